"""Conversations, placements and holdings as the dispatcher uses them, and what the status says of them."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from viiwork.config.model import RoutingSection, Seconds
from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.holdings import Holding
from viiwork.core.replicas import Replica
from viiwork.core.turn import Ask, Chain, Grant, Held, Outcome, Usage
from viiwork.limits import HOLDINGS_MAX
from viiwork.node.dispatch import Dispatcher

KEY = "ab" * 16


def links(*words: str) -> Chain:
    made, text = [], ""
    for word in ("head", *words):
        text += "|" + word
        made.append(sha256(text.encode()).hexdigest()[:16])
    return Chain(tuple(made), tuple(range(400, 400 + len(made))))


class Node:
    """A dispatcher with one backend and whatever peers the test gives it."""

    def __init__(self, slots: int = 2, name: str = "a") -> None:
        self.now = 100.0
        self.n_asked = 0
        self.n = 0
        self.d = Dispatcher(
            name,
            RoutingSection(queue_timeout=Seconds(5)),
            prepare=self.prepare,
            on_end=lambda *args: None,
            ask_peers=self.ask_peers,
            clock=lambda: self.now,
            wall_ms=lambda: int(self.now * 1000),
        )
        self.heard: tuple[Holding, ...] = ()
        if slots:
            self.d.slots.put_backend("m/0", model="m", url="http://e", n_slots=slots, routable=True)

    async def prepare(self, grant: Grant) -> None:
        pass

    async def ask_peers(self) -> None:
        self.n_asked += 1
        self.d.book.reported("b", self.heard, self.now)

    def peer(self, name: str, free: int = 4) -> None:
        self.d.peers.put(name, f"http://{name}")
        entry = ModelCapacity("m", slots=free, backends=1, healthy_backends=1)
        self.d.peers.reported(name, PeerReport(CapacityReport(name, "1", (entry,)), self.now, self.now))

    def ask(self, *words: str, key: str | None = None, **facts) -> Ask:
        self.n += 1
        self.now += 0.01
        return Ask(f"r{self.n}", "m", session_key=key, chain=links(*words) if words else None, **facts)

    async def turn(self, ask: Ask, cached: int = 0, prefilled: int = 100) -> Grant:
        grant = await self.d.acquire(ask)
        self.now += 1
        self.d.finish(grant, Outcome("done", 200, usage=Usage(cached, prefilled, 1)))
        return grant

    @property
    def sessions(self) -> dict:
        return self.d.book.status()


async def test_agents_without_a_header_keep_their_slot():
    node = Node()
    one = await node.turn(node.ask("a"))
    two = await node.turn(node.ask("b"))
    assert one.slot != two.slot
    for words in (("a", "1", "2"), ("a", "1", "2", "3", "4")):
        assert (await node.turn(node.ask(*words))).slot == one.slot
    assert (await node.turn(node.ask("b", "1", "2"))).slot == two.slot


async def test_parallel_turns_under_one_key_both_run_and_the_chat_keeps_its_slot():
    node = Node(slots=3)
    chat = await node.turn(node.ask("build", key=KEY), prefilled=5000)
    chat_ask, title_ask = node.ask("build", "1", "2", key=KEY), node.ask("title of build", key=KEY)
    running, title = await node.d.acquire(chat_ask), await node.d.acquire(title_ask)
    assert running.slot == chat.slot != title.slot
    assert running.ask.session == chat.ask.session != title.ask.session
    node.d.finish(title, Outcome("done", 200, usage=Usage(0, 40, 1)))
    node.d.finish(running, Outcome("done", 200, usage=Usage(5000, 50, 1)))
    again = await node.turn(node.ask("build", "1", "2", "3", "4", key=KEY), cached=5050)
    assert again.slot == chat.slot and node.sessions["hits"] == 2


async def test_hits_count_turns_that_reused_most_of_their_context_and_compactions_are_kept_out():
    node = Node()
    await node.turn(node.ask("a", key=KEY), prefilled=1000)
    await node.turn(node.ask("a", "1", "2", key=KEY), cached=1000, prefilled=100)
    await node.turn(node.ask("a", "1", "2", "3", "4", key=KEY), cached=800, prefilled=400)
    await node.turn(node.ask("summary", key=KEY), cached=10, prefilled=200)
    assert node.sessions == {
        "open": 1,
        "turns": 4,
        "new": 1,
        "continued": 2,
        "compactions": 1,
        "forks": 0,
        "judged": 2,
        "hits": 1,
        "hit_rate": 0.5,
        "moves": {"nodes": 0, "backends": 0, "slots": 0},
    }


async def test_a_turn_whose_counts_are_not_told_is_neither_hit_nor_miss():
    node = Node()
    await node.turn(node.ask("a"))
    grant = await node.d.acquire(node.ask("a", "1", "2"))
    node.d.finish(grant, Outcome("done", 200))
    assert node.sessions["continued"] == 1 and node.sessions["judged"] == 0
    assert node.sessions["hit_rate"] is None


async def test_a_failed_turn_and_one_that_never_ran_change_no_count_and_leave_nothing_running():
    node = Node(slots=1)
    held = await node.d.acquire(node.ask("a"))
    waiter = asyncio.create_task(node.d.acquire(node.ask("b")))
    while not node.d.queue.depth("m"):
        await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait((waiter,))
    node.d.finish(held, Outcome("broken", 200))
    assert node.sessions["turns"] == 0 and len(node.d.book.conversations) == 0
    assert not node.d.book.conversations._running


async def test_moves_between_slots_and_backends_count_where_the_turn_runs():
    node = Node(slots=1)
    node.d.slots.put_backend("m/1", model="m", url="http://f", n_slots=2, routable=True)
    first = await node.turn(node.ask("a"))
    assert first.backend == "m/1"
    assert first.slot is not None
    lease = node.d.slots.lease(next(iter(r for r in node.d.slots.free_slots("m") if r.slot == first.slot)))
    second = await node.turn(node.ask("a", "1", "2"))
    assert second.backend == "m/1" and second.slot != first.slot and node.sessions["moves"]["slots"] == 1
    node.d.slots.put_backend("m/1", model="m", url="http://f", n_slots=2, routable=False)
    third = await node.turn(node.ask("a", "1", "2", "3", "4"))
    assert third.backend == "m/0"
    assert node.sessions["moves"] == {"nodes": 0, "backends": 1, "slots": 1}
    node.d.slots.release(lease)


async def test_a_move_between_nodes_counts_once_at_the_entry_node():
    node = Node(slots=1)
    node.peer("b")
    await node.turn(node.ask("a"))
    blocker = await node.d.acquire(node.ask("other"))
    away = await node.turn(node.ask("a", "1", "2"))
    assert away.node == "b" and node.sessions["moves"]["nodes"] == 1
    node.d.finish(blocker, Outcome("done", 200))
    node.peer("b")
    stays = await node.turn(node.ask("a", "1", "2", "3", "4"))
    assert stays.node == "b" and node.sessions["moves"]["nodes"] == 1

    executor = Node(slots=1, name="b")
    forward = executor.ask("a", "1", "2", session=away.ask.session, forwarded_by="a")
    await executor.turn(forward)
    assert executor.sessions["turns"] == 0 and executor.sessions["moves"]["nodes"] == 0


async def test_a_turn_returns_to_the_peer_that_ran_the_last_one_before_it_has_reported():
    node = Node(slots=1)
    node.peer("b")
    blocker = await node.d.acquire(node.ask("other"))
    away = await node.turn(node.ask("a"), prefilled=900)
    assert away.node == "b"
    node.d.finish(blocker, Outcome("done", 200))
    ask = node.d.book.identified(node.ask("a", "1", "2"))
    assert node.d.book.held(ask) == {"b": Held(900, "slot")}
    node.d.book.reported("b", (), node.now - 10)  # asked for before the turn ended
    assert node.d.book.held(ask) == {"b": Held(900, "slot")}
    node.d.book.reported("b", (), node.now)
    assert node.d.book.held(ask) == {}


async def test_any_node_finds_the_home_of_a_conversation_from_what_that_tells():
    home, entry = Node(name="b"), Node(name="a")
    session = "12" * 16
    await home.turn(home.ask("a", session=session, forwarded_by="c"), prefilled=700)
    rev, holdings = home.d.book.holdings()
    assert [(h.session, h.n_tokens, h.where) for h in holdings] == [(session, 700, "slot")]
    entry.peer("b")
    entry.d.book.reported("b", holdings, entry.now)
    grant = await entry.turn(entry.ask("a", "1", "2"), cached=700)
    assert (grant.node, grant.ask.session) == ("b", session)
    assert entry.sessions["hits"] == 1 and entry.sessions["moves"]["nodes"] == 0
    assert home.d.book.holdings() == (rev, holdings)


async def test_the_middle_of_an_unknown_conversation_makes_the_node_ask_its_peers_first():
    node = Node()
    node.peer("b")
    tip = links("a", "1", "2").links[-1]
    node.heard = (Holding("12" * 16, "m", tip, "", 700, "slot", 5, "m/0"),)
    await node.turn(node.ask("x"))
    assert node.n_asked == 0
    grant = await node.turn(node.ask("a", "1", "2", "3", "4"))
    assert node.n_asked == 1 and grant.node == "b" and grant.ask.session == "12" * 16
    await node.turn(node.ask("a", "1", "2", "3", "4", "5", "6"))
    assert node.n_asked == 1


async def test_an_edit_without_a_key_goes_to_its_parents_node():
    home, entry = Node(name="b"), Node(name="a")
    parent = "12" * 16
    await home.turn(home.ask("a", session=parent, forwarded_by="c"), prefilled=700)
    await home.turn(home.ask("a", "1", "2", session=parent, forwarded_by="c"), cached=700)
    entry.peer("b")
    await entry.turn(entry.ask("a"), prefilled=700)  # it saw the first turn of a like conversation
    entry.d.book.reported("b", home.d.book.holdings()[1], entry.now)
    edited = entry.d.book.identified(entry.ask("a", "1", "2", "3", "4"))
    assert edited.session == parent
    fork_ask = entry.ask("a", "1", "2")  # all of it is known, so another agent may have said the same
    fork = entry.d.book.identified(fork_ask)
    assert fork.session != parent and fork.parent == parent
    assert entry.d.book.held(fork)["b"].n_tokens == 800
    at_home = home.d.book.identified(home.ask("a", "1x", session="34" * 16, forwarded_by="a"))
    assert at_home.parent == parent and 0 < home.d.book.held(at_home)["b"].n_tokens < 800


async def test_a_replica_of_a_peers_conversation_counts_as_held_here():
    node = Node()
    session, tip = "12" * 16, links("a").links[-1]
    node.d.book.replicas.put(Replica("r", (session, "m"), 640, 1, 50, "b", tip))
    rev, holdings = node.d.book.holdings()
    assert holdings == (Holding(session, "m", tip, "", 640, "replica", 50),)
    other = Node(name="c", slots=0)
    other.peer("a")
    other.d.book.reported("a", holdings, other.now)
    ask = other.d.book.identified(other.ask("a", "1", "2"))
    assert ask.session == session and other.d.book.held(ask) == {"a": Held(640, "replica")}
    forward = node.d.book.identified(node.ask("a", "1", "2", session=session, forwarded_by="c"))
    assert node.d.book.held(forward) == {"a": Held(640, "replica")}
    node.d.book.replicas.clear()
    assert node.d.book.holdings()[0] > rev and node.d.book.held(forward) == {}


async def test_only_a_conversation_that_came_back_or_has_a_key_is_expected_again():
    node = Node()
    once = await node.turn(node.ask("a"))
    assert not node.d.book.is_lasting(once.ask)
    twice = await node.turn(node.ask("a", "1", "2"))
    assert node.d.book.is_lasting(twice.ask)
    keyed = await node.turn(node.ask("k", key=KEY))
    assert node.d.book.is_lasting(keyed.ask)


async def test_a_conversation_that_a_peer_holds_is_expected_again_when_it_moves_here():
    node, session, tip = Node(), "12" * 16, links("a").links[-1]
    node.peer("b")
    node.d.book.reported("b", (Holding(session, "m", tip, "", 640, "slot", 50, "m/0"),), node.now)
    moved = await node.turn(node.ask("a", "1", "2", session=session, forwarded_by="b"))
    assert node.d.book.is_lasting(moved.ask)


async def test_the_newest_holdings_are_told_and_no_more_than_the_limit():
    node = Node(slots=1)
    node.d.sessions.ram_cache("m/0", 10**9)
    for n in range(HOLDINGS_MAX + 20):
        await node.turn(node.ask(f"word {n}"))
    _, holdings = node.d.book.holdings()
    assert len(holdings) == HOLDINGS_MAX
    assert [h.generation for h in holdings] == sorted((h.generation for h in holdings), reverse=True)
    assert holdings[0].where == "slot" and {h.where for h in holdings[1:]} == {"ram"}


async def test_a_peer_that_left_holds_nothing():
    node = Node()
    node.d.book.reported("b", (Holding("12" * 16, "m", links("a").links[-1], "", 700, "slot", 5),), 1.0)
    node.d.book.node_gone("b")
    assert node.d.book.held(node.ask("a", "1", "2", session="12" * 16)) == {}


async def test_with_one_slot_at_home_the_title_request_runs_elsewhere_at_once_and_the_chat_comes_back():
    node = Node(slots=1)
    await node.turn(node.ask("build", key=KEY), prefilled=5000)
    node.peer("b")
    running = await node.d.acquire(node.ask("build", "1", "2", key=KEY))
    title = await node.d.acquire(node.ask("title of build", key=KEY))
    assert (running.node, title.node) == ("a", "b")
    node.d.finish(title, Outcome("done", 200, usage=Usage(0, 40, 1)))
    node.d.finish(running, Outcome("done", 200, usage=Usage(5000, 50, 1)))
    again = await node.turn(node.ask("build", "1", "2", "3", "4", key=KEY), cached=5050)
    assert again.node == "a" and node.sessions["moves"]["nodes"] == 0


async def test_one_key_on_two_models_is_two_conversations_at_once():
    node = Node(slots=1)
    node.d.slots.put_backend("n/0", model="n", url="http://f", n_slots=1, routable=True)
    one = node.ask("build", key=KEY)
    two = Ask("other", "n", session_key=KEY, chain=one.chain)
    first, second = await node.d.acquire(one), await node.d.acquire(two)
    assert (first.backend, second.backend) == ("m/0", "n/0")
    assert first.ask.session != second.ask.session
    node.d.finish(first, Outcome("done", 200))
    node.d.finish(second, Outcome("done", 200))
