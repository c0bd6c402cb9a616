"""Computes a function of some rows of a batch as part of the whole batch.

JAX's default random bits are a function of the key and the flat index of each entry. So a draw over rows takes the flat
indices that its rows have in the draw of the whole batch, and all parts of a batch use the same key. A split of keys is the
same, and an `iota` over rows is the rows' numbers. Values that depend on all rows, but on no weight, are computed on the
whole batch before. `dims.RowUse` says which equations these are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, PyTree, UInt32

from .._tree import as_bare_shapes, is_key
from ..dims import Factors, RowUse, equations_of, place_of_rows
from ..errors import warn
from ..tracing import Rule, Site, as_fun, interpret, normal, plain, restricted, without_remats


class Rows(NamedTuple):
    """Some rows of a batch: their numbers, and what they take from the whole batch."""

    # The number of each row: its place in the whole update, or in the whole call of an evaluation or a prediction.
    numbers: UInt32[Array, " rows"]
    total: UInt32[Array, ""]  # how many rows the update or the call has
    size: UInt32[Array, ""]  # the number of rows that counts as that of the whole batch
    own: Sequence[Array] = ()  # entries of values of the whole batch, `[rows, ...]`; `[rows / n, ...]` if n rows share one
    shared: Sequence[Array] = ()  # the values of the whole batch that have no rows


def _trace(fn: Callable[..., Any], use: RowUse, args: Sequence[PyTree]) -> tuple[Any, PyTree, list[Any] | None]:
    """Returns a function's closed jaxpr, the shapes of its outputs, and its equations by their places: None if they are not
    those that the verdict is about."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*as_bare_shapes(args))
    closed = normal(closed)
    is_known = use.is_about(closed, jax.tree.leaves(args[2])[0].shape[0])
    return closed, shapes, equations_of(closed) if is_known else None


def of_whole(
    fn: Callable[..., Any], use: RowUse, weights: PyTree, state: PyTree, batch: PyTree, key: Array, rows: Rows
) -> Rows:
    """Returns the rows of a whole batch with the values that its parts need, of which none depends on weights, given the
    batch and its rows without these values. The others are as for `by_row`."""
    args = (weights, state, batch, key)
    if not use.whole:
        return rows
    closed, _, known = _trace(fn, use, args)
    if known is None:
        return rows
    closed = without_remats(closed)
    eqns = equations_of(closed)
    outvars = [var for of in use.whole for var in eqns[of.place].outvars]
    found = interpret(restricted(closed, outvars), jax.tree.leaves(args), [_ByRow(rows, use, eqns)])
    own, shared = [], []
    for value, factors in zip(found, (factors for of in use.whole for factors in of.factors), strict=True):
        if (place := place_of_rows(factors)) is None:
            shared.append(value)
        else:
            dim, outer, inner = place
            value = value.reshape(*value.shape[:dim], outer, -1, inner, *value.shape[dim + 1 :])
            own.append(jnp.moveaxis(value, dim + 1, 0))
    return rows._replace(own=own, shared=shared)


