"""Compressed moments of gradients: bfloat16, or 8 bits per number with a float32 scale per block.

Owns the formats. A block is a run of numbers along one dim, with the largest magnitude as its scale. A first moment `m` is
stored as `127 sqrt(|m| / scale)` with its sign, a second moment `v` as `255 (v / scale)^(1/4)`, both as integers: a linear
code would have too few steps for the small numbers of a block, and a second moment of zero would make an update infinite. So
no second moment above zero is rounded to zero.

Moments change by less than one step of these formats at a time: `v` by a thousandth, with `b2=0.999`. So they are rounded
stochastically, which is correct on average; rounded to nearest, they would never change.

Source: block-wise scales, T. Dettmers et al., *8-bit Optimizers via Block-wise Quantization* (arXiv:2110.02861), which uses
a lookup table of steps instead of roots; stochastic rounding (arXiv:2010.06192).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._rounding import to_bfloat16

# Smaller leaves stay in float32: they need little memory, and norms and biases are sensitive.
MIN_SIZE = 2**12
_BLOCKS = range(256, 63, -1)  # numbers in a block; with 64, the scales add a sixteenth to the bytes
_SHARDS = (64, 32, 16, 8, 4, 2, 1)
_STEPS = {"first": 127, "second": 255}
_ROOTS = {"first": 1, "second": 2}  # how many times the square root is taken

FORMATS = ("8bit", "bfloat16")


@dataclass(frozen=True)
class Blocks:
    """The blocks of a leaf: `size` numbers each, along the dim `dim`."""

    dim: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Blocks | None":
        """Returns the blocks of a leaf: along the last dim that divides into blocks, with a size that no usual number of
        shards splits. None for a small leaf, or one without such a dim.

        They depend only on the shape, so that a checkpoint restores onto any mesh.
        """
        if math.prod(shape) < MIN_SIZE:
            return None
        for dim in reversed(range(len(shape))):
            for n_shards in _SHARDS:
                part, rest = divmod(shape[dim], n_shards)
                size = next((size for size in _BLOCKS if not rest and part % size == 0), None)
                if size is not None:
                    return cls(dim, size)
        return None

    def scales(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales: the leaf's, with one entry per block."""
        return tuple(n // self.size if dim == self.dim else n for dim, n in enumerate(shape))

    def split(self, x: Array) -> Array:
        """Splits the leaf's dim `dim` into two: blocks, and the numbers of a block."""
        shape = x.shape
        return x.reshape(*shape[: self.dim], shape[self.dim] // self.size, self.size, *shape[self.dim + 1 :])

    def expand(self, scales: Array) -> Array:
        """Reshapes the scales to broadcast against leaves from `split`."""
        return jnp.expand_dims(scales, self.dim + 1)


def zeros(shape: Sequence[int], which: str, form: str) -> tuple[Array, Array | None]:
    """Returns the `"first"` or the `"second"` moment, of zeros, in one of `FORMATS`; and its scales, or None."""
    blocks = Blocks.of(shape)
    if blocks is None:
        return jnp.zeros(shape, jnp.float32), None
    if form == "bfloat16":
        return jnp.zeros(shape, jnp.bfloat16), None
    dtype = jnp.int8 if which == "first" else jnp.uint8
    return jnp.zeros(shape, dtype), jnp.zeros(blocks.scales(shape), jnp.float32)


def read(stored: Array, scales: Array | None, which: str) -> Array:
    """Returns a moment in float32."""
    if scales is None:
        return stored.astype(jnp.float32)
    blocks = Blocks.of(stored.shape)
    assert blocks is not None, "it has scales"
    codes = blocks.split(stored).astype(jnp.float32)
    return (jnp.sign(codes) * _decode(jnp.abs(codes), which) * blocks.expand(scales)).reshape(stored.shape)


def write(x: Array, like: Array, which: str, noise: Array) -> tuple[Array, Array | None]:
    """Returns the moment `x`, in float32, in the stored format of `like`, and its scales. `noise` is uint16, as `x`."""
    if like.dtype == jnp.float32:
        return x, None
    if like.dtype == jnp.bfloat16:
        return to_bfloat16(x, noise), None
    blocks = Blocks.of(x.shape)
    assert blocks is not None, "it is stored in blocks"
    cut = blocks.split(x)
    scales = jnp.max(jnp.abs(cut), axis=blocks.dim + 1)
    whole = blocks.expand(scales)
    part = jnp.abs(cut) / jnp.where(whole == 0, 1, whole)
    lower = jnp.floor(_encode(part, which))
    below, above = _decode(lower, which), _decode(lower + 1, which)
    codes = lower + ((part - below) / (above - below) > blocks.split(noise).astype(jnp.float32) / 2**16)
    if which == "second":
        codes = jnp.where(part > 0, jnp.maximum(codes, 1), codes)
    codes = jnp.sign(cut) * jnp.minimum(codes, _STEPS[which])
    return codes.astype(like.dtype).reshape(x.shape), scales


def _encode(part: Any, which: str) -> Array:
    """Returns the code of a number from 0 to 1, before rounding."""
    for _ in range(_ROOTS[which]):
        part = jnp.sqrt(part)
    return part * _STEPS[which]


def _decode(code: Any, which: str) -> Array:
    """Returns the number from 0 to 1 of a code."""
    part = code / _STEPS[which]
    for _ in range(_ROOTS[which]):
        part = jnp.square(part)
    return part


def noises(key: Array, shape: Sequence[int]) -> tuple[Array, Array]:
    """Returns two uint16 arrays of random bits, for the two moments of a leaf."""
    bits = jax.random.bits(key, tuple(shape), jnp.uint32)
    return (bits & 0xFFFF).astype(jnp.uint16), (bits >> 16).astype(jnp.uint16)
