"""Finds the equations of a traced function that use weights, and the first and last products with weights.

A weight is any value that depends on parameters only: a parameter, a view of one, or a function of several, as `w + a @ b`.
A product is first if its other operand depends on no parameter (it reads the data), and last if no other product depends on
its output (it computes the logits). There may be several of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ._flow import flow, union
from ._products import BY_WEIGHT

# The dependencies of a value are a bit set: one bit for parameters, one for data, and one for each product with a weight.
_WEIGHTS, _DATA = 1, 2
_BOTH = _WEIGHTS | _DATA
_READS = ("gather", "broadcast_in_dim")  # of their first operand
SPREAD = ("add", "sub", "mul", "div")  # these broadcast dims of size 1, as of a bias


@dataclass
class _Use:
    bit: int = 0  # of a product with a weight
    sides: set[int | None] = field(default_factory=set)  # the operand that is a weight, in each call; None for no weight
    is_fed: bool = False  # whether its other operand depends on parameters


@dataclass
class WeightUses:
    """The uses of weights in a traced function: its first `n_weights` inputs are parameters, and the others data."""

    closed: Any
    n_weights: int
    _uses: dict[Any, _Use] = field(default_factory=dict)
    _bits: Iterator[int] = field(default_factory=lambda: map((4).__lshift__, count()))
    _followed: int = 0  # the bits of products on whose output another product depends

    def __post_init__(self) -> None:
        n_data = len(self.closed.jaxpr.invars) - self.n_weights
        inputs = [_WEIGHTS] * self.n_weights + [_DATA] * n_data
        flow(self.closed, inputs, self._outputs, union, visit=self._note)

    def side(self, eqn: Any) -> int | None:
        """Returns which operand of a product, gather, broadcast or sum is a weight, or None if not the same in all calls."""
        use = self._uses.get(eqn)
        return next(iter(use.sides)) if use is not None and len(use.sides) == 1 else None

    def is_between(self, eqn: Any) -> bool:
        """Whether a product is neither first nor last."""
        use = self._uses.get(eqn)
        return use is not None and use.is_fed and bool(self._followed & use.bit)

    def is_last(self, eqn: Any) -> bool:
        """Whether an equation is a product with a weight that no other such product depends on: it computes the logits."""
        use = self._uses.get(eqn)
        return use is not None and self.side(eqn) is not None and not self._followed & use.bit

    def _use(self, eqn: Any) -> _Use:
        return self._uses.setdefault(eqn, _Use())

    def _outputs(self, eqn: Any, ins: Sequence[int]) -> list[int] | None:
        """Returns the dependencies of a product with a weight, with its own bit, or None for any other equation."""
        if eqn.primitive.name not in BY_WEIGHT or _weight_side(eqn, ins) is None:
            return None
        use = self._use(eqn)
        use.bit = use.bit or next(self._bits)
        return [union(ins) | use.bit]

    def _note(self, eqn: Any, ins: Sequence[int], outs: Sequence[int]) -> None:
        """Records an equation that may use a weight."""
        del outs
        if eqn.primitive.name not in (*BY_WEIGHT, *SPREAD, *_READS):
            return
        use, side = self._use(eqn), _weight_side(eqn, ins)
        use.sides.add(side)
        if side is not None and eqn.primitive.name in BY_WEIGHT:
            use.is_fed |= bool(ins[1 - side] & _WEIGHTS)
            self._followed |= ins[1 - side]


def _weight_side(eqn: Any, ins: Sequence[int]) -> int | None:
    """Returns which operand of an equation is a weight in one call, or None for no weight."""
    sides = [i for i, bits in enumerate(ins) if bits & _BOTH == _WEIGHTS]
    if eqn.primitive.name in _READS:
        return 0 if 0 in sides else None
    if len(sides) != 1 or (eqn.primitive.name in BY_WEIGHT and not ins[1 - sides[0]] & _DATA):
        return None
    return sides[0]
