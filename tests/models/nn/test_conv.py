"""`ShortConv`: values from the definition, padding, segments, and decoding from its last inputs; in 64 bits."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.decoder import make_conv
from redeqx.models.lfm import Lfm2Config
from redeqx.models.nn import Cache, States
from tests.models.families._case import in_float64

pytestmark = pytest.mark.usefixtures("x64")

D, KERNEL, SEQ = 8, 4, 20
LAYER = make_conv(Lfm2Config(d_model=D, n_heads=2, n_kv_heads=2, conv_kernel=KERNEL, init_std=0.5), jax.random.key(0))
X = np.random.default_rng(0).normal(size=(SEQ, D))
run = eqx.filter_jit(lambda layer, x, **options: layer(x, **options)[0])


def by_tokens(layer, x):
    """Returns the same from the definition, one token at a time."""
    value, gate_in, gate_out = (x @ getattr(layer, name).weight.T for name in ("value", "gate_in", "gate_out"))
    rows = np.pad(gate_in * value, ((KERNEL - 1, 0), (0, 0)))
    mixed = np.stack([(rows[t : t + KERNEL] * layer.taps.T).sum(0) for t in range(len(x))])
    return (gate_out * mixed) @ layer.output.weight.T


def test_padding_and_segments_change_nothing():
    """Padding on the left is as no token, and each segment is computed as alone."""
    layer, lengths = in_float64(LAYER), [7, 1, 12]
    starts = np.cumsum([0, *lengths])
    alone = np.concatenate([by_tokens(layer, X[a:b]) for a, b in itertools.pairwise(starts)])
    np.testing.assert_allclose(run(layer, X, segments=jnp.asarray(np.repeat([4, 7, 0], lengths))), alone, atol=1e-12)
    np.testing.assert_allclose(run(layer, X, mask=jnp.arange(SEQ) >= 8)[8:], alone[8:], atol=1e-12)


def empty():
    states = States.empty(((1, KERNEL - 1, D),), None, jnp.float64)
    return eqx.tree_at(lambda c: c.states, Cache.empty(0, SEQ, 1, 1, jnp.float64), states, is_leaf=lambda x: x is None)


@pytest.mark.sweep
def test_its_last_inputs_continue_the_text():
    """In one call after another, each token is what it is in one call; and with earlier states the cache goes back."""
    layer = in_float64(LAYER)
    call = eqx.filter_jit(lambda x, cache: layer(x, cache=cache.begin(jnp.ones(len(x), bool))))
    cache, found, expected = empty(), [], by_tokens(layer, X)
    for start, stop in itertools.pairwise((0, 2, 3, 12)):
        out, cache = call(X[start:stop], cache)
        found.append(out)
        cache = cache.end(stop - start)
    np.testing.assert_allclose(np.concatenate(found), expected[:12], atol=1e-12)
    first, after = call(X[12:16], cache.keep(5))
    after = eqx.tree_at(lambda c: c.index, after.end(4), after.index + 2)  # only two of four
    second, _ = call(X[14:17], after)
    np.testing.assert_allclose(np.concatenate([first[:2], second]), expected[12:17], atol=1e-12)
