"""The near end of a link's measurement: every path to the other host, each way to send a state over it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import msgspec

from viiwork.bench.janitor import Janitor
from viiwork.bench.listen import MODEL, SESSION, cpu_of
from viiwork.bench.rawtcp import send_raw
from viiwork.bench.results import Phase, Run, Switch
from viiwork.bench.states import BenchState, cool, warm
from viiwork.bench.talk import (
    FAR_NAME,
    NEAR_NAME,
    Begin,
    Drop,
    Dropped,
    Opening,
    Ready,
    Received,
    Render,
    Rendered,
    TakeResult,
    Talk,
    open_with,
)
from viiwork.config.model import KvShareSection
from viiwork.core.paths import LinkRule, PeerAddress, mesh_path, paths_to
from viiwork.core.paths import Path as LinkPath
from viiwork.errors import BenchError, ChannelError, ChannelRefused, KvError, NobodyListens
from viiwork.host.network import address_towards, link_addresses
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SaveFacts, SendDone, SendJob, Stages, StateFile
from viiwork.limits import BENCH_PATHS_MAX, MIB
from viiwork.mesh.channel import connected
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import host_port
from viiwork.node.kv_paths import must_encrypt
from viiwork.version import VERSION
from viiwork.wire.replica import Mark
from viiwork.wire.state import Layout

_NEAR_STORE_BYTES = 1 * MIB  # the near worker only sends
_OF_SENDER = ("handshake_s", "wait_s", "read_s", "hash_s", "compress_s", "send_s")
_OF_RECEIVER = ("receive_s", "verify_s", "write_s")


class Way(NamedTuple):
    """One way to send a state."""

    cache: Literal["cold", "warm"]
    compress: Switch
    encrypt: Switch


PLAIN = Way("warm", "off", "off")
COMPRESSED = Way("warm", "on", "off")
LAB_WAYS = (PLAIN, Way("cold", "off", "off"), COMPRESSED, Way("warm", "off", "on"))
ALL_WAYS = (*LAB_WAYS, Way("warm", "on", "on"), Way("warm", "auto", "auto"))


class Progress(Protocol):
    """Hears how far a measurement is."""

    def plan(self, steps: int) -> None:
        """So many more steps will come."""

    def step(self, what: str) -> None:
        """One step is done; `what` is next or was done, in a few words."""


@dataclass(frozen=True, slots=True)
class Target:
    """The other host: where it was asked for, and the secret that both hold."""

    addr: str
    port: int
    key: bytes

    @property
    def where(self) -> str:
        return host_port(self.addr, self.port)


async def resolve(host: str, port: int) -> str:
    """The address of a name. Raises `BenchError`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BenchError(f"{one_line(host)!r} is no host that is known here: {error.strerror}") from None
    # IPv4 first: what a name means on a LAN.
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


async def look(addr: str, port: int) -> None:
    """Raises `NobodyListens` when no other end of a benchmark is there; nothing is begun."""
    sock = await _connect(addr, port)
    try:
        await open_with(sock, Opening("look", VERSION), host_port(addr, port))
    finally:
        sock.close()


