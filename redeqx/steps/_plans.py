"""Plans of a model for what is computed with it: its loss, or a prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._tree import as_bare_shapes
from ..dims import UNKNOWN, RowUse
from ..errors import warn
from ..partition import Overrides, Plan, describe_positions, make_plan, mark_read
from ..tracing import Trace
from ..transforms import expert_stacks
from ._structure import Structure


def plan_model(
    model: PyTree,
    mesh: Mesh,
    trace: Trace | None = None,
    overrides: Overrides | None = None,
    row_use: RowUse = UNKNOWN,
    *,
    splits_residual: bool = False,
) -> Plan:
    """Returns the plan of a model on a mesh, in the order of its traced loss if there is one; issues the plan's warnings."""
    experts = {} if trace is None else expert_stacks(trace, mesh, splits_residual=splits_residual)
    plan = make_plan(model, mesh, overrides, trace, experts)
    for message in plan.warnings:
        warn(message)
    return plan if trace is None else mark_read(plan, trace, row_use)


def plan_prediction(
    model: PyTree, mesh: Mesh, structure: Structure, predict: Callable[..., PyTree], state: Sequence[Any], batch: PyTree
) -> Plan:
    """Returns the plan of a model on a mesh, in the order in which `predict`, as `prediction` returns it, computes; issues
    the plan's warnings."""

    def of_model(model: PyTree, *rest: Any) -> PyTree:
        trained, frozen = structure.take(model)
        return predict([*trained, *frozen], *rest)

    key = jax.eval_shape(lambda: jax.random.key(0))
    trace = Trace.of(of_model, model, *as_bare_shapes((state, batch)), key)
    plan = make_plan(model, mesh, trace=trace)
    for message in plan.warnings:
        warn(message)
    # Other batches may have other lengths, so none is refused.
    return replace(plan, positions=describe_positions(trace, mesh, len(state), may_be_whole=True))
