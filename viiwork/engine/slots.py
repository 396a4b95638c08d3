"""The engine's slot endpoints: what they hold, run, save, restore, erase; its probes; a prompt's tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from viiwork.errors import EngineError, KvError
from viiwork.limits import ENGINE_ANSWER_MAX_BYTES, ENGINE_SLOTS_MAX

T = TypeVar("T")
# The engine's own rule, checked here because it answers a broken one with a bare 400.
_BAD_FILENAME = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]|\.\.|^\.$|^ | $|\.$')


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot as the engine reports it. `n_prompt_tokens` is what it holds; None = it never ran a task."""

    id: int
    n_ctx: int
    is_processing: bool
    id_task: int | None
    n_prompt_tokens: int | None
    n_decoded: int | None  # of the running task
    n_remain: int | None


@dataclass(frozen=True, slots=True)
class SaveDone:
    n_saved: int  # tokens
    n_written: int  # bytes; the file is whole only when it has this size
    ms: float


@dataclass(frozen=True, slots=True)
class RestoreDone:
    n_restored: int
    n_read: int
    ms: float


@dataclass(frozen=True, slots=True)
class Ran:
    """A prompt that ran in a slot."""

    n_cached: int  # leading tokens the slot held already
    n_read: int
    tokens: tuple[int, ...]  # what came out


@dataclass(frozen=True, slots=True)
class Props:
    total_slots: int
    build_info: str
    model_path: str
    is_sleeping: bool
    n_ctx: int  # tokens per slot


@dataclass(frozen=True, slots=True)
class Health:
    """Answer to a probe: `loading` is the engine's 503; `said` is one line about anything but `ready`."""

    state: Literal["ready", "loading", "wrong", "unreachable"]
    said: str = ""


class _NextToken(msgspec.Struct):
    n_decoded: int | None = None
    n_remain: int | None = None


class _Slot(msgspec.Struct):
    id: int
    n_ctx: int
    is_processing: bool = False
    id_task: int | None = None
    n_prompt_tokens: int | None = None
    next_token: list[_NextToken] | _NextToken | None = None


class _Timings(msgspec.Struct):
    save_ms: float = 0.0
    restore_ms: float = 0.0


class _Saved(msgspec.Struct):
    id_slot: int
    n_saved: int
    n_written: int
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Restored(msgspec.Struct):
    id_slot: int
    n_restored: int
    n_read: int
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Erased(msgspec.Struct):
    id_slot: int
    n_erased: int


class _Counts(msgspec.Struct):
    cache_n: int
    prompt_n: int


class _Completion(msgspec.Struct):
    timings: _Counts
    tokens: list[int] = msgspec.field(default_factory=list)


