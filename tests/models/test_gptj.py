"""GPT-J: decoding with a cache, dropout, presets, and the configs that it accepts and refuses."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.gptj import GPTJ, GPTJConfig
from redeqx.models.hf import ConfigReader
from redeqx.models.nn import apply_rotary, rotation
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = GPTJConfig(53, 24, d_model=32, n_layers=2, n_heads=2, rope_share=6 / 16)
NAMES = ("embedding_dropout", "attention_dropout", "residual_dropout")
IDS = jnp.array([5, 0, 52, 7, 7, 31, 2, 9, 44, 1, 17])


def make_model(config=CONFIG):
    return random_model(GPTJ, config)


@eqx.filter_jit
def run(model, ids, mask=None, key=None):
    return model(ids, mask=mask, key=key)


@eqx.filter_jit
def decode(model, ids, cache, mask=None):
    return model.decode(ids, cache, mask=mask)


def test_rotary_rotates_adjacent_pairs_and_keeps_other_dims():
    rng, positions = np.random.default_rng(0), np.array([0, 1, 5, 2047])
    x = rng.normal(size=(4, 2, 16)).astype(np.float32)
    found = np.asarray(apply_rotary(jnp.asarray(x), *rotation(jnp.asarray(positions), 6, 10000.0), is_interleaved=True))
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])
    angles = positions[:, None] * 10000.0 ** (-np.array([0, 2, 4]) / 6)  # in float64
    pairs = (x[..., 0:6:2] + 1j * x[..., 1:6:2]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(found[..., 0:6:2], pairs.real, atol=3e-4)  # angles up to 2047 in float32
    np.testing.assert_allclose(found[..., 1:6:2], pairs.imag, atol=3e-4)


def test_decoding_in_pieces_with_padding_equals_a_call():
    model = make_model()
    plain = run(model, IDS)
    ids = jnp.concatenate([jnp.array([3, 3, 3]), IDS])
    mask = jnp.arange(len(ids)) >= 3
    cache = model.init_cache(len(ids) + 2)
    start = 0
    for length in (2, 5, 5, 1, 1):  # the first piece is only padding
        piece = slice(start, start + length)
        logits, cache = decode(model, ids[piece], cache, mask[piece])
        start += length
        if start > 3:
            np.testing.assert_allclose(logits, plain[start - 4], rtol=1e-4, atol=1e-4)
    assert int(cache.index) == len(ids)


def test_logits_of_hidden_states_equal_a_call():
    model = make_model()
    np.testing.assert_allclose(model.logits(model.hidden(IDS)), run(model, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(name):
    model = make_model(dataclasses.replace(CONFIG, **{name: 0.3}))
    a, same, b = (run(model, IDS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    np.testing.assert_allclose(run(eqx.nn.inference_mode(model), IDS), run(make_model(), IDS), rtol=1e-5, atol=1e-5)
    assert model.config.without_dropout() == CONFIG


def test_initial_weights():
    model = eqx.filter_jit(GPTJ)(GPTJConfig(400, 8, 128, 4, 4), key=jax.random.key(0))
    blocks = model.stack.blocks
    for layer in (
        model.embedding,
        model.head,
        blocks.attention.query,
        blocks.attention.output,
        blocks.mlp.up,
        blocks.mlp.down,
    ):
        assert layer.weight.std() == pytest.approx(0.02, rel=0.02)
    for bias in (model.head.bias, blocks.mlp.up.bias, blocks.mlp.down.bias, blocks.attention_norm.bias, model.norm.bias):
        assert np.all(bias == 0)


@pytest.mark.parametrize(("is_tied", "n_parameters"), [(False, 6_050_882_784), (True, 6_050_882_784 - 50400 * 4096)])
def test_the_preset_has_the_published_number_of_parameters(is_tied, n_parameters):
    config = dataclasses.replace(GPTJConfig.of("6b"), is_tied=is_tied)
    model = eqx.filter_eval_shape(GPTJ, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_config_round_trip():
    for config in (
        GPTJConfig(),
        dataclasses.replace(CONFIG, d_mlp=40, is_tied=True, eos_token_id=(1, 2), bos_token_id=None, residual_dropout=0.1),
    ):
        assert GPTJConfig.from_hf(ConfigReader(config.to_hf())) == config
    assert GPTJConfig.from_hf(ConfigReader({})) == GPTJConfig()
    assert GPTJConfig.from_hf(ConfigReader({"n_inner": 4 * 4096, "rotary": True, "use_cache": True})) == GPTJConfig()
    assert GPTJConfig.from_hf(ConfigReader({"rotary_dim": 32, "use_cache": False})).extra == {"use_cache": False}


def test_a_null_rotary_size_is_the_whole_head():
    config = GPTJConfig.from_hf(ConfigReader({"n_embd": 32, "n_head": 4, "rotary_dim": None}))
    assert config.rotary_size == 8
    assert config.to_hf()["rotary_dim"] == 8


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, r"`n_layers`: expected at least 1, got 0"),
        ("d_mlp", 0, r"`d_mlp`: expected at least 1, got 0"),
        ("n_heads", 5, r"`n_heads`: expected a divisor of `d_model`=32, got 5"),
        ("rope_share", 5 / 16, r"`rope_share`: expected an even number of rotary dims, got 5\. Rotary"),
        ("rope_share", 18 / 16, r"`rope_share`: expected an even number of rotary dims, got 18"),
        ("rope_share", 0.0, r"`rope_share`: expected an even number of rotary dims, got 0"),
        ("attention_dropout", 1.0, r"`attention_dropout`: expected a rate in \[0, 1\), got 1\.0"),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})
