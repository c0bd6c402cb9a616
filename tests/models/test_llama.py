"""The LLaMA family: decoding with a cache and a window, rotary positions, presets, plans, and the configs of four types."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import redeqx
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.hf import ConfigReader
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.mistral import Mistral, MistralConfig
from redeqx.models.nn import LinearScaling, Llama3Scaling, YarnScaling, apply_rotary, rotation
from redeqx.models.qwen import Qwen2, Qwen2Config, Qwen3, Qwen3Config
from redeqx.transforms import attentions
from tests.models.families._case import is_shape, random_model

SIZES = {"vocab_size": 53, "n_positions": 24, "d_model": 32, "d_mlp": 40, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
CONFIG = LlamaConfig(**SIZES, attention_dropout=0.1)
NO_DROPOUT = CONFIG.without_dropout()
MISTRAL = MistralConfig(**SIZES, window=4)
QWEN2 = Qwen2Config(**SIZES, window=4, windowed_layers=(1,))
QWEN3 = Qwen3Config(**{**SIZES, "n_kv_heads": 1}, head_size=10, is_tied=True)
MODELS = {cls.config_class: cls for cls in (Llama, Mistral, Qwen2, Qwen3)}
IDS = jnp.array([5, 0, 52, 7, 7, 31, 2, 9, 44, 1, 17])


def make_model(config=NO_DROPOUT):
    return random_model(MODELS[type(config)], config)


def test_kernels_recognise_the_causal_mask():
    """If all layers have the same mask, no bias of tokens x tokens is made."""

    def kinds(config):
        model = make_model(config)
        return list(attentions(jax.make_jaxpr(lambda ids: model(ids))(IDS))[0])

    assert kinds(NO_DROPOUT) == ["causal, in blocks of queries"]
    (windowed,) = kinds(MISTRAL)
    assert "window" in windowed and "bias" not in windowed


@eqx.filter_jit
def run(model, ids, mask=None, key=None):
    return model(ids, mask=mask, key=key)


@eqx.filter_jit
def decode(model, ids, cache, mask=None):
    return model.decode(ids, cache, mask=mask)


def read(cls=LlamaConfig, **fields):
    return cls.from_hf(ConfigReader(fields))


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [NO_DROPOUT, *(pytest.param(x, marks=pytest.mark.sweep) for x in (MISTRAL, QWEN2, QWEN3))],
    ids=lambda config: config.model_type,
)
def test_decoding_in_pieces_with_padding_equals_a_call(config):
    model = make_model(config)
    plain = run(model, IDS)
    ids = jnp.concatenate([jnp.array([1, 1, 1]), IDS])
    mask = jnp.arange(len(ids)) >= 3
    cache = model.init_cache(len(ids) + 2)
    assert cache.keys.size == 2 * (len(ids) + 2) * config.groups * config.size
    start = 0
    for length in (6, 6, 1, 1):
        piece = slice(start, start + length)
        logits, cache = decode(model, ids[piece], cache, mask[piece])
        start += length
        np.testing.assert_allclose(logits, plain[start - 4], rtol=1e-4, atol=1e-4)


def test_windows_limit_how_far_back_a_token_attends():
    """Two layers with a window of 4 reach 6 tokens back; a layer without one reaches all."""
    for config, n_reached in ((MISTRAL, 7), (QWEN2, 11), (NO_DROPOUT, 11)):
        model = make_model(config)
        before, after = run(model, IDS), run(model, IDS.at[0].set(50))
        differs = ~np.isclose(before, after, atol=1e-6).all(axis=-1)
        assert differs.tolist() == [i < n_reached for i in range(len(IDS))]
    model = make_model()
    np.testing.assert_array_equal(run(model, IDS)[:6], run(model, IDS.at[6].set(50))[:6])


def test_rotary_keeps_lengths_and_depends_only_on_distances():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 3, 8))
    at = lambda i: rotation(jnp.array([i]), 8, CONFIG.rope_theta)  # noqa: E731
    np.testing.assert_array_equal(apply_rotary(x, *at(0)), x)
    np.testing.assert_allclose(jnp.sum(apply_rotary(x, *at(9)) ** 2, -1), jnp.sum(x**2, -1), rtol=1e-5)
    products = [jnp.sum(apply_rotary(x, *at(i + 4)) * apply_rotary(y, *at(i)), -1) for i in (0, 3, 17)]
    for product in products[1:]:
        np.testing.assert_allclose(product, products[0], atol=1e-5)
    # The first dim of a head is paired with the first of its second half, and rotates by one radian per position.
    unit = jnp.zeros((1, 1, 8)).at[0, 0, 0].set(1.0)
    wanted = np.zeros(8)
    wanted[[0, 4]] = math.cos(1), math.sin(1)
    np.testing.assert_allclose(apply_rotary(unit, *at(1))[0, 0], wanted, atol=1e-6)


def test_scalings_keep_high_frequencies_and_divide_low_ones():
    theta = 500000.0
    plain = theta ** -(np.arange(0, 128, 2) / 128)
    assert np.all(LinearScaling(4.0).scale(plain, theta) == plain / 4)
    for scaling in (Llama3Scaling(8.0, 1.0, 4.0, 8192), YarnScaling(8.0, 8192, 1.0)):
        kept = scaling.scale(plain, theta) / plain
        assert np.all(np.diff(kept) <= 1e-12)
        np.testing.assert_allclose(kept[[0, -1]], [1, 1 / 8])
    turns = 8192 * plain / (2 * np.pi)
    kept = Llama3Scaling(8.0, 1.0, 4.0, 8192).scale(plain, theta) / plain
    np.testing.assert_allclose(kept[turns > 4], 1)
    np.testing.assert_allclose(kept[turns < 1], 1 / 8)
    assert np.all((kept[(turns > 1) & (turns < 4)] > 1 / 8) & (kept[(turns > 1) & (turns < 4)] < 1))


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode():
    model = make_model(CONFIG)
    a, same, b = (run(model, IDS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.allclose(a, b)
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(IDS)
    np.testing.assert_array_equal(run(eqx.nn.inference_mode(model), IDS), run(make_model(), IDS))


@pytest.mark.sweep
def test_remat_changes_neither_value_nor_gradients():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        log_probs = jax.nn.log_softmax(model(IDS[:-1]))
        return -jnp.mean(jnp.take_along_axis(log_probs, IDS[1:, None], axis=-1))

    results = [loss(make_model(dataclasses.replace(QWEN2, remat=remat))) for remat in (False, True)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert np.any(a != 0)  # every leaf has a gradient


def test_bfloat16_stays_bfloat16():
    model = make_model(QWEN3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    logits, wanted = run(half, IDS), run(model, IDS)
    assert logits.dtype == half.init_cache(4).keys.dtype == jnp.bfloat16
    assert jnp.abs(logits.astype(jnp.float32) - wanted).mean() < 0.05 * wanted.std()


@pytest.mark.sweep
def test_initial_weights_are_normal_and_norms_one():
    config = Qwen2Config(500, 64, 128, 4, 8, 256, 2, init_std=0.05)
    model = eqx.filter_jit(Qwen2)(config, key=jax.random.key(0))
    blocks = model.stack.blocks
    layers = [getattr(blocks.attention, name) for name in ("query", "key", "value", "output")]
    layers += [blocks.mlp.gate, blocks.mlp.up, blocks.mlp.down]
    for weight in (model.embedding.weight, model.head.weight, *(layer.weight for layer in layers)):
        assert weight.std() == pytest.approx(0.05, rel=0.03)
        assert abs(weight.mean()) < 5 * 0.05 / math.sqrt(weight.size)
    draws = [layer.weight[i].ravel()[:100] for layer in layers for i in range(4)]
    assert np.max(np.abs(np.corrcoef(draws) - np.eye(len(draws)))) < 0.5
    assert all(np.all(layer.bias == 0) for layer in layers[:3])
    assert all(layer.bias is None for layer in layers[3:])
    assert all(np.all(norm.weight == 1) for norm in (blocks.attention_norm, blocks.mlp_norm, model.norm))


def test_rejects_more_tokens_than_positions():
    model = make_model()
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=24 tokens, got 25\. Cut the example"):
        model(jnp.zeros(25, int))
    with pytest.raises(ValueError, match=r"`length`: expected at most `n_positions`=24 tokens, got 25\."):
        model.init_cache(25)


# --- plans ------------------------------------------------------------------------------------------------------------


def sum_of_logits(model, ids, key):
    return jax.vmap(eqx.nn.inference_mode(model))(ids).sum()


def test_everything_but_norms_is_split_with_few_key_value_heads():
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    shapes = eqx.filter_eval_shape(Llama, dataclasses.replace(CONFIG, vocab_size=56), key=jax.random.key(0))
    plan = deployer.plan(shapes, sum_of_logits, jax.ShapeDtypeStruct((16, 24), jnp.int32))
    assert not plan.warnings
    for name, leaf in plan.leaves.items():
        assert leaf.n_shards == (1 if "norm" in name else 4), name


def test_mlps_split_as_columns_and_rows():
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    shapes = eqx.filter_eval_shape(Llama, LlamaConfig.of("llama3-8b"), key=jax.random.key(0))
    leaves = deployer.plan(shapes, sum_of_logits, jax.ShapeDtypeStruct((8, 512), jnp.int32)).leaves
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        spec = leaves[f"stack.blocks.mlp.{name}.weight"].spec
        assert [i for i, axis in enumerate(spec) if axis] == [dim], name
    assert all(leaves[f"stack.blocks.attention.{name}.weight"].n_shards == 4 for name in ("query", "key", "value", "output"))


# --- configs ----------------------------------------------------------------------------------------------------------

PRESETS = {
    "llama": {"7b": 6_738_415_616, "13b": 13_015_864_320, "33b": 32_528_943_616, "65b": 65_285_660_672},
    "llama2": {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 68_976_648_192},
    "llama3": {"8b": 8_030_261_248, "70b": 70_553_706_496},
    "llama3.1": {"8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800},
}


@pytest.mark.parametrize("family", PRESETS)
def test_presets_have_the_published_number_of_parameters(family):
    for size, n_parameters in PRESETS[family].items():
        config = LlamaConfig.of(f"{family}-{size}")
        model = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters, size
        assert read(**config.to_hf()) == config


def test_rejects_an_unpublished_size():
    with pytest.raises(
        ValueError, match=r"`size`: expected one of llama-7b, .*, got 'llama3-405b'\. For other sizes set the"
    ):
        LlamaConfig.of("llama3-405b")


@pytest.mark.parametrize("cls", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_absent_keys_get_the_defaults(cls):
    config = read(cls)
    assert config == (cls(window=None) if cls in (Qwen2Config, Qwen3Config) else cls())


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(CONFIG, attention_bias=True, mlp_bias=True, eos_token_id=(2, 7), pad_token_id=0),
        dataclasses.replace(CONFIG, rope_scaling=LinearScaling(2.0), head_size=6),
        dataclasses.replace(CONFIG, rope_scaling=YarnScaling(2.0, 12, 1.1, 16.0, 2.0, truncate=False)),
        MISTRAL,
        dataclasses.replace(MISTRAL, window=None),
        QWEN2,
        dataclasses.replace(QWEN2, windowed_layers=None),
        QWEN3,
    ],
)
def test_config_round_trip(config):
    assert read(type(config), **config.to_hf()) == config


def test_old_and_new_keys_of_rotary_positions_are_equivalent():
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    wanted = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    for fields in (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **llama3}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, "type": "llama3", **llama3}},
    ):
        config = read(**fields)
        assert (config.rope_theta, config.rope_scaling) == (5e5, wanted)
        assert not config.extra
    config = read(Qwen2Config, rope_theta=1000000, rope_scaling=None)
    assert (config.rope_theta, config.rope_scaling) == (1e6, None)


def test_the_attention_factor_of_yarn_scales_queries_and_keys():
    scaling = YarnScaling(factor=4.0, n_original=32, attention_factor=1.5)
    cos, sin = rotation(jnp.arange(40), 8, 10000.0, scaling)
    np.testing.assert_allclose(cos**2 + sin**2, np.full((40, 1, 4), 1.5**2), rtol=1e-5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 2, 8)), jnp.float32)
    norms = np.linalg.norm(apply_rotary(x, cos, sin), axis=-1)
    np.testing.assert_allclose(norms, 1.5 * np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_yarn_defaults():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    short = read(Qwen2Config, rope_scaling=yarn).rope_scaling
    assert short == YarnScaling(4.0, 32768, 0.1 * math.log(4) + 1)
    scaled = read(Qwen2Config, rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}).rope_scaling
    assert scaled.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_windows_of_qwen():
    sizes = functools.partial(read, Qwen2Config, num_hidden_layers=3, sliding_window=8)
    assert sizes().windows == (None, None, None)
    assert sizes(use_sliding_window=True).windows == (None, None, None)  # the first 28 layers have none
    assert sizes(use_sliding_window=True, max_window_layers=0).windows == (8, 8, 8)
    assert sizes(use_sliding_window=True, max_window_layers=2).windows == (None, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert sizes(use_sliding_window=True, layer_types=types).windows == (8, None, 8)
    assert sizes(use_sliding_window=True, layer_types=["full_attention"] * 3).windows == (None, None, None)


def test_null_means_no_window_and_no_grouping():
    config = read(MistralConfig, sliding_window=None, num_key_value_heads=None)
    assert (config.window, config.groups) == (None, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "xielu"}, r"`config.json`: `hidden_act`: expected 'gelu', .* or 'tanh', got 'xielu'"),
        (
            {"rope_scaling": {"type": "mrope", "factor": 2.0}},
            r"json: rope_parameters`: `rope_type`: expected 'default' or 'linear' or .* 'longrope', .* got 'mrope'",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"`config.json: rope_parameters`: expected the key `factor`, got none"),
        ({"partial_rotary_factor": 0.5}, r"`config.json`: `partial_rotary_factor`: expected 1\.0 or None, .* got 0\.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"`full_attention`: expected a number, the same for all layers, .* got \{'rope_type': 'default'\}",
        ),
        (
            {"cls": Qwen2Config, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            r"`layer_types`: expected full_attention for each of 2 layers, .* got \['full_attention', 'sliding_attention'\]",
        ),
        (
            {"cls": Qwen3Config, "num_hidden_layers": 2, "layer_types": ["full_attention"], "use_sliding_window": True},
            r"`layer_types`: expected full_attention or sliding_attention for each of 2 layers, .* got \['full_attention'\]",
        ),
    ],
)
def test_refuses_what_it_does_not_implement(fields, message):
    with pytest.raises(ValueError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 0}, r"`n_layers`: expected at least 1, got 0"),
        ({"n_heads": 5}, r"`n_heads`: expected a divisor of `d_model`=32, got 5"),
        ({"n_kv_heads": 3}, r"`n_kv_heads`: expected a divisor of `n_heads`=4, got 3\. Each must serve the same"),
        ({"head_size": 7}, r"`head_size`: expected an even number, got 7\. Rotary positions pair its halves"),
        ({"attention_dropout": 1.0}, r"`attention_dropout`: expected a rate in \[0, 1\), got 1\.0"),
        ({"window": 4}, r"`window`: expected None, as in every 'llama' model, got 4\. Its `config\.json` has no key for"),
        ({"unrotated_layers": (2,)}, r"`unrotated_layers`: expected None, as in every 'llama' model, got \(2,\)\."),
    ],
)
def test_rejects_a_wrong_config(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)


def test_rejects_windows_of_layers_that_do_not_exist():
    with pytest.raises(
        ValueError, match=r"`windowed_layers`: expected numbers below `n_layers`=2, got \(2,\)\. Count from 0"
    ):
        dataclasses.replace(QWEN2, windowed_layers=(2,))


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [NO_DROPOUT, QWEN3], ids=["llama", "qwen3"])
def test_a_folder_may_contain_tensors_that_are_not_weights(config, tmp_path):
    """Old files contain frequencies, and new ones a second copy of a tied embedding."""
    model = make_model(dataclasses.replace(config, extra={"pretraining_tp": 1}))
    save_pretrained(model, model.config, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {**load_file(path), "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    if config.is_tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    again, read_config = from_pretrained(tmp_path)
    assert read_config == config
    assert read_config.extra["pretraining_tp"] == 1
    assert eqx.tree_equal(again, model)
