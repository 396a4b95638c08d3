from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.peers import PeerTable
from viiwork.limits import CAPACITY_MODELS_MAX, LOST_MODEL_KEPT_S


def report(asked_at: float, **free: int) -> PeerReport:
    models = tuple(
        ModelCapacity(m, slots=n + 2, busy=2, backends=1, healthy_backends=1) for m, n in free.items()
    )
    return PeerReport(CapacityReport("b", "1", models), asked_at, asked_at)


def free(table: PeerTable, model: str, now: float) -> int | None:
    return next((c.free for c in table.candidates(model, now) if c.node == "b"), None)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.integers(0, 4), st.integers(0, 3)),
        st.tuples(st.just("start"), st.sampled_from("mn"), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("refuse"), st.sampled_from("mn"), st.just(0)),
    ),
    max_size=30,
)


@given(steps)
def test_free_slots_are_the_reports_less_forwards_begun_and_plus_those_ended_since_it_was_asked_for(steps):
    table, now = PeerTable(1e9), 0.0
    table.put("b", "http://b")
    last, open_forwards, refused_at, ended = None, {}, {}, []
    for kind, what, late in steps:
        now += 1.0
        if kind == "report":
            last = report(now - late - 0.5, m=what, n=4)  # asked for before the last `late` steps
            table.reported("b", last)
            ended = []
        elif kind == "start":
            open_forwards[table.forward_started("b", what, now)] = (what, now)
        elif kind == "end" and open_forwards:
            number = list(open_forwards)[what % len(open_forwards)]
            model, started_at = open_forwards.pop(number)
            if last is not None and started_at <= last.requested_at:
                ended.append(model)
            assert table.forward_ended("b", number) and not table.forward_ended("b", number)
        elif kind == "refuse":
            table.refused("b", what, now)
            refused_at[what] = now
        if last is None:
            assert free(table, "m", now) is None
            continue
        for model, told in zip("mn", last.report.models, strict=True):
            # What an older report left standing is settled once a report was asked for after it.
            asked = last.requested_at
            ours = sum(m == model and at > asked for m, at in open_forwards.values())
            refused_at = {m: at for m, at in refused_at.items() if at >= asked}
            expected = min(max(told.free - ours + ended.count(model), 0), told.slots)
            assert free(table, model, now) == (0 if model in refused_at else expected)
        assert table.open_forwards == len(open_forwards)


def test_a_model_a_peer_lists_no_longer_is_not_known_any_more():
    table = PeerTable(3.0)
    table.put("b", "http://b")
    table.reported("b", report(1.0, m=1, n=1))
    assert table.knows("m", 1.0) and table.lists("b", "m") and not table.lists("c", "m")
    table.reported("b", report(2.0, n=1))
    assert not table.knows("m", 2.0) and table.knows("n", 2.0)
    table.remove("b", 2.0)
    assert not table.knows("m", 2.0) and table.candidates("n", 2.0) == [] and table.silent_s("b", 2.0) is None


def test_a_model_whose_last_node_went_stays_known_for_a_while():
    table = PeerTable(3.0)
    table.put("b", "http://b")
    table.reported("b", report(1.0, m=1))
    table.remove("b", 10.0)
    assert table.knows("m", 10.0 + LOST_MODEL_KEPT_S / 2) and not table.candidates("m", 11.0)
    assert not table.knows("m", 10.0 + LOST_MODEL_KEPT_S)


def test_models_of_many_nodes_that_went_do_not_add_up():
    table = PeerTable(3.0)
    for n in range(CAPACITY_MODELS_MAX + 5):
        table.put("b", "http://b")
        table.reported("b", report(1.0, **{f"m{n}": 1}))
        table.remove("b", 1.0)
    assert not table.knows("m0", 2.0) and table.knows(f"m{CAPACITY_MODELS_MAX + 4}", 2.0)


def test_a_peer_that_left_and_came_back_has_none_of_its_old_forwards():
    table = PeerTable(3.0)
    table.put("b", "http://b")
    number = table.forward_started("b", "m", 1.0)
    table.remove("b", 2.0)
    table.put("b", "http://b")
    assert not table.forward_ended("b", number) and table.open_forwards == 0


def test_after_a_sleep_no_report_is_fresh_and_the_model_is_still_known():
    table = PeerTable(3.0)
    table.put("b", "http://b")
    table.reported("b", report(100.0, m=2))
    assert free(table, "m", 100.5) == 2
    table.slept(10_800.0)  # the process's clock stood still meanwhile
    assert free(table, "m", 100.5) is None and table.knows("m", 100.5)
