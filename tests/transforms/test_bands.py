"""Conjunctions of masks: whatever a kernel is told of them, values and gradients are those of the code as written."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.kernels import AttentionSetting, attend
from redeqx.tracing import equations, transformed
from redeqx.transforms import FuseAttention

N, SIZE, LOW = 24, 4, -1e9
Q, K, V = (jax.random.normal(jax.random.key(i), (2, N, 2, SIZE)) for i in range(3))
LENGTHS = jnp.array([9, N])
SEGMENTS = jnp.array([[0] * 7 + [1] * 17, [0] * 12 + [1] * 12])


def distance():
    return jnp.arange(N)[:, None] - jnp.arange(N)


def two_sided(left, right):
    return (distance() <= left) & (distance() >= -right)


# Each mask is `[rows or 1, queries, keys]`, True at keys that are attended to. The first ones are known while tracing.
MASKS = {
    "causal": lambda: jnp.arange(N)[:, None] >= jnp.arange(N),
    "causal, by tril": lambda: jnp.tril(jnp.ones((N, N), bool)),
    "causal, by numpy": lambda: np.tril(np.ones((N, N), bool)),
    "causal, negated": lambda: ~(jnp.arange(N)[:, None] < jnp.arange(N)),
    "strictly past": lambda: distance() > 0,
    "future": lambda: distance() <= 0,
    "window": lambda: distance() < 6,
    "wide window": lambda: distance() < N,
    "two-sided window": lambda: abs(np.arange(N)[:, None] - np.arange(N)) <= 3,
    "two-sided window, by comparisons": lambda: two_sided(4, 4),
    "two-sided window, more to the left": lambda: two_sided(8, 2),
    "two-sided window, more to the right": lambda: two_sided(2, 8),
    "padding": lambda: (jnp.arange(N) < LENGTHS[:, None])[:, None],
    "segments": lambda: SEGMENTS[:, :, None] == SEGMENTS[:, None],
}


def attention(q, k, v, masks, how):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(SIZE)
    masks = [jnp.asarray(MASKS[name]()) for name in masks]
    masks = [mask[:, None] if mask.ndim == 3 else mask for mask in masks]
    if how == "one after the other":
        for mask in masks:
            scores = jnp.where(mask, scores, LOW)
    elif how == "negated":  # of any that is False
        excluded = ~masks[0]
        for mask in masks[1:]:
            excluded = excluded | ~mask
        scores = jnp.where(excluded, LOW, scores)
    else:
        kept = masks[0]
        for mask in masks[1:]:
            kept = kept & mask
        scores = jnp.where(kept, scores, LOW)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)


def check(masks, how):
    def loss(fn):
        return lambda q, k, v: (jnp.sin(fn(q, k, v)) * jnp.arange(1.0, N + 1)[:, None, None]).mean()

    def written(q, k, v):
        return attention(q, k, v, masks, how)

    changed = transformed(written, [FuseAttention()])
    assert any(eqn.primitive.name == "attention" for eqn in equations(jax.make_jaxpr(changed)(Q, K, V))), "it is fused"
    expected, found = (jax.jit(jax.value_and_grad(loss(fn), (0, 1, 2)))(Q, K, V) for fn in (written, changed))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


WAYS = ["one after the other", "negated", "together"]
PAIRS = [*itertools.permutations(["causal", "two-sided window", "two-sided window, more to the right"], 2)]


def drawn(seed):
    """Two to four masks in a random order, and how they are combined."""
    rng = np.random.default_rng(seed)
    return [str(name) for name in rng.choice([*MASKS], rng.integers(2, 5), replace=False)], WAYS[seed % len(WAYS)]


def covering(first, last):
    """The seeds between which every two masks meet, and each mask in each way."""
    seen = set()
    for seed in range(first, last):
        masks, how = drawn(seed)
        new = {*itertools.combinations(sorted(masks), 2), *((mask, how) for mask in masks)} - seen
        if new:
            seen |= new
            yield seed


@pytest.mark.parametrize(("masks", "how"), [*((pair, WAYS[i % 3]) for i, pair in enumerate(PAIRS)), *map(drawn, range(6))])
def test_conjunctions_of_masks_keep_values_and_gradients(masks, how):
    check(masks, how)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [*covering(6, 150)])
def test_conjunctions_of_masks_keep_values_and_gradients_in_any_order(seed):
    check(*drawn(seed))


def test_a_mask_that_all_queries_share_is_no_causal_one():
    """The only row of a triangle of one row lets all queries attend to the first key."""

    def attention(q):
        return attend(q, K, V, {"mask": jnp.tril(jnp.ones((1, 1, 1, N), bool))}, AttentionSetting(1.0))

    np.testing.assert_allclose(transformed(attention, [FuseAttention()])(Q), jnp.broadcast_to(V[:, :1], V.shape), rtol=1e-5)