class LinkBench:
    """A conversation with the other host, and what is sent over paths to it. Use as a context manager."""

    def __init__(
        self,
        target: Target,
        state: BenchState,
        progress: Progress,
        restore: Callable[[], Awaitable[float]] | None = None,
    ) -> None:
        """`restore` imports the state into an engine of this host; None = there is none."""
        self._restore = restore
        self._target, self._state, self._progress = target, state, progress
        self._generation = 1
        self._janitor = Janitor()
        self._folder = Path(tempfile.mkdtemp(prefix="viiwork-bench-"))
        self._janitor.owes_folder(self._folder)
        self._worker = KvWorker(self._folder / "replicas", _NEAR_STORE_BYTES)
        self._control: socket.socket | None = None

    async def __aenter__(self) -> LinkBench:
        try:
            await self._begin()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _begin(self) -> None:
        target = self._target
        await self._worker.start()
        try:
            self._facts: SaveFacts = await self._worker.inspect(self._state.path)
        except KvError as error:
            raise BenchError(f"{self._state.path} is no slot save-file of llama.cpp: {error}") from None
        self._control = sock = await _connect(target.addr, target.port)
        await open_with(sock, Opening("control", VERSION), target.where)
        try:
            self._talk = await Talk.initiate(sock, target.key)
        except (ChannelError, ConnectionError):
            # A responder that cannot read our hello says nothing and closes.
            raise BenchError(
                f"{target.where} does not hold the same mesh secret: start both with it, or both without"
            ) from None
        except (OSError, TimeoutError) as error:
            raise BenchError(f"the connection to {target.where} broke: {error or 'no answer'}") from None
        self._n_bytes = self._facts.total_bytes
        self.far: Ready = await self._talk.ask(
            Begin(shape=self._facts.shape, n_tokens=self._facts.n_tokens, n_bytes=self._n_bytes), Ready
        )

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        await self._worker.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        await asyncio.to_thread(self._janitor.close)

    # -- paths
    async def paths(self) -> list[LinkPath]:
        """The way that was asked for, and every direct link between the two hosts."""
        addr = self._target.addr
        own = await asyncio.to_thread(link_addresses)
        told = [PeerAddress(theirs.addr, theirs.speed_mbps, theirs.mtu) for theirs in self.far.addresses]
        rule = LinkRule("auto", secured=True, open_lan=True)
        own_ip = address_towards(addr.partition("%")[0], self._target.port) or ""
        mesh = mesh_path(addr, own_ip, own, told)
        return [mesh, *paths_to(own, told, rule, addr)][:BENCH_PATHS_MAX]

    # -- measuring
    async def measure(
        self,
        path: LinkPath,
        ways: tuple[Way, ...],
        runs: int,
        *,
        name: str = "",
        link_mbps: int | None = None,
    ) -> Phase:
        """All ways over one path, `runs` rounds of them, a raw stream before each round.

        A path whose first connection fails is a phase without figures. Raises `BenchError` when one breaks
        later.
        """
        phase = Phase(
            name=name or f"{'mesh' if path.is_mesh else 'direct'} {path.addr}",
            path=f"{path.addr} {path.interface}".strip(),
            link_mbps=link_mbps or path.speed_mbps,
        )
        steps = runs * (len(ways) + 1)
        self._progress.plan(steps)
        try:
            (await self._open(path, "probe")).close()
        except BenchError as error:
            for _ in range(steps):
                self._progress.step(f"{path.addr} does not answer")
            return msgspec.structs.replace(phase, failed=str(error))
        raw: list[float] = []
        done: list[Run] = []
        left_out: set[Way] = set()
        for at in range(1, runs + 1):
            raw.append(await self._raw(path))
            self._progress.step(f"{phase.name}: {raw[-1] * 8 / 1e9:.2f} Gb/s raw, round {at} of {runs}")
            for way in ways:
                run = None if way in left_out else await self._move(path, way, raw)
                if run is None:
                    left_out.add(way)
                    self._progress.step(f"{phase.name}: no cold reads, the file's folder is in memory")
                else:
                    done.append(run)
                    rate = run.bytes * 8 / run.seconds / 1e9
                    self._progress.step(f"{phase.name}: {_said(way)} {run.seconds:.2f} s, {rate:.2f} Gb/s")
        return msgspec.structs.replace(phase, raw_bytes_per_s=raw, runs=done)

    async def _raw(self, path: LinkPath) -> float:
        """Bytes/s of one plain stream of as many bytes as the delta has."""
        size = self._facts.total_bytes
        await asyncio.to_thread(warm, self._state.path)
        sock = await self._open(path, "raw", size)
        try:
            sock.setblocking(True)
            return size / await asyncio.to_thread(send_raw, sock, self._state.path, size)
        finally:
            sock.close()

    async def _move(self, path: LinkPath, way: Way, raw: list[float]) -> Run | None:
        """One delta; None where its file cannot be cold."""
        state = self._state
        marks: tuple[Mark, ...] = ()
        if state.base is not None:
            await self._send(path, state.base, PLAIN, (), 0.0)
            marks = (Mark(generation=self._generation, source=NEAR_NAME, keep=state.held),)
        prepare = warm if way.cache == "warm" else cool
        if await asyncio.to_thread(prepare, state.path) is False:
            await self._talk.ask(Drop(), Dropped)
            return None
        before = cpu_of(self._worker.pid)
        sent, encrypted, received = await self._send(path, state.path, way, marks, statistics.median(raw))
        cpu = {"send": cpu_of(self._worker.pid) - before, "receive": received.cpu_s}
        stages = _stages(sent.stages, received.stages)
        if way == PLAIN:
            facts = self._facts
            layout = Layout(
                shape=facts.shape,
                n_stream=facts.n_stream,
                slot=0,
                v_trans=facts.v_trans,
                max_tokens=facts.n_tokens,
            )
            stages["render_s"] = (await self._talk.ask(Render(target=layout), Rendered)).seconds
            if self._restore is not None:
                stages["import_s"] = await self._restore()
        await self._talk.ask(Drop(), Dropped)
        return Run(
            cache=way.cache,
            compress=way.compress,
            encrypt=way.encrypt,
            encrypted=encrypted,
            bytes=sent.raw_bytes,
            wire_bytes=sent.wire_bytes,
            seconds=sent.stages.total_s,
            raw_bytes_per_s=raw[-1],
            stages=stages,
            cpu_s=cpu,
        )

    async def _send(
        self, path: LinkPath, file: Path, way: Way, known: tuple[Mark, ...], rate: float
    ) -> tuple[SendDone, bool, Received]:
        wanted = {"off": False, "on": True, "auto": must_encrypt(KvShareSection(), path.addr)}
        encrypt = wanted[way.encrypt]
        self._generation += 1
        job = SendJob(
            file=StateFile(
                path=str(file),
                session=SESSION,
                model_fp=MODEL,
                generation=self._generation,
                created_unix_s=0.0,
                source=NEAR_NAME,
                known=known,
            ),
            key=self._target.key,
            local_name=NEAR_NAME,
            peer_name=FAR_NAME,
            encrypt=encrypt,
            compress=way.compress,
            link_bytes_per_s=rate,
        )
        sock = await self._open(path, "state")
        sock.setblocking(True)
        try:
            done = await self._worker.send(sock, job)
        except KvError as error:
            where = host_port(path.addr, self._target.port)
            if error.reason in ("link_lost", "timeout"):
                raise BenchError(f"the link to {where} died in the middle of a state: {error}") from None
            raise BenchError(f"{where} did not take the state: {one_line(str(error))}") from None
        return done, encrypt, await self._talk.ask(TakeResult(), Received)

    async def _open(self, path: LinkPath, what: str, n_bytes: int = 0) -> socket.socket:
        port = self._target.port
        sock = await _connect(path.addr, port, "" if path.is_mesh else path.source)
        try:
            opening = Opening(what, VERSION, self.far.token, n_bytes)
            await open_with(sock, opening, host_port(path.addr, port))
        except BaseException:
            sock.close()
            raise
        return sock


async def _connect(addr: str, port: int, source: str = "") -> socket.socket:
    try:
        return await connected(addr, port, source)
    except ChannelRefused as error:
        where = host_port(addr, port)
        raise NobodyListens(f"{where} cannot be reached: {one_line(str(error))}") from None


def _stages(sender: Stages, receiver: Stages) -> dict[str, float]:
    found = {name: getattr(sender, name) for name in _OF_SENDER}
    return found | {name: getattr(receiver, name) for name in _OF_RECEIVER}


def _said(way: Way) -> str:
    words: list[str] = [way.cache]
    words += [f"compress {way.compress}"] if way.compress != "off" else []
    words += [f"encrypt {way.encrypt}"] if way.encrypt != "off" else []
    return ", ".join(words)
