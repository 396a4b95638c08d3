"""Direct links between network namespaces: which path a state takes, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.netns import Lan, ip

from .lan import lan_node, running, until_all_see_all
from .links import PATIENCE_S, SECRET, Cable, ends, sent_bytes, shape
from .nodes import model_entry
from .test_two_nodes import chat, opening, reused_share, said, until_received

pytestmark = [pytest.mark.netns]

MIB = 1024 * 1024
OFF = "direct links are off on this node"


def make_state(folder: Path, mib: int = 32) -> Path:
    """A save-file of about this size."""
    spec = importlib.util.spec_from_file_location("saves", Path(__file__).parents[1] / "kv" / "saves.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = folder / "state"
    path.write_bytes(module.make_save(mib * MIB // (30 * 2 * 2048), n_layer=30, row=2048))
    return path


def refusal(link: dict[str, Any], addr: str) -> str:
    """Why a path of the link is not used, "" = it is not known or works."""
    return next(
        (str(path["failed"]) for path in link["paths"] if path["addr"] == addr and "failed" in path), ""
    )


async def until_sent(netns: str, device: str, n_bytes: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sent_bytes(netns, device) < n_bytes:
            await asyncio.sleep(0.01)


async def test_a_state_takes_the_fast_cable_and_not_the_slow_network_of_the_mesh(tmp_path: Path):
    state = make_state(tmp_path)
    with Lan(2, "10.79.1") as lan:
        cable = Cable(lan, 0, 1, "eth1", "10.79.2")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
            shape(netns, "eth1", "10gbit", "1mb")
        async with ends(lan, tmp_path, state) as (a, b):
            link = await a.until_best("n1", "10.79.2.2")
            assert (link["source"], link["interface"], link["kind"]) == ("10.79.2.1", "eth1", "direct")
            before = sent_bytes(lan.names[0], "eth0")
            sent = await a.send("n1")
            assert sent == {"sent": "n1", "path": "10.79.2.2", "source": "10.79.2.1", "encrypted": True}
            assert sent_bytes(cable.ends[0], "eth1") > state.stat().st_size
            assert sent_bytes(lan.names[0], "eth0") - before < MIB
            await b.until_received(1)
            (cable_path,) = [p for p in (await a.links())[0]["paths"] if p["addr"] == "10.79.2.2"]
            assert cable_path["how"] == "measured over 1 transfer"


async def test_a_transfer_whose_cable_is_cut_goes_on_over_the_mesh(tmp_path: Path):
    state = make_state(tmp_path)
    with Lan(2, "10.79.1") as lan:
        cable = Cable(lan, 0, 1, "eth1", "10.79.2")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        async with ends(lan, tmp_path, state) as (a, b):
            await a.until_best("n1", "10.79.2.2")
            shape(cable.ends[0], "eth1", "40mbit")  # so that there is time to cut it
            before = sent_bytes(cable.ends[0], "eth1")
            a.ask(send="n1")
            await until_sent(cable.ends[0], "eth1", before + 4 * MIB)
            cable.cut()
            sent = await a.answer()
            assert sent["path"] == "10.79.1.3" and sent["encrypted"]
            await b.until_received(1)
            assert "link.failed peer=n1 addr=10.79.2.2" in a.log
            await a.until_best("n1", "10.79.1.3")
            cable.mend()
            await a.until_best("n1", "10.79.2.2")
            assert (await a.send("n1"))["path"] == "10.79.2.2"


async def test_a_host_that_is_not_the_peer_at_an_address_of_the_peers_gets_nothing(tmp_path: Path):
    """The cable leads to a third machine which bears the address the peer told, and runs a node too."""
    state = make_state(tmp_path, 4)
    with Lan(3, "10.79.1") as lan:
        wrong = Cable(lan, 0, 2, "eth1", "10.79.2")
        ip("-n", lan.names[1], "link", "add", "eth1", "type", "veth", "peer", "name", "eth1x")
        ip("-n", lan.names[1], "addr", "add", "10.79.2.2/24", "dev", "eth1")
        ip("-n", lan.names[1], "link", "set", "eth1x", "up")
        ip("-n", lan.names[1], "link", "set", "eth1", "up")
        async with ends(lan, tmp_path, state) as (a, b, c):
            link = await a.until_link("n1", "was probed", lambda link: refusal(link, "10.79.2.2"))
            assert "this is 'n2', not 'n1'" in refusal(link, "10.79.2.2")
            assert link["addr"] == "10.79.1.3"
            before = sent_bytes(wrong.ends[0], "eth1")
            assert (await a.send("n1"))["path"] == "10.79.1.3"
            assert sent_bytes(wrong.ends[0], "eth1") - before < MIB
            await b.until_received(1)
            assert (await c.received())["done"] == 0
            await a.until_best("n2", "10.79.2.2")  # whose it is


async def test_a_host_without_the_secret_at_an_address_of_the_peers_gets_nothing(tmp_path: Path):
    """It even has the peer's name, and answers like a node."""
    state = make_state(tmp_path, 4)
    with Lan(3, "10.79.1") as lan:
        Cable(lan, 0, 2, "eth1", "10.79.2")
        ip("-n", lan.names[1], "link", "add", "eth1", "type", "veth", "peer", "name", "eth1x")
        ip("-n", lan.names[1], "addr", "add", "10.79.2.2/24", "dev", "eth1")
        ip("-n", lan.names[1], "link", "set", "eth1x", "up")
        ip("-n", lan.names[1], "link", "set", "eth1", "up")
        other = base64.b64encode(b"another secret of 32 bytes or so").decode()
        async with ends(lan, tmp_path, state, secrets={2: other}, names={2: "n1"}) as (a, b, _):
            link = await a.until_link("n1", "was probed", lambda link: refusal(link, "10.79.2.2"))
            assert "answers with 401" in refusal(link, "10.79.2.2")
            assert (await a.send("n1"))["path"] == "10.79.1.3"
            await b.until_received(1)


