"""Pads between entries that also cut some off, at which XLA ends the process if the dim is split over devices.

Such a pad has a negative size before the first entry. This rule computes it as a pad that only adds entries, and a slice.

Source: measured with jax 0.10.2 (the test `test_xla_still_...` fails once it is fixed). Cost: none but a larger intermediate
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
    """Computes pads between entries that cut off the first by pads that do not, and slices."""

    mesh: Mesh
    corrects: ClassVar = True

    def claims(self, eqn: Any) -> bool:
        is_pad = eqn.primitive.name == "pad" and self.mesh.size > 1
        return is_pad and any(low < 0 < interior for low, _, interior in eqn.params["padding_config"])

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        x, fill = map(plain, ins)
        return [pad(x, fill, eqn.params["padding_config"])]


def pad(x: jax.Array, fill: jax.Array, sizes: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Returns `jax.lax.pad(x, fill, sizes)`, computed without negative sizes."""
    x = jax.lax.pad(x, fill, [(max(low, 0), max(high, 0), interior) for low, high, interior in sizes])
    starts = [max(-low, 0) for low, _, _ in sizes]
    return jax.lax.slice(x, starts, [size - max(-high, 0) for size, (_, high, _) in zip(x.shape, sizes, strict=True)])
