"""The autoencoder of latent diffusion (`AutoencoderKL`): encodes images to latents, and back.

The latents of Stable Diffusion have an eighth of the image's height and width.

Source: Rombach et al. 2022, *High-Resolution Image Synthesis with Latent Diffusion Models*, and its code,
github.com/CompVis/latent-diffusion. Weights are stored as in `diffusers`. Only the layout differs from that code.

Dims: c = channels, h x w = height and width, latent = channels of the latents.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PRNGKeyArray

from redeqx._rounding import at_least_float32

from ._kinds import NUMBER, POSITIVE
from .diffusion import Resnet, apply, attention, check_groups, diffusers, mirrored, size_of_sample, sizes_of_blocks, upsample
from .hf import ConfigReader, Field, Fields, Fixed, FolderConfig, Only, Pretrained, Row, WeightMap, published, shapes_of
from .nn import Attention, check_sizes

_EPS = 1e-6  # added to the variance in all norms here
# The names in folders from before diffusers 0.17, including those of Stable Diffusion.
_OLD = (("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("proj_attn", "to_out.0"))


def _block_types(key: str, kind: str) -> Row:
    """Returns the row of the blocks' types. All blocks must have the type `kind`."""
    types = lambda n: [kind] * n  # noqa: E731
    return Only(
        key,
        lambda known: [types(len(known["block_channels"]))],
        default=types(1),
        save=lambda config: types(len(config.block_channels)),
    )


