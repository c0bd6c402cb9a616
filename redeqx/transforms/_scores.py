"""Pattern matching of attention scores: finds a softmax, and traces its input back to the product of queries and keys.

The dims of the softmax's input are used as labels. They are traced through scales, masks, biases, casts and transposes to
the dims of each operand. `_fuse_attention` decides whether the result is an attention.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..dims import repeats, view
from ..tracing import Body, has_derivative_of, variables
from ._bands import inequalities, whole_view

_MASKED_SCORE = -1e4  # at or below this, the weight of a score is 0
_ABSORBING_SCORE = -1e9  # at or below this, a sum with scores or biases rounds them away
_MAX_SUMS = 8  # of biases with scores. Both sides of a sum may be sums, so there are twice as many paths for each more
_MAX_INSPECTED = 2**22  # elements of the largest constant whose values are inspected
SIZE = "size"  # the label of the head size, the dim that the first product contracts


@dataclass(frozen=True)
class Operand:
    """A value and the labels of its dims; None for unlabelled dims of size 1."""

    atom: Any
    labels: tuple[Any, ...]

    def arrange(self, read: Any, order: Sequence[Any]) -> Any:
        """Returns the array with one dim per label in `order`, of size 1 for labels that it lacks."""
        x = read(self.atom)
        x = jnp.squeeze(x, [dim for dim, label in enumerate(self.labels) if label is None])
        labels = [label for label in self.labels if label is not None]
        x = jnp.transpose(x, [labels.index(label) for label in order if label in labels])
        return jnp.expand_dims(x, [dim for dim, label in enumerate(order) if label not in labels])


class Mask(NamedTuple):
    """A mask, the value of `operand` at keys that are attended to, and the score of the others or what is added to it."""

    operand: Operand
    keep: bool
    level: float


@dataclass(frozen=True)
class Scores:
    """The computation between the product of queries and keys and the softmax."""

    # The product, and the labels of its dims; None for equations of no attention, or with masks that are not one mask.
    product: tuple[Any, tuple[Any, ...]] | None = None
    stopped_at: str | None = None  # the primitive at which tracing stopped
    eqns: tuple[Any, ...] = ()  # in any order
    scale: float = 1.0  # the factor of the product
    masks: tuple[Mask, ...] = ()  # in any order
    biases: tuple[tuple[Operand, float], ...] = ()  # each with its factor


# --- the softmax ------------------------------------------------------------------------------------------------------


class WeightsUse(NamedTuple):
    """A product that reads the output of a softmax, or a view of it."""

    product: Any
    side: int  # the index of the weights among its operands
    path: Sequence[Any]  # the equations of the views, from the softmax to the product
    dims: Sequence[int | None]  # for each dim of the weights there, the dim of the softmax
    is_unchanged: bool  # whether it reads the weights themselves, maybe in another order of dims


def uses_of_weights(body: Body, softmax: Any) -> list[WeightsUse]:
    """Follows the output of a softmax through views with one reader, and returns the products at their ends."""
    found, all_dims = [], set(range(softmax.outvars[0].aval.ndim))
    for eqn in body.readers(softmax.outvars[0]):
        atom, path, dims = softmax.outvars[0], [], [*all_dims]
        while eqn is not None and (source := view(eqn)) is not None and len(readers := body.readers(eqn.outvars[0])) == 1:
            atom, path, dims = eqn.outvars[0], [*path, eqn], [None if dim is None else dims[dim] for dim in source]
            (eqn,) = readers
        if eqn is not None and eqn.primitive.name == "dot_general":
            is_unchanged = {*dims} == all_dims and all(map(_preserves_values, path))
            found += [WeightsUse(eqn, i, path, dims, is_unchanged) for i in (0, 1) if eqn.invars[i] is atom]
    return found


def _trace_views(
    body: Body, operand: Operand, is_followed: Callable[[Any], bool] = lambda eqn: True, bounded: Any = None
) -> tuple[Operand, list[Any]]:
    """Follows a value back through views, except slices. Returns what they view, with the labels of its dims, and the views.

    If `bounded` is given, a `max` with a lower bound is followed too, if the value is constant along the dim of this label.
    """
    path: list[Any] = []
    while (eqn := body.producer(operand.atom)) is not None:
        if eqn.primitive.name == "max" and bounded is not None and bounded not in operand.labels:
            sides = [side for side in variables(eqn.invars) if side.aval.ndim == len(operand.labels)]
            if not sides:
                break
            operand = Operand(sides[0], operand.labels)
        else:
            dims = whole_view(eqn)
            if dims is None or not is_followed(eqn):
                break
            operand = Operand(eqn.invars[0], _operand_labels(eqn, dims, operand.labels))
        path.append(eqn)
    return operand, path


def _preserves_values(eqn: Any) -> bool:
    """Whether a view preserves the values and the gradient of its operand, up to rounding to a dtype of at least 16 bits.
    Other views are meant to change values: they round further or to integers, stop gradients, or slice."""
    if eqn.primitive.name == "convert_element_type":
        dtypes = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        return all(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16 for dtype in dtypes)
    if eqn.primitive.name == "reduce_precision":
        return 1 + eqn.params["exponent_bits"] + eqn.params["mantissa_bits"] >= 16
    return eqn.primitive.name not in ("stop_gradient", "slice", "dynamic_slice")


def match_softmax(body: Body, eqn: Any) -> tuple[Any, list[Any], int] | None:
    """Returns the input of the softmax that an equation computes, its equations and its dim; None if it computes none."""
    if len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "custom_jvp_call":
        if not has_derivative_of(eqn, "jax"):  # a user's rule may give another derivative
            return None
        inner = eqn.params["call_jaxpr"].jaxpr
        last = body.producer(inner.outvars[0])
        found = None if last is None else match_softmax(body, last)
        if found is None or found[0] not in inner.invars:
            return None
        return eqn.invars[inner.invars.index(found[0])], [eqn], found[2]
    if eqn.primitive.name != "div":
        return None
    exp, (divisor, sum_path) = body.producer(eqn.invars[0]), _trace_views(body, _labelled(eqn.invars[1]))
    total = body.producer(divisor.atom)
    if exp is None or exp.primitive.name != "exp" or total is None or total.primitive.name != "reduce_sum":
        return None
    summed, casts = total.invars[0], []
    if summed is not exp.outvars[0]:  # `jnp.sum` accumulates bfloat16 in float32
        casts = [body.producer(summed)]
        if casts[0] is None or casts[0].primitive.name != "convert_element_type" or casts[0].invars[0] is not exp.outvars[0]:
            return None
    if len(total.params["axes"]) != 1 or not all(map(_preserves_values, [*sum_path, *casts])):
        return None
    members, axis, source = [eqn, *sum_path, total, *casts, exp], int(total.params["axes"][0]), exp.invars[0]
    kept = [dim for dim in range(source.aval.ndim) if dim != axis]
    sizes = divisor.atom.aval.shape
    if any(n != 1 and label != dim for n, label, dim in zip(sizes, divisor.labels, kept, strict=True)):
        return None  # entries are divided by the sums of other rows
    shifted = body.producer(source)
    # Subtracting the same number from all scores of a query, mostly the largest score, does not change the softmax.
    if shifted is not None and shifted.primitive.name == "sub":
        shift, max_path = _trace_views(body, _labelled(shifted.invars[1]), bounded=axis)
        largest = body.producer(shift.atom)
        if largest is not None and largest.primitive.name == "reduce_max" and axis not in shift.labels:
            members, source = [*members, shifted, *max_path, largest], shifted.invars[0]
    return source, members, axis


def _labelled(atom: Any) -> Operand:
    """Returns a value whose labels are its dims, except those of size 1."""
    return Operand(atom, tuple(None if n == 1 else dim for dim, n in enumerate(atom.aval.shape)))


# --- from the softmax back to the product of queries and keys ---------------------------------------------------------


def trace_scores(body: Body, atom: Any) -> Scores:
    """Traces the input of a softmax, whose dims are the labels, back to the product of queries and keys."""
    scores = _trace_scores(body, atom, tuple(range(atom.aval.ndim)), Scores())
    return scores if scores.product is None else _resolve_masks(body, scores)


def _resolve_masks(body: Body, scores: Scores) -> Scores:
    """Turns biases into masks, unless a single mask would give other weights.

    If all keys of a query are masked, a kernel weighs them equally. The original code does too if they have one level, but
    not if masks have several levels, or one at which scores and biases still count. (One case is not detected: if a bias
    masks keys at the same level as a mask, as with two masks of -1e9 one of which is added, the original code may weigh
    only some of the keys.)
    """
    added = [_bias_to_mask(body, bias, factor) for bias, factor in scores.biases]
    biases = tuple(bias for bias, mask in zip(scores.biases, added, strict=True) if mask is None)
    masks = (*scores.masks, *(mask for mask in added if mask is not None))
    lows = [low for bias, factor in biases if (low := _lowest_constant(body, bias.atom, factor)) is not None]
    levels = {mask.level for mask in masks}
    if all(_includes_diagonal(body, mask.operand.atom, mask.keep) for mask in masks):  # each query attends to a key
        if not lows or max(levels, default=-math.inf) <= min(_ABSORBING_SCORE, *lows):
            return replace(scores, masks=masks, biases=biases)
    elif not lows and len(levels) == 1 and (not biases or max(levels) <= _ABSORBING_SCORE):
        return replace(scores, masks=masks, biases=biases)
    lows += [mask.level for mask in added if mask is not None]
    levels = {mask.level for mask in scores.masks}
    if not levels or (len(levels) == 1 and max(levels) <= min([_ABSORBING_SCORE, *lows])):
        return scores
    return replace(scores, product=None, stopped_at="select_n")


def _lowest_constant(body: Body, atom: Any, factor: float) -> float | None:
    """Returns the lowest masking level among the constants that a bias is computed from; None if there is none."""
    levels = [-abs(number * factor) for number in _constants(body, atom, _MAX_DEPTH)]
    return min((level for level in levels if level <= _MASKED_SCORE), default=None)


_MAX_DEPTH = 12  # equations between a bias and a constant that it is computed from
_ARITHMETIC = {"mul", "add", "sub", "neg", "select_n", "max", "min", "convert_element_type", "stop_gradient"}


def _constants(body: Body, atom: Any, depth: int) -> Iterator[float]:
    """Yields the constants that a value is computed from by arithmetic and selection."""
    if (number := body.number(atom)) is not None:
        yield number
    elif body.is_constant(atom):
        if (value := _inspected(body, atom)) is not None:
            yield from (float(value.min()), float(value.max()))
    elif depth and (eqn := body.producer(atom)) is not None:
        if eqn.primitive.name in _ARITHMETIC:
            for operand in eqn.invars:
                yield from _constants(body, operand, depth - 1)
        elif view(eqn) is not None:
            yield from _constants(body, eqn.invars[0], depth - 1)


def _trace_scores(body: Body, atom: Any, labels: tuple[Any, ...], scores: Scores) -> Scores:
    """Same as `trace_scores` for a value with these labels, without checking that the masks can be combined."""
    while (eqn := body.producer(atom)) is not None:
        name = eqn.primitive.name
        scores = replace(scores, stopped_at=name)
        if name == "dot_general":
            return replace(scores, product=(eqn, labels))
        if name in ("mul", "div"):
            value = body.number(eqn.invars[1])
            side = 0
            if value is None and name == "mul":
                value, side = body.number(eqn.invars[0]), 1
            if value is None or value <= 0:
                return scores
            scores = replace(scores, scale=scores.scale * (value if name == "mul" else 1 / value))
        elif name == "select_n" and len(eqn.invars) == 3:
            fills = [body.number(operand) for operand in eqn.invars[1:]]
            low = [fill is not None and fill * scores.scale <= _MASKED_SCORE for fill in fills]
            if low[0] == low[1]:
                return scores
            which = Operand(eqn.invars[0], labels if eqn.invars[0].aval.ndim else ())
            fill = fills[low.index(True)]
            assert fill is not None
            parts = _split_mask(body, which, keep=low[0])
            masks = (Mask(operand, keep, fill * scores.scale) for operand, keep in parts)
            scores = replace(scores, masks=(*scores.masks, *masks))
            side = 1 + low.index(False)
        elif name in ("add", "sub"):
            return _trace_sum(body, eqn, labels, scores)
        else:
            dims = view(eqn)
            if dims is None or repeats(eqn) or not _preserves_values(eqn):
                return scores
            labels, side = _operand_labels(eqn, dims, labels), 0
        scores = replace(scores, eqns=(*scores.eqns, eqn))
        atom = eqn.invars[side]
        if math.prod(atom.aval.shape) != math.prod(eqn.outvars[0].aval.shape):
            return scores
    return scores


def _trace_sum(body: Body, eqn: Any, labels: tuple[Any, ...], scores: Scores) -> Scores:
    """Traces the side of a sum that comes from the product; the other side is a bias or a mask."""
    if sum(each.primitive.name in ("add", "sub") for each in scores.eqns) == _MAX_SUMS:
        return scores
    for side in (0, 1) if eqn.primitive.name == "add" else (0,):
        own, other = eqn.invars[side], eqn.invars[1 - side]
        if own.aval.shape != eqn.outvars[0].aval.shape:
            continue
        found = _trace_scores(body, own, labels, replace(scores, eqns=(*scores.eqns, eqn), stopped_at=None))
        if found.product is None:
            if found.stopped_at not in (None, "broadcast_in_dim"):  # where tracing a mask or a bias stops
                scores = replace(scores, stopped_at=found.stopped_at)
            continue
        if body.number(other) is not None:  # adding a scalar does not change the softmax
            return found
        factor = scores.scale * (1 if eqn.primitive.name == "add" else -1)
        bias = _strip_broadcasts(body, Operand(other, labels if other.aval.ndim else ()))
        return replace(found, biases=(*found.biases, (bias, factor)))
    return scores


def _bias_to_mask(body: Body, bias: Operand, factor: float) -> Mask | None:
    """Returns a bias as a mask, if it is 0 at some keys, including the query's own, and very low at all others. If all keys
    of a query were masked, its scores would still count: so only bands that include the diagonal are masks."""
    source, _ = _trace_views(body, bias, lambda eqn: eqn.primitive.name == "convert_element_type")
    eqn, numbers = body.producer(source.atom), None
    if eqn is not None and eqn.primitive.name == "select_n" and len(eqn.invars) == 3:
        fills = [body.number(side) for side in eqn.invars[1:]]
        numbers = None if None in fills else np.asarray(fills)
    if numbers is None:
        numbers = _inspected(body, bias.atom)
    low = np.zeros(0) if numbers is None else numbers[numbers != 0] * factor
    if not low.size or low.max() > _MASKED_SCORE or not _includes_diagonal(body, bias.atom, keep=True):
        return None
    return Mask(bias, True, float(low.max()))


def _inspected(body: Body, atom: Any) -> np.ndarray | None:
    """Returns the value of a floating constant that is not too large to be inspected; None for other values."""
    is_inspected = jnp.issubdtype(atom.aval.dtype, jnp.floating) and 0 < math.prod(atom.aval.shape) <= _MAX_INSPECTED
    return np.asarray(body.value(atom), np.float64) if is_inspected and body.is_constant(atom) else None


def _includes_diagonal(body: Body, atom: Any, keep: bool) -> bool:
    """Whether a mask is known to be a band that includes the diagonal, so that each query attends to its own position."""
    found = inequalities(body, atom, negated=not keep)
    if found is None:
        return False
    sizes = {n for _, *slopes in found for n, slope in zip(atom.aval.shape, slopes, strict=True) if slope}
    return len(sizes) <= 1 and all(sum(slopes) == 0 and start >= 0 for start, *slopes in found)


def _split_mask(body: Body, operand: Operand, keep: bool) -> list[tuple[Operand, bool]]:
    """Splits a mask into masks that are combined by `and`, each once and with its `keep`."""
    found, seen, todo = list[tuple[Operand, bool]](), set[Any](), [(operand, keep)]
    while todo:  # no recursion: a mask may be combined of many
        operand, keep = todo.pop()
        operand = _strip_broadcasts(body, operand)
        if (key := (id(operand.atom), operand.labels, keep)) in seen:
            continue
        seen.add(key)
        eqn = body.producer(operand.atom)
        name, operands = ("", []) if eqn is None else (eqn.primitive.name, eqn.invars)
        if name == "not":
            todo.append((Operand(operands[0], operand.labels), not keep))
        elif name == ("and" if keep else "or") and all(atom.aval.ndim == len(operand.labels) for atom in operands):
            todo += [(Operand(atom, operand.labels), keep) for atom in reversed(operands)]
        else:
            found.append((operand, keep))
    return found


def _strip_broadcasts(body: Body, operand: Operand) -> Operand:
    """Returns the value that a mask or a bias is broadcast from, without labels for dims of size 1."""

    def is_followed(eqn: Any) -> bool:
        return eqn.primitive.name != "stop_gradient" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype

    operand, _ = _trace_views(body, operand, is_followed)
    shape = operand.atom.aval.shape
    return Operand(operand.atom, tuple(None if n == 1 else label for n, label in zip(shape, operand.labels, strict=True)))


def _operand_labels(eqn: Any, dims: Sequence[int | None], labels: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the labels of a view's operand, given those of its output."""
    before: list[Any] = [None] * eqn.invars[0].aval.ndim
    for dim, label in zip(dims, labels, strict=True):
        if dim is not None:
            before[dim] = label
    return tuple(before)
