"""Which conversation a body belongs to: its messages as a chain of hashes, and the key a client put into it.

A link covers everything up to and including one message, so a conversation that grew has its old links
still, and two that parted share those before. Messages are hashed as they were sent. Clients move marks
about that do not change what is said; a body that carries such marks is hashed without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from blake3 import blake3
from msgspec import UNSET, Raw, UnsetType

from viiwork.core.names import node_name_problem
from viiwork.core.turn import Chain
from viiwork.limits import CHAIN_BLOCK_BYTES, CHAIN_LINKS_MAX, SESSION_FIELD_MAX_BYTES

SESSION_HEADER = "X-Viiwork-Session"  # on a forward: the conversation, as its entry node found it
LINK_BYTES = 8

_Piece = Raw | bytes | memoryview

_SYSTEM = re.compile(rb'\{\s*"role"\s*:\s*"(?:system|developer)"')
HOME_HEADER = "X-Viiwork-Session-Home"  # the same for the node that ran its last turn
_SESSION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ROLE = re.compile(rb'\{\s*"role"\s*:')
_MARK = b'"cache_control"'
_MARK_MEMBER = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)|"cache_control"\s*:\s*(?:\{[^{}]*\}|null)\s*,'
)
# One block of text instead of a string: how clients find room for a mark on a plain message.
_WRAPPED = re.compile(
    rb'(\{\s*"role"\s*:\s*"\w{1,32}"\s*,\s*"content"\s*:\s*)'
    rb'\[\s*\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*(?=")'
)
_WRAP_END = re.compile(rb'"\s*\}\s*\]\s*\}\s*\Z')
# Claude Code writes a number into its system prompt that differs from request to request.
_BILLING = b"x-anthropic-billing-header:"
_BILLING_TEXT = re.compile(rb'x-anthropic-billing-header:[^"\\]*')
_MARKED_LOOK = 2  # messages at the end that are looked through for marks: who sets any, sets one there


class Parts(msgspec.Struct):
    """The members of a body that make up a conversation or name it; of equal keys the last one counts."""

    messages: list[Raw] | UnsetType = UNSET
    input: list[Raw] | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input_prefix: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET


class _Metadata(msgspec.Struct):
    session_id: Raw | UnsetType = UNSET
    user_id: Raw | UnsetType = UNSET


class _Role(msgspec.Struct):
    role: str = ""


_decode_metadata = msgspec.json.Decoder(_Metadata).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_role = msgspec.json.Decoder(_Role).decode


def forwarded_session(headers: Mapping[str, str]) -> str | None:
    """The conversation a proven forward says it belongs to."""
    said = headers.get(SESSION_HEADER, "")
    return said if _SESSION.fullmatch(said) else None


def forwarded_home(headers: Mapping[str, str]) -> str:
    """The node of the conversation's last turn, as a proven forward says; "" when it does not."""
    said = headers.get(HOME_HEADER, "")
    return said if node_name_problem(said) is None else ""


def body_key(parts: Parts) -> str | None:
    """The client's own name for the session, if the body holds one: `prompt_cache_key`, else `metadata`."""
    if text := _text(parts.prompt_cache_key):
        return text
    if isinstance(parts.metadata, UnsetType):
        return None
    found = _metadata(bytes(parts.metadata))
    return _text(found.session_id) or _session_of_user(_text(found.user_id)) or None


def chain_of(path: str, parts: Parts, input_raw: Raw | None = None) -> Chain | None:
    """The conversation a request of `path` carries, None where it carries none.

    `input_raw` is the `input` of `/v1/responses` when it is no list.
    """
    match path:
        case "/v1/chat/completions" | "/v1/messages":
            if isinstance(parts.messages, UnsetType):
                return None
            return _of_messages((parts.tools, parts.system), parts.messages)
        case "/v1/responses":
            items = parts.input
            if isinstance(items, UnsetType):
                items = [input_raw] if input_raw is not None else []
            return _of_messages((parts.tools, parts.instructions), items)
        case "/v1/completions":
            return _of_text(parts.prompt)
        case "/infill":
            return _of_text(parts.input_prefix)
    return None


