"""How each value of a loss depends on the rows of the batch: whether the loss of the batch is a sum over its parts.

Two traces are compared, for two numbers of rows (see `_growth`). Constants that change, such as the `1 / n` of a mean, give
the *degree*: 0 for a mean, 1 for a sum (see `_states`). If anything is left unexplained, nothing is promised.
"""

from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp

from ..tracing import scan_counts
from ._atoms import Atom, Block, Step, Value, reached, steps_of
from ._derivatives import is_float
from ._ends import ends_by_flags, ends_of_rows, raises
from ._growth import Growth
from ._lookups import ADDING
from ._names import Names
from ._relations import REDUCTIONS, UNVMAPPED
from ._states import (
    FREE,
    MIXED,
    PREFIX,
    ROW,
    SUM,
    TERMS,
    Kind,
    State,
    chosen,
    degree_of_outputs,
    is_linear,
    is_of_any_degree,
    joined,
    keeps_numbers,
    of_constant,
)

# Reductions whose result does not depend on the order of the rows.
_UNORDERED = {"dot_general", *REDUCTIONS}
# What makes the entries of rows without entries of rows: equal ones, or ones from the numbers of the rows.
_MAKES_ROWS = {"broadcast_in_dim", "tile", "iota", "random_bits", "random_split", "rng_bit_generator", "rng_uniform"}
_UNNAMED = "a dim that grows with the rows is not known to be rows"
_OWN_DERIVATIVE = "a derivative of its own mixes rows or is not linear"
NOT_KNOWN = ("an unknown operation", _UNNAMED, _OWN_DERIVATIVE)


