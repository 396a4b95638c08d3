"""Who gets a state that he asks for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.config.model import KvShareSection, RoutingSection
from viiwork.core.capacity import CapacityReport, ModelCapacity, PeerReport
from viiwork.core.replicas import Replica
from viiwork.core.sessions import Binding, SessionKey
from viiwork.core.slots import SlotRef
from viiwork.errors import KvError, KvRefused, RequestError, Unauthorized
from viiwork.limits import KV_PULLS_AT_ONCE, KV_PULLS_PER_PEER
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_pulled import PullServer
from viiwork.wire.kvpull import PullAsk, PullDone, decode_ask, decode_done, encode

from .importing import IDENTITY, KEY, MODEL, SESSION, Engine, Layout

ASK = PullAsk(session=SESSION, model=MODEL, newer_than=5)


class Origins:
    def sent_by(self, method: str, path_qs: str, headers: Any, body: bytes, remote_ip: str) -> str:
        if "X-Viiwork-Node" not in headers:
            raise Unauthorized("not a request of this mesh")
        return headers["X-Viiwork-Node"]


@dataclass
class Client:
    key: bytes | None = None


@dataclass
class Peers:
    client: Client
    me: str = "a"
    addr: str = "127.0.0.9"

    def member(self, name: str) -> Member | None:
        return Member(name, self.addr, 1, 2, "alive") if name in "bcdefghij" else None


class Layouts:
    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout

    def any_of(self, model: str) -> Layout | None:
        return self.layout if model == MODEL else None


class Pushes:
    def __init__(self) -> None:
        self.pushed: list[tuple[SessionKey, str]] = []
        self.may = asyncio.Event()
        self.may.set()
        self.fault: Exception | None = None

    async def push_now(self, key: SessionKey, node: str, reason: str) -> Any:
        await self.may.wait()
        if self.fault is not None:
            raise self.fault
        self.pushed.append((key, node))


async def nothing(*args: Any) -> None:
    return None


class Holder:
    """Node `a`, which holds generation 9 of the session in a slot."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.d = Dispatcher("a", RoutingSection(), prepare=nothing, on_end=lambda *args: None)
        self.pushes, self.peers = Pushes(), Peers(Client())
        self.layouts = Layouts(Layout(Engine(), folder))
        self.replicas = self.d.book.replicas
        self.d.sessions.ran_here(KEY, Binding("a", SlotRef("m/0", 0), 600, 9))
        self.server = PullServer(
            KvShareSection(**config),
            self.peers,  # type: ignore[arg-type]
            Origins(),  # type: ignore[arg-type]
            self.d,
            self.replicas,
            self.layouts,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            self.pushes,
        )
        self.reports("b")

    def reports(self, node: str, fp: str = "fp") -> None:
        entry = ModelCapacity(MODEL, slots=1, kv=replace(IDENTITY, model_fp=fp))
        now = time.monotonic()
        self.d.peers.put(node, "http://p")
        self.d.peers.reported(node, PeerReport(CapacityReport(node, models=(entry,)), now, now))

    async def asked(self, ask: PullAsk = ASK, node: str = "b") -> int:
        headers = {"X-Viiwork-Node": node}
        return decode_done(
            await self.server.pulled("/v1/kv/pull", headers, encode(ask), "127.0.0.9")
        ).generation


async def test_a_member_that_could_use_the_state_gets_it(tmp_path: Path):
    holder = Holder(tmp_path)
    assert await holder.asked() == 9
    assert holder.pushes.pushed == [(KEY, "b")] and holder.server.as_json()["served"] == 1


async def test_a_stranger_is_turned_away_before_its_question_is_read(tmp_path: Path):
    with pytest.raises(Unauthorized):
        await Holder(tmp_path).server.pulled("/v1/kv/pull", {}, b"not even JSON", "127.0.0.9")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"session": "x", "model": "m"}', b"[" * 100_000])
