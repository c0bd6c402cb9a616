"""Goodput: the share of a run's time that went into steps which count, and what took the rest.

Owns the seconds by cause, and those of earlier processes of the run, which it reads from their records. `ProgressLine` and
the engine say what runs.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ._units import duration_text

CAUSES = {
    "steps": "steps",
    "starting": "starting",  # the model, a checkpoint, the plan: all before the first step of a process
    "compiling": "compiling",
    "data": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "lost": "lost steps",
    "stalled": "stalled",
    "other": "other",  # what the script does between its steps
}
_MIN_SHARE = 0.001  # that the text names


class Goodput:
    """The time of a run by cause: each moment has one, the innermost that was said. It begins with the Deployer.

    A process that continues a run takes over the seconds of the earlier ones. The time after the step that it continues from
    is lost, and the time from the last record to its own begin is stalled, unless the earlier process had ended its fit.

    Attribute `waited`: the seconds that a loop adds for which it waited for data; they are those of no other cause.
    """

    def __init__(self) -> None:
        self.waited: float = 0.0  # since the time that is noted
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._began, self._noted = time.time(), time.perf_counter()
        self._cause = "other"
        self._has_stepped = False  # in this process

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """A context for work of a cause. What is unknown counts as other."""
        self._note()
        before, self._cause = self._cause, cause if cause in CAUSES else "other"
        try:
            yield
        finally:
            self._note()
            self._cause = before

    def step(self) -> None:
        """Notes that a step has ended. All before the end of a process's first one is its start."""
        if not self._has_stepped:
            self._note()
            self._has_stepped = True

    def _note(self) -> None:
        now = time.perf_counter()
        is_starting = not self._has_stepped and self._cause in ("steps", "other")
        self._seconds["starting" if is_starting else self._cause] += now - self._noted - self.waited
        self._seconds["data"] += self.waited
        self._noted, self.waited = now, 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by cause so far."""
        self._note()
        return dict(self._seconds)

    def numbers(self) -> dict[str, float]:
        """Returns `goodput`, the seconds of each cause that had any, and the time, to be recorded."""
        seconds = self.seconds
        named = {f"seconds_{cause}": round(x, 3) for cause, x in seconds.items() if x}
        share = seconds["steps"] / (sum(seconds.values()) or 1.0)
        return {"goodput": round(share, 4), **named, "unix_time": round(time.time(), 3)}

    def text(self) -> str:
        """Describes where the time went, the largest part of the rest first."""
        seconds = self.seconds
        total = sum(seconds.values()) or 1.0
        shares = {CAUSES[cause]: x / total for cause, x in seconds.items() if cause != "steps"}
        rest = [f"{what} {x:.1%}" for what, x in sorted(shares.items(), key=lambda item: -item[1]) if x >= _MIN_SHARE]
        return ", ".join([f"{seconds['steps'] / total:.1%} of {duration_text(total)} in steps", *rest])

    def continue_from(self, records: Iterable[tuple[int, Mapping[str, float]]], step: int) -> None:
        """Takes over the seconds of the processes that made these records, for a process that continues from `step`. Each
        record is a step and its numbers, and they are in order; those without times are left out."""
        rows = [(at, numbers) for at, numbers in records if "unix_time" in numbers]
        if not rows:
            return
        kept = next(((at, numbers) for at, numbers in reversed(rows) if at <= step), (0, {}))
        following = next(((at, numbers) for at, numbers in rows if at > step), None)
        seconds = _seconds_of(kept[1])
        total, last = sum(seconds.values()), rows[-1][1]
        if following is not None:  # the saved step was between two records
            after = sum(_seconds_of(following[1]).values())
            seconds["steps"] += (after - total) * (step - kept[0]) / (following[0] - kept[0])
        seconds["lost"] += sum(_seconds_of(last).values()) - sum(seconds.values())
        if not last.get("ended"):
            seconds["stalled"] += max(0.0, self._began - last["unix_time"])
        for cause, x in seconds.items():
            self._seconds[cause] += x


def _seconds_of(numbers: Mapping[str, float]) -> dict[str, float]:
    return {cause: numbers.get(f"seconds_{cause}", 0.0) for cause in CAUSES}
