"""Networks that carry TCP and lose datagrams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes.cable import Cable, is_udp

from .lan import NO_SHARING, alive, running, until_says
from .nodes import NodeProcess

pytestmark = pytest.mark.netns


def pair_on(cable: Cable, folder: Path) -> list[NodeProcess]:
    folder.mkdir()
    nodes = []
    for i in range(2):
        node = NodeProcess(
            f"n{i}",
            cable.addresses[i],
            folder,
            "",
            (f"{cable.addresses[1 - i]}:7946",),
            NO_SHARING,
            api_port=8086,
            mesh_port=7946,
            netns=cable.names[i],
            advertise="",
            mesh="lan: {mdns: off}, ",
        )
        nodes.append(node)
    return nodes


async def test_lost_datagrams_are_named_and_membership_holds_over_tcp(tmp_path: Path):
    one_way = Cable("10.79.1", lambda sender, packet: sender == 0 and is_udp(packet))
    both_ways = Cable("10.79.2", lambda sender, packet: is_udp(packet))
    with one_way, both_ways:
        pairs = [pair_on(one_way, tmp_path / "one"), pair_on(both_ways, tmp_path / "both")]
        with running(*pairs[0], *pairs[1]):
            asked = [(cable.names[i], "over TCP only") for cable in (one_way, both_ways) for i in (0, 1)]
            told = await asyncio.gather(*(asyncio.to_thread(until_says, *one, 90) for one in asked))
            for body in told:
                status = json.loads(body)
                assert len(alive(status)) == 2
                assert "7946/udp is blocked or loses packets" in " ".join(status["mesh"]["problems"])
            for node in (*pairs[0], *pairs[1]):
                assert "member.dead" not in node.log


async def test_a_path_that_loses_long_datagrams_carries_all_of_ours(tmp_path: Path):
    with Cable("10.79.3", lambda sender, packet: is_udp(packet) and len(packet) > 1280) as cable:
        nodes = pair_on(cable, tmp_path / "long")
        with running(*nodes):
            for i in (0, 1):
                body = await asyncio.to_thread(
                    until_says, cable.names[i], f'"addr":"{cable.addresses[1 - i]}"', 60
                )
                assert len(alive(json.loads(body))) == 2
        assert 0 < cable.largest_udp_bytes <= 1280
