"""Which conversation a request belongs to."""

from __future__ import annotations

from hashlib import sha256
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.core.conversations import Conversations, Identity
from viiwork.core.holdings import Holding, PeerHoldings, scope_of
from viiwork.core.turn import Ask, Chain
from viiwork.limits import CONVERSATION_TIPS_MAX

KEY, OTHER = "ab" * 16, "cd" * 16
_numbers = count()


def chain(*words: str, head: str = "tools") -> Chain:
    """One link for the head and one for each message."""
    links, text = [sha256(head.encode()).hexdigest()[:16]], head
    for word in words:
        text += "|" + word
        links.append(sha256(text.encode()).hexdigest()[:16])
    return Chain(tuple(links), tuple(len(head) + 100 * n for n in range(len(links))))


def ask(*words: str, key: str | None = None, head: str = "tools", request: str = "") -> Ask:
    return Ask(request or f"r{next(_numbers)}", "m", session_key=key, chain=chain(*words, head=head))


class Bed:
    """A node's conversations, and what its peers hold."""

    def __init__(self) -> None:
        self.peers = PeerHoldings()
        self.known = Conversations(self.peers)
        self.generation = 100

    def begin(self, one: Ask) -> Identity:
        found = self.known.identify(one)
        assert found is not None
        self.known.began(one, found.session)
        return found

    def end(self, one: Ask, identity: Identity, *, ok: bool = True) -> None:
        if ok:
            self.generation += 1
            self.known.succeeded(one, identity.session, "a", 50, self.generation)
        self.known.ended(one)

    def turn(self, one: Ask) -> Identity:
        found = self.begin(one)
        self.end(one, found)
        return found

    def hear(self, holdings: list[Holding], node: str = "b") -> None:
        self.peers.put(node, tuple(holdings))


def held(one: Ask, session: str, generation: int, n_tokens: int = 70) -> Holding:
    assert one.chain is not None
    scope = scope_of(one.session_key)
    return Holding(session, "m", one.chain.links[-1], scope, n_tokens, "slot", generation, "m/0")


def test_a_request_without_key_or_chain_has_no_conversation():
    assert Conversations(PeerHoldings()).identify(Ask("r", "m")) is None


def test_a_chain_that_grew_continues_its_conversation_with_or_without_a_key():
    for key in (None, KEY):
        bed = Bed()
        first = bed.turn(ask("hi", key=key))
        assert first.kind == "new" and len(first.session) == 32
        second = bed.turn(ask("hi", "hello", "and now", key=key))
        third = bed.turn(ask("hi", "hello", "and now", "so", "good", key=key))
        assert second == Identity(first.session, "continues", 50, "a") == third


def test_the_longest_remembered_tip_wins():
    bed = Bed()
    short = bed.turn(ask("hi"))
    long = bed.turn(ask("hi", "x", "y"))  # the same conversation
    apart = bed.turn(ask("hi", "other", "way"))  # left the first turn
    assert long.session == short.session != apart.session and apart.kind == "fork"
    assert bed.turn(ask("hi", "other", "way", "1", "2")).session == apart.session
    assert bed.turn(ask("hi", "x", "y", "1", "2")).session == long.session


def test_two_agents_that_begin_with_the_same_words_stay_two():
    bed = Bed()
    one = bed.turn(ask("hi"))
    two = bed.turn(ask("hi"))
    assert one.session != two.session
    a = bed.turn(ask("hi", "answer a", "go"))
    b = bed.turn(ask("hi", "answer b", "go"))
    assert {a.session, b.session} == {one.session, two.session}
    assert bed.turn(ask("hi", "answer a", "go", "x", "y")).session == a.session
    assert bed.turn(ask("hi", "answer b", "go", "x", "y")).session == b.session


def test_openings_at_the_same_moment_are_separate_conversations_also_under_one_key():
    for key in (None, KEY):
        bed = Bed()
        one, two = ask("hi", key=key), ask("hi", key=key)
        assert bed.begin(one).session != bed.begin(two).session


