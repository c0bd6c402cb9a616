"""Whether a loop ends for each row by itself: under `vmap` a row that has ended keeps its values while others go on; text is
generated until a flag of each row is set. And whether a branch ends the program."""

from collections.abc import Callable, Collection
from typing import Any

from ..tracing import alike, same_array
from ._atoms import Block, Step, Value

_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "copy")


def ends_of_rows(step: Step) -> Value | None:
    """Returns what says whether a row goes on, if a `while` goes on as long as any row does and its body keeps the values of
    rows that have ended. Otherwise returns None."""
    condition, body = step.blocks
    made = {id(out): by for block in step.blocks for by in block.steps for out in by.outs}
    any_row = made.get(id(condition.outs[0]))
    if any_row is None or any_row.name != "reduce_or":
        return None
    goes_on = any_row.ins[0]

    def are_same(one: Value, two: Value) -> bool:
        """Whether two values are the same function of the carry and of constants."""
        seen, todo = set[tuple[int, int]](), [(one, two)]
        while todo:  # no recursion: such a function may be long
            one, two = todo.pop()
            if one is two or (id(one), id(two)) in seen:
                continue
            seen.add((id(one), id(two)))
            if one.literal is not None and two.literal is not None:
                if one.aval != two.aval or not same_array(one.literal, two.literal):
                    return False
                continue
            by, other = made.get(id(one)), made.get(id(two))
            if by is None or other is None or by.outs.index(one) != other.outs.index(two) or not alike(by.eqn, other.eqn):
                return False
            todo += [(a, b) for a, b in zip(by.ins, other.ins, strict=True)]
        return True

    def is_kept(value: Value, before: Value) -> bool:
        """Whether the rows of a carry that have ended keep their values."""
        by = made.get(id(value))
        if value is before or by is None or by.name != "select_n" or by.ins[1] is not before:
            return value is before
        which = by.ins[0]
        while (view := made.get(id(which))) is not None and view.name in _VIEWS:
            which = view.ins[0]
        return are_same(which, goes_on)

    carry = body.ins[len(body.ins) - len(body.outs) :]
    return goes_on if all(is_kept(out, slot) for out, slot in zip(body.outs, carry, strict=True)) else None


def ends_by_flags(condition: Block, reduced: Collection[Step], rows_in: Callable[[Value], Collection[Any]]) -> bool:
    """Whether a loop's condition mixes rows by `all` or `any` of booleans in its carry alone, which mark the rows that have
    ended. An `any` of rows that have not converged, for one, is computed of numbers."""
    made = {id(out): by for by in condition.steps for out in by.outs}
    todo = [value for by in reduced for value in by.ins]
    while todo:
        value = todo.pop()
        if rows_in(value):
            is_given = any(value is each for each in condition.ins)
            if value.aval.dtype != bool or (id(value) not in made and not is_given):  # made in a loop or branch, of anything
                return False
            todo += [] if is_given else made[id(value)].ins
    return bool(reduced) and {by.name for by in reduced} <= {"reduce_and", "reduce_or"}


def raises(block: Block) -> bool:
    """Whether a branch is the one in which `equinox.error_if` raises: nothing reads its outputs."""
    callbacks = (step.eqn.params.get("callback") for step in block.steps if step.name == "pure_callback")
    functions = (getattr(callback, "callback_func", None) for callback in callbacks)
    return any(getattr(function, "__module__", "") == "equinox._errors" for function in functions)
