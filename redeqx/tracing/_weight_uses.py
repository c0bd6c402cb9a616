"""Finds the equations of a traced function that use weights, and the first and last products with weights.

A weight is any value that depends on parameters only: a parameter, a view of one, or a function of several, as `w + a @ b`.
A product is first if its other operand depends on no parameter (it reads the data), and last if no other product depends on
its output (it computes the logits). There may be several of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from jax.extend import core as jex

from ._inner import insides, scan_counts
from ._products import BY_WEIGHT

# The dependencies of a value are a bit set: one bit for parameters, one for data, and one for each product with a weight.
_WEIGHTS, _DATA = 1, 2
_BOTH = _WEIGHTS | _DATA

SPREAD = ("add", "sub", "mul", "div")  # these broadcast dims of size 1, as of a bias


@dataclass
class _Use:
    eqn: Any  # keeps the equation alive, so that its id stays unique
    bit: int
    sides: set[int | None] = field(default_factory=set)  # the operand that is a weight, in each call; None for no weight
    is_fed: bool = False  # whether its other operand depends on parameters


@dataclass
class WeightUses:
    """The uses of weights in a traced function.

    **Arguments:**

    - `n_weights`: the number of parameters, which are the function's first inputs. The other inputs are data.
    """

    closed: Any
    n_weights: int
    _uses: dict[int, _Use] = field(default_factory=dict)
    _followed: int = 0  # the bits of products on whose output another product depends
    _is_settled: bool = True  # whether the dependencies of all enclosing loops have reached their fixed point
    _memo: dict[tuple[int, bool, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_inputs = len(self.closed.jaxpr.invars)
        self._outputs(self.closed, [_WEIGHTS] * self.n_weights + [_DATA] * (n_inputs - self.n_weights))

    def side(self, eqn: Any) -> int | None:
        """Returns which operand of a product, gather, broadcast or sum is a weight, or None if not the same in all calls."""
        use = self._uses.get(id(eqn))
        return next(iter(use.sides)) if use is not None and len(use.sides) == 1 else None

    def is_between(self, eqn: Any) -> bool:
        """Whether a product is neither first nor last."""
        use = self._uses.get(id(eqn))
        return use is not None and use.is_fed and bool(self._followed & use.bit)

    def is_last(self, eqn: Any) -> bool:
        """Whether an equation is a product with a weight that no other such product depends on: it computes the logits."""
        use = self._uses.get(id(eqn))
        return use is not None and self.side(eqn) is not None and not self._followed & use.bit

    def _outputs(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        """Returns the dependencies of a jaxpr's outputs."""
        key = (id(closed.jaxpr), self._is_settled, tuple(inputs))
        if key in self._memo:
            return self._memo[key]
        env: dict[Any, int] = dict(zip(closed.jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, jex.Literal) else env.get(atom, 0)

        for eqn in closed.jaxpr.eqns:
            env.update(zip(eqn.outvars, self._outputs_of(eqn, list(map(read, eqn.invars))), strict=True))
        self._memo[key] = list(map(read, closed.jaxpr.outvars))
        return self._memo[key]

    def _outputs_of(self, eqn: Any, ins: list[int]) -> list[int]:
        if insides(eqn):
            return self._through(eqn, ins)
        if eqn.primitive.name == "optimization_barrier":  # output i is operand i
            return ins
        union = _union(ins)
        if eqn.primitive.name in (*BY_WEIGHT, *SPREAD, "gather", "broadcast_in_dim"):
            union |= self._note(eqn, ins)
        return [union] * len(eqn.outvars)

    def _note(self, eqn: Any, ins: list[int]) -> int:
        """Records an equation that may use a weight. Returns its bit if it is a product with a weight, else 0."""
        use = self._uses.setdefault(id(eqn), _Use(eqn, 4 << len(self._uses)))
        sides = [i for i, bits in enumerate(ins) if bits & _BOTH == _WEIGHTS]
        is_product = eqn.primitive.name in BY_WEIGHT
        if eqn.primitive.name in ("gather", "broadcast_in_dim"):
            is_use = 0 in sides
        else:
            is_use = len(sides) == 1 and (not is_product or bool(ins[1 - sides[0]] & _DATA))
        if self._is_settled:
            use.sides.add(sides[0] if is_use else None)
        if not (is_use and is_product):
            return 0
        other = ins[1 - sides[0]]
        use.is_fed |= bool(other & _WEIGHTS)
        self._followed |= other
        return use.bit

    def _through(self, eqn: Any, ins: list[int]) -> list[int]:
        """Returns the dependencies of the outputs of an equation with inner jaxprs; of a loop, their fixed point."""
        inner = [inner for inner in insides(eqn) if inner.role != "condition"]
        if eqn.primitive.name not in ("scan", "while"):
            outs = [self._outputs(each.closed, [ins[i] for i in each.operands]) for each in inner]
            chosen = ins[0] if eqn.primitive.name == "cond" else 0  # the index of the branch
            return [chosen | _union(of_output) for of_output in zip(*outs, strict=True)]
        (body,) = inner
        start = body.kinds.index("carry") if "carry" in body.kinds else 0
        n_carry = scan_counts(eqn)[1] if eqn.primitive.name == "scan" else body.kinds.count("carry")
        inputs, carry = [ins[i] for i in body.operands], slice(start, start + n_carry)
        was_settled, self._is_settled = self._is_settled, False
        while True:
            outs = self._outputs(body.closed, inputs)[:n_carry]
            if all(before | after == before for before, after in zip(inputs[carry], outs, strict=True)):
                break
            inputs[carry] = [before | after for before, after in zip(inputs[carry], outs, strict=True)]
        self._is_settled = was_settled
        return self._outputs(body.closed, inputs)


def _union(values: Sequence[int]) -> int:
    return reduce(or_, values, 0)
