"""SIGHUP: the config file is read again, and its models take the place of those that run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from viiwork.config.load import LoadedConfig, load_config
from viiwork.config.model import Config
from viiwork.errors import ConfigError

log = logging.getLogger(__name__)


class Reloader:
    """One reload at a time; what is asked for meanwhile, or before `run` begins, follows as one more."""

    def __init__(
        self,
        started_with: LoadedConfig,
        env: Mapping[str, str],
        apply: Callable[[LoadedConfig], Awaitable[None]],
    ) -> None:
        self._config = started_with.config
        self._path = Path(started_with.file)
        self._env = env
        self._apply = apply
        self._asked = asyncio.Event()

    def ask(self) -> None:
        self._asked.set()

    async def run(self) -> None:
        """Run for the node's life."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._reload()

    async def _reload(self) -> None:
        try:
            # Opened by its path, so that an editor or tool that replaced the file is followed.
            loaded = await asyncio.to_thread(load_config, self._path, self._env)
        except ConfigError as error:
            log.warning("config.unchanged: the running config stays: %s", error)
            return
        for warning in loaded.warnings:
            log.warning("config.warning: %s", warning)
        if others := changed_sections(self._config, loaded.config):
            log.warning("config.restart_needed sections=%s", ",".join(others))
        before = {model.name: model for model in self._config.models}
        after = {model.name: model for model in loaded.config.models}
        log.info(
            "config.reloaded added=%s removed=%s changed=%s",
            _names(after.keys() - before.keys()),
            _names(before.keys() - after.keys()),
            _names({name for name in after.keys() & before.keys() if after[name] != before[name]}),
        )
        self._config = msgspec.structs.replace(self._config, models=loaded.config.models)
        await self._apply(loaded)


def changed_sections(running: Config, wanted: Config) -> list[str]:
    """The sections but `models` in which two configs differ."""
    return [
        field.name
        for field in msgspec.structs.fields(Config)
        if field.name != "models" and getattr(running, field.name) != getattr(wanted, field.name)
    ]


def _names(names: set[str]) -> str:
    return ",".join(sorted(names)) or "-"
