"""Traced values that a model keeps outside of its leaves are found, wherever they are."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from redeqx.tracing import leak


class Layer(eqx.Module):
    weight: Any
    act: Callable
    shift: Any = eqx.field(static=True, default=None)


def keeps(value, act=None):
    def fn(x):
        return x + value if act is None else act(x)

    return fn


def has_default(value):
    return lambda x, by=value: x + by


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Layer(jnp.ones(2), keeps(jnp.ones(2))), "act.value"),
        (lambda: [Layer(jnp.ones(2), jax.nn.relu), {"a": Layer(None, keeps((0.0, jnp.ones(2))))}], "1.a.act.value.1"),
        (lambda: Layer(jnp.ones(2), keeps(1.0, act=keeps(jnp.ones(2)))), "act.act.value"),
        (lambda: Layer(jnp.ones(2), has_default(jnp.ones(2))), "act.0"),
        (lambda: Layer(jnp.ones(2), functools.partial(jnp.add, jnp.ones(2))), "act.0"),
        (lambda: Layer(jnp.ones(2), functools.partial(jnp.add, y=jnp.ones(2))), "act.y"),
        (lambda: Layer(jnp.ones(2), jax.jit(keeps(jnp.ones(2)))), "act.__wrapped__.value"),
        (lambda: Layer(jnp.ones(2), jax.nn.relu, jnp.ones(2)), "shift"),
    ],
)
def test_kept_value_is_found(make, path):
    assert leak(eqx.filter_eval_shape(make)) == path
    assert leak(make()) is None  # nothing is traced


def test_model_without_one_has_no_leak():
    def make():
        def later(x):
            return later(x) + undefined  # of itself, and of a variable that is never assigned

        if len(jax.devices()) < 0:
            undefined = 1
        return [eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), later, keeps(1.0), jax.jit(keeps(2.0)), print, int, None]

    assert leak(eqx.filter_eval_shape(make)) is None
