"""The UNet: its parts, its blocks, and all of them.

Dims: c = channels, h x w = height and width, seq = h x w pixels as a sequence, source = tokens of the context, context =
width of the context, time = width of the embedded timestep.
"""

import functools
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray

from ..diffusion import Resnet, TimeEmbedding, apply, attention, mirrored, sinusoids, upsample
from ..hf import Pretrained, WeightMap, shapes_of
from ..nn import Attention, Mlp, linear, norm
from ._config import UNetConfig

_TRANSFORMER_EPS = 1e-6  # of the group norm before attention; the other norms use the config's


def _mlp(d: int, key: PRNGKeyArray) -> Mlp:
    """Returns an MLP with GELU gating, whose inner width is four times the outer."""
    gate_key, up_key, down_key = jax.random.split(key, 3)
    gate, up = (eqx.nn.Linear(d, 4 * d, key=key) for key in (gate_key, up_key))
    return Mlp(gate, up, eqx.nn.Linear(4 * d, d, key=down_key), activation="gelu")


class Given(NamedTuple):
    """What every block reads besides its input."""

    time: Float[Array, " time"]
    context: Float[Array, "source context"]
    mask: Bool[Array, "1 source"] | None  # True for tokens of the context that are attended to


class TransformerBlock(eqx.Module):
    """Self-attention over the pixels, cross-attention to the context, and an MLP. Each is pre-norm and residual."""

    norm1: eqx.nn.LayerNorm
    attn1: Attention
    norm2: eqx.nn.LayerNorm
    attn2: Attention
    norm3: eqx.nn.LayerNorm
    ff: Mlp
    only_cross_attention: bool = eqx.field(static=True)

    def __init__(self, d: int, n_heads: int, only_cross_attention: bool, context_size: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(d)
        source = context_size if only_cross_attention else d
        self.attn1 = attention(d, source, n_heads, use_bias=False, key=keys[0])
        self.norm2 = eqx.nn.LayerNorm(d)
        self.attn2 = attention(d, context_size, n_heads, use_bias=False, key=keys[1])
        self.norm3 = eqx.nn.LayerNorm(d)
        self.ff = _mlp(d, keys[2])
        self.only_cross_attention = only_cross_attention

    def __call__(
        self, x: Float[Array, "seq c"], context: Float[Array, "source context"], mask: Bool[Array, "1 source"] | None
    ) -> Float[Array, "seq c"]:
        # As in diffusers, the mask is that of the second attention alone. Without a memory, the first is self-attention.
        memory = context if self.only_cross_attention else None
        x = x + self.attn1(norm(self.norm1, x), memory=memory)[0]
        x = x + self.attn2(norm(self.norm2, x), memory=context, mask=mask)[0]
        return x + self.ff(norm(self.norm3, x))


class Transformer(eqx.Module):
    """Transformer blocks over the pixels as a sequence, between two projections, with a residual connection."""

    norm: eqx.nn.GroupNorm
    proj_in: eqx.nn.Linear
    transformer_blocks: list[TransformerBlock]
    proj_out: eqx.nn.Linear

    def __init__(self, i: int, config: UNetConfig, *, only_cross_attention: bool, key: PRNGKeyArray):
        """**Arguments:**

        - `i`: the index of the block whose sizes are used.
        """
        channels, n_heads, n_layers = (
            config.per_block(name)[i] for name in ("block_channels", "n_heads", "transformer_layers")
        )
        in_key, out_key, *keys = jax.random.split(key, 2 + n_layers)
        self.norm = eqx.nn.GroupNorm(config.norm_groups, channels, eps=_TRANSFORMER_EPS)
        self.proj_in = eqx.nn.Linear(channels, channels, key=in_key)
        self.transformer_blocks = [
            TransformerBlock(channels, n_heads, only_cross_attention, config.context_size, key=key) for key in keys
        ]
        self.proj_out = eqx.nn.Linear(channels, channels, key=out_key)

    def __call__(
        self, x: Float[Array, "c h w"], context: Float[Array, "source context"], mask: Bool[Array, "1 source"] | None
    ) -> Float[Array, "c h w"]:
        pixels = linear(self.proj_in, rearrange(self.norm(x), "c h w -> (h w) c"))
        for block in self.transformer_blocks:
            pixels = block(pixels, context, mask)
        return x + rearrange(linear(self.proj_out, pixels), "(h w) c -> c h w", h=x.shape[1])


# --- blocks -----------------------------------------------------------------------------------------------------------


def _resnets(sizes: Sequence[tuple[int, int]], config: UNetConfig, key: PRNGKeyArray) -> list[Resnet]:
    """Residual blocks with these pairs of input and output channels."""
    more = {"groups": config.norm_groups, "eps": config.norm_eps, "dropout": config.dropout}
    keys = jax.random.split(key, len(sizes))
    return [Resnet(*size, time_size=config.time_size, **more, key=key) for size, key in zip(sizes, keys, strict=True)]


def _transformers(n: int, i: int, config: UNetConfig, key: PRNGKeyArray) -> list[Transformer]:
    """Returns the `n` transformers of the `i`-th down or up block."""
    crosses = config.per_block("only_cross_attention")[i]
    return [Transformer(i, config, only_cross_attention=crosses, key=key) for key in jax.random.split(key, n)]


class DownBlock(eqx.Module):
    """Residual blocks, each followed by a transformer if the block has attention; then downsampling, except in the last."""

    resnets: list[Resnet]
    attentions: list[Transformer]  # empty if the block has no attention
    downsampler: eqx.nn.Conv2d | None
    remat: bool = eqx.field(static=True)

    def __init__(self, i: int, config: UNetConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `i`: the index of the block, from the outermost.
        """
        resnets_key, transformers_key, sampler_key = jax.random.split(key, 3)
        channels, n = config.block_channels, config.per_block("layers_per_block")[i]
        c = channels[i]
        self.resnets = _resnets([(channels[max(i - 1, 0)], c), *[(c, c)] * (n - 1)], config, resnets_key)
        self.attentions = _transformers(n, i, config, transformers_key) if config.down_attention[i] else []
        is_last = i == len(channels) - 1
        self.downsampler = None if is_last else eqx.nn.Conv2d(c, c, 3, stride=2, padding=1, key=sampler_key)
        self.remat = config.remat

    def __call__(self, x: Float[Array, "c h w"], given: Given, *, key: PRNGKeyArray | None = None) -> list[Array]:
        """Returns the outputs of all steps of the block. The up blocks use all of them, the next down block the last one."""
        skips = []
        keys = _split(key, len(self.resnets))
        for resnet, transformer, key in zip_longest(self.resnets, self.attentions, keys):
            x = apply(resnet, x, given.time, remat=self.remat, key=key)
            if transformer is not None:
                x = apply(transformer, x, given.context, given.mask, remat=self.remat)
            skips.append(x)
        return skips if self.downsampler is None else [*skips, self.downsampler(x)]


class MidBlock(eqx.Module):
    """The innermost block: a residual block, a transformer, and another residual block."""

    resnets: list[Resnet]
    attentions: list[Transformer]
    remat: bool = eqx.field(static=True)

    def __init__(self, config: UNetConfig, *, key: PRNGKeyArray):
        resnets_key, transformer_key = jax.random.split(key)
        c = config.block_channels[-1]
        self.resnets = _resnets([(c, c), (c, c)], config, resnets_key)
        # Self-attention over the pixels is used here even if `only_cross_attention` is set.
        self.attentions = [Transformer(-1, config, only_cross_attention=False, key=transformer_key)]
        self.remat = config.remat

    def __call__(self, x: Float[Array, "c h w"], given: Given, *, key: PRNGKeyArray | None = None) -> Float[Array, "c h w"]:
        keys = _split(key, 2)
        x = apply(self.resnets[0], x, given.time, remat=self.remat, key=keys[0])
        x = apply(self.attentions[0], x, given.context, given.mask, remat=self.remat)
        return apply(self.resnets[1], x, given.time, remat=self.remat, key=keys[1])


class UpBlock(eqx.Module):
    """As `DownBlock`, but each residual block also takes an output of the down blocks, and the block upsamples."""

    resnets: list[Resnet]
    attentions: list[Transformer]  # empty if the block has no attention
    upsampler: eqx.nn.Conv2d | None
    remat: bool = eqx.field(static=True)

    def __init__(self, i: int, config: UNetConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `i`: the index of the matching down block, whose outputs it takes.
        """
        resnets_key, transformers_key, sampler_key = jax.random.split(key, 3)
        channels, n = config.block_channels, config.per_block("layers_per_block")[i] + 1
        c, last = channels[i], len(channels) - 1
        before = [channels[min(i + 1, last)], *[c] * (n - 1)]
        beside = [*[c] * (n - 1), channels[max(i - 1, 0)]]
        self.resnets = _resnets([(a + b, c) for a, b in zip(before, beside, strict=True)], config, resnets_key)
        self.attentions = _transformers(n, i, config, transformers_key) if config.up_attention[last - i] else []
        self.upsampler = None if i == 0 else eqx.nn.Conv2d(c, c, 3, padding=1, key=sampler_key)
        self.remat = config.remat

    def __call__(
        self, x: Float[Array, "c h w"], skips: list[Array], given: Given, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "out h2 w2"]:
        """**Arguments:**

        - `skips`: the outputs of the down blocks. The block removes those that it uses from the end.
        """
        keys = _split(key, len(self.resnets))
        for resnet, transformer, key in zip_longest(self.resnets, self.attentions, keys):
            x = apply(resnet, jnp.concatenate([x, skips.pop()]), given.time, remat=self.remat, key=key)
            if transformer is not None:
                x = apply(transformer, x, given.context, given.mask, remat=self.remat)
        if self.upsampler is None:
            return x
        _, h, w = skips[-1].shape  # halving rounds odd sizes up
        return self.upsampler(upsample(x)[:, :h, :w])


def _split(key: PRNGKeyArray | None, n: int) -> Sequence[PRNGKeyArray | None]:
    return [None] * n if key is None else list(jax.random.split(key, n))


class UNet(Pretrained):
    """A UNet that predicts noise, or another target, from noisy latents. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = UNet(UNetConfig.of("sd1"), key=jax.random.key(0))
    noise = jax.vmap(model)(samples, timesteps, contexts)
    ```

    `models.schedulers` has the schedulers, which add noise for training and compute the denoising steps.
    """

    config_class = UNetConfig
    model_types = ("UNet2DConditionModel",)
    architectures = ("UNet2DConditionModel",)
    weights_name = "diffusion_pytorch_model"

    time_embedding: TimeEmbedding
    add_embedding: TimeEmbedding | None  # of a pooled text and of sizes, in SDXL
    conv_in: eqx.nn.Conv2d
    down_blocks: list[DownBlock]
    mid_block: MidBlock
    up_blocks: list[UpBlock]
    conv_norm_out: eqx.nn.GroupNorm
    conv_out: eqx.nn.Conv2d
    config: UNetConfig = eqx.field(static=True)

    def __init__(self, config: UNetConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and the dropout rate.
        - `key`: draws the weights and biases as torch does, uniformly in ±1 / sqrt(inputs). Norms are initialized to 1.
        """
        n_blocks = len(config.block_channels)
        time_key, in_key, down_key, mid_key, up_key, out_key = jax.random.split(key, 6)
        first = config.block_channels[0]
        self.time_embedding = TimeEmbedding(first, config.time_size, key=time_key)
        added = config.added_size
        # A key of its own, so that the other weights are the same with and without this part.
        add_key = jax.random.fold_in(time_key, 1)
        self.add_embedding = None if added is None else TimeEmbedding(added, config.time_size, key=add_key)
        self.conv_in = _same_size_conv(config.in_channels, first, config.conv_in_kernel, key=in_key)
        self.down_blocks = [DownBlock(i, config, key=key) for i, key in enumerate(jax.random.split(down_key, n_blocks))]
        self.mid_block = MidBlock(config, key=mid_key)
        up_keys = jax.random.split(up_key, n_blocks)
        self.up_blocks = [UpBlock(i, config, key=up_keys[i]) for i in reversed(range(n_blocks))]
        self.conv_norm_out = eqx.nn.GroupNorm(config.norm_groups, first, eps=config.norm_eps)
        self.conv_out = _same_size_conv(first, config.out_channels, config.conv_out_kernel, key=out_key)
        self.config = config

    def __call__(
        self,
        sample: Float[Array, "c h w"],
        timestep: Num[Array, ""] | int | float,
        context: Float[Array, "source context"],
        *,
        mask: Bool[Array, " source"] | None = None,
        pooled: Float[Array, " pooled"] | None = None,
        sizes: Num[Array, " sizes"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "out h w"]:
        """Returns the prediction: the noise in `sample`, or the target that the scheduler's `prediction_type` names.

        **Arguments:**

        - `sample`: noisy latents, of any height and width.
        - `timestep`: the noise level, from 0.
        - `context`: the sequence for cross-attention, such as the hidden states of a text.
        - `mask`: True for the context's tokens that are attended to; None for all, as in Stable Diffusion's training.
        - `pooled`, `sizes`: in SDXL, and only there, the vector that represents the text, and numbers of pixels: height and
            width of the original image, the top left corner that was cut from it, and height and width of the result.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if the model needs `pooled` and `sizes` but does not get them, in the widths of the config, and the
        reverse.
        """
        mid_key, *keys = _split(key, 1 + 2 * len(self.down_blocks))
        waves = sinusoids(jnp.asarray(timestep), self.config.block_channels[0], **self.config.wave_options)
        time = self.time_embedding(waves.astype(sample.dtype))
        added = self._added(pooled, sizes, sample.dtype)
        if added is not None and self.add_embedding is not None:
            time = time + self.add_embedding(added)
        given = Given(time, context, None if mask is None else mask[None])
        x = self.conv_in(2 * sample - 1 if self.config.centers_input else sample)
        skips = [x]
        with jax.named_scope("down"):
            for block in self.down_blocks:
                skips += block(skips[-1], given, key=keys.pop())
        with jax.named_scope("mid"):
            x = self.mid_block(skips[-1], given, key=mid_key)
        with jax.named_scope("up"):
            for block in self.up_blocks:
                x = block(x, skips, given, key=keys.pop())
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))

    def _added(self, pooled: Array | None, sizes: Array | None, dtype: Any) -> Array | None:
        """Returns the vector that is embedded and added to the timestep."""
        wanted, wave_size = self.config.added_size, self.config.added_wave_size or 0
        given = None if pooled is None or sizes is None else len(pooled) + len(sizes) * wave_size
        if given != wanted or (pooled is None) != (sizes is None):
            shapes = [None if x is None else list(x.shape) for x in (pooled, sizes)]
            rule = "None" if wanted is None else f"arrays whose embedding has the width `added_size`={wanted}"
            raise ValueError(f"`pooled` and `sizes`: expected {rule}, got {shapes}. SDXL needs both, other models neither.")
        if pooled is None or sizes is None:
            return None
        waves = sinusoids(sizes, wave_size, **self.config.wave_options)
        return jnp.concatenate([pooled.astype(dtype), waves.reshape(-1).astype(dtype)])

    @staticmethod
    @functools.cache
    def weight_map(config: UNetConfig) -> WeightMap:
        convolutions = r"(?!)" if config.use_linear_projection else r"\.proj_(in|out)\."
        return WeightMap(mirrored(shapes_of(UNet, config), convolutions=convolutions))


def _same_size_conv(in_channels: int, out_channels: int, kernel: int, *, key: PRNGKeyArray) -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(in_channels, out_channels, kernel, padding=(kernel - 1) // 2, key=key)
