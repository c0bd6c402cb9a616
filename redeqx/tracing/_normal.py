"""The normal form of a traced function, in which rules and analyses read it.

There are no plain jits and calls, so patterns of equations may cross their boundaries: `jax.nn.softmax` and `jnp.where` are
jits themselves. A reshape keeps the order of dims: one in another order, as with `order="F"`, is a transpose and a reshape.
An `unstack`, as of an array that a script unpacks (JAX 0.12), is slices. Each equation is an object of its own at each
place, even in the bodies of loops, so `id(eqn)` is a place. JAX traces a jitted function once, so the equations of a
library's function would have the line of its first call in the process: they get that of their own call.
"""

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import jax
from jax.extend import core as jex

from ._inner import CALLS, REMAT, Env, equations, insides, variables, with_insides

T = TypeVar("T")


def once(analysis: Callable[..., T]) -> Callable[..., T]:
    """Wraps an analysis of a closed jaxpr, and of further hashable arguments, so that it is made once for each function,
    whoever asks first. A result is kept as long as the jaxpr is."""
    found: WeakKeyDictionary[Any, dict[Any, T]] = WeakKeyDictionary()

    @wraps(analysis)
    def of(closed: Any, *args: Any) -> T:
        results = found.setdefault(closed.jaxpr, {})
        if args not in results:
            results[args] = analysis(closed, *args)
        return results[args]

    return of


_NORMAL: WeakSet[Any] = WeakSet()  # the jaxprs in normal form that were made here


def normal(closed: Any) -> Any:
    """Returns a closed jaxpr in normal form; the same object if it was made by the functions here."""
    return closed if closed.jaxpr in _NORMAL else _normal(closed)


def without_remats(closed: Any) -> Any:
    """Returns a closed jaxpr in normal form whose remats are inlined too, to read or evaluate values inside them."""
    has_remats = any(eqn.primitive.name == REMAT for eqn in equations(closed))
    return _normal(closed, keeps_remats=False) if has_remats else normal(closed)


def restricted(closed: Any, outvars: Sequence[Any], invars: Sequence[Any] | None = None) -> Any:
    """Returns a closed jaxpr of some values of another, with the equations that they need or that have effects. Its `invars`
    are the inputs in another order, and values that are inputs instead of being computed."""
    needed, given, eqns = set(variables(outvars)), set(invars or ()), []
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or any(var in needed and var not in given for var in eqn.outvars):
            needed.update(variables(eqn.invars))
            eqns.append(eqn)
    invars = closed.jaxpr.invars if invars is None else list(invars)
    info = jex.DebugInfo("redeqx", "restricted", None, None)
    jaxpr = closed.jaxpr.replace(invars=invars, outvars=list(outvars), eqns=eqns[::-1], debug_info=info)
    form = jex.ClosedJaxpr(jaxpr, closed.consts)
    return _marked(form) if closed.jaxpr in _NORMAL else form


def _marked(form: Any) -> Any:
    """Returns a closed jaxpr that is known to be in normal form from now on."""
    _NORMAL.add(form.jaxpr)  # JAX 0.12 closes a copy of a jaxpr
    return form


def _is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a jit that donates no operand and sets no sharding."""
    if eqn.primitive.name != "jit":
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    is_anywhere = all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return is_anywhere and not any(eqn.params.get("donated_invars", ()))


def _is_of_library(eqn: Any) -> bool:
    """Whether a jit is a library's own function: not one that `eqx.filter_jit` wraps."""
    file = eqn.params["jaxpr"].jaxpr.debug_info.func_filename or "site-packages"
    return "site-packages" in file and not file.endswith(os.path.join("equinox", "_jit.py"))


def _normal(closed: Any, call: Any = None, *, keeps_remats: bool = True) -> Any:
    """Returns a closed jaxpr in normal form; remats are inlined only if not `keeps_remats`. `call` is the traceback of the
    call of a library's function in which the jaxpr is; None if it is in none."""
    constvars, consts, eqns = list[Any](), list[Any](), list[Any]()

    def enter(closed: Any, ins: list[Any], call: Any, scope: Any = None) -> list[Any]:
        """Appends the equations of a closed jaxpr. Returns its outputs."""
        constvars.extend(of_consts := _fresh(closed.jaxpr.constvars))
        consts.extend(closed.consts)
        of_inputs = zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*of_consts, *ins], strict=True)
        env = Env(of_inputs, literal=lambda literal: literal)
        for eqn in closed.jaxpr.eqns:
            invars, info = env.read(eqn.invars), eqn.source_info
            if scope is not None:
                info = info.replace(name_stack=scope + info.name_stack)
            if call is not None:
                info = info.replace(traceback=call)
            if _is_plain_jit(eqn):
                of_call = info.traceback if call is None and _is_of_library(eqn) else call
                env.update(zip(eqn.outvars, enter(eqn.params["jaxpr"], invars, of_call, info.name_stack), strict=True))
                continue
            if eqn.primitive.name in CALLS or (not keeps_remats and eqn.primitive.name == REMAT):
                env.update(zip(eqn.outvars, enter(insides(eqn)[0].closed, invars, call, info.name_stack), strict=True))
                continue
            if (others := _as_others(eqn)) is not None:
                outs = enter(others, invars, info.traceback, info.name_stack)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            env.update(zip(eqn.outvars, outvars := _fresh(eqn.outvars), strict=True))
            new = eqn.replace(invars=invars, outvars=outvars, source_info=info)
            if inside := [inner for inner in insides(eqn) if inner.role != "manual"]:
                forms = [_normal(inner.closed, call, keeps_remats=keeps_remats) for inner in inside]
                new, operands = with_insides(new, invars, forms)
                for var, operand in zip(new.invars, operands, strict=True):
                    if operand is not var:  # a constant of an inner jaxpr that became an operand
                        constvars.append(var)
                        consts.append(operand)
            eqns.append(new)
        return env.read(closed.jaxpr.outvars)

    invars = _fresh(closed.jaxpr.invars)
    outvars = enter(closed, invars, call)
    jaxpr = closed.jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)
    return _marked(jex.ClosedJaxpr(jaxpr, consts))


def _as_others(eqn: Any) -> Any | None:
    """Returns the closed jaxpr of equations of the normal form that compute the same; None for one of them."""
    name, lax = eqn.primitive.name, jax.lax
    if name == "reshape" and (order := eqn.params["dimensions"]) is not None:

        def compute(x: Any) -> Any:
            return lax.reshape(lax.transpose(x, order), eqn.params["new_sizes"])
    elif name == "unstack":

        def compute(x: Any) -> Any:
            return [lax.index_in_dim(x, i, eqn.params["axis"], keepdims=False) for i in range(len(eqn.outvars))]
    else:
        return None
    return jax.make_jaxpr(compute)(*(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars))


def _fresh(variables: Any) -> list[Any]:
    return [jex.Var(var.aval) for var in variables]
