"""CLIP: behavior beyond parity of outputs."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.clip import CLIP, CLIPConfig, CLIPText, CLIPTextConfig, CLIPVision, CLIPVisionConfig
from redeqx.models.hf import ConfigReader
from tests.models.families._case import in_float64, is_shape, random_model

# Only in the sweep: `make test` compares the family's outputs with transformers' in `test_golden.py`.
pytestmark = pytest.mark.sweep

TEXT = CLIPTextConfig(
    41, 9, d_model=16, d_ff=24, n_layers=2, n_heads=2, attention_dropout=0.3, bos_token_id=0, eos_token_id=40, init_std=0.3
)
VISION = CLIPVisionConfig(8, 4, d_model=24, d_ff=20, n_layers=2, n_heads=3, attention_dropout=0.3, init_std=0.3)
CONFIG = CLIPConfig(TEXT, VISION, d_projection=12)
IDS = jnp.array([0, 7, 31, 7, 40, 40, 40])
PIXELS = jax.random.normal(jax.random.key(5), (3, 8, 8))


def make(cls, config):
    return random_model(cls, config)


@eqx.filter_jit
def run(model, *args, **kwargs):
    return model(*args, **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pretrained(make(CLIP, CONFIG), CONFIG, tmp_path_factory.mktemp("clip"))


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("cls", "config", "n_parameters"),
    [
        (CLIP, CLIPConfig.of("vit-base-patch32"), 151_277_313),
        (CLIP, CLIPConfig.of("vit-base-patch16"), 149_620_737),
        (CLIP, CLIPConfig.of("vit-large-patch14"), 427_616_513),
        (CLIPText, CLIPTextConfig.of("sd1"), 123_060_480),
        (CLIPText, CLIPTextConfig.of("sd2"), 340_387_840),
    ],
)
def test_presets_have_the_published_number_of_parameters(cls, config, n_parameters):
    model = eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_embeddings_have_length_one_and_logits_are_scaled_cosines():
    model = eqx.nn.inference_mode(make(CLIP, CONFIG))
    text, image = run(model, IDS, PIXELS)
    assert text.shape == image.shape == (12,)
    np.testing.assert_allclose([jnp.linalg.norm(text), jnp.linalg.norm(image)], 1, rtol=1e-6)
    np.testing.assert_allclose(eqx.filter_jit(CLIP.encode_text)(model, IDS), text, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(eqx.filter_jit(CLIP.encode_image)(model, PIXELS), image, rtol=1e-5, atol=1e-6)
    logits = model.logits_per_image(jnp.stack([image, -image, image]), jnp.stack([text, -text]))
    cosine = np.exp(model.logit_scale) * (image @ text)
    np.testing.assert_allclose(logits, cosine * np.array([[1, -1], [-1, 1], [1, -1]]), rtol=1e-5)


def test_a_token_attends_only_to_earlier_tokens_and_not_to_padding():
    model = eqx.nn.inference_mode(make(CLIPText, TEXT))
    mask = jnp.arange(7) < 5
    whole, masked = run(model, IDS), run(model, IDS, mask=mask)
    np.testing.assert_allclose(masked[:5], whole[:5], rtol=1e-5, atol=1e-6)
    other = run(model, IDS.at[2].set(9), mask=mask)
    np.testing.assert_array_equal(other[:2], masked[:2])
    assert not np.isclose(other[2:5], masked[2:5]).all(axis=-1).any()
    left = run(model, IDS, mask=~mask)
    changed = run(model, IDS.at[:5].set(3), mask=~mask)
    np.testing.assert_array_equal(left[5:], changed[5:])


def test_a_text_is_pooled_at_its_first_end_or_its_largest_id():
    hidden = jnp.arange(7.0)[:, None] * jnp.ones(16)
    model, old = (make(CLIPText, dataclasses.replace(TEXT, eos_token_id=eos)) for eos in (31, 2))
    assert model.pool(hidden, IDS)[0] == 2
    assert old.pool(hidden, IDS)[0] == 4


def test_dropout_depends_on_the_key_and_is_off_in_inference_mode():
    model = make(CLIP, CONFIG)
    a, same, b = (jnp.stack(run(model, IDS, PIXELS, key=jax.random.key(i))) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert not np.isclose(a, b).any(axis=-1).all()
    with pytest.raises(RuntimeError, match="Dropout requires a key"):
        model(IDS, PIXELS)
    quiet = run(make(CLIP, CONFIG.without_dropout()), IDS, PIXELS, key=jax.random.key(0))
    assert_same(run(eqx.nn.inference_mode(model), IDS, PIXELS), quiet)


def test_remat_changes_neither_value_nor_gradients():
    config = TEXT.without_dropout()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.sum(jnp.arange(16) * model.pool(model(IDS), IDS))

    configs = [dataclasses.replace(config, remat=remat) for remat in (False, True)]
    with jax.enable_x64(True):  # in float64, another order of sums differs less than a wrong derivative
        results = [loss(in_float64(make(CLIPText, config))) for config in configs]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-7)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_stays_bfloat16():
    model = eqx.nn.inference_mode(make(CLIP, CONFIG))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    for found, wanted in zip(run(half, IDS, PIXELS), run(model, IDS, PIXELS), strict=True):
        assert found.dtype == jnp.bfloat16
        assert jnp.abs(found.astype(jnp.float32) - wanted).mean() < 0.1 * wanted.std()


def test_initial_weights():
    text = CLIPTextConfig(500, 200, d_model=128, d_ff=512, n_layers=8, n_heads=4)
    vision = CLIPVisionConfig(64, 8, d_model=256, d_ff=512, n_layers=2, n_heads=4)
    model = eqx.filter_jit(CLIP)(CLIPConfig(text, vision, d_projection=256), key=jax.random.key(0))
    blocks = model.text.stack.blocks
    for weight, std in [
        (model.text.embedding.weight, 0.02),
        (model.text.positions, 0.02),
        (blocks.attention.query.weight, 128**-0.5),
        (blocks.attention.key.weight, 128**-0.5),
        (blocks.attention.value.weight, 128**-0.5),
        (blocks.attention.output.weight, (16 * 128) ** -0.5),
        (blocks.mlp.up.weight, 256**-0.5),
        (blocks.mlp.down.weight, (16 * 128) ** -0.5),
        (model.text_projection.weight, 128**-0.5),
        (model.vision.patches.weight, 0.02),
        (model.vision.positions, 0.02),
        (model.vision.stack.blocks.mlp.down.weight, (4 * 256) ** -0.5),
        (model.vision_projection.weight, 256**-0.5),
    ]:
        assert weight.std() == pytest.approx(std, rel=0.03)
    assert model.vision.class_token.std() == pytest.approx(256**-0.5, rel=0.2)
    assert model.logit_scale == pytest.approx(2.6592)
    for layer in (blocks.attention.query, blocks.attention.output, blocks.mlp.up, blocks.mlp.down):
        assert np.all(layer.bias == 0)


def test_text_and_vision_models_load_from_a_clip_folder(folder):
    model = make(CLIP, CONFIG)
    text, config = CLIPText.from_pretrained(folder)
    assert config == TEXT
    assert_same(text, model.text)
    vision, config = CLIPVision.from_pretrained(folder)
    assert config == VISION
    assert_same(vision, model.vision)


def test_a_text_model_with_names_before_transformers_5(folder, tmp_path):
    """As Stable Diffusion's text encoder on the Hub, and as a text model saved with the config of both models."""
    tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if name.startswith("text_model.")}
    tensors["text_model.embeddings.position_ids"] = np.arange(9)[None]
    save_file(tensors, tmp_path / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    for fields in ({**whole["text_config"], "dropout": 0.0}, whole):
        (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["CLIPTextModel"]}))
        model, config = from_pretrained(tmp_path)
        assert isinstance(model, CLIPText)
        assert config == TEXT
        assert_same(model, make(CLIP, CONFIG).text)


