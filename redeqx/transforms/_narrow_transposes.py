"""Narrow transposes: computes a weight's gradient by the product that transposes the narrower of its factors, for CPUs.

The gradient of a weight is a product of the layer's input `[rows, in]` and its output's gradient `[rows, out]`, contracted
over rows. XLA for CPUs multiplies `[m, k]` by `[k, n]`, so it first copies one factor to a transpose: the one whose dim
comes first in the weight as it is stored. For an output head `[vocab, d]` that is the gradient of all logits. This rule
computes the transpose of the weight's gradient instead if that moves fewer numbers, its own transpose included. GPUs and
TPUs transpose within their products.

XLA would undo this, as the transpose of a product is the product of swapped factors. A barrier prevents it.

Where the wide factor is larger than the processor's caches, as the 64 MiB of gradients of GPT-2's head with 8192 tokens,
that gradient takes 0.66 of the processor time by itself, and a step with six layers 0.91. The 12 MiB of an MLP gain 3 % by
themselves, and nothing that could be measured in a loss (`tests/benchmarks/README.md`; jax 0.10.2; 2026-11-26).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array

from ..tracing import Rule, Site, WeightUses, equations, n_bytes, plain, run
from ._weight_products import run_instead


@dataclass(frozen=True)
class NarrowTransposes(Rule):
    """Computes the gradients of weights in products so that the narrower factor is transposed.

    **Arguments:**

    - `n_weights`: the number of parameters, which are the function's first inputs.
    - `min_bytes`: the least size of a wide factor that must not be transposed.
    """

    n_weights: int
    min_bytes: int = 2**25
    uses: Any = None  # the `WeightUses` of one function

    def of(self, closed: Any) -> Rule | None:
        if not any(map(self._is_large, equations(closed))):  # most functions: the search below takes longer
            return None
        return replace(self, uses=WeightUses(closed, self.n_weights))

    def _is_large(self, eqn: Any) -> bool:
        is_product = eqn.primitive.name == "dot_general"
        return is_product and any(n_bytes(atom) >= self.min_bytes for atom in (*eqn.invars, *eqn.outvars))

    def claims(self, eqn: Any) -> bool:
        """Whether an equation is a product with a matrix, all of one dtype, whose wider factor is large."""
        side = self.uses.side(eqn) if eqn.primitive.name == "dot_general" else None
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

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        side = self.uses.side(eqn)
        assert side is not None, "it is claimed"
        return run_instead(eqn, _product(eqn, side), list(map(plain, ins)))


def _product(eqn: Any, side: int) -> Callable[[Array, Array], Array]:
    """Returns the product of an equation as a function with a custom derivative. Operand `side` is the weight."""
    (contracted, _), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    (of_weight,), of_other = contracted[side], contracted[1 - side]
    n_dims = eqn.invars[1 - side].aval.ndim
    rows = [dim for dim in range(n_dims) if dim not in of_other]
    # The output has the dims of the first operand before those of the second.
    rows_of_out = [dim + (side == 0) for dim in range(len(rows))]

    @jax.custom_vjp
    def product(*operands: Array) -> Array:
        return run(eqn, operands)[0]

    def backward(operands: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
        weight, other = operands[side], operands[1 - side]

        def of(x: Array) -> Array:
            return run(eqn, [weight, x] if side == 0 else [x, weight])[0]

        (d_other,) = jax.linear_transpose(of, other)(g)
        n_in, n_out = weight.shape[of_weight], weight.shape[1 - of_weight]
        factors = [(other, rows), (g, rows_of_out)]
        (first, first_rows), (second, second_rows) = factors if n_in < n_out else reversed(factors)
        dims = ((tuple(first_rows), tuple(second_rows)), ((), ()))
        d_weight = jax.lax.optimization_barrier(jax.lax.dot_general(first, second, dims, precision))
        d_weight = d_weight if (n_in < n_out) == (of_weight == 0) else d_weight.T
        return (d_weight, d_other) if side == 0 else (d_other, d_weight)

    # Not `product` itself: an optimizer may differentiate this.
    product.defvjp(lambda *operands: (run(eqn, operands)[0], operands), backward)
    return product
