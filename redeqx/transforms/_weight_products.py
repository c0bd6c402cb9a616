"""Products with weights: multiplied in fp8, and gradients of weights summed in a wider dtype than they are computed with.

Two things, each by choice, for any model. In **fp8** both operands of a product are scaled, each by one power of two so that
its largest entry just fits, and cast: activations and weights to e4m3, gradients to e5m2, forward and backward. Sums of
products are in float32. The scale follows from the values at hand (current scaling), so a step needs no history, and powers
of two round nothing. The first product, which reads the data, and the last, which makes the logits, stay as they are, as do
products of attention, batched products, and those with a side that is no multiple of 16.

**Wide gradients**: the gradient of a weight is a sum over the rows of all devices. JAX makes it in the dtype that the weight
is computed with, so devices add up bfloat16. Here products, lookups and broadcasts of weights sum it in a wider dtype, over
rows and over devices, and round once. Convolutions stay as they are.

Source: FP8 formats (arXiv:2209.05433); first and last products as in DeepSeek-V3 (arXiv:2412.19437), scaling by powers of
two as in its MX formats (arXiv:2310.10537). Cost: of fp8, a pass over each operand for its largest entry, and one all-reduce
of a number where that is split; of wide gradients, twice the bytes of their reduction.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..tracing import SPREAD, Rule, Site, WeightUses, all_inside, n_iterations, plain, repeats, run
from ._gather import gathered

_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_TILE = 16  # cuBLAS multiplies fp8 matrices whose sides are multiples of this


@dataclass(frozen=True)
class WeightProducts(Rule):
    """Computes with weights in fp8, or sums their gradients in another dtype, or both.

    **Arguments:**

    - `n_weights`: how many of the function's first inputs are parameters.
    - `fp8`: whether products that can are multiplied in fp8.
    - `gradients`: the dtype in which gradients are summed, where weights have a narrower one; None for that of the weights.
    - `emulated`: whether operands are multiplied in float32, as on CPUs, for which XLA has no product of bfloat16 that is
        summed in float32, and none of fp8. The numbers are the same.
    """

    n_weights: int
    fp8: bool = False
    gradients: Any = None
    emulated: bool = False

    def of(self, closed: Any) -> Rule | None:
        return _WeightProductsOf(WeightUses(closed, self.n_weights), self.fp8, self.gradients, self.emulated)


@dataclass(frozen=True)
class _WeightProductsOf(Rule):
    """The rule for one function."""

    uses: WeightUses
    fp8: bool
    gradients: Any
    emulated: bool

    def claims(self, eqn: Any) -> bool:
        return self._widens(eqn) or (self.fp8 and _is_for_fp8(eqn, self.uses))

    def _widens(self, eqn: Any) -> bool:
        """Whether the gradient of the weight that an equation uses is summed in a wider dtype than it has."""
        side = self.uses.side(eqn)
        if side is None or self.gradients is None or eqn.primitive.name not in _SUMMED:
            return False
        dtype = eqn.invars[side].aval.dtype
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= jnp.finfo(self.gradients).bits:
            return False
        if eqn.primitive.name in SPREAD:
            return eqn.invars[side].aval.shape != eqn.outvars[0].aval.shape
        return eqn.primitive.name != "broadcast_in_dim" or repeats(eqn)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        side, widens = self.uses.side(eqn), self._widens(eqn)
        assert side is not None, "it is claimed"
        weight, store = gathered(ins[side]) if widens else (plain(ins[side]), lambda gradient: gradient)
        values = [weight if i == side else plain(value) for i, value in enumerate(ins)]
        of_weight = _OfWeight(side, self.gradients if widens else weight.dtype, store)
        if eqn.primitive.name == "dot_general":
            in_fp8 = self.fp8 and _is_for_fp8(eqn, self.uses)
            return _in_place_of(eqn, _product(eqn, of_weight, in_fp8, self.emulated), values)
        if eqn.primitive.name in SPREAD:  # the broadcast that the equation implies, and the equation
            shape = eqn.outvars[0].aval.shape
            values[side] = _linear(weight, lambda w: jnp.broadcast_to(w, shape), of_weight)(weight)
            return run(eqn, values)
        return _in_place_of(eqn, _linear(weight, lambda *values: run(eqn, values)[0], of_weight), values)


_SUMMED = ("dot_general", "gather", "broadcast_in_dim", *SPREAD)


class _OfWeight(NamedTuple):
    """How the gradient of the weight of an equation is made.

    **Arguments:**

    - `side`: which operand is the weight.
    - `dtype`: in which its gradient is summed.
    - `store`: brings its gradient to where the weight is stored.
    """

    side: int
    dtype: Any
    store: Callable[[Array], Array]


def _is_for_fp8(eqn: Any, uses: WeightUses) -> bool:
    """Whether an equation is a product with a weight that can be, and is to be, in fp8."""
    if eqn.primitive.name != "dot_general" or uses.side(eqn) is None or not uses.is_between(eqn):
        return False
    (contracted, batched), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    if any(batched) or not (precision is None or set(precision) == {jax.lax.Precision.DEFAULT}):
        return False
    for var, dims in zip(eqn.invars, contracted, strict=True):
        n_contracted = math.prod(var.aval.shape[dim] for dim in dims)
        if not jnp.issubdtype(var.aval.dtype, jnp.floating) or n_contracted % _TILE:
            return False
        if not var.aval.size or var.aval.size // n_contracted % _TILE:
            return False
    return True


def fp8_products(closed: Any, n_weights: int) -> tuple[int, int]:
    """How many products of a traced function are multiplied in fp8, and how many with a weight there are.

    **Arguments:**

    - `n_weights`: as for `WeightProducts`.
    """
    uses = WeightUses(closed, n_weights)
    return _count(closed.jaxpr, uses, ("dot_general",), lambda eqn: _is_for_fp8(eqn, uses))


def wide_products(closed: Any, n_weights: int, dtype: Any) -> tuple[int, int]:
    """How many products and convolutions with a weight of a traced function are computed in a dtype wider than this one, as
    what the weight is multiplied with is wider; and how many there are.

    **Arguments:**

    - `n_weights`: as for `WeightProducts`.
    """
    bits = jnp.finfo(dtype).bits

    def is_wide(eqn: Any) -> bool:
        return any(jnp.issubdtype(x.aval.dtype, jnp.floating) and jnp.finfo(x.aval.dtype).bits > bits for x in eqn.invars)

    return _count(closed.jaxpr, WeightUses(closed, n_weights), ("dot_general", "conv_general_dilated"), is_wide)


def _count(jaxpr: Any, uses: WeightUses, names: Sequence[str], is_one: Callable[[Any], bool]) -> tuple[int, int]:
    """How many equations of these names that use a weight are of a kind, and how many there are; of loops as often as they
    run."""
    found, every = 0, 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names and uses.side(eqn) is not None:
            found, every = found + is_one(eqn), every + 1
        times = n_iterations(eqn)
        for inner in all_inside(eqn):
            more = _count(inner.jaxpr, uses, names, is_one)
            found, every = found + times * more[0], every + times * more[1]
    return found, every


# --- the products ----------------------------------------------------------------------------------------------------


class _Scaled(NamedTuple):
    """An operand of a product: `values * unscale`; without `unscale`, `values`."""

    values: Array
    unscale: Array | None = None


def _scaled(x: Array, dtype: Any) -> _Scaled:
    """An array in fp8, scaled by the largest power of two with which all its entries fit."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x))
    ratio = float(jnp.finfo(dtype).max) / jnp.maximum(largest, 2.0**-100)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0xFF800000)  # without the mantissa
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)  # fp8 would hide an infinite value
    return _Scaled((x * scale).astype(dtype), 1 / scale)


