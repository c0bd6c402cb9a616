"""The speed of a loop: rates over its newest steps.

It takes counts and reads a clock. Callers pass what a step computes, and the chip's published rates.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Time constant of the rates, in seconds: after it the weight of a step is 1/e.
MEMORY = 15.0


@dataclass(frozen=True)
class Work:
    """The work of one device in a step.

    **Arguments:**

    - `flops`: floating point operations of the model's matmuls, forward and backward. Recomputation is not counted.
    - `seconds`: their time at the published rates of the chip; None if those are unknown.
    """

    flops: float
    seconds: float | None = None

    def __mul__(self, share: float) -> "Work":
        return Work(self.flops * share, None if self.seconds is None else self.seconds * share)


class Meter:
    """Measures the steps of a loop. Rates exclude compilations and pauses."""

    def __init__(self) -> None:
        # Decaying sums over past steps, by name; their ratios are the rates. Unknown sums are missing.
        self._sums: dict[str, float] = {}
        self._last: float | None = None  # when the previous step was finished; None right after compiling
        self._waited: float | None = None  # seconds spent waiting for a batch since then

    def step(self, n_steps: int, n_examples: int, n_tokens: int | None, work: Work | None) -> None:
        """Records that a step has finished, or several at once."""
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
        """Begins the next step now; the time since the last one is not counted."""
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Excludes the time since the last step, and the next step."""
        self._last = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context for other work, whose time is not counted."""
        last, began = self._last, time.perf_counter()
        try:
            yield
        finally:
            if last is not None and self._last is not None:
                self._last = last + time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Returns a context in which the loop waits for a batch."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited = (self._waited or 0.0) + time.perf_counter() - began

    @property
    def seconds_per_step(self) -> float | None:
        """The mean time of a step; None before the second step."""
        sums = self._sums
        # A step that is reported again adds time, but no step.
        return sums["seconds"] / sums["steps"] if sums.get("seconds", 0) > 0 and sums["steps"] > 0 else None

    def rates(self) -> dict[str, float]:
        """Returns the known rates of the newest steps by name.

        These are `examples_per_second`; `tokens_per_second`; `model_flops_per_second` of one device; `mfu`, its share of the
        chip's published rate; `data_wait`, the share of the time spent waiting for a batch.
        """
        sums = self._sums  # read once: another thread draws while `step` runs
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
