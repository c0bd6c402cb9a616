"""The train, eval and predict steps: one jitted program each, for every mesh.

An update reads from top to bottom in `TrainStep.step_fn`: its micro-batches, the gradient, the values, the update.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from .._promotion import promoting
from .._tree import is_array_like, is_key, named_leaves
from ..dims import UNKNOWN, RowUse, row_use
from ..machine import XlaOptions, is_in_host, replicated, split_rows
from ..memory import may_cut
from ..optimizers import Update, ascent, check_kept_form, injected_rate, n_updates
from ..partition import Plan
from ..transforms import Rows, by_row
from ._compute import Compute
from ._functions import Functions
from ._loss import n_rows
from ._micro_batches import UNKNOWN_TOTAL, accumulate, number_rows, split, with_whole
from ._rules import with_rules
from ._state import TrainState, stream_key
from ._structure import Structure

UNMOVED = "share of updates that rounding loses"  # computed for 16-bit parameters; checked, not recorded
# Streams of one key, derived inside the steps: keys made outside would each compile a small program.
_TRAIN, _EVAL, _ROUND = 0, 1, 2


class _Totals(NamedTuple):
    """Sums over the rows of an update: gradients by trained leaf, and metrics as pairs of a total and its weight."""

    grads: list[Array]
    total: Array
    weight: Array
    metrics: Mapping[str, tuple[Array, Array]]


@dataclass(frozen=True, eq=False)
class TrainStep:
    """One update of a training state, whose shardings it is given. `metric_names` are set once the step has been traced."""

    functions: Functions
    update: Update
    opt_treedef: Any
    layers_treedef: Any
    shardings: TrainState
    metric_names: list[str] = field(default_factory=list)

    def step_fn(self, state: TrainState, frozen: list[Array], groups: Sequence[PyTree], n_rows: Array) -> Any:
        """Returns the state after an update, and its metrics and then the weight of the loss as one vector, for groups of
        micro-batches of equal size, `[n, rows, ...]`. Rows from `n_rows` on (uint32 `[]`) are repetitions, see
        `accumulate`."""
        functions, task, precision = self.functions, self.functions.task, self.functions.task.compute.precision
        step, n_skipped = state.counts
        opt_state = in_memory(jax.memory.Space.Device, state.opt_state, self.shardings.opt_state)
        before = replace(state, opt_state=opt_state)
        key, rounding_key = (_step_key(state.stream, of, step) for of in (_TRAIN, _ROUND))

        parts, every = number_rows(groups), Rows(jnp.zeros(0, jnp.uint32), n_rows, n_rows)
        is_only = task.n_parts == 1 and len(parts) == len(parts[0].numbers) == 1
        use = UNKNOWN
        if not is_only:
            weights, layers = [*state.trained, *frozen], jax.tree.unflatten(self.layers_treedef, state.layers)
            parts, every, use = with_whole(functions, weights, layers, parts, key, every, inference=False)
            if may_cut(use, has_state=task.has_state):  # the number was chosen for the first shapes
                parts = split(parts, task.n_parts, use.group, functions.plan.mesh)
        gradient, loss = functions.gradient(is_only=is_only), functions.loss(inference=False, is_only=is_only)

        def gradient_of(trained: list[Array], layers: list[Array], rows: PyTree, numbers: Rows) -> Any:
            tree = jax.tree.unflatten(self.layers_treedef, layers)
            (total, weight, metrics, grads), tree = gradient(trained, frozen, tree, rows, key, numbers)
            grads = jax.lax.with_sharding_constraint(grads, self.shardings.trained)
            return _Totals(grads, total, weight, metrics), jax.tree.leaves(tree)

        def loss_at(trained: PyTree) -> Array:  # of this update's rows, at other parameters
            def of_part(layers: list[Array], rows: PyTree, numbers: Rows) -> Any:
                tree, weights = jax.tree.unflatten(self.layers_treedef, layers), [*jax.tree.leaves(trained), *frozen]
                (total, weight, _), tree = loss(weights, tree, rows, key, numbers)
                return (total, weight), jax.tree.leaves(tree)

            (total, weight), _ = accumulate(of_part, state.layers, parts, every)
            return total / weight

        def with_grads(trained: PyTree) -> tuple[Array, PyTree]:
            leaves, treedef = jax.tree.flatten(trained)
            sums, _ = accumulate(partial(gradient_of, leaves), state.layers, parts, every)
            grads = [(g / sums.weight).astype(x.dtype) for g, x in zip(sums.grads, leaves, strict=True)]
            return sums.total / sums.weight, jax.tree.unflatten(treedef, grads)

        if not is_only and not use.is_exact and task.grad_fn is None:  # its gradient is the mean of those of micro-batches
            loss_at = jax.custom_vjp(loss_at)
            loss_at.defvjp(with_grads, lambda grads, by: (jax.tree.map(lambda g: g * by.astype(g.dtype), grads),))

        sums, layers = accumulate(partial(gradient_of, state.trained), state.layers, parts, every)
        grads = [g / sums.weight for g in sums.grads]
        values = {"loss": sums.total / sums.weight, "grad_norm": _norm(grads)}
        opt_tree, new_opt_tree, updates = self._updates(before, grads, values["loss"], loss_at)
        rate = injected_rate(new_opt_tree)
        if rate is None and task.lr_schedule_fn is not None:
            n_before = n_updates(opt_tree)  # a skipped step does not advance the optimizer's own count
            rate = task.lr_schedule_fn(step - n_skipped if n_before is None else n_before)
        if rate is not None:
            values["learning_rate"] = jnp.asarray(rate, sums.total.dtype)
        # Sorted, as a scan sorts them: every program of a run must agree on the order.
        values.update({name: metric / over for name, (metric, over) in sorted(sums.metrics.items())})
        trained = precision.updated(task.structure.trained_tree(before.trained), updates, rounding_key)
        opt_leaves = [strong(leaf) for leaf in jax.tree.leaves(new_opt_tree)]
        after = replace(before, trained=jax.tree.leaves(trained), opt_state=opt_leaves, layers=layers)

        if not precision.rounds and any(map(_is_narrow, before.trained)):
            share = _share_unmoved(before.trained, jax.tree.leaves(updates), after.trained)
            values[UNMOVED] = share.astype(values["loss"].dtype)
        self.metric_names[:] = values
        if task.max_skipped is not None:  # the state then stays unchanged, bit for bit
            is_finite = jnp.isfinite(values["loss"]) & jnp.isfinite(values["grad_norm"])
            after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, before)
            n_skipped = n_skipped + jnp.where(is_finite, 0, 1).astype(n_skipped.dtype)
        opt_state = in_memory(jax.memory.Space.Host, after.opt_state, self.shardings.opt_state)
        after = replace(after, opt_state=opt_state, counts=jnp.stack([step + 1, n_skipped]), stream=state.stream)
        return after, jnp.stack([*values.values(), sums.weight])

    def _updates(
        self, state: TrainState, grads: list[Array], loss: Array, loss_at: Callable[..., Array]
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Returns the optimizer's state, its new state and the updates."""
        opt_tree, tree = jax.tree.unflatten(self.opt_treedef, state.opt_state), self.functions.task.structure.trained_tree
        if self.functions.task.grad_fn is None:
            grads = ascent(grads)
        # For optimizers that use the value of the loss, or search along a line.
        of_loss = loss, loss_at, lambda tree: ascent(jax.grad(loss_at)(tree))
        updates, new = self.update(tree(grads), opt_tree, tree(state.trained), *of_loss)
        check_kept_form(new, opt_tree)
        return opt_tree, new, updates


