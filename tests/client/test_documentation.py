"""The programs in docs/fleet-capacity.md do what the text says."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeDispatcher, FakeFacts, route, serving

DOC = Path(__file__).parent.parent.parent / "docs" / "fleet-capacity.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)


class Facts(FakeFacts):
    def fleet_capacity(self, model: str | None) -> dict[str, Any]:
        hosts = [{"node": "a", "slots": 3}]
        return {"models": [{"name": "m", "hosts": hosts}], "resolved_from": model}


@pytest.mark.parametrize("program", PROGRAMS, ids=["threads", "asyncio"])
async def test_the_programs_run_and_use_what_the_mesh_has(program, tmp_path):
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("a", engine.url)])
        async with serving(dispatcher, facts=Facts(aliases={"coder": "m"})) as api:
            assert "http://127.0.0.1:8086" in program
            path = tmp_path / "program.py"
            path.write_text(program.replace("http://127.0.0.1:8086", api.url))
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            out, _ = await process.communicate()
            url = api.url
        assert process.returncode == 0, out.decode()
        answers, room = out.decode().splitlines()
        assert answers == str(["hello"] * 6) and room in ("3 fleet", f"{{'{url}': 3}} fleet")
        assert len(engine.requests) == 6 and {ask.alias for ask in dispatcher.asks} == {"coder"}
