"""Whether two equations compute the same of other operands, and have the same derivative.

Traced twice, a function gives equations that are equal in all but their variables. What an equation is given besides
operands is compared by value: the jaxprs inside it up to the names of variables, functions by their code and what they are
closed over. A derivative that an equation brings along is a function of JAX's own making, so it is traced and compared.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from ._inner import called, run

_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_SMALL = 2**22  # elements of arrays that are compared by value
_ORDER = 2  # derivatives of derivatives that are compared: a rule may call its own function again


def alike(a: Any, b: Any, order: int = _ORDER) -> bool:
    """Whether two equations compute the same of operands of the same types. False where that cannot be told.

    **Arguments:**

    - `order`: up to which order derivatives that an equation brings along are compared.
    """
    if a.primitive is not b.primitive or a.effects or b.effects or not _same_types(a, b):
        return False
    if a is b:
        return True
    if a.primitive.name in _CUSTOM:
        return _same_values(a, b, order) and (order == 0 or _same_derivatives(a, b, order - 1))
    return _same(a.params, b.params, order)


def same_array(a: Any, b: Any) -> bool:
    """Whether two values are one array, or small ones of equal entries."""
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
    """Whether two equations with a derivative of their own call the same jaxpr."""
    x, y = called(a), called(b)
    return x is not None and y is not None and _same(x, y, order)


def _same_derivatives(a: Any, b: Any, order: int) -> bool:
    """Whether two equations with a derivative of their own have the same."""

    def traced(eqn: Any) -> Any:
        def value(*ins: Any) -> Any:
            return run(eqn, list(ins))

        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        floats = [i for i, s in enumerate(shapes) if jax.numpy.issubdtype(s.dtype, jax.numpy.inexact)]

        def with_derivative(*ins: Any) -> Any:
            def of_floats(*xs: Any) -> Any:
                every = list(ins)
                for i, x in zip(floats, xs, strict=True):
                    every[i] = x
                return value(*every)

            primals = [ins[i] for i in floats]
            if eqn.primitive.name == "custom_jvp_call":
                return jax.jvp(of_floats, primals, primals)
            outs, backward = jax.vjp(of_floats, *primals)
            return outs, backward(outs)

        return jax.make_jaxpr(with_derivative)(*shapes)

    try:
        return _same(traced(a), traced(b), order)
    except Exception:  # a derivative that refuses to be traced apart from its context
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
    except Exception:  # objects whose comparison is no boolean
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
    """Whether two jaxprs differ in nothing but the names of variables."""
    counts = [(len(x.constvars), len(x.invars), len(x.outvars), len(x.eqns)) for x in (a, b)]
    if counts[0] != counts[1]:
        return False
    names: dict[Any, Any] = {}

    def is_bound(x: Any, y: Any) -> bool:
        names[x] = y
        return x.aval == y.aval

    def is_read(x: Any, y: Any) -> bool:
        if isinstance(x, jex.Literal) or isinstance(y, jex.Literal):
            both = isinstance(x, jex.Literal) and isinstance(y, jex.Literal)
            return both and x.aval == y.aval and same_array(x.val, y.val)
        return names.get(x) is y

    if not all(map(is_bound, [*a.constvars, *a.invars], [*b.constvars, *b.invars])):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if len(x.invars) != len(y.invars) or not all(map(is_read, x.invars, y.invars)) or not alike(x, y, order):
            return False
        if not all(map(is_bound, x.outvars, y.outvars)):
            return False
    return all(map(is_read, a.outvars, b.outvars))


_COMPARED: tuple[tuple[Any, Callable[[Any, Any, int], bool]], ...] = (
    (jex.ClosedJaxpr, _same_closed),
    (jex.Jaxpr, _same_jaxprs),
    (Mapping, _same_mappings),
    ((tuple, list), _same_items),
    ((np.ndarray, jax.Array), lambda a, b, _: same_array(a, b)),
    (FunctionType, _same_functions),
)
