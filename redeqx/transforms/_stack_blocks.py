"""Stacking: computes equal consecutive blocks of a loss as one scan over their stacked weights.

A model with its blocks in a Python list is traced block by block. XLA then compiles each block separately, and saves all
residuals of each for the backward pass. As a scan the blocks compile once, and `RematLoops` decides what is saved.

The blocks are found in the trace, as a run of equations that repeats with a fixed period. Each repetition may read outputs
of the one before, values that all share, and values of its own (weights, keys), which are stacked. The model needs no
special form: a list, a tuple, fields of equal layers, or a Python loop over slices all work.

Cost: a copy of the stacked weights, in the dtype that they are used in, and of their gradients. In tracing, one more pass.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ..tracing import (
    Env,
    Rule,
    alike,
    as_array,
    insides,
    line_of,
    matmul_flops,
    normal,
    product_flops,
    run,
    same_array,
    shapes_in,
    variables,
)

MIN_BLOCKS = 4
_MAX_PERIODS = 64  # to try
_MAX_STARTS = 16  # to try for each run of equal equations


@dataclass(frozen=True)
class StackBlocks(Rule):
    """Computes runs of equal blocks, each with its own weights, as scans.

    **Arguments:**

    - `kinds`: for each weight, which are the function's first inputs, its sharding. Only weights of one kind are stacked.
    """

    kinds: Sequence[Any]

    def rewritten(self, closed: Any) -> Any:
        found = _Search(closed, self.kinds).runs()
        return _scanned(closed, found) if found else closed

    def found(self, closed: Any) -> list[tuple[int, str]]:
        """Returns, for each run of blocks, their number and the source line of their first product."""
        form = normal(closed)
        return [(blocks.n, blocks.line(form)) for blocks in _Search(form, self.kinds).runs()]


# The index of an equation in its block, and the index of an operand or output of that equation.
_Place = tuple[int, int]


class _Carry(NamedTuple):
    """An output, at `place`, of the block that is `depth` blocks before the reader."""

    place: _Place
    depth: int


class _Read(NamedTuple):
    """An operand of a block.

    **Arguments:**

    - `reader`: the index of the block that reads it.
    - `block`: the index of the block that computes it, or None if it is computed before all blocks.
    - `place`: the output of that block.
    """

    atom: Any
    reader: int
    block: int | None = None
    place: _Place = (-1, -1)


@dataclass(frozen=True)
class _Blocks:
    """A run of equal blocks: equations `start` to `start + n * period`, and the source of each operand.

    **Arguments:**

    - `carries`: the values that blocks read from earlier blocks, with the initial value of each.
    - `carried`: maps the place of an operand to its carry.
    - `stacked`: the values to stack: lists with one value for each block.
    - `sliced`: maps the place of an operand to its list in `stacked`.
    - `hoisted`: indices of equations that differ between blocks, such as slices with different starts. They are computed
        before the scan.
    - `outputs`: maps the place of each output that is read after the run to the blocks whose output is read.
    """

    start: int
    period: int
    n: int
    carries: dict[_Carry, Any]
    carried: dict[_Place, _Carry]
    stacked: list[list[Any]]
    sliced: dict[_Place, int]
    hoisted: frozenset[int]
    outputs: dict[_Place, list[int]]

    @property
    def end(self) -> int:
        return self.start + self.n * self.period

    def line(self, closed: Any) -> str:
        eqns = closed.jaxpr.eqns[self.start : self.start + self.period]
        first = next(eqn for eqn in eqns if _has_product(eqn))
        return line_of(first)


def _has_product(eqn: Any) -> bool:
    return product_flops(eqn) is not None or any(matmul_flops(inner.closed.jaxpr) for inner in insides(eqn))


# --- search ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Search:
    """The search for runs of blocks in one traced function."""

    closed: Any
    kinds: Sequence[Any]

    def __post_init__(self):
        jaxpr = self.closed.jaxpr
        self.eqns = jaxpr.eqns
        self.producer = Env(
            ((var, (i, out)) for i, eqn in enumerate(self.eqns) for out, var in enumerate(eqn.outvars)), literal=_no_value
        )
        self.last_read = Env()
        for i, eqn in enumerate(self.eqns):
            self.last_read.update((var, i) for var in variables(eqn.invars))
        self.last_read.update((var, len(self.eqns)) for var in variables(jaxpr.outvars))
        self.kind_of = self._kinds_of_values()
        ids: dict[Any, int] = {}
        self.forms = np.array([ids.setdefault(self._form(eqn), len(ids)) for eqn in self.eqns], np.int64)
        self.products = [i for i, eqn in enumerate(self.eqns) if _has_product(eqn)]
        self.consts = Env(zip(jaxpr.constvars, self.closed.consts, strict=True))
        self._alike: dict[tuple[int, int], bool] = {}

    def runs(self) -> list[_Blocks]:
        """Returns all runs of blocks, in the order of the equations."""
        if len(self.products) < MIN_BLOCKS:
            return []
        found, todo = [], [(0, len(self.eqns))]
        while todo:
            begin, end = todo.pop()
            blocks = next(filter(None, (self._blocks(*where) for where in self._candidates(begin, end))), None)
            if blocks is not None:
                found.append(blocks)
                todo += [(begin, blocks.start), (blocks.end, end)]
        return sorted(found, key=lambda blocks: blocks.start)

    def _candidates(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields candidate runs as (start, period, number of blocks).

        Runs that cover the most equations come first, then those with the fewest bytes passed from block to block.
        """
        forms = self.forms[begin:end]
        places: dict[int, list[int]] = defaultdict(list)
        for i in self.products:
            if begin <= i < end:
                places[int(self.forms[i])].append(i)
        distances = Counter(
            b - a for at in places.values() for n in (1, 2, 3, 4, 6, 8) for a, b in zip(at, at[n:], strict=False)
        )
        runs = []
        for period, _ in distances.most_common(_MAX_PERIODS):
            is_equal = np.concatenate([[False], forms[:-period] == forms[period:], [False]])
            edges = np.flatnonzero(np.diff(is_equal.astype(np.int8)))
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                if last - first >= (MIN_BLOCKS - 1) * period:
                    runs.append((int(last - first) + period, period, int(first) + begin))
        for length, period, first in sorted(runs, key=lambda found: (-found[0], found[1])):
            starts = [(-((length - i) // period), self._live[first + i + period], first + i) for i in range(period)]
            for minus_n, _, start in sorted(starts)[:_MAX_STARTS]:
                if -minus_n >= MIN_BLOCKS:
                    yield start, period, -minus_n

    @cached_property
    def _live(self) -> np.ndarray:
        """The live bytes before each equation: computed before it and read by it or later. Excludes the jaxpr's inputs."""
        change = np.zeros(len(self.eqns) + 2, np.int64)
        for var, (made, _) in self.producer.items():
            n_bytes = math.prod(getattr(var.aval, "shape", ())) * getattr(getattr(var.aval, "dtype", None), "itemsize", 1)
            change[made + 1] += n_bytes
            change[self.last_read.get(var, made) + 1] -= n_bytes
        return np.cumsum(change)

    def _kinds_of_values(self) -> Env:
        """Returns the kind of each weight, and of values that are computed from one weight only."""
        found = Env(zip(self.closed.jaxpr.invars, self.kinds, strict=False), literal=_no_value)
        for eqn in self.eqns:
            operands = variables(eqn.invars)
            if len(operands) == 1 and operands[0] in found:
                found.update(dict.fromkeys(eqn.outvars, found[operands[0]]))
        return found

    def _form(self, eqn: Any) -> Any:
        """Returns a key that corresponding equations of equal blocks share."""
        if eqn.effects:
            return object()
        kinds = [self.kind_of.get(atom) for atom in eqn.invars]
        return eqn.primitive.name, tuple(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)), tuple(kinds)

    def _is_alike(self, i: int, j: int) -> bool:
        if (i, j) not in self._alike:
            self._alike[i, j] = alike(self.eqns[i], self.eqns[j])
        return self._alike[i, j]

    def _blocks(self, start: int, period: int, n: int) -> _Blocks | None:
        """Returns the run of blocks at a candidate, or None unless each block reads its operands from the same places."""
        different = {j for j in range(period) for i in range(1, n) if not self._is_alike(start + j, start + i * period + j)}
        reads = {
            (j, k): [self._read(atom, start, period, i) for i, atom in enumerate(atoms)]
            for j in range(period)
            for k, atoms in enumerate(zip(*(self.eqns[start + i * period + j].invars for i in range(n)), strict=True))
        }
        hoisted = self._hoisted(different, reads)
        if hoisted is None:
            return None
        carries: dict[_Carry, Any] = {}
        carried, sliced, stacked = {}, {}, []
        lists: dict[tuple[int, ...], int] = {}
        has_weights = False
        for (j, k), of_blocks in reads.items():
            if j in hoisted:
                continue
            depth, place = _depth(of_blocks), of_blocks[-1].place
            if depth == 0 and place[0] not in hoisted:
                continue
            if depth:
                if place[0] in hoisted:
                    return None
                initial = {_Carry(place, depth - i): of_blocks[i].atom for i in range(depth)}
                if any(carries.setdefault(carry, atom) is not atom for carry, atom in initial.items()):
                    return None
                carried[j, k] = _Carry(place, depth)
                continue
            if depth is None and any(each.block is not None for each in of_blocks):
                return None
            atoms = [each.atom for each in of_blocks]
            if all(self._is_same(atoms[0], atom) for atom in atoms[1:]):
                continue
            kinds = list(map(self.kind_of.get, variables(atoms)))
            if any(kind != kinds[0] for kind in kinds):
                return None
            has_weights |= bool(kinds) and kinds[0] is not None
            key = tuple(map(id, atoms))
            if key not in lists:
                lists[key] = len(stacked)
                stacked.append(atoms)
            sliced[j, k] = lists[key]
        if not has_weights or not any(start <= i < start + period for i in self.products):
            return None
        outputs = self._outputs(start, period, n, hoisted)
        return _Blocks(start, period, n, carries, carried, stacked, sliced, frozenset(hoisted), outputs)

    def _read(self, atom: Any, start: int, period: int, block: int) -> "_Read":
        """Finds where a block's operand is computed."""
        made, out = self.producer.get(atom) or (-1, 0)
        if made < start:
            return _Read(atom, block)
        by, j = divmod(made - start, period)
        return _Read(atom, block, by, (j, out))

    def _hoisted(self, different: set[int], reads: dict[_Place, list[_Read]]) -> set[int] | None:
        """Returns the equations that differ between blocks and those that they depend on.

        Returns None if one of these reads an output of another block.
        """
        operands = defaultdict(list)
        for (j, _), of_blocks in reads.items():
            operands[j].append(of_blocks)
        found, todo = set(), list(different)
        while todo:
            j = todo.pop()
            if j in found:
                continue
            found.add(j)
            for of_blocks in operands[j]:
                if any(each.block not in (None, each.reader) for each in of_blocks):
                    return None
                todo += [each.place[0] for each in of_blocks if each.block is not None]
        return found

    def _is_same(self, a: Any, b: Any) -> bool:
        """Whether two operands are the same value."""
        is_known = all(var in self.consts for var in variables([a, b]))
        return a is b or (is_known and same_array(*self.consts.read([a, b])))

    def _outputs(self, start: int, period: int, n: int, hoisted: set[int]) -> dict[tuple[int, int], list[int]]:
        """Maps the place of each output that is read after the last block to the blocks whose output is read."""
        end, found = start + n * period, defaultdict(list)
        for i in range(n):
            for j in range(period):
                for out, var in enumerate(self.eqns[start + i * period + j].outvars):
                    if j not in hoisted and self.last_read.get(var, -1) >= end:
                        found[j, out].append(i)
        return dict(found)


def _no_value(literal: Any) -> None:
    del literal


def _depth(of_blocks: Sequence[_Read]) -> int | None:
    """Returns by how many blocks before the reader an operand is computed, at the same place of each: 0 by its own block.

    The first blocks read initial values. Returns None for any other operand.
    """
    depth = next((i for i, each in enumerate(of_blocks) if each.block is not None), len(of_blocks))
    place = of_blocks[-1].place
    is_same = all(each.block == each.reader - depth and each.place == place for each in of_blocks[depth:])
    return depth if depth < len(of_blocks) and is_same else None


# --- computation -----------------------------------------------------------------------------------------------------


def _scanned(closed: Any, runs: Sequence[_Blocks]) -> Any:
    """Returns the closed jaxpr with each run of blocks as a scan. Its constants stay constants."""
    jaxpr, starts = closed.jaxpr, {blocks.start: blocks for blocks in runs}
    n_consts = len(jaxpr.constvars)

    def compute(*args: Any) -> list[Any]:
        env, i = Env(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True)), 0
        while i < len(jaxpr.eqns):
            if i in starts:
                env.update(_scan(starts[i], jaxpr.eqns, env))
                i = starts[i].end
                continue
            eqn = jaxpr.eqns[i]
            env.update(zip(eqn.outvars, run(eqn, env.read(eqn.invars)), strict=True))
            i += 1
        return [as_array(env[atom], atom) for atom in jaxpr.outvars]

    consts = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.constvars]
    new = jax.make_jaxpr(compute)(*consts, *shapes_in(closed))
    constvars = [*new.jaxpr.constvars, *new.jaxpr.invars[:n_consts]]
    changed = new.jaxpr.replace(constvars=constvars, invars=new.jaxpr.invars[n_consts:], debug_info=jaxpr.debug_info)
    return jex.ClosedJaxpr(changed, [*new.consts, *closed.consts])


