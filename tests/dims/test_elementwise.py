"""All elementwise primitives of the JAX that is installed are known to be: a new one would make a loss 'unknown'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives

from redeqx.dims import row_use

ROWS = np.linspace(0.1, 0.9, 12).reshape(4, 3)
INPUTS = [(dtype, n) for dtype in (np.float32, np.int32, np.complex64) for n in (1, 2, 3)]


def call(primitive, dtype, n, x=ROWS):
    """Returns the output of a primitive of n equal operands."""
    operands = [jnp.asarray(x * 10 if dtype == np.int32 else x, dtype)] * n
    try:
        return primitive.bind(*operands)
    except TypeError:
        return primitive.bind(*operands, accuracy=None)


def is_elementwise(primitive, dtype, n):
    """Whether the output has the shape of the operands, and a change of one entry changes it there alone."""
    try:
        changed = ROWS.copy()
        changed[2, 1] = 0.95
        a, b = np.asarray(call(primitive, dtype, n)), np.asarray(call(primitive, dtype, n, changed))
    except Exception:  # of another number of operands, of other dtypes, or with parameters
        return False
    return a.shape == ROWS.shape and np.argwhere(a != b).tolist() == [[2, 1]]


@pytest.mark.sweep
def test_an_elementwise_primitive_keeps_rows_apart():
    found, unknown = set(), {}
    for name in dir(primitives):
        primitive = getattr(primitives, name)
        for dtype, n in INPUTS if name.endswith("_p") else ():
            if not is_elementwise(primitive, dtype, n):
                continue

            def fn(weights, state, batch, key, operands=(primitive, dtype, n)):
                out = jnp.real(call(*operands, batch * weights))
                return out.astype(jnp.float32).sum(), jnp.float32(len(batch))

            use = row_use(fn, jnp.float32(1), (), jnp.asarray(ROWS, jnp.float32), jax.random.key(0))
            found.add(name)
            if use.kind != "separable":
                unknown[name] = use.text
    assert not unknown and len(found) >= 50
