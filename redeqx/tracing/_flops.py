"""Counts a jaxpr's floating point operations: matmuls, convolutions and attention."""

import math
from collections import Counter
from typing import Any

from ._inner import all_inside, n_iterations


def matmul_flops(jaxpr: Any, *, with_recomputation: bool = True) -> Counter[str]:
    """Floating point operations of a jaxpr's matmuls and convolutions, by the dtype of their inputs.

    A multiplication and its addition are two. Loops of unknown length count once, of branches the longest.

    **Arguments:**

    - `with_recomputation`: whether the scores count that the gradient of an attention computes again.
    """
    counted: dict[int, Counter[str]] = {}  # by the inner jaxpr, which calls of one jitted function share

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
                inner = [max(inner, key=lambda of: of.total(), default=Counter())]
            times = n_iterations(eqn)
            for of in inner:
                flops.update({dtype: n * times for dtype, n in of.items()})
        return flops

    return count(jaxpr)


# Products of the primitives of `kernels`, whose inner dim is the size of a key, and of a value. All keys count, also those
# that a causal mask leaves out, as in a model that writes the products out.
_ATTENTIONS = {"attention": (1, 1), "attention_gradient": (3, 2)}


def product_flops(eqn: Any, *, with_recomputation: bool = True) -> int | None:
    """Floating point operations of an equation that is a matmul, a convolution or an attention; None of any other."""
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
    else:  # a kernel's elements for each of its output features
        terms = math.prod(rhs.shape) // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms
