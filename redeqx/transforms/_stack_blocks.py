"""Stacking: equal blocks that a loss computes one after the other, computed as one scan over their stacked weights.

A model that keeps its blocks in a Python list is traced block by block. XLA then compiles every block by itself, and keeps
of every block whatever its backward pass reads. As one scan the blocks compile once, and `RematLoops` decides what is kept.

The blocks are found in the trace: a run of equations that repeats with a fixed period, where each repetition reads what the
one before made, what all share, and values of its own (weights, keys), which are stacked. Nothing is asked of the model: a
list, a tuple, fields of equal layers or a Python loop over slices are all the same.

Cost: a copy of the stacked weights, in the dtype that they are used in, and of their gradients; in tracing, one more pass.
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

from ..compiled import line_of
from ..tracing import Rule, alike, equations, inlined, insides, product_flops, run, same_array, shapes_in, value_of

LEAST = 4  # fewer blocks are left as they are
_PERIODS = 64  # periods that are tried at most, and places to begin for each
_BEGINNINGS = 16


@dataclass(frozen=True)
class StackBlocks(Rule):
    """Computes runs of equal blocks with weights of their own as scans.

    **Arguments:**

    - `kinds`: for each of the function's first inputs, which are the weights, what those must have in common that are
        stacked: how they are sharded.
    """

    kinds: Sequence[Any]

    def rewritten(self, closed: Any) -> Any:
        flat = inlined(closed)
        found = _Search(flat, self.kinds).runs()
        return _scanned(flat, found) if found else closed

    def found(self, closed: Any) -> list[tuple[int, str]]:
        """Of each run of blocks how many there are, and the line of code of their first product."""
        flat = inlined(closed)
        return [(blocks.n, blocks.line(flat)) for blocks in _Search(flat, self.kinds).runs()]


# The number of an equation in its block, and of an operand or output of it.
_Place = tuple[int, int]


class _Carry(NamedTuple):
    """What the block `depth` before made, at a place of outputs."""

    place: _Place
    depth: int


class _Read(NamedTuple):
    """An operand of a block, the reader, and which block made it, where; none made what comes from before all blocks."""

    atom: Any
    reader: int
    block: int | None = None
    place: _Place = (-1, -1)


@dataclass(frozen=True)
class _Blocks:
    """A run of equal blocks: equations `start` to `start + n * period`, and where each operand comes from.

    **Arguments:**

    - `carries`: what blocks read of those before them, with the value from before all blocks that it begins with.
    - `carried`: for places of operands, which carry they are.
    - `stacked`: values that each block has of its own, one list for each.
    - `sliced`: for places of operands, which list they are of.
    - `hoisted`: equations that differ from block to block and are computed before, as slices at different places.
    - `outputs`: places of outputs that are read after the blocks: of the last block alone, or of several.
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
    inside = [each for inner in insides(eqn) for each in equations(inner.closed)]
    return any(product_flops(each) is not None for each in (eqn, *inside))


