"""Relates dims: unifies them, and records along which dims an equation combines entries."""

from collections.abc import Iterable, Sequence
from typing import Any

from ._atoms import Atom, Dim, Step, Value, flat, have_common_factors


class Inference:
    """What the relations of equations may do."""

    def __init__(self) -> None:
        self._step: Step | None = None  # whose operands are being related
        self.parts: list[tuple[str, Dim, Dim]] = []  # how a dim was made of some entries of another, that one, and the dim

    def dim(self, size: int) -> Dim:
        """Returns a new dim."""
        return () if size == 1 else (Atom(size),)

    def fresh(self, aval: Any, **kwargs: Any) -> Value:
        """Returns a value with new dims."""
        return Value(aval, tuple(map(self.dim, getattr(aval, "shape", ()))), **kwargs)

    def unify(self, one: Dim, two: Dim) -> bool:
        """Makes two dims of equal size the same, where needed by dividing atoms. Returns False if their factors differ."""
        a, b = flat(one), flat(two)
        if a == b:
            return True
        if not have_common_factors(a, b):
            self.mix("conflict", (*a, *b))
            return False
        while a and b:
            x, y = a[0], b[0]
            if x is y:
                a, b = a[1:], b[1:]
            elif x.size == y.size:
                y.to = (x,)
                a, b = flat(a)[1:], flat(b)[1:]
            elif x.size > y.size:
                x.to = (Atom(y.size), Atom(x.size // y.size))
                a, b = flat(a), flat(b)
            else:
                a, b = b, a
        return True

    def unify_all(self, ones: Iterable[Dim], twos: Iterable[Dim]) -> None:
        """Makes dims the same, as far as both have some."""
        for one, two in zip(ones, twos, strict=False):
            self.unify(one, two)

    def mix(self, how: str, dim: Dim) -> None:
        """Records that the present equation combines the entries of a dim."""
        if dim and self._step is not None:
            self._step.mixes.append((how, dim))

    def part(self, dim: Dim, size: int, how: str = "part") -> Dim:
        """Returns a new dim of some entries of another."""
        self.mix(how, dim)
        new = self.dim(size)
        self.parts.append((how, dim, new))
        return new

    def mark_own(self, column: int) -> None:
        """Records that a column of the present equation's indices is the index of each entry itself."""
        assert self._step is not None
        self._step.own_columns += (column,)

    def give_up(self, eqn: Any, ins: Sequence[Value]) -> list[tuple[Dim, ...]]:
        """Returns the dims of the outputs of an equation that no table has: it may mix anything."""
        if self._step is not None:
            self._step.is_known = False
        for value in ins:
            for dim in value.dims:
                self.mix("unknown", dim)
        return [self.fresh(var.aval).dims for var in eqn.outvars]
