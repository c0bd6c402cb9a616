"""Weight decay: which parameters an optimizer shrinks, read from its traced update.

Any optimizer and any mask: a leaf decays if its update contains a multiple of the leaf itself. Norms of a leaf, as of trust
ratios, do not count, nor does the difference to a copy in the optimizer state, as in L-BFGS.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..tracing import Env, flow, insides, union
from ._update import MasterState, Update

_KEPT = (
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "max", "min", "neg", "optimization_barrier",
    "reshape", "select_n", "sharding_constraint", "squeeze", "transpose",
)  # fmt: skip


def decaying(update: Update) -> list[bool] | None:
    """Returns for each trained leaf whether the update shrinks it; None for one that cannot be traced alone."""
    closed, n = update.closed, len(jax.tree.leaves(update.params))
    if closed is None:
        return None
    leaves = [1 << i for i in range(n)]  # a value's bits: the leaves that it contains as they are, then multiples of them

    def of_state(node: Any) -> PyTree:
        if not isinstance(node, MasterState):
            return 0
        masters = jax.tree.unflatten(jax.tree.structure(node.master), leaves)  # its copies stand for the leaves
        return MasterState(jax.tree.map(lambda _: 0, node.inner), masters)

    of_states = jax.tree.leaves(jax.tree.map(of_state, update.state, is_leaf=lambda node: isinstance(node, MasterState)))
    bits = flow(closed, [*[0] * n, *of_states, *leaves, 0], partial(_contained, n), union)
    return [bool(bits(atom) >> n + i & 1) for i, atom in enumerate(closed.jaxpr.outvars[:n])]


def _contained(n: int, eqn: Any, ins: Sequence[int]) -> Sequence[int] | None:
    """Returns the bits of an equation's outputs, or None for those of all operands, or to enter it."""
    name = eqn.primitive.name
    if name in _KEPT or (insides(eqn) and name not in ("scan", "while")):
        return None
    if name == "sub":  # a leaf minus a copy of it is no multiple of it
        return [union(ins) >> n << n]
    nonzero = [bits for bits in ins if bits]
    is_zero = not all(map(np.any, (Env().get(atom, True) for atom in eqn.invars)))
    if name in ("mul", "div") and len(nonzero) == 1 and not is_zero:
        return [(nonzero[0] | nonzero[0] >> n) % (1 << n) << n]
    return [0] * len(eqn.outvars)
