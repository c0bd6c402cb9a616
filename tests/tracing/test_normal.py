"""The normal form: no plain jits, and each equation an object of its own at each place."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.tracing import Rule, Trace, all_inside, equations, interpret, line_of, normal, variables


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


def test_reshape_of_dims_in_another_order_is_a_transpose_first():
    x = np.arange(24.0).reshape(2, 3, 4)
    closed = normal(jax.make_jaxpr(lambda x: jnp.ravel(x, order="F"))(x))
    assert [eqn.params["dimensions"] for eqn in equations(closed) if eqn.primitive.name == "reshape"] == [None]
    np.testing.assert_array_equal(interpret(closed, [x], [])[0], x.ravel(order="F"))


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


@pytest.mark.parametrize("around", [lambda fn: fn, jax.checkpoint, jax.custom_jvp], ids=["plain", "remat", "derivative"])
def test_no_plain_jit_is_left(around):
    def fn(x):
        return jnp.where(x > 0, x, 1.0)

    wrapped = around(fn)
    if isinstance(wrapped, jax.custom_jvp):
        wrapped.defjvps(lambda dx, out, x: dx)
    trace = Trace.of(lambda model, x: wrapped(model * x).sum(), jnp.ones(3), jnp.ones(3))
    todo, names = [trace.closed], []
    while todo:
        for eqn in todo.pop().jaxpr.eqns:
            names.append(eqn.primitive.name)
            todo += all_inside(eqn)
    assert "select_n" in names and "jit" not in names
    np.testing.assert_allclose(interpret(trace.closed, [jnp.ones(3), -jnp.arange(3.0)], [])[0], 3.0)


def test_equations_of_a_library_have_the_line_of_their_own_call():
    """JAX keeps the trace of `jnp.where`, with the lines of its first call."""
    jnp.where(jnp.ones(3) > 0, jnp.ones(3), 2.0)
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    trace = Trace.of(lambda model, x: jnp.where(x > 0, model, 2.0).sum(), shape, shape)
    (select,) = (eqn for eqn in equations(trace.closed) if eqn.primitive.name == "select_n")
    (add,) = (eqn for eqn in equations(trace.closed) if eqn.primitive.name == "reduce_sum")
    assert line_of(select) == line_of(add) != ""


def test_equations_of_a_users_jitted_function_keep_their_lines():
    def fn(x):
        return jnp.sin(x)

    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    for jitted in (jax.jit(fn), eqx.filter_jit(fn)):
        (sine,) = equations(Trace.of(lambda model, jitted=jitted: jitted(model), shape).closed)
        assert line_of(sine).endswith(f":{fn.__code__.co_firstlineno + 1}")
