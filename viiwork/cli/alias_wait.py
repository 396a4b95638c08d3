"""How far a write to the alias table has come: the members are asked until all know of it, or time is up."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from viiwork.cli.control import ControlClient
from viiwork.errors import ViiworkError
from viiwork.limits import ALIAS_LOOK_S, ALIAS_LOOK_TIMEOUT_S, ALIAS_LOOKS_AT_ONCE
from viiwork.wire.aliases import decode_table


def members_that_know(client: ControlClient, vers: Mapping[str, int], within_s: float) -> tuple[int, int]:
    """How many members know these versions of aliases, and how many are alive, the asked node included."""
    end_at = time.monotonic() + within_s
    try:
        apis = _apis(client.get("/v1/status"))
    except ViiworkError:
        return 1, 1  # it took the write; who else is there it does not say
    n_alive, waiting = len(apis) + 1, apis
    with ThreadPoolExecutor(ALIAS_LOOKS_AT_ONCE) as pool:
        while True:
            looks = pool.map(lambda api: _knows(client, api, vers), waiting)
            waiting = [api for api, knows in zip(waiting, looks, strict=True) if not knows]
            if not waiting or time.monotonic() + ALIAS_LOOK_S > end_at:
                return n_alive - len(waiting), n_alive
            time.sleep(ALIAS_LOOK_S)


def _apis(status: Any) -> list[str]:
    """API addresses of the other members that are alive."""
    try:
        members, me = status["mesh"]["members"], status["node"]
        return [str(m["api"]) for m in members if m["state"] == "alive" and m["node"] != me]
    except (KeyError, TypeError):
        return []


def _knows(client: ControlClient, api: str, vers: Mapping[str, int]) -> bool:
    try:
        answer = client.other(api, ALIAS_LOOK_TIMEOUT_S).get("/v1/aliases?table=1")
        table = decode_table(json.dumps(answer).encode())
    except ViiworkError:
        return False
    return all(name in table and table[name].current.ver >= ver for name, ver in vers.items())
