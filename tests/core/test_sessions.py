from __future__ import annotations

from viiwork.core.holdings import Holding, PeerHoldings
from viiwork.core.sessions import Binding, SessionTable
from viiwork.core.slots import SlotRef, SlotTable
from viiwork.core.turn import Ask, Chain

S, T = ("s", "m"), ("t", "m")
SLOT, OTHER = SlotRef("m/0", 0), SlotRef("m/0", 1)


def bound(generation: int = 1, ref: SlotRef = SLOT) -> Binding:
    return Binding("a", ref, 100, generation)


def test_another_sessions_turn_in_the_slot_ends_the_binding():
    table = SessionTable()
    table.ran_here(S, bound())
    table.taken(SLOT, T)
    assert table.get(S) is None and table.occupant(SLOT) is None


def test_a_turn_without_a_session_ends_the_binding_too():
    table = SessionTable()
    table.ran_here(S, bound())
    table.taken(SLOT, None)
    assert table.get(S) is None


def test_the_sessions_own_next_turn_keeps_the_binding():
    table = SessionTable()
    table.ran_here(S, bound())
    table.taken(SLOT, S)
    assert table.get(S) == bound()


def test_a_session_that_moved_to_another_slot_leaves_the_old_one():
    table = SessionTable()
    table.ran_here(S, bound())
    table.ran_here(S, bound(2, OTHER))
    assert table.occupant(SLOT) is None and table.occupant(OTHER) == S


def test_an_engine_restart_forgets_what_its_slots_held():
    table = SessionTable()
    table.ran_here(S, bound())
    table.ran_here(T, bound(ref=SlotRef("n/0", 0)))
    table.engine_restarted("m/0")
    assert table.get(S) is None and table.get(T) is not None


def test_a_turn_on_another_node_keeps_what_a_slot_here_still_holds():
    table = SessionTable()
    table.ran_here(S, bound())
    table.ran_elsewhere(S, "b", 5)
    assert table.get(S) == Binding("b", SLOT, 100, 1)


def test_a_node_that_left_is_nobodys_home():
    table = SessionTable()
    table.ran_elsewhere(S, "b", 5)
    table.ran_here(T, bound())
    table.ran_elsewhere(T, "b", 5)
    table.node_gone("b")
    assert table.get(S) is None and table.get(T) == Binding("", SLOT, 100, 1)


def test_generations_grow_whatever_the_clock_says():
    table = SessionTable()
    table.ran_here(S, bound(generation=1000))
    assert table.next_generation(S, wall_ms=5) == 1001
    assert table.next_generation(S, wall_ms=9000) == 9000


def test_the_table_forgets_the_session_unused_longest():
    table = SessionTable(limit=2)
    for number in range(3):
        table.ran_here((str(number), "m"), bound(ref=SlotRef("m/0", number)))
    assert len(table) == 2 and table.get(("0", "m")) is None
    assert table.occupant(SlotRef("m/0", 0)) is None


# -- the engine's RAM cache ------------------------------------------------------------------------


def cached_table(budget_tokens: int = 1000) -> SessionTable:
    table = SessionTable()
    table.ram_cache("m/0", budget_tokens)
    return table


def ran(table: SessionTable, name: str, ref: SlotRef = SLOT, n_tokens: int = 100, **facts) -> None:
    table.taken(ref, (name, "m"))
    table.ran_here((name, "m"), Binding("a", ref, n_tokens, 1), **facts)


def where(table: SessionTable, name: str) -> str | None:
    binding = table.get((name, "m"))
    if binding is None:
        return None
    return "slot" if binding.ref is not None else binding.ram


def test_a_session_whose_slot_is_taken_lies_in_the_engines_ram_cache():
    table = cached_table()
    ran(table, "s")
    ran(table, "t")
    assert where(table, "s") == "m/0" and where(table, "t") == "slot"
    assert table.occupant(SLOT) == ("t", "m")


def test_the_session_comes_back_from_ram_into_any_slot_of_its_backend():
    table = cached_table()
    ran(table, "s")
    ran(table, "t")
    ran(table, "s", OTHER, cached=100)
    assert where(table, "s") == "slot" and table.occupant(OTHER) == ("s", "m")
    assert where(table, "t") == "slot"


