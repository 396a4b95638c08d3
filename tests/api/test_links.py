"""The questions nodes ask one another about their addresses, as they come over HTTP."""

from __future__ import annotations

import pytest

from tests.fakes.node import FakeDispatcher, serving
from tests.fakes.rawclient import RawClient
from viiwork.api.probe import Probes
from viiwork.config.model import KvShareSection
from viiwork.core.paths import LinkAddress
from viiwork.limits import LINK_BODY_MAX_BYTES
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.node.kv_paths import KvPaths, LinkHost
from viiwork.wire.probe import PROBE_PATH, Probe, decode_answer, encode, is_proof

KEY = b"k" * 32


async def heard(address: LinkAddress, *, is_named: bool) -> bool:
    return True


def paths(keys: tuple[bytes, ...] = (KEY,), **config: object) -> KvPaths:
    client = PeerClient("b", keys)
    origins = MeshOrigins("b", keys, client, lambda name: None)
    section = KvShareSection(**config)  # type: ignore[arg-type]
    return KvPaths("b", section, client, keys, origins, LinkHost(list, heard), list)


def lines(key: bytes, body: bytes) -> list[str]:
    signed = PeerClient("a", (key,)).sign("POST", PROBE_PATH, body)
    return [f"{name}: {value}" for name, value in signed.items()]


def question(to: str = "b", addr: str = "127.0.0.1") -> bytes:
    return encode(Probe(to=to, addr=addr, nonce="3" * 32))


async def ask(links: KvPaths, body: bytes, key: bytes = KEY) -> tuple[int, bytes]:
    async with (
        serving(FakeDispatcher([]), routes=Probes(links).routes()) as api,
        RawClient(api.port) as client,
    ):
        client.post(PROBE_PATH, body, *lines(key, body))
        reply = await client.reply()
        return reply.status, reply.body


async def test_the_node_that_is_asked_where_it_is_proves_itself():
    links = paths()
    status, body = await ask(links, question())
    probe = Probe(to="b", addr="127.0.0.1", nonce="3" * 32)
    assert status == 200
    assert is_proof(decode_answer(body), (KEY,), asks="a", probe=probe, run=links._run)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (question(to="c"), 409, b"this is 'b', not 'c'"),
        (question(addr="10.9.0.2"), 409, b"reached at 127.0.0.1, not at 10.9.0.2"),
        (b"{}", 400, b"not a probe"),
        (b"x" * (LINK_BODY_MAX_BYTES + 1), 413, b"larger"),
    ],
)
async def test_any_other_question_gets_a_reason_and_no_proof(body: bytes, status: int, says: bytes):
    got = await ask(paths(), body)
    assert got[0] == status and says in got[1] and b"proof" not in got[1]


async def test_whoever_has_not_the_secret_gets_no_proof():
    assert (await ask(paths(), question(), b"x" * 32))[0] == 401


async def test_a_node_whose_direct_links_are_off_says_so():
    status, body = await ask(paths(direct="off"), question())
    assert status == 409 and b"direct links are off" in body
