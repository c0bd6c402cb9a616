"""Ends a run that hangs: nothing else notices a process that is alive but stuck."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import check_number
from ._exits import say, stacks
from ._links import START, PeerError
from ._peers import EXIT_CODE, HEARTBEAT, Peers


@dataclass(frozen=True)
class Timeouts:
    """How many seconds to wait for other processes, and for progress.

    **Arguments:**

    - `heartbeat`: if another process sends nothing for so long, it counts as lost, and this one exits.
    - `start`: all processes must start within this time.
    - `hang`: if nothing progresses for so long, not counting compilation, the run ends, and prints which process is behind
        and the stack of each thread; None never ends it. A step, a batch of an evaluation, and a call of `eval_metric_fn`
        are progress.

    Raises ValueError for anything but a number above 0.
    """

    heartbeat: float = HEARTBEAT
    start: float = START
    hang: float | None = 1800.0

    def __post_init__(self) -> None:
        for name in ("heartbeat", "start"):
            rule, fits = "a finite number above 0", lambda seconds: 0 < seconds < math.inf
            check_number(getattr(self, name), f"timeouts.{name}", rule, fits, "Pass seconds.")
        is_positive = lambda seconds: seconds > 0  # noqa: E731
        check_number(self.hang, "timeouts.hang", "a number above 0", is_positive, "Pass seconds.", optional=True)


class Watch:
    """Ends a run after that many seconds without progress (None: never); prints the stack of every thread, and which process
    is behind."""

    def __init__(self, peers: Peers, seconds: float | None = Timeouts.hang):
        self._peers, self._seconds = peers, seconds
        self._last: float | None = None  # the time of the last progress; None while none is expected
        self._n_loops = 0  # loops over steps or batches, one inside another
        peers.on("stuck", lambda index, seconds: self._report(seconds))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Returns a context in which progress is expected, from the first `beat` on: a step, or a batch of an evaluation."""
        is_left = threading.Event()
        if not self._n_loops and self._seconds is not None:
            threading.Thread(target=self._watch, args=(is_left, self._seconds), name="redeqx-watch", daemon=True).start()
        self._n_loops += 1
        try:
            yield
        finally:
            self._n_loops -= 1
            is_left.set()
            if not self._n_loops:
                self._last = None

    def beat(self, step: int | None = None) -> None:
        """Records progress, and the step that was finished if one is given; more progress is expected."""
        if step is not None:
            self._peers.step = step
        if self._n_loops:
            self._last = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context for work that may take any time, such as compilation."""
        was_on, self._last = self._last is not None, None
        try:
            yield
        finally:
            if was_on:
                self.beat()

    def _watch(self, is_left: threading.Event, seconds: float) -> None:
        while not is_left.wait(min(1.0, seconds / 4)):
            last = self._last
            if last is not None and time.monotonic() - last > seconds:
                self._peers.broadcast("stuck", seconds)
                self._report(seconds)

    def _report(self, seconds: float) -> None:
        if not self._peers.claim_end():
            return
        # In a thread: the calling thread receives the others' contributions.
        threading.Thread(target=self._end, args=(seconds,), name="redeqx-stuck", daemon=True).start()

    def _end(self, seconds: float) -> None:
        try:
            # The number of gatherings tells processes at the same step apart: one that has not entered a gathering is behind
            # those that wait in it.
            at = [self._peers.step or 0, self._peers.n_contributed]
            reached: list[Any] = self._peers.gather("stuck at", at, timeout=5.0)
        except PeerError as error:
            why = f"no progress for {seconds:g} s ({error})"
        else:
            behind = [i for i, at in enumerate(reached) if at == min(reached)]
            who = f"process {', '.join(map(str, behind))} of {self._peers.n} is behind"
            who = "no process is behind another" if len(behind) == self._peers.n else who
            why = f"no progress for {seconds:g} s: {who}, after step {min(reached)[0]}"
        say(f"redeqx: {why}. What each thread of process {self._peers.index} is at:\n{stacks()}")
        self._peers.leave(why, EXIT_CODE)
