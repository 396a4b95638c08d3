"""Sessions that change hosts of unlike layouts turn after turn: warm, and answered as if unmoved."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from .nodes import NodeProcess
from .secret_words import tell_secrets
from .switching import HostKind, Session, Switcher, Turn, judge, unmoved

pytestmark = pytest.mark.engine

KINDS = (HostKind(2), HostKind(4, unified=True), HostKind(3, transposed=True))
CONTEXT = 1024


@pytest.fixture(scope="module")
def models(smollm2: Path, tiny_models: dict[str, Path]) -> dict[str, Path]:
    return {"dense": smollm2, "hybrid": tiny_models["qwen35"], "swa": tiny_models["gemma3"]}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[list[NodeProcess]]:
    """Three hosts of all models, each keeping its caches in its own way."""
    folder = tmp_path_factory.mktemp("hosts")
    share = f"kv_share: {{min_tokens: 64, replicas: {len(KINDS) - 1}}}"
    nodes = [
        NodeProcess(name, f"127.0.30.{n}", folder, kind.models(models, CONTEXT), extra=share)
        for n, (name, kind) in enumerate(zip("abc", KINDS, strict=True), 1)
    ]
    for node in nodes:
        node.seeds = tuple(other.seed for other in nodes if other is not node)
    try:
        for node in nodes:
            node.start()
        yield nodes
        for node in nodes:
            assert "Traceback" not in node.log
    finally:
        for node in nodes:
            node.end()


@pytest.fixture
async def switcher(
    http: aiohttp.ClientSession, hosts: list[NodeProcess], models: dict[str, Path]
) -> AsyncIterator[Switcher]:
    made = Switcher(http, hosts)
    await made.until_ready(list(models))
    yield made


async def until_all_is_as_unmoved(turns: list[Turn], model: Path, folder: Path) -> None:
    said = await unmoved(model, folder, turns)
    wrong = [turn for turn in turns if judge(turn.said, said[turn.request]) == "wrong"]
    assert not wrong, [(turn.text, said[turn.request], turn.log) for turn in wrong]


@pytest.mark.parametrize(
    "model, n_sessions, n_switches, n_words",
    [("dense", 2, 6, 150), ("hybrid", 1, 4, 400), ("swa", 1, 4, 400)],
)
async def test_sessions_that_change_hosts_are_warm_and_say_what_they_would_say_at_home(
    switcher: Switcher,
    models: dict[str, Path],
    tmp_path: Path,
    model: str,
    n_sessions: int,
    n_switches: int,
    n_words: int,
):
    sessions = [Session(f"{model} {n}", model, random.Random(n), f"{model} {n}") for n in range(n_sessions)]
    runs = await asyncio.gather(*(switcher.switched(session, n_switches, n_words) for session in sessions))
    turns = [turn for run in runs for turn in run]
    moves = [turn for turn in turns if turn.moved]
    assert len(moves) == n_sessions * n_switches
    assert all(turn.n_committed == len(KINDS) for turn in moves)
    not_warm = [turn for turn in moves if turn.warmth != "warm"]
    assert not not_warm, [(turn.cached, turn.prompt, turn.log) for turn in not_warm]
    await until_all_is_as_unmoved(turns, models[model], tmp_path)


async def test_no_conversation_tells_the_secret_word_of_another_that_began_the_same(switcher: Switcher):
    told = await tell_secrets(switcher, "dense", 40, at_once=4)
    assert len(told) == 40
    assert not [(one.word, one.turn.text, one.turn.log) for one in told if not one.is_right]
    assert {one.turn.host for one in told} == {"a", "b", "c"} and any(one.turn.moved for one in told)


async def test_conversations_that_shrink_fork_and_are_compacted_say_what_they_would_say_at_home(
    switcher: Switcher, models: dict[str, Path], tmp_path: Path
):
    session = Session("shapes", "dense", random.Random(7), "shapes")
    turns = await switcher.switched(session, 1, n_words=100)
    for kind in ("shrunk", "forked", "compacted"):
        await switcher.until_committed(session, turns[-1])
        host = next(name for name in sorted(switcher.nodes) if name != session.host)
        if kind == "forked":
            branch = session.fork("branch", "another key")
            turns.append(await switcher.turn(branch, kind, session.host, host))
            session.grow()
        elif kind == "shrunk":
            session.shrink()
        else:
            session.compact(100)
        turns.append(await switcher.turn(session, kind, session.host, host))
    await until_all_is_as_unmoved(turns, models["dense"], tmp_path)
    assert turns[2].warmth == "warm", turns[2].cached  # what the client took back is all that was lost
