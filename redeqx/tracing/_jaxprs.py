"""A traced function, and what its jaxpr says of itself: jaxprs that equations call, inputs that outputs depend on, the
matmuls that it takes; and the same function with some of its equations computed otherwise."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jaxtyping import PyTree

from .._tree import is_array_like, named_leaves

# Equations that call one jaxpr on all of their operands, once.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "remat",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def closed(jaxpr: Any) -> Any:
    """A jaxpr or a closed jaxpr as a closed one."""
    return jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())


def called(eqn: Any) -> Any | None:
    """The closed jaxpr that an equation calls once on its operands, one for one; None where it is no such call."""
    if eqn.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            inner = closed(eqn.params[name])
            return inner if len(inner.jaxpr.invars) == len(eqn.invars) else None
    return None


def shapes_in(closed: Any) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a closed jaxpr's inputs, to trace another with."""
    avals = [var.aval for var in closed.jaxpr.invars]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]


def run(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """One equation, evaluated with its name scope and source line."""
    values = {atom: value for atom, value in zip(eqn.invars, ins, strict=True) if not isinstance(atom, jex.Literal)}
    info = jex.DebugInfo("redeqx", eqn.primitive.name, None, None)
    jaxpr = jex.Jaxpr((), list(values), eqn.outvars, [eqn], eqn.effects, info)
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


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants of its loop, and how many after them its carry; the rest is sliced."""
    if "ft_in" in eqn.params:  # jax 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


@dataclass(frozen=True)
class Trace:
    """A function of a model, traced abstractly: no array is made.

    **Arguments:**

    - `names`, `leaves`: of the model's arrays, which are the first inputs of `closed`.
    - `closed`: the jaxpr.
    """

    names: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    closed: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], model: PyTree, *args: PyTree) -> "Trace":
        """`fn(model, *args)`, of arrays or their shapes."""
        arrays, static = eqx.partition(model, is_array_like)
        leaves, treedef = jax.tree.flatten(arrays)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)

        def of_leaves(leaves: tuple[Any, ...], *args: PyTree) -> Any:
            return fn(eqx.combine(jax.tree.unflatten(treedef, leaves), static), *args)

        return cls(tuple(named_leaves(arrays)), shapes, jax.make_jaxpr(of_leaves)(shapes, *args))

    def reads(self) -> dict[str, bool]:
        """For each leaf, whether the outputs' gradient can depend on it.

        An inside that is not followed (`while`, `cond`) counts as reading all it gets.
        """
        live = _live_inputs(self.closed.jaxpr, [True] * len(self.closed.jaxpr.outvars))
        return dict(zip(self.names, live, strict=False))


def _live_inputs(jaxpr: Any, live_outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of a jaxpr some live output depends on, from the last equation to the first."""
    live = {v for v, alive in zip(jaxpr.outvars, live_outputs, strict=True) if alive and not isinstance(v, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outs = [var in live for var in eqn.outvars]
        if not any(outs) or eqn.primitive.name == "stop_gradient":
            continue
        inner = called(eqn)
        if eqn.primitive.name == "scan":
            reads = _live_inputs_of_scan(eqn, eqn.params["jaxpr"].jaxpr, outs)
        elif inner is not None:
            reads = _live_inputs(inner.jaxpr, outs)
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


# --- a function, rewritten ---------------------------------------------------------------------------------------------

# Where equations keep the jaxprs that gradients are taken through. Those with rules of their own for that are left alone.
_INSIDE = {
    "jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "remat": "jaxpr", "scan": "jaxpr",
    "while": "body_jaxpr", "cond": "branches",
}  # fmt: skip

# For an equation, what computes its outputs in its place, given its inputs; None where it stays.
Change = Callable[[Any], Callable[..., Sequence[Any]] | None]


def rewrite(fn: Callable[..., Any], change: Change) -> Callable[..., Any]:
    """`fn` with some of its equations computed otherwise, also inside jits, loops, remats and branches.

    **Arguments:**

    - `fn`: takes PyTrees of arrays, and returns one.
    """

    def rewritten(*args: Any) -> Any:
        flat, treedef = jax.tree.flatten(args)
        traced, shapes = jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*flat)
        outs = evaluate(traced, flat, change) if changes(traced, change) else as_fun(traced)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return rewritten


def evaluate(traced: Any, args: Sequence[Any], change: Change) -> list[Any]:
    """The outputs of a closed jaxpr, rewritten."""
    env: dict[Any, Any] = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    env.update(zip(traced.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in traced.jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        changed = change(eqn)
        if changed is not None:
            outs = changed(*ins)
        elif any(changes(jaxpr, change) for jaxpr in _inside(eqn)):
            outs = run(_with_inside(eqn, change), ins)
        else:
            outs = run(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value_of(atom, read(atom)) for atom in traced.jaxpr.outvars]


def changes(traced: Any, change: Change) -> bool:
    """Whether rewriting a closed jaxpr would change any equation."""
    return any(change(eqn) is not None or any(changes(jaxpr, change) for jaxpr in _inside(eqn)) for eqn in traced.jaxpr.eqns)


def _inside(eqn: Any) -> list[Any]:
    """The closed jaxprs of an equation."""
    found = eqn.params.get(_INSIDE.get(eqn.primitive.name, ""), ())
    return [closed(jaxpr) for jaxpr in (found if isinstance(found, tuple | list) else [found])]


def _with_inside(eqn: Any, change: Change) -> Any:
    name = _INSIDE[eqn.primitive.name]

    def rewritten(jaxpr: Any) -> Any:
        inner = closed(jaxpr)
        made = jax.make_jaxpr(lambda *args: evaluate(inner, args, change))(*shapes_in(inner))
        return made if hasattr(jaxpr, "consts") else made.jaxpr

    found = eqn.params[name]
    made = type(found)(map(rewritten, found)) if isinstance(found, tuple | list) else rewritten(found)
    return eqn.replace(params={**eqn.params, name: made})


def remat_loops(eqn: Any) -> Callable[..., Sequence[Any]] | None:
    """A change: the backward pass of each scan recomputes its body from what the body was given."""
    if eqn.primitive.name != "scan" or any(inner.primitive.name in _REMATS for inner in eqn.params["jaxpr"].jaxpr.eqns):
        return None

    def recomputing(*ins: Any) -> list[Any]:
        body = eqn.params["jaxpr"]
        again = jax.make_jaxpr(jax.checkpoint(as_fun(body), prevent_cse=False))(*shapes_in(body))
        return run(eqn.replace(params={**eqn.params, "jaxpr": again}), ins)

    return recomputing


def keep_everything(eqn: Any) -> Callable[..., Sequence[Any]] | None:
    """A change: nothing is recomputed."""
    if eqn.primitive.name not in _REMATS:
        return None
    inner = closed(eqn.params["jaxpr"])
    return lambda *ins: evaluate(inner, ins, keep_everything)


_REMATS = ("remat2", "checkpoint", "remat")


# --- what it takes -----------------------------------------------------------------------------------------------------


def matmul_flops(jaxpr: Any) -> Counter[str]:
    """Floating point operations of a jaxpr's matmuls and convolutions, by the dtype of their inputs.

    A multiplication and its addition are two. Loops of unknown length count once, of branches the longest.
    """
    flops: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        if (of_product := product_flops(eqn)) is not None:
            flops[str(eqn.invars[0].aval.dtype)] += of_product
            continue
        inner = [matmul_flops(found.jaxpr) for found in all_inside(eqn)]
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=lambda of: of.total(), default=Counter())]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for of in inner:
            flops.update({dtype: n * times for dtype, n in of.items()})
    return flops


def product_flops(eqn: Any) -> int | None:
    """Floating point operations of an equation that is a matmul or a convolution; None of any other."""
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
        return None
    lhs, rhs = (var.aval for var in eqn.invars)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(lhs.shape[dim] for dim in contracted)
    else:  # a kernel's elements for each of its output features
        terms = math.prod(rhs.shape) // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms


def all_inside(eqn: Any) -> list[Any]:
    """The closed jaxprs of an equation, those of calls with derivatives of their own too."""
    inner = called(eqn)
    return _inside(eqn) or ([] if inner is None else [inner])