def _step_key(stream: Array, of: int, step: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(stream_key(stream), of), step)


def _norm(grads: Sequence[Array]) -> Array:
    """Returns the norm of a gradient. A sum of squares per leaf: `vdot` or raveling would gather every sharded gradient."""
    squares = [jnp.sum(g * g) if jnp.isrealobj(g) else jnp.sum(jnp.real(g * jnp.conj(g))) for g in grads]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _is_narrow(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def _share_unmoved(before: Sequence[Array], updates: Sequence[Array], after: Sequence[Array]) -> Array:
    """Returns which share of the updates of 16-bit parameters is lost: not zero, but rounded away."""
    n_lost, n = jnp.float32(0), jnp.float32(0)
    for old, update, new in zip(before, updates, after, strict=True):
        if _is_narrow(old):
            is_update = update != 0
            n_lost += jnp.sum(is_update & (new == old), dtype=jnp.float32)
            n += jnp.sum(is_update, dtype=jnp.float32)
    return n_lost / jnp.maximum(n, 1)


def strong(x: Array) -> Array:
    """Returns an array of an optimizer state without its weak type. A checkpoint has none, and a state that loses it on the
    way would compile the step again, and be computed in another dtype after a resume."""
    return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x


def in_memory(space: Any, arrays: Sequence[Array], shardings: Sequence[NamedSharding]) -> list[Array]:
    """Copies arrays whose sharding is in host memory to the given memory space; keeps the others."""
    pairs = zip(arrays, shardings, strict=True)
    return [jax.device_put(x, space) if is_in_host(sharding) else x for x, sharding in pairs]


@dataclass(frozen=True, eq=False)
class EvalStep:
    """The sums of a loss and its metrics over a batch of an evaluation, with the model in inference mode. `names`, of the
    loss and the metrics, sorted, are set once the step has been traced."""

    functions: Functions
    layers_treedef: Any
    names: list[str] = field(default_factory=list)

    def eval_fn(
        self,
        trained: list[Array],
        frozen: list[Array],
        layers: list[Array],
        stream: Array,
        span: Array,
        groups: Sequence[PyTree],
    ) -> Array:
        """Returns a vector of the total and the weight of each name. `span` is the place of the batch in the evaluation, see
        `row_span`."""
        is_all, (before, total) = len(groups) == len(jax.tree.leaves(groups[0])[0]) == 1, span
        loss = self.functions.loss(inference=True, is_all=is_all)
        key = jax.random.fold_in(stream_key(stream), _EVAL)
        weights, tree = [*trained, *frozen], jax.tree.unflatten(self.layers_treedef, layers)
        parts = number_rows(groups, before)
        every = Rows(jnp.zeros(0, jnp.uint32), total, jnp.uint32(sum(part.numbers.size for part in parts)))
        parts, every, use = with_whole(self.functions, weights, tree, parts, key, every, inference=True)
        if use.is_additive:  # as in one undivided batch; else each batch counts as a whole
            every = every._replace(size=jnp.where(total == jnp.uint32(UNKNOWN_TOTAL), every.size, total))

        def of_part(layers: list[Array], rows: PyTree, numbers: Rows) -> Any:
            tree = jax.tree.unflatten(self.layers_treedef, layers)
            (total, weight, metrics), _ = loss(weights, tree, rows, key, numbers)
            return {"loss": (total, weight), **metrics}, layers

        sums, _ = accumulate(of_part, layers, parts, every)
        self.names[:] = sorted(sums)  # as a scan sorts them: every program of a run must agree on the order
        return jnp.stack([x for name in self.names for x in sums[name]])


def prediction(
    structure: Structure, pred_fn: Callable[..., Any], state_treedef: Any, compute_dtype: Any
) -> Callable[..., PyTree]:
    """Returns `(weights, state, batch, key) -> outputs`: the user's `pred_fn` as a function of lists of arrays, with the
    model in inference mode, and with the model state of `state_treedef`, if it is not None. It checks that each output has
    the rows of the batch."""
    n_trained = len(structure.names[0])

    def predict(weights, state, batch, key):
        model = structure.put(weights[:n_trained], weights[n_trained:], inference=True, compute_dtype=compute_dtype)
        extra = [] if state_treedef is None else [jax.tree.unflatten(state_treedef, state)]
        outputs = pred_fn(model, *extra, batch, key)
        n, leaves = n_rows(batch), named_leaves(outputs)
        if not leaves:
            raise ValueError(
                f"`pred_fn`: expected arrays with one row per example, got {outputs!r}. Return a PyTree of arrays."
            )
        for name, leaf in leaves.items():
            if not is_array_like(leaf) or not leaf.shape or leaf.shape[0] != n:
                found = getattr(leaf, "shape", type(leaf).__name__)
                raise ValueError(
                    f"`pred_fn` output `{name}`: expected {n} rows, one for each of the batch, got {found}. "
                    "Return arrays whose leading dim is the batch."
                )
            if is_key(leaf):
                raise TypeError(
                    f"`pred_fn` output `{name}`: expected numbers, got random keys. Return `jax.random.key_data(keys)`."
                )
        return outputs

    return predict


def make_predict_step(
    structure: Structure,
    plan: Plan,
    compute: Compute,
    predict: Callable[..., PyTree],
    *,
    named: bool,
    options: XlaOptions,
    judged: Callable[[RowUse], None],
) -> Callable[..., Any]:
    """Returns the jitted `(trained, frozen, state, group, key, span) -> outputs` of a `prediction`, with rows split over the
    batch axes. `group` is the batch as the only micro-batch, `[1, rows, ...]`, and `span` its place in the prediction, see
    `row_span`. `judged` is called with what `predict` does with rows, whenever it is traced."""

    def of_part(*args):
        use = row_use(predict, *args[:4], returns_rows=True, is_differentiated=False)
        judged(use)
        return by_row(predict, use)(*args)

    planned_fn = with_rules(of_part, structure, plan, compute, "prediction", named=named)

    def predict_fn(trained, frozen, state, group, key, span):
        batch = jax.tree.map(lambda x: x[0], group)
        (before, total), n = span, n_rows(batch)
        rows = Rows(before + jnp.arange(n, dtype=jnp.uint32), total, total)
        return planned_fn([*trained, *frozen], state, batch, key, rows)

    # With several processes each one gets all rows, since each script uses them.
    outputs = replicated(plan.mesh) if plan.mesh.is_multi_process else split_rows(plan.mesh)
    return jitted(predict_fn, outputs, options)


def jitted(step: Callable[..., Any], outputs: Any, options: XlaOptions, **kwargs: Any) -> Callable[..., Any]:
    """Returns a compiled step, with the shardings of its outputs and the compiler's options."""
    return jax.jit(promoting(step), out_shardings=outputs, compiler_options=dict(options), **kwargs)
