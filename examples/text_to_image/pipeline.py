"""A latent diffusion pipeline: its four parts as one model, read and written as a `diffusers` folder.

Dims: c = channels of the latents, h x w = their height and width, seq = tokens of a caption, d = width of their states.
"""

import json
from pathlib import Path
from typing import Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

import redeqx
from examples._texts import load_tokenizer
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.clip import CLIPText, CLIPTextConfig
from redeqx.models.schedulers import DDIM, denoise, guided
from redeqx.models.unet import UNet, UNetConfig
from redeqx.models.vae import VAE

PARTS = {"vae": VAE, "text_encoder": CLIPText, "unet": UNet}  # the models by their subfolders


def without_words(ids: Int[Array, "b seq"]) -> Int[Array, "b seq"]:
    """Returns empty captions: each caption's first token, then only end tokens."""
    return ids.at[:, 1:].set(ids[:, -1:])


def encode_captions(tokenizer: Tokenizer, captions: list[str], n_tokens: int) -> np.ndarray:
    """Returns the ids of captions, padded to equal length with the end token."""
    encoded = [tokenizer.encode(caption).ids for caption in captions]
    for caption, ids in zip(captions, encoded, strict=True):
        if len(ids) > n_tokens:
            raise ValueError(
                f"`{caption}`: expected a caption of at most {n_tokens} tokens, got {len(ids)}. Shorten it, or train with "
                "a larger `--max-tokens`."
            )
    return np.array([ids + ids[-1:] * (n_tokens - len(ids)) for ids in encoded], np.int32)


def check_padding(path: Path, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a folder's tokenizer pads with another token than the end token, as Stable Diffusion 2's does."""
    pad = json.loads(path.read_text("utf-8")).get("pad_token") if path.is_file() else None
    pad = pad["content"] if isinstance(pad, dict) else pad
    end = tokenizer.id_to_token(tokenizer.encode("").ids[-1])
    if pad not in (None, end):
        raise ValueError(
            f"`{path}`: `pad_token`: expected {end!r}, with which captions are padded here, got {pad!r}. Pass a pipeline of "
            "Stable Diffusion 1, or train `redeqx.models.text_to_image.StableDiffusion`."
        )


class Pipeline(eqx.Module):
    """Generates images from captions. The noise schedule has no arrays: it only defines the noise of each timestep."""

    vae: VAE
    text_encoder: CLIPText
    unet: UNet
    schedule: DDIM = eqx.field(static=True)

    def predict(
        self, latents: Float[Array, "b c h w"], timesteps: Int[Array, " b"], ids: Int[Array, "b seq"]
    ) -> Float[Array, "b c h w"]:
        """Returns the UNet's prediction from noisy latents, given their timesteps and captions."""
        return jax.vmap(self.unet)(latents, timesteps, jax.vmap(self.text_encoder)(ids))

    def denoise(
        self,
        noise: Float[Array, "b c h w"],
        ids: Int[Array, "b seq"],
        *,
        guidance: float,
        n_steps: int,
    ) -> Float[Array, "b c h w"]:
        """Denoises latents in `n_steps`, with classifier-free guidance of scale `guidance`."""

        def predict_for(states: Float[Array, "b seq d"]):
            return lambda latents, timestep: jax.vmap(self.unet, (0, None, 0))(latents, timestep, states)

        # Encode captions once, not at every step.
        text, nothing = (predict_for(jax.vmap(self.text_encoder)(x)) for x in (ids, without_words(ids)))
        return denoise(self.schedule, guided(text, nothing, guidance), noise, n_steps)

    def decode(self, latents: Float[Array, "b c h w"]) -> Float[Array, "b channels height width"]:
        """Returns the images of latents, in [-1, 1]."""
        return jnp.clip(jax.vmap(self.vae.decode)(self.vae.config.from_diffusion(latents)), -1, 1)

    @classmethod
    def make(
        cls, vae: VAE, text: CLIPTextConfig, channels: tuple[int, ...], latent_size: int, deployer: redeqx.Deployer
    ) -> Self:
        """Puts an untrained text encoder and UNet around an autoencoder.

        **Arguments:**

        - `channels`: the channels of the UNet's blocks. All blocks except the innermost attend to the caption, and so does
            the middle block.
        - `latent_size`: the height and width of the latents.
        """
        n_latent, n_outer = vae.config.latent_channels, len(channels) - 1
        unet = UNetConfig(
            n_latent, n_latent, channels, down_attention=(True,) * n_outer + (False,), layers_per_block=1, n_heads=4,
            up_attention=(False,) + (True,) * n_outer, norm_groups=8, context_size=text.d_model, sample_size=latent_size,
        )  # fmt: skip
        # Predict velocities, and end the schedule in pure noise, because drawing starts from pure noise.
        schedule = DDIM(
            beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", clip_range=None, timestep_spacing="trailing"
        )
        text_key, unet_key = deployer.next_key(), deployer.next_key()
        text_encoder = deployer.init(lambda: CLIPText(text, key=text_key))
        return cls(vae, text_encoder, deployer.init(lambda: UNet(unet, key=unet_key)), schedule)

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Writes the folder for `load`. Each part is in the format of `diffusers` or `transformers`."""
        for name in PARTS:
            part = getattr(self, name)
            save_pretrained(part, part.config, folder / name)
        self.schedule.save_pretrained(folder / "scheduler")
        (folder / "tokenizer").mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer/tokenizer.json"))

    @classmethod
    def load(cls, folder: Path, deployer: redeqx.Deployer) -> tuple[Self, Tokenizer]:
        """Loads the pipeline of a folder onto the deployer's mesh.

        Raises ValueError with the part that is missing, of another kind, or incompatible with the others.
        """
        for name in (*PARTS, "scheduler", "tokenizer"):
            if not (folder / name).is_dir():
                there = ", ".join(sorted(entry.name for entry in folder.glob("*"))) or "nothing"
                raise ValueError(
                    f"`{folder / name}`: expected a part of the pipeline, got {there} in {folder}. "
                    "Pass a folder that diffusers or this example wrote."
                )
        parts = {name: from_pretrained(folder / name, deployer=deployer)[0] for name in PARTS}
        for name, kind in PARTS.items():
            if not isinstance(parts[name], kind):
                raise ValueError(
                    f"`{folder / name}`: expected a {kind.__name__}, got a {type(parts[name]).__name__}. Put it there."
                )
        tokenizer = load_tokenizer(folder / "tokenizer")
        check_padding(folder / "tokenizer/tokenizer_config.json", tokenizer)
        vae, text, unet = (parts[name].config for name in PARTS)
        for what, size, wanted in (
            ("unet/config.json`: `in_channels", unet.in_channels, vae.latent_channels),
            ("unet/config.json`: `cross_attention_dim", unet.context_size, text.d_model),
            ("text_encoder/config.json`: `vocab_size", text.vocab_size, max(text.vocab_size, tokenizer.get_vocab_size())),
        ):
            if size != wanted:
                raise ValueError(
                    f"`{folder}/{what}`: expected {wanted}, as in the other parts, got {size}. Use parts of one pipeline."
                )
        return cls(**parts, schedule=DDIM.from_pretrained(folder / "scheduler")), tokenizer
