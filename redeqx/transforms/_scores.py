"""What stands between two products: a softmax, and what is done to the scores before it.

The dims of a softmax's input are its labels. They are followed back, through scales, masks, biases, casts and transposes, to
the product that made the scores; and on to the product that reads the weights. `_fuse_attention` decides what it is.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ..tracing import Body, repeats, view
from ._bands import inequalities

_LOW = -1e4  # a score as low as that weighs nothing
_LOST = -1e9  # scores and biases are lost in the rounding of a sum with this
_LARGE = 2**22  # elements of a constant that is not looked into
SIZE = "size"  # the label of the dim that a product contracts: the size of a head


@dataclass(frozen=True)
class Operand:
    """A value and the labels of its dims; None for dims of size 1 that have none."""

    atom: Any
    labels: tuple[Any, ...]

    def arranged(self, read: Any, order: Sequence[Any]) -> Any:
        """The array with a dim for each of these labels, of size 1 where it has none."""
        x = read(self.atom)
        x = jnp.squeeze(x, [dim for dim, label in enumerate(self.labels) if label is None])
        labels = [label for label in self.labels if label is not None]
        x = jnp.transpose(x, [labels.index(label) for label in order if label in labels])
        return jnp.expand_dims(x, [dim for dim, label in enumerate(order) if label not in labels])


@dataclass(frozen=True)
class Mask:
    """Keys that are seen, and what the others' scores become.

    **Arguments:**

    - `is_seen`: whether True is seen.
    - `level`: the score of a key that is not seen, or what is added to it.
    - `bias`: the same as a bias with its factor, where it is added; None where it takes the place of the scores.
    """

    operand: Operand
    is_seen: bool
    level: float
    bias: tuple[Operand, float] | None = None


@dataclass
class Scores:
    """What is done between the product of queries and keys and the softmax.

    **Arguments:**

    - `eqns`: the equations, in any order.
    - `scale`: of the product.
    - `masks`: in any order.
    - `biases`: with the factor of each.
    - `product`: the product, and its dims' labels.
    - `stop`: the primitive that is no part of an attention, where there is one.
    """

    eqns: list[Any] = field(default_factory=list)
    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    biases: list[tuple[Operand, float]] = field(default_factory=list)
    product: tuple[Any, tuple[Any, ...]] | None = None
    stop: str | None = None


# --- the softmax ------------------------------------------------------------------------------------------------------


def weights_from(body: Body, atom: Any) -> tuple[list[Any], tuple[Any, list[Any], int], tuple[int, ...]] | None:
    """The softmax that a product's operand comes from, and the way there."""
    eqns: list[Any] = []
    back = tuple(range(len(atom.aval.shape)))  # for each dim of the operand, the dim of the value followed so far
    while (eqn := body.producer(atom)) is not None:
        if (softmax := softmax_of(body, eqn)) is not None:
            return eqns, softmax, back
        dims = view(eqn)
        if dims is None or repeats(eqn) or not _keeps_values(eqn):
            return None
        if sorted(d for d in dims if d is not None) != list(range(eqn.invars[0].aval.ndim)):
            return None
        before = [dims[dim] for dim in back]
        back, atom = tuple(dim for dim in before if dim is not None), eqn.invars[0]
        if len(back) < len(before):  # a dim of size 1 that is new
            return None
        eqns.append(eqn)
    return None


def _keeps_values(eqn: Any) -> bool:
    """Whether a view has the values and the gradient of its operand, but for a rounding to a dtype that kernels compute in.

    What is rounded further, or to integers, or has its gradient stopped, is meant to be.
    """
    if eqn.primitive.name == "convert_element_type":
        dtypes = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        return all(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16 for dtype in dtypes)
    if eqn.primitive.name == "reduce_precision":
        return 1 + eqn.params["exponent_bits"] + eqn.params["mantissa_bits"] >= 16
    return eqn.primitive.name not in ("stop_gradient", "slice", "dynamic_slice")


