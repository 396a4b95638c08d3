"""Going over from one secret to the next."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from viiwork.mesh.keys import key_id, read_ids, sending_key

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
HOLDINGS = st.frozensets(st.sampled_from([key_id(k) for k in (OLD, NEW, OTHER)]), max_size=2)


def test_the_new_secret_is_used_once_everybody_can_read_it():
    old, both, new = (frozenset(map(key_id, keys)) for keys in ([OLD], [OLD, NEW], [NEW]))
    assert sending_key((NEW, OLD), [both, old]) == OLD
    assert sending_key((NEW, OLD), [both, both]) == NEW
    assert sending_key((NEW, OLD), [both, new]) == NEW
    assert sending_key((NEW, OLD), [frozenset()]) == OLD, "who says nothing may not know it"
    assert sending_key((NEW,), [old]) == NEW, "with one secret there is no choice"


@given(st.lists(HOLDINGS, max_size=8), st.randoms())
def test_the_choice_depends_on_who_is_there_and_not_on_the_order_they_came(others, random):
    shuffled = others + others[: len(others) // 2]
    random.shuffle(shuffled)
    assert sending_key((NEW, OLD), others) == sending_key((NEW, OLD), shuffled)


@given(st.lists(HOLDINGS, min_size=1, max_size=8))
def test_a_member_that_follows_the_rotation_can_read_what_is_sent(others):
    """Members hold the old secret, both, or the new one, and never is the last beside the first."""
    stages = ([OLD], [OLD, NEW]), ([OLD, NEW], [NEW])
    for stage in stages:
        fleet = [frozenset(map(key_id, stage[bool(ids)])) for ids in others]
        sent = sending_key((NEW, OLD), fleet)
        assert all(key_id(sent) in ids for ids in fleet)


@given(st.text())
def test_ids_of_a_stranger_are_few_and_of_our_form(text: str):
    ids = read_ids(text)
    assert len(ids) <= 2 and all(len(one) == 16 for one in ids)


def test_an_id_tells_nothing_of_its_secret_and_differs_between_secrets():
    one, other = os.urandom(32), os.urandom(32)
    assert key_id(one) == key_id(one) != key_id(other)
    assert read_ids(f"{key_id(one)},{key_id(other)}") == {key_id(one), key_id(other)}
