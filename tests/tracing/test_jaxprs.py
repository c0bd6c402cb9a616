"""Which leaves a traced function reads, whatever its equations are wrapped in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.machine._mesh import make_mesh
from redeqx.tracing._jaxprs import Trace, keep_everything, matmul_flops, remat_loops, rewrite
from redeqx.transforms._gather import Home, gather_at_use
from redeqx.transforms._grouped_convolution import mend_grouped_convs
from redeqx.transforms._reshard import exchange_parts

X = jnp.ones(4)


def add_used(used, unused):
    """Reads the first alone, though it is given both."""
    del unused
    return used.sum()


def scanned(used, unused):
    def body(total, layer):
        return total + layer[0].sum(), layer[1] * 2

    return jax.lax.scan(body, 0.0, (used, unused))[0]


def scanned_constants(used, unused):
    return jax.lax.scan(lambda x, _: ((x + used) * 0.5, unused), X, length=3)[0].sum()


def scanned_carry(used, unused):
    """`used` reaches what is returned only in the second and third iteration."""
    return jax.lax.scan(lambda c, _: ((c[1], c[2], c[2], c[3] * 2), None), (X, X, used, unused), length=3)[0][0].sum()


@jax.custom_jvp
def with_jvp(used, unused):
    del unused
    return used.sum()


with_jvp.defjvps(lambda d, *_: d.sum(), lambda d, *_: d.sum())


@jax.custom_vjp
def with_vjp(used, unused):
    del unused
    return used.sum()


with_vjp.defvjp(lambda used, unused: (used.sum(), None), lambda _, g: (g * X, g * X))

FOLLOWED = {
    "as it is": add_used,
    "jit": jax.jit(add_used),
    "jit in jit": jax.jit(lambda a, b: jax.jit(add_used)(a, b)),
    "remat": jax.checkpoint(lambda a, b: add_used(jnp.sin(a), b)),
    "vmap": lambda a, b: jax.vmap(add_used)(a, b).sum(),
    "scan": scanned,
    "scan's constants": scanned_constants,
    "scan's carry": scanned_carry,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "a result thrown away": lambda a, b: jax.jit(lambda a, b: (a.sum(), jnp.exp(b)))(a, b)[0],
    "stop_gradient": lambda a, b: a.sum() + jax.lax.stop_gradient(b).sum(),
    "a print": lambda a, b: (jax.debug.print("{}", b), a.sum())[1],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_leaf_that_is_only_handed_on_is_not_read(name):
    fn = FOLLOWED[name]
    trace = Trace.of(lambda model, scale: fn(*model) * scale, (X, X), 2.0)
    assert trace.reads() == {"0": True, "1": False}


NOT_FOLLOWED = {
    "cond": lambda a, b: jax.lax.cond(True, lambda a, b: a.sum(), lambda a, b: 0.0, a, b),
    "while": lambda a, b: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2, c[2] * 2), (0, a, b))[
        1
    ].sum(),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_is_not_followed_counts_as_reading(name):
    fn = NOT_FOLLOWED[name]
    assert Trace.of(lambda model: fn(*model), (X, X)).reads() == {"0": True, "1": True}


def test_shapes_are_enough_and_every_output_counts():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)

    def fn(model, batch):
        return {"a": model["a"], "b": jnp.dot(model["b"], batch["x"])}

    trace = Trace.of(fn, {"a": shape, "b": shape, "c": shape, "name": "not an array"}, {"x": shape})
    assert trace.reads() == {"a": True, "b": True, "c": False}
    assert trace.leaves == (shape, shape, shape)


# --- rewritten -----------------------------------------------------------------------------------------------------------


def deep(weights, x):
    """Sines in a scan in a jit, in a branch, in a while loop, and in a remat."""

    def layer(x, w):
        return jnp.sin(x @ w), None

    x = jax.jit(lambda x: jax.lax.scan(layer, x, weights)[0])(x)
    x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    x = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
    return {"out": jax.checkpoint(jnp.sin)(x)}


def test_equations_are_changed_wherever_they_are():
    weights, x = jnp.linspace(0.1, 0.9, 3 * 16).reshape(3, 4, 4), jnp.ones((2, 4))

    def doubled(eqn):
        return (lambda x: [2 * x]) if eqn.primitive.name == "sin" else None

    def by_hand(weights, x):
        for w in weights:
            x = 2 * (x @ w)
        return 2 * 2 * 2 * (2 * x)  # the branch, two rounds of the loop, the remat

    rewritten = rewrite(deep, doubled)(weights, x)
    assert jnp.allclose(rewritten["out"], by_hand(weights, x))
    assert jnp.array_equal(rewrite(deep, lambda eqn: None)(weights, x)["out"], deep(weights, x)["out"])


def scanned_loss(weights, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])


def rematted_loss(weights, x):
    return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, weights)[0])


def test_loops_recompute_and_remats_keep_with_the_same_gradients(x64):
    weights, x = jnp.linspace(-1, 1, 3 * 64).reshape(3, 8, 8), jnp.linspace(0, 1, 16).reshape(2, 8)
    expected = jax.grad(scanned_loss)(weights, x)
    again, kept = rewrite(scanned_loss, remat_loops), rewrite(rematted_loss, keep_everything)
    for fn in (again, kept):
        assert jnp.allclose(jax.grad(fn)(weights, x), expected, rtol=1e-6)
    forward = 3 * 2 * 2 * 8 * 8
    flops = {fn: matmul_flops(jax.make_jaxpr(jax.grad(fn))(weights, x).jaxpr).total() for fn in (scanned_loss, again, kept)}
    assert flops == {scanned_loss: 3 * forward, again: 4 * forward, kept: 3 * forward}
    # What recomputes already is left as it is.
    assert str(jax.make_jaxpr(rewrite(rematted_loss, remat_loops))(weights, x)) == str(
        jax.make_jaxpr(rematted_loss)(weights, x)
    )


def constants(weights, x):
    """Outputs that are literals of the jaxpr: of the function's own, of a jit, a remat, a branch and a loop's carry."""
    w, bias = weights
    y = jnp.sin(x @ w + bias).reshape(len(x), 2, -1).sum(1)  # equal parts of what the model axis splits
    made = (y.sum(), True, 2.5, np.float16(3), np.int8(4), jnp.zeros((), jnp.bfloat16), 7)
    kept = {"jit": jax.jit(lambda y: (y, True, 1.0))(y), "remat": jax.checkpoint(lambda y: (jnp.sin(y), False, 1))(y)}
    kept["cond"] = jax.lax.cond(y.sum() > 0, lambda y: (y, True, 1.0), lambda y: (2 * y, True, 1.0), y)
    begin = (x @ w, jnp.zeros((), jnp.bool_), 1.0, jnp.float16(2))

    def body(carry, _):
        return (jnp.sin(carry[0][:, :8] @ w), True, 2.0, jnp.float16(1)), None

    kept["scan"] = jax.lax.scan(body, begin, length=2)[0]
    return made, kept


def doubled_twice(eqn):
    return (lambda x: [jnp.sin(x)]) if eqn.primitive.name == "sin" else None


def of_meshes(n_model_shards, n_fsdp_shards):
    mesh = make_mesh(n_model_shards, n_fsdp_shards)
    specs = ((P(None, "fsdp"), P(None, None)), (P("fsdp"), P(None)))
    homes = [Home(NamedSharding(mesh, lives), NamedSharding(mesh, used)) for lives, used in specs]
    return mesh, homes


REWRITTEN = {
    "rewrite": lambda fn: rewrite(fn, doubled_twice),
    "rewrite that changes nothing": lambda fn: rewrite(fn, lambda eqn: None),
    "grouped convolutions": lambda fn: mend_grouped_convs(fn, make_mesh(4)),
    "parts": lambda fn: exchange_parts(fn, [1, 0], make_mesh(4)),
    "no parts": lambda fn: exchange_parts(fn, [None, None], make_mesh(4)),
    "gather": lambda fn: gather_at_use(fn, of_meshes(1, 8)[1]),
    "all": lambda fn: gather_at_use(exchange_parts(rewrite(fn, doubled_twice), [1, 0], make_mesh(2, 2)), of_meshes(2, 2)[1]),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_constant_outputs_are_arrays_of_their_own_type(name):
    """Also weak types, which a loop's carry must keep."""
    weights, x = (jnp.linspace(-1, 1, 8 * 16).reshape(8, 16), jnp.ones(16)), jnp.linspace(0, 1, 64).reshape(8, 8)
    assert any("True" in str(var) for var in jax.make_jaxpr(constants)(weights, x).jaxpr.outvars), "literals"
    seen = []

    def taken(weights, x):
        outs = REWRITTEN[name](constants)(weights, x)
        seen.extend(jax.tree.leaves(outs))
        return outs

    got, expected = jax.jit(taken)(weights, x), jax.jit(constants)(weights, x)
    assert all(isinstance(leaf, jax.Array) for leaf in seen)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)


def test_flops_of_matmuls_and_convolutions_by_dtype():
    def fn(a, b, image, kernel):
        matmul = jnp.einsum("bij,bjk->bik", a, b)
        conv = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", feature_group_count=2)
        branch = jax.lax.cond(matmul.sum() > 0, lambda a: a @ a.mT, lambda a: a[..., :4] @ a[..., :4].mT, a)
        return matmul, conv, branch

    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (
        ((2, 3, 5), "bfloat16"), ((2, 5, 7), "bfloat16"), ((1, 4, 8, 8), "float32"), ((6, 2, 3, 3), "float32")
    )]  # fmt: skip
    flops = matmul_flops(jax.make_jaxpr(fn)(*shapes).jaxpr)
    longest = 2 * 2 * 3 * 3 * 5
    assert flops == {"bfloat16": 2 * 2 * 3 * 7 * 5 + longest, "float32": 2 * (6 * 8 * 8) * (2 * 3 * 3)}
