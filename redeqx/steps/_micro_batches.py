"""The rows of a step or an evaluation: numbered, cut into micro-batches, and summed over them.

A batch arrives as groups of micro-batches of equal size, `[n, rows, ...]`. The functions here do not know what is summed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from .._rounding import at_least_float32
from ..dims import RowUse
from ..machine import n_batch_shards, replicated, split_rows
from ..tracing import as_fun
from ..transforms import Rows
from ._functions import Functions

# --- rows --------------------------------------------------------------------------------------------------------------

UNKNOWN_TOTAL = 2**31  # the number of rows of an iterable, which is known only at its end


def row_span(before: int, n: int | None) -> np.ndarray:
    """Returns the place of a batch among the rows of an evaluation or a prediction, uint32 `[2]`: the number of rows before
    it, and the number of all rows, 2**31 if that is unknown."""
    return np.array([before, UNKNOWN_TOTAL if n is None else n]).astype(np.uint32)


class Part(NamedTuple):
    """Micro-batches of equal size, `[n, rows, ...]`, or one of them: their batch, and `numbers` and `own` of its `Rows`."""

    batch: PyTree
    numbers: Array
    own: Sequence[Array] = ()


def number_rows(groups: Sequence[PyTree], first: Any = 0) -> list[Part]:
    """Returns each group with the numbers of its rows from `first` (uint32 `[]`) on, in the order of the examples."""
    parts, start = [], jnp.asarray(first, jnp.uint32)
    for group in groups:
        n, rows = jax.tree.leaves(group)[0].shape[:2]
        parts.append(Part(group, start + jnp.arange(n * rows, dtype=jnp.uint32).reshape(n, rows)))
        start += jnp.uint32(n * rows)
    return parts


def with_whole(
    functions: Functions, weights: PyTree, state: PyTree, groups: Sequence[Part], key: Array, every: Rows, *, inference: bool
) -> tuple[list[Part], Rows, RowUse]:
    """Computes the values of the whole batch that its parts need. Returns the groups with their entries of them, the `Rows`
    of all groups (`every` without these values and without numbers), and what the function does with rows. Each device keeps
    its rows if their order does not matter. Else it gets all rows, once."""
    mesh, n_all = functions.plan.mesh, sum(group.numbers.size for group in groups)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n_all, *x.shape[2:]), x.dtype), groups[0].batch)
    use = functions.task.row_use(weights, state, shapes, key, inference=inference)
    if not use.whole:
        return list(groups), every, use
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
    return [group._replace(own=of) for group, of in zip(groups, own, strict=True)], every, use


# --- micro-batches -----------------------------------------------------------------------------------------------------


def accumulate(fn: Callable[..., Any], state: PyTree, groups: Sequence[Part], every: Rows) -> tuple[Any, PyTree]:
    """Sums `fn(state, batch, rows) -> (sums, state)` over all micro-batches of all groups, whose `Rows` are `every`; returns
    the sums and the last state. The results of a micro-batch whose rows have numbers from `total` on are dropped, so that a
    step with fewer micro-batches uses the same program."""

    def of(state: PyTree, part: Part) -> Any:
        return fn(state, part.batch, every._replace(numbers=part.numbers, own=part.own))

    sums: Any = None
    for group in groups:
        if len(group.numbers) == 1:
            added, state = of(state, jax.tree.map(lambda x: x[0], group))
            if len(groups) > 1:  # as in a scan: bfloat16 sums would lose small terms
                added = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), added)
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

            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, at_least_float32(s.dtype)), shapes[0])
            (added, state), _ = jax.lax.scan(body, (zeros, state), group)
        sums = added if sums is None else jax.tree.map(jnp.add, sums, added)
    return sums, state


def split(groups: Sequence[Part], n_parts: int, n_together: int, mesh: Mesh) -> list[Part]:
    """Splits micro-batches into smaller ones, where their rows divide into parts that keep `n_together` consecutive rows.
    Each has rows of every device, so no row moves."""
    n_shards = n_batch_shards(mesh)

    def cut(x: Array) -> Array:
        return einops.rearrange(x, "n (shard part row) ... -> (n part) (shard row) ...", shard=n_shards, part=n_parts)

    def split_one(group: Part) -> Part:
        batch, numbers, own = jax.tree.map(cut, group)
        batch, own = jax.lax.with_sharding_constraint((batch, own), split_rows(mesh, dim=1))
        return Part(batch, numbers, own)  # each device can compute any number: reading one needs no collective

    if n_parts == 1:
        return list(groups)
    divide = [group.numbers.shape[1] % (n_shards * n_parts * n_together) == 0 for group in groups]
    return [split_one(group) if divides else group for group, divides in zip(groups, divide, strict=True)]
