"""What is printed before the first step: the devices, the model, and how its step is computed."""

import jax.numpy as jnp
from jax.sharding import Mesh

from ..compiled import shortened
from ..errors import warn
from ..machine import split_heads, xla_settings
from ..monitor import size_text
from ..partition import Plan
from ..tracing import Trace, equations
from ..transforms import StackBlocks, attentions, fp8_products, wide_products
from ._functions import kind_of
from ._precision import AS_GIVEN
from ._program import shard_bytes
from ._recipe import Recipe
from ._run import Run
from ._state import TrainState

_LARGE = 2**30  # bytes of an array of queries x keys from which a user is warned


def header_rows(
    run: Run, recipe: Recipe, plan: Plan, state: TrainState, trace: Trace | None, precision: str
) -> dict[str, str]:
    """The rows of the header, by their names.

    **Arguments:**

    - `trace`: of the loss; None where no batch is at hand.
    - `precision`: the dtypes of the run, in words.
    """
    mesh, devices = run.mesh, run.mesh.devices.flat
    held, opt = shard_bytes([*state.trained, *state.frozen]), shard_bytes(state.opt_state)
    where = " in the host's memory" if recipe.offload_opt_state else ""
    compiler = {"xla": xla_settings(mesh, recipe.xla_settings).text(), "compilation cache": run.cache}
    return {
        "devices": f"{mesh.size} x {devices[0].device_kind}",
        "mesh": " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
        "parameters": f"{sum(x.size for x in state.trained):,} trained"
        + (f", {sum(x.size for x in state.frozen):,} frozen" if state.frozen else ""),
        "bytes per device": f"{size_text(held)} parameters, {size_text(opt)} optimizer state{where}",
        **_of_precision(recipe, mesh, trace, precision),
        "plan": plan.summary(),
        **of_loss(recipe, plan, trace),
        **{name: said for name, said in compiler.items() if said},
        "workdir": str(run.workdir) if run.workdir else "none: nothing is recorded",
    }


def _of_precision(recipe: Recipe, mesh: Mesh, trace: Trace | None, said: str) -> dict[str, str]:
    """What is said of dtypes, where the model's own are not used throughout."""
    if recipe.precision == AS_GIVEN:
        return {}
    if recipe.precision.in_fp8 and trace is not None:
        in_fp8, every = fp8_products(trace.closed, len(trace.leaves))
        emulated = ", emulated on CPUs" if mesh.devices.flat[0].platform == "cpu" else ""
        said += f"; {in_fp8} of {every} products with weights in fp8{emulated}"
    return {"precision": said + ("" if trace is None else _of_wide_products(recipe, trace))}


def _of_wide_products(recipe: Recipe, trace: Trace) -> str:
    """What is said of products that are not computed in the dtype asked for; a warning where none is."""
    dtype = recipe.precision.dtype
    if dtype is None or jnp.finfo(dtype).bits >= 32:
        return ""
    wide, every = wide_products(trace.closed, len(trace.leaves), dtype)
    if wide and wide == every:
        warn(
            f"`precision`: expected products with weights in {dtype.name}, got all {every} in a wider dtype, that of their "
            f"inputs. Cast floating inputs in `loss_fn`: `x.astype({dtype.name!r})`."
        )
    return f"; {wide} of {every} products with weights in a wider dtype, as their inputs are" if wide else ""


def of_loss(recipe: Recipe, plan: Plan, trace: Trace | None) -> dict[str, str]:
    """What is said of how the loss is computed: its attention and its loops. With no trace nothing is known."""
    return {} if trace is None else {**_of_attention(recipe, plan.mesh, trace), **_of_loops(recipe, plan, trace)}


def _of_loops(recipe: Recipe, plan: Plan, trace: Trace) -> dict[str, str]:
    """What is said of equal blocks that are computed as one loop, and of loops that are written out."""
    mesh, closed, said = plan.mesh, trace.closed, []
    if recipe.stacks_on(mesh) and recipe.grad_fn is None:
        stacking = StackBlocks([kind_of(plan, name) for name in trace.names])
        said += [
            f"{n} equal blocks as one (from {shortened(line) or 'an unknown line'})" for n, line in stacking.found(closed)
        ]
        closed = stacking.rewritten(closed)
    unrolling = recipe.unroll_on(mesh, recipe.remat_level)
    if unrolling is not None:
        n = sum(unrolling.claims(eqn) for eqn in equations(closed))
        said += [f"{n} written out"] if n else []
    return {"loops": "; ".join(said)} if said else {}


def _of_attention(recipe: Recipe, mesh: Mesh, trace: Trace) -> dict[str, str]:
    """What is said of the attention in the loss, and a warning of what is made of all queries and keys all the same."""
    if not recipe.fuse_attention:
        return {}
    fused, left, dense = attentions(trace.closed, mesh.devices.flat[0].platform, split_heads(mesh))
    for what, n_bytes in dense.items():
        if n_bytes > _LARGE:
            warn(
                f"attention: {what} take {n_bytes / 2**30:,.1f} GiB of a device, a number for each query and key. Use "
                "`redeqx.attention` with `causal`, `window` or `lengths` where these say the same, or shorter rows.",
            )
    said = [f"{n} fused ({what})" for what, n in fused.items()]
    said += [f"as written at {shortened(line) or 'an unknown line'}: {reason}" for line, reason in left.items()]
    return {"attention": "; ".join(said)} if said else {}
