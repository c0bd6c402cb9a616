"""ModernBERT and DistilBERT: presets, config keys, windows and dropout. `test_bert.py` tests what they share with BERT."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.distilbert import DistilBert, DistilBertConfig, DistilBertForTokenClassification
from redeqx.models.hf import ConfigReader
from redeqx.models.modernbert import (
    ModernBert,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
)
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the families' outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = ModernBertConfig(
    41, 12, d_model=24, d_ff=20, n_layers=4, n_heads=3, window=2, bos_token_id=1, eos_token_id=2, pad_token_id=0
)
IDS = jnp.array([2, 7, 31, 7, 40, 3, 19, 5, 11, 23])


@pytest.mark.parametrize(
    ("cls", "config", "n_parameters"),
    [
        (ModernBert, ModernBertConfig.of("base"), 149_014_272),
        (ModernBert, ModernBertConfig.of("large"), 394_781_696),
        (DistilBert, DistilBertConfig.of("uncased"), 66_362_880),
        (DistilBert, DistilBertConfig.of("cased"), 65_190_912),
        (DistilBert, DistilBertConfig.of("multilingual-cased"), 134_734_080),
    ],
)
def test_presets_have_the_published_number_of_parameters(cls, config, n_parameters):
    model = eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_tokens_attend_within_the_window_in_all_but_every_third_layer():
    """With windows in all layers, a change at one end reaches `n_layers * window` tokens."""
    run = eqx.filter_jit(lambda model, ids: model(ids))
    for windowed, reached in (((0, 1), 5), (None, 10)):
        config = dataclasses.replace(CONFIG, n_layers=2, windowed_layers=windowed)
        model = random_model(ModernBert, config)
        changed = np.any(np.asarray(run(model, IDS) != run(model, IDS.at[0].set(9))), axis=-1)
        assert changed[:reached].all() and not changed[reached:].any()
    assert CONFIG.local_layers == (False, True, True, False)


def test_each_dropout_has_its_own_rate():
    for name in ("dropout", "attention_dropout", "mlp_dropout"):
        model = random_model(ModernBertForMaskedLM, dataclasses.replace(CONFIG, **{name: 0.5}))
        run = eqx.filter_jit(lambda model, key: model(IDS, key=key))
        assert not np.isclose(run(model, jax.random.key(0)), run(model, jax.random.key(1))).all()
        with pytest.raises(RuntimeError, match="Dropout requires a key"):
            model(IDS)
    quiet = dataclasses.replace(CONFIG, dropout=0.2, attention_dropout=0.3, mlp_dropout=0.4, classifier_dropout=0.5)
    assert quiet.without_dropout() == CONFIG


def test_the_mean_of_many_tokens_does_not_exceed_float16():
    config = dataclasses.replace(CONFIG, n_positions=800, n_layers=2, norm_bias=True, pooling="mean")
    model = random_model(ModernBertForSequenceClassification, config)
    where = lambda model: (model.encoder.final_norm.weight, model.encoder.final_norm.bias)  # noqa: E731
    model = eqx.tree_at(where, model, (jnp.zeros(24), jnp.full(24, 100.0)))  # the same hidden state for each token
    half = jax.tree.map(lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, model)
    run = eqx.filter_jit(lambda model, mask: model(jnp.full(800, 7), mask=mask))
    many, few = np.arange(800) < 700, np.arange(800) < 2
    assert np.isfinite(run(half, many)).all()
    np.testing.assert_allclose(run(half, many), run(half, few), rtol=1e-3)


def test_initial_weights_that_add_to_the_residual_stream_are_smaller():
    config = dataclasses.replace(CONFIG, d_model=96, d_ff=128, n_layers=8)
    model = eqx.filter_jit(ModernBert)(config, key=jax.random.key(0))
    for block in (model.first, model.stack.blocks):
        assert block.attention.query.weight.std() == pytest.approx(0.02, rel=0.05)
        assert block.mlp.gate.weight.std() == pytest.approx(0.02, rel=0.05)
        assert block.attention.output.weight.std() == pytest.approx(0.005, rel=0.05)
        assert block.mlp.down.weight.std() == pytest.approx(0.005, rel=0.05)


def test_config_round_trip():
    changes = {
        "windowed_layers": (1,),
        "rope_theta": 500.0,
        "local_rope_theta": 20.0,
        "window": 5,
        "pooling": "mean",
        "head_activation": "relu",
        "logits_bias": False,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), True),
    }
    alone = dataclasses.replace(CONFIG, window=0)  # each token sees itself only
    for config in (CONFIG, alone, ModernBertConfig.of("large"), dataclasses.replace(CONFIG, **changes)):
        assert ModernBertConfig.from_hf(ConfigReader(config.to_hf())) == config
    assert ModernBertConfig.from_hf(ConfigReader({})) == ModernBertConfig()
    old = {"global_rope_theta": 500.0, "local_rope_theta": 20.0, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
    config = ModernBertConfig.from_hf(ConfigReader({**old, "reference_compile": True}))
    assert (config.rope_theta, config.local_rope_theta, config.windowed_layers) == (500.0, 20.0, (1, 3))
    assert config.extra == {"reference_compile": True}
    config = ModernBertConfig.from_hf(ConfigReader({**old, "local_rope_theta": None}))
    assert (config.rope_theta, config.local_rope_theta) == (500.0, 500.0)
    config = DistilBertConfig(64, 12, d_model=32, d_ff=48, n_layers=2, n_heads=4, classifier_dropout=0.3, pad_token_id=None)
    assert DistilBertConfig.from_hf(ConfigReader(config.to_hf())) == config
    assert DistilBertConfig.from_hf(ConfigReader({})) == DistilBertConfig()


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (ModernBertConfig, {"sliding_window": 4}, r"`sliding_window`: expected 64, which .* got 4\."),
        (ModernBertConfig, {"rope_scaling": {"rope_type": "yarn"}}, r"`rope_scaling`: expected None, which .* got \{"),
        (
            ModernBertConfig,
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"full_attention`: `rope_type`: expected 'default', which this family implements, got 'yarn'",
        ),
        (
            ModernBertConfig,
            {"rope_parameters": {"rope_theta": 3.0}},
            r"`rope_parameters`: expected an object for each of full_",
        ),
        (ModernBertConfig, {"layer_types": ["full_attention"]}, r"`layer_types`: expected full_attention or .* each of 22"),
        (ModernBertConfig, {"hidden_activation": "prelu"}, r"`hidden_activation`: expected 'gelu', .* got 'prelu'"),
        (ModernBertConfig, {"classifier_pooling": "max"}, r"`classifier_pooling`: expected 'cls' or 'mean', .* got 'max'"),
        (ModernBertConfig, {"tie_word_embeddings": False}, r"`tie_word_embeddings`: expected True, which .* got False"),
        (ModernBertConfig, {"num_hidden_layers": 1}, r"`num_hidden_layers`: expected at least 2, got 1\. The first layer"),
        (DistilBertConfig, {"activation": "prelu"}, r"`activation`: expected 'gelu', .* got 'prelu'"),
        (DistilBertConfig, {"tie_word_embeddings": False}, r"`tie_word_embeddings`: expected True, which .* got False"),
    ],
)
def test_refuses_what_it_does_not_implement(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls.from_hf(ConfigReader(fields))


def test_rejects_token_types_and_poolers_of_other_families():
    with pytest.raises(ValueError, match=r"`has_pooler`: expected False, as in every 'distilbert' model, got True\."):
        DistilBertConfig(has_pooler=True)
    with pytest.raises(ValueError, match=r"`token_types`: expected None for 'modernbert', got \[10\]\. This family has no"):
        random_model(ModernBert, CONFIG)(IDS, token_types=IDS)


def test_an_encoder_reads_the_folder_of_a_model_with_a_head(tmp_path):
    distilbert = DistilBertConfig(41, 12, d_model=24, d_ff=20, n_layers=2, n_heads=3)
    for cls, base, config in (
        (DistilBertForTokenClassification, DistilBert, distilbert),
        (ModernBertForMaskedLM, ModernBert, CONFIG),
    ):
        model = random_model(cls, config)
        save_pretrained(model, config, tmp_path / cls.__name__)
        assert isinstance(from_pretrained(tmp_path / cls.__name__)[0], cls)
        encoder, found = base.from_pretrained(tmp_path / cls.__name__)
        assert found == config
        for a, b in zip(jax.tree.leaves(encoder), jax.tree.leaves(model.encoder), strict=True):
            np.testing.assert_array_equal(a, b)
