"""How equations with inner jaxprs relate the dims of their operands and outputs. Inner jaxprs are followed once; carries are
unified afterwards. `names` is the `Names` that follows them."""

from collections.abc import Callable
from typing import Any

from ..kernels import formula
from ..tracing import CUSTOM_DERIVATIVES, insides, normal, without_remats
from ._atoms import Step, Value
from ._derivatives import has_own_derivative, take_derivative


def _enter(names: Any, step: Step) -> list[Value]:
    """Follows an equation like the jaxprs inside it: a call, the body of a loop, or the branches of a `cond`."""
    found, given, carry = insides(step.eqn), list(step.ins), list[Value]()
    if not found:
        return _opaque(names, step)
    for var, operand, kind in zip(found[-1].closed.jaxpr.invars, found[-1].operands, found[-1].kinds, strict=True):
        if kind == "same":
            continue
        value = step.ins[operand]
        if kind == "carry":
            given[operand] = Value(value.aval, value.dims).depends(value)
            carry.append(given[operand])
        else:
            step.scanned = step.scanned or value.dims[0]
            names.unify(step.scanned, value.dims[0])
            given[operand] = Value(var.aval, value.dims[1:]).depends(value)
    if step.name == "scan":
        step.scanned = step.scanned or names.dim(step.eqn.params["length"])
        names.mix("scan", step.scanned)
    step.blocks = [names.block(inner.closed, [given[i] for i in inner.operands]) for inner in found]
    outs = step.blocks[-1].outs
    if found[0].role == "call":
        outs = list(map(_again, outs))
        return take_derivative(names, step, given, outs) if has_own_derivative(step.eqn) else outs
    if found[0].role == "branch":
        carry = [Value(value.aval, value.dims).depends(step.ins[0]) for value in outs]
    for inner, block in zip(found, step.blocks, strict=True):
        if inner.role == "condition":
            carry = [value.depends(*block.outs) for value in carry]
            continue
        for value, out in zip(carry, block.outs, strict=False):
            names.unify_all(value.depends(out).dims, out.dims)
    stacked = zip(step.eqn.outvars[len(carry) :], outs[len(carry) :], strict=True)
    return [*map(_again, carry), *(Value(var.aval, (step.scanned, *value.dims)).depends(value) for var, value in stacked)]


def _again(value: Value) -> Value:
    """Returns the value as the output of an equation."""
    return Value(value.aval, value.dims, index_of=value.index_of).depends(value)


def _follow(names: Any, step: Step, closed: Any) -> list[Value]:
    """Follows an equation like the closed jaxpr that it computes."""
    step.blocks = [names.block(without_remats(closed), step.ins)]
    return list(map(_again, step.blocks[0].outs))


def _linear_solve(names: Any, step: Step) -> list[Value]:
    """Followed like the solve that it calls. Its derivative solves with the transposed matrix."""
    lengths, first, ins = step.eqn.params["const_lengths"], sum(step.eqn.params["const_lengths"][:2]), step.ins
    step.ins = [*ins[first : first + lengths.solve], *ins[sum(lengths) :]]
    return take_derivative(names, step, ins, _follow(names, step, step.eqn.params["jaxprs"].solve))


def _opaque(names: Any, step: Step) -> list[Value]:
    found = names.give_up(step.eqn, step.ins)
    return [Value(var.aval, dims).depends(*step.ins) for var, dims in zip(step.eqn.outvars, found, strict=True)]


LOOPS: dict[str, Callable[[Any, Step], list[Value]]] = {
    **dict.fromkeys(("scan", "while", "cond", "jit", "closed_call", "eval_jaxpr", *CUSTOM_DERIVATIVES), _enter),
    **dict.fromkeys(("attention", "attention_gradient"), lambda names, step: _follow(names, step, formula(step.eqn))),
    "custom_linear_solve": _linear_solve,
    "remat_opt": lambda names, step: _follow(names, step, normal(step.eqn.params["fwd_jaxpr"])),  # of `optimize_remat=True`
    **dict.fromkeys(("shard_map", "custom_lin"), _opaque),
}
