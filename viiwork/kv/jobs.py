"""What control asks of a worker and what it answers: the values of their private socket."""

from __future__ import annotations

import msgspec

from viiwork.errors import KvError
from viiwork.limits import KV_CONTROL_MAX_BYTES, KV_JOB_DEADLINE_S, KV_SILENCE_S
from viiwork.wire.replica import Manifest
from viiwork.wire.whole_file import Layout, SaveInfo, StateShape


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Stages(msgspec.Struct, kw_only=True):
    """Seconds a job spent in each stage; stages of two threads overlap, so they may add up to more."""

    handshake_s: float = 0.0
    wait_s: float = 0.0  # for the peer's answers
    read_s: float = 0.0
    hash_s: float = 0.0  # hashing, proofs and encryption
    send_s: float = 0.0
    receive_s: float = 0.0
    verify_s: float = 0.0  # proofs, decryption, structure
    write_s: float = 0.0
    render_s: float = 0.0
    total_s: float = 0.0


class ModelTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model a receiver takes states of, as its engines hold them."""

    model_fp: bytes
    shape: StateShape
    max_tokens: int
    n_vocab: int = 0


class SendJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send a save-file. The file stays the caller's; it is not removed."""

    path: str
    session: bytes
    model_fp: bytes
    generation: int
    created_unix_s: float
    key: bytes  # channel.mesh_key
    local_name: str
    peer_name: str
    encrypt: bool
    n_written: int = 0  # what the engine reported; 0 = do not compare
    n_saved: int = 0
    n_vocab: int = 0
    deadline_s: float = KV_JOB_DEADLINE_S
    silence_s: float = KV_SILENCE_S


class ReceiveGrant(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take one state from a peer, on these terms."""

    keys: tuple[bytes, ...]  # current mesh key first, then the previous one
    local_name: str
    peer_name: str
    models: tuple[ModelTerms, ...]
    require_encrypt: bool = False
    deadline_s: float = KV_JOB_DEADLINE_S
    silence_s: float = KV_SILENCE_S


class RenderJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Write a replica as a file the target engine restores; `out` must not exist."""

    replica: str
    target: Layout
    out: str


class InspectJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    n_vocab: int = 0


class DropJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str


class StatsJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class CancelJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give up the request `id`; it answers with `cancelled` unless it was done already."""

    id: int


Job = SendJob | ReceiveGrant | RenderJob | InspectJob | DropJob | StatsJob


class SendDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    info: SaveInfo
    total_bytes: int
    stages: Stages


class ReceiveDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    manifest: Manifest
    dropped: tuple[str, ...]  # replicas that made room or were replaced
    stages: Stages


class RenderDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    n_tokens: int
    total_bytes: int
    stages: Stages


class InspectDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    info: SaveInfo


class DropDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dropped: bool


class StoreStats(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: int
    replica_bytes: int
    incoming: int
    incoming_bytes: int
    budget_bytes: int
    transfers: int


class Ready(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of a worker."""

    pid: int


class Failed(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str
    message: str


Done = SendDone | ReceiveDone | RenderDone | InspectDone | DropDone | StoreStats | Ready | Failed


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: int
    job: Job | CancelJob


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: int
    done: Done


_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def pack(message: Request | Reply) -> bytes:
    """Raises `KvError` (`too_large`) when the message does not fit the socket."""
    data = msgspec.msgpack.encode(message)
    if len(data) > KV_CONTROL_MAX_BYTES:
        raise KvError("too_large", f"a control message of {len(data)} bytes")
    return data


def unpack_request(data: bytes) -> Request:
    return _requests.decode(data)


def unpack_reply(data: bytes) -> Reply:
    return _replies.decode(data)