@dataclass(frozen=True)
class VAEConfig(FolderConfig):
    """The sizes of an autoencoder. The defaults are those of diffusers, with one small block.

    **Arguments:**

    - `in_channels`, `out_channels`, `latent_channels`: the channels of the encoder's input, the decoder's output, and the
        latents.
    - `block_channels`: the channels of the encoder's blocks; the decoder has them in reverse order. Each block but the last
        halves height and width.
    - `layers_per_block`: the number of residual blocks in each block of the encoder. The decoder's blocks have one more.
    - `norm_groups`: the number of groups of every norm; it divides all `block_channels`.
    - `scaling_factor`, `shift_factor`: a diffusion model works on `(latents - shift_factor) * scaling_factor`, so that they
        have unit variance. The autoencoder itself applies neither.
    - `has_mid_attention`: whether the middle blocks have attention.
    - `has_quant_conv`, `has_post_quant_conv`: whether a 1x1 convolution follows the encoder, and whether one precedes the
        decoder.
    - `sample_size`: the height and width of the training images, in pixels, for pipelines. Any size can be encoded.
    - `needs_float32`: whether float16 is too narrow for its activations, for pipelines (see `StableDiffusionXL`).
    - `remat`: whether the backward pass recomputes each residual block.

    Raises ValueError for sizes below 1, and for groups that do not divide the channels.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    block_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    norm_groups: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    has_mid_attention: bool = True
    has_quant_conv: bool = True
    has_post_quant_conv: bool = True
    sample_size: int | tuple[int, ...] | None = 32
    needs_float32: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "in_channels", "out_channels", "latent_channels", "layers_per_block", "norm_groups")
        check_groups(self.block_channels, self.norm_groups)

    # The autoencoders of Stable Diffusion 1 and 2, of XL, and of 3 and 3.5, with 84 million parameters each.
    sizes = published(
        {
            "sd": {"sample_size": 512},
            "sdxl": {"scaling_factor": 0.13025, "sample_size": 1024},
            "sd3": {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609, "has_quant_conv": False,
                    "has_post_quant_conv": False, "sample_size": 1024},
        },
        block_channels=(128, 256, 512, 512),
        layers_per_block=2,
    )  # fmt: skip

    def to_diffusion(self, latents: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Returns what a diffusion model works on: latents of mean 0 and variance 1."""
        return (latents - (self.shift_factor or 0.0)) * self.scaling_factor

    def from_diffusion(self, latents: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Returns the latents to decode: the inverse of `to_diffusion`."""
        return latents / self.scaling_factor + (self.shift_factor or 0.0)

    rows = (
        *diffusers("AutoencoderKL"),
        Only("act_fn", "silu", "swish"),  # two names for the same function
        *Fields("in_channels", "out_channels", "latent_channels"),
        Field("block_out_channels", "block_channels", via=sizes_of_blocks),
        _block_types("down_block_types", "DownEncoderBlock2D"),
        _block_types("up_block_types", "UpDecoderBlock2D"),
        Field("layers_per_block", via=ConfigReader.layers),
        Field("norm_num_groups", "norm_groups"),
        Field("scaling_factor", kind=POSITIVE),
        Field("shift_factor", kind=NUMBER),
        *Fixed(is_written=False, latents_mean=None, latents_std=None),
        *Fields(has_mid_attention="mid_block_add_attention", has_quant_conv="use_quant_conv"),
        Field("use_post_quant_conv", "has_post_quant_conv"),
        Field("sample_size", via=size_of_sample),
        Field("force_upcast", "needs_float32"),
    )


class Posterior(eqx.Module):
    """The distribution of an image's latents: a normal distribution with independent entries."""

    mean: Float[Array, "latent h w"]
    log_variance: Float[Array, "latent h w"]

    @property
    def mode(self) -> Float[Array, "latent h w"]:
        """The most likely latents."""
        return self.mean

    def sample(self, key: PRNGKeyArray) -> Float[Array, "latent h w"]:
        """Latents drawn from the distribution."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_variance / 2) * noise

    def kl(self) -> Float[Array, ""]:
        """Returns the KL divergence from the standard normal in nats, summed over all entries, in at least float32: a term
        of the training loss."""
        dtype = at_least_float32(self.mean.dtype)
        mean, log_variance = self.mean.astype(dtype), self.log_variance.astype(dtype)
        return (jnp.square(mean) + jnp.exp(log_variance) - 1 - log_variance).sum() / 2


def _resnets(channels: Sequence[int], config: VAEConfig, key: PRNGKeyArray) -> list[Resnet]:
    """Returns a sequence of residual blocks; `channels` are those before, between and after them."""
    keys = jax.random.split(key, len(channels) - 1)
    return [
        Resnet(*pair, groups=config.norm_groups, eps=_EPS, key=key)
        for pair, key in zip(pairwise(channels), keys, strict=True)
    ]


class AttentionBlock(eqx.Module):
    """Single-head attention over all pixels, with a residual connection."""

    group_norm: eqx.nn.GroupNorm
    attention: Attention

    def __init__(self, channels: int, config: VAEConfig, *, key: PRNGKeyArray):
        self.group_norm = eqx.nn.GroupNorm(config.norm_groups, channels, eps=_EPS)
        self.attention = attention(channels, channels, 1, use_bias=True, key=key)

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "c h w"]:
        mixed, _ = self.attention(rearrange(self.group_norm(x), "c h w -> (h w) c"))
        return x + rearrange(mixed, "(h w) c -> c h w", h=x.shape[1])


class MidBlock(eqx.Module):
    """The innermost block: a residual block, attention, and another residual block."""

    resnets: list[Resnet]
    attentions: list[AttentionBlock]
    remat: bool = eqx.field(static=True)

    def __init__(self, config: VAEConfig, *, key: PRNGKeyArray):
        resnets_key, attention_key = jax.random.split(key)
        channels = config.block_channels[-1]
        self.resnets = _resnets([channels] * 3, config, resnets_key)
        self.attentions = [AttentionBlock(channels, config, key=attention_key)] if config.has_mid_attention else []
        self.remat = config.remat

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "c h w"]:
        first, last = self.resnets
        for block in (first, *self.attentions, last):
            x = apply(block, x, remat=self.remat)
        return x


class DownBlock(eqx.Module):
    """Residual blocks, then downsampling to half of height and width, except in the last block."""

    resnets: list[Resnet]
    downsampler: eqx.nn.Conv2d | None
    remat: bool = eqx.field(static=True)

    def __init__(self, in_channels: int, out_channels: int, is_last: bool, config: VAEConfig, *, key: PRNGKeyArray):
        resnets_key, sampler_key = jax.random.split(key)
        self.resnets = _resnets([in_channels, *[out_channels] * config.layers_per_block], config, resnets_key)
        padding = ((0, 1), (0, 1))  # only after the last row and column
        sampler = functools.partial(eqx.nn.Conv2d, stride=2, padding=padding, key=sampler_key)
        self.downsampler = None if is_last else sampler(out_channels, out_channels, 3)
        self.remat = config.remat

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "out h2 w2"]:
        for block in self.resnets:
            x = apply(block, x, remat=self.remat)
        return x if self.downsampler is None else self.downsampler(x)


class UpBlock(eqx.Module):
    """Residual blocks, then upsampling to twice the height and width, except in the last block."""

    resnets: list[Resnet]
    upsampler: eqx.nn.Conv2d | None
    remat: bool = eqx.field(static=True)

    def __init__(self, in_channels: int, out_channels: int, is_last: bool, config: VAEConfig, *, key: PRNGKeyArray):
        resnets_key, sampler_key = jax.random.split(key)
        self.resnets = _resnets([in_channels, *[out_channels] * (config.layers_per_block + 1)], config, resnets_key)
        sampler = functools.partial(eqx.nn.Conv2d, padding=1, key=sampler_key)
        self.upsampler = None if is_last else sampler(out_channels, out_channels, 3)
        self.remat = config.remat

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "out h2 w2"]:
        for block in self.resnets:
            x = apply(block, x, remat=self.remat)
        return x if self.upsampler is None else self.upsampler(upsample(x))


class Encoder(eqx.Module):
    """From an image to a tensor with twice the latents' channels: their mean and log-variance."""

    conv_in: eqx.nn.Conv2d
    down_blocks: list[DownBlock]
    mid_block: MidBlock
    conv_norm_out: eqx.nn.GroupNorm
    conv_out: eqx.nn.Conv2d

    def __init__(self, config: VAEConfig, *, key: PRNGKeyArray):
        in_key, mid_key, out_key, *keys = jax.random.split(key, 3 + len(config.block_channels))
        first, *_, last = sizes = (config.block_channels[0], *config.block_channels)
        self.conv_in = eqx.nn.Conv2d(config.in_channels, first, 3, padding=1, key=in_key)
        self.down_blocks = [
            DownBlock(a, b, i == len(keys) - 1, config, key=keys[i]) for i, (a, b) in enumerate(pairwise(sizes))
        ]
        self.mid_block = MidBlock(config, key=mid_key)
        self.conv_norm_out = eqx.nn.GroupNorm(config.norm_groups, last, eps=_EPS)
        self.conv_out = eqx.nn.Conv2d(last, 2 * config.latent_channels, 3, padding=1, key=out_key)

    def __call__(self, image: Float[Array, "c h w"]) -> Float[Array, "out h2 w2"]:
        x = self.conv_in(image)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(eqx.Module):
    """From latents to an image."""

    conv_in: eqx.nn.Conv2d
    mid_block: MidBlock
    up_blocks: list[UpBlock]
    conv_norm_out: eqx.nn.GroupNorm
    conv_out: eqx.nn.Conv2d

    def __init__(self, config: VAEConfig, *, key: PRNGKeyArray):
        in_key, mid_key, out_key, *keys = jax.random.split(key, 3 + len(config.block_channels))
        first, *_, last = sizes = (config.block_channels[-1], *reversed(config.block_channels))
        self.conv_in = eqx.nn.Conv2d(config.latent_channels, first, 3, padding=1, key=in_key)
        self.mid_block = MidBlock(config, key=mid_key)
        self.up_blocks = [UpBlock(a, b, i == len(keys) - 1, config, key=keys[i]) for i, (a, b) in enumerate(pairwise(sizes))]
        self.conv_norm_out = eqx.nn.GroupNorm(config.norm_groups, last, eps=_EPS)
        self.conv_out = eqx.nn.Conv2d(last, config.out_channels, 3, padding=1, key=out_key)

    def __call__(self, latents: Float[Array, "latent h w"]) -> Float[Array, "out h2 w2"]:
        x = self.mid_block(self.conv_in(latents))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class VAE(Pretrained):
    """An autoencoder of images in [-1, 1]. Call it on one image; `jax.vmap` it over a batch.

    ```python
    model = VAE(VAEConfig.of("sd"), key=jax.random.key(0))
    latents = model.config.to_diffusion(model.encode(image).sample(key))  # the input of a diffusion model
    image = model.decode(model.config.from_diffusion(latents))
    ```
    """

    config_class = VAEConfig
    model_types = ("AutoencoderKL",)
    architectures = ("AutoencoderKL",)
    weights_name = "diffusion_pytorch_model"

    encoder: Encoder
    quant_conv: eqx.nn.Conv2d | None
    post_quant_conv: eqx.nn.Conv2d | None
    decoder: Decoder
    config: VAEConfig = eqx.field(static=True)

    def __init__(self, config: VAEConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes.
        - `key`: draws the weights and biases as torch does, uniformly in ±1 / sqrt(inputs). Norms are initialized to 1.
        """
        keys = jax.random.split(key, 4)
        n = config.latent_channels
        self.encoder = Encoder(config, key=keys[0])
        self.quant_conv = eqx.nn.Conv2d(2 * n, 2 * n, 1, key=keys[1]) if config.has_quant_conv else None
        self.post_quant_conv = eqx.nn.Conv2d(n, n, 1, key=keys[2]) if config.has_post_quant_conv else None
        self.decoder = Decoder(config, key=keys[3])
        self.config = config

    def __call__(self, image: Float[Array, "c h w"], *, key: PRNGKeyArray | None = None) -> Float[Array, "out h2 w2"]:
        """Encodes and decodes an image.

        **Arguments:**

        - `image`: its shape is kept if its height and width are divisible by the total downsampling factor.
        - `key`: draws the latents. None takes the most likely ones.
        """
        posterior = self.encode(image)
        return self.decode(posterior.mode if key is None else posterior.sample(key))

    def encode(self, image: Float[Array, "c h w"]) -> Posterior:
        """Encodes an image. Returns the distribution of its latents."""
        with jax.named_scope("encode"):
            moments = self.encoder(image)
            moments = moments if self.quant_conv is None else self.quant_conv(moments)
        mean, log_variance = jnp.split(moments, 2)
        return Posterior(mean, jnp.clip(log_variance, -30.0, 20.0))

    def decode(self, latents: Float[Array, "latent h w"]) -> Float[Array, "out h2 w2"]:
        """Decodes latents to an image."""
        with jax.named_scope("decode"):
            return self.decoder(latents if self.post_quant_conv is None else self.post_quant_conv(latents))

    @staticmethod
    @functools.cache
    def weight_map(config: VAEConfig) -> WeightMap:
        aliases = tuple((rf"(attentions\.\d+)\.{old}\.", rf"\1.{new}.") for old, new in _OLD)
        return WeightMap(mirrored(shapes_of(VAE, config)), aliases=aliases)
