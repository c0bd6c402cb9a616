"""OPT: decoding with a cache, dropout, presets, old names of tensors, and the configs that it accepts and refuses."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.hf import ConfigReader
from redeqx.models.opt import OPT, OPTConfig
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = OPTConfig(53, 24, d_model=32, n_layers=2, n_heads=2, residual_dropout=0.0)
POST_NORM = dataclasses.replace(CONFIG, norm_places="sum", d_embedding=16)
PLAIN = dataclasses.replace(
    CONFIG,
    is_tied=False,
    attention_bias=False,
    mlp_bias=False,
    norm="plain_layer",
    has_final_norm=False,
    activation="gelu",
    d_mlp=40,
)
CONFIGS = pytest.mark.parametrize("config", [CONFIG, POST_NORM, PLAIN], ids=["pre-norm", "350m", "plain"])
IDS = jnp.array([5, 0, 52, 7, 7, 31, 2, 9, 44, 1, 17])


def make_model(config=CONFIG):
    return random_model(OPT, config)


@eqx.filter_jit
def run(model, ids, mask=None, key=None):
    return model(ids, mask=mask, key=key)


@eqx.filter_jit
def decode(model, ids, cache, mask=None):
    return model.decode(ids, cache, mask=mask)


@CONFIGS
def test_decoding_in_pieces_with_padding_equals_a_call(config):
    model = make_model(config)
    plain = run(model, IDS)
    ids = jnp.concatenate([jnp.array([1, 1, 1]), IDS])
    mask = jnp.arange(len(ids)) >= 3
    cache = model.init_cache(len(ids) + 2)
    start = 0
    for length in (6, 6, 1, 1):
        piece = slice(start, start + length)
        logits, cache = decode(model, ids[piece], cache, mask[piece])
        start += length
        np.testing.assert_allclose(logits, plain[start - 4], rtol=1e-4, atol=1e-4)
    assert int(cache.index) == len(ids)


def test_positions_start_at_the_third_row_and_end_at_the_last():
    model = make_model(dataclasses.replace(CONFIG, n_positions=len(IDS)))
    assert model.positions.shape == (len(IDS) + 2, 32)
    before = run(model, IDS)
    for row, n_reached in ((0, 0), (1, 0), (2, len(IDS)), (len(IDS) + 1, 1)):
        after = run(eqx.tree_at(lambda m: m.positions, model, model.positions.at[row].set(1)), IDS)
        assert (after != before).any(axis=1).sum() == n_reached


def test_hidden_has_the_width_of_the_embedding():
    model = make_model(POST_NORM)
    hidden = model.hidden(IDS)
    assert hidden.shape == (len(IDS), 16)
    np.testing.assert_allclose(model.logits(hidden), run(model, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["attention_dropout", "residual_dropout"])
def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(name):
    model = make_model(dataclasses.replace(CONFIG, **{name: 0.3}))
    a, same, b = (run(model, IDS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    np.testing.assert_allclose(run(eqx.nn.inference_mode(model), IDS), run(make_model(), IDS), rtol=1e-5, atol=1e-5)
    assert model.config.without_dropout() == CONFIG


def test_remat_changes_neither_value_nor_gradients():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return (model(IDS) ** 2).mean()

    plain, remat = loss(make_model(POST_NORM)), loss(make_model(dataclasses.replace(POST_NORM, remat=True)))
    np.testing.assert_allclose(plain[0], remat[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(remat[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert np.any(a != 0)  # every leaf has a gradient


@CONFIGS
def test_bfloat16_stays_bfloat16(config):
    model = make_model(config)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    logits, wanted = run(half, IDS), run(model, IDS)
    assert logits.dtype == jnp.bfloat16
    assert jnp.abs(logits.astype(jnp.float32) - wanted).mean() < 0.05 * wanted.std()
    assert half.init_cache(4).keys.dtype == jnp.bfloat16


def test_initial_weights_are_those_of_the_paper():
    model = eqx.filter_jit(OPT)(OPTConfig(400, 254, 128, 8, 4, d_embedding=64), key=jax.random.key(0))
    blocks = model.stack.blocks
    assert np.all(model.embedding.weight[1] == 0)  # the row of the padding token
    assert np.delete(model.embedding.weight, 1, 0).std() == pytest.approx(0.02, rel=0.02)
    for weight in (model.positions, model.project_in.weight, model.project_out.weight, blocks.attention.query.weight):
        assert weight.std() == pytest.approx(0.02, rel=0.02)
    for layer in (blocks.attention.output, blocks.mlp.down):
        assert layer.weight.std() == pytest.approx(0.02 / 4, rel=0.02)
    for layer in (blocks.attention.query, blocks.attention.output, blocks.mlp.up, blocks.mlp.down, blocks.mlp_norm):
        assert np.all(layer.bias == 0)
    unpadded = dataclasses.replace(CONFIG, pad_token_id=None)
    assert np.all(eqx.filter_jit(lambda key: OPT(unpadded, key=key).embedding.weight)(jax.random.key(0)) != 0)


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (OPTConfig.of("125m"), 125_239_296),
        (OPTConfig.of("350m"), 331_196_416),
        (OPTConfig.of("1.3b"), 1_315_758_080),
        (OPTConfig.of("2.7b"), 2_651_596_800),
        (OPTConfig.of("6.7b"), 6_658_473_984),
        (OPTConfig.of("13b"), 12_853_473_280),
        (OPTConfig.of("30b"), 29_974_540_288),
        (OPTConfig.of("66b"), 65_719_701_504),
    ],
)
def test_presets_have_the_published_number_of_parameters(config, n_parameters):
    model = eqx.filter_eval_shape(OPT, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_loads_the_hubs_base_models(tmp_path):
    model = make_model(POST_NORM)
    save_pretrained(model, POST_NORM, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    assert all(name.startswith("decoder.") for name in old)
    old |= {"lm_head.weight": old["decoder.embed_tokens.weight"], "decoder.version": np.array([3.0], np.float32)}
    save_file(old, file, metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["OPTModel"]}))
    again, config = from_pretrained(tmp_path)
    assert config == POST_NORM
    assert eqx.tree_equal(again, model)


@CONFIGS
def test_config_round_trip(config):
    config = dataclasses.replace(config, eos_token_id=(1, 2), pad_token_id=None, attention_dropout=0.1)
    assert OPTConfig.from_hf(ConfigReader(config.to_hf())) == config


def test_absent_keys_default_to_the_smallest_model():
    assert OPTConfig.from_hf(ConfigReader({})) == OPTConfig()
    assert OPTConfig.from_hf(ConfigReader({"word_embed_proj_dim": None})) == OPTConfig()
    config = OPTConfig.from_hf(ConfigReader({"layerdrop": 0, "activation_dropout": 0.0, "prefix": "</s>"}))
    assert config.extra == {"activation_dropout": 0.0, "prefix": "</s>"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "activation_function",
            "swiglu",
            r"`config\.json`: `activation_function`: expected 'gelu', .* or 'tanh', got 'swiglu'\.",
        ),
        (
            "layerdrop",
            0.1,
            r"`config\.json`: `layerdrop`: expected 0\.0, which this family implements, got 0\.1\. Load",
        ),
    ],
)
def test_refuses_what_it_does_not_implement(name, value, message):
    with pytest.raises(ValueError, match=message):
        OPTConfig.from_hf(ConfigReader({name: value}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, r"`n_layers`: expected at least 1, got 0"),
        ("d_embedding", 0, r"`d_embedding`: expected at least 1, got 0"),
        ("d_mlp", 0, r"`d_mlp`: expected at least 1, got 0"),
        ("n_heads", 5, r"`n_heads`: expected a divisor of `d_model`=32, got 5"),
        ("activation", "swiglu", r"`activation`: expected 'gelu', .* or 'tanh', got 'swiglu'"),
        ("attention_dropout", 1.0, r"`attention_dropout`: expected a rate in \[0, 1\), got 1\.0"),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_rejects_more_tokens_than_positions():
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=24 tokens, got 25\. Cut the example"):
        make_model()(jnp.zeros(25, int))
    with pytest.raises(ValueError, match=r"`length`: expected at most `n_positions`=24 tokens, got 25\. Cut the example"):
        make_model().init_cache(25)
