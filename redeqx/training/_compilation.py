"""What happens when a step compiles for a new batch: it is shown, checked, counted, and made to fit into memory."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .._deployer import Deployer
from ..compiled import SavedPrograms, checked as checked_work, step_facts
from ..data import Batch
from ..distributed import agree_on_program
from ..machine import cache_text, cache_use, chip_of_kind
from ..memory import Loop, SearchSpace, Strategy, choose, matmul_seconds
from ..monitor import ProgressLine, Work
from ..steps import Program, Task, TrainState, make_program, n_rows, shard_bytes
from ..tracing import insides


class CalledStep(NamedTuple):
    """What a jitted step has captured; of a train step also its lowering, and its work on one device, if rates are shown."""

    captured: list[jax.Array]
    lowered: Any = None
    work: Work | None = None


class CalledSteps:
    """The calls of a jitted step with a name, of a user's function."""

    def __init__(self, deployer: Deployer, name: str, fn: str):
        self.known: dict[Any, CalledStep] = {}  # by the signature of their batch
        self._deployer, self._name, self._fn = deployer, name, fn
        self._step: Any = None

    def call(self, step: Any, args: tuple[Any, ...], signature: Any, line: AbstractContextManager[ProgressLine]) -> Any:
        """Calls a step, which may be another than before; returns its results. `line` is a context with the line that shows
        the compilation, if the signature is new."""
        if self._step is not step:
            self._step, self.known = step, {}
        if signature in self.known:
            check_captured(self.known[signature].captured, self._fn)
            return step(*args)
        with line as shown, self.compiling(step, args, shown):
            outs = step(*args)
        self.known[signature] = CalledStep(captured(step, args))
        return outs

    @contextmanager
    def compiling(
        self,
        step: Any,
        args: tuple[Any, ...],
        line: ProgressLine,
        check: AbstractContextManager[Any] | None = None,
        ahead: "Compilation | None" = None,
    ) -> Iterator[None]:
        """A context for the first call of a step with these shapes, which compiles it, if not `ahead` of it: a line shows
        that, and the processes check that they call the same program. `check` is a context for the call itself."""
        deployer, text = self._deployer, f"{self._name} for another batch shape" if self.known else self._name
        with (
            deployer.preemption.held(),  # a save computes nothing while a function is traced
            deployer.watch.paused(),
            line.compiling(text, None if ahead is None else ahead.began) as notes,
            check or nullcontext(),
            cache_use() as cached,
        ):
            if deployer.peers.n > 1:  # the call reuses the lowering
                agree_on_program(deployer.peers, self._name, step.lower(*args))
            yield
            notes.append(cache_text(cached) if ahead is None else ahead.note)


class TrainSteps(CalledSteps):
    """The calls of the train steps of one model."""

    def __init__(self, deployer: Deployer):
        super().__init__(deployer, "train step", "loss_fn")
        self._ahead: Compilation | None = None
        self._unchecked: SavedPrograms | None = deployer.saved_programs

    def compile_ahead(self, program: Program, batch: Batch) -> None:
        """Compiles a train step in a thread, while its arrays are made or read."""
        args = program.train_args(program.state, batch.groups, np.uint32(batch.n_examples))
        self._check_saved(program, args)
        self._ahead = Compilation(program.train_step, args, batch.signature)

    def _check_saved(self, program: Program, args: tuple[Any, ...]) -> None:
        """Raises ValueError if the first train step is not the one that the cache folder was filled for."""
        saved, self._unchecked = self._unchecked, None
        if saved is not None:
            saved.check(step_facts(program.argument_texts(args), program.train_step.lower(*args)))

    def call_first(
        self, program: Program, state: TrainState, batch: Batch, line: ProgressLine
    ) -> tuple[CalledStep, tuple[TrainState, jax.Array]]:
        """Calls a train step for a batch with a new signature, which compiles it; returns the step, and its results."""
        args = program.train_args(state, batch.groups, np.uint32(batch.n_examples))
        self._check_saved(program, args)
        step, check = program.train_step, checked_work(program.train_step, args, program.plan, batch.groups)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.step is not step or ahead.signature != batch.signature):
            ahead = None
        with self.compiling(step, args, line, check, ahead):
            work = _work(program, args) if self._deployer.console.shows_speed else None
            called = CalledStep(captured(step, args), step.lower(*args), work)
            if ahead is not None:
                ahead.wait()
            outs = program.call_train(state, *args[2:])  # finds this lowering in JAX's caches
        self.known[batch.signature] = called
        return called, outs


def captured(step: Any, args: tuple[Any, ...]) -> list[jax.Array]:
    """Returns the arrays from outside that a jitted step has read when it was traced for these arguments, or a jit in it."""

    def arrays(closed: Any) -> Iterator[jax.Array]:
        yield from (x for x in closed.consts if isinstance(x, jax.Array))
        for eqn in closed.jaxpr.eqns:
            for inner in insides(eqn):
                yield from arrays(inner.closed)

    return list(arrays(step.trace(*args).jaxpr))


