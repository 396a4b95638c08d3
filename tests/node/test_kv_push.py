"""When a state is saved, to whom it goes, and who shares it; the engine and the peers do what a test says."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from viiwork.core.replicas import Replica
from viiwork.core.sessions import Binding
from viiwork.core.turn import Ask, Outcome
from viiwork.errors import KvError
from viiwork.limits import KV_FULL_LONG_S, KV_PUSH_TRIES, MIB
from viiwork.node.kv_send import Sender
from viiwork.wire.replica import Mark

from .kv_pushing import KEY, ORDER, Bench, until

FIRST, SECOND = ORDER


@pytest.fixture
async def bench(tmp_path: Path):
    made = Bench(tmp_path)
    yield made
    await made.pusher.stop()
    await made.stash.stop()
    assert made.dispatcher.slots.open_leases == 0
    assert not list(tmp_path.iterdir()), "no save is left"


# -- what is sent ----------------------------------------------------------------------------------
async def test_a_turns_state_goes_to_the_host_that_would_run_the_next_one(bench: Bench):
    generation = await bench.turn()
    await bench.quiet()
    assert bench.sends.to == [(FIRST, generation)]
    assert bench.sends.all[0].why == "turn" and bench.sends.all[0].has_file
    assert bench.sends.all[0].saved.known == ()


async def test_the_offer_names_earlier_saves_and_the_rows_that_are_still_theirs(bench: Bench):
    first = await bench.turn()
    await bench.quiet()
    second = await bench.turn(cached=990, prefilled=400)
    await bench.quiet()
    third = await bench.turn(cached=700, prefilled=900)
    await bench.quiet()
    known = [sending.saved.known for sending in bench.sends.all]
    assert [mark.generation for mark in known[2]] == [first, second] and third > second
    assert known[1] == (Mark(generation=first, source="a", keep=990),)
    assert {mark.keep for mark in known[2]} == {700}


async def test_a_short_or_unshared_turn_is_not_sent(bench: Bench):
    await bench.turn(prefilled=99)
    assert bench.pusher.pushing == 0 and not bench.engine.saved


async def test_nothing_is_saved_when_no_peer_could_use_it(bench: Bench):
    for name in "bc":
        bench.reports(name, kv=None)
    await bench.turn()
    await bench.quiet()
    assert bench.engine.saved == [] and bench.stats.sent.skipped == {"no_peer": 1}


async def test_nothing_is_saved_when_its_peer_holds_it_already(bench: Bench):
    generation = await bench.turn()
    bench.targets.sent(KEY, FIRST, Binding("a", None, 0, generation))
    await bench.quiet()
    assert bench.engine.saved == [] and bench.stats.sent.skipped == {"current": 1}


async def test_a_newer_turn_follows_the_push_of_the_older_one(bench: Bench):
    bench.sends.at_once = False
    older = await bench.turn()
    await until(lambda: bench.sends.all)
    await bench.turn(cached=1000, prefilled=400)
    newest = await bench.turn(cached=1400, prefilled=400)
    bench.sends.all[0].end.set_result("")
    await until(lambda: len(bench.sends.all) == 2)
    bench.sends.all[1].end.set_result("")
    await bench.quiet()
    assert bench.sends.to == [(FIRST, older), (FIRST, newest)]


async def test_a_turn_that_must_stay_stops_a_push_that_is_under_way(bench: Bench):
    bench.sends.at_once = False
    await bench.turn()
    bench.pusher.withhold(KEY)  # before it began
    assert bench.pusher.pushing == 0
    await bench.turn()
    await until(lambda: bench.sends.all)
    bench.pusher.withhold(KEY)
    assert bench.pusher.pushing == 0


# -- to whom ---------------------------------------------------------------------------------------
async def test_a_state_a_peer_does_not_take_goes_to_the_next_one_from_the_same_save(bench: Bench):
    bench.sends.fails[FIRST] = "link_lost"
    generation = await bench.turn()
    await bench.quiet()
    assert bench.sends.to == [(FIRST, generation), (SECOND, generation)] and len(bench.engine.saved) == 1
    again = await bench.turn(prefilled=2000)
    await bench.quiet()
    assert bench.sends.to[2:] == [(SECOND, again)], "the first one rests"


async def test_a_state_no_peer_takes_is_tried_again_and_not_for_ever(bench: Bench, monkeypatch):
    monkeypatch.setattr(bench.targets, "try_again_s", lambda key: 0.0)
    monkeypatch.setattr("viiwork.core.push_targets.KV_PEER_BACKOFF_S", 0.0)
    monkeypatch.setattr("viiwork.core.manners.KV_DEBOUNCE_S", 0.0)
    bench.sends.fails = {FIRST: "link_lost", SECOND: "no_space"}
    await bench.turn()
    await bench.quiet()
    assert len(bench.engine.saved) == 1 + KV_PUSH_TRIES


async def test_a_turn_that_ends_while_its_only_peer_rests_is_sent_later(bench: Bench, monkeypatch):
    bench.reports(SECOND, kv=None)
    bench.sends.fails[FIRST] = "link_lost"
    monkeypatch.setattr("viiwork.node.kv_push.KV_PUSH_TRIES", 0)
    await bench.turn()
    await bench.quiet()
    assert bench.sends.to and bench.targets.in_order(KEY, 1000) == []
    monkeypatch.setattr("viiwork.node.kv_push.KV_PUSH_TRIES", 5)
    bench.sends.fails.clear()
    newest = await bench.turn(cached=1000, prefilled=300)
    await bench.quiet()
    assert bench.sends.to[1:] == [(FIRST, newest)]


async def test_at_its_end_a_node_tries_peers_that_failed_as_well(bench: Bench):
    bench.reports(SECOND, kv=None)
    await bench.turn(prefilled=10)
    bench.targets.failed(FIRST, KvError("link_lost"))
    generation = await bench.turn()
    await bench.pusher.hand_over()
    assert bench.sends.to == [(FIRST, generation)]


async def test_a_state_goes_to_no_address_that_forbids_it(bench: Bench):
    bench.client.key = None
    bench.members = {name: replace(member, addr="192.168.1.9") for name, member in bench.members.items()}
    await bench.turn()
    await bench.quiet()
    assert bench.engine.saved == [] and bench.stats.sent.skipped == {"path_not_allowed": 1}
    with pytest.raises(KvError, match=r"192\.168\.1\.9"):
        await bench.pusher.push_now(KEY, FIRST, "pull")


async def test_states_whose_peers_all_rest_after_a_failure_go_there_when_they_have_rested(
    bench: Bench, monkeypatch
):
    monkeypatch.setattr("viiwork.core.push_targets.KV_PEER_BACKOFF_S", 0.3)
    monkeypatch.setattr("viiwork.core.manners.KV_DEBOUNCE_S", 0.0)
    bench.sends.fails = {FIRST: "link_lost", SECOND: "link_lost"}
    failed = await bench.turn()
    await until(lambda: len(bench.sends.to) == 2)
    bench.sends.fails.clear()
    came_then = await bench.turn("other")
    await bench.quiet()
    assert {generation for _, generation in bench.sends.to[2:]} == {failed, came_then}
    assert bench.stats.sent.skipped["no_peer"] == 0


@pytest.mark.parametrize("reason", ["worker_died", "bad_file", "have_newer", "superseded"])
async def test_what_says_nothing_against_a_peer_does_not_set_it_back(bench: Bench, reason: str):
    bench.sends.fails[FIRST] = reason
    await bench.turn()
    await bench.quiet()
    assert [member.name for member in bench.targets.in_order(KEY, 1000)] == ORDER


async def test_a_peer_that_is_full_for_long_comes_last(bench: Bench, monkeypatch):
    bench.reports(FIRST, busy=2)
    bench.targets.in_order(KEY, 1000)
    later = time.monotonic() + KV_FULL_LONG_S
    monkeypatch.setattr("viiwork.node.kv_targets.time.monotonic", lambda: later)
    assert [member.name for member in bench.targets.in_order(KEY, 1000)] == [SECOND, FIRST]


async def test_a_copy_counts_until_the_peer_says_otherwise_or_goes(bench: Bench):
    bench.targets.sent(KEY, FIRST, Binding("a", None, 0, 7))
    assert bench.targets.holders(KEY, 7) == {FIRST} and not bench.targets.holders(KEY, 8)
    bench.reports(FIRST)  # asked for later, and tells of no such state
    assert not bench.targets.holders(KEY, 7)
    bench.targets.sent(KEY, SECOND, Binding("a", None, 0, 7))
    bench.targets.peer_gone(SECOND)
    assert not bench.targets.holders(KEY, 7)


# -- manners ---------------------------------------------------------------------------------------
async def test_a_slot_that_goes_to_a_waiting_request_is_not_saved_first(bench: Bench):
    running = [await bench.begin("x"), await bench.begin("y")]
    waiting = asyncio.create_task(bench.begin("z"))
    await until(lambda: bench.dispatcher.queue.depth("m") == 1)
    bench.end(running[0])
    z = await waiting
    await until(lambda: bench.stats.sent.skipped == {"not_here": 1})
    assert bench.engine.saved == []
    bench.dispatcher.finish(z, Outcome("client_gone"))
    bench.dispatcher.finish(running[1], Outcome("client_gone"))


async def test_no_save_begins_while_a_request_waits_that_could_run_here(bench: Bench):
    queue, now = bench.dispatcher.queue, time.monotonic()
    elsewhere = queue.enter(Ask("1", "m", pin="b"), now, 3600.0)
    waiter = queue.enter(Ask("2", "m"), now, 3600.0)  # such as one that holds out for a peer a while longer
    await bench.turn()
    await until(lambda: bench.manners.as_json(0.0)["put_off"] == {"queue": 1})
    assert bench.engine.saved == []
    queue.leave(waiter)
    await bench.quiet()
    assert bench.engine.saved and len(bench.sends.all) == 1
    queue.leave(elsewhere)


async def test_a_save_that_has_not_begun_gives_way_to_a_turn_of_its_own_session(bench: Bench):
    bench.engine.busy = {0, 1}  # the engine has not let go of the slot yet
    await bench.turn()
    await until(lambda: bench.dispatcher.slots.open_leases == 1)
    grant = await asyncio.wait_for(bench.begin("s"), 10)
    assert bench.engine.saved == [] and bench.manners.as_json(0.0)["put_off"] == {"queue": 1}
    bench.engine.busy = set()
    bench.end(grant)
    await bench.quiet()
    assert len(bench.sends.all) == 1


async def test_a_turn_that_comes_while_its_slot_is_saved_waits_for_that_and_no_longer(bench: Bench):
    bench.engine.may_save.clear()
    await bench.turn()
    await bench.engine.asked.wait()
    waiting = asyncio.create_task(bench.begin("s"))
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.engine.may_save.set()
    grant = await asyncio.wait_for(waiting, 10)
    assert grant.slot == bench.engine.saved[0]
    bench.dispatcher.finish(grant, Outcome("client_gone"))
    await bench.quiet()


async def test_quick_turns_are_saved_together_and_a_long_one_at_once(bench: Bench):
    await bench.turn()
    await bench.quiet()
    await bench.turn(cached=1000, prefilled=20)
    await until(lambda: bench.manners.as_json(0.0)["put_off"] == {"debounce": 1})
    newest = await bench.turn(cached=1020, prefilled=20)
    assert len(bench.engine.saved) == 1
    await bench.quiet()
    assert bench.sends.to[1:] == [(FIRST, newest)]
    await bench.turn(cached=1040, prefilled=300)
    await bench.quiet()
    assert len(bench.engine.saved) == 3 and bench.manners.as_json(0.0)["put_off"] == {"debounce": 1}


async def test_an_engine_that_was_stopped_too_long_is_left_alone_until_somebody_needs_the_state(bench: Bench):
    bench.manners.restored("m/0", 1000.0, time.monotonic())
    generation = await bench.turn()
    await until(lambda: bench.manners.as_json(0.0)["put_off"] == {"budget": 1})
    assert bench.engine.saved == [] and bench.pusher.pushing == 1
    done = await bench.pusher.push_now(KEY, SECOND, "pull")
    assert (done.node, done.generation) == (SECOND, generation)  # type: ignore[attr-defined]
    await bench.quiet()
    assert sorted(bench.sends.to) == sorted([(FIRST, generation), (SECOND, generation)])
    assert len(bench.engine.saved) == 1


@pytest.mark.parametrize(
    "mib, mbit_per_s, is_slow",
    [(150, 1000, True), (150, 3200, False), (2, 1000, False), (2, 15, True)],
)
def test_a_link_is_slow_for_a_recurrent_part_by_the_time_that_takes(mib, mbit_per_s, is_slow):
    paths: Any = SimpleNamespace(bytes_per_s=lambda member: mbit_per_s * 125_000)
    nothing: Any = None
    sender = Sender(nothing, nothing, nothing, paths, nothing)
    assert sender.is_slow(nothing, mib * MIB) == is_slow


async def test_a_recurrent_state_goes_over_a_slow_link_when_the_session_rests(bench: Bench):
    bench.layout.shape.recurrent = SimpleNamespace(n_bytes=1)
    await bench.turn()
    await bench.quiet()
    assert len(bench.sends.all) == 1 and not bench.manners.as_json(0.0)["put_off"]
    bench.sends.slow = {FIRST}
    await bench.turn(cached=1000, prefilled=400)
    await until(lambda: bench.manners.as_json(0.0)["put_off"] == {"rest": 1})
    newest = await bench.turn(cached=1400, prefilled=400)
    assert len(bench.engine.saved) == 1
    await bench.quiet()
    assert bench.sends.to[1:] == [(FIRST, newest)]


async def test_saves_do_not_queue_up_before_a_restore(bench: Bench):
    bench.engine.may_save.clear()
    await bench.turn()
    await bench.engine.asked.wait()
    other = await bench.turn("t")
    await until(lambda: bench.manners.as_json(0.0)["put_off"] == {"gate": 1})
    restoring = asyncio.create_task(bench.gates.of("m/0").acquire())
    await asyncio.sleep(0)
    bench.engine.may_save.set()
    assert await asyncio.wait_for(restoring, 10) and len(bench.engine.saved) == 1
    bench.gates.of("m/0").release()
    await bench.quiet()
    assert len(bench.engine.saved) == 2 and other in [generation for _, generation in bench.sends.to]


async def test_a_save_that_fails_is_counted_and_leaves_nothing(bench: Bench):
    async def refuses(slot: int, filename: str, timeout_s: float) -> None:
        (bench.engine.folder / filename).write_bytes(b"part")
        raise KvError("save_timeout")

    bench.engine.save = refuses  # type: ignore[method-assign,assignment]
    await bench.turn()
    await bench.quiet()
    assert bench.sends.failed == ["save_timeout"] and bench.sends.all == []


# -- those who ask ---------------------------------------------------------------------------------
async def test_who_asks_for_a_state_that_is_on_its_way_shares_the_transfer(bench: Bench):
    bench.sends.at_once = False
    generation = await bench.turn()
    await until(lambda: bench.sends.all)
    asking = [asyncio.create_task(bench.pusher.push_now(KEY, node, "pull")) for node in (FIRST, SECOND)]
    await until(lambda: len(bench.sends.all) == 2)
    for sending in bench.sends.all:
        sending.end.set_result("")
    found = await asyncio.gather(*asking)
    assert [done.node for done in found] == [FIRST, SECOND]  # type: ignore[attr-defined]
    await bench.quiet()
    assert bench.sends.to == [(FIRST, generation), (SECOND, generation)] and len(bench.engine.saved) == 1


async def test_who_asks_while_an_older_state_is_on_its_way_gets_the_newest(bench: Bench):
    bench.sends.at_once = False
    await bench.turn()
    await until(lambda: bench.sends.all)
    newest = await bench.turn(cached=1000, prefilled=10)
    asking = asyncio.create_task(bench.pusher.push_now(KEY, SECOND, "pull"))
    await until(lambda: len(bench.sends.all) == 3)
    bench.sends.at_once = True
    for sending in bench.sends.all:
        sending.end.set_result("")
    assert (await asking).generation == newest  # type: ignore[attr-defined]
    await bench.quiet()
    assert (FIRST, newest) in bench.sends.to, "and so does the peer the older one goes to"


async def test_who_asks_for_what_is_not_here_or_is_nobody_is_told(bench: Bench):
    for node, reason in ((FIRST, "not_here"), ("nobody", "no_peer")):
        with pytest.raises(KvError) as caught:
            await bench.pusher.push_now(KEY, node, "pull")
        assert caught.value.reason == reason
    grant = await bench.begin()
    bench.end(grant)
    running = await bench.begin()
    with pytest.raises(KvError) as caught:
        await bench.pusher.push_now(KEY, FIRST, "pull")
    assert caught.value.reason == "slot_busy"
    bench.dispatcher.finish(running, Outcome("client_gone"))


async def test_a_state_that_must_stay_is_given_to_nobody(bench: Bench):
    await bench.turn()
    bench.pusher.withhold(KEY)
    state = next(bench.states.newest_first())
    bench.states.ran(KEY, state.binding, 0, shared=False)
    with pytest.raises(KvError, match="may leave"):
        await bench.pusher.push_now(KEY, FIRST, "pull")
    await bench.pusher.hand_over()
    assert bench.engine.saved == []


async def test_a_failed_transfer_is_told_to_who_asked_and_does_not_end_the_others(bench: Bench):
    bench.sends.fails[SECOND] = "no_space"
    generation = await bench.turn()
    with pytest.raises(KvError, match="no_space"):
        await bench.pusher.push_now(KEY, SECOND, "pull")
    await bench.quiet()
    assert (FIRST, generation) in bench.sends.to


# -- handing over ----------------------------------------------------------------------------------
async def test_what_no_peer_holds_is_handed_over_the_newest_first(bench: Bench):
    await bench.turn("held")
    await bench.quiet()
    bench.manners.restored("m/0", 1000.0, time.monotonic())
    other = await bench.turn()
    await until(lambda: bench.manners.as_json(0.0)["put_off"] == {"budget": 1})
    await bench.pusher.hand_over()
    assert bench.sends.to[1:] == [(FIRST, other)] and len(bench.engine.saved) == 2
    await bench.pusher.hand_over()
    assert len(bench.engine.saved) == 2, "all of it is held now"
    last = await bench.turn(cached=1000, prefilled=1)  # of a request that still ran
    await bench.pusher.hand_over()
    assert bench.sends.to[2:] == [(FIRST, last)]


async def test_a_backend_that_drains_can_still_be_saved(bench: Bench):
    bench.manners.restored("m/0", 1000.0, time.monotonic())
    await bench.turn()
    bench.dispatcher.slots.put_backend("m/0", model="m", url="http://e", n_slots=2, routable=False)
    waiting = asyncio.create_task(bench.begin("z"))
    await until(lambda: bench.dispatcher.queue.depth("m") == 1)
    await bench.pusher.hand_over("m/1")
    assert bench.sends.all == []
    await bench.pusher.hand_over("m/0")
    assert len(bench.sends.all) == 1, "whoever waits for the model cannot run there"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


# -- the last copy ---------------------------------------------------------------------------------
async def lone_states(bench: Bench) -> None:
    """Both slots hold a session that is nowhere else."""
    for name in "bc":
        bench.reports(name, kv=None)
    for session in ("s", "t"):
        await bench.turn(session, prefilled=3000)
    await bench.quiet()
    assert bench.engine.saved == []


async def test_a_last_copy_is_kept_here_before_another_session_takes_its_slot(bench: Bench):
    await lone_states(bench)
    grant = await bench.begin("u")
    await bench.stash.before(grant)
    await until(lambda: bench.stats.keeps.done == 1)
    (file,) = bench.worker.files
    (replica,) = list(bench.dispatcher.book.replicas)
    assert replica.source == "a" and replica.key[0] in "st" and file.generation == replica.generation
    assert bench.engine.saved == [grant.slot]
    bench.dispatcher.finish(grant, Outcome("client_gone"))


@pytest.mark.parametrize("why", ["held by a peer", "in the engine's RAM", "not lasting", "to stay", "kept"])
async def test_nothing_is_kept_of_what_is_not_lost_or_not_to_be_kept(bench: Bench, why: str):
    bench.dispatcher.sessions.ram_cache("m/0", 10**6 if why == "in the engine's RAM" else 0)
    await lone_states(bench)
    for state in list(bench.states.newest_first()):
        key, binding = state.key, state.binding
        if why == "held by a peer":
            bench.targets.sent(key, FIRST, binding)
        if why == "kept":
            bench.dispatcher.book.replicas.put(Replica(key[0], key, 3000, 5, binding.generation, "a"))
        bench.states.ran(key, binding, 0, shared=why != "to stay", lasting=why != "not lasting")
    grant = await bench.begin("u")
    await bench.stash.before(grant)
    assert bench.engine.saved == []
    bench.dispatcher.finish(grant, Outcome("client_gone"))


async def test_a_turn_of_the_same_session_takes_nothing_away(bench: Bench):
    await lone_states(bench)
    grant = await bench.begin("s")
    await bench.stash.before(grant)
    assert bench.engine.saved == []
    bench.dispatcher.finish(grant, Outcome("client_gone"))


async def test_a_turn_never_waits_for_a_stash_that_costs_more_than_it_saves(bench: Bench):
    await lone_states(bench)
    bench.manners.saved("m/0", 1000, 1.0, -1e9)  # 3 s for what takes 1.5 s to read
    grant = await bench.begin("u")
    await bench.stash.before(grant)
    assert bench.engine.saved == []
    bench.dispatcher.finish(grant, Outcome("client_gone"))


async def test_a_stash_that_does_not_end_in_time_is_given_up(bench: Bench, monkeypatch):
    monkeypatch.setattr(bench.stash, "_bound_s", lambda *args: 0.05)
    await lone_states(bench)
    bench.engine.may_save.clear()
    grant = await bench.begin("u")
    await bench.stash.before(grant)
    assert bench.stats.keeps.failed == {"too_slow": 1} and not bench.worker.files
    bench.dispatcher.finish(grant, Outcome("client_gone"))
