"""Dequantise at use: reads the codes of a quantised weight anew for each of its uses, forward and backward.

A product saves its weight for the backward pass. Of a weight that codes were dequantised to, this would be all of its
numbers, in each layer: more memory than the codes save. Under this rule the numbers are a view of the codes that stays
pending until a use. The use is computed from the codes, in a remat, and so is its gradient. Under FSDP codes and scales are
gathered there, not numbers.

Source: the dequantisation of QLoRA (arXiv:2305.14314). Cost: each weight is dequantised once more in the backward pass. In
tracing, one `jax.checkpoint` for each use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .._quantised import dequantise_p
from ..dims import repeats, view
from ..tracing import REMAT, Rule, Site, Tag, Tagged, equations, has_tag, plain, run
from ._gather import computed_again, viewed


@dataclass(frozen=True)
class _Numbers(Tag):
    """Tags the codes and scales of a weight, in place of a view of its numbers: `eqns` dequantise, and then view them."""

    eqns: tuple[Any, ...]

    def release(self, value: Any) -> Any:
        return viewed(self.eqns[1:], run(self.eqns[0], list(map(plain, value)))[0])


class DequantiseAtUse(Rule):
    """Dequantises weights where they are used."""

    follows: ClassVar = _Numbers

    def of(self, closed: Any) -> Rule | None:
        return self if any(map(self.claims, equations(closed))) else None

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive is dequantise_p

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if self.claims(eqn):
            return [Tagged(tuple(ins), _Numbers((eqn,)))]
        if len(ins) == 1 and view(eqn) is not None and not repeats(eqn):
            return [Tagged(ins[0].value, _Numbers((*ins[0].tag.eqns, eqn)))]
        if eqn.primitive.name == REMAT or site.enters(eqn):
            return None

        def compute(*values: Any) -> list[Any]:
            operands = []
            for old, value in zip(ins, values, strict=True):
                if has_tag(old, _Numbers):
                    (numbers,) = site.rest(old.tag.eqns[0], value)
                    operands.append(viewed(old.tag.eqns[1:], plain(numbers)))
                else:
                    operands.append(value)
            return site.rest(eqn, operands)

        values = (value.value if has_tag(value, _Numbers) else value for value in ins)
        return computed_again(compute, eqn, site)(*values)
