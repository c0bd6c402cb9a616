"""Weight decay: which parameters an optimizer shrinks, read from its traced update.

Any optimizer and any mask: a leaf decays if its update contains a multiple of the leaf itself. Norms of a leaf, as of trust
ratios, do not count, nor does the difference to a copy in the optimizer state, as in L-BFGS.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core as jex

from .._tree import PyTree
from ..partition import Plan
from ..tracing import flow, insides
from ._precision import MasterState, widened
from ._step import update_with

_KEPT = (
    "broadcast_in_dim", "convert_element_type", "copy", "neg", "optimization_barrier", "reshape", "sharding_constraint",
    "squeeze", "transpose",
)  # fmt: skip
_SUMS = ("add", "add_any", "select_n", "max", "min")
_Taint = tuple[int, int]  # a bit for each leaf: those that the value contains as they are, and multiples of them
_NONE: _Taint = (0, 0)


def decaying(optimizer: optax.GradientTransformation, plan: Plan, params: PyTree, state: PyTree) -> list[bool] | None:
    """Returns for each trained leaf whether the optimizer shrinks it; None for an optimizer that cannot be traced alone.

    **Arguments:**

    - `params`: the trained leaves as the optimizer receives them, as arrays or shapes.
    - `state`: the optimizer's state.
    """
    params, state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
    one = jax.ShapeDtypeStruct((), jnp.float32)

    def update(params: PyTree, state: PyTree, grads: PyTree, value: Any) -> PyTree:
        extra = {"value": value, "value_fn": lambda *_: value, "grad_fn": lambda *_: grads}
        return update_with(optimizer, plan, grads, state, params, **extra)[0]

    has_masters = any(isinstance(node, MasterState) for node in jax.tree.leaves(state, is_leaf=_is_master))
    try:
        traced = jax.make_jaxpr(update)(params, state, jax.eval_shape(widened, params) if has_masters else params, one)
    except Exception:  # the training step calls it with its own arguments, and reports errors; a description ends no run
        return None
    n = len(jax.tree.leaves(params))
    bits = [(1 << i, 0) for i in range(n)]

    def of_state(node: Any) -> PyTree:
        if _is_master(node):  # its copies stand for the leaves
            masters = jax.tree.unflatten(jax.tree.structure(node.master), [_Bits(bit) for bit in bits])
            return MasterState(jax.tree.map(lambda _: _Bits(_NONE), node.inner), masters)
        return _Bits(_NONE)

    of_states = [leaf.taint for leaf in jax.tree.leaves(jax.tree.map(of_state, state, is_leaf=_is_master))]
    found = flow(traced, [*bits, *of_states, *[_NONE] * (n + 1)], _outputs_of, _union)
    return [bool(found(atom)[1] >> i & 1) for i, atom in enumerate(traced.jaxpr.outvars)]


class _Bits:
    """A taint as a leaf of a tree."""

    def __init__(self, taint: _Taint):
        self.taint = taint


def _is_master(node: Any) -> bool:
    return isinstance(node, MasterState)


def _outputs_of(eqn: Any, ins: Sequence[_Taint]) -> list[_Taint] | None:
    """Returns which leaves each output of an equation contains; None to enter an equation with inner jaxprs."""
    name, n_outs = eqn.primitive.name, len(eqn.outvars)
    if insides(eqn) and name not in ("scan", "while"):
        return None
    if name in _KEPT:
        return list(ins) if len(ins) == n_outs else [_union(ins)] * n_outs
    if name in _SUMS:
        return [_union(ins)]
    if name == "sub":  # a leaf minus a copy of it is no multiple of it
        return [(0, _union(ins)[1])]
    if name in ("mul", "div"):
        tainted = [taint for taint in ins if any(taint)]
        is_zero = any(isinstance(atom, jex.Literal) and not np.any(atom.val) for atom in eqn.invars)
        return [(0, tainted[0][0] | tainted[0][1]) if len(tainted) == 1 and not is_zero else _NONE]
    return [_NONE] * n_outs


def _union(taints: Sequence[_Taint]) -> _Taint:
    raw = multiples = 0
    for each in taints:
        raw, multiples = raw | each[0], multiples | each[1]
    return raw, multiples
