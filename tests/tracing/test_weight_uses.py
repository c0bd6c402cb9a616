"""Which equations of a function use weights, and the memory that this takes."""

import tracemalloc

import jax
import jax.numpy as jnp

from redeqx.tracing import WeightUses, equations


def test_equations_without_weights_take_no_bits():
    """Each sum once had a bit in all sets after it: bytes that grow with the square of the number of equations."""

    def fn(w, x):
        for _ in range(10_000):
            x = x + 1.0
        return x @ w

    closed = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
    tracemalloc.start()
    uses = WeightUses(closed, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert uses.is_last(closed.jaxpr.eqns[-1]) and peak < 600 * 10_000


def test_a_product_of_another_operand_in_each_call_has_no_side():
    product = jax.jit(jnp.matmul)

    def fn(w, x):
        return product(w, x) + product(x, w)

    closed = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
    products = {eqn for eqn in equations(closed) if eqn.primitive.name == "dot_general"}
    assert len(products) == 1 and WeightUses(closed, 1).side(*products) is None
