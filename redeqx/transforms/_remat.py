"""Rematerialisation: loops that recompute their bodies in the backward pass, and a loss without recomputation.

Source: rematerialisation per layer (arXiv:1604.06174). Cost of `RematLoops`: the backward pass computes each loop's body
once more, or only its cheap operations if the outputs of products are saved. `KeepEverything` serves to count the
operations of the model itself; its result is never run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..tracing import PRODUCTS, REMATS, Rule, Site, normal, scan_counts, without_remats


@dataclass(frozen=True)
class RematLoops(Rule):
    """Recomputes the body of each scan in the backward pass, from the body's inputs.

    Scans whose body contains a remat are left unchanged, and so are loops inside a scan that recomputes.

    **Arguments:**

    - `level`: `"matmuls"` saves the outputs of matmuls, convolutions and attention. No product is then computed twice, and
        the recomputed operations (norms, activations, casts) are bound by memory bandwidth on GPUs and TPUs. `"full"` saves
        only the body's inputs. `"offload"` does too, with the carry in host memory.
    """

    level: str = "full"

    def claims(self, eqn: Any) -> bool:
        return is_scan_without_remat(eqn)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if self.level == "offload":
            n_consts, n_carry = scan_counts(eqn)
            remat = partial(_offloaded, carries=range(n_consts, n_consts + n_carry))
            return site.enter(eqn, ins, remat=remat)
        policy = is_product if self.level == "matmuls" else None
        return site.enter(eqn, ins, remat=partial(jax.checkpoint, prevent_cse=False, policy=policy))


def _offloaded(body: Callable[..., Any], carries: range) -> Callable[..., Any]:
    """Returns a loop's body that the backward pass recomputes from a carry in host memory."""

    def named(*args: Any) -> Any:
        # Scalars of the carry, such as counters and sums of losses, stay on the device.
        is_large = [i in carries and x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.inexact) for i, x in enumerate(args)]
        return body(*(checkpoint_name(x, _CARRY) if large else x for x, large in zip(args, is_large, strict=True)))

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_CARRY],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(named, prevent_cse=False, policy=policy)


_CARRY = "redeqx: a loop's carry"


# `pallas_call` covers the kernels of other libraries; primitives of their own have unknown names.
_PRODUCTS = {*PRODUCTS, "pallas_call"}


def is_product(primitive: Any, *args: Any, **params: Any) -> bool:
    """Whether a primitive is a product, whose outputs are saved. A policy for `jax.checkpoint`.

    Complex products are computed again: JAX rounds what a policy saves by `reduce_precision`, which takes no complex dtype
    (jax 0.10.2; `test_complex_products_in_a_loop` compares).
    """
    is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in args if hasattr(x, "dtype"))
    return primitive.name in _PRODUCTS and not is_complex


class KeepEverything(Rule):
    """Removes all remats, so that nothing is recomputed."""

    def rewritten(self, closed: Any) -> Any:
        return without_remats(closed)


def is_scan_without_remat(eqn: Any) -> bool:
    """Whether an equation is a scan that saves all residuals for its backward pass."""
    if eqn.primitive.name != "scan":
        return False
    return not any(inner.primitive.name in REMATS for inner in normal(eqn.params["jaxpr"]).jaxpr.eqns)
