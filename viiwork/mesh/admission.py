"""Whether what gossip calls a member is one of ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from viiwork.core.addresses import Network, is_acceptable
from viiwork.core.names import node_name_problem
from viiwork.mesh.keys import key_id, read_ids
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import Member, MemberState, split_host_port

META_VERSION = "2"
_VERSION_MAX_CHARS = 64


@dataclass(frozen=True, slots=True)
class MeshIdentity:
    """How this node appears in the mesh."""

    name: str
    addr: str  # IP literal gossip binds and advertises
    port: int  # 0 = any free one
    api_port: int
    version: str
    role: str = "node"
    # Current and previous secret; () = open mesh. Kept out of logs and tracebacks.
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    network: Network = "lan"
    loopback_ok: bool = False  # mesh.advertise names a loopback address

    @property
    def is_open(self) -> bool:
        return not self.keys

    def meta(self) -> dict[str, str]:
        """What gossip carries about this node; model names are not in it, they come by capacity polls."""
        meta = {"v": META_VERSION, "api": str(self.api_port), "ver": self.version, "role": self.role}
        if self.keys:
            meta["k"] = ",".join(key_id(key) for key in self.keys)
        return meta


def admit(
    us: MeshIdentity, name: str, gossip_addr: str, state: MemberState, meta: Mapping[str, str], epoch: int
) -> Member | str:
    """The member as ours, or one line that says why it has no business here."""
    shown = one_line(f"member {name} at {gossip_addr}")
    if problem := node_name_problem(name):
        return f"{shown}: its name {problem}"
    try:
        addr, port = split_host_port(gossip_addr)
    except ValueError:
        return f"{shown}: unusable address"
    if meta.get("v") != META_VERSION:
        return f"{shown} is no viiwork node of this generation"
    api_port = _port(meta.get("api", ""))
    if api_port is None:
        return f"{shown}: unusable API port"
    if us.is_open and not is_acceptable(addr, us.network, loopback_ok=us.loopback_ok):
        return f"{shown} is outside the {us.network} ranges an open mesh accepts"
    return Member(
        name=name,
        addr=addr,
        gossip_port=port,
        api_port=api_port,
        state=state,
        version=one_line(meta.get("ver", ""))[:_VERSION_MAX_CHARS],
        # A role we do not know runs nothing we could ask for.
        role="node" if meta.get("role", "node") == "node" else "gateway",
        epoch=epoch,
        key_ids=read_ids(meta.get("k", "")),
    )


def _port(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        return None
    port = int(text)
    return port if 1 <= port <= 65535 else None
