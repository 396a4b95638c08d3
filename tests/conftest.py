"""Fixtures that more than one area uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.fakes.tiny_models import MODELS, make_tiny_model
from viiwork.host.demo_model import ensure_demo_model

# A busy machine makes any example slow; no test here is about time.
settings.register_profile("viiwork", deadline=None)
settings.load_profile("viiwork")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M model file, downloaded once per machine."""
    return ensure_demo_model()


@pytest.fixture(scope="session")
def tiny_models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models of a few layers: `llama`, `gemma3` (sliding window) and `qwen35` (hybrid)."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(kind, smollm2, folder) for kind in MODELS}
