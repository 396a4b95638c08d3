"""Signatures between nodes."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.limits import NONCE_CACHE_MAX, NONCE_KEPT_S, SIGNATURE_SKEW_S
from viiwork.wire import signature
from viiwork.wire.signature import AUTH, FORWARDED, NONCE, SIGNER, TIMESTAMP, Verifier, sign

KEY, OLD_KEY = b"k" * 32, b"o" * 32
UNIX = 1_800_000_000.7
PATH, BODY = "/v1/chat/completions?host=b", b'{"model":"q"}'
N = bytes(range(16))


def signed(key=KEY, signer="a", method="POST", path=PATH, body=BODY, at=UNIX, nonce=N, forwarded=None):
    headers = sign(key, signer, method, path, body, now_unix_s=at, nonce=nonce)
    return headers if forwarded is None else {FORWARDED: forwarded, **headers}


def verify(headers, verifier=None, method="POST", path=PATH, body=BODY, unix=UNIX, now=0.0):
    return (verifier or Verifier((KEY,))).verify(method, path, headers, body, now_unix_s=unix, now=now)


def test_the_mac_is_over_the_eight_published_lines():
    headers = signed()
    nonce = base64.urlsafe_b64encode(N).rstrip(b"=").decode()
    lines = ["v1", "req", "POST", PATH, "1800000000", nonce, "a", hashlib.sha256(BODY).hexdigest()]
    mac = hmac.digest(KEY, "\n".join(lines).encode(), "sha256")
    assert headers == {
        SIGNER: "a",
        TIMESTAMP: "1800000000",
        NONCE: nonce,
        AUTH: "v1=" + base64.urlsafe_b64encode(mac).rstrip(b"=").decode(),
    }


def test_no_body_is_signed_as_the_empty_string():
    nonce = base64.urlsafe_b64encode(N).rstrip(b"=").decode()
    mac = hmac.digest(KEY, f"v1\nreq\nGET\n/x\n1800000000\n{nonce}\na\n".encode(), "sha256")
    assert signed(method="GET", path="/x", body=b"")[AUTH][3:] == base64.urlsafe_b64encode(mac)[:-1].decode()


@given(
    st.binary(max_size=300),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60),
    st.binary(min_size=16, max_size=16),
    st.integers(-SIGNATURE_SKEW_S, SIGNATURE_SKEW_S),
)
def test_what_was_signed_verifies(body, path, nonce, skew):
    headers = signed(path=path, body=body, nonce=nonce, at=UNIX + skew)
    verdict = verify(headers, path=path, body=body)
    assert verdict.ok and verdict.signer == "a"


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_of_what_is_signed_fails(data):
    headers = {**signed(), "method": "POST", "path": PATH, "body": BODY.decode()}
    field = data.draw(st.sampled_from(sorted(headers)))
    at = data.draw(st.integers(0, len(headers[field]) - 1))
    new = data.draw(
        st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != headers[field][at])
    )
    headers[field] = headers[field][:at] + new + headers[field][at + 1 :]
    if field == "method" and headers["method"].upper() == "POST":
        return  # methods are compared in capitals
    body = headers.pop("body").encode()
    method, path = headers.pop("method"), headers.pop("path")
    assert not verify(headers, method=method, path=path, body=body).ok


def test_a_replayed_request_fails():
    verifier, headers = Verifier((KEY,)), signed()
    assert verify(headers, verifier).ok
    assert "used before" in verify(headers, verifier, now=1.0).reason


def test_a_failed_signature_does_not_use_up_its_nonce():
    verifier = Verifier((KEY,))
    assert not verify(signed(key=OLD_KEY), verifier).ok
    assert verifier.n_nonces == 0
    assert verify(signed(), verifier).ok


def test_a_nonce_is_kept_as_long_as_its_timestamp_can_pass():
    verifier = Verifier((KEY,))
    ahead = signed(at=UNIX + SIGNATURE_SKEW_S)
    assert verify(ahead, verifier).ok
    late = 2 * SIGNATURE_SKEW_S
    assert "used before" in verify(ahead, verifier, unix=UNIX + late, now=float(late)).reason
    assert "timestamp" in verify(ahead, verifier, unix=UNIX + late + 1, now=late + 1.0).reason


def test_a_wall_clock_set_back_does_not_revive_a_request():
    verifier, headers = Verifier((KEY,)), signed()
    assert verify(headers, verifier, now=0.0).ok
    assert not verify(headers, verifier, unix=UNIX - 60, now=NONCE_KEPT_S - 1).ok


@pytest.mark.parametrize("off", [SIGNATURE_SKEW_S + 1, -SIGNATURE_SKEW_S - 1, 10**15, -(10**15)])
def test_a_timestamp_outside_the_skew_fails(off):
    assert "timestamp" in verify(signed(at=int(UNIX) + off)).reason


def test_skew_is_in_whole_seconds_on_both_sides():
    assert verify(signed(at=UNIX + SIGNATURE_SKEW_S), unix=int(UNIX) + 0.999).ok


@pytest.mark.parametrize("ts", ["", "now", "1e9", "9" * 40, "１８", " 1800000000", "--5"])
def test_an_unusable_timestamp_fails(ts):
    assert not verify({**signed(), TIMESTAMP: ts}).ok


@pytest.mark.parametrize("nonce", ["", "AAAA", "A" * 23, "A" * 21 + "=", "A" * 21 + "é", "A" * 24])
def test_a_nonce_that_is_not_sixteen_bytes_fails(nonce):
    assert "nonce" in verify({**signed(), NONCE: nonce}).reason


@pytest.mark.parametrize("auth", ["", "v2=abc", "abc", "v1", "v1=", "v1=é", "V1=abc"])
def test_another_scheme_or_an_odd_mac_fails(auth):
    assert not verify({**signed(), AUTH: auth}).ok


def test_the_previous_secret_is_accepted_while_rotating():
    verifier = Verifier((KEY, OLD_KEY))
    assert verify(signed(key=OLD_KEY), verifier).ok
    assert not verify(signed(key=b"x" * 32, nonce=b"y" * 16), verifier).ok


def test_a_forward_must_be_signed_by_the_node_it_names():
    assert verify(signed(forwarded="a")).ok
    assert "another node" in verify(signed(forwarded="b")).reason
    assert not verify(signed(forwarded="")).ok


def test_header_names_may_be_in_any_case():
    assert verify({k.lower(): v for k, v in signed(forwarded="a").items()}).ok
    assert not verify({k.lower(): v for k, v in signed(forwarded="b").items()}).ok


def test_a_full_nonce_memory_refuses_rather_than_forgets(monkeypatch):
    assert NONCE_CACHE_MAX >= 100_000
    monkeypatch.setattr(signature, "NONCE_CACHE_MAX", 2)
    verifier = Verifier((KEY,))
    nonces = [bytes([i]) * 16 for i in range(3)]
    assert verify(signed(nonce=nonces[0]), verifier, now=0.0).ok
    assert verify(signed(nonce=nonces[1]), verifier, now=10.0).ok
    assert "too many" in verify(signed(nonce=nonces[2]), verifier, now=20.0).reason
    assert verify(signed(nonce=nonces[2]), verifier, now=NONCE_KEPT_S + 1).ok
    assert verifier.n_nonces == 2
