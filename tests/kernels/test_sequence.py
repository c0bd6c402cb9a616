"""Attention over split positions: values and gradients of one device, by heads and by positions, and what it sends."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.compiled import Module, collectives
from redeqx.kernels import (
    KERNELS,
    AttentionSetting,
    InBlocks,
    WithOffset,
    attend,
    attention,
    backward_by_positions,
    forward_by_positions,
)
from redeqx.machine import make_mesh, split_heads
from redeqx.tracing import transformed
from redeqx.transforms import FuseAttention

ROWS, T = 4, 64
rng = np.random.default_rng(0)
SEGMENTS = jnp.asarray(np.sort(rng.integers(0, 4, (ROWS, T))))
LENGTHS = jnp.array([3, 0, 64, 40])  # in one row, all keys are masked
DROPOUT = {"key": jax.random.split(jax.random.key(0), ROWS)}
ODD = {"n_heads": 3, "groups": 3}  # heads that do not divide: by positions


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


@cache
def split(n_sequence, n_model=1):
    return split_heads(make_mesh(n_model, n_sequence_shards=n_sequence))


def draw(n_queries=T, n_keys=T, n_heads=8, groups=2):
    """The same numbers in each test, whichever ran before."""
    drawn = np.random.default_rng(1)
    shapes = ((n_queries, n_heads), (n_keys, groups), (n_keys, groups), (n_queries, n_heads))
    return [jnp.asarray(drawn.normal(size=(ROWS, *shape, 8)), jnp.float32) for shape in shapes]


def place(x, sharding):
    """Splits an array like the queries, except for dims that do not divide."""
    n = AttentionSetting(1.0, split=sharding).n_shards
    spec = P(*(None if x.shape[dim] % n(dim) else entry for dim, entry in enumerate(sharding.spec)))
    return jax.device_put(x, NamedSharding(sharding.mesh, spec))


def compiled(setting, extras, operands):
    """Compiles the output and the gradients of queries, keys, values and bias; returns it with its arguments."""

    def fn(q, k, v, g, extras):
        bias = {name: x for name, x in extras.items() if name == "bias"}
        out, pull = jax.vjp(lambda q, k, v, bias: attend(q, k, v, {**extras, **bias}, setting), q, k, v, bias)
        return out, pull(g)

    if setting.split is not None:
        operands = [place(x, setting.split) for x in operands]
    return jax.jit(fn).lower(*operands, extras).compile(), (*operands, extras)


def assert_close(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.max(jnp.abs(b))))


CASES = {
    "all keys": ({}, {}, {}),
    "causal": ({"causal": True}, {}, {}),
    "lengths": ({"causal": True}, {"lengths": LENGTHS}, {}),
    "segments": ({"causal": True}, {"query_segments": SEGMENTS, "key_segments": SEGMENTS}, {}),
    "bias of heads": ({}, {"bias": normal(1, 8, T, T)}, {}),
    "dropout": ({"causal": True, "dropout": 0.3}, DROPOUT, {}),
    "no even length": ({"causal": True}, {}, {"n_queries": 63, "n_keys": 63}),
    "all keys by positions": ({}, {}, ODD),
    "causal by positions": ({"causal": True}, {}, {"n_heads": 6, "groups": 1}),
    "lengths by positions": ({"causal": True}, {"lengths": LENGTHS}, ODD),
    "segments by positions": ({"causal": True}, {"query_segments": SEGMENTS, "key_segments": SEGMENTS}, ODD),
    "bias of heads by positions": ({"causal": True}, {"bias": normal(1, 3, T, T)}, ODD),
    "bias of rows": ({}, {"bias": normal(ROWS, 1, T, T)}, {}),
    "bias of keys by positions": ({"causal": True}, {"bias": normal(ROWS, 1, 1, T)}, ODD),
    "mask": ({"causal": True}, {"mask": jnp.asarray(rng.random((ROWS, 1, T, T)) < 0.3)}, {}),
    "dropout by positions": ({"causal": True, "window": 9, "dropout": 0.3}, DROPOUT, ODD),
    "window": ({"window": 4}, {"lengths": LENGTHS}, ODD),
    "causal window": ({"causal": True, "window": 8}, {}, {}),
    "window wider than a shard": ({"causal": True, "window": 50}, {"lengths": LENGTHS}, ODD),
    "other keys": ({}, {"lengths": jnp.array([3, 0, 37, 20])}, {**ODD, "n_keys": 37}),
    "fewer keys, causal": ({"causal": True}, {}, {**ODD, "n_keys": 40}),
    "more keys, causal window": ({"causal": True, "window": 9}, {}, {**ODD, "n_keys": 72}),
    "no even length by positions": (
        {"causal": True},
        {"bias": normal(1, 3, 61, 61), "query_segments": SEGMENTS[:, :61], "key_segments": SEGMENTS[:, :61]},
        {**ODD, "n_queries": 61, "n_keys": 61},
    ),
    "decoding": ({}, {"lengths": LENGTHS}, {"n_queries": 1}),
}
MESHES = [(2, 1), (4, 1), (8, 1), (2, 2)]
# Each device has a branch of the program, so these take long to compile: each case has one more mesh in sweeps.
QUICK = [
    ("dropout", (2, 2)),
    ("no even length by positions", (4, 1)),
    ("bias of heads by positions", (2, 1)),
    ("mask", (2, 2)),
    ("window", (4, 1)),
    ("decoding", (2, 1)),
]


@cache
def on_one_device(name):
    kwargs, extras, sizes = CASES[name]
    operands = draw(**sizes)
    fn, args = compiled(AttentionSetting(0.3, **kwargs), extras, operands)
    return operands, fn(*args)


IN_SWEEPS = [(name, MESHES[i % 4]) for i, name in enumerate(CASES) if (name, MESHES[i % 4]) not in QUICK]


@pytest.mark.parametrize(
    ("name", "mesh"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.sweep) for pair in IN_SWEEPS)], ids=str
)
def test_values_and_gradients_are_those_of_one_device(name, mesh):
    kwargs, extras, _ = CASES[name]
    operands, want = on_one_device(name)
    fn, args = compiled(AttentionSetting(0.3, split=split(*mesh), **kwargs), extras, operands)
    assert_close(fn(*args), want)


def test_unsigned_lengths_end_before_the_keys_of_a_device():
    q, k, v, _ = draw(**ODD)
    short = jnp.full(ROWS, 5, jnp.uint8)

    def fn(q, k, v):
        return attention(q, k, v, causal=True, window=10, lengths=short)

    over_devices = jax.jit(transformed(fn, [FuseAttention(split(4))]))
    assert_close(over_devices(*(place(x, split(4)) for x in (q, k, v))), fn(q, k, v))


def test_a_window_of_one_key_sends_nothing():
    """Its output is the query's own value, and the gradients of queries and keys are 0."""
    q, k, v, g = draw(**ODD)
    fn, args = compiled(AttentionSetting(0.3, causal=True, window=1, split=split(4)), {}, (q, k, v, g))
    out, (dq, dk, dv, _) = fn(*args)
    assert not collectives(Module.of(fn.as_text()))
    assert_close([out, dv], [v, g])
    np.testing.assert_allclose(np.stack([dq, dk]), 0, atol=1e-5)


