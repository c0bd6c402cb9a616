"""Cumulative operations along split positions, such as running sums: each device computes those of its own part.

The last entry of a part is its total. The totals of all parts are gathered, one entry for each device. A device makes one
number of those before its part (after it, in reverse), and combines it with each of its entries. The same holds for all
cumulative operations of JAX, since they are associative.

Source: the prefix sums of Blelloch (1990), over devices. A gradient is divided among equal largest entries by parts, and on
one device by pairs, as JAX combines them; any division is a subgradient.
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


# Of each operation: two entries combined, many of them, and the entry of a dtype that changes no other one.
_COMBINE: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], Any]]] = {
    "cumsum": (jnp.add, jnp.sum, lambda _: 0),
    "cumprod": (jnp.multiply, jnp.prod, lambda _: 1),
    "cummax": (jnp.maximum, jnp.max, _bound(-1)),
    "cummin": (jnp.minimum, jnp.min, _bound(1)),
    "cumlogsumexp": (jnp.logaddexp, jax.nn.logsumexp, _bound(-1)),
}


def cumulative_by_parts(eqn: Any, x: jax.Array, n: int, split: Callable[[Any, int | None, int], Any]) -> jax.Array:
    """Returns the output of a cumulative operation.

    **Arguments:**

    - `n`: the number of parts. If it does not divide the entries, some are appended that change no other one.
    - `split`: `split(x, dim, whole)` constrains a value so that `dim` is split over devices, if any, and `whole` is not.
    """
    (combine, of_many, identity), axis = _COMBINE[eqn.primitive.name], eqn.params["axis"]
    size, nothing = x.shape[axis], jnp.array(identity(x.dtype), x.dtype)
    padded = jnp.pad(x, [(0, -size % n if i == axis else 0) for i in range(x.ndim)], constant_values=nothing)
    parts = split(padded.reshape(*x.shape[:axis], n, -1, *x.shape[axis + 1 :]), axis, axis + 1)
    own = split(eqn.primitive.bind(parts, **{**eqn.params, "axis": axis + 1}), axis, axis + 1)
    totals = jax.lax.index_in_dim(own, 0 if eqn.params["reverse"] else -1, axis + 1, keepdims=False)
    totals = jnp.expand_dims(split(totals, None, axis), axis)  # [..., 1, n, ...]: each part has all
    place, other = (jnp.arange(n).reshape(shape) for shape in ((n, 1), (1, n)))
    is_before = (other > place if eqn.params["reverse"] else other < place).reshape(n, n, *[1] * (x.ndim - axis - 1))
    before = split(jnp.where(is_before, totals, nothing), axis, axis + 1)
    before = of_many(before, axis=axis + 1, keepdims=True).astype(x.dtype)
    out = split(combine(before, own), axis, axis + 1).reshape(padded.shape)
    return jax.lax.slice_in_dim(out, 0, size, axis=axis)
