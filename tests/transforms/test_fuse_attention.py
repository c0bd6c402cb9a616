"""Fused attention: which functions are matched, which are not and why, and that results stay the same."""

import re
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.machine import make_mesh, split_heads
from redeqx.tracing import as_fun, equations, transformed
from redeqx.transforms import FuseAttention, attentions
from tests._programs import assert_all_close, computed
from tests._tree import drawn

BATCH, N, HEADS, SIZE = 2, 20, 4, 8


def draw(*shape, seed=0):
    return drawn(jax.ShapeDtypeStruct(shape, jnp.float32), 1.0, seed)


def heads(groups=HEADS):
    """Returns queries, keys and values, `[batch, positions, heads, size]`."""
    return draw(BATCH, N, HEADS, SIZE), draw(BATCH, N, groups, SIZE, seed=1), draw(BATCH, N, groups, SIZE, seed=2)


def causal():
    return jnp.tril(jnp.ones((N, N), bool))


PADDING = jnp.arange(N) < jnp.array([[5], [N]])
BIAS = draw(HEADS, N, N, seed=3)


def written(q, k, v, *, mask=None, bias=None, scores="bthd,bshd->bhts", out="bhts,bshd->bthd", before=None, after=None):
    """Computes attention by hand, with options between the products."""
    s = jnp.einsum(scores, q, k) / np.sqrt(SIZE)
    s = s if before is None else before(s)
    s = s if bias is None else s + bias
    s = s if mask is None else jnp.where(mask, s, -1e9)
    weights = jax.nn.softmax(s, -1)
    return jnp.einsum(out, weights if after is None else after(weights), v)


def own_softmax(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def one_head(q, k, v):
    return jax.nn.softmax(jnp.where(jnp.arange(N)[:, None] >= jnp.arange(N), q @ k.T, -jnp.inf)) @ v


def scanned(q, k, v):
    mask = causal()  # computed outside the loop

    @jax.checkpoint
    def step(x, _):
        return x + written(x, k, v, mask=mask), None

    return jax.lax.scan(step, q, None, length=3)[0]


def by_position(fn):
    """Calls `fn` with heads before positions."""
    return lambda *args: fn(*(jnp.swapaxes(x, 1, 2) for x in args))


def shared_queries(q, k, v):
    """All rows share one array of queries, as in a Perceiver."""
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("thd,bshd->bhts", q, k)), v)