# --- in a ring ----------------------------------------------------------------------------------------------------------

PACKED = {"query_segments": SEGMENTS, "key_segments": SEGMENTS}
RINGS = {
    "all keys": ({}, {}, ODD),
    "causal": ({"causal": True}, {}, {"n_heads": 9, "groups": 3}),
    "chunks of one": ({"causal": True}, {}, {**ODD, "n_queries": 24, "n_keys": 24}),  # on 4, 6 are not two even chunks
    "other keys": ({}, {}, {**ODD, "n_keys": 40}),
    "segments": ({"causal": True}, PACKED, ODD),
    "segments of other keys": ({}, {**PACKED, "key_segments": SEGMENTS[:, 24:]}, {**ODD, "n_keys": 40}),
    "lengths": ({"causal": True}, {"lengths": LENGTHS}, ODD),
    "lengths of other keys": ({}, {"lengths": jnp.array([3, 0, 37, 20])}, {**ODD, "n_keys": 37}),
    "wide causal window": ({"causal": True, "window": 40}, {}, ODD),
    "wide window, lengths and segments": ({"window": 34}, {"lengths": LENGTHS, **PACKED}, ODD),
    "wide causal window, lengths and segments": ({"causal": True, "window": 41}, {"lengths": LENGTHS, **PACKED}, ODD),
    "fewer keys, causal": ({"causal": True}, {}, {**ODD, "n_keys": 40}),
    "more keys, window": ({"causal": True, "window": 50}, {}, {**ODD, "n_keys": 72}),
    "fewer keys, window": ({"window": 9}, {"lengths": jnp.array([3, 0, 30, 20])}, {**ODD, "n_keys": 30}),
    "no even length": (
        {"causal": True},
        {"bias": normal(1, 3, 61, 61), "query_segments": SEGMENTS[:, :61], "key_segments": SEGMENTS[:, :61]},
        {**ODD, "n_queries": 61, "n_keys": 61},
    ),
    "bias of keys": ({"causal": True}, {"bias": normal(ROWS, 1, 1, T), "lengths": LENGTHS}, ODD),
    "bias of rows": ({}, {"bias": normal(ROWS, 1, T, T)}, ODD),
    "mask of keys": ({"causal": True}, {"mask": jnp.asarray(rng.random((ROWS, 1, 1, T)) < 0.5)}, ODD),
    "mask and bias": ({}, {"mask": jnp.asarray(rng.random((1, 3, T, T)) < 0.1), "bias": normal(1, 3, T, T)}, ODD),
}


