"""How each value of a loss depends on the rows of the batch: whether the loss of the batch is a sum over its parts.

Two traces are compared, for two numbers of rows (see `_growth`). Constants that change, such as the `1 / n` of a mean, give
the *degree*: 0 for a mean, 1 for a sum. If anything is left unexplained, nothing is promised.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..tracing import BY_WEIGHT, scan_counts
from ._atoms import Atom, Block, Step, Value, flat, live_steps, steps_of
from ._ends import ends_of_rows
from ._growth import Growth
from ._names import Names


class Kind(IntEnum):
    """How a value depends on rows, from the least to the most."""

    FREE = 0  # on no row; its entry of a row may be made from the row's number
    ROW = 1  # its entry of a row depends on that row alone
    PREFIX = 2  # a carry of a loop over rows, plus a sum over the rows so far
    SUM = 3  # a sum over rows of such entries, plus terms without rows
    STATISTIC = 4  # any other function of sums or reductions over rows
    MIXED = 5  # its entry of a row depends on other rows


FREE, ROW, PREFIX, SUM, STATISTIC, MIXED = Kind


@dataclass(frozen=True)
class State:
    """What is known of a value.

    **Arguments:**

    - `kind`: how it depends on rows.
    - `is_trained`: whether it depends on weights.
    - `degree`: d, if its sums over rows and literals make it grow like the d-th power of the number of rows: 0 for a mean, 1
        for a sum.
    - `is_whole`: whether it depends on values that are computed on the whole batch.
    - `is_of_any_degree`: whether it is zeros, infinite, or the carry of a loop to which nothing was added.
    - `carry`: for a `PREFIX`, the id of the carry.
    """

    kind: Kind = FREE
    is_trained: bool = False
    degree: int = 0
    is_whole: bool = False
    is_of_any_degree: bool = False
    carry: int = 0


# By primitive, the operands in which an equation is linear together, if the others have no rows. They become entries of the
# output, or are added, and so have one degree.
_SCATTERS = ("scatter-add", "scatter_add", "scatter-sub")
_TERMS = {
    **dict.fromkeys(("add", "sub", "neg", "add_any", "real", "imag", "conj", "reduce_precision"), slice(None)),
    **dict.fromkeys(
        ("copy", "copy_p", "convert_element_type", "stop_gradient", "reduce_sum", "psum", "cumsum"), slice(None)
    ),
    **dict.fromkeys(("reshape", "transpose", "squeeze", "broadcast_in_dim", "tile", "rev", "slice", "pad"), slice(None)),
    **dict.fromkeys(("concatenate", "stack", "split", "unstack"), slice(None)),
    **dict.fromkeys(("div", "gather", "dynamic_slice"), slice(1)),
    "dynamic_update_slice": slice(2),
    **dict.fromkeys((*_SCATTERS, "scatter"), slice(0, None, 2)),
    **dict.fromkeys(("select_n", "select_if_vmap"), slice(1, None)),
}
_BILINEAR = {"mul", *BY_WEIGHT}
# Reductions whose result does not depend on the order of the rows.
_UNORDERED = {"dot_general", *(f"reduce_{of}" for of in ("sum", "max", "min", "prod", "and", "or", "xor"))}
# What makes the entries of rows without entries of rows: equal ones, or ones from the numbers of the rows.
_MAKES_ROWS = {"broadcast_in_dim", "tile", "iota", "random_bits", "random_split", "rng_bit_generator", "rng_uniform"}
_UNNAMED = "a dim that grows with the rows is not known to be rows"
NOT_KNOWN = ("an unknown operation", _UNNAMED)
TOGETHER = "a loop that runs as long as any row needs"


class Rows:
    """How each value depends on the rows of the batch.

    **Arguments:**

    - `names`: the names of a function.
    - `growth`: what changes with the number of rows.
    - `judged`: the indices of the outputs that are judged. What only others depend on is not looked at.
    - `with_whole`: whether values that mix rows, but depend on no weight, are computed on the whole batch before, where that
        makes the function a sum over rows.

    **Attributes:**

    - `outs`: the states of the judged outputs, by their indices.
    - `live`: the ids of the steps on which these depend.
    - `whole`: the root's steps to compute on the whole batch.
    - `in_order`: whether these depend on the order of the rows.
    - `scaled`: by the id of a step, for each of its operands the power of the rows' number in the whole batch over that in a
        part, to multiply it by.
    """

    def __init__(self, names: Names, growth: Growth, judged: Collection[int], *, with_whole: bool = True):
        self.names, self.growth, self._rows = names, growth, growth.rows
        self._judged = {i: value for i, value in enumerate(names.root.outs) if i in judged}
        is_judged = [i in self._judged for i in range(len(names.root.outs))]
        self.live = set(map(id, live_steps(names.root, is_judged)[0]))
        self._made = {id(value): step for step in names.root.steps for value in step.outs}
        self._whole: dict[int, Step] = {}
        self._run()
        while with_whole and not self.is_sum and not self._wanted.keys() <= self._whole.keys():
            self._whole |= self._wanted
            self._run()
        self.whole = self._needed() if self.is_sum else []
        self.in_order = any(map(self._needs_order, self._whole.values()))

    def _run(self) -> None:
        """Finds the states of all values, if the steps in `_whole` are computed on the whole batch."""
        self._states: dict[int, State] = {}
        self.scaled: dict[int, tuple[int, ...]] = {}
        self._found: dict[int, tuple[str, Step]] = {}  # by the id of the step
        self._wanted: dict[int, Step] = {}  # the root's, on data alone, because of which rows are mixed
        batch = self.names.inputs.batch
        ins = [
            State(ROW if batch.start <= i < batch.stop and value.dims else FREE, i < self.names.inputs.n_weights)
            for i, value in enumerate(self.names.root.ins)
        ]
        self._follow(self.names.root, ins)
        self.outs = {i: self.of(value) for i, value in self._judged.items()}
        for i in self.mixed:
            self._want(self._made.get(id(self._judged[i].source)), [self.outs[i]])

    @property
    def mixed(self) -> list[int]:
        """The judged outputs that are no sums over rows, are not by row, and depend on rows."""
        return [i for i, state in self.outs.items() if state.kind not in (FREE, ROW, SUM)]

    @property
    def is_sum(self) -> bool:
        """Whether each judged output is a sum over rows, is by row, or depends on no row."""
        return not self.mixed

    @property
    def first(self) -> tuple[str, Step] | None:
        """How and where rows are first mixed; None if they are not."""
        order = {id(step): i for i, step in enumerate(steps_of(self.names.root))}
        found = [each for each in self._found.values() if id(each[1]) not in self._whole]
        return min(found, key=lambda found: order[id(found[1])], default=None)

    def of(self, value: Value) -> State:
        """Returns the state of a value."""
        value = value.source
        found = self._states.get(id(value))
        if found is None:
            found = self._states[id(value)] = self._of_constant(value)
        return found

    def _of_constant(self, value: Value) -> State:
        degree = self.growth.degrees.get(id(value), 0)
        if degree is None:
            return State(MIXED)
        x = value.literal
        return State(degree=degree, is_of_any_degree=x is not None and np.shape(x) == () and _is_of_any_degree(x))

    def _needed(self) -> list[Step]:
        """Returns the steps of the whole batch that others read."""
        found, needed = [], {id(value.source) for value in self._judged.values()}
        for step in reversed(self.names.root.steps):
            if not step.eqn.effects and needed.isdisjoint(map(id, step.outs)):
                continue
            if id(step) in self._whole:
                found.append(step)
            else:
                read = [step.ins[1]] if step.name == "select_n" and step.ins[0].is_negative else step.ins
                needed.update(id(value.source) for value in read)
        return found[::-1]

    def _needs_order(self, step: Step) -> bool:
        """Whether a step may compute something else for the same rows in another order."""
        mixes = any(atom in self._rows for _, dim in step.mixes for atom in flat(dim))
        makes_rows = any(map(self._present, step.outs)) and not any(map(self._present, step.ins))
        return bool(step.blocks) or (mixes and step.name not in _UNORDERED) or (makes_rows and step.name not in _MAKES_ROWS)

    # --- blocks and equations --------------------------------------------------------------------------------------------

    def _follow(self, block: Block, ins: Sequence[State]) -> list[State]:
        """Returns the states of a block's outputs, for those of its inputs."""
        self._states.update(zip(map(id, block.ins), ins, strict=True))
        for step in block.steps:
            if id(step) not in self.live:
                continue
            outs = self._of_step(step)
            if any(id(value) in self.growth.unexplained for value in step.outs):
                self._note(_UNNAMED, step, MIXED)
                outs = [State(MIXED, state.is_trained) for state in outs]
            if block is self.names.root:
                outs = self._of_root(step, outs)
            self._states.update(zip(map(id, step.outs), outs, strict=True))
        return list(map(self.of, block.outs))

    def _of_root(self, step: Step, outs: list[State]) -> list[State]:
        """Returns the states of the outputs of one of the root's steps, which may be computed on the whole batch."""
        if id(step) in self._whole:
            return [State(ROW if self._present(value) else FREE, is_whole=True) for value in step.outs]
        ins = list(map(self.of, step.ins))
        is_by_number = any(s.is_whole for s in ins) and any(id(v.source) in self.growth.degrees for v in step.ins)
        if is_by_number or any(state.kind not in (FREE, ROW, SUM) for state in outs):
            made = {id(value.source): self._made.get(id(value.source)) for value in step.ins}
            for value, state in zip(step.ins, ins, strict=True):
                if state.kind not in (FREE, ROW):
                    self._want(made[id(value.source)], [state])
            if not any(id(each) in self._wanted for each in made.values()):
                self._want(step, outs)
        return outs

    def _want(self, step: Step | None, outs: Sequence[State]) -> None:
        """Notes that a step of the root is to be computed on the whole batch, if it depends on no weight and a part can take
        its own rows of it."""
        if step is None or step.eqn.effects or any(state.is_trained for state in outs) or len(self._rows) > 1:
            return
        is_named = not any(id(value) in self.growth.unexplained for value in step.outs)
        if is_named and not any(map(_has_pairs, map(self._present, step.outs))):
            self._wanted[id(step)] = step

    def _of_step(self, step: Step) -> list[State]:
        if step.name == "scan":
            return self._of_scan(step)
        if step.name == "while":
            return self._of_while(step)
        if step.name == "cond":
            return self._of_cond(step)
        ins = list(map(self.of, step.ins))
        if len(step.blocks) == 1:
            return self._follow(step.blocks[0], ins)
        if step.name == "optimization_barrier":  # output i is operand i
            return ins
        if step.name == "select_n" and step.ins[0].is_negative:  # an index counted from the end, which it is not
            return [ins[1]]
        return self._of_equation(step, ins)

    def _of_equation(self, step: Step, ins: Sequence[State]) -> list[State]:
        if not step.outs:
            return []
        touched = {how for how, dim in step.mixes if any(atom in self._rows for atom in flat(dim))}
        kinds = {state.kind for state in ins} - {FREE}
        present = list(map(self._present, step.ins))
        if touched and not kinds and any(present):
            kinds = {ROW}  # a draw or a mask over rows
        is_trained, is_whole = any(s.is_trained for s in ins), any(s.is_whole for s in ins)
        degree, is_of_any = self._degree(step, ins, "sum" in touched), self._is_of_any_degree(step, ins)
        self.scaled.pop(id(step), None)
        if degree is None and MIXED not in kinds and (powers := self._powers(step, ins, touched)) is not None:
            scaled = [replace(s, degree=s.degree - power) for s, power in zip(ins, powers, strict=True)]
            degree = self._degree(step, scaled, "sum" in touched)
            if degree is not None:
                self.scaled[id(step)] = powers
        if degree is None or MIXED in kinds:
            if MIXED not in kinds or any(
                state.kind == MIXED and v.source.literal is not None for state, v in zip(ins, step.ins, strict=True)
            ):
                self._note("the number of rows", step, MIXED)
            return [State(MIXED, is_trained, is_whole=is_whole)] * len(step.outs)
        found = []
        for out in step.outs:
            own = self._present(out)
            if _has_pairs(own):
                kind = self._note("pairs of rows", step, MIXED)
            elif own and not any(present) and step.name not in _MAKES_ROWS:
                kind = self._note(f"rows made by `{step.name}`", step, MIXED)
            else:
                kind = self._combined(step, ins, kinds, touched, own, present) if kinds else FREE
            carry = next((state.carry for state in ins if state.carry), 0) if kind == PREFIX else 0
            found.append(State(kind, is_trained, degree, is_whole, is_of_any, carry))
        return found

    def _powers(self, step: Step, ins: Sequence[State], touched: set[str]) -> tuple[int, ...] | None:
        """Returns the powers of the part's share of the rows that its operands are divided by, where their degrees differ.

        Terms of a sum over rows get the degree of the sum: in the mean over a mask plus the size of the weights, a part adds
        its share of the latter. Any other operand gets the value that it has in the whole batch.
        """
        kinds = {state.kind for state in ins}
        if id(step.eqn) not in self.names.places or kinds - {FREE, ROW, SUM}:
            return None
        to = 0
        if SUM in kinds:
            if ROW in kinds or touched or step.name not in _TERMS:
                return None
            to = next(state.degree for state in ins if state.kind == SUM)
        powers = tuple(0 if state.is_of_any_degree else state.degree - to for state in ins)
        is_inexact = (jnp.issubdtype(value.aval.dtype, jnp.inexact) for value in step.ins)
        return powers if all(x or not power for x, power in zip(is_inexact, powers, strict=True)) else None

    def _is_of_any_degree(self, step: Step, ins: Sequence[State]) -> bool:
        if step.name == "mul":
            return any(state.is_of_any_degree and state.kind == FREE for state in ins)
        terms = _terms(step)
        return terms is not None and all(state.is_of_any_degree for state in ins[terms])

    def _degree(self, step: Step, ins: Sequence[State], is_sum: bool) -> int | None:
        """Returns the degree of an equation's outputs; None if there is none."""
        name, degrees, terms = step.name, [state.degree for state in ins], _terms(step)
        if name in _BILINEAR:
            return sum(degrees) + is_sum
        if name == "div" and terms is not None:
            return degrees[0] - degrees[1]
        if name in ("integer_pow", "square"):
            return degrees[0] * step.eqn.params.get("y", 2)
        if terms is not None:
            if any(degrees[i] for i in _others(terms, ins)):
                return None
            added = [int(i == 2 and is_sum and name in _SCATTERS) for i in range(len(ins))]  # only the updates are summed
            of = {s.degree + more for s, more in list(zip(ins, added, strict=True))[terms] if not s.is_of_any_degree}
            return max(of, default=0) + (is_sum and not any(added)) if len(of) < 2 else None
        is_counted = any(s.kind in (SUM, STATISTIC) for s in ins) and name != "convert_element_type"
        return 0 if is_counted or not any(degrees) else None

    def _combined(
        self,
        step: Step,
        ins: Sequence[State],
        kinds: set[Kind],
        touched: set[str],
        own: Sequence[Atom],
        present: Sequence[Any],
    ) -> Kind:
        """Returns the kind of an output, for those of the operands that depend on rows."""
        name = step.name
        of_dependent = [dims for dims, state in zip(present, ins, strict=True) if state.kind != FREE]
        terms = _terms(step)
        is_linear = (terms is not None and all(ins[i].kind == FREE for i in _others(terms, ins))) or (
            name in _BILINEAR and len(of_dependent) == 1
        )
        if touched:
            if touched == {"sum"} and (kinds == {ROW} or (is_linear and kinds <= {SUM})):
                return max(SUM, *kinds)
            if kinds == {ROW} and touched <= {"reduce", "sum"} and not own:
                return self._note("a reduction over rows", step, STATISTIC)
            return self._note(_SAID.get(min(touched), f"`{name}` along rows"), step, MIXED)
        if PREFIX in kinds:
            is_sum = not own and kinds <= {PREFIX, ROW} and self._adds_to_carry(step, ins)
            return PREFIX if is_sum else self._note("a loop over rows", step, MIXED)
        if ROW in kinds:
            if kinds != {ROW}:
                return self._note("a row with a sum over rows", step, MIXED)
            return ROW if all(dims == own for dims in of_dependent) else self._note("pairs of rows", step, MIXED)
        if own and any(dims != own for dims in of_dependent):
            return self._note("a sum over rows repeated over rows", step, MIXED)
        if is_linear:
            return max(kinds)
        return STATISTIC if STATISTIC in kinds else self._note(f"`{name}` of a sum over rows", step, STATISTIC)

    def _adds_to_carry(self, step: Step, ins: Sequence[State]) -> bool:
        """Whether an equation passes on one carry of a loop over rows, with terms that do not depend on it."""
        carries = [i for i, state in enumerate(ins) if state.kind == PREFIX]
        if step.name in ("add", "add_any"):
            return len(carries) == 1 and step.ins[carries[0]].aval.shape == step.outs[0].aval.shape
        if step.name in ("sub", "copy", "convert_element_type", "reduce_precision", *_SCATTERS):
            return carries == [0] and (step.name != "convert_element_type" or _keeps_numbers(step))
        return step.name == "select_n" and carries == [*range(1, len(ins))] and len({ins[i].carry for i in carries}) == 1

    def _present(self, value: Value) -> tuple[Atom, ...]:
        """Returns the atoms of rows among a value's dims."""
        found = [atom for dim in value.dims for atom in flat(dim) if atom in self._rows]
        return tuple(sorted(found, key=id)) if len(found) > 1 else tuple(found)

    def _note(self, how: str, step: Step, kind: Kind) -> Kind:
        self._found.setdefault(id(step), (how, step))
        return kind

    # --- loops and branches ----------------------------------------------------------------------------------------------

    def _of_cond(self, step: Step) -> list[State]:
        index, ins = self.of(step.ins[0]), list(map(self.of, step.ins[1:]))
        outs = [_joined(*of) for of in zip(*(self._follow(branch, ins) for branch in step.blocks), strict=True)]
        if index.kind in (FREE, ROW):
            return [_chosen(out, index) for out in outs]
        kind = self._note("a branch chosen by a sum over rows", step, STATISTIC)
        return [State(MIXED if out.kind in (ROW, MIXED) else kind, out.is_trained or index.is_trained) for out in outs]

    def _of_scan(self, step: Step) -> list[State]:
        n_consts, n_carry = scan_counts(step.eqn)
        ins, body = list(map(self.of, step.ins)), step.blocks[0]
        consts, initial, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
        if not self.growth.has_rows([step.scanned]):
            outs = self._fixed(lambda carry: self._follow(body, [*consts, *carry, *xs]), initial)
        else:
            xs = [replace(state, kind=max(ROW, state.kind)) for state in xs]
            outs = self._of_rows(step, [*consts], initial, xs)
        is_pair = [_has_pairs(self._present(value)) for value in step.outs]
        return [
            State(self._note("pairs of rows", step, MIXED), state.is_trained) if pair else state
            for state, pair in zip(outs, is_pair, strict=True)
        ]

    def _of_rows(self, step: Step, consts: list[State], initial: list[State], xs: list[State]) -> list[State]:
        """Returns the states of a loop over rows: a carry is a sum over the rows so far, or it mixes rows."""
        n_consts, n_carry = len(consts), len(initial)
        body = step.blocks[0]
        slots = body.ins[n_consts : n_consts + n_carry]
        kept = [slot.source is out.source for slot, out in zip(slots, body.outs[:n_carry], strict=True)]
        carry = [
            state
            if keeps
            else State(PREFIX, state.is_trained, is_of_any_degree=True, carry=id(slot))
            if state.kind == FREE and not self._present(slot)
            else State(MIXED, state.is_trained)
            for state, slot, keeps in zip(initial, slots, kept, strict=True)
        ]
        while True:
            outs, new = self._follow(body, [*consts, *carry, *xs]), []
            for before, out, keeps in zip(carry, outs[:n_carry], kept, strict=True):
                is_sum = before.kind == out.kind == PREFIX and out.carry == before.carry
                is_trained = before.is_trained or out.is_trained
                new.append(
                    before if keeps else replace(before, is_trained=is_trained) if is_sum else State(MIXED, is_trained)
                )
            if new == carry:
                break
            carry = new
        found = []
        for start, out, keeps in zip(initial, outs[:n_carry], kept, strict=True):
            is_trained = start.is_trained or out.is_trained
            if keeps or (out.kind == PREFIX and out.is_of_any_degree):
                found.append(start)
            elif out.kind == PREFIX and (start.is_of_any_degree or start.degree == out.degree + 1):
                found.append(State(SUM, is_trained, out.degree + 1, start.is_whole or out.is_whole))
            else:
                found.append(State(self._note("a loop over rows", step, MIXED), is_trained))
        for out in outs[n_carry:]:
            is_by_row = out.kind in (FREE, ROW)
            found.append(out if is_by_row else State(self._note("a loop over rows", step, MIXED), out.is_trained))
        return found

    def _fixed(self, follow: Any, carry: Sequence[State]) -> list[State]:
        """Returns the outputs of a loop's body at the fixed point of its carries."""
        while True:
            outs = follow(carry)
            new = [_joined(before, out) for before, out in zip(carry, outs, strict=False)]
            if new == list(carry):
                return [*new, *outs[len(new) :]]
            carry = new

    def _of_while(self, step: Step) -> list[State]:
        condition, body = step.blocks
        n_cond, n_body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
        ins = list(map(self.of, step.ins))
        consts = ins[n_cond : n_cond + n_body]
        carry = self._fixed(lambda carry: self._follow(body, [*consts, *carry]), ins[n_cond + n_body :])
        before = dict(self._found)
        runs = self._follow(condition, [*ins[:n_cond], *carry])[0]
        if runs.kind in (FREE, ROW):
            return [_chosen(state, runs) for state in carry]
        if (by := ends_of_rows(step)) is not None and self.of(by).kind == ROW:
            self._found = before
            return carry
        self._note(TOGETHER, step, MIXED)
        return [State(MIXED, state.is_trained or runs.is_trained) for state in carry]