def bounded_softmax(q, k, v):
    """The shift of the scores is at least 0, as in `softmax1` and quantised models."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), jnp.zeros(())))
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


@jax.jit
def padding_mask(lengths):
    return (jnp.arange(N) < lengths[:, None])[:, None, None, :]


def multihead(mask=None):
    attention = eqx.nn.MultiheadAttention(HEADS, 32, key=jax.random.key(0))

    def fn(x, masks=None):
        def attend(x, row_mask=None):
            return attention(x, x, x, mask=mask() if row_mask is None and mask is not None else row_mask)

        return jax.vmap(attend)(x) if masks is None else jax.vmap(attend)(x, masks)

    return fn


dot_product = jax.nn.dot_product_attention
ALIBI = -jnp.array([0.5, 0.25, 0.125, 0.0625])[:, None, None] * (jnp.arange(N)[:, None] - jnp.arange(N))
X = draw(BATCH, N, 32)
# A function, its arguments, and the number of attentions by their description.
FUSED = {
    "eqx.nn.MultiheadAttention": (multihead(), [X], {"all keys": 1}),
    "causal": (multihead(causal), [X], {"causal": 1}),
    "causal, by numpy": (multihead(lambda: np.tril(np.ones((N, N), bool))), [X], {"causal": 1}),
    "a mask of data": (multihead(), [X, PADDING[:, None] & causal()], {"a mask": 1}),
    "causal and padding": (
        lambda x, padding: jax.vmap(lambda x, padding: multihead(lambda: causal() & padding)(x[None])[0])(x, padding),
        [X, PADDING],
        {"causal, a mask": 1},
    ),
    "jax.nn": (dot_product, heads(), {"all keys": 1}),
    "jax.nn causal": (lambda *args: dot_product(*args, is_causal=True), heads(), {"causal": 1}),
    "jax.nn grouped": (lambda *args: dot_product(*args, is_causal=True), heads(2), {"causal": 1}),
    "jax.nn one group": (dot_product, heads(1), {"all keys": 1}),
    "jax.nn window": (lambda *args: dot_product(*args, local_window_size=3), heads(), {"window of 4": 1}),
    "jax.nn causal window": (
        lambda *args: dot_product(*args, is_causal=True, local_window_size=(3, 0)),
        heads(),
        {"causal, window of 4": 1},
    ),
    "jax.nn bias": (lambda q, k, v, bias: dot_product(q, k, v, bias), [*heads(), BIAS[None]], {"a bias": 1}),
    "jax.nn lengths": (
        lambda *args: dot_product(*args, key_value_seq_lengths=jnp.array([5, 7])),
        heads(),
        {"a mask": 1},
    ),
    "by hand": (written, heads(), {"all keys": 1}),
    "by hand, heads first": (
        by_position(lambda *args: written(*args, mask=causal(), scores="bhtd,bhsd->bhts", out="bhts,bhsd->bhtd")),
        heads(),
        {"causal": 1},
    ),
    "by hand, keys first": (
        lambda q, k, v: jnp.einsum("bhst,bshd->bthd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", k, q), 2), v),
        heads(),
        {"all keys": 1},
    ),
    "by hand, grouped": (
        lambda q, k, v: jnp.einsum(
            "bgrts,bsgd->btgrd",
            jax.nn.softmax(jnp.einsum("btgrd,bsgd->bgrts", q.reshape(BATCH, N, 2, 2, SIZE), k)),
            v,
        ),
        heads(2),
        {"all keys": 1},
    ),
    "its own softmax": (own_softmax, heads(), {"all keys": 1}),
    "masked out, not in": (
        lambda *args: written(*args, bias=jnp.where(jnp.triu(jnp.ones((N, N), bool), 1), -jnp.inf, 0.0)),
        heads(),
        {"causal": 1},
    ),
    "added mask": (lambda *args: written(*args, bias=jnp.triu(jnp.full((N, N), -1e9), 1)), heads(), {"causal": 1}),
    "a constant that is added": (
        lambda *args: written(*args, bias=np.where(np.tril(np.ones((N, N), bool)), 0.0, -np.inf).astype(np.float32)),
        heads(),
        {"causal": 1},
    ),
    "queries that all rows share": (shared_queries, [heads()[0][0], *heads()[1:]], {"all keys": 1}),
    "a softmax with a bound": (bounded_softmax, heads(), {"all keys": 1}),
    "a mask from a jitted function that ends in a view": (
        lambda q, k, v, lengths: written(q, k, v, mask=padding_mask(lengths)),
        [*heads(), jnp.array([5, N])],
        {"a mask": 1},
    ),
    "added padding": (
        lambda q, k, v, padding: written(q, k, v, bias=(1.0 - padding[:, None, None]) * -1e9),
        [*heads(), PADDING],
        {"a bias": 1},
    ),
    "alibi": (lambda *args: written(*args, mask=causal(), bias=ALIBI), heads(), {"causal, a bias": 1}),
    "trained bias": (lambda q, k, v, bias: written(q, k, v, bias=bias[None]), [*heads(), BIAS], {"a bias": 1}),
    "two masks": (
        lambda *args: written(*args, mask=causal(), bias=jnp.where(jnp.arange(N) < 15, 0.0, -1e9)),
        heads(),
        {"causal, a bias": 1},
    ),
    "a mask that hides nothing": (lambda *args: written(*args, mask=jnp.ones((N, N), bool)), heads(), {"all keys": 1}),
    "another band": (
        lambda *args: written(*args, mask=jnp.arange(N)[:, None] + 2 >= jnp.arange(N)),
        heads(),
        {"a mask": 1},
    ),
    "one head": (one_head, [x[0, :, 0] for x in heads()], {"causal": 1}),
    "vmap over heads": (jax.vmap(jax.vmap(one_head, 1, 1)), heads(), {"causal": 1}),
    "scan and remat": (scanned, heads(), {"causal": 3}),
}


def fuse(fn):
    return transformed(fn, [FuseAttention()])


def total_of(fn, args):
    """The value and the gradients of a weighted sum of a function's outputs, with respect to floating arguments."""

    def total(*args):
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in jax.tree.leaves(fn(*args)))

    return jax.value_and_grad(total, [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)])