@pytest.fixture
def small_ring(monkeypatch):
    """All keys and values are too large to gather. JAX caches the shape of the log-sum-exps, which are pairs in a ring."""
    monkeypatch.setattr("redeqx.kernels._sequence.RING_BYTES", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


QUICK_RINGS = {("segments", (4, 1)), ("other keys", (2, 2)), ("wide causal window, lengths and segments", (4, 1))}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK_RINGS else pytest.mark.sweep)
        for i, name in enumerate(RINGS)
        for mesh in (MESHES if i < 6 else [MESHES[i % 3], *([(4, 1)] if (name, (4, 1)) in QUICK_RINGS else [])])
    ],
    ids=str,
)
def test_a_ring_gives_the_values_and_gradients_of_one_device(name, mesh, small_ring):
    kwargs, extras, sizes = RINGS[name]
    operands = draw(**sizes)
    one_device, args = compiled(AttentionSetting(0.3, **kwargs), extras, operands)
    fn, args_on_mesh = compiled(AttentionSetting(0.3, split=split(*mesh), **kwargs), extras, operands)
    sent = [each for each in collectives(Module.of(fn.as_text())) if each.kind != "collective-permute"]
    if sizes.get("n_keys", T) % mesh[0] == 0:  # otherwise keys and their gradients come and go whole
        # With masks sums of the values, for queries whose keys are all masked, and gradients of a bias, for all its rows.
        is_padded = kwargs and sizes.get("n_keys", T) < sizes.get("n_queries", T)  # to as many keys, behind a length
        assert {each.kind for each in sent} <= ({"all-reduce"} if extras or is_padded else set())
        assert all(len(each.shape) < 4 or each.shape[1] == 1 or "bias" in extras for each in sent)
    assert_close(fn(*args_on_mesh), one_device(*args))


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_ring_of_large_scores_is_as_exact_as_one_device(causal, small_ring):
    """Scores are in the hundreds, and of one row all keys have a low bias, as padding has: a log-sum-exp in float32 would
    have lost the log of the sum."""
    bias = jnp.zeros((ROWS, 1, 1, T)).at[0].set(-1e9)
    setting, operands = AttentionSetting(60.0, causal=causal), draw(**ODD)
    one_device, args = compiled(setting, {"bias": bias}, operands)
    fn, args_on_mesh = compiled(replace(setting, split=split(4)), {"bias": bias}, operands)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in operands]
        exact, args_in_wide = compiled(setting, {"bias": bias.at[0].set(0).astype(jnp.float64)}, wide)
        want = jax.tree.leaves(exact(*args_in_wide))
    results = (jax.tree.leaves(each) for each in (fn(*args_on_mesh), one_device(*args), want))
    for found in list(zip(*results, strict=True))[:4]:  # all but the gradient of the bias
        ring, one, x = (np.asarray(each, np.float64) for each in found)
        assert_close(ring[0], one[0])  # whose scores are rounded to 64
        assert np.linalg.norm(ring[1:] - x[1:]) <= 3 * np.linalg.norm(one[1:] - x[1:])


