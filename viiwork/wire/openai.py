"""What a request body and its headers say about routing; and the two changes made to a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from blake3 import blake3
from msgspec import UNSET, Raw, UnsetType

from viiwork.core.turn import Chain
from viiwork.errors import RequestError
from viiwork.limits import MODEL_NAME_MAX_CHARS, SESSION_KEY_MAX_BYTES
from viiwork.native.span import offset_in
from viiwork.wire.conversation import Parts, body_key, chain_of

# Where clients name their session: the first one that says something counts, then what the body says.
SESSION_HEADERS = (
    "X-Session-Affinity",
    "X-Session-Id",
    "X-Claude-Code-Session-Id",
    "X-Opencode-Session",
    "Session-Id",
    "Session_id",
    "Thread-Id",
    "Conversation_id",
    "X-Amp-Thread-Id",
    "X-Hermes-Session-Id",
    "X-Qwen-Code-Session-Id",
    "X-Litellm-Session-Id",
    "Helicone-Session-Id",
)
KV_SHARE_HEADER = "X-Viiwork-Kv-Share"
_SHARED = frozenset(
    ("", "auto", "on", "true", "yes", "1")
)  # all else keeps the state: a slip must not send it
ENGINE_CHOOSES = -1  # `id_slot` that lets the engine take any idle slot

# Endpoints whose work needs a slot, and whether the engine honours `id_slot` in their body.
_PINNABLE = {
    "/v1/chat/completions": True,
    "/v1/completions": True,
    "/v1/messages": True,
    "/v1/responses": True,
    "/infill": True,
    "/v1/embeddings": False,
    "/v1/rerank": False,
    "/rerank": False,
}
_WITHOUT_SLOT = ("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/apply-template")
INFERENCE_PATHS = (*_PINNABLE, *_WITHOUT_SLOT)


class Peek(msgspec.Struct, frozen=True):
    """The few facts routing needs; everything else in the body is the engine's business."""

    model: str
    stream: bool  # asked for; what the engine does shows in its answer
    session_key: str | None  # the client's own key, hashed: 32 hex digits
    chain: Chain | None
    kv_share: bool
    needs_slot: bool
    pinnable: bool
    names_slot: bool  # the client sent an `id_slot` of its own


class _Wanted(Parts):
    model: str | UnsetType = UNSET
    stream: Raw | UnsetType = UNSET
    id_slot: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET


class _Plain(msgspec.Struct):
    """The same of a body whose `messages` or `input` are no lists."""

    model: str | UnsetType = UNSET
    stream: Raw | UnsetType = UNSET
    id_slot: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET


class _Named(msgspec.Struct):
    model: msgspec.Raw


_decode = msgspec.json.Decoder(_Wanted).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_plain = msgspec.json.Decoder(_Plain).decode


def peek(path: str, headers: Mapping[str, str], body: bytes) -> Peek:
    """Read what routing needs. Raises `RequestError` for a body no engine could mean the same by.

    Of equal keys the last one counts, as it does for the engine.
    """
    wanted, input_raw = _wanted(body)
    model = wanted.model
    if not isinstance(model, str) or not model:
        raise RequestError("the request names no model")
    if len(model) > MODEL_NAME_MAX_CHARS:
        raise RequestError(f"the model name is longer than {MODEL_NAME_MAX_CHARS} characters")
    pinnable = _PINNABLE.get(path)
    # Several answers to one prompt need several slots; pinned, they would wait for each other.
    single = isinstance(wanted.n, UnsetType) or bytes(wanted.n) in (b"1", b"null")
    return Peek(
        model=model,
        stream=not isinstance(wanted.stream, UnsetType) and bytes(wanted.stream) == b"true",
        session_key=session_key(headers, wanted),
        chain=chain_of(path, wanted, input_raw),
        kv_share=headers.get(KV_SHARE_HEADER, "").strip().lower() in _SHARED,
        needs_slot=pinnable is not None,
        pinnable=bool(pinnable) and single,
        names_slot=not isinstance(wanted.id_slot, UnsetType),
    )


def session_key(headers: Mapping[str, str], parts: Parts) -> str | None:
    """The client's name for its session as 32 hex digits; None when it sent none worth the name."""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        if value and (value := value.strip()):
            break
    else:
        value = body_key(parts)
        if value is None:
            return None
    raw = value.encode("utf-8", "surrogateescape")[:SESSION_KEY_MAX_BYTES]
    return blake3(raw).hexdigest(length=16)


def pin(body: bytes, slot: int) -> bytes:
    """`body` with `id_slot` as its last key, which is the one the engine obeys; all else unchanged.

    `body` is a JSON object with at least one key, as `peek` has made sure.
    """
    end = body.rindex(b"}")
    return b'%b,"id_slot":%d%b' % (body[:end], slot, body[end:])


def name_model(body: bytes, model: str) -> bytes:
    """`body` with another model in place of the one that counts; all other bytes unchanged.

    `body` is one that `peek` has read. Of equal keys only the last is changed, the one that `peek` and every
    engine obeys. A second `model` at the end would do for most of them, but some refuse an equal key.
    """
    value = _decode_named(body).model  # a view of the body: its place is the value's place
    at = offset_in(body, value)
    return b"%b%b%b" % (body[:at], msgspec.json.encode(model), body[at + len(memoryview(value)) :])


def error_body(message: str, error_type: str, code: str) -> dict[str, Any]:
    """The shape in which OpenAI's clients expect an error."""
    return {"error": {"message": message, "type": error_type, "code": code}}


def _wanted(body: bytes) -> tuple[_Wanted, Raw | None]:
    """What the body says, and its `input` when that is no list."""
    try:
        if not body.isascii():
            body.decode()  # the decoder does not look into strings it skips
        try:
            return _decode(body), None
        except msgspec.ValidationError:
            plain = _decode_plain(body)  # what is wrong with it otherwise, this says again
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise RequestError(f"the body is not what was expected: {error}") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    wanted = _Wanted(
        model=plain.model,
        stream=plain.stream,
        id_slot=plain.id_slot,
        n=plain.n,
        instructions=plain.instructions,
        tools=plain.tools,
        prompt=plain.prompt,
        prompt_cache_key=plain.prompt_cache_key,
        metadata=plain.metadata,
    )
    return wanted, None if isinstance(plain.input, UnsetType) else plain.input
