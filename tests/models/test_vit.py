"""ViT: behavior beyond parity of outputs."""

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
from redeqx.models.vit import ViT, ViTConfig, ViTForImageClassification
from tests.models.families._case import in_float64, is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

CONFIG = ViTConfig(8, 4, 2, d_model=24, d_ff=40, n_layers=2, n_heads=3, n_classes=5, dropout=0.2, attention_dropout=0.3)
PIXELS = jax.random.normal(jax.random.key(5), (2, 8, 8))


def make(cls, config=CONFIG):
    return random_model(cls, config)


@eqx.filter_jit
def run(model, *args, **kwargs):
    return model(*args, **kwargs)


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def classifier():
    return make(ViTForImageClassification)


@pytest.fixture(scope="module")
def folder(classifier, tmp_path_factory):
    return save_pretrained(classifier, CONFIG, tmp_path_factory.mktemp("vit"))


@pytest.mark.parametrize(
    ("cls", "config", "n_parameters"),
    [
        (ViTForImageClassification, ViTConfig.of("base-patch16"), 86_567_656),
        (ViTForImageClassification, ViTConfig.of("large-patch16"), 304_326_632),
        (ViTForImageClassification, ViTConfig.of("huge-patch14"), 632_045_800),
        (ViT, ViTConfig.of("base-patch16"), 86_389_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(cls, config, n_parameters):
    model = eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_a_classifier_uses_the_class_token_of_its_vit(classifier):
    quiet = eqx.nn.inference_mode(classifier)
    hidden = run(quiet.encoder, PIXELS)
    assert hidden.shape == (1 + 4, 24)
    head = quiet.classifier
    np.testing.assert_allclose(run(quiet, PIXELS), head.weight @ hidden[0] + head.bias, rtol=1e-4, atol=1e-5)
    # Each token attends to every patch.
    assert not np.isclose(run(quiet.encoder, PIXELS.at[:, 7, 7].add(1)), hidden).all(axis=-1).any()


def test_pixels_beyond_the_last_complete_patch_are_ignored():
    model = eqx.nn.inference_mode(make(ViT, dataclasses.replace(CONFIG, image_size=11)))
    pixels = jnp.zeros((2, 11, 11)).at[:, :8, :8].set(PIXELS)
    assert_same(run(model, pixels), run(model, pixels.at[:, 8:].set(7)))


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode(classifier):
    a, same, b = (run(classifier, PIXELS, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.isclose(a, b).any()
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        classifier(PIXELS)
    quiet = run(make(ViTForImageClassification, CONFIG.without_dropout()), PIXELS)  # which needs no key
    assert_same(run(eqx.nn.inference_mode(classifier), PIXELS), quiet)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_each_dropout_has_its_own_rate(name):
    model = make(ViT, dataclasses.replace(CONFIG.without_dropout(), **{name: 0.5}))
    a, b = (run(model, PIXELS, key=jax.random.key(i)) for i in (0, 1))
    assert not np.isclose(a, b).all(axis=-1).any()


def test_remat_changes_neither_value_nor_gradients():
    config = CONFIG.without_dropout()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.sum(jnp.arange(5) * model(PIXELS.astype(jnp.float64)))

    configs = [dataclasses.replace(config, remat=remat) for remat in (False, True)]
    with jax.enable_x64(True):  # in float64, another order of sums differs less than a wrong derivative
        results = [loss(in_float64(make(ViTForImageClassification, config))) for config in configs]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-7)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.any(np.asarray(a))  # every leaf has a gradient


def test_bfloat16_stays_bfloat16(classifier):
    model = eqx.nn.inference_mode(classifier)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    found, wanted = run(half, PIXELS), run(model, PIXELS)
    assert found.dtype == jnp.bfloat16
    assert jnp.abs(found.astype(jnp.float32) - wanted).mean() < 0.1 * wanted.std()


def test_initial_weights():
    config = ViTConfig(64, 8, d_model=128, d_ff=256, n_layers=4, n_heads=4, n_classes=100)
    model = eqx.filter_jit(ViTForImageClassification)(config, key=jax.random.key(0))
    vit = model.encoder
    blocks = vit.stack.blocks
    attention = blocks.attention
    matrices = [vit.patches.weight, vit.positions, model.classifier.weight, blocks.mlp.up.weight, blocks.mlp.down.weight]
    matrices += [layer.weight for layer in (attention.query, attention.key, attention.value, attention.output)]
    for weight in matrices:
        assert weight.std() == pytest.approx(0.02, rel=0.03)
        assert abs(weight.mean()) < 5 * 0.02 / weight.size**0.5
    assert 0.015 < vit.class_token.std() < 0.025
    layers = [vit.patches, model.classifier, blocks.mlp.up, blocks.mlp.down, attention.query, attention.output]
    norms = [vit.norm, blocks.attention_norm, blocks.mlp_norm]
    assert all(np.all(layer.bias == 0) for layer in [*layers, *norms])
    assert all(np.all(norm.weight == 1) for norm in norms)


def test_a_classifier_round_trips_and_its_folder_loads_as_vit(folder, classifier):
    model, config = from_pretrained(folder)
    assert isinstance(model, ViTForImageClassification)
    assert config == CONFIG
    assert_same(model, classifier)
    vit, config = ViT.from_pretrained(folder)
    assert vit.pooler is None
    assert config == dataclasses.replace(CONFIG, has_pooler=False)
    assert_same(vit, classifier.encoder)
    with pytest.raises(
        ValueError, match=r"`has_pooler`: expected True, got False: this model has no pooler\. Take the class"
    ):
        vit.pool(run(eqx.nn.inference_mode(vit), PIXELS))
    with pytest.raises(ValueError, match=r"`pooler\.dense\.weight`: expected for `pooler\.weight`, got none\."):
        ViT.from_pretrained(folder, has_pooler=True)


def test_a_pooler_is_kept_or_dropped(tmp_path):
    model = make(ViT)
    save_pretrained(model, CONFIG, tmp_path)
    again, config = from_pretrained(tmp_path)
    assert config.has_pooler
    assert_same(again, model)
    hidden = run(eqx.nn.inference_mode(model), PIXELS)
    pooled = jnp.tanh(model.pooler.weight @ hidden[0] + model.pooler.bias)
    np.testing.assert_allclose(model.pool(hidden), pooled, rtol=1e-5, atol=1e-6)

    bare, config = ViT.from_pretrained(tmp_path, has_pooler=False)
    assert bare.pooler is None
    save_pretrained(bare, config, tmp_path / "bare")
    assert not any("pooler" in name for name in load_file(tmp_path / "bare" / "model.safetensors"))
    assert_same(from_pretrained(tmp_path / "bare")[0], bare)


def test_a_pretrained_vit_in_a_new_classifier(folder, tmp_path):
    vit, config = ViT.from_pretrained(folder)
    config = dataclasses.replace(config, n_classes=3)
    model = make(ViTForImageClassification, config)
    model = eqx.tree_at(lambda model: model.encoder, model, vit)
    assert run(eqx.nn.inference_mode(model), PIXELS).shape == (3,)
    save_pretrained(model, config, tmp_path)
    again, _ = from_pretrained(tmp_path)
    assert_same(again, model)
    assert_same(again.encoder, vit)


def test_classes_keep_their_names(folder, tmp_path):
    fields = json.loads((folder / "config.json").read_text())
    assert fields["id2label"] == {str(i): f"LABEL_{i}" for i in range(5)}
    assert fields["label2id"] == {f"LABEL_{i}": i for i in range(5)}
    # As in ImageNet, where two classes share a name.
    names = {"id2label": {"0": "crane", "1": "ibex", "2": "crane"}, "label2id": {"crane": 2, "ibex": 1}}
    config = ViTConfig.from_hf(ConfigReader({**fields, **names}))
    assert config.n_classes == 3
    written = {**config.extra, **config.to_hf()}
    assert {name: written[name] for name in names} == names
    # A head of another size has other classes.
    other = dataclasses.replace(config, n_classes=2)
    assert other.to_hf()["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    assert "id2label" not in ViTConfig().to_hf()  # transformers' default
    with pytest.raises(ValueError, match=r"`num_labels`: expected the length of `id2label`, 3, got 4\. Correct one"):
        ViTConfig.from_hf(ConfigReader({**fields, **names, "num_labels": 4}))
    assert ViTConfig.from_hf(ConfigReader({"num_labels": 4})).n_classes == 4


def test_config_round_trip():
    config = dataclasses.replace(CONFIG, has_qkv_bias=False, layer_norm_eps=1e-6, init_std=0.1)
    assert ViTConfig.from_hf(ConfigReader(config.to_hf())) == config
    assert ViTConfig.from_hf(ConfigReader({})) == ViTConfig()
    config = ViTConfig.from_hf(ConfigReader({"image_size": [32, 32], "patch_size": [8, 8], "encoder_stride": 8}))
    assert (config.image_size, config.patch_size, config.extra) == (32, 8, {"encoder_stride": 8})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "prelu", r"`hidden_act`: expected 'gelu', .* or 'tanh', got 'prelu'\. Pass one of them"),
        ("pooler_act", "relu", r"`pooler_act`: expected 'tanh', which this family implements, got 'relu'\. Load"),
        (
            "pooler_output_size",
            7,
            r"`pooler_output_size`: expected None or 768, which this family implements, got 7",
        ),
        (
            "image_size",
            [32, 16],
            r"`image_size`: expected one number of pixels for height and width, which .* \[32, 16\]",
        ),
    ],
)
def test_refuses_what_it_does_not_implement(key, value, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig.from_hf(ConfigReader({key: value}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, r"`n_layers`: expected at least 1, got 0"),
        ("n_classes", 0, r"`n_classes`: expected at least 1, got 0"),
        ("n_heads", 5, r"`n_heads`: expected a divisor of `d_model`=24, got 5"),
        ("dropout", 1.0, r"`dropout`: expected a rate in \[0, 1\), got 1\.0"),
        ("patch_size", 9, r"`patch_size`: expected at most `image_size`=8, got 9\. Choose smaller patches"),
    ],
)
def test_rejects_a_wrong_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_rejects_an_image_of_another_shape(classifier):
    with pytest.raises(
        ValueError, match=r"`pixels`: expected \(2, 8, 8\), got \(2, 8, 9\)\. Resize the image, channels first"
    ):
        classifier(jnp.zeros((2, 8, 9)), key=jax.random.key(0))


def test_a_tensor_of_another_shape_is_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["vit.embeddings.position_embeddings"] = np.zeros((1, 10, 24), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(
        ValueError, match=r"`vit\.embeddings\.position_embeddings`: expected \(1, 5, 24\), as .* got \(1, 10, 24\)"
    ):
        from_pretrained(tmp_path)
