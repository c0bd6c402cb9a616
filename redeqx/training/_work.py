"""The work of a train step on one device, in FLOPs, counted on its trace: the basis of its measured speed."""

import math
from typing import Any

import jax

from ..data import Batch
from ..machine import chip_of_kind
from ..monitor import Work
from ..partition import Plan
from ..tracing import REMATS, equations, matmul_flops
from ..transforms import KeepEverything
from ._recipe import Recipe


def work_of(recipe: Recipe, plan: Plan, model: Any, state: Any, step: Any, args: tuple[Any, ...]) -> Work:
    """Returns the work of one device in a step of a full batch.

    **Arguments:**

    - `step`, `args`: the jitted train step and its arguments. The subsequent call finds this trace in JAX's cache.
    """
    traced = step.trace(*args).jaxpr
    if recipe.grad_fn is None and any(eqn.primitive.name in REMATS for eqn in equations(traced)):
        # Recomputation is not counted: count the same step without it.
        step = recipe.program(plan, model, state, change=KeepEverything()).train_step
        traced = step.trace(*args).jaxpr
    n_devices = plan.mesh.size
    flops = matmul_flops(traced.jaxpr, with_recomputation=False)
    chip = chip_of_kind(plan.mesh.devices.flat[0].device_kind)
    at_peak = None if chip is None else sum(n / chip.rate(dtype) for dtype, n in flops.items()) / n_devices
    return Work(flops.total() / n_devices, at_peak)


def counted_share(batch: Batch) -> float:
    """Returns the share of a step's rows that count; the others are repetitions, to reuse a larger program."""
    return batch.n_examples / sum(math.prod(jax.tree.leaves(group)[0].shape[:2]) for group in batch.groups)