def softmax_of(body: Body, eqn: Any) -> tuple[Any, list[Any], int] | None:
    """What a softmax is taken of, its equations and its dim, where this equation makes one."""
    if len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "custom_jvp_call":
        if not _is_of_jax(eqn.params["call_jaxpr"]):  # it has another derivative, or it would not say one
            return None
        inner = body.inside(eqn)
        last = inner.producer(inner.closed.jaxpr.outvars[0])
        found = None if last is None else softmax_of(inner, last)
        if found is None or found[0] not in inner.closed.jaxpr.invars:
            return None
        return eqn.invars[inner.closed.jaxpr.invars.index(found[0])], [eqn], found[2]
    if eqn.primitive.name != "div":
        return None
    exp, (total, of_total) = body.producer(eqn.invars[0]), _back(body, eqn.invars[1], _ON_THE_WAY_TO_THE_SUM)
    if exp is None or exp.primitive.name != "exp" or total is None or total.primitive.name != "reduce_sum":
        return None
    summed, casts = total.invars[0], []
    if summed is not exp.outvars[0]:  # `jnp.sum` adds up in float32 what is in bfloat16
        casts = [body.producer(summed)]
        if casts[0] is None or casts[0].primitive.name != "convert_element_type" or casts[0].invars[0] is not exp.outvars[0]:
            return None
    if len(total.params["axes"]) != 1:
        return None
    members, axis, source = [eqn, *of_total, total, *casts, exp], int(total.params["axes"][0]), exp.invars[0]
    if not _is_sum_of_each(eqn, of_total, total, axis):
        return None
    shifted = body.producer(source)
    # Whatever is subtracted from all scores of a query changes nothing: mostly it is the largest.
    if shifted is not None and shifted.primitive.name == "sub" and _is_alike_along(body, shifted.invars[1], axis):
        most, of_most = _back(body, shifted.invars[1], _ON_THE_WAY_TO_THE_LARGEST)
        if most is not None and most.primitive.name == "reduce_max":
            members, source = [*members, shifted, *of_most, most], shifted.invars[0]
    return source, members, axis


def _is_of_jax(closed: Any) -> bool:
    """Whether JAX itself defines the function of a jaxpr."""
    file = getattr(closed.jaxpr.debug_info, "func_filename", None) or ""
    return file.startswith(os.path.dirname(jax.__file__) + os.sep)


_ON_THE_WAY_TO_THE_SUM = ("broadcast_in_dim", "reshape", "convert_element_type")
_ON_THE_WAY_TO_THE_LARGEST = ("broadcast_in_dim", "reshape", "stop_gradient", "max", "transpose", "convert_element_type")


def _is_sum_of_each(eqn: Any, way: Sequence[Any], total: Any, axis: int) -> bool:
    """Whether a quotient divides each entry by the sum along its own row, and not along that of another.

    **Arguments:**

    - `way`: the views from the divisor back to the sum.
    """
    divisor = eqn.invars[1].aval.shape
    if not divisor:  # a scalar: the sum of a vector
        return math.prod(eqn.outvars[0].aval.shape) == eqn.outvars[0].aval.shape[axis]
    back: list[int | None] = [dim if size != 1 else None for dim, size in enumerate(divisor)]
    for each in way:
        dims = view(each)
        if dims is None:
            return False
        back = [None if dim is None else dims[dim] for dim in back]
    kept = [dim for dim in range(len(divisor)) if dim != axis]
    sizes = total.outvars[0].aval.shape
    is_own = all(back[dim] == i or sizes[i] == 1 for i, dim in enumerate(kept))
    return is_own and (back[axis] is None or sizes[back[axis]] == 1)


