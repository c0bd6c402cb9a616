"""Compares whole pipelines with `diffusers`, every step from the same noise, and their folders; needs the `parity` extra."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from redeqx.models.schedulers import DDIM, PNDM
from redeqx.models.text_to_image import StableDiffusion, StableDiffusion3, StableDiffusionXL
from tests.models.families import clip, mmdit, unet, vae
from tests.models.families._case import fill, shapes

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

PROMPTS, N_TOKENS, SIZE, N_STEPS, GUIDANCE = ["a cab", "bad"], 9, 16, 4, 3.0
LATENT = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NO_QUANT = {"use_quant_conv": False, "use_post_quant_conv": False}
SD35 = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
TEXT = {"hidden_size": 8, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1, "vocab_size": 43}


def tokenizer(pad):
    """Returns a tokenizer of single letters."""
    import transformers

    letters = "abcd"
    words = ["<|startoftext|>", "<|endoftext|>", "!", *letters, *(f"{letter}</w>" for letter in letters)]
    return transformers.CLIPTokenizer(
        {word: i for i, word in enumerate(words)}, [], pad_token=pad, model_max_length=N_TOKENS
    )


def noisy(scheduler, latents, i):
    """Returns latents after `i` steps of diffusers in our scale."""
    if not hasattr(scheduler, "init_noise_sigma") or type(scheduler).__name__ != "EulerDiscreteScheduler":
        return latents
    return latents / float(1 + scheduler.sigmas[i] ** 2) ** 0.5


def filled(pipeline, folder, **absent):
    """Saves a pipeline, replaces all its weights by those of `fill`, and returns it as diffusers loads it."""
    pipeline.save_pretrained(folder)
    for path in folder.glob("*/*.safetensors"):
        fill(path, shapes(path))
    return type(pipeline).from_pretrained(folder, **absent)


def run_theirs(pipeline, noise, **more):
    """Returns the latents after each step, and the image in [-1, 1]."""
    import torch

    steps = []

    def keep(pipeline, i, timestep, values):
        steps.append(noisy(pipeline.scheduler, values["latents"], i + 1).numpy())
        return {}

    image = pipeline(
        PROMPTS, latents=torch.tensor(noise), guidance_scale=GUIDANCE, num_inference_steps=N_STEPS, output_type="np",
        height=SIZE, width=SIZE, callback_on_step_end=keep, **more,
    )  # fmt: skip
    return np.stack(steps), 2 * image.images.transpose(0, 3, 1, 2) - 1


def run_ours(pipeline, noise, conditions, empties):
    """The same. Steps are taken one by one, and all of them in the pipeline's own loop."""
    scheduler = pipeline.scheduler_of(jnp.asarray(noise[0]))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None))
    def step(x, memory, condition, empty, timestep):
        output = pipeline.model_fn(condition, empty, GUIDANCE)(x, timestep)
        memory, arguments = scheduler.recall(memory, output, timestep, x, n_steps=N_STEPS)
        return scheduler.step(*arguments, n_steps=N_STEPS), memory

    @jax.jit
    @jax.vmap
    def run(noise, condition, empty):
        latents = pipeline.denoise(noise, condition, empty, guidance=GUIDANCE, n_steps=N_STEPS)
        return latents, pipeline.decode(latents)

    x, steps = scheduler.begin(jnp.asarray(noise), N_STEPS), []
    memory = jax.vmap(scheduler.memory)(x)
    for timestep in scheduler.timesteps(N_STEPS):
        x, memory = step(x, memory, conditions, empties, timestep)
        steps.append(x)
    latents, images = run(noise, conditions, empties)
    compare([latents], [steps[-1]])
    return np.stack(steps), images


def compare(ours, theirs):
    for found, expected in zip(ours, theirs, strict=True):
        assert np.std(expected) > 0.1
        size = np.abs(expected).max()
        print(f"difference {np.abs(found - expected).max():.1e} of numbers up to {size:.1f}")
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * size)


def round_trip(pipeline, theirs, folder, **absent):
    """Our folder is loaded by diffusers, with the same weights and tokenizers."""
    import torch

    pipeline.save_pretrained(folder)
    again = type(theirs).from_pretrained(folder, **absent)
    for name in pipeline.parts:
        if getattr(theirs, name) is None:
            assert getattr(again, name) is None
            continue
        for key, tensor in getattr(theirs, name).state_dict().items():
            assert torch.equal(getattr(again, name).state_dict()[key], tensor), f"{name}: {key}"
    assert again.tokenizer("a cab").input_ids == theirs.tokenizer("a cab").input_ids
    return json.loads((folder / "model_index.json").read_text())


def ids_of(tokenizer, texts):
    return jnp.asarray(tokenizer(texts, padding="max_length", max_length=N_TOKENS).input_ids, jnp.int32)


def encoded(pipeline, texts, empty, **given):
    """Returns the conditions of texts, and those without a text."""

    @jax.jit
    @jax.vmap
    def encode(texts, empty):
        condition = pipeline.encode(*texts, **given)
        return condition, pipeline.empty(condition, *empty)

    return encode(texts, empty)


