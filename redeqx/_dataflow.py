"""What a traced loss does with each leaf of a model, read from its jaxpr: so far, whether it reads the leaf at all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex


def leaves_read(fn: Callable[..., Any], leaves: Sequence[Any], *args: Any) -> list[bool]:
    """For each leaf, whether the gradient of `fn(leaves, *args)` can depend on it.

    Traces `fn` abstractly: no array is made. An inside that is not followed (`while`, `cond`) counts as reading all it gets.

    **Arguments:**

    - `fn`: takes a sequence of arrays, then any PyTrees, and returns arrays.
    - `leaves`, `args`: arrays or `jax.ShapeDtypeStruct`s.
    """
    closed = jax.make_jaxpr(lambda leaves, *args: fn(leaves, *args))(list(leaves), *args)
    live = _live_inputs(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return live[: len(leaves)]


def _live_inputs(jaxpr: Any, live_outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of a jaxpr some live output depends on, from the last equation to the first."""
    live = {v for v, alive in zip(jaxpr.outvars, live_outputs, strict=True) if alive and not isinstance(v, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outs = [var in live for var in eqn.outvars]
        if not any(outs) or eqn.primitive.name == "stop_gradient":
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if eqn.primitive.name == "scan":
            reads = _live_inputs_of_scan(eqn, inner, outs)
        elif inner is not None and len(inner.invars) == len(eqn.invars):
            reads = _live_inputs(inner, outs)
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


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants of its loop, and how many after them its carry; the rest is sliced."""
    if "ft_in" in eqn.params:  # jax 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]
