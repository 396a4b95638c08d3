"""The supervisor against engines that are broken in all the ways engines are."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from viiwork.config.model import LlamacppSection, ModelSection
from viiwork.engine.backend import Pace
from viiwork.engine.ladder import Rules
from viiwork.engine.ports import PortPicker

from .conftest import PATIENCE_S, Watch, gone, is_alive, kill_if_alive, written_pid

Build = Callable[..., ModelSection]
QUICK = Rules(backoff_first_s=0.05, dead_retry_first_s=600.0, stop_grace_s=0.5)


async def test_backend_loads_warms_each_slot_and_is_healthy(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model(parallel=3))
    view = await watched.until_healthy()
    assert (view.id, view.epoch, view.n_slots, view.ctx, view.busy) == ("fake/0", 1, 3, 256, 0)
    assert [v.phase for v in watched.seen if v.status == "starting"] == ["loading", "loading", "warming up"]
    async with aiohttp.ClientSession() as session, session.get(f"{view.url}/slots") as response:
        assert [slot.get("n_prompt_tokens") for slot in await response.json()] == [1, 1, 1]


async def test_engine_gets_exactly_the_environment_it_should(
    watch: Watch, fake_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_MESH", "s3cret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    watched = await watch(fake_model(env={"OWN": "1"}))
    view = await watched.until_healthy()
    env = Path(f"/proc/{view.pid}/environ").read_bytes().decode().split("\0")
    names = {entry.partition("=")[0] for entry in env}
    assert "OWN" in names and "MALLOC_ARENA_MAX" in names
    assert not names & {"SECRET_OF_THE_MESH", "CUDA_VISIBLE_DEVICES"}


async def test_slots_are_as_many_as_the_engine_says(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model(parallel=1, slots=4))
    assert (await watched.until_healthy()).n_slots == 4


async def test_save_folder_is_private_and_empty_at_each_start(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    watched = await watch(fake_model(name="org/model: v2"))
    view = await watched.until_healthy()
    assert view.save_dir.parent == tmp_path / "save" and view.save_dir.stat().st_mode & 0o777 == 0o700
    (view.save_dir / "old.bin").write_bytes(b"x")
    os.kill(view.pid, signal.SIGKILL)
    again = await watched.until_healthy(epoch=2)
    assert again.save_dir == view.save_dir and not list(view.save_dir.iterdir())


async def test_engine_that_loads_slowly_is_waited_for(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model(loading_s=0.5))
    view = await watched.until_healthy()
    assert (view.epoch, view.respawns) == (1, 0)


async def test_engine_that_loads_for_ever_is_ended_by_the_startup_timeout(
    watch: Watch, fake_model: Build
) -> None:
    model = fake_model(loading_s=-1)
    watched = await watch(
        ModelSection(**{f: getattr(model, f) for f in model.__struct_fields__} | {"startup_timeout": 1.0}),
        rules=Rules(max_respawns=0, stop_grace_s=0.5),
    )
    view = await watched.until(lambda view: view.status == "dead")
    assert view.reason == "not ready within 1 s"


async def test_engine_that_exits_at_once_gets_one_free_retry_and_spaced_respawns(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    watched = await watch(
        fake_model(exit=1, say="ggml: out of memory error", starts=str(starts)), rules=QUICK
    )
    view = await watched.until(lambda view: view.status == "dead")
    assert view.reason == "exited with code 1: ggml: out of memory error"
    assert view.last_lines[-1] == "ggml: out of memory error"
    assert view.respawns == 3
    assert len(starts.read_text().split()) == 2 * (1 + 3)


async def test_crash_loop_that_ends_is_served_again_by_itself(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    rules = Rules(max_respawns=1, backoff_first_s=0.05, dead_retry_first_s=0.1)
    watched = await watch(fake_model(exit=1, only_first=5, starts=str(tmp_path / "starts")), rules=rules)
    await watched.until(lambda view: view.status == "dead")
    view = await watched.until_healthy()
    assert view.epoch == 6


async def test_usage_error_is_not_retried(watch: Watch, fake_model: Build, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    watched = await watch(fake_model(exit=1, say="error: invalid argument: --bogus", starts=str(starts)))
    view = await watched.until(lambda view: view.status == "dead")
    assert view.reason == "error: invalid argument: --bogus"
    assert len(starts.read_text().split()) == 1


async def test_missing_model_file_is_dead_at_once_with_the_reason(watch: Watch, fake_model: Build) -> None:
    model = fake_model()
    Path(model.path).unlink()
    watched = await watch(model)
    view = await watched.until(lambda view: view.status == "dead")
    assert view.reason == f"model fake: no file {model.path}" and view.epoch == 1


async def test_dead_backend_lets_the_next_one_load(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model("broken", exit=2), fake_model("fine"))
    await watched.until(lambda view: view.id == "fine/0" and view.status == "healthy")


async def test_backends_load_one_at_a_time_in_order(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model("a", loading_s=0.3), fake_model("b"))
    await watched.until(lambda view: view.id == "b/0" and view.status == "healthy")
    seen = [(view.id, view.phase or view.status) for view in watched.seen]
    assert seen.index(("a/0", "healthy")) < seen.index(("b/0", "loading"))


async def test_web_server_on_the_port_is_never_taken_for_the_engine(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    watched = await watch(fake_model(foreign=str(stranger), only_first=1, starts=str(tmp_path / "starts")))
    try:
        view = await watched.until_healthy()
        assert (view.epoch, view.respawns) == (2, 0)
        assert any(f"process {stranger.read_text()}" in seen.reason for seen in watched.seen)
        assert is_alive(int(stranger.read_text())), "a stranger is not ours to kill"
    finally:
        kill_if_alive(await written_pid(stranger))


@pytest.mark.parametrize(
    "faults",
    [{"flood_mib": 10}, {"long_line": 5_000_000}, {"odd_bytes": True}, {"close_out": True}],
    ids=["ten MiB of lines", "five MB without a newline", "odd bytes", "closed output"],
)
async def test_engine_that_logs_badly_serves_all_the_same(
    watch: Watch, fake_model: Build, faults: dict[str, object]
) -> None:
    watched = await watch(fake_model(**faults))
    view = await watched.until_healthy()
    assert all(len(line) < 10_000 and line.isprintable() for line in view.last_lines)
    if "odd_bytes" in faults:
        assert view.last_lines == ("\\xff\\xfe nul \\x00 red \\x1b[31m half \\xe2\\x82",)


async def test_killed_engine_comes_back_as_a_new_epoch(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model())
    view = await watched.until_healthy()
    os.kill(view.pid, signal.SIGKILL)
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "killed by signal 9" and respawn.url is None and respawn.busy is None
    again = await watched.until_healthy(epoch=2)
    assert again.pid != view.pid and again.respawns == 1


async def test_rest_of_a_crashed_engine_is_killed_with_it(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    watched = await watch(fake_model(child=str(tmp_path / "child")))
    view = await watched.until_healthy()
    child = await written_pid(tmp_path / "child")
    os.kill(view.pid, signal.SIGKILL)
    await gone(child)


async def test_stopped_process_leaves_routing_at_the_first_failed_probe_and_is_replaced(
    watch: Watch, fake_model: Build
) -> None:
    pace = Pace(starting_probe_s=0.05, probe_s=0.05, probe_timeout_s=0.3, load_poll_s=0.1, load_timeout_s=0.1)
    watched = await watch(fake_model(), pace=pace)
    view = await watched.until_healthy()
    os.kill(view.pid, signal.SIGSTOP)
    await watched.until(lambda view: view.status == "unhealthy")
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "3 probes failed: /health: no answer within 0.3 s"
    await watched.until_healthy(epoch=2)


async def test_stopped_process_that_goes_on_is_healthy_again(watch: Watch, fake_model: Build) -> None:
    pace = Pace(starting_probe_s=0.05, probe_s=0.05, probe_timeout_s=0.3, load_poll_s=0.1, load_timeout_s=0.1)
    watched = await watch(fake_model(), pace=pace, rules=Rules(max_failures=1000))
    view = await watched.until_healthy()
    os.kill(view.pid, signal.SIGSTOP)
    await watched.until(lambda view: view.status == "unhealthy")
    told = len(watched.seen)
    os.kill(view.pid, signal.SIGCONT)
    again = await watched.until(lambda view: view.status == "healthy", after=told)
    assert again.epoch == 1


async def test_engine_that_answers_health_but_no_request_is_killed_and_replaced(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    dead = tmp_path / "dead"
    pace = Pace(starting_probe_s=0.05, probe_s=0.1, load_poll_s=0.1, proof_s=0.5)
    watched = await watch(fake_model(dead=str(dead), deaf=True), pace=pace)
    view = await watched.until_healthy()
    dead.touch()
    watched.in_flight["fake/0"] = 2
    watched.supervisor.stalled("fake/0")
    out = await watched.until(lambda view: view.status == "unhealthy")
    assert (out.phase, out.reason) == ("proving", "it took a request and did not begin it")
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "it lost a request, and then: /completion: no answer within 0.5 s"
    dead.unlink()
    assert (await watched.until_healthy(epoch=2)).pid != view.pid


async def test_engine_that_lost_a_request_and_runs_a_token_serves_on(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model())
    await watched.until_healthy()
    told = len(watched.seen)
    watched.supervisor.stalled("fake/0")
    await watched.until(lambda view: view.phase == "proving", told)
    again = await watched.until(lambda view: view.status == "healthy", len(watched.seen))
    assert again.epoch == 1
    watched.supervisor.stalled("fake/0")
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "2 requests in a row got no answer"


SLOW_PROBES = Pace(starting_probe_s=0.05, probe_s=600.0, load_poll_s=0.05, load_timeout_s=0.2)


async def test_stopped_process_leaves_routing_at_its_first_unanswered_poll_and_comes_back_by_itself(
    watch: Watch, fake_model: Build
) -> None:
    watched = await watch(fake_model(), pace=SLOW_PROBES)
    view = await watched.until_healthy()
    os.kill(view.pid, signal.SIGSTOP)
    out = await watched.until(lambda view: view.status == "unhealthy")
    assert (out.phase, out.reason) == ("silent", "/slots: no answer within 0.2 s")
    told = len(watched.seen)
    os.kill(view.pid, signal.SIGCONT)
    again = await watched.until(lambda view: view.status == "healthy", told)
    assert (again.epoch, again.phase, again.reason) == (1, "", "")


async def test_engine_whose_main_loop_hangs_is_replaced_though_health_is_answered(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    pace = Pace(starting_probe_s=0.05, probe_s=0.1, load_poll_s=0.05, load_timeout_s=0.2)
    watched = await watch(fake_model(hangs=str(hangs)), pace=pace)
    await watched.until_healthy()
    watched.in_flight["fake/0"] = 1  # which would never end
    hangs.touch()
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "3 probes failed: /health is answered and /slots is not"
    hangs.unlink()
    await watched.until_healthy(epoch=2)


async def test_engine_that_kv_share_lets_save_may_be_silent(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    pace = Pace(starting_probe_s=0.05, probe_s=0.1, load_poll_s=0.05, load_timeout_s=0.1)
    watched = await watch(fake_model(hangs=str(hangs)), pace=pace)
    await watched.until_healthy()
    watched.occupied.add("fake/0")
    hangs.touch()
    await watched.until(lambda view: view.busy is None)  # several polls went unanswered
    assert {view.status for view in watched.seen[3:]} == {"healthy"}
    watched.occupied.clear()
    await watched.until(lambda view: view.phase == "silent")
    hangs.unlink()


async def test_engine_that_works_may_be_silent(watch: Watch, fake_model: Build, monkeypatch) -> None:
    used = iter(range(10**6))
    monkeypatch.setattr("viiwork.engine.backend.cpu_seconds", lambda pid: float(next(used)))
    watched = await watch(fake_model(), pace=SLOW_PROBES)
    view = await watched.until_healthy()
    told = len(watched.seen)
    os.kill(view.pid, signal.SIGSTOP)
    await watched.until(lambda view: view.busy is None, told)
    assert {view.status for view in watched.seen[told:]} == {"healthy"}
    os.kill(view.pid, signal.SIGCONT)


async def test_success_between_two_stalls_keeps_an_engine(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model())
    view = await watched.until_healthy()
    for tell in ("stalled", "succeeded", "succeeded", "stalled", "succeeded"):
        getattr(watched.supervisor, tell)("fake/0")
    os.kill(view.pid, signal.SIGKILL)
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "killed by signal 9", "it was given up before it was killed"


async def test_engine_seen_on_a_card_of_another_backend_is_replaced(watch: Watch, fake_model: Build) -> None:
    def card_pids() -> dict[int, frozenset[int]]:
        return {
            0: frozenset(),
            1: frozenset(view.pid for view in watched.seen if view.pid and view.epoch == 1),
        }

    pace = Pace(starting_probe_s=0.05, probe_s=0.1, load_poll_s=0.1, cards_s=0.05)
    watched = await watch(fake_model(), pace=pace, card_pids=card_pids)
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason == "it runs on cards 1, assigned: none"
    await watched.until_healthy(epoch=2)


async def test_hard_failure_and_one_failed_probe_end_an_engine(watch: Watch, fake_model: Build) -> None:
    pace = Pace(starting_probe_s=0.05, probe_s=600.0, probe_timeout_s=0.3, load_poll_s=0.1)
    watched = await watch(fake_model(), pace=pace)
    view = await watched.until_healthy()
    os.kill(view.pid, signal.SIGSTOP)
    watched.supervisor.hard_failure("fake/0", "connection reset")
    respawn = await watched.until(lambda view: view.status == "respawn")
    assert respawn.reason.startswith("it broke connections")


async def test_engine_deaf_to_sigterm_is_killed_when_the_node_stops(
    watch: Watch, fake_model: Build, tmp_path: Path
) -> None:
    watched = await watch(fake_model(deaf=True, child=str(tmp_path / "child")))
    view = await watched.until_healthy()
    await watched.supervisor.stop(timeout_s=0.2)
    assert not is_alive(view.pid)
    await gone(await written_pid(tmp_path / "child"))
    assert watched.seen[-1].status == "stopped"


async def test_stop_while_an_engine_loads_ends_it(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model(loading_s=-1))
    view = await watched.until(lambda view: view.pid is not None)
    await watched.supervisor.stop(timeout_s=0.5)
    assert not is_alive(view.pid)


async def test_binary_that_is_not_there_is_named(watch: Watch, fake_model: Build, tmp_path: Path) -> None:
    model = ModelSection(
        name="m",
        engine="llamacpp",
        path=fake_model().path,
        context=1,
        llamacpp=LlamacppSection(binary=str(tmp_path / "nothing")),
    )
    watched = await watch(model)
    view = await watched.until(lambda view: view.status == "dead")
    assert f"{tmp_path / 'nothing'} is not an executable file" in view.reason


async def test_killed_guard_process_is_replaced(watch: Watch, fake_model: Build, tmp_path: Path) -> None:
    watched = await watch(fake_model())
    view = await watched.until_healthy()
    guard = watched.supervisor._guard
    first = guard.pid
    os.kill(first, signal.SIGKILL)
    await gone(first)
    os.kill(view.pid, signal.SIGKILL)
    await watched.until_healthy(epoch=2)
    assert guard.pid != first and is_alive(guard.pid)
    entries = json.loads((tmp_path / "run" / "engines.json").read_text())
    assert [entry["group"] for entry in entries] == [watched.seen[-1].pid]


async def test_taken_port_costs_one_retry_even_if_the_listener_there_is_silent(
    watch: Watch, fake_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:  # takes connections into its backlog and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ports = iter([silent.getsockname()[1], PortPicker().pick()])
        monkeypatch.setattr(PortPicker, "pick", lambda self: next(ports))
        pace = Pace(starting_probe_s=0.01, probe_timeout_s=10 * PATIENCE_S)
        watched = await watch(fake_model(), pace=pace)
        view = await watched.until_healthy()
    assert (view.epoch, view.respawns) == (2, 0)
