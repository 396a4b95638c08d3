"""Two real nodes on a LAN without IPv4, with the ports and addresses a user has."""

from __future__ import annotations

import base64
import os
import uuid
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.netns import Lan

from .lan import lan_node, running, until_all_see_all
from .nodes import model_entry
from .test_two_nodes import chat, opening, reused_share, said, until_received

pytestmark = [pytest.mark.netns, pytest.mark.engine]


@pytest.mark.parametrize("env", [{}, {"VIIWORK_MESH_SECRET": base64.b64encode(os.urandom(32)).decode()}])
async def test_sessions_move_between_ipv6_nodes_that_found_each_other(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession, env: dict[str, str]
):
    with Lan(2, "fd78:11:") as lan:
        small, share = model_entry("small", smollm2), "kv_share: {min_tokens: 64, open: true}"
        nodes = [lan_node(lan, i, tmp_path, small, extra=share, env=env) for i in range(2)]
        with running(*nodes):
            await until_all_see_all(http, nodes)
            for node in nodes:
                await node.until_healthy(http)
                await node.until_sees(http, "small", 2)
            messages, session = opening(300), uuid.uuid4().hex
            first = await chat(http, nodes[0], messages, session)
            await until_received(http, nodes[1], 0)
            messages += [said(first), {"role": "user", "content": "Go on."}]
            warm = await chat(http, nodes[1], messages, session)
            assert warm["node"] == "n1" and reused_share(warm) >= 0.9