def test_a_request_beside_the_running_turn_of_its_conversation_is_another_conversation():
    for key in (None, KEY):
        bed = Bed()
        first = bed.turn(ask("hi", key=key))
        running = bed.begin(ask("hi", "a", "b", key=key))
        beside = bed.begin(ask("hi", "a", "c", key=key))
        assert running.session == first.session != beside.session
        assert beside.kind == "fork" and beside.parent == first.session


def test_one_key_carries_the_chat_and_its_title_request():
    bed = Bed()
    chat, title = ask("build it", key=KEY), ask("build it", key=KEY, head="write a title")
    running, beside = bed.begin(chat), bed.begin(title)
    assert running.session != beside.session and beside.kind == "new"
    bed.end(chat, running)
    bed.end(title, beside)
    assert bed.turn(ask("build it", "ok", "on", key=KEY)).session == running.session
    later = bed.turn(ask("another", key=KEY, head="write a title"))
    assert later.session == beside.session != running.session


def test_without_tools_and_system_prompt_the_title_request_is_not_taken_for_a_compaction():
    bed = Bed()
    chat = bed.turn(ask("build it", key=KEY, head=""))
    title = bed.turn(ask("a title for: build it", key=KEY, head=""))
    assert title.session != chat.session and title.kind == "new"


def test_two_keys_never_share_a_conversation():
    bed = Bed()
    assert bed.turn(ask("hi", key=KEY)).session != bed.turn(ask("hi", key=OTHER)).session
    theirs = bed.turn(ask("hi", "a", "b", key=OTHER))
    assert bed.turn(ask("hi", "a", "b", "c", "d")).kind == "new"
    assert theirs.kind == "continues"


def test_a_prompt_begun_anew_under_a_key_is_a_compaction_of_its_largest_conversation():
    bed = Bed()
    chat = bed.turn(ask("a", "b", "c", "d", "e", key=KEY))
    small = bed.turn(ask("else", key=KEY, head="other tools"))
    compacted = bed.turn(ask("summary", key=KEY))
    assert compacted == Identity(chat.session, "compaction") and small.session != chat.session
    assert bed.turn(ask("summary", "x", "y", key=KEY)) == Identity(chat.session, "continues", 50, "a")


def test_an_edit_under_a_key_stays_in_its_conversation():
    bed = Bed()
    chat = bed.turn(ask("a", key=KEY))
    bed.turn(ask("a", "b", "c", key=KEY))
    bed.turn(ask("a", "b", "c", "d", "e", key=KEY))
    longer = bed.turn(ask("a", "b", "c", "D", "E", "F", "G", key=KEY))
    assert (longer.session, longer.kind, longer.parent) == (chat.session, "fork", chat.session)
    shorter = bed.turn(ask("a", "B", key=KEY))
    assert (shorter.session, shorter.kind) == (chat.session, "compaction")


def test_a_fork_knows_how_much_of_its_parents_state_is_still_right():
    bed = Bed()
    bed.turn(ask("a"))
    bed.turn(ask("a", "b", "c"))  # 50 tokens for 305 bytes
    assert bed.turn(ask("a", "B", "C")).shared_tokens == 50 * 105 // 305
    tip = ask("x", "y", "z")
    bed.hear([held(tip, "77" * 16, 5, n_tokens=70)])
    assert bed.turn(ask("x", "y", "z")).shared_tokens == 70


def test_a_forked_conversation_its_entry_node_names_knows_its_parent_here():
    bed = Bed()
    parent = bed.turn(ask("a"))
    bed.turn(ask("a", "b", "c"))
    one = Ask("1", "m", session="12" * 16, chain=chain("a", "B"), forwarded_by="b")
    found = bed.turn(one)
    assert (found.session, found.kind, found.parent) == ("12" * 16, "new", parent.session)


