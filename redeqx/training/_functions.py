"""Wraps the user's loss, gradient and prediction functions as functions of flat lists of arrays, under the plan's rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from .._tree import is_array_like, named_leaves
from ..dims import UNKNOWN, RowUse
from ..machine import MODEL, axes_of, split_heads
from ..partition import Plan
from ..tracing import Rule, transformed
from ..transforms import (
    FixGroupedConvolutions,
    FuseAttention,
    GatherAtUse,
    PickByComparison,
    RematLoops,
    Reshard,
    RowNumbers,
    Shardings,
    StackBlocks,
    UnrollLoops,
    WeightProducts,
)
from ._loss import as_sums, n_rows
from ._parts import Parts
from ._precision import AS_GIVEN, Precision


def effective_specs(plan: Plan, name: str) -> Any:
    """Returns a leaf's specs in storage and in compute, without axes of size 1. These split nothing: on them, a column and a
    row are alike. Weights with equal ones can be stacked."""
    specs = plan.sharding(name).spec, plan.spec_in_use(name)
    sizes = plan.mesh.shape
    return tuple(tuple(tuple(a for a in axes_of(entry) if sizes[a] > 1) for entry in spec) for spec in specs)


def plan_rules(
    parts: Parts, plan: Plan, *, named: bool = False, convolutions: bool = True, fuse_attention: bool = True
) -> list[Rule]:
    """Returns the rules that rewrite a function of the trained and then the frozen arrays, in the order in which they apply.

    Weights are gathered first, so that the other rules see plain arrays. These others claim different equations.

    **Arguments:**

    - `named`: whether the program names the weight of each operation, gathered or not; it computes the same.
    - `convolutions`: whether the function is differentiated, and may contain convolutions.
    - `fuse_attention`: whether attention is computed by the platform's kernel.
    """
    shardings, splits = [], []
    for name in (name for names in parts.names for name in names):
        of = Shardings(plan.sharding(name), NamedSharding(plan.mesh, plan.spec_in_use(name)), name)
        shardings.append(of if of.is_gathered or named else None)
        splits.append(plan.model_dim(name))
    rules: list[Rule] = []
    if any(of is not None for of in shardings):
        rules.append(GatherAtUse(shardings))
    if plan.mesh.shape[MODEL] > 1:
        rules += [FixGroupedConvolutions(plan.mesh)] if convolutions else []
        rules.append(Reshard(splits, plan.mesh))
    return [*rules, FuseAttention(split_heads(plan.mesh))] if fuse_attention else rules


@dataclass(frozen=True)
class Functions:
    """The user's functions, for a model in parts."""

    parts: Parts
    plan: Plan
    loss_fn: Callable[..., Any]
    has_state: bool = False
    precision: Precision = AS_GIVEN
    grad_fn: Callable[..., Any] | None = None
    named: bool = False  # as for `plan_rules`
    change: Rule | None = None  # an additional rule, applied before those of the plan
    fuse_attention: bool = True
    remat: str = "none"  # for loops without their own; as for `Trainer`, except "auto"
    unroll: UnrollLoops | None = None
    stack_blocks: bool = False  # in the loss
    rows: RowUse = UNKNOWN  # what the loss does with rows

    def _model(self, weights: Sequence[Array], inference: bool) -> PyTree:
        n_trained = len(self.parts.names[0])
        return self.parts.put(
            weights[:n_trained], weights[n_trained:], inference=inference, compute_dtype=self.precision.dtype
        )

    def _with_rules(self, fn: Callable[..., Any], *, is_loss: bool = False, is_trained: bool = False) -> Callable[..., Any]:
        rules = plan_rules(self.parts, self.plan, named=self.named, fuse_attention=self.fuse_attention)
        in_fp8, summed_in = self.precision.in_fp8, self.precision.summed_in
        if in_fp8 or summed_in is not None:
            n_weights = sum(map(len, self.parts.names))
            is_cpu = self.plan.mesh.devices.flat[0].platform == "cpu"
            rules.append(WeightProducts(n_weights, in_fp8, summed_in, emulated=is_cpu))
        first: list[Rule] = []
        if self.stack_blocks and is_loss:
            first.append(StackBlocks([effective_specs(self.plan, name) for names in self.parts.names for name in names]))
        first += [] if self.change is None else [self.change]
        if is_trained:  # without a backward pass nothing is kept or recomputed
            rules.append(PickByComparison())
            first += [] if self.unroll is None else [self.unroll]
            first += [] if self.remat == "none" else [RematLoops(self.remat)]
        planned = transformed(fn, [*first, *rules])
        # Each micro-batch draws its own numbers.
        return lambda *args: planned(*args[:-2], jax.random.fold_in(args[-2], args[-1].numbers[0]), args[-1])

    def loss(self, inference: bool, *, is_only: bool = False) -> Callable[..., Any]:
        """Returns `(weights, state, batch, key, rows) -> (total, (weight, metrics, state))`; gathers weights at their use.

        The user's function does not see `rows`, the `RowNumbers` of the batch: they are for the rules.

        **Arguments:**

        - `is_only`: whether the batch is the only micro-batch of a step. A mean then has weight 1, as in a
            hand-written step: no gradient is multiplied by the number of rows and divided by it again.
        """

        def loss(weights: Sequence[Array], state: PyTree, batch: PyTree, key: Array, rows: RowNumbers) -> Any:
            del rows
            model = self._model(weights, inference)
            out = self.loss_fn(model, *([state] if self.has_state else []), batch, key)
            out, state = self._with_state(out, state, "loss_fn")
            total, weight, metrics = as_sums(out, 1 if is_only else n_rows(batch))
            return total, (weight, metrics, state)

        return self._with_rules(loss, is_loss=True, is_trained=not inference)

    def gradient(self, *, is_only: bool = False) -> Callable[..., Any]:
        """Returns `(trained, frozen, state, batch, key, rows) -> (gradients of the total, total, weight, metrics, state)`.

        **Arguments:**

        - `is_only`: as for `loss`.
        """
        loss = self.loss(inference=False, is_only=is_only)

        def default(trained: list, frozen: list, *rest: Any) -> Any:
            def of_trained(trained: list) -> Any:
                return loss([*trained, *frozen], *rest)

            (total, (weight, metrics, state)), grads = jax.value_and_grad(of_trained, has_aux=True)(trained)
            return grads, total, weight, metrics, state

        if self.grad_fn is None:
            return default
        grad_fn = self.grad_fn

        def user(weights: Sequence[Array], state: PyTree, batch: PyTree, key: Array, rows: RowNumbers) -> Any:
            del rows
            model = self._model(weights, inference=False)
            out = grad_fn(model, *([state] if self.has_state else []), batch, key)
            out, grads = _pair(out, "grad_fn", "(loss, grads)")
            out, state = self._with_state(out, state, "grad_fn")
            total, weight, metrics = as_sums(out, 1 if is_only else n_rows(batch), "grad_fn")
            leaves = {name: leaf for name, leaf in named_leaves(grads).items() if is_array_like(leaf)}
            picked = []
            for name, param in zip(self.parts.names[0], weights, strict=False):
                if name not in leaves or leaves[name].shape != param.shape:
                    found = leaves[name].shape if name in leaves else "none"
                    raise ValueError(
                        f"`grad_fn` gradient `{name}`: expected shape {param.shape}, got {found}. "
                        "Return a gradient for every trainable leaf, in the model's structure."
                    )
                picked.append(leaves[name] * weight)
            return picked, total, weight, metrics, state

        planned_fn = self._with_rules(user)
        return lambda trained, frozen, *rest: planned_fn([*trained, *frozen], *rest)

    def _with_state(self, out: Any, state: PyTree, where: str) -> tuple[Any, PyTree]:
        return _pair(out, where, "(loss, state)", ", as `model_state` was given") if self.has_state else (out, state)


def _pair(out: Any, where: str, names: str, why: str = "") -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    found = f"{len(out)} values" if isinstance(out, tuple) else "an array" if eqx.is_array(out) else type(out).__name__
    raise TypeError(f"`{where}`: expected `{names}`{why}, got {found}. Return both.")


def weak_types(state: PyTree) -> tuple[bool, ...]:
    """Returns, for each array of a model's state, whether its type is weak, as that of `jnp.array(0.0)`."""
    return tuple(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))


def with_weak_types(fn: Callable[..., Any], weak: Sequence[bool]) -> Callable[..., Any]:
    """Wraps a function of `(model, state, ...)` so that it receives the weak types with which the state was made.

    `eqx.nn.State.set` requires them of a new value, but arrays lose them when they are placed, carried or loaded.
    """
    if not any(weak):
        return fn

    def weakened(leaf: Array, is_weak: bool) -> Any:
        if not is_weak:
            return leaf
        return jax.lax.convert_element_type_p.bind(leaf, new_dtype=leaf.dtype, weak_type=True, sharding=None)

    @wraps(fn, updated=())
    def with_types(model: PyTree, state: PyTree, *rest: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        return fn(model, jax.tree.unflatten(treedef, map(weakened, leaves, weak)), *rest)

    return with_types
