"""The jaxprs inside an equation: one table of the primitives that have some, and how their operands map inward.

Everything that follows a jaxpr into its loops, branches and calls reads this table: the interpreter, the count of FLOPs, the
liveness of parameters, and the dataflow of a plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core as jex

REMATS = ("remat2", "checkpoint", "remat")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
# What calls one jaxpr on all of its operands, once.
_CALLS = ("jit", *REMATS, *_CUSTOM, "closed_call")
# What may be given another inside. A custom derivative is of the inside that it was written for, and the inside of a
# shard_map sees shards.
_REPLACEABLE = ("jit", *REMATS, "scan", "while", "cond")

Kind = Literal["same", "carry", "slice", "shard"]
_SAME: Kind = "same"
_CARRY: Kind = "carry"
_SLICE: Kind = "slice"
_SHARD: Kind = "shard"
Role = Literal["call", "body", "condition", "branch", "manual"]


@dataclass(frozen=True)
class Inner:
    """One jaxpr inside an equation.

    **Arguments:**

    - `closed`: the closed jaxpr.
    - `role`: what it is to the equation; `"manual"` is the inside of a shard_map.
    - `operands`: for each of its inputs, the index of the equation's operand that it comes from.
    - `kinds`: for each of its inputs, how it comes from that operand. `"same"`: it is the operand, in every iteration.
        `"carry"`: it begins as the operand. `"slice"`: it is one entry of the operand along dim 0. `"shard"`: it is a
        device's part of it.
    - `param`: the name of the equation's parameter that holds it.
    """

    closed: Any
    role: Role
    operands: tuple[int, ...]
    kinds: tuple[Kind, ...]
    param: str


@dataclass(frozen=True)
class Place:
    """One input of a jaxpr inside an equation, where an operand arrives."""

    eqn: Any
    inner: Inner
    index: int

    @property
    def kind(self) -> Kind:
        return self.inner.kinds[self.index]

    @property
    def var(self) -> Any:
        return self.inner.closed.jaxpr.invars[self.index]


def closed(jaxpr: Any) -> Any:
    """A jaxpr or a closed jaxpr as a closed one."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())


def insides(eqn: Any) -> tuple[Inner, ...]:
    """The jaxprs inside an equation; none for a primitive that the table does not have."""
    read = _TABLE.get(eqn.primitive.name)
    return () if read is None else read(eqn)


def place_of(eqn: Any, operand: int) -> Place | None:
    """The input inside an equation that an operand arrives at: in a while loop's body rather than its condition, and in all
    branches of a `cond` alike. None where it arrives nowhere, as the index of a branch."""
    found = [Place(eqn, inner, inner.operands.index(operand)) for inner in insides(eqn) if operand in inner.operands]
    return found[-1] if found else None


def is_replaceable(eqn: Any) -> bool:
    """Whether the equation has jaxprs inside that may be replaced by others."""
    return eqn.primitive.name in _REPLACEABLE


