"""Code shared by the UNet and the autoencoder: the residual block, resampling, and the names on disk.

Both trees mirror the folders that `diffusers` writes (`down_blocks.0.resnets.1.conv1`). Their weight map is therefore the
list of the tree's leaves, except for a few whose name or shape differs.

Dims: c = channels, h x w = height and width, time = width of the embedded timestep.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from einops import repeat
from jaxtyping import Array, Float, PRNGKeyArray

from redeqx._tree import is_array_like, named_leaves

from .._kinds import SIZE, kind_of
from ..hf import ConfigReader, Row, StoredTensor, Written, fused, reshaped, same

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


def sizes(reader: ConfigReader, key: str, default: Sequence[int]) -> tuple[int, ...]:
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
        return sizes(reader, key, [])
    return default if size is None else reader.get(key, kind=SIZE)


def diffusers(class_name: str | Callable[[Any], str]) -> tuple[Row, ...]:
    """Returns the rows that name the `diffusers` class of a file."""
    return Written("_class_name", class_name), Written("_diffusers_version", DIFFUSERS)


def check_groups(channels: tuple[int, ...], groups: int) -> None:
    """Raises ValueError if the groups of the norms do not divide the channels."""
    if not channels or any(n < 1 or n % groups for n in channels):
        raise ValueError(
            f"`block_channels`: expected multiples of `norm_groups`={groups}, got {channels}. Change one of the two."
        )


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
    for leaf, array in named_leaves(model).items():
        if not is_array_like(array):
            continue
        disk = functools.reduce(lambda name, rule: re.sub(*rule, name), _SPELLING, leaf)
        shape = tuple(array.shape)
        if re.search(r"\bff\.(gate|up)\.", leaf):  # one layer on disk, in which the gate comes second
            if leaf.endswith("up.weight"):
                up = leaf.removesuffix(".weight")
                names += fused(disk.removesuffix(".weight"), [up, re.sub("up$", "gate", up)])
        elif leaf.endswith("bias") and len(shape) == 3:
            names.append(reshaped(disk, leaf, shape[:1], shape))
        elif leaf.endswith("weight") and re.search(convolutions, leaf):
            names.append(reshaped(disk, leaf, (*shape, 1, 1), shape))
        else:
            names.append(same(disk, leaf))
    return names
