"""Stacking: computes equal consecutive blocks of a loss as one scan over their stacked weights.

A model with its blocks in a Python list is traced block by block. XLA then compiles each block separately, and saves all
residuals of each for the backward pass. As a scan the blocks compile once, and `RematLoops` decides what is saved.

The blocks are found in the trace, as a run of equations that repeats with a fixed period. Each repetition may read outputs
of the one before, values that all share, and values of its own (weights, keys), which are stacked. The model needs no
special form: a list, a tuple, fields of equal layers, or a Python loop over slices all work.

Cost: a copy of the stacked weights, in the dtype that they are used in, and of their gradients. In tracing, one more pass.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ..tracing import (
    Env,
    Rule,
    alike,
    as_array,
    evaluate,
    line_of,
    matmul_flops,
    n_bytes,
    normal,
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
    """Computes runs of equal blocks, each with its own weights, as scans. `kinds` has the sharding of each weight, which are
    the function's first inputs. Only weights of one kind are stacked."""

    kinds: Sequence[Any]

    def rewritten(self, closed: Any) -> Any:
        runs = _Search(closed, self.kinds).runs()
        if not runs:
            return closed
        jaxpr, n_consts = closed.jaxpr, len(closed.jaxpr.constvars)

        def compute(*args: Any) -> list[Any]:
            env, end = Env(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True)), 0
            for blocks in runs:
                evaluate(jaxpr.eqns[end : blocks.start], env)
                env.update(_scan(blocks, jaxpr.eqns, env))
                end = blocks.end
            evaluate(jaxpr.eqns[end:], env)
            return [as_array(env[atom], atom) for atom in jaxpr.outvars]

        consts = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.constvars]
        new = jax.make_jaxpr(compute)(*consts, *shapes_in(closed))
        constvars = [*new.jaxpr.constvars, *new.jaxpr.invars[:n_consts]]  # constants stay constants
        changed = new.jaxpr.replace(constvars=constvars, invars=new.jaxpr.invars[n_consts:], debug_info=jaxpr.debug_info)
        return jex.ClosedJaxpr(changed, [*new.consts, *closed.consts])

    def found(self, closed: Any) -> list[tuple[int, str]]:
        """Returns, for each run of blocks, their number and the source line of their first product."""
        form = normal(closed)
        return [(blocks.n, blocks.line(form)) for blocks in _Search(form, self.kinds).runs()]


# The index of an equation in its block, and the index of an operand or output of that equation.
_Place = tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """A run of equal blocks: equations `start` to `start + n * period`, and the source of each operand."""

    start: int
    period: int
    n: int
    carries: dict[_Place, Any]  # the outputs that each block reads from the one before, with what the first reads instead
    carried: dict[_Place, _Place]  # by the place of an operand, the output of the block before that it is
    stacked: list[Sequence[Any]]  # the values to stack: lists with one value for each block
    sliced: dict[_Place, int]  # by the place of an operand, its list in `stacked`
    hoisted: set[int]  # equations that differ, such as slices with different starts, which are computed before the scan
    outputs: dict[_Place, list[int]]  # by each output that is read after the run, the blocks whose output is read

    @property
    def end(self) -> int:
        return self.start + self.n * self.period

    def line(self, closed: Any) -> str:
        eqns = closed.jaxpr.eqns[self.start : self.start + self.period]
        return line_of(next(eqn for eqn in eqns if matmul_flops(eqn)))


# --- search ----------------------------------------------------------------------------------------------------------


