"""Compiles a training run for described devices, which need not exist, and searches for settings that make it fit.

Nothing is allocated: models, optimizer states and batches are shapes with shardings, and all numbers of a step are read from
its compiled program. `machine` describes the devices, `compiled` reads the buffers and collectives of a program, and
`_report` prints the result.
"""

import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.extend import core as jex
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..compiled import Module, bytes_moved, collectives, host_bytes, temporaries, workspace_allowance
from ..data import BatchSize, Group, group_sharding
from ..dims import RowUse
from ..machine import Machine, dry, is_in_host, make_mesh, uncached_where_described
from ..tracing import matmul_flops
from ..training import REMATS, Job, Program, Setting, shard_bytes
from ..transforms import KeepEverything
from ._figures import COLLECTIVES, FLOPS, MODEL_FLOPS, MOVED, TEMPORARIES, Step, attempt, reason
from ._report import DryRun
from ._search import CompiledSetting, SearchSpace

EXIT_FAILED, EXIT_DOES_NOT_FIT = 1, 3


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
    job: Job,
    machine: Machine,
    *,
    optimization: str | None = None,
    search: bool = True,
    fit: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> DryRun:
    """Compiles the steps of a job for a machine.

    **Arguments:**

    - `optimization`: the compiler's optimization level, `"O0"` to `"O3"`, or `"UNKNOWN"`, the level of a run. The default is
        `"O2"` for TPUs, which compiles in half the time, to a program that needs the same memory, and `"UNKNOWN"` for all
        others. `"O1"` compiles still faster, to a program that needs less memory.
    - `search`: whether to try other settings if the job's own does not fit, until one does. Each is compiled too.
    - `fit`: whether to search for the fastest setting that fits, even if the job's own fits.
    - `say`: called with progress messages.
    """
    say(f"compiling for {machine.name}")
    run = _compiled(job, machine, job.setting, optimization, say=say)
    if machine.memory is None or not (fit or (search and not run.fits)):
        return run
    failed: dict[str, str] = {}
    tried: list[CompiledSetting] = []
    try:
        space = attempt("other settings", partial(_search_space, job, run), None, failed)
        if space is not None:
            run = replace(run, setting=space.own)
            own = _as_setting(run, run.model_flops)
            tried += [own] if fit else []

            def measure(setting: Setting) -> CompiledSetting | None:
                # A setting that is invalid for this model (such as heads that do not divide) raises: it is listed as failed.
                say(f"trying {setting.code()}")
                make = partial(_compiled, job, machine, setting, optimization, only_train=True)
                other = attempt(setting.code(), make, None, failed)
                return None if other is None else _as_setting(other, run.model_flops)

            tried.extend(space.search(own, measure, to_fastest=fit))
    except KeyboardInterrupt:  # report the results so far
        failed["other settings"] = "interrupted"
    return replace(run, tried=tuple(tried), is_searched=fit, failed={**run.failed, **failed})


def _as_setting(run: DryRun, model_flops: Mapping[str, int]) -> CompiledSetting:
    """Converts a dry run to a compiled setting."""
    estimate = replace(run, model_flops=model_flops).estimate
    is_refused = any(step.is_refused for step in run.steps.values())
    return CompiledSetting(run.setting, run.needs, run.fits, is_refused, sum(run.held.values()), estimate)


def _search_space(job: Job, run: DryRun) -> SearchSpace:
    """Returns the settings to try for a job, with the numbers that traces and shapes give without compiling."""
    machine = run.machine
    assert machine.memory is not None
    remat, flops = _levels(job, run)
    program = job.make_program(run.plan, None, replace(run.setting, remat=remat))
    parameters, others = [*program.trained, *program.frozen], [*program.opt_state, *program.state]
    weights, state = (sum(math.prod(x.shape) * x.dtype.itemsize for x in xs) for xs in (parameters, parameters + others))
    opt_state = sum(math.prod(x.shape) * x.dtype.itemsize for x in program.opt_state)
    return SearchSpace(
        replace(run.setting, remat=remat),
        len(machine.devices),
        flops,
        weights,
        state,
        machine.memory,
        machine.chip,
        opt_state=0 if machine.devices[0].platform == "cpu" else opt_state,  # CPU devices have no separate host memory
        unrolls=run.setting.unroll and job.can_remat and _unrolls(job, run),
        rows=job.rows,
    )