@pytest.mark.sweep
def test_a_ring_in_bfloat16_is_as_exact_as_one_device(small_ring):
    """Each part is rounded, and their sum is not."""
    operands = [x.astype(jnp.bfloat16) for x in draw(**ODD)]
    setting, extras = AttentionSetting(0.3, causal=True, window=40), {"lengths": LENGTHS, **PACKED}

    def run(setting, operands):
        fn, args = compiled(setting, extras, operands)
        return [x.astype(jnp.float32) for x in jax.tree.leaves(fn(*args))]

    exact = run(setting, [x.astype(jnp.float32) for x in operands])
    for ring, by_one, x in zip(run(replace(setting, split=split(4)), operands), run(setting, operands), exact, strict=True):
        assert jnp.linalg.norm(ring - x) <= 1.5 * jnp.linalg.norm(by_one - x)


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["by heads", "by positions"])
def test_under_vmap_scan_and_remat(sizes):
    q, k, v, g = draw(**sizes)

    def loss(q, k, v, setting):
        def one(x, k, v):  # one row without a batch dim
            return x + attend(x, k, v, {}, setting)

        def step(x, _):
            return jax.checkpoint(jax.vmap(one))(x, k, v), None

        out, _ = jax.lax.scan(step, q, None, length=3)
        return jnp.vdot(out, g), out  # the outputs are compared: the sum is small, as terms of both signs cancel in it

    setting = AttentionSetting(0.3, causal=True)
    grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnames="setting")
    args = [place(x, split(4)) for x in (q, k, v)]
    assert_close(grad(*args, setting=replace(setting, split=split(4))), grad(q, k, v, setting=setting), 2e-6)


@pytest.mark.sweep
def test_second_derivatives():
    q, k, v, g = draw(16, 16)

    def twice(q, setting):
        return jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.vdot(attend(q, k, v, {}, setting), g))(q) ** 2))(q)

    setting = AttentionSetting(0.3, causal=True)
    got = jax.jit(partial(twice, setting=replace(setting, split=split(4))))(place(q, split(4)))
    assert_close(got, jax.jit(partial(twice, setting=setting))(q), 1e-5)


# --- what devices send and compute --------------------------------------------------------------------------------------


def sent(kwargs, sizes, mesh, extras=None):
    """Returns the bytes of each kind of collective of an attention and its gradient."""
    fn, _ = compiled(AttentionSetting(0.3, split=split(*mesh), **kwargs), extras or {}, draw(**sizes))
    found = {}
    for each in collectives(Module.of(fn.as_text())):
        found[each.kind] = found.get(each.kind, 0) + each.moved
    return found


@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)], ids=str)
def test_by_heads_only_exchanges(mesh):
    assert set(sent({"causal": True}, {}, mesh)) == {"all-to-all"}


def test_a_window_reads_only_the_keys_of_neighbours():
    found = sent({"causal": True, "window": 5}, {}, (4, 1))
    assert set(found) == {"collective-permute"}
    row = 2 * 2 * 2 * 8 * 4  # keys and values of 2 rows, 2 groups, 8 features, in bytes
    assert found["collective-permute"] == 2 * 4 * row  # 4 keys, and their gradients


def test_in_a_ring_keys_travel_no_further_than_a_window_reaches(small_ring):
    """Of 8 devices with 8 keys each: a window of 20 reaches 3 devices back, and one to both sides of 10 reaches 2."""
    shard = 2 * 4 * 8 * 3 * 8 * 4  # keys and values of a device, in bytes: 4 rows, 8 positions, 3 heads
    # In both passes keys and values, and in the second their gradients: before each round, and back. Those of both sides are
    # first sent ahead, which is the same in both passes.
    for kwargs, times in (({"causal": True, "window": 20}, 3 + 3 + 4 + 1), ({"window": 10}, 1 + 4 + 4 + 5 + 1)):
        assert sent(kwargs, ODD, (8, 1)) == {"collective-permute": times * shard}


