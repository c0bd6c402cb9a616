"""The normal form of a traced function, in which rules and analyses read it.

There are no plain jits, so patterns of equations may cross their boundaries: `jax.nn.softmax` and `jnp.where` are jits
themselves. Each equation is an object of its own at each place, also in the bodies of loops, so `id(eqn)` is a place.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jax.extend import core as jex

from ._inner import Env, insides, is_replaceable, with_insides


class Inlined(NamedTuple):
    """A plain jit that became equations of the normal form.

    **Arguments:**

    - `eqn`: the jit, with operands of the normal form.
    - `outs`: the atoms of its outputs.
    - `n_eqns`: how many equations it became.
    """

    eqn: Any
    outs: Sequence[Any]
    n_eqns: int


# By a jaxpr in normal form and the first equation that a jit became; outermost first.
_INLINED: WeakKeyDictionary[Any, dict[Any, list[Inlined]]] = WeakKeyDictionary()


def inlined_at(jaxpr: Any, eqn: Any) -> Sequence[Inlined]:
    """Returns the jits whose equations start with this one in a jaxpr in normal form, outermost first."""
    return _INLINED.get(jaxpr, {}).get(eqn, ())


def normal(closed: Any) -> Any:
    """Returns a closed jaxpr in normal form; the same object if it is in this form already."""
    return closed if closed.jaxpr in _INLINED or _is_normal(closed, set()) else _normal(closed)


def _is_normal(closed: Any, seen: set[int]) -> bool:
    """Whether a closed jaxpr is in normal form and has no equation among those seen before."""
    for eqn in closed.jaxpr.eqns:
        if id(eqn) in seen or _is_plain_jit(eqn):
            return False
        seen.add(id(eqn))
        if is_replaceable(eqn) and not all(_is_normal(inner.closed, seen) for inner in insides(eqn)):
            return False
    return True


def _is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a jit that donates no operand and sets no sharding."""
    if eqn.primitive.name != "jit":
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    is_anywhere = all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return is_anywhere and not any(eqn.params.get("donated_invars", ()))


def _normal(closed: Any) -> Any:
    constvars, consts, eqns = list[Any](), list[Any](), list[Any]()
    calls: dict[int, list[Inlined]] = {}  # by the index of the first equation

    def enter(closed: Any, ins: list[Any], scope: Any = None) -> list[Any]:
        """Appends the equations of a closed jaxpr. Returns its outputs."""
        constvars.extend(of_consts := _fresh(closed.jaxpr.constvars))
        consts.extend(closed.consts)
        of_inputs = zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*of_consts, *ins], strict=True)
        env = Env(of_inputs, literal=lambda literal: literal)
        for eqn in closed.jaxpr.eqns:
            invars, info = env.read(eqn.invars), eqn.source_info
            if scope is not None:
                info = info.replace(name_stack=scope + info.name_stack)
            if _is_plain_jit(eqn):
                start, outs = len(eqns), enter(eqn.params["jaxpr"], invars, info.name_stack)
                env.update(zip(eqn.outvars, outs, strict=True))
                if len(eqns) > start:
                    call = Inlined(eqn.replace(invars=invars, source_info=info), outs, len(eqns) - start)
                    calls.setdefault(start, []).insert(0, call)
                continue
            env.update(zip(eqn.outvars, outvars := _fresh(eqn.outvars), strict=True))
            new = eqn.replace(invars=invars, outvars=outvars, source_info=info)
            if is_replaceable(eqn):
                new, operands = with_insides(new, invars, [_normal(inner.closed) for inner in insides(eqn)])
                for var, operand in zip(new.invars, operands, strict=True):
                    if operand is not var:  # a constant of an inner jaxpr that became an operand
                        constvars.append(var)
                        consts.append(operand)
            eqns.append(new)
        return env.read(closed.jaxpr.outvars)

    invars = _fresh(closed.jaxpr.invars)
    outvars = enter(closed, invars)
    jaxpr = closed.jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns)
    form = jex.ClosedJaxpr(jaxpr, consts)
    _INLINED[form.jaxpr] = {eqns[i]: found for i, found in calls.items()}
    return form


def _fresh(variables: Any) -> list[Any]:
    return [jex.Var(var.aval) for var in variables]
