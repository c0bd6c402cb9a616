"""The jaxprs inside an equation: one table of the primitives that contain jaxprs, and how operands map to their inputs.

All code that descends into loops, branches and calls reads this table: the interpreter, the FLOP counts, the liveness of
parameters, and the dataflow of a plan.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex

REMAT = "remat2"  # `jax.checkpoint`
CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
CALLS = ("closed_call", "eval_jaxpr")  # the latter since JAX 0.12, as of a custom derivative that was taken
# Primitives that call one jaxpr once, on all of their operands.
_ALL_CALLS = ("jit", REMAT, *CUSTOM_DERIVATIVES, *CALLS)
# Primitives whose inner jaxpr may be replaced. Not custom derivatives, which belong to the function that they were written
# for, nor shard_map, whose inner jaxpr computes on shards.
_REPLACEABLE = ("jit", REMAT, "scan", "while", "cond")

# How an input of an inner jaxpr is made from an operand: it is the "same" as the operand, in every iteration; or a "carry",
# with the operand as its initial value; or a "slice" of the operand along dim 0; or a device's "shard" of it.
Role = Literal["call", "body", "condition", "branch", "manual"]


class Env(dict[Any, Any]):
    """What is known of the atoms of a jaxpr: a dict by variables that can be read for literals too, which JAX does not hash.
    `literal` takes a literal and returns what is known of it: its value by default."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]] = (), literal: Callable[[Any], Any] = attrgetter("val")):
        super().__init__(pairs)
        self._literal = literal

    def __getitem__(self, atom: Any) -> Any:
        return super().__getitem__(atom) if is_variable(atom) else self._literal(atom)

    def get(self, atom: Any, default: Any = None) -> Any:
        try:
            return self[atom]
        except KeyError:
            return default

    def read(self, atoms: Iterable[Any]) -> list[Any]:
        """Returns what is known of several atoms."""
        return list(map(self.__getitem__, atoms))


