"""Calls of jitted steps: shows, checks and counts what is new when a step compiles for a new batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    @property
    def newest_step(self) -> jax.stages.Compiled | None:
        """The compiled program of the newest train step; None before the first."""
        return None if self._newest is None else self._newest.lowered.compile()

    def has_called(self, step: Any, signature: Any = None) -> bool:
        """Returns whether a train step has been called; with `signature`, with such a batch."""
        called, programs = self._known.get(_TRAIN, (None, {}))
        return called is step and (signature is None or signature in programs)

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
            with self._compiling(_TRAIN, step, args, line, checked_work(step, args, plan, batch.groups)):
                program = _TrainProgram(step.lower(*args), count())  # the call below reuses the lowering
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
    ) -> Iterator[None]:
        run = self._run
        text = f"{name} for another batch shape" if self._programs(name, step) else name
        with run.watch.paused(), line.compiling(text) as notes, check or nullcontext(), cache_use() as cached:
            if run.peers.n > 1:  # the call below reuses the lowering
                agree_on_program(run.peers, name, step.lower(*args))
            yield
            notes.append(cached.text())


_TRAIN, _EVAL = "train step", "eval step"
