"""Nodes that nobody told of each other, on LANs of network namespaces."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.netns import Lan, ip

from .lan import (
    aliases,
    alive,
    ask,
    fake_model,
    lan_node,
    running,
    set_alias,
    state_of,
    until_all_see_all,
    until_says,
)

pytestmark = pytest.mark.netns


async def test_nodes_on_a_lan_find_each_other_and_lose_and_find_one_that_was_killed(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(3) as lan:
        nodes = [lan_node(lan, i, tmp_path, mesh="rejoin_interval: 60s, ") for i in range(3)]
        nodes[2].models = fake_model(tmp_path)
        with running(*nodes):
            await until_all_see_all(http, nodes)
            await nodes[2].until_healthy(http)
            await nodes[0].until_sees(http, "m", 1)
            assert await ask(http, nodes[0]) == (200, "n2")
            nodes[2].kill(signal.SIGKILL)
            for node in nodes[:2]:
                await node.until(http, "rid of n2", lambda s: state_of(s, "n2") == "dead")
            assert (await ask(http, nodes[0]))[0] in (404, 503)
            nodes[2].end()
            nodes[2].start()
            await until_all_see_all(http, nodes)
        for node in nodes[:2]:
            assert "Traceback" not in node.log


async def test_an_ipv6_only_lan_carries_discovery_forwards_and_bracketed_addresses(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(2, "fd78:9:") as lan:
        nodes = [lan_node(lan, i, tmp_path) for i in range(2)]
        nodes[1].models = fake_model(tmp_path)
        with running(*nodes):
            await until_all_see_all(http, nodes)
            await nodes[0].until_sees(http, "m", 1)
            assert await ask(http, nodes[0]) == (200, "n1")
            fleet = await nodes[0].get(http, "/v1/fleet/capacity")
            assert fleet["models"][0]["hosts"][0]["api"] == "[fd78:9::3]:8086"


async def test_a_machine_with_many_bridges_and_two_cards_advertises_the_way_out(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(2) as lan:
        name = lan.names[1]
        ip("-n", name, "link", "add", "docker0", "type", "bridge")
        ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", name, "link", "set", "docker0", "up")
        for i in range(30):
            ip("-n", name, "link", "add", f"veth{i}", "type", "veth", "peer", "name", f"vethp{i}")
            ip("-n", name, "link", "set", f"veth{i}", "master", "docker0", "up")
            ip("-n", name, "link", "set", f"vethp{i}", "up")
        ip("-n", name, "link", "add", "eth1", "type", "bridge")
        ip("-n", name, "addr", "add", "192.168.55.5/24", "dev", "eth1")
        ip("-n", name, "link", "set", "eth1", "up")
        hosts = Path("/etc/netns") / name
        hosts.mkdir(parents=True)
        (hosts / "hosts").write_text(f"127.0.1.1 {socket.gethostname()}\n::1 localhost\n")
        nodes = [lan_node(lan, i, tmp_path) for i in range(2)]
        try:
            with running(*nodes):
                await until_all_see_all(http, nodes)
                assert (await nodes[1].status(http))["addr"] == lan.address(1)
        finally:
            (hosts / "hosts").unlink()
            hosts.rmdir()


async def test_a_split_network_merges_again_without_seeds(tmp_path: Path, http: aiohttp.ClientSession):
    with Lan(4) as lan:
        nodes = [lan_node(lan, i, tmp_path) for i in range(4)]
        with running(*nodes):
            await until_all_see_all(http, nodes)
            lan.split(2, 3)
            for node, gone in ((nodes[0], "n2"), (nodes[1], "n3")):
                await node.until(http, "alone", lambda s, gone=gone: state_of(s, gone) == "dead")
            for node in (nodes[0], nodes[2]):
                set_alias(node, f"of-{node.name}", "m")
                set_alias(node, "both", node.name)
            lan.heal()
            await until_all_see_all(http, nodes)
            async with asyncio.timeout(60):
                tables: list[dict[str, str]] = [{}]
                while len(tables[0]) < 3 or any(table != tables[0] for table in tables):
                    await asyncio.sleep(0.1)
                    tables = [await aliases(http, node) for node in nodes]
            assert tables[0].keys() == {"of-n0", "of-n2", "both"}


async def test_a_node_starts_without_any_network_and_joins_when_there_is_one(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(2) as lan:
        nodes = [lan_node(lan, i, tmp_path) for i in range(2)]
        lan.take(1, lan.address(1))
        ip("-n", lan.names[1], "link", "set", "eth0", "down")
        with running(*nodes):
            status = json.loads(until_says(lan.names[1], "waiting for an address"))
            assert status["mesh"]["state"] == "looking for an own address"
            ip("-n", lan.names[1], "link", "set", "eth0", "up")
            lan.give(1, lan.address(1))
            lan.route(1)
            await until_all_see_all(http, nodes)
            assert nodes[1].log.count("waiting for an address") == 1


async def test_a_node_whose_address_changes_is_met_again_at_the_new_one_without_a_restart(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(3) as lan:
        nodes = [lan_node(lan, i, tmp_path, mesh="rejoin_interval: 60s, ") for i in range(3)]
        nodes[0].models = fake_model(tmp_path)
        with running(*nodes):
            await until_all_see_all(http, nodes)
            await nodes[2].until_sees(http, "m", 1)
            pid, moved = nodes[2].pid, nodes[2]
            lan.take(2, moved.host)
            moved.host = f"{lan.prefix}.77"
            lan.give(2, moved.host)
            lan.route(2)
            await moved.until(http, "there again", lambda s: s["addr"] == moved.host)
            assert len(alive(await moved.status(http))) == 3, "it forgets nobody because it moved"
            await moved.until_sees(http, "m", 1)
            assert await ask(http, moved) == (200, "n0")
            await until_all_see_all(http, nodes)
            assert moved.pid == pid and moved.process is not None and moved.process.poll() is None
            assert "bears our name" not in moved.log
        assert not [node.name for node in nodes if "Traceback" in node.log]


async def test_a_cable_pulled_and_plugged_in_again_mends_itself(tmp_path: Path, http: aiohttp.ClientSession):
    with Lan(2) as lan:
        nodes = [lan_node(lan, i, tmp_path, mesh="rejoin_interval: 60s, ") for i in range(2)]
        with running(*nodes):
            await until_all_see_all(http, nodes)
            lan.link(1, "down")
            await nodes[0].until(http, "alone", lambda s: state_of(s, "n1") == "dead")
            lan.link(1, "up")
            await until_all_see_all(http, nodes)
            assert "mesh.moved" not in nodes[1].log
        assert not [node.name for node in nodes if "Traceback" in node.log]


async def test_a_node_stopped_for_seconds_calls_nobody_dead_when_it_goes_on(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(3) as lan:
        nodes = [lan_node(lan, i, tmp_path) for i in range(3)]
        with running(*nodes):
            await until_all_see_all(http, nodes)
            nodes[0].kill(signal.SIGSTOP)
            for node in nodes[1:]:
                await node.until(http, "missing n0", lambda s: state_of(s, "n0") in ("suspect", "dead"))
            nodes[0].kill(signal.SIGCONT)
            await until_all_see_all(http, nodes)
            assert "member.dead" not in nodes[0].log


async def test_a_tailnet_node_without_tailscaled_says_so_serves_and_joins_when_it_comes(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(2, "100.64.9") as lan:
        sockets = [tmp_path / f"ts{i}.sock" for i in range(2)]
        daemons = []
        nodes = [
            lan_node(lan, i, tmp_path, mesh=f"network: tailnet, tailnet: {{socket: {sockets[i]}}}, ")
            for i in range(2)
        ]
        try:
            with running(*nodes):
                for node in nodes:
                    status = await node.until(http, "waiting", lambda s: bool(s["mesh"]["problems"]))
                    assert "start Tailscale" in status["mesh"]["problems"][0]
                    assert "mesh.network: lan" in status["mesh"]["problems"][0]
                daemons = [tailscaled(sockets[i], lan.address(i), lan.address(1 - i)) for i in range(2)]
                await until_all_see_all(http, nodes)
        finally:
            for daemon in daemons:
                daemon.kill()
                daemon.wait()


def tailscaled(path: Path, own: str, peer: str) -> subprocess.Popen[bytes]:
    """A tailscaled that knows one online peer."""
    status = {
        "BackendState": "Running",
        "Self": {"TailscaleIPs": [own]},
        "Peer": {"k": {"TailscaleIPs": [peer], "Online": True}},
    }
    program = (
        "import http.server, socketserver\n"
        f"body = {json.dumps(status)!r}.encode()\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', str(len(body)))\n"
        "        self.end_headers(); self.wfile.write(body)\n"
        "    def address_string(self): return ''\n"
        "    def log_message(self, *args): pass\n"
        f"socketserver.ThreadingUnixStreamServer({str(path)!r}, Answer).serve_forever()\n"
    )
    return subprocess.Popen([sys.executable, "-S", "-c", program])


async def test_a_node_that_finds_something_else_on_a_members_port_says_so(
    tmp_path: Path, http: aiohttp.ClientSession
):
    with Lan(1) as lan, socket.create_server((f"{lan.prefix}.1", 7946)):
        node = lan_node(lan, 0, tmp_path, seeds=(f"{lan.prefix}.1:7946",))
        with running(node):
            status = await node.until(http, "told", lambda s: bool(s["mesh"]["problems"]))
            assert (
                f"{lan.prefix}.1:7946 takes connections but does not answer" in status["mesh"]["problems"][0]
            )
