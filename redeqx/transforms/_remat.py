"""Rematerialisation: loops that compute in the backward pass again what they do not keep, and a loss that keeps everything.

Source: rematerialisation a layer (arXiv:1604.06174). Cost of `RematLoops`: each loop's body is computed once more, in the
backward pass; or, where products are kept, only what is cheap of it. `KeepEverything` is for counting the operations of the
model itself, and nothing runs it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..tracing import REMATS, Rule, Site, scan_counts


@dataclass(frozen=True)
class RematLoops(Rule):
    """The backward pass of each scan recomputes its body from what the body was given.

    A scan whose body has a remat is left as it is, and so are the loops inside of one that recomputes.

    **Arguments:**

    - `level`: `"matmuls"` keeps the outputs of matmuls, convolutions and attention. Then no product is computed twice, and
        what is recomputed (norms, activations, casts) is what a GPU or TPU waits for its memory to read. `"full"` keeps
        only what the body was given; `"offload"` too, and of that the carry in the memory of the host.
    """

    level: str = "full"

    def claims(self, eqn: Any) -> bool:
        return keeps(eqn)

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        if self.level == "offload":
            return site.enter(eqn, ins, remat=partial(_offloaded, carries=_carries(eqn)), by_rest=True)
        policy = is_product if self.level == "matmuls" else None
        return site.enter(eqn, ins, remat=partial(jax.checkpoint, prevent_cse=False, policy=policy), by_rest=True)


def _offloaded(body: Callable[..., Any], carries: range) -> Callable[..., Any]:
    """A loop's body that the backward pass recomputes from a carry that it reads from the memory of the host."""

    def named(*args: Any) -> Any:
        # Not a carry's few numbers: counters, and sums of losses.
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


def _carries(eqn: Any) -> range:
    """The operands of a scan that are its carry."""
    n_consts, n_carry = scan_counts(eqn)
    return range(n_consts, n_consts + n_carry)


# Of other libraries' kernels `pallas_call` is the one with a name that is known.
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "attention", "pallas_call"}


def is_product(primitive: Any, *args: Any, **params: Any) -> bool:
    """Whether a primitive is one whose outputs are kept, as a policy of `jax.checkpoint`."""
    return primitive.name in _PRODUCTS


@dataclass(frozen=True)
class KeepEverything(Rule):
    """Nothing is recomputed."""

    def claims(self, eqn: Any) -> bool:
        return eqn.primitive.name in REMATS

    def __call__(self, eqn: Any, ins: Sequence[Any], site: Site) -> Sequence[Any] | None:
        return site.inline(eqn, ins)


def keeps(eqn: Any) -> bool:
    """Whether an equation is a loop that keeps what its backward pass reads."""
    return eqn.primitive.name == "scan" and not _recomputes(eqn.params["jaxpr"].jaxpr)


def _recomputes(jaxpr: Any) -> bool:
    """Whether something of a jaxpr is rematerialised, also within a function that it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REMATS:
            return True
        if eqn.primitive.name == "jit" and _recomputes(eqn.params["jaxpr"].jaxpr):
            return True
    return False
