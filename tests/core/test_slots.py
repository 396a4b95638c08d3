from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.core.slots import SlotRef, SlotTable


def table(n_slots: int = 2, routable: bool = True) -> SlotTable:
    slots = SlotTable()
    slots.put_backend("m/0", model="m", url="http://e", n_slots=n_slots, routable=routable)
    return slots


def test_a_lease_takes_its_slot_and_release_gives_it_back_once():
    slots = table()
    lease = slots.lease(SlotRef("m/0", 1))
    assert list(slots.free_slots("m")) == [SlotRef("m/0", 0)]
    assert slots.release(lease) == SlotRef("m/0", 1)
    assert slots.release(lease) is None
    assert list(slots.free_slots("m")) == [SlotRef("m/0", 0), SlotRef("m/0", 1)]


def test_a_taken_slot_cannot_be_leased_again():
    slots = table()
    slots.lease(SlotRef("m/0", 0))
    with pytest.raises(ValueError):
        slots.lease(SlotRef("m/0", 0))


def test_a_late_release_does_not_free_the_next_holder():
    slots = table(n_slots=1)
    first = slots.lease(SlotRef("m/0", 0))
    slots.release(first)
    slots.lease(SlotRef("m/0", 0))
    slots.release(first)
    assert slots.in_flight("m/0") == 1


def test_an_unroutable_backend_has_no_free_slot_but_keeps_its_leases():
    slots = table()
    lease = slots.lease(SlotRef("m/0", 0))
    slots.put_backend("m/0", model="m", url="http://e", n_slots=2, routable=False)
    assert not list(slots.free_slots("m"))
    assert slots.any_routable("m") is None
    assert slots.release(lease) is not None
    assert slots.open_leases == 0


def test_a_backend_restarted_with_fewer_slots_counts_the_leases_of_the_vanished_ones():
    slots = table(n_slots=3)
    leases = [slots.lease(SlotRef("m/0", slot)) for slot in range(3)]
    slots.put_backend("m/0", model="m", url="http://e", n_slots=2, routable=True)
    assert slots.in_flight("m/0") == 3
    slots.release(leases[0])
    assert not list(slots.free_slots("m")), "two requests still run on an engine with two slots"
    slots.release(leases[2])
    assert list(slots.free_slots("m")) == [SlotRef("m/0", 0)]


@given(st.lists(st.tuples(st.sampled_from(["lease", "release", "resize"]), st.integers(0, 5)), max_size=60))
def test_free_and_in_flight_never_leave_their_bounds(steps):
    slots, open_leases, n_slots = table(n_slots=3), [], 3
    for what, number in steps:
        if what == "lease":
            free = list(slots.free_slots("m"))
            if free:
                open_leases.append(slots.lease(free[number % len(free)]))
        elif what == "release" and open_leases:
            slots.release(open_leases.pop(number % len(open_leases)))
        elif what == "resize":
            n_slots = number
            slots.put_backend("m/0", model="m", url="http://e", n_slots=n_slots, routable=True)
        n_free = len(list(slots.free_slots("m")))
        assert 0 <= n_free <= n_slots
        assert n_free == max(n_slots - len(open_leases), 0)
        assert slots.in_flight("m/0") == slots.open_leases == len(open_leases)


def test_a_model_is_served_with_or_without_backends_until_it_is_removed():
    slots = SlotTable()
    slots.add_model("m")
    assert slots.serves("m") and slots.any_routable("m") is None and not list(slots.free_slots("m"))
    slots.put_backend("m/0", model="m", url="http://e", n_slots=1, routable=True)
    slots.remove_backend("m/0")
    assert slots.serves("m") and not list(slots.free_slots("m"))
    slots.remove_model("m")
    assert not slots.serves("m")


def test_a_lease_on_a_removed_backend_ends_and_takes_nothing_from_the_next_of_its_name():
    slots = table(n_slots=1)
    old = slots.lease(SlotRef("m/0", 0))
    slots.remove_backend("m/0")
    assert slots.any_routable("m") is None and slots.open_leases == 1
    slots.put_backend("m/0", model="m", url="http://new", n_slots=1, routable=True)
    new = slots.lease(SlotRef("m/0", 0))
    assert slots.release(old) == SlotRef("m/0", 0)
    assert slots.in_flight("m/0") == 1 and not list(slots.free_slots("m"))
    assert slots.release(new) == SlotRef("m/0", 0) and slots.open_leases == 0
    assert list(slots.free_slots("m")) == [SlotRef("m/0", 0)]


def test_news_of_a_draining_backend_does_not_bring_its_removed_model_back():
    slots = table()
    slots.remove_model("m")
    slots.put_backend("m/0", model="m", url="http://e", n_slots=2, routable=False)
    assert not slots.serves("m")
