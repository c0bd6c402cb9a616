"""Which products a loop computes again in its backward pass, counted in the trace."""

import jax
import jax.numpy as jnp
import pytest

from redeqx.tracing import matmul_flops, transformed
from redeqx.transforms import FuseAttention, RematLoops

LAYERS, N, D = 3, 16, 8
SCORES = 2 * N * N * D  # FLOPs of queries times keys in one layer
FORWARD = LAYERS * (2 * N * D * D + 2 * SCORES)  # the projection, and both products of attention


def loss(weights, x):
    def layer(x, weight):
        y = x @ weight
        return x + jax.nn.softmax(y @ y.T) @ y, None

    return jnp.square(jax.lax.scan(layer, x, weights)[0]).sum()


@pytest.mark.parametrize(
    ("level", "again", "scores"),
    [
        ("none", 0, 0),
        ("matmuls", 0, 0),
        ("full", FORWARD - LAYERS * SCORES, 0),
        ("fused", 0, 1),
        ("fused, matmuls", 0, 1),
    ],
)
def test_flops_with_and_without_recomputation(level, again, scores):
    """A step computes three products for each one of the loss. `"full"` repeats the forward pass except for the last
    product of each layer, which no gradient needs; the gradient of fused attention its scores; `"matmuls"` no product."""
    rules = {
        "none": [],
        "fused": [FuseAttention()],
        "fused, matmuls": [RematLoops("matmuls"), FuseAttention()],
    }.get(level, [RematLoops(level)])
    shapes = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.float32), jax.ShapeDtypeStruct((N, D), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(transformed(loss, rules)))(*shapes).jaxpr
    assert matmul_flops(jaxpr) == {"float32": 3 * FORWARD + again + scores * LAYERS * SCORES}
    assert matmul_flops(jaxpr, with_recomputation=False) == {"float32": 3 * FORWARD}


def test_jax_still_saves_no_complex_products():
    """Why loops compute them again (jax 0.10.2, 2026-11-27). Once this fails, save them as others."""
    fn = jax.checkpoint(lambda x: jnp.abs(jnp.sin(x @ x)).sum(), policy=jax.checkpoint_policies.dots_saveable)
    with pytest.raises(TypeError, match="reduce_precision does not accept dtype complex64"):
        jax.grad(fn)(jnp.ones((2, 2), jnp.complex64))