def assert_all_same(cases, with_gradients=()):
    """Compares what functions and fused functions compute, and gradients of some. `cases` are functions and their arguments,
    by name."""
    found, wanted = (
        computed(
            {name: (change(fn), args) for name, (fn, args) in cases.items()}
            | {
                f"gradients of {name}": (total_of(change(cases[name][0]), cases[name][1]), cases[name][1])
                for name in with_gradients
            }
        )
        for change in (fuse, lambda fn: fn)
    )
    assert_all_close(found, wanted, rtol=1e-5, atol=2e-5)


def assert_unchanged(fn, args):
    assert str(jax.make_jaxpr(fuse(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


def n_fused(fn, args):
    traced = jax.make_jaxpr(fuse(fn))(*args)
    return sum(eqn.primitive.name == "attention" for eqn in equations(traced))


def in_half_precision(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


IN_HALF = [name for name in FUSED if name != "scan and remat"]  # its float32 scale would change the dtype of the carry


@pytest.mark.parametrize("name", IN_HALF)
def test_attention_is_fused_in_half_precision(name):
    """`jnp.sum` accumulates bfloat16 in float32 and casts back."""
    fn, args, fused = FUSED[name]
    assert attentions(jax.make_jaxpr(fn)(*in_half_precision(args))).fused.total() == sum(fused.values())


def in_its_dtype(q, k, v):
    scores = jnp.where(causal(), jnp.einsum("bthd,bshd->bhts", q, k) / SIZE**0.5, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_exact_as_the_original(dtype):
    args, exact = in_half_precision(heads(), dtype), in_its_dtype(*heads())
    assert n_fused(in_its_dtype, args) == 1
    outputs = [fuse(in_its_dtype)(*args), in_its_dtype(*args)]
    assert all(x.dtype == dtype for x in outputs)
    fused_error, error = (jnp.abs(x.astype(jnp.float32) - exact).max() for x in outputs)
    assert fused_error <= 1.5 * error


@pytest.mark.parametrize(("fn", "args", "fused"), FUSED.values(), ids=FUSED)
def test_attention_is_fused(fn, args, fused):
    assert attentions(jax.make_jaxpr(fn)(*args)) == (
        {f"{description}, in blocks of queries": n for description, n in fused.items()},
        {},
    )
    assert n_fused(fn, args) == 1


# With gradients: of grouped heads, masks, a bias, transposed operands, and inside a loop. Those of the kernel are its own.
WITH_GRADIENTS = ["jax.nn grouped", "causal and padding", "trained bias", "by hand, keys first", "scan and remat"]


@pytest.mark.parametrize("part", range(4))
def test_fused_attention_gives_the_same_results(part):
    cases = {name: FUSED[name][:2] for name in [*FUSED][part::4]}
    assert_all_same(cases, [name for name in WITH_GRADIENTS if name in cases])


def dropped(weights):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape), weights / 0.9, 0.0)


@jax.custom_jvp
def no_output(x):
    return ()


no_output.defjvp(lambda primals, tangents: ((), ()))


def with_readers_without_outputs(q, k, v):
    """Solver and checking libraries leave such equations in a trace."""
    no_output(q)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    no_output(weights)
    jax.debug.callback(lambda weights: None, weights)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def with_weights(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", weights, v), weights


@jax.custom_jvp
def straight_through(scores):
    """Its gradient is the identity."""
    return jax.nn.softmax(scores, -1)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))
straight_through_jax = jax.custom_jvp(jax.nn.softmax, nondiff_argnums=(1,))  # a function of JAX, but not its derivative
straight_through_jax.defjvp(lambda axis, primals, tangents: (jax.nn.softmax(primals[0], axis), tangents[0]))


def of_own_softmax(q, k, v, softmax=straight_through):
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


def over_other_rows(q, k, v):
    """The weights of a row are summed over the values of all rows."""
    return jnp.einsum("bhts,cshd->bcthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


def over_two_dims(q, k, v):
    """The scores are summed over heads."""
    return jnp.einsum("bts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bts", q, k)), v)


UNFUSED = {
    "weights without a gradient": (
        lambda *args: written(*args, after=jax.lax.stop_gradient),
        "`stop_gradient` between the weights and the values",
    ),
    "weights in 8 bits": (
        lambda *args: written(*args, after=lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32)),
        "`convert_element_type` between the weights and the values",
    ),
    "scores without a gradient": (
        lambda *args: written(*args, before=jax.lax.stop_gradient),
        "`stop_gradient` between the scores and their softmax",
    ),
    "values of other rows": (over_other_rows, "values and keys have different rows or heads"),
    "scores of two dims": (over_two_dims, "scores contract more than one dim"),
    "softcap": (lambda *args: written(*args, before=lambda s: 30 * jnp.tanh(s / 30)), "`tanh` between the scores and"),
    "dropout": (lambda *args: written(*args, after=dropped), "between the weights and the values, such as dropout"),
    "readers without outputs": (with_readers_without_outputs, "scores or weights are also used elsewhere"),
    "returned weights": (with_weights, "scores or weights are also used elsewhere"),
}


