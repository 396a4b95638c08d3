"""Which node a request comes from."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from viiwork.errors import Forbidden, Unauthorized
from viiwork.limits import CLAIM_LOG_MAX
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.wire.signature import FORWARDED, SIGNER

KEY, OTHER = b"k" * 32, b"o" * 32
ASK = ("POST", "/v1/chat/completions", b"{}")


def origins(make_member, keys=(), name="b"):
    members = {"a": make_member("a", "127.0.0.1", 8086), "six": make_member("six", "fd00::6", 8086)}
    return MeshOrigins(name, keys, PeerClient(name, keys), members.get, now=lambda: 0.0)


def forwarded(o, headers, ip="127.0.0.1", ask=ASK):
    method, path, body = ask
    return o.forwarded_by(method, path, CIMultiDict(headers), body, ip)


def from_a(key=KEY, name="a", ask=ASK):
    return PeerClient(name, (key,) if key else ()).forward_headers(*ask)


def test_a_request_without_a_claim_is_a_clients(make_member):
    for keys in ((), (KEY,)):
        assert forwarded(origins(make_member, keys), {"X-Other": "1"}) is None


def test_a_signed_forward_is_its_signers_from_any_address(make_member):
    assert forwarded(origins(make_member, (KEY,)), from_a(), ip="203.0.113.1") == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {FORWARDED: "a"},
        {FORWARDED: ""},
        from_a(key=OTHER),
        {**from_a(), FORWARDED: "c"},
        {**from_a(), SIGNER: "c"},
        from_a(name="b"),
        from_a(ask=("POST", "/v1/completions", b"{}")),
        from_a(ask=("POST", "/v1/chat/completions", b"{} ")),
    ],
)
def test_a_wrong_proof_in_a_secured_mesh_is_unauthorized(make_member, headers):
    with pytest.raises(Unauthorized):
        forwarded(origins(make_member, (KEY,)), headers)


def test_a_recorded_forward_is_unauthorized_the_second_time(make_member):
    o, headers = origins(make_member, (KEY,)), from_a()
    assert forwarded(o, headers) == "a"
    with pytest.raises(Unauthorized, match="used before"):
        forwarded(o, headers)


def test_an_open_mesh_believes_a_members_own_address(make_member):
    o = origins(make_member)
    assert forwarded(o, from_a(key=None), ip="127.0.0.1") == "a"
    assert forwarded(o, from_a(key=None), ip="::ffff:127.0.0.1") == "a"
    assert forwarded(o, from_a(key=None, name="six"), ip="fd00:0:0::6") == "six"


@pytest.mark.parametrize(
    ("name", "ip"), [("a", "127.0.0.2"), ("c", "127.0.0.1"), ("b", "127.0.0.1"), ("a", "junk")]
)
def test_any_other_claim_in_an_open_mesh_is_an_ordinary_client(make_member, name, ip):
    assert forwarded(origins(make_member), from_a(key=None, name=name), ip=ip) is None


def test_unproven_claims_are_logged_once_a_minute_and_not_for_every_invented_name(make_member, caplog):
    o = origins(make_member)
    for _ in range(3):
        forwarded(o, {FORWARDED: "c\x1b[2J"})
    assert len(caplog.records) == 1 and "\x1b" not in caplog.text
    for i in range(2 * CLAIM_LOG_MAX):
        forwarded(o, {FORWARDED: f"n{i}"})
    assert len(caplog.records) == CLAIM_LOG_MAX


def test_requests_only_nodes_may_send_need_a_proof(make_member):
    method, path, body = ASK
    secured, signed = origins(make_member, (KEY,)), PeerClient("a", (KEY,)).sign(*ASK)
    assert secured.sent_by(method, path, signed, body, "203.0.113.1") == "a"
    with pytest.raises(Unauthorized):
        secured.sent_by(method, path, {}, body, "127.0.0.1")
    open_mesh = origins(make_member)
    assert open_mesh.sent_by(method, path, {SIGNER: "a"}, body, "127.0.0.1") == "a"
    with pytest.raises(Forbidden):
        open_mesh.sent_by(method, path, {SIGNER: "a"}, body, "127.0.0.2")
    with pytest.raises(Forbidden):
        open_mesh.sent_by(method, path, {}, body, "127.0.0.1")


def test_forward_headers_prove_this_node_to_the_next(make_member):
    headers = origins(make_member, (KEY,), name="b").forward_headers(*ASK)
    assert forwarded(origins(make_member, (KEY,), name="a"), headers) == "b"
