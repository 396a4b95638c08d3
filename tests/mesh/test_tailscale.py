"""What tailscaled tells: our address, who is online, the suffix; and every way it does not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

import pytest
from aiohttp import web

from viiwork.config.model import MeshSection, TailnetSection
from viiwork.errors import NoOwnAddress
from viiwork.limits import TAILSCALE_BODY_MAX_BYTES
from viiwork.mesh import tailscale
from viiwork.mesh.address import OwnAddress, own_address
from viiwork.mesh.tailscale import parse_status, tailnet, tailnet_suffix

RUNNING = {
    "BackendState": "Running",
    "MagicDNSSuffix": "old.ts.net",
    "CurrentTailnet": {"Name": "home", "MagicDNSSuffix": "Tail1234.ts.net."},
    "Self": {"HostName": "me", "TailscaleIPs": ["fd7a:115c:a1e0::1", "100.101.102.103"], "Online": True},
    "Peer": {
        "nodekey:a": {"HostName": "a", "TailscaleIPs": ["fd7a:115c:a1e0::2", "100.64.0.2"], "Online": True},
        "nodekey:b": {"HostName": "b", "TailscaleIPs": ["100.64.0.3"], "Online": False},
        "nodekey:c": {"HostName": "c", "TailscaleIPs": ["fd7a:115c:a1e0::4"], "Online": True},
        "nodekey:d": {"HostName": "d", "TailscaleIPs": None, "Online": True},
        "nodekey:e": {"HostName": "e", "TailscaleIPs": ["8.8.8.8", "100.100.100.100", "x"], "Online": True},
    },
}


@pytest.fixture
async def tailscaled(tmp_path):
    """A tailscaled whose status can be set; `asked` counts."""
    state = {"status": 200, "body": json.dumps(RUNNING), "asked": 0, "path": str(tmp_path / "ts.sock")}

    async def answer(request):
        assert (request.path, request.host) == ("/localapi/v0/status", "local-tailscaled.sock")
        state["asked"] += 1
        return web.Response(status=state["status"], text=state["body"])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, state["path"]).start()
    state["mesh"] = MeshSection(tailnet=TailnetSection(socket=state["path"]))
    yield state
    await runner.cleanup()


def nowhere() -> str | None:
    return None


async def test_ipv4_is_preferred_and_an_address_we_have_is_kept(tailscaled):
    assert await own_address(tailscaled["mesh"], nowhere) == OwnAddress("100.101.102.103")
    kept = await own_address(tailscaled["mesh"], nowhere, "fd7a:115c:a1e0::1")
    assert kept == OwnAddress("fd7a:115c:a1e0::1")
    assert (await own_address(tailscaled["mesh"], nowhere, "100.64.9.9")).ip == "100.101.102.103"


async def test_peers_that_are_online_are_offered_in_the_family_of_our_own_address(tailscaled):
    found = await tailnet(tailscaled["path"])
    assert found.peers("100.101.102.103", 7946) == ["100.64.0.2:7946"]
    v6 = found.peers("fd7a:115c:a1e0::1", 7946)
    assert v6 == ["[fd7a:115c:a1e0::2]:7946", "[fd7a:115c:a1e0::4]:7946"]


def test_a_tailnet_without_ipv4_gives_an_ipv6_address():
    status = {"BackendState": "Running", "Self": {"TailscaleIPs": ["fd7a:115c:a1e0::7"]}}
    assert parse_status(json.dumps(status).encode()).own == ("fd7a:115c:a1e0::7",)


async def test_the_suffix_is_there_in_lower_case_or_not_at_all(tailscaled):
    assert await tailnet_suffix(tailscaled["path"]) == "tail1234.ts.net"
    for suffix in ("", "evil\r\nHeader: x", "*", "a" * 300):
        tailscaled["body"] = json.dumps({**RUNNING, "CurrentTailnet": {"MagicDNSSuffix": suffix}})
        assert await tailnet_suffix(tailscaled["path"]) is None
    tailscaled["status"] = 500
    assert await tailnet_suffix(tailscaled["path"]) is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"BackendState":"NeedsLogin"}', "tailscale up"),
        ('{"BackendState":"Running"}', "no address"),
        ('{"BackendState":"Running","Self":{"TailscaleIPs":null}}', "no address"),
        ('{"BackendState":"Running","Self":{"TailscaleIPs":["fd7a::1","8.8.8.8","x"]}}', "no address"),
        ('{"BackendState":5}', "cannot be read"),
        ("<html>", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_every_way_tailscale_is_not_ready_says_what_to_do(body, why):
    with pytest.raises(NoOwnAddress, match=why):
        parse_status(body.encode())


@pytest.mark.parametrize(("status", "why"), [(403, "may this user ask it"), (302, "302")])
async def test_a_tailscaled_that_refuses_is_named(tailscaled, status, why):
    tailscaled["status"] = status
    with pytest.raises(NoOwnAddress, match=why):
        await tailnet(tailscaled["path"])


async def test_a_status_without_end_is_refused(tailscaled):
    tailscaled["body"] = " " * (TAILSCALE_BODY_MAX_BYTES + 1)
    with pytest.raises(NoOwnAddress, match="over 16777216 bytes"):
        await tailnet(tailscaled["path"])


async def test_no_tailscaled_at_all_says_how_to_go_on(tmp_path):
    with pytest.raises(NoOwnAddress, match=r"start Tailscale.*mesh\.network: lan"):
        await tailnet(str(tmp_path / "none.sock"))


async def test_a_tailscaled_that_hangs_up_is_an_answer(tmp_path):
    path = str(tmp_path / "rude.sock")

    async def hang_up(reader, writer):
        writer.close()

    server = await asyncio.start_unix_server(hang_up, path)
    with pytest.raises(NoOwnAddress, match="does not answer"):
        await tailnet(path)
    server.close()
    await server.wait_closed()


# -- other ways than the socket ------------------------------------------------------------------------
@pytest.fixture
def binary(tmp_path, monkeypatch):
    """A `tailscale` on the PATH that prints a file and remembers TERM and its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps(RUNNING))
    script = folder / "tailscale"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nfolder = {str(folder)!r}\n"
        'open(folder + "/seen", "w").write(os.environ.get("TERM", "none") + " " + " ".join(sys.argv[1:]))\n'
        'sys.stdout.write(open(folder + "/status.json").read())\n'
        'sys.exit(int(os.environ.get("TS_EXIT", "0")))\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("TERM", raising=False)
    return folder


