"""What ends a run before its end, and where it then stands: a scheduler's signal, and a step that never comes.

`Preemption` makes all processes stop after the same step, to save it. `Watch` notices that no step comes any more: where a
peer is alive and stuck, nobody else does.
"""

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._peers import EXIT_CODE, PeerError, Peers, leave

# Kubernetes, spot machines and SLURM; SLURM's `--signal=USR1@120`, which Windows has not.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
HANG = 1800.0  # seconds without a step after which a run counts as stuck
# Steps that a process goes on after it has said where it is: others may be ahead, and wait for it in a collective.
_AHEAD = 2


class Preempted(SystemExit):
    """The end of a run that was told to stop, with its last step saved: exit code 75, on which schedulers requeue."""

    def __init__(self, step: int):
        super().__init__(EXIT_CODE)
        self.step = step


class Preemption:
    """Whether this run has been told to stop, and after which step all its processes do."""

    def __init__(self, peers: Peers):
        self._peers = peers
        self._noticed = False
        self._topic: str | None = None  # of the gathering of where each is
        self._limit = 0
        self._steps: list[int | None] | None = None
        peers.on("preempted", lambda index, value: self._notice())

    def _notice(self) -> None:
        self._noticed = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals; what else they would do is put off until the end of this."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python hands signals to the main thread alone
            return
        before = {number: signal.signal(number, lambda *_: self._notice()) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():  # None: not Python's, as that of JAX, which only notes it too
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if self._topic is None and self._peers.n > 1:
                self._peers.give("preempted at", None)  # no step of this process comes: whoever waits goes on to the end

    def is_due(self, step: int) -> bool:
        """Whether the run stops after this step; every process asks after every step, and gets the same answer."""
        if self._peers.n == 1 or not self._noticed:
            return self._noticed
        if self._topic is None:
            self._peers.say("preempted")
            self._topic, self._limit = self._peers.give("preempted at", step), step + _AHEAD
        if self._steps is None:
            self._steps = self._peers.wait(self._topic) if step >= self._limit else self._peers.answer(self._topic)
        reached = [at for at in self._steps or () if at is not None]
        # Nobody has gone further than this, which is as far as the one that is most ahead goes without an answer.
        return len(reached) == self._peers.n and step == max(reached) + _AHEAD


class Watch:
    """Ends a run in which no step comes any more, with what every thread is at, and who is behind.

    **Arguments:**

    - `seconds`: without a step; None never ends it.
    """

    def __init__(self, peers: Peers, seconds: float | None = HANG):
        self._peers, self._seconds = peers, seconds
        self._last: float | None = None  # when the last step came; None while none is expected
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        peers.on("stuck", lambda index, seconds: self._say_where(seconds))

    def beat(self, step: int | None = None) -> None:
        """Something has come, a step if one is given, and the next is expected."""
        self._peers.step = self._peers.step if step is None else step
        self._last = time.monotonic()
        if self._thread is None and self._seconds is not None:
            self._thread = threading.Thread(target=self._look, name="redeqx-watch", daemon=True)
            self._thread.start()

    def beat_on(self) -> None:
        """As `beat`, where something was expected at all."""
        if self._last is not None:
            self.beat()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in this may take any time: compilation, a user's metrics."""
        was_on, self._last = self._last is not None, None
        try:
            yield
        finally:
            if was_on:
                self.beat()

    def off(self) -> None:
        """Nothing is expected any more."""
        self._last = None

    def _look(self) -> None:
        assert self._seconds is not None
        while True:
            time.sleep(min(1.0, self._seconds / 4))
            last = self._last
            if last is not None and time.monotonic() - last > self._seconds:
                self._peers.say("stuck", self._seconds)
                self._say_where(self._seconds)

    def _say_where(self, seconds: float) -> None:
        if not self._ending.acquire(blocking=False):
            return
        # In a thread: what is heard from the others comes by the thread that calls this.
        threading.Thread(target=self._end, args=(seconds,), name="redeqx-stuck", daemon=True).start()

    def _end(self, seconds: float) -> None:
        try:
            # The step, and what was said since: one that is stuck before a step is behind one that waits for it.
            reached: list[Any] = self._peers.gather("stuck at", [self._peers.step or 0, self._peers.n_given], timeout=5.0)
        except PeerError as error:
            why = f"no step for {seconds:g} s ({error})"
        else:
            behind = [i for i, at in enumerate(reached) if at == min(reached)]
            who = f"process {', '.join(map(str, behind))} of {self._peers.n} is behind"
            who = "no process is behind another" if len(behind) == self._peers.n else who
            why = f"no step for {seconds:g} s: {who}, after step {min(reached)[0]}"
        print(f"redeqx: {why}. What each thread of process {self._peers.index} is at:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        leave(why, self._peers.committed)
