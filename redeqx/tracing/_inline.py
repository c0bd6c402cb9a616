"""Inlines plain jits: replaces each call by the equations of its jaxpr, without tracing.

Patterns of equations are searched in the result. `jax.nn.softmax` and `jnp.where` are jits themselves, and a search would
miss patterns that cross the boundary of a jit.
"""

from typing import Any

from jax.extend import core as jex

from ._inner import insides, is_replaceable, with_insides


def has_jits(closed: Any) -> bool:
    """Whether a closed jaxpr calls a plain jit, also inside its loops and branches."""
    found: dict[int, bool] = {}

    def of(jaxpr: Any) -> bool:
        if id(jaxpr) not in found:
            found[id(jaxpr)] = any(
                _is_plain_jit(eqn) or (is_replaceable(eqn) and any(of(inner.closed.jaxpr) for inner in insides(eqn)))
                for eqn in jaxpr.eqns
            )
        return found[id(jaxpr)]

    return of(closed.jaxpr)


def inlined(closed: Any) -> Any:
    """Returns a closed jaxpr without plain jits, also inside its loops and branches. Its input variables stay the same."""
    return _inlined(closed, {})


def _is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a jit that donates no operand and sets no sharding."""
    if eqn.primitive.name != "jit":
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    is_anywhere = all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)
    return is_anywhere and not any(eqn.params.get("donated_invars", ()))


def _inlined(closed: Any, memo: dict[int, Any]) -> Any:
    if id(closed.jaxpr) in memo:
        return memo[id(closed.jaxpr)]
    constvars, consts, eqns = list(closed.jaxpr.constvars), list(closed.consts), []

    def emit(jaxpr: Any, env: dict[Any, Any], scope: Any) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            invars, info = list(map(read, eqn.invars)), eqn.source_info
            if scope is not None:
                info = info.replace(name_stack=scope + info.name_stack)
            if _is_plain_jit(eqn):
                inner = eqn.params["jaxpr"]
                fresh = [jex.Var(var.aval) for var in inner.jaxpr.constvars]
                constvars.extend(fresh)
                consts.extend(inner.consts)
                inside = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*fresh, *invars], strict=True))
                env.update(zip(eqn.outvars, emit(inner.jaxpr, inside, info.name_stack), strict=True))
                continue
            outvars = [jex.Var(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            new = eqn.replace(invars=invars, outvars=outvars, source_info=info)
            if is_replaceable(eqn):
                within = [_inlined(inner.closed, memo) for inner in insides(eqn)]
                new, operands = with_insides(new, invars, within)
                for var, operand in zip(new.invars, operands, strict=True):
                    if operand is not var:  # a constant of a remat's new jaxpr
                        constvars.append(var)
                        consts.append(operand)
            eqns.append(new)
        return list(map(read, jaxpr.outvars))

    env: dict[Any, Any] = {var: var for var in (*closed.jaxpr.constvars, *closed.jaxpr.invars)}
    outvars = emit(closed.jaxpr, env, None)
    jaxpr = closed.jaxpr.replace(constvars=constvars, outvars=outvars, eqns=eqns)
    memo[id(closed.jaxpr)] = jex.ClosedJaxpr(jaxpr, consts)
    return memo[id(closed.jaxpr)]
