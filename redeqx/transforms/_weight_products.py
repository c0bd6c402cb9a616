"""Products with weights: in fp8, and with gradients that are summed in a wider dtype, or computed by narrow transposes.

All three are optional, and work for any model.

**fp8**: both operands of a product are scaled and cast: activations and weights to e4m3, gradients to e5m2, in the forward
and the backward pass. Each scale is the largest power of two with which the operand's largest entry fits. Products are
summed in float32. Scales are computed from the current values (current scaling), so a step needs no history, and powers of
two cause no rounding. Products that stay in their dtype: the first, which reads the data; the last, which computes the
logits; those of attention; batched and grouped ones; and those with a side that is no multiple of 16.

**Wide gradients**: the gradient of a weight is a sum over the rows of all devices. JAX computes it in the weight's compute
dtype, so devices add bfloat16 values. Here products, gathers and broadcasts of weights sum it in a wider dtype, over rows
and over devices, and round once. Convolutions and grouped matmuls are unchanged.

**Narrow transposes**: the gradient of a weight is a product of the layer's input `[rows, in]` and its output's gradient
`[rows, out]`, contracted over rows. XLA for CPUs multiplies `[m, k]` by `[k, n]`, so it first copies one factor to a
transpose: the one whose dim comes first in the weight as it is stored. For an output head `[vocab, d]` that is the gradient
of all logits. Instead the transpose of the weight's gradient is computed if that moves fewer numbers, its own transpose
included. XLA would undo this, as the transpose of a product is the product of swapped factors; a barrier prevents it. GPUs
and TPUs transpose within their products. Where the wide factor is larger than the processor's caches, as the 64 MiB of
gradients of GPT-2's head with 8192 tokens, that gradient takes 0.66 of the processor time by itself, and a step with six
layers 0.91. The 12 MiB of an MLP gain 3 % by themselves, and nothing that could be measured in a loss
(`tests/benchmarks/README.md`; jax 0.10.2; 2026-11-26).

Source: FP8 formats (arXiv:2209.05433); first and last products as in DeepSeek-V3 (arXiv:2412.19437); scales that are powers
of two as in the MX formats (arXiv:2310.10537). Cost of fp8: a pass over each operand for its largest entry, and an
all-reduce of one number if the operand is split. Cost of wide gradients: twice the bytes of their reduction.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..dims import Related, repeats
from ..tracing import BY_WEIGHT, SPREAD, Rule, Site, WeightUses, entered, equations, fold, n_bytes, plain, run
from ._gather import gather_without_derivative

_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_TILE = 16  # cuBLAS multiplies fp8 matrices whose sides are multiples of this


@dataclass(frozen=True)
class WeightProducts(Rule):
    """Multiplies with weights in fp8, sums their gradients in a wider dtype, or computes these by narrow transposes."""

    n_weights: int  # the number of parameters, which are the function's first inputs
    fp8: bool = False  # whether to multiply eligible products in fp8
    gradients: Any = None  # the dtype in which gradients of narrower weights are summed; None for the weights' dtype
    # Whether to multiply the rounded operands in float32, with the same results. CPUs need this: XLA has no fp8 product for
    # them, and none of bfloat16 with sums in float32.
    emulated: bool = False
    narrow: bool = False  # whether to transpose the narrower factor of other gradients of weights
    min_bytes: int = 2**25  # the least size of a wide factor that must not be transposed
    uses: Any = None  # the `WeightUses` of one function

    def of(self, closed: Any) -> Rule | None:
        is_needed = self.fp8 or self.gradients is not None or any(map(self._is_large, equations(closed)))
        return replace(self, uses=WeightUses(closed, self.n_weights)) if is_needed else None

    def claims(self, eqn: Any) -> bool:
        return self._widens(eqn) or (self.fp8 and _is_for_fp8(eqn, self.uses)) or self._narrows(eqn)

    def _is_large(self, eqn: Any) -> bool:
        is_product = self.narrow and eqn.primitive.name == "dot_general"
        return is_product and any(n_bytes(atom) >= self.min_bytes for atom in (*eqn.invars, *eqn.outvars))

    def _narrows(self, eqn: Any) -> bool:
        """Whether an equation is a product with a matrix, all of one dtype, whose wider factor is large."""
        side = self.uses.side(eqn) if self._is_large(eqn) else None
        if side is None:
            return False
        contracted, batched = eqn.params["dimension_numbers"]
        weight, other = (eqn.invars[i].aval for i in (side, 1 - side))
        is_matrix = not any(batched) and len(contracted[side]) == 1 and weight.ndim == 2 and weight.size
        if not is_matrix or len({var.aval.dtype for var in (*eqn.invars, *eqn.outvars)}) > 1:
            return False
        n_rows = other.size // weight.shape[contracted[side][0]]
        is_large = n_rows * max(weight.shape) * weight.dtype.itemsize >= self.min_bytes
        return is_large and n_rows * abs(weight.shape[0] - weight.shape[1]) > weight.size

    def _widens(self, eqn: Any) -> bool:
        """Whether the gradient of an equation's weight is summed in a wider dtype than the weight's."""
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
        weight, store = gather_without_derivative(ins[side]) if widens else (plain(ins[side]), lambda gradient: gradient)
        values = [weight if i == side else plain(value) for i, value in enumerate(ins)]
        dtype = self.gradients if widens else weight.dtype  # in which the weight's gradient is summed
        if eqn.primitive.name == "dot_general":
            in_fp8 = self.fp8 and _is_for_fp8(eqn, self.uses)
            options = {"in_fp8": in_fp8, "emulated": self.emulated, "narrow": not (widens or in_fp8)}
            return run_instead(eqn, _product(eqn, side, dtype, store, **options), values)
        if eqn.primitive.name in SPREAD:  # the implicit broadcast, then the equation
            shape = eqn.outvars[0].aval.shape
            values[side] = _linear(weight, lambda w: jnp.broadcast_to(w, shape), dtype, store)(weight)
            return run(eqn, values)
        return run_instead(eqn, _linear(weight, lambda *values: run(eqn, values)[0], dtype, store), values)


_SUMMED = ("dot_general", "gather", "broadcast_in_dim", *SPREAD)


def _is_for_fp8(eqn: Any, uses: WeightUses) -> bool:
    """Whether an equation is a product with a weight that is eligible for fp8."""
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
    """Counts the products of a traced function that are multiplied in fp8, and all its products with a weight. Its first
    `n_weights` inputs are weights."""
    uses = WeightUses(closed, n_weights)
    return _count(closed, uses, ("dot_general",), lambda eqn: _is_for_fp8(eqn, uses))


def wide_products(closed: Any, n_weights: int, dtype: Any) -> tuple[int, int]:
    """Counts the products and convolutions with a weight that are computed in a wider dtype than `dtype`, and all of them. A
    product is computed in a wider dtype if one of its operands has a wider dtype."""
    bits = jnp.finfo(dtype).bits

    def is_wide(eqn: Any) -> bool:
        return any(jnp.issubdtype(x.aval.dtype, jnp.floating) and jnp.finfo(x.aval.dtype).bits > bits for x in eqn.invars)

    return _count(closed, WeightUses(closed, n_weights), BY_WEIGHT, is_wide)


def _count(closed: Any, uses: WeightUses, names: Collection[str], predicate: Callable[[Any], bool]) -> tuple[int, int]:
    """Counts the equations of these primitives that use a weight and satisfy the predicate, and all that use a weight. The
    body of a loop counts once for each iteration."""

    def count(eqn: Any) -> dict[str, int] | None:
        is_use = eqn.primitive.name in names and uses.side(eqn) is not None
        return {"found": predicate(eqn), "all": 1} if is_use else None

    counted = fold(closed.jaxpr, count, lambda eqn: entered(eqn)._replace(is_choice=False))
    return counted["found"], counted["all"]


# --- the products ----------------------------------------------------------------------------------------------------


class _Scaled(NamedTuple):
    """An operand of a product. It stands for `values * unscale`, or for `values` if `unscale` is None."""

    values: Array
    unscale: Array | None = None


def _scaled(x: Array, dtype: Any) -> _Scaled:
    """Casts an array to fp8, scaled by the largest power of two with which all its entries fit."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x))
    ratio = float(jnp.finfo(dtype).max) / jnp.maximum(largest, 2.0**-100)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(0xFF800000)  # clears the mantissa
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)  # fp8 would hide an infinite value
    return _Scaled((x * scale).astype(dtype), 1 / scale)


