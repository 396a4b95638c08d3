"""What peers hold, and what that is worth to a request."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.core.holdings import Holding, PeerHoldings, held_by_peers, scope_of
from viiwork.core.turn import Ask, Chain, Held
from viiwork.limits import HOLDINGS_MAX

S, T = "5" * 32, "7" * 32
LINKS = tuple(f"{n:016x}" for n in range(1, 6))
CHAIN = Chain(LINKS, (4000, 5000, 6000, 7000, 8000))


def holding(session: str = S, tip: str = LINKS[3], n_tokens: int = 900, **facts) -> Holding:
    return Holding(
        session, "m", tip, **{"scope": "", "where": "slot", "generation": 1} | facts, n_tokens=n_tokens
    )


def peers(**lists: tuple[Holding, ...]) -> PeerHoldings:
    made = PeerHoldings()
    for node, holdings in lists.items():
        made.put(node, holdings)
    return made


def ask(**facts) -> Ask:
    return Ask("r", "m", **{"session": S, "chain": CHAIN} | facts)


def test_a_tip_in_the_chain_proves_a_prefix_whosever_session_it_was():
    found = held_by_peers(ask(session=T), peers(b=(holding(),)))
    assert found == {"b": Held(900, "slot")}


def test_of_two_tips_a_node_holds_the_longer_counts():
    both = (holding(tip=LINKS[1], n_tokens=200), holding(T, tip=LINKS[4], n_tokens=1200, where="ram"))
    assert held_by_peers(ask(), peers(b=both)) == {"b": Held(1200, "ram")}


def test_a_slot_comes_before_a_copy_of_the_same_length():
    both = (holding(where="replica"), holding(T, where="slot"))
    assert held_by_peers(ask(), peers(b=both)) == {"b": Held(900, "slot")}


def test_a_session_whose_tip_is_not_in_the_chain_is_good_for_the_head_alone():
    compacted = peers(b=(holding(tip="f" * 16, n_tokens=30_000),))
    assert held_by_peers(ask(), compacted) == {"b": Held(1000, "slot")}
    assert held_by_peers(ask(session=None), compacted) == {}


def test_of_a_forks_parent_the_part_before_the_fork_counts():
    parents = peers(
        b=(holding(T, tip="f" * 16, n_tokens=30_000),), c=(holding(T, tip="f" * 16, n_tokens=900),)
    )
    found = held_by_peers(ask(parent=T, shared_tokens=2500), parents)
    assert found == {"b": Held(2500, "slot"), "c": Held(900, "slot")}


def test_without_a_chain_the_session_is_all_there_is_to_go_by():
    assert held_by_peers(ask(chain=None), peers(b=(holding(),))) == {"b": Held(900, "slot")}
    unknown = peers(b=(holding(tip="", where="replica"),))
    assert held_by_peers(ask(), unknown) == {"b": Held(900, "replica")}


def test_other_models_and_other_sessions_are_worth_nothing():
    found = peers(b=(holding(T, tip="f" * 16),))
    assert held_by_peers(ask(), found) == {}
    assert held_by_peers(Ask("r", "n", session=S, chain=CHAIN), peers(b=(holding(),))) == {}


def test_only_a_part_of_a_key_is_published():
    assert scope_of(None) == "" and scope_of("ab" * 16) == "ab" * 8


def test_the_newest_of_several_nodes_states_is_found():
    found = peers(b=(holding(generation=4),), c=(holding(generation=9),))
    newest = found.newest(S, "m")
    assert newest is not None and newest.generation == 9 and set(found.of(S, "m")) == {"b", "c"}
    found.remove("c")
    newest = found.newest(S, "m")
    assert newest is not None and newest.generation == 4


def test_the_same_list_told_again_changes_nothing():
    told = (holding(),)
    found = peers(b=told)
    assert not found.put("b", told) and found.put("b", ())
    assert found.newest(S, "m") is None


LISTS = st.lists(
    st.builds(holding, st.sampled_from([S, T]), st.sampled_from([*LINKS, ""]), st.integers(0, 99)), max_size=5
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bcd"), LISTS), max_size=12))
def test_lists_replace_one_another_without_a_trace(told):
    made = PeerHoldings()
    for node, holdings in told:
        made.put(node, tuple(holdings))
    for node in "bcd":
        made.remove(node)
    assert not made._by_tip and not made._by_session and not made._lists


def test_more_than_the_limit_is_not_kept():
    made = peers(b=tuple(holding(f"{n:032x}", tip=f"{n:016x}") for n in range(HOLDINGS_MAX + 50)))
    assert len(made._by_session) == HOLDINGS_MAX == len(made._by_tip)
    made.remove("b")
    assert not made._by_session and not made._by_tip