class _Dot(NamedTuple):
    """How operands are multiplied: the fields as of `dot_general`, and `emulated` as of the rule."""

    dims: Any
    precision: Any
    dtype: Any
    emulated: bool

    def __call__(self, lhs: _Scaled, rhs: _Scaled) -> Array:
        # Float16 could not hold a product that is still scaled.
        wide = jnp.float32 if self.emulated or (lhs.unscale is not None and self.dtype == jnp.float16) else self.dtype
        left, right = (x.values.astype(wide) if self.emulated else x.values for x in (lhs, rhs))
        out = jax.lax.dot_general(left, right, self.dims, self.precision, wide)
        if lhs.unscale is not None and rhs.unscale is not None:
            out = out * (lhs.unscale * rhs.unscale).astype(out.dtype)
        return out if self.dtype is None else out.astype(self.dtype)


def _product(eqn: Any, of_weight: _OfWeight, in_fp8: bool, emulated: bool) -> Callable[..., Array]:
    """The product of an equation, and its derivative."""
    dims, given = eqn.params["dimension_numbers"], eqn.params["precision"]
    out = eqn.outvars[0].aval
    of = [var.aval for var in eqn.invars]
    # Sums of the backward pass are not cut short, as cuBLAS otherwise may in fp8 (XLA's `use_fast_accum`).
    precision = jax.lax.Precision.HIGHEST if in_fp8 else given

    @jax.custom_vjp
    def product(lhs: Array, rhs: Array) -> Array:
        return forward(lhs, rhs)[0]

    def forward(lhs: Array, rhs: Array) -> Any:
        if not in_fp8:
            return run(eqn, [lhs, rhs])[0], (_Scaled(lhs), _Scaled(rhs))
        operands = _scaled(lhs, _E4M3), _scaled(rhs, _E4M3)
        return _Dot(dims, None, out.dtype, emulated)(*operands), operands

    def backward(kept: Any, g: Array) -> Any:
        of_out = _scaled(g, _E5M2) if in_fp8 else _Scaled(g)
        grads = []
        for i, other in enumerate((kept[1], kept[0])):
            is_weight = i == of_weight.side
            own = of[i].dtype if in_fp8 else eqn.params["preferred_element_type"]
            dtype = of_weight.dtype if is_weight else own
            dot = _Dot(dims, precision, dtype, emulated and (in_fp8 or dtype != of[i].dtype))
            grad = _gradient(of_out, other, i, of[i].ndim, dot)
            grads.append((of_weight.store(grad) if is_weight else grad).astype(of[i].dtype))
        return tuple(grads)

    product.defvjp(forward, backward)
    return product


