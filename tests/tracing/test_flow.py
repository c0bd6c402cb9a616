"""Values flow forward through calls, branches and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from redeqx.tracing import flow, union

X = jnp.ones((3, 3))


def scanned(a, b, c):
    """The carry `b` reaches the output only after an iteration, `c` never."""
    return lax.scan(lambda carry, x: ((carry[1] * x, carry[1], carry[2]), x), (jnp.zeros((3, 3)), b, c), a[0])[0][0]


# For each function of three arrays, which of them each output depends on, as bits.
DEPENDS = {
    "call": (lambda a, b, c: jax.jit(lambda x, y: (x, y + c))(a, b), [1, 6]),
    "barrier": (lambda a, b, c: lax.optimization_barrier((a, b)), [1, 2]),
    "cond": (lambda a, b, c: lax.cond(c[0, 0] > 0, lambda x, y: (x, x), lambda x, y: (y, 2 * x), a, b), [7, 5]),
    "scan": (scanned, [3]),
    "slices": (lambda a, b, c: lax.scan(lambda carry, x: (carry, x + b), c, a), [4, 3]),
    "while": (lambda a, b, c: lax.while_loop(lambda v: v[0].sum() < 0, lambda v: (v[1], b), (a, c)), [7, 6]),
    "remat": (jax.checkpoint(lambda a, b, c: jnp.sin(a) * b), [3]),
    "literal": (lambda a, b, c: (1.0, a), [0, 1]),
}


@pytest.mark.parametrize("name", DEPENDS)
def test_dependencies_of_outputs(name):
    fn, expected = DEPENDS[name]
    closed = jax.make_jaxpr(fn)(X, X, X)
    assert list(map(flow(closed, [1, 2, 4], lambda eqn, ins: None, union), closed.jaxpr.outvars)) == expected


def test_rule_comes_first_and_equations_of_loops_are_visited_at_the_fixed_point():
    """`sin` drops its operand's value; the carry of `mul` has the value of `b` from the second iteration on."""

    def fn(a, b):
        return lax.scan(lambda carry, x: (carry * x + jnp.sin(b), None), a, jnp.ones(2))[0]

    visited = []
    closed = jax.make_jaxpr(fn)(X, X)
    read = flow(
        closed,
        [1, 2],
        lambda eqn, ins: [4] if eqn.primitive.name == "sin" else None,
        union,
        visit=lambda eqn, ins, outs: visited.append((eqn.primitive.name, list(ins))),
    )
    assert list(map(read, closed.jaxpr.outvars)) == [5]
    assert [ins for name, ins in visited if name == "mul"] == [[5, 0]]
