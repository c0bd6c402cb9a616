"""The UNet of latent diffusion (`UNet2DConditionModel`): predicts the noise in latents.

Its inputs are noisy latents, a timestep and the hidden states of a text.

Source: Rombach et al. 2022, *High-Resolution Image Synthesis with Latent Diffusion Models*, and its code,
github.com/CompVis/latent-diffusion. Weights are stored as in `diffusers`. Only the layout differs from that code: the gate
of each MLP is a separate layer, and the 1x1 convolutions around attention are linear layers.

Dims: c = channels, h x w = height and width, seq = h x w pixels as a sequence, source = tokens of the context, context =
width of the context, time = width of the embedded timestep.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray

from ._kinds import COUNT, LIST, RATE
from .diffusion import (
    Resnet,
    apply,
    check_groups,
    diffusers,
    layers_of_blocks,
    mirrored,
    one_or_many,
    size_of_sample,
    sizes,
    upsample,
)
from .hf import ConfigReader, Field, FolderConfig, Only, Pretrained, Row, WeightMap
from .nn import Attention, check_rates, check_sizes, linear, norm

_TRANSFORMER_EPS = 1e-6  # of the group norm before attention; the other norms use the config's

# Keys for which only this value is implemented. It is also the value of an absent key.
_ONLY = {
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "mid_block_scale_factor": 1,
    "downsample_padding": 1,
    "num_attention_heads": None,
    "reverse_transformer_layers_per_block": None,
    "dual_cross_attention": False,
    "attention_type": "default",
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "class_embed_type": None,
    "num_class_embeds": None,
    "class_embeddings_concat": False,
    "addition_embed_type": None,
    "resnet_time_scale_shift": "default",
    "time_embedding_type": "positional",
    "time_embedding_dim": None,
    "time_embedding_act_fn": None,
    "timestep_post_act": None,
    "time_cond_proj_dim": None,
}
_DOWN = {"DownBlock2D": False, "CrossAttnDownBlock2D": True}  # whether a block of this type has attention
_UP = {"UpBlock2D": False, "CrossAttnUpBlock2D": True}


def _attention_of_blocks(key: str, name: str, types: Mapping[str, bool]) -> Row:
    """Returns the row of a field that says which blocks have attention, stored as the names of their types."""

    def read(reader: ConfigReader, key: str, default: tuple[bool, ...]) -> tuple[bool, ...]:
        found = reader.get(key, None, LIST)
        for kind in found or ():
            if not isinstance(kind, str) or kind not in types:
                raise reader.refuse(key, kind, " or ".join(map(repr, types)))
        return default if found is None else tuple(types[kind] for kind in found)

    written = {attends: kind for kind, attends in types.items()}
    return Field(key, name, via=read, save=lambda config: [written[attends] for attends in getattr(config, name)])


@dataclass(frozen=True)
class UNetConfig(FolderConfig):
    """The sizes of a UNet. The defaults are those of diffusers, which are close to those of Stable Diffusion 1.

    A field that may hold a tuple has one entry for each block, from the outermost to the innermost. A single value applies
    to all blocks.

    **Arguments:**

    - `in_channels`, `out_channels`: the channels of the noisy latents, and of the prediction.
    - `block_channels`: the channels of the down blocks; the up blocks have them in reverse order. Each block but the last
        halves height and width. The first number is also the width of a timestep's sinusoids.
    - `down_attention`, `up_attention`: which blocks have attention, each in the order in which they run.
    - `layers_per_block`: the number of residual blocks in a down block. An up block has one more.
    - `transformer_layers`: the number of transformer blocks (self-attention, cross-attention and MLP) after each residual
        block.
    - `n_heads`: the number of heads; it divides the channels of its block. `config.json` calls it `attention_head_dim`.
    - `context_size`: the width of the context.
    - `only_cross_attention`: whether both attentions of a transformer block attend to the context.
    - `use_linear_projection`: whether the layers around attention are stored as linear layers instead of convolutions. They
        compute the same function.
    - `norm_groups`, `norm_eps`: the number of groups of the group norms, which divides all `block_channels`, and the number
        added to their variance.
    - `dropout`: the dropout rate in the residual blocks, in [0, 1).
    - `flips_sin_to_cos`, `freq_shift`: whether cosines come before sines in a timestep's sinusoids, and the number that is
        subtracted from half of their count in the formula of the frequencies.
    - `centers_input`: whether samples are in [0, 1] and must be scaled to [-1, 1].
    - `conv_in_kernel`, `conv_out_kernel`: the kernel size of the first and the last convolution, in pixels.
    - `sample_size`: the height and width of the training samples, in pixels, for pipelines. Other sizes can be denoised too.
    - `remat`: whether the backward pass recomputes each residual block and each transformer.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, for tuples whose length is not that of `block_channels`, for groups and heads that
    do not divide their channels, and for rates outside [0, 1).
    """

    in_channels: int = 4
    out_channels: int = 4
    block_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    down_attention: tuple[bool, ...] = (True, True, True, False)
    up_attention: tuple[bool, ...] = (False, True, True, True)
    layers_per_block: int | tuple[int, ...] = 2
    transformer_layers: int | tuple[int, ...] = 1
    n_heads: int | tuple[int, ...] = 8
    context_size: int = 1280
    only_cross_attention: bool | tuple[bool, ...] = False
    use_linear_projection: bool = False
    norm_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0
    flips_sin_to_cos: bool = True
    freq_shift: int = 0
    centers_input: bool = False
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    sample_size: int | tuple[int, ...] | None = None
    remat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "in_channels", "out_channels", "context_size", "norm_groups", "conv_in_kernel", "conv_out_kernel")
        check_groups(self.block_channels, self.norm_groups)
        check_rates(self, "dropout")
        n_blocks = len(self.block_channels)
        for name in ("down_attention", "up_attention", "layers_per_block", "transformer_layers", "n_heads"):
            self._check_blocks(name, n_blocks)
        self._check_blocks("only_cross_attention", n_blocks)
        for name in ("layers_per_block", "transformer_layers", "n_heads"):
            if min(self.per_block(name)) < 1:
                raise ValueError(f"`{name}`: expected at least 1, got {getattr(self, name)}. Pass a positive size.")
        attends = (*self.down_attention[:-1], True)  # the middle block always has attention
        up_attends = self.up_attention[::-1]
        for i, (channels, heads) in enumerate(zip(self.block_channels, self.per_block("n_heads"), strict=True)):
            if (attends[i] or up_attends[i]) and channels % heads:
                raise ValueError(
                    f"`n_heads`: expected a divisor of `block_channels[{i}]`={channels}, got {heads}. Pass one per block."
                )

    def _check_blocks(self, name: str, n_blocks: int) -> None:
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != n_blocks:
            raise ValueError(
                f"`{name}`: expected {n_blocks}, one per block of `block_channels`, got {value}. Pass one each."
            )

    def per_block(self, name: str) -> tuple[Any, ...]:
        """Returns a field's value for each block, from the outermost to the innermost."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * len(self.block_channels)

    @property
    def time_size(self) -> int:
        """The width of the embedded timestep."""
        return 4 * self.block_channels[0]

    def without_dropout(self) -> "UNetConfig":
        """The same config without dropout."""
        return replace(self, dropout=0.0)

    @classmethod
    def sd1(cls) -> "UNetConfig":
        """The UNet of Stable Diffusion 1.1 to 1.5, with 860 million parameters."""
        return cls(context_size=768, sample_size=64)

    @classmethod
    def sd2(cls) -> "UNetConfig":
        """The UNet of Stable Diffusion 2.0 and 2.1, with 866 million parameters."""
        return cls(context_size=1024, n_heads=(5, 10, 20, 20), use_linear_projection=True, sample_size=96)

    rows = (
        *diffusers("UNet2DConditionModel"),
        *(Only(key, value, is_written=False) for key, value in _ONLY.items()),
        Only("act_fn", "silu", "swish"),  # two names for the same function
        Field("in_channels"),
        Field("out_channels"),
        Field("block_out_channels", "block_channels", via=sizes),
        _attention_of_blocks("down_block_types", "down_attention", _DOWN),
        _attention_of_blocks("up_block_types", "up_attention", _UP),
        Field("layers_per_block", via=layers_of_blocks),
        Field("transformer_layers_per_block", "transformer_layers", via=layers_of_blocks),
        Field("attention_head_dim", "n_heads", via=one_or_many),
        Field("cross_attention_dim", "context_size"),
        Field("only_cross_attention", via=one_or_many),
        Field("use_linear_projection"),
        Field("norm_num_groups", "norm_groups"),
        Field("norm_eps"),
        Field("dropout", kind=RATE),
        Field("flip_sin_to_cos", "flips_sin_to_cos"),
        Field("freq_shift", kind=COUNT),
        Field("center_input_sample", "centers_input"),
        Field("conv_in_kernel"),
        Field("conv_out_kernel"),
        Field("sample_size", via=size_of_sample),
    )


