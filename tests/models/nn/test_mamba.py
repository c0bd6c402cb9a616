"""`Mamba2`: values and gradients by a loop over tokens, padding, segments, and decoding from a state; in 64 bits."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.decoder import make_mamba
from redeqx.models.granite_hybrid import GraniteMoeHybridConfig
from redeqx.models.nn import Cache, States
from tests._tree import drawn
from tests.models.families._case import in_float64

pytestmark = pytest.mark.usefixtures("x64")

D, GROUPS, HEADS, SIZE, VALUE, KERNEL = 12, 2, 4, 5, 6, 4
SEQ = 150  # three chunks, the last one not full
LIMITS = (0.02, 2.0)
CONFIG = GraniteMoeHybridConfig(
    d_model=D,
    n_heads=2,
    state_groups=GROUPS,
    state_heads=HEADS,
    state_size=SIZE,
    state_value_size=VALUE,
    step_limits=LIMITS,
    conv_kernel=KERNEL,
)
LAYER = drawn(eqx.filter_eval_shape(make_mamba, CONFIG, jax.random.key(0)), 0.5)
# Some heads forget within a few tokens, others keep what they hold over many chunks.
LAYER = eqx.tree_at(lambda layer: layer.log_rate, LAYER, jnp.log(jnp.array([1e-3, 0.01, 0.3, 5.0])))
X = np.random.default_rng(0).normal(size=(SEQ, D))
run = eqx.filter_jit(lambda layer, x, **options: layer(x, **options)[0])


def by_tokens(layer, x):
    """Returns the same from the definition: a loop over tokens, one head at a time."""

    def convolved(name):
        linear, taps, bias = (getattr(layer, f"{name}{end}") for end in ("", "_taps", "_bias"))
        rows = jnp.pad(x @ linear.weight.T, ((KERNEL - 1, 0), (0, 0)))
        return jax.nn.silu(jnp.stack([(rows[t : t + KERNEL] * taps.T).sum(0) for t in range(len(x))]) + bias)

    query, key, value = map(convolved, ("query", "key", "value"))
    steps = jnp.clip(jax.nn.softplus(x @ layer.decay.weight.T + layer.decay_bias), *LIMITS)
    keep = jnp.exp(-jnp.exp(layer.log_rate) * steps)
    found = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        q, k = (a[:, group * SIZE : (group + 1) * SIZE] for a in (query, key))
        v = value[:, head * VALUE : (head + 1) * VALUE]

        def step(memory, token):
            q, k, v, step, keep = token
            memory = keep * memory + step * jnp.outer(k, v)
            return memory, q @ memory

        out = jax.lax.scan(step, jnp.zeros((SIZE, VALUE)), (q, k, v, steps[:, head], keep[:, head]))[1]
        found.append(out + layer.skip[head] * v)
    mixed = (jnp.concatenate(found, -1) * jax.nn.silu(x @ layer.gate.weight.T)).reshape(len(x), GROUPS, -1)
    mixed = mixed / jnp.sqrt((mixed**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    return (mixed.reshape(len(x), -1) * layer.norm.weight) @ layer.output.weight.T


@pytest.mark.sweep
def test_values_and_gradients_are_those_of_a_loop_over_tokens():
    weights = np.random.default_rng(1).normal(size=(SEQ, D))

    def gradients(fn):
        def loss(args):
            y = fn(*args)
            return (y * weights).sum(), y

        return eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))((in_float64(LAYER), jnp.asarray(X)))

    (ours, found), (expected, wanted) = (gradients(fn) for fn in (lambda layer, x: layer(x)[0], by_tokens))
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) < 1e-9 * np.linalg.norm(other)


@pytest.mark.sweep
def test_padding_and_segments_change_nothing():
    """Padding on the left is as no token, also with biases, and each segment is computed as alone."""
    layer, lengths = in_float64(LAYER), [50, 1, 99]
    starts = np.cumsum([0, *lengths])
    segments = np.repeat([4, 7, 0], lengths)
    alone = np.concatenate([run(layer, X[a:b]) for a, b in itertools.pairwise(starts)])
    np.testing.assert_allclose(run(layer, X, segments=jnp.asarray(segments)), alone, atol=1e-9)
    padded = run(layer, X, mask=jnp.arange(SEQ) >= 51)
    np.testing.assert_allclose(padded[51:], alone[51:], atol=1e-9)
    assert np.isfinite(padded).all()


@pytest.mark.sweep
def test_a_state_continues_the_text():
    """In one call after another, of many tokens or of one, each token is what it is in one call; and the text goes back."""
    widths = (GROUPS * SIZE, GROUPS * SIZE, HEADS * VALUE)
    rows = tuple((1, KERNEL - 1, width) for width in widths)
    states = States.empty(rows, (1, HEADS, SIZE, VALUE), jnp.float64)
    cache = eqx.tree_at(lambda c: c.states, Cache.empty(0, SEQ, 1, 1, jnp.float64), states, is_leaf=lambda x: x is None)
    layer, found = in_float64(LAYER), []
    call = eqx.filter_jit(lambda x, cache: layer(x, cache=cache.begin(jnp.ones(len(x), bool))))
    for start, stop in itertools.pairwise((0, 70, 71, 140)):
        out, cache = call(X[start:stop], cache)
        assert cache.states.layer == 1
        found.append(out)
        cache = cache.end(stop - start)
    cache = cache.keep(5)
    first, cache = call(X[140:144], cache)
    cache = eqx.tree_at(lambda c: c.index, cache.end(4), jnp.int32(142))  # only two of four
    second, _ = call(X[142:146], cache)
    found += [first[:2], second]
    np.testing.assert_allclose(np.concatenate(found), run(layer, X)[:146], atol=1e-9)
