"""Patterns of module names in an adapter's config (`rank_pattern`, `alpha_pattern`), as PEFT applies them.

PEFT runs each key as a regular expression, at the end of a name. Python's matcher tries alternatives one after another, so a
key such as `(a+)+x` of a foreign folder would run for ever. Here a key is a sequence of steps, and all positions that it can
reach in a name are followed together: the time grows with the length of the key times that of the name.
"""

import functools
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

_MOST = 5 * 10**4  # characters in all of a config's patterns with repeats or alternatives; thousands of names need no such
_NO_END = 10**9
_STEP = re.compile(
    r"(?:\((?:\?:)?(?P<choices>[\w.\\|-]*)\)|(?P<one>\[\^?[\w.\\-]+\]|\\[dDwW.-]|[\w.-]))"
    r"(?P<repeat>[*+?]\??|\{(?P<low>\d{1,9})(?P<to>,(?P<high>\d{0,9}))?\})?"
)
_CHOICE = re.compile(r"(?:[\w.-]|\\[dDwW.-])*")
_PLAIN = re.compile(r"(?:[\w.-]|\\[.-])+")


@dataclass(frozen=True)
class _Step:
    """One of several expressions without repeats, `low` to `high` times."""

    choices: tuple[re.Pattern[str], ...]
    low: int
    high: int

    def after(self, name: str, places: Set[int]) -> Set[int]:
        """Returns the positions in a name that can be reached from others."""
        for _ in range(self.low):
            before, places = places, self._once(name, places)
            if places == before:  # nothing, or as many empty texts as wanted
                break
        reached, newest, n = places, places, self.low
        while newest and n < self.high:
            newest, n = self._once(name, newest) - reached, n + 1
            reached = reached | newest
        return reached

    def _once(self, name: str, places: Set[int]) -> Set[int]:
        found = (choice.match(name, place) for choice in self.choices for place in places)
        return {match.end() for match in found if match is not None}


def check_patterns(patterns: Mapping[str, Any]) -> str | None:
    """Returns the first pattern that is not supported, or None if all are."""
    n = 0
    for pattern in patterns:
        n += 0 if _PLAIN.fullmatch(pattern) else len(pattern)
        try:
            _steps(pattern)
        except (ValueError, re.error):
            return pattern
        if n > _MOST:
            return pattern
    return None


def by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value for a module: that of the first pattern that matches the end of its name, else the default."""
    return next((value for pattern, value in patterns.items() if _matches(pattern, name)), default)


def _matches(pattern: str, name: str) -> bool:
    for is_whole, steps in _steps(pattern):
        places: Set[int] = {0} if is_whole else {0, *(i + 1 for i, letter in enumerate(name) if letter == ".")}
        for step in steps:
            places = step.after(name, places)
        if len(name) in places:
            return True
    return False


@functools.lru_cache(2**14)
def _steps(pattern: str) -> tuple[tuple[bool, tuple[_Step, ...]], ...]:
    """Returns the alternatives of a pattern: whether each begins at the start of a name (`^`), and its steps.

    Raises ValueError for a pattern that is not supported.
    """
    if _PLAIN.fullmatch(pattern):
        return ((False, (_Step((re.compile(pattern),), 1, 1),)),)
    found = []
    for option in re.split(r"\|(?![^(]*\))", pattern):
        text = option.removeprefix("^").removesuffix("$")
        steps, at = [], 0
        while at < len(text):
            match = _STEP.match(text, at)
            if match is None:
                raise ValueError(pattern)
            at = match.end()
            choices = [match["one"]] if match["one"] else match["choices"].split("|")
            if match["choices"] is not None and not all(map(_CHOICE.fullmatch, choices)):
                raise ValueError(pattern)
            repeat = match["repeat"] or ""
            low = int(match["low"] or (0 if repeat[:1] in ("*", "?") and repeat else 1))
            high = {"": 1, "?": 1, "*": _NO_END, "+": _NO_END}.get(repeat[:1])
            if high is None:
                high = low if match["to"] is None else int(match["high"] or _NO_END)
            steps.append(_Step(tuple(map(re.compile, choices)), low, high))
        found.append((option.startswith("^"), tuple(steps)))
    return tuple(found)
