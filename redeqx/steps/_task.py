"""The task: the arguments of a Trainer, as functions of flat lists of arrays, and the plan that follows on any mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from .._tree import array_leaves, as_bare_shapes, is_array_like, named_leaves
from ..dims import UNKNOWN, RowUse, row_use, shapes_of_row
from ..errors import note, warn
from ..machine import XlaOptions, XlaSettings, xla_settings
from ..optimizers import follows_schedule, paired_leaves
from ..partition import Overrides, Plan, make_plan, mark_read
from ..tracing import Trace, normal, restricted, shapes_in, variables
from ..transforms import describe_attention, describe_residual, expert_stacks
from ._compute import Compute
from ._loss import as_sums, n_rows
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


@dataclass(frozen=True)
class Task:
    """How a model is trained: the user's functions, the optimizer, and the options of a step. It holds no arrays.

    `loss`, `gradient` and `judged` return functions `(weights, state, batch, key) -> (sums, state)`: the user's loss, or
    loss and gradients, as sums over the rows of a batch, for a model as a flat list of the trained and the frozen arrays.
    Fields without a comment are the Trainer's arguments.
    """

    structure: Structure  # the names of the trained and the frozen leaves, and everything else of the model
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    compute: Compute  # `optimizer` was made for its precision
    has_state: bool = False  # whether the model has stateful layers
    grad_fn: Callable[..., Any] | None = None
    lr_schedule_fn: Callable[[Any], Any] | None = None
    collate_fn: Callable[[list], PyTree] = list
    accumulate: int = 1  # micro-batches per update
    plan: Plan | None = None  # the user's own plan; None makes one from the loss
    max_skipped: int | None = None  # how many updates in a row that are not finite may be skipped; None skips none
    n_parts: int = 1  # of each micro-batch whose rows may be cut, computed one after the other
    xla_settings: XlaOptions | str | None = "auto"  # for the train and eval steps, as for `Deployer`
    uses: dict[Any, RowUse] = field(default_factory=dict, compare=False, repr=False)  # the verdicts so far, see `row_use`

    def trace(self, model: PyTree, state: PyTree, batch: PyTree) -> Trace:
        """Traces the loss for the shapes of a batch. The trace of the verdict about rows is used if it is for these."""
        traced = None if self.has_state or self.grad_fn is not None else self.row_use_of(model, state, batch).trace
        names = tuple(named_leaves(eqx.filter(model, is_array_like)))
        shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
        if traced is not None and [v.aval.shape for v in traced.jaxpr.invars[len(names) : -1]] == shapes:
            weights, rest = traced.jaxpr.invars[: len(names)], traced.jaxpr.invars[len(names) :]
            by_name = dict(zip(self.structure.weights, weights, strict=True))
            closed = restricted(traced, traced.jaxpr.outvars[:1], [*map(by_name.__getitem__, names), *rest])
            return Trace(names, tuple(shapes_in(closed)[: len(names)]), closed)
        return self._traced(model, state, batch)

    def plan_on(
        self, mesh: Mesh, model: PyTree, trace: Trace | None, row_use: RowUse = UNKNOWN, placed: Plan | None = None
    ) -> Plan:
        """Returns the model's plan on a mesh; with a trace and its verdict about rows, in the order of the loss. The plan by
        which the model is `placed` already stays if something was traced for it, and learns what the loss does."""
        own = placed if placed is not None and placed.is_traced else self.plan
        if own is None:
            by_model = self.grad_fn is None and self.compute.splits_residual_on(mesh)
            plan = plan_model(model, mesh, trace, row_use=row_use, splits_residual=by_model)
        else:
            own.check(model)
            plan = own.on(mesh)
            plan = plan if trace is None else mark_read(plan, trace, row_use, with_kinds=plan.repeats is None)
        if trace is not None and self.grad_fn is None and self.compute.splits_residual_on(mesh):
            plan = replace(plan, positions=(*plan.positions, *describe_residual(trace, plan)))
        if trace is not None:  # the user's own plan may be that of another trainer, which fused attention
            plan = replace(plan, attention=describe_attention(trace, mesh) if self.compute.fuse_attention else ())
        if self.grad_fn is None and all(plan[name].is_read is False for name in self.structure.names[0]):
            raise ValueError(
                "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of "
                f"{len(self.structure.names[0])}. Use the model that `loss_fn` is given, not one from outside."
            )
        return plan

    def compiler(self, mesh: Mesh) -> XlaSettings:
        """Returns the settings for the compiler of the train and eval steps on a mesh."""
        return xla_settings(mesh, self.xla_settings, self.compute.settings_on(mesh))

    def precision_of(self, model: PyTree) -> str:
        """Returns a description of the dtypes of a step."""
        return self.compute.precision.describe([leaf.dtype for leaf in self.structure.take(model)[0]])

    def init_opt_state(self, trained: Sequence[Any]) -> PyTree:
        """Returns the optimizer's state for the trained leaves."""
        params = self.structure.trained_tree(trained)
        with note(_OF_INIT, lambda: _CALLED if callable(params) else ""):
            return self.optimizer.init(params)

    def opt_shapes(self, model: PyTree) -> PyTree:
        """Returns the shapes of the optimizer state."""
        return jax.eval_shape(self.init_opt_state, self.structure.take(model)[0])

    def checked_schedule(self, model: PyTree) -> Callable[[Any], Any] | None:
        """Returns `lr_schedule_fn` if the learning rate of each step is its value there, as far as the optimizer shows."""
        schedule = self.lr_schedule_fn
        return schedule if schedule is not None and follows_schedule(self.opt_shapes(model)) else None

    # --- the functions -------------------------------------------------------------------------------------------------

    def loss(self, *, inference: bool, is_only: bool = False) -> Callable[..., Any]:
        """Returns the function with the sums `(total, weight, metrics)`. If the batch is the only micro-batch of a step, a
        mean has weight 1, as in a hand-written step: no gradient is multiplied by the number of rows and divided by it
        again."""

        def loss(weights: Sequence[Array], state: PyTree, batch: PyTree, key: Array) -> Any:
            out, state = self._call(self.loss_fn, "loss_fn", weights, state, batch, key, inference=inference)
            return as_sums(out, 1 if is_only else n_rows(batch)), state

        return loss

    def gradient(self, *, is_only: bool = False) -> Callable[..., Any]:
        """Returns the function of `grad_fn`, with the sums `(total, weight, metrics, gradients of the trained arrays)`."""
        assert self.grad_fn is not None
        grad_fn = self.grad_fn

        def gradient(weights: Sequence[Array], state: PyTree, batch: PyTree, key: Array) -> Any:
            out, state = self._call(grad_fn, "grad_fn", weights, state, batch, key, inference=False)
            out, grads = _pair(out, "grad_fn", "(loss, grads)")
            total, weight, metrics = as_sums(out, 1 if is_only else n_rows(batch), "grad_fn")
            leaves = array_leaves(grads)
            picked = []
            for name, param in zip(self.structure.names[0], weights, strict=False):
                if name not in leaves or leaves[name].shape != param.shape:
                    found = leaves[name].shape if name in leaves else "none"
                    raise ValueError(
                        f"`grad_fn` gradient `{name}`: expected shape {param.shape}, got {found}. "
                        "Return a gradient for every trainable leaf, in the model's structure."
                    )
                picked.append(leaves[name] * weight)
            return (total, weight, metrics, picked), state

        return gradient

    def judged(self, *, inference: bool) -> Callable[..., Any]:
        """Returns the function that `row_use` is about: the user's gradient if there is one, else the loss."""
        return self.loss(inference=inference) if self.grad_fn is None or inference else self.gradient()

    def row_use(self, weights: Sequence[Any], state: PyTree, batch: PyTree, key: Any, *, inference: bool = False) -> RowUse:
        """Returns what the function does with the rows of a batch, given as arrays or shapes. It is found once for all
        numbers of rows; longer texts, for example, are other shapes, for which other constants of the loss may hold."""
        of = inference, *shapes_of_row(weights, state, batch)
        if of not in self.uses:
            self.uses[of] = self.find_row_use(weights, state, batch, key, inference=inference)
        return self.uses[of]

    def find_row_use(self, weights: Sequence[Any], state: PyTree, batch: PyTree, key: Any, *, inference: bool) -> RowUse:
        """As `row_use`, which calls it once for each shape of a row."""
        fn = self.judged(inference=inference)
        is_differentiated = self.grad_fn is None and not inference
        use = row_use(lambda *args: fn(*args)[0], weights, state, batch, key, is_differentiated=is_differentiated)
        if not use.is_exact or inference:
            return use
        changes, reads = _changes_state(fn, weights, state, batch, key)
        if reads:
            return replace(use, kind="mixed", why="it reads a state that each part of the batch changes")
        return replace(use, changes_state=changes)

    def row_use_of(self, model: PyTree, state: PyTree, batch: PyTree, *, inference: bool = False) -> RowUse:
        """Returns what the function does with the rows of a batch, for a model in one piece."""
        trained, frozen = self.structure.take(model)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return self.row_use([*trained, *frozen], state, batch, key, inference=inference)

    def _traced(self, model: PyTree, state: PyTree, batch: PyTree) -> Trace:
        """Traces the total of the loss for the shapes of a batch, for a model in one piece."""
        loss = self.loss(inference=False)

        def total(model: PyTree, batch: PyTree, key: Any) -> Any:
            trained, frozen = self.structure.take(model)
            return loss([*trained, *frozen], jax.tree.map(_any_value, state), batch, key)[0][0]

        return Trace.of(total, model, batch, jax.eval_shape(lambda: jax.random.key(0)))

    def _call(
        self,
        fn: Callable[..., Any],
        where: str,
        weights: Sequence[Array],
        state: PyTree,
        batch: PyTree,
        key: Array,
        *,
        inference: bool,
    ) -> tuple[Any, PyTree]:
        n, dtype = len(self.structure.names[0]), self.compute.dtype
        model = self.structure.put(weights[:n], weights[n:], inference=inference, compute_dtype=dtype)
        if not self.has_state:
            return fn(model, batch, key), state
        given = jax.tree.map(lambda x: x, state)  # a copy: `state.set` makes the object that it is called on unusable
        out, after = _pair(fn(model, given, batch, key), where, "(loss, state)", ", as `model_state` was given")
        return out, state if inference else _checked_state(after, state, where)


