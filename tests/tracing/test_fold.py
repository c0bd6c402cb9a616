"""Numbers are summed over equations, with the lengths of loops; of branches, the largest counts."""

import jax
import jax.numpy as jnp
from jax import lax

from redeqx.tracing import fold, matmul_flops, rarely


def test_fold_multiplies_loops_and_takes_the_largest_branch():
    def loop(x):
        return lax.scan(lambda x, _: (lax.cond(x[0, 0] > 0, lambda x: x + x + x, jnp.sin, x), None), x, length=5)[0]

    def count(eqn):
        return {eqn.primitive.name: 1} if eqn.primitive.name in ("add", "sin", "neg") else None

    closed = jax.make_jaxpr(lambda x: -jax.jit(loop)(jax.jit(loop)(x)))(jnp.ones((3, 3)))
    assert fold(closed.jaxpr, count) == {"add": 2 * 5 * 2, "neg": 1}


def test_of_a_choice_that_is_rarely_taken_the_cheaper_branch_counts_also_in_its_gradient():
    x = jnp.ones((4, 4))

    @jax.checkpoint
    def further(is_needed, x):
        with rarely():
            return jax.lax.cond(is_needed, lambda x: x @ x, lambda x: x, x)

    def loss(x, is_needed):
        return (further(is_needed, x @ x) * x).sum()

    once = 2 * 4**3
    assert matmul_flops(jax.make_jaxpr(loss)(x, True).jaxpr) == {"float32": once}
    assert matmul_flops(jax.make_jaxpr(jax.grad(loss))(x, True).jaxpr) == {"float32": 3 * once}


def test_flops_of_ragged_products_and_their_gradients():
    """Each row is multiplied with one group's matrix, whatever the number of groups."""

    def loss(x, weights):
        return lax.ragged_dot(x, weights, jnp.array([3, 3, 4])).sum()

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((10, 4)), jnp.ones((3, 4, 7)))
    assert matmul_flops(closed.jaxpr) == {"float32": 3 * 2 * 10 * 4 * 7}
