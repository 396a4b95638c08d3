"""What the slots of a simulated llama.cpp hold, and how much of a prompt that spares: its rules, no time."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIMILAR = 0.1  # --slot-prompt-similarity
N_VOCAB = 151_936
CHECKPOINTS = 32  # a slot keeps
CHECKPOINT_EVERY = 8192  # tokens of a prompt
CHECKPOINT_BACK = 4  # tokens before the end of a prompt at which one is made

_SPECIAL = ("<|im_start|>", "<|im_end|>")
# Four characters a token, and never across a line's end: what was generated reads back as the same tokens.
_PIECE = re.compile(r"<\|im_start\|>|<\|im_end\|>|\n|[^\n<]{1,4}|<")


def tokens_of(text: str) -> array[int]:
    crc = zlib.crc32
    return array("i", [crc(piece.encode()) % N_VOCAB for piece in _PIECE.findall(text)])


def chat_prompt(messages: list[dict[str, Any]], tools: object = None) -> str:
    """ChatML, as Qwen's template writes it; it ends where the answer begins."""
    begin, end = _SPECIAL
    head = f"{begin}system\n{tools}{end}\n" if tools else ""
    turns = [f"{begin}{m.get('role', 'user')}\n{_text(m.get('content'))}{end}\n" for m in messages]
    return f"{head}{''.join(turns)}{begin}assistant\n"


def answer_text(tokens: array[int], n: int) -> list[str]:
    """The `n` pieces, a token each, that always follow these tokens."""
    seed = zlib.crc32(tokens.tobytes())
    return [f"{zlib.crc32(b'%d/%d' % (seed, at)) & 0xFFF:03x} " for at in range(n)]


def common(a: array[int], b: array[int]) -> int:
    """Leading tokens both have."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class Held:
    """Tokens whose state is there, and the token counts at which a copy of the recurrent state was kept."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    checkpoints: list[int] = field(default_factory=list)

    def reusable(self, prompt: array[int]) -> int:
        """Tokens of the prompt that need not be read: a recurrent state cannot be cut, only taken whole."""
        shared = common(self.tokens, prompt)
        if shared == len(self.tokens) and shared < len(prompt):
            return shared
        below = [at for at in self.checkpoints if at <= min(shared, len(prompt) - 1)]
        return max(below, default=0)

    def cut(self, n: int) -> None:
        del self.tokens[n:]
        self.checkpoints = [at for at in self.checkpoints if at <= n]

    def prompt_read(self) -> None:
        """All tokens of a prompt are in; on the way checkpoints were made, the last one near its end."""
        end = len(self.tokens) - CHECKPOINT_BACK
        newest = max(self.checkpoints, default=0)
        every = range(CHECKPOINT_EVERY * (newest // CHECKPOINT_EVERY + 1), end, CHECKPOINT_EVERY)
        made = [*every, end] if end > newest else []
        self.checkpoints = [*self.checkpoints, *made][-CHECKPOINTS:]

    def copy(self) -> Held:
        return Held(self.tokens[:], list(self.checkpoints))


@dataclass(slots=True)
class PacedSlot:
    id: int
    held: Held = field(default_factory=Held)
    task: int | None = None  # the newest one's number; None = it never ran any
    busy: bool = False
    used: int = 0  # order of last use
    copied: int = 0  # the task whose state lies in RAM as well


class PacedSlots:
    """The slots and the RAM cache beside them."""

    def __init__(self, n: int, ram_bytes: int, bytes_of: Callable[[int], int]) -> None:
        self.slots = [PacedSlot(at) for at in range(n)]
        self._ram: list[Held] = []
        self._ram_bytes = ram_bytes
        self._bytes_of = bytes_of
        self._n_tasks = 0

    def choose(self, prompt: array[int], wanted: int | None) -> PacedSlot | None:
        """The slot a prompt runs in, by id_slot, likeness or age; None while it has to wait."""
        if wanted is not None:
            slot = self.slots[wanted % len(self.slots)]
            return None if slot.busy else slot
        idle = [slot for slot in self.slots if not slot.busy]
        like = max(idle, key=lambda slot: common(slot.held.tokens, prompt), default=None)
        if like is not None and common(like.held.tokens, prompt) > SIMILAR * len(prompt):
            return like
        return min(idle, key=lambda slot: slot.used, default=None)

    def begin(self, slot: PacedSlot, prompt: array[int]) -> int:
        """A task takes the slot; how many of its tokens are there already."""
        self._n_tasks += 1
        slot.busy, slot.task, slot.used = True, self._n_tasks, self._n_tasks
        held = slot.held
        if held.tokens and common(held.tokens, prompt) < 0.5 * len(held.tokens):
            self._keep(held.copy())
        for other in self.slots:  # whenever a task starts, the engine copies what idle slots hold
            if not other.busy and other.task is not None and other.copied != other.task:
                other.copied = other.task
                self._keep(other.held.copy())
        best = max(self._ram, key=lambda there: there.reusable(prompt), default=None)
        if best is not None and best.reusable(prompt) > held.reusable(prompt):
            self._ram = [kept for kept in self._ram if kept is not best]
            held = slot.held = best.copy()
        while sum(self._bytes_of(len(kept.tokens)) for kept in self._ram) > self._ram_bytes:
            del self._ram[0]
        n = held.reusable(prompt)
        held.cut(n)
        return n

    def restored(self, slot: PacedSlot, tokens: array[int]) -> None:
        """A save-file replaces what the slot held; it is no task, so it is not copied before the next one."""
        slot.held = Held(tokens)
        slot.copied = 0

    def _keep(self, held: Held) -> None:
        if not self._ram_bytes or not held.tokens:
            return
        same = (kept for kept in self._ram if common(kept.tokens, held.tokens) == len(kept.tokens))
        for covered in list(same):
            self._ram.remove(covered)
        self._ram.append(held)


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
