"""The UNet of latent diffusion: both projections around attention, odd sizes, a masked context, sizes block by block."""

import dataclasses
import functools

import jax
import numpy as np

from redeqx import Loss
from redeqx.models.unet import UNet, UNetConfig
from tests.models.families._case import Case, Training

CONTEXT = 12


def make(**kwargs):
    import diffusers

    sizes = {
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "cross_attention_dim": CONTEXT,
        "norm_num_groups": 4,
    }
    return diffusers.UNet2DConditionModel(**{**sizes, **kwargs}).eval()


def run(module, inputs):
    import torch

    inputs = {name: torch.tensor(value) for name, value in inputs.items()}
    added = {"text_embeds": inputs["pooled"], "time_ids": inputs["sizes"]} if "pooled" in inputs else None
    return module(
        inputs["sample"],
        inputs["timestep"],
        inputs["context"],
        encoder_attention_mask=inputs.get("mask"),
        added_cond_kwargs=added,
    ).sample


rng = np.random.default_rng(0)


def inputs(channels=4, h=6, w=6):
    return {
        "sample": rng.normal(size=(2, channels, h, w)).astype(np.float32),
        "timestep": np.array([981, 20], np.int32),
        "context": rng.normal(size=(2, 5, CONTEXT)).astype(np.float32),
    }


PADDED = inputs() | {"mask": np.arange(5) < np.array([[5], [3]])}
SD2 = {"use_linear_projection": True, "attention_head_dim": (2, 4), "layers_per_block": 2}
# Three different blocks; the middle one has attention on the way up, the others on the way down.
UNEVEN = {
    "in_channels": 5,
    "out_channels": 3,
    "block_out_channels": (8, 12, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": (1, 2, 1),
    "attention_head_dim": (2, 3, 4),
    "only_cross_attention": (True, False, True),
}
# Stable Diffusion XL: no attention in the first block, more in the last, and a text and sizes added to the timestep.
SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 6,
    "projection_class_embeddings_input_dim": 10 + 6 * 6,
}
ADDED = {
    "pooled": np.sin(np.arange(20, dtype=np.float32)).reshape(2, 10),
    "sizes": np.array([[96, 64, 0, 0, 96, 64], [100, 90, 2, 4, 80, 80]], np.float32),
}
OPTIONS = {
    "center_input_sample": True,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-2,
    "conv_in_kernel": 5,
    "conv_out_kernel": 1,
    "transformer_layers_per_block": 2,
    "dropout": 0.5,
}

CASES = [
    Case("unet", make, inputs(), run, gradients=True),
    Case("unet-padded", functools.partial(make, only_cross_attention=True), PADDED, run),
    Case("unet-sd2", functools.partial(make, **SD2), inputs(h=4), run),
    Case("unet-uneven", functools.partial(make, **UNEVEN), inputs(5, 7, 5), run),
    Case("unet-options", functools.partial(make, **OPTIONS), inputs(h=4), run),
    Case("sdxl", functools.partial(make, **SDXL), PADDED | ADDED, run, gradients=True),
]


def loss_fn(model, batch, key):
    """The squared error of the predicted noise."""
    del key
    predicted = jax.vmap(model)(batch["sample"], batch["timestep"], batch["context"])
    return Loss(((predicted - batch["noise"]) ** 2).sum(), batch["noise"].size)


CONFIG = UNetConfig(
    block_channels=(8, 16),
    down_attention=(True, False),
    up_attention=(False, False),
    layers_per_block=1,
    n_heads=2,
    context_size=CONTEXT,
    norm_groups=4,
)


def example():
    noise = rng.normal(size=(4, 8, 8)).astype(np.float32)
    return {
        "sample": noise + 0.5 * rng.normal(size=(4, 1, 1)).astype(np.float32),
        "noise": noise,
        "timestep": np.int32(rng.integers(1000)),
        "context": rng.normal(size=(5, CONTEXT)).astype(np.float32),
    }


def sdxl_loss_fn(model, batch, key):
    """The same with a pooled text and sizes."""
    del key
    call = lambda row: model(row["sample"], row["timestep"], row["context"], pooled=row["pooled"], sizes=row["sizes"])  # noqa: E731
    return Loss(((jax.vmap(call)(batch) - batch["noise"]) ** 2).sum(), batch["noise"].size)


def sdxl_example():
    pooled, sizes = rng.normal(size=8).astype(np.float32), rng.integers(0, 100, 6).astype(np.float32)
    return example() | {"pooled": pooled, "sizes": sizes}


SDXL_CONFIG = dataclasses.replace(
    CONFIG,
    down_attention=(False, True),
    up_attention=(True, False),
    n_heads=(2, 4),
    use_linear_projection=True,
    added_size=8 + 6 * 4,
    added_wave_size=4,
)
TRAININGS = [
    Training("unet", lambda key: UNet(CONFIG, key=key), [example() for _ in range(16)], loss_fn),
    Training("sdxl", lambda key: UNet(SDXL_CONFIG, key=key), [sdxl_example() for _ in range(16)], sdxl_loss_fn),
]
