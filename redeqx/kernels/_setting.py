"""The configuration of an attention: which keys a query attends to, and how scores are scaled.

Dims, in all modules of this package: `B` all leading dims flattened to one, `T` queries, `S` keys, `N` query heads, `G` key
and value heads, `R = N / G` query heads per key head, `H` head size.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from .._rounding import at_least_float32
from ..machine import n_shards

# The dim of the queries in each optional operand that has one; its size may be 1. The key of a dropout is one per row.
QUERY_DIMS = {"bias": 2, "mask": 2, "query_segments": 1}
# The score of a masked key. Finite, so that a query whose keys are all masked weighs them equally instead of giving NaN.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
# A log-sum-exp that makes all weights of a query zero in the backward pass.
NO_WEIGHTS = 1e30


class Unsupported(Exception):
    """Raised if a platform's kernel cannot compute an attention; the message is the reason."""


@dataclass(frozen=True)
class AttentionSetting:
    """The static configuration of an attention.

    **Arguments:**

    - `scale`: the factor of the scores.
    - `causal`: whether query `i` attends only to keys `j <= i`.
    - `window`: a query attends only to keys with `|i - j| < window`; None for all.
    - `dropout`: the probability that a weight is set to zero.
    - `precision`: that of the products, a `jax.lax.Precision` or a `jax.lax.DotAlgorithmPreset`; None for the platform's
        default.
    - `split`: the sharding of queries `[B, T, N, H]`; None if it is unknown or there is one device.
    - `offset`: the position of the first query among the keys; not 0 if the queries are one of several chunks.
    - `in_ring`: whether the keys are computed a part at a time; a part's backward pass takes the log-sum-exps of the whole.
        They are pairs, `[..., 2]`, of the largest score and the log of the sum relative to it: where scores are large, or
        a bias is, a number of float32 would lose the second to rounding.
    - `names`: the names of the operands after queries, keys and values, in order. Their leading dims may be 1:

        - `bias`: float `[B, N or 1, T or 1, S]`, added to the scaled scores;
        - `mask`: bool `[B, N or 1, T or 1, S]`, True for keys that are attended to;
        - `lengths`: int `[B]`, the number of leading keys that are attended to;
        - `query_segments`, `key_segments`: int `[B, T]` and `[B, S]`; a query attends to the keys of its own segment;
        - `key`: PRNG keys `[B]`, for dropout.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    precision: Any = None
    split: NamedSharding | None = None
    offset: int = 0
    in_ring: bool = False
    names: tuple[str, ...] = ()

    def n_shards(self, *dims: int) -> int:
        """Returns the number of devices that dims of the queries are split over."""
        return 1 if self.split is None else n_shards([self.split.spec[dim] for dim in dims], self.split.mesh)

    @property
    def splits_positions(self) -> bool:
        """Whether several devices share the positions of the queries."""
        return self.n_shards(1) > 1

    def mesh_axes(self, q: Any, k: Any) -> tuple[Any, Any]:
        """Returns the mesh axes that split the rows and the heads of `q` and `k`; None for a dim that does not divide."""
        assert self.split is not None
        rows, _, heads, *_ = self.split.spec
        heads_divide = q.shape[2] % self.n_shards(2) == k.shape[2] % self.n_shards(2) == 0
        return None if q.shape[0] % self.n_shards(0) else rows, heads if heads_divide else None

    def n_repeats(self, n_heads: int, n_groups: int) -> int:
        """Returns how often to repeat each key and value head, so that they divide over the devices that split query heads.
        It is 1 if the query heads do not divide."""
        return 1 if n_heads % self.n_shards(2) else math.lcm(n_groups, self.n_shards(2)) // n_groups

    @property
    def may_mask_all_keys(self) -> bool:
        """Whether all keys of a query may be masked."""
        return self.window is not None or bool({"mask", "lengths", "query_segments"} & set(self.names))


def make_mask(
    setting: AttentionSetting, rows: Int[Array, " t"], n_keys: int, operands: dict[str, Any]
) -> Bool[Array, "b g r t s"] | None:
    """Returns a mask that is True for the keys that queries at these positions attend to; None for all keys. It has size 1
    along dims where it repeats. `operands` include the optional ones for these queries; a mask as `[B, G, R, t, S]`."""
    columns = jnp.arange(n_keys)
    distance = (rows[:, None] - columns)[None, None, None]
    masks: list[Any] = []
    if setting.causal:
        masks.append(distance >= 0)
    if setting.window is not None:
        masks.append(distance < setting.window if setting.causal else jnp.abs(distance) < setting.window)
    if "mask" in operands:
        masks.append(operands["mask"])
    if "lengths" in operands:
        masks.append((columns < operands["lengths"][:, None])[:, None, None, None])
    if "query_segments" in operands:
        same_segment = operands["query_segments"][:, :, None] == operands["key_segments"][:, None, :]
        masks.append(same_segment[:, None, None])
    out = masks[0] if masks else None
    for mask in masks[1:]:
        out = out & mask
    return out


def pairs_of(log_sum: Float[Array, "b n t *pair"]) -> Float[Array, "b n t 2"]:
    """Returns log-sum-exps as pairs, as a ring merges them. Those of other platforms' kernels are one number each."""
    return log_sum if log_sum.ndim == 4 else jnp.stack([log_sum, jnp.zeros_like(log_sum)], -1)


def numbers_of(log_sum: Float[Array, "b n t *pair"]) -> Float[Array, "b n t"]:
    """Returns log-sum-exps as one number each, as other platforms' kernels take them."""
    return jnp.sum(log_sum, -1) if log_sum.ndim == 4 else log_sum


def lacks_keys(log_sum: Float[Array, "b n t *pair"]) -> Bool[Array, "b t n 1"]:
    """Returns True for queries whose keys are all masked: their output is the mean of the values."""
    largest = log_sum[..., 0] if log_sum.ndim == 4 else log_sum
    return jnp.swapaxes(largest <= MASK_VALUE / 2, 1, 2)[..., None]


def gradient_of_mean(lacking: Bool[Array, "b t n 1"], g: Float[Array, "b t n h"], groups: int) -> Float[Array, "b 1 g h"]:
    """Returns the gradient of the mean of the values, in at least float32, of the outputs of queries whose keys are all
    masked."""
    total = jnp.sum(jnp.where(lacking, g, 0).astype(at_least_float32(g.dtype)), 1, keepdims=True)
    return jnp.sum(total.reshape(*total.shape[:2], groups, -1, total.shape[-1]), 3)
