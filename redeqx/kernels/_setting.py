"""What an attention computes, apart from its arrays: which keys a query sees, and how scores are scaled.

Dims, everywhere in this package: `T` queries, `S` keys, `N` heads, `G` heads of keys and values, `R = N / G` heads of
queries to each of those, `H` size of a head, `B` all leading dims as one.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

# The score of a key that is not seen. Finite, so that a query that sees none weighs all alike instead of giving NaN.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class Refused(Exception):
    """A platform's kernel does not compute an attention, and why."""


@dataclass(frozen=True)
class Setting:
    """The static part of an attention.

    **Arguments:**

    - `scale`: of the scores.
    - `causal`: whether query `i` sees keys `j <= i` only.
    - `window`: a query sees keys with `|i - j| < window` only; None for all.
    - `dropout`: the probability that a weight is set to zero.
    - `precision`: of its products, a `jax.lax.Precision` or a `jax.lax.DotAlgorithmPreset`; None for the platform's default.
    - `split`: how a plan splits queries `[B, T, N, H]` over devices; None where that is not known, or there is one device.
    - `names`: of the operands after queries, keys and values, in their order. Their shapes, where the leading dims may be 1:

        - `bias`: float `[B, N or 1, T or 1, S]`, added to the scaled scores;
        - `mask`: bool `[B, N or 1, T or 1, S]`, True for keys that are seen;
        - `lengths`: int `[B]`, the number of keys that are seen, from the first;
        - `query_segments`, `key_segments`: int `[B, T]` and `[B, S]`; keys of the same segment are seen;
        - `key`: PRNG keys `[B]`, for dropout.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    precision: Any = None
    split: NamedSharding | None = None
    names: tuple[str, ...] = ()

    @property
    def row_shards(self) -> int:
        """Over how many devices the rows are split."""
        return self._shards(0)

    @property
    def head_shards(self) -> int:
        """Over how many devices the heads are split."""
        return self._shards(2)

    def _shards(self, dim: int) -> int:
        if self.split is None:
            return 1
        axes = self.split.spec[dim] or ()
        return math.prod(self.split.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def axes(self, q: Any, k: Any) -> tuple[Any, Any]:
        """The axes of the mesh that split rows and heads of these queries and keys; None for what does not divide."""
        assert self.split is not None
        rows, _, heads, *_ = self.split.spec
        divide = q.shape[2] % self.head_shards == k.shape[2] % self.head_shards == 0
        return None if q.shape[0] % self.row_shards else rows, heads if divide else None

    def n_repeats(self, n_heads: int, n_groups: int) -> int:
        """How often each head of keys and values has to be there to divide over as many devices as heads of queries do; 1
        where those do not divide."""
        return 1 if n_heads % self.head_shards else math.lcm(n_groups, self.head_shards) // n_groups

    @property
    def may_see_nothing(self) -> bool:
        """Whether a query may see no key at all."""
        return self.window is not None or bool({"mask", "lengths", "query_segments"} & set(self.names))


def default_precision() -> Any:
    """Returns the precision that `jax.default_matmul_precision` sets here, as for `Setting`."""
    config: Any = jax.config  # which declares no attribute for its options
    name = config.jax_default_matmul_precision
    if name is None:
        return None
    presets = jax.lax.DotAlgorithmPreset.__members__
    return presets[name] if name in presets else jax.lax.Precision(name)


def seen(setting: Setting, rows: Int[Array, " t"], n_keys: int, operands: dict[str, Any]) -> Bool[Array, "b g r t s"] | None:
    """The keys that some queries see, with 1 for dims along which all see the same; None for all keys.

    **Arguments:**

    - `rows`: the positions of the queries.
    - `operands`: among them the optional ones, of these queries; a mask as `[B, G, R, t, S]`.
    """
    columns = jnp.arange(n_keys)
    distance = (rows[:, None] - columns)[None, None, None]
    found: list[Any] = []
    if setting.causal:
        found.append(distance >= 0)
    if setting.window is not None:
        found.append(distance < setting.window if setting.causal else jnp.abs(distance) < setting.window)
    if "mask" in operands:
        found.append(operands["mask"])
    if "lengths" in operands:
        found.append((columns < operands["lengths"][:, None])[:, None, None, None])
    if "query_segments" in operands:
        same = operands["query_segments"][:, :, None] == operands["key_segments"][:, None, :]
        found.append(same[:, None, None])
    out = found[0] if found else None
    for sees in found[1:]:
        out = out & sees
    return out
