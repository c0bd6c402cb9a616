"""The memory that a step needs, estimated from its trace, before anything compiles.

Walks the equations in their order, and sums the values that are live: of each on one device, as the shardings of the inputs
and the constraints in the trace split it. As in XLA, there is no memory for values that are fused into what reads them, such
as casts and sums between two products, nor for outputs that replace donated inputs. It does not know what the compiler
reorders, copies and pads (`tests/benchmarks/compiled.md` compares).
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from ..dims import VIEWS, is_elementwise
from ..tracing import Env, insides, normal, scan_counts, variables
from ._shards import Shards

# Equations whose output is fused into what reads it, besides elementwise ones.
_FUSED = {*VIEWS, "iota", "random_bits", "broadcast_in_dim", "reduce_precision", "name", "optimization_barrier"}
_MAX_SOURCES = 8  # of a fused value. Few are read from more: a residual stream of many blocks is in memory in between


def estimated_bytes(closed: Any, specs: Sequence[P | None], mesh: Mesh) -> int:
    """Returns the bytes of a step's temporaries on one device, at their peak, given its closed jaxpr, which donates its
    state, and the specs of its inputs; None for replicated ones."""
    closed = normal(closed)  # jits are fused with what is around them
    return _Walk(Shards(closed, specs, mesh)).peak(closed.jaxpr)


class _Walk:
    def __init__(self, shards: Shards):
        self._shards = shards
        self._memo: dict[Any, int] = {}

    def peak(self, jaxpr: Any) -> int:
        """Returns the most bytes that are live at once, without the jaxpr's inputs and the outputs that are fused."""
        if jaxpr in self._memo:
            return self._memo[jaxpr]
        eqns = jaxpr.eqns
        sources = self._sources(jaxpr)
        last: dict[Any, int] = {}
        for i, eqn in enumerate(eqns):
            for atom in variables(eqn.invars):
                for var in sources[atom]:
                    last[var] = i
        for atom in variables(jaxpr.outvars):
            last.update(dict.fromkeys(sources[atom], len(eqns)))
        ends: dict[int, list[int]] = {}
        live, most = 0, 0
        for i, eqn in enumerate(eqns):
            made = [var for var in eqn.outvars if sources[var] == (var,)]
            n_bytes = {var: self._bytes(var) for var in made}
            replaced = self._replaced(eqn, sources, {var for var, end in last.items() if end == i})
            most = max(most, live - replaced + self._inside(eqn, sum(n_bytes.values())))
            live -= replaced
            live += sum(n_bytes.values())
            for var, size in n_bytes.items():
                ends.setdefault(last.get(var, i), []).append(size)
            most = max(most, live)
            live -= sum(ends.pop(i, ())) - replaced
        self._memo[jaxpr] = most
        return most

    def _bytes(self, var: Any) -> int:
        is_in_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        return 0 if is_in_host else self._shards.n_bytes(var)

    def _replaced(self, eqn: Any, sources: Env, ending: Collection[Any]) -> int:
        """Returns the bytes of initial values of a loop's carry that end there: the carry is in their place."""
        if eqn.primitive.name not in ("scan", "while"):
            return 0
        carries = [i for each in insides(eqn) for i, kind in zip(each.operands, each.kinds, strict=True) if kind == "carry"]
        initial = variables(eqn.invars[i] for i in dict.fromkeys(carries))
        return sum(self._bytes(var) for var in initial if sources[var] == (var,) and var in ending)

    def _inside(self, eqn: Any, outs: int) -> int:
        """Returns the bytes that an equation needs while it runs, with its outputs."""
        inner = [each for each in insides(eqn) if each.role != "manual"]
        if not inner:
            return outs
        most = max(self.peak(each.closed.jaxpr) for each in inner)
        if eqn.primitive.name == "scan":
            # The stacks and the carry are live during all iterations; slices of what is stacked are made inside.
            return outs + most + sum(map(self._bytes, variables(inner[0].closed.jaxpr.invars[sum(scan_counts(eqn)) :])))
        return outs + most if eqn.primitive.name == "while" else max(outs, most)

    def _sources(self, jaxpr: Any) -> Env:
        """Returns, for each variable, the values in memory that it is computed from when it is read: itself, if it is in
        memory. Inputs have none, since they stay."""
        readers: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for atom in variables(eqn.invars):
                readers.setdefault(atom, []).append(eqn)
        sources = Env(((var, ()) for var in [*jaxpr.constvars, *jaxpr.invars]), literal=lambda _: ())
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                found = dict.fromkeys(each for atom in eqn.invars for each in sources[atom])
                is_fused = len(found) <= _MAX_SOURCES and self._is_fused(eqn, var, readers.get(var, ()))
                sources[var] = tuple(found) if is_fused else (var,)
        return sources

    def _is_fused(self, eqn: Any, var: Any, readers: Sequence[Any]) -> bool:
        if math.prod(getattr(var.aval, "shape", ())) <= 1:
            return True
        if not any(getattr(atom.aval, "shape", ()) for atom in eqn.invars) and eqn.primitive.name in _FUSED:
            return True  # zeros, for example, are made where they are read
        is_gather = eqn.primitive.name == "sharding_constraint" and self._bytes(var) > self._bytes(eqn.invars[0])
        return may_fuse(eqn) and not is_gather and not any(map(_reads_memory, readers))


def may_fuse(eqn: Any) -> bool:
    """Whether an equation may be computed where its output is read."""
    if inner := insides(eqn):
        return all(each.role == "call" and all(map(may_fuse, each.closed.jaxpr.eqns)) for each in inner)
    return eqn.primitive.name in _FUSED or is_elementwise(eqn)


def _reads_memory(eqn: Any) -> bool:
    """Whether an equation reads its operands from memory, even if they could be fused into it."""
    is_kernel = eqn.primitive.name in (
        "attention",
        "attention_gradient",
        "pallas_call",
        "sort",
        "gather",
        "scatter-add",
        "fft",
    )
    return is_kernel or (bool(insides(eqn)) and not may_fuse(eqn))
