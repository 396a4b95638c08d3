"""Conversations that begin with the same words and have one secret word each, asked for it everywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .switching import Session, Switcher, Turn

OPENING = (
    "The harbour office keeps a list of all ships. Each ship has one code word. The clerk writes it "
    "down and repeats it when he is asked. He never says another word. "
)
QUESTIONS = (
    "What is the code word?",
    "Say the code word again.",
    "Which word was it?",
    "Repeat the code word.",
)
SECRETS = """
    amber badger canyon dagger ember falcon garnet hammer indigo jasper kettle lemon marble nectar orchid
    pepper quartz raven saddle timber velvet walnut yellow zephyr
""".split()
TURNS_EACH = 14  # then the client begins a new one, with another word


@dataclass(frozen=True)
class Told:
    """One answer to the question for the secret word."""

    word: str
    turn: Turn

    @property
    def others(self) -> list[str]:
        """Words of other conversations in it."""
        return [word for word in SECRETS if word != self.word and word in self.turn.text.lower()]

    @property
    def is_right(self) -> bool:
        return self.word in self.turn.text.lower() and not self.others


async def tell_secrets(
    switcher: Switcher, model: str, n_turns: int, at_once: int, length: int = 2
) -> list[Told]:
    """Ask `n_turns` questions in so many conversations at once, through random nodes, mostly of random hosts.

    No turn waits until the state of the one before has been sent. `length`: paragraphs of the opening.
    """
    told: list[Told] = []
    left = iter(range(n_turns))
    await asyncio.gather(*(_client(switcher, model, n, left, length, told) for n in range(at_once)))
    return told


async def _client(
    switcher: Switcher, model: str, number: int, left: Iterator[int], length: int, told: list[Told]
) -> None:
    names, rng = sorted(switcher.nodes), random.Random(number)
    key = ("", f"client {number}", "one key for several")[number % 3]
    for round_number in range(1_000_000):
        session = Session(f"secret-{number:02}-{round_number:03}", model, rng, key and f"{key} {model}")
        word = rng.choice(SECRETS)
        # The first turn is the same in all of them, its answer too.
        session.says(OPENING * length + "Are you ready?")
        await switcher.turn(session, "first", rng.choice(names), rng.choice(names), max_tokens=6)
        session.messages[-1]["content"] = "I am ready."
        session.says(f"The code word is {word}. Repeat it.")
        session.messages.append({"role": "assistant", "content": f"The code word is {word}."})
        for n in range(TURNS_EACH):
            if next(left, None) is None:
                return
            session.says(f"Question {n + 1}: {rng.choice(QUESTIONS)}")
            host = rng.choice([*names, ""])
            turn = await switcher.turn(session, "grown", rng.choice(names), host, max_tokens=10)
            told.append(Told(word, turn))
