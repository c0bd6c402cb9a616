"""A part of the rows draws what the whole batch draws for them, also where that is 2^32 numbers and more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from redeqx.dims import row_use
from redeqx.transforms import Rows, by_row

KEY = jax.random.key(7)
ROWS = [0, 1, 5, 2**16 + 3, 2**31 - 1, 2**31 + 7, 2**32 - 2]
TOTAL = 2**32 - 1


def drawn(draw, rows, total):
    """Returns what is drawn for some rows of a batch of `total` rows."""

    def fn(weights, state, batch, key):
        return draw(key, len(batch))

    def batch(n):
        return jax.ShapeDtypeStruct((n,), jnp.float32)

    use = row_use(fn, (), (), batch(8), KEY, returns_rows=True)
    assert use.kind == "separable" and not use.draws
    numbers = Rows(jnp.asarray(rows, jnp.uint32), jnp.uint32(total), jnp.uint32(total))
    return np.asarray(by_row(fn, use)((), (), jnp.zeros(len(rows)), KEY, numbers))


def bits_at(key, index, dtype):
    """Returns the random bits of a key at flat indices of 64 bits, as JAX defines them."""
    halves = [jnp.asarray(index.astype(np.uint64) >> np.uint64(shift), jnp.uint32) for shift in (32, 0)]
    high, low = map(np.asarray, threefry2x32_p.bind(*jax.random.key_data(key), *halves))
    if np.dtype(dtype).itemsize == 8:
        return high.astype(np.uint64) << np.uint64(32) | low
    return (high ^ low).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_indices_are_numbers_of_64_bits(dtype, x64):
    T, D = 5, 70_001
    rows, t, d = (np.asarray(x, object) for x in (ROWS, range(T), [0, 1, D - 1]))
    last = drawn(lambda key, n: jax.random.bits(key, (n, D), dtype)[:, np.asarray([0, 1, D - 1])], ROWS, TOTAL)
    np.testing.assert_array_equal(last, bits_at(KEY, rows[:, None] * D + d, dtype))
    middle = drawn(lambda key, n: jax.random.bits(key, (T, n, 7), dtype).swapaxes(0, 1), ROWS, TOTAL)
    index = (t[:, None] * TOTAL + rows[:, None, None]) * 7 + np.arange(7).astype(object)
    np.testing.assert_array_equal(middle, bits_at(KEY, index, dtype))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_numbers_are_those_of_the_whole_batch(dtype):
    def keys_by_column(key, n):
        return jax.vmap(lambda key: jax.random.bits(key, (n, 2), dtype), out_axes=1)(jax.random.split(key, 3))

    def keys_by_row(key, n):
        return jax.vmap(lambda key: jax.random.bits(key, (2,), dtype))(jax.random.split(key, n))

    def keys_by_row_and_column(key, n):
        return jax.vmap(lambda key: jax.random.key_data(jax.random.split(key, n)), out_axes=1)(jax.random.split(key, 3))

    for draw in (keys_by_column, keys_by_row, keys_by_row_and_column):
        whole = np.asarray(draw(KEY, 40))
        np.testing.assert_array_equal(drawn(draw, [3, 17, 39, 8], 40), whole[[3, 17, 39, 8]])
        np.testing.assert_array_equal(drawn(draw, [17], 40), whole[[17]])
