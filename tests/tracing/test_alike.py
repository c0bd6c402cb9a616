"""Which equations compute the same."""

import functools

import jax
import jax.numpy as jnp
import pytest

from redeqx.tracing import alike, inlined

X = jnp.ones((3, 4))


def last(fn, *args):
    """The last equation of a function's trace, its jits inlined."""
    return inlined(jax.make_jaxpr(fn)(*(args or (X,)))).jaxpr.eqns[-1]


def scaled(scale):
    @jax.custom_vjp
    def fn(x):
        return x * 2.0

    fn.defvjp(lambda x: (x * 2.0, None), lambda _, g: (scale * g,))
    return fn


def sloped(slope):
    @jax.custom_jvp
    def fn(x):
        return x * 2.0

    fn.defjvp(lambda primals, tangents: (primals[0] * 2.0, slope * tangents[0]))
    return fn


def calling_itself(slope):
    @jax.custom_jvp
    def fn(x):
        return jnp.exp(x)

    fn.defjvp(lambda primals, tangents: (fn(*primals), slope * fn(*primals) * tangents[0]))
    return fn


def looping(n):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) * n, None), x, None, length=3)[0]


def keeping(*names):
    return jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names(*names))


@pytest.mark.parametrize(
    ("make", "same", "other"),
    [
        (lambda axis: functools.partial(jnp.sum, axis=axis), 0, 1),
        (scaled, 1.0, 2.0),
        (sloped, 1.0, 2.0),
        (calling_itself, 1.0, 2.0),
        (looping, 2.0, 3.0),
        (keeping, "a", "b"),
        (lambda n: lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jnp.cos(x) * n, x), 2.0, 3.0),
    ],
    ids=["parameters", "vjp", "jvp", "own jvp", "scan", "policy", "branches"],
)
def test_two_traces_are_compared_by_what_they_compute(make, same, other):
    assert alike(last(make(same)), last(make(same)))
    assert not alike(last(make(same)), last(make(other)))


def test_types_count():
    assert not alike(last(jnp.sin), last(jnp.sin, X[0]))
    assert not alike(last(jnp.sin), last(jnp.sin, X.astype(jnp.bfloat16)))
    assert not alike(last(jnp.sin), last(jnp.cos))


def test_effects_are_never_alike():
    def fn(x):
        jax.debug.print("{}", x)

    assert not alike(last(fn), last(fn))
