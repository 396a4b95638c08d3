"""What control asks of a worker and what it answers: the values of their private socket."""

from __future__ import annotations

from typing import Literal

import msgspec

from viiwork.errors import KvError
from viiwork.limits import KV_CONTROL_MAX_BYTES, KV_JOB_DEADLINE_S, KV_SILENCE_S
from viiwork.wire.replica import Mark
from viiwork.wire.state import Layout, StateShape


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Stages(msgspec.Struct, kw_only=True):
    """Seconds a job spent in each stage; stages of two threads overlap, so they may add up to more."""

    handshake_s: float = 0.0
    wait_s: float = 0.0  # for the peer's answers
    read_s: float = 0.0
    hash_s: float = 0.0  # hashing, proofs and encryption
    compress_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    verify_s: float = 0.0  # proofs, decryption, decompression, structure
    write_s: float = 0.0
    render_s: float = 0.0
    total_s: float = 0.0


class ModelTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model a receiver takes states of, as its engines hold them."""

    model_fp: bytes
    shape: StateShape
    max_tokens: int
    n_vocab: int = 0


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What control needs to know of a checked save-file."""

    shape: StateShape
    n_tokens: int
    n_stream: int
    v_trans: bool
    checkpoints: tuple[int, ...]  # token counts
    total_bytes: int


class StateFile(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A save-file and what it is of. The file stays the caller's; it is not removed."""

    path: str
    session: bytes
    model_fp: bytes
    generation: int
    created_unix_s: float
    source: str  # the node that made it
    known: tuple[Mark, ...] = ()  # earlier generations, and how many leading rows are theirs still
    checkpoints: int = 1  # newest ones that go along, at most
    n_written: int = 0  # what the engine reported; 0 = do not compare
    n_saved: int = 0
    n_vocab: int = 0


class SendJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send the state in a save-file to a peer that keeps it: only what the peer does not hold yet."""

    file: StateFile
    key: bytes  # channel.mesh_key
    local_name: str
    peer_name: str
    encrypt: bool
    compress: Literal["auto", "on", "off"] = "auto"
    link_bytes_per_s: float = 0.0  # measured goodput of the path, for `auto`; 0 = not known
    deadline_s: float = KV_JOB_DEADLINE_S
    silence_s: float = KV_SILENCE_S


class KeepJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep the state in a save-file of this node as a replica here."""

    file: StateFile


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
    # Tokens that are of use, 0 = all. The file has fewer where the state cannot be cut exactly there, more
    # where the engine reaches further back in it than a shorter one goes.
    at_most: int = 0


class MatchJob(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many leading tokens does a prompt share with a replica?"""

    replica: str
    prefix: bytes  # `prefix_digests` of the prompt's tokens


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


Job = SendJob | ReceiveGrant | KeepJob | RenderJob | MatchJob | InspectJob | DropJob | StatsJob


class SendDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    info: SaveFacts
    total_bytes: int  # of the save-file
    kept: int  # positions the peer held already
    raw_bytes: int  # of tokens, rows and blobs that were sent
    wire_bytes: int  # sent, all told
    stages: Stages


class ReceiveDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica that is kept from now on, received or of this node's own file."""

    replica: str
    session: bytes
    model_fp: bytes
    generation: int
    source: str
    n_tokens: int
    kept: int  # positions that were held already
    total_bytes: int  # of the replica
    raw_bytes: int  # of tokens, rows and blobs that came
    wire_bytes: int
    dropped: tuple[str, ...]  # replicas that made room or were replaced
    stages: Stages
    known: tuple[Mark, ...] = ()  # the offer's: generations whose leading rows these are, itself among them


class RenderDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    n_tokens: int
    total_bytes: int
    stages: Stages


class MatchDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompt's first `n_same` tokens are the replica's, and `next` are those that follow in it."""

    n_same: int
    next: bytes  # little-endian i32, at most KV_PREFIX_TOKENS: the difference is among them


class InspectDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    info: SaveFacts


class DropDone(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dropped: bool


class StoreStats(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: int
    replica_bytes: int
    unfinished: int  # broken transfers whose verified rows are kept
    incoming: int
    budget_bytes: int
    transfers: int


class Ready(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of a worker."""

    pid: int


class Failed(_Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str
    message: str


Done = SendDone | ReceiveDone | RenderDone | MatchDone | InspectDone | DropDone | StoreStats | Ready | Failed


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