def latents(channels):
    return np.random.default_rng(0).normal(size=(2, channels, SIZE // 2, SIZE // 2)).astype(np.float32)


def test_sdxl(tmp_path):
    import diffusers
    import torch

    theirs = filled(
        diffusers.StableDiffusionXLPipeline(
            vae=vae.make(latent_channels=4, scaling_factor=0.13),
            text_encoder=clip.make_text(**TEXT),
            text_encoder_2=clip.make_projection(**{**TEXT, "hidden_size": 4}, projection_dim=10),
            tokenizer=tokenizer("<|endoftext|>"),
            tokenizer_2=tokenizer("!"),
            unet=unet.make(**unet.SDXL),
            scheduler=diffusers.EulerDiscreteScheduler(**LATENT, steps_offset=1, timestep_spacing="leading"),
            add_watermarker=False,
        ),
        tmp_path / "theirs",
    )
    pipeline = StableDiffusionXL.from_pretrained(tmp_path / "theirs")
    assert pipeline.config.is_empty_zero
    tokenizers = (theirs.tokenizer, theirs.tokenizer_2)
    sizes = jnp.array([40, 30, 1, 2, SIZE, SIZE])
    texts, nothing = ([ids_of(tokenizer, texts) for tokenizer in tokenizers] for texts in (PROMPTS, ["", ""]))
    noise = latents(4)
    more = {"original_size": (40, 30), "crops_coords_top_left": (1, 2)}
    compare(run_ours(pipeline, noise, *encoded(pipeline, texts, [], sizes=sizes)), run_theirs(theirs, noise, **more))
    index = round_trip(pipeline, theirs, tmp_path / "ours")
    assert index["force_zeros_for_empty_prompt"]
    assert index["text_encoder_2"] == ["transformers", "CLIPTextModelWithProjection"]

    theirs.register_to_config(force_zeros_for_empty_prompt=False)
    with torch.no_grad():
        states, empty_states, pooled, empty_pooled = (x.numpy() for x in theirs.encode_prompt(PROMPTS))
    condition, empty = encoded(pipeline, texts, nothing, sizes=sizes)
    found = (condition["context"], empty["context"], condition["pooled"], empty["pooled"])
    compare(found, (states, empty_states, pooled, empty_pooled))


@pytest.mark.parametrize(
    ("cls", "options"), [(DDIM, {"clip_sample": False, "set_alpha_to_one": False}), (PNDM, {"skip_prk_steps": True})]
)
def test_stable_diffusion(cls, options, tmp_path):
    import diffusers

    theirs = filled(
        diffusers.StableDiffusionPipeline(
            vae=vae.make(latent_channels=4),
            text_encoder=clip.make_text(**{**TEXT, "hidden_size": unet.CONTEXT}),
            tokenizer=tokenizer("<|endoftext|>"),
            unet=unet.make(),
            scheduler=getattr(diffusers, cls.class_name)(**LATENT, steps_offset=1, **options),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ),
        tmp_path / "theirs",
    )
    pipeline = StableDiffusion.from_pretrained(tmp_path / "theirs")
    assert type(pipeline.config.scheduler) is cls

    noise = latents(4)
    texts, empty = ([ids_of(theirs.tokenizer, texts)] for texts in (PROMPTS, ["", ""]))
    compare(run_ours(pipeline, noise, *encoded(pipeline, texts, empty)), run_theirs(theirs, noise))
    assert round_trip(pipeline, theirs, tmp_path / "ours")["unet"] == ["diffusers", "UNet2DConditionModel"]


@pytest.mark.parametrize(("has_t5", "shift"), [(True, {"shift": 3.0}), (False, {"use_dynamic_shifting": True})])
def test_sd3(has_t5, shift, tmp_path):
    import diffusers
    import transformers

    absent = {} if has_t5 else {"text_encoder_3": None}  # diffusers loads no such folder without being told so
    t5 = transformers.T5Config(
        vocab_size=43, d_model=mmdit.CONTEXT, d_kv=4, d_ff=16, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    theirs = filled(
        diffusers.StableDiffusion3Pipeline(
            vae=vae.make(latent_channels=16, scaling_factor=1.5, shift_factor=0.06, **NO_QUANT),
            text_encoder=clip.make_projection(**TEXT, projection_dim=6),
            text_encoder_2=clip.make_projection(**{**TEXT, "hidden_size": 2, "num_attention_heads": 1}, projection_dim=4),
            text_encoder_3=transformers.T5EncoderModel(t5).eval() if has_t5 else None,
            tokenizer=tokenizer("<|endoftext|>"),
            tokenizer_2=tokenizer("!"),
            tokenizer_3=tokenizer("!"),
            transformer=mmdit.make(in_channels=16, out_channels=16, **({} if has_t5 else SD35)),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**shift),
        ),
        tmp_path / "theirs",
        **absent,
    )
    pipeline = eqx.nn.inference_mode(StableDiffusion3.from_pretrained(tmp_path / "theirs"))
    assert (pipeline.text_encoder_3 is not None) == has_t5
    tokenizers = (theirs.tokenizer, theirs.tokenizer_2, theirs.tokenizer_3)
    texts, empty = ([ids_of(tokenizer, texts) for tokenizer in tokenizers] for texts in (PROMPTS, ["", ""]))
    noise, more = latents(16), {"max_sequence_length": N_TOKENS}
    compare(run_ours(pipeline, noise, *encoded(pipeline, texts, empty)), run_theirs(theirs, noise, **more))
    index = round_trip(pipeline, theirs, tmp_path / "ours", **absent)
    assert index["text_encoder_3"] == (["transformers", "T5EncoderModel"] if has_t5 else [None, None])
