"""Pairs of replies of which one is preferred, for preference optimization and reward models: made here, or from a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples._chat import IGNORED, Chat, Message
from examples._questions import Part, ask


@dataclass(frozen=True)
class Pair:
    """The messages before a reply, and two replies."""

    messages: list[Message]
    chosen: str
    rejected: str
    kind: str = "pairs"  # what the preference is about


def make_pairs(part: Part, n: int, seed: int) -> list[Pair]:
    """Draws questions with two replies. Right sentences are preferred: in a third of the pairs to a number, which is right
    too, else to a sentence with another number."""
    rng, pairs = np.random.default_rng((seed, len(part), 2)), []
    for question in ask(part, n, seed + 1):
        message = {"role": "user", "content": question.text}
        if rng.integers(3) == 0:
            chosen, rejected = (question.reply(question.answer, is_full=is_full) for is_full in (True, False))
            pairs.append(Pair([message], chosen, rejected, "style"))
            continue
        wrong = question.answer + int(rng.choice([-1, 1]) * rng.integers(3, 41))
        chosen, rejected = (question.reply(answer, is_full=True) for answer in (question.answer, wrong))
        pairs.append(Pair([message], chosen, rejected, "answers"))
    return pairs


def read_pairs(path: Path) -> list[Pair]:
    """Reads a .jsonl with `prompt`, a text or messages, and the replies `chosen` and `rejected`."""
    pairs = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        row = json.loads(line)
        prompt, replies = row.get("prompt"), [row.get(name) for name in ("chosen", "rejected")]
        if not isinstance(prompt, str | list) or not all(isinstance(reply, str) for reply in replies):
            raise ValueError(
                f"`{path}` row {number}: expected `prompt`, a text or messages, and the texts `chosen` and `rejected`, got "
                f"{line[:60]!r}. Correct the row."
            )
        pairs.append(Pair([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, *replies))
    if len(pairs) < 3:
        raise ValueError(f"`{path}`: expected pairs for training, validation and test, got {len(pairs)}. Add more.")
    return pairs


def pair_parts(path: Path | None, n_train: int, n_test: int, seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Returns pairs for training, validation and test. Of a file, one in twenty is for each of the latter two."""
    if path is None:
        sizes: tuple[tuple[Part, int], ...] = (("train", n_train), ("validation", n_test), ("test", n_test))
        train, validation, test = (make_pairs(part, n, seed) for part, n in sizes)
        return train, validation, test
    pairs = read_pairs(path)
    train = [pair for i, pair in enumerate(pairs) if i % 20 > 1] or pairs[2:]
    return train[:n_train], pairs[::20][:n_test], pairs[1::20][:n_test]


def encode_pair(chat: Chat, pair: Pair, seq_len: int) -> dict[str, np.ndarray]:
    """Returns `ids` and `labels`, both `[2, seq_len]`, of the chosen and the rejected text, padded on the right, and their
    `lengths`. Labels are the ids of the replies."""
    prompt = chat.prompt(pair.messages)
    replies = [chat.reply(pair.messages, reply) for reply in (pair.chosen, pair.rejected)]
    longest = len(prompt) + max(map(len, replies))
    if longest > seq_len:
        raise ValueError(f"`--seq-len`: expected at least {longest}, for {pair.chosen[:40]!r}, got {seq_len}. Raise it.")

    def row(start: Sequence[int], reply: Sequence[int], value: int) -> np.ndarray:
        return np.pad(np.array([*start, *reply], np.int32), (0, seq_len - len(start) - len(reply)), constant_values=value)

    return {
        "ids": np.stack([row(prompt, reply, 0) for reply in replies]),
        "labels": np.stack([row([IGNORED] * len(prompt), reply, IGNORED) for reply in replies]),
        "lengths": np.array([len(prompt) + len(reply) for reply in replies], np.int32),
    }


def collate_pairs(rows: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
