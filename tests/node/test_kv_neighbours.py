"""What kv_share's saves cost those who use the same engine."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import aiohttp

from .fleet import running
from .nodes import NodeProcess
from .state_nodes import PATIENCE_S, SHARE, kv, seen, state_model, turn, until_sharing, words


def asking(
    http: aiohttp.ClientSession, node: NodeProcess, name: str, hold_s: float
) -> asyncio.Task[dict[str, object]]:
    """A turn of a session of its own that keeps its slot for a while."""
    question = [{"role": "user", "content": f"{name} {words(100)}"}]
    return asyncio.create_task(turn(http, node, question, uuid.uuid4().hex, hold_s=hold_s))


async def test_no_save_begins_while_requests_wait_for_a_slot(tmp_path: Path, http: aiohttp.ClientSession):
    """Each of the six turns leaves a state to send, and the save of one takes longer than a turn."""
    a = NodeProcess("a", "127.0.17.1", tmp_path, state_model(tmp_path, "a", SAVE_S=1), extra=SHARE)
    b = NodeProcess("b", "127.0.17.2", tmp_path, state_model(tmp_path, "b", parallel=1), extra=SHARE)
    async with running(http, a, b):
        await until_sharing(http, a, b)
        elsewhere = asking(http, b, "b", 4.0)  # so that nobody is sent there
        await b.until(http, "busy", lambda s: s["models"][0]["busy"] == 1)
        await asyncio.gather(*(asking(http, a, f"a{i}", 0.3) for i in range(6)))
        await a.until(http, "done with a save", lambda s: kv(s)["sent"]["done"], PATIENCE_S)
        happened = seen(a)
        begun = [i for i, what in enumerate(happened) if what.startswith("begin")]
        saved = [i for i, what in enumerate(happened) if what == "save"]
        assert len(begun) == 6 and saved and min(saved) > max(begun), happened
        await elsewhere
