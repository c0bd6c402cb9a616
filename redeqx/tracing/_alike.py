"""Compares equations: whether two compute the same function of their operands, with the same derivative.

A function that is traced twice gives equations that differ only in variables. What is compared is a form without these:
parameters by value, inner jaxprs with numbers for variables, functions by their code and closures. JAX wraps a custom
derivative in a new function at each trace, so custom derivatives are traced and their jaxprs compared.
"""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from ._inner import CUSTOM_DERIVATIVES, Env, called, run

_SMALL = 2**22  # elements of arrays that are compared by value
_ORDER = 2  # the highest order of derivatives compared; bounded, since a rule may call its own function again


def alike(a: Any, b: Any) -> bool:
    """Whether two equations compute the same function of operands of the same types. False if this cannot be decided."""
    if a.primitive is not b.primitive or a.effects or b.effects or _types(a) != _types(b):
        return False
    if a is b:
        return True
    if a.primitive.name not in CUSTOM_DERIVATIVES and all(a.params[key] is b.params.get(key) for key in a.params):
        return True
    try:
        return bool(_equation(a, _ORDER) == _equation(b, _ORDER))
    except Exception:  # a derivative that cannot be traced outside its context, or a parameter that cannot be compared
        return False


def same_array(a: Any, b: Any) -> bool:
    """Whether two values are the same object, or small arrays with equal entries."""
    return a is b or _array(a) == _array(b)


def _types(eqn: Any) -> Any:
    return [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]


def _equation(eqn: Any, order: int) -> Any:
    if eqn.effects:
        raise ValueError("an equation with effects is like no other")
    if eqn.primitive.name not in CUSTOM_DERIVATIVES:
        return eqn.primitive, _types(eqn), _form(eqn.params, order)
    return eqn.primitive, _types(eqn), _form(called(eqn), order), _form(derivative_of(eqn), order - 1) if order else None


def _form(x: Any, order: int) -> Any:
    """Returns a parameter in a form that can be compared."""
    if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr):  # one class since JAX 0.12
        jaxpr: Any = getattr(x, "jaxpr", x)
        return _jaxpr(jaxpr, order), list(map(_array, getattr(x, "consts", ())))
    if isinstance(x, Mapping):
        return {key: _form(value, order) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x), [_form(each, order) for each in x]
    if isinstance(x, np.ndarray | jax.Array):
        return _array(x)
    if isinstance(x, FunctionType):
        return x.__code__, x.__defaults__, [_form(cell.cell_contents, order) for cell in x.__closure__ or ()]
    return type(x), x


def _array(x: Any) -> Any:
    is_key = jnp.issubdtype(jax.dtypes.result_type(x), jax.dtypes.extended)
    if isinstance(x, Tracer) or is_key or np.size(x) > _SMALL:
        return id(x)
    x = np.asarray(x)
    return x.shape, x.dtype, x.tobytes()


def _jaxpr(jaxpr: jex.Jaxpr, order: int) -> Any:
    numbers = Env(literal=lambda literal: (literal.aval, _array(literal.val)))

    def new(variables: Any) -> Any:
        for var in variables:
            numbers[var] = len(numbers)
        return [var.aval for var in variables]

    inputs = new(jaxpr.constvars), new(jaxpr.invars)
    eqns = [(numbers.read(eqn.invars), _equation(eqn, order), new(eqn.outvars)) for eqn in jaxpr.eqns]
    return inputs, eqns, numbers.read(jaxpr.outvars)


def derivative_of(eqn: Any) -> Any:
    """Returns the closed jaxpr of an equation and its derivative: it takes the operands and the gradients of the floating
    outputs, and returns the outputs and the gradients of the floating operands."""

    def with_derivative(ins: list[Any], gradients: list[Any]) -> Any:
        floats, others = eqx.partition(ins, eqx.is_inexact_array)

        def compute(floats: Any) -> Any:
            return eqx.partition(run(eqn, eqx.combine(floats, others)), eqx.is_inexact_array)

        outs, backward, integers = jax.vjp(compute, floats, has_aux=True)
        return eqx.combine(outs, integers), backward(gradients)

    avals = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    ins, outs = ([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in each] for each in avals)
    gradients = [shape if jnp.issubdtype(shape.dtype, jnp.inexact) else None for shape in outs]
    return jax.make_jaxpr(with_derivative)(ins, gradients)