def _scan(blocks: _Blocks, eqns: Sequence[Any], env: Env) -> dict[Any, Any]:
    """Computes the blocks as a scan. Returns the values that equations after the blocks read."""
    known = Env(env.items())

    def value(atom: Any) -> Any:
        return as_array(known[atom], atom)

    def of_block(i: int) -> Sequence[Any]:
        return eqns[blocks.start + i * blocks.period : blocks.start + (i + 1) * blocks.period]

    for i in range(blocks.n):
        for j in sorted(blocks.hoisted):
            eqn = of_block(i)[j]
            known.update(zip(eqn.outvars, run(eqn, known.read(eqn.invars)), strict=True))
    xs = [jnp.stack([value(atom) for atom in atoms]) for atoms in blocks.stacked]
    first = of_block(0)
    last = blocks.n - 1
    only_last = [_Carry(place, 1) for place, read_of in blocks.outputs.items() if read_of == [last]]
    zeros = {carry: jnp.zeros(var.aval.shape, var.aval.dtype) for carry in only_last for var in [_made(first, carry.place)]}
    initial = {**zeros, **{carry: value(atom) for carry, atom in blocks.carries.items()}}
    several = [place for place, read_of in blocks.outputs.items() if read_of != [last]]

    def body(values: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        carry, within, made = dict(zip(initial, values, strict=True)), Env(known.items()), dict[_Place, Any]()
        for j, eqn in enumerate(first):
            if j in blocks.hoisted:
                continue
            ins = [
                carry[blocks.carried[j, k]]
                if (j, k) in blocks.carried
                else slices[blocks.sliced[j, k]]
                if (j, k) in blocks.sliced
                else within[atom]
                for k, atom in enumerate(eqn.invars)
            ]
            outs = run(eqn, ins)
            within.update(zip(eqn.outvars, outs, strict=True))
            made.update({(j, out): value for out, value in enumerate(outs)})
        after = [made[each.place] if each.depth == 1 else carry[_Carry(each.place, each.depth - 1)] for each in carry]
        return after, [made[place] for place in several]

    values, stacks = jax.lax.scan(body, list(initial.values()), xs, length=blocks.n)
    after = dict(zip(initial, values, strict=True))
    found = {_made(of_block(last), each.place): after[each] for each in only_last}
    for place, stack in zip(several, stacks, strict=True):
        found.update({_made(of_block(i), place): stack[i] for i in blocks.outputs[place]})
    return {**found, **{var: known[var] for i in range(blocks.n) for j in blocks.hoisted for var in of_block(i)[j].outvars}}


def _made(eqns: Sequence[Any], place: _Place) -> Any:
    return eqns[place[0]].outvars[place[1]]