def test_an_edit_without_a_key_is_a_new_conversation_that_knows_its_parent():
    bed = Bed()
    chat = bed.turn(ask("a"))
    bed.turn(ask("a", "b", "c"))
    edited = bed.turn(ask("a", "b", "C"))
    assert edited.session != chat.session and edited.kind == "fork" and edited.parent == chat.session


def test_a_fork_under_a_key_never_lands_in_a_third_conversation():
    bed = Bed()
    base = bed.turn(ask("a", key=KEY))
    bed.turn(ask("a", "b", "c", key=KEY))
    running = bed.begin(ask("a", "b", "c", "d", "e", key=KEY))
    helper_ask = ask("a", "b", "c", "d", "helper", key=KEY)
    helper = bed.turn(helper_ask)
    busy = bed.begin(ask("a", "b", "c", "d", "helper", "x", "y", key=KEY))
    beside = bed.begin(ask("a", "b", "c", "d", "helper", "x", "z", key=KEY))
    assert running.session == base.session and busy.session == helper.session
    assert len({base.session, helper.session, beside.session}) == 3


def test_the_key_alone_is_the_conversation_of_requests_without_a_chain():
    bed = Bed()
    first = bed.turn(Ask("1", "m", session_key=KEY))
    assert first.kind == "new"
    assert bed.turn(Ask("2", "m", session_key=KEY)) == Identity(first.session, "continues", 50, "a")
    assert bed.turn(Ask("3", "m", session_key=OTHER)).session != first.session
    assert bed.turn(Ask("4", "n", session_key=KEY)).session != first.session


def test_every_try_of_one_request_finds_the_same_conversation():
    bed = Bed()
    one = ask("hi")
    first = bed.begin(one)
    bed.end(one, first, ok=False)  # refused: it is tried elsewhere
    assert bed.begin(one) == first
    bed.end(one, first)
    assert bed.turn(ask("hi", "a", "b")).session == first.session


def test_a_turn_that_failed_leaves_no_tip():
    bed = Bed()
    one = ask("hi")
    failed = bed.begin(one)
    bed.end(one, failed, ok=False)
    assert len(bed.known) == 0
    assert bed.turn(ask("hi", "a", "b")).session != failed.session


def test_a_session_its_entry_node_names_is_taken_over():
    bed = Bed()
    named = "12" * 16
    one = Ask("1", "m", session=named, chain=chain("hi"), forwarded_by="b")
    assert bed.turn(one) == Identity(named, "new")
    assert bed.turn(ask("hi", "a", "b")).session == named


def test_a_conversation_held_by_a_peer_is_recognised_by_its_tip():
    for key in (None, KEY):
        bed = Bed()
        bed.hear([held(ask("hi", "a", "b", key=key), "77" * 16, 5)])
        found = bed.turn(ask("hi", "a", "b", "c", "d", key=key))
        assert found == Identity("77" * 16, "continues", 70, "b")
        other = bed.turn(ask("hi", "a", "b", "x", key=OTHER))
        assert other.session != found.session


def test_a_conversation_that_went_on_through_another_node_has_left_its_old_tip():
    bed = Bed()
    mine = bed.turn(ask("hi"))
    bed.hear([held(ask("hi", "a", "b"), mine.session, bed.generation + 10)])
    other = bed.turn(ask("hi", "x", "y"))  # another agent with the same opening
    assert other.kind == "fork" and other.session != mine.session
    assert bed.turn(ask("hi", "a", "b", "c", "d")).session == mine.session


def test_with_a_key_a_node_that_has_heard_nothing_finds_the_same_session():
    one, two = Bed(), Bed()
    first = one.turn(ask("hi", key=KEY))
    assert two.turn(ask("hi", "a", "b", key=KEY)).session == first.session