def _of_messages(head: Sequence[Raw | UnsetType], messages: list[Raw]) -> Chain | None:
    """Link 0 covers what stands before the conversation, then one for each message."""
    n_system = 0
    while n_system < len(messages) and _is_system(messages[n_system]):
        n_system += 1
    before: list[_Piece] = [part for part in head if not isinstance(part, UnsetType)]
    before += messages[:n_system]
    said: Sequence[_Piece] = messages[n_system:]
    if not said:
        return None
    head_bytes = b"\0".join(before)
    if _MARK in head_bytes or _BILLING in head_bytes or any(_MARK in bytes(m) for m in said[-_MARKED_LOOK:]):
        head_bytes = _BILLING_TEXT.sub(b"", _unmarked(head_bytes))
        said = [_unwrapped(_unmarked(piece)) for piece in said]
    return _links(head_bytes, said)


def _of_text(raw: Raw | UnsetType) -> Chain | None:
    """A prompt without messages, in blocks: what it begins with is what it continues. The last, broken
    block is left out, for it will not be the same when the prompt has grown.
    """
    if isinstance(raw, UnsetType):
        return None
    text = memoryview(raw)[1:]
    n_blocks = len(text) // CHAIN_BLOCK_BYTES
    if n_blocks == 0:
        return None
    return _links(b"", [text[i * CHAIN_BLOCK_BYTES : (i + 1) * CHAIN_BLOCK_BYTES] for i in range(n_blocks)])


def _links(before: bytes, said: Sequence[_Piece]) -> Chain:
    """Links 0 and 1 and the last ones. Most of a long conversation is hashed in one go, which is several
    times as fast as by messages.
    """
    hasher = blake3(before)
    n_bytes = len(before)
    links, ends = [hasher.hexdigest(length=LINK_BYTES)], [n_bytes]
    first_kept = max(len(said) - (CHAIN_LINKS_MAX - 3), 1)
    groups: list[Sequence[_Piece]] = [said[:1], *([said[1:first_kept]] if first_kept > 1 else [])]
    groups += [(piece,) for piece in said[first_kept:]]
    for group in groups:
        data = memoryview(b"".join(group) if len(group) > 1 else group[0])
        hasher.update(data)
        n_bytes += len(data)
        links.append(hasher.hexdigest(length=LINK_BYTES))
        ends.append(n_bytes)
    return Chain(tuple(links), tuple(ends))


def _is_system(message: Raw) -> bool:
    start = memoryview(message)
    if _ROLE.match(start):
        return _SYSTEM.match(start) is not None
    try:
        return _decode_role(message).role in ("system", "developer")
    except (msgspec.MsgspecError, RecursionError):
        return False


def _unmarked(piece: _Piece) -> bytes:
    raw = bytes(piece)
    return _MARK_MEMBER.sub(b"", raw) if _MARK in raw else raw


def _unwrapped(message: bytes) -> bytes:
    """The message as if its only block of text were its content."""
    start = _WRAPPED.match(message)
    if start is None:
        return message
    end = _WRAP_END.search(message, max(len(message) - 32, start.end()))
    return b"%b%b}" % (start[1], message[start.end() : end.start() + 1]) if end else message


def _text(raw: Raw | UnsetType) -> str:
    """A JSON string's text without the blanks around it; "" for anything else."""
    if isinstance(raw, UnsetType) or len(memoryview(raw)) > SESSION_FIELD_MAX_BYTES:
        return ""
    try:
        return _decode_text(raw).strip()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _metadata(raw: bytes) -> _Metadata:
    """Empty when it is not what was expected."""
    if len(raw) > SESSION_FIELD_MAX_BYTES:
        return _Metadata()
    try:
        return _decode_metadata(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Metadata()


def _session_of_user(user: str) -> str:
    """Session part of what Claude Code calls a user: `user_..._session_<uuid>`, or JSON in a string."""
    if user.startswith("{"):
        return _text(_metadata(user.encode("utf-8", "surrogatepass")).session_id)
    before, mark, session = user.rpartition("_session_")
    return session if mark and before.startswith("user_") else ""
