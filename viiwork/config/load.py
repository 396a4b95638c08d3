"""Load a config file: read, type, check, and the mesh secrets from the environment."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from viiwork.config.convert import Converted, convert
from viiwork.config.document import parse_document
from viiwork.config.fault import Fault, printable
from viiwork.config.model import Config
from viiwork.config.rules import check_rules
from viiwork.config.secrets import MeshSecrets, read_api_keys, read_secrets, refuse_in_file
from viiwork.errors import ConfigError
from viiwork.limits import CONFIG_FILE_MAX_BYTES


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    secrets: MeshSecrets
    warnings: tuple[str, ...]  # one line each: legal, but rarely meant
    file: str  # where it was read
    api_keys: Mapping[str, str] = field(repr=False)  # of external servers, by environment variable


def default_config_path(platform: str = sys.platform) -> Path:
    if platform == "darwin":
        return Path.home() / ".config/viiwork/viiwork.yaml"
    return Path("/etc/viiwork/viiwork.yaml")


def load_config(path: Path, env: Mapping[str, str]) -> LoadedConfig:
    """The config in the file at `path`; raises `ConfigError`, one line that names file, line and key."""
    return parse_config(_read(path), str(path), env)


def load_without_secrets(path: Path) -> Config:
    """The config alone, for commands that only ask for the node's address and the name of its secret."""
    return _checked(_read(path), str(path))[0].config


def parse_config(data: bytes, file: str, env: Mapping[str, str]) -> LoadedConfig:
    """As `load_config`, of bytes that were read already; `file` is what errors call them."""
    converted, warnings = _checked(data, file)
    config = converted.config
    try:
        secrets = read_secrets(config.mesh, env)
        api_keys = read_api_keys(config.models, env)
        refuse_in_file(config, env, data)
    except Fault as fault:
        raise _said(file, fault.line or converted.line_of(fault.path), fault) from None
    return LoadedConfig(config, secrets, tuple(warnings), file, api_keys)


def _checked(data: bytes, file: str) -> tuple[Converted, list[str]]:
    """The typed config with the lines of its keys, and warnings."""
    try:
        converted = convert(parse_document(data))
    except Fault as fault:
        raise _said(file, fault.line, fault) from None
    try:
        return converted, check_rules(converted.config)
    except Fault as fault:
        raise _said(file, fault.line or converted.line_of(fault.path), fault) from None


def _said(file: str, line: int, fault: Fault) -> ConfigError:
    return ConfigError(f"{printable(file)}:{line}: {fault}")


def _read(path: Path) -> bytes:
    """At most one byte more than a config may have; never waits on a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{printable(str(path))}: cannot read the config: {why}") from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            got = "a directory" if stat.S_ISDIR(mode) else "something else"
            raise ConfigError(f"{printable(str(path))}: expected a config file, got {got}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(CONFIG_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{printable(str(path))}: cannot read the config: {error.strerror}") from None
    finally:
        os.close(fd)