def by_row(fn: Callable[..., Any], use: RowUse, *, is_all: bool = False) -> Callable[..., Any]:
    """Returns `(weights, state, batch, key, rows) -> outputs` of a part of the rows of a batch.

    Its first outputs are scaled so that their sums over all parts are those of the whole batch. If the verdict is no proof,
    each part is a batch of its own, with a key of its own. `use` is the verdict of `fn`, `(weights, state, batch, key) ->
    outputs`; `rows` has those values of the whole batch that `of_whole` returns. A part that `is_all` of the batch is a
    batch of its own anyway.
    """

    def of_part(weights: PyTree, state: PyTree, batch: PyTree, key: Array, rows: Rows) -> Any:
        n_rows = rows.numbers.shape[0]
        if use.is_plain and use.n_rows in (0, n_rows):
            return fn(weights, state, batch, key)
        n_copies, args, rows, (closed, shapes, eqns) = _enough(fn, use, (weights, state, batch, key), rows)

        def as_written(key: Array) -> Any:
            if n_copies > 1:
                return fn(weights, state, batch, key)
            return jax.tree.unflatten(jax.tree.structure(shapes), as_fun(closed)(*jax.tree.leaves((*args[:3], key))))

        if eqns is None or (use.whole and not (rows.own or rows.shared)):
            if use.is_exact and not use.draws and (use.is_additive or not is_all):
                warn(
                    f"`loss_fn`: expected the same equations for {n_rows} rows as for the whole batch, got "
                    "others. These rows are computed as a batch of their own. Write a loss whose equations and constants do "
                    "not depend on the number of rows."
                )
            return as_written(_own_key(key, rows.numbers[0]) if use.is_random else key)
        if use.is_plain:
            return as_written(key)
        share = rows.size.astype(jnp.zeros(()).dtype) / (n_rows * n_copies)
        flat = jax.tree.leaves(args)
        outs = interpret(closed, flat, [_ByRow(rows, use, eqns, share)])
        draws = tuple(made for made in use.by_number if made.is_draw)
        if use.own and (use.whole or use.scaled or len(draws) < len(use.by_number)):  # else they are among the outputs
            of_own = restricted(closed, [closed.jaxpr.outvars[i] for i in use.own])
            only_draws = _ByRow(rows, replace(use, by_number=draws, whole=(), scaled=()), eqns)
            for i, out in zip(use.own, interpret(of_own, flat, [only_draws]), strict=True):
                outs[i] = out
        scaled = []
        n_judged = len(use.powers)
        for i, (out, power) in enumerate(zip(outs[:n_judged], use.powers, strict=True)):
            is_by_row = i in use.of_rows
            if is_by_row:
                out = out[: len(out) // n_copies]
            if power or (n_copies > 1 and not is_by_row):
                of = out * (share**power / (1 if is_by_row else n_copies))
                out = of.astype(out.dtype) if jnp.issubdtype(out.dtype, jnp.inexact) else jnp.round(of).astype(out.dtype)
            scaled.append(out)
        return jax.tree.unflatten(jax.tree.structure(shapes), [*scaled, *outs[n_judged:]])  # the state is not added

    return of_part


def _enough(
    fn: Callable[..., Any], use: RowUse, args: tuple[Any, ...], rows: Rows
) -> tuple[int, tuple[Any, ...], Rows, tuple[Any, PyTree, list[Any] | None]]:
    """Repeats the rows of a part that has too few for the equations of the whole batch: JAX writes others for dims of size
    1, and for the first 5 of 4 rows. Returns how often each row is there, the arguments, the rows and the trace."""
    (weights, state, batch, key), n_rows = args, rows.numbers.shape[0]
    n_copies, has_whole = 2 if n_rows == use.group else 1, bool(rows.own or rows.shared)
    while True:
        is_last = not has_whole or n_copies * n_rows >= use.n_rows
        of = _repeated((batch, rows.numbers, rows.own), n_copies)
        args = (weights, state, of[0], key)
        try:
            trace = _trace(fn, use, args)
        except Exception:
            if is_last:
                raise
        else:
            if is_last or trace[2] is not None:
                return n_copies, args, rows._replace(numbers=of[1], own=of[2]), trace
        n_copies *= 2


def _repeated(tree: PyTree, n: int) -> PyTree:
    return tree if n == 1 else jax.tree.map(lambda x: jnp.concatenate([x] * n), tree)


def _own_key(key: Array, first: Array) -> Array:
    """Returns the key of a part that is a batch of its own; the first one's is the key itself."""
    data = [jax.random.key_data(each) for each in (key, jax.random.fold_in(key, first))]
    return jax.random.wrap_key_data(jnp.where(first == 0, *data), impl=jax.random.key_impl(key))


class _ByRow(Rule):
    """Computes the equations that make the entry of a row from its number, or that were computed on the whole batch: those
    that the verdict `use` is about, by their places. `share` is that of the rows of the whole batch over those of the part;
    None for the whole."""

    corrects = True

    def __init__(self, rows: Rows, use: RowUse, eqns: Sequence[Any], share: Array | None = None):
        self._rows, self._share = rows, share
        self._by_number = {eqns[made.place]: made for made in use.by_number}
        self._powers = {} if share is None else {eqns[scaled.place]: scaled.powers for scaled in use.scaled}
        self._whole: dict[Any, list[Array]] = {}
        if share is not None:
            own, shared = iter(rows.own), iter(rows.shared)
            for of in use.whole:
                outs = zip((var.aval.shape for var in eqns[of.place].outvars), of.factors, strict=True)
                self._whole[eqns[of.place]] = [
                    next(shared)
                    if (place := place_of_rows(factors)) is None
                    else jnp.moveaxis(next(own), 0, place[0] + 1).reshape(shape)
                    for shape, factors in outs
                ]

    def claims(self, eqn: Any) -> bool:
        return any(eqn in claimed for claimed in (self._by_number, self._whole, self._powers))

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any]:
        if eqn in self._whole:
            return self._whole[eqn]
        ins = list(map(plain, ins))
        if powers := self._powers.get(eqn):
            assert self._share is not None
            scales = (self._share**power for power in powers)
            ins = [x * scale.astype(x.dtype) if power else x for x, scale, power in zip(ins, scales, powers, strict=True)]
        if eqn not in self._by_number:
            return site.rest(eqn, ins)
        made, aval = self._by_number[eqn], eqn.outvars[0].aval
        if eqn.primitive.name == "iota":
            (_, numbers), dim = self._index(made.factors), eqn.params["dimension"]
            return [jax.lax.broadcast_in_dim(numbers.astype(aval.dtype), aval.shape, (dim,))]
        if made.columns:  # this part of the table has only these rows
            for column, rows, along, repeats in made.columns:
                own = jax.lax.broadcasted_iota(ins[1].dtype, ins[1].shape[:-1], along)
                if ins[1].shape[along] != (n_rows := ins[0].shape[rows]):
                    own = own // repeats % n_rows
                ins[1] = ins[1].at[..., column].set(own)
            return site.rest(eqn, ins)
        return [_drawn(ins[0], self._index(made.factors), aval)]

    def _numbers(self, factor: int | None) -> Array:
        """Returns the numbers along a factor of a dim."""
        numbers = self._rows.numbers
        if factor is None:
            return numbers
        return numbers[::-factor] // -factor if factor < 0 else jnp.arange(factor, dtype=jnp.uint32)

    def _total(self, factor: int | None) -> Array:
        """Returns how many numbers the whole batch has along a factor of a dim."""
        if factor is None:
            return self._rows.total
        return self._rows.total // -factor if factor < 0 else jnp.uint32(factor)

    def _index(self, dims: Sequence[Factors]) -> tuple[Array, Array]:
        """Returns the upper and lower 32 bits of the flat indices in a draw of the whole batch, in the shape of the dims."""
        factors = [factor for dim in dims for factor in dim]
        high, low = jnp.uint32(0), jnp.uint32(0)
        stride = (jnp.uint32(0), jnp.uint32(1))
        for i, factor in reversed(list(enumerate(factors))):
            own = self._numbers(factor).reshape([-1] + [1] * (len(factors) - i - 1))
            high, low = _add((high, low), _times(stride, own))
            stride = _times(stride, self._total(factor))
        shape = [math.prod(self._numbers(factor).shape[0] for factor in dim) for dim in dims]
        return high.reshape(shape), low.reshape(shape)


