"""The speed of a loop: rates over its newest steps.

It takes counts and reads a clock. What a step computes, and how fast a chip could, others tell it.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Seconds after which a step weighs 1/e in the rates.
MEMORY = 15.0


@dataclass(frozen=True)
class Work:
    """What one device computes in a step.

    **Arguments:**

    - `flops`: floating point operations of the model's matmuls, forward and backward. What is computed again to save memory
        does not count.
    - `seconds`: their time at the published rates of the chip; None where those are unknown.
    """

    flops: float
    seconds: float | None = None

    def __mul__(self, share: float) -> "Work":
        return Work(self.flops * share, None if self.seconds is None else self.seconds * share)


class Meter:
    """Measures the steps of a loop. Compilations and pauses count in no rate."""

    def __init__(self) -> None:
        # Sums over past steps, by what they are of; their ratios are the rates. A sum is missing where it is unknown.
        self._sums: dict[str, float] = {}
        self._last: float | None = None  # when the step before this one was finished; None right after compiling
        self._waited: float | None = None  # seconds without a batch since then

    def step(self, n_steps: int, n_examples: int, n_tokens: int | None, work: Work | None) -> None:
        """A step has finished, or several at once."""
        now = time.perf_counter()
        if self._last is not None:
            seconds = now - self._last
            new = {
                "seconds": seconds,
                "steps": n_steps,
                "examples": n_examples,
                "tokens": n_tokens,
                "flops": None if work is None else work.flops,
                "seconds at peak": None if work is None else work.seconds,
                "seconds without data": self._waited,
            }
            memory, old = math.exp(-seconds / MEMORY), self._sums
            self._sums = {of: memory * old.get(of, 0.0) + x for of, x in new.items() if x is not None}
        self._last = now
        self._waited = None if self._waited is None else 0.0

    def begin(self) -> None:
        """The next step begins now, whatever the time since the last one."""
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Neither the time since the last step nor the next step counts."""
        self._last = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Other work, whose time counts in no rate."""
        last, began = self._last, time.perf_counter()
        try:
            yield
        finally:
            if last is not None and self._last is not None:
                self._last = last + time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The loop has no batch to go on with."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited = (self._waited or 0.0) + time.perf_counter() - began

    @property
    def seconds_per_step(self) -> float | None:
        """None before two steps were seen."""
        sums = self._sums
        return sums["seconds"] / sums["steps"] if sums.get("seconds", 0) > 0 else None

    def rates(self) -> dict[str, float]:
        """What is known of the newest steps, by name: `examples_per_second`; `tokens_per_second`; `model_flops_per_second`
        of one device; `mfu`, the share of the chip's published rate that this is; `data_wait`, the share of the time in
        which the loop waited for a batch."""
        sums = self._sums  # read once: the thread that draws runs beside `step`
        if not sums.get("seconds"):
            return {}
        return {name: sums[of] / sums["seconds"] for name, of in _RATES.items() if of in sums}


_RATES = {
    "examples_per_second": "examples",
    "tokens_per_second": "tokens",
    "model_flops_per_second": "flops",
    "mfu": "seconds at peak",
    "data_wait": "seconds without data",
}
