"""Sums numbers over the equations of a jaxpr, also inside its calls, branches and loops, with the loops' trip numbers."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from ._inner import all_inside, n_iterations


class Entered(NamedTuple):
    """The programs inside a step of a program: how often it runs them, and whether it runs only one of them."""

    programs: Iterable[Hashable]
    times: float = 1
    is_choice: bool = False


def entered(eqn: Any) -> Entered:
    """Returns the jaxprs inside an equation. A loop of unknown length has one iteration."""
    return Entered([inner.jaxpr for inner in all_inside(eqn)], n_iterations(eqn), eqn.primitive.name == "cond")


def fold(
    program: Any,
    count: Callable[[Any], Mapping[Any, float] | None],
    enter: Callable[[Any], Entered] = entered,
    steps: Callable[[Any], Iterable[Any]] = attrgetter("eqns"),
) -> Counter[Any]:
    """Returns the sums of numbers, by key, over the steps of a program. Of a choice, the largest counts.

    **Arguments:**

    - `program`: a jaxpr, with the default `enter` and `steps`.
    - `count`: takes a step and returns its numbers, or None to enter it.
    """
    memo: dict[Any, Counter[Any]] = {}  # calls of one jitted function share its jaxpr

    def of(program: Any) -> Counter[Any]:
        if program not in memo:
            total = memo[program] = Counter[Any]()
            for step in steps(program):
                if (own := count(step)) is not None:
                    total.update(own)
                    continue
                programs, times, is_choice = enter(step)
                inner = list(map(of, programs))
                for numbers in [max(inner, key=Counter.total, default=Counter())] if is_choice else inner:
                    total.update({key: times * n for key, n in numbers.items()})
        return memo[program]

    return of(program)