_OF_INIT = (
    "Raised by `optimizer.init` of the trained arrays, which are the model with None for everything else. Masks and labels "
    "have that structure; an optimizer whose parameters are something else cannot be used."
)
_CALLED = (
    " optax calls labels that can be called, and a tree of labels can, as this model has a `__call__`. Pass the tree as "
    "`lambda params: labels`."
)


def _any_value(leaf: Any) -> Any:
    """Returns a JAX array of the trace for a shape or a NumPy array, as in a dry run: NumPy would compute outside of it."""
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray) else leaf


def _changes_state(fn: Callable[..., Any], weights: PyTree, state: PyTree, batch: PyTree, key: Any) -> tuple[bool, bool]:
    """Whether `(sums, state)` has a part of the state changed, and whether the sums depend on such a part."""
    n = len(jax.tree.leaves(state))
    if not n:
        return False, False
    closed = normal(jax.make_jaxpr(fn)(*as_bare_shapes((weights, state, batch, key))))
    start, outs = len(jax.tree.leaves(weights)), closed.jaxpr.outvars
    needed = {var for eqn in restricted(closed, outs[:-n]).jaxpr.eqns for var in variables(eqn.invars)}
    pairs = zip(closed.jaxpr.invars[start : start + n], outs[-n:], strict=True)
    changed = {before for before, after in pairs if before is not after}
    return bool(changed), bool(changed & needed)


def _pair(out: Any, where: str, names: str, why: str = "") -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    found = f"{len(out)} values" if isinstance(out, tuple) else "an array" if eqx.is_array(out) else type(out).__name__
    raise TypeError(f"`{where}`: expected `{names}`{why}, got {found}. Return both.")


def _checked_state(after: PyTree, before: PyTree, where: str) -> PyTree:
    """Returns the state after a call, in the dtypes from before it. Raises ValueError for a state of another structure or
    shape, and for numbers that would become integers, such as a decayed rate that began as `jnp.array(1)`."""
    advice = "Return the state that the model's call returned, or what else replaces each leaf."
    new_leaves = []
    for name, leaf, old in paired_leaves(after, before, where, "model_state", advice):
        new = jnp.asarray(leaf)
        becomes_integer = jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact)
        if new.shape != old.shape or becomes_integer:
            raise ValueError(
                f"`{where}` state `{name}`: expected {old.dtype}{list(old.shape)}, as in `model_state`, got "
                f"{new.dtype}{list(new.shape)}. Return that, or pass the other one as `model_state`."
            )
        new_leaves.append(new.astype(old.dtype))
    return jax.tree.unflatten(jax.tree.structure(before), new_leaves)
