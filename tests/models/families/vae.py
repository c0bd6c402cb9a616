"""The autoencoder of latent diffusion: encoder, decoder and both; with and without the optional parts of a config."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from redeqx import Loss
from redeqx.models.vae import VAE, VAEConfig
from tests.models.families._case import Case, Training


def make(**kwargs):
    import diffusers

    sizes = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 2,
        "norm_num_groups": 4,
    }
    return diffusers.AutoencoderKL(**{**sizes, **kwargs}).eval()


def run(module, inputs):
    import torch

    return module(torch.tensor(inputs["image"])).sample


def run_encode(module, inputs):
    import torch

    posterior = module.encode(torch.tensor(inputs["image"])).latent_dist
    return torch.cat([posterior.mean, posterior.logvar], dim=1)


def run_decode(module, inputs):
    import torch

    return module.decode(torch.tensor(inputs["latents"])).sample


def encode(model, row):
    posterior = model.encode(row["image"])
    return jnp.concatenate([posterior.mean, posterior.log_variance])


def decode(model, row):
    return model.decode(row["latents"])


rng = np.random.default_rng(0)


def pixels(*shape):
    return rng.normal(size=(2, *shape)).astype(np.float32)


PLAIN = {
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
    "in_channels": 1,
    "out_channels": 5,
}
DEEP = {
    "block_out_channels": (8, 8, 12),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 2,
}

CASES = [
    Case("vae", make, {"image": pixels(3, 8, 8)}, run, gradients=True),
    Case("vae-encode", functools.partial(make, **DEEP), {"image": pixels(3, 21, 13)}, run_encode, encode, gradients=True),
    Case("vae-decode", functools.partial(make, **DEEP), {"latents": pixels(2, 2, 3)}, run_decode, decode),
    Case("vae-plain", functools.partial(make, **PLAIN), {"image": pixels(1, 8, 6)}, run),
]


def loss_fn(model, batch, key):
    """The squared error of an image, and a small weight on the latents' KL divergence from the standard normal."""
    del key

    def of_one(image):
        posterior = model.encode(image)
        return ((model.decode(posterior.mode) - image) ** 2).sum() + 1e-3 * posterior.kl()

    return Loss(jax.vmap(of_one)(batch["image"]).sum(), batch["image"].size)


CONFIG = VAEConfig(block_channels=(8, 16), latent_channels=2, norm_groups=4)


def example():
    rows, columns = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    slopes = rng.normal(size=(2, 3, 1, 1))
    return {"image": np.sin(slopes[0] * rows + slopes[1] * columns).astype(np.float32)}


TRAININGS = [Training("vae", lambda key: VAE(CONFIG, key=key), [example() for _ in range(16)], loss_fn)]