# --- finding ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Search:
    """The search for runs of blocks in one traced function."""

    closed: Any
    kinds: Sequence[Any]

    def __post_init__(self):
        jaxpr = self.closed.jaxpr
        self.eqns = jaxpr.eqns
        self.made_at = {var: (i, out) for i, eqn in enumerate(self.eqns) for out, var in enumerate(eqn.outvars)}
        self.last_read: dict[Any, int] = {}
        for i, eqn in enumerate(self.eqns):
            self.last_read.update((atom, i) for atom in eqn.invars if not isinstance(atom, jex.Literal))
        self.last_read.update((atom, len(self.eqns)) for atom in jaxpr.outvars if not isinstance(atom, jex.Literal))
        self.kind_of = self._kinds_of_values()
        numbers: dict[Any, int] = {}
        self.forms = np.array([numbers.setdefault(self._form(eqn), len(numbers)) for eqn in self.eqns], np.int64)
        self.products = [i for i, eqn in enumerate(self.eqns) if _has_product(eqn)]
        self.consts = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        self._alike: dict[tuple[int, int], bool] = {}

    def runs(self) -> list[_Blocks]:
        """All runs of blocks, in the order of the equations."""
        if len(self.products) < LEAST:
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
        """Where a run may start, its period and its number of blocks: what covers most equations first, then what has the
        fewest bytes to hand from block to block."""
        forms = self.forms[begin:end]
        places: dict[int, list[int]] = defaultdict(list)
        for i in self.products:
            if begin <= i < end:
                places[int(self.forms[i])].append(i)
        distances = Counter(
            b - a for of in places.values() for n in (1, 2, 3, 4, 6, 8) for a, b in zip(of, of[n:], strict=False)
        )
        runs = []
        for period, _ in distances.most_common(_PERIODS):
            is_equal = np.concatenate([[False], forms[:-period] == forms[period:], [False]])
            edges = np.flatnonzero(np.diff(is_equal.astype(np.int8)))
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                if last - first >= (LEAST - 1) * period:
                    runs.append((int(last - first) + period, period, int(first) + begin))
        for length, period, first in sorted(runs, key=lambda found: (-found[0], found[1])):
            starts = [(-((length - i) // period), self._live[first + i + period], first + i) for i in range(period)]
            for minus_n, _, start in sorted(starts)[:_BEGINNINGS]:
                if -minus_n >= LEAST:
                    yield start, period, -minus_n

    @cached_property
    def _live(self) -> np.ndarray:
        """Bytes that are made before each equation and read from it on; weights and other inputs do not count."""
        change = np.zeros(len(self.eqns) + 2, np.int64)
        for var, (made, _) in self.made_at.items():
            n_bytes = math.prod(getattr(var.aval, "shape", ())) * getattr(getattr(var.aval, "dtype", None), "itemsize", 1)
            change[made + 1] += n_bytes
            change[self.last_read.get(var, made) + 1] -= n_bytes
        return np.cumsum(change)

    def _kinds_of_values(self) -> dict[Any, Any]:
        """The kind of each weight, and of what equations make of one weight alone."""
        found: dict[Any, Any] = dict(zip(self.closed.jaxpr.invars, self.kinds, strict=False))
        for eqn in self.eqns:
            of = {id(atom): atom for atom in eqn.invars if not isinstance(atom, jex.Literal)}.values()
            if len(of) == 1 and (atom := next(iter(of))) in found:
                found.update(dict.fromkeys(eqn.outvars, found[atom]))
        return found

    def _form(self, eqn: Any) -> Any:
        """What equations of equal blocks have in common at least."""
        if eqn.effects:
            return object()
        kinds = [None if isinstance(atom, jex.Literal) else self.kind_of.get(atom) for atom in eqn.invars]
        return eqn.primitive.name, tuple(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars)), tuple(kinds)

    def _is_alike(self, i: int, j: int) -> bool:
        if (i, j) not in self._alike:
            self._alike[i, j] = alike(self.eqns[i], self.eqns[j])
        return self._alike[i, j]

    def _blocks(self, start: int, period: int, n: int) -> _Blocks | None:
        """The run of blocks there, if each reads its own values from the same places."""
        own = {j for j in range(period) for i in range(1, n) if not self._is_alike(start + j, start + i * period + j)}
        reads = {
            (j, k): [self._read(atom, start, period, i) for i, atom in enumerate(atoms)]
            for j in range(period)
            for k, atoms in enumerate(zip(*(self.eqns[start + i * period + j].invars for i in range(n)), strict=True))
        }
        hoisted = self._hoisted(own, reads)
        if hoisted is None:
            return None
        carries: dict[_Carry, Any] = {}
        carried, sliced, stacked = {}, {}, []
        lists: dict[tuple[int, ...], int] = {}
        has_weights = False
        for (j, k), of in reads.items():
            if j in hoisted:
                continue
            if (made := _same_place(of)) is not None and made[0] not in hoisted:
                continue
            if (depth := _blocks_back(of)) is not None:
                place = of[-1].place
                if place[0] in hoisted:
                    return None
                begins = {_Carry(place, depth - i): of[i].atom for i in range(depth)}
                if any(carries.setdefault(carry, atom) is not atom for carry, atom in begins.items()):
                    return None
                carried[j, k] = _Carry(place, depth)
                continue
            if made is None and any(each.block is not None for each in of):
                return None
            atoms = [each.atom for each in of]
            if all(self._is_one(atoms[0], atom) for atom in atoms[1:]):
                continue
            kinds = [self.kind_of.get(atom) for atom in atoms if not isinstance(atom, jex.Literal)]
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
        """Where a block's operand comes from."""
        if isinstance(atom, jex.Literal) or atom not in self.made_at or self.made_at[atom][0] < start:
            return _Read(atom, block)
        made, out = self.made_at[atom]
        of, j = divmod(made - start, period)
        return _Read(atom, block, of, (j, out))

    def _hoisted(self, own: set[int], reads: dict[_Place, list[_Read]]) -> set[int] | None:
        """Equations that differ from block to block, and those that they read; None where a block before makes what they
        read."""
        operands = defaultdict(list)
        for (j, _), of in reads.items():
            operands[j].append(of)
        found, todo = set(), list(own)
        while todo:
            j = todo.pop()
            if j in found:
                continue
            found.add(j)
            for of in operands[j]:
                if any(each.block not in (None, each.reader) for each in of):
                    return None
                todo += [each.place[0] for each in of if each.block is not None]
        return found

    def _is_one(self, a: Any, b: Any) -> bool:
        """Whether two operands are one value."""
        if a is b:
            return True
        if isinstance(a, jex.Literal) and isinstance(b, jex.Literal):
            return same_array(a.val, b.val)
        return a in self.consts and b in self.consts and same_array(self.consts[a], self.consts[b])

    def _outputs(self, start: int, period: int, n: int, hoisted: set[int]) -> dict[tuple[int, int], list[int]]:
        """The blocks whose outputs are read after the last, by the outputs' places."""
        end, found = start + n * period, defaultdict(list)
        for i in range(n):
            for j in range(period):
                for out, var in enumerate(self.eqns[start + i * period + j].outvars):
                    if j not in hoisted and self.last_read.get(var, -1) >= end:
                        found[j, out].append(i)
        return dict(found)


def _same_place(of: Sequence[_Read]) -> _Place | None:
    """The place where each block makes what it reads itself; None where they do not."""
    place = of[0].place
    return place if all(each.block == each.reader and each.place == place for each in of) else None


def _blocks_back(of: Sequence[_Read]) -> int | None:
    """How many blocks before itself each block reads, at one place, and the first blocks what is from before all; None where
    they do not."""
    depth = next((i for i, each in enumerate(of) if each.block is not None), len(of))
    is_one = all(each.block == each.reader - depth and each.place == of[-1].place for each in of[depth:])
    return depth if 0 < depth < len(of) and is_one else None


# --- computing -------------------------------------------------------------------------------------------------------


def _scanned(closed: Any, runs: Sequence[_Blocks]) -> Any:
    """The closed jaxpr with each run of blocks as a scan. Its constants stay constants."""
    jaxpr, starts = closed.jaxpr, {blocks.start: blocks for blocks in runs}
    n_consts = len(jaxpr.constvars)

    def compute(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(atom: Any) -> Any:
            return _operand(atom, env)

        i = 0
        while i < len(jaxpr.eqns):
            if i in starts:
                env.update(_scan(starts[i], jaxpr.eqns, env))
                i = starts[i].end
                continue
            eqn = jaxpr.eqns[i]
            env.update(zip(eqn.outvars, run(eqn, list(map(read, eqn.invars))), strict=True))
            i += 1
        return [value_of(atom, read(atom)) for atom in jaxpr.outvars]

    consts = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.constvars]
    made = jax.make_jaxpr(compute)(*consts, *shapes_in(closed))
    constvars = [*made.jaxpr.constvars, *made.jaxpr.invars[:n_consts]]
    changed = made.jaxpr.replace(constvars=constvars, invars=made.jaxpr.invars[n_consts:], debug_info=jaxpr.debug_info)
    return jex.ClosedJaxpr(changed, [*made.consts, *closed.consts])


def _scan(blocks: _Blocks, eqns: Sequence[Any], env: dict[Any, Any]) -> dict[Any, Any]:
    """What equations after the blocks read of them."""
    known = dict(env)

    def value(atom: Any) -> Any:
        return value_of(atom, _operand(atom, known))

    def of_block(i: int) -> Sequence[Any]:
        return eqns[blocks.start + i * blocks.period : blocks.start + (i + 1) * blocks.period]

    for i in range(blocks.n):
        for j in sorted(blocks.hoisted):
            eqn = of_block(i)[j]
            known.update(zip(eqn.outvars, run(eqn, [_operand(atom, known) for atom in eqn.invars]), strict=True))
    xs = [jnp.stack([value(atom) for atom in atoms]) for atoms in blocks.stacked]
    first = of_block(0)
    last = blocks.n - 1
    only_last = [_Carry(place, 1) for place, of in blocks.outputs.items() if of == [last]]
    zeros = {carry: jnp.zeros(var.aval.shape, var.aval.dtype) for carry in only_last for var in [_made(first, carry.place)]}
    begin = {**zeros, **{carry: value(atom) for carry, atom in blocks.carries.items()}}
    several = [place for place, of in blocks.outputs.items() if of != [last]]

    def body(carry: dict[_Carry, Any], slices: Sequence[Any]) -> tuple[dict[_Carry, Any], list[Any]]:
        within, made = dict(known), dict[_Place, Any]()
        for j, eqn in enumerate(first):
            if j in blocks.hoisted:
                continue
            invars, ins = list(eqn.invars), []
            for k, atom in enumerate(eqn.invars):
                if (j, k) in blocks.carried:
                    ins.append(carry[blocks.carried[j, k]])
                elif (j, k) in blocks.sliced:
                    ins.append(slices[blocks.sliced[j, k]])
                else:
                    ins.append(_operand(atom, within))
                    continue
                invars[k] = jex.Var(atom.aval)  # where the first block has a literal
            outs = run(eqn.replace(invars=invars), ins)
            within.update(zip(eqn.outvars, outs, strict=True))
            made.update({(j, out): value for out, value in enumerate(outs)})
        after = {of: made[of.place] if of.depth == 1 else carry[_Carry(of.place, of.depth - 1)] for of in carry}
        return after, [made[place] for place in several]

    after, stacks = _scan_over(body, begin, xs, blocks.n)
    found = {_made(of_block(last), of.place): after[of] for of in only_last}
    for place, stack in zip(several, stacks, strict=True):
        found.update({_made(of_block(i), place): stack[i] for i in blocks.outputs[place]})
    return {**found, **{var: known[var] for i in range(blocks.n) for j in blocks.hoisted for var in of_block(i)[j].outvars}}


def _scan_over(body: Any, begin: dict[_Carry, Any], xs: Any, n: int) -> tuple[dict[_Carry, Any], list[Any]]:
    """`jax.lax.scan` with carries by name."""
    names = list(begin)

    def of_values(values: Sequence[Any], slices: Any) -> Any:
        after, made = body(dict(zip(names, values, strict=True)), slices)
        return [after[name] for name in names], made

    values, made = jax.lax.scan(of_values, [begin[name] for name in names], xs, length=n)
    return dict(zip(names, values, strict=True)), made


def _made(eqns: Sequence[Any], place: _Place) -> Any:
    return eqns[place[0]].outvars[place[1]]


def _operand(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]
