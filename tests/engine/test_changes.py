"""Models that come, go, change and are parked while the supervisor runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from viiwork.config.model import ModelSection, Seconds
from viiwork.engine.ladder import Rules

from .conftest import PATIENCE_S, Watch, is_alive

Build = Callable[..., ModelSection]


def changed(model: ModelSection) -> ModelSection:
    return msgspec.structs.replace(model, startup_timeout=Seconds(99))


async def test_a_model_that_did_not_change_keeps_its_process(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model("a"), fake_model("b"))
    a = await watched.until(lambda view: view.id == "a/0" and view.status == "healthy")
    await watched.until(lambda view: view.id == "b/0" and view.status == "healthy")
    watched.apply(fake_model("c"), fake_model("a"))
    await watched.until(lambda view: view.id == "c/0" and view.status == "healthy")
    assert watched.gone == [("b/0", "b")]
    assert {view.id: view.pid for view in watched.supervisor.views()}["a/0"] == a.pid
    assert [model.name for model in watched.supervisor.models] == ["c", "a"]


async def test_a_changed_model_drains_first_and_nothing_starts_before_all_drains_ended(
    watch: Watch, fake_model: Build
) -> None:
    watched = await watch(fake_model("a"), fake_model("b"))
    a = await watched.until(lambda view: view.id == "a/0" and view.status == "healthy")
    b = await watched.until(lambda view: view.id == "b/0" and view.status == "healthy")
    watched.in_flight["b/0"] = 1
    watched.apply(changed(fake_model("a")), fake_model("c"))
    for gone in ("a/0", "b/0"):
        await watched.until(lambda view, gone=gone: (view.id, view.status) == (gone, "draining"))
    await watched.until_gone("a/0")
    assert not is_alive(a.pid) and is_alive(b.pid), "a request still runs in b"
    assert [view.id for view in watched.supervisor.views()] == ["b/0"]
    told = len(watched.seen)
    watched.in_flight.clear()
    await watched.until(lambda view: view.id == "a/0" and view.status == "healthy", told)
    await watched.until(lambda view: view.id == "c/0" and view.status == "healthy", told)
    assert not is_alive(b.pid) and watched.gone == [("a/0", "a"), ("b/0", "b")]


async def test_a_change_during_a_drain_follows_it(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model("a"))
    await watched.until_healthy()
    watched.in_flight["a/0"] = 1
    watched.apply(fake_model("b"))
    await watched.until(lambda view: view.status == "draining")
    watched.apply(fake_model("a"), fake_model("c"))
    watched.in_flight.clear()
    told = len(watched.seen)
    await watched.until(lambda view: view.id == "c/0" and view.status == "healthy", told)
    await watched.until(lambda view: view.id == "a/0" and view.status == "healthy", told)
    assert "b/0" not in {view.id for view in watched.seen}


async def test_requests_that_do_not_end_within_the_grace_do_not_hold_a_change(
    watch: Watch, fake_model: Build
) -> None:
    watched = await watch(fake_model("a"), rules=Rules(respawn_grace_s=0.1, stop_grace_s=0.1))
    old = await watched.until_healthy()
    watched.in_flight["a/0"] = 1
    watched.apply(fake_model("b"))
    await watched.until(lambda view: view.id == "b/0" and view.status == "healthy")
    assert not is_alive(old.pid)


async def test_a_loading_model_that_is_removed_lets_the_next_one_load(
    watch: Watch, fake_model: Build
) -> None:
    watched = await watch(fake_model("slow", loading_s=-1), fake_model("next"))
    await watched.until(lambda view: view.id == "slow/0" and view.phase == "loading")
    watched.apply(fake_model("next"))
    await watched.until(lambda view: view.id == "next/0" and view.status == "healthy")
    await watched.until_gone("slow/0")


async def test_a_parked_model_has_no_process_until_it_is_wanted_again(
    watch: Watch, fake_model: Build
) -> None:
    watched = await watch(fake_model("a"), fake_model("b"))
    a = await watched.until(lambda view: view.id == "a/0" and view.status == "healthy")
    assert watched.supervisor.park(["a"], True) == {"a"}
    assert watched.supervisor.park(["a"], True) == set()
    await watched.until_gone("a/0")
    assert not is_alive(a.pid) and "a" in watched.supervisor.parked
    await watched.until(lambda view: view.id == "b/0" and view.status == "healthy")
    assert [view.id for view in watched.supervisor.views()] == ["b/0"]
    assert watched.supervisor.park(["a", "b"], False) == {"a"}
    again = await watched.until(
        lambda view: view.id == "a/0" and view.status == "healthy" and view.pid != a.pid
    )
    assert again.epoch == 1


async def test_parking_survives_a_change_of_the_model_but_not_its_removal(
    watch: Watch, fake_model: Build
) -> None:
    watched = await watch(fake_model("a"), fake_model("b"))
    await watched.until(lambda view: view.id == "b/0" and view.status == "healthy")
    watched.supervisor.park(["a"], True)
    await watched.until_gone("a/0")
    watched.apply(changed(fake_model("a")), fake_model("b"))
    assert list(watched.supervisor.parked) == ["a"]
    told = len(watched.seen)
    watched.apply(fake_model("b"))
    watched.apply(fake_model("a"), fake_model("b"))
    await watched.until(lambda view: view.id == "a/0" and view.status == "healthy", told)


async def test_unparking_during_the_drain_starts_the_model_anew(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model("a"))
    old = await watched.until_healthy()
    watched.in_flight["a/0"] = 1
    watched.supervisor.park(["a"], True)
    watched.supervisor.park(["a"], False)
    watched.in_flight.clear()
    new = await watched.until(lambda view: view.status == "healthy" and view.pid != old.pid)
    assert not is_alive(old.pid) and new.id == "a/0"


async def test_stopping_in_the_middle_of_a_drain_ends_everything(watch: Watch, fake_model: Build) -> None:
    watched = await watch(fake_model("a", deaf=True))
    view = await watched.until_healthy()
    watched.in_flight["a/0"] = 1
    watched.apply(fake_model("b"))
    await watched.until(lambda view: view.status == "draining")
    async with asyncio.timeout(PATIENCE_S):  # less than the grace of what drains; the second stop hurries
        await asyncio.gather(watched.supervisor.stop(60.0), watched.supervisor.stop(0.0))
    assert not is_alive(view.pid) and "b/0" not in {view.id for view in watched.seen}


@pytest.mark.parametrize("tell", ["stalled", "succeeded"])
async def test_news_of_a_backend_that_is_gone_is_no_fault(watch: Watch, fake_model: Build, tell: str) -> None:
    watched = await watch(fake_model("a"))
    await watched.until_healthy()
    watched.apply()
    await watched.until_gone("a/0")
    getattr(watched.supervisor, tell)("a/0")
    watched.supervisor.hard_failure("a/0", "reset")
    assert watched.supervisor.views() == [] and watched.supervisor.external("a/0") is None
