"""Compiles a training run for described devices, which need not exist, and searches for a strategy with which it fits.

Nothing is allocated: models, optimizer states and batches are shapes with shardings, and all numbers of a step are read from
its compiled program. `machine` describes the devices, `compiled` reads the buffers and collectives of a program, and
`_report` prints the result.
"""

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._tree import bare_shape
from ..compiled import (
    Module,
    SavedPrograms,
    bytes_moved,
    collectives,
    hidden_host_share,
    host_copies,
    program_environment,
    step_facts,
    temporaries,
    with_overlap,
    workspace_allowance,
)
from ..data import BatchSize, Group, group_sharding, n_tokens
from ..dims import RowUse
from ..errors import check_choice
from ..machine import Machine, configured, dry, is_in_host, uncached_where_described
from ..memory import Loop, SearchSpace, Strategy, Tried, estimated_bytes, matmul_seconds, refused_bytes, sizes_of
from ..monitor import ProgressLine
from ..partition import Plan
from ..steps import Program, n_rows, shard_bytes
from ..tracing import kind_of_product, matmul_flops
from ._figures import Step, attempt, reason, sent_per_second
from ._report import DryRun
from ._workload import Workload

EXIT_FAILED, EXIT_DOES_NOT_FIT = 1, 3
UNCOMPILED = "none"  # a level of optimization
OPTIMIZATIONS = (UNCOMPILED, "O0", "O1", "O2", "O3", "UNKNOWN")
SEARCHES = ("fits", "fastest", "none")


class DryRunDone(SystemExit):
    """Ends the script of a dry run when its report is complete."""

    def __init__(self, run: DryRun):
        is_complete = all(f"{name} step" not in run.failed for name in ("eval", "predict"))
        fits = run.fits or (run.is_searched and run.best is not None)
        super().__init__(EXIT_DOES_NOT_FIT if not fits else 0 if is_complete else EXIT_FAILED)
        self.run = run
        if (described := dry()) is not None:
            described.done.append(self)


def dry_run(
    work: Workload,
    machine: Machine,
    *,
    optimization: str | None = None,
    search: str = "fits",
    log: Callable[[str], None] = lambda text: None,
    line: ProgressLine | None = None,
    save: SavedPrograms | None = None,
) -> DryRun:
    """Compiles the steps of a workload for a machine.

    **Arguments:**

    - `optimization`, `search`: as for `Trainer.dry_run`. Each strategy that is tried is compiled too.
    - `log`: called with progress messages.
    - `line`: shows what is being compiled, and since when.
    - `save`: where the programs of the script's own strategy are saved, compiled as a run compiles them.
    """
    check_choice(optimization, "optimization", (*OPTIMIZATIONS, None))
    check_choice(search, "search", SEARCHES)
    shown = _Shown(machine, optimization, line)
    with nullcontext() if line is None else line:
        with shown.compiling(work.strategy):
            run = _compiled(work, machine, work.strategy, optimization, log=log, save=save)
        return _searched(work, run, shown, search)


@dataclass
class _Shown:
    """Shows what is compiled for a machine, after how many others."""

    machine: Machine
    optimization: str | None
    line: ProgressLine | None
    n_done: int = 0

    @contextmanager
    def compiling(self, strategy: Strategy) -> Iterator[None]:
        what = f"for {self.machine.name}: {strategy.code()}"
        if self.line is None:
            yield
            return
        self.line.begin_step(self.n_done)
        with self.line.pause(f"estimating {what}") if self.optimization == UNCOMPILED else self.line.compiling(what):
            yield
        self.n_done += 1
        self.line.begin_step(self.n_done)


def _searched(work: Workload, run: DryRun, shown: _Shown, search: str) -> DryRun:
    """Adds the other strategies that are tried to a dry run."""
    machine, optimization, to_fastest = run.machine, shown.optimization, search == "fastest"
    if machine.memory is None or not (to_fastest or (search == "fits" and not run.fits)):
        return run
    failed: dict[str, str] = {}
    tried: list[Tried] = []
    try:
        space = attempt("other strategies", partial(_search_space, work, run), None, failed)
        if space is not None:
            run = replace(run, strategy=space.own)
            own = _as_tried(run, run.model_flops)
            tried += [own] if to_fastest else []
            # The evaluation needs as much whatever else a strategy changes.
            where = attrgetter("shards", "offload_opt_state")
            unfit = {where(run.strategy)} if {*run.too_large} - {"train"} else set()

            def measure(strategy: Strategy) -> Tried | None:
                if where(strategy) in unfit:
                    return None
                # One that is invalid for this model (such as heads that do not divide) raises: it is listed as failed.
                make = partial(_compiled, work, machine, strategy, optimization, is_own=False)
                with shown.compiling(strategy):
                    other = attempt(strategy.code(), make, None, failed)
                if other is None:
                    return None
                if {*other.too_large} - {"train"}:
                    unfit.add(where(strategy))
                return _as_tried(other, run.model_flops)

            tried.extend(space.search(own, measure, to_fastest=to_fastest))
    except KeyboardInterrupt:  # report the results so far
        failed["other strategies"] = "interrupted"
    return replace(run, tried=tuple(tried), is_searched=to_fastest, failed={**run.failed, **failed})


