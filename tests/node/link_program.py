"""One end of links: real paths, channel, receiver and KV worker, no engine; does what lines of JSON ask."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from tests.fakes.node import FakeFacts, FakeOrigins, HeardRequests
from viiwork.api.app import ApiServer
from viiwork.api.probe import Probes
from viiwork.config.model import KvShareSection, RoutingSection
from viiwork.core.capacity import KvIdentity
from viiwork.core.replicas import ReplicaTable
from viiwork.errors import ViiworkError
from viiwork.host.network import link_addresses
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SendJob, StateFile
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_paths import KvPaths, LinkHost
from viiwork.node.kv_receive import Receiver
from viiwork.node.kv_route import send_over
from viiwork.node.kv_send import session_digest
from viiwork.node.kv_stats import KvStats
from viiwork.node.listeners import Listeners
from viiwork.wire.channel import mesh_key
from viiwork.wire.kvoffer import StateOffer, encode_offer
from viiwork.wire.savefile import parse
from viiwork.wire.state import SaveInfo

IDENTITY = KvIdentity("b" * 64, "4:abc", "f16", "f16", False, 1 << 22)
MODEL_FP = bytes.fromhex("b" * 64)


class Layouts:
    """An engine that takes any state of the file's shape."""

    model_fp = MODEL_FP

    def __init__(self, info: SaveInfo) -> None:
        self.shape = info.shape
        self.view = self
        self.ctx = 1 << 22

    def any_of(self, model: str) -> Layouts:
        return self

    def identity(self) -> KvIdentity:
        return IDENTITY


def info_of(state: Path) -> SaveInfo:
    with state.open("rb") as file:
        return parse(lambda off, n: os.pread(file.fileno(), n, off), state.stat().st_size)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def nothing(*args: Any) -> None:
    return None


async def main(told: dict[str, Any]) -> None:
    name, folder, state = told["name"], Path(told["folder"]), Path(told["state"])
    info = info_of(state)
    keys = (base64.b64decode(told["secret"]),) if told["secret"] else ()
    config = KvShareSection(**{k: tuple(v) if isinstance(v, list) else v for k, v in told["kv"].items()})
    members = {n: Member(n, addr, 7946, told["port"], "alive") for n, addr in told["members"].items()}
    client = PeerClient(name, keys)
    client.own_ip = told["addr"]
    await client.start()
    worker = KvWorker(folder / f"store-{told['addr']}", 4 << 30)
    await worker.start()
    paths: KvPaths
    origins = MeshOrigins(name, keys, client, members.get, is_at=lambda member, ip: paths.is_at(member, ip))
    api: ApiServer
    listeners = Listeners(lambda ip, port: api.listen(ip, port), told["host"], told["port"])
    paths = KvPaths(
        name,
        config,
        client,
        keys,
        origins,
        LinkHost(link_addresses, listeners.hears),
        lambda: [member for member in members.values() if member.name != name],
    )
    dispatcher = Dispatcher(name, RoutingSection(), prepare=nothing, on_end=lambda *args: None)
    stats = KvStats()
    receiver: Any = Receiver(
        name,
        config,
        keys,
        origins,
        dispatcher,
        ReplicaTable(100),
        Layouts(info),
        worker,
        stats,  # type: ignore[arg-type]
    )
    api = ApiServer(
        dispatcher,
        FakeOrigins(name),
        FakeFacts(name),
        receiver,
        Probes(paths).routes(),
        requests=HeardRequests(),
    )
    await api.listen(told["host"], told["port"])
    await listeners.at_mesh(told["addr"])
    looking = asyncio.create_task(paths.run())

    async def send(peer: str, generation: int) -> None:
        offer = StateOffer(
            session="a" * 32,
            model="m",
            generation=generation,
            n_tokens=info.n_tokens,
            model_fp=IDENTITY.model_fp,
            state=IDENTITY.state,
        )
        job = SendJob(
            file=StateFile(
                path=str(state),
                session=session_digest(("a" * 32, "m")),
                model_fp=MODEL_FP,
                generation=generation,
                created_unix_s=time.time(),
                source=name,
            ),
            key=mesh_key(client.key or b""),
            local_name=name,
            peer_name=peer,
            encrypt=True,
        )
        try:
            sent = await send_over(paths, worker, members[peer], encode_offer(offer), job)
        except ViiworkError as error:
            say(failed=str(error), reason=getattr(error, "reason", error.code))
            return
        say(sent=peer, path=sent.path.addr, source=sent.path.source, encrypted=sent.encrypted)

    say(ready=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    sending: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        asked = json.loads(line)
        if "send" in asked:
            sending.add(asyncio.create_task(send(asked["send"], time.time_ns() // 1_000_000)))
        else:
            say(links=paths.status(), stats=stats.as_json())
    looking.cancel()
    await paths.stop()
    await receiver.stop()
    await worker.stop()
    await api.stop(0.0)
    await client.stop()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