async def test_of_three_hosts_the_two_that_are_cabled_use_their_cable(tmp_path: Path):
    state = make_state(tmp_path, 8)
    with Lan(3, "10.79.1") as lan:
        Cable(lan, 0, 1, "eth1", "10.79.2")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        async with ends(lan, tmp_path, state) as (a, b, c):
            await a.until_best("n1", "10.79.2.2")
            await b.until_best("n0", "10.79.2.1")
            only = await c.until_link("n0", "was probed", lambda link: "rtt_ms" in link)
            assert only["addr"] == "10.79.1.2" and "the only path" in only["why"]
            assert (await a.send("n1"))["path"] == "10.79.2.2"
            assert (await a.send("n2"))["path"] == "10.79.1.4"
            assert (await b.send("n0"))["path"] == "10.79.2.1"
            assert (await c.send("n0"))["path"] == "10.79.1.2"


async def test_a_cable_with_nothing_but_link_local_addresses_of_ipv6_is_used(tmp_path: Path):
    state = make_state(tmp_path, 8)
    with Lan(2, "10.79.1") as lan:
        Cable(lan, 0, 1, "eth1")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        async with ends(lan, tmp_path, state) as (a, b):
            link = await a.until_link("n1", "is the cable", lambda link: link["addr"].startswith("fe80:"))
            assert link["addr"].endswith("%eth1") and link["source"].endswith("%eth1")
            assert (await a.send("n1"))["path"] == link["addr"]
            await b.until_received(1)


