"""Sums numbers over the equations of a jaxpr and of its calls, branches and loops, which count as often as they run.

What each device computes by `jax.shard_map` counts once for each of these devices.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import jax

from ._inner import insides, n_iterations

_RARELY, _ABOUT = "redeqx_rarely", "redeqx_about_"  # no scopes of a user


def rarely() -> AbstractContextManager[Any]:
    """A context for a choice (`jax.lax.cond`) of which a step usually takes the cheaper branch, as where a further pass is
    needed only if experts are very unbalanced. What counts the work of a step then counts the cheaper branch."""
    return jax.named_scope(_RARELY)


def is_rare(scopes: str) -> bool:
    """Whether an operation with this name, as in a jaxpr or in HLO, was made in the context `rarely`."""
    return _RARELY in re.split(r"[/()]", scopes)


def about(n: int) -> AbstractContextManager[Any]:
    """A context for a `jax.lax.while_loop` of unknown length that usually has at least `n` iterations. What counts the
    work of a compiled program then counts so many."""
    return jax.named_scope(f"{_ABOUT}{n}")


def expected_length(loop: str) -> int | None:
    """Returns the number of iterations of a loop with this name in HLO if it was made in the context `about`, or None."""
    found = re.search(rf"{_ABOUT}(\d+)/while$", loop)
    return int(found.group(1)) if found else None


class Entered(NamedTuple):
    """The programs inside a step of a program: how often it runs them, whether it runs only one of them, and whether that is
    usually the cheapest."""

    programs: Iterable[Hashable]
    times: float = 1
    is_choice: bool = False
    is_rare: bool = False


def entered(eqn: Any) -> Entered:
    """Returns the jaxprs inside an equation. A loop of unknown length has one iteration."""
    inside = [inner.closed.jaxpr for inner in insides(eqn) if inner.role != "condition"]
    times = n_iterations(eqn)
    if eqn.primitive.name == "shard_map":
        times = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return Entered(inside, times, eqn.primitive.name == "cond", is_rare(str(eqn.source_info.name_stack)))


def fold(
    program: Any,
    count: Callable[[Any], Mapping[Any, float] | None],
    enter: Callable[[Any], Entered] = entered,
    steps: Callable[[Any], Iterable[Any]] = attrgetter("eqns"),
) -> Counter[Any]:
    """Returns the sums of numbers, by key, over the steps of a program, such as a jaxpr. Of a choice, the largest counts; of
    one that is made in the context `rarely`, the smallest. `count` takes a step and returns its numbers, or None to enter
    it."""
    memo: dict[Any, Counter[Any]] = {}  # calls of one jitted function share its jaxpr

    def of(program: Any) -> Counter[Any]:
        if program not in memo:
            total = memo[program] = Counter[Any]()
            for step in steps(program):
                if (own := count(step)) is not None:
                    total.update(own)
                    continue
                programs, times, is_choice, rare = enter(step)
                inner = list(map(of, programs))
                choose = min if rare else max
                for numbers in [choose(inner, key=Counter.total, default=Counter())] if is_choice else inner:
                    total.update({key: times * n for key, n in numbers.items()})
        return memo[program]

    return of(program)
