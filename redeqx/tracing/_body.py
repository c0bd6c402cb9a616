"""What is known of the values of a function in normal form: their producers, their readers, and those known while tracing.

A value that depends on no input of the function is a constant: a causal mask, positions, a scale. It is a constant also
inside a branch or a loop that takes it as an operand. Values are computed lazily.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._inner import Env, equations, insides, run, variables

MAX_KNOWN = 2**22  # elements; larger values are not computed while tracing
_Sources = frozenset[str] | None
# Equations whose output has the numbers of their operand, maybe rounded to another floating dtype, and no others.
_REPEATING = ("broadcast_in_dim", "convert_element_type", "reshape", "copy")


class Body:
    """The values of a closed jaxpr in normal form, where each variable has one place, including those inside its loops,
    branches and calls. `known` has for each of its first inputs its name and value, or None if nothing is known."""

    def __init__(self, closed: Any, known: Sequence[tuple[str, Any] | None] = ()):
        self.closed = closed
        self.eqns: list[Any] = list(equations(closed))  # without those of custom derivatives, which are not replaced
        self._producers, self._outer = (Env(literal=lambda _: None) for _ in range(2))
        self._readers: dict[Any, list[Any]] = {}
        self._values = Env()
        self._sources = Env(literal=lambda _: frozenset())
        for var, named in zip(closed.jaxpr.invars, known, strict=False):
            if named is not None:
                self._sources[var], self._values[var] = frozenset(named[:1]), named[1]
        self._read(closed)

    def _read(self, closed: Any) -> None:
        """Notes the equations of a closed jaxpr. The sources of its inputs are known."""
        self._values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        of_consts = (None if isinstance(const, Tracer) else frozenset() for const in closed.consts)
        self._sources.update(zip(closed.jaxpr.constvars, of_consts, strict=True))
        for eqn in closed.jaxpr.eqns:
            for var in variables(eqn.invars):
                self._readers.setdefault(var, []).append(eqn)
            self._producers.update(dict.fromkeys(eqn.outvars, eqn))
            self._sources.update(dict.fromkeys(eqn.outvars, self._sources_of(eqn)))
            for inner in insides(eqn):
                if inner.role == "manual":  # its values are those of one device
                    continue
                for var, operand, kind in zip(inner.closed.jaxpr.invars, inner.operands, inner.kinds, strict=True):
                    self._outer[var] = eqn.invars[operand], kind
                    if kind == "same":
                        self._sources[var] = self.sources(eqn.invars[operand])
                self._read(inner.closed)
        for var in variables(closed.jaxpr.outvars):
            self._readers.setdefault(var, []).append(None)

    def _sources_of(self, eqn: Any) -> _Sources:
        """Returns the sources of an equation's outputs. Calls, loops and branches are computed whole."""
        size = max((math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars), default=0)
        sources = list(map(self.sources, eqn.invars))
        if eqn.effects or size > MAX_KNOWN or None in sources:
            return None
        return frozenset[str]().union(*(each for each in sources if each))

    def producer(self, atom: Any) -> Any | None:
        """Returns the equation that computes an atom, or None for inputs, constants and literals."""
        return self._producers.get(atom)

    def readers(self, var: Any) -> Sequence[Any]:
        """Returns the equations that read a value. The outputs of its jaxpr count as a reader None."""
        return self._readers.get(var, ())

    def outer(self, atom: Any) -> tuple[Any, str] | None:
        """Returns the operand of a loop, branch or call that becomes an input inside of it, and how (`Inner.kinds`); None
        for other values."""
        return self._outer.get(atom)

    def origin(self, atom: Any) -> Any:
        """Returns the value outside of loops, branches and calls that an input of these is; the atom itself for others."""
        while (outer := self.outer(atom)) is not None and outer[1] == "same":
            atom = outer[0]
        return atom

    def sources(self, atom: Any) -> _Sources:
        """Returns the names of the inputs that a value depends on: none for a constant. None if it is not known."""
        return self._sources.get(atom)

    def is_constant(self, atom: Any) -> bool:
        """Whether a value depends on no input of the function."""
        return self.sources(atom) == frozenset()

    def number(self, atom: Any) -> float | None:
        """Returns the value of a constant that is the same number everywhere; None for other values."""
        while (eqn := self.producer(atom)) is not None and eqn.primitive.name in _REPEATING:
            if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating) and not jnp.issubdtype(atom.aval.dtype, jnp.floating):
                break  # a cast to integers cuts the fraction off
            atom = eqn.invars[0]
        is_number = any(jnp.issubdtype(atom.aval.dtype, kind) for kind in (jnp.floating, jnp.integer))
        if not is_number or not self.is_constant(atom) or math.prod(atom.aval.shape) != 1:
            return None
        return float(np.asarray(self.value(atom)).reshape(()))

    def value(self, atom: Any) -> Any | None:
        """Returns a value that can be computed while tracing, as an array, or None for others."""
        if self.sources(atom) is None:
            return None
        todo = variables([atom])
        while todo:  # no recursion: a chain of equations may exceed Python's recursion limit
            var = todo[-1]
            eqn, outer = self.producer(var), self.outer(var)
            operands = eqn.invars if eqn is not None else [] if outer is None else [outer[0]]
            if var in self._values:
                todo.pop()
            elif missing := [each for each in variables(operands) if each not in self._values]:
                todo += missing
            elif eqn is None:
                self._values[var] = self._values[operands[0]]
            else:
                with jax.ensure_compile_time_eval():
                    self._values.update(zip(eqn.outvars, run(eqn, self._values.read(operands)), strict=True))
        return self._values[atom]
