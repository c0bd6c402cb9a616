"""Code shared by the UNet and the autoencoder: the residual block, resampling, and the names on disk.

Both trees mirror the folders that `diffusers` writes (`down_blocks.0.resnets.1.conv1`). Their weight map is therefore the
list of the tree's leaves, except for a few whose name or shape differs.

Dims: c = channels, h x w = height and width, time = width of the embedded timestep.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import repeat
from jaxtyping import Array, Float, Num, PRNGKeyArray

from redeqx._tree import is_array_like, named_leaves
from redeqx.errors import wrong

from .._kinds import SIZE, kind_of
from ..hf import ConfigReader, Row, StoredTensor, Written, reshaped, same, stored
from ..nn import Attention

DIFFUSERS = "0.36.0"  # `_diffusers_version` of saved configs: the oldest version that the parity tests accept


# --- layers ---------------------------------------------------------------------------------------------------------


class Resnet(eqx.Module):
    """Two convolutions, each after a norm and SiLU, with a residual connection. The timestep is added between the two."""

    norm1: eqx.nn.GroupNorm
    conv1: eqx.nn.Conv2d
    time_emb_proj: eqx.nn.Linear | None
    norm2: eqx.nn.GroupNorm
    dropout: eqx.nn.Dropout
    conv2: eqx.nn.Conv2d
    conv_shortcut: eqx.nn.Conv2d | None  # only if the number of channels changes

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        time_size: int | None = None,
        groups: int,
        eps: float,
        dropout: float = 0.0,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 4)
        self.norm1 = eqx.nn.GroupNorm(groups, in_channels, eps=eps)
        self.conv1 = eqx.nn.Conv2d(in_channels, out_channels, 3, padding=1, key=keys[0])
        self.time_emb_proj = None if time_size is None else eqx.nn.Linear(time_size, out_channels, key=keys[1])
        self.norm2 = eqx.nn.GroupNorm(groups, out_channels, eps=eps)
        self.dropout = eqx.nn.Dropout(dropout)
        self.conv2 = eqx.nn.Conv2d(out_channels, out_channels, 3, padding=1, key=keys[2])
        is_same = in_channels == out_channels
        self.conv_shortcut = None if is_same else eqx.nn.Conv2d(in_channels, out_channels, 1, key=keys[3])

    def __call__(
        self, x: Float[Array, "c h w"], time: Float[Array, " time"] | None = None, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "out h w"]:
        mixed = self.conv1(jax.nn.silu(self.norm1(x)))
        if self.time_emb_proj is not None:
            assert time is not None
            mixed = mixed + self.time_emb_proj(jax.nn.silu(time))[:, None, None]
        mixed = self.conv2(self.dropout(jax.nn.silu(self.norm2(mixed)), key=key))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + mixed


def sinusoids(
    number: Num[Array, "*dims"], size: int, *, flips_sin_to_cos: bool = True, freq_shift: int = 0
) -> Float[Array, "*dims size"]:
    """Returns sines and cosines of a number, such as a timestep, in float32. `UNetConfig` describes the options."""
    half = size // 2
    frequencies = np.exp(-math.log(10000) * np.arange(half) / (half - freq_shift)).astype(np.float32)
    angles = number.astype(jnp.float32)[..., None] * frequencies
    waves = [jnp.cos(angles), jnp.sin(angles)] if flips_sin_to_cos else [jnp.sin(angles), jnp.cos(angles)]
    return jnp.concatenate([*waves, jnp.zeros((*number.shape, size % 2))], axis=-1)


class TimeEmbedding(eqx.Module):
    """Two linear layers, which embed the sinusoids of a timestep or another vector."""

    linear_1: eqx.nn.Linear
    linear_2: eqx.nn.Linear

    def __init__(self, in_size: int, size: int, *, key: PRNGKeyArray):
        key_1, key_2 = jax.random.split(key)
        self.linear_1 = eqx.nn.Linear(in_size, size, key=key_1)
        self.linear_2 = eqx.nn.Linear(size, size, key=key_2)

    def __call__(self, x: Float[Array, " in"]) -> Float[Array, " size"]:
        return self.linear_2(jax.nn.silu(self.linear_1(x)))


def attention(d: int, source: int, n_heads: int, *, use_bias: bool, key: PRNGKeyArray) -> Attention:
    """Returns an attention of `d` channels, to a sequence of `source`, with torch's initial weights. `use_bias` is that of
    query, key and value."""
    sizes, biases = (d, source, source, d), (use_bias, use_bias, use_bias, True)
    layers = [
        eqx.nn.Linear(size, d, use_bias=has_bias, key=key)
        for size, has_bias, key in zip(sizes, biases, jax.random.split(key, 4), strict=True)
    ]
    return Attention(*layers, n_heads=n_heads, n_kv_heads=n_heads)


def upsample(x: Float[Array, "c h w"]) -> Float[Array, "c 2*h 2*w"]:
    """Doubles height and width: each pixel becomes four."""
    return repeat(x, "c h w -> c (h rows) (w columns)", rows=2, columns=2)


def apply(block: Callable[..., Any], *args: Any, remat: bool, **kwargs: Any) -> Any:
    """Returns `block(*args, **kwargs)`. If `remat` is set, the backward pass recomputes it."""
    if not remat:
        return block(*args, **kwargs)
    return eqx.filter_checkpoint(lambda block, args, kwargs: block(*args, **kwargs))(block, args, kwargs)


# --- configurations -------------------------------------------------------------------------------------------------


def one_or_many(reader: ConfigReader, key: str, default: Any) -> Any:
    """Returns the value of a key that holds one value for all blocks, or a list of one for each block. Values have the
    default's type."""
    value = reader.get(key, None)
    value = default if value is None else tuple(value) if isinstance(value, list | tuple) else value
    for one in value if isinstance(value, tuple) else (value,):
        if type(one) is not type(default):
            kind = type(default).__name__
            raise reader.refuse(key, value, f"one {kind}, or a list of one {kind} per block")
        kind_of(default).check(reader.path, key, one)
    return value


