"""Calls of jitted steps: shows, checks and counts what is new when a step compiles for a new batch."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import jax

from ..compiled import checked as checked_work
from ..data import Batch
from ..distributed import agree_on_program
from ..machine import cache_use
from ..monitor import ProgressLine, Work
from ..partition import Plan
from ._run import Run


class _TrainProgram(NamedTuple):
    """A program of the train step, and its work on one device."""

    lowered: jax.stages.Lowered
    work: Work


class _Compilation:
    """Compiles a step in a thread, for the call that follows: it finds the compiled program in JAX's caches.

    **Arguments:**

    - `step`, `args`: the jitted step, and the arguments of the call or their shapes.
    - `signature`: of the batch.
    """

    def __init__(self, step: Any, args: tuple[Any, ...], signature: Any):
        self.step, self.signature = step, signature
        self.began = time.perf_counter()
        self.note = ""  # on the compilation cache
        self._thread = threading.Thread(target=self._compile, args=(step.lower(*args),), name="redeqx-compile")
        self._thread.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        with suppress(Exception), cache_use() as cached:  # the call compiles again, and raises the error
            lowered.compile()
            self.note = cached.text()

    def wait(self) -> None:
        self._thread.join()


class Calls:
    """Calls the steps of one model.

    **Arguments:**

    - `run`: its processes check that they call the same program; its console shows compilations.
    """

    def __init__(self, run: Run):
        self._run = run
        # By name: the newest step that was called, and its programs by the signature of their batch.
        self._known: dict[str, tuple[Any, dict[Any, Any]]] = {}
        self._newest: _TrainProgram | None = None
        self._ahead: _Compilation | None = None

    @property
    def newest_step(self) -> jax.stages.Compiled | None:
        """The compiled program of the newest train step; None before the first."""
        return None if self._newest is None else self._newest.lowered.compile()

    def has_called(self, step: Any, signature: Any = None) -> bool:
        """Returns whether a train step has been called; with `signature`, with such a batch."""
        called, programs = self._known.get(_TRAIN, (None, {}))
        return called is step and (signature is None or signature in programs)

    def compile_ahead(self, step: Any, args: tuple[Any, ...], signature: Any) -> None:
        """Compiles a train step in a thread, while its arrays are made or read.

        **Arguments:**

        - `args`: the arguments of the call, or their shapes.
        - `signature`: of the batch.
        """
        self._ahead = _Compilation(step, args, signature)

    def train(
        self, step: Any, args: tuple[Any, ...], batch: Batch, line: ProgressLine, plan: Plan, count: Callable[[], Work]
    ) -> tuple[Any, Work]:
        """Calls a train step; returns its results, and its work on one device.

        **Arguments:**

        - `plan`: the model's plan, to check that no device repeats the work of others.
        - `count`: counts the work; called once for each program.
        """
        signature, programs = batch.signature, self._programs(_TRAIN, step)
        if signature in programs:
            outs = step(*args)
        else:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and (ahead.step is not step or ahead.signature != signature):
                ahead = None
            with self._compiling(_TRAIN, step, args, line, checked_work(step, args, plan, batch.groups), ahead):
                program = _TrainProgram(step.lower(*args), count())  # the call below reuses the lowering
                if ahead is not None:
                    ahead.wait()
                outs = step(*args)
            programs[signature] = program
        self._newest = programs[signature]
        return outs, programs[signature].work

    def evaluate(self, step: Any, args: tuple[Any, ...], batch: Batch, line: ProgressLine) -> Any:
        """Calls an eval step; returns its results."""
        signature, programs = batch.signature, self._programs(_EVAL, step)
        if signature in programs:
            return step(*args)
        with self._compiling(_EVAL, step, args, line):
            outs = step(*args)
        programs[signature] = None
        return outs

    def _programs(self, name: str, step: Any) -> dict[Any, Any]:
        """Returns the programs of a step; empty if the step has just replaced another."""
        if name not in self._known or self._known[name][0] is not step:
            self._known[name] = (step, {})
        return self._known[name][1]

    @contextmanager
    def _compiling(
        self,
        name: str,
        step: Any,
        args: tuple[Any, ...],
        line: ProgressLine,
        check: AbstractContextManager[Any] | None = None,
        ahead: _Compilation | None = None,
    ) -> Iterator[None]:
        run = self._run
        began = None if ahead is None else ahead.began
        text = f"{name} for another batch shape" if self._programs(name, step) else name
        held = run.preemption.held()  # a save computes nothing while a function is traced
        with held, run.watch.paused(), line.compiling(text, began) as notes, check or nullcontext(), cache_use() as cached:
            if run.peers.n > 1:  # the call below reuses the lowering
                agree_on_program(run.peers, name, step.lower(*args))
            yield
            notes.append(cached.text() if ahead is None else ahead.note)


_TRAIN, _EVAL = "train step", "eval step"