def test_by_positions_gathers_keys_and_scatters_their_gradients():
    found = sent({}, ODD, (4, 1))
    assert set(found) == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize(("sizes", "share"), [({}, 1), (ODD, 9 / 16)], ids=["by heads", "by positions"])
def test_the_work_is_split(sizes, share):
    """By positions, each of 4 devices computes 9 of the 16 pairs of chunks that its queries have on one device."""

    def flops(setting):
        q, k, v, _ = (x if setting.split is None else place(x, setting.split) for x in draw(256, 256, **sizes))
        compiled = jax.jit(lambda q, k, v: attend(q, k, v, {}, setting)).lower(q, k, v).compile()
        return compiled.cost_analysis()["flops"]

    setting = AttentionSetting(0.3, causal=True)
    assert 8 * flops(replace(setting, split=split(4))) <= 1.05 * share * flops(setting)


# --- other kernels --------------------------------------------------------------------------------------------------------


def scores_of(setting, q, k, extras):
    assert not setting.offset and setting.split is None
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * setting.scale
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    mask = jnp.ones((1, 1, q.shape[1], k.shape[1]), bool)
    if setting.causal:
        assert q.shape[1] == k.shape[1]
        mask = mask & (i >= j)
    if setting.window is not None:
        mask = mask & (i - j < setting.window)
    if "lengths" in extras:
        mask = mask & (j < extras["lengths"][:, None])[:, None, None]
    if "query_segments" in extras:
        mask = mask & (extras["query_segments"][:, :, None] == extras["key_segments"][:, None])[:, None]
    if "mask" in extras:
        mask = mask & extras["mask"]
    return jnp.where(mask, scores + extras.get("bias", 0), -jnp.inf)


def dense_forward(setting, q, k, v, extras):
    """Like cuDNN's kernel: its causal mask has no offset, and the result for a row without keys is NaN."""
    scores = scores_of(setting, q, k, extras)
    log_sum = jax.nn.logsumexp(scores, -1)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - log_sum[..., None]), v), log_sum


def dense_backward(setting, q, k, v, extras, out, log_sum, g):
    """Takes the weights from the log-sum-exps that it gets, as cuDNN's kernel does."""
    repeats = q.shape[2] // k.shape[2]
    weights = jnp.exp(scores_of(setting, q, k, extras) - log_sum[..., None])
    d_weights = jnp.einsum("btnh,bsnh->bnts", g, jnp.repeat(v, repeats, 2))
    d_scores = weights * (d_weights - jnp.einsum("btnh,btnh->bnt", out, g)[..., None])
    dq = jnp.einsum("bnts,bsnh->btnh", d_scores, jnp.repeat(k, repeats, 2)) * setting.scale
    dk = jnp.einsum("bnts,btnh->bsnh", d_scores, q) * setting.scale
    dv = jnp.einsum("bnts,btnh->bsnh", weights, g)
    dk, dv = (x.reshape(*x.shape[:2], -1, repeats, x.shape[-1]).sum(3) for x in (dk, dv))
    bias = extras.get("bias")
    return [dq, dk, dv, *([] if bias is None else [d_scores.sum(0, keepdims=True)])]


DENSE = WithOffset(dense_forward, dense_backward)
WITH_OFFSETS = {
    "all keys": ({}, {}),
    "causal": ({"causal": True}, {}),
    "window": ({"causal": True, "window": 7}, {}),
    "wide window": ({"causal": True, "window": 30}, {}),
    "lengths": ({"causal": True}, {"lengths": jnp.array([3, 17, 64, 40])}),
    "window and lengths": ({"causal": True, "window": 60}, {"lengths": jnp.array([60, 61, 64, 62])}),
    "segments": ({"causal": True}, {"query_segments": SEGMENTS, "key_segments": SEGMENTS}),
    "bias": ({"causal": True, "window": 40}, {"bias": normal(1, 6, T, T)}),
    "mask": ({"causal": True}, {"mask": jnp.ones((1, 1, 1, T), bool).at[..., 5].set(False)}),
}