def shifted_by_the_largest_of_all(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    weights = jnp.exp(scores - scores.max())
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def shifted_by_maxima_of_other_keys(q, k, v):
    """The shift is a slice of the maxima, and differs from key to key."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    maxima = jnp.concatenate([scores, 2 * scores], 2).max(-1)
    weights = jnp.exp(scores - maxima[:, :, None, :N])
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def with_a_learned_scalar(q, k, v):
    return written(q, k, v, before=lambda scores: scores + q[0, 0, 0, 0])


def latents(q, k, v):
    """The queries have a leading dim of size 1 that the softmax lacks."""
    scores = q[:1, :, 0] @ k[0, :, 0].T
    return jax.nn.softmax(scores.squeeze(0)) @ v[0, :, 0]


def weights_of_layers(q, k, v):
    """A softmax of a vector that is not part of an attention."""
    weights = jnp.exp(q[0, :3, 0, 0])
    return jnp.tensordot(weights / weights.sum(), jnp.stack([q, k, v]), 1)


def one_query(q, k, v):
    """One query: a vector of scores, divided by a scalar."""
    weights = jnp.exp(k[0, :, 0] @ q[0, 0, 0])
    return (weights / weights.sum()) @ v[0, :, 0]


SCALARS = {
    "shifted by the largest of all": (shifted_by_the_largest_of_all, 1),
    "shifted by maxima of other keys": (shifted_by_maxima_of_other_keys, 0),
    "a learned scalar": (with_a_learned_scalar, 1),
    "latents": (latents, 1),
    "weights of layers": (weights_of_layers, 0),
    "one query": (one_query, 0),
}


def test_scalars_and_dims_of_size_1():
    assert {name: n_fused(fn, heads()) for name, (fn, _) in SCALARS.items()} == {name: n for name, (_, n) in SCALARS.items()}
    assert_all_same({name: (fn, heads()) for name, (fn, n) in SCALARS.items() if n}, ["a learned scalar"])
    for fn, n in SCALARS.values():
        if not n:
            assert_unchanged(fn, heads())


PADDED_LEFT = jnp.arange(N) >= jnp.array([[6], [0]])  # left padding: the first queries attend only to padding
LOWEST = jnp.finfo(jnp.float32).min


def with_scores(q, k, v, change):
    """Attention with changed scores, including queries whose keys are all masked."""
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(change(jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(SIZE)), -1), v)


PADDED = PADDED_LEFT[:, None, None]
SEVERAL_MASKS = {
    "early GPT-2": lambda s: jnp.where(causal(), s, -1e4) + (1.0 - PADDED) * -1e4,
    "both added, at -1e4": lambda s: s + jnp.where(causal(), 0.0, -1e4) + jnp.where(PADDED, 0.0, -1e4),
    "two levels": lambda s: jnp.where(PADDED, jnp.where(causal(), s, LOWEST), -1e9),
    "added below another": lambda s: jnp.where(PADDED, s + jnp.where(causal(), 0.0, LOWEST), -1e9),
    "a bias above a mask": lambda s: jnp.where(PADDED, s, -1e4) + BIAS,
    "one level": lambda s: jnp.where(PADDED, jnp.where(causal(), s, LOWEST), LOWEST),
    "at once": lambda s: jnp.where(PADDED & causal(), s, -1e9),
    "added at once": lambda s: s + jnp.where(PADDED & causal(), 0.0, -1e9),
    "a level below the other": lambda s: jnp.where(causal(), s, -jnp.inf) + (1.0 - PADDED) * -1e9,
}


def test_queries_whose_keys_are_all_masked_keep_their_weights():
    cases = {name: (partial(with_scores, change=change), heads()) for name, change in SEVERAL_MASKS.items()}
    fused = ("both added, at -1e4", *list(SEVERAL_MASKS)[5:])
    assert {name for name, case in cases.items() if n_fused(*case)} == {*fused}
    assert_all_same({name: cases[name] for name in fused}, ["added at once"])
    for name in cases.keys() - fused:
        assert_unchanged(*cases[name])


def test_an_error_while_matching_keeps_the_original_code(monkeypatch):
    def fails(*args):
        raise IndexError("list index out of range")

    monkeypatch.setattr("redeqx.transforms._fuse_attention.trace_scores", fails)
    message = r"search for attention at .*test_fuse_attention.py:\d+.* knows, got IndexError .*computed as it is written"
    with pytest.warns(UserWarning, match=message):
        assert_unchanged(written, heads())


@pytest.mark.parametrize(("fn", "reason"), UNFUSED.values(), ids=UNFUSED)
def test_other_attention_is_not_fused_and_the_reason_is_reported(fn, reason):
    fused, unfused = attentions(jax.make_jaxpr(fn)(*heads()))
    assert not fused
    ((line, reported),) = unfused.items()
    assert reason in reported and "test_fuse_attention.py:" in line
    assert_unchanged(fn, heads())


def wrong_rows(q, k, v):
    weights = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k) / 8)
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1)[:, :, None], v)  # divides by the sums of other queries


def rounded_sums(q, k, v, dtype):
    weights = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k) / 8)
    sums = weights.sum(-1, keepdims=True).astype(dtype).astype(jnp.float32)
    return jnp.einsum("bhts,bshd->bthd", weights / sums, v)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_a_softmax_by_a_rounded_sum_is_left(dtype):
    assert_unchanged(partial(rounded_sums, dtype=dtype), heads())


def wrapping(q, k, v):
    """No key is masked: differences of unsigned positions wrap around and are never below 0."""
    i, j = jnp.arange(N, dtype=jnp.uint32)[:, None], jnp.arange(N, dtype=jnp.uint32)
    return written(q, k, v, mask=i - j >= jnp.uint32(0))


def test_a_division_by_other_sums_is_not_a_softmax():
    assert_unchanged(wrong_rows, heads())


def test_unsigned_positions_are_not_affine():
    (description,) = attentions(jax.make_jaxpr(wrapping)(*heads()))[0]
    assert "causal" not in description
    assert_all_same({"wrapping": (wrapping, heads())})


def test_the_softmax_of_a_classifier_is_not_attention():
    def fn(x, w):
        return jax.nn.softmax(x @ w)

    assert attentions(jax.make_jaxpr(fn)(draw(20, 8), draw(8, 8))) == ({}, {})


def test_sums_of_sums_are_searched_for_scores_in_little_time():
    """Once twice as long for each sum: a minute for 18 of them."""

    def fn(x, w):
        for _ in range(18):
            x = x + 0.5 * x
        return jax.nn.softmax(x) @ w

    start = time.process_time()
    assert not attentions(jax.make_jaxpr(fn)(draw(20, 8), draw(8, 8))).fused
    assert time.process_time() - start < 3


def test_masks_of_many_parts_are_fused():
    def fn(q, k, v, lengths):
        mask = lengths > 0
        for i in range(1, 600):
            mask = mask & (lengths > i)  # more than Python's recursion limit, if each took two calls
        return written(q, k, v, mask=mask[:, None, None])

    assert len(attentions(jax.make_jaxpr(fn)(*heads(), draw(BATCH, N))).fused) == 1


def test_few_queries_are_not_fused():
    q, k, v = heads()
    assert n_fused(written, (q[:, :1], k, v)) == 0
    (reason,) = attentions(jax.make_jaxpr(written)(q[:, :15], k, v)).unfused.values()
    assert reason == "it has fewer than 16 queries"


def test_a_softmax_with_a_custom_derivative_is_not_fused():
    assert_unchanged(of_own_softmax, heads())
    assert_unchanged(partial(of_own_softmax, softmax=straight_through_jax), heads())


def test_float64_stays_float64():
    def half(q, k, v):  # its weights are in float64, though its scores are not
        return written(q, k, v, after=lambda weights: weights.astype(jnp.float64))

    with jax.enable_x64(True):
        assert n_fused(half, (*heads()[:2], heads()[2].astype(jnp.float64))) == 0
        bias = jax.random.normal(jax.random.key(3), (heads()[0].shape[1],) * 2, jnp.float64)
        biased, args = partial(written, bias=bias), [x.astype(jnp.float64) for x in heads()]
        assert n_fused(biased, args) == 1
        got, want = (total_of(run, args)(*args) for run in (fuse(biased), biased))
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, two, rtol=1e-13, atol=1e-13)


def precisions(fn, *args):
    """Returns the precisions of all products in a function's TPU program."""
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    return set(re.findall(r"stablehlo.dot_general.*?precision = \[(\w+), \w+\]", lowered))


def test_products_keep_their_precision():
    """A float32 model that sets a precision must not be computed in bfloat16 on a TPU."""
    high, highest = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST

    def mixed(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k, precision=high))
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision=highest)

    def gradients(q, k, v):
        return jax.grad(lambda *args: fuse(mixed)(*args).sum(), (0, 1, 2))(q, k, v)

    assert n_fused(mixed, heads()) == 1
    assert precisions(gradients, *heads()) == {"HIGHEST"}
    assert precisions(fuse(written), *heads()) == {"DEFAULT"}
    with jax.default_matmul_precision("high"):
        traced = jax.make_jaxpr(redeqx.attention)(*heads())
    (eqn,) = [eqn for eqn in equations(traced) if eqn.primitive.name == "attention"]
    assert eqn.params["setting"].precision == high
    assert precisions(as_fun(traced), *heads()) == {"HIGH"}
    with jax.default_matmul_precision("F16_F16_F32"):
        (eqn,) = equations(jax.make_jaxpr(redeqx.attention)(*heads()))
    assert eqn.params["setting"].precision == jax.lax.DotAlgorithmPreset.F16_F16_F32


