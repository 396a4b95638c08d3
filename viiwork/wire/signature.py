"""Signatures of requests between nodes: HMAC-SHA256 over what the request is, with a nonce against replay.

    X-Viiwork-Forwarded: <entry node>        only on forwards; must equal the signer
    X-Viiwork-Node:      <signer id>
    X-Viiwork-Ts:        <unix seconds>
    X-Viiwork-Nonce:     <16 random bytes, base64url without padding>
    X-Viiwork-Auth:      v1=<base64url of the MAC, without padding>

The MAC covers eight lines joined by newlines: `v1`, `req`, METHOD, path with query, ts, nonce, signer id,
hex SHA-256 of the body (empty when there is no body).
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from viiwork.limits import NONCE_CACHE_MAX, NONCE_KEPT_S, SIGNATURE_SKEW_S, SIGNER_MAX_CHARS

FORWARDED = "X-Viiwork-Forwarded"
SIGNER = "X-Viiwork-Node"
TIMESTAMP = "X-Viiwork-Ts"
NONCE = "X-Viiwork-Nonce"
AUTH = "X-Viiwork-Auth"

NONCE_BYTES = 16
_SCHEME = "v1"
_TS = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_NONCE = re.compile(r"[A-Za-z0-9_-]{22}", re.ASCII)  # 16 bytes without padding


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who signed, or why the signature proves nothing (`reason`, one line, "" when it does)."""

    signer: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


def sign(
    key: bytes, signer: str, method: str, path_qs: str, body: bytes, *, now_unix_s: float, nonce: bytes
) -> dict[str, str]:
    """The four headers that prove `signer` made this request; `nonce` is 16 fresh random bytes."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    ts, nonce_text = str(int(now_unix_s)), _b64(nonce)
    return {
        SIGNER: signer,
        TIMESTAMP: ts,
        NONCE: nonce_text,
        AUTH: f"{_SCHEME}={_mac(key, method, path_qs, ts, nonce_text, signer, body)}",
    }


class Verifier:
    """Checks signatures against the current and the previous key; remembers nonces. One owner, one clock."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        if not keys:
            raise ValueError("a verifier needs at least one key")
        self._keys = keys
        self._seen: dict[bytes, float] = {}  # nonce -> monotonic seconds, oldest first

    @property
    def n_nonces(self) -> int:
        return len(self._seen)

    def verify(
        self,
        method: str,
        path_qs: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        now_unix_s: float,
        now: float,
    ) -> Verdict:
        """Judge one request. A forward (`X-Viiwork-Forwarded` present) must be signed by the node it names.

        `now_unix_s` judges the sender's clock; the monotonic `now` ages nonces, so that a wall clock set
        back cannot bring a recorded request back to life.
        """
        auth, signer = _get(headers, AUTH), _get(headers, SIGNER)
        ts, nonce_text = _get(headers, TIMESTAMP), _get(headers, NONCE)
        if not auth:
            return Verdict(reason="no signature")
        scheme, _, mac = auth.partition("=")
        if scheme != _SCHEME:
            return Verdict(reason="unknown signature scheme")
        if not signer or len(signer) > SIGNER_MAX_CHARS:
            return Verdict(reason="no usable signer")
        if not _NONCE.fullmatch(nonce_text):
            return Verdict(reason=f"nonce is not {NONCE_BYTES} bytes")
        if not _TS.fullmatch(ts):
            return Verdict(reason="no usable timestamp")
        off_s = int(ts) - int(now_unix_s)
        if abs(off_s) > SIGNATURE_SKEW_S:
            return Verdict(reason=f"timestamp is {off_s:+d} s off; the clocks differ too much")
        # Every key is tried, so the time taken does not tell which one fits.
        fits = [
            hmac.compare_digest(
                _mac(key, method, path_qs, ts, nonce_text, signer, body).encode(),
                mac.encode("utf-8", "surrogateescape"),
            )
            for key in self._keys
        ]
        if not any(fits):
            return Verdict(reason="signature does not match; the secret differs or the request was changed")
        if _get(headers, FORWARDED, signer) != signer:
            return Verdict(reason="signed by another node than the one it claims to come from")
        if reason := self._use(base64.urlsafe_b64decode(nonce_text + "=="), now):
            return Verdict(reason=reason)
        return Verdict(signer=signer)

    def _use(self, nonce: bytes, now: float) -> str:
        """Remember a nonce; says why it may not be used. Only proven requests get here."""
        while self._seen:
            oldest = next(iter(self._seen))
            if now - self._seen[oldest] <= NONCE_KEPT_S:
                break
            del self._seen[oldest]
        if nonce in self._seen:
            return "nonce was used before"
        if len(self._seen) >= NONCE_CACHE_MAX:
            return "too many signed requests to tell a replay"  # forgetting one would let it in again
        self._seen[nonce] = now
        return ""


def _mac(key: bytes, method: str, path_qs: str, ts: str, nonce: str, signer: str, body: bytes) -> str:
    digest = sha256(body).hexdigest() if body else ""
    lines = "\n".join((_SCHEME, "req", method.upper(), path_qs, ts, nonce, signer, digest))
    return _b64(hmac.digest(key, lines.encode("utf-8", "surrogateescape"), "sha256"))


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _get(headers: Mapping[str, str], name: str, absent: str = "") -> str:
    """A header by name in any mapping: case-insensitive ones directly, plain dicts in either case."""
    value = headers.get(name)
    return value if value is not None else headers.get(name.lower(), absent)
