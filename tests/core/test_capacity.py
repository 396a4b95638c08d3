"""Room on one node and in the fleet."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.capacity import (
    CapacityReport,
    KvIdentity,
    ModelCapacity,
    PeerReport,
    fleet_capacity,
    is_fresh,
)

KV = KvIdentity("abc", "4", "f16", "f16", v_trans=False, n_ctx=4096)


def model(name="qwen", slots=4, busy=1, queued=0, ctx=8192, healthy=1):
    return ModelCapacity(name, "llamacpp", slots, busy, queued, ctx, backends=1, healthy_backends=healthy)


def peer(node, *models, at=100.0, api=""):
    return PeerReport(CapacityReport(node, "0.1", models), requested_at=at - 0.01, received_at=at, api=api)


def own(*models):
    return CapacityReport("a", "0.1", models)


def test_free_is_never_below_zero_however_busy_the_engine_says_it_is():
    assert model(slots=2, busy=7).free == 0


def test_a_model_without_a_healthy_backend_has_no_free_slot():
    assert model(slots=4, busy=0, healthy=0).free == 0


def test_a_report_exactly_as_old_as_the_limit_is_stale():
    assert is_fresh(2.999, 3.0)
    assert not is_fresh(3.0, 3.0)


def test_age_counts_from_the_answer_and_is_never_negative():
    assert peer("b", at=100.0).age_s(101.5) == 1.5
    assert peer("b", at=100.0).age_s(99.0) == 0.0


def test_fleet_free_is_the_sum_of_clamped_free_not_slots_minus_busy():
    (m,) = fleet_capacity(own(model(slots=2, busy=6)), [peer("b", model(slots=4, busy=1))], 100.0, 3.0)
    assert (m.slots, m.busy, m.free) == (6, 7, 3)


def test_a_stale_host_is_listed_with_its_age_and_adds_nothing():
    (m,) = fleet_capacity(own(model(ctx=9000)), [peer("b", model(ctx=10), at=90.0)], 100.0, 3.0)
    a, b = m.hosts
    assert (m.slots, m.busy, m.free, m.ctx) == (4, 1, 3, 9000)
    assert not a.is_stale and a.age_s == 0.0
    assert b.is_stale and b.model is None and b.age_s == 10.0


def test_a_model_only_a_stale_host_serves_is_still_known():
    (m,) = fleet_capacity(own(), [peer("b", model(), at=0.0)], 100.0, 3.0)
    assert (m.name, m.engine, m.slots, m.ctx) == ("qwen", "llamacpp", 0, None)


def test_fleet_context_is_the_smallest_of_fresh_hosts_that_have_slots():
    peers = [
        peer("b", model(ctx=16384)),
        peer("c", model(slots=0, ctx=512)),
        peer("d", model(ctx=64), at=1.0),
    ]
    (m,) = fleet_capacity(own(model(ctx=32768)), peers, 100.0, 3.0)
    assert m.ctx == 16384


def test_an_unknown_model_gives_an_empty_list():
    assert fleet_capacity(own(model()), [], 100.0, 3.0, model="other") == ()


def test_models_are_sorted_by_name_and_one_can_be_picked():
    all_models = fleet_capacity(own(model("z"), model("b")), [peer("b", model("m"))], 100.0, 3.0)
    assert [m.name for m in all_models] == ["b", "m", "z"]
    assert [m.name for m in fleet_capacity(own(model("z"), model("b")), [], 0.0, 3.0, model="z")] == ["z"]


def test_a_report_that_bears_our_own_name_is_not_counted_twice():
    (m,) = fleet_capacity(own(model()), [peer("a", model())], 100.0, 3.0)
    assert m.slots == 4 and len(m.hosts) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 200), st.integers(0, 2), st.floats(0, 10)), max_size=20
    )
)
def test_fleet_free_stays_between_zero_and_slots(hosts):
    peers = [
        peer(f"n{i}", model(slots=s, busy=b, healthy=h), at=100.0 - age)
        for i, (s, b, h, age) in enumerate(hosts)
    ]
    for m in fleet_capacity(own(), peers, 100.0, 3.0):
        assert 0 <= m.free <= m.slots
        assert m.free == sum(h.model.free for h in m.hosts if h.model is not None)


def test_states_move_only_between_engines_that_agree_on_all_that_rendering_cannot_change():
    assert KV.matches(replace(KV, n_ctx=512))
    assert KV.matches(replace(KV, v_trans=True))
    for change in (
        {"model_fp": "x"},
        {"state": "5"},
        {"cache_type_k": "q8_0"},
        {"cache_type_v": "q8_0"},
    ):
        assert not KV.matches(replace(KV, **change))
    assert not KV.matches(None)


def test_an_unknown_fingerprint_matches_nothing_not_even_another_unknown():
    unknown = replace(KV, model_fp="")
    assert not unknown.matches(unknown)


def test_a_state_fits_only_with_room_for_one_more_token():
    assert KV.fits(4095)
    assert not KV.fits(4096)
