"""Compares equations: whether two compute the same function of their operands, with the same derivative.

A function that is traced twice gives equations that differ only in their variables. The parameters of equations are compared
by value: inner jaxprs up to the names of variables, functions by their code and closures. JAX wraps a custom derivative in
a new function at each trace, so custom derivatives are traced and their jaxprs compared.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from ._inner import Env, called, run, variables

_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_SMALL = 2**22  # elements of arrays that are compared by value
_ORDER = 2  # the highest order of derivatives compared; bounded, since a rule may call its own function again


def alike(a: Any, b: Any, order: int = _ORDER) -> bool:
    """Whether two equations compute the same function of operands of the same types. False if this cannot be decided.

    **Arguments:**

    - `order`: the highest order of custom derivatives to compare.
    """
    if a.primitive is not b.primitive or a.effects or b.effects or not _same_types(a, b):
        return False
    if a is b:
        return True
    if a.primitive.name in _CUSTOM:
        return _same_values(a, b, order) and (order == 0 or _same_derivatives(a, b, order - 1))
    return _same(a.params, b.params, order)


def same_array(a: Any, b: Any) -> bool:
    """Whether two values are the same object, or small arrays with equal entries."""
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    if np.shape(a) != np.shape(b) or np.size(a) > _SMALL or np.result_type(a) != np.result_type(b):
        return False
    return np.array_equal(np.asarray(a), np.asarray(b))


def _same_types(a: Any, b: Any) -> bool:
    ins, outs = ([(x.aval, y.aval) for x, y in zip(xs, ys, strict=False)] for xs, ys in (
        (a.invars, b.invars), (a.outvars, b.outvars)
    ))  # fmt: skip
    is_equal = len(a.invars) == len(b.invars) and len(a.outvars) == len(b.outvars)
    return is_equal and all(x == y for x, y in (*ins, *outs))


def _same_values(a: Any, b: Any, order: int) -> bool:
    """Whether two equations with custom derivatives call the same jaxpr."""
    x, y = called(a), called(b)
    return x is not None and y is not None and _same(x, y, order)


def _same_derivatives(a: Any, b: Any, order: int) -> bool:
    """Whether two equations with custom derivatives have the same derivative."""

    def traced(eqn: Any) -> Any:
        def value(*ins: Any) -> Any:
            return run(eqn, list(ins))

        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        floats = [i for i, s in enumerate(shapes) if jax.numpy.issubdtype(s.dtype, jax.numpy.inexact)]

        def with_derivative(*ins: Any) -> Any:
            def of_floats(*xs: Any) -> Any:
                values = list(ins)
                for i, x in zip(floats, xs, strict=True):
                    values[i] = x
                return value(*values)

            primals = [ins[i] for i in floats]
            if eqn.primitive.name == "custom_jvp_call":
                return jax.jvp(of_floats, primals, primals)
            outs, backward = jax.vjp(of_floats, *primals)
            return outs, backward(outs)

        return jax.make_jaxpr(with_derivative)(*shapes)

    try:
        return _same(traced(a), traced(b), order)
    except Exception:  # a derivative that cannot be traced outside its context
        return False


def _same(a: Any, b: Any, order: int) -> bool:
    """Whether two parameters of equations are equal."""
    if a is b:
        return True
    compare = next((compare for kind, compare in _COMPARED if isinstance(a, kind) and isinstance(b, kind)), None)
    if compare is not None:
        return compare(a, b, order)
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # objects whose comparison is not a boolean
        return False


def _same_closed(a: Any, b: Any, order: int) -> bool:
    consts = len(a.consts) == len(b.consts) and all(map(same_array, a.consts, b.consts))
    return consts and _same_jaxprs(a.jaxpr, b.jaxpr, order)


def _same_items(a: Any, b: Any, order: int) -> bool:
    return type(a) is type(b) and len(a) == len(b) and all(_same(x, y, order) for x, y in zip(a, b, strict=True))


def _same_mappings(a: Any, b: Any, order: int) -> bool:
    return a.keys() == b.keys() and all(_same(a[key], b[key], order) for key in a)


def _same_functions(a: Any, b: Any, order: int) -> bool:
    is_same = a.__code__ is b.__code__ and a.__defaults__ == b.__defaults__
    return is_same and _same(_closed_over(a), _closed_over(b), order)


def _closed_over(fn: Any) -> Sequence[Any]:
    return tuple(cell.cell_contents for cell in fn.__closure__ or ())


def _same_jaxprs(a: Any, b: Any, order: int) -> bool:
    """Whether two jaxprs are equal up to the names of variables."""
    counts = [(len(x.constvars), len(x.invars), len(x.outvars), len(x.eqns)) for x in (a, b)]
    if counts[0] != counts[1]:
        return False
    names = Env(literal=lambda _: None)

    def bind(x: Any, y: Any) -> bool:
        names[x] = y
        return x.aval == y.aval

    def same_atom(x: Any, y: Any) -> bool:
        if variables([x, y]):
            return names.get(x) is y
        return x.aval == y.aval and same_array(x.val, y.val)

    if not all(map(bind, [*a.constvars, *a.invars], [*b.constvars, *b.invars])):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if len(x.invars) != len(y.invars) or not all(map(same_atom, x.invars, y.invars)) or not alike(x, y, order):
            return False
        if not all(map(bind, x.outvars, y.outvars)):
            return False
    return all(map(same_atom, a.outvars, b.outvars))


_COMPARED: tuple[tuple[Any, Callable[[Any, Any, int], bool]], ...] = (
    (jex.ClosedJaxpr, _same_closed),
    (jex.Jaxpr, _same_jaxprs),
    (Mapping, _same_mappings),
    ((tuple, list), _same_items),
    ((np.ndarray, jax.Array), lambda a, b, _: same_array(a, b)),
    (FunctionType, _same_functions),
)
