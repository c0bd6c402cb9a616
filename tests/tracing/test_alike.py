"""Which equations count as the same computation."""

import functools

import jax
import jax.numpy as jnp
import pytest

from redeqx.tracing import alike, normal

X = jnp.ones((3, 4))


def last_equation(fn, *args):
    """The last equation of a function's trace, with jits inlined."""
    return normal(jax.make_jaxpr(fn)(*(args or (X,)))).jaxpr.eqns[-1]


def with_vjp(scale):
    @jax.custom_vjp
    def fn(x):
        return x * 2.0

    fn.defvjp(lambda x: (x * 2.0, None), lambda _, g: (scale * g,))
    return fn


def with_jvp(slope):
    @jax.custom_jvp
    def fn(x):
        return x * 2.0

    fn.defjvp(lambda primals, tangents: (primals[0] * 2.0, slope * tangents[0]))
    return fn


def with_recursive_jvp(slope):
    @jax.custom_jvp
    def fn(x):
        return jnp.exp(x)

    fn.defjvp(lambda primals, tangents: (fn(*primals), slope * fn(*primals) * tangents[0]))
    return fn


def with_scan(n):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) * n, None), x, None, length=3)[0]


def with_remat_policy(*names):
    return jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names(*names))


@pytest.mark.parametrize(
    ("make", "same", "other"),
    [
        (lambda axis: functools.partial(jnp.sum, axis=axis), 0, 1),
        (with_vjp, 1.0, 2.0),
        (with_jvp, 1.0, 2.0),
        (with_recursive_jvp, 1.0, 2.0),
        (with_scan, 2.0, 3.0),
        (with_remat_policy, "a", "b"),
        (lambda n: lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jnp.cos(x) * n, x), 2.0, 3.0),
    ],
    ids=["parameters", "vjp", "jvp", "recursive jvp", "scan", "policy", "branches"],
)
def test_equations_with_equal_computations_are_alike(make, same, other):
    assert alike(last_equation(make(same)), last_equation(make(same)))
    assert not alike(last_equation(make(same)), last_equation(make(other)))


def test_different_shapes_dtypes_or_primitives_are_not_alike():
    assert not alike(last_equation(jnp.sin), last_equation(jnp.sin, X[0]))
    assert not alike(last_equation(jnp.sin), last_equation(jnp.sin, X.astype(jnp.bfloat16)))
    assert not alike(last_equation(jnp.sin), last_equation(jnp.cos))


def test_equations_with_effects_are_never_alike():
    def fn(x):
        jax.debug.print("{}", x)

    assert not alike(last_equation(fn), last_equation(fn))
