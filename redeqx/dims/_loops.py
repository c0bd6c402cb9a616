"""How loops, branches and calls relate the dims of their operands and outputs. Bodies are walked once; carries are unified
afterwards. `names` is the `Names` that walks them."""

from collections.abc import Callable, Sequence
from typing import Any

from ..kernels import formula
from ..tracing import insides, scan_counts, without_remats
from ._atoms import Step, Value


def _follow(names: Any, step: Step, closed: Any) -> list[Value]:
    """Follows an equation like the closed jaxpr that it computes."""
    step.blocks = [names.block(closed, step.ins)]
    return list(map(_again, step.blocks[0].outs))


def _called(names: Any, step: Step) -> list[Value]:
    inner = insides(step.eqn)
    return _follow(names, step, inner[0].closed) if inner else _opaque(names, step)


def _opaque(names: Any, step: Step) -> list[Value]:
    step.ins = list(map(names.use, step.ins))
    found = names.give_up(step.eqn, step.ins)
    return [Value(var.aval, dims) for var, dims in zip(step.eqn.outvars, found, strict=True)]


def _attention(names: Any, step: Step) -> list[Value]:
    return _follow(names, step, without_remats(formula(step.eqn)))


def _linear_solve(names: Any, step: Step) -> list[Value]:
    """Followed like the solve that it calls. The verdict checks the gradient, which solves with the transposed matrix."""
    lengths, solve = step.eqn.params["const_lengths"], step.eqn.params["jaxprs"].solve
    first = lengths.matvec + lengths.vecmat
    step.ins = [*step.ins[first : first + lengths.solve], *step.ins[sum(lengths) :]]
    return _follow(names, step, without_remats(solve))


def _scan(names: Any, step: Step) -> list[Value]:
    n_consts, n_carry = scan_counts(step.eqn)
    consts, initial, xs = step.ins[:n_consts], step.ins[n_consts : n_consts + n_carry], step.ins[n_consts + n_carry :]
    xs, initial = list(map(names.use, xs)), list(map(names.use, initial))
    step.ins = [*consts, *initial, *xs]
    step.scanned = xs[0].dims[0] if xs else names.dim(step.eqn.params["length"])
    for value in xs[1:]:
        names.unify(step.scanned, value.dims[0])
    inner = insides(step.eqn)[0].closed
    avals = [var.aval for var in inner.jaxpr.invars[n_consts + n_carry :]]
    slices = [Value(aval, value.dims[1:], value.is_polymorphic) for aval, value in zip(avals, xs, strict=True)]
    carry = [Value(value.aval, value.dims) for value in initial]
    step.blocks = [names.block(inner, [*consts, *carry, *slices])]
    outs = step.blocks[0].outs
    _unify(names, carry, outs)
    names.mix("scan", step.scanned)
    avals = [var.aval for var in step.eqn.outvars[n_carry:]]
    stacked = zip(avals, map(names.use, outs[n_carry:]), strict=True)
    return [*map(_again, carry), *(Value(aval, (step.scanned, *value.dims)) for aval, value in stacked)]


def _while(names: Any, step: Step) -> list[Value]:
    condition, body = insides(step.eqn)
    n_cond, n_body = step.eqn.params["cond_nconsts"], step.eqn.params["body_nconsts"]
    of_cond, of_body, initial = step.ins[:n_cond], step.ins[n_cond : n_cond + n_body], step.ins[n_cond + n_body :]
    carry = [Value(value.aval, names.use(value).dims) for value in initial]
    step.blocks = [names.block(condition.closed, [*of_cond, *carry]), names.block(body.closed, [*of_body, *carry])]
    _unify(names, carry, step.blocks[1].outs)
    return list(map(_again, carry))


def _cond(names: Any, step: Step) -> list[Value]:
    step.blocks = [names.block(branch.closed, step.ins[1:]) for branch in insides(step.eqn)]
    outs = [Value(value.aval, names.use(value).dims) for value in step.blocks[0].outs]
    for other in step.blocks[1:]:
        _unify(names, outs, other.outs)
    return outs


def _again(value: Value) -> Value:
    """Returns the value as the output of an equation."""
    return Value(value.aval, value.dims, value.is_polymorphic, index_of=value.index_of)


def _unify(names: Any, carry: Sequence[Value], outs: Sequence[Value]) -> None:
    for value, out in zip(carry, outs, strict=False):
        names.unify_all(value.dims, names.use(out).dims)


_OPAQUE = ("shard_map", "custom_lin")


LOOPS: dict[str, Callable[[Any, Step], list[Value]]] = {
    "attention": _attention,
    "attention_gradient": _attention,
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(("jit", "closed_call", "custom_jvp_call", "custom_vjp_call"), _called),
    **dict.fromkeys(_OPAQUE, _opaque),
}
