"""Derivatives that are not JAX's: those that the user, or a package that is not known, wrote for a function.

Such a derivative is one more block of the equation that calls the function. It takes the operands and the gradients of the
outputs, and returns the outputs, which it may compute in another way, and the gradients of the operands. `_rows` checks that
it depends on rows as JAX's derivatives do.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..tracing import derivative_of, has_derivative_of, normal, without_remats
from ._atoms import Block, Step, Value

# Packages whose derivatives are those of their functions, by row under `vmap`: this one too, with its models.
_TRUSTED = ("jax", "equinox", "optax", "diffrax", "lineax", "optimistix", "redeqx")


def has_own_derivative(eqn: Any) -> bool:
    """Whether a call has a derivative that the user, or a package that is not known, wrote."""
    return eqn.primitive.name.startswith("custom_") and not has_derivative_of(eqn, *_TRUSTED)


def is_float(value: Value) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(getattr(value.aval, "dtype", int), jnp.inexact)


def take_derivative(names: Any, step: Step, ins: Sequence[Value], outs: Sequence[Value]) -> list[Value]:
    """Adds the derivative of an equation to its step, unless no gradient is taken of it. Returns the outputs."""
    if not names.is_differentiated:
        return list(outs)
    step.derivative = derivative = Block([*ins, *(Value(out.aval, out.dims) for out in outs if is_float(out))])
    try:
        closed = without_remats(normal(derivative_of(step.eqn)))
    except Exception:  # the user's, who may never ask for a gradient
        return list(outs)
    names.is_differentiated = False  # no derivative of a derivative is taken
    step.derivative = derivative = names.block(closed, derivative.ins)
    names.is_differentiated = True
    gradients = derivative.outs[len(outs) :]
    return [out.depends(value, *gradients) for out, value in zip(outs, derivative.outs, strict=False)]
