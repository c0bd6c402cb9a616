"""The batch of each step: its examples are read, collated and placed on the mesh by a thread, while earlier steps run.

Owns which rows are read when. `_examples` chooses the examples of a step, `_collate` checks their batch, `_rows` splits and
places it, `_workers` collates several batches at once, and `_prefetch` is the thread.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._tree import bare_shape
from ..dims import UNKNOWN, RowUse, with_rows
from ..distributed import RowCheck
from ._collate import check_leading_dims, collate, collate_alone, n_tokens, read
from ._examples import Slice
from ._prefetch import Prefetch, drawn_ahead
from ._rows import BatchSize, Group, local_rows, place_batch
from ._workers import CollatePool


@dataclass(frozen=True)
class Batch:
    """The batch of one step, on the mesh.

    **Arguments:**

    - `groups`: the result of `place_batch`.
    - `signature`: its structure, shapes and dtypes, which determine the compiled program.
    - `counted_share`: the share of the rows in `groups` that count; the others are repetitions, to reuse a larger program.
    - `n_examples`, `n_tokens`: the numbers in the whole step, over all processes; `n_tokens` is None if the batch has no
        tokens. Rows of `groups` after the first `n_examples` are repetitions.
    - `position`, `state`: those of the step's `Slice`.
    - `rows`, `places`: this process's collated rows, and the number of each row's example.
    """

    groups: tuple[PyTree, ...]
    signature: Any
    counted_share: float
    n_examples: int
    n_tokens: int | None
    position: int
    state: Any
    rows: PyTree
    places: Sequence[int]

    @property
    def micro_batch(self) -> PyTree:
        """The shapes of one micro-batch, as `loss_fn` receives it."""
        return jax.tree.map(lambda x: bare_shape(x, x.shape[1:]), self.groups[0])


def batches(
    steps: Iterable[Slice],
    pool: CollatePool,
    size: BatchSize,
    mesh: Mesh,
    check: RowCheck | None = None,
    *,
    use: RowUse | Callable[[PyTree], RowUse] = UNKNOWN,
    checks_end: bool = False,
    depth: int = 2,
) -> Prefetch:
    """Returns the batch of each step, prepared ahead by a thread; close it after use, see `Prefetch`.

    That thread reads examples and places batches, both in order.

    **Arguments:**

    - `pool`: calls `collate_fn`, for several steps at once; without workers, the thread itself calls it.
    - `check`: in a run of several processes, compares their batches, in that thread. Each process collates the rows that
        its devices need; if rows have different shapes, it collates all rows of a step, as a single process does.
    - `use`: what the loss does with rows, on which the micro-batches depend; or a function that finds it, called with the
        shapes of all rows of the first step, which is then read and collated in the caller's thread.
    - `checks_end`: whether `check` is also called after the last step, with no rows and 0.
    - `depth`: the number of batches that are prepared ahead; with 0 there is no thread.
    """
    known = use if isinstance(use, RowUse) else UNKNOWN
    collates_whole = False  # all rows of a step

    def cut_of(i: int, step: Slice) -> tuple[Group, ...]:
        if i == 0 and step.n_last is not None:  # so that a remainder that cannot be cut is an error now, not after an epoch
            size.cut(step.n_last, known, mesh)
        return size.cut(len(step.examples), known, mesh)

    def needed_rows(i: int, step: Slice) -> np.ndarray:
        n = len(step.examples)
        rows = np.arange(n) if collates_whole else local_rows(cut_of(i, step), mesh)
        return rows if rows[-1] < n else np.unique(np.minimum(rows, n - 1))  # those of padding repeat the last one

    def begun(i: int, step: Slice) -> "_Step":
        rows = needed_rows(i, step)
        examples = read(step.examples, rows, step.places)
        return _Step(i, step, rows, [step.places[row] for row in rows], examples, pool.start(examples))

    def collated(given: "_Step") -> tuple["_Step", PyTree]:
        nonlocal collates_whole
        batch = None
        if given.i == 0 and check is not None:
            batch = given.batch()
            # The only step of an `update` tells nothing of others.
            alone = collate_alone(lambda examples: pool.start(examples)(), given.examples) if depth else []
            collates_whole = check.vary([batch, *alone])
        if collates_whole and len(given.rows) < len(given.step.examples):  # begun before that was known
            given, batch = begun(given.i, given.step), None
        batch = given.batch() if batch is None else batch
        if check is not None:
            check(given.i, batch, len(given.step.examples))
        return given, batch

    def prepared(given: "_Step", batch: PyTree) -> Batch:
        cut, n_rows, rows = cut_of(given.i, given.step), len(given.step.examples), size.micro_batch_for(known, mesh)
        # A remainder of full micro-batches runs in the program of a full step, unless the repeated rows would count.
        is_full = len(cut) == 1 and cut[0].rows == rows and known.kind != "after"
        tokens = n_tokens(batch)  # of this process's rows; the rows of other processes have the same length
        groups = place_batch(batch, cut, mesh, given.rows, size.examples // rows if is_full else 0)
        leaves, treedef = jax.tree.flatten(groups)
        return Batch(
            groups,
            (treedef, *((x.shape, x.dtype) for x in leaves)),
            n_rows / sum(math.prod(jax.tree.leaves(group)[0].shape[:2]) for group in groups),
            n_rows,
            None if tokens is None else tokens * n_rows // len(given.rows),
            given.step.position,
            given.step.state,
            batch,
            given.places,
        )

    # A StopIteration in a `collate_fn` would end a pass, but not these generators.
    def first(find: Callable[[PyTree], RowUse]) -> Iterator[tuple[_Step, PyTree]]:
        nonlocal known
        if (each := next(numbered, None)) is None:
            return
        given, batch = collated(begun(*each))
        check_leading_dims(batch, len(given.examples), lambda: pool.start(given.examples[:1])())
        known = find(with_rows(batch, len(given.step.examples)))
        if not np.array_equal(needed_rows(*each), given.rows):
            given = begun(*each)
            batch = given.batch()
        yield given, batch

    def every() -> Iterator[Batch]:
        n = len(head)
        while head:
            yield prepared(*head.pop())
        for given in drawn_ahead((begun(i, step) for i, step in numbered), pool.n):
            yield prepared(*collated(given))
            n += 1
        if check is not None and checks_end:
            check(n, {}, 0)

    numbered, head = enumerate(steps), []
    if not isinstance(use, RowUse):
        Prefetch.pause_others()
        head = list(first(use))
    return Prefetch(every(), depth)


class _Step(NamedTuple):
    """A step whose examples have been read and are being collated."""

    i: int
    step: Slice
    rows: np.ndarray
    places: Sequence[int]
    examples: list[Any]
    collated: Callable[[], PyTree]

    def batch(self) -> PyTree:
        """Returns the checked batch."""
        return collate(lambda _: self.collated(), self.examples, self.places)
