"""Finds equal blocks in a model's lists, and extrapolates the step of all blocks from steps with fewer.

A loss that computes its blocks in an unrolled loop takes minutes and gigabytes of host memory to compile. Each block adds
the same amount to the program, so two programs with a few blocks determine the numbers of the full one. This is checked on
the traced programs: each block must add exactly the same number of matmuls, and nearly the same number of equations. Blocks
that `stack_blocks` turns into one loop compile once, and nothing is extrapolated.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

import jax.tree_util as jtu
from jax.extend import core as jex
from jaxtyping import PyTree

from .._tree import is_array_like, map_named, named_leaves, render
from ..tracing import BY_WEIGHT, matmul_flops
from ._figures import Step

_MIN_BLOCKS = 12  # shorter lists are compiled completely
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Blocks:
    """A run of `n` equal blocks in the list at `path` of a model, from index `start` on."""

    path: str
    start: int
    n: int


def equal_blocks(model: PyTree) -> list[Blocks]:
    """Returns the longest run of equal blocks in each list of a model, if it has at least `_MIN_BLOCKS` blocks.

    Blocks are equal if they have the same class and their arrays have the same names, shapes and dtypes.
    """
    found = []
    for path, items in jtu.tree_flatten_with_path(model, is_leaf=lambda x: _longest_run(x)[1] >= _MIN_BLOCKS)[0]:
        start, n = _longest_run(items)
        if n >= _MIN_BLOCKS:
            found.append(Blocks(render(path), start, n))
    return found


def _longest_run(items: Any) -> tuple[int, int]:
    if type(items) not in (list, tuple) or len(items) < _MIN_BLOCKS:
        return 0, 0
    best = current = 0, 0
    signatures = [_signature(item) for item in items]
    for i, signature in enumerate(signatures):
        continues = i > 0 and signature is not None and signature == signatures[i - 1]
        current = (current[0], current[1] + 1) if continues else (i, 1)
        best = max(best, current, key=lambda run: run[1])
    return best


def _signature(item: Any) -> Any:
    """Returns the class of a block and its arrays' names, shapes and dtypes, or None for arrays and items without arrays."""
    leaves = {} if is_array_like(item) else named_leaves(item)
    arrays = [(name, leaf.shape, leaf.dtype) for name, leaf in leaves.items() if is_array_like(leaf)]
    return (type(item), arrays) if arrays else None


def with_fewer(model: PyTree, counts: Mapping[Blocks, int]) -> tuple[PyTree, dict[str, str]]:
    """Shortens each run of blocks to `counts[blocks]`. Returns the model, and the names of its leaves in the full model."""
    of_path = {blocks.path: blocks for blocks in counts}

    def cut(path: tuple[Any, ...], x: Any) -> Any:
        if (blocks := of_path.get(render(path))) is None:
            return x
        return type(x)([*x[: blocks.start + counts[blocks]], *x[blocks.start + blocks.n :]])

    def is_list(path: tuple[Any, ...], x: Any) -> bool:
        return render(path) in of_path

    names = map_named(lambda name, _: name, model)
    fewer, names = (jtu.tree_map_with_path(cut, tree, is_leaf=is_list, is_leaf_takes_path=True) for tree in (model, names))
    return fewer, named_leaves(names)


# --- extrapolation -----------------------------------------------------------------------------------------------------


def content(jaxpr: Any) -> Counter[str]:
    """Counts the equations and matmuls in a jaxpr, and the matmuls' FLOPs by dtype."""
    found = Counter({f"FLOPs {dtype}": n for dtype, n in matmul_flops(jaxpr).items()})
    todo = [jaxpr]
    while todo:
        eqns = todo.pop().eqns
        found["equations"] += len(eqns)
        found["matmuls"] += sum(eqn.primitive.name in BY_WEIGHT for eqn in eqns)
        todo += [getattr(inner, "jaxpr", inner) for eqn in eqns for inner in jex.jaxprs_in_params(eqn.params)]
    return found


