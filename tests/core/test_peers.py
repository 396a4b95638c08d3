"""What is known of peers' room when time jumps."""

from __future__ import annotations

from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.peers import PeerTable


def test_after_a_sleep_no_report_is_fresh_and_the_model_is_still_known():
    peers = PeerTable(3.0)
    peers.put("b", "http://b")
    model = ModelCapacity("m", slots=2, backends=1, healthy_backends=1)
    peers.reported("b", PeerReport(CapacityReport("b", "1", (model,)), 100.0, 100.1, 0.1, "b:1"))
    assert [name for name, *_ in peers.serving("m", 100.5)] == ["b"]
    peers.slept(10_800.0)  # the process's clock stood still meanwhile
    assert not list(peers.serving("m", 100.5)) and peers.knows("m")
    assert peers.reports()["b"].age_s(100.5) > 10_800
