"""Attention: values and all derivatives against the formula, memory, meshes, and each error."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.machine import make_mesh
from tests._programs import assert_all_close, computed
from tests._tree import drawn

BATCH, HEADS, SIZE = 2, 4, 8


def by_formula(q, k, v, *, causal=False, window=None, lengths=None, segments=None, bias=None, scale=None):
    """Textbook attention of `[batch, positions, heads, size]`."""
    n_queries, n_keys, n_heads = q.shape[1], k.shape[1], q.shape[2]
    k, v = (jnp.repeat(x, n_heads // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    i, j = np.arange(n_queries)[:, None], np.arange(n_keys)
    mask = np.ones((1, 1, n_queries, n_keys), bool)
    if causal:
        mask = mask & (i >= j)
    if window is not None:
        mask = mask & (abs(i - j) < window)
    if lengths is not None:
        mask = mask & (j < lengths[:, None])[:, None, None]
    if segments is not None:
        query_segments, key_segments = segments if isinstance(segments, tuple) else (segments, segments)
        mask = mask & (query_segments[:, :, None] == key_segments[:, None])[:, None]
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def draw(*shapes):
    return drawn([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], 1.0)


def qkv(n_queries=20, n_keys=None, groups=HEADS):
    key_shape = (BATCH, n_keys or n_queries, groups, SIZE)
    return draw((BATCH, n_queries, HEADS, SIZE), key_shape, key_shape)


def assert_close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def value_and_grads(fn, *args):
    """Returns the value and the gradients of a weighted sum of the output, with respect to all arguments."""

    def total(*args):
        out = fn(*args)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    return jax.jit(jax.value_and_grad(total, tuple(range(len(args))), has_aux=True))(*args)


def assert_match_formula(cases, tolerance=1e-5):
    """Compares values and gradients. `cases` are queries, keys, values and perhaps a bias, and the other arguments, by
    name."""

    def run(fn, setting):
        def total(*args):
            out = fn(*args[:3], **setting, **({"bias": args[3]} if len(args) > 3 else {}))
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

        return lambda *args: jax.value_and_grad(total, tuple(range(len(args))), has_aux=True)(*args)

    found, wanted = (
        computed({name: (run(fn, setting), args) for name, (args, setting) in cases.items()})
        for fn in (redeqx.attention, by_formula)
    )
    assert_all_close(found, wanted, rtol=tolerance, atol=tolerance)


SETTINGS = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 3},
    "lengths": {"lengths": jnp.array([4, 17])},
    "no key": {"lengths": jnp.array([0, 17])},
    "segments": {"segments": jnp.arange(BATCH * 20).reshape(BATCH, 20) // 7},
    "scale": {"scale": 0.3, "causal": True},
}


@pytest.mark.parametrize("groups", [2, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 4))])
def test_values_and_gradients_match_the_formula(groups):
    assert_match_formula({name: (qkv(groups=groups), setting) for name, setting in SETTINGS.items()})


@pytest.mark.sweep
def test_several_blocks_of_queries_match_the_formula():
    settings = ({}, {"causal": True}, {"window": 100}, {"lengths": jnp.array([300, 70])})
    args = qkv(301, groups=2)  # the second block is padded
    assert_match_formula({str(setting): (args, setting) for setting in settings})


@pytest.mark.parametrize("n", [20, pytest.param(301, marks=pytest.mark.sweep)])
def test_gradient_of_a_bias(n):
    cases = {}
    for shape in itertools.product((BATCH, 1), (HEADS, 1), (n, 1), (n,)):
        cases[f"bias of {shape}"] = ([*qkv(n), *draw(shape)], {"causal": True})
    assert_match_formula(cases, 2e-5)


def test_a_bias_may_omit_leading_dims():
    (bias,) = draw((HEADS, 20, 20))
    assert_close(redeqx.attention(*qkv(), bias=bias), by_formula(*qkv(), bias=bias))


def test_queries_and_keys_of_different_lengths_and_segments():
    segments = (jnp.arange(BATCH * 24).reshape(BATCH, 24) % 2, jnp.arange(BATCH * 17).reshape(BATCH, 17) % 3)
    assert_match_formula({"segments": (qkv(24, 17), {"segments": segments})})


def test_a_query_whose_keys_are_all_masked_gets_the_mean_of_the_values():
    q, k, v = qkv()
    out = redeqx.attention(q, k, v, lengths=jnp.zeros(BATCH, int))
    assert_close(out, jnp.broadcast_to(v.mean(1, keepdims=True), out.shape))


def test_values_of_another_head_size():
    args = draw((BATCH, 20, HEADS, SIZE), (BATCH, 20, HEADS, SIZE), (BATCH, 20, HEADS, 5))
    assert_match_formula({"values": (args, {"causal": True})})


def test_bfloat16_accumulates_in_float32():
    args = qkv(301)
    got = redeqx.attention(*(x.astype(jnp.bfloat16) for x in args), causal=True)
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), by_formula(*args, causal=True), 2e-2)


# --- transformations -----------------------------------------------------------------------------------------------------


def one(fn, **setting):
    """Returns attention for a single example, without a batch dim."""
    if fn is redeqx.attention:
        return lambda q, k, v, **extra: fn(q, k, v, **setting, **extra)
    return lambda q, k, v, **extra: fn(q[None], k[None], v[None], **setting, **extra)[0]


@pytest.mark.parametrize("n", [20, pytest.param(301, marks=pytest.mark.sweep)])
def test_float64_is_computed_in_float64(n):
    with jax.enable_x64(True):
        args = [x.astype(jnp.float64) for x in (*qkv(n), *draw((1, HEADS, 1, n)))]
        assert_match_formula({"causal": (args, {"causal": True})}, 1e-13)


def test_vmap_over_examples():
    got, want = (value_and_grads(jax.vmap(one(fn, causal=True)), *qkv()) for fn in (redeqx.attention, by_formula))
    assert_close(got, want)


def test_vmap_over_heads_and_shared_keys():
    q, k, v = qkv(groups=1)
    by_head = jax.vmap(lambda q, k, v: redeqx.attention(q[:, :, None], k, v)[:, :, 0], (2, None, None), 2)
    assert_close(value_and_grads(by_head, q, k, v), value_and_grads(by_formula, q, k, v))


def test_vmap_does_not_repeat_a_shared_bias():
    (bias,) = draw((HEADS, 20, 20))
    fn = jax.vmap(lambda q, k, v, bias: redeqx.attention(q, k, v, bias=bias), (0, 0, 0, None))
    (eqn,) = [eqn for eqn in jax.make_jaxpr(fn)(*qkv(), bias).eqns if eqn.primitive.name == "attention"]
    assert eqn.invars[3].aval.shape == (1, HEADS, 20, 20)
    want = value_and_grads(lambda *args: by_formula(*args[:3], bias=args[3]), *qkv(), bias)
    assert_close(value_and_grads(fn, *qkv(), bias), want)


@pytest.mark.sweep
def test_per_example_gradients():
    (bias,) = draw((HEADS, 20, 20))

    def gradients(fn):
        def loss(q, k, v, bias):
            return jnp.sum(one(fn)(q, k, v, bias=bias) ** 2)

        return jax.vmap(jax.grad(loss, (0, 1, 2, 3)), (0, 0, 0, None))(*qkv(), bias)

    assert_close(gradients(redeqx.attention), gradients(by_formula))


def test_forward_mode_and_second_derivatives():
    args, tangents = qkv(), qkv()[::-1]

    def derivatives(fn):
        def loss(*args):
            return jnp.sum(fn(*args, causal=True, window=7) ** 2)

        grad = jax.grad(loss, (0, 1, 2))
        forward = jax.jvp(lambda *args: fn(*args, causal=True, window=7), args, tangents)
        forward_over_reverse = jax.jvp(grad, args, tangents)[1]
        reverse_over_reverse = jax.grad(lambda *args: sum(jnp.sum(x**2) for x in grad(*args)), (0, 1, 2))(*args)
        return forward, forward_over_reverse, reverse_over_reverse

    assert_close(jax.jit(lambda: derivatives(redeqx.attention))(), jax.jit(lambda: derivatives(by_formula))(), 1e-3)


def test_under_remat_and_scan():
    q, k, v = qkv()

    def loss(fn):
        def step(x, _):
            return jax.checkpoint(lambda x: x + fn(x, k, v, causal=True))(x), None

        return jax.value_and_grad(lambda q: jnp.sum(jax.lax.scan(step, q, None, length=3)[0] ** 2))(q)

    assert_close(loss(redeqx.attention), loss(by_formula), 1e-4)


# --- dropout -------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_dropout_preserves_the_mean_and_depends_on_the_key():
    q, k, v = qkv()
    keys = jax.random.split(jax.random.key(1), 4000)
    outs = jax.jit(jax.vmap(lambda key: redeqx.attention(q, k, v, dropout=0.3, key=key)))(keys)
    assert not np.allclose(outs[0], outs[1])
    assert_close(outs[0], redeqx.attention(q, k, v, dropout=0.3, key=keys[0]))
    np.testing.assert_allclose(outs.mean(0), by_formula(q, k, v), atol=0.06)


@pytest.mark.sweep
def test_dropout_is_the_same_in_the_forward_and_backward_pass():
    args, key = qkv(301), jax.random.key(1)

    def fn(*args):
        return redeqx.attention(*args, causal=True, dropout=0.3, key=key)

    tangents = qkv(301)[::-1]
    forward = jax.jvp(fn, args, tangents)[1]
    _, pull = jax.vjp(fn, *args)
    weights = jnp.cos(jnp.arange(forward.size)).reshape(forward.shape)
    backward = sum(jnp.vdot(grad, tangent) for grad, tangent in zip(pull(weights), tangents, strict=True))
    np.testing.assert_allclose(backward, jnp.vdot(weights, forward), rtol=1e-3)


def test_each_query_of_each_block_drops_other_keys():
    q, k, v = jnp.zeros((1, 600, 1, 8)), jnp.zeros((1, 64, 1, 8)), jnp.eye(64)[None, :, None]
    weights = np.asarray(redeqx.attention(q, k, v, dropout=0.5, key=jax.random.key(0)))[0, :, 0]  # [queries, keys]
    assert len(np.unique(weights > 0, axis=0)) == 600
    np.testing.assert_allclose(weights[weights > 0], 2 / 64, rtol=1e-6)


def test_dropout_differs_by_example():
    q, k, v = (jnp.broadcast_to(x[:1], x.shape) for x in qkv())
    keys = jax.random.split(jax.random.key(0), BATCH)
    outs = jax.vmap(lambda q, k, v, key: redeqx.attention(q, k, v, dropout=0.5, key=key))(q, k, v, keys)
    assert not np.allclose(outs[0], outs[1])


# --- memory and meshes -----------------------------------------------------------------------------------------------------


def test_the_weights_of_all_queries_for_all_keys_are_never_materialized():
    args = draw(*[(1, 4096, 2, 8)] * 3)

    def temporary_bytes(fn):
        compiled = jax.jit(jax.grad(lambda *args: jnp.sum(fn(*args, causal=True) ** 2), (0, 1, 2))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    weights = 2 * 4096**2 * 4
    assert temporary_bytes(by_formula) > weights
    assert temporary_bytes(redeqx.attention) < weights / 2


@pytest.mark.sweep
@pytest.mark.parametrize("n", [32, 512])
def test_splitting_rows_and_heads_needs_no_collective(n):
    mesh = make_mesh(2, 2)
    args = draw(*[(8, n, 4, 8)] * 3)
    want = value_and_grads(lambda *args: redeqx.attention(*args, causal=True), *args)
    split = [jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"), None, "model"))) for x in args]
    grad = jax.jit(jax.grad(lambda *args: jnp.sum(redeqx.attention(*args, causal=True) ** 2), (0, 1, 2)))
    assert not collectives(Module.of(grad.lower(*split).compile().as_text()))
    assert_close(value_and_grads(lambda *args: redeqx.attention(*args, causal=True), *split), want)


def test_inside_shard_map():
    mesh = make_mesh(1, 8)
    args = draw(*[(8, 32, 4, 8)] * 3)
    fn = jax.shard_map(
        lambda *args: redeqx.attention(*args, causal=True), mesh=mesh, in_specs=(P("fsdp"),) * 3, out_specs=P("fsdp")
    )
    assert_close(value_and_grads(fn, *args), value_and_grads(lambda *args: by_formula(*args, causal=True), *args))


# --- errors ----------------------------------------------------------------------------------------------------------------

Q = jnp.zeros((2, 20, 4, 8))
ERRORS = {
    "rank": ((Q[0, 0], Q, Q), {}, r"`q`: expected \[\*batch, positions, heads, size\], got shape \(4, 8\)"),
    "values": ((Q, Q, Q[:, :3]), {}, r"`k`, `v`: expected the same .*, got shapes \(2, 20, 4, 8\) and \(2, 3, 4, 8\)"),
    "size": ((Q, Q[..., :4], Q), {}, r"`q`, `k`: expected the same .* got shapes \(2, 20, 4, 8\) and \(2, 20, 4, 4\)"),
    "batch": ((Q, Q[:1], Q[:1]), {}, r"`q`, `k`: expected the same .* got shapes \(2, 20, 4, 8\) and \(1, 20, 4, 8\)"),
    "heads": ((Q, Q[:, :, :3], Q[:, :, :3]), {}, r"`k`: expected a number of heads that divides the 4 of `q`, got 3"),
    "window": ((Q, Q, Q), {"window": 0}, r"`window`: expected at least 1, got 0"),
    "lengths": ((Q, Q, Q), {"lengths": jnp.ones(3, int)}, r"`lengths`: expected integers of shape \(2,\), got int32 of"),
    "segments": (
        (Q, Q, Q),
        {"segments": jnp.ones((2, 20))},
        r"`segments`: expected integers of shape \(2, 20\), got float32",
    ),
    "bias": ((Q, Q, Q), {"bias": jnp.ones((3, 20, 20))}, r"`bias`: expected a shape that broadcasts to \(2, 4, 20, 20\)"),
    "mask": (
        (Q, Q, Q),
        {"bias": jnp.ones((20, 20), bool)},
        r"`bias`: expected floating numbers, .* bool. Convert a mask",
    ),
    "integers": ((Q.astype(int), Q, Q), {}, r"`q`: expected floating numbers, got int32"),
    "dropout": ((Q, Q, Q), {"dropout": 1.0}, r"`dropout`: expected a probability in \[0, 1\), got 1.0"),
    "key": ((Q, Q, Q), {"dropout": 0.1}, r"`key`: expected a PRNG key for `dropout`, got None"),
}


@pytest.mark.parametrize(("args", "setting", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_expected_and_the_actual_value(args, setting, message):
    with pytest.raises(ValueError, match=message):
        redeqx.attention(*args, **setting)


def test_a_query_whose_keys_all_have_a_large_negative_bias():
    """Its log-sum-exp would lose the log of the sum to rounding, if the backward pass computed the weights from it."""
    cases = {}
    for low in (-1e9, -1e4, float(jnp.finfo(jnp.float32).min)):
        bias = jnp.zeros((20, 20)).at[3].set(low).at[5, 7:].set(low)
        cases[f"{low}"] = (qkv(), {"bias": bias})
        if low > -1e30:  # lower, masked keys weigh as much in the formula
            cases[f"{low}, causal"] = (qkv(), {"bias": bias, "causal": True})
    assert_match_formula(cases)


def test_lists_are_converted_to_arrays():
    q, k, v = qkv()
    got = redeqx.attention(q, k, v, lengths=[4, 17], bias=0.5)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(got, redeqx.attention(q, k, v, lengths=jnp.array([4, 17]), bias=jnp.full((1, 20), 0.5)))


def test_gradients_with_large_scores():
    sizes, k = (1.0, 2e6, 2e8), jnp.ones((BATCH, 6, HEADS, SIZE))
    queries, (v,) = [jnp.full(k.shape, size) for size in sizes], draw(k.shape)

    def of_values(fn):
        return lambda *values: jnp.stack([fn(q, k, v) for q, v in zip(queries, values, strict=True)])

    assert_close(*(value_and_grads(of_values(fn), v, v, v) for fn in (redeqx.attention, by_formula)))


def test_forward_mode_with_a_bias_per_key():
    def derivative(fn, causal):
        return lambda args, along: jax.jvp(lambda q, k, v, b: fn(q, k, v, bias=b, causal=causal), args, along)

    found, wanted = {}, {}
    for n, causal in ((5, False), (16, True)):
        args = (*qkv(n), *draw((HEADS, 1, n)))
        given = args, tuple(draw(*(x.shape for x in args)))
        found[f"{n} keys"], wanted[f"{n} keys"] = ((derivative(fn, causal), given) for fn in (redeqx.attention, by_formula))
    assert_all_close(computed(found), computed(wanted), rtol=1e-5, atol=1e-5)


def test_a_large_bias_shared_by_queries_of_several_blocks():
    shapes = (1, 257, 2, SIZE), (1, 257, 2, SIZE), (1, 257, 2, SIZE)
    args = (*draw(*shapes), jnp.full((1, 1, 1, 257), 100.0))
    got, want = (
        value_and_grads(lambda q, k, v, b, fn=fn: fn(q, k, v, bias=b), *args) for fn in (redeqx.attention, by_formula)
    )
    assert_close(got, want, 2e-5)


def test_causal_masks_later_keys_whatever_the_bias():
    """Left padding, masked by the lowest number."""
    q, k, v = qkv(8)
    bias = jnp.where(jnp.arange(8) < 2, jnp.finfo(jnp.float32).min, 0.0)
    out = redeqx.attention(q, k, v, causal=True, bias=bias)
    later = redeqx.attention(q, k, v.at[:, 4:].add(100.0), causal=True, bias=bias)
    np.testing.assert_array_equal(out[:, :4], later[:, :4])
    np.testing.assert_allclose(out[:, 1], v[:, :2].mean(1), rtol=1e-5)


def test_no_queries_give_an_empty_output_and_no_keys_raise():
    q, k, v = qkv(8)
    assert redeqx.attention(q[:, :0], k, v).shape == (BATCH, 0, HEADS, SIZE)
    with pytest.raises(ValueError, match="expected at least one key and one head, got shapes"):
        redeqx.attention(q, k[:, :0], v[:, :0])


@pytest.mark.sweep
def test_derivatives_agree_if_all_keys_of_a_query_have_the_lowest_bias():
    q, k, v = qkv(6)
    bias = jnp.zeros((6, 6)).at[2].set(jnp.finfo(jnp.float32).min)
    fn = lambda q: redeqx.attention(q, k, v, bias=bias)  # noqa: E731
    np.testing.assert_allclose(jax.jacfwd(fn)(q), jax.jacrev(fn)(q), rtol=1e-5, atol=1e-5)