_SAID = {
    "order": "an order of rows",
    "part": "a part of the rows",
    "pick": "rows picked by an index",
    "into": "rows written by an index",
    "join": "rows joined with others",
    "conflict": "a reshape that cuts across rows",
    "window": "a window over rows",
    "scan": "a loop over rows",
    "unknown": "an unknown operation",
}


def _has_pairs(atoms: Sequence[Atom]) -> bool:
    """Whether a value has an entry for each pair of rows."""
    return len(atoms) > len(set(atoms))


def _is_of_any_degree(x: Any) -> bool:
    """Whether a number is zero or infinite."""
    if jnp.issubdtype(jax.dtypes.result_type(x), jax.dtypes.extended):
        return False
    return not x or not np.isfinite(x)


def _is_inexact(step: Step) -> bool:
    return jnp.issubdtype(step.outs[0].aval.dtype, jnp.inexact)


def _terms(step: Step) -> slice | None:
    """Returns the operands in which an equation is linear together; None if it is not linear."""
    is_rounded = step.name == "convert_element_type" and not _keeps_numbers(step)
    is_rounded |= step.name == "div" and not _is_inexact(step)
    return None if is_rounded else _TERMS.get(step.name)


def _others(terms: slice, ins: Sequence[State]) -> set[int]:
    """Returns the indices of the other operands."""
    return set(range(len(ins))) - set(range(*terms.indices(len(ins))))