def test_the_middle_of_a_conversation_nobody_told_of_is_unknown_until_somebody_does():
    bed = Bed()
    middle = ask("hi", "a", "b")
    assert bed.known.is_unknown(middle) and not bed.known.is_unknown(ask("hi"))
    bed.hear([held(ask("hi"), "77" * 16, 5)])
    assert not bed.known.is_unknown(middle)
    bed.peers.remove("b")
    assert bed.known.is_unknown(middle)
    bed.turn(ask("hi"))
    assert not bed.known.is_unknown(middle)


def test_executors_clocks_decide_which_of_two_turns_is_newer():
    bed = Bed()
    mine = bed.turn(ask("hi"))  # by this node's clock, which is ahead
    tip = held(ask("hi"), mine.session, 3)
    bed.hear([tip])
    bed.known.heard(tip)
    bed.hear([held(ask("hi", "a", "b"), mine.session, 4)])
    assert bed.turn(ask("hi", "x", "y")).kind == "fork"


def test_conversations_are_bounded_and_leave_nothing_behind():
    bed = Bed()
    bed.known = Conversations(bed.peers, limit=3)
    for n in range(10):
        bed.turn(ask(f"word {n}", key=KEY, head=f"head {n}"))
        for _ in range(CONVERSATION_TIPS_MAX + 3):
            bed.turn(ask(f"word {n}", *map(str, range(_)), key=KEY, head=f"head {n}"))
    assert len(bed.known) == 3
    assert len(bed.known._at_tip) <= 3 * CONVERSATION_TIPS_MAX and len(bed.known._with_head) == 3
    assert not bed.known._running and not bed.known._asked


# -- any arrival order -----------------------------------------------------------------------------


class Mesh:
    """Nodes whose conversations tell one another what they hold after each turn."""

    def __init__(self, n_nodes: int) -> None:
        self.beds = [Bed() for _ in range(n_nodes)]
        self.held: dict[str, Holding] = {}
        self.generation = 1000

    def begin(self, entry: int, one: Ask) -> Identity:
        return self.beds[entry].begin(one)

    def end(self, entry: int, one: Ask, identity: Identity) -> None:
        self.generation += 1
        bed = self.beds[entry]
        bed.generation = self.generation - 1
        bed.end(one, identity)
        self.held[identity.session] = held(one, identity.session, self.generation)
        for n, other in enumerate(self.beds):
            if n != entry:
                other.hear(list(self.held.values()), node="executor")


AGENTS = st.lists(
    st.tuples(st.sampled_from(["open", "other", "third"]), st.sampled_from([None, KEY, OTHER])),
    min_size=2,
    max_size=5,
)
STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=30)


@settings(deadline=None, max_examples=150)
@given(AGENTS, STEPS, st.integers(1, 3))
def test_each_of_several_agents_keeps_a_conversation_of_its_own_whatever_node_it_enters_by(
    agents, steps, n_nodes
):
    """Turns of one agent follow one another, those of different agents mix; each agent gets other answers."""
    mesh = Mesh(n_nodes)
    history: dict[int, list[str]] = {}
    session: dict[int, str] = {}
    for who, entry in steps:
        who %= len(agents)
        opening, key = agents[who]
        # Two helpers under one key with the same head are told apart while they run side by side only.
        head = f"tools of {who}" if key else "tools"
        words = history.setdefault(who, [opening])
        one = ask(*words, key=key, head=head)
        found = mesh.begin(entry % n_nodes, one)
        if len(words) > 3:
            assert found.session == session[who] and found.kind == "continues"
        mesh.end(entry % n_nodes, one, found)
        if len(words) > 1:
            session[who] = found.session
        words += [f"answer to {who} number {len(words)}", f"next of {who}"]
    assert len(set(session.values())) == len(session)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(["open", "other"]), min_size=2, max_size=6), st.sampled_from([None, KEY]))
def test_requests_in_flight_together_never_share_a_conversation(openings, key):
    bed = Bed()
    bed.turn(ask("open", key=key))
    running = [bed.begin(ask(opening, "x", key=key)) for opening in openings]
    assert len({identity.session for identity in running}) == len(running)
