"""Band masks: recognises constant masks that let a query attend to a band of keys, from the equations that compute them.

A causal mask of 16,384 tokens has 268 million entries, so it is not evaluated. Instead, integers are represented as affine
functions of the array index (`iota`, sums, differences), and comparisons of them as inequalities.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..dims import view
from ..tracing import Body

_MAX_LENGTH = 2**20  # of a constant vector that is checked for being an `arange`


Affine = np.ndarray  # of integers, for an integer array: its entry at index `i` is `affine[0] + affine[1:] @ i`
Inequalities = tuple[Affine, ...]  # for a boolean array: its entries are True where all of these are at least 0


def select_dims(affine: Affine, dims: Sequence[int | None]) -> Affine:
    """Returns the array whose dim `i` is the given array's dim `dims[i]`; None for a new dim."""
    return np.array([affine[0], *(0 if dim is None else affine[1 + dim] for dim in dims)])


def whole_view(eqn: Any) -> Sequence[int | None] | None:
    """Returns the dims of a view that has all entries of its operand; None for any other equation."""
    return None if eqn.primitive.name in ("slice", "dynamic_slice") else view(eqn)


def inequalities(body: Body, atom: Any, negated: bool = False) -> Inequalities | None:
    """Returns a boolean array, or its negation, as inequalities; None if it has no such form. A floating array counts as
    True where it is zero; it must be a constant."""
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
        return tuple(select_dims(each, [None] * len(shape)) for each in found) if found and is_scalar else found

    if name == "not":
        return of_operand(eqn.invars[0], not negated)
    if name == ("or" if negated else "and"):
        return _all_of(*(of_operand(operand, negated) for operand in eqn.invars))
    if name == "select_n" and len(eqn.invars) == 3:
        which, if_false, if_true = eqn.invars
        low, high = of_operand(if_false, negated), of_operand(if_true, negated)
        if _is_false(low, shape):
            return _all_of(of_operand(which, False), high)
        return _all_of(of_operand(which, True), low) if _is_false(high, shape) else None
    dims = whole_view(eqn)
    is_of_kind = jnp.issubdtype(eqn.invars[0].aval.dtype, bool if atom.aval.dtype == bool else jnp.floating)
    if dims is None or not is_of_kind:
        return None
    found = inequalities(body, eqn.invars[0], negated)
    return None if found is None else tuple(select_dims(each, dims) for each in found)


def find_band(found: Sequence[Affine], shape: Sequence[int], query: int, key: int) -> tuple[bool, int | None] | None:
    """Returns `causal` and `window` of the kernels' settings, if inequalities hold for a band of keys that these express.
    `query` and `key` are the dims of the queries' and the keys' positions."""
    lowers, uppers = list[int](), list[int]()
    for affine in found:
        start, slopes = int(affine[0]), affine[1:]
        if _bounds(affine, shape)[0] >= 0:
            continue
        others = [slope for dim, slope in enumerate(slopes) if dim not in (query, key)]
        if any(others) or (slopes[query], slopes[key]) not in ((1, -1), (-1, 1)):
            return None
        lowers += [-start] if slopes[query] == 1 else []  # query - key >= -start
        uppers += [start] if slopes[query] == -1 else []
    lower, upper = max(lowers, default=None), min(uppers, default=None)  # of `query - key`
    if lower is None and upper is None:
        return False, None
    if lower == 0:
        return True, None if upper is None else upper + 1
    return (False, upper + 1) if lower is not None and upper is not None and lower == -upper else None


