"""Rotary positions, and their scalings for texts longer than in training.

Source: Su et al. 2021, *RoFormer* (arXiv:2104.09864).

Dims: seq = tokens of one example, size = width of a head, half = half of the rotary dims, size / 2 if all are.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class LinearScaling:
    """Divides positions by `factor`. Source: Chen et al. 2023 (arXiv:2306.15595)."""

    factor: float

    attention_factor = 1.0  # the factor for queries and keys

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies, `[half]`."""
        del theta
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones are kept, those in between are interpolated.

    **Arguments:**

    - `n_original`: the number of positions in the original training. Over these, a low frequency makes at most `low`
        rotations, and a high one at least `high` rotations.
    """

    factor: float
    low: float
    high: float
    n_original: int

    attention_factor = 1.0

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies, `[half]`."""
        del theta
        turns = self.n_original * frequencies / (2 * np.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling: low frequencies are divided by `factor`, high ones are kept, with a linear ramp over the dims in
    between. Source: Peng et al. 2023, *YaRN* (arXiv:2309.00071).

    **Arguments:**

    - `n_original`: the number of positions in the original training. Over these, the ramp's first dim makes `fast`
        rotations, and its last dim `slow` rotations.
    - `attention_factor`: the factor for queries and keys. In the paper it is `0.1 * log(factor) + 1`.
    - `truncate`: whether the ends of the ramp are rounded to whole dims.
    - `all_dims`: the factor of the logarithm in a factor for all dims of queries and keys, also those without rotary
        positions, as in DeepSeek's attention; 0 for none. Other attentions ignore it.
    """

    factor: float
    n_original: int
    attention_factor: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    all_dims: float = 0.0

    @property
    def score_factor(self) -> float:
        """The factor of scores that `all_dims` stands for."""
        return (0.1 * self.all_dims * math.log(max(self.factor, 1.0)) + 1) ** 2

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies, `[half]`."""
        half = len(frequencies)
        first, last = (
            half * math.log(self.n_original / (turns * 2 * math.pi)) / math.log(theta) for turns in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = last - first or 0.001
        stretched = np.clip((np.arange(half) - first) / width, 0, 1)
        return frequencies * (1 - stretched + stretched / self.factor)


@dataclass(frozen=True)
class DynamicScaling:
    """Raises the base of the frequencies with the length of the text, once it exceeds the original training.

    Source: the NTK-aware scaling of bloc97 and emozilla, 2023, as in `transformers`.

    **Arguments:**

    - `n_original`: the number of positions in the original training.
    """

    factor: float
    n_original: int

    attention_factor = 1.0

    def frequencies(self, plain: np.ndarray, theta: float, length: Int[Array, "*dims 1"]) -> Float[Array, "*dims half"]:
        """Returns the frequencies for texts of so many tokens."""
        size = 2 * len(plain)
        ratio = self.factor * jnp.maximum(length, self.n_original) / self.n_original - (self.factor - 1)
        base = theta * ratio ** (size / (size - 2))
        return base ** -(jnp.arange(0, size, 2) / size)


@dataclass(frozen=True)
class AlphaScaling:
    """Raises the base of the frequencies by a fixed factor, whatever the length of the text is, as in Hunyuan."""

    alpha: float

    attention_factor = 1.0

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies, `[half]`."""
        size = 2 * len(frequencies)
        return (theta * self.alpha ** (size / (size - 2))) ** -(np.arange(0, size, 2) / size)


@dataclass(frozen=True)
class LongScaling:
    """Divides each frequency by its own factor: one list of them for texts up to the original length, one for longer ones.

    The token that exceeds the original length changes the keys of all tokens before it. So the cache for a longer text holds
    the keys and values of both lists, which takes twice the memory, until the prompt itself is known to be longer.

    Source: Ding et al. 2024, *LongRoPE* (arXiv:2402.13753), as in Phi-3.

    **Arguments:**

    - `short`, `long`: a factor for each pair of dims.
    - `n_original`: the number of positions in the original training.
    - `attention_factor`: the factor for queries and keys.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    n_original: int
    attention_factor: float = 1.0

    def frequencies(self, plain: np.ndarray, theta: float, length: Int[Array, "*dims 1"]) -> Float[Array, "*dims half"]:
        """Returns the frequencies for texts of so many tokens."""
        del theta
        short, long = (jnp.asarray(plain / np.asarray(factors), jnp.float32) for factors in (self.short, self.long))
        return jnp.where(length > self.n_original, long, short)


@dataclass(frozen=True)
class ProportionalScaling:
    """Divides positions by `factor`, and leaves out the lowest frequencies: only a share of the dims is rotated, but each of
    them with its partner in the other half of the whole head, as in Gemma 4.

    **Arguments:**

    - `share`: the share of the dims of a head that are rotated.
    """

    share: float = 1.0
    factor: float = 1.0

    attention_factor = 1.0

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Returns the scaled frequencies, `[half]`."""
        del theta
        n_rotated = int(self.share * (2 * len(frequencies)) // 2)
        return np.where(np.arange(len(frequencies)) < n_rotated, frequencies / self.factor, 0.0)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | AlphaScaling | LongScaling | ProportionalScaling


def rotation(
    positions: Int[Array, " seq"],
    size: int,
    theta: float,
    scaling: Scaling | None = None,
    *,
    length: Int[Array, "*seq"] | None = None,
    segments: Int[Array, " seq"] | None = None,
) -> tuple[Float[Array, "seq 1 half"], Float[Array, "seq 1 half"]]:
    """Returns cosine and sine of the rotary angles at these positions, in float32 because angles become large.

    **Arguments:**

    - `size`: the number of rotary dims of a head, even.
    - `theta`, `scaling`: the base of the frequencies, and their scaling.
    - `length`: the tokens of the text, or of the text of each token, for a scaling that depends on them; None takes them
        from the largest position. (`transformers` takes the longest text of the batch.)
    - `segments`: the segments of a packed row, each of which is a text; None for one text.
    """
    frequencies: Any = theta ** -(np.arange(0, size, 2) / size)
    growth = 1.0
    if isinstance(scaling, DynamicScaling | LongScaling):
        if segments is not None:
            length = _lengths(positions, segments)
        elif length is None:
            length = positions.max() + 1
        frequencies = scaling.frequencies(frequencies, theta, length.reshape(-1, 1, 1))
        growth = scaling.attention_factor
    elif scaling is not None:
        frequencies = scaling.scale(frequencies, theta)
        growth = scaling.attention_factor
    angles = positions[:, None, None].astype(jnp.float32) * frequencies.astype(np.float32)
    return growth * jnp.cos(angles), growth * jnp.sin(angles)


def _lengths(positions: Int[Array, " seq"], segments: Int[Array, " seq"]) -> Int[Array, " seq"]:
    """Returns the number of tokens of each token's segment."""
    end = len(segments) - 1
    ends = jnp.where(segments != jnp.roll(segments, -1), jnp.arange(len(segments)), end)
    return positions[jax.lax.cummin(ends, reverse=True)] + 1


def apply_rotary(
    x: Float[Array, "seq heads size"],
    cos: Float[Array, "seq 1 half"],
    sin: Float[Array, "seq 1 half"],
    *,
    is_interleaved: bool = False,
) -> Float[Array, "seq heads size"]:
    """Rotates each head of each token. If there are fewer angles than pairs of dims, the last dims stay as they are.

    **Arguments:**

    - `is_interleaved`: whether each even dim is paired with the next, instead of the first half of the dims with the second.

    Source: Su et al. 2021 (arXiv:2104.09864), where dims are interleaved.
    """
    n_rotary = 2 * cos.shape[-1]
    rotated, rest = (x, None) if n_rotary == x.shape[-1] else (x[..., :n_rotary], x[..., n_rotary:])
    wide = rotated.astype(jnp.float32)
    if is_interleaved:
        a, b = rearrange(wide, "seq heads (half two) -> two seq heads half", two=2)
        both = jnp.stack([a * cos - b * sin, b * cos + a * sin])
        turned = rearrange(both, "two seq heads half -> seq heads (half two)").astype(x.dtype)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return turned if rest is None else jnp.concatenate([turned, rest], axis=-1)