def is_variable(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a variable, and no literal."""
    return not isinstance(atom, jex.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among the atoms of a jaxpr, each once."""
    return list(dict.fromkeys(filter(is_variable, atoms)))


def n_bytes(atom: Any) -> int:
    """Returns the bytes of the value of an atom; 0 if it is no array."""
    dtype = getattr(atom.aval, "dtype", None)
    return 0 if dtype is None else math.prod(atom.aval.shape) * dtype.itemsize


@dataclass(frozen=True)
class Inner:
    """One jaxpr inside an equation."""

    closed: Any
    role: Role  # "manual" is the body of a shard_map
    operands: tuple[int, ...]  # for each of its inputs, the index of the equation's operand that it comes from
    kinds: tuple[str, ...]  # for each of its inputs, how it is made from that operand
    param: str  # the name of the equation's parameter that holds the jaxpr


@dataclass(frozen=True)
class Place:
    """An input of a jaxpr inside an equation: where one of the equation's operands arrives."""

    eqn: Any
    inner: Inner
    index: int

    @property
    def kind(self) -> str:
        return self.inner.kinds[self.index]

    @property
    def var(self) -> Any:
        return self.inner.closed.jaxpr.invars[self.index]


def closed(jaxpr: Any) -> Any:
    """Returns a closed jaxpr unchanged, and closes an open one without constants."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())


def insides(eqn: Any) -> tuple[Inner, ...]:
    """Returns the jaxprs inside an equation, or none if the table lacks its primitive."""
    read = _TABLE.get(eqn.primitive.name)
    return () if read is None else read(eqn)


def place_of(eqn: Any, operand: int) -> Place | None:
    """Returns the inner input at which an operand arrives, or None if there is none, as for a branch index.

    For a while loop this is an input of the body rather than of the condition. For a `cond` it is one of the last branch,
    and the other branches have the same inputs.
    """
    found = [Place(eqn, inner, inner.operands.index(operand)) for inner in insides(eqn) if operand in inner.operands]
    return found[-1] if found else None


def is_replaceable(eqn: Any) -> bool:
    """Whether the equation contains jaxprs that may be replaced."""
    return eqn.primitive.name in _REPLACEABLE


def with_insides(eqn: Any, values: Sequence[Any], new_insides: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the equation with its inner jaxprs replaced by new closed ones, in the order of `insides`, and its operands.

    Some constants of the new jaxprs become operands: values of an enclosing trace, because JAX differentiates and batches
    operands only, and all constants of a remat, because it holds an open jaxpr.
    """
    found, params = insides(eqn), dict(eqn.params)
    is_open = any(isinstance(params[inner.param], jex.Jaxpr) for inner in found)
    added = [
        {var: const for var, const in _constants(new) if is_open or isinstance(const, Tracer)} for new in new_insides
    ]  # by the variable inside
    if eqn.primitive.name == "cond":  # all branches have the same inputs
        added = [{var: const for of_branch in added for var, const in of_branch.items()}] * len(added)
    new_insides = [_taking(new, list(more), eqn) for new, more in zip(new_insides, added, strict=True)]
    by_param: dict[str, list[Any]] = {}
    for inner, new in zip(found, new_insides, strict=True):
        by_param.setdefault(inner.param, []).append(new.jaxpr if is_open else new)
    for param, news in by_param.items():
        params[param] = tuple(news) if isinstance(params[param], tuple | list) else news[0]
    operands = list(zip(eqn.invars, values, strict=True))
    if any(added):
        params, operands = _with_more_operands(eqn.primitive.name, params, operands, [list(more.items()) for more in added])
    invars, values = ([pair[i] for pair in operands] for i in (0, 1))
    return eqn.replace(params=params, invars=invars), values


def _constants(closed: Any) -> list[tuple[Any, Any]]:
    return list(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def _taking(closed: Any, added: Sequence[Any], eqn: Any) -> Any:
    """Returns a closed jaxpr with further inputs, before the others. Those that were constants are none any more."""
    if not added:
        return closed
    kept = [(var, const) for var, const in _constants(closed) if var not in added]
    jaxpr = closed.jaxpr.replace(
        constvars=[var for var, _ in kept], invars=[*added, *closed.jaxpr.invars], debug_info=_unnamed(eqn)
    )
    return jex.ClosedJaxpr(jaxpr, [const for _, const in kept])


_Operands = list[tuple[Any, Any]]  # variables and values


def _with_more_operands(
    name: str, params: dict[str, Any], operands: _Operands, added: Sequence[_Operands]
) -> tuple[dict[str, Any], _Operands]:
    """Returns the parameters and operands of an equation of primitive `name` with further operands for each inner jaxpr. The
    new operands arrive at the first inputs of their jaxprs, the same in all iterations."""
    (first, *_), n = added, len(added[0])
    if name == "cond":
        return params, [operands[0], *first, *operands[1:]]
    if name == "while":
        n_cond, counts = params["cond_nconsts"], ("cond_nconsts", "body_nconsts")
        grown = {count: params[count] + len(more) for count, more in zip(counts, added, strict=True)}
        return params | grown, [*first, *operands[:n_cond], *added[1], *operands[n_cond:]]
    of_jit, of_scan = _one_operand()
    if name == "scan" and "ft_in" in params:  # jax 0.11
        pack, (one, _, _) = type(of_scan["ft_in"]), of_scan["ft_in"].unpack()
        consts, *others = params["ft_in"].unpack()
        params = params | {"ft_in": pack(pack(*[one] * n, consts), *others)}
    elif name == "scan":
        params = params | {"num_consts": params["num_consts"] + n}
    elif name == "jit":
        by_operand = ("in_shardings", "in_layouts", "donated_invars")
        params = params | {param: (*of_jit[param] * n, *params[param]) for param in by_operand}
    elif isinstance(params.get("prevent_cse"), tuple):
        params = params | {"prevent_cse": (*[False] * n, *params["prevent_cse"])}
    return params, [*first, *operands]


@cache
def _one_operand() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of a plain jit with one operand and of a scan with one constant."""

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry + x, None), x, length=1)[0]

    (of_jit,) = jax.make_jaxpr(jax.jit(loop))(1.0).jaxpr.eqns
    (of_scan,) = of_jit.params["jaxpr"].jaxpr.eqns
    return of_jit.params, of_scan.params


def called(eqn: Any) -> Any | None:
    """Returns the closed jaxpr that an equation calls once, on all of its operands, or None if it is no such call."""
    found = insides(eqn)
    return found[0].closed if found and found[0].role == "call" else None


def all_inside(eqn: Any) -> list[Any]:
    """Returns the closed jaxprs inside an equation: a loop's body, all branches of a `cond`, or what it calls. Excludes the
    conditions of while loops, and the bodies of shard_maps, whose shapes are those of one device."""
    return [inner.closed for inner in insides(eqn) if inner.role not in ("condition", "manual")]


def equations(closed: Any) -> Iterator[Any]:
    """Yields the equations of a closed jaxpr and of its loops, branches and plain calls. Visits each jaxpr once."""
    seen: set[Any] = set()

    def of(jaxpr: Any) -> Iterator[Any]:
        if jaxpr in seen:
            return
        seen.add(jaxpr)
        for eqn in jaxpr.eqns:
            yield eqn
            if is_replaceable(eqn):
                for inner in insides(eqn):
                    yield from of(inner.closed.jaxpr)

    return of(closed.jaxpr)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns a scan's numbers of constants and of carries, which are its first inputs in this order. The rest is sliced."""
    if "ft_in" in eqn.params:  # jax 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def n_iterations(eqn: Any) -> int:
    """Returns how many times an equation runs its inner jaxpr: a scan's length, and 1 for all other primitives."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


# --- the table -----------------------------------------------------------------------------------------------------------


def _call(eqn: Any) -> tuple[Inner, ...]:
    for param in ("jaxpr", "call_jaxpr"):
        if param in eqn.params:
            inner = closed(eqn.params[param])
            n = len(inner.jaxpr.invars)
            return (Inner(inner, "call", tuple(range(n)), ("same",) * n, param),) if n == len(eqn.invars) else ()
    return ()


def _shard_map(eqn: Any) -> tuple[Inner, ...]:
    n = len(eqn.invars)
    return (Inner(closed(eqn.params["jaxpr"]), "manual", tuple(range(n)), ("shard",) * n, "jaxpr"),)


def _scan(eqn: Any) -> tuple[Inner, ...]:
    n, (n_consts, n_carry) = len(eqn.invars), scan_counts(eqn)
    kinds = ("same",) * n_consts + ("carry",) * n_carry + ("slice",) * (n - n_consts - n_carry)
    return (Inner(eqn.params["jaxpr"], "body", tuple(range(n)), kinds, "jaxpr"),)


def _while(eqn: Any) -> tuple[Inner, ...]:
    n, n_cond, n_body = len(eqn.invars), eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body, carry = range(n_cond), range(n_cond, n_cond + n_body), range(n_cond + n_body, n)
    carried = ("carry",) * len(carry)
    return (
        Inner(eqn.params["cond_jaxpr"], "condition", (*of_cond, *carry), ("same",) * n_cond + carried, "cond_jaxpr"),
        Inner(eqn.params["body_jaxpr"], "body", (*of_body, *carry), ("same",) * n_body + carried, "body_jaxpr"),
    )


def _cond(eqn: Any) -> tuple[Inner, ...]:
    n = len(eqn.invars) - 1  # the first operand is the branch's index
    operands = tuple(range(1, n + 1))
    return tuple(Inner(branch, "branch", operands, ("same",) * n, "branches") for branch in eqn.params["branches"])


_TABLE: dict[str, Callable[[Any], tuple[Inner, ...]]] = {
    **dict.fromkeys(_ALL_CALLS, _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


# --- jaxprs and equations as functions -----------------------------------------------------------------------------------


def _unnamed(eqn: Any) -> Any:
    return jex.DebugInfo("redeqx", eqn.primitive.name, None, None)


def shapes_in(closed: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of a closed jaxpr's inputs, to trace another function with."""
    avals = [var.aval for var in closed.jaxpr.invars]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]


def run(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, with its name scope and source line. An operand may have another value than its literal, or
    than another operand that is the same variable."""
    invars = [jex.Var(atom.aval) for atom in eqn.invars]
    jaxpr = jex.Jaxpr((), invars, eqn.outvars, [eqn.replace(invars=invars)], eqn.effects, _unnamed(eqn))
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*ins)


def evaluate(eqns: Iterable[Any], env: Env, compute: Callable[[Any, Sequence[Any]], Iterable[Any]] = run) -> None:
    """Evaluates equations, one after the other, from the values of an environment, which gets those of their outputs: what
    `compute` returns, given an equation and its operands."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, compute(eqn, env.read(eqn.invars)), strict=True))


def as_fun(traced: Any) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function. Unlike `jaxpr_as_fun`, it returns arrays also for outputs that are literals."""
    return lambda *args: list(map(as_array, jex.jaxpr_as_fun(traced)(*args), traced.jaxpr.outvars))


def as_array(value: Any, atom: Any) -> Any:
    """Returns the value of an atom as an array. The value of a literal, as of a layer that returns a constant, may be a
    Python or numpy scalar. A weak type stays weak, because a loop's carry must keep its initial type."""
    if isinstance(value, jax.Array):
        return value
    aval: Any = atom.aval
    return jnp.asarray(value) if getattr(aval, "weak_type", False) else jnp.asarray(value, aval.dtype)
