"""Which leaves a traced function reads, also inside transforms and loops, and its matmul FLOPs."""

import jax
import jax.numpy as jnp
import pytest

import redeqx
from redeqx.tracing import Trace, matmul_flops

X = jnp.ones(4)


def add_used(used, unused):
    """Reads only the first argument."""
    del unused
    return used.sum()


def scanned(used, unused):
    def body(total, layer):
        return total + layer[0].sum(), layer[1] * 2

    return jax.lax.scan(body, 0.0, (used, unused))[0]


def scanned_constants(used, unused):
    return jax.lax.scan(lambda x, _: ((x + used) * 0.5, unused), X, length=3)[0].sum()


def scanned_carry(used, unused):
    """`used` reaches the returned value only in the second and third iteration."""
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

FUNCTIONS = {
    "plain": add_used,
    "jit": jax.jit(add_used),
    "jit in jit": jax.jit(lambda a, b: jax.jit(add_used)(a, b)),
    "remat": jax.checkpoint(lambda a, b: add_used(jnp.sin(a), b)),
    "vmap": lambda a, b: jax.vmap(add_used)(a, b).sum(),
    "scan": scanned,
    "scan's constants": scanned_constants,
    "scan's carry": scanned_carry,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "unused result": lambda a, b: jax.jit(lambda a, b: (a.sum(), jnp.exp(b)))(a, b)[0],
    "stop_gradient": lambda a, b: a.sum() + jax.lax.stop_gradient(b).sum(),
    "debug print": lambda a, b: (jax.debug.print("{}", b), a.sum())[1],
    "cond": lambda a, b: jax.lax.cond(True, lambda a, b: a.sum(), lambda a, b: 0.0, a, b),
    "while": lambda a, b: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2, c[2] * 2), (0, a, b))[
        1
    ].sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_leaf_without_effect_on_the_output_is_not_read(name):
    fn = FUNCTIONS[name]
    trace = Trace.of(lambda model, scale: fn(*model) * scale, (X, X), 2.0)
    assert trace.reads() == {"0": True, "1": False}


def test_shapes_suffice_and_all_outputs_count():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)

    def fn(model, batch):
        return {"a": model["a"], "b": jnp.dot(model["b"], batch["x"])}

    trace = Trace.of(fn, {"a": shape, "b": shape, "c": shape, "name": "not an array"}, {"x": shape})
    assert trace.reads() == {"a": True, "b": True, "c": False}
    assert trace.leaves == (shape, shape, shape)


def test_nested_loops_are_analysed_in_linear_time():
    """One analysis per iteration of the enclosing fixed point would be exponential in the depth: it would not end."""
    assert Trace.of(nested(40), (X, X)).reads() == {"0": True, "1": False}


def nested(depth):
    """Nested scans, each of which passes a carry element on only in the next iteration."""

    def level(n, carry):
        if n == 0:
            return (carry[1], carry[1] * 2, carry[2])
        return jax.lax.scan(lambda c, _: (level(n - 1, c), None), carry, length=2)[0]

    return lambda model: level(depth, (jnp.zeros(4), model[0], model[1]))[0].sum()


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


def test_gradients_of_a_convolution_with_strides_take_as_many_flops_as_itself():
    """That of its input is a convolution over zeros between the entries of an array."""

    def fn(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME").sum()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 4, 8, 8), (6, 4, 3, 3))]
    own = 2 * (2 * 6 * 4 * 4) * (4 * 3 * 3)
    assert matmul_flops(jax.make_jaxpr(fn)(*shapes).jaxpr) == {"float32": own}
    both = lambda *args: jax.vjp(fn, *args)[1](jnp.float32(1))  # noqa: E731
    assert matmul_flops(jax.make_jaxpr(both)(*shapes).jaxpr) == {"float32": 3 * own}


@pytest.mark.parametrize(
    ("options", "n_pairs"), [({}, 64 * 64), ({"causal": True}, 64 * 65 // 2), ({"causal": True, "window": 8}, 64 * 8 - 28)]
)
def test_masked_pairs_of_an_attention_may_be_left_out(options, n_pairs):
    """Of a causal one, that is about half: fused kernels skip the rest, in both passes."""
    q, k = jnp.zeros((2, 64, 4, 8)), jnp.zeros((2, 64, 2, 8))
    step = jax.value_and_grad(lambda q, k, v: redeqx.attention(q, k, v, **options).sum(), (0, 1, 2))
    jaxpr = jax.make_jaxpr(step)(q, k, k).jaxpr
    of_pair, n_products = 2 * 2 * 4 * 8, 2 + 5  # FLOPs of one product, for all rows and heads; the scores are computed again
    assert matmul_flops(jaxpr, with_masked=False) == {"float32": n_products * of_pair * n_pairs}
    assert matmul_flops(jaxpr) == {"float32": n_products * of_pair * 64 * 64}