def _multiply(lhs: _Scaled, rhs: _Scaled, dims: Any, precision: Any, dtype: Any, *, emulated: bool) -> Array:
    """Returns the product in a dtype; the arguments are those of `dot_general`, and `emulated` is that of the rule."""
    # Scaled products could overflow in float16.
    wide = jnp.float32 if emulated or (lhs.unscale is not None and dtype == jnp.float16) else dtype
    left, right = (x.values.astype(wide) if emulated else x.values for x in (lhs, rhs))
    out = jax.lax.dot_general(left, right, dims, precision, wide)
    if lhs.unscale is not None and rhs.unscale is not None:
        out = out * (lhs.unscale * rhs.unscale).astype(out.dtype)
    return out if dtype is None else out.astype(dtype)


def _product(
    eqn: Any, side: int, dtype: Any, store: Callable[[Array], Array], *, in_fp8: bool, emulated: bool, narrow: bool
) -> Any:
    """Returns the product of an equation as a function with a custom derivative. Operand `side` is the weight. Its gradient
    is summed in `dtype`, and `store` reshards it to the storage sharding."""
    out_dtype, avals, related = eqn.outvars[0].aval.dtype, [var.aval for var in eqn.invars], Related(eqn)
    # The backward pass must not use cuBLAS's less precise sums in fp8 (XLA's `use_fast_accum`).
    precision = jax.lax.Precision.HIGHEST if in_fp8 else eqn.params["precision"]

    @jax.custom_vjp
    def product(lhs: Array, rhs: Array) -> Array:
        return forward(lhs, rhs)[0]

    def forward(lhs: Array, rhs: Array) -> Any:
        if not in_fp8:
            return run(eqn, [lhs, rhs])[0], (_Scaled(lhs), _Scaled(rhs))
        operands = _scaled(lhs, _E4M3), _scaled(rhs, _E4M3)
        return _multiply(*operands, eqn.params["dimension_numbers"], None, out_dtype, emulated=emulated), operands

    def backward(operands: Any, g: Array) -> Any:
        g_scaled = _scaled(g, _E5M2) if in_fp8 else _Scaled(g)
        grads = []
        for i, (aval, other) in enumerate(zip(avals, reversed(operands), strict=True)):
            own = aval.dtype if in_fp8 else eqn.params["preferred_element_type"]
            summed_in = dtype if i == side else own
            factors, (dims, order) = (g_scaled, other), _gradient_dims(related, i)
            is_narrow = narrow and i == side
            if is_narrow and aval.shape[order[0]] > aval.shape[order[1]]:  # more outputs than inputs
                factors, dims, order = factors[::-1], tuple(each[::-1] for each in dims), order[::-1]
            is_emulated = emulated and (in_fp8 or summed_in != aval.dtype)
            grad = _multiply(*factors, dims, precision, summed_in, emulated=is_emulated)
            grad = jax.lax.transpose(jax.lax.optimization_barrier(grad) if is_narrow else grad, order)
            grads.append((store(grad) if i == side else grad).astype(aval.dtype))
        return tuple(grads)

    product.defvjp(forward, backward)
    return product