class RowDependence:
    """How each value depends on the rows of the batch.

    **Arguments:**

    - `judged`: the indices of the outputs that are judged. What only others depend on is not looked at.
    - `with_whole`: whether values that mix rows, but depend on no weight, are computed on the whole batch before, where that
        makes the function a sum over rows.
    - `makes_text`: whether a loop that runs until a flag of each row is set keeps rows apart: text is generated in this way,
        and what follows an end is not used.

    **Attributes:**

    - `outs`: the states of the judged outputs, by their indices.
    - `scaled`: by the id of a step, for each of its operands the power of the rows' number in the whole batch over that in a
        part, to multiply it by.
    """

    def __init__(
        self, names: Names, growth: Growth, judged: Collection[int], *, with_whole: bool = True, makes_text: bool = False
    ):
        self.names, self.growth, self._rows, self._makes_text = names, growth, growth.rows, makes_text
        self._judged = {i: value for i, value in enumerate(names.root.outs) if i in judged}
        self._live = names.needed(judged)
        self._trained = reached(names.root.ins[: names.inputs.n_weights], lambda value: value.readers)
        self._made = {id(value): step for step in names.root.steps for value in step.outs}
        self._whole: dict[int, Step] = {}
        self._run()
        while with_whole and not self.is_sum and not self._wanted.keys() <= self._whole.keys():
            self._whole |= self._wanted
            self._run()
        self.whole = self._needed() if self.is_sum else []  # the root's steps to compute on the whole batch
        before = reached((out for step in self.whole for out in step.outs), lambda value: value.reads)
        # Whether these, or what they are computed from, depend on the order of the rows.
        self.in_order = any(self._needs_order(by) for by in names.root.steps if not before.isdisjoint(map(id, by.outs)))

    def _run(self) -> None:
        """Finds the states of all values, if the steps in `_whole` are computed on the whole batch."""
        self._states: dict[int, State] = {}
        self.scaled: dict[int, tuple[int, ...]] = {}
        self._found: dict[int, tuple[str, Step]] = {}  # by the id of the step
        self._wanted: dict[int, Step] = {}  # the root's, on data alone, because of which rows are mixed
        of_whole = (out for step in self._whole.values() for out in step.outs)
        self._of_whole = reached(of_whole, lambda value: value.readers)
        batch = self.names.inputs.batch
        ins = enumerate(self.names.root.ins)
        self._follow(
            self.names.root,
            [State(ROW if batch.start <= i < batch.stop and value.dims else FREE) for i, value in ins],
        )
        self.outs = {i: self.of(value) for i, value in self._judged.items()}
        for i in self.mixed:
            self._want(self._made.get(id(self._judged[i])))

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
        if id(value) not in self._states:
            self._states[id(value)] = of_constant(value.literal, self.growth.degrees.get(id(value), 0))
        return self._states[id(value)]

    def _needed(self) -> list[Step]:
        """Returns the steps of the whole batch that others read."""
        needed = self.names.needed(self._judged, (out for step in self._whole.values() for out in step.outs))
        return [
            step for step in self.names.root.steps if id(step) in self._whole and not needed.isdisjoint(map(id, step.outs))
        ]

    def _needs_order(self, step: Step) -> bool:
        """Whether a step may compute something else for the same rows in another order."""
        if step.blocks and step.name not in _LOOPS:
            return any(map(self._needs_order, step.blocks[0].steps))
        mixes = self.growth.has_rows(dim for _, dim in step.mixes)
        makes_rows = any(map(self._present, step.outs)) and not any(map(self._present, step.ins))
        has_constants = any(self._present(x) and self.growth.degrees.get(id(x), 0) is None for x in step.ins)
        by_place = (mixes and step.name not in _UNORDERED) or (makes_rows and step.name not in _MAKES_ROWS)
        return bool(step.blocks) or has_constants or by_place

    # --- blocks and equations --------------------------------------------------------------------------------------------

    def _follow(self, block: Block, ins: Sequence[State]) -> list[State]:
        """Returns the states of a block's outputs, for those of its inputs."""
        self._states.update(zip(map(id, block.ins), ins, strict=True))
        for step in block.steps:
            if self._live.isdisjoint(map(id, step.outs)):
                continue
            outs = self._of_step(step)
            if step.derivative is not None and not self._is_by_row(step, step.derivative, outs):
                outs = [self._mixed(_OWN_DERIVATIVE, step)] * len(outs)
            if any(id(value) in self.growth.unexplained for value in step.outs):
                outs = [self._mixed(_UNNAMED, step)] * len(outs)
            if block is self.names.root:
                outs = self._of_root(step, outs)
            self._states.update(zip(map(id, step.outs), outs, strict=True))
        return list(map(self.of, block.outs))

    def _of_root(self, step: Step, outs: list[State]) -> list[State]:
        """Returns the states of the outputs of one of the root's steps, which may be computed on the whole batch."""
        if id(step) in self._whole:
            return [State(ROW if self._present(value) else FREE) for value in step.outs]
        is_by_number = any(id(value) in self._of_whole for value in step.ins)
        is_by_number &= any(id(value) in self.growth.degrees for value in step.ins)
        if is_by_number or any(state.kind not in (FREE, ROW, SUM) for state in outs):
            for value in step.ins:
                if self.of(value).kind not in (FREE, ROW):
                    self._want(self._made.get(id(value)))
            if not any(id(self._made.get(id(value))) in self._wanted for value in step.ins):
                self._want(step)
        return outs

    def _want(self, step: Step | None) -> None:
        """Notes that a step of the root is to be computed on the whole batch, if it depends on no weight and a part can take
        its own rows of it; or else the sums of data from which it is made."""
        todo, seen = [step], set[int]()
        while todo:
            step = todo.pop()
            if step is None or id(step) in seen or step.eqn.effects or len(self._rows) > 1:
                continue
            seen.add(id(step))
            if not self._trained.isdisjoint(map(id, step.outs)):
                todo += [self._made.get(id(value)) for value in step.ins if self.of(value).kind == SUM]
                continue
            is_named = self.growth.unexplained.isdisjoint(map(id, step.outs))
            if is_named and not any(map(_has_pairs, map(self._present, step.outs))):
                self._wanted[id(step)] = step

    def _of_step(self, step: Step) -> list[State]:
        if step.name in _LOOPS:
            return _LOOPS[step.name](self, step)
        ins = list(map(self.of, step.ins))
        if step.blocks:
            return self._follow(step.blocks[0], ins)
        return self._of_equation(step, ins) if step.copied is None else list(map(self.of, step.copied))

    def _is_by_row(self, step: Step, derivative: Block, outs: Sequence[State]) -> bool:
        """Whether a derivative depends on rows as JAX's do, and is linear in the gradients that it takes: its gradient of a
        value by row is by row, and of a value without rows a sum over rows. Its outputs are those of the function."""
        operands, floats = [*derivative.ins], [out for out in step.outs if is_float(out)]
        del operands[len(operands) - len(floats) :]
        wanted = [(i, v) for i, v in enumerate(filter(is_float, operands)) if id(v) in self._trained]
        states = dict(zip(map(id, step.outs), outs, strict=True))
        if not wanted or any(state.kind == MIXED for state in outs):
            return True
        if not derivative.outs:  # it cannot be traced
            return False
        ins = list(map(self.of, operands))
        for power in (0, 1):  # of a derivative that is not linear in the gradients, at most one has the expected degrees
            given = [self._gradient(out, states[id(out)], power) for out in floats]
            found = self._follow(derivative, [*ins, *given])
            expected = [(i, out) for i, out in enumerate(outs) if id(step.outs[i]) in self._live]
            expected += [(len(outs) + i, self._gradient(v, self.of(v), power)) for i, v in wanted]
            for i, (kind, degree, *_) in expected:
                state, degrees = found[i], {FREE: degree, kind: degree}
                if kind == SUM:  # a loop over rows adds up those of its iterations
                    degrees[ROW] = degree - 1
                if state.kind not in degrees or not (state.is_of_any_degree or state.degree == degrees[state.kind]):
                    return False
        return True

    def _gradient(self, value: Value, state: State, power: int) -> State:
        """Returns the state of a value's gradient, of a mean over rows divided by a power of their number."""
        is_by_row = state.kind == ROW or bool(self._present(value))
        kind = ROW if is_by_row else SUM if state.kind == FREE else FREE
        return State(kind, -state.degree - is_by_row - power)

    def _of_equation(self, step: Step, ins: Sequence[State]) -> list[State]:
        touched = {how for how, dim in step.mixes if self.growth.has_rows([dim])}
        kinds = {state.kind for state in ins} - {FREE}
        if MIXED in kinds:
            if any(state.kind == MIXED and v.literal is not None for state, v in zip(ins, step.ins, strict=True)):
                self._mixed("the number of rows", step)
            return [State(MIXED)] * len(step.outs)
        if step.name in UNVMAPPED and kinds <= {ROW}:
            return [State()]
        present = list(map(self._present, step.ins))
        if touched and not kinds and any(present):
            kinds = {ROW}  # a draw or a mask over rows
        sums_all = self.growth.grows(dim for how, dim in step.mixes if how == "sum")
        degree = degree_of_outputs(step, ins, sums_all)
        self.scaled.pop(id(step), None)
        if degree is None and (powers := self._powers(step, ins, touched)) is not None:
            scaled = [s._replace(degree=s.degree - power) for s, power in zip(ins, powers, strict=True)]
            degree = degree_of_outputs(step, scaled, sums_all)
            if degree is not None:
                self.scaled[id(step)] = powers
        if degree is None:
            return [self._mixed("the number of rows", step)] * len(step.outs)
        kinds_of_outs = [self._combined(step, ins, kinds, touched, self._present(out), present) for out in step.outs]
        carry, is_any = max((state.carry for state in ins), default=0), is_of_any_degree(step, ins)
        return [
            kind if isinstance(kind, State) else State(kind, degree, is_any, carry if kind == PREFIX else 0)
            for kind in kinds_of_outs
        ]

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
            if ROW in kinds or touched or step.name not in TERMS:
                return None
            to = next(state.degree for state in ins if state.kind == SUM)
        powers = tuple(0 if state.is_of_any_degree else state.degree - to for state in ins)
        is_inexact = (jnp.issubdtype(value.aval.dtype, jnp.inexact) for value in step.ins)
        return powers if all(x or not power for x, power in zip(is_inexact, powers, strict=True)) else None

    def _combined(
        self,
        step: Step,
        ins: Sequence[State],
        kinds: set[Kind],
        touched: set[str],
        own: Sequence[Atom],
        present: Sequence[Sequence[Atom]],
    ) -> Kind | State:
        """Returns the kind of an output, or `State(MIXED)`, given those of the operands that depend on rows, how the
        equation combines entries of rows, and the atoms of rows of the output, and of each operand."""
        name = step.name
        if _has_pairs(own):
            return self._mixed("pairs of rows", step)
        if own and not any(present) and name not in _MAKES_ROWS:
            return self._mixed(f"rows made by `{name}`", step)
        if not kinds:
            return FREE
        if touched:
            if touched == {"sum"} and (kinds == {ROW} or (kinds == {SUM} and is_linear(step, ins))):
                return SUM
            is_reduction = kinds == {ROW} and touched <= {"reduce", "sum"} and not own
            why = "a reduction over rows" if is_reduction else _SAID.get(min(touched), f"`{name}` along rows")
            return self._mixed(why, step)
        if PREFIX in kinds:
            is_sum = not own and kinds <= {PREFIX, ROW} and self._adds_to_carry(step, ins)
            return PREFIX if is_sum else self._mixed("a loop over rows", step)
        is_by_row = all(dims == own for dims, state in zip(present, ins, strict=True) if state.kind != FREE)
        if kinds == {ROW}:
            return ROW if is_by_row else self._mixed("pairs of rows", step)
        if ROW in kinds:
            return self._mixed("a row with a sum over rows", step)
        if own and not is_by_row:
            return self._mixed("a sum over rows repeated over rows", step)
        return SUM if is_linear(step, ins) else self._mixed(f"`{name}` of a sum over rows", step)

    def _adds_to_carry(self, step: Step, ins: Sequence[State]) -> bool:
        """Whether an equation passes on one carry of a loop over rows, with terms that do not depend on it."""
        carries = [i for i, state in enumerate(ins) if state.kind == PREFIX]
        if step.name in ("add", "add_any"):
            return len(carries) == 1 and step.ins[carries[0]].aval.shape == step.outs[0].aval.shape
        if step.name in ("sub", "copy", "convert_element_type", "reduce_precision", *ADDING):
            return carries == [0] and (step.name != "convert_element_type" or keeps_numbers(step))
        return step.name == "select_n" and carries == [*range(1, len(ins))] and len({ins[i].carry for i in carries}) == 1

    def _present(self, value: Value) -> tuple[Atom, ...]:
        """Returns the atoms of rows among a value's dims."""
        found = [atom for atom in value.atoms if atom in self._rows]
        return tuple(sorted(found, key=id)) if len(found) > 1 else tuple(found)

    def _mixed(self, why: str, step: Step) -> State:
        """Notes why a step mixes rows."""
        self._found.setdefault(id(step), (why, step))
        return State(MIXED)

    # --- loops and branches ----------------------------------------------------------------------------------------------

    def _of_cond(self, step: Step) -> list[State]:
        index, ins = self.of(step.ins[0]), list(map(self.of, step.ins[1:]))
        branches = [branch for branch in step.blocks if not raises(branch)] or step.blocks
        outs = [joined(*of) for of in zip(*(self._follow(branch, ins) for branch in branches), strict=True)]
        if len(branches) == 1:
            return outs
        if index.kind in (FREE, ROW):
            return [chosen(out, index) for out in outs]
        return [self._mixed("a branch chosen by a sum over rows", step)] * len(outs)

    def _of_scan(self, step: Step) -> list[State]:
        n_consts, n_carry = scan_counts(step.eqn)
        ins, body = list(map(self.of, step.ins)), step.blocks[0]
        consts, initial, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
        if self.growth.has_rows([step.scanned]):
            outs = self._of_rows(step, consts, initial, [x._replace(kind=max(ROW, x.kind)) for x in xs])
        else:
            outs = self._fixed(lambda carry: self._follow(body, [*consts, *carry, *xs]), initial)
        is_pair = [_has_pairs(self._present(value)) for value in step.outs]
        return [self._mixed("pairs of rows", step) if pair else state for state, pair in zip(outs, is_pair, strict=True)]

    def _of_rows(self, step: Step, consts: list[State], initial: list[State], xs: list[State]) -> list[State]:
        """Returns the states of a loop over rows: a carry is a sum over the rows so far, or it mixes rows."""
        n_carry, body = len(initial), step.blocks[0]
        slots = body.ins[len(consts) : len(consts) + n_carry]
        kept = [slot is out for slot, out in zip(slots, body.outs[:n_carry], strict=True)]
        carry = [
            state
            if keeps
            else State(PREFIX, is_of_any_degree=True, carry=id(slot))
            if state.kind == FREE and not self._present(slot)
            else State(MIXED)
            for state, slot, keeps in zip(initial, slots, kept, strict=True)
        ]
        while True:
            outs = self._follow(body, [*consts, *carry, *xs])
            new = [
                before if keeps or (before.kind == out.kind == PREFIX and out.carry == before.carry) else State(MIXED)
                for before, out, keeps in zip(carry, outs[:n_carry], kept, strict=True)
            ]
            if new == carry:
                break
            carry = new
        found, more = [], self.growth.grows([step.scanned])
        for start, out, keeps in zip(initial, outs[:n_carry], kept, strict=True):
            if keeps or (out.kind == PREFIX and out.is_of_any_degree):
                found.append(start)
            elif out.kind == PREFIX and (start.is_of_any_degree or start.degree == out.degree + more):
                found.append(State(SUM, out.degree + more))
            else:
                found.append(self._mixed("a loop over rows", step))
        stacked = (out if out.kind in (FREE, ROW) else self._mixed("a loop over rows", step) for out in outs[n_carry:])
        return [*found, *stacked]

    def _fixed(self, follow: Callable[[Sequence[State]], Sequence[State]], carry: Sequence[State]) -> list[State]:
        """Returns the outputs of a loop's body at the fixed point of its carries."""
        while True:
            outs = follow(carry)
            new = [joined(before, out) for before, out in zip(carry, outs, strict=False)]
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
            return [chosen(state, runs) for state in carry]
        by, reduced = ends_of_rows(step), [by for by in steps_of(condition) if id(by) in self._found]
        has_ended = self._makes_text and ends_by_flags(condition, reduced, self._present)
        if has_ended or (by is not None and self.of(by).kind == ROW):
            self._found = before
            return carry
        return [self._mixed("a loop that runs as long as any row needs", step)] * len(carry)

    def _of_linear_solve(self, step: Step) -> list[State]:
        """The solution is linear in the right-hand side, however it is computed: JAX transposes it as such."""
        n_consts, ins = step.eqn.params["const_lengths"].solve, list(map(self.of, step.ins))
        has_rows = any(map(self._present, (*step.ins, *step.outs)))
        if has_rows or any(state.kind or state.degree for state in ins[:n_consts]):
            return self._follow(step.blocks[0], ins)
        return [joined(*ins[n_consts:])] * len(step.outs)


_LOOPS: dict[str, Callable[[RowDependence, Step], list[State]]] = {
    "cond": RowDependence._of_cond,
    "custom_linear_solve": RowDependence._of_linear_solve,
    "scan": RowDependence._of_scan,
    "while": RowDependence._of_while,
}
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