def _gradient(g: _Scaled, other: _Scaled, side: int, ndim: int, dot: _Dot) -> Array:
    """The gradient of one operand of a product: that of the output times the other operand.

    **Arguments:**

    - `side`, `ndim`: which operand it is of, and how many dims that has.
    - `dot`: the product, but for its dims as it is to be computed.
    """
    contracted, batched = dot.dims
    own, others = contracted[side], contracted[1 - side]
    own_batch, other_batch = batched[side], batched[1 - side]
    kept = [dim for dim in range(ndim) if dim not in (*own, *own_batch)]
    other_kept = [dim for dim in range(other.values.ndim) if dim not in (*others, *other_batch)]
    n_batch = len(own_batch)
    first = n_batch + (len(kept) if side == 0 else 0)  # of the other operand's dims in the output
    of_output = range(first, first + len(other_kept))
    grad = dot._replace(dims=((of_output, other_kept), (range(n_batch), other_batch)))(g, other)
    order = [*own_batch, *kept, *(own[i] for i in np.argsort(others))]
    return jax.lax.transpose(grad, np.argsort(order).tolist())


def _linear(aval: Any, of: Callable[..., Array], of_weight: _OfWeight) -> Callable[..., Array]:
    """A lookup in a weight, its first operand, or a broadcast of it, and its derivative; `aval` has the weight's shape."""

    @jax.custom_vjp
    def fn(weight: Array, *rest: Array) -> Array:
        return of(weight, *rest)

    def forward(weight: Array, *rest: Array) -> Any:
        return fn(weight, *rest), rest

    def backward(rest: Any, g: Array) -> Any:
        wide = jax.ShapeDtypeStruct(aval.shape, of_weight.dtype)
        (grad,) = jax.linear_transpose(lambda weight: of(weight, *rest), wide)(g.astype(of_weight.dtype))
        return (of_weight.store(grad).astype(aval.dtype), *[None] * len(rest))

    fn.defvjp(forward, backward)
    return fn


def _in_place_of(eqn: Any, fn: Callable[..., Array], values: Sequence[Any]) -> list[Any]:
    """The outputs of a function that stands for an equation, with the equation's name scope and source line."""
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    (call,) = jax.make_jaxpr(fn)(*shapes).jaxpr.eqns
    return run(call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info), values)
