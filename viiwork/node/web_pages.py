"""Which web pages this node lets in at the moment: the config's list, else what tailscaled's name allows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from viiwork.config.model import Config
from viiwork.core.cross_origin import OriginRules
from viiwork.limits import TAILNET_NAME_ASK_S


class WebPages:
    """Owner of the rules in force."""

    def __init__(self, config: Config, tailnet_suffix: Callable[[str], Awaitable[str | None]]) -> None:
        cors, mesh = config.api.cors, config.mesh
        self._tailnet_ips = cors.allow_tailnet_ips
        self._suffix = tailnet_suffix
        self._socket = mesh.tailnet.socket
        in_tailnet = mesh.tailnet.enabled == "on" or (
            mesh.tailnet.enabled == "auto" and mesh.network == "tailnet"
        )
        self._asks = cors.allow_origins is None and in_tailnet
        self._rules = (
            OriginRules.derived(tailnet_ips=cors.allow_tailnet_ips)
            if cors.allow_origins is None
            else OriginRules.listed(cors.allow_origins)
        )

    def allows(self, origin: str) -> bool:
        return self._rules.allows(origin)

    async def follow_tailnet(self) -> None:
        """Keep up with the tailnet's name: Tailscale may start later, or log in elsewhere."""
        while self._asks:
            # An answer that does not come changes nothing: a restart of tailscaled shuts no page out.
            if suffix := await self._suffix(self._socket):
                self._rules = OriginRules.derived(tailnet_suffix=suffix, tailnet_ips=self._tailnet_ips)
            await asyncio.sleep(TAILNET_NAME_ASK_S)
