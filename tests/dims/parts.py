"""Parts of the rows of a batch, as the steps take them."""

import jax
import jax.numpy as jnp
import numpy as np

from redeqx.transforms import Rows, of_whole


def all_rows(n):
    return Rows(jnp.arange(n, dtype=jnp.uint32), jnp.uint32(n), jnp.uint32(n))


def rows_with_whole(fn, use, weights, batch, key):
    """Returns the `Rows` of a whole batch, with the values of it that its parts need, computed in another order of the rows
    if the verdict is that it does not matter."""
    every = all_rows(len(jax.tree.leaves(batch)[0]))
    numbers = np.asarray(every.numbers)
    if not use.in_order:
        numbers = numbers.reshape(2, -1, use.group).swapaxes(0, 1).reshape(-1)
    batch, given = jax.tree.map(lambda x: x[numbers], batch), every._replace(numbers=jnp.asarray(numbers))
    every = jax.jit(lambda: of_whole(fn, use, weights, (), batch, key, given))()
    own = [x[np.argsort(numbers[:: len(numbers) // len(x)])] for x in every.own]
    return every._replace(own=own)


def part_of(every, numbers):
    """Returns the `Rows` with these numbers, which are whole groups of consecutive rows."""
    n = len(every.numbers)
    own = [x[numbers[:: n // len(x)] // (n // len(x))] for x in every.own]
    return every._replace(numbers=jnp.asarray(numbers, jnp.uint32), own=own)