def test_the_ram_cache_forgets_the_oldest_when_its_budget_is_full():
    table = cached_table(250)
    for name in "stuv":
        ran(table, name)
    assert [where(table, name) for name in "stuv"] == [None, "m/0", "m/0", "slot"]


def test_without_a_ram_cache_or_a_known_size_a_replaced_session_is_forgotten():
    plain = SessionTable()
    ran(plain, "s")
    ran(plain, "t")
    assert where(plain, "s") is None
    unknown = cached_table()
    ran(unknown, "s", n_tokens=0)
    ran(unknown, "t")
    assert where(unknown, "s") is None


def test_what_the_ram_cache_did_not_give_back_tells_that_older_ones_are_gone():
    table = cached_table()
    for name in "stuv":
        ran(table, name)
    ran(table, "t", cached=3)
    assert [where(table, name) for name in "stuv"] == [None, "slot", "m/0", "m/0"]


def test_a_ram_cache_that_never_gives_anything_back_is_believed_no_more():
    table = cached_table()
    for name in "stuvw":
        ran(table, name)
    for name in "stu":
        ran(table, name, cached=0)
    assert [where(table, name) for name in "stvw"] == [None] * 4 and where(table, "u") == "slot"
    ran(table, "x")
    assert where(table, "u") is None


def test_a_slot_tells_whether_its_last_content_is_expected_in_ram():
    table = cached_table()
    ran(table, "s")
    assert not table.replaces(SLOT)
    table.taken(SLOT, T)
    assert table.replaces(SLOT)
    table.taken(SLOT, None)
    assert not table.replaces(SLOT)
    plain = SessionTable()
    ran(plain, "s")
    plain.taken(SLOT, T)
    assert not plain.replaces(SLOT)


def test_a_restarted_engine_has_an_empty_ram_cache():
    table = cached_table()
    ran(table, "s")
    ran(table, "t")
    table.engine_restarted("m/0")
    assert len(table) == 0
    ran(table, "s")
    ran(table, "t")
    assert where(table, "s") == "m/0"


def test_a_session_that_went_elsewhere_keeps_what_lies_in_ram():
    table = cached_table()
    ran(table, "s")
    ran(table, "t")
    table.ran_elsewhere(("s", "m"), "b", 5, 500)
    binding = table.get(("s", "m"))
    assert binding is not None and (binding.node, binding.ram, binding.n_tokens) == ("b", "m/0", 100)
    table.node_gone("b")
    assert where(table, "s") == "m/0"


def test_forgetting_leaves_no_trace_of_a_session():
    table = SessionTable(limit=3)
    table.ram_cache("m/0", 10_000)
    for n in range(20):
        table.taken(SLOT, (str(n), "m"))
        table.ran_here((str(n), "m"), Binding("a", SLOT, 100, n, f"{n:016x}"))
    assert len(table) == 3 and len(table._at_tip) == 3
    assert len(table._ram["m/0"].entries) == 2 and table._ram["m/0"].n_tokens == 200


# -- which slot ------------------------------------------------------------------------------------


def slots(*backends: tuple[str, int]) -> SlotTable:
    table = SlotTable()
    for name, n_slots in backends:
        table.put_backend(name, model="m", url="http://e", n_slots=n_slots, routable=True)
    return table


def best(table: SessionTable, free: SlotTable, now: float = 10.0, **facts) -> SlotRef | None:
    return table.best_slot(free, Ask("r", "m", **facts), now)


def test_an_empty_slot_comes_before_any_session():
    table = SessionTable()
    ran(table, "s")
    assert best(table, slots(("m/0", 2)), session="x") == OTHER


def test_the_title_request_takes_the_small_sessions_slot_although_the_chat_is_idle_longer():
    table = SessionTable()
    ran(table, "chat", SLOT, 20_000, now=0.0)
    ran(table, "small", OTHER, 300, now=9.0)
    assert best(table, slots(("m/0", 2)), session="title") == OTHER


def test_of_equal_sessions_the_one_unused_longest_gives_way():
    table = SessionTable()
    ran(table, "s", SLOT, now=5.0)
    ran(table, "t", OTHER, now=1.0)
    assert best(table, slots(("m/0", 2)), session="x") == OTHER