@pytest.mark.parametrize(
    "mask",
    [
        lambda i, j: i >= j,
        lambda i, j: j <= i,
        lambda i, j: ~(j > i),
        lambda i, j: ~((j > i) | (i - j < 0)),
        lambda i, j: (i - j >= 0) & (j < 10**6),
        lambda i, j: i + 1 > j,
        lambda i, j: jnp.logical_not(i < j),
    ],
)
def test_a_long_causal_mask_is_recognised_without_evaluating_it(mask):
    n = 65536

    def fn(q, k, v):
        causal_mask = mask(jnp.arange(n)[:, None], jnp.arange(n))
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(causal_mask, jnp.einsum("thd,shd->hts", q, k), -1e9)), v)

    shapes = [jax.ShapeDtypeStruct((n, 2, 8), jnp.float32)] * 3
    assert attentions(jax.make_jaxpr(fn)(*shapes)) == ({"causal, in blocks of queries": 1}, {})


def test_bfloat16_with_a_float32_softmax():
    def fn(q, k, v):
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(jnp.bfloat16), v).astype(jnp.float32)

    assert n_fused(fn, heads()) == 1
    got, want = (run(*heads()) for run in (fuse(fn), fn))
    np.testing.assert_allclose(got, want, atol=0.05)


# --- in a Trainer ----------------------------------------------------------------------------------------------------------


