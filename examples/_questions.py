"""Questions about two numbers with their answers, for the examples that tune a chat model. Each reply can be checked.

A reply is a number, or a sentence that ends with it. No two numbers occur together in two parts of the data.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

Part = Literal["train", "validation", "test"]
BRIEF, FULL = "Reply with a number.", "Reply with a sentence."  # system messages


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the answer in a sentence."""

    text: str
    answer: int
    sentence: str

    def reply(self, answer: int, *, is_full: bool) -> str:
        """Returns a reply with this answer, which may be wrong: a sentence, or the number alone."""
        return self.sentence.replace("?", str(answer)) if is_full else str(answer)


def part_of(a: int, b: int) -> Part:
    """Returns the part of the data with these two numbers: a tenth are for validation, another for testing."""
    place = zlib.crc32(f"{min(a, b)} {max(a, b)}".encode()) % 10
    return "validation" if place == 0 else "test" if place == 1 else "train"


def ask(part: Part, n: int, seed: int) -> list[Question]:
    """Draws `n` questions about two numbers from 10 to 99: their sum, their difference, or which of them is larger."""
    rng, found = np.random.default_rng((seed, len(part))), []
    while len(found) < n:
        a, b = map(int, rng.integers(10, 100, 2))
        if part_of(a, b) != part:
            continue
        kind = rng.integers(3)
        if kind == 0:
            found.append(Question(f"What is {a} + {b}?", a + b, f"{a} + {b} is ?."))
        elif kind == 1:
            a, b = max(a, b), min(a, b)
            found.append(Question(f"What is {a} - {b}?", a - b, f"{a} - {b} is ?."))
        else:
            found.append(Question(f"Which is larger, {a} or {b}?", max(a, b), "The larger one is ?."))
    return found


def conversations(part: Part, n: int, seed: int) -> list[list[dict[str, str]]]:
    """Draws conversations of one to three questions with their replies. A system message says how to reply; in a third of
    those for training there is none, and replies are numbers or sentences at random."""
    rng, questions = np.random.default_rng((seed, len(part), 1)), iter(ask(part, 3 * n, seed))
    found = []
    for _ in range(n):
        kind = rng.integers(3 if part == "train" else 2)
        messages = [{"role": "system", "content": (BRIEF, FULL)[kind]}] if kind < 2 else []
        for question in (next(questions) for _ in range(rng.integers(1, 4))):
            is_full = bool(kind == 1 if kind < 2 else rng.integers(2))
            messages.append({"role": "user", "content": question.text})
            messages.append({"role": "assistant", "content": question.reply(question.answer, is_full=is_full)})
        found.append(messages)
    return found


def number_in(reply: str) -> str | None:
    """Returns the last number of a reply, as a text."""
    return next(reversed(re.findall(r"-?\d+", reply)), None)
