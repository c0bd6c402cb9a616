"""How each value of a loss depends on the rows of the batch: whether the loss of the batch is a sum over its parts.

Two traces are compared, for two numbers of rows. A dim that grows must be named as rows, and a literal that changes is a
power of the number of rows, such as the `1 / n` of a mean. It gives the *degree*: 0 for a mean, 1 for a sum. If anything is
left unexplained, nothing is promised.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..tracing import BY_WEIGHT, scan_counts
from ._atoms import Atom, Block, Step, Value, flat, live_steps, size_of, steps_of
from ._names import Names


class Kind(IntEnum):
    """How a value depends on rows, from the least to the most."""

    FREE = 0  # on no row
    ROW = 1  # its entry of a row depends on that row alone
    PREFIX = 2  # a sum over the rows that a loop has seen so far
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
    - `is_drawn`: whether it depends on a draw, so that it is not a zero to start a sum with.
    """

    kind: Kind = FREE
    is_trained: bool = False
    degree: int = 0
    is_whole: bool = False
    is_drawn: bool = False


_LINEAR = {
    *("add", "sub", "neg", "add_any", "reshape", "transpose", "squeeze", "broadcast_in_dim", "reduce_sum", "copy", "slice"),
    *("convert_element_type", "pad", "rev", "concatenate", "real", "imag", "cumsum", "stack", "split", "reduce_precision"),
    *("stop_gradient", "tile", "psum", "conj", "unstack", "copy_p"),
}
_BILINEAR = {"mul", *BY_WEIGHT}
_LINEAR_IN_FIRST = {"div", "gather", "dynamic_slice"}
_ADDS = {"add", "sub", "add_any", "select_n", "concatenate", "dynamic_update_slice", "scatter-add", "scatter", "stack"}


