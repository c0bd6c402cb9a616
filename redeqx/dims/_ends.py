"""Whether a loop under `vmap` ends for each row by itself: a row that has ended keeps its values while others go on."""

from collections.abc import Sequence
from typing import Any

from ._atoms import Block, Step, Value

_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "copy")


def ends_of_rows(step: Step) -> Value | None:
    """Returns what says whether a row goes on, if a `while` goes on as long as any row does and its body keeps the values of
    rows that have ended. Otherwise returns None."""
    condition, body = step.blocks
    n_cond, n_body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    names: dict[Any, int] = {}
    of_cond = _Formulas(condition, step.ins[:n_cond], names)
    of_body = _Formulas(body, step.ins[n_cond : n_cond + n_body], names)
    any_row = of_cond.made.get(id(condition.outs[0].source))
    if any_row is None or any_row.name != "reduce_or":
        return None
    goes_on = any_row.ins[0]
    expected = of_cond.of(goes_on)
    for out, slot in zip(body.outs, body.ins[n_body:], strict=True):
        by = of_body.made.get(id(out.source))
        is_kept = by is not None and by.name == "select_n" and by.ins[1].source is slot
        if out.source is not slot and not (is_kept and by is not None and of_body.of(of_body.viewed(by.ins[0])) == expected):
            return None
    return goes_on


class _Formulas:
    """Numbers values of a block so that two of one formula have one number.

    **Arguments:**

    - `constants`: the operands of the block's first inputs. The other inputs are the carries.
    - `names`: the numbers so far.
    """

    def __init__(self, block: Block, constants: Sequence[Value], names: dict[Any, int]):
        self.made = {id(out): step for step in block.steps for out in step.outs}
        self._names, self._known = names, dict[int, int]()
        for i, value in enumerate(block.ins):
            of = ("constant", id(constants[i].source)) if i < len(constants) else ("carry", i - len(constants))
            self._known[id(value.source)] = self._number(of)

    def viewed(self, value: Value) -> Value:
        """Returns the value that a value repeats."""
        while (by := self.made.get(id(value.source))) is not None and by.name in _VIEWS:
            value = by.ins[0]
        return value

    def of(self, value: Value) -> int:
        """Returns the number of a value's formula."""
        value = value.source
        if id(value) not in self._known:
            by = self.made.get(id(value))
            if by is None:
                literal = value.literal
                of = ("literal", repr(literal) if getattr(literal, "ndim", 0) == 0 else id(literal), str(value.aval))
            else:
                place = next(i for i, out in enumerate(by.outs) if out is value)
                params = str(sorted(by.eqn.params.items(), key=lambda item: item[0]))
                of = (by.name, params, place, *map(self.of, by.ins))
            self._known[id(value)] = self._number(of)
        return self._known[id(value)]

    def _number(self, of: Any) -> int:
        return self._names.setdefault(of, len(self._names))
