"""Which node a request comes from."""

from __future__ import annotations

import os

import pytest
from multidict import CIMultiDict

from viiwork.errors import Forbidden, Unauthorized
from viiwork.limits import CLAIM_LOG_MAX, SIGNATURE_SKEW_S
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.wire.signature import FORWARDED, SIGNER, sign

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


def test_a_request_that_names_no_sender_is_logged_as_nobodys(make_member, caplog):
    with pytest.raises(Unauthorized):
        origins(make_member, (KEY,)).sent_by(*ASK[:2], {}, ASK[2], "127.0.0.1")
    assert "request of nobody at 127.0.0.1 refused" in caplog.text


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


CHANGE = ("PUT", "/v1/aliases/fast?x=1", b'{"target":"m"}')
HERE = {"Host": "127.0.0.1:8086"}


def changed(o, headers, ip="127.0.0.1", ask=CHANGE):
    method, path, body = ask
    return o.control(method, path, CIMultiDict(headers), body, ip)


def signed(key=KEY, signer="viiwork-cli@desk", ask=CHANGE, at=1000.0):
    return sign(key, signer, *ask, now_unix_s=at, nonce=os.urandom(16))


def secured_at(make_member, now, unix_now, keys=(KEY,)):
    return MeshOrigins(
        "b", keys, PeerClient("b", keys), {}.get, now=lambda: now[0], unix_now=lambda: unix_now[0]
    )


def test_whoever_holds_the_secret_may_change_a_secured_mesh_from_anywhere(make_member):
    o = secured_at(make_member, [0.0], [1000.0], (KEY, OTHER))
    assert changed(o, signed(), ip="203.0.113.9") == "viiwork-cli@desk"
    assert changed(o, signed(key=OTHER)) == "viiwork-cli@desk", (
        "the previous secret holds while one is rotated"
    )
    assert changed(o, signed(signer="b")) == "b", "also in the node's own name"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        HERE,
        signed(key=b"x" * 32),
        signed(ask=("POST", *CHANGE[1:])),
        signed(ask=(CHANGE[0], "/v1/aliases/fast", CHANGE[2])),
        signed(ask=(*CHANGE[:2], b"{}")),
        signed(at=1000.0 - 121),
        signed(at=1000.0 + 121),
        {**signed(), SIGNER: "other"},
        {**signed(), FORWARDED: "a"},
        {**signed(), "X-Viiwork-Auth": "v1="},
        {**signed(), "X-Viiwork-Auth": "v2=x"},
        {**signed(), "X-Viiwork-Nonce": ""},
        {**signed(), "X-Viiwork-Ts": "9" * 30},
    ],
)
def test_any_other_change_of_a_secured_mesh_is_unauthorized_also_from_this_machine(make_member, headers):
    with pytest.raises(Unauthorized):
        changed(secured_at(make_member, [0.0], [1000.0]), headers)


def test_a_recorded_change_cannot_be_made_again(make_member):
    now, unix_now = [0.0], [1000.0]
    o = secured_at(make_member, now, unix_now)
    recorded = signed(at=1000.0 + SIGNATURE_SKEW_S)
    changed(o, recorded)
    for later_s in (0, SIGNATURE_SKEW_S, 2 * SIGNATURE_SKEW_S, 2 * SIGNATURE_SKEW_S + 2):
        now[0], unix_now[0] = float(later_s), 1000.0 + later_s
        with pytest.raises(Unauthorized):
            changed(o, recorded)


def test_a_change_that_proved_nothing_does_not_use_up_the_nonce(make_member):
    o, headers = secured_at(make_member, [0.0], [1000.0]), signed()
    with pytest.raises(Unauthorized):
        changed(o, headers, ask=(*CHANGE[:2], b"{}"))
    assert changed(o, headers)


@pytest.mark.parametrize("host", ["127.0.0.1:8086", "localhost", "LocalHost:8086", "[::1]:8086"])
@pytest.mark.parametrize("ip", ["127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"])
def test_an_open_mesh_takes_changes_from_the_nodes_own_machine(make_member, host, ip):
    assert changed(origins(make_member), {"Host": host}, ip) == "this machine"


@pytest.mark.parametrize(
    ("headers", "ip", "word"),
    [
        (HERE, "192.168.1.5", "192.168.1.5"),
        (HERE, "::ffff:192.168.1.5", "came from"),
        (HERE, "fd00::5", "came from"),
        (HERE, "", "came from"),
        ({**HERE, "Origin": "http://127.0.0.1:8086"}, "127.0.0.1", "web page"),
        ({**HERE, "Origin": "null"}, "127.0.0.1", "web page"),
        ({"Host": "evil.example:8086"}, "127.0.0.1", "evil.example"),
        ({"Host": "127.0.0.1.evil.example"}, "127.0.0.1", "sent to"),
        ({"Host": "192.168.1.5:8086"}, "127.0.0.1", "sent to"),
        ({}, "127.0.0.1", "sent to"),
        ({**HERE, "X-Forwarded-For": "203.0.113.9"}, "127.0.0.1", "proxy"),
        ({**HERE, "Forwarded": "for=203.0.113.9"}, "127.0.0.1", "proxy"),
        ({**HERE, "Via": "1.1 x"}, "127.0.0.1", "proxy"),
        (signed() | {"Host": "x"}, "203.0.113.9", "came from"),
    ],
)
def test_an_open_mesh_takes_them_from_nowhere_else(make_member, headers, ip, word):
    with pytest.raises(Forbidden, match=word):
        changed(origins(make_member), headers, ip)


def test_refused_changes_are_logged_once_a_minute_and_in_one_line(make_member, caplog):
    o = secured_at(make_member, [0.0], [1000.0])
    for _ in range(5):
        with pytest.raises(Unauthorized):
            changed(o, {"X-Viiwork-Auth": "\x1b[2J\n"}, ip="203.0.113.9")
    assert len(caplog.records) == 1
    assert "203.0.113.9" in caplog.text and "\x1b" not in caplog.text