def _is_alike_along(body: Body, atom: Any, dim: int) -> bool:
    """Whether an array has the same entries all along a dim."""
    if isinstance(atom, jex.Literal) or atom.aval.ndim == 0 or atom.aval.shape[dim] == 1:
        return True
    while (eqn := body.producer(atom)) is not None and (dims := view(eqn)) is not None:
        before = dims[dim]
        if before is None or eqn.invars[0].aval.shape[before] != atom.aval.shape[dim]:
            return eqn.primitive.name == "broadcast_in_dim"
        dim, atom = before, eqn.invars[0]
    return False


def _back(body: Body, atom: Any, names: Sequence[str]) -> tuple[Any, list[Any]]:
    """The first equation that is none of these, on the way back along the operands of most dims, and the way."""
    eqns = []
    while (eqn := body.producer(atom)) is not None and eqn.primitive.name in names:
        eqns.append(eqn)
        operands = [operand for operand in eqn.invars if not isinstance(operand, jex.Literal)]
        if not operands:
            return None, []
        atom = max(operands, key=lambda operand: operand.aval.ndim)  # beside it, the least that a maximum may be
    return eqn, eqns


# --- from the softmax to the product of queries and keys --------------------------------------------------------------


def follow_scores(body: Body, atom: Any, labels: tuple[Any, ...], scores: Scores) -> bool:
    """Fill `scores` with what leads to a value of these labels; False where that is something else, or masks that are not
    one mask."""
    return _follow(body, atom, labels, scores) and _settle_masks(body, scores)


def _settle_masks(body: Body, scores: Scores) -> bool:
    """Make biases of the masks that have to stay what is added; False where what is left is not one mask.

    A kernel weighs all keys alike where a query sees none. As written it is so too where all of them are at one level, but
    not where masks have several levels, or one at which scores and biases still count. (Where a mask's level is as low as
    what a bias hides keys with, as in two masks of -1e9 one of which is added, such a query may weigh some of them only as
    written.)
    """
    lows = [low for bias, factor in scores.biases if (low := _lowest(body, bias.atom, factor)) is not None]
    levels = {mask.level for mask in scores.masks}
    if all(_has_diagonal(body, mask.operand.atom, mask.is_seen) for mask in scores.masks):  # each query sees a key
        if not lows or max(levels, default=-math.inf) <= min(_LOST, *lows):
            return True
    elif not lows and len(levels) == 1 and (not scores.biases or max(levels) <= _LOST):
        return True
    added = [mask for mask in scores.masks if mask.bias is not None]
    scores.biases += [mask.bias for mask in added if mask.bias is not None]
    scores.masks = [mask for mask in scores.masks if mask.bias is None]
    lows, levels = [*lows, *(mask.level for mask in added)], {mask.level for mask in scores.masks}
    if not levels or (len(levels) == 1 and max(levels) <= min([_LOST, *lows])):
        return True
    scores.stop = "select_n"
    return False


def _lowest(body: Body, atom: Any, factor: float) -> float | None:
    """The lowest number that a bias seems to be made with, as a mask that is added is; None without one."""
    found = [-abs(number * factor) for number in _numbers(body, atom, _DEPTH)]
    return min((number for number in found if number <= _LOW), default=None)


_DEPTH = 12  # equations between a bias and the number that it is made with
_MADE_BY = {"mul", "add", "sub", "neg", "select_n", "max", "min", "convert_element_type", "stop_gradient"}


def _numbers(body: Body, atom: Any, depth: int) -> Iterator[float]:
    """The constants that a value is made of by sums, products and choices."""
    if (number := _scalar(body, atom)) is not None:
        yield number
    elif not isinstance(atom, jex.Literal) and body.is_constant(atom):
        if math.prod(atom.aval.shape) <= _LARGE and jnp.issubdtype(atom.aval.dtype, jnp.floating) and atom.aval.size:
            value = np.asarray(body.value(atom), np.float64)
            yield from (float(value.min()), float(value.max()))
    elif depth and (eqn := body.producer(atom)) is not None:
        if eqn.primitive.name in _MADE_BY:
            for operand in eqn.invars:
                yield from _numbers(body, operand, depth - 1)
        elif view(eqn) is not None:
            yield from _numbers(body, eqn.invars[0], depth - 1)


