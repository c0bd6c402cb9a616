"""The train, eval and predict steps: one jitted program each, for every mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from .._tree import is_array_like, named_leaves
from ..dims import row_use
from ..machine import Options, is_in_host, n_batch_shards, replicated, split_rows
from ..optimizers import ascent, injected_rate, n_updates, update_with, widened
from ..partition import Plan
from ..tracing import as_fun, transformed
from ..transforms import Rows, by_row
from ._functions import Functions, plan_rules
from ._loss import n_rows
from ._metrics import UNMOVED
from ._parts import Parts
from ._run import stream_key

# --- rows --------------------------------------------------------------------------------------------------------------

_UNKNOWN = 2**31  # the number of rows of an iterable, which is known only at its end


def row_span(before: int, n: int | None) -> np.ndarray:
    """Returns the place of a batch among the rows of an evaluation or a prediction, uint32 `[2]`: the number of rows before
    it, and the number of all rows, 2**31 if that is unknown."""
    return np.array([before, _UNKNOWN if n is None else n]).astype(np.uint32)


class Part(NamedTuple):
    """Micro-batches of equal size, `[n, rows, ...]`, or one of them: their batch, and `numbers` and `own` of its `Rows`."""

    batch: PyTree
    numbers: Array
    own: Sequence[Array] = ()


def number_rows(groups: Sequence[PyTree], first: Any = 0) -> list[Part]:
    """Returns each group with the numbers of its rows, in the order of the examples, as if all were one batch.

    **Arguments:**

    - `first`: uint32 `[]`, the number of the first row.
    """
    parts, start = [], jnp.asarray(first, jnp.uint32)
    for group in groups:
        n, rows = jax.tree.leaves(group)[0].shape[:2]
        parts.append(Part(group, start + jnp.arange(n * rows, dtype=jnp.uint32).reshape(n, rows)))
        start += jnp.uint32(n * rows)
    return parts


def with_whole(
    functions: Functions, weights: PyTree, state: PyTree, groups: Sequence[Part], key: Array, every: Rows, *, inference: bool
) -> tuple[list[Part], Rows, int]:
    """Computes the values of the whole batch that its parts need. Returns the groups with their entries of them, the `Rows`
    of all groups, and how many consecutive rows stay together.

    Each device keeps its rows if their order does not matter. Else it gets all rows, once.

    **Arguments:**

    - `every`: the `Rows` of all groups, without these values and without numbers.
    """
    mesh, n_all = functions.plan.mesh, sum(group.numbers.size for group in groups)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n_all, *x.shape[2:]), x.dtype), groups[0].batch)
    use = functions.sums.row_use(weights, state, shapes, key, inference=inference)
    if not use.whole:
        return list(groups), every, use.group
    n_shards = n_batch_shards(mesh)
    layout = replicated(mesh) if use.in_order else split_rows(mesh) if n_all % n_shards == 0 else None
    shards = [1 if use.in_order or group.numbers.shape[1] % (n_shards * use.group) else n_shards for group in groups]

    def join(*parts: Array) -> Array:
        pairs = zip(parts, shards, strict=True)
        rows = [einops.rearrange(x, "n (shard row) ... -> (shard n row) ...", shard=shard) for x, shard in pairs]
        if use.in_order:
            rows = [jax.lax.with_sharding_constraint(x, layout) for x in rows]
        x = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
        return x if layout is None else jax.lax.with_sharding_constraint(x, layout)

    def cut(x: Array) -> list[Array]:
        n_together, start, found = n_all // x.shape[0], 0, []
        for (n, rows), shard in zip((group.numbers.shape for group in groups), shards, strict=True):
            end = start + n * rows // n_together
            of = einops.rearrange(x[start:end], "(shard n row) ... -> n (shard row) ...", shard=shard, n=n)
            split = split_rows(mesh, dim=1) if of.shape[1] % n_shards == 0 else replicated(mesh)
            found.append(jax.lax.with_sharding_constraint(of, split))
            start = end
        return found

    batch, numbers, _ = jax.tree.map(join, *groups)
    every = functions.whole(weights, state, batch, key, every._replace(numbers=numbers), inference=inference)
    own = list(zip(*map(cut, every.own), strict=True)) or [()] * len(groups)
    return [group._replace(own=of) for group, of in zip(groups, own, strict=True)], every, use.group


# --- micro-batches -----------------------------------------------------------------------------------------------------


def _accumulate(fn: Callable[..., Any], state: PyTree, groups: Sequence[Part], every: Rows) -> tuple[Any, PyTree]:
    """Sums `fn(state, batch, rows) -> (sums, state)` over all micro-batches of all groups; returns the sums and the last
    state.

    The results of a micro-batch whose rows have numbers from `total` on are dropped, so that a step with fewer micro-batches
    uses the same program.

    **Arguments:**

    - `every`: the `Rows` of all groups.
    """

    def of(state: PyTree, part: Part) -> Any:
        return fn(state, part.batch, every._replace(numbers=part.numbers, own=part.own))

    sums: Any = None
    for group in groups:
        if len(group.numbers) == 1:
            added, state = of(state, jax.tree.map(lambda x: x[0], group))
            if len(groups) > 1:  # as in a scan: bfloat16 sums would lose small terms
                added = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), added)
        else:
            first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), group)
            traced, shapes = jax.make_jaxpr(of, return_shape=True)(state, first)  # once: the body is this trace

            def body(carry: Any, part: Part, traced: Any = traced, shapes: Any = shapes) -> Any:
                sums, state = carry
                outs = as_fun(traced)(*jax.tree.leaves((state, part)))
                added, after = jax.tree.unflatten(jax.tree.structure(shapes), outs)
                new = (jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, added), after)
                if len(groups) == 1:  # else none is a repetition
                    new = jax.tree.map(lambda new, old: jnp.where(part.numbers[0] < every.total, new, old), new, carry)
                return new, None

            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes[0])
            (added, state), _ = jax.lax.scan(body, (zeros, state), group)
        sums = added if sums is None else jax.tree.map(jnp.add, sums, added)
    return sums, state


def _split_micro_batches(groups: Sequence[Part], n_parts: int, n_together: int, mesh: Mesh) -> list[Part]:
    """Splits micro-batches into smaller ones, where their rows divide. Each has rows of every device, so no row moves.

    **Arguments:**

    - `n_together`: the number of consecutive rows that stay together.
    """
    n_shards = n_batch_shards(mesh)

    def cut(x: Array) -> Array:
        return einops.rearrange(x, "n (shard part row) ... -> (n part) (shard row) ...", shard=n_shards, part=n_parts)

    def split(group: Part) -> Part:
        batch, numbers, own = jax.tree.map(cut, group)
        batch, own = jax.lax.with_sharding_constraint((batch, own), split_rows(mesh, dim=1))
        return Part(batch, numbers, own)  # each device can compute any number: reading one needs no collective

    divide = [group.numbers.shape[1] % (n_shards * n_parts * n_together) == 0 for group in groups]
    if n_parts == 1 or not divide[0]:
        return list(groups)
    return [split(group) if divides else group for group, divides in zip(groups, divide, strict=True)]


# Streams of one key, derived inside the steps: keys made outside would each compile a small program.
_TRAIN, _EVAL, _ROUND = 0, 1, 2


@dataclass(frozen=True)
class Layout:
    """The shardings of the arrays that a train step carries."""

    trained: list[NamedSharding]
    opt_state: list[NamedSharding]
    state: list[NamedSharding]


def make_train_step(
    functions: Functions,
    optimizer: optax.GradientTransformation,
    lr_schedule_fn: Callable[[Any], Any] | None,
    opt_treedef: Any,
    state_treedef: Any,
    layout: Layout,
    skip_nonfinite: bool = False,
    n_parts: int = 1,
    options: Options | None = None,
) -> tuple[Callable[..., Any], list[str]]:
    """Returns the jitted `(trained, opt_state, state, steps, frozen, stream, groups, n_rows) -> (trained, opt_state, state,
    steps, vector)`, where `steps` counts the steps taken and, of those, the skipped ones, and `n_rows`, uint32 `[]`, is how
    many rows count: rows with larger numbers are repetitions, see `_accumulate`.

    All arguments but the frozen arrays, the stream, the batch and `n_rows` are donated. The vector holds the metrics,
    and then the weight of the loss, in one transfer per step; the list has the metrics' names once the step has been traced.

    **Arguments:**

    - `skip_nonfinite`: if the loss or the gradient's norm is not finite, the carried arrays stay unchanged, bit for bit.
    - `n_parts`: the number of parts of each micro-batch, computed one after the other.
    - `options`: for the compiler.
    """
    parts, mesh, precision = functions.parts, functions.plan.mesh, functions.precision
    # For optimizers that use the value of the loss, search along a line, or depend on the plan.
    names: list[str] = []

    def step_fn(trained, opt_state, state, steps, frozen, stream, groups, n_rows):
        step, n_skipped = steps
        opt_state = in_memory(jax.memory.Space.Device, opt_state, layout.opt_state)
        key = stream_key(stream)
        rounding_key = jax.random.fold_in(jax.random.fold_in(key, _ROUND), step)
        key = jax.random.fold_in(jax.random.fold_in(key, _TRAIN), step)

        groups = number_rows(groups)
        every = Rows(jnp.zeros(0, jnp.uint32), n_rows, n_rows)
        is_only = n_parts == 1 and len(groups) == len(groups[0].numbers) == 1
        if not is_only:
            tree = jax.tree.unflatten(state_treedef, state)
            weights = [*trained, *frozen]
            groups, every, n_together = with_whole(functions, weights, tree, groups, key, every, inference=False)
            groups = _split_micro_batches(groups, n_parts, n_together, mesh)
        gradient, loss = functions.gradient(is_only=is_only), functions.loss(inference=False, is_only=is_only)

        def micro_step(state, batch, rows):
            tree = jax.tree.unflatten(state_treedef, state)
            (total, weight, metrics, grads), tree = gradient(trained, frozen, tree, batch, key, rows)
            grads = jax.lax.with_sharding_constraint(grads, layout.trained)
            return (grads, total, weight, metrics), _state_leaves(tree, state, state_treedef)

        def loss_of(tree):
            """Returns the loss of this step's batch at other parameters."""
            weights = [*jax.tree.leaves(tree), *frozen]

            def micro_step(state, batch, rows):
                tree = jax.tree.unflatten(state_treedef, state)
                (total, weight, _), after = loss(weights, tree, batch, key, rows)
                return (total, weight), _state_leaves(after, state, state_treedef)

            (total, weight), _ = _accumulate(micro_step, before[2], groups, every)
            return total / weight

        before = (trained, opt_state, state)
        (grads, total, weight, metrics), state = _accumulate(micro_step, state, groups, every)
        grads = [g / weight for g in grads]
        # A sum of squares per leaf: `vdot` or raveling would gather every sharded gradient.
        squares = [jnp.sum(g * g) if jnp.isrealobj(g) else jnp.sum(jnp.real(g * jnp.conj(g))) for g in grads]
        as_params = widened(trained) if precision.rounds else trained
        grads = [g.astype(x.dtype) for g, x in zip(grads, as_params, strict=True)]
        if functions.sums.grad_fn is None:
            grads = ascent(grads)
        values = {"loss": total / weight, "grad_norm": jnp.sqrt(jnp.sum(jnp.stack(squares)))}
        tree = parts.trained_tree(trained)
        grad_tree, opt_tree = parts.trained_tree(grads), jax.tree.unflatten(opt_treedef, opt_state)
        n_before = n_updates(opt_tree)
        of_loss = {"value": values["loss"], "value_fn": loss_of, "grad_fn": lambda tree: ascent(jax.grad(loss_of)(tree))}
        updates, opt_tree = update_with(optimizer, functions.plan, grad_tree, opt_tree, tree, **of_loss)
        rate = injected_rate(opt_tree)
        if rate is None and lr_schedule_fn is not None:
            # A skipped step does not advance the optimizer's own count.
            rate = lr_schedule_fn(step - n_skipped if n_before is None else n_before)
        if rate is not None:
            values["learning_rate"] = jnp.asarray(rate, total.dtype)
        # Sorted, as a scan sorts them: every program of a run must agree on the order.
        values.update({name: metric / over for name, (metric, over) in sorted(metrics.items())})
        names[:] = values
        opt_leaves = [strong(leaf) for leaf in jax.tree.leaves(opt_tree)]
        after = (jax.tree.leaves(precision.updated(tree, updates, rounding_key)), opt_leaves, state)
        if not precision.rounds and any(map(_is_narrow, trained)):
            values[UNMOVED] = _share_unmoved(trained, jax.tree.leaves(updates), after[0]).astype(total.dtype)
            names[:] = values
        if skip_nonfinite:
            is_finite = jnp.isfinite(values["loss"]) & jnp.isfinite(values["grad_norm"])
            after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, before)
            n_skipped = n_skipped + jnp.where(is_finite, 0, 1).astype(n_skipped.dtype)
        after = (after[0], in_memory(jax.memory.Space.Host, after[1], layout.opt_state), after[2])
        return *after, jnp.stack([step + 1, n_skipped]), jnp.stack([*values.values(), weight])

    replicate = replicated(mesh)
    shardings = (layout.trained, layout.opt_state, layout.state, replicate, replicate)
    donated = (0, 1, 2, 3)
    jitted = jax.jit(step_fn, donate_argnums=donated, out_shardings=shardings, compiler_options=dict(options or {}))
    return jitted, names


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


