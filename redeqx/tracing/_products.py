"""What a product is: one table of the primitives that multiply and sum, with their FLOPs. A multiply-add is two FLOPs."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ._fold import fold


def _dtype(eqn: Any) -> str:
    return str(eqn.invars[0].aval.dtype)


def kind_of_product(eqn: Any) -> str:
    """Returns `"attention"`, `"experts"` for rows in groups, `"convolution"` or `"matmul"`."""
    name = eqn.primitive.name
    if name in GROUPED:
        return "experts"
    return {"dot_general": "matmul", "conv_general_dilated": "convolution"}.get(name, "attention")


def matmul_flops(
    program: Any,
    *,
    with_recomputation: bool = True,
    with_masked: bool = True,
    key: Callable[[Any], str] = _dtype,
) -> Counter[str]:
    """Counts the FLOPs of the products in a jaxpr, or in one equation, by the dtype of their inputs.

    A loop of unknown length counts as one iteration, and a `cond` as its costliest branch.

    **Arguments:**

    - `with_recomputation`: whether to count what a backward pass computes again: in remats, and an attention's scores.
    - `with_masked`: whether to count the keys that a causal mask or a window excludes, which fused kernels skip.
    - `key`: by what to count, such as `kind_of_product`.
    """

    def count(eqn: Any) -> dict[str, int] | None:
        # JAX names the scope of what the gradient of a remat computes again.
        if not with_recomputation and "rematted_computation" in str(eqn.source_info.name_stack):
            return {}
        flops = product_flops(eqn, with_recomputation=with_recomputation)
        if flops and not with_masked and eqn.primitive.name in ("attention", "attention_gradient"):
            n_queries, n_keys = (var.aval.shape[-3] for var in eqn.invars[:2])
            flops = flops * _n_pairs(eqn.params["setting"], n_queries, n_keys) // (n_queries * n_keys)
        return None if flops is None else {key(eqn): flops}

    return fold(program, count, steps=lambda program: getattr(program, "eqns", (program,)))


def product_flops(eqn: Any, *, with_recomputation: bool = True) -> int | None:
    """Counts the FLOPs of an equation that is a product. Returns None for any other."""
    if eqn.primitive.name not in PRODUCTS:
        return None
    is_less = eqn.primitive.name == "attention_gradient" and not with_recomputation
    return PRODUCTS[eqn.primitive.name](eqn) - (_of_attention(eqn, 1, 0) if is_less else 0)


def _of_dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)


def _of_ragged_dot(eqn: Any) -> int:
    """Each row is multiplied with the matrix of its group alone."""
    numbers, (lhs, rhs) = eqn.params["ragged_dot_dimension_numbers"], (var.aval.shape for var in eqn.invars[:2])
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    others = {*contracted, *batched, *numbers.rhs_group_dimensions}
    return 2 * math.prod(lhs) * math.prod(size for dim, size in enumerate(rhs) if dim not in others)


def _of_grouped_matmul(eqn: Any) -> int:
    return 2 * math.prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]


def _of_convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    terms = math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]  # for each output feature
    # The gradient of a convolution with strides reads its input with zeros in between, which kernels do not multiply.
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms // math.prod(eqn.params["lhs_dilation"])


def _of_attention(eqn: Any, with_keys: int, with_values: int) -> int:
    """Counts the products whose inner dim is the size of a key, and those where it is that of a value, for all keys."""
    q, k, v = (var.aval.shape for var in eqn.invars[:3])
    return 2 * math.prod(q[:-1]) * k[-3] * (with_keys * q[-1] + with_values * v[-1])


def _n_pairs(setting: Any, n_queries: int, n_keys: int) -> int:
    """Counts the pairs of a query and a key that a causal mask and a window leave."""
    first, last = np.zeros(n_queries, np.int64), np.full(n_queries, n_keys - 1)
    rows = np.arange(n_queries)
    if setting.causal:
        last = np.minimum(last, rows)
    if setting.window is not None:
        first = np.maximum(first, rows - setting.window + 1)
        last = np.minimum(last, rows + setting.window - 1)
    return int(np.maximum(last - first + 1, 0).sum())


# Products of two operands, either of which may be a weight.
BY_WEIGHT: dict[str, Callable[[Any], int]] = {"dot_general": _of_dot, "conv_general_dilated": _of_convolution}
# Products of rows in groups, each with a matrix of its own, and the gradients of these matrices.
GROUPED: dict[str, Callable[[Any], int]] = {
    "ragged_dot_general": _of_ragged_dot,
    **dict.fromkeys(("grouped_matmul", "grouped_matmul_gradient"), _of_grouped_matmul),
}
PRODUCTS: dict[str, Callable[[Any], int]] = {
    **BY_WEIGHT,
    **GROUPED,
    "attention": partial(_of_attention, with_keys=1, with_values=1),
    "attention_gradient": partial(_of_attention, with_keys=3, with_values=2),
}