def _follow(body: Body, atom: Any, labels: tuple[Any, ...], scores: Scores) -> bool:
    """As `follow_scores`, whatever the masks are together."""
    while (eqn := body.producer(atom)) is not None:
        name = scores.stop = eqn.primitive.name
        if name == "dot_general":
            scores.product = (eqn, labels)
            return True
        if name in ("mul", "div"):
            value = _scalar(body, eqn.invars[1])
            side = 0
            if value is None and name == "mul":
                value, side = _scalar(body, eqn.invars[0]), 1
            if value is None or value <= 0:
                return False
            scores.scale *= value if name == "mul" else 1 / value
        elif name == "select_n" and len(eqn.invars) == 3:
            fills = [_scalar(body, operand) for operand in eqn.invars[1:]]
            low = [fill is not None and fill * scores.scale <= _LOW for fill in fills]
            if low[0] == low[1]:
                return False
            which = Operand(eqn.invars[0], labels if eqn.invars[0].aval.ndim else ())
            fill = fills[low.index(True)]
            assert fill is not None
            conjuncts = _conjuncts(body, which, is_seen=low[0])
            scores.masks += [Mask(operand, is_seen, fill * scores.scale) for operand, is_seen in conjuncts]
            side = 1 + low.index(False)
        elif name in ("add", "sub"):
            return _follow_sum(body, eqn, labels, scores)
        else:
            dims = view(eqn)
            if dims is None or repeats(eqn) or not _keeps_values(eqn):
                return False
            labels, side = _labels_before(eqn, dims, labels), 0
        scores.eqns.append(eqn)
        atom = eqn.invars[side]
        if isinstance(atom, jex.Literal) or math.prod(atom.aval.shape) != math.prod(eqn.outvars[0].aval.shape):
            return False
    return False


def _follow_sum(body: Body, eqn: Any, labels: tuple[Any, ...], scores: Scores) -> bool:
    """One side leads to the product, the other is a bias."""
    for side in (0, 1) if eqn.primitive.name == "add" else (0,):
        own, other = eqn.invars[side], eqn.invars[1 - side]
        tried = Scores(eqns=[eqn], scale=scores.scale)
        is_full = not isinstance(own, jex.Literal) and own.aval.shape == eqn.outvars[0].aval.shape
        if not is_full:
            continue
        if not _follow(body, own, labels, tried):
            if tried.stop not in (None, "broadcast_in_dim"):  # what a mask or a bias is made of
                scores.stop = tried.stop
            continue
        factor = scores.scale * (1 if eqn.primitive.name == "add" else -1)
        if _scalar(body, other) is None:  # the same number everywhere changes nothing
            bias = _without_repeats(body, Operand(other, labels if other.aval.ndim else ()))
            mask = _as_mask(body, bias, factor)
            tried.masks += [] if mask is None else [mask]
            tried.biases += [(bias, factor)] if mask is None else []
        scores.eqns += tried.eqns
        scores.masks += tried.masks
        scores.biases += tried.biases
        scores.scale, scores.product = tried.scale, tried.product
        return True
    return False


def _as_mask(body: Body, bias: Operand, factor: float) -> Mask | None:
    """The mask that a bias stands for: zero where a key is seen and very low elsewhere, but never low for all keys."""
    if (level := _low_elsewhere(body, bias.atom, factor)) is not None and _has_diagonal(body, bias.atom, is_seen=True):
        return Mask(bias, True, level, (bias, factor))
    eqn = body.producer(bias.atom)
    if eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = body.producer(eqn.invars[0])
    if eqn is None or eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    fills = [_scalar(body, side) for side in eqn.invars[1:]]
    level = min((fill * factor for fill in fills if fill is not None), default=0)
    if None in fills or 0 not in fills or level > _LOW:
        return None
    is_seen = fills[1] == 0
    # Where a query saw no key at all, its scores would still count under the low numbers: only bands with the diagonal.
    if not _has_diagonal(body, eqn.invars[0], is_seen):
        return None
    return Mask(Operand(eqn.invars[0], bias.labels), is_seen, level, (bias, factor))