def check_captured(arrays: Sequence[jax.Array], name: str) -> None:
    """Raises ValueError if training has replaced an array that a step has captured, since the step has its former values.
    `name` is that of the user's function that reads the arrays."""
    if (found := next((x for x in arrays if x.is_deleted()), None)) is not None:
        raise ValueError(
            f"`{name}`: expected arrays from outside to stay the same, got {found.dtype}{list(found.shape)}, which a "
            f"trainer has updated since: `{name}` is traced once, and would use the former values. Pass what changes in the "
            "examples, or copy what shall stay. Where the gradient of one model passes through another, train both as the "
            "fields of one model."
        )


class Compilation:
    """Compiles a step in a thread, for the call that follows: it finds the compiled program in JAX's caches. `args` are
    those of the call or their shapes."""

    def __init__(self, step: Any, args: tuple[Any, ...], signature: Any):
        self.step, self.signature = step, signature
        self.began = time.perf_counter()
        self.note = ""  # on the compilation cache
        self._is_done = threading.Event()
        threading.Thread(target=self._compile, args=(step.lower(*args),), name="redeqx-compile").start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        try:
            with suppress(Exception), cache_use() as cached:  # the call compiles again, and raises the error
                lowered.compile()
                self.note = cache_text(cached)
        finally:
            self._is_done.set()

    def wait(self) -> None:
        # Not `Thread.join`: if a signal's handler raises in it, Python before 3.13 takes the thread for ended, and does not
        # wait for it at exit. XLA then aborts the process, with another exit code than that for a scheduler.
        self._is_done.wait()


# --- the work of a step -----------------------------------------------------------------------------------------------


def _work(program: Program, args: tuple[Any, ...]) -> Work:
    """Returns the work of one device in a step of a full batch, given the arguments of the train step."""
    flops = program.model_flops(args)
    mesh = program.plan.mesh
    n_devices, chip = mesh.size, chip_of_kind(mesh.devices.flat[0].device_kind)
    return Work(flops.total() / n_devices, None if chip is None else matmul_seconds(flops, chip, n_devices))


# --- memory -----------------------------------------------------------------------------------------------------------


def choose_memory(engine: Any, batch: Batch) -> None:
    """Chooses the strategy for a batch. Each program is compiled once: the step whose memory was checked is the one that
    runs."""
    deployer, task = engine.deployer, engine.task
    if task.compute.memory is None or task.grad_fn is not None:
        return
    rows = max(1, n_rows(batch.micro_batch) // deployer.n_batch_shards // task.n_parts)
    own = Strategy.of(task.compute, deployer.mesh, rows, task.accumulate * task.n_parts)
    own = replace(own, remat=task.compute.remat_level)

    def compiled(strategy: Strategy) -> jax.stages.Compiled:
        if strategy != own:
            engine.use_task(_with_strategy(engine.task, strategy))
        with engine.line.compiling("train step"):
            return engine.compiled(batch)

    opt_state = 0 if task.compute.offload_opt_state else shard_bytes(engine.placed[1].opt_state)
    with deployer.watch.paused():
        tried, text = choose(
            own, deployer.mesh, deployer.peers, compiled, partial(_search_space, engine, own, batch), opt_state
        )
    is_first = engine.newest_step is None
    if tried and (tried[-1].strategy != own or not tried[-1].fits or is_first):
        deployer.console.info(text)


def _search_space(engine: Any, own: Strategy, batch: Batch, limit: int) -> SearchSpace:
    """Returns the strategies that make the same update on this mesh."""
    task, mesh, (program, state) = engine.task, engine.deployer.mesh, engine.placed
    args, device = program.train_args(state, batch.groups, jax.ShapeDtypeStruct((), "uint32")), mesh.devices.flat[0]

    def make(task: Task) -> Program:
        return make_program(task, program.plan, *engine.trees, update=program.update)

    def trace(strategy: Strategy) -> Any:
        changed = make(replace(task, compute=strategy.applied(task.compute)))
        return changed.train_step.trace(*args).jaxpr.jaxpr

    def loops(strategy: Strategy) -> Sequence[Loop]:
        changed = make(_with_strategy(task, replace(strategy, remat="0KiB")))
        changed.train_step.trace(*args)
        return changed.saved

    return SearchSpace.of(
        own,
        trace,
        program.sizes,
        device.platform,
        loops=loops,
        n_devices=mesh.size,
        memory=limit,
        chip=chip_of_kind(device.device_kind),
        rows=task.row_use_of(*engine.trees, batch.micro_batch),
        has_state=task.has_state,
        is_running=True,
    )


def _with_strategy(task: Task, strategy: Strategy) -> Task:
    """Returns a task as it is computed by a strategy."""
    n_parts = strategy.accumulate_grad_batches // task.accumulate
    return replace(task, compute=strategy.applied(task.compute), n_parts=n_parts)