def _add(one: tuple[Any, Any], two: tuple[Any, Any]) -> tuple[Any, Any]:
    """Adds numbers of 64 bits, as their upper and lower halves."""
    low = one[1] + two[1]
    return one[0] + two[0] + (low < two[1]).astype(jnp.uint32), low


def _times(one: tuple[Any, Any], by: Any) -> tuple[Any, Any]:
    """Multiplies numbers of 64 bits, as their upper and lower halves, by numbers of 32 bits."""
    high, low = one
    a, b, c, d = low >> 16, low & 0xFFFF, by >> 16, by & 0xFFFF
    middle = (b * d >> 16) + (a * d & 0xFFFF) + (b * c & 0xFFFF)
    return high * by + a * c + (a * d >> 16) + (b * c >> 16) + (middle >> 16), low * by


def _drawn(key: Array, index: tuple[Array, Array], aval: Any) -> Array:
    """Returns the random bits, or the keys, at these flat indices of what a key draws."""
    if key.ndim:
        return jax.vmap(lambda key: _drawn(key, index, aval))(key)
    high, low = threefry2x32_p.bind(*jax.random.key_data(key), *index)
    if is_key(aval):
        return jax.random.wrap_key_data(jnp.stack([high, low], -1), impl=jax.random.key_impl(key))
    if aval.dtype.itemsize == 8:
        return (high.astype(aval.dtype) << 32) | low.astype(aval.dtype)
    return (high ^ low).astype(aval.dtype)
