"""Receiving end of the proofs: which node a request really comes from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from viiwork.core.addresses import is_loopback
from viiwork.core.cross_origin import is_loopback_host
from viiwork.errors import Forbidden, Unauthorized
from viiwork.limits import CLAIM_LOG_MAX
from viiwork.mesh.notices import Repeats, one_line
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import Member, canonical_ip
from viiwork.wire.signature import FORWARDED, SIGNER, Verifier

log = logging.getLogger(__name__)

_PROXIED = ("X-Forwarded-For", "Forwarded", "X-Real-Ip", "Via")


class MeshOrigins:
    """Proof of who sent a request: a signature when the mesh has a secret, else the member's own address."""

    def __init__(
        self,
        name: str,
        keys: tuple[bytes, ...],
        peer: PeerClient,
        find_member: Callable[[str], Member | None],
        *,
        is_at: Callable[[str, str], bool] = lambda name, ip: False,
        now: Callable[[], float] = time.monotonic,
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        """`is_at` says whether a member told this node that it is at an address beside its mesh one."""
        self._is_at = is_at
        self._name = name
        self._verifier = Verifier(keys) if keys else None
        self._peer = peer
        self._find_member = find_member
        self._now = now
        self._unix_now = unix_now
        self._claims = Repeats(max_keys=CLAIM_LOG_MAX)

    def forwarded_by(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str | None:
        """Entry node of a proven forward, None for an ordinary client.

        Secured: a wrong proof raises Unauthorized. Open: a claim from any other address than that member's
        is just a client with an odd header.
        """
        claimed = headers.get(FORWARDED)
        if claimed is None:
            return None
        try:
            return self._prove(claimed, method, path_qs, headers, body, remote_ip)
        except Forbidden as error:
            if self._claims.is_due(claimed[:128], self._now()):
                log.warning("unproven forward treated as a client's request: %s", error)
            return None

    def sent_by(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str:
        """Node that sent a request only nodes may send; raises Unauthorized or Forbidden."""
        claimed = headers.get(SIGNER, "")
        if self._verifier is None and self._is_at(claimed, _plain_ip(remote_ip)):
            return claimed
        return self._prove(claimed, method, path_qs, headers, body, remote_ip)

    def control(
        self, method: str, path_qs: str, headers: Mapping[str, str], body: bytes, remote_ip: str
    ) -> str:
        """Who makes a control write: whoever holds the secret, else only somebody on this very machine.

        Raises Unauthorized or Forbidden. A web page is refused although it runs here: its requests carry
        an `Origin`, or (a foreign name made to resolve to this machine) a foreign `Host`.
        """
        if self._verifier is None:
            reason = _not_from_here(headers, remote_ip)
            if reason:
                raise Forbidden(f"an open mesh takes changes only from the node's own machine: {reason}")
            return "this machine"
        verdict = self._verifier.verify(
            method, path_qs, headers, body, now_unix_s=self._unix_now(), now=self._now()
        )
        if not verdict.ok:
            if self._claims.is_due(f"control {remote_ip}", self._now()):
                log.warning("control.refused remote=%s: %s", one_line(remote_ip), verdict.reason)
            raise Unauthorized(
                f"the mesh has a secret, and this change is not signed with it: {verdict.reason}"
            )
        return one_line(verdict.signer)

    @property
    def source_ip(self) -> str:
        """Where connections to peers must come from, "" = anywhere."""
        return self._peer.source_ip

    def forward_headers(self, method: str, path_qs: str, body: bytes) -> dict[str, str]:
        """Headers that prove to a peer that this node forwards the request."""
        return self._peer.forward_headers(method, path_qs, body)

    def _prove(
        self,
        claimed: str,
        method: str,
        path_qs: str,
        headers: Mapping[str, str],
        body: bytes,
        remote_ip: str,
    ) -> str:
        if self._verifier is not None:
            verdict = self._verifier.verify(
                method, path_qs, headers, body, now_unix_s=self._unix_now(), now=self._now()
            )
            reason = verdict.reason
            if not reason and verdict.signer == self._name:
                reason = "signed in this node's own name"
            if reason:
                if self._claims.is_due(claimed[:128], self._now()):
                    log.warning(
                        "request of %s at %s refused: %s", one_line(claimed) or "nobody", remote_ip, reason
                    )
                raise Unauthorized(f"not a request of this mesh: {reason}")
            return verdict.signer
        member = self._find_member(claimed)
        if member is None or member.addr != _plain_ip(remote_ip):
            raise Forbidden(f"{one_line(claimed)!r} is no member at {one_line(remote_ip)}")
        return member.name


def _not_from_here(headers: Mapping[str, str], remote_ip: str) -> str:
    """Why a request may not be one of this machine's own; "" if nothing speaks against it."""
    if not is_loopback(remote_ip):
        return f"it came from {one_line(remote_ip)}"
    if headers.get("Origin") is not None:
        return "a web page sent it"
    if any(headers.get(name) is not None for name in _PROXIED):
        return "a proxy passed it on"
    host = headers.get("Host", "")
    return "" if is_loopback_host(host) else f"it was sent to {one_line(host)[:100]!r}, not to 127.0.0.1"


def _plain_ip(text: str) -> str:
    """The sender's address the way members' addresses are written; "" if it is none."""
    try:
        return canonical_ip(text.partition("%")[0])
    except ValueError:
        return ""