class Rows:
    """How each value depends on the rows of the batch.

    **Arguments:**

    - `names`, `other`: the names of a function for two numbers of rows.
    - `in_groups`: whether rows that a reshape divides into groups of constant size may be mixed within a group.
    - `with_whole`: whether values that mix rows, but depend on no weight, are computed on the whole batch before, where that
        makes the function a sum over rows.

    **Attributes:**

    - `outs`: the states of the function's outputs.
    - `whole`: the indices of the root's steps to compute on the whole batch.
    - `group`: the number of consecutive rows that belong together.
    - `unnamed`: a step whose output grows with the number of rows in a dim that is not known to be rows; None if there is no
        such step.
    - `is_comparable`: whether the two traces have the same equations.
    """

    def __init__(self, names: Names, other: Names, *, in_groups: bool = False, with_whole: bool = True):
        self.names, self.group, self.whole = names, 1, set[int]()
        self._degrees: dict[int, int | None] = {}  # of literals that depend on the number of rows
        self._rows = set(names.rows)
        self.unnamed: Step | None = None
        self.is_comparable = self._compare(other)
        if in_groups and len(names.rows) == len(other.rows):
            varies = [one.size != two.size for one, two in zip(names.rows, other.rows, strict=True)]
            if varies == sorted(varies, reverse=True):  # the outer factors
                n = sum(varies)
                self._rows, self.group = set(names.rows[:n]), size_of(names.rows[n:])
        self._made = {id(value): i for i, step in enumerate(names.root.steps) for value in step.outs}
        self._run()
        while with_whole and self.is_comparable and not self.is_sum and not self._wanted <= self.whole:
            self.whole |= self._wanted
            self._run()
        self.whole = self._read(self.whole) if self.is_sum else set()

    def _read(self, whole: set[int]) -> set[int]:
        """Returns the steps among these whose outputs others read."""
        others = (value for i, step in enumerate(self.names.root.steps) if i not in whole for value in step.ins)
        return {self._made.get(id(value.source), -1) for value in (*others, *self.names.root.outs)} & whole

    def _run(self) -> None:
        """Finds the states of all values, if the steps in `whole` are computed on the whole batch."""
        self._states: dict[int, State] = {}
        self._found: dict[int, tuple[str, Step]] = {}  # by the id of the step
        self._wanted: set[int] = set()  # steps of the root which depend on data alone, and because of which rows are mixed
        batch = self.names.inputs.batch
        ins = [
            State(ROW if batch.start <= i < batch.stop and value.dims else FREE, i < self.names.inputs.n_weights)
            for i, value in enumerate(self.names.root.ins)
        ]
        self.outs = self._follow(self.names.root, ins)

    @property
    def is_sum(self) -> bool:
        """Whether each output is a sum over rows, is by row, or depends on no row."""
        return self.is_comparable and self.unnamed is None and self.kind in (FREE, ROW, SUM)

    @property
    def kind(self) -> Kind:
        """The outputs' most dependent kind."""
        return _most(self.outs)

    @property
    def first(self) -> tuple[str, Step] | None:
        """How and where rows are first mixed; None if they are not."""
        order = {id(step): i for i, step in enumerate(steps_of(self.names.root))}
        return min(self._found.values(), key=lambda found: order[id(found[1])], default=None)

    def of(self, value: Value) -> State:
        """Returns the state of a value."""
        value = value.source
        if id(value) in self._degrees:
            degree = self._degrees[id(value)]
            return State(MIXED) if degree is None else State(FREE, degree=degree)
        return self._states.get(id(value), State())

    # --- two traces ------------------------------------------------------------------------------------------------------

    def _compare(self, other: Names) -> bool:
        ours, others = list(steps_of(self.names.root)), list(steps_of(other.root))
        if [step.name for step in ours] != [step.name for step in others]:
            return False
        ratio = size_of(other.rows) / max(size_of(self.names.rows), 1)
        for one, two in zip(ours, others, strict=True):
            for value, its in zip(one.ins, two.ins, strict=True):
                self._compare_literals(value.source, its.source.literal, ratio)
        for value, its in zip(self.names.root.outs, other.root.outs, strict=True):
            self._compare_literals(value.source, its.source.literal, ratio)
        self._find_unnamed(other)
        return True

    def _compare_literals(self, value: Value, its: Any, ratio: float) -> None:
        """Notes a literal that depends on the number of rows, and its degree if it is a power of that number."""
        if value.literal is its or id(value) in self._degrees:
            return
        if value.literal is None or its is None:
            self._degrees[id(value)] = None
            return
        if jnp.issubdtype(value.aval.dtype, jax.dtypes.prng_key):
            return
        x, y = np.asarray(value.literal), np.asarray(its)
        if x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
            return
        # Exactly, as twice the number is exact in any dtype: `n - 1` of many rows is nearly a power of `n`.
        degrees = [d for d in (-2, -1, 1, 2) if x.shape == y.shape == () and x and y == x * ratio**d]
        self._degrees[id(value)] = degrees[0] if degrees else None

    def _find_unnamed(self, other: Names) -> None:
        ours, others = live_steps(self.names.root)[0], live_steps(other.root)[0]
        uses: dict[int, list[Value]] = {}
        for value in (value for step in ours for value in step.ins if value.base is not None):
            uses.setdefault(id(value.base), []).append(value)
        for one, two in zip(ours, others, strict=True):
            for value, its in zip(one.outs, two.outs, strict=True):
                shapes = zip(value.aval.shape, its.aval.shape, strict=True)
                grows = [i for i, (size, its_size) in enumerate(shapes) if size != its_size]
                values = uses.get(id(value), []) if value.is_polymorphic else [value]
                if any(self._rows.isdisjoint(flat(each.dims[i])) for i in grows for each in values):
                    self.unnamed = self.unnamed or one

    # --- blocks and equations --------------------------------------------------------------------------------------------

    def _follow(self, block: Block, ins: Sequence[State]) -> list[State]:
        """Returns the states of a block's outputs, for those of its inputs."""
        self._states.update(zip(map(id, block.ins), ins, strict=True))
        for i, step in enumerate(block.steps):
            outs = self._of_step(step)
            if block is self.names.root and not any(state.is_trained for state in outs):
                if i in self.whole:
                    self._found.pop(id(step), None)
                    outs = [State(ROW if self._present(value) else FREE, is_whole=True) for value in step.outs]
                elif self._is_by_number(step) or (_most(outs) > SUM >= _most(map(self.of, step.ins))):
                    self._want(i)
            self._states.update(zip(map(id, step.outs), outs, strict=True))
        return list(map(self.of, block.outs))

    def _is_by_number(self, step: Step) -> bool:
        """Whether a step uses the number of rows with a value of the whole batch."""
        is_whole = any(self.of(value).is_whole for value in step.ins)
        return is_whole and any(id(value.source) in self._degrees for value in step.ins)

    def _want(self, i: int) -> None:
        """Notes that a step of the root is to be computed on the whole batch, if a part can take its own rows of it."""
        step = self.names.root.steps[i]
        if all(max(self._present(value).values(), default=0) <= 1 for value in step.outs) and self._has_rows_first(step):
            self._wanted.add(i)

    def _has_rows_first(self, step: Step) -> bool:
        """Whether the rows are the first factor of each dim that has them, as the part of a micro-batch is taken of it."""
        dims = [flat(dim) for value in step.outs for dim in value.dims]
        return all(dim[0] in self._rows for dim in dims if not self._rows.isdisjoint(dim)) and len(self._rows) <= 1

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
        touched = {how for how, dim in step.mixes if not self._rows.isdisjoint(flat(dim))}
        kinds = {state.kind for state in ins} - {FREE}
        if touched and not kinds and any(map(self._present, step.ins)):
            kinds = {ROW}  # a draw or a mask over rows
        is_trained, is_whole = any(s.is_trained for s in ins), any(s.is_whole for s in ins)
        degree = self._degree(step, ins, "sum" in touched)
        if degree is None:
            if (is_trained or kinds) and MIXED not in kinds:
                self._note("the number of rows", step, MIXED)
            return [State(MIXED, is_trained, is_whole=is_whole)] * len(step.outs)
        of = [self._combined(step, ins, kinds, touched, out) if kinds else FREE for out in step.outs]
        is_drawn = step.name.startswith(("random_", "rng_")) or any(s.is_drawn for s in ins)
        return [State(kind, is_trained, degree, is_whole, is_drawn) for kind in of]

    def _degree(self, step: Step, ins: Sequence[State], is_sum: bool) -> int | None:
        """Returns the degree of an equation's outputs; None if there is none."""
        name, degrees = step.name, [state.degree for state in ins]
        if name in _BILINEAR:
            return sum(degrees) + is_sum
        if name == "div":
            return degrees[0] - degrees[1]
        if name in ("integer_pow", "square"):
            return degrees[0] * step.eqn.params.get("y", 2)
        if name in _ADDS:
            terms = list(zip(ins, step.ins, strict=True))[1 if name == "select_n" else 0 :]
            of = {s.degree for s, v in terms if _is_term(s, v)}
            return max(of, default=0) + is_sum if len(of) < 2 else None
        if name in _LINEAR or name in _LINEAR_IN_FIRST:
            return degrees[0] + is_sum
        return 0 if not any(degrees) or any(s.kind in (SUM, STATISTIC) for s in ins) else None

    def _combined(self, step: Step, ins: Sequence[State], kinds: set[Kind], touched: set[str], out: Value) -> Kind:
        """Returns the kind of an output, for those of the operands that depend on rows."""
        if MIXED in kinds:
            return MIXED
        name, own = step.name, self._present(out)
        dependent = [value for value in step.ins if self.of(value).kind != FREE]
        is_linear = (
            name in _LINEAR
            or (name in _BILINEAR and len(dependent) == 1)
            or (name in _LINEAR_IN_FIRST and all(s.kind == FREE for s in ins[1:]))
            or (name in ("select_n", "scatter-add") and ins[name == "scatter-add"].kind == FREE)
        )
        if touched:
            if touched == {"sum"} and (kinds == {ROW} or (is_linear and kinds <= {SUM})):
                return self._note("pairs of rows", step, MIXED) if max(own.values(), default=0) > 1 else max(SUM, *kinds)
            if kinds == {ROW} and touched <= {"reduce", "sum"} and not own:
                return self._note("a reduction over rows", step, STATISTIC)
            return self._note(_SAID.get(min(touched), f"`{name}` along rows"), step, MIXED)
        if PREFIX in kinds:
            adds = name in _LINEAR or name in ("select_n", "dynamic_update_slice", "scatter-add")
            return PREFIX if adds and kinds <= {PREFIX, ROW} else self._note("a loop over rows", step, MIXED)
        if ROW in kinds:
            if kinds != {ROW}:
                return self._note("a row with a sum over rows", step, MIXED)
            if max(own.values(), default=0) > 1 or any(self._present(value) != own for value in dependent):
                return self._note("pairs of rows", step, MIXED)
            return ROW
        if own and any(self._present(value) != own for value in dependent):
            return self._note("a sum over rows repeated over rows", step, MIXED)
        if is_linear:
            return max(kinds)
        return STATISTIC if STATISTIC in kinds else self._note(f"`{name}` of a sum over rows", step, STATISTIC)

    def _present(self, value: Value) -> Counter[Atom]:
        return Counter(atom for atom in value.atoms if atom in self._rows)

    def _note(self, how: str, step: Step, kind: Kind) -> Kind:
        self._found.setdefault(id(step), (how, step))
        for value in step.ins:
            state = self.of(value)
            if state.kind not in (FREE, ROW) and not state.is_trained and id(value.source) in self._made:
                self._want(self._made[id(value.source)])
        return kind

    # --- loops and branches ----------------------------------------------------------------------------------------------

    def _of_cond(self, step: Step) -> list[State]:
        index, ins = self.of(step.ins[0]), list(map(self.of, step.ins[1:]))
        outs = [_joined(*of) for of in zip(*(self._follow(branch, ins) for branch in step.blocks), strict=True)]
        if index.kind in (FREE, ROW):
            return [_joined(out, State(index.kind, index.is_trained, out.degree)) for out in outs]
        kind = self._note("a branch chosen by a sum over rows", step, STATISTIC)
        return [State(MIXED if out.kind in (ROW, MIXED) else kind, True) for out in outs]

    def _of_scan(self, step: Step) -> list[State]:
        n_consts, n_carry = scan_counts(step.eqn)
        ins, body = list(map(self.of, step.ins)), step.blocks[0]
        consts, initial, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
        is_by_row = not self._rows.isdisjoint(flat(step.scanned))
        slots = body.ins[n_consts : n_consts + n_carry]
        kept = [slot.source is out.source for slot, out in zip(slots, body.outs[:n_carry], strict=True)]
        if is_by_row:  # a carry is a sum over the rows so far, or it mixes rows
            initial = [
                replace(state, kind=PREFIX) if state.kind != FREE and not keeps else state
                for state, keeps in zip(initial, kept, strict=True)
            ]
        outs = self._fixed(lambda carry: self._follow(body, [*consts, *carry, *xs]), initial, is_by_row)
        if not is_by_row:
            return outs
        carries = zip(slots, body.outs, outs, kept, strict=False)
        if not all(keeps or (state.kind != FREE and _only_adds(body, slot, out)) for slot, out, state, keeps in carries):
            # Such as a counter, a key that is split again and again, or a sum that another sum reads.
            kind = self._note("a loop over rows", step, MIXED)
            return [State(kind, any(s.is_trained for s in (*ins, *outs)))] * len(step.outs)
        # A carry that does not start at zero is a sum over rows and a term of another degree.
        starts = step.ins[n_consts : n_consts + n_carry]
        hides = [s.kind == PREFIX and not _is_zero(v, self.names) for s, v in zip(outs, starts, strict=False)]
        if (
            any(hides)
            or any(s.kind not in (FREE, ROW) for s in outs[n_carry:])
            or any(s.kind in (ROW, MIXED) for s in outs[:n_carry])
        ):
            self._note("a loop over rows", step, MIXED)
        carry = [
            State(MIXED, s.is_trained) if hidden else replace(s, kind=SUM, degree=s.degree + 1) if s.kind == PREFIX else s
            for s, hidden in zip(outs[:n_carry], hides, strict=True)
        ]
        return [*carry, *(s if s.kind in (FREE, ROW) else State(MIXED, s.is_trained) for s in outs[n_carry:])]

    def _fixed(
        self, follow: Callable[[Sequence[State]], list[State]], carry: Sequence[State], is_by_row: bool
    ) -> list[State]:
        """Returns the outputs of a loop's body at the fixed point of its carries."""
        while True:
            outs, new = follow(carry), []
            for before, out in zip(carry, outs, strict=False):
                if is_by_row and before.kind == PREFIX != out.kind:
                    new.append(State(MIXED, before.is_trained or out.is_trained))
                elif is_by_row and before.kind == FREE != out.kind:
                    new.append(replace(out, kind=PREFIX if out.kind in (ROW, PREFIX) else MIXED))
                else:
                    new.append(_joined(before, out))
            if new == list(carry):
                return [*new, *outs[len(new) :]]
            carry = new

    def _of_while(self, step: Step) -> list[State]:
        condition, body = step.blocks
        n_cond, n_body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
        ins = list(map(self.of, step.ins))
        consts = ins[n_cond : n_cond + n_body]
        carry = self._fixed(lambda carry: self._follow(body, [*consts, *carry]), ins[n_cond + n_body :], False)
        before = dict(self._found)
        runs = self._follow(condition, [*ins[:n_cond], *carry])[0]
        if runs.kind in (FREE, ROW):
            return [_joined(state, State(runs.kind, runs.is_trained, state.degree)) for state in carry]
        made = {id(value): each for each in body.steps for value in each.outs}

        def keeps(out: Value, slot: Value) -> bool:
            """Whether a row that has ended keeps its value, as in a loop under `vmap`."""
            by = made.get(id(out.source))
            if out.source is slot.source:
                return True
            is_select = by is not None and by.name == "select_n" and by.ins[1].source is slot
            return is_select and self.of(by.ins[0]).kind == ROW  # pyright: ignore[reportOptionalMemberAccess]

        if all(map(keeps, body.outs, body.ins[n_body:])):
            self._found = before
            return carry
        self._note("a loop that runs as long as any row needs", step, MIXED)
        return [State(MIXED, state.is_trained) for state in carry]


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