def _unrolls(job: Job, run: DryRun) -> bool:
    """Whether the step has loops that are unrolled on a mesh without gathered weights."""
    setting = replace(run.setting, n_fsdp_shards=1, remat="none")
    mesh = make_mesh(setting.n_model_shards, 1, run.machine.devices)

    def traced(unroll: bool) -> Any:
        program = job.make_program(run.plan.on(mesh), None, replace(setting, unroll=unroll))
        return _traced(job, program, setting, only_train=True)["train"].jaxpr.jaxpr

    return _content(traced(True)) != _content(traced(False))


def _levels(job: Job, run: DryRun) -> tuple[str, dict[str, Mapping[str, int]]]:
    """Returns the job's own level of recomputation, and the FLOPs of a step's matmuls for each distinct level.

    If all levels give the same program, because the loss has no loops or has remats itself, only the own level is returned.
    """

    def traced(remat: str) -> Any:
        program = job.make_program(run.plan, None, replace(run.setting, remat=remat))
        return _traced(job, program, run.setting, only_train=True)["train"].jaxpr.jaxpr

    own = traced(run.setting.remat)
    own_content = _content(own)
    programs: dict[str, tuple[Any, Any]] = {}  # a jaxpr, and its content
    is_cpu = run.machine.devices[0].platform == "cpu"
    for remat in REMATS if job.can_remat else ():
        jaxpr = traced(remat) if remat != "offload" or not is_cpu else own
        found = _content(jaxpr)
        if all(found != other for _, other in programs.values()):
            programs[remat] = jaxpr, found
    same = [remat for remat, (_, found) in programs.items() if found == own_content]
    if len(programs) < 2 or not same:
        same, programs = [run.setting.remat], {run.setting.remat: (own, own_content)}
    return same[0], {remat: matmul_flops(jaxpr) for remat, (jaxpr, _) in programs.items()}