def _keeps_numbers(step: Step) -> bool:
    """Whether a conversion rounds at most: not to integers from floats, to fewer bits, or to bools."""
    old, new = step.ins[0].aval.dtype, step.outs[0].aval.dtype
    if jnp.issubdtype(new, jnp.inexact):
        return not jnp.issubdtype(old, jnp.complexfloating) or jnp.issubdtype(new, jnp.complexfloating)
    return jnp.issubdtype(new, jnp.integer) and not jnp.issubdtype(old, jnp.inexact) and new.itemsize >= old.itemsize


def _joined(*states: State) -> State:
    """Returns the state of a value that is one of several."""
    kinds = {state.kind for state in states} - {FREE}
    of = [state for state in states if not state.is_of_any_degree]
    degrees, carries = {state.degree for state in of} or {0}, {state.carry for state in states}
    is_mixed = (ROW in kinds and kinds != {ROW}) or len(degrees) > 1
    is_mixed |= PREFIX in kinds and len(carries) > 1  # another carry, or none
    kind = MIXED if is_mixed else max(kinds, default=FREE)
    return State(
        kind,
        any(s.is_trained for s in states),
        0 if is_mixed else max(degrees),
        any(s.is_whole for s in states),
        not of,
        max(carries) if kind == PREFIX else 0,
    )


def _chosen(state: State, by: State) -> State:
    """Returns the state of a value that a branch or the end of a loop chooses."""
    is_trained, is_whole = state.is_trained or by.is_trained, state.is_whole or by.is_whole
    if by.degree:
        return State(MIXED, is_trained)
    if by.kind == FREE or state.kind == PREFIX:
        return replace(state, is_trained=is_trained, is_whole=is_whole)
    kind = ROW if state.kind in (FREE, ROW) else MIXED
    return replace(state, kind=kind, is_trained=is_trained, is_whole=is_whole)
