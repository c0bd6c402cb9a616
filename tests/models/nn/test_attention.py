"""Compares the attention of all families with its definition in float64, and the cache with one call on all tokens."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.nn import Attention, Cache, causal_mask, learned_positions, normal_linear, token_positions

SEQ, D, HEADS, GROUPS, SIZE = 7, 12, 4, 2, 5
rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=(SEQ, D)), jnp.float32)


def make(**kwargs):
    keys = jax.random.split(jax.random.key(0), 4)
    wide, narrow = HEADS * SIZE, GROUPS * SIZE
    layer = lambda i, n_in, n_out: normal_linear(n_in, n_out, std=0.5, key=keys[i])  # noqa: E731
    return Attention(layer(0, D, wide), layer(1, D, narrow), layer(2, D, narrow), layer(3, wide, D), HEADS, GROUPS, **kwargs)


def reference(attention, x, memory, mask, bias, scale):
    """Computes the attention head by head, query by query, in float64."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) if eqx.is_array(leaf) else leaf, attention)
    x, memory = np.asarray(x, np.float64), np.asarray(memory, np.float64)
    q, k, v = (
        (rows @ layer.weight.T + layer.bias).reshape(len(rows), -1, SIZE)
        for layer, rows in ((w.query, x), (w.key, memory), (w.value, memory))
    )
    out = np.zeros((len(x), HEADS, SIZE))
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        for i in range(len(x)):
            scores = k[:, group] @ q[i, head] * scale + (0 if bias is None else np.asarray(bias, np.float64)[head, i])
            scores = np.where(np.broadcast_to(mask, (len(x), len(memory)))[i], scores, -np.inf)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[:, group]
    return out.reshape(len(x), -1) @ w.output.weight.T + w.output.bias


BIAS = jnp.asarray(rng.normal(size=(HEADS, SEQ, SEQ)), jnp.float32)


@pytest.mark.parametrize("dropout", [False, True], ids=["fused", "spelt out"])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["", "biased"])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_equals_the_definition(bias, scale, dropout):
    attention = make(scale=scale)
    if dropout:  # so small that nothing is dropped, but the dropout path is used
        attention = eqx.tree_at(lambda a: a.dropout, attention, eqx.nn.Dropout(1e-12))
    mask = causal_mask(None, SEQ)
    found, cache = attention(X, mask=mask, bias=bias, key=jax.random.key(0))
    assert cache is None
    expected = reference(attention, X, X, mask, bias, SIZE**-0.5 if scale is None else scale)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_attends_to_a_memory():
    attention, memory = make(), jnp.asarray(rng.normal(size=(3, D)), jnp.float32)
    mask = jnp.array([[True, False, True]])
    expected = reference(attention, X, memory, np.array(mask), None, SIZE**-0.5)
    np.testing.assert_allclose(attention(X, memory=memory, mask=mask)[0], expected, rtol=1e-4, atol=1e-5)
    pairs = attention.project_memory(memory)
    np.testing.assert_allclose(attention.attend_memory(X, pairs, mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_dropout_depends_on_the_key_and_keeps_the_mean():
    attention = make(dropout=eqx.nn.Dropout(0.2))
    keys = jax.random.split(jax.random.key(0), 400)
    noisy = jax.jit(jax.vmap(lambda key: attention(X, key=key)[0]))(keys)
    quiet = eqx.nn.inference_mode(attention)(X)[0]
    assert noisy.std(0).mean() > 0.05
    assert jnp.abs(noisy.mean(0) - quiet).max() < 0.3 * noisy.std(0).max()
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        attention(X)


# --- masks and positions ---------------------------------------------------------------------------------------------


def test_causal_masks_with_and_without_a_window():
    mask = jnp.array([False, True, True, True, True])
    expected = [  # padding attends to itself, so that its softmax is not empty
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 1, 1, 1, 1],
    ]
    np.testing.assert_array_equal(causal_mask(mask, 5), np.array(expected, bool))
    np.testing.assert_array_equal(causal_mask(None, 5), np.tri(5, dtype=bool))
    np.testing.assert_array_equal(causal_mask(None, 5, window=2), np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))


def test_positions_count_tokens():
    mask = jnp.array([False, False, True, True, False, True])
    np.testing.assert_array_equal(token_positions(mask, 6), [0, 0, 0, 1, 1, 2])
    np.testing.assert_array_equal(token_positions(None, 3), [0, 1, 2])
    table = jnp.arange(20.0).reshape(10, 2)
    np.testing.assert_array_equal(learned_positions(table, mask, 6, offset=2), table[np.array([2, 2, 2, 3, 3, 4])])
    np.testing.assert_array_equal(learned_positions(table, None, 3), table[:3])


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "window"),
    [((0, 7), 3), ((0, 1, 2, 3, 4, 5, 6, 7), None), ((0, 4, 5, 7), 3)],
    ids=["whole", "one by one", "pieces"],
)
def test_decoding_in_pieces_with_a_cache_equals_one_call(cuts, window):
    attention, real = make(), jnp.array([False, False, True, True, True, True, True])
    expected = attention(X, mask=causal_mask(real, SEQ, window=window))[0]
    cache, found = Cache.empty(1, SEQ + 2, GROUPS, SIZE, jnp.float32), []
    for start, stop in itertools.pairwise(cuts):
        cache = cache.begin(real[start:stop])
        mask = causal_mask(real[start:stop], stop - start, cache, window=window)
        assert mask.shape == (stop - start, SEQ + 2)
        np.testing.assert_array_equal(token_positions(None, stop - start, cache), token_positions(real, SEQ)[start:stop])
        out, cache = attention(X[start:stop], mask=mask, cache=cache)
        cache = cache.end(stop - start)
        found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found), expected, rtol=1e-5, atol=1e-6)
    assert cache.index == SEQ and cache.layer == 0


def test_layers_write_in_order_and_batches_share_the_counters():
    def write(row):
        cache = Cache.empty(2, 4, GROUPS, SIZE, jnp.float32).begin(jnp.array([True]))
        ones = jnp.full((GROUPS, 1, SIZE), row)
        cache, first, _ = cache.write(ones, -ones)
        cache, second, _ = cache.write(2 * ones, -ones)
        return cache.end(1), (first, second)

    axes = jax.eval_shape(write, 1.0)[0].axes()
    cache, (first, second) = jax.vmap(write, out_axes=(axes, 0))(jnp.array([1.0, 3.0, 5.0]))
    assert cache.keys.shape == (3, 2, GROUPS, 4, SIZE)
    assert cache.index.shape == () and cache.index == 1
    np.testing.assert_array_equal(cache.keys[:, :, 0, 0, 0], [[1, 2], [3, 6], [5, 10]])
    np.testing.assert_array_equal(first[:, 0, 0, 0], [1, 3, 5])
    np.testing.assert_array_equal(second[:, 0, 0, 0], [2, 6, 10])


def test_a_cache_in_bfloat16_keeps_its_dtype():
    attention = make()
    cache = Cache.empty(1, SEQ, GROUPS, SIZE, jnp.bfloat16).begin(jnp.ones(SEQ, bool))
    out, cache = attention(X, mask=causal_mask(None, SEQ, cache), cache=cache)
    assert out.dtype == jnp.float32 and cache.keys.dtype == jnp.bfloat16


def test_fields_are_those_of_the_registered_attention():
    assert {"query", "key", "value", "output", "n_heads", "n_kv_heads"} <= {f.name for f in dataclasses.fields(Attention)}