def _compiled(
    job: Job,
    machine: Machine,
    setting: Setting,
    optimization: str | None,
    *,
    only_train: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> DryRun:
    mesh = make_mesh(setting.n_model_shards, setting.n_fsdp_shards, machine.devices)
    rows = _groups(job.batch, setting.size(mesh), job.rows, mesh)[0]
    micro_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report shows the plan with its warnings
        plan = job.make_plan(mesh, micro_batch)
    program = job.make_program(plan, None, setting)
    offloaded = [x for x in program.opt_state if x.ndim and setting.offload_opt_state]
    in_host = shard_bytes(offloaded)
    # Compilers for GPUs that do not exist here have no host memory. For them the state is compiled on the devices.
    is_compiled_in_host = all(is_in_host(x.sharding) for x in offloaded)
    held = {
        "parameters": shard_bytes([*program.trained, *program.frozen]),
        "optimizer state": shard_bytes(program.opt_state) - in_host,
        "model state": shard_bytes(program.state),
    }
    held = {what: size for what, size in held.items() if size}
    resident = sum(held.values())
    if only_train and machine.memory is not None and resident > machine.memory:
        step = Step(needs=resident, compile_seconds=0.0, is_refused=True)
        return DryRun(machine, setting, plan, held, {"train": step}, {}, {}, in_host=in_host)

    # All steps are traced before the first is compiled, so that errors of the script are raised early.
    traced = _traced(job, program, setting, only_train)
    failed: dict[str, str] = {}
    run = DryRun(machine, setting, plan, held, {}, {}, {}, in_host=in_host, failed=failed)

    copies = {"train": _copies(job.batch, setting.size(mesh), job.rows, mesh)}
    if job.eval_batch is not None:
        copies["eval"] = _copies(job.eval_batch, job.eval_size(mesh), job.eval_rows, mesh)

    def compiled(name: str, other_bytes: int) -> Step:
        step = _renamed(_step(traced[name], machine, optimization, other_bytes), program.argument_names)
        return replace(step, flops={dtype: int(n * copies.get(name, 1)) for dtype, n in step.flops.items()})

    train = compiled("train", 0)
    if not is_compiled_in_host:
        train = _offloaded(train, in_host, resident + shard_bytes(program.trained))
    run = replace(run, steps={"train": train})
    if only_train:
        return run
    say(f"train step: {run.verdict()}")
    steps = dict(run.steps)
    other_bytes = held.get("optimizer state", 0)  # not an input of an evaluation, but still in memory
    for name in [name for name in traced if name != "train"]:
        step = attempt(f"{name} step", partial(compiled, name, other_bytes), None, failed)
        if step is not None:
            steps[name] = step

    def model_flops() -> Mapping[str, int]:
        ideal = job.make_program(plan, KeepEverything() if job.can_remat else None, setting)
        jaxpr = _traced(job, ideal, setting, only_train=True)["train"].jaxpr.jaxpr
        return matmul_flops(jaxpr, with_recomputation=False)

    return replace(run, steps=steps, files=job.files, model_flops=attempt(MODEL_FLOPS, model_flops, {}, failed))


def _offloaded(step: Step, state: int, other_bytes: int) -> Step:
    """Estimates a step that copies the optimizer's state from the host, from a step with the state on the devices.

    The estimate assumes that the copy happens when the gradients are complete, and of all the state at once.

    **Arguments:**

    - `state`: bytes of the state.
    - `other_bytes`: other bytes in memory at that time: parameters, gradients and the rest of the run's state.
    """
    needs = max(step.needs - state, other_bytes + state)
    return replace(step, needs=needs, arguments=step.arguments - state, host_bytes=step.host_bytes + 2 * state)


def _traced(job: Job, program: Program, setting: Setting, only_train: bool) -> dict[str, Any]:
    """Returns the traced steps of a program, by name."""
    mesh = program.plan.mesh
    groups = _groups(job.batch, setting.size(mesh), job.rows, mesh)
    n_rows = jax.ShapeDtypeStruct((), "uint32")
    traced = {"train": program.train_step.trace(*program.train_shapes(groups, n_rows))}
    if not only_train and job.eval_batch is not None:
        span = jax.ShapeDtypeStruct((2,), "uint32")
        groups = _groups(job.eval_batch, job.eval_size(mesh), job.eval_rows, mesh)
        args = (program.trained, program.frozen, program.state, program.stream, span, groups)
        traced["eval"] = program.eval_step.trace(*args)
    if not only_train and job.trace_predict is not None:
        traced["predict"] = job.trace_predict(program)
    return traced


def _content(jaxpr: Any) -> Counter[str]:
    """Counts the primitives of a jaxpr, and its matmuls' FLOPs by dtype."""
    found = Counter({f"FLOPs {dtype}": n for dtype, n in matmul_flops(jaxpr).items()})
    todo = [jaxpr]
    while todo:
        eqns = todo.pop().eqns
        found.update(eqn.primitive.name for eqn in eqns)
        todo += [getattr(inner, "jaxpr", inner) for eqn in eqns for inner in jex.jaxprs_in_params(eqn.params)]
    return found


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    """Replaces the names of a step's arguments by those of their leaves."""

    def rename(item: Any) -> Any:
        return replace(item, op_name=re.sub(r"[^/()\s;:]+", lambda part: names.get(part[0], part[0]), item.op_name))

    return replace(step, largest=tuple(map(rename, step.largest)), collectives=tuple(map(rename, step.collectives)))


def _copies(batch: PyTree, size: BatchSize, use: RowUse, mesh: Mesh) -> float:
    """Returns the number of batch shards that compute a row of a batch, on average over its rows."""
    groups = size.cut(jax.tree.leaves(batch)[0].shape[0], use, mesh)
    return sum(group.size * group.n_copies(mesh) for group in groups) / sum(group.size for group in groups)


def _groups(batch: PyTree, size: BatchSize, use: RowUse, mesh: Mesh) -> tuple[PyTree, ...]:
    """Returns the shapes of a batch in the layout that a step receives (that of `place_batch`)."""
    n_rows = jax.tree.leaves(batch)[0].shape[0]

    def shapes(group: Group) -> PyTree:
        sharding = group_sharding(group, mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((group.n, group.rows, *x.shape[1:]), x.dtype, sharding=sharding), batch
        )

    return tuple(map(shapes, size.cut(n_rows, use, mesh)))


# The TPU compiler's two error messages: from before memory assignment, and from a failed assignment.
_OUT_OF_MEMORY = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM|Exceeded hbm capacity by ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _step(traced: Any, machine: Machine, optimization: str | None, other_bytes: int) -> Step:
    """Compiles a traced step.

    **Arguments:**

    - `other_bytes`: bytes that are in memory while it runs, but are not its arguments.
    """
    failed: dict[str, str] = {}
    flops = attempt(FLOPS, lambda: matmul_flops(traced.jaxpr.jaxpr), {}, failed)
    lowered = traced.lower()
    began = time.perf_counter()
    try:
        level = optimization or ("O2" if machine.devices[0].platform == "tpu" else "UNKNOWN")
        with _at_level(level), uncached_where_described(machine.devices[0]):
            compiled = lowered.compile(compiler_options=_options(machine))
    except jax.errors.JaxRuntimeError as error:
        found = _OUT_OF_MEMORY.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
            raise
        everything, unit, excess, unit_of_excess = found.groups()
        needs = float(everything or excess) * _UNITS[unit or unit_of_excess or ""] + other_bytes
        needs = int(needs) + (0 if everything else machine.memory or 0)
        return Step(needs=needs, compile_seconds=time.perf_counter() - began, is_refused=True, flops=flops, failed=failed)
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    outputs = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": outputs,
        "code": memory.generated_code_size_in_bytes,
    }
    step = Step(needs=sum(sizes.values()) + other_bytes, compile_seconds=seconds, **sizes, flops=flops, failed=failed)
    try:
        text = compiled.as_text()
        module = Module.of(text)
    except Exception as error:  # for example, if libtpu is newer than jaxlib: `jax[tpu]` installs a matching one
        failed.update(dict.fromkeys((TEMPORARIES, COLLECTIVES, MOVED), reason(error)))
        return step
    allowance = workspace_allowance(module)
    return replace(
        step,
        needs=step.needs + allowance,
        allowance=allowance,
        largest=attempt(TEMPORARIES, lambda: tuple(b for b in temporaries(module) if b.bytes >= 2**10), (), failed),
        collectives=attempt(COLLECTIVES, lambda: tuple(c for c in collectives(text) if c.group_size > 1), (), failed),
        bytes_moved=attempt(MOVED, lambda: bytes_moved(module), 0, failed),
        host_bytes=attempt(MOVED, lambda: host_bytes(module), 0, failed),
    )


def _options(machine: Machine) -> dict[str, Any] | None:
    if machine.devices[0].platform not in ("cuda", "gpu") or machine.name == "this":
        return None
    # Autotuning would time kernels on a GPU, but there is none. Without autotuning some Triton matmuls do not compile. Those
    # of cuBLAS need the same memory.
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@contextmanager
def _at_level(optimization: str) -> Iterator[None]:
    before = getattr(jax.config, _LEVEL)
    jax.config.update(_LEVEL, optimization)
    try:
        yield
    finally:
        jax.config.update(_LEVEL, before)


_LEVEL = "jax_optimization_level"