def _bounds(affine: Affine, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the smallest and the largest entry of an array of this shape."""
    ends = affine[1:] * (np.array(shape, int) - 1)
    return affine[0] + np.minimum(ends, 0).sum(), affine[0] + np.maximum(ends, 0).sum()


# --- booleans ---------------------------------------------------------------------------------------------------------

_COMPARISONS: Mapping[str, Callable[[Affine, Affine], Inequalities | None]] = {
    "ge": lambda a, b: (a - b,),
    "le": lambda a, b: (b - a,),
    "gt": lambda a, b: (a - b - _one(a),),
    "lt": lambda a, b: (b - a - _one(a),),
    "eq": lambda a, b: (a - b, b - a),
    "ne": lambda a, b: None,
}
_NEGATED = {"ge": "lt", "lt": "ge", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _one(like: Affine) -> Affine:
    return np.eye(1, len(like), dtype=int)[0]


def _is_false(found: Inequalities | None, shape: Sequence[int]) -> bool:
    """Whether a boolean array is known to be False everywhere."""
    return found is not None and any(_bounds(each, shape)[1] < 0 for each in found)


def _all_of(a: Inequalities | None, b: Inequalities | None) -> Inequalities | None:
    return None if a is None or b is None else (*a, *b)


def _from_value(body: Body, atom: Any, negated: bool) -> Inequalities | None:
    """Same as `inequalities`, from the value of a closed-over or a small constant array."""
    is_floating = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    if not body.is_constant(atom) or not (is_floating or atom.aval.dtype == bool) or not math.prod(atom.aval.shape):
        return None
    value = np.asarray(body.value(atom))
    value = (value == 0 if is_floating else value) != negated
    distance = np.zeros(1 + value.ndim, int)
    if value.all() or not value.any():
        return () if value.all() else (distance - _one(distance),)
    long_dims = [dim for dim, size in enumerate(value.shape) if size != 1]
    if len(long_dims) != 2:
        return None
    mask = value.reshape([value.shape[dim] for dim in long_dims])
    rows, columns = np.nonzero(mask)
    lower, upper = (rows - columns).min(), (rows - columns).max()
    distances = np.arange(mask.shape[0])[:, None] - np.arange(mask.shape[1])
    if not np.array_equal(mask, (distances >= lower) & (distances <= upper)):
        return None
    distance[1 + long_dims[0]], distance[1 + long_dims[1]] = 1, -1
    return distance - lower * _one(distance), upper * _one(distance) - distance


# --- integers ---------------------------------------------------------------------------------------------------------


def _affine(body: Body, atom: Any, shape: Sequence[int]) -> Affine | None:
    """Returns an integer array, broadcast to `shape`, as an affine function of the index; None if it has no such form."""
    dtype, own = atom.aval.dtype, atom.aval.shape
    if not np.issubdtype(dtype, np.signedinteger) or dtype.itemsize < 4:  # other dtypes wrap around
        return None
    atom = body.origin(atom)
    eqn, found = body.producer(atom), None
    if eqn is None or eqn.effects:
        found = _affine_from_constant(body, atom)
    elif eqn.primitive.name == "iota":
        # No slope along a dim of size 1: a mask may repeat along it.
        found = np.array([0, *(int(dim == eqn.params["dimension"] and n != 1) for dim, n in enumerate(own))])
    elif eqn.primitive.name in _ARITHMETIC:
        operands = [_affine(body, operand, own) for operand in eqn.invars]
        found = None if any(each is None for each in operands) else _ARITHMETIC[eqn.primitive.name](*operands)
    elif (dims := whole_view(eqn)) is not None:
        found = _affine(body, eqn.invars[0], eqn.invars[0].aval.shape)
        found = None if found is None else select_dims(found, dims)
    if found is None or len(own) == len(shape):
        return found
    return None if own else select_dims(found, [None] * len(shape))


_ARITHMETIC: Mapping[str, Callable[..., Affine]] = {"add": np.add, "sub": np.subtract, "neg": np.negative}


def _affine_from_constant(body: Body, atom: Any) -> Affine | None:
    """Same as `_affine`, for a constant vector or scalar, such as positions made with NumPy."""
    shape = atom.aval.shape
    if sum(size != 1 for size in shape) > 1 or max(shape, default=1) > _MAX_LENGTH or not body.is_constant(atom):
        return None
    entries = np.asarray(body.value(atom)).reshape(-1).astype(np.int64)
    step = entries[1] - entries[0] if len(entries) > 1 else 0
    if len(entries) == 0 or not np.array_equal(entries, entries[0] + step * np.arange(len(entries))):
        return None
    return np.array([entries[0], *(step if size != 1 else 0 for size in shape)])
