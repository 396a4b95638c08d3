"""What gossip's counters say about the mesh between two looks. Pure."""

from __future__ import annotations

import kinship

UDP_LOOK_S = 30.0
_UDP_LOSS_N = 5  # of about 30 probes in that time; one lost datagram is no news


def unread_packets(before: kinship.Stats, after: kinship.Stats, *, is_open: bool) -> list[tuple[str, str]]:
    """(key, line) of each problem with packets that could not be read since `before`."""
    found = []
    if n := after.decrypt_failures - before.decrypt_failures:
        found.append(
            ("secret", f"{n} gossip packets could not be decrypted: a node's mesh secret differs from ours")
        )
    if n := after.decode_errors - before.decode_errors:
        what = (
            "could not be read: the secret differs, a node has one and we are open"
            if is_open
            else "were not encrypted: the secret differs, a node has none and we are secured"
        )
        found.append(("mode", f"{n} gossip packets {what}, or something else sends to the port"))
    return found


def udp_loss(before: kinship.Stats, after: kinship.Stats, port: int) -> tuple[str, str] | None:
    """The problem of probes that only TCP answered, looked at every UDP_LOOK_S."""
    n = after.tcp_ping_acks - before.tcp_ping_acks
    if n < _UDP_LOSS_N:
        return None
    return "udp", f"{n} probes were answered over TCP only: {port}/udp is blocked or loses packets"