def _as_tried(run: DryRun, model_flops: Mapping[str, int]) -> Tried:
    estimate = replace(run, model_flops=model_flops).estimate
    is_refused = any(step.is_refused for step in run.steps.values())
    seconds = None if estimate is None else (estimate.step, estimate.serial)
    return Tried(run.strategy, run.needs, sum(run.held.values()), run.fits, is_refused, seconds)


def _search_space(work: Workload, run: DryRun) -> SearchSpace:
    """Returns the strategies to try for a workload, with the numbers that traces and shapes give without compiling."""
    machine, own = run.machine, run.strategy
    plan = run.plan.on(replace(own, n_fsdp_shards=1, n_sequence_shards=1).mesh(machine.devices))  # where loops are unrolled

    def trace(strategy: Strategy) -> Any:
        strategy = replace(strategy, n_fsdp_shards=1, n_sequence_shards=1)
        return _traced(work, work.program(plan, strategy), strategy, only_train=True)["train"].jaxpr.jaxpr

    def estimate(strategy: Strategy) -> int:
        return _compiled(work, machine, strategy, UNCOMPILED, is_own=False).needs

    return SearchSpace.of(
        own,
        trace,
        work.program(run.plan, own).sizes,
        machine.devices[0].platform,
        can_remat=work.task.grad_fn is None,  # no rule changes the backward pass of a user's own
        n_devices=len(machine.devices),
        # Of 405B's step on 256 v5p, 4 % more is compiled than estimated: what is chosen by estimates leaves room.
        memory=int((machine.memory or 0) * (0.9 if run.steps["train"].is_estimate else 1)),
        chip=machine.chip,
        rows=work.rows,
        has_state=work.task.has_state,
        loops=partial(_loops, work, machine),
        estimate=estimate,
    )


