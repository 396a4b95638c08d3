"""Fixtures that more than one area uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from viiwork.host.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M model file, downloaded once per machine."""
    return ensure_demo_model()
