"""`viiwork down` and `up` against real nodes, open and secured."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path

import aiohttp
import pytest

from viiwork.cli.main import main

from .nodes import NodeProcess

ENGINE = Path(__file__).parents[1] / "fuzz" / "engine.py"


@pytest.mark.parametrize("secured", [False, True])
async def test_a_model_is_parked_and_taken_back_by_whoever_may(
    secured: bool, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch, capsys
):
    secret, other = (base64.b64encode(os.urandom(32)).decode() for _ in range(2))
    binary = tmp_path / "llama-server"
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    binary.chmod(0o755)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    models = (
        f"  - {{name: m, engine: llamacpp, path: {tmp_path / 'm.gguf'}, context: 256, "
        f"llamacpp: {{binary: {binary}, threads: 1}}}}\n"
    )
    env = {"VIIWORK_MESH_SECRET": secret} if secured else {}
    node = NodeProcess("a", "127.0.16.3", tmp_path, models, env=env)
    config = str(tmp_path / "a.yaml")

    async def run(*argv: str, given: str | None = secret if secured else None) -> tuple[int, str, str]:
        monkeypatch.delenv("VIIWORK_MESH_SECRET", raising=False)
        if given is not None:
            monkeypatch.setenv("VIIWORK_MESH_SECRET", given)
        code = await asyncio.to_thread(main, [argv[0], "--config", config, *argv[1:]])
        out, err = capsys.readouterr()
        return code, out, err

    try:
        node.start()
        await node.until_healthy(http)
        code, out, err = await run("down", "m", "nope")
        assert (code, out) == (1, "") and "400" in err and "nope" in err and err.count("\n") == 1
        if secured:
            for wrong in (None, other):
                code, out, err = await run("down", given=wrong)
                assert (code, out) == (1, "") and "401" in err and err.count("\n") == 1
        url = f"{node.api}/v1/models/down"
        async with http.post(url, json={}, headers={"Origin": "http://evil.example"}) as page:
            assert page.status == 403
        async with http.post(url, json={}, headers={"Host": "evil.example"}) as rebound:
            assert rebound.status == (401 if secured else 403)
        assert not (await node.status(http))["models"][0].get("parked")

        assert await run("down") == (0, "a  m  parked\n", "")
        await node.until(http, "parked", lambda s: s["models"][0].get("parked") is True)
        assert await run("down", "m") == (0, "a  m  was parked already\n", "")
        assert await run("up", "m") == (0, "a  m  in service\n", "")
        await node.until_healthy(http)
        assert secret not in node.log and other not in node.log
    finally:
        assert node.end() == 0
