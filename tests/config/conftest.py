"""Ways to load a config from text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from viiwork.config.load import LoadedConfig, parse_config
from viiwork.errors import ConfigError

Load = Callable[..., LoadedConfig]
Refusal = Callable[..., str]


@pytest.fixture
def load() -> Load:
    """Loads a file of an open mesh unless the text has a `mesh` section of its own."""

    def load(text: str | bytes, env: Mapping[str, str] | None = None) -> LoadedConfig:
        data = text.encode() if isinstance(text, str) else text
        if b"mesh" not in data:
            data += b"\nmesh: {open: true}\n"
        return parse_config(data, "f.yaml", env or {})

    return load


@pytest.fixture
def refusal(load: Load) -> Refusal:
    """The one line a wrong file is refused with."""

    def refusal(text: str | bytes, env: Mapping[str, str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, env)
        line = str(caught.value)
        assert line.isprintable()
        return line

    return refusal


@pytest.fixture
def model_file() -> Callable[..., str]:
    """The text of a file with one model, whose keys can be set as written."""

    def model_file(*more: str, **keys: str) -> str:
        merged = {"name": "m", "engine": "llamacpp", "path": "/m.gguf", "context": "512", **keys}
        lines = [f"{key}: {value}" for key, value in merged.items()] + list(more)
        return "models:\n  - " + "\n    ".join(lines) + "\n"

    return model_file
