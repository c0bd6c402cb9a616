"""Which loops are unrolled, and that their values and gradients are unchanged."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redeqx
from redeqx.machine import GPUS
from redeqx.tracing import equations, transformed
from redeqx.transforms import RematLoops, UnrollLoops

CHIP = GPUS["h100-80gb"].chip
ROWS, D, LAYERS = 4096, 64, 4
rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=(32, D)), jnp.float32)
WEIGHTS = jnp.asarray(rng.normal(size=(LAYERS, D, D)) / 8, jnp.float32)


def scanned(x, weights):
    return jnp.sum(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0] ** 2)


def with_remat(x, weights):
    return jnp.sum(jax.lax.scan(lambda x, w: (x + jax.checkpoint(jnp.tanh)(x @ w), None), x, weights)[0] ** 2)


def nested(x, weights):
    def twice(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)

    return jnp.sum(jax.lax.scan(lambda x, w: (twice(x, w)[0], None), x, weights)[0])


def unroll_factors(fn, rule=None, *, rows=32, d=D, layers=LAYERS, rules=()):
    """The `unroll` parameter of each scan in the traced function."""
    args = jax.ShapeDtypeStruct((rows, d), jnp.float32), jax.ShapeDtypeStruct((layers, d, d), jnp.float32)
    traced = jax.make_jaxpr(transformed(fn, [rule or UnrollLoops(CHIP), *rules]))(*args)
    return [eqn.params["unroll"] for eqn in equations(traced) if eqn.primitive.name == "scan"]


@pytest.mark.parametrize("rules", [(), (RematLoops("matmuls"),)], ids=["alone", "with remat"])
def test_unrolled_loop_has_the_same_values_and_gradients(rules):
    assert unroll_factors(scanned, rules=rules) == [LAYERS]
    fn = transformed(scanned, [UnrollLoops(CHIP), *rules])
    (value, grads), (wanted, wanted_grads) = (jax.jit(jax.value_and_grad(f, (0, 1)))(X, WEIGHTS) for f in (fn, scanned))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for a, b in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert "while" not in str(jax.jit(jax.grad(fn)).lower(X, WEIGHTS).as_text())


def test_which_loops_are_unrolled():
    assert unroll_factors(scanned, d=4096, rows=4096) == [1], "its products take longer than its copies"
    assert unroll_factors(scanned, layers=2000) == [1], "too much to compile"
    assert unroll_factors(scanned, layers=1) == [1]
    assert unroll_factors(with_remat) == [1]
    assert unroll_factors(nested) == [1, 1]


def test_loops_that_do_not_fit_in_memory_are_not_unrolled():
    rows = int(CHIP.memory / 8 / (2 * LAYERS * D * 4))
    assert unroll_factors(scanned, rows=rows - 8) == [LAYERS]
    assert unroll_factors(scanned, rows=rows + 8) == [1]
    assert unroll_factors(scanned, UnrollLoops(CHIP, n_devices=2), rows=rows + 8) == [LAYERS]


def test_attention_scores_are_not_counted_as_saved_values():
    """This rule runs before attention is fused, so it still sees the scores."""

    def attention(x, weights):
        def block(x, w):
            scores = jnp.einsum("btd,bsd->bts", x @ w, x)
            return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x), None

        return jnp.sum(jax.lax.scan(block, x[None].repeat(2, 0), weights)[0])

    # The scores of all layers take 8 MiB, all other saved values 5 MiB.
    small = dataclasses.replace(CHIP, memory=8 * 8 * 2**20)
    assert unroll_factors(attention, UnrollLoops(small), rows=512) == [LAYERS]


def test_only_gpus_unroll_and_only_where_it_helps():
    deployer = redeqx.Deployer(verbose=False)

    def mesh(kind=CHIP.kind, platform="gpu", fsdp=1):
        devices = np.array([SimpleNamespace(platform=platform, device_kind=kind)])
        return SimpleNamespace(devices=devices, shape={"fsdp": fsdp, "sequence": 1}, size=4)

    assert redeqx.Compute(remat="matmuls").unroll_on(mesh()) == UnrollLoops(CHIP, 4)
    assert redeqx.Compute(unroll=False).unroll_on(mesh()) is None
    assert redeqx.Compute(remat="full").unroll_on(mesh()) is None
    assert redeqx.Compute().unroll_on(mesh(fsdp=2)) is None
    assert redeqx.Compute().unroll_on(mesh(kind="an unknown GPU")) is None
    assert redeqx.Compute().unroll_on(mesh(platform="tpu")) is None
    assert redeqx.Compute().unroll_on(deployer.mesh) is None


def test_remat_inside_a_jit_counts_as_remat_of_the_loop():
    def loop(body):
        step = lambda carry, _: (body(carry), None)  # noqa: E731
        return jax.make_jaxpr(lambda x: jax.lax.scan(step, x, length=3))(jnp.ones(2)).jaxpr.eqns[-1]

    bodies = [jnp.sin, jax.jit(jnp.sin), jax.checkpoint(jnp.sin), jax.jit(jax.checkpoint(jnp.sin))]
    rule = RematLoops().of(None)
    assert [rule.claims(loop(body)) for body in bodies] == [True, True, False, False]