def test_an_unread_key_of_a_submodel_is_written_back(folder, tmp_path):
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["projection_dim"] = 12
    fields["initializer_factor"] = 1.0
    config = CLIPConfig.from_hf(ConfigReader(fields))
    save_pretrained(make(CLIP, CONFIG), config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == fields


@pytest.mark.parametrize(
    "config", [TEXT, VISION, CONFIG, CLIPConfig.of("vit-large-patch14")], ids=lambda c: type(c).__name__
)
def test_config_round_trip(config):
    assert type(config).from_hf(ConfigReader(config.to_hf())) == config


def test_an_empty_config_is_the_default_one():
    for cls in (CLIPTextConfig, CLIPVisionConfig, CLIPConfig):
        assert cls.from_hf(ConfigReader({})) == cls()


def test_a_submodel_that_an_old_config_contains_twice():
    fields = {"text_config": {"hidden_size": 768, "eos_token_id": 2}, "text_config_dict": {"hidden_size": 768}}
    assert CLIPConfig.from_hf(ConfigReader(fields)).text == CLIPTextConfig(d_model=768)
    assert CLIPTextConfig.from_hf(ConfigReader(fields)) == CLIPTextConfig(d_model=768, eos_token_id=2)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (
            CLIPTextConfig,
            {"hidden_act": "prelu"},
            r"`config.json`: `hidden_act`: expected 'gelu', .* or 'tanh', got 'prelu'",
        ),
        (CLIPTextConfig, {"eos_token_id": None}, r"`eos_token_id`: expected one id, at which a text is pooled, .* got None"),
        (CLIPTextConfig, {"eos_token_id": [2, 3]}, r"`eos_token_id`: expected one id, .* got \(2, 3\)"),
        (CLIPVisionConfig, {"hidden_act": "xielu"}, r"`hidden_act`: expected 'gelu', .* or 'tanh', got 'xielu'"),
        (CLIPVisionConfig, {"image_size": [224, 196]}, r"`image_size`: expected one number of pixels for height and width"),
        (
            CLIPConfig,
            {"vision_config": {"hidden_act": "prelu"}},
            r"`config.json: vision_config`: `hidden_act`: expected 'gelu', .* or 'tanh', got 'prelu'",
        ),
    ],
)
def test_refuses_a_key_that_it_does_not_implement(cls, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cls.from_hf(ConfigReader(fields))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (TEXT, {"n_layers": 0}, r"`n_layers`: expected at least 1, got 0"),
        (TEXT, {"n_heads": 3}, r"`n_heads`: expected a divisor of `d_model`=16, got 3"),
        (TEXT, {"attention_dropout": 1.0}, r"`attention_dropout`: expected a rate in \[0, 1\), got 1\.0"),
        (TEXT, {"activation": "prelu"}, r"`activation`: expected 'gelu', .* or 'tanh', got 'prelu'"),
        (VISION, {"n_channels": 0}, r"`n_channels`: expected at least 1, got 0"),
        (VISION, {"patch_size": 9}, r"`patch_size`: expected at most `image_size`=8, got 9\. Choose smaller patches"),
        (CONFIG, {"d_projection": 0}, r"`d_projection`: expected at least 1, got 0"),
    ],
)
def test_rejects_a_wrong_config(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


def test_rejects_inputs_of_a_wrong_shape():
    model = eqx.nn.inference_mode(make(CLIP, CONFIG))
    with pytest.raises(ValueError, match=r"`ids`: expected at most `n_positions`=9 tokens, got 10\. Cut the example"):
        model.encode_text(jnp.zeros(10, int))
    with pytest.raises(ValueError, match=r"`pixels`: expected \(3, 8, 8\), got \(8, 8, 3\)\. Resize the image"):
        model.encode_image(jnp.zeros((8, 8, 3)))
