"""What stands between two products: a softmax, and what is done to the scores before it.

The dims of a softmax's input are its labels. They are followed back, through scales, masks, biases, casts and transposes, to
the product that made the scores; and on to the product that reads the weights. `_fuse_attention` decides what it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from ..tracing import Body, repeats, view
from ._bands import inequalities

_LOW = -1e4  # a score as low as that weighs nothing
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


@dataclass
class Scores:
    """What is done between the product of queries and keys and the softmax.

    **Arguments:**

    - `eqns`: the equations, in any order.
    - `scale`: of the product.
    - `masks`: with whether True is seen.
    - `biases`: with the factor of each.
    - `product`: the product, and its dims' labels.
    - `stop`: the primitive that is no part of an attention, where there is one.
    """

    eqns: list[Any] = field(default_factory=list)
    scale: float = 1.0
    masks: list[tuple[Operand, bool]] = field(default_factory=list)
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
        if dims is None or repeats(eqn) or sorted(d for d in dims if d is not None) != list(range(eqn.invars[0].aval.ndim)):
            return None
        before = [dims[dim] for dim in back]
        back, atom = tuple(dim for dim in before if dim is not None), eqn.invars[0]
        if len(back) < len(before):  # a dim of size 1 that is new
            return None
        eqns.append(eqn)
    return None


def softmax_of(body: Body, eqn: Any) -> tuple[Any, list[Any], int] | None:
    """What a softmax is taken of, its equations and its dim, where this equation makes one."""
    if len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "custom_jvp_call":
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
    """The first equation that is none of these, on the way back along the operands that are no literals, and the way."""
    eqns = []
    while (eqn := body.producer(atom)) is not None and eqn.primitive.name in names:
        eqns.append(eqn)
        atom = next((operand for operand in eqn.invars if not isinstance(operand, jex.Literal)), None)
        if atom is None:
            return None, []
    return eqn, eqns


# --- from the softmax to the product of queries and keys --------------------------------------------------------------


def follow_scores(body: Body, atom: Any, labels: tuple[Any, ...], scores: Scores) -> bool:
    """Fill `scores` with what leads to a value of these labels; False where that is something else."""
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
            scores.masks += _conjuncts(body, which, is_seen=low[0])
            side = 1 + low.index(False)
        elif name in ("add", "sub"):
            return _follow_sum(body, eqn, labels, scores)
        else:
            dims = view(eqn)
            if dims is None or repeats(eqn) or name in ("slice", "dynamic_slice", "stop_gradient"):
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
        if not follow_scores(body, own, labels, tried):
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


def _as_mask(body: Body, bias: Operand, factor: float) -> tuple[Operand, bool] | None:
    """The mask that a bias stands for: zero where a key is seen and very low elsewhere, but never low for all keys."""
    eqn = body.producer(bias.atom)
    if eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = body.producer(eqn.invars[0])
    if eqn is None or eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    fills = [_scalar(body, side) for side in eqn.invars[1:]]
    if None in fills or 0 not in fills or min(fill * factor for fill in fills if fill is not None) > _LOW:
        return None
    is_seen = fills[1] == 0
    found = inequalities(body, eqn.invars[0], negated=not is_seen)
    # Where a query saw no key at all, its scores would still count under the low numbers: only bands with the diagonal.
    of_band = {n for of in found or () for n, slope in zip(eqn.invars[0].aval.shape, of.slopes, strict=True) if slope}
    if found is None or len(of_band) > 1 or any(sum(of.slopes) != 0 or of.start < 0 for of in found):
        return None
    return Operand(eqn.invars[0], bias.labels), is_seen


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