def _state_leaves(tree: PyTree, before: Sequence[Array], treedef: Any) -> list[Array]:
    if jax.tree.structure(tree) != treedef:
        raise ValueError(
            "`loss_fn` state: expected the structure of `model_state`, got another one. "
            "Return the state that the model's call returned."
        )
    return [new.astype(old.dtype) for new, old in zip(jax.tree.leaves(tree), before, strict=True)]


def make_eval_step(
    functions: Functions, state_treedef: Any, options: Options | None = None
) -> tuple[Callable[..., Any], list[str]]:
    """Returns the jitted `(trained, frozen, state, stream, span, groups) -> vector` of sums over a batch: total and weight
    of the loss, then of each metric in the list of names. The model is in inference mode.

    `span` is the place of the batch in the evaluation, see `row_span`.
    """
    loss = functions.loss(inference=True)
    names: list[str] = []

    def eval_fn(trained, frozen, state, stream, span, groups):
        before, total = span
        key = jax.random.fold_in(stream_key(stream), _EVAL)
        weights, tree = [*trained, *frozen], jax.tree.unflatten(state_treedef, state)
        groups = number_rows(groups, before)
        size = jnp.uint32(sum(group.numbers.size for group in groups))
        every = Rows(jnp.zeros(0, jnp.uint32), total, size)
        groups, every, _ = with_whole(functions, weights, tree, groups, key, every, inference=True)

        def micro_step(state, batch, rows):
            tree = jax.tree.unflatten(state_treedef, state)
            (total, weight, metrics), _ = loss(weights, tree, batch, key, rows)
            return {"loss": (total, weight), **metrics}, state

        sums, _ = _accumulate(micro_step, state, groups, every)
        names[:] = sorted(sums)  # as a scan sorts them: every program of a run must agree on the order
        return jnp.stack([x for name in names for x in sums[name]])

    replicate = replicated(functions.plan.mesh)
    return jax.jit(eval_fn, out_shardings=replicate, compiler_options=dict(options or {})), names


