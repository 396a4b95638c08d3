"""Ways to a peer: which pairs of addresses are worth a probe, and which that answered is the best."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from viiwork.core.addresses import is_acceptable, is_tailnet, is_within
from viiwork.limits import (
    LINK_ADDRESSES_MAX,
    LINK_AGAIN_S,
    LINK_CHECK_S,
    LINK_GUESS_BYTES_PER_S,
    LINK_KEPT_MIN,
    LINK_NEAR_S,
    LINK_PATHS_MAX,
    LINK_RATE_ALPHA,
    LINK_RATE_KEPT_S,
    LINK_RATE_MIN_BYTES,
    LINK_TUNNEL_BYTES_PER_S,
    LINK_WINDOW_BYTES,
)

_METADATA = ipaddress.ip_address("169.254.169.254")  # hands out cloud credentials
_BYTES_PER_MBIT = 125_000
_EQUAL_BYTES_PER_S = 1e6  # speeds this near are the same


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """An address of this machine's and the interface that bears it."""

    addr: str  # without a zone
    prefix_len: int
    interface: str
    speed_mbps: int | None  # None = the interface does not say
    mtu: int


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """An address a peer says it has."""

    addr: str
    speed_mbps: int | None
    mtu: int


@dataclass(frozen=True, slots=True)
class Path:
    """One way to a peer. Link-local addresses carry the zone they have here (`fe80::1%eth1`)."""

    addr: str
    source: str = ""  # where connections come from, "" = the kernel's choice
    interface: str = field(default="", compare=False)
    speed_mbps: int | None = field(default=None, compare=False)  # of the slower end
    mtu: int = field(default=0, compare=False)
    is_mesh: bool = False


class LinkRule:
    """`kv_share.direct`, and what a mesh without a secret may use."""

    def __init__(self, direct: str | tuple[str, ...], *, secured: bool, open_lan: bool) -> None:
        self.is_off = direct in ("off", ())
        self._networks = direct if isinstance(direct, tuple) else None
        self._secured = secured
        self._open_lan = open_lan

    @property
    def is_list(self) -> bool:
        """The operator named the addresses: they count even where they are not on a network of ours."""
        return self._networks is not None

    def allows(self, addr: str) -> bool:
        """May this address, ours or a peer's, be an end of a direct link?"""
        if self.is_off:
            return False
        try:
            ip = ipaddress.ip_address(addr)
        except ValueError:
            return False
        if ip.is_loopback or ip.is_unspecified or ip.is_multicast or ip == _METADATA or "%" in addr:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            return False
        if self._networks is not None and not is_within(addr, self._networks):
            return False
        return self._secured or is_tailnet(addr) or (self._open_lan and _is_lan(addr, ip))


