"""Counts the FLOPs of a jaxpr's matmuls, convolutions and attentions."""

import math
from collections import Counter
from typing import Any

from ._inner import all_inside, n_iterations


def matmul_flops(jaxpr: Any, *, with_recomputation: bool = True) -> Counter[str]:
    """Counts the FLOPs of a jaxpr's matmuls, convolutions and attentions, by the dtype of their inputs.

    A multiply-add is two FLOPs. A loop of unknown length counts as one iteration, and a `cond` as its costliest branch.

    **Arguments:**

    - `with_recomputation`: whether to count the attention scores that an attention's gradient recomputes.
    """
    counted: dict[int, Counter[str]] = {}  # by jaxpr: calls of one jitted function share it

    def count(jaxpr: Any) -> Counter[str]:
        if id(jaxpr) in counted:
            return counted[id(jaxpr)]
        flops = counted[id(jaxpr)] = Counter[str]()
        for eqn in jaxpr.eqns:
            if (of_product := product_flops(eqn, with_recomputation=with_recomputation)) is not None:
                flops[str(eqn.invars[0].aval.dtype)] += of_product
                continue
            inner = [count(found.jaxpr) for found in all_inside(eqn)]
            if eqn.primitive.name == "cond":
                inner = [max(inner, key=lambda counts: counts.total(), default=Counter())]
            times = n_iterations(eqn)
            for counts in inner:
                flops.update({dtype: n * times for dtype, n in counts.items()})
        return flops

    return count(jaxpr)


# For each primitive of `kernels`, the number of products whose inner dim is the size of a key, and of a value. Keys that a
# causal mask excludes count too, as in a model without fused attention.
_ATTENTIONS = {"attention": (1, 1), "attention_gradient": (3, 2)}


def product_flops(eqn: Any, *, with_recomputation: bool = True) -> int | None:
    """Counts the FLOPs of an equation that is a matmul, a convolution or an attention. Returns None for any other."""
    if eqn.primitive.name in _ATTENTIONS:
        q, k, v = (var.aval.shape for var in eqn.invars[:3])
        with_keys, with_values = _ATTENTIONS[eqn.primitive.name]
        with_keys -= eqn.primitive.name == "attention_gradient" and not with_recomputation
        return 2 * math.prod(q[:-1]) * k[-3] * (with_keys * q[-1] + with_values * v[-1])
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
        return None
    lhs, rhs = (var.aval for var in eqn.invars)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(lhs.shape[dim] for dim in contracted)
    else:  # elements of the convolution kernel for each output feature
        terms = math.prod(rhs.shape) // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms
