"""Cumulative operations along split positions, such as running sums: each device computes those of its own part.

The last entry of a part is its total. The totals of all parts are gathered, one entry for each device. The same operation
on these gives what is before each part (after it, in reverse), which is combined with each of its entries. This holds for
all cumulative operations of JAX, since they are associative. A reduction of the totals would not do: its gradient is NaN
where an entry is infinite, also if the loss masks what is made of it.

Source: the prefix sums of Blelloch (1990), over devices. A gradient is divided among equal largest entries by pairs, as JAX
combines them, and these are other pairs; any division is a subgradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _bound(sign: int) -> Callable[[Any], Any]:
    """Returns a function of a dtype, with its largest number, or with its lowest one."""

    def bound(dtype: Any) -> Any:
        if jnp.issubdtype(dtype, jnp.inexact):
            return sign * np.inf
        return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min

    return bound


# Of each operation: two entries combined, and the entry of a dtype that changes no other one.
_COMBINE: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "cumsum": (jnp.add, lambda _: 0),
    "cumprod": (jnp.multiply, lambda _: 1),
    "cummax": (jnp.maximum, _bound(-1)),
    "cummin": (jnp.minimum, _bound(1)),
    "cumlogsumexp": (jnp.logaddexp, _bound(-1)),
}


def cumulative_by_parts(eqn: Any, x: jax.Array, n: int, split: Callable[[Any, int | None, int], Any]) -> jax.Array:
    """Returns the output of a cumulative operation.

    **Arguments:**

    - `n`: the number of parts. If it does not divide the entries, some are appended that change no other one.
    - `split`: `split(x, dim, whole)` constrains a value so that `dim` is split over devices, if any, and `whole` is not.
    """
    (combine, identity), axis, is_reverse = _COMBINE[eqn.primitive.name], eqn.params["axis"], eqn.params["reverse"]
    size, nothing = x.shape[axis], jnp.array(identity(x.dtype), x.dtype)

    def appended(x: jax.Array, low: int, high: int) -> jax.Array:
        return jax.lax.pad(x, nothing, [(low, high, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)])

    padded = appended(x, 0, -size % n)
    parts = split(padded.reshape(*x.shape[:axis], n, -1, *x.shape[axis + 1 :]), axis, axis + 1)
    own = split(eqn.primitive.bind(parts, **{**eqn.params, "axis": axis + 1}), axis, axis + 1)
    totals = split(jax.lax.index_in_dim(own, 0 if is_reverse else -1, axis + 1, keepdims=False), None, axis)
    before = appended(eqn.primitive.bind(totals, **eqn.params), *((-1, 1) if is_reverse else (1, -1)))
    before = split(jnp.expand_dims(before, axis + 1), axis, axis + 1)
    out = split(combine(before, own), axis, axis + 1).reshape(padded.shape)
    return jax.lax.slice_in_dim(out, 0, size, axis=axis)
