"""Equal blocks in the lists of a model, and what a step of all of them takes, from steps of fewer.

Layers that a loss computes one after the other, each written out, take compilers minutes and gigabytes of the host. Each of
them adds the same to a program: two programs of a few blocks say what one of all takes. What may be extrapolated is decided
by the traced program, whose equations and matmuls must grow by exactly as much with each block. (Stacking the blocks into a
scan would compile as fast, but is another program: for eight blocks of a GPT on v5e it took 1.6 times the memory.)
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
from ..tracing import matmul_flops
from ._report import Step

_LEAST = 12  # blocks; fewer are compiled as they are
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Blocks:
    """`n` equal blocks, one after the other, in the list at `path` of a model, from its entry `start` on."""

    path: str
    start: int
    n: int


def equal_blocks(model: PyTree) -> list[Blocks]:
    """The longest run of equal blocks of each list of a model: of one class, with arrays of the same names and shapes."""
    found = []
    for path, items in jtu.tree_flatten_with_path(model, is_leaf=lambda x: _longest_run(x)[1] >= _LEAST)[0]:
        start, n = _longest_run(items)
        if n >= _LEAST:
            found.append(Blocks(render(path), start, n))
    return found


def _longest_run(items: Any) -> tuple[int, int]:
    if type(items) not in (list, tuple) or len(items) < _LEAST:
        return 0, 0
    best = start = 0, 0
    signatures = [_signature(item) for item in items]
    for i, signature in enumerate(signatures):
        is_more = i > 0 and signature is not None and signature == signatures[i - 1]
        start = (start[0], start[1] + 1) if is_more else (i, 1)
        best = max(best, start, key=lambda run: run[1])
    return best


def _signature(item: Any) -> Any:
    """What equal blocks have in common; None for what has no arrays, and for an array."""
    leaves = {} if is_array_like(item) else named_leaves(item)
    arrays = [(name, leaf.shape, leaf.dtype) for name, leaf in leaves.items() if is_array_like(leaf)]
    return (type(item), arrays) if arrays else None


def with_fewer(model: PyTree, counts: Mapping[Blocks, int]) -> tuple[PyTree, dict[str, str]]:
    """The model with only so many of the blocks, and for each of its leaves the name that it has in the whole model."""
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


# --- what grows with them ----------------------------------------------------------------------------------------------


def content(jaxpr: Any) -> Counter[str]:
    """What a jaxpr consists of: its equations and, among them, its matmuls; and the FLOPs of those, by dtype."""
    found = Counter({f"FLOPs {dtype}": n for dtype, n in matmul_flops(jaxpr).items()})
    todo = [jaxpr]
    while todo:
        eqns = todo.pop().eqns
        found["equations"] += len(eqns)
        found["matmuls"] += sum(eqn.primitive.name in ("dot_general", "conv_general_dilated") for eqn in eqns)
        todo += [getattr(inner, "jaxpr", inner) for eqn in eqns for inner in jex.jaxprs_in_params(eqn.params)]
    return found


@dataclass(frozen=True)
class Shares:
    """How much a whole takes by a base and by programs with more blocks of one list: `base + sum(times * (more - base))`."""

    times: tuple[Fraction, ...]

    def of(self, base: int, more: Sequence[int]) -> Fraction:
        return base + sum((times * (each - base) for times, each in zip(self.times, more, strict=True)), Fraction(0))

    def holds(self, whole: Counter[str], base: Counter[str], more: Sequence[Counter[str]]) -> bool:
        """Whether traced programs add up to the whole: matmuls exactly, equations nearly (a long `jnp.stack` is a tree)."""

        def is_sum(what: str) -> bool:
            off = abs(self.of(base[what], [each[what] for each in more]) - whole[what])
            return off <= (whole[what] // 100 if what == "equations" else 0)

        return all(map(is_sum, whole))

    def step(self, base: Step, more: Sequence[Step], flops: Mapping[str, int]) -> Step:
        """The step of all blocks."""
        every = [base, *more]
        seconds = sum(step.compile_seconds for step in every)
        failed = {what: why for step in every for what, why in step.failed.items()}
        if any(step.is_refused for step in every):
            needs = max(step.needs for step in every)
            return Step(needs=needs, compile_seconds=seconds, is_refused=True, flops=flops, failed=failed)

        def size(name: str) -> int:
            return max(0, round(self.of(getattr(base, name), [getattr(step, name) for step in more])))

        return Step(
            compile_seconds=seconds,
            flops=flops,
            failed=failed,
            largest=self._items([step.largest for step in every], lambda x: (x.bytes, x.dtype, x.shape), _repeated),
            collectives=self._items(
                [step.collectives for step in every], lambda x: (x.kind, x.dtype, x.shape, x.group), _more_often
            ),
            needs=size("needs"),
            arguments=size("arguments"),
            temporaries=size("temporaries"),
            outputs=size("outputs"),
            code=size("code"),
            bytes_moved=size("bytes_moved"),
        )

    def _items(
        self,
        lists: Sequence[Sequence[_Item]],
        key: Callable[[_Item], Any],
        add: Callable[[_Item, int], Iterable[_Item]],
    ) -> tuple[_Item, ...]:
        """The items of all blocks: those of the base, and of each kind as many more as the others have."""
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
    """A step of fewer blocks whose operations name their weights as the whole model does."""
    changed = {name: whole for name, whole in names.items() if name != whole}
    if not changed:
        return step

    def rename(item: Any) -> Any:
        return replace(item, op_name=re.sub(r"[^/()\s;:]+", lambda part: changed.get(part[0], part[0]), item.op_name))

    return replace(step, largest=tuple(map(rename, step.largest)), collectives=tuple(map(rename, step.collectives)))