def test_a_large_session_that_nobody_came_back_to_gives_way_in_the_end():
    table = SessionTable()
    ran(table, "old", SLOT, 20_000, now=0.0)
    ran(table, "new", OTHER, 2_000, now=3600.0)
    assert best(table, slots(("m/0", 2)), now=3600.0, session="x") == SLOT


def test_a_session_that_went_on_at_a_peer_is_missed_less():
    peers = PeerHoldings()
    table = SessionTable(peers=peers)
    ran(table, "s", SLOT, 4000)
    ran(table, "t", OTHER, 3000)
    assert best(table, slots(("m/0", 2)), session="x") == OTHER
    peers.put("b", (Holding("s", "m", "", "", 5000, "slot", 2),))
    assert best(table, slots(("m/0", 2)), session="x") == SLOT


def test_a_session_in_ram_goes_to_a_free_slot_of_that_backend():
    table = cached_table()
    ran(table, "s")
    ran(table, "t")
    two = slots(("m/1", 3), ("m/0", 1))
    assert best(table, two, session="s") == SLOT
    assert best(table, two, session="x") != SLOT
    two.lease(SLOT)
    assert best(table, two, session="s") is not None


def test_a_conversation_is_given_the_slot_that_holds_its_beginning_whosever_it_is():
    table = SessionTable()
    tip = "aa" * 8
    table.ran_here(("parent", "m"), Binding("a", SLOT, 5000, 1, tip))
    found = best(table, slots(("m/0", 2)), session="fork", chain=Chain(("00" * 8, tip, "bb" * 8), (0, 1, 2)))
    assert found == SLOT
    other = best(table, slots(("m/0", 2)), session="fork", chain=Chain(("00" * 8, "bb" * 8), (0, 1)))
    assert other == OTHER


def test_where_the_engine_copies_idle_slots_a_fork_leaves_its_parents_slot_alone():
    table = cached_table(10_000)
    tip = "aa" * 8
    chain = Chain(("00" * 8, tip, "bb" * 8), (0, 1, 2))
    table.ran_here(("parent", "m"), Binding("a", SLOT, 5000, 1, tip))
    two = slots(("m/1", 2), ("m/0", 2))
    assert best(table, two, session="fork", chain=chain) == OTHER
    two.lease(OTHER)
    assert best(table, two, session="fork", chain=chain) == SLOT


def test_a_fork_at_an_older_turn_goes_to_its_parents_backend():
    table = cached_table(10_000)
    table.ran_here(("parent", "m"), Binding("a", SLOT, 5000, 1, "aa" * 8))
    two = slots(("m/1", 3), ("m/0", 2))
    assert best(table, two, session="fork", parent="parent") == OTHER
    assert best(table, two, session="stranger") == SlotRef("m/1", 0)


def test_a_slot_that_is_built_upon_leaves_no_copy_of_what_it_held_in_ram():
    table = cached_table(10_000)
    tip = "aa" * 8
    table.ran_here(("parent", "m"), Binding("a", SLOT, 100, 1, tip))
    table.taken(SLOT, ("fork", "m"), ("00" * 8, tip, "bb" * 8))
    assert where(table, "parent") is None and table._ram["m/0"].n_tokens == 0


def test_a_generation_is_newer_than_what_peers_hold_but_not_than_any_lie():
    peers = PeerHoldings()
    table = SessionTable(peers=peers)
    peers.put("b", (Holding("s", "m", "", "", 1, "slot", 2000),))
    assert table.next_generation(S, wall_ms=1000) == 2001
    peers.put("b", (Holding("s", "m", "", "", 1, "slot", 10**18),))
    assert table.next_generation(S, wall_ms=1000) == 1000


def test_a_conversation_that_builds_upon_anothers_slot_holds_it_from_then_on():
    table = SessionTable()
    held = Binding("a", SLOT, 100, 1, tip="t1")
    table.ran_here(S, held)
    table.taken(SLOT, T, ("t1", "t2"))
    assert table.get(S) is None and table.get(T) == held and table.occupant(SLOT) == T
