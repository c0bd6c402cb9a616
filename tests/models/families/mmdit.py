"""Stable Diffusion 3's transformer: positions cropped, and in 3.5 norms of heads and attention of patches alone."""

import functools

import jax
import numpy as np

from redeqx import Loss
from redeqx.models.mmdit import MMDiT, MMDiTConfig
from redeqx.models.schedulers import FlowMatchEuler
from tests.models.families._case import Case, Training

CONTEXT, POOLED = 12, 10
SD35 = {"dual_attention_layers": (0,), "qk_norm": "rms_norm", "num_layers": 3, "out_channels": 3, "patch_size": 1}


def make(**kwargs):
    import diffusers

    sizes = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 4,
        "num_attention_heads": 2,
        "caption_projection_dim": 8,
        "joint_attention_dim": CONTEXT,
        "pooled_projection_dim": POOLED,
        "pos_embed_max_size": 6,
    }
    return diffusers.SD3Transformer2DModel(**{**sizes, **kwargs}).eval()


def run(module, inputs):
    import torch

    sample, timestep, context, pooled = (torch.tensor(inputs[name]) for name in ("sample", "timestep", "context", "pooled"))
    return module(sample, context, pooled, timestep).sample


rng = np.random.default_rng(0)


def inputs(h, w):
    return {
        "sample": rng.normal(size=(2, 4, h, w)).astype(np.float32),
        "timestep": np.array([981.25, 20.0], np.float32),
        "context": rng.normal(size=(2, 5, CONTEXT)).astype(np.float32),
        "pooled": rng.normal(size=(2, POOLED)).astype(np.float32),
    }


CASES = [
    Case("sd3", make, inputs(8, 6), run, gradients=True),
    Case("sd3-5", functools.partial(make, **SD35), inputs(5, 4), run, gradients=True),
]


def loss_fn(model, batch, key):
    """The squared error of the velocity, at timesteps of the examples."""
    del key

    def of_one(row):
        scheduler = FlowMatchEuler(shift=3.0)
        noisy = scheduler.add_noise(row["sample"], row["noise"], row["timestep"])
        target = scheduler.target(row["sample"], row["noise"], row["timestep"])
        return ((model(noisy, row["timestep"], row["context"], row["pooled"]) - target) ** 2).sum()

    return Loss(jax.vmap(of_one)(batch).sum(), batch["noise"].size)


CONFIG = MMDiTConfig(
    in_channels=4,
    out_channels=4,
    n_layers=2,
    n_heads=4,
    head_size=8,
    context_size=CONTEXT,
    pooled_size=16,
    max_patches=4,
    dual_layers=(0,),
    head_norm="rms_norm",
    sample_size=8,
)


def example():
    return {
        "sample": np.broadcast_to(rng.normal(size=(4, 1, 1)), (4, 8, 8)).astype(np.float32),
        "noise": rng.normal(size=(4, 8, 8)).astype(np.float32),
        "timestep": np.float32(rng.uniform(0, 1000)),
        "context": rng.normal(size=(5, CONTEXT)).astype(np.float32),
        "pooled": rng.normal(size=16).astype(np.float32),
    }


TRAININGS = [Training("mmdit", lambda key: MMDiT(CONFIG, key=key), [example() for _ in range(16)], loss_fn)]