# --- parts ------------------------------------------------------------------------------------------------------------


class TimeEmbedding(eqx.Module):
    """Sinusoids of a timestep, followed by two linear layers."""

    linear_1: eqx.nn.Linear
    linear_2: eqx.nn.Linear
    flips_sin_to_cos: bool = eqx.field(static=True)
    freq_shift: int = eqx.field(static=True)

    def __init__(self, config: UNetConfig, *, key: PRNGKeyArray):
        key_1, key_2 = jax.random.split(key)
        self.linear_1 = eqx.nn.Linear(config.block_channels[0], config.time_size, key=key_1)
        self.linear_2 = eqx.nn.Linear(config.time_size, config.time_size, key=key_2)
        self.flips_sin_to_cos = config.flips_sin_to_cos
        self.freq_shift = config.freq_shift

    def __call__(self, timestep: Num[Array, ""], dtype: Any) -> Float[Array, " time"]:
        """Returns the embedding of `timestep`. The sinusoids are computed in float32 and cast to `dtype`."""
        size = self.linear_1.weight.shape[1]
        half = size // 2
        frequencies = np.exp(-math.log(10000) * np.arange(half) / (half - self.freq_shift)).astype(np.float32)
        angles = timestep.astype(jnp.float32) * frequencies
        waves = [jnp.cos(angles), jnp.sin(angles)] if self.flips_sin_to_cos else [jnp.sin(angles), jnp.cos(angles)]
        waves = jnp.concatenate([*waves, jnp.zeros(size % 2)]).astype(dtype)
        return self.linear_2(jax.nn.silu(self.linear_1(waves)))


