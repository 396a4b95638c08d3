"""Two real nodes whose mesh has a secret, their states encrypted on the way."""

from __future__ import annotations

import base64
import os
import uuid
from pathlib import Path

import aiohttp
import pytest

from .nodes import NodeProcess, model_entry
from .test_two_nodes import chat, opening, reused_share, said, text_of, until_received

pytestmark = pytest.mark.engine


async def test_a_secured_mesh_forwards_and_moves_sessions_and_lets_no_other_secret_in(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    secret, other = (base64.b64encode(os.urandom(32)).decode() for _ in range(2))
    share = "kv_share: {min_tokens: 64, encrypt: on}"
    small = model_entry("small", smollm2)
    a = NodeProcess("a", "127.0.15.1", tmp_path, small, (), share, {"VIIWORK_MESH_SECRET": secret})
    b = NodeProcess(
        "b",
        "127.0.15.2",
        tmp_path,
        small + model_entry("only-b", smollm2, context=512, parallel=1),
        (a.seed,),
        share,
        {"VIIWORK_MESH_SECRET": secret},
    )
    c = NodeProcess("c", "127.0.15.3", tmp_path, "", (a.seed,), "", {"VIIWORK_MESH_SECRET": other})
    try:
        for node in (a, b, c):
            node.start()
        for node in (a, b):
            await node.until_healthy(http)
            await node.until_sees(http, "small", 2)
        assert (await chat(http, a, [{"role": "user", "content": "hi"}], model="only-b"))["node"] == "b"

        messages, session = opening(400), uuid.uuid4().hex
        first = await chat(http, a, messages, session)
        await until_received(http, b, 0)
        sent = [t for t in (await a.status(http))["kv_share"]["last"] if t["what"] == "send"]
        assert sent and sent[-1]["encrypted"] is True
        messages += [said(first), {"role": "user", "content": "Go on."}]
        at_home = await chat(http, a, messages, session, headers={"X-Viiwork-Kv-Share": "off"})
        warm = await chat(http, b, messages, session)
        assert warm["node"] == "b" and reused_share(warm) >= 0.95 and text_of(warm) == text_of(at_home)

        status = await a.until(http, "told of the stranger", lambda s: bool(s["mesh"]["problems"]), 20)
        assert [m["node"] for m in status["mesh"]["members"]] == ["a", "b"]
        assert "secret differs" in " ".join(status["mesh"]["problems"])
        headers = {"X-Viiwork-Forwarded": "b", "X-Viiwork-Node": "b"}
        async with http.post(
            f"{a.api}/v1/chat/completions", json={"model": "small"}, headers=headers
        ) as forged:
            assert forged.status == 401
        for node in (a, b, c):
            assert secret not in node.log and other not in node.log
    finally:
        for node in (a, b, c):
            node.end()
