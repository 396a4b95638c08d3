"""Fixtures that more than one area uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from viiwork.host.demo_model import ensure_demo_model

# A busy machine makes any example slow; no test here is about time.
settings.register_profile("viiwork", deadline=None)
settings.load_profile("viiwork")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M model file, downloaded once per machine."""
    return ensure_demo_model()
