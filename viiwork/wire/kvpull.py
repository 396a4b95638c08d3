"""`POST /v1/kv/pull`: a node asks for a session's state, and hears when it has it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from viiwork.errors import RequestError
from viiwork.limits import MODEL_NAME_MAX_BYTES

PULL_PATH = "/v1/kv/pull"

_Generation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PullAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Push me this session's state if yours is newer than this generation."""

    session: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MODEL_NAME_MAX_BYTES)]
    newer_than: _Generation = 0


class PullDone(msgspec.Struct, frozen=True, kw_only=True):
    """The state has arrived with whoever asked."""

    generation: _Generation


_asks = msgspec.json.Decoder(PullAsk)
_dones = msgspec.json.Decoder(PullDone)
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: PullAsk | PullDone) -> bytes:
    return msgspec.json.encode(message)


def decode_ask(body: bytes) -> PullAsk:
    """Raises `RequestError` with what is wrong."""
    try:
        return _asks.decode(body)
    except _ERRORS as error:
        raise RequestError(f"not a question for a state: {error}") from error


def decode_done(body: bytes) -> PullDone:
    """Raises `RequestError` with what is wrong."""
    try:
        return _dones.decode(body)
    except _ERRORS as error:
        raise RequestError(f"not the answer to a question for a state: {error}") from error