def _gradient_dims(related: Related, side: int) -> tuple[Any, list[int]]:
    """Returns how to multiply a product's output gradient and one operand to the gradient of the other, operand `side`:
    the dimension numbers of the product, and the order of its dims."""
    of_g, of_other, own = related.outs[0], related.ins[1 - side], related.ins[side]
    contracted = [dim for dim in of_other if dim not in own]
    batched = [dim for dim in of_g if dim in own and dim in of_other]
    dims = tuple(tuple([of.index(dim) for dim in each] for of in (of_g, of_other)) for each in (contracted, batched))
    kept = [dim for of in (of_g, of_other) for dim in of if dim not in (*contracted, *batched)]
    return dims, [[*batched, *kept].index(dim) for dim in own]


def _linear(aval: Any, linear: Callable[..., Array], dtype: Any, store: Callable[[Array], Array]) -> Callable[..., Array]:
    """Returns a function that is linear in a weight, its first argument, with a custom derivative: a gather from it, or a
    broadcast of it. `aval` has the weight's shape and dtype; `dtype` and `store` are as for `_product`."""

    @jax.custom_vjp
    def fn(weight: Array, *rest: Array) -> Array:
        return linear(weight, *rest)

    def forward(weight: Array, *rest: Array) -> Any:
        return linear(weight, *rest), rest  # not `fn`: a derivative of this derivative sees what it can differentiate

    def backward(rest: Any, g: Array) -> Any:
        wide = jax.ShapeDtypeStruct(aval.shape, dtype)
        (grad,) = jax.linear_transpose(lambda weight: linear(weight, *rest), wide)(g.astype(dtype))
        return (store(grad).astype(aval.dtype), *[None] * len(rest))

    fn.defvjp(forward, backward)
    return fn


def run_instead(eqn: Any, fn: Callable[..., Array], values: Sequence[Any]) -> list[Any]:
    """Computes a function instead of an equation, with the equation's name scope and source line."""
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    (call,) = jax.make_jaxpr(fn)(*shapes).jaxpr.eqns
    return run(call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info), values)
