"""RoBERTa: positions, presets and config keys. `test_bert.py` tests what it shares with BERT."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.hf import ConfigReader
from redeqx.models.roberta import Roberta, RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification
from tests.models.families._case import is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = RobertaConfig(41, 7, d_model=24, d_ff=40, n_layers=2, n_heads=3, dropout=0.2, classifier_dropout=0.4)


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (RobertaConfig.of("base"), 124_645_632),
        (RobertaConfig.of("large"), 355_359_744),
        (RobertaConfig.of("xlm-base"), 278_043_648),
        (RobertaConfig.of("xlm-large"), 559_890_432),
    ],
)
def test_presets_have_the_published_number_of_parameters(config, n_parameters):
    model = eqx.filter_eval_shape(Roberta, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_positions_count_tokens_only_also_in_segments():
    model = eqx.nn.inference_mode(random_model(Roberta, CONFIG))
    run = eqx.filter_jit(lambda ids, mask=None, segments=None: model(ids, mask=mask, segments=segments))
    ids = jnp.array([5, 9, 1, 30, 7])
    alone = run(ids)
    padded = run(jnp.concatenate([jnp.array([1, 1]), ids]), mask=jnp.arange(7) >= 2)
    np.testing.assert_allclose(padded[2:], alone, rtol=1e-4, atol=1e-5)
    packed = run(
        jnp.concatenate([ids, ids, jnp.ones(2, int)]), segments=jnp.repeat(jnp.array([2, 1, 0]), jnp.array([5, 5, 2]))
    )
    for start in (0, 5):
        np.testing.assert_allclose(packed[start : start + 5], alone, rtol=1e-4, atol=1e-5)
    # A segment with more tokens than positions is NaN.
    assert np.isnan(run(jnp.full(9, 3), segments=jnp.zeros(9, int))[7:]).all()
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=7 tokens, got 8\. Cut the example"):
        model(jnp.zeros(8, int))


def test_a_classifier_has_dropout_before_its_transformation_too():
    config = dataclasses.replace(CONFIG.without_dropout(), classifier_dropout=0.5)
    model = random_model(RobertaForSequenceClassification, config)
    hidden = eqx.filter_jit(eqx.nn.inference_mode(model).encoder)(jnp.arange(5))[0]
    key = jax.random.split(jax.random.key(7))[1]
    first = model.dropout(hidden, key=jax.random.fold_in(key, 1))
    wanted = model.dropout(jnp.tanh(model.transform(first)), key=key)
    np.testing.assert_allclose(
        eqx.filter_jit(model)(jnp.arange(5), key=jax.random.key(7)), model.classifier(wanted), rtol=1e-4, atol=1e-5
    )


def test_config_round_trip():
    for config in (
        CONFIG,
        RobertaConfig.of("xlm-base"),
        dataclasses.replace(CONFIG, pad_token_id=5, n_token_types=1, model_type="xlm-roberta"),
    ):
        fields = config.to_hf()
        assert fields["max_position_embeddings"] == config.n_positions + config.pad_token_id + 1
        assert RobertaConfig.from_hf(ConfigReader(fields)) == config
    assert RobertaConfig.from_hf(ConfigReader({})) == RobertaConfig()
    assert RobertaConfig.from_hf(ConfigReader({"model_type": "xlm-roberta"})).vocab_size == 30522


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"position_embedding_type": "relative_key"},
            r"`position_embedding_type`: expected 'absolute', .* got 'relative_key'",
        ),
        ({"is_decoder": True}, r"`is_decoder`: expected False, which this family implements, got True\. Load"),
        ({"hidden_act": "prelu"}, r"`hidden_act`: expected 'gelu', .* or 'tanh', got 'prelu'\. "),
        (
            {"pad_token_id": None},
            r"`pad_token_id`: expected a token id, got None\. Positions are counted from the row after",
        ),
        ({"max_position_embeddings": 2}, r"`max_position_embeddings`: expected at least 1, got 0"),
    ],
)
def test_refuses_what_it_does_not_implement(fields, message):
    with pytest.raises(ValueError, match=message):
        RobertaConfig.from_hf(ConfigReader(fields))


def test_rejects_what_no_config_file_can_hold():
    with pytest.raises(ValueError, match=r"`position_kind`: expected 'counted', as in every 'roberta' model, got 'learned'"):
        dataclasses.replace(CONFIG, position_kind="learned")
    with pytest.raises(ValueError, match=r"`model_type`: expected 'roberta' or 'xlm-roberta', got 'bert'\. Pass one of"):
        dataclasses.replace(CONFIG, model_type="bert")


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta"])
def test_folders_name_the_class_of_their_model_type(model_type, tmp_path):
    config = dataclasses.replace(CONFIG, model_type=model_type)
    model = random_model(RobertaForMaskedLM, config)
    save_pretrained(model, config, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    prefix = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[model_type]
    assert (fields["model_type"], fields["architectures"]) == (model_type, [f"{prefix}ForMaskedLM"])
    again, found = from_pretrained(tmp_path)
    assert found == config and isinstance(again, RobertaForMaskedLM)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
    encoder, found = Roberta.from_pretrained(tmp_path)
    assert not found.has_pooler and encoder.pooler is None
    np.testing.assert_array_equal(encoder.positions, model.encoder.positions)
