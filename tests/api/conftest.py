"""The API's tests run on the loop it is served with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvloop


def pytest_asyncio_loop_factories(
    config: Any, item: Any
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