def _plan(work: Workload, machine: Machine, strategy: Strategy) -> Plan:
    mesh = strategy.mesh(machine.devices)
    rows = _groups(work.batch, strategy.size(mesh), work.rows, mesh)[0]
    micro_batch = jax.tree.map(lambda x: bare_shape(x, x.shape[1:]), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report shows the plan with its warnings
        return work.plan_on(mesh, micro_batch)


def _loops(work: Workload, machine: Machine, strategy: Strategy) -> Sequence[Loop]:
    """Returns what the loops of a strategy could save."""
    noting = replace(strategy, remat="0KiB")
    program = work.program(_plan(work, machine, strategy), noting)
    _traced(work, program, noting, only_train=True)
    return program.saved


def _compiled(
    work: Workload,
    machine: Machine,
    strategy: Strategy,
    optimization: str | None,
    *,
    is_own: bool = True,
    log: Callable[[str], None] = lambda text: None,
    save: SavedPrograms | None = None,
) -> DryRun:
    """Compiles the steps for a strategy: the script's own, or another, of which those of the evaluation only matter if the
    train step fits."""
    mesh, plan = strategy.mesh(machine.devices), _plan(work, machine, strategy)
    program = work.program(plan, strategy, named=save is None, measures=is_own)
    offloaded = [x for x in program.state.opt_state if x.ndim and strategy.offload_opt_state]
    in_host = shard_bytes(offloaded)
    # Compilers for GPUs that do not exist here have no host memory. For them the state is compiled on the devices.
    is_compiled_in_host = all(is_in_host(x.sharding) for x in offloaded)
    held = {
        "parameters": shard_bytes([*program.state.trained, *program.state.frozen]),
        "optimizer state": shard_bytes(program.state.opt_state) - in_host,
        "model state": shard_bytes(program.state.layers),
    }
    held = {what: size for what, size in held.items() if size}
    resident = sum(held.values())
    failed: dict[str, str] = {}
    size, tokens = strategy.size(mesh), n_tokens(work.batch)
    if tokens is not None:
        tokens = tokens // n_rows(work.batch) * size.examples
    saved = program.saved  # known when the train step has been traced
    run = DryRun(machine, strategy, plan, held, {}, {}, {}, in_host=in_host, n_tokens=tokens, saved=saved, failed=failed)
    if not is_own and machine.memory is not None and resident > machine.memory:
        return replace(run, steps={"train": Step(needs=resident, compile_seconds=0.0, is_refused=True)})

    if optimization == UNCOMPILED:
        return replace(run, steps={"train": _estimated(work, program, strategy, machine, resident)})
    # All steps are traced before the first is compiled, so that errors of the script are raised early.
    traced = _traced(work, program, strategy, only_train=not is_own)
    copies = {"train": _copies(work.batch, strategy.size(mesh), work.rows, mesh)}
    if work.eval_batch is not None:
        copies["eval"] = _copies(work.eval_batch, work.eval_size(mesh), work.eval_rows, mesh)

    def compiled(name: str, other_bytes: int) -> Step:
        step = _renamed(_step(traced[name], machine, mesh, optimization, other_bytes, save), program.argument_names)
        flops, kinds = ({key: int(n * copies.get(name, 1)) for key, n in of.items()} for of in (step.flops, step.kinds))
        return replace(step, flops=flops, kinds=kinds)

    train = compiled("train", 0)
    if not is_compiled_in_host:
        train = train.offloaded(in_host, resident + shard_bytes(program.state.trained))
    run = replace(run, steps={"train": train})
    if not is_own:
        traced = _traced(work, program, strategy, only_train=not run.fits)
    log(f"train step: {run.verdict()}")
    steps = dict(run.steps)
    other_bytes = held.get("optimizer state", 0)  # not an input of an evaluation, but still in memory
    if program.eval_params is not None:  # averages are evaluated, beside the trained weights
        other_bytes += shard_bytes(program.state.trained)
    for name in [name for name in traced if name != "train"]:
        step = attempt(f"{name} step", partial(compiled, name, other_bytes), None, failed)
        if step is not None:
            steps[name] = step

    if save is not None and not train.is_refused:
        _save(save, work, program, strategy, traced["train"])
    model_flops = program.model_flops(_train_args(work, program, strategy))
    return replace(run, steps=steps, files=work.files, model_flops=model_flops)


def _save(save: SavedPrograms, work: Workload, program: Program, strategy: Strategy, train: Any) -> None:
    """Completes a folder that holds the compiled steps: adds the creation of the optimizer state, and the manifest."""
    init: Any = program.init_opt_state
    with save.saving():
        init.lower(program.state.trained).compile()
    arguments = program.argument_texts(_train_args(work, program, strategy))
    save.facts = {**program_environment(program.plan.mesh), **step_facts(arguments, train.lower())}
    save.write()


def _estimated(work: Workload, program: Program, strategy: Strategy, machine: Machine, resident: int) -> Step:
    """Returns the train step with its temporaries estimated from its trace."""
    began, args = time.perf_counter(), _train_args(work, program, strategy)
    mesh = program.plan.mesh
    arguments = resident + shard_bytes(jax.tree.leaves(_groups(work.batch, strategy.size(mesh), work.rows, mesh)))
    closed = program.train_step.trace(*args).jaxpr
    specs = [getattr(getattr(x, "sharding", None), "spec", None) for x in jax.tree.leaves(args)]
    temporaries = estimated_bytes(closed, specs, mesh)
    flops = matmul_flops(closed.jaxpr, with_masked=machine.devices[0].platform == "cpu")
    sizes = {"arguments": arguments, "temporaries": temporaries, "flops": flops}
    return Step(arguments + temporaries, time.perf_counter() - began, **sizes, is_estimate=True)


def _train_args(work: Workload, program: Program, strategy: Strategy) -> tuple[Any, ...]:
    """Returns the shapes of the arguments of the train step."""
    mesh = program.plan.mesh
    groups = _groups(work.batch, strategy.size(mesh), work.rows, mesh)
    return program.train_args(program.state, groups, jax.ShapeDtypeStruct((), "uint32"))


def _traced(work: Workload, program: Program, strategy: Strategy, *, only_train: bool) -> dict[str, Any]:
    """Returns the traced steps of a program, by name."""
    traced = {"train": program.train_step.trace(*_train_args(work, program, strategy))}
    if not only_train and work.eval_batch is not None:
        span, mesh, state = jax.ShapeDtypeStruct((2,), "uint32"), program.plan.mesh, program.state
        groups = _groups(work.eval_batch, work.eval_size(mesh), work.eval_rows, mesh)
        args = (state.trained, state.frozen, state.layers, state.stream, span, groups)
        traced["eval"] = program.eval_step.trace(*args)
    if not only_train and work.trace_predict is not None:
        traced["predict"] = work.trace_predict(program)
    return traced


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    """Replaces the names of a step's arguments by those of their leaves."""

    def rename(item: Any) -> Any:
        return replace(item, op_name=re.sub(r"[^/()\s;:]+", lambda part: names.get(part[0], part[0]), item.op_name))

    return replace(step, largest=tuple(map(rename, step.largest)), collectives=tuple(map(rename, step.collectives)))


def _copies(batch: PyTree, size: BatchSize, use: RowUse, mesh: Mesh) -> float:
    """Returns the number of batch shards that compute a row of a batch, on average over its rows."""
    groups = size.cut(n_rows(batch), use, mesh)
    return sum(group.size * group.n_copies(mesh) for group in groups) / sum(group.size for group in groups)


def _groups(batch: PyTree, size: BatchSize, use: RowUse, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the shapes of a batch in the layout that a step receives (that of `place_batch`)."""

    def shapes(group: Group) -> PyTree:
        sharding = group_sharding(group, mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((group.n, group.rows, *x.shape[1:]), x.dtype, sharding=sharding), batch
        )

    return tuple(map(shapes, size.cut(n_rows(batch), use, mesh)))


def _step(
    traced: Any,
    machine: Machine,
    mesh: Mesh,
    optimization: str | None,
    other_bytes: int,
    save: SavedPrograms | None = None,
) -> Step:
    """Compiles a traced step. `other_bytes` are in memory while it runs, but are not its arguments."""
    # Of the kernels that compute attention on CPUs, in blocks of queries, masked keys are computed too.
    count = partial(matmul_flops, traced.jaxpr.jaxpr, with_masked=machine.devices[0].platform == "cpu")
    flops, kinds = count(), count(key=kind_of_product)
    lowered = traced.lower()
    began = time.perf_counter()
    try:
        level = optimization or ("O2" if machine.devices[0].platform == "tpu" else "UNKNOWN")
        # Only what is compiled with the options of a run has the key that a run asks for.
        options = {"jax_optimization_level": level} if save is None else {}
        cache = uncached_where_described(machine.devices[0]) if save is None else save.saving()
        with configured(**options), cache:
            compiled = lowered.compile(compiler_options=_options(machine))
    except jax.errors.JaxRuntimeError as error:
        needs = refused_bytes(error, machine.memory)
        if needs is None:
            raise
        seconds = time.perf_counter() - began
        return Step(needs=needs + other_bytes, compile_seconds=seconds, is_refused=True, flops=flops, kinds=kinds)
    seconds = time.perf_counter() - began
    sizes = sizes_of(compiled)
    step = Step(needs=sum(sizes.values()) + other_bytes, compile_seconds=seconds, **sizes, flops=flops, kinds=kinds)
    try:
        text = compiled.as_text()
        module = Module.of(text)
        allowance = workspace_allowance(module)
        sent = [each for each in collectives(module) if each.group_size > 1]
        host_hidden = None
        if (chip := machine.chip) is not None and (seconds := matmul_seconds(flops, chip, mesh.size)):
            rate = sum(flops.values()) / mesh.size / seconds
            sent = with_overlap(sent, module, rate, lambda each: sent_per_second(each, chip, mesh))
            host_hidden = hidden_host_share(module, rate, chip.host)
        return replace(
            step,
            needs=step.needs + allowance,
            allowance=allowance,
            largest=tuple(b for b in temporaries(module) if b.bytes >= 2**10),
            collectives=tuple(sent),
            bytes_moved=bytes_moved(module),
            host_bytes=host_copies(module).total(),
            host_hidden=host_hidden,
        )
    except Exception as error:  # for example, if libtpu is newer than jaxlib: `jax[tpu]` installs a matching one
        return replace(step, unread=reason(error))


def _options(machine: Machine) -> dict[str, Any] | None:
    if machine.devices[0].platform not in ("cuda", "gpu") or machine.name == "this":
        return None
    # Autotuning would time kernels on a GPU, but there is none. Without autotuning some Triton matmuls do not compile. Those
    # of cuBLAS need the same memory.
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
