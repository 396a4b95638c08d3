"""Requests to servers that somebody else runs: their key, their name of the model, their path, their TLS."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.fakes.engine import Conn, FakeEngine
from tests.fakes.node import FakeDispatcher, route, serving
from tests.fakes.rawclient import RawClient, Reply


@dataclass
class External:
    model: str = ""
    api_key: str = ""


BODY = b'{"messages": [], "model": "m", "id_slot": 7}'


async def ask(port: int, *headers: str) -> Reply:
    async with RawClient(port) as client:
        client.post("/v1/chat/completions?x=1", BODY, *headers)
        async with asyncio.timeout(20):
            return await client.reply()


async def test_the_configured_key_takes_the_place_of_the_clients(caplog: pytest.LogCaptureFixture):
    caplog.set_level(0)
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("a", engine.url)])
        async with serving(dispatcher, external=lambda backend: External(api_key="server-key")) as api:
            await ask(api.port, "Authorization: Bearer clients-own", "AUTHORIZATION: Basic again")
            await ask(api.port)
    for seen in engine.requests:
        assert seen.values("Authorization") == ["Bearer server-key"]
    assert "server-key" not in caplog.text


async def test_without_a_key_the_clients_own_authorization_passes():
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("a", engine.url)])
        async with serving(dispatcher, external=lambda backend: External()) as api:
            await ask(api.port, "Authorization: Bearer clients-own")
    assert engine.requests[0].values("Authorization") == ["Bearer clients-own"]


async def test_a_forward_carries_no_key_whatever_the_backend_is_called():
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("b", engine.url, backend="")])
        async with serving(dispatcher, external=lambda backend: External("other", "server-key")) as api:
            await ask(api.port)
    (seen,) = engine.requests
    assert seen.values("Authorization") == [] and seen.body == BODY


async def test_the_body_passes_unchanged_without_a_slot_of_ours():
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("a", engine.url, slot=1)])
        async with serving(dispatcher, external=lambda backend: External()) as api:
            await ask(api.port)
    assert engine.requests[0].body == BODY


async def test_the_model_is_called_as_the_server_calls_it_and_nothing_else_changes():
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("a", engine.url)])
        async with serving(dispatcher, external=lambda backend: External(model='org/"m"')) as api:
            await ask(api.port)
    (seen,) = engine.requests
    assert seen.body == BODY.replace(b'"m"', b'"org/\\"m\\""') and seen.target == "/v1/chat/completions?x=1"


async def test_a_path_of_the_address_goes_in_front():
    async with FakeEngine() as engine:
        dispatcher = FakeDispatcher([route("a", f"{engine.url}/api")])
        async with serving(dispatcher, external=lambda backend: External()) as api:
            await ask(api.port)
    assert engine.requests[0].target == "/api/v1/chat/completions?x=1"


@dataclass
class Authority:
    """A certificate for 127.0.0.1 that vouches for itself."""

    cert: Path
    server: ssl.SSLContext


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "cert.pem"
    path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_path = tmp_path / "key.pem"
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path, key_path)
    return Authority(path, server)


async def secured(engine: FakeEngine, authority: Authority) -> tuple[asyncio.Server, str]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Conn(engine), "127.0.0.1", 0, ssl=authority.server)
    return server, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_server_behind_tls_is_asked_over_one_kept_connection(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))
    async with FakeEngine() as engine:
        server, url = await secured(engine, authority)
        dispatcher = FakeDispatcher([route("a", url)])
        async with serving(dispatcher, external=lambda backend: External(api_key="k")) as api:
            for _ in range(3):
                assert b'"hello"' in (await ask(api.port)).body
        server.close()
    assert engine.n_opened == 1 and dispatcher.results == ["done"] * 3


async def test_a_server_with_an_unknown_certificate_gets_nothing_and_the_client_hears_why(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with FakeEngine() as engine:
        server, url = await secured(engine, authority)
        dispatcher = FakeDispatcher([route("a", url)])
        async with serving(dispatcher, external=lambda backend: External(api_key="k")) as api:
            answer = await ask(api.port)
        server.close()
    assert answer.status == 502 and "its certificate: self-signed" in answer.json["error"]["message"]
    assert engine.requests == []
