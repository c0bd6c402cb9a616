"""Gradients of weights whose narrower factor is transposed: their values, and the products that XLA makes for CPUs."""

import re
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.tracing import transformed
from redeqx.transforms import WeightProducts

IN, OUT = 8, 96
# Multiples of a power of two: gradients of sums are exact in any order, which the instructions of the CPU decide.
x, target = (jnp.round(4 * jax.random.normal(jax.random.key(i), (2, 32, n))) / 4 for i, n in enumerate((IN, OUT)))
layer = jax.tree.map(lambda weight: jnp.round(16 * weight) / 16, eqx.nn.Linear(IN, OUT, key=jax.random.key(2)))


def of_product(product):
    def loss(weight, x):
        return jnp.mean((product(weight, x) - target) ** 2)

    return loss


CASES = {
    "[out, in], the output wider": (of_product(lambda w, x: x @ w.T), layer.weight, x, (IN, OUT)),
    "[in, out], the output wider": (of_product(lambda w, x: x @ w), layer.weight.T, x, (IN, OUT)),
    "a vmapped layer": (of_product(lambda w, x: jax.vmap(jax.vmap(lambda row: w @ row))(x)), layer.weight, x, (IN, OUT)),
    "[in, out], the input wider": (lambda w, x: jnp.sum((x @ w) ** 2), layer.weight, target, (IN, OUT)),
    "[out, in], the input wider": (lambda w, x: jnp.sum((x @ w.T) ** 2), layer.weight.T, target, (IN, OUT)),
}


def gradients(loss):
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def products(compiled):
    """Returns the shapes of the outputs of a program's products."""
    found = re.findall(r"f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    return [tuple(map(int, shape.split(","))) for shape in found]


@pytest.mark.parametrize(("loss", "weight", "x", "shape"), CASES.values(), ids=CASES)
def test_the_narrow_factor_is_transposed(loss, weight, x, shape):
    changed = gradients(transformed(loss, [WeightProducts(1, narrow=True, min_bytes=0)])).lower(weight, x).compile()
    expected = gradients(loss)(weight, x)
    for got, want in zip(jax.tree.leaves(changed(weight, x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert shape in products(changed) and shape[::-1] not in products(changed)


def test_xla_still_transposes_the_wide_factor():
    loss, weight, x, shape = CASES["[out, in], the output wider"]
    assert shape[::-1] in products(gradients(loss).lower(weight, x).compile())  # else the rule is not needed any more


def test_products_that_gain_nothing_stay_as_they_are():
    def square(weight, x):
        return jnp.sum((x @ weight.T) ** 2)

    def few_rows(weight, x):
        return jnp.sum((weight @ x[0, 0]) ** 2)

    small = WeightProducts(1, narrow=True)
    rules = [(square, jnp.eye(IN), replace(small, min_bytes=0)), (few_rows, layer.weight, replace(small, min_bytes=0))]
    for loss, weight, rule in [*rules, (CASES["[out, in], the output wider"][0], layer.weight, small)]:
        plain, changed = (str(jax.make_jaxpr(fn)(weight, x)) for fn in (loss, transformed(loss, [rule])))
        assert changed == plain
