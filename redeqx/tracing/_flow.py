"""Carries one value per variable forward through a jaxpr and through its calls, branches and loops.

An analysis of what values depend on is a rule for one equation: from the values of its operands to those of its outputs.
Values are joined where paths meet: those of a `cond`'s branches, and those of a loop's iterations, until its carry no longer
changes.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from ._inner import Env, insides

T = TypeVar("T")


def union(bits: Sequence[int]) -> int:
    """Joins values that are bit sets."""
    return reduce(or_, bits, 0)


def flow(
    closed: Any,
    inputs: Sequence[T],
    rule: Callable[[Any, Sequence[T]], Sequence[T] | None],
    join: Callable[[Sequence[T]], T],
    *,
    visit: Callable[[Any, Sequence[T], Sequence[T]], None] = lambda eqn, ins, outs: None,
    entry: Callable[[T], T] = lambda value: value,
    stack: Callable[[T], T] = lambda value: value,
) -> Callable[[Any], T]:
    """Returns a function from the atoms of a closed jaxpr to their values.

    **Arguments:**

    - `inputs`: the values of the inputs. Values are hashable.
    - `rule`: takes an equation and the values of its operands, and returns those of its outputs. If it returns None, the
        equation is entered; one without inner jaxprs has outputs with the joined values of all its operands.
    - `join`: merges values, in any order. Constants have the value `join([])`, which changes no other.
    - `visit`: is called for each equation in each of its contexts, after those inside it, with the values of its operands
        and outputs; in a loop only with those of the fixed point.
    - `entry`, `stack`: from the value of an array that a scan slices to that of its entries, and the reverse. Values
        that tell dims apart need them.
    """
    nothing = join([])
    memo: dict[Any, list[T]] = {}  # without it, the time would be exponential in the depth of nested loops

    def follow(closed: Any, inputs: Sequence[T], is_settled: bool) -> Callable[[Any], T]:
        env = Env(zip(closed.jaxpr.invars, inputs, strict=True), literal=lambda _: nothing)
        env.update(dict.fromkeys(closed.jaxpr.constvars, nothing))
        for eqn in closed.jaxpr.eqns:
            ins = env.read(eqn.invars)
            if (outs := rule(eqn, ins)) is None:
                outs = enter(eqn, ins, is_settled)
            if is_settled:
                visit(eqn, ins, outs)
            env.update(zip(eqn.outvars, outs, strict=True))
        return env.__getitem__

    def outputs(closed: Any, inputs: Sequence[T], is_settled: bool) -> list[T]:
        key = (closed.jaxpr, is_settled, *inputs)
        if key not in memo:
            memo[key] = list(map(follow(closed, inputs, is_settled), closed.jaxpr.outvars))
        return memo[key]

    def enter(eqn: Any, ins: Sequence[T], is_settled: bool) -> Sequence[T]:
        if eqn.primitive.name == "optimization_barrier":  # output i is operand i
            return ins
        inner = [inner for inner in insides(eqn) if inner.role != "condition"]
        if not inner:
            return [join(ins)] * len(eqn.outvars)
        if inner[0].role != "body":
            each = [outputs(inside.closed, [ins[i] for i in inside.operands], is_settled) for inside in inner]
            index = ins[:1] if inner[0].role == "branch" else ()
            return [join([*index, *of_output]) for of_output in zip(*each, strict=True)]
        (body,) = inner
        carry = [i for i, kind in enumerate(body.kinds) if kind == "carry"]
        values = [entry(ins[i]) if kind == "slice" else ins[i] for i, kind in zip(body.operands, body.kinds, strict=True)]
        before = None
        while values != before:
            before = list(values)
            for i, out in zip(carry, outputs(body.closed, values, False), strict=False):
                values[i] = join([values[i], out])
        stacked = map(stack, outputs(body.closed, values, is_settled)[len(carry) :])
        return [*(values[i] for i in carry), *stacked]  # with the initial values: a loop may have no iterations

    return follow(closed, inputs, True)