class GEGLU(eqx.Module):
    """An MLP with GELU gating, whose inner width is four times the outer."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, d: int, *, key: PRNGKeyArray):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = eqx.nn.Linear(d, 4 * d, key=gate_key)
        self.up = eqx.nn.Linear(d, 4 * d, key=up_key)
        self.down = eqx.nn.Linear(4 * d, d, key=down_key)

    def __call__(self, x: Float[Array, "seq c"]) -> Float[Array, "seq c"]:
        return linear(self.down, linear(self.up, x) * jax.nn.gelu(linear(self.gate, x), approximate=False))


def _attention(d: int, source: int, n_heads: int, key: PRNGKeyArray) -> Attention:
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    return Attention(
        query=eqx.nn.Linear(d, d, use_bias=False, key=q_key),
        key=eqx.nn.Linear(source, d, use_bias=False, key=k_key),
        value=eqx.nn.Linear(source, d, use_bias=False, key=v_key),
        output=eqx.nn.Linear(d, d, key=o_key),
        n_heads=n_heads,
        n_kv_heads=n_heads,
    )


class TransformerBlock(eqx.Module):
    """Self-attention over the pixels, cross-attention to the context, and an MLP. Each is pre-norm and residual."""

    norm1: eqx.nn.LayerNorm
    attn1: Attention
    norm2: eqx.nn.LayerNorm
    attn2: Attention
    norm3: eqx.nn.LayerNorm
    ff: GEGLU
    only_cross_attention: bool = eqx.field(static=True)

    def __init__(self, d: int, n_heads: int, only_cross_attention: bool, context_size: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(d)
        self.attn1 = _attention(d, context_size if only_cross_attention else d, n_heads, keys[0])
        self.norm2 = eqx.nn.LayerNorm(d)
        self.attn2 = _attention(d, context_size, n_heads, keys[1])
        self.norm3 = eqx.nn.LayerNorm(d)
        self.ff = GEGLU(d, key=keys[2])
        self.only_cross_attention = only_cross_attention

    def __call__(
        self, x: Float[Array, "seq c"], context: Float[Array, "source context"], mask: Bool[Array, "1 source"] | None
    ) -> Float[Array, "seq c"]:
        memory, attended = (context, mask) if self.only_cross_attention else (None, None)  # None means self-attention
        x = x + self.attn1(norm(self.norm1, x), memory=memory, mask=attended)[0]
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
        self,
        x: Float[Array, "c h w"],
        context: Float[Array, "source context"],
        mask: Bool[Array, "1 source"] | None,
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

    def __call__(
        self,
        x: Float[Array, "c h w"],
        time: Float[Array, " time"],
        context: Float[Array, "source context"],
        mask: Bool[Array, "1 source"] | None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> list[Array]:
        """Returns the outputs of all steps of the block. The up blocks use all of them, the next down block the last one."""
        skips = []
        keys = _split(key, len(self.resnets))
        for resnet, transformer, key in zip_longest(self.resnets, self.attentions, keys):
            x = apply(resnet, x, time, remat=self.remat, key=key)
            if transformer is not None:
                x = apply(transformer, x, context, mask, remat=self.remat)
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

    def __call__(
        self,
        x: Float[Array, "c h w"],
        time: Float[Array, " time"],
        context: Float[Array, "source context"],
        mask: Bool[Array, "1 source"] | None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "c h w"]:
        keys = _split(key, 2)
        x = apply(self.resnets[0], x, time, remat=self.remat, key=keys[0])
        x = apply(self.attentions[0], x, context, mask, remat=self.remat)
        return apply(self.resnets[1], x, time, remat=self.remat, key=keys[1])


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
        self,
        x: Float[Array, "c h w"],
        skips: list[Array],
        time: Float[Array, " time"],
        context: Float[Array, "source context"],
        mask: Bool[Array, "1 source"] | None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "out h2 w2"]:
        """**Arguments:**

        - `skips`: the outputs of the down blocks. The block removes those that it uses from the end.
        """
        keys = _split(key, len(self.resnets))
        for resnet, transformer, key in zip_longest(self.resnets, self.attentions, keys):
            x = apply(resnet, jnp.concatenate([x, skips.pop()]), time, remat=self.remat, key=key)
            if transformer is not None:
                x = apply(transformer, x, context, mask, remat=self.remat)
        if self.upsampler is None:
            return x
        _, h, w = skips[-1].shape  # halving rounds odd sizes up
        return self.upsampler(upsample(x)[:, :h, :w])


def _split(key: PRNGKeyArray | None, n: int) -> Sequence[PRNGKeyArray | None]:
    return [None] * n if key is None else list(jax.random.split(key, n))


class UNet(Pretrained):
    """A UNet that predicts noise, or another target, from noisy latents. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = UNet(UNetConfig.sd1(), key=jax.random.key(0))
    noise = jax.vmap(model)(samples, timesteps, contexts)
    ```

    `models.schedulers` has the schedulers, which add noise for training and compute the denoising steps.
    """

    config_class = UNetConfig
    model_types = ("UNet2DConditionModel",)
    architectures = ("UNet2DConditionModel",)
    weights_name = "diffusion_pytorch_model"

    time_embedding: TimeEmbedding
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
        self.time_embedding = TimeEmbedding(config, key=time_key)
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
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "out h w"]:
        """Returns the prediction: the noise in `sample`, or the target that the scheduler's `prediction_type` names.

        **Arguments:**

        - `sample`: noisy latents, of any height and width.
        - `timestep`: the noise level, from 0.
        - `context`: the sequence for cross-attention, such as the hidden states of a text.
        - `mask`: True for the context's tokens that are attended to; None for all, as in Stable Diffusion's training.
        - `key`: for dropout; not needed in inference.
        """
        attended = None if mask is None else mask[None]
        mid_key, *keys = _split(key, 1 + 2 * len(self.down_blocks))
        time = self.time_embedding(jnp.asarray(timestep), sample.dtype)
        x = self.conv_in(2 * sample - 1 if self.config.centers_input else sample)
        skips = [x]
        with jax.named_scope("down"):
            for block in self.down_blocks:
                skips += block(skips[-1], time, context, attended, key=keys.pop())
        with jax.named_scope("mid"):
            x = self.mid_block(skips[-1], time, context, attended, key=mid_key)
        with jax.named_scope("up"):
            for block in self.up_blocks:
                x = block(x, skips, time, context, attended, key=keys.pop())
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))

    @staticmethod
    def weight_map(config: UNetConfig) -> WeightMap:
        """Maps the tensors of a `UNet2DConditionModel` folder to the tree's leaves."""
        return _weight_map(config)


def _same_size_conv(in_channels: int, out_channels: int, kernel: int, *, key: PRNGKeyArray) -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(in_channels, out_channels, kernel, padding=(kernel - 1) // 2, key=key)


@functools.cache
def _weight_map(config: UNetConfig) -> WeightMap:
    shapes = eqx.filter_eval_shape(UNet, config, key=jax.eval_shape(lambda: jax.random.key(0)))
    convolutions = r"(?!)" if config.use_linear_projection else r"\.proj_(in|out)\."
    return WeightMap(mirrored(shapes, convolutions=convolutions))
