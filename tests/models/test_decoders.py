"""The families of the one decoder: stored outputs of a tiny folder of each, presets, configs, errors."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import cross_entropy, from_pretrained
from redeqx.models._families import MODELS
from redeqx.models.cohere import Cohere
from redeqx.models.decoder import CausalLM
from redeqx.models.ernie import Ernie4_5
from redeqx.models.gemma import Gemma2, Gemma3
from redeqx.models.glm import Glm
from redeqx.models.gpt_neox import GPTNeoX
from redeqx.models.hf import ConfigReader
from redeqx.models.mistral import Mixtral, MixtralConfig
from redeqx.models.nn import Attention, DynamicScaling, LinearScaling, LongScaling, add_routing, rotation
from redeqx.models.olmo import Olmo
from redeqx.models.olmoe import Olmoe
from redeqx.models.phi import Phi, Phi3, Phi3Config
from redeqx.models.qwen import Qwen3Moe
from redeqx.models.smollm import SmolLM3
from redeqx.models.stablelm import StableLm
from redeqx.models.starcoder2 import Starcoder2
from tests.models.families._case import assert_equal, fill, is_shape, outputs, random_model
from tests.models.families._decoders import CASES, GOLDEN
from tests.models.families._table import END, README, START, table

FAMILIES = [cls for cls in MODELS if issubclass(cls, CausalLM)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs(case, tmp_path):
    golden = json.loads((GOLDEN / f"{case.name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    fill(tmp_path / "model.safetensors", golden["tensors"])
    model, config = from_pretrained(tmp_path)
    assert type(config).from_hf(ConfigReader(config.to_hf())) == config
    found = outputs(case, model)
    assert_equal(case, found, np.array(golden["outputs"]).reshape(found.shape))


def test_every_golden_file_has_a_case():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {case.name for case in CASES}


def test_the_table_of_families_is_up_to_date():
    assert START + table() + END in README.read_text(), "python -m tests.models.families._table"


# --- presets and configs ----------------------------------------------------------------------------------------------

# The number of parameters of the published weights.
PUBLISHED = {
    "mistral": {"7b": 7_241_732_096},
    "mixtral": {"8x7b": 46_702_792_704, "8x22b": 140_630_071_296},
    "qwen2": {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512, "72b": 72_706_203_648},
    "qwen3": {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
    },
    "qwen3_moe": {"30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560},
    "gemma": {"2b": 2_506_172_416, "7b": 8_537_680_896},
    "gemma2": {"2b": 2_614_341_888, "9b": 9_241_705_984, "27b": 27_227_128_320},
    "gemma3_text": {"270m": 268_098_176, "1b": 999_885_952},
    "olmo": {"1b": 1_176_764_416, "7b": 6_888_095_744},
    "olmo2": {"1b": 1_484_916_736, "7b": 7_298_617_344, "13b": 13_716_198_400, "32b": 32_234_279_936},
    "olmo3": {"7b": 7_298_011_136},
    "phi": {"1.5": 1_418_270_720, "2": 2_779_683_840},
    "phi3": {"3-mini-4k": 3_821_079_552, "4": 14_659_507_200},
    "smollm3": {"3b": 3_075_098_624},
    "granite": {"3.1-2b": 2_533_531_648, "3.1-8b": 8_170_848_256},
    "starcoder2": {"3b": 3_030_371_328, "7b": 7_173_923_840, "15b": 15_957_889_024},
    "glm": {"9b": 9_399_951_360},
    "glm4": {"9b": 9_400_279_040},
    "olmoe": {"1b-7b": 6_919_161_856},
    "cohere": {"command-r": 34_980_831_232},
    "cohere2": {"7b": 8_028_033_024},
    "exaone4": {"1.2b": 1_279_391_488},
    "seed_oss": {"36b": 36_151_104_512},
    "ernie4_5": {"0.3b": 360_748_032},
    "stablelm": {"2-1.6b": 1_644_515_328},
    "gpt_neox": {
        "pythia-160m": 162_322_944,
        "pythia-1.4b": 1_414_647_808,
        "pythia-6.9b": 6_857_302_016,
        "20b": 20_554_567_680,
    },
}


@pytest.mark.parametrize("cls", FAMILIES, ids=lambda cls: cls.config_class.model_type)
def test_presets_have_the_published_number_of_parameters(cls):
    config_class = cls.config_class
    if config_class.model_type in ("llama", "gpt2", "gptj", "opt"):  # in their own files
        return
    assert config_class.sizes.keys() == PUBLISHED.get(config_class.model_type, {}).keys()
    for size in config_class.sizes:
        config = config_class.of(size)
        shapes = eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
        n_parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes) if is_shape(leaf))
        assert n_parameters == PUBLISHED[config_class.model_type][size], size
        assert config_class.from_hf(ConfigReader(config.to_hf())) == config
    assert config_class.from_hf(ConfigReader({**config_class().to_hf()})) == config_class()


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (
            Mixtral,
            {"router_jitter_noise": 0.1},
            r"`router_jitter_noise`: expected 0\.0, which this family implements, got 0\.1",
        ),
        (Qwen3Moe, {"mlp_only_layers": [0]}, r"`mlp_only_layers`: expected \[\] or None, .* got \[0\]"),
        (Qwen3Moe, {"decoder_sparse_step": 2}, r"`decoder_sparse_step`: expected 1, .* got 2"),
        (
            Gemma2,
            {"use_bidirectional_attention": True},
            r"`use_bidirectional_attention`: expected False or None, .* got True",
        ),
        (
            Gemma2,
            {"layer_types": ["full_attention"]},
            r"`layer_types`: expected full_attention or sliding_attention for each",
        ),
        (
            Gemma3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"sliding_attention`: `rope_type`: expected 'default', .* got 'linear'",
        ),
        (Gemma3, {"attn_logit_softcapping": 50.0}, r"`attn_logit_softcapping`: expected None, .* got 50\.0"),
        (Olmoe, {"clip_qkv": 8.0}, r"`clip_qkv`: expected None, .* got 8\.0"),
        (Cohere, {"use_qk_norm": True}, r"`use_qk_norm`: expected False or None, .* got True"),
        (StableLm, {"use_parallel_residual": True}, r"`use_parallel_residual`: expected False, .* got True"),
        (Ernie4_5, {"use_bias": "yes"}, r"`use_bias`: expected bool, got 'yes'"),
        (Olmo, {"clip_qkv": 8.0}, r"`clip_qkv`: expected None, .* got 8\.0"),
        (Phi, {"qk_layernorm": True}, r"`qk_layernorm`: expected False, .* got True"),
        (
            Phi3,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"`rope_type`: expected 'default' or 'longrope', .* got",
        ),
        (SmolLM3, {"use_sliding_window": True}, r"`use_sliding_window`: expected False, .* got True"),
        (SmolLM3, {"no_rope_layers": [1, 2]}, r"`no_rope_layers`: expected 0 or 1 for each of 36 layers, .* got \[1, 2\]"),
        (Glm, {"partial_rotary_factor": 1.5}, r"`partial_rotary_factor`: expected a share in \(0, 1\], got 1\.5"),
        (GPTNeoX, {"rotary_pct": 0.1}, r"`partial_rotary_factor`: expected an even number of rotary dims, got 9\."),
    ],
)
def test_refuses_what_it_does_not_implement(cls, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cls.config_class.from_hf(ConfigReader(fields))


def test_fields_that_share_a_key_have_one_value():
    message = r"`attention_bias`: expected the same as attention_bias, mlp_bias, got attention_bias=True, mlp_bias=False"
    with pytest.raises(ValueError, match=message):
        Starcoder2.config_class(mlp_bias=False)


# --- positions --------------------------------------------------------------------------------------------------------


def test_a_text_longer_than_the_original_ones_changes_the_frequencies():
    positions = jnp.arange(12)
    plain = rotation(positions, 8, 100.0)
    dynamic = DynamicScaling(2.0, 8)
    np.testing.assert_array_equal(rotation(positions[:8], 8, 100.0, dynamic), rotation(positions[:8], 8, 100.0))
    # Twelve tokens: the base grows by (2 * 12 / 8 - 1) ** (8 / 6).
    np.testing.assert_allclose(rotation(positions, 8, 100.0, dynamic), rotation(positions, 8, 100 * 2 ** (8 / 6)), atol=1e-5)
    long = LongScaling((1.0,) * 4, (2.0,) * 4, 8, 1.5)
    np.testing.assert_allclose(rotation(positions[:8], 8, 100.0, long)[0], 1.5 * plain[0][:8], rtol=1e-6)
    np.testing.assert_allclose(
        rotation(positions, 8, 100.0, long)[0], 1.5 * rotation(positions, 8, 100.0, LinearScaling(2.0))[0], rtol=1e-5
    )


def test_configs_of_scalings_are_read_as_written():
    long = LongScaling((1.0, 1.5), (2.0, 3.0), 16, 1.25)
    config = Phi3Config(n_positions=64, d_model=16, n_heads=4, n_kv_heads=2, rope_scaling=long)
    assert Phi3Config.from_hf(ConfigReader(config.to_hf())) == config
    fields = {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    config = Phi.config_class.from_hf(ConfigReader(fields))
    assert (config.n_positions, config.rope_scaling) == (128, DynamicScaling(4.0, 32))
    assert config.to_hf()["max_position_embeddings"] == 32
    assert Phi.config_class.from_hf(ConfigReader(config.to_hf())) == config


# --- experts ----------------------------------------------------------------------------------------------------------


def test_what_routers_did_comes_with_the_hidden_states():
    sizes = {"vocab_size": 53, "n_positions": 24, "d_model": 16, "d_mlp": 8, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2}
    model = random_model(Mixtral, MixtralConfig(**sizes, n_experts=4))
    ids = jnp.arange(10)
    mask = ids >= 2
    hidden, routing = eqx.filter_jit(lambda: model.routed(ids, mask=mask))()
    assert routing.tokens == 3 * 8  # of three layers
    assert routing.dropped == 0 and routing.imbalance >= routing.tokens
    loss = add_routing(cross_entropy(model.logits(hidden[:-1]), ids[1:]), routing, balance_loss=0.5)
    found = (loss.total - cross_entropy(model.logits(hidden[:-1]), ids[1:]).total) / 0.5
    np.testing.assert_allclose(found, routing.balance, rtol=1e-4)
    with pytest.raises(ValueError, match=r"`n_experts`: expected a model with experts, got 0\. Call `hidden`"):
        random_model(Olmo, Olmo.config_class(**sizes)).routed(ids)


# --- special attention ------------------------------------------------------------------------------------------------


def test_caps_and_sinks_of_an_attention():
    """Against the formula, with dropout of weights off."""
    key, rng = jax.random.key(0), np.random.default_rng(0)
    layers = [eqx.nn.Linear(8, 8, use_bias=False, key=k) for k in jax.random.split(key, 4)]
    x = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=2), jnp.float32)
    attention = Attention(*layers, n_heads=2, n_kv_heads=2, cap=0.3, sinks=sinks)
    mask = jnp.tri(5, dtype=bool)
    found, _ = attention(x, mask=mask)
    q, k, v = (jnp.reshape(x @ layer.weight.T, (5, 2, 4)) for layer in layers[:3])
    scores = 0.3 * jnp.tanh(jnp.einsum("qhd,khd->hqk", q, k) / 2 / 0.3)
    weights = jnp.where(mask, jnp.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + jnp.exp(sinks)[:, None, None]
    wanted = jnp.einsum("hqk,khd->qhd", weights, v).reshape(5, 8) @ layers[3].weight.T
    np.testing.assert_allclose(found, wanted, atol=1e-6)
