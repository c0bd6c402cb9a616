"""A traced function, and what its jaxpr says of itself: jaxprs that equations call, inputs that outputs depend on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.extend import core as jex
from jaxtyping import PyTree

from ._paths import is_array_like, named_leaves

# Equations that call one jaxpr on all of their operands, once.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "remat",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def closed(jaxpr: Any) -> Any:
    """A jaxpr or a closed jaxpr as a closed one."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())


def called(eqn: Any) -> Any | None:
    """The closed jaxpr that an equation calls once on its operands, one for one; None where it is no such call."""
    if eqn.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            inner = closed(eqn.params[name])
            return inner if len(inner.jaxpr.invars) == len(eqn.invars) else None
    return None


def shapes_in(closed: Any) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a closed jaxpr's inputs, to trace another with."""
    avals = [var.aval for var in closed.jaxpr.invars]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]


def run(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """One equation, evaluated with its name scope and source line."""
    values = {atom: value for atom, value in zip(eqn.invars, ins, strict=True) if not isinstance(atom, jex.Literal)}
    info = jex.DebugInfo("redeqx", eqn.primitive.name, None, None)
    jaxpr = jex.Jaxpr((), list(values), eqn.outvars, [eqn], eqn.effects, info)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*values.values())


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants of its loop, and how many after them its carry; the rest is sliced."""
    if "ft_in" in eqn.params:  # jax 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


@dataclass(frozen=True)
class Trace:
    """A function of a model, traced abstractly: no array is made.

    **Arguments:**

    - `names`, `leaves`: of the model's arrays, which are the first inputs of `closed`.
    - `closed`: the jaxpr.
    """

    names: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    closed: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], model: PyTree, *args: PyTree) -> "Trace":
        """`fn(model, *args)`, of arrays or their shapes."""
        arrays, static = eqx.partition(model, is_array_like)
        leaves, treedef = jax.tree.flatten(arrays)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)

        def of_leaves(leaves: tuple[Any, ...], *args: PyTree) -> Any:
            return fn(eqx.combine(jax.tree.unflatten(treedef, leaves), static), *args)

        return cls(tuple(named_leaves(arrays)), shapes, jax.make_jaxpr(of_leaves)(shapes, *args))

    def reads(self) -> dict[str, bool]:
        """For each leaf, whether the outputs' gradient can depend on it.

        An inside that is not followed (`while`, `cond`) counts as reading all it gets.
        """
        live = _live_inputs(self.closed.jaxpr, [True] * len(self.closed.jaxpr.outvars))
        return dict(zip(self.names, live, strict=False))


def _live_inputs(jaxpr: Any, live_outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of a jaxpr some live output depends on, from the last equation to the first."""
    live = {v for v, alive in zip(jaxpr.outvars, live_outputs, strict=True) if alive and not isinstance(v, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outs = [var in live for var in eqn.outvars]
        if not any(outs) or eqn.primitive.name == "stop_gradient":
            continue
        inner = called(eqn)
        if eqn.primitive.name == "scan":
            reads = _live_inputs_of_scan(eqn, eqn.params["jaxpr"].jaxpr, outs)
        elif inner is not None:
            reads = _live_inputs(inner.jaxpr, outs)
        else:
            reads = [True] * len(eqn.invars)
        live.update(v for v, read in zip(eqn.invars, reads, strict=True) if read and not isinstance(v, jex.Literal))
    return [var in live for var in jaxpr.invars]


def _live_inputs_of_scan(eqn: Any, body: Any, live_outputs: Sequence[bool]) -> list[bool]:
    """As `_live_inputs`: what one iteration reads of its carry, the iteration before must have made."""
    n_consts, n_carry = scan_counts(eqn)
    carry, stacked = list(live_outputs[:n_carry]), live_outputs[n_carry:]
    while True:
        reads = _live_inputs(body, [*carry, *stacked])
        consts, read, slices = reads[:n_consts], reads[n_consts : n_consts + n_carry], reads[n_consts + n_carry :]
        grown = [alive or is_read for alive, is_read in zip(carry, read, strict=True)]
        if grown == carry:
            return [*consts, *carry, *slices]
        carry = grown