@dataclass(frozen=True)
class Shares:
    """Extrapolates numbers of the full program: `base + sum(times * (more - base))`.

    `base` is the number of a program with few blocks, and `more` are those of programs with more blocks of one list each.
    """

    times: tuple[Fraction, ...]

    def of(self, base: int, more: Sequence[int]) -> Fraction:
        return base + sum((times * (each - base) for times, each in zip(self.times, more, strict=True)), Fraction(0))

    def holds(self, full: Counter[str], base: Counter[str], more: Sequence[Counter[str]]) -> bool:
        """Whether extrapolating the traced programs gives the full one.

        It must be exact for matmuls and FLOPs, and within 1 % for equations, since a long `jnp.stack` is a tree.
        """

        def is_close(what: str) -> bool:
            error = abs(self.of(base[what], [each[what] for each in more]) - full[what])
            return error <= (full[what] // 100 if what == "equations" else 0)

        return all(map(is_close, full))

    def step(self, base: Step, more: Sequence[Step], flops: Mapping[str, int]) -> Step:
        """Returns the extrapolated step of all blocks. If the compiler refused a step, `needs` is the largest of all."""
        steps = [base, *more]
        seconds = sum(step.compile_seconds for step in steps)
        failed = {what: why for step in steps for what, why in step.failed.items()}
        if any(step.is_refused for step in steps):
            needs = max(step.needs for step in steps)
            return Step(needs=needs, compile_seconds=seconds, is_refused=True, flops=flops, failed=failed)

        def size(name: str) -> int:
            return max(0, round(self.of(getattr(base, name), [getattr(step, name) for step in more])))

        return Step(
            compile_seconds=seconds,
            flops=flops,
            failed=failed,
            largest=self._items([step.largest for step in steps], lambda x: (x.bytes, x.dtype, x.shape), _repeated),
            collectives=self._items(
                [step.collectives for step in steps], lambda x: (x.kind, x.dtype, x.shape, x.group), _more_often
            ),
            needs=size("needs"),
            arguments=size("arguments"),
            temporaries=size("temporaries"),
            outputs=size("outputs"),
            code=size("code"),
            allowance=size("allowance"),
            bytes_moved=size("bytes_moved"),
            host_bytes=size("host_bytes"),
        )

    def _items(
        self,
        lists: Sequence[Sequence[_Item]],
        key: Callable[[_Item], Any],
        add: Callable[[_Item, int], Iterable[_Item]],
    ) -> tuple[_Item, ...]:
        """Extrapolates the number of items of each kind. Returns the items of the base, with the missing ones added."""
        counts = [Counter[Any]() for _ in lists]
        last: dict[Any, _Item] = {}
        for count, items in zip(counts, lists, strict=True):
            for item in items:
                count[key(item)] += getattr(item, "n_executions", 1)
                last[key(item)] = item
        found = list(lists[0])
        for kind, item in last.items():
            missing = round(self.of(counts[0][kind], [count[kind] for count in counts[1:]])) - counts[0][kind]
            found += add(item, missing) if missing > 0 else []
        return tuple(found)


def _repeated(item: _Item, n: int) -> Iterable[_Item]:
    return [item] * n


def _more_often(item: Any, n: int) -> Iterable[Any]:
    return [replace(item, n_executions=n)]


def renamed(step: Step, names: Mapping[str, str]) -> Step:
    """Replaces names in the operations of a step.

    Arguments get the names of their leaves, and the weights of a step with fewer blocks get those in the full model.
    """
    changed = {name: full for name, full in names.items() if name != full}
    if not changed:
        return step

    def rename(item: Any) -> Any:
        return replace(item, op_name=re.sub(r"[^/()\s;:]+", lambda part: changed.get(part[0], part[0]), item.op_name))

    return replace(step, largest=tuple(map(rename, step.largest)), collectives=tuple(map(rename, step.collectives)))
