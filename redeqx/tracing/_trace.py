"""Traces a function of a model abstractly, and finds which of the model's leaves its outputs depend on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.extend import core as jex
from jaxtyping import PyTree

from .._tree import is_array_like, named_leaves
from ._inner import called, insides, scan_counts


@dataclass(frozen=True)
class Trace:
    """An abstract trace of a function of a model. No array is allocated.

    **Arguments:**

    - `names`, `leaves`: the names and shapes of the model's arrays, which are the first inputs of `closed`.
    - `closed`: the closed jaxpr.
    """

    names: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    closed: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], model: PyTree, *args: PyTree) -> "Trace":
        """Traces `fn(model, *args)`, for arrays or `jax.ShapeDtypeStruct`s."""
        arrays, static = eqx.partition(model, is_array_like)
        leaves, treedef = jax.tree.flatten(arrays)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)

        def of_leaves(leaves: tuple[Any, ...], *args: PyTree) -> Any:
            return fn(eqx.combine(jax.tree.unflatten(treedef, leaves), static), *args)

        return cls(tuple(named_leaves(arrays)), shapes, jax.make_jaxpr(of_leaves)(shapes, *args))

    def reads(self) -> dict[str, bool]:
        """Returns, for each leaf, whether the outputs' gradient can depend on it.

        A `while` or `cond` is not analysed: it counts as reading all of its operands.
        """
        live = _live_inputs(self.closed.jaxpr, [True] * len(self.closed.jaxpr.outvars), {})
        return dict(zip(self.names, live, strict=False))

    @property
    def reads_last(self) -> bool:
        """Whether the outputs can depend on the last input (the key of a loss), differentiably or not."""
        (*_, last), live = self.closed.jaxpr.invars, set(filter(_is_var, self.closed.jaxpr.outvars))
        for eqn in reversed(self.closed.jaxpr.eqns):
            if eqn.effects or any(var in live for var in eqn.outvars):
                live.update(filter(_is_var, eqn.invars))
        return last in live


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jex.Literal)


# Maps a jaxpr and its live outputs to its live inputs, so that the body of a nested loop is analysed once for each set of
# live outputs.
_Memo = dict[tuple[int, tuple[bool, ...]], list[bool]]


def _live_inputs(jaxpr: Any, live_outputs: Sequence[bool], memo: _Memo) -> list[bool]:
    """Returns which inputs of a jaxpr its live outputs depend on. Visits the equations from last to first."""
    key = (id(jaxpr), tuple(live_outputs))
    if key in memo:
        return memo[key]
    live = {v for v, alive in zip(jaxpr.outvars, live_outputs, strict=True) if alive and not isinstance(v, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outs = [var in live for var in eqn.outvars]
        if not any(outs) or eqn.primitive.name == "stop_gradient":
            continue
        inner = called(eqn)
        if eqn.primitive.name == "scan":
            reads = _live_inputs_of_scan(eqn, outs, memo)
        elif inner is not None:
            reads = _live_inputs(inner.jaxpr, outs, memo)
        elif eqn.primitive.name == "optimization_barrier":  # output i is operand i
            reads = outs
        else:
            reads = [True] * len(eqn.invars)
        live.update(v for v, read in zip(eqn.invars, reads, strict=True) if read and not isinstance(v, jex.Literal))
    memo[key] = [var in live for var in jaxpr.invars]
    return memo[key]


def _live_inputs_of_scan(eqn: Any, live_outputs: Sequence[bool], memo: _Memo) -> list[bool]:
    """`_live_inputs` of a scan: a carry that one iteration reads is a live output of the iteration before."""
    (body,), (n_consts, n_carry) = insides(eqn), scan_counts(eqn)
    carry, stacked = list(live_outputs[:n_carry]), live_outputs[n_carry:]
    while True:
        reads = _live_inputs(body.closed.jaxpr, [*carry, *stacked], memo)
        consts, read, slices = reads[:n_consts], reads[n_consts : n_consts + n_carry], reads[n_consts + n_carry :]
        new_carry = [alive or is_read for alive, is_read in zip(carry, read, strict=True)]
        if new_carry == carry:
            return [*consts, *carry, *slices]
        carry = new_carry
