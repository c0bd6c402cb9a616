"""Pads between entries that also pad or cut the ends: if the dim is split, XLA computes them wrongly, fails, or aborts.

They are the derivatives of slices with strides too. This rule computes both in two steps: between entries, and at the ends.

Source: measured with jax 0.10.2 (the tests `test_xla_still_...` fail once it is fixed). Cost: none but a larger intermediate
value, which XLA fuses with its use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from ..tracing import Rule, Site, plain


@dataclass(frozen=True)
class FixPads(Rule):
    """Computes pads between entries and at the ends, and slices whose derivatives are such pads, in two steps."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        if self.mesh.size == 1 or eqn.primitive.name not in ("pad", "slice"):
            return False
        kept = zip(_sizes(eqn), eqn.outvars[0].aval.shape, strict=True)
        # As far as a stride, as of every other entry, XLA splits them; but for a slice of one entry it returns another one.
        return any(n and (low < 0 or max(low, high) > n or (low and size == 1)) for (low, high, n), size in kept)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        x, *fill = map(plain, ins)
        sizes = _sizes(eqn)
        if fill:
            return [pad(x, fill[0], sizes)]
        ends = [size - high for size, (_, high, _) in zip(x.shape, sizes, strict=True)]
        x = jax.lax.slice(x, [low for low, _, _ in sizes], ends)
        return [jax.lax.slice(x, [0] * x.ndim, x.shape, [n + 1 for _, _, n in sizes])]


def pad(x: jax.Array, fill: jax.Array, sizes: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Returns `jax.lax.pad(x, fill, sizes)`, computed between entries first."""
    x = jax.lax.pad(x, fill, [(0, 0, n) for _, _, n in sizes])
    return jax.lax.pad(x, fill, [(low, high, 0) for low, high, _ in sizes])


def _sizes(eqn: Any) -> list[tuple[int, int, int]]:
    """Returns for each dim how many entries a pad adds, or a slice leaves out: before the first, after the last, between."""
    if eqn.primitive.name == "pad":
        return [*eqn.params["padding_config"]]
    starts, strides = eqn.params["start_indices"], eqn.params["strides"] or [1] * len(eqn.params["start_indices"])
    sizes = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, starts, strides, strict=True)
    return [(start, size - start - max(kept - 1, 0) * n - min(kept, 1), n - 1) for size, kept, start, n in sizes]