class Model(eqx.Module):
    table: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, key, dropout=0.0):
        keys = jax.random.split(key, 3)
        self.table = eqx.nn.Embedding(32, 32, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(HEADS, 32, dropout_p=dropout, key=keys[1])
        self.head = eqx.nn.Linear(32, 32, key=keys[2])

    def __call__(self, ids, key=None):
        x = jax.vmap(self.table)(ids)
        return jax.vmap(self.head)(x + self.attention(x, x, x, mask=jnp.tril(jnp.ones((len(ids),) * 2, bool)), key=key))


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch[:, :-1], jax.random.split(key, len(batch)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def trainer(n_model_shards=1, n_fsdp_shards=1, dropout=0.0, **options):
    deployer = redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards)
    model = Model(jax.random.key(0), dropout)
    return redeqx.Trainer(deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn, **options)


EXAMPLES = list(np.random.default_rng(0).integers(0, 32, (32, 33)).astype(np.int32))


@pytest.mark.parametrize("mesh", [pytest.param((1, 1), marks=pytest.mark.sweep), (2, 2)], ids=str)
def test_a_trainer_fuses_and_trains_to_the_same_weights(mesh, capsys):
    trained = []
    for fuse in (True, False):
        run = trainer(*mesh, compute=redeqx.Compute(fuse_attention=fuse))
        run.fit(EXAMPLES, batch_size=16, n_epochs=2)
        trained.append(jax.tree.leaves(eqx.filter(run.model, eqx.is_array)))
        assert ("1 fused (causal, in blocks of queries)" in capsys.readouterr().out) == fuse
    for a, b in zip(*trained, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_header_row_is_printed_with_the_first_step_after_a_prediction(capsys):
    """The header is printed at the first use, but the loss is traced later."""
    run = trainer(1, 1)
    run.get_default_predictor(lambda model, batch, key: batch[:, 0]).predict(EXAMPLES[:8], batch_size=8)
    assert "attention" not in capsys.readouterr().out
    run.train(EXAMPLES[:8], 1)
    assert capsys.readouterr().out.count("attention: 1 fused (causal, in blocks of queries)") == 1


@pytest.mark.sweep
def test_the_header_says_why_attention_is_not_fused(capsys):
    trainer(dropout=0.1).fit(EXAMPLES, batch_size=16, n_epochs=1)
    header = " ".join(capsys.readouterr().out.split())
    assert "test_fuse_attention.py" in header and "such as dropout" in header


def test_a_predictor_fuses():
    def pred_fn(model, batch, key):
        return jax.vmap(model)(batch)

    outputs = []
    for fuse in (True, False):
        predictor = redeqx.Predictor(
            redeqx.Deployer(verbose=False),
            model=Model(jax.random.key(0)),
            collate_fn=np.stack,
            pred_fn=pred_fn,
            compute=redeqx.Compute(fuse_attention=fuse),
        )
        outputs.append(predictor.predict(EXAMPLES, batch_size=16))
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_calling_redeqx_attention_gives_the_same_plan_as_writing_attention():
    class Calls(Model):
        def __call__(self, ids, key=None):
            x = jax.vmap(self.table)(ids)
            q, k, v = (
                jax.vmap(projection)(x).reshape(len(ids), HEADS, -1)
                for projection in (self.attention.query_proj, self.attention.key_proj, self.attention.value_proj)
            )
            out = redeqx.attention(q, k, v, causal=True).reshape(len(ids), -1)
            return jax.vmap(self.head)(x + jax.vmap(self.attention.output_proj)(out))

    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    batch = np.stack(EXAMPLES[:8])
    plans = [deployer.plan(make(jax.random.key(0)), loss_fn, batch) for make in (Model, Calls)]
    specs = [{name: leaf.spec for name, leaf in plan.leaves.items()} for plan in plans]
    assert specs[0] == specs[1]
    assert "arrives split" in plans[1]["attention.output_proj.weight"].reason


def structs(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def test_the_split_of_segments_depends_on_how_their_mask_is_made():
    long = structs(*[(1, 2**16, 4, 8)] * 3, dtype=jnp.bfloat16)  # whose bias of 8 GiB is made in blocks
    traced = jax.make_jaxpr(partial(redeqx.attention, segments=jnp.zeros((1, 2**16), int)))(*long)
    for n, split in ((2, "heads"), (8, "positions")):  # each of 8 makes 1 GiB of it at once
        found = attentions(traced, "gpu", split_heads(make_mesh(n_sequence_shards=n)))
        assert list(found.fused) == [f"segments, by cuDNN split by {split}"]


def test_the_kernel_is_named_with_the_reason_for_a_fallback():
    def fn(dtype, size):
        def attend_twice(x):
            q, k, v = (x.reshape(2, 32, 4, size) for _ in range(3))
            return redeqx.attention(q, k, v, causal=True), written(q, k, v)

        return attentions(jax.make_jaxpr(attend_twice)(jax.ShapeDtypeStruct((2, 32, 4 * size), dtype)), "gpu")[0]

    assert fn(jnp.bfloat16, 8) == {"causal, by cuDNN": 1, "all keys, by cuDNN": 1}
    fallback = "in blocks of queries, not by cuDNN: it supports bfloat16 and float16, not float32"
    assert fn(jnp.float32, 8) == {f"causal, {fallback}": 1, f"all keys, {fallback}": 1}
    fallback = "in blocks of queries, not by cuDNN: it needs equal head sizes that are multiples of 8, not 6 and 6"
    assert fn(jnp.bfloat16, 6) == {f"causal, {fallback}": 1, f"all keys, {fallback}": 1}
