"""Image encoders beyond parity of outputs: presets, images of other sizes, masked patches, the loss of SigLIP, refusals."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.dinov2 import (
    Dinov2,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegisters,
    Dinov2WithRegistersConfig,
)
from redeqx.models.hf import ConfigReader
from redeqx.models.siglip import (
    Siglip,
    SiglipConfig,
    SiglipText,
    SiglipTextConfig,
    SiglipVision,
    SiglipVisionConfig,
    sigmoid_loss,
)
from tests.models.families._case import is_shape, random_model

DINO = Dinov2Config(12, 4, d_model=16, d_ff=32, n_layers=2, n_heads=2, n_classes=3)
TEXT = SiglipTextConfig(41, 9, d_model=16, d_ff=24, n_layers=2, n_heads=2, d_projection=16)
VISION = SiglipVisionConfig(8, 4, d_model=16, d_ff=20, n_layers=2, n_heads=2)


@pytest.mark.parametrize(
    ("cls", "config", "n_parameters"),
    [
        (Dinov2, Dinov2Config.of("small"), 22_056_576),
        (Dinov2, Dinov2Config.of("base"), 86_580_480),
        (Dinov2, Dinov2Config.of("large"), 304_368_640),
        (Dinov2, Dinov2Config.of("giant"), 1_136_480_768),
        (Dinov2WithRegisters, Dinov2WithRegistersConfig.of("base"), 86_583_552),
        (Siglip, SiglipConfig.of("base-patch16-224"), 203_155_970),
        (Siglip, SiglipConfig.of("large-patch16-384"), 652_478_466),
        (Siglip, SiglipConfig.of("so400m-patch14-384"), 877_960_498),
    ],
)
def test_presets_have_the_published_number_of_parameters(cls, config, n_parameters):
    model = eqx.filter_eval_shape(cls, config, key=jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(model) if is_shape(leaf)) == n_parameters


def test_the_loss_is_a_cross_entropy_for_each_pair():
    logits = np.random.default_rng(0).normal(size=(4, 4)) * 3
    matches = 1 / (1 + np.exp(-logits))
    wanted = -sum(np.log(matches[i, j] if i == j else 1 - matches[i, j]) for i in range(4) for j in range(4))
    loss = sigmoid_loss(jnp.asarray(logits))
    np.testing.assert_allclose(loss.total, wanted, rtol=1e-5)
    assert loss.weight == 4
    with pytest.raises(
        ValueError, match=r"`logits`: expected one row and one column for each pair, got \(4, 3\)\. Pass whole"
    ):
        sigmoid_loss(jnp.zeros((4, 3)))


@pytest.mark.sweep
def test_masked_patches_have_no_influence_and_positions_are_of_the_image():
    model = random_model(Dinov2, DINO)
    run = eqx.filter_jit(lambda pixels, masked=None: model(pixels, masked=masked))
    pixels = jax.random.normal(jax.random.key(1), (3, 12, 12))
    masked = jnp.arange(9) == 4
    changed = pixels.at[:, 4:8, 4:8].add(1)
    np.testing.assert_array_equal(run(pixels, masked), run(changed, masked))
    assert not np.isclose(run(pixels), run(changed)).all(axis=-1).any()
    wide = model(jnp.zeros((3, 8, 17)))  # 2 x 4 patches, and a column of pixels that is left over
    assert wide.shape == (1 + 8, 16) and not np.isclose(wide[1:], wide[1]).all(axis=-1)[1:].any()
    with pytest.raises(ValueError, match=r"`pixels`: expected \(3, 12, 12\), got \(3, 12, 3\)\. Resize the image"):
        model(jnp.zeros((3, 12, 3)))
    with pytest.raises(ValueError, match=r"`masked`: expected \(9,\), one for each patch, got \(8,\)\. Flatten it"):
        model(pixels, masked=jnp.zeros(8, bool))
    without = random_model(Dinov2, dataclasses.replace(DINO, has_mask_token=False))
    with pytest.raises(ValueError, match=r"`masked`: expected None for 'dinov2', got \[9\]\. This model has no mask token"):
        without(pixels, masked=masked)


@pytest.mark.sweep
def test_models_without_the_rest_load_from_larger_folders(tmp_path):
    classifier = random_model(Dinov2ForImageClassification, DINO)
    save_pretrained(classifier, DINO, tmp_path / "dino")
    assert isinstance(from_pretrained(tmp_path / "dino")[0], Dinov2ForImageClassification)
    pair = random_model(Siglip, config := SiglipConfig(TEXT, VISION))
    save_pretrained(pair, config, tmp_path / "siglip")
    for cls, folder, wanted in [
        (Dinov2, "dino", classifier.encoder),
        (SiglipText, "siglip", pair.text),
        (SiglipVision, "siglip", pair.vision),
    ]:
        for a, b in zip(jax.tree.leaves(cls.from_pretrained(tmp_path / folder)[0]), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (
            Dinov2Config,
            {"drop_path_rate": 0.1},
            r"`drop_path_rate`: expected 0.0, which this family implements, got 0.1\. Load",
        ),
        (Dinov2Config, {"hidden_act": "prelu"}, r"`hidden_act`: expected 'gelu', .* got 'prelu'"),
        (Dinov2Config, {"image_size": [8, 4]}, r"`image_size`: expected one number of pixels for height and width"),
        (SiglipVisionConfig, {"hidden_size": 10}, r"`num_attention_heads`: expected a divisor of `hidden_size`=10, got 12"),
        (
            SiglipConfig,
            {"text_config": {"projection_size": 5}},
            r"`text_config`: expected a `projection_size`|`text`: expected a `d_projection` of .*=768, got 5",
        ),
        (SiglipConfig, {"vision_config": {"vision_use_head": False}}, r"expected a model with `has_pooler`, got False"),
    ],
)
def test_refuses_what_it_does_not_implement(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config.from_hf(ConfigReader(fields))


def test_rejects_what_no_config_file_can_hold():
    with pytest.raises(
        ValueError, match=r"`d_ff`: expected a multiple of `d_model`=16, got 40\. `config.json` has the ratio"
    ):
        dataclasses.replace(DINO, d_ff=40)
    with pytest.raises(ValueError, match=r"`n_registers`: expected 0, as in every 'dinov2' model, got 4"):
        dataclasses.replace(DINO, n_registers=4)
    with pytest.raises(ValueError, match=r"`is_causal`: expected False, as in every 'siglip_text_model' model, got True"):
        dataclasses.replace(TEXT, is_causal=True)
    for config in (DINO, TEXT, VISION, SiglipConfig(TEXT, VISION), Dinov2WithRegistersConfig.of("giant")):
        assert type(config).from_hf(ConfigReader(config.to_hf())) == config