def run_by_positions(kernel, setting, extras, q, k, v, g):
    out, log_sum = forward_by_positions(kernel, setting, q, k, v, extras)
    grads = backward_by_positions(kernel, setting, q, k, v, extras, out, log_sum, g)
    return [out, log_sum.sum(-1) if setting.in_ring else log_sum, *grads]


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, n, marks=[pytest.mark.sweep] * (i % 2 or n > 2))
        for i, name in enumerate(WITH_OFFSETS)
        for n in (2, (4, 8)[i % 2])
    ],
)
def test_a_kernel_whose_causal_mask_has_no_offset(name, n):
    kwargs, extras = WITH_OFFSETS[name]
    setting = AttentionSetting(0.3, names=tuple(extras), **kwargs)
    q, k, v, g = operands = draw(n_heads=6, groups=2)
    if "lengths" in extras and "window" in kwargs:
        # Queries whose window lies behind a row's length have no keys: their result is unspecified, and their gradient 0.
        g = operands[3] = jnp.where((jnp.arange(T) < extras["lengths"][:, None])[..., None, None], g, 0)
    got = jax.jit(partial(run_by_positions, DENSE, replace(setting, split=split(n)), extras))(*operands)
    out, log_sum = dense_forward(setting, q, k, v, extras)
    want = [out, log_sum, *dense_backward(setting, q, k, v, extras, out, log_sum, g)]
    assert_close(got, want)


@pytest.fixture
def small_blocks(monkeypatch):
    """All masks of segments are too large to make at once. Blocks of one row have 32 queries, and of four 16."""
    monkeypatch.setattr("redeqx.kernels._dense.AT_ONCE", 0)
    monkeypatch.setattr("redeqx.kernels._dense.OF_BLOCK", 4096)


IN_BLOCKS = {
    "segments": ({}, {}),
    "causal": ({"causal": True}, {"lengths": jnp.array([64, 63, 64, 64])}),
    "causal, no even length": ({"causal": True}, {"n": 60}),
    "window": ({"causal": True, "window": 20}, {}),
    "one row of segments": ({"causal": True}, {"query_segments": SEGMENTS[:1], "key_segments": SEGMENTS[:1]}),
}


@pytest.mark.parametrize(
    "name", [*list(IN_BLOCKS)[:2], *(pytest.param(x, marks=pytest.mark.sweep) for x in list(IN_BLOCKS)[2:])]
)
def test_a_mask_of_segments_in_blocks(name, small_blocks):
    kwargs, others = IN_BLOCKS[name]
    n = others.get("n", T)
    extras = {name: x if name == "lengths" else x[:, :n] for name, x in {**PACKED, **others}.items() if name != "n"}
    setting, (q, k, v, g) = AttentionSetting(0.3, names=tuple(extras), **kwargs), draw(n, n, n_heads=6, groups=2)
    kernel = InBlocks(DENSE.forward, DENSE.backward)

    @jax.jit
    def run(q, k, v, g):
        out, log_sum = kernel.forward(setting, q, k, v, extras)
        return [out, log_sum, *kernel.backward(setting, q, k, v, extras, out, log_sum, g)]

    out, log_sum = dense_forward(setting, q, k, v, extras)
    want = [out, log_sum, *dense_backward(setting, q, k, v, extras, out, log_sum, g)]
    program = run.lower(q, k, v, g).compile()
    assert_close(program(q, k, v, g), want)
    assert f",{n},{n}]" not in program.as_text()


def test_in_blocks_a_query_without_keys_gets_the_mean_of_the_values(small_blocks):
    """As a softmax of scores of which all have the value of masked ones: here of texts that no key has, and of no length."""
    extras = {"query_segments": SEGMENTS.at[:, 20:30].set(9), "key_segments": SEGMENTS, "lengths": LENGTHS}
    setting, (q, k, v, g) = AttentionSetting(0.3, causal=True, names=tuple(extras)), draw(n_heads=6, groups=2)
    kernel = InBlocks(DENSE.forward, DENSE.backward)

    def by_formula(q, k, v):
        k, v = (jnp.repeat(x, 3, 2) for x in (k, v))
        mask = (extras["query_segments"][:, :, None] == SEGMENTS[:, None]) & jnp.tri(T, dtype=bool)
        mask = (mask & (jnp.arange(T) < LENGTHS[:, None, None]))[:, None]
        return jnp.einsum(
            "bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3, -1e9)), v
        )

    out, pull = jax.vjp(by_formula, q, k, v)
    found, log_sum = jax.jit(partial(kernel.forward, setting))(q, k, v, extras)
    grads = jax.jit(partial(kernel.backward, setting))(q, k, v, extras, found, log_sum, g)
    assert_close([found, *grads], [out, *pull(g)])