def prediction(
    parts: Parts, pred_fn: Callable[..., Any], state_treedef: Any = None, compute_dtype: Any = None
) -> Callable[..., PyTree]:
    """Returns `(weights, state, batch, key) -> outputs`: the user's `pred_fn` as a function of lists of arrays, with the
    model in inference mode. It checks that each output has the rows of the batch.

    **Arguments:**

    - `state_treedef`: of the model state that `pred_fn` also receives; None if there is none.
    """
    n_trained = len(parts.names[0])

    def predict(weights, state, batch, key):
        model = parts.put(weights[:n_trained], weights[n_trained:], inference=True, compute_dtype=compute_dtype)
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
        return outputs

    return predict


def make_predict_step(
    parts: Parts,
    plan: Plan,
    predict: Callable[..., PyTree],
    *,
    named: bool = False,
    fuse_attention: bool = True,
    options: Options | None = None,
) -> Callable[..., Any]:
    """Returns the jitted `(trained, frozen, state, batch, key, span) -> outputs`, with rows split over the batch axes.
    `span` is the place of the batch in the prediction, see `row_span`.

    **Arguments:**

    - `predict`: as `prediction` returns it.
    - `named`, `fuse_attention`: as for `plan_rules`.
    - `options`: for the compiler.
    """
    rules = plan_rules(parts, plan, named=named, convolutions=False, fuse_attention=fuse_attention)

    def of_part(*args):
        return by_row(predict, row_use(predict, *args[:4], returns_rows=True))(*args)

    planned_fn = transformed(of_part, rules)

    def predict_fn(trained, frozen, state, batch, key, span):
        (before, total), n = span, n_rows(batch)
        rows = Rows(before + jnp.arange(n, dtype=jnp.uint32), total, jnp.uint32(n))
        return planned_fn([*trained, *frozen], state, batch, key, rows)

    # With several processes each one gets all rows, since each script uses them.
    outputs = replicated(plan.mesh) if plan.mesh.is_multi_process else split_rows(plan.mesh)
    return jax.jit(predict_fn, out_shardings=outputs, compiler_options=dict(options or {}))