async def test_bridges_with_the_same_address_on_both_hosts_are_no_path(tmp_path: Path):
    state = make_state(tmp_path, 4)
    with Lan(2, "10.79.1") as lan:
        for netns in lan.names:
            ip("-n", netns, "link", "add", "docker0", "type", "veth", "peer", "name", "docker0x")
            ip("-n", netns, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", netns, "link", "set", "docker0x", "up")
            ip("-n", netns, "link", "set", "docker0", "up")
        async with ends(lan, tmp_path, state) as (a, _):
            link = await a.until_link("n1", "was probed", lambda link: "rtt_ms" in link)
            assert not any(path["addr"].startswith("172.17.") for path in link["paths"])


async def test_a_cable_marked_plain_carries_states_in_the_clear_once_both_ends_say_so(tmp_path: Path):
    state = make_state(tmp_path, 4)
    plain = {"plain": ["10.79.2.0/24"]}
    with Lan(2, "10.79.1") as lan:
        Cable(lan, 0, 1, "eth1", "10.79.2")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        async with ends(lan, tmp_path, state, kv={0: plain, 1: plain}) as (a, _):
            await a.until_best("n1", "10.79.2.2")
            assert not (await a.send("n1"))["encrypted"]
        async with ends(lan, tmp_path, state, kv={0: plain}) as (a, b):
            await a.until_best("n1", "10.79.2.2")
            await b.until_best("n0", "10.79.2.1")
            assert (await a.send("n1"))["encrypted"] and (await b.send("n0"))["encrypted"]


async def test_an_open_mesh_uses_cables_where_sharing_over_a_lan_is_allowed(tmp_path: Path):
    state = make_state(tmp_path, 4)
    open_lan = {"open": True}
    with Lan(2, "10.79.1") as lan:
        Cable(lan, 0, 1, "eth1", "10.79.2")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        async with ends(lan, tmp_path, state, secret="", kv={0: open_lan, 1: open_lan}) as (a, b):
            await a.until_best("n1", "10.79.2.2")
            assert (await a.send("n1"))["path"] == "10.79.2.2"
            await b.until_received(1)


@pytest.mark.parametrize("direct", ["off", ["10.79.3.0/24"]])
async def test_only_what_the_config_allows_is_a_direct_link(tmp_path: Path, direct: object):
    state = make_state(tmp_path, 4)
    with Lan(2, "10.79.1") as lan:
        Cable(lan, 0, 1, "eth1", "10.79.2")
        third = Cable(lan, 0, 1, "eth2", "10.79.3")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        async with ends(lan, tmp_path, state, kv={1: {"direct": direct}}) as (a, _):
            if direct == "off":
                link = await a.until_link("n1", "is off", lambda link: OFF in link.get("no_direct_links", ""))
                assert len(link["paths"]) == 1
                assert (await a.send("n1"))["path"] == "10.79.1.3"
            else:
                link = await a.until_best("n1", "10.79.3.2")
                assert {path["addr"] for path in link["paths"]} == {"10.79.1.3", "10.79.3.2"}
                assert third.device == link["interface"]


async def test_an_api_kept_to_the_mesh_address_also_listens_at_links_named_in_the_config(tmp_path: Path):
    state = make_state(tmp_path, 4)
    with Lan(2, "10.79.1") as lan:
        Cable(lan, 0, 1, "eth1", "10.79.2")
        Cable(lan, 0, 1, "eth2", "10.79.3")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        named = {i: {"direct": ["10.79.2.0/24"]} for i in range(2)}
        only = {i: lan.address(i) for i in range(2)}
        async with ends(lan, tmp_path, state, hosts=only, kv=named) as (a, _):
            await a.until_best("n1", "10.79.2.2")
        async with ends(lan, tmp_path, state, hosts=only) as (a, _):
            link = await a.until_link("n1", "was probed", lambda link: "rtt_ms" in link)
            assert [path["addr"] for path in link["paths"]] == ["10.79.1.3"]


@pytest.mark.engine
async def test_a_session_of_real_nodes_moves_over_their_cable(
    tmp_path: Path, smollm2: Path, http: aiohttp.ClientSession
):
    with Lan(2) as lan:
        Cable(lan, 0, 1, "eth1", "10.79.2")
        for netns in lan.names:
            shape(netns, "eth0", "100mbit")
        small, share = model_entry("small", smollm2), "kv_share: {min_tokens: 64}"
        env = {"VIIWORK_MESH_SECRET": SECRET}
        nodes = [lan_node(lan, i, tmp_path, small, extra=share, env=env) for i in range(2)]
        with running(*nodes):
            await until_all_see_all(http, nodes)
            await nodes[0].until(http, "linked", lambda s: best_of(s) == ["10.79.2.2"])
            await nodes[1].until(http, "linked", lambda s: best_of(s) == ["10.79.2.1"])
            messages, session = opening(300), uuid.uuid4().hex
            first = await chat(http, nodes[0], messages, session)
            await until_received(http, nodes[1], 0)
            status = await nodes[0].until(http, "told", lambda s: s["kv_share"]["last"])
            assert status["kv_share"]["last"][-1]["path"] == "10.79.2.2"
            messages += [said(first), {"role": "user", "content": "Go on."}]
            warm = await chat(http, nodes[1], messages, session)
            assert warm["node"] == "n1" and reused_share(warm) >= 0.9


def best_of(status: dict[str, Any]) -> list[str]:
    return [link["addr"] for link in status["kv_share"]["links"]]