class _Prompt(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Generation(msgspec.Struct):
    n_ctx: int = 0


class _Props(msgspec.Struct):
    total_slots: int
    build_info: str = ""
    model_path: str = ""
    is_sleeping: bool = False
    default_generation_settings: _Generation = msgspec.field(default_factory=_Generation)


class _Status(msgspec.Struct):
    status: str


class SlotsClient:
    """Talks to one backend at `url`; borrows the caller's session.

    The engine takes a slot number modulo its slot count, so the range is checked here: `n_slots` as it
    reported. A save or restore must only be posted for an idle slot. Cancelling one, or its timeout, closes
    the connection, which makes the engine drop the task within a second when it has not started yet.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, n_slots: int) -> None:
        self._url = url
        self._session = session
        self._n_slots = n_slots

    async def health(self, timeout_s: float) -> Health:
        """Never raises: a probe that fails is an answer."""
        try:
            status, body = await self._ask("GET", "/health", None, timeout_s)
        except EngineError as error:
            return Health("unreachable", str(error))
        if status == 503:
            return Health("loading", "loading the model")
        if status != 200:
            return Health("wrong", f"/health answered {status}")
        try:
            said = msgspec.json.decode(body, type=_Status).status
        except msgspec.MsgspecError:
            return Health("wrong", "/health answered something that is not an engine's")
        return Health("ready") if said == "ok" else Health("wrong", f"/health says {said[:80]!r}")

    async def slots(self, timeout_s: float = 1.0) -> list[SlotView]:
        found = await self._get("/slots", list[_Slot], timeout_s)
        if not found or len(found) > ENGINE_SLOTS_MAX:
            raise EngineError(f"/slots lists {len(found)} slots")
        return [_slot_view(slot) for slot in found]

    async def props(self, timeout_s: float = 5.0) -> Props:
        found = await self._get("/props", _Props, timeout_s)
        n_ctx = found.default_generation_settings.n_ctx
        return Props(found.total_slots, found.build_info, found.model_path, found.is_sleeping, n_ctx)

    async def warm_up(self, slot: int, timeout_s: float) -> None:
        """Run one token in `slot`: from then on /slots tells what it holds. Raises `EngineError`.

        An engine without completions (embeddings only) refuses with 501, or 400 on older builds; it needs
        none.
        """
        self._check_slot(slot)
        await self.run_one_token(slot, timeout_s)

    async def run_one_token(self, slot: int, timeout_s: float) -> None:
        """As `warm_up`; `ENGINE_CHOOSES` takes any idle slot."""
        body = {"prompt": "a", "n_predict": 1, "id_slot": slot, "stream": False}
        status, answer = await self._ask("POST", "/completion", body, timeout_s)
        if status not in (200, 400, 501):
            raise EngineError(f"one token in slot {slot} failed: {status} {_message(answer)}")

    async def run(self, slot: int, tokens: list[int], n_predict: int, timeout_s: float) -> Ran:
        """Read a prompt into `slot` and generate `n_predict` tokens, the likeliest. Raises `EngineError`."""
        self._check_slot(slot)
        body = {"prompt": tokens, "n_predict": n_predict, "id_slot": slot, "temperature": 0}
        body |= {"cache_prompt": True, "return_tokens": True, "stream": False}
        done = await self._post("/completion", body, _Completion, timeout_s)
        return Ran(done.timings.cache_n, done.timings.prompt_n, tuple(done.tokens))

    async def templated(self, body: bytes, timeout_s: float) -> str:
        """The prompt a chat request's body becomes. Raises `EngineError`."""
        return (await self._post("/apply-template", body, _Prompt, timeout_s)).prompt

    async def tokenized(self, text: str, timeout_s: float) -> list[int]:
        """The tokens of a prompt, as a completion reads it. Raises `EngineError`."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return (await self._post("/tokenize", body, _Tokens, timeout_s)).tokens

    async def save(self, slot: int, filename: str, timeout_s: float) -> SaveDone:
        """Write `slot` to `filename` in the backend's folder. Raises `KvError`."""
        done = await self._act(slot, "save", filename, _Saved, timeout_s)
        return SaveDone(done.n_saved, done.n_written, done.timings.save_ms)

    async def restore(self, slot: int, filename: str, timeout_s: float) -> RestoreDone:
        """Replace what `slot` holds. Raises `KvError`; what the slot held before is lost then as well."""
        done = await self._act(slot, "restore", filename, _Restored, timeout_s)
        return RestoreDone(done.n_restored, done.n_read, done.timings.restore_ms)

    async def erase(self, slot: int, timeout_s: float = 10.0) -> int:
        """Empty `slot`; the number of tokens it held. Raises `KvError`."""
        return (await self._act(slot, "erase", None, _Erased, timeout_s)).n_erased

    async def _act(self, slot: int, action: str, filename: str | None, kind: type[T], timeout_s: float) -> T:
        self._check_slot(slot)
        if filename is not None and (not 0 < len(filename.encode()) < 256 or _BAD_FILENAME.search(filename)):
            raise KvError("bad_filename", f"the engine does not take {filename!r} as the name of a save-file")
        body = {} if filename is None else {"filename": filename}
        try:
            status, answer = await self._ask("POST", f"/slots/{slot}?action={action}", body, timeout_s)
        except EngineError as error:
            reason = f"{action}_timeout" if isinstance(error.__cause__, TimeoutError) else f"{action}_failed"
            raise KvError(reason, str(error)) from error
        if status != 200:
            raise KvError(f"{action}_refused", f"the engine refused to {action}: {status} {_message(answer)}")
        try:
            done = msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise KvError(
                f"{action}_failed", f"the engine's answer to {action} is not understood: {error}"
            ) from error
        if getattr(done, "id_slot", slot) != slot:
            raise KvError("wrong_slot", f"asked to {action} slot {slot}, the engine took another")
        return done

    async def _get(self, path: str, kind: type[T], timeout_s: float) -> T:
        return _decoded(path, *await self._ask("GET", path, None, timeout_s), kind)

    async def _post(self, path: str, body: Any, kind: type[T], timeout_s: float) -> T:
        return _decoded(path, *await self._ask("POST", path, body, timeout_s), kind)

    async def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        """One exchange; `body` is a value, or JSON already. Raises `EngineError` without a bounded answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await _read_bounded(response)
                return response.status, answer
        except TimeoutError as error:
            raise EngineError(f"{path.partition('?')[0]}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{path.partition('?')[0]}: {str(error) or type(error).__name__}") from error

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._n_slots:
            raise KvError("no_such_slot", f"slot {slot} of an engine with {self._n_slots}")


def _decoded(path: str, status: int, body: bytes, kind: type[T]) -> T:
    if status != 200:
        raise EngineError(f"{path} answered {status} {_message(body)}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{path} answered something that is not an engine's: {error}") from error


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > ENGINE_ANSWER_MAX_BYTES:
            response.close()
            raise EngineError(f"an answer of more than {ENGINE_ANSWER_MAX_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _slot_view(slot: _Slot) -> SlotView:
    token = slot.next_token[0] if isinstance(slot.next_token, list) and slot.next_token else slot.next_token
    busy = slot.is_processing and isinstance(token, _NextToken)
    return SlotView(
        id=slot.id,
        n_ctx=slot.n_ctx,
        is_processing=slot.is_processing,
        id_task=slot.id_task,
        n_prompt_tokens=slot.n_prompt_tokens,
        n_decoded=token.n_decoded if busy and isinstance(token, _NextToken) else None,
        n_remain=token.n_remain if busy and isinstance(token, _NextToken) else None,
    )


def _message(body: bytes) -> str:
    """The engine's error text, one short line."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
        error = found.get("error")
        text = str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
    except msgspec.MsgspecError:
        text = body[:200].decode("utf-8", "replace")
    return " ".join(text.split())[:200]