def _only_adds(body: Block, slot: Value, out: Value) -> bool:
    """Whether a loop does nothing with a carry but add to it."""
    value, has_added = slot.source, False
    while True:
        readers = [step for step in body.steps for each in step.ins if each.source is value]
        ends = [each for each in body.outs if each.source is value]
        if value is out.source:
            return has_added and not readers and len(ends) == 1
        is_sum = len(readers) == 1 and readers[0].name in ("add", "add_any")
        if len(readers) != 1 or ends or not (is_sum or readers[0].name == "convert_element_type"):
            return False
        value, has_added = readers[0].outs[0].source, has_added or is_sum


def _most(states: Iterable[State]) -> Kind:
    return max((state.kind for state in states), default=FREE)


def _is_term(state: State, value: Value) -> bool:
    """Whether a value counts in a sum. Others are taken for the zeros that sums start with."""
    return state.kind != FREE or any((state.is_trained, state.is_whole, state.is_drawn, state.degree, _is_nonzero(value)))


def _is_nonzero(value: Value) -> bool:
    literal = value.source.literal
    return literal is not None and np.shape(literal) == () and bool(literal)


def _is_zero(value: Value, names: Names) -> bool:
    """Whether a value is zeros, by the equation that makes it."""
    made = {id(out): step for step in steps_of(names.root) for out in step.outs}
    value = value.source
    while (step := made.get(id(value))) is not None and step.name in ("broadcast_in_dim", "convert_element_type", "reshape"):
        value = step.ins[0].source
    return value.literal is not None and not np.any(np.asarray(value.literal))


def _joined(*states: State) -> State:
    """Returns the state of a value that is one of several."""
    kinds = {state.kind for state in states} - {FREE}
    degrees = {s.degree for s in states if s.kind != FREE or s.is_trained or s.degree} or {0}
    kind = MIXED if (ROW in kinds and kinds != {ROW}) or len(degrees) > 1 else max(kinds, default=FREE)
    is_drawn = any(s.is_drawn for s in states)
    return State(kind, any(s.is_trained for s in states), max(degrees), any(s.is_whole for s in states), is_drawn)
