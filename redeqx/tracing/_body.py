"""A jaxpr at its call site: the producer and readers of each value, and the values that are known while tracing.

A value that depends on no input of the traced function is a constant: a causal mask, positions, a scale. It is a constant
also inside a jit, a branch or a loop that takes it as an operand. Values are computed lazily.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.core import Tracer

from ._flow import flow
from ._inner import Env, Inner, insides, run, variables

MAX_KNOWN = 2**22  # elements; larger values are not computed while tracing
_Sources = frozenset[str] | None


@dataclass(frozen=True)
class Known:
    """An input whose value is known."""

    value: Any
    sources: frozenset[str] = frozenset()  # the names of its sources; empty for a constant


@dataclass(eq=False)
class Body:
    """A closed jaxpr at one call site of a traced function."""

    closed: Any
    inputs: Sequence[Any] = ()  # for each a `Known`, an atom of the enclosing body, or None if nothing is known
    around: "Body | None" = None  # the enclosing body
    _inner: dict[tuple[Any, int], "Body"] = field(default_factory=dict, repr=False)
    _values: Env = field(default_factory=Env, repr=False)

    @property
    def eqns(self) -> Sequence[Any]:
        return self.closed.jaxpr.eqns

    @cached_property
    def _producers(self) -> Mapping[Any, Any]:
        return Env(((var, eqn) for eqn in self.eqns for var in eqn.outvars), literal=lambda _: None)

    @cached_property
    def _readers(self) -> Mapping[Any, list[Any]]:
        readers = Env(literal=lambda _: None)
        for eqn in self.eqns:
            for var in variables(eqn.invars):
                readers.setdefault(var, []).append(eqn)
        for var in variables(self.closed.jaxpr.outvars):
            readers.setdefault(var, []).append(None)
        return readers

    def producer(self, atom: Any) -> Any | None:
        """Returns the equation that computes an atom, or None for inputs, constants and literals."""
        return self._producers.get(atom)

    def readers(self, var: Any) -> Sequence[Any]:
        """Returns the equations that read a value. The jaxpr's outputs count as a reader None."""
        return self._readers.get(var) or ()

    def inside(self, eqn: Any, index: int = 0) -> "Body":
        """Returns the body of jaxpr `index` inside an equation, in the order of `insides`."""
        if (eqn, index) not in self._inner:
            inner: Inner = insides(eqn)[index]
            atoms = [eqn.invars[i] if kind == "same" else None for i, kind in zip(inner.operands, inner.kinds, strict=True)]
            self._inner[eqn, index] = Body(inner.closed, atoms, self)
        return self._inner[eqn, index]

    def given(self, atom: Any) -> "tuple[Body, Any] | None":
        """Returns the enclosing body and the atom there that an input stands for, or None if the atom is no such input."""
        invars = self.closed.jaxpr.invars
        if self.around is None or atom not in invars[: len(self.inputs)]:
            return None
        known = self.inputs[invars.index(atom)]
        return None if known is None or isinstance(known, Known) else (self.around, known)

    # --- known values --------------------------------------------------------------------------------------------------

    def is_constant(self, atom: Any) -> bool:
        """Whether a value depends on no input of the traced function."""
        return self.sources(atom) == frozenset()

    def value(self, atom: Any) -> Any | None:
        """Returns a value that can be computed while tracing, as an array, or None for others."""
        if (value := self._values.get(atom)) is not None or self.sources(atom) is None:
            return value
        needed, todo = set[Any](), [atom]
        while todo:  # no recursion: a chain of equations may exceed Python's recursion limit
            eqn = self._producers.get(todo.pop())
            if eqn is not None and eqn not in needed and eqn.outvars[0] not in self._values:
                needed.add(eqn)
                todo += variables(eqn.invars)
        for eqn in self.eqns:
            if eqn in needed:
                ins = list(map(self.value, eqn.invars))
                with jax.ensure_compile_time_eval():
                    self._values.update(zip(eqn.outvars, run(eqn, ins), strict=True))
        return self._values[atom] if atom in self._values else self._input(atom)

    def _input(self, var: Any) -> Any:
        """Returns the value of an input or of a constvar."""
        jaxpr = self.closed.jaxpr
        if var in jaxpr.constvars:
            return self.closed.consts[jaxpr.constvars.index(var)]
        known = self.inputs[jaxpr.invars.index(var)]
        if isinstance(known, Known):
            return known.value
        assert self.around is not None
        return self.around.value(known)

    @cached_property
    def sources(self) -> Callable[[Any], _Sources]:
        """From atoms to the sources of their values: empty for a constant, None for what is not known while tracing."""
        of_inputs = list(map(self._sources_of_input, self.inputs))
        of_inputs += [None] * (len(self.closed.jaxpr.invars) - len(self.inputs))
        of_constant = lambda const: None if isinstance(const, Tracer) else frozenset()  # noqa: E731
        return flow(self.closed, of_inputs, _sources_of, _union, constant=of_constant)

    def _sources_of_input(self, known: Any) -> _Sources:
        if known is None or isinstance(known, Known):
            return known and known.sources
        assert self.around is not None
        return self.around.sources(known)


def _sources_of(eqn: Any, ins: Sequence[_Sources]) -> list[_Sources]:
    """Returns the sources of an equation's outputs. Calls, loops and branches are computed whole."""
    size = max((math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars), default=0)
    return [None if eqn.effects or size > MAX_KNOWN else _union(ins)] * len(eqn.outvars)


def _union(sources: Sequence[_Sources]) -> _Sources:
    known = [each for each in sources if each is not None]
    return frozenset().union(*known) if len(known) == len(sources) else None
