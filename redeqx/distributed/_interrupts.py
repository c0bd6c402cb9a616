"""What ends a run before its end, and where it then stands: a scheduler's signal, and a step that never comes.

`Preemption` makes all processes stop after the same step, to save it. `Watch` notices that no step comes any more: where a
peer is alive and stuck, nobody else does.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

from ._exits import end_in_time, keep_quiet, say, stacks
from ._links import PeerError
from ._peers import EXIT_CODE, Peers, leave
from ._signals import handled, woken

# Kubernetes, spot machines and SLURM; SLURM's `--signal=USR1@120`, which Windows has not.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
HANG = 1800.0  # seconds without a step after which a run counts as stuck
_INTERRUPTED = 130  # as shells call the end by Ctrl-C: 128 + SIGINT
_STOPPING = b"\nredeqx: Ctrl-C: stopping after this step, to save it; a second one leaves at once\n"


class Preempted(SystemExit):
    """The end of a run that was told to stop, with its last step saved: exit code 75, on which schedulers requeue."""

    def __init__(self, step: int):
        super().__init__(EXIT_CODE)
        self.step = step


class Preemption:
    """Whether this run has been told to stop, by a scheduler or by Ctrl-C, and after which step all its processes do.

    Each is asked after every step; the first that knows tells the others, and all say how far they are: they stop one step
    after the furthest. A thread says so for a process whose main one may be in a collective, where it waits for another.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._noticed = False  # and to stay so, until this process stops
        self._is_interrupt = False  # by Ctrl-C
        self._change = threading.Lock()
        self._begin(is_on=False)
        peers.on("preempted", lambda index, is_interrupt: self._hear(is_interrupt))

    def _begin(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._is_passed_on = False
        self._step = self._said = 0  # after which this process was asked last, and after which it was when it said so
        self._topic: str | None = None  # of the gathering of where each is, once this process has said where
        self._steps: list[int | None] | None = None  # where each is; None of one that has ended

    def _notice(self) -> None:
        self._noticed = True  # no more: a signal comes wherever the main thread is, and whatever it holds

    def _interrupt(self) -> None:
        """At a Ctrl-C; in a notebook the second one ends the fit at once, and the kernel stays."""
        if _is_interactive():
            if self._noticed:
                raise KeyboardInterrupt
            _say_stopping()
        self._is_interrupt = True
        self._notice()

    def _hear(self, is_interrupt: bool = False) -> None:
        self._is_interrupt |= is_interrupt
        self._noticed = self._is_passed_on = True
        self._say_where()

    def _say_where(self) -> None:
        with self._change:
            if self._is_on and self._topic is None:
                self._said, self._topic = self._step, self._peers.give("preempted at", self._step)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals; what else they would do is put off until the end of this."""
        acts = dict.fromkeys(SIGNALS, self._notice)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a script that a shell has put in the background
            acts[signal.SIGINT] = self._interrupt
        with self._change:
            self._begin(is_on=True)
        try:
            with handled(acts), nullcontext() if _is_interactive() else _second_leaves():
                yield
            if self._is_interrupt and self._noticed:  # too late for this fit; a scheduler's signal waits for the next one
                self._is_interrupt = self._noticed = False
                raise KeyboardInterrupt
        finally:
            with self._change:
                self._is_on = False
                if self._topic is None and self._peers.n > 1:
                    with suppress(PeerError):  # of a forked child
                        self._peers.give("preempted at", None)  # no step of this process comes: others go on to their end

    def is_due(self, step: int) -> bool:
        """Whether the run stops after this step; every process asks after every step, and gets the same answer."""
        with self._change:
            self._step = step
        if not self._noticed:
            return False
        if self._peers.n > 1 and not self._are_all_there(step):
            return False
        self._noticed = False
        return True

    def _are_all_there(self, step: int) -> bool:
        if not self._is_passed_on:
            self._is_passed_on = True
            self._peers.say("preempted", self._is_interrupt)
        self._say_where()
        if step == self._said:
            return False
        if self._steps is None:
            assert self._topic is not None
            self._steps = self._peers.wait(self._topic)
        reached = [at for at in self._steps if at is not None]
        return len(reached) == self._peers.n and step == max(reached) + 1

    def end(self, step: int, say: Callable[[str], None]) -> NoReturn:
        """End the script, once that step is saved: with exit code 75, or as Ctrl-C does, which a notebook survives."""
        is_interrupt, self._is_interrupt = self._is_interrupt, False
        said = "stopped by Ctrl-C" if is_interrupt else "told to stop"
        say(f"{said}: step {step} is saved; run the script again to go on from it")
        if not _is_interactive():
            end_in_time(_INTERRUPTED if is_interrupt else EXIT_CODE)
        if not is_interrupt:
            raise Preempted(step)
        error = KeyboardInterrupt(f"step {step} is saved")
        if not _is_interactive():
            keep_quiet(error)
        raise error


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")  # as Python's prompt, IPython and notebooks have it


def _say_stopping() -> None:
    with suppress(OSError):  # not by `print`, within which the signal may have come
        os.write(2, _STOPPING)


def _second_leaves() -> AbstractContextManager[None]:
    """The first Ctrl-C is told what it does, the second ends the process, wherever its main thread is."""
    return woken(signal.SIGINT, lambda n: _say_stopping() if n == 1 else os._exit(_INTERRUPTED))


class Watch:
    """Ends a run in which no step comes any more, with what every thread is at, and who is behind.

    **Arguments:**

    - `seconds`: without a step; None never ends it.
    """

    def __init__(self, peers: Peers, seconds: float | None = HANG):
        self._peers, self._seconds = peers, seconds
        self._last: float | None = None  # when the last step came; None while none is expected
        self._n_loops = 0  # of training, one inside another
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        peers.on("stuck", lambda index, seconds: self._say_where(seconds))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Steps are expected in this, from the first `beat` on; after it none."""
        self._n_loops += 1
        try:
            yield
        finally:
            self._n_loops -= 1
            if not self._n_loops:
                self._last = None

    def beat(self, step: int | None = None) -> None:
        """Something has come, a step if one is given, and the next is expected."""
        self._peers.step = self._peers.step if step is None else step
        if not self._n_loops:
            return
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
        say(f"redeqx: {why}. What each thread of process {self._peers.index} is at:\n{stacks()}")
        leave(why, self._peers.committed)