async def test_what_is_no_question_is_refused(tmp_path: Path, body: bytes):
    with pytest.raises(RequestError, match="not a question for a state"):
        await Holder(tmp_path).server.pulled("/v1/kv/pull", {"X-Viiwork-Node": "b"}, body, "127.0.0.9")


@pytest.mark.parametrize(
    ("ask", "node", "why"),
    [
        ({"newer_than": 9}, "b", "no newer state"),
        ({"session": "6" * 32}, "b", "no newer state"),
        ({"model": "n"}, "b", "no portable backend"),
        ({}, "z", "no portable backend"),  # has left meanwhile
        ({}, "c", "no engine of 'c' could use"),  # has not reported
        ({}, "d", "no engine of 'd' could use"),  # other weights
    ],
)
async def test_who_could_not_use_it_or_has_it_is_refused(
    tmp_path: Path, ask: dict[str, Any], node: str, why: str
):
    holder = Holder(tmp_path)
    holder.reports("d", fp="other")
    fields = {"session": SESSION, "model": MODEL, "newer_than": 5} | ask
    with pytest.raises(KvRefused, match=why):
        await holder.asked(PullAsk(**fields), node)
    assert holder.pushes.pushed == []


async def test_kv_share_that_is_off_sends_nothing(tmp_path: Path):
    with pytest.raises(KvRefused, match="off"):
        await Holder(tmp_path, enabled=False).asked()


async def test_an_open_mesh_sends_nothing_to_an_address_that_is_not_private(tmp_path: Path):
    holder = Holder(tmp_path)
    holder.peers.addr = "192.168.1.7"
    with pytest.raises(KvRefused, match="no secret"):
        await holder.asked()


async def test_one_peer_and_all_of_them_are_bounded(tmp_path: Path):
    holder = Holder(tmp_path)
    holder.pushes.may.clear()
    tasks = [asyncio.create_task(holder.asked()) for _ in range(KV_PULLS_PER_PEER)]
    await asyncio.sleep(0)
    with pytest.raises(KvRefused, match="as many"):
        await holder.asked()
    others = "cdefghij"
    for node in others:
        holder.reports(node)
        tasks += [asyncio.create_task(holder.asked(node=node)) for _ in range(KV_PULLS_PER_PEER)]
    await asyncio.sleep(0)
    assert holder.server._running.total() == KV_PULLS_AT_ONCE
    holder.pushes.may.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert ended.count(9) == KV_PULLS_AT_ONCE
    assert not holder.server._running and await holder.asked() == 9


async def test_a_push_that_fails_is_a_refusal_with_its_reason(tmp_path: Path):
    holder = Holder(tmp_path)
    holder.pushes.fault = KvError("slot_busy", "a turn runs there")
    with pytest.raises(KvRefused, match="a turn runs there"):
        await holder.asked()
    assert holder.server.as_json()["not_served"] == {"slot_busy": 1}


async def test_a_replica_that_is_as_new_is_passed_on_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    holder = Holder(tmp_path)
    sent: list[str] = []

    async def send_replica(replica: Replica, member: Member, layout: Any) -> None:
        sent.append(replica.name)

    monkeypatch.setattr(holder.server, "_send_replica", send_replica)
    holder.replicas.put(Replica("r", KEY, 600, 1, 8, "c"))
    assert await holder.asked() == 9 and sent == []
    holder.replicas.put(Replica("s", KEY, 600, 1, 9, "c"))
    assert await holder.asked() == 9 and sent == ["s"] and len(holder.pushes.pushed) == 1


@given(st.binary(max_size=200))
def test_any_bytes_are_a_question_or_refused(data: bytes):
    for decode in (decode_ask, decode_done):
        try:
            decode(data)
        except RequestError:
            continue


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(0, (1 << 63) - 1))
def test_a_question_comes_back_as_it_was(session: str, generation: int):
    ask = PullAsk(session=session, model="m", newer_than=generation)
    assert decode_ask(encode(ask)) == ask
    assert decode_done(encode(PullDone(generation=generation))).generation == generation
