"""Problems whose answers can be checked: questions about two numbers, or those of a file; and the reward of a reply."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples._chat import Message
from examples._questions import ask, number_in


@dataclass(frozen=True)
class Problem:
    """The messages before a reply, the answer, and a regular expression for the form of the whole reply."""

    messages: list[Message]
    answer: str
    form: str = ".*"


def is_right(problem: Problem, reply: str) -> bool:
    """Returns whether the last number of a reply is the answer."""
    return number_in(reply) == problem.answer


def rewards_of(problem: Problem, replies: Sequence[str]) -> np.ndarray:
    """Returns the rewards of replies: one half for the answer, and one half for the form."""
    has_form = [re.fullmatch(problem.form, reply, re.DOTALL) is not None for reply in replies]
    return np.array([0.5 * is_right(problem, reply) + 0.5 * form for reply, form in zip(replies, has_form, strict=True)])


def problem_parts(path: Path | None, n_train: int, n_test: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Returns problems for training and for the test. Of a file, one in twenty is for the test."""
    if path is None:
        parts = ask("train", n_train, seed + 2), ask("test", n_test, seed + 2)
        form = r"\w.* is \d+\."  # a sentence
        train, test = ([Problem([{"role": "user", "content": q.text}], str(q.answer), form) for q in part] for part in parts)
        return train, test
    problems = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        row = json.loads(line)
        prompt, answer = row.get("prompt"), row.get("answer")
        if not isinstance(prompt, str | list) or not isinstance(answer, str | int):
            raise ValueError(
                f"`{path}` row {number}: expected `prompt`, a text or messages, and `answer`, got {line[:60]!r}. Correct it."
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        problems.append(Problem(messages, str(answer)))
    if len(problems) < 2:
        raise ValueError(f"`{path}`: expected problems for training and the test, got {len(problems)}. Add more.")
    return [p for i, p in enumerate(problems) if i % 20][:n_train], problems[::20][:n_test]
