"""Masks that are known beforehand: which of them say that a query sees a band of keys, found from how they are computed.

A causal mask of 16,384 tokens has 268 million entries, so it is never computed here. Integers are followed as affine
functions of the position in the array (`iota`, sums, differences), and comparisons of them as inequalities.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ..tracing import Body, called, view

_MAX_LENGTH = 2**20  # of a constant vector that is compared with an `arange`


@dataclass(frozen=True)
class Affine:
    """An integer at each position of an array: `start` plus, for each dim, its slope times the index."""

    start: int
    slopes: tuple[int, ...]

    def of(self, dims: Sequence[int | None]) -> "Affine":
        """The array whose dim `i` is this one's dim `dims[i]`."""
        return Affine(self.start, tuple(0 if dim is None else self.slopes[dim] for dim in dims))

    def plus(self, other: "Affine", times: int = 1) -> "Affine":
        slopes = tuple(a + times * b for a, b in zip(self.slopes, other.slopes, strict=True))
        return Affine(self.start + times * other.start, slopes)

    def bounds(self, shape: Sequence[int]) -> tuple[int, int]:
        """The smallest and the largest of the integers."""
        ends = [slope * (size - 1) for slope, size in zip(self.slopes, shape, strict=True)]
        return self.start + sum(min(end, 0) for end in ends), self.start + sum(max(end, 0) for end in ends)


# A boolean at each position: whether all of these are at least 0. None is what is not known; no inequality is always true.
Inequalities = tuple[Affine, ...]


def inequalities(body: Body, atom: Any, negated: bool = False) -> Inequalities | None:
    """A boolean array, or its negation, as inequalities; None where it is computed in another way. A floating array is true
    where it is zero; only constants of that kind are looked into."""
    if isinstance(atom, jex.Literal):
        return _constant(bool(atom.val) != negated, ())
    body, atom = _outside(body, atom)
    found = _computed(body, atom, negated)
    return _of_value(body, atom, negated) if found is None else found


def _computed(body: Body, atom: Any, negated: bool) -> Inequalities | None:
    """As `inequalities`, from the equation that computes the array."""
    eqn, shape = body.producer(atom), atom.aval.shape
    if eqn is None or eqn.effects:
        return None
    name = eqn.primitive.name
    if called(eqn) is not None:
        inner = body.inside(eqn)
        return inequalities(inner, inner.closed.jaxpr.outvars[list(eqn.outvars).index(atom)], negated)
    if name in _COMPARISONS:
        a, b = (_affine(body, operand, shape) for operand in eqn.invars)
        return None if a is None or b is None else _COMPARISONS[_NEGATED[name] if negated else name](a, b)

    def of(operand: Any, negated: bool) -> Inequalities | None:
        found = inequalities(body, operand, negated)
        if found is None or len(operand.aval.shape) == len(shape):
            return found
        return tuple(Affine(each.start, (0,) * len(shape)) for each in found)  # a scalar beside an array

    if name == "not":
        return of(eqn.invars[0], not negated)
    if name == ("or" if negated else "and"):
        return _both(*(of(operand, negated) for operand in eqn.invars))
    if name == "select_n" and len(eqn.invars) == 3:
        which, if_false, if_true = eqn.invars
        if _is_false(of(if_false, negated), shape):
            return _both(of(which, False), of(if_true, negated))
        return _both(of(which, True), of(if_false, negated)) if _is_false(of(if_true, negated), shape) else None
    dims = view(eqn)
    if dims is None or name in ("slice", "dynamic_slice") or eqn.invars[0].aval.dtype != bool:
        return None
    found = inequalities(body, eqn.invars[0], negated)
    return None if found is None else tuple(each.of(dims) for each in found)


def band(found: Inequalities, shape: Sequence[int], query: int, key: int) -> tuple[int | None, int | None] | None:
    """The least and the largest of `query - key` that are seen, None for no bound; None alone for what is no such band.

    **Arguments:**

    - `query`, `key`: the dims of the queries' and the keys' positions.
    """
    least: int | None = None
    most: int | None = None
    for of in found:
        low, _ = of.bounds(shape)
        if low >= 0:
            continue
        others = [slope for dim, slope in enumerate(of.slopes) if dim not in (query, key)]
        if any(others) or (of.slopes[query], of.slopes[key]) not in ((1, -1), (-1, 1)):
            return None
        if of.slopes[query] == 1:  # query - key >= -start
            least = -of.start if least is None else max(least, -of.start)
        else:
            most = of.start if most is None else min(most, of.start)
    return least, most


# --- how booleans are computed ----------------------------------------------------------------------------------------

