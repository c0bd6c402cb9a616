"""Ends a run early, at a scheduler's signal and at Ctrl-C.

All processes stop after the same step, to save it. A script that is preempted outside of a fit ends too.
"""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NoReturn, Protocol

from ..errors import warn
from ._exits import PATIENCE, end_in_time, exit_now, say
from ._links import PeerError
from ._peers import EXIT_CODE, Peers
from ._signals import handle_always, handled, woken

# Kubernetes, spot machines and SLURM send SIGTERM; SLURM's `--signal=USR1@120` sends SIGUSR1.
SIGNALS: list[int] = [signal.SIGTERM, signal.SIGUSR1]
_GRACE = 20.0  # seconds within which several processes reach the end of an update; schedulers kill after 30
_INTERRUPTED = 130  # the exit code that shells report after Ctrl-C: 128 + SIGINT
_STOPPING = b"\nredeqx: Ctrl-C: stopping after this step, to save it; a second one leaves at once\n"


class Keeper(Protocol):
    """Saves what a resumed run needs; both methods are called in the main thread, between two updates."""

    def is_unsaved(self) -> bool: ...
    def save_to_resume(self) -> int:
        """Saves the newest step, and returns it."""
        ...


class Preempted(SystemExit):
    """Ends a preempted run after its last step is saved, with exit code 75, on which schedulers requeue."""

    def __init__(self, step: int):
        super().__init__(EXIT_CODE)
        self.step = step


class _Interrupted(SystemExit, KeyboardInterrupt):
    """Ends a script that Ctrl-C has stopped, without a traceback."""


