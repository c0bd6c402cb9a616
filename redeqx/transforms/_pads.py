"""Pads and strided slices, which XLA computes wrongly where the dim is split.

A pad that cuts an end off is wrong if its operand is replicated and its result is split: `pad(x, 0, [(1, -1, 0)])`, a shift.
The derivative of each pad is such a pad, and XLA joins those that follow each other. So the gradient of
`jnp.pad(x[:-1], (1, 0))` is wrong too, where `x` is split and the result is replicated. This rule cuts by slices, and makes
a slice the derivative of a pad.

A pad between entries that also pads or cuts the ends is wrong, fails, or aborts. The derivative of a slice with strides is
one. This rule computes both in two steps: between entries, and at the ends.

Source: measured with jax 0.10.2 (the tests `test_xla_still_...` fail once it is fixed). Cost: none but larger intermediate
values, which XLA fuses with their use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..tracing import Rule, Site, plain


@dataclass(frozen=True)
class FixPads(Rule):
    """Computes pads, and slices whose derivatives are pads between entries and at the ends, by steps that XLA computes
    rightly."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        if self.mesh.size == 1 or eqn.primitive.name not in ("pad", "slice"):
            return False
        if eqn.primitive.name == "pad":
            return True
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
    """Returns `jax.lax.pad(x, fill, sizes)`: adds entries between, then cuts the ends off, then adds entries there."""
    if any(n for _, _, n in sizes):
        x = jax.lax.pad(x, fill, [(0, 0, n) for _, _, n in sizes])
    shape = [n + low + high for n, (low, high, _) in zip(x.shape, sizes, strict=True)]
    if any(min(low, high) < 0 for low, high, _ in sizes):
        starts = [min(max(-low, 0), n) for n, (low, _, _) in zip(x.shape, sizes, strict=True)]
        ends = [max(n + min(high, 0), start) for n, (_, high, _), start in zip(x.shape, sizes, starts, strict=True)]
        x = jax.lax.slice(x, starts, ends)
    if x.shape == tuple(shape):
        return x
    before = [min(max(low, 0), n - kept) for n, kept, (low, _, _) in zip(shape, x.shape, sizes, strict=True)]
    after = [n - low - kept for n, low, kept in zip(shape, before, x.shape, strict=True)]

    @jax.custom_jvp
    def extended(x: jax.Array, fill: jax.Array) -> jax.Array:
        return jax.lax.pad(x, fill, [(low, high, 0) for low, high in zip(before, after, strict=True)])

    @extended.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        of_x, of_fill = tangents
        # The same as a pad, and its derivative is a slice.
        return extended(*primals), jax.lax.dynamic_update_slice(jnp.full(shape, of_fill), of_x, before)

    return extended(x, fill)


def _sizes(eqn: Any) -> list[tuple[int, int, int]]:
    """Returns for each dim how many entries a pad adds, or a slice leaves out: before the first, after the last, between."""
    if eqn.primitive.name == "pad":
        return [*eqn.params["padding_config"]]
    starts, strides = eqn.params["start_indices"], eqn.params["strides"] or [1] * len(eqn.params["start_indices"])
    sizes = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, starts, strides, strict=True)
    return [(start, size - start - max(kept - 1, 0) * n - min(kept, 1), n - 1) for size, kept, start, n in sizes]