def sizes_of_blocks(reader: ConfigReader, key: str, default: Sequence[int]) -> tuple[int, ...]:
    """Returns the value of a key that is a list of sizes."""
    return tuple(SIZE.check(reader.path, key, size) for size in reader.get(key, list(default)))


def layers_of_blocks(reader: ConfigReader, key: str, default: int) -> int | tuple[int, ...]:
    """Reads numbers of layers, as `one_or_many` does. Each is at most the number of tensors."""
    layers = one_or_many(reader, key, default)
    for n in layers if isinstance(layers, tuple) else (layers,):
        reader.check_layers(key, n)
    return layers


def size_of_sample(reader: ConfigReader, key: str, default: int | None) -> int | tuple[int, ...] | None:
    """Returns the size of a sample in pixels: one number for a square, or height and width."""
    size = reader.get(key, None)
    if isinstance(size, list):
        return sizes_of_blocks(reader, key, [])
    return default if size is None else reader.get(key, kind=SIZE)


def diffusers(class_name: str | Callable[[Any], str]) -> tuple[Row, ...]:
    """Returns the rows that name the `diffusers` class of a file."""
    return Written("_class_name", class_name), Written("_diffusers_version", DIFFUSERS)


def check_groups(channels: tuple[int, ...], groups: int) -> None:
    """Raises ValueError if the groups of the norms do not divide the channels."""
    if not channels or any(n < 1 or n % groups for n in channels):
        raise wrong("block_channels", f"multiples of `norm_groups`={groups}", channels, "Change one of the two.")


# --- names on disk --------------------------------------------------------------------------------------------------

# `(pattern, replacement)` pairs that turn a leaf's path into its tensor's name.
_SPELLING = (
    (r"\battention\.", ""),
    (r"\bquery\b", "to_q"),
    (r"\bkey\b", "to_k"),
    (r"\bvalue\b", "to_v"),
    (r"\boutput\b", "to_out.0"),
    (r"\bdownsampler\b", "downsamplers.0.conv"),
    (r"\bupsampler\b", "upsamplers.0.conv"),
    (r"\bff\.up\b", "ff.net.0.proj"),
    (r"\bff\.down\b", "ff.net.2"),
)


def mirrored(model: Any, *, convolutions: str = r"(?!)") -> list[StoredTensor]:
    """Returns the weight map of a model whose tree mirrors its folder.

    **Arguments:**

    - `model`: the model, with arrays or shapes as leaves.
    - `convolutions`: a pattern for the paths of linear layers that are 1x1 convolutions on disk.
    """
    names: list[StoredTensor] = []
    leaves = {leaf: array for leaf, array in named_leaves(model).items() if is_array_like(array)}
    for leaf, array in leaves.items():
        disk = functools.reduce(lambda name, rule: re.sub(*rule, name), _SPELLING, leaf)
        shape = tuple(array.shape)
        if re.search(r"\bff\.(gate|up)\.", leaf):  # one layer on disk, in which the gate comes second
            if leaf.endswith("up.weight"):
                up = leaf.removesuffix(".weight")
                names += stored({f"{up} {up.removesuffix('up')}gate": disk.removesuffix(".weight")}, leaves)
        elif leaf.endswith("bias") and len(shape) == 3:
            names.append(reshaped(disk, leaf, shape[:1], shape))
        elif leaf.endswith("weight") and re.search(convolutions, leaf):
            names.append(reshaped(disk, leaf, (*shape, 1, 1), shape))
        else:
            names.append(same(disk, leaf))
    return names
