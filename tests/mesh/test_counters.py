"""What gossip's counters say."""

from __future__ import annotations

from dataclasses import fields, replace

import kinship
import pytest

from viiwork.mesh.counters import udp_loss, unread_packets

ZERO = kinship.Stats(**{f.name: 0 for f in fields(kinship.Stats)})


def test_quiet_counters_are_no_problem():
    busy = replace(ZERO, packets_received=10_000, probes_sent=500, push_pulls=20)
    assert unread_packets(ZERO, busy, is_open=True) == []
    assert udp_loss(ZERO, busy, 7946) is None


def test_packets_that_cannot_be_decrypted_say_that_a_secret_differs():
    ((key, line),) = unread_packets(ZERO, replace(ZERO, decrypt_failures=3), is_open=False)
    assert key == "secret" and line.startswith("3 ") and "secret differs" in line


def test_only_new_failures_count():
    seen = replace(ZERO, decrypt_failures=3)
    assert unread_packets(seen, seen, is_open=False) == []


@pytest.mark.parametrize(("is_open", "why"), [(True, "we are open"), (False, "we are secured")])
def test_packets_of_the_other_kind_of_mesh_are_named_as_such(is_open, why):
    found = unread_packets(ZERO, replace(ZERO, decode_errors=2), is_open=is_open)
    assert len(found) == 1 and "2 gossip packets" in found[0][1] and why in found[0][1]


def test_a_lost_datagram_now_and_then_is_no_news_but_blocked_udp_is():
    assert udp_loss(ZERO, replace(ZERO, tcp_ping_acks=4), 7946) is None
    key, line = udp_loss(ZERO, replace(ZERO, tcp_ping_acks=25), 7946)
    assert key == "udp" and "7946/udp" in line
