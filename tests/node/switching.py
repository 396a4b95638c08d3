"""Sessions that are made to change hosts, and what an engine of nobody else says to the same prompts."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from tests.fakes.real_engine import Build, real_engine

from .nodes import NodeProcess, model_entry

Kind = Literal["first", "grown", "shrunk", "forked", "compacted"]
Judgement = Literal["same", "tie", "wrong"]

COMMIT_S = 60.0  # only a broken push takes this long
NO_COMMIT_S = 5.0  # for a state that perhaps nobody is sent: of a conversation without a key
TURN_S = 300.0  # only a turn that hangs takes this long
POLL_S = 0.02
SEED = 1
# How far apart an unmoved engine says the log-probability of a token, reading the prompt in other batches:
# up to 0.3 for SmolLM2, 0.03 for the tiny models.
NOISE = 0.5
WORDS = """
    account archive balance bridge candle carbon castle circuit copper cotton crystal delta desert engine
    fabric falcon filter forest garden glacier harbor hollow island jungle kernel ladder lantern magnet
    marble meadow mirror needle ocean orbit paper pepper piston planet pocket prism quarry ribbon river
""".split()


@dataclass(frozen=True)
class HostKind:
    """How a host's engines keep their cache; `share` is more of its kv_share section."""

    slots: int
    unified: bool = False
    transposed: bool = False  # flash attention off

    def models(self, models: dict[str, Path], context: int) -> str:
        """The `models:` entries of a host of this kind."""
        entries = []
        for name, path in models.items():
            entry = model_entry(name, path, context=context, parallel=self.slots)
            if self.unified:
                entry = entry.replace("engine: llamacpp", "engine: llamacpp, args: [--kv-unified]")
            if self.transposed:
                entry = entry.replace("threads: 1", "threads: 1, flash_attn: 'off'")
            entries.append(entry)
        return "".join(entries)


