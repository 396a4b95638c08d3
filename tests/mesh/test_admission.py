"""Who may be a member, what addresses are, and saying things once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.addresses import is_acceptable
from viiwork.limits import LOG_KEYS_MAX, LOG_REPEAT_S, MESH_PROBLEM_KEPT_S, MESH_PROBLEMS_MAX
from viiwork.mesh.admission import MeshIdentity, admit
from viiwork.mesh.notices import Problems, Repeats, one_line
from viiwork.mesh.values import Member, canonical_ip, host_port, split_host_port

OPEN = MeshIdentity("a", "192.168.1.2", 7946, 8086, "0.1")
SECURED = MeshIdentity("a", "192.168.1.2", 7946, 8086, "0.1", keys=(b"k" * 32,))
META = {"v": "2", "api": "8086", "ver": "0.1", "role": "node"}


def judge(us=OPEN, name="b", addr="192.168.1.3:7946", **meta):
    return admit(us, name, addr, "alive", {**META, **meta}, 5)


@pytest.mark.parametrize("addr", ["10.1.2.3", "172.16.0.1", "172.31.255.254", "192.168.0.1", "fd00::1"])
def test_private_addresses_may_join_an_open_lan_mesh(addr):
    assert is_acceptable(addr, "lan")
    assert not is_acceptable(addr, "tailnet")


@pytest.mark.parametrize(
    "addr",
    [
        "8.8.8.8",
        "172.32.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "::",
        "169.254.169.254",
        "fe80::1",
        "224.0.0.1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:8.8.8.8",
        "::ffff:169.254.169.254",
        "::ffff:127.0.0.1",
        "64:ff9b::8.8.8.8",
        "64:ff9b::169.254.169.254",
        "not an address",
        "",
        "10.0.0.1 ",
    ],
)
def test_everything_else_may_not(addr):
    assert not is_acceptable(addr, "lan")


def test_forms_that_hold_a_private_ipv4_address_count_as_it():
    assert is_acceptable("::ffff:192.168.1.1", "lan")
    assert is_acceptable("64:ff9b::10.0.0.1", "lan")


def test_a_tailnet_mesh_takes_a_tailnets_addresses_of_both_families_only():
    for addr in (
        "100.64.0.1",
        "100.127.255.254",
        "fd7a:115c:a1e0::1",
        "::ffff:100.64.0.1",
        "64:ff9b::100.64.0.1",
    ):
        assert is_acceptable(addr, "tailnet"), addr
    # Each machine's own tailscaled answers at the last three.
    for addr in (
        "100.63.255.255",
        "100.128.0.1",
        "10.0.0.1",
        "fd00::1",
        "fd7a:115c:a1e1::1",
        "64:ff9b::10.0.0.1",
    ):
        assert not is_acceptable(addr, "tailnet"), addr
    for addr in ("100.100.100.100", "fd7a:115c:a1e0::53", "::ffff:100.100.100.100"):
        assert not is_acceptable(addr, "tailnet"), addr


@pytest.mark.parametrize(
    "addr", ["fd00::1%eth0", "fe80::1%eth0", "2002:a00:1::1", "64:ff9b:1::a00:1", "::10.0.0.1"]
)
def test_addresses_that_mean_something_here_only_or_hide_another_are_refused(addr):
    assert not is_acceptable(addr, "lan") and not is_acceptable(addr, "tailnet")


def test_loopback_members_need_a_loopback_advertise_and_bring_nothing_else_in():
    assert is_acceptable("127.0.0.2", "lan", loopback_ok=True)
    assert is_acceptable("::1", "lan", loopback_ok=True)
    assert not is_acceptable("8.8.8.8", "lan", loopback_ok=True)


def test_a_member_is_taken_over_with_its_metadata():
    assert judge() == Member("b", "192.168.1.3", 7946, 8086, "alive", "0.1", "node", 5)


def test_a_secured_mesh_does_not_check_addresses():
    assert isinstance(judge(SECURED, addr="8.8.8.8:7946"), Member)
    assert "outside" in judge(OPEN, addr="8.8.8.8:7946")


@pytest.mark.parametrize(
    "meta",
    [{"v": "1"}, {"v": ""}, {"api": ""}, {"api": "0"}, {"api": "65536"}, {"api": "80860000"}, {"api": "٨"}],
)
def test_metadata_of_another_kind_is_refused_with_one_line(meta):
    line = judge(**meta)
    assert isinstance(line, str) and "\n" not in line


def test_a_role_we_do_not_know_is_not_asked_for_anything():
    assert judge(role="backup").role == "gateway"


@given(st.text(max_size=80), st.text(max_size=80), st.dictionaries(st.text(max_size=5), st.text(max_size=20)))
def test_whatever_gossip_says_gives_a_member_or_a_printable_line(name, addr, meta):
    verdict = admit(OPEN, name, addr, "alive", meta, 0)
    assert isinstance(verdict, Member) or verdict.isprintable()


def test_ipv6_addresses_are_written_with_brackets():
    assert host_port("fd00::1", 8086) == "[fd00::1]:8086"
    assert split_host_port("[FD00:0::1]:8086") == ("fd00::1", 8086)
    assert split_host_port("10.0.0.1:1") == ("10.0.0.1", 1)
    assert canonical_ip("::ffff:10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    "text", ["", "a", "host:1", "1.2.3.4", "fd00::1:80", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4:+"]
)
def test_what_is_no_address_is_said_to_be_none(text):
    with pytest.raises(ValueError):
        split_host_port(text)


def test_a_line_is_let_through_once_per_interval():
    repeats = Repeats()
    assert repeats.is_due("x", 0.0)
    assert not repeats.is_due("x", LOG_REPEAT_S - 0.1)
    assert repeats.is_due("x", LOG_REPEAT_S)


def test_invented_keys_neither_grow_memory_nor_fill_the_log():
    repeats = Repeats()
    let_through = sum(repeats.is_due(f"name{i}", 0.0) for i in range(10_000))
    assert let_through == LOG_KEYS_MAX
    assert repeats.is_due("later", LOG_REPEAT_S)


def test_a_problem_not_seen_again_is_over():
    problems = Problems()
    assert problems.add("k", "first", 0.0)
    assert not problems.add("k", "second", 1.0)
    assert problems.lines(2.0) == ["second"]
    assert problems.lines(1.0 + MESH_PROBLEM_KEPT_S) == []
    problems.clear("k")
    assert problems.lines(2.0) == []


def test_problems_are_bounded():
    problems = Problems()
    for i in range(10_000):
        problems.add(f"{i}", "x" * 5000, 0.0)
    assert len(problems.lines(0.0)) == MESH_PROBLEMS_MAX
    assert all(len(line) <= 300 for line in problems.lines(0.0))


def test_control_characters_do_not_reach_a_terminal():
    assert one_line("a\x1b[2J\r\nb") == "a\ufffd[2J\ufffd\ufffdb"
