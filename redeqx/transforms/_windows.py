"""Windows: what the parts of a result read of a dim along which a window slides, as that of a convolution or a pool."""

from typing import Any

import jax
import jax.numpy as jnp

from ._pads import pad


def in_windows(
    x: jax.Array,
    dim: int,
    n: int,
    fill: Any,
    *,
    n_results: int,
    size: int,
    stride: int,
    padding: tuple[int, int],
    dilations: tuple[int, int],
) -> jax.Array:
    """Returns n parts of a dim with their edges, `[..., n, part, ...]`. A window that slides along each of them, without
    padding and dilation of the input, gives an nth of the results.

    **Arguments:**

    - `fill`: the value that pads.
    - `n_results`: a multiple of n.
    - `size`: of the window, of which the others are the strides, paddings and dilations of the input and of the window.
    """
    n_own = n_results // n * stride  # entries of a part that the next one does not read
    n_edge = max((size - 1) * dilations[1] + 1 - stride, 0)
    low, high = padding[0], n * n_own + n_edge - padding[0] - ((x.shape[dim] - 1) * dilations[0] + 1)
    sizes = [(low, high, dilations[0] - 1) if i == dim else (0, 0, 0) for i in range(x.ndim)]
    x = pad(x, jnp.asarray(fill, x.dtype), sizes)
    n_next = -(-n_edge // n_own)  # the parts after one of which it reads some
    own = jax.lax.slice_in_dim(x, 0, n * n_own, axis=dim)
    last = jax.lax.slice_in_dim(x, n * n_own, None, axis=dim)
    last = jnp.pad(last, [(0, n_next * n_own - n_edge if i == dim else 0) for i in range(x.ndim)])
    own, last = (
        each.reshape(*x.shape[:dim], count, n_own, *x.shape[dim + 1 :]) for each, count in ((own, n), (last, n_next))
    )
    parts = [own]
    for i in range(1, n_next + 1):
        width = min(n_own, n_edge - (i - 1) * n_own)
        edges = [jax.lax.slice_in_dim(each, 0, width, axis=dim + 1) for each in (own, last)]
        parts.append(jax.lax.slice_in_dim(jnp.concatenate(edges, dim), i, i + n, axis=dim))
    return jnp.concatenate(parts, dim + 1)