def with_insides(eqn: Any, values: Sequence[Any], made: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The equation with other closed jaxprs inside, in the order of `insides`, and its operands.

    A remat's jaxpr is closed over nothing, so the arrays that a new one is closed over become operands.
    """
    params = dict(eqn.params)
    for inner in insides(eqn):
        if isinstance(params[inner.param], tuple | list):
            params[inner.param] = type(params[inner.param])()
    invars, values = list(eqn.invars), list(values)
    for inner, new in zip(insides(eqn), made, strict=True):
        if isinstance(params[inner.param], tuple | list):
            params[inner.param] = (*params[inner.param], new)
        elif hasattr(params[inner.param], "consts"):
            params[inner.param] = new
        else:
            jaxpr = new.jaxpr
            if new.consts:
                inputs = [*jaxpr.constvars, *jaxpr.invars]
                jaxpr = jex.Jaxpr((), inputs, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, _unnamed(eqn))
                invars, values = [*new.jaxpr.constvars, *invars], [*new.consts, *values]
            params[inner.param] = jaxpr
    return eqn.replace(params=params, invars=invars), values


def called(eqn: Any) -> Any | None:
    """The closed jaxpr that an equation calls once on its operands, one for one; None where it is no such call."""
    found = insides(eqn)
    return found[0].closed if found and found[0].role == "call" else None


def all_inside(eqn: Any) -> list[Any]:
    """The closed jaxprs that an equation computes: a loop's body, all branches of a `cond`, what it calls.

    The conditions of while loops are left out, and so are shard_maps, whose shapes are those of one device.
    """
    return [inner.closed for inner in insides(eqn) if inner.role not in ("condition", "manual")]


def equations(closed: Any) -> Iterator[Any]:
    """The equations of a closed jaxpr, also inside its loops, branches and plain calls, each jaxpr once."""
    seen: set[int] = set()
    todo = [closed.jaxpr]
    while todo:
        jaxpr = todo.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        yield from jaxpr.eqns
        inner = [found.closed.jaxpr for eqn in jaxpr.eqns if is_replaceable(eqn) for found in insides(eqn)]
        todo.extend(reversed(inner))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants of its loop, and how many after them its carry; the rest is sliced."""
    if "ft_in" in eqn.params:  # jax 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def n_iterations(eqn: Any) -> int:
    """How many times an equation computes what it has inside, as far as that is known: 1 for all but a scan."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


# --- the table -----------------------------------------------------------------------------------------------------------


def _call(eqn: Any) -> tuple[Inner, ...]:
    for param in ("jaxpr", "call_jaxpr"):
        if param in eqn.params:
            inner = closed(eqn.params[param])
            n = len(inner.jaxpr.invars)
            return (Inner(inner, "call", tuple(range(n)), (_SAME,) * n, param),) if n == len(eqn.invars) else ()
    return ()


def _shard_map(eqn: Any) -> tuple[Inner, ...]:
    n = len(eqn.invars)
    return (Inner(closed(eqn.params["jaxpr"]), "manual", tuple(range(n)), (_SHARD,) * n, "jaxpr"),)


def _scan(eqn: Any) -> tuple[Inner, ...]:
    n, (n_consts, n_carry) = len(eqn.invars), scan_counts(eqn)
    kinds = (_SAME,) * n_consts + (_CARRY,) * n_carry + (_SLICE,) * (n - n_consts - n_carry)
    return (Inner(eqn.params["jaxpr"], "body", tuple(range(n)), kinds, "jaxpr"),)


def _while(eqn: Any) -> tuple[Inner, ...]:
    n, n_cond, n_body = len(eqn.invars), eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body, carry = range(n_cond), range(n_cond, n_cond + n_body), range(n_cond + n_body, n)
    carried = (_CARRY,) * len(carry)
    return (
        Inner(eqn.params["cond_jaxpr"], "condition", (*of_cond, *carry), (_SAME,) * n_cond + carried, "cond_jaxpr"),
        Inner(eqn.params["body_jaxpr"], "body", (*of_body, *carry), (_SAME,) * n_body + carried, "body_jaxpr"),
    )


def _cond(eqn: Any) -> tuple[Inner, ...]:
    n = len(eqn.invars) - 1  # the first operand is the branch's index
    operands = tuple(range(1, n + 1))
    return tuple(Inner(branch, "branch", operands, (_SAME,) * n, "branches") for branch in eqn.params["branches"])


_TABLE: dict[str, Callable[[Any], tuple[Inner, ...]]] = {
    **dict.fromkeys(_CALLS, _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


# --- jaxprs and equations as functions -----------------------------------------------------------------------------------


def _unnamed(eqn: Any) -> Any:
    return jex.DebugInfo("redeqx", eqn.primitive.name, None, None)


def shapes_in(closed: Any) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a closed jaxpr's inputs, to trace another with."""
    avals = [var.aval for var in closed.jaxpr.invars]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]


def run(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The outputs of one equation, computed with its name scope and source line."""
    values = {atom: value for atom, value in zip(eqn.invars, ins, strict=True) if not isinstance(atom, jex.Literal)}
    jaxpr = jex.Jaxpr((), list(values), eqn.outvars, [eqn], eqn.effects, _unnamed(eqn))
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*values.values())


def as_fun(traced: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of arrays to arrays: `jaxpr_as_fun` returns an output that is a literal as it is kept."""

    def fun(*args: Any) -> list[Any]:
        outs = jex.jaxpr_as_fun(traced)(*args)
        return [value_of(atom, out) for atom, out in zip(traced.jaxpr.outvars, outs, strict=True)]

    return fun


def value_of(output: Any, value: Any) -> Any:
    """The value of a jaxpr's output as an array, where a literal's is a scalar of Python or numpy, with or without a type.

    A layer that sets a constant makes one. A weak type stays weak, as a loop's carry must have the type that it began with.
    """
    if not isinstance(output, jex.Literal):
        return value
    aval: Any = output.aval
    return jnp.asarray(value) if getattr(aval, "weak_type", False) else jnp.asarray(value, aval.dtype)