class _Search:
    """The search for runs of blocks in one traced function, in normal form."""

    def __init__(self, closed: Any, kinds: Sequence[Any]):
        jaxpr = closed.jaxpr
        self.eqns = jaxpr.eqns
        self.producer = Env(
            ((var, (i, out)) for i, eqn in enumerate(self.eqns) for out, var in enumerate(eqn.outvars)), literal=_no_value
        )
        # The index of the last equation that reads each variable; their number for outputs.
        last_read = {var: i for i, eqn in enumerate(self.eqns) for var in variables(eqn.invars)}
        self.last_read: dict[Any, Any] = last_read | dict.fromkeys(variables(jaxpr.outvars), len(self.eqns))
        # The kind of each weight, and of values that are computed from one weight only.
        self.kind_of = Env(zip(jaxpr.invars, kinds, strict=False), literal=_no_value)
        for eqn in self.eqns:
            operands = variables(eqn.invars)
            if len(operands) == 1 and operands[0] in self.kind_of:
                self.kind_of.update(dict.fromkeys(eqn.outvars, self.kind_of[operands[0]]))
        ids: dict[Any, int] = {}
        self.forms = np.array([ids.setdefault(self._form(eqn), len(ids)) for eqn in self.eqns], np.int64)
        self.products = [i for i, eqn in enumerate(self.eqns) if matmul_flops(eqn)]
        self.consts = Env(zip(jaxpr.constvars, closed.consts, strict=True))
        self.alike = cache(alike)

    def runs(self) -> list[Blocks]:
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
        """Yields candidate runs as (start, period, number of blocks). Runs that cover the most equations come first, then
        those with the fewest bytes passed from block to block."""
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
            change[made + 1] += n_bytes(var)
            change[self.last_read.get(var, made) + 1] -= n_bytes(var)
        return np.cumsum(change)

    def _form(self, eqn: Any) -> Any:
        """Returns a key that corresponding equations of equal blocks share."""
        if eqn.effects:
            return object()
        kinds = [self.kind_of.get(atom) for atom in eqn.invars]
        return eqn.primitive.name, tuple(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)), tuple(kinds)

    def _blocks(self, start: int, period: int, n: int) -> Blocks | None:
        """Returns the run of blocks at a candidate, or None unless each block reads its operands from the same places."""
        columns = list(zip(*(self.eqns[start + i * period : start + (i + 1) * period] for i in range(n)), strict=True))
        reads = {
            (j, k): atoms
            for j, eqns in enumerate(columns)
            for k, atoms in enumerate(zip(*(eqn.invars for eqn in eqns), strict=True))
        }
        sources = {place: [self._source(atom, start, period) for atom in atoms] for place, atoms in reads.items()}
        different = [j for j, eqns in enumerate(columns) if not all(self.alike(eqns[0], eqn) for eqn in eqns[1:])]
        hoisted = _with_dependencies(different, sources)
        if hoisted is None:
            return None
        carries: dict[_Place, Any] = {}
        carried, sliced, stacked = {}, {}, []
        lists: dict[tuple[int, ...], int] = {}
        has_weights = False
        for (j, k), atoms in reads.items():
            if j in hoisted:
                continue
            first, *others = sources[j, k]
            place = (-1, -1) if others[0] is None else others[0][1]
            if first is None and others == [(i, place) for i in range(n - 1)] and place[0] not in hoisted:
                if carries.setdefault(place, atoms[0]) is not atoms[0]:
                    return None
                carried[j, k] = place
                continue
            if [first, *others] == [(i, place) for i in range(n)]:
                if place[0] not in hoisted:
                    continue
            elif any(source is not None for source in sources[j, k]):
                return None
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
        end, outputs = start + n * period, defaultdict(list)
        for i in range(n):
            for j, eqns in enumerate(columns):
                for out, var in enumerate(eqns[i].outvars):
                    if j not in hoisted and self.last_read.get(var, -1) >= end:
                        outputs[j, out].append(i)
        return Blocks(start, period, n, carries, carried, stacked, sliced, hoisted, outputs)

    def _source(self, atom: Any, start: int, period: int) -> tuple[int, _Place] | None:
        """Returns the block that computes a value, and the place of its output; None for a value from before the blocks."""
        made, out = self.producer.get(atom) or (-1, 0)
        if made < start:
            return None
        block, j = divmod(made - start, period)
        return block, (j, out)

    def _is_same(self, a: Any, b: Any) -> bool:
        """Whether two operands are the same value."""
        is_known = all(var in self.consts for var in variables([a, b]))
        return a is b or (is_known and same_array(*self.consts.read([a, b])))


def _with_dependencies(different: Sequence[int], sources: Mapping[_Place, Sequence[Any]]) -> set[int] | None:
    """Returns these equations of a block and those that they depend on; None if one reads an output of another block."""
    found, todo = set[int](), [*different]
    while todo:
        j = todo.pop()
        if j in found:
            continue
        found.add(j)
        for i, source in (each for place, of in sources.items() if place[0] == j for each in enumerate(of)):
            if source is not None:
                block, (made, _) = source
                if block != i:
                    return None
                todo.append(made)
    return found


def _no_value(literal: Any) -> None:
    del literal


# --- computation -----------------------------------------------------------------------------------------------------


def _scan(blocks: Blocks, eqns: Sequence[Any], env: Env) -> dict[Any, Any]:
    """Computes the blocks as a scan. Returns the values that equations after the blocks read."""
    known = Env(env.items())

    def value(atom: Any) -> Any:
        return as_array(known[atom], atom)

    def of_block(i: int) -> Sequence[Any]:
        return eqns[blocks.start + i * blocks.period : blocks.start + (i + 1) * blocks.period]

    evaluate((of_block(i)[j] for i in range(blocks.n) for j in sorted(blocks.hoisted)), known)
    xs = [jnp.stack([value(atom) for atom in atoms]) for atoms in blocks.stacked]
    first = of_block(0)
    last = blocks.n - 1
    only_last = [place for place, read_of in blocks.outputs.items() if read_of == [last]]
    zeros = {place: jnp.zeros(var.aval.shape, var.aval.dtype) for place in only_last for var in [_made(first, place)]}
    initial = {**zeros, **{place: value(atom) for place, atom in blocks.carries.items()}}
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
        return [made[place] for place in carry], [made[place] for place in several]

    values, stacks = jax.lax.scan(body, list(initial.values()), xs, length=blocks.n)
    after = dict(zip(initial, values, strict=True))
    found = {_made(of_block(last), place): after[place] for place in only_last}
    for place, stack in zip(several, stacks, strict=True):
        found.update({_made(of_block(i), place): stack[i] for i in blocks.outputs[place]})
    return {**found, **{var: known[var] for i in range(blocks.n) for j in blocks.hoisted for var in of_block(i)[j].outvars}}


def _made(eqns: Sequence[Any], place: _Place) -> Any:
    return eqns[place[0]].outvars[place[1]]