_COMPARISONS: Mapping[str, Callable[[Affine, Affine], Inequalities | None]] = {
    "ge": lambda a, b: (a.plus(b, -1),),
    "le": lambda a, b: (b.plus(a, -1),),
    "gt": lambda a, b: (_less_one(a.plus(b, -1)),),
    "lt": lambda a, b: (_less_one(b.plus(a, -1)),),
    "eq": lambda a, b: (a.plus(b, -1), b.plus(a, -1)),
    "ne": lambda a, b: None,
}
_NEGATED = {"ge": "lt", "lt": "ge", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _less_one(of: Affine) -> Affine:
    return Affine(of.start - 1, of.slopes)


def _constant(value: bool, shape: Sequence[int]) -> Inequalities:
    return () if value else (Affine(-1, (0,) * len(shape)),)


def _is_false(found: Inequalities | None, shape: Sequence[int]) -> bool:
    """Whether a boolean is False everywhere."""
    return found is not None and any(of.bounds(shape)[1] < 0 for of in found)


def _both(a: Inequalities | None, b: Inequalities | None) -> Inequalities | None:
    return None if a is None or b is None else (*a, *b)


def _of_value(body: Body, atom: Any, negated: bool) -> Inequalities | None:
    """An array that the function is closed over, or a small one that is computed beforehand, where it is a band."""
    is_number = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    if not body.is_constant(atom) or not (is_number or atom.aval.dtype == bool) or not math.prod(atom.aval.shape):
        return None
    value = np.asarray(body.value(atom))
    value = (value == 0 if is_number else value) != negated
    if value.all() or not value.any():
        return _constant(bool(value.all()), value.shape)
    long = [dim for dim, size in enumerate(value.shape) if size != 1]
    if len(long) != 2:
        return None
    mask = value.reshape([value.shape[dim] for dim in long])
    rows, columns = np.nonzero(mask)
    least, most = int((rows - columns).min()), int((rows - columns).max())
    distance = np.arange(mask.shape[0])[:, None] - np.arange(mask.shape[1])
    if not np.array_equal(mask, (distance >= least) & (distance <= most)):
        return None
    slopes = tuple(0 if dim not in long else 1 if dim == long[0] else -1 for dim in range(value.ndim))
    return Affine(-least, slopes), Affine(most, tuple(-slope for slope in slopes))


# --- how integers are computed ----------------------------------------------------------------------------------------


def _outside(body: Body, atom: Any) -> tuple[Body, Any]:
    """Where a value that a jaxpr is given comes from."""
    while (given := body.given(atom)) is not None:
        body, atom = given
    return body, atom


def _affine(body: Body, atom: Any, shape: Sequence[int]) -> Affine | None:
    flat = (0,) * len(shape)
    if isinstance(atom, jex.Literal):
        value = np.asarray(atom.val)
        return Affine(int(value), flat) if np.issubdtype(value.dtype, np.integer) and value.ndim == 0 else None
    dtype = atom.aval.dtype
    if not np.issubdtype(dtype, np.signedinteger) or dtype.itemsize < 4:  # others wrap around
        return None
    own = atom.aval.shape
    found = _affine_of(*_outside(body, atom))
    if found is None or len(own) == len(shape):
        return found
    return Affine(found.start, flat) if not own else None


def _affine_of(body: Body, atom: Any) -> Affine | None:
    shape, eqn = atom.aval.shape, body.producer(atom)
    if eqn is None or eqn.effects:
        return _affine_constant(body, atom)
    name = eqn.primitive.name
    if called(eqn) is not None:
        inner = body.inside(eqn)
        return _affine(inner, inner.closed.jaxpr.outvars[list(eqn.outvars).index(atom)], shape)
    if name == "iota":
        return Affine(0, tuple(int(dim == eqn.params["dimension"]) for dim in range(len(shape))))
    if name in ("add", "sub"):
        a, b = (_affine(body, operand, shape) for operand in eqn.invars)
        return None if a is None or b is None else a.plus(b, 1 if name == "add" else -1)
    if name == "neg":
        a = _affine(body, eqn.invars[0], shape)
        return None if a is None else Affine(0, (0,) * len(shape)).plus(a, -1)
    if name == "mul":
        a, b = (_affine(body, operand, shape) for operand in eqn.invars)
        if a is None or b is None:
            return None
        if any(a.slopes):
            a, b = b, a
        return None if any(a.slopes) else Affine(0, (0,) * len(shape)).plus(b, a.start)
    dims = view(eqn)
    if dims is None or name in ("slice", "dynamic_slice"):
        return None
    found = _affine(body, eqn.invars[0], eqn.invars[0].aval.shape)
    return None if found is None else found.of(dims)


def _affine_constant(body: Body, atom: Any) -> Affine | None:
    """A constant vector or scalar, as of positions that the user made with NumPy."""
    shape = atom.aval.shape
    longest = max(shape, default=1)
    if sum(size != 1 for size in shape) > 1 or longest > _MAX_LENGTH or not body.is_constant(atom):
        return None
    value = np.asarray(body.value(atom))
    entries = value.reshape(-1).astype(np.int64)
    step = int(entries[1] - entries[0]) if len(entries) > 1 else 0
    if len(entries) == 0 or not np.array_equal(entries, entries[0] + step * np.arange(len(entries))):
        return None
    return Affine(int(entries[0]), tuple(step if size != 1 else 0 for size in shape))
