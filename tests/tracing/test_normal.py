"""The normal form: no plain jits, and each equation an object of its own at each place."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.tracing import Rule, equations, interpret, normal, variables


@dataclass(frozen=True)
class AsCosine(Rule):
    """Computes one equation, a sine, as a cosine."""

    place: Any

    def claims(self, eqn):
        return eqn is self.place

    def __call__(self, eqn, ins, site):
        return [jnp.cos(ins[0])]


AROUND = {
    "jit": jax.jit,
    "scan in a jit": lambda fn: jax.jit(lambda x: jax.lax.scan(lambda x, _: (fn(x), None), x, length=1)[0]),
    "remat in a jit": lambda fn: jax.jit(jax.checkpoint(fn)),
    "jit in a jit": lambda fn: jax.jit(lambda x: jax.jit(fn)(x)),
}


@pytest.mark.parametrize("name", AROUND)
def test_equation_is_one_place_of_the_function(name):
    """JAX traces a jitted function once, so its calls share their equations."""

    def calls(first, second, x):
        return second(2 * first(x))

    sine, x = AROUND[name](jnp.sin), 0.3
    traced = jax.make_jaxpr(partial(calls, sine, sine))(x)
    closed = normal(traced)
    assert normal(closed) is closed
    sines = [eqn for eqn in equations(closed) if eqn.primitive.name == "sin"]
    assert len(sines) == len(set(map(id, sines))) == 2
    for place, expected in zip(sines, (calls(jnp.cos, jnp.sin, x), calls(jnp.sin, jnp.cos, x)), strict=True):
        np.testing.assert_allclose(interpret(closed, [x], [AsCosine(place)])[0], expected, rtol=1e-6)
    np.testing.assert_allclose(interpret(closed, [x], [])[0], calls(jnp.sin, jnp.sin, x), rtol=1e-6)


def test_names_of_scopes_and_constants_stay():
    table = np.linspace(0.0, 1.0, 3)

    @jax.checkpoint
    @jax.jit
    def scaled(x):
        with jax.named_scope("scale"):
            return x * jnp.asarray(table, x.dtype)

    def fn(x):
        with jax.named_scope("block"):
            return scaled(scaled(x))

    closed = normal(jax.make_jaxpr(fn)(jnp.ones(3)))
    assert not any(eqn.primitive.name in ("jit", "pjit") for eqn in equations(closed))
    assert len(set(closed.jaxpr.constvars)) == len(closed.jaxpr.constvars) == len(closed.consts)
    lowered = jax.jit(lambda x: interpret(closed, [x], [])).lower(jnp.ones(3))
    assert "block" in lowered.as_text(debug_info=True) and "scale" in lowered.as_text(debug_info=True)
    np.testing.assert_allclose(interpret(closed, [jnp.ones(3)], [])[0], table**2, rtol=1e-6)


def test_variables_are_listed_once_without_literals():
    closed = jax.make_jaxpr(lambda x, y: jnp.clip(x, 1.0, y) + x * x)(1.0, 2.0)
    for eqn in equations(normal(closed)):
        assert not any(hasattr(var, "val") for var in variables(eqn.invars))
        assert len(set(variables(eqn.invars))) == len(variables(eqn.invars))
    square = next(eqn for eqn in equations(normal(closed)) if eqn.primitive.name in ("mul", "square", "integer_pow"))
    assert len(variables(square.invars)) == 1