def _is_lan(addr: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return is_acceptable(addr, "lan") or (ip.version == 6 and ip.is_link_local)


def told_addresses(own: Iterable[LinkAddress], rule: LinkRule) -> list[LinkAddress]:
    """Those of this machine's addresses that peers are told, the fastest first."""
    usable = _usable(own, rule)
    usable.sort(key=lambda mine: (-(mine.speed_mbps or 0), _is_link_local(mine.addr), mine.addr))
    return usable[:LINK_ADDRESSES_MAX]


def _usable(own: Iterable[LinkAddress], rule: LinkRule) -> list[LinkAddress]:
    """Allowed addresses; a link-local one only where its interface has no other: both lead the same way."""
    allowed = [mine for mine in own if rule.allows(mine.addr)]
    settled = {mine.interface for mine in allowed if not _is_link_local(mine.addr)}
    return [mine for mine in allowed if not _is_link_local(mine.addr) or mine.interface not in settled]


def paths_to(
    own: Sequence[LinkAddress], told: Iterable[PeerAddress], rule: LinkRule, mesh_addr: str
) -> list[Path]:
    """Pairs of addresses worth a probe, the fastest first.

    A peer's address is tried from each interface whose network it is on; one on no network of ours only
    where the operator named it. An address that is also ours (the bridges of two container hosts are often
    alike) leads to ourselves, and the peer's address in the mesh is a path already.
    """
    mine = _usable(own, rule)
    held = {address.addr for address in own}
    found = []
    for theirs in told:
        if theirs.addr in held or theirs.addr == mesh_addr or not rule.allows(theirs.addr):
            continue
        beside = [address for address in mine if _on_link(address, theirs.addr)]
        found += [_path(address, theirs) for address in beside]
        if not beside and rule.is_list and not _is_link_local(theirs.addr):
            found.append(Path(theirs.addr, speed_mbps=theirs.speed_mbps, mtu=theirs.mtu))
    found.sort(key=lambda path: (-(path.speed_mbps or 0), "%" in path.addr, path.addr, path.source))
    return found[:LINK_PATHS_MAX]


def _path(mine: LinkAddress, theirs: PeerAddress) -> Path:
    zone = f"%{mine.interface}" if _is_link_local(theirs.addr) and ":" in theirs.addr else ""
    return Path(
        theirs.addr + zone,
        mine.addr + zone,
        mine.interface,
        slower(mine.speed_mbps, theirs.speed_mbps),
        min(mine.mtu, theirs.mtu),
    )


def mesh_path(addr: str, own_ip: str, own: Iterable[LinkAddress], told: Iterable[PeerAddress]) -> Path:
    """The way by the peer's address in the mesh, with what both ends say of the interfaces there."""
    mine = next((address for address in own if address.addr == own_ip), None)
    theirs = next((address for address in told if address.addr == addr), None)
    return Path(
        addr,
        speed_mbps=slower(mine.speed_mbps if mine else None, theirs.speed_mbps if theirs else None),
        interface=mine.interface if mine else "",
        is_mesh=True,
    )


def slower(a: int | None, b: int | None) -> int | None:
    """The slower of two speeds as far as they are known."""
    return min((speed for speed in (a, b) if speed is not None), default=None)


def _on_link(mine: LinkAddress, addr: str) -> bool:
    ip, own = ipaddress.ip_address(addr), ipaddress.ip_address(mine.addr)
    if ip.version != own.version:
        return False
    n_rest = ip.max_prefixlen - mine.prefix_len
    return int(ip) >> n_rest == int(own) >> n_rest


def _is_link_local(addr: str) -> bool:
    return ipaddress.ip_address(addr).is_link_local


@dataclass(slots=True)
class _Seen:
    """What one path has shown."""

    rtt_s: float | None = None  # of the newest probe that was answered
    rate: float | None = None  # bytes/s of transfers
    rated_at: float = 0.0
    n_transfers: int = 0
    failure: str = ""


class PeerPaths:
    """The ways to one peer and what they have shown; the mesh's is always among them."""

    def __init__(self, mesh: Path) -> None:
        self._mesh = mesh
        self._seen: dict[Path, _Seen] = {mesh: _Seen()}
        self._failures = 0  # rounds since the last one in which every path answered

    def paths(self) -> list[Path]:
        return list(self._seen)

    def offer(self, mesh: Path, paths: Iterable[Path]) -> None:
        """The paths there are now; what known ones have shown is kept."""
        self._mesh = mesh
        self._seen = {path: self._seen.get(path, _Seen()) for path in (mesh, *paths)}

    def answered(self, path: Path, rtt_s: float) -> bool:
        """The peer itself answered a probe; True when the path is new, or works again."""
        if (seen := self._seen.get(path)) is None:
            return False
        is_new = bool(seen.failure) or seen.rtt_s is None
        seen.rtt_s, seen.failure = rtt_s, ""
        return is_new

    def failed(self, path: Path, why: str) -> bool:
        """A probe or a transfer failed; True when the path worked before."""
        if (seen := self._seen.get(path)) is None:
            return False
        worked = not seen.failure and seen.rtt_s is not None
        seen.failure = why
        seen.rate = None  # what comes back may be another link
        return worked

    def sent(self, path: Path, n_bytes: int, seconds: float, now: float) -> None:
        """A transfer came to its end."""
        if (seen := self._seen.get(path)) is None:
            return
        seen.failure = ""
        if n_bytes < LINK_RATE_MIN_BYTES or seconds <= 0:
            return
        rate = n_bytes / seconds
        if (before := self.measured(path, now)) is not None:
            rate = before + LINK_RATE_ALPHA * (rate - before)
        seen.rate, seen.rated_at = rate, now
        seen.n_transfers += 1

    def next_check_s(self, is_whole: bool) -> float:
        """Until the next round of probes; `is_whole`: every path answered in the last one."""
        self._failures = 0 if is_whole else min(self._failures + 1, 8)
        return LINK_CHECK_S if is_whole else min(LINK_AGAIN_S * 2 ** (self._failures - 1), LINK_CHECK_S)

    def ranked(self, now: float) -> list[Path]:
        """Paths to try in this order: direct ones that answered, and the mesh's whatever it did."""
        usable = [
            path
            for path, seen in self._seen.items()
            if path.is_mesh or (not seen.failure and seen.rtt_s is not None)
        ]
        return sorted(usable, key=lambda path: self._order(path, now))

    def _order(self, path: Path, now: float) -> tuple[bool, int, bool, int, bool, float, str, str]:
        seen = self._seen[path]
        rtt_s = seen.rtt_s if seen.rtt_s is not None else LINK_CHECK_S
        rate = round(self.rate(path, now)[0] / _EQUAL_BYTES_PER_S)
        # Of equals a direct one, for the mesh's address may be a tunnel or a shared network; and one that was
        # not tried yet, so that all are once.
        return (
            *(bool(seen.failure), -rate, path.is_mesh, seen.n_transfers, "%" in path.addr),
            *(rtt_s, path.addr, path.source),
        )

    def rate(self, path: Path, now: float) -> tuple[float, str]:
        """Bytes/s a transfer will get, and how that is known.

        Transfers say it. Without a fresh one it is what the interfaces and the window allow, of which the
        path is believed to keep as much as the best one that was measured: what the machines are too slow
        for is lost on every path.
        """
        if (rate := self.measured(path, now)) is not None:
            n = self._seen[path].n_transfers
            return rate, f"measured over {n} transfer{'s' if n != 1 else ''}"
        kept = [
            rate / self._guess(other)[0]
            for other in self._seen
            if (rate := self.measured(other, now)) is not None
        ]
        guess, why = self._guess(path)
        share = min(max(*kept, LINK_KEPT_MIN), 1.0) if kept else 1.0
        return guess * share, why

    def measured(self, path: Path, now: float) -> float | None:
        """Bytes/s of the newest transfers; None = there were none lately."""
        seen = self._seen.get(path)
        return seen.rate if seen is not None and now - seen.rated_at < LINK_RATE_KEPT_S else None

    def _guess(self, path: Path) -> tuple[float, str]:
        """What the interfaces and one connection's window allow."""
        if path.speed_mbps is not None:
            guess, why = float(path.speed_mbps * _BYTES_PER_MBIT), f"link of {path.speed_mbps} Mb/s"
        elif is_tailnet(path.addr):
            guess, why = LINK_TUNNEL_BYTES_PER_S, "guessed for a tunnel"
        else:
            guess, why = LINK_GUESS_BYTES_PER_S, "guessed, the link's speed is not known"
        rtt_s = self._seen[path].rtt_s
        if rtt_s is not None and rtt_s > LINK_NEAR_S and (most := LINK_WINDOW_BYTES / rtt_s) < guess:
            guess, why = most, f"bounded by a round trip of {rtt_s * 1000:.0f} ms"
        return guess, why

    def as_json(self, now: float) -> dict[str, Any]:
        """The path in use and why, and all others."""
        best = self.ranked(now)[0]
        shown = [self._shown(path, now) for path in sorted(self._seen, key=lambda p: self._order(p, now))]
        return {**self._shown(best, now), "why": self._why(best, now), "paths": shown}

    def _why(self, best: Path, now: float) -> str:
        rate, how = self.rate(best, now)
        others = len(self._seen) - 1
        if not others:
            return "the only path: no other address of the peer is on a network of this node"
        if best.is_mesh and len(self.ranked(now)) == 1:
            return f"none of {others} direct links answers"
        return f"the fastest: {how}" if rate else how

    def _shown(self, path: Path, now: float) -> dict[str, Any]:
        seen = self._seen[path]
        rate, how = self.rate(path, now)
        body: dict[str, Any] = {
            "addr": path.addr,
            "kind": "mesh" if path.is_mesh else "direct",
            "mb_per_s": round(rate / 1e6, 1),
            "how": how,
        }
        known = {
            "source": path.source,
            "interface": path.interface,
            "link_mbps": path.speed_mbps,
            "mtu": path.mtu,
            "rtt_ms": round(seen.rtt_s * 1000, 3) if seen.rtt_s is not None else None,
            "transfers": seen.n_transfers,
            "failed": seen.failure,
        }
        return body | {key: value for key, value in known.items() if value}
