"""Which equations of a traced function compute with weights, and where each product stands among the others.

A weight is whatever depends on parameters alone: a parameter, a view of one, or what is computed of several, as `w + a @ b`.
A first product reads the data: its other operand depends on no parameter. A last product makes the logits: no other product
depends on its output. There may be several of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jex

from ._inner import insides, scan_counts

# What a value depends on is an integer: a bit for parameters, one for data, and one for each product with a weight.
_WEIGHTS, _DATA = 1, 2
_BOTH = _WEIGHTS | _DATA
_PRODUCTS = ("dot_general", "conv_general_dilated")
SPREAD = ("add", "sub", "mul", "div")  # which broadcast dims of size 1, as of a bias


@dataclass
class _Found:
    eqn: Any  # kept, or another equation could get its id
    bit: int
    sides: set[int | None] = field(default_factory=set)  # where the weight is, in all calls; None where it is no weight
    is_fed: bool = False


@dataclass
class WeightUses:
    """The uses of weights in a traced function.

    **Arguments:**

    - `n_weights`: how many of the function's first inputs are parameters; the others are data.
    """

    closed: Any
    n_weights: int
    _found: dict[int, _Found] = field(default_factory=dict)
    _followed: int = 0
    _is_settled: bool = True  # whether what is read now is what the last iteration of each loop around reads
    _memo: dict[tuple[int, bool, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_inputs = len(self.closed.jaxpr.invars)
        self._outputs(self.closed, [_WEIGHTS] * self.n_weights + [_DATA] * (n_inputs - self.n_weights))

    def side(self, eqn: Any) -> int | None:
        """Which operand of a product, lookup, broadcast or sum is a weight; None where none is, or not in all calls."""
        found = self._found.get(id(eqn))
        return next(iter(found.sides)) if found is not None and len(found.sides) == 1 else None

    def is_between(self, eqn: Any) -> bool:
        """Whether a product is neither a first nor a last one."""
        found = self._found.get(id(eqn))
        return found is not None and found.is_fed and bool(self._followed & found.bit)

    def is_last(self, eqn: Any) -> bool:
        """Whether it is a product with a weight from which no other such product is made: it makes the logits."""
        found = self._found.get(id(eqn))
        return found is not None and self.side(eqn) is not None and not self._followed & found.bit

    def _outputs(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        """What the outputs of a jaxpr depend on."""
        key = (id(closed.jaxpr), self._is_settled, tuple(inputs))
        if key in self._memo:
            return self._memo[key]
        env: dict[Any, int] = dict(zip(closed.jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, jex.Literal) else env.get(atom, 0)

        for eqn in closed.jaxpr.eqns:
            env.update(zip(eqn.outvars, self._of(eqn, list(map(read, eqn.invars))), strict=True))
        self._memo[key] = list(map(read, closed.jaxpr.outvars))
        return self._memo[key]

    def _of(self, eqn: Any, ins: list[int]) -> list[int]:
        if insides(eqn):
            return self._through(eqn, ins)
        if eqn.primitive.name == "optimization_barrier":  # each output is its operand
            return ins
        every = 0
        for of in ins:
            every |= of
        if eqn.primitive.name in (*_PRODUCTS, *SPREAD, "gather", "broadcast_in_dim"):
            every |= self._note(eqn, ins)
        return [every] * len(eqn.outvars)

    def _note(self, eqn: Any, ins: list[int]) -> int:
        """Note an equation that may use a weight; returns its bit, where it is a product with one."""
        found = self._found.setdefault(id(eqn), _Found(eqn, 4 << len(self._found)))
        sides = [i for i, of in enumerate(ins) if of & _BOTH == _WEIGHTS]
        is_product = eqn.primitive.name in _PRODUCTS
        if eqn.primitive.name in ("gather", "broadcast_in_dim"):
            is_use = 0 in sides
        else:
            is_use = len(sides) == 1 and (not is_product or bool(ins[1 - sides[0]] & _DATA))
        if self._is_settled:
            found.sides.add(sides[0] if is_use else None)
        if not (is_use and is_product):
            return 0
        other = ins[1 - sides[0]]
        found.is_fed |= bool(other & _WEIGHTS)
        self._followed |= other
        return found.bit

    def _through(self, eqn: Any, ins: list[int]) -> list[int]:
        """What the outputs of an equation with jaxprs inside depend on; of a loop, until no iteration adds to it."""
        inner = [found for found in insides(eqn) if found.role != "condition"]
        if eqn.primitive.name not in ("scan", "while"):
            made = [self._outputs(found.closed, [ins[i] for i in found.operands]) for found in inner]
            chosen = ins[0] if eqn.primitive.name == "cond" else 0  # by the index of the branch
            outs = [chosen] * len(eqn.outvars)
            return [out | sum_of for out, sum_of in zip(outs, map(_either, zip(*made, strict=True)), strict=True)]
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


def _either(values: Sequence[int]) -> int:
    every = 0
    for of in values:
        every |= of
    return every
