"""Band masks: recognises constant masks that let a query attend to a band of keys, from the equations that compute them.

A causal mask of 16,384 tokens has 268 million entries, so it is not evaluated. Instead, integers are represented as affine
functions of the array index (`iota`, sums, differences), and comparisons of them as inequalities.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..dims import view
from ..tracing import Body

_MAX_LENGTH = 2**20  # of a constant vector that is checked for being an `arange`


@dataclass(frozen=True)
class Affine:
    """An integer array whose entries are `start` plus, for each dim, the slope times the index."""

    start: int
    slopes: tuple[int, ...]

    def select_dims(self, dims: Sequence[int | None]) -> "Affine":
        """Returns the array whose dim `i` is this array's dim `dims[i]`; None for a new dim."""
        return Affine(self.start, tuple(0 if dim is None else self.slopes[dim] for dim in dims))

    def add(self, other: "Affine", times: int = 1) -> "Affine":
        """Returns `self + times * other`."""
        slopes = tuple(a + times * b for a, b in zip(self.slopes, other.slopes, strict=True))
        return Affine(self.start + times * other.start, slopes)

    def scaled(self, factor: int) -> "Affine":
        return Affine(factor * self.start, tuple(factor * slope for slope in self.slopes))

    def bounds(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the smallest and the largest entry."""
        ends = [slope * (size - 1) for slope, size in zip(self.slopes, shape, strict=True)]
        return self.start + sum(min(end, 0) for end in ends), self.start + sum(max(end, 0) for end in ends)


def whole_view(eqn: Any) -> Sequence[int | None] | None:
    """Returns the dims of a view that has all entries of its operand; None for any other equation."""
    return None if eqn.primitive.name in ("slice", "dynamic_slice") else view(eqn)


# A boolean array whose entries are True where all of these are at least 0; an empty tuple is True everywhere.
Inequalities = tuple[Affine, ...]


def inequalities(body: Body, atom: Any, negated: bool = False) -> Inequalities | None:
    """Returns a boolean array, or its negation, as inequalities; None if it has no such form.

    A floating array counts as True where it is zero; it must be a constant.
    """
    atom = body.origin(atom)
    found = _from_equation(body, atom, negated)
    return _from_value(body, atom, negated) if found is None else found


def _from_equation(body: Body, atom: Any, negated: bool) -> Inequalities | None:
    """Same as `inequalities`, from the equation that computes the array."""
    eqn, shape = body.producer(atom), atom.aval.shape
    if eqn is None or eqn.effects:
        return None
    name = eqn.primitive.name
    if name in _COMPARISONS:
        a, b = (_affine(body, operand, shape) for operand in eqn.invars)
        return None if a is None or b is None else _COMPARISONS[_NEGATED[name] if negated else name](a, b)

    def of_operand(operand: Any, negated: bool) -> Inequalities | None:
        found = inequalities(body, operand, negated)
        is_scalar = len(operand.aval.shape) < len(shape)
        return tuple(each.select_dims([None] * len(shape)) for each in found) if found and is_scalar else found

    if name == "not":
        return of_operand(eqn.invars[0], not negated)
    if name == ("or" if negated else "and"):
        return _all_of(*(of_operand(operand, negated) for operand in eqn.invars))
    if name == "select_n" and len(eqn.invars) == 3:
        which, if_false, if_true = eqn.invars
        if _is_false(of_operand(if_false, negated), shape):
            return _all_of(of_operand(which, False), of_operand(if_true, negated))
        if _is_false(of_operand(if_true, negated), shape):
            return _all_of(of_operand(which, True), of_operand(if_false, negated))
        return None
    dims = whole_view(eqn)
    is_of_kind = jnp.issubdtype(eqn.invars[0].aval.dtype, bool if atom.aval.dtype == bool else jnp.floating)
    if dims is None or not is_of_kind:
        return None
    found = inequalities(body, eqn.invars[0], negated)
    return None if found is None else tuple(each.select_dims(dims) for each in found)


def find_band(found: Inequalities, shape: Sequence[int], query: int, key: int) -> tuple[int | None, int | None] | None:
    """Returns the bounds of `query - key` at True entries, each None if there is no bound; None if this is not a band.

    **Arguments:**

    - `query`, `key`: the dims of the queries' and the keys' positions.
    """
    lower: int | None = None
    upper: int | None = None
    for each in found:
        smallest, _ = each.bounds(shape)
        if smallest >= 0:
            continue
        others = [slope for dim, slope in enumerate(each.slopes) if dim not in (query, key)]
        if any(others) or (each.slopes[query], each.slopes[key]) not in ((1, -1), (-1, 1)):
            return None
        if each.slopes[query] == 1:  # query - key >= -start
            lower = -each.start if lower is None else max(lower, -each.start)
        else:
            upper = each.start if upper is None else min(upper, each.start)
    return lower, upper


# --- booleans ---------------------------------------------------------------------------------------------------------

_COMPARISONS: Mapping[str, Callable[[Affine, Affine], Inequalities | None]] = {
    "ge": lambda a, b: (a.add(b, -1),),
    "le": lambda a, b: (b.add(a, -1),),
    "gt": lambda a, b: (_minus_one(a.add(b, -1)),),
    "lt": lambda a, b: (_minus_one(b.add(a, -1)),),
    "eq": lambda a, b: (a.add(b, -1), b.add(a, -1)),
    "ne": lambda a, b: None,
}
_NEGATED = {"ge": "lt", "lt": "ge", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _minus_one(a: Affine) -> Affine:
    return Affine(a.start - 1, a.slopes)


def _constant(value: bool, shape: Sequence[int]) -> Inequalities:
    return () if value else (Affine(-1, (0,) * len(shape)),)


def _is_false(found: Inequalities | None, shape: Sequence[int]) -> bool:
    """Whether a boolean array is known to be False everywhere."""
    return found is not None and any(each.bounds(shape)[1] < 0 for each in found)


def _all_of(a: Inequalities | None, b: Inequalities | None) -> Inequalities | None:
    return None if a is None or b is None else (*a, *b)


def _from_value(body: Body, atom: Any, negated: bool) -> Inequalities | None:
    """Same as `inequalities`, from the value of a closed-over or a small constant array."""
    is_floating = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    if not body.is_constant(atom) or not (is_floating or atom.aval.dtype == bool) or not math.prod(atom.aval.shape):
        return None
    value = np.asarray(body.value(atom))
    value = (value == 0 if is_floating else value) != negated
    if value.all() or not value.any():
        return _constant(bool(value.all()), value.shape)
    long_dims = [dim for dim, size in enumerate(value.shape) if size != 1]
    if len(long_dims) != 2:
        return None
    mask = value.reshape([value.shape[dim] for dim in long_dims])
    rows, columns = np.nonzero(mask)
    lower, upper = int((rows - columns).min()), int((rows - columns).max())
    distance = np.arange(mask.shape[0])[:, None] - np.arange(mask.shape[1])
    if not np.array_equal(mask, (distance >= lower) & (distance <= upper)):
        return None
    slopes = tuple(0 if dim not in long_dims else 1 if dim == long_dims[0] else -1 for dim in range(value.ndim))
    return Affine(-lower, slopes), Affine(upper, tuple(-slope for slope in slopes))


# --- integers ---------------------------------------------------------------------------------------------------------


def _affine(body: Body, atom: Any, shape: Sequence[int]) -> Affine | None:
    """Returns an integer array, broadcast to `shape`, as an affine function of the index; None if it has no such form."""
    dtype, own = atom.aval.dtype, atom.aval.shape
    if not np.issubdtype(dtype, np.signedinteger) or dtype.itemsize < 4:  # other dtypes wrap around
        return None
    atom = body.origin(atom)
    eqn = body.producer(atom)
    if eqn is None or eqn.effects:
        found = _affine_from_constant(body, atom)
    elif eqn.primitive.name == "iota":
        found = Affine(0, tuple(int(dim == eqn.params["dimension"]) for dim in range(len(own))))
    elif eqn.primitive.name in _ARITHMETIC:
        operands = [_affine(body, operand, own) for operand in eqn.invars]
        found = None if None in operands else _ARITHMETIC[eqn.primitive.name](*operands)
    else:
        dims = whole_view(eqn)
        found = None if dims is None else _affine(body, eqn.invars[0], eqn.invars[0].aval.shape)
        found = None if found is None or dims is None else found.select_dims(dims)
    if found is None or len(own) == len(shape):
        return found
    return None if own else found.select_dims([None] * len(shape))


def _product(a: Affine, b: Affine) -> Affine | None:
    constant, other = (b, a) if any(a.slopes) else (a, b)
    return None if any(constant.slopes) else other.scaled(constant.start)


_ARITHMETIC: Mapping[str, Callable[..., Affine | None]] = {
    "add": Affine.add,
    "sub": lambda a, b: a.add(b, -1),
    "neg": lambda a: a.scaled(-1),
    "mul": _product,
}


def _affine_from_constant(body: Body, atom: Any) -> Affine | None:
    """Same as `_affine`, for a constant vector or scalar, such as positions made with NumPy."""
    shape = atom.aval.shape
    if sum(size != 1 for size in shape) > 1 or max(shape, default=1) > _MAX_LENGTH or not body.is_constant(atom):
        return None
    value = np.asarray(body.value(atom))
    entries = value.reshape(-1).astype(np.int64)
    step = int(entries[1] - entries[0]) if len(entries) > 1 else 0
    if len(entries) == 0 or not np.array_equal(entries, entries[0] + step * np.arange(len(entries))):
        return None
    return Affine(int(entries[0]), tuple(step if size != 1 else 0 for size in shape))