@dataclass(frozen=True)
class Said:
    """The tokens of an answer, how likely each was, and the two likeliest at its place."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[dict[int, float], ...]


@dataclass
class Turn:
    """One turn as its client saw it."""

    session: str
    model: str
    kind: Kind
    messages: list[dict[str, str]]
    said: Said
    text: str
    entry: str
    host: str
    moved: bool  # to another host than the turn before
    cached: int
    prompt: int
    max_tokens: int
    request: str
    state_id: str = ""  # of the conversation, as the nodes call it
    n_committed: int = 0  # hosts that held the state the turn before it left
    log: list[str] = field(default_factory=list)  # what the nodes logged of it, when it was not warm

    @property
    def share(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    @property
    def warmth(self) -> str:
        return "warm" if self.share >= 0.9 else "partly" if self.share >= 0.3 else "cold"


@dataclass
class Session:
    """One client's conversation."""

    name: str
    model: str
    rng: random.Random
    key: str = ""  # what its client calls it, "" = nothing
    messages: list[dict[str, str]] = field(default_factory=list)
    host: str = ""
    n_held: int = 0  # hosts that hold its newest state
    turns: int = 0

    def words(self, n: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(n))

    def says(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def begin(self, n_words: int) -> None:
        self.messages = [{"role": "system", "content": "Answer with one short sentence."}]
        self.says(f"Task {self.name}: {self.words(n_words)}. Which word comes first?")

    def grow(self) -> None:
        self.says(f"And {self.rng.choice(WORDS)}?")

    def shrink(self) -> None:
        """The client takes its last question and the answer back and asks something else."""
        del self.messages[-2:]
        self.says(f"Or {self.rng.choice(WORDS)}?")

    def compact(self, n_words: int) -> None:
        del self.messages[1:]
        self.says(f"Summary of {self.name}: {self.words(n_words)}. Go on.")

    def fork(self, name: str, key: str) -> Session:
        """A second conversation that begins as this one did up to its last question."""
        other = Session(name, self.model, random.Random(name), key, self.messages[:-2], self.host)
        other.n_held = self.n_held
        other.says(f"Branch {name}: and {other.rng.choice(WORDS)}?")
        return other


class Switcher:
    """Nodes that all serve the same models, and turns that are made to run where the caller says."""

    def __init__(self, http: aiohttp.ClientSession, nodes: Sequence[NodeProcess]) -> None:
        self.http = http
        self.nodes = {node.name: node for node in nodes}
        self._newest: dict[str, int] = {}  # generation of each state, by the nodes' id of it

    async def until_ready(self, models: Sequence[str]) -> None:
        """All engines run, all nodes see all hosts, and every layout is known."""
        for node in self.nodes.values():
            await node.until_healthy(self.http)
        for model in models:
            for node in self.nodes.values():
                await node.until_sees(self.http, model, len(self.nodes))
        for node in self.nodes.values():
            async with asyncio.timeout(COMMIT_S):
                while not await self._is_sharing(node, set(models)):
                    await asyncio.sleep(POLL_S)

    async def turn(self, session: Session, kind: Kind, entry: str, host: str, max_tokens: int = 12) -> Turn:
        """Run the session's next turn on the host ("" = where the nodes like), and add its answer."""
        body = {"model": session.model, "messages": session.messages, "max_tokens": max_tokens}
        body |= {"temperature": 0, "seed": SEED, "logprobs": True, "top_logprobs": 2}
        headers = {"X-Session-Id": session.key} if session.key else {}
        url = f"{self.nodes[entry].api}/v1/chat/completions?host={host or 'mesh'}"
        async with asyncio.timeout(TURN_S):
            status = 429
            while status == 429:  # the host is full: the client tries again, as it was told
                async with self.http.post(url, json=body, headers=headers) as response:
                    status, answer = response.status, await response.json()
        assert status == 200, (status, answer, session.name)
        ran, request = response.headers["X-Viiwork-Node"], response.headers["X-Viiwork-Request"]
        assert host in ("", ran)
        choice, usage = answer["choices"][0], answer["usage"]
        done = Turn(
            session.name,
            session.model,
            kind,
            list(session.messages),
            said_of(answer),
            choice["message"]["content"],
            entry,
            ran,
            bool(session.host) and session.host != ran,
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["prompt_tokens"],
            max_tokens,
            request,
            n_committed=session.n_held,
        )
        done.state_id = await self._state_of(done)
        session.messages.append({"role": "assistant", "content": done.text})
        session.host, session.n_held = ran, 1
        session.turns += 1
        return done

    async def until_committed(self, session: Session, turn: Turn) -> int:
        """Wait until every other host holds the state the turn left; how many hosts hold it then."""
        deadline = asyncio.get_running_loop().time() + (COMMIT_S if session.key else NO_COMMIT_S)
        before = self._newest.get(turn.state_id, -1)
        # A client has its answer a moment before the node has put the turn on its books.
        generation = -1
        while generation <= before and asyncio.get_running_loop().time() < deadline:
            generation = await self._generation(self.nodes[turn.host], turn)
            await asyncio.sleep(POLL_S)
        self._newest[turn.state_id] = generation
        held = {turn.host}
        while len(held) < len(self.nodes) and asyncio.get_running_loop().time() < deadline:
            for name in self.nodes.keys() - held:
                if await self._generation(self.nodes[name], turn) >= generation:
                    held.add(name)
            await asyncio.sleep(POLL_S)
        session.n_held = len(held)
        return len(held)

    async def switched(self, session: Session, n: int, n_words: int = 150) -> list[Turn]:
        """A conversation's first turn and `n` more, each on another host, which has been sent its state."""
        session.begin(n_words)
        names, rng = sorted(self.nodes), session.rng
        turns = [await self.turn(session, "first", rng.choice(names), rng.choice(names))]
        for _ in range(n):
            await self.until_committed(session, turns[-1])
            session.grow()
            host = rng.choice([name for name in names if name != session.host])
            turns.append(await self.turn(session, "grown", rng.choice(names), host))
            if turns[-1].warmth != "warm":
                await self.explain(turns[-1])
        return turns

    async def explain(self, turn: Turn) -> None:
        """Add what the nodes say of the turn: its decisions, and what they logged of its conversation."""
        why = await self.nodes[turn.entry].get(self.http, f"/v1/why/{turn.request}")
        turn.log = [str(why.get("decisions"))]
        for node in self.nodes.values():
            found = [line for line in node.log.splitlines() if turn.state_id[:8] in line]
            turn.log += [f"{node.name}: {line}" for line in found[-6:]]

    async def _is_sharing(self, node: NodeProcess, models: set[str]) -> bool:
        """Does the node know the form of every model's state, and all peers it may share it with?"""
        report = await node.get(self.http, "/v1/capacity")
        links = (await node.status(self.http))["kv_share"]["links"]
        known = {model["name"] for model in report["models"] if model.get("kv")}
        return models <= known and {link["peer"] for link in links} == self.nodes.keys() - {node.name}

    async def _state_of(self, turn: Turn) -> str:
        """The id of the conversation; the receipt is there before the answer."""
        why = await self.nodes[turn.entry].get(self.http, f"/v1/why/{turn.request}")
        return str(why.get("session", ""))

    async def _generation(self, node: NodeProcess, turn: Turn) -> int:
        """Of the newest state of the conversation the node holds; -1: none."""
        report = await node.get(self.http, "/v1/capacity?holdings=0")
        found = [row[5] for row in report["holdings"].get(turn.model, ()) if row[0] == turn.state_id]
        return max(found, default=-1)


def said_of(answer: dict[str, Any]) -> Said:
    """What an answer that was asked for with two log-probabilities a token says."""
    found = answer["choices"][0]["logprobs"]["content"]
    tops = [{top["id"]: top["logprob"] for top in token["top_logprobs"]} for token in found]
    return Said(
        tuple(token["id"] for token in found), tuple(token["logprob"] for token in found), tuple(tops)
    )


async def unmoved(
    model: Path, folder: Path, turns: Iterable[Turn], *, cold: bool = False, transposed: bool = False
) -> dict[str, Said]:
    """What one engine with one slot says to the same prompts, by request; `cold`: it reads each anew."""
    said: dict[str, Said] = {}
    folder = folder / f"unmoved-{uuid.uuid4().hex[:8]}"
    async with real_engine(model, folder, Build(transposed=transposed)) as engine:
        for turn in sorted(turns, key=lambda turn: turn.session):
            body = {"messages": turn.messages, "max_tokens": turn.max_tokens, "id_slot": 0}
            body |= {"temperature": 0, "seed": SEED, "logprobs": True, "top_logprobs": 2}
            said[turn.request] = said_of(
                await engine.post("/v1/chat/completions", body | {"cache_prompt": not cold})
            )
    return said


def judge(said: Said, unmoved: Said) -> Judgement:
    """Is it what an unmoved engine says? `tie`: they part where that engine holds both for as likely."""
    for n, (a, b) in enumerate(zip(said.tokens, unmoved.tokens, strict=False)):
        if a != b:
            both = unmoved.tops[n]
            return "tie" if a in both and abs(both[b] - both[a]) <= NOISE else "wrong"
        if abs(said.logprobs[n] - unmoved.logprobs[n]) > NOISE:
            return "wrong"
    return "same" if said.tokens == unmoved.tokens else "wrong"


def apart(said: Said, unmoved: Said) -> float:
    """The largest difference of log-probabilities, as long as both say the same tokens."""
    far = 0.0
    for n, (a, b) in enumerate(zip(said.tokens, unmoved.tokens, strict=False)):
        if a != b:
            break
        far = max(far, abs(said.logprobs[n] - unmoved.logprobs[n]))
    return far