@pytest.mark.parametrize("in_ring", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_mask_of_segments_in_blocks_over_devices(in_ring, small_blocks):
    setting = AttentionSetting(0.3, causal=True, in_ring=in_ring, names=tuple(PACKED))
    q, k, v, g = draw(n_heads=6, groups=2)
    kernel = InBlocks(DENSE.forward, DENSE.backward)
    got = jax.jit(partial(run_by_positions, kernel, replace(setting, split=split(2)), PACKED))(q, k, v, g)
    out, log_sum = dense_forward(setting, q, k, v, PACKED)
    assert_close(got, [out, log_sum, *dense_backward(setting, q, k, v, PACKED, out, log_sum, g)])


@pytest.mark.parametrize("n", [2, pytest.param(8, marks=pytest.mark.sweep)])
def test_such_a_kernel_in_a_ring(n):
    setting = AttentionSetting(0.3, causal=True)
    q, k, v, g = draw(n_heads=6, groups=2)
    in_ring = replace(setting, split=split(n), in_ring=True)
    got = jax.jit(partial(run_by_positions, DENSE, in_ring, {}))(q, k, v, g)
    out, log_sum = dense_forward(setting, q, k, v, {})
    assert_close(got, [out, log_sum, *dense_backward(setting, q, k, v, {}, out, log_sum, g)])


SPLASH = [
    {"causal": True},
    {"causal": True, "window": 100},
    {"window": 70},
    {"in_ring": True},
    {"causal": True, "in_ring": True},
    {"causal": True, "window": 300, "in_ring": True},
    {"causal": False, "window": 300, "in_ring": True},
    # One text: some blocks of 128 queries see none of a chunk's keys.
    {"causal": True, "window": 500, "in_ring": True, "times": 24, "names": ()},
]


@pytest.mark.sweep
@pytest.mark.parametrize("kwargs", SPLASH, ids=str)
def test_splash_attention(kwargs):
    class Interpreted:
        forward = staticmethod(partial(KERNELS["splash attention"].forward, interpret=True))
        backward = staticmethod(partial(KERNELS["splash attention"].backward, interpret=True))

    kwargs = {"causal": True, "times": 16, "names": tuple(PACKED), **kwargs}
    times = kwargs.pop("times")
    extras = {name: jnp.repeat(SEGMENTS[:1], times, 1) for name in kwargs["names"]}
    q, k, v, g = (x[:1] for x in draw(times * T, times * T, 2, 1))
    setting = AttentionSetting(0.3, **kwargs)
    by_blocks, whole = KERNELS["XLA"], replace(setting, in_ring=False)
    out, log_sum = by_blocks.forward(whole, q, k, v, extras)
    want = [out, log_sum, *by_blocks.backward(whole, q, k, v, extras, out, log_sum, g)]
    got = jax.jit(partial(run_by_positions, Interpreted, replace(setting, split=split(4)), extras))(q, k, v, g)
    assert_close(got, want, 1e-5)


def test_splash_attention_in_a_ring_keeps_nan():
    """A block of queries that see no key is no part of the output; NaN that a model computed are none of these."""
    q, k, v, _ = (x[:1] for x in draw(4 * T, 4 * T, 2, 1))
    setting = AttentionSetting(0.3, causal=True, window=300, in_ring=True, offset=256)
    out, log_sum = KERNELS["splash attention"].forward(setting, q.at[:, 3].set(jnp.nan), k, v, {}, interpret=True)
    assert np.isnan(out[0, 3]).all() and np.isnan(log_sum[0, :, 3]).all()
    assert np.isfinite(out[0, 4:]).all()