def _low_elsewhere(body: Body, atom: Any, factor: float) -> float | None:
    """The highest of the low numbers that a constant has where it is not zero; None for anything else."""
    if isinstance(atom, jex.Literal) or not body.is_constant(atom) or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
        return None
    if not 0 < math.prod(atom.aval.shape) <= _LARGE:
        return None
    value = np.asarray(body.value(atom), np.float32)
    low = value[value != 0] * np.float32(factor)
    return float(low.max()) if low.size and low.max() <= _LOW else None


def _has_diagonal(body: Body, atom: Any, is_seen: bool) -> bool:
    """Whether a mask, as for `inequalities`, is known to be a band with the diagonal: each query sees its own position."""
    found = inequalities(body, atom, negated=not is_seen)
    if found is None:
        return False
    of_band = {n for of in found for n, slope in zip(atom.aval.shape, of.slopes, strict=True) if slope}
    return len(of_band) <= 1 and all(sum(of.slopes) == 0 and of.start >= 0 for of in found)


def _conjuncts(body: Body, operand: Operand, is_seen: bool) -> list[tuple[Operand, bool]]:
    """Masks that all have to hold, and of each whether True is seen."""
    operand = _without_repeats(body, operand)
    eqn = body.producer(operand.atom)
    if eqn is not None and eqn.primitive.name == "not":
        return _conjuncts(body, Operand(eqn.invars[0], operand.labels), not is_seen)
    if eqn is None or eqn.primitive.name != ("and" if is_seen else "or"):
        return [(operand, is_seen)]
    if any(isinstance(atom, jex.Literal) or atom.aval.ndim != len(operand.labels) for atom in eqn.invars):
        return [(operand, is_seen)]
    return [mask for atom in eqn.invars for mask in _conjuncts(body, Operand(atom, operand.labels), is_seen)]


def _without_repeats(body: Body, operand: Operand) -> Operand:
    """The value that a mask or a bias is a view of, without the dims along which it repeats."""
    while (eqn := body.producer(operand.atom)) is not None:
        dims, before = view(eqn), eqn.invars[0]
        if dims is None or isinstance(before, jex.Literal) or eqn.primitive.name in ("slice", "dynamic_slice"):
            break
        if eqn.primitive.name == "stop_gradient" or before.aval.dtype != operand.atom.aval.dtype:
            break
        operand = Operand(eqn.invars[0], _labels_before(eqn, dims, operand.labels))
    shape = operand.atom.aval.shape
    return Operand(operand.atom, tuple(None if n == 1 else label for n, label in zip(shape, operand.labels, strict=True)))


def _labels_before(eqn: Any, dims: Sequence[int | None], labels: Sequence[Any]) -> tuple[Any, ...]:
    """The labels of a view's operand, from those of its output."""
    before: list[Any] = [None] * eqn.invars[0].aval.ndim
    for dim, label in zip(dims, labels, strict=True):
        if dim is not None:
            before[dim] = label
    return tuple(before)


def _scalar(body: Body, atom: Any) -> float | None:
    """The number that a constant is everywhere; None for anything else."""
    while not isinstance(atom, jex.Literal) and (eqn := body.producer(atom)) is not None:
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
            break
        atom = eqn.invars[0]
    if isinstance(atom, jex.Literal):
        return float(atom.val) if np.ndim(atom.val) == 0 and not np.iscomplexobj(atom.val) else None
    if not body.is_constant(atom) or math.prod(atom.aval.shape) != 1 or not jnp.issubdtype(atom.aval.dtype, jnp.number):
        return None
    return float(np.asarray(body.value(atom)).reshape(()))
