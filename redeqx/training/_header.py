"""The header, printed before the first step: the devices, the model, and how its step is computed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from .._deployer import Deployer
from .._tree import PyTree, listed, named_leaves
from ..data import BatchSize
from ..dims import UNKNOWN, RowUse
from ..errors import warn
from ..machine import mesh_text, n_batch_shards
from ..monitor import size_text
from ..optimizers import decaying
from ..steps import AS_GIVEN, Program, Task, TrainState, effective_specs, shard_bytes
from ..tracing import REMAT, Trace, equations, or_as_written, shortened, variables
from ..transforms import StackBlocks, fp8_products, wide_products


def header_rows(deployer: Deployer, task: Task, program: Program, state: TrainState, trace: Trace | None) -> dict[str, str]:
    """Returns the rows of the header, by name; `trace` is that of the loss, None without a batch."""
    mesh, devices, plan = deployer.mesh, deployer.mesh.devices.flat, program.plan
    weights, opt = shard_bytes([*state.trained, *state.frozen]), shard_bytes(state.opt_state)
    where = " in the host's memory" if task.compute.offload_opt_state else ""
    compiler = {"xla": task.compiler(mesh).text(), "compilation cache": deployer.cache_text}
    return {
        "devices": f"{mesh.size} x {devices[0].device_kind}",
        "mesh": mesh_text(mesh.shape),
        "parameters": f"{sum(x.size for x in state.trained):,} trained"
        + (f", {sum(x.size for x in state.frozen):,} frozen" if state.frozen else ""),
        "bytes per device": f"{size_text(weights)} parameters, {size_text(opt)} optimizer state{where}",
        **_precision_rows(task, mesh, trace, [x.dtype for x in state.trained]),
        "plan": plan.summary(),
        **loss_rows(task, program, trace),
        **{name: text for name, text in compiler.items() if text},
        "workdir": str(deployer.workdir) if deployer.workdir else "none: nothing is recorded",
    }


def _decay_rows(task: Task, program: Program, trace: Trace) -> dict[str, str]:
    """Describes how much of the model has weight decay."""
    del task, trace
    decays = decaying(program.update)
    if decays is None:
        return {}
    sizes = [x.size for x, does in zip(program.state.trained, decays, strict=True) if does]
    of_all = f"{len(sizes)} of {len(decays)} trained leaves, {sum(sizes):,} parameters"
    return {"weight decay": of_all if sizes else "none"}


def _precision_rows(task: Task, mesh: Mesh, trace: Trace | None, trained: Sequence[Any]) -> dict[str, str]:
    """Describes the dtypes, unless the model's own are used throughout."""
    if task.compute.precision == AS_GIVEN:
        return {}
    text = task.compute.precision.describe(trained)
    if task.compute.precision.in_fp8 and trace is not None:
        in_fp8, every = fp8_products(trace.closed, len(trace.leaves))
        emulated = ", emulated on CPUs" if mesh.devices.flat[0].platform == "cpu" else ""
        text += f"; {in_fp8} of {every} products with weights in fp8{emulated}"
    dtype = task.compute.precision.dtype
    if trace is None or dtype is None or jnp.finfo(dtype).bits >= 32:
        return {"precision": text}
    wide, every = wide_products(trace.closed, len(trace.leaves), dtype)
    if wide and wide == every:
        warn(
            f"`precision`: expected products with weights in {dtype.name}, got all {every} in a wider dtype, that of their "
            f"inputs. Cast floating inputs in `loss_fn`: `x.astype({dtype.name!r})`."
        )
    note = f"; {wide} of {every} products with weights in a wider dtype, as their inputs are" if wide else ""
    return {"precision": text + note}


def loss_rows(task: Task, program: Program, trace: Trace | None) -> dict[str, str]:
    """Describes which leaves decay, and how the loss computes its rows, attention and loops. Empty without a trace."""
    if trace is None:
        return {}
    rows: dict[str, str] = {}
    for part in (_narrow_rows, _use_rows, _decay_rows, _attention_rows, _loop_rows):
        rows |= or_as_written(partial(part, task, program, trace), dict, "the header's description")
    return rows


def _narrow_rows(task: Task, program: Program, trace: Trace) -> dict[str, str]:
    """Describes a loss whose value was rounded to 16 bits, before it became the float32 total."""
    del task, program
    made, x = {id(var): eqn for eqn in trace.closed.jaxpr.eqns for var in eqn.outvars}, trace.closed.jaxpr.outvars[0]
    while (eqn := made.get(id(x))) is not None and eqn.primitive.name in ("convert_element_type", "mul"):
        if len(operands := variables(eqn.invars)) > 1:  # a mean is multiplied by the number of rows alone
            break
        (x,) = operands
        if jnp.issubdtype(x.aval.dtype, jnp.floating) and (form := jnp.finfo(x.aval.dtype)).bits < 32:
            return {"loss": f"rounded to {form.dtype.name}, {form.precision} digits: cast logits to float32 in `loss_fn`"}
    return {}