async def test_without_the_default_socket_the_binary_is_asked_and_told_that_it_has_no_window(
    binary, tmp_path, monkeypatch
):
    monkeypatch.setattr(tailscale, "DEFAULT_SOCKET", str(tmp_path / "none.sock"))
    found = await tailnet(str(tmp_path / "none.sock"))
    assert found.own[0] == "100.101.102.103"
    assert (binary / "seen").read_text() == "dumb status --json"
    monkeypatch.setenv("TERM", "xterm")
    await tailnet(str(tmp_path / "none.sock"))
    assert (binary / "seen").read_text().startswith("xterm ")


async def test_a_binary_that_fails_leaves_the_advice(binary, tmp_path, monkeypatch):
    monkeypatch.setattr(tailscale, "DEFAULT_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("TS_EXIT", "1")
    with pytest.raises(NoOwnAddress, match="start Tailscale"):
        await tailnet(str(tmp_path / "none.sock"))


async def test_a_configured_socket_is_never_second_guessed(binary, tmp_path):
    with pytest.raises(NoOwnAddress, match="cannot reach tailscaled"):
        await tailnet(str(tmp_path / "none.sock"))
    assert not (binary / "seen").exists()


async def test_a_daemon_that_answered_with_an_error_is_not_replaced(binary, tailscaled, monkeypatch):
    monkeypatch.setattr(tailscale, "DEFAULT_SOCKET", tailscaled["path"])
    tailscaled["status"] = 500
    with pytest.raises(NoOwnAddress, match="answers 500"):
        await tailnet(tailscaled["path"])
    assert not (binary / "seen").exists()


async def test_a_mac_has_two_more_ways(tailscaled, tmp_path, monkeypatch):
    monkeypatch.setattr(tailscale.sys, "platform", "darwin")
    monkeypatch.setattr(tailscale, "DEFAULT_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setattr(tailscale, "_MAC_SOCKET", tailscaled["path"])
    assert (await tailnet(str(tmp_path / "none.sock"))).own[0] == "100.101.102.103"


async def test_the_app_bundle_is_the_last_way_of_a_mac(binary, tmp_path, monkeypatch):
    monkeypatch.setattr(tailscale.sys, "platform", "darwin")
    monkeypatch.setattr(tailscale, "DEFAULT_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setattr(tailscale, "_MAC_SOCKET", str(tmp_path / "none2.sock"))
    monkeypatch.setattr(tailscale, "_MAC_BINARY", str(binary / "tailscale"))
    monkeypatch.setattr(tailscale.shutil, "which", lambda name: None)
    assert (await tailnet(str(tmp_path / "none.sock"))).own[0] == "100.101.102.103"


async def test_a_silent_daemon_is_given_up_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tailscale, "TAILSCALE_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "mute.sock"))
        server.listen()
        with pytest.raises(NoOwnAddress, match="timed out"):
            await tailnet(str(tmp_path / "mute.sock"))
        assert await tailnet_suffix(str(tmp_path / "mute.sock")) is None
