"""The batch of each step: its examples are read, collated and placed on the mesh by a thread, while earlier steps run.

Owns which rows are read when. `_examples` chooses the examples of a step, `_collate` checks their batch, `_rows` splits and
places it, `_workers` collates several batches at once, and `_prefetch` is the thread.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from ._prefetch import Deferred, Prefetch, drawn_ahead
from ._rows import BatchSize, Group, local_rows, place_batch
from ._workers import CollatePool


@dataclass(frozen=True)
class Batch:
    """The batch of one step, on the mesh."""

    groups: tuple[PyTree, ...]  # the result of `place_batch`
    signature: Any  # its structure, shapes and dtypes, which determine the compiled program
    counted_share: float  # of the rows in `groups`; the others are repetitions, to reuse a larger program
    n_examples: int  # in the whole step, over all processes; rows of `groups` after these are repetitions
    n_tokens: int | None  # likewise; None if the batch has no tokens
    position: int  # that of the step's `Slice`, as is `state`
    state: Any
    rows: PyTree  # this process's collated rows
    places: Sequence[int]  # the number of each row's example

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
    find_use: Callable[[PyTree], RowUse] | None = None,
    uses: dict[Any, RowUse] | None = None,
    checks_end: bool = False,
    depth: int = 2,
) -> Prefetch:
    """Returns the batch of each step, prepared ahead by a thread; close it after use, see `Prefetch`.

    That thread reads examples and places batches, both in order.

    **Arguments:**

    - `pool`: calls `collate_fn`, for several steps at once; without workers, the thread itself calls it.
    - `check`: in a run of several processes, compares their batches, in that thread. Each process collates the rows that
        its devices need; if rows have different shapes, it collates all rows of a step, as a single process does.
    - `find_use`: finds what the loss does with rows, on which the micro-batches depend; called in the caller's thread with
        the shapes of all rows of the first step that has them, if `uses` lacks these. Without it, nothing is known.
    - `uses`: what was found, by the shapes of a row, for this pass and later ones. If it is empty, the first step is read
        and collated in the caller's thread.
    - `checks_end`: whether `check` is also called after the last step, with no rows and 0.
    - `depth`: the number of batches that are prepared ahead; with 0 there is no thread.
    """
    work = _Pass(enumerate(steps), pool, size, mesh, check, find_use, {} if uses is None else uses, is_update=not depth)
    head = []
    if find_use is not None and not work.uses:
        Prefetch.pause_others()
        head = list(work.first())
    return Prefetch(work.every(head, checks_end=checks_end), depth)


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


@dataclass
class _Pass:
    """One pass over numbered steps, and what is known of them by now."""

    steps: Iterator[tuple[int, Slice]]
    pool: CollatePool
    size: BatchSize
    mesh: Mesh
    check: RowCheck | None
    find_use: Callable[[PyTree], RowUse] | None
    uses: dict[Any, RowUse]
    is_update: bool  # whose only step tells nothing of others
    collates_whole: bool = False  # all rows of a step

    # `first` and `every` are generators, where a StopIteration of a `collate_fn` is an error and does not end the pass.
    def first(self) -> Iterator[tuple[_Step, PyTree]]:
        """Yields the first step with its rows, by which it finds what the loss does with rows."""
        if (each := next(self.steps, None)) is None:
            return
        given, batch = self.collated(self.begun(*each))
        check_leading_dims(batch, len(given.examples), lambda: self.pool.start(given.examples[:1])())
        self.use_of(given, batch)
        yield given, batch

    def every(self, head: list[tuple[_Step, PyTree]], *, checks_end: bool) -> Iterator[Batch | Deferred]:
        """Yields the batches of the first steps and of those after them. One with rows of new shapes is for the reader, who
        finds what the loss does with them."""
        n = len(head)
        while head:
            yield self.placed(*head.pop())
        for given in drawn_ahead((self.begun(i, step) for i, step in self.steps), self.pool.n):
            given, batch = self.collated(given)
            use = self.known_use(batch)
            yield Deferred(partial(self.placed, given, batch)) if use is None else self.placed(given, batch, use)
            n += 1
        if self.check is not None and checks_end:
            self.check(n, {}, 0)

    def begun(self, i: int, step: Slice, use: RowUse | None = None) -> _Step:
        """Reads the examples of a step that this process needs, and starts to collate them; without `use`, as if the loss
        does with its rows what it does with the newest shapes."""
        rows = self.needed_rows(i, step, use or [UNKNOWN, *self.uses.values()][-1])
        examples = read(step.examples, rows, step.places)
        return _Step(i, step, rows, [step.places[row] for row in rows], examples, self.pool.start(examples))

    def collated(self, given: _Step) -> tuple[_Step, PyTree]:
        """Returns a step with its rows, compared with those of other processes: all rows if they vary or are mixed."""
        batch = None
        if given.i == 0 and self.check is not None:
            batch = given.batch()
            alone, mixes = [], False
            if not self.is_update:
                alone, mixes = collate_alone(lambda each: self.pool.start(each)(), given.examples, batch)
            self.collates_whole = self.check.vary([batch, *alone], mixes=mixes)
        if self.collates_whole and len(given.rows) < len(given.step.examples):  # begun before that was known
            given, batch = self.begun(given.i, given.step), None
        batch = given.batch() if batch is None else batch
        if self.check is not None:
            self.check(given.i, batch, len(given.step.examples))
        return given, batch

    def placed(self, given: _Step, batch: PyTree, use: RowUse | None = None) -> Batch:
        """Places the rows of a step on the mesh; without `use`, finds what the loss does with them."""
        use, n_rows = use or self.use_of(given, batch), len(given.step.examples)
        cut, rows = self.cut(given.i, given.step, use), self.size.micro_batch_for(use, self.mesh)
        if self.mesh.is_multi_process and not np.array_equal(self.needed_rows(given.i, given.step, use), given.rows):
            given = self.begun(given.i, given.step, use)  # begun with the rows that another use needs
            batch = given.batch()
        # A remainder of full micro-batches runs in the program of a full step, unless the repeated rows would count.
        is_full = len(cut) == 1 and cut[0].rows == rows and use.kind != "after"
        tokens = n_tokens(batch)  # of this process's rows; the rows of other processes have the same length
        groups = place_batch(batch, cut, self.mesh, given.rows, self.size.examples // rows if is_full else 0)
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

    def known_use(self, batch: PyTree) -> RowUse | None:
        """Returns what the loss does with the rows of a batch; None if that is to be found."""
        return UNKNOWN if self.find_use is None else self.uses.get(_shapes(batch))

    def use_of(self, given: _Step, batch: PyTree) -> RowUse:
        """Returns what the loss does with the rows of a batch, and finds it for rows of new shapes."""
        use = self.known_use(batch)
        if use is None:
            assert self.find_use is not None
            use = self.uses[_shapes(batch)] = self.find_use(with_rows(batch, len(given.step.examples)))
        return use

    def cut(self, i: int, step: Slice, use: RowUse) -> tuple[Group, ...]:
        if i == 0 and step.n_last is not None:  # so that a remainder that cannot be cut is an error now, not after an epoch
            self.size.cut(step.n_last, use, self.mesh)
        return self.size.cut(len(step.examples), use, self.mesh)

    def needed_rows(self, i: int, step: Slice, use: RowUse) -> np.ndarray:
        n, has_all = len(step.examples), self.collates_whole or not self.mesh.is_multi_process
        rows = np.arange(n) if has_all else local_rows(self.cut(i, step, use), self.mesh)
        rows = rows if rows[-1] < n else np.unique(np.minimum(rows, n - 1))  # those of padding repeat the last one
        if len(rows) == 1 < n and i == 0 and not self.is_update:  # with another one, on which it may depend
            rows = np.unique([*rows, (rows[0] + 1) % n])
        return rows


def _shapes(batch: PyTree) -> Any:
    """Returns the structure, shapes and dtypes of a row of a batch."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, *((x.shape[1:], x.dtype) for x in leaves)