def _use_rows(task: Task, program: Program, trace: Trace) -> dict[str, str]:
    """Describes what the loss does with rows and positions, and which draws do not follow rows."""
    plan = program.plan
    use, positions = plan.row_use, {"positions": "; ".join(plan.positions)} if plan.positions else {}
    if use == UNKNOWN:
        return positions
    text = use.text
    if not use.is_exact and task.accumulate > 1:
        n_rows, are = trace.closed.in_avals[len(trace.leaves)].shape[0], "is" if use.kind == "mixed" else "may be"
        text += f", so each of the {task.accumulate} micro-batches, of {n_rows} rows, {are} a batch of its own"
    draws = "; ".join(use.draws)
    drawn = {"draws": f"differ with the number of micro-batches: {draws}"} if draws else {}
    return {"rows": text, **drawn, **positions}


def eval_text(use: RowUse, is_counted: bool) -> str:
    """Describes how the values of an evaluation depend on its batch size; empty if they do not, or if nothing is known.
    `is_counted` says whether the number of all examples is known."""
    if use == UNKNOWN or (use.is_additive and (is_counted or not use.scaled)):
        return ""
    depends = "may depend" if use.kind == "unknown" else "depends"
    return f"evaluation: the loss {depends} on the batch size. Rows: {'; '.join([use.text, *use.draws])}"


def shapes_text(batch: PyTree) -> str:
    """Describes the shapes of a batch."""
    return ", ".join(listed([f"`{name}` {list(leaf.shape)}" for name, leaf in named_leaves(batch).items()], 4))


def warn_of_uncut_rows(use: RowUse, size: BatchSize, mesh: Mesh) -> None:
    """Warns if every device computes all rows of a micro-batch, since they must not be cut and do not divide."""
    n_shards, rows = n_batch_shards(mesh), size.micro_batch_for(use, mesh)
    if use.stays_whole and rows % n_shards:
        mixes, where = "mixes" if use.kind == "mixed" else "may mix", f" at {use.line}" if use.line else ""
        changes = "Each micro-batch changes the state, so its rows"
        why = changes if use.is_exact else f"The loss {mixes} rows{where}, so they"
        warn(
            f"`batch_size`: expected micro-batches of a multiple of {n_shards} rows, so that each device computes its "
            f"share, got {rows}. {why} are not cut, and every device computes all of them. "
            f"Choose a multiple of {n_shards * size.asked}."
        )


def warn_of_means(use: RowUse) -> None:
    """Warns of metrics that are divided by a number of rows although they are no sums over rows."""
    for name in use.no_sums:
        warn(
            f"`Loss.metrics[{name!r}]`: expected a sum over rows, as its weight is (by default that of the loss), got a "
            f"value that does not grow with their number, such as a mean. Return its sum, or the pair `({name}, 1)`."
        )


def _attention_rows(task: Task, program: Program, trace: Trace) -> dict[str, str]:
    """Describes the attention in the loss."""
    del task, trace
    return {"attention": "; ".join(program.plan.attention)} if program.plan.attention else {}


def _loop_rows(task: Task, program: Program, trace: Trace) -> dict[str, str]:
    """Describes equal blocks that are computed as one loop, or not although only loops recompute, and unrolled loops."""
    mesh, closed, notes = program.plan.mesh, trace.closed, []
    stacks = task.compute.stacks_on(mesh)
    if (stacks or task.compute.recomputes_products) and task.grad_fn is None:
        stacking = StackBlocks([effective_specs(program.plan, name) for name in trace.names])
        how = "as one" if stacks else "recompute nothing, with `stack_blocks=False`"
        for n, line in stacking.found(closed):
            notes.append(f"{n} equal blocks {how} (from {shortened(line) or 'an unknown line'})")
        closed = stacking.rewritten(closed) if stacks else closed
        if not notes and not any(eqn.primitive.name in ("scan", REMAT) for eqn in equations(closed)):
            notes += ["none, so nothing is recomputed"] if task.compute.recomputes_products else []
    unrolling = task.compute.unroll_on(mesh)
    if unrolling is not None:
        n = sum(unrolling.claims(eqn) for eqn in equations(closed))
        notes += [f"{n} written out"] if n else []
    return {"loops": "; ".join(notes)} if notes else {}
