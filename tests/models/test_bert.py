"""BERT: behavior beyond parity of outputs."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import cross_entropy, from_pretrained, save_pretrained
from redeqx.models.bert import Bert, BertConfig, BertForMaskedLM, BertForSequenceClassification
from redeqx.models.hf import ConfigReader
from tests.models.families._case import in_float64, is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = BertConfig(
    41,
    12,
    d_model=24,
    d_ff=40,
    n_layers=2,
    n_heads=3,
    n_classes=5,
    dropout=0.2,
    attention_dropout=0.3,
    classifier_dropout=0.4,
)
QUIET = CONFIG.without_dropout()
IDS = jnp.array([2, 7, 31, 7, 40, 3, 19])
TYPES = jnp.array([0, 0, 0, 1, 1, 1, 1])


def make(cls, config=CONFIG):
    return random_model(cls, config)


@eqx.filter_jit
def run(model, *args, **kwargs):
    return model(*args, **kwargs)


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def base():
    return make(Bert)


@pytest.fixture(scope="module")
def mlm():
    return make(BertForMaskedLM)


@pytest.fixture(scope="module")
def classifier():
    return make(BertForSequenceClassification)


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (BertConfig.of("base-uncased"), 109_482_240),
        (BertConfig.of("base-cased"), 108_310_272),
        (BertConfig.of("base-multilingual-cased"), 177_853_440),
        (BertConfig.of("large-uncased"), 335_141_888),
        (BertConfig.of("large-cased"), 333_579_264),
    ],
)
def test_presets_have_the_published_number_of_parameters(config, n_parameters):
    model = eqx.filter_eval_shape(Bert, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_a_token_attends_in_both_directions_and_not_to_padding(base):
    model = eqx.nn.inference_mode(base)
    mask = jnp.arange(7) < 5
    whole, masked = run(model, IDS), run(model, IDS, mask=mask)
    assert not np.isclose(masked[:5], whole[:5]).all(axis=-1).any()
    np.testing.assert_allclose(masked[:5], run(model, IDS[:5]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(run(model, IDS.at[5:].set(9), mask=mask)[:5], masked[:5])
    assert not np.isclose(run(model, IDS.at[4].set(9), mask=mask)[:5], masked[:5]).all(axis=-1).any()


def test_token_types_default_to_zeros(base):
    model = eqx.nn.inference_mode(base)
    np.testing.assert_allclose(run(model, IDS, token_types=0 * TYPES), run(model, IDS), rtol=1e-5, atol=1e-6)
    assert not np.isclose(run(model, IDS, token_types=TYPES), run(model, IDS)).all(axis=-1).any()
    for token_type in (2, -1):
        assert np.isnan(run(model, IDS, token_types=TYPES.at[3].set(token_type))).all()
    assert np.isnan(run(model, IDS.at[3].set(41))).all()


def test_a_classifier_uses_the_pooled_first_token(classifier):
    model = eqx.nn.inference_mode(classifier)
    hidden = run(model.encoder, IDS)
    pooled = np.tanh(model.encoder.pooler.weight @ hidden[0] + model.encoder.pooler.bias)
    logits = model.classifier.weight @ pooled + model.classifier.bias
    np.testing.assert_allclose(run(model, IDS), logits, rtol=1e-4, atol=1e-5)


def test_logits_of_hidden_states_equal_a_call_and_chunks_give_the_same_loss(mlm):
    model = eqx.nn.inference_mode(mlm)

    @eqx.filter_jit
    def both(model):
        hidden, labels = model.hidden(IDS, token_types=TYPES), jnp.where(TYPES == 1, IDS, -100)
        logits = model(IDS, token_types=TYPES)
        plain, chunked = cross_entropy(logits, labels), cross_entropy(hidden, labels, head=model.logits, chunk_size=2)
        return logits, model.logits(hidden), plain.total, chunked.total

    logits, same, plain, chunked = both(model)
    assert logits.shape == (7, 41)
    np.testing.assert_allclose(logits, same, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plain, chunked, rtol=1e-5)


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForSequenceClassification])
def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(cls):
    model = make(cls)
    a, same, b = (run(model, IDS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.isclose(a, b).all(axis=-1).any()
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(IDS)
    assert_same(run(eqx.nn.inference_mode(model), IDS), run(make(cls, QUIET), IDS))


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "classifier_dropout"])
def test_each_dropout_has_its_own_rate(name):
    model = make(BertForSequenceClassification, dataclasses.replace(QUIET, **{name: 0.5}))
    a, b = (run(model, IDS, key=jax.random.key(i)) for i in (0, 1))
    assert not np.isclose(a, b).all()


def test_the_heads_dropout_rate_defaults_to_dropout():
    config = dataclasses.replace(CONFIG, classifier_dropout=None)
    assert eqx.filter_eval_shape(BertForSequenceClassification, config, key=jax.random.key(0)).dropout.p == 0.2


def test_remat_changes_neither_value_nor_gradients():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.sum(jnp.arange(5) * model(IDS, token_types=TYPES))

    configs = [dataclasses.replace(QUIET, remat=remat) for remat in (False, True)]
    with jax.enable_x64(True):  # in float64, another order of sums differs less than a wrong derivative
        results = [loss(in_float64(make(BertForSequenceClassification, config))) for config in configs]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-7)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.any(np.asarray(a))  # every leaf has a gradient


def test_bfloat16_stays_bfloat16(mlm):
    model = eqx.nn.inference_mode(mlm)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    found, wanted = run(half, IDS, token_types=TYPES), run(model, IDS, token_types=TYPES)
    assert found.dtype == jnp.bfloat16
    assert jnp.abs(found.astype(jnp.float32) - wanted).mean() < 0.1 * wanted.std()


def test_initial_weights():
    config = BertConfig(500, 200, d_model=128, d_ff=256, n_layers=4, n_heads=4, n_classes=100, pad_token_id=3)
    model = eqx.filter_jit(BertForSequenceClassification)(config, key=jax.random.key(0))
    bert = model.encoder
    blocks = bert.stack.blocks
    attention = blocks.attention
    layers = [attention.query, attention.key, attention.value, attention.output, blocks.mlp.up, blocks.mlp.down]
    layers += [bert.pooler, model.classifier]
    for weight in [bert.positions, bert.embedding.weight, *(layer.weight for layer in layers)]:
        assert weight.std() == pytest.approx(0.02, rel=0.03)
        assert abs(weight.mean()) < 5 * 0.02 / weight.size**0.5
    assert 0.017 < bert.token_types.std() < 0.023
    np.testing.assert_array_equal(np.flatnonzero(~np.any(bert.embedding.weight != 0, axis=1)), [3])
    norms = [bert.norm, blocks.attention_norm, blocks.mlp_norm]
    assert all(np.all(layer.bias == 0) for layer in [*layers, *norms])
    assert all(np.all(norm.weight == 1) for norm in norms)


def as_first_published(mlm, folder):
    """Writes a folder like bert-base-uncased: TensorFlow's names of norms, a pooler, a next-sentence head, a copy of the
    embedding as the decoder, and a counter."""
    save_pretrained(mlm, CONFIG, folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    old = {}
    for name, tensor in tensors.items():
        old[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    old["cls.seq_relationship.weight"] = np.zeros((2, 24), np.float32)
    old["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    old["bert.pooler.dense.weight"] = rng.normal(size=(24, 24)).astype(np.float32)
    old["bert.pooler.dense.bias"] = np.ones(24, np.float32)
    old["bert.embeddings.position_ids"] = np.arange(12)[None]
    save_file(old, folder / "model.safetensors")
    return old


def test_the_first_published_folder_loads(mlm, tmp_path):
    old = as_first_published(mlm, tmp_path)
    for architecture in ("BertForMaskedLM", "BertForPreTraining"):
        fields = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": [architecture]}))
        model, config = from_pretrained(tmp_path)
        assert config == CONFIG
        assert isinstance(model, BertForMaskedLM)
        assert_same(model, mlm)
    bert, config = Bert.from_pretrained(tmp_path)
    assert config == CONFIG
    np.testing.assert_array_equal(bert.pooler.weight, old["bert.pooler.dense.weight"])
    assert_same(eqx.tree_at(lambda bert: bert.pooler, bert, None), mlm.encoder)

    save_file({**old, "cls.predictions.decoder.bias": np.ones(41, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"`cls\.predictions\.decoder\.bias`: expected the same values as `cls\.predictions"
    ):
        from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`classifier\.weight`: expected for `classifier\.weight`, got none\."):
        BertForSequenceClassification.from_pretrained(tmp_path)
    # The remedy must be allowed by the config: this family has no separate head.
    save_file(
        {**old, "cls.predictions.decoder.weight": old["cls.predictions.decoder.weight"] + 1}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"`cls\.predictions\.decoder\.weight`: .* got others\. This family always ties them"
    ) as raised:
        BertForMaskedLM.from_pretrained(tmp_path)
    assert "tie_word_embeddings" not in str(raised.value)


def test_a_folder_without_a_pooler_gives_a_model_without_one(mlm, tmp_path):
    save_pretrained(mlm, CONFIG, tmp_path)
    bert, config = Bert.from_pretrained(tmp_path)
    assert config == dataclasses.replace(CONFIG, has_pooler=False)
    assert_same(bert, mlm.encoder)
    with pytest.raises(
        ValueError, match=r"`has_pooler`: expected True, got False: this model has no pooler\. Take the first"
    ):
        bert.pool(jnp.zeros((7, 24)))
    save_pretrained(bert, config, tmp_path / "bare")
    assert_same(from_pretrained(tmp_path / "bare")[0], bert)
    with pytest.raises(ValueError, match=r"`pooler\.dense\.weight`: expected for `pooler\.weight`, got none\."):
        Bert.from_pretrained(tmp_path, has_pooler=True)


def test_a_pretrained_bert_in_a_new_classifier(base, tmp_path):
    save_pretrained(base, CONFIG, tmp_path)
    bert, config = Bert.from_pretrained(tmp_path)
    config = dataclasses.replace(config, n_classes=3)
    model = make(BertForSequenceClassification, config)
    model = eqx.tree_at(lambda model: model.encoder, model, bert)
    save_pretrained(model, config, tmp_path / "classifier")
    again, config = from_pretrained(tmp_path / "classifier")
    assert_same(again, model)
    assert config.n_classes == 3
    without, _ = Bert.from_pretrained(tmp_path / "classifier", has_pooler=False)
    assert without.pooler is None
    assert_same(without, eqx.tree_at(lambda bert: bert.pooler, base, None))


def test_config_round_trip():
    for config in (
        CONFIG,
        QUIET,
        dataclasses.replace(CONFIG, classifier_dropout=None, activation="relu", n_classes=1, pad_token_id=None),
        dataclasses.replace(CONFIG, bos_token_id=1, eos_token_id=(2, 3), layer_norm_eps=1e-5, n_token_types=1),
    ):
        assert BertConfig.from_hf(ConfigReader(config.to_hf())) == config
    assert BertConfig.from_hf(ConfigReader({})) == BertConfig()
    config = BertConfig.from_hf(ConfigReader({"problem_type": "regression", "num_labels": 1, "use_cache": True}))
    assert config.n_classes == 1
    assert config.extra == {"problem_type": "regression", "use_cache": True}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "position_embedding_type",
            "relative_key",
            r"`position_embedding_type`: expected 'absolute', .* got 'relative_key'",
        ),
        ("is_decoder", True, r"`is_decoder`: expected False, which this family implements, got True\. Load"),
        ("add_cross_attention", True, r"`add_cross_attention`: expected False, which this family implements, got"),
        ("tie_word_embeddings", False, r"`tie_word_embeddings`: expected True, which this family implements, got"),
        ("hidden_act", "prelu", r"`hidden_act`: expected 'gelu', .* or 'tanh', got 'prelu'\. "),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, message):
    with pytest.raises(ValueError, match=message):
        BertConfig.from_hf(ConfigReader({key: value}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_token_types", 0, r"`n_token_types`: expected at least 1, got 0"),
        ("n_heads", 5, r"`n_heads`: expected a divisor of `d_model`=24, got 5"),
        ("classifier_dropout", 1.0, r"`classifier_dropout`: expected a rate in \[0, 1\), got 1\.0"),
        ("activation", "prelu", r"`activation`: expected 'gelu', .* or 'tanh', got 'prelu'\. "),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_rejects_more_tokens_than_positions(base):
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=12 tokens, got 13\. Cut the example"):
        base(jnp.zeros(13, int), key=jax.random.key(0))