class Preemption:
    """Stops all processes of a run after the same step, when a scheduler or Ctrl-C preempts it.

    Every process calls `is_due` after each step. The first one that received a signal broadcasts it. All then contribute
    their step, and stop one step after the furthest. A thread contributes for a process whose main thread may be waiting
    in a collective.

    Outside of a fit, a scheduler's signal ends the script too, once `guard` was called: after saving what is not saved yet,
    which several processes can do only after the same update.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._is_signalled = False  # by a scheduler; stays True until this process stops
        self._n_interrupts = 0  # Ctrl-C, in this fit
        self._is_guarded = self._is_in_fit = False
        self._n_held = 0
        self._keepers: list[weakref.ref[Keeper]] = []  # in the same order in all processes
        self._change = threading.Lock()
        self._begin(is_on=False)

    def _begin(self, *, is_on: bool) -> None:
        with self._change:
            self._is_on = is_on
            self._step = 0  # the last step of this process
            self._contributed = 0  # the step that this process contributed
            self._gathering: str | None = None  # the name of the gathering, once this process has contributed its step
            self._end: int | None = None  # the step after which all stop; 0 if the fit of one has ended
        # In place of another deployer of this run, which may have been made since.
        self._peers.on("preempted", lambda index, is_interrupt: self._handle(is_interrupt))

    def _notice(self) -> None:
        self._is_signalled = True  # do nothing else: the main thread may hold any lock

    def _interrupt(self) -> None:
        """Handles Ctrl-C. In a notebook the second one ends the fit at once, and the kernel keeps running."""
        if _is_interactive():
            if self._n_interrupts:
                raise KeyboardInterrupt
            _print_stopping()
        self._n_interrupts += 1

    def _handle(self, is_interrupt: bool) -> None:
        self._is_signalled |= not is_interrupt
        self._n_interrupts += is_interrupt
        self._contribute_step()

    def _contribute_step(self) -> None:
        with self._change:
            if self._is_on and self._gathering is None:
                self._contributed = self._step
                self._gathering = self._peers.contribute("preempted at", self._step)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Returns a context that records the signals. Their usual effect is delayed until its end."""
        acts = dict.fromkeys(SIGNALS, self._notice)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a script that a shell runs in the background
            acts[signal.SIGINT] = self._interrupt
        self._begin(is_on=True)
        self._is_in_fit, is_late = True, False
        try:
            with handled(acts), nullcontext() if _is_interactive() else _second_exits():
                yield
            is_late = self._n_interrupts > 0  # Ctrl-C came after the last step
        finally:
            # Ctrl-C ends this fit only. (A scheduler's signal after the last step ends the script, or stops the next fit.)
            self._is_in_fit, self._n_interrupts = False, 0
            with self._change:
                self._is_on = False
                if self._gathering is None and self._peers.n > 1:
                    with suppress(PeerError):  # raised in a forked child
                        self._peers.contribute("preempted at", None)  # this process takes no more steps
        if is_late:
            raise KeyboardInterrupt

    def is_due(self, step: int) -> bool:
        """Returns whether the run stops after this step, the same in every process. Each calls it after each step."""
        with self._change:
            self._step = step
        if not (self._is_signalled or self._n_interrupts):
            return False
        if self._peers.n > 1 and not self._is_common_step(step):
            return False
        self._is_signalled = False
        return True

    def _is_common_step(self, step: int) -> bool:
        if self._gathering is None:  # no message of another process has come first
            self._peers.broadcast("preempted", self._n_interrupts > 0)
        self._contribute_step()
        if step == self._contributed:  # does not wait: the others' messages may take longer than a step
            return False
        if self._end is None:
            assert self._gathering is not None
            steps = self._peers.wait(self._gathering)
            self._end = 0 if None in steps else max(steps) + 1
        return step == self._end

    def end(self, step: int, log: Callable[[str], None]) -> NoReturn:
        """Ends the script after that step is saved: with exit code 75, or by KeyboardInterrupt, which notebooks survive."""
        is_interrupt, self._n_interrupts = self._n_interrupts > 0, 0
        why = "stopped by Ctrl-C" if is_interrupt else "preempted"
        what = "`fit`" if _is_interactive() else "the script"
        log(f"{why}: step {step} is saved; run {what} again to go on from it")
        if self._is_guarded and threading.current_thread() is not threading.main_thread():
            self._peers.close()
            exit_now(EXIT_CODE)  # an exception would end this thread alone
        if not _is_interactive():
            end_in_time(_INTERRUPTED if is_interrupt else EXIT_CODE)
        if not is_interrupt:
            raise Preempted(step)
        raise KeyboardInterrupt(f"step {step} is saved") if _is_interactive() else _Interrupted(_INTERRUPTED)

    # --- outside of a fit --------------------------------------------------------------------------------------------

    def guard(self) -> None:
        """From now on, a scheduler's signal outside of a fit ends the script with exit code 75, after saving.

        A signal that the script handles itself is left to it. Warns in another thread than the main one, in which Python
        calls handlers.
        """
        if _is_interactive():
            return
        if handle_always(SIGNALS, _act_outside):
            self._is_guarded = True
            _guarded.append(weakref.ref(self))
        elif not _guarded:
            warn(
                "`Deployer`: expected in the main thread, which handles signals, got another one: SIGTERM ends the process "
                "without saving. Make a Deployer in the main thread first."
            )

    def keep(self, keeper: Keeper) -> None:
        """Has `keeper` save before the end of the script; held by a weak reference."""
        self._keepers.append(weakref.ref(keeper))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Returns a context in which a signal waits for its end: what would be saved changes, or is being saved."""
        self._n_held += 1
        try:
            yield
        finally:
            self._n_held -= 1
        if self._is_signalled and self._is_guarded and not self._is_in_fit:
            self._signal_outside()

    def is_due_outside(self, step: int) -> bool:
        """`is_due` after an update outside of a fit; False within one."""
        if not self._is_guarded or self._is_in_fit:
            return False
        if not self._is_on:
            self._begin(is_on=True)
        return self.is_due(step)

    def end_outside(self) -> NoReturn:
        """Ends the script with exit code 75, after what is not saved yet was saved. All processes call it after the same
        update, or there is nothing to save."""
        self._is_signalled = False
        self._n_held += 1  # a second signal must not end the save
        unsaved = self._unsaved()
        for keeper in unsaved:
            try:
                say(f"redeqx: preempted: step {keeper.save_to_resume()} is saved")
            except Exception as error:  # this process ends in any case
                say(f"redeqx: preempted: the newest step could not be saved: {error}")
        if self._peers.n > 1:
            if unsaved:  # then all processes are here, and the first one to leave ends the others
                with suppress(PeerError):
                    self._peers.gather("saved", timeout=PATIENCE)
            self._peers.end(_OUTSIDE, EXIT_CODE)
        say(f"redeqx: {_OUTSIDE}. Leaving with exit code {EXIT_CODE}: run it again to go on.")
        end_in_time(EXIT_CODE)
        raise SystemExit(EXIT_CODE)

    def _signal_outside(self) -> None:
        self._is_signalled = True
        if self._n_held:  # then at the end of `held`
            return
        if self._peers.n == 1 or not self._unsaved():
            self.end_outside()
        # Else the processes save after their next update, if one comes.
        threading.Thread(target=self._leave_late, name="redeqx-preempted", daemon=True).start()

    def _unsaved(self) -> list[Keeper]:
        runs = [run for ref in _guarded if (run := ref()) is not None]
        keepers = [keeper for run in runs for ref in run._keepers if (keeper := ref()) is not None]
        return [keeper for keeper in keepers if keeper.is_unsaved()]

    def _leave_late(self) -> None:
        time.sleep(_GRACE)
        if self._is_signalled and not self._is_in_fit:  # else the processes save the same step, or a fit ends by itself
            self._peers.end(_OUTSIDE, EXIT_CODE)


_OUTSIDE = "preempted outside of `fit`"
_guarded: "list[weakref.ref[Preemption]]" = []


def _act_outside() -> None:
    """Handles a scheduler's signal while no fit runs in the main thread."""
    runs = [run for ref in _guarded if (run := ref()) is not None]
    if fits := [run for run in runs if run._is_in_fit]:  # in another thread, which ends the process
        for run in fits:
            run._notice()
    elif runs:
        next((run for run in runs if run._n_held), runs[0])._signal_outside()
    else:  # the run is gone, and its script goes on
        raise SystemExit(EXIT_CODE)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1")  # set by Python's prompt, IPython and notebooks


def _print_stopping() -> None:
    with suppress(OSError):  # not `print`: the signal may have interrupted one
        os.write(2, _STOPPING)


def _second_exits() -> AbstractContextManager[None]:
    """Returns a context in which the first Ctrl-C prints a message, and the second ends the process, wherever the main
    thread is."""
    return woken(signal.SIGINT, lambda n: _print_stopping() if n == 1 else os._exit(_INTERRUPTED))
