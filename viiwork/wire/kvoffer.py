"""The body of `POST /v1/kv/channel`: which session's state a node wants to hand over."""

from __future__ import annotations

from typing import Annotated

import msgspec

from viiwork.errors import RequestError
from viiwork.limits import MODEL_NAME_MAX_BYTES

ENCRYPT_HEADER = "X-Viiwork-Kv-Encrypt"  # in the 101: this end takes the state only encrypted

_Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32,64}\Z")]


_Link = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Enough for the peer to say no before a byte of the state travels."""

    session: _Hex  # hashed session key
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MODEL_NAME_MAX_BYTES)]
    generation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    n_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    model_fp: _Hex
    state: Annotated[str, msgspec.Meta(max_length=64)]  # state version and digest of the layout
    tip: _Link = ""  # last link of the turn that made the state, "" = had none
    scope: _Link = ""  # of the client's key, "" = had none


_DECODER = msgspec.json.Decoder(StateOffer)


def encode_offer(offer: StateOffer) -> bytes:
    return msgspec.json.encode(offer)


def decode_offer(body: bytes) -> StateOffer:
    """Raises `RequestError` with what is wrong."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"not an offer of a state: {error}") from error
