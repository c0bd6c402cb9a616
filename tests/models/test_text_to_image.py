"""Pipelines from texts to images: folders, errors, guidance and the loss. `diffusion/test_text_to_image_parity.py` compares
their numbers with diffusers."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redeqx.models.clip import CLIPText, CLIPTextConfig, CLIPTextWithProjection, CLIPTextWithProjectionConfig
from redeqx.models.mmdit import MMDiT, MMDiTConfig
from redeqx.models.schedulers import DDIM, DDPM, Euler, FlowMatchEuler
from redeqx.models.text_to_image import PipelineConfig, StableDiffusion, StableDiffusion3, StableDiffusionXL
from redeqx.models.unet import UNet, UNetConfig
from redeqx.models.vae import VAE, VAEConfig
from tests._tree import named_leaves
from tests.models.families._case import random_model

SMALL = {"vocab_size": 11, "n_positions": 5, "d_ff": 8, "n_layers": 2, "n_heads": 2, "eos_token_id": 1}
TEXT = CLIPTextConfig(d_model=8, **SMALL)
TEXT_2 = CLIPTextWithProjectionConfig(d_model=4, d_projection=6, **SMALL)
UNET = UNetConfig(
    block_channels=(8, 8),
    down_attention=(False, True),
    up_attention=(True, False),
    layers_per_block=1,
    n_heads=2,
    context_size=12,
    norm_groups=4,
    added_size=6 + 6 * 4,
    added_wave_size=4,
)
VAE_CONFIG = VAEConfig(block_channels=(4, 4), latent_channels=4, norm_groups=2, scaling_factor=0.5, shift_factor=0.1)
EULER = PipelineConfig(Euler(timestep_spacing="leading"), is_empty_zero=True)
TRANSFORMER = MMDiTConfig(
    in_channels=4, out_channels=4, n_layers=2, n_heads=2, head_size=4, context_size=12, pooled_size=12, max_patches=4
)


def sdxl(config=EULER, *, unet=UNET):
    return StableDiffusionXL(
        vae=random_model(VAE, VAE_CONFIG),
        text_encoder=random_model(CLIPText, TEXT),
        text_encoder_2=random_model(CLIPTextWithProjection, TEXT_2),
        unet=random_model(UNet, unet),
        config=config,
    )


def sd3(**changes):
    parts = {
        "vae": random_model(VAE, VAE_CONFIG),
        "text_encoder": random_model(CLIPTextWithProjection, TEXT_2),
        "text_encoder_2": random_model(CLIPTextWithProjection, TEXT_2),
        "text_encoder_3": None,
        "transformer": random_model(MMDiT, TRANSFORMER),
    }
    return StableDiffusion3(**parts | changes, config=PipelineConfig(FlowMatchEuler(shift=3.0)))


@pytest.mark.sweep
def test_a_folder_holds_the_pipeline_and_its_tokenizers(tmp_path):
    template = "tokenizer_2/additional_chat_templates/plain.jinja"
    files = {template: b"plain", "tokenizer_2/vocab.json": b"{}"}
    config = dataclasses.replace(EULER, files=files, extra={"tokenizer_2": ["t", "CLIPTokenizer"]})
    config.extra["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    pipeline = sdxl(config)
    assert pipeline.save_pretrained(tmp_path / "a") == tmp_path / "a"
    index = json.loads((tmp_path / "a/model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionXLPipeline"
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    assert index["text_encoder_2"] == ["transformers", "CLIPTextModelWithProjection"]
    assert index["scheduler"] == ["diffusers", "EulerDiscreteScheduler"]
    assert index["tokenizer_2"] == ["t", "CLIPTokenizer"]
    assert index["safety_checker"] == [None, None]  # its folder is not written
    assert index["force_zeros_for_empty_prompt"] is True

    again = StableDiffusionXL.from_pretrained(tmp_path / "a")
    assert again.config == config
    again.save_pretrained(tmp_path / "b")
    assert {name: (tmp_path / "b" / name).read_bytes() for name in files} == files == again.config.files
    for name, leaf in named_leaves(eqx.filter(pipeline, eqx.is_array)).items():
        np.testing.assert_array_equal(named_leaves(eqx.filter(again, eqx.is_array))[name], leaf)
    other = StableDiffusionXL.from_pretrained(tmp_path / "a", scheduler=DDPM)
    assert isinstance(other.config.scheduler, DDPM)

    def edited(**keys):
        (tmp_path / "a/model_index.json").write_text(json.dumps(index | keys))
        return StableDiffusionXL.from_pretrained(tmp_path / "a")

    for value in (True, False, None):  # as in diffusers, where None is false
        assert edited(force_zeros_for_empty_prompt=value).config.is_empty_zero is bool(value)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/vocab.json").write_text("{}")
    assert edited(**{"../outside": ["t", "CLIPTokenizer"]}).config.files == files  # or it would be written outside too
    for keys, message in (
        ({"_class_name": "KandinskyPipeline"}, "`_class_name`: expected 'StableDiffusionXLPipeline', .* got 'Kandinsky"),
        ({"unet": ["diffusers", "UNet3D"]}, "`unet`: expected 'UNet2DConditionModel', .* got 'UNet3D'"),
        ({"unet": [None, None]}, "`unet`: expected 'UNet2DConditionModel', .* got None"),
        ({"vae": "AutoencoderKL"}, "`vae`: expected list, got 'AutoencoderKL'"),
        (
            {"scheduler": ["diffusers", "LMSDiscreteScheduler"]},
            r"`scheduler`: expected DDIM or .* got LMSDiscreteScheduler\. Pass `scheduler=`",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            edited(**keys)


@pytest.mark.sweep
def test_an_absent_t5_stays_absent(tmp_path):
    sd3().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["text_encoder_3"] == [None, None]
    pipeline = StableDiffusion3.from_pretrained(tmp_path)
    assert pipeline.text_encoder_3 is None
    condition = jax.eval_shape(pipeline.encode, jnp.arange(5), jnp.arange(5))
    assert condition["context"].shape == (5 + 256, 12)
    assert condition["pooled"].shape == (12,)


@pytest.mark.sweep
def test_parts_must_fit_together():
    for unet, message in (
        ({"context_size": 13}, "`unet/config.json`: `cross_attention_dim`: expected 12, as in the other parts, got 13"),
        ({"in_channels": 5}, "`in_channels`: expected 4, as in the other parts, got 5"),
        ({"added_size": 31}, "`projection_class_embeddings_input_dim`: expected 30, as in the other parts, got 31"),
        (
            {"added_size": None, "added_wave_size": None},
            "`projection_class_embeddings_input_dim`: expected 1542, .* got None",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            sdxl(unet=dataclasses.replace(UNET, **unet))
    with pytest.raises(ValueError, match="`pooled_projection_dim`: expected 12, as in the other parts, got 10"):
        sd3(transformer=random_model(MMDiT, dataclasses.replace(TRANSFORMER, pooled_size=10)))
    with pytest.raises(ValueError, match="`joint_attention_dim`: expected 8, as in the other parts, got 4"):
        sd3(transformer=random_model(MMDiT, dataclasses.replace(TRANSFORMER, context_size=4)))


def test_a_mask_of_padding_is_refused():
    """diffusers reads this key of the text encoder, and masks padding then."""
    text = random_model(CLIPText, dataclasses.replace(TEXT, d_model=12, extra={"use_attention_mask": True}))
    unet = random_model(UNet, dataclasses.replace(UNET, added_size=None, added_wave_size=None))
    parts = {"vae": random_model(VAE, VAE_CONFIG), "unet": unet, "config": PipelineConfig(DDIM())}
    with pytest.raises(ValueError, match="`use_attention_mask`: expected False, as padding is attended to here, got True"):
        StableDiffusion(text_encoder=text, **parts)


def test_without_a_text():
    sizes = jnp.arange(6.0)
    condition = {"context": jnp.ones((5, 12)), "pooled": jnp.ones(6), "sizes": sizes}
    empty = sdxl().empty(condition)
    assert not np.any(empty["context"]) and not np.any(empty["pooled"])
    np.testing.assert_array_equal(empty["sizes"], sizes)
    with pytest.raises(ValueError, match="`ids`: expected those of an empty text, got none"):
        sdxl(dataclasses.replace(EULER, is_empty_zero=False)).empty(condition)


def test_latents_are_scaled_and_shifted():
    x = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(VAE_CONFIG.to_diffusion(x), (x - 0.1) * 0.5)
    np.testing.assert_allclose(VAE_CONFIG.from_diffusion(VAE_CONFIG.to_diffusion(x)), x, rtol=1e-6)
    np.testing.assert_allclose(dataclasses.replace(VAE_CONFIG, shift_factor=None).to_diffusion(x), x * 0.5)


@pytest.mark.parametrize("needs_float32", [True, False])
def test_the_autoencoder_of_sdxl_is_computed_in_float32_if_float16_is_too_narrow(needs_float32):
    config = dataclasses.replace(VAE_CONFIG, needs_float32=needs_float32)
    vae = random_model(VAE, config)
    vae = eqx.tree_at(lambda m: (m.encoder.conv_in.weight, m.decoder.conv_in.weight), vae, replace_fn=lambda w: 3e3 * w)
    cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)  # noqa: E731
    narrow = dataclasses.replace(sdxl(), vae=cast(vae, jnp.float16))
    wide = dataclasses.replace(narrow, vae=cast(narrow.vae, jnp.float32))
    for name, shape in (("decode", (4, 4, 4)), ("encode_image", (3, 8, 8))):
        x = (30 * jax.random.normal(jax.random.key(0), shape)).astype(jnp.float16)
        found = getattr(narrow, name)(x)
        if needs_float32:
            expected = getattr(wide, name)(x.astype(jnp.float32))
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
            assert found.dtype == (jnp.float32 if name == "decode" else jnp.float16)
        else:
            assert found.dtype == jnp.float16 and not np.all(np.isfinite(found))


@pytest.mark.sweep
def test_trains_and_draws():
    """With guidance 1 the image does not depend on the empty text, and a step on the loss lowers it."""
    text = CLIPTextConfig(d_model=12, **SMALL)
    unet = dataclasses.replace(UNET, added_size=None, added_wave_size=None)
    pipeline = StableDiffusion(
        vae=random_model(VAE, VAE_CONFIG),
        text_encoder=random_model(CLIPText, text),
        unet=UNet(unet, key=jax.random.key(0)),
        config=PipelineConfig(DDIM(clip_range=None)),
    )
    image = jax.random.uniform(jax.random.key(1), (3, 8, 8), minval=-1)
    keys, ids = jax.random.split(jax.random.key(2), 4), jnp.arange(5)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(pipeline):
        condition, latents = pipeline.encode(ids), pipeline.encode_image(image)
        return jax.vmap(lambda key: pipeline.loss(latents, condition, key))(keys).mean()

    first, grads = loss(pipeline)
    assert np.any(grads.text_encoder.embedding.weight)
    pipeline = eqx.apply_updates(pipeline, jax.tree.map(lambda grad: -0.01 * grad, grads))
    assert loss(pipeline)[0] < first

    @eqx.filter_jit
    def draw(guidance):
        condition, empty = pipeline.encode(ids), pipeline.encode(ids[::-1])
        noise = jax.random.normal(jax.random.key(3), (4, 4, 4))
        return pipeline.denoise(noise, condition, empty, guidance=guidance, n_steps=2)

    plain, guided = draw(jnp.array(1.0)), draw(jnp.array(4.0))
    assert np.abs(plain - guided).max() > 1e-3
    image = pipeline.decode(plain)
    assert image.shape == (3, 8, 8) and np.abs(image).max() <= 1
