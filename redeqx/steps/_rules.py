"""The rules on the user's functions, in their order. The page "Rules" says why each has its place."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax

from ..dims import Inputs
from ..machine import SEQUENCE, axes_of, sharding_of, split_heads
from ..memory import Loop
from ..partition import Plan
from ..tracing import Rule
from ..transforms import (
    DequantiseAtUse,
    ExchangeLookups,
    FixConvolutions,
    FixLookups,
    FixPads,
    FixPools,
    FuseAttention,
    GatherAtUse,
    GroupMatmuls,
    InCustomDerivatives,
    PickByComparison,
    Reshard,
    Shardings,
    SplitFourier,
    SplitPositions,
    SplitRepeated,
    SplitResidual,
    SplitVocabulary,
    StackBlocks,
    WeightProducts,
    with_remats,
)
from ._compute import Compute
from ._structure import Structure

# A loss that is differentiated, or evaluated alone; a user's `grad_fn`; a `pred_fn`.
Role = Literal["training", "evaluation", "grad_fn", "prediction"]


def effective_specs(plan: Plan, name: str) -> Any:
    """Returns a leaf's specs in storage and in compute, without axes of size 1. These split nothing: on them, a column and a
    row are alike. Weights with equal ones can be stacked."""
    specs = plan.sharding(name).spec, plan.spec_in_use(name)
    sizes = plan.mesh.shape
    return tuple(tuple(tuple(a for a in axes_of(entry) if sizes[a] > 1) for entry in spec) for spec in specs)


def plan_rules(
    structure: Structure,
    plan: Plan,
    compute: Compute,
    inputs: Inputs,
    role: Role,
    *,
    named: bool = False,
    measures: bool = False,
    in_host: int = 0,
) -> list[Rule]:
    """Returns the rules on a function `(weights, state, batch, ...)`, in the order in which they apply. Which of them change
    anything on this mesh they say themselves. A `named` program names the weight of each operation, gathered or not, and
    computes the same. `measures`: whether it becomes known what loops save at each level of recomputation. `in_host`: the
    bytes of the optimizer's state in host memory, for each device."""
    mesh, names, is_trained = plan.mesh, structure.weights, role == "training"
    n_weights, is_cpu = len(names), mesh.devices.flat[0].platform == "cpu"
    splits, specs = tuple(map(plan.model_dim, names)), list(map(plan.spec_in_use, names))
    every = [Shardings(plan.sharding(name), sharding_of(spec, mesh), name) for name, spec in zip(names, specs, strict=True)]
    has_loss = role in ("training", "evaluation")
    in_loops: list[Rule | None] = []  # without a backward pass nothing is kept or recomputed
    if is_trained:
        remats = compute.remats_on(mesh, specs, measures=measures, in_host=in_host)
        n_trained = sum(math.prod(plan.leaves[name].shape) for name in structure.names[0])
        in_loops = [SplitVocabulary(mesh, n_trained), compute.unroll_on(mesh), remats]
    splits_residual = is_trained and compute.splits_residual_on(mesh)
    around: list[Any] = [SplitResidual(mesh, inputs, splits)] if splits_residual else []
    if mesh.shape[SEQUENCE] > 1:
        around += [SplitPositions(mesh, inputs, residual=around[0] if around else None)]
    lookups, fourier = FixLookups(mesh, splits_residual, inputs=inputs), SplitFourier(mesh, splits, inputs=inputs)
    given = inputs if around else None  # else no other rule searches for positions
    fixes = FixConvolutions(mesh, role != "prediction"), FixPads(mesh), FixPools(mesh), FixLookups(mesh)
    in_fp8, summed_in = compute.precision.in_fp8, compute.precision.summed_in
    products = WeightProducts(n_weights, in_fp8, summed_in, emulated=is_cpu, narrow=is_cpu and is_trained)
    rules: list[Rule | None] = [
        *(replace(rule, of_loops=True) for rule in around),
        StackBlocks([effective_specs(plan, name) for name in names]) if has_loss and compute.stacks_on(mesh) else None,
        *in_loops,
        *([lookups, fourier] if mesh.size > 1 else []),
        *around,
        DequantiseAtUse(),
        ExchangeLookups(mesh, n_weights),
        GatherAtUse([of if of.is_gathered or named else None for of in every]),
        # From here on weights are plain arrays. These rules claim different equations.
        SplitRepeated(mesh, n_weights),
        FixConvolutions(mesh, role != "prediction", inputs=given),
        FixPads(mesh),
        FixPools(mesh, inputs=given),
        InCustomDerivatives(fixes),
        Reshard(splits, mesh),
        GroupMatmuls(mesh, splits, given),
        FuseAttention(split_heads(mesh), inputs=given) if compute.fuse_attention else None,
        products if role != "prediction" else None,
        PickByComparison() if is_trained else None,
    ]
    return [rule for rule in rules if rule is not None]


def with_rules(
    fn: Callable[..., Any],
    structure: Structure,
    plan: Plan,
    compute: Compute,
    role: Role,
    *,
    saved: list[Loop] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function `(weights, state, batch, ...)` under the rules; `saved` receives what each loop saves, where that
    is chosen by value."""

    def under_rules(*args: Any) -> Any:
        inputs = Inputs(*(len(jax.tree.leaves(tree)) for tree in args[:3]))
        return with_remats(fn, plan_rules(structure, plan, compute, inputs, role, **options), saved)(*args)

    return under_rules
