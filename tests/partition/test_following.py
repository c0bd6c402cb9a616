"""Dataflow analysis of a loss: it supports every equation of our models, and takes bounded time for nested loops."""

import cProfile
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from redeqx.dims import Related
from redeqx.partition import order
from redeqx.tracing import Trace

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.families._case import collect

TRAININGS = {training.name: training for training in collect("TRAININGS")}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.sweep] * (x == "unet")) for x in TRAININGS])
@pytest.mark.sweep
def test_no_equation_of_a_model_family_is_unsupported(name):
    training = TRAININGS[name]
    model = eqx.filter_eval_shape(training.make, jax.random.key(0))
    batch = jax.eval_shape(lambda: jax.tree.map(lambda *rows: jnp.stack(rows), *training.examples))

    def loss(model, batch, key):
        return jax.tree.leaves(training.loss_fn(model, batch, key))[0]

    trace = Trace.of(loss, model, batch, jax.eval_shape(lambda: jax.random.key(0)))
    assert order(trace, 2).errors == {}


def test_unsupported_equations_are_counted_and_replicated(monkeypatch):
    def unknown(self, operand):
        raise KeyError("a parameter of another version of JAX")

    monkeypatch.setattr(Related, "places", unknown)
    w = jnp.ones((8, 8))
    found = order(Trace.of(lambda ws, x: jnp.sum(x @ ws[0] @ ws[1]), [w, w], jnp.ones((2, 8))), 4)
    assert [*found.errors.values()] == ["dot_general: KeyError"] * 2
    assert {name: split.dim for name, split in found.splits.items()} == {"0": None, "1": None}


def fresh_carries(depth, weights, x):
    """Each loop starts with new zeros, which its body may split. So each loop is analysed with two splits of its carry."""

    def level(n):
        if n == 0:
            return jnp.tanh(x @ weights[0])
        return jax.lax.scan(lambda c, _: (c * 0.5 + level(n - 1), None), jnp.zeros((8, 64)), length=2)[0]

    return jnp.sum(level(depth) @ weights[1])


def two_carries(depth, weights, x):
    """One carry arrives replicated, the other one split."""

    def level(n, x, s):
        if n == 0:
            h = jnp.tanh(x @ weights[0])
            return x + h @ weights[1], s + h

        def body(carry, _):
            x, inner = level(n - 1, carry[0], jnp.zeros((8, 64)))
            return (x, carry[1] + inner), None

        return jax.lax.scan(body, (x, s), length=2)[0]

    x, s = level(depth, x, jnp.zeros((8, 64)))
    return jnp.sum(x) + jnp.sum(s @ weights[1])


@pytest.mark.parametrize("loss", [fresh_carries, two_carries])
def test_nested_loops_are_not_exponential_in_their_depth(loss):
    weights, counts, splits = [jnp.ones((16, 64)), jnp.ones((64, 16))], [], []
    for depth in range(1, 6):
        trace = Trace.of(lambda ws, x, depth=depth: loss(depth, ws, x), weights, jnp.ones((8, 16)))
        profile = cProfile.Profile()
        found = profile.runcall(order, trace, 4)
        counts.append(sum(entry.callcount for entry in profile.getstats()))
        splits.append({name: split.dim for name, split in found.splits.items()})
    assert splits == [{"0": 1, "1": 0}] * 5
    assert counts[4] < 2 * counts[3]  # without the memo, each level would multiply the count by 4


def test_a_convolution_keeps_the_split_of_a_dim_that_it_does_not_mix():
    def loss(model, x):
        h = jnp.tanh(jnp.einsum("bcw,wh->bch", x, model["lift"]))
        return jnp.sum(jax.lax.conv_general_dilated(h, model["mix"], (1,), "SAME") @ model["down"])

    model = {"lift": jnp.ones((8, 16)), "mix": jnp.ones((6, 6, 1)), "down": jnp.ones((16, 8))}
    found = order(Trace.of(loss, model, jnp.ones((2, 6, 8))), 4)
    assert found.errors == {}
    assert {name: split.dim for name, split in found.splits.items()} == {"lift": 1, "mix": None, "down": 0}
