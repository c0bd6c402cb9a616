"""Mixers with a state: values and gradients by a loop over tokens, padding, segments, and decoding; in 64 bits."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.decoder import make_delta, make_mamba, make_mamba1
from redeqx.models.granite_hybrid import GraniteMoeHybridConfig
from redeqx.models.jamba import JambaConfig
from redeqx.models.nn import Cache, States
from redeqx.models.qwen_next import Qwen3NextConfig
from tests._tree import drawn
from tests.models.families._case import in_float64

pytestmark = pytest.mark.usefixtures("x64")

D, GROUPS, HEADS, SIZE, VALUE, KERNEL = 12, 2, 4, 5, 6, 4
SEQ = 150  # three chunks, the last one not full
LIMITS = (0.02, 2.0)
SIZES = {
    "d_model": D,
    "state_groups": GROUPS,
    "state_heads": HEADS,
    "state_size": SIZE,
    "state_value_size": VALUE,
    "conv_kernel": KERNEL,
}
DELTA = Qwen3NextConfig(**SIZES, init_std=0.5)
MAMBA = GraniteMoeHybridConfig(**SIZES, n_heads=2, step_limits=LIMITS)
INNER = HEADS * VALUE
MAMBA1 = JambaConfig(d_model=D, n_heads=2, n_kv_heads=None, state_size=SIZE, state_value_size=INNER, conv_kernel=KERNEL)
X = np.random.default_rng(0).normal(size=(SEQ, D))
run = eqx.filter_jit(lambda layer, x, **options: layer(x, **options)[0])


def convolved(layer, x):
    """Returns queries, keys and values."""
    for name in ("query", "key", "value"):
        linear, taps, bias = (getattr(layer, f"{name}{end}", 0.0) for end in ("", "_taps", "_bias"))
        rows = jnp.pad(x @ linear.weight.T, ((KERNEL - 1, 0), (0, 0)))
        yield jax.nn.silu(jnp.stack([(rows[t : t + KERNEL] * taps.T).sum(0) for t in range(len(x))]) + bias)


def heads_of(layer, x):
    """Yields, for each head, its queries, keys and values."""
    query, key, value = convolved(layer, x)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        q, k = (a[:, group * SIZE : (group + 1) * SIZE] for a in (query, key))
        yield q, k, value[:, head * VALUE : (head + 1) * VALUE]


def delta_by_tokens(layer, x):
    """Returns the same from the definition: a loop over tokens, one head at a time."""
    strength = jax.nn.sigmoid(x @ layer.strength.weight.T)
    keep = jnp.exp(-jnp.exp(layer.log_rate) * jax.nn.softplus(x @ layer.decay.weight.T + layer.decay_bias))
    gate = jax.nn.silu(x @ layer.gate.weight.T)
    found = []

    def step(memory, token):
        q, k, v, strength, keep = token
        memory = keep * memory
        memory = memory + strength * jnp.outer(k, v - k @ memory)
        return memory, q @ memory / SIZE**0.5

    for head, (q, k, v) in enumerate(heads_of(layer, x)):
        q, k = (a / jnp.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        out = jax.lax.scan(step, jnp.zeros((SIZE, VALUE)), (q, k, v, strength[:, head], keep[:, head]))[1]
        out = out / jnp.sqrt((out**2).mean(-1, keepdims=True) + DELTA.norm_eps) * layer.norm.weight
        found.append(out * gate[:, head * VALUE : (head + 1) * VALUE])
    return jnp.concatenate(found, -1) @ layer.output.weight.T


def mamba_by_tokens(layer, x):
    steps = jnp.clip(jax.nn.softplus(x @ layer.decay.weight.T + layer.decay_bias), *LIMITS)
    keep = jnp.exp(-jnp.exp(layer.log_rate) * steps)
    found = []

    def step(memory, token):
        q, k, v, step, keep = token
        memory = keep * memory + step * jnp.outer(k, v)
        return memory, q @ memory

    for head, (q, k, v) in enumerate(heads_of(layer, x)):
        out = jax.lax.scan(step, jnp.zeros((SIZE, VALUE)), (q, k, v, steps[:, head], keep[:, head]))[1]
        found.append(out + layer.skip[head] * v)
    mixed = (jnp.concatenate(found, -1) * jax.nn.silu(x @ layer.gate.weight.T)).reshape(len(x), GROUPS, -1)
    mixed = mixed / jnp.sqrt((mixed**2).mean(-1, keepdims=True) + MAMBA.norm_eps)
    return (mixed.reshape(len(x), -1) * layer.norm.weight) @ layer.output.weight.T


def mamba1_by_tokens(layer, x):
    def normed(layer, x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + MAMBA1.norm_eps) * layer.weight

    rows = jnp.pad(x @ layer.value.weight.T, ((KERNEL - 1, 0), (0, 0)))
    rows = jnp.stack([(rows[t : t + KERNEL] * layer.value_taps.T).sum(0) for t in range(len(x))])
    v = jax.nn.silu(rows + layer.value_bias)
    q, k, low = (normed(getattr(layer, f"{n}_norm"), v @ getattr(layer, n).weight.T) for n in ("query", "key", "low"))
    steps = jax.nn.softplus(low @ layer.decay.weight.T + layer.decay_bias)

    def step(memory, token):
        q, k, v, step = token
        memory = jnp.exp(-jnp.exp(layer.log_rate.T) * step) * memory + jnp.outer(k, step * v)
        return memory, q @ memory

    out = jax.lax.scan(step, jnp.zeros((SIZE, INNER)), (q, k, v, steps))[1]
    return ((out + layer.skip * v) * jax.nn.silu(x @ layer.gate.weight.T)) @ layer.output.weight.T


def with_rates(layer):
    """Some heads forget within a few tokens, others keep what they hold over many chunks."""
    return eqx.tree_at(lambda layer: layer.log_rate, layer, jnp.log(jnp.array([1e-3, 0.01, 0.3, 5.0])))


LAYERS = {
    "delta": with_rates(make_delta(DELTA, jax.random.key(0))),
    "mamba": with_rates(drawn(eqx.filter_eval_shape(make_mamba, MAMBA, jax.random.key(0)), 0.5)),
    "mamba1": drawn(eqx.filter_eval_shape(make_mamba1, MAMBA1, jax.random.key(0)), 0.5),
}
BY_TOKENS = {"delta": delta_by_tokens, "mamba": mamba_by_tokens, "mamba1": mamba1_by_tokens}


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.mark.sweep
def test_values_and_gradients_are_those_of_a_loop_over_tokens(name):
    weights = np.random.default_rng(1).normal(size=(SEQ, D))

    def gradients(fn):
        def loss(args):
            y = fn(*args)
            return (y * weights).sum(), y

        return eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))((in_float64(LAYERS[name]), jnp.asarray(X)))

    (ours, found), (expected, wanted) = (gradients(fn) for fn in (lambda layer, x: layer(x)[0], BY_TOKENS[name]))
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) < 1e-9 * np.linalg.norm(other)


@pytest.mark.sweep
def test_equal_keys_and_full_strength_stay_finite_and_exact():
    """The triangular system with the largest entries: a power series of it would be wrong by more than the values."""
    of = lambda layer: (layer.log_rate, layer.strength.weight)  # noqa: E731
    layer = eqx.tree_at(of, in_float64(LAYERS["delta"]), (jnp.full(HEADS, -20.0), 50 * jnp.ones((HEADS, D))))
    x = jnp.abs(jnp.asarray(X[:1])).repeat(SEQ, 0)
    np.testing.assert_allclose(run(layer, x), eqx.filter_jit(delta_by_tokens)(layer, x), atol=1e-9)


@pytest.mark.sweep
def test_padding_and_segments_change_nothing(name):
    """Padding on the left is as no token, also with biases, and each segment is computed as alone, wherever chunks begin."""
    layer, lengths = in_float64(LAYERS[name]), [50, 1, 99]
    starts = np.cumsum([0, *lengths])
    segments = np.repeat([4, 7, 0], lengths)
    alone = np.concatenate([run(layer, X[a:b]) for a, b in itertools.pairwise(starts)])
    np.testing.assert_allclose(run(layer, X, segments=jnp.asarray(segments)), alone, atol=1e-9)
    padded = run(layer, X, mask=jnp.arange(SEQ) >= 51)
    np.testing.assert_allclose(padded[51:], alone[51:], atol=1e-9)
    assert np.isfinite(padded).all()


def empty(name):
    widths, heads = (
        ((INNER,), (1, SIZE, INNER)) if name == "mamba1" else ((GROUPS * SIZE,) * 2 + (INNER,), (HEADS, SIZE, VALUE))
    )
    states = States.empty(tuple((1, KERNEL - 1, width) for width in widths), (1, *heads), jnp.float64)
    cache = Cache.empty(0, SEQ, 1, 1, jnp.float64)
    return eqx.tree_at(lambda c: c.states, cache, states, is_leaf=lambda x: x is None)


@pytest.mark.sweep
def test_a_state_continues_the_text(name):
    """In one call after another, of many tokens or of one, each token is what it is in one call."""
    cache, layer = empty(name), in_float64(LAYERS[name])
    call = eqx.filter_jit(lambda x, cache: layer(x, cache=cache.begin(jnp.ones(len(x), bool))))
    found = []
    for start, stop in itertools.pairwise((0, 70, 71, 149, 150)):
        out, cache = call(X[start:stop], cache)
        assert cache.states.layer == 1
        found.append(out)
        cache = cache.end(stop - start)
    np.testing.assert_allclose(np.concatenate(found), run(layer, X), atol=1e-9)
    assert cache.index == SEQ and cache.states.layer == 0


@pytest.mark.sweep
def test_a_cache_with_earlier_states_goes_back(name):
    """After a call of several tokens, the text goes on from any of them."""
    layer = in_float64(LAYERS[name])
    call = eqx.filter_jit(lambda x, cache: layer(x, cache=cache.begin(jnp.ones(len(x), bool))))
    _, cache = call(X[:7], empty(name))
    cache = cache.end(7).keep(5)
    _, after = call(X[60:64], cache)  # four others, of which none is kept
    after = eqx.tree_at(lambda c: (c.index, c.states.layer), after, (cache.index, cache.states.layer))
    first, after = call(X[7:11], after)
    after = eqx.tree_at(lambda c: c.index, after.end(4), after.index + 2)  # only two of four
    second, _ = call(X[9:12], after)
    np.testing.assert_allclose(np.concatenate([first[:2], second]), run(layer, X[:12])[7:], atol=1e-9)
