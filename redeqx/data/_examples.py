"""Turns raw examples into the batch of each step: order, position and collation.

Owns the order of examples (in each epoch a permutation that depends only on the seed) and the checks of `collate_fn`'s
result. It uses only `len()` and integer items of examples, or iterates over them. `_streams` keeps the position of an
iterable, `_rows` splits and places rows, `_prefetch` prepares the next batch in a thread while a step runs, `_workers`
collates several batches at once.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._tree import named_leaves, render
from ..dims import UNKNOWN, RowUse, with_rows
from ..errors import check_examples_kind, check_function, check_integers, example_note
from ._prefetch import Prefetch
from ._rows import BatchSize, Group, local_rows, place_batch
from ._streams import Stream, checksum
from ._workers import CollatePool, drawn_ahead

# --- collating ------------------------------------------------------------------------------------------------------


def read(examples: Any, indices: Iterable[Any], places: Sequence[int] | None = None) -> list[Any]:
    """Returns the examples at these indices. If reading one raises, the error gets a note with the example's number.

    **Arguments:**

    - `places`: the number of each example, if it differs from its index.
    """
    items = []
    for i in map(int, indices):
        with example_note("Raised in reading example", [i if places is None else places[i]]):
            items.append(examples[i])
    return items


def collate(collate_fn: Callable[[list], PyTree], examples: list, places: Sequence[int] | None = None) -> PyTree[np.ndarray]:
    """Returns the checked result of `collate_fn`: a PyTree of NumPy arrays, each with one row per example.

    64-bit numbers are converted to 32 bits, as everywhere in JAX, unless JAX runs in 64-bit mode.

    **Arguments:**

    - `places`: the examples' numbers, for a note in errors; by default they count from 0.

    Raises TypeError for a leaf that is not an array of numbers, ValueError for another number of rows and for integers that
    do not fit into 32 bits.
    """
    with example_note("`collate_fn` was called with examples", range(len(examples)) if places is None else places):
        try:
            return _checked_batch(collate_fn(examples), len(examples))
        except Exception as error:
            if (shapes := _as_ready_batch(examples)) is not None:
                error.add_note(_READY_BATCH.format(shapes))
            raise


_READY_BATCH = (
    "Each example has arrays that share their leading dim: {}. If these are ready batches, pass their rows as the examples, "
    "and stack these in `collate_fn`: redeqx shuffles and batches by itself."
)


def _as_ready_batch(examples: list) -> str | None:
    """Returns the shapes of the first example's arrays if they could be the columns of a batch; None otherwise."""
    first = examples[0] if examples else ()
    columns = first.values() if isinstance(first, Mapping) else first if isinstance(first, tuple | list) else ()
    shapes: list[tuple[int, ...]] = [tuple(getattr(column, "shape", None) or ()) for column in columns]
    if len(shapes) < 2 or not all(shapes) or len({shape[0] for shape in shapes}) > 1 or max(map(len, shapes)) < 2:
        return None
    return ", ".join(map(str, shapes))


def _checked_batch(batch: PyTree, n_rows: int) -> PyTree[np.ndarray]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    if not leaves:
        raise TypeError(f"`collate_fn`: expected a PyTree of arrays, got {batch!r}. Return a dict of numpy arrays.")
    return jax.tree.unflatten(treedef, [_checked(render(path), leaf, n_rows) for path, leaf in leaves])


def _check_leading_dims(batch: PyTree[np.ndarray], n_rows: int, collate_one: Callable[[], PyTree]) -> None:
    """Raises ValueError for a leaf whose leading dim has as many entries as there are rows, but is another dim.

    This is seen by the leaf of one example alone, which is collated only if another dim has as many entries too.
    """
    doubtful = {name: leaf.shape for name, leaf in named_leaves(batch).items() if n_rows > 1 and n_rows in leaf.shape[1:]}
    if not doubtful:
        return
    try:
        one = {name: np.shape(leaf) for name, leaf in named_leaves(collate_one()).items() if name in doubtful}
    except Exception:  # such as a `collate_fn` that needs pairs of examples
        return
    for name, shape in one.items():
        if shape and shape[0] != 1:
            raise ValueError(
                f"`collate_fn` output `{name}`: expected rows in dim 0, one for each example, got shape {doubtful[name]} "
                f"for {n_rows} examples and {shape} for one. The leading dim is the batch: transpose it."
            )


def collated_shapes(collate_fn: Callable[[list], PyTree], examples: Sequence[Any]) -> PyTree:
    """Returns the shapes of the result of `collate`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), collate(collate_fn, list(examples)))


def micro_batch_shapes(collate_fn: Callable[[list], PyTree], examples: Sequence[Any], size: BatchSize, mesh: Mesh) -> PyTree:
    """Returns the shapes of the first micro-batch of a step with these examples, as `loss_fn` receives it."""
    return with_rows(collated_shapes(collate_fn, examples), size.cut(len(examples), UNKNOWN, mesh)[0].rows)


def _checked(name: str, leaf: Any, n_rows: int) -> np.ndarray:
    if isinstance(leaf, list):
        lengths = sorted({len(x) for x in leaf if hasattr(x, "__len__")})
        found = f"a list of {len(leaf)}" + (f" with lengths {lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else "")
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array of {n_rows} rows, got {found}. "
            f"{'Pad to one length and return' if len(lengths) > 1 else 'Return'} `np.array(...)`."
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array of {n_rows} rows, got {type(leaf).__name__}. "
            "Return `np.array(...)` with one row for each example."
        )
    array = np.asarray(leaf)
    if not (array.dtype == bool or jnp.issubdtype(array.dtype, np.number)):
        raise TypeError(f"`collate_fn` output `{name}`: expected numbers, got {_describe_objects(array)}.")
    if array.ndim == 0 or len(array) != n_rows:
        raise ValueError(
            f"`collate_fn` output `{name}`: expected {n_rows} rows, one for each example, got shape {array.shape}. "
            "The leading dim is the batch."
        )
    check_integers(array, f"`collate_fn` output `{name}`")
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _describe_objects(array: np.ndarray) -> str:
    """Returns what an array without numbers holds, and the next step."""
    objects = array.ravel().tolist()
    nones = [i for i, x in enumerate(objects) if x is None]
    lengths = sorted({len(x) for x in objects if hasattr(x, "__len__")})
    if nones:
        return f"None in {len(nones)} of {len(objects)} entries, the first is entry {nones[0]}. Replace them by numbers"
    if any(isinstance(x, str | bytes) for x in objects):
        return f"text, in an array of shape {array.shape}. Tokenize it, or leave it out"
    if len(lengths) > 1:
        return f"rows of {lengths[0]} to {lengths[-1]} items. Pad them to one length"
    kinds = sorted({type(x).__name__ for x in objects})
    return f"an array of dtype {array.dtype} that holds: {', '.join(kinds)}. Return arrays of numbers"


def n_tokens(batch: PyTree[np.ndarray]) -> int | None:
    """Returns the number of tokens in a batch: the size of its largest integer leaf `[rows, seq]`; None without one."""
    return max((x.size for x in jax.tree.leaves(batch) if x.ndim == 2 and x.dtype.kind in "iu"), default=None)


# --- examples and their order ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """The examples of one step, and the position after it.

    `examples` are read on access, so that each process reads only its own.

    **Arguments:**

    - `position`: the number of examples of the epoch up to the end of this step.
    - `state`: the state of the `Stream` at the end of this step.
    - `n_last`: the number of examples of the pass's last step; None if unknown.
    """

    examples: Sequence[Any]
    position: int
    state: Any = None
    n_last: int | None = None

    @property
    def places(self) -> Sequence[int]:
        """The number of each example: its index, or its position in an iterable."""
        if isinstance(self.examples, _Subset):
            return self.examples.places
        return range(self.position - len(self.examples), self.position)


@dataclass(frozen=True)
class _Subset(Sequence[Any]):
    """The items of a sequence at these indices."""

    of: Any
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        return [self[j] for j in range(*i.indices(len(self)))] if isinstance(i, slice) else self.of[self.places[i]]


def check_examples(given: Any, name: str = "train_examples") -> None:
    """Checks that `given` are examples: an object with `len()` and integer items (a list, an array, a dataset), an iterable,
    or a function of the epoch that returns one of these.

    The position of an iterable is saved by its (or its iterator's) `get_state` / `set_state` or `state_dict` /
    `load_state_dict`, if it has them.

    Raises TypeError for anything else, ValueError for no examples.
    """
    if is_function(given):
        return check_function(given, name, ["epoch"])
    check_examples_kind(given, name)
    if isinstance(given, str | bytes | Mapping) or not (_is_sized(given) or hasattr(given, "__iter__")):
        raise TypeError(
            f"`{name}`: expected examples with `len()` and integer items, an iterable, or a function of the epoch, got "
            f"{type(given).__name__}. Pass a list with one entry for each example."
        )
    n = size_of(given)
    if n == 0:
        raise ValueError(f"`{name}`: expected at least one example, got none. Look at what was loaded.")
    if n is not None and n > _MOST:  # as grain's `repeat()`
        raise ValueError(
            f"`{name}`: expected a number of examples, got {n:,}, as from endless repeats. Remove them: `n_epochs` repeats."
        )


def examples_of(given: Any, epoch: int, name: str = "train_examples") -> Any:
    """Returns the examples of an epoch: `given`, or its result if it is a function of the epoch.

    If examples have `set_epoch`, it is called: an iterable of `datasets` shuffles by it, and then starts the epoch at its
    beginning even if a state was loaded in the epoch before.
    """
    if not is_function(given):
        if hasattr(given, "set_epoch"):
            given.set_epoch(epoch)
        return given
    examples = given(epoch)
    check_examples(examples, f"{name}({epoch})")
    return examples


def size_of(examples: Any) -> int | None:
    """Returns the number of examples; None if it is known only after iterating over them."""
    return len(examples) if _is_sized(examples) else None


def slices(
    examples: Any,
    batch_size: int,
    *,
    seed: tuple[int, ...] | None = None,
    position: int = 0,
    state: Any = None,
    drop_remainder: bool = False,
    name: str = "train_examples",
) -> Iterator[Slice]:
    """Yields the slices of one pass over the examples from `position` on, `batch_size` examples each; the last slice has the
    remainder.

    **Arguments:**

    - `seed`: for the permutation. None keeps the order. The order of an iterable is always kept.
    - `position`, `state`: those of the `Slice` after which to continue.
    - `drop_remainder`: whether to drop a last slice of fewer than `batch_size` examples.

    Raises ValueError for an iterable without examples, and with `drop_remainder` for fewer examples than a batch; TypeError
    for an iterable whose state is not JSON.
    """
    n = size_of(examples)
    if n is not None:
        if drop_remainder and n < batch_size:
            raise ValueError(
                f"`{name}`: expected at least {batch_size} examples, a batch of them, as `drop_remainder=True`, got {n}. "
                "Pass a smaller batch size, or keep the remainder."
            )
        order = np.arange(n) if seed is None else np.random.default_rng(seed).permutation(n)
        n_last = batch_size if drop_remainder else (n - position - 1) % batch_size + 1
        for start in range(position, n - batch_size + 1 if drop_remainder else n, batch_size):
            places = tuple(order[start : start + batch_size].tolist())
            yield Slice(_Subset(examples, places), start + len(places), n_last=n_last)
        return
    stream = Stream(examples, position, state, name)
    while taken := list(itertools.islice(stream, batch_size)):
        if drop_remainder and len(taken) < batch_size:
            break
        position += len(taken)
        yield Slice(taken, position, stream.state())
    if position == 0:
        fewest, found = (f"{batch_size} examples", "fewer") if drop_remainder else ("one example", "none")
        raise ValueError(
            f"`{name}`: expected at least {fewest}, got an iterable with {found}, or one that is used up. "
            "Pass one that can be iterated anew, or a function of the epoch."
        )


def n_slices(n: int, batch_size: int, drop_remainder: bool = False) -> int:
    """Returns the number of slices of `n` examples."""
    return n // batch_size if drop_remainder else -(-n // batch_size)


def sample_of(examples: Any) -> int | None:
    """Returns a checksum of the first, the middle and the last example, to detect other examples. None for iterables, for
    items that differ at each access, and for items that do not consist of numbers and text."""
    n = size_of(examples)
    if not n:
        return None

    try:
        first, again = (checksum(*(examples[i] for i in (0, n // 2, n - 1))) for _ in range(2))
        return first if first == again else None
    except Exception:  # the step that needs this example raises the error
        return None


def _is_sized(examples: Any) -> bool:
    """Returns whether examples have a length and integer items. A torch IterableDataset may have only a length."""
    if any((cls.__module__, cls.__name__) == _TORCH_ITERABLE for cls in type(examples).__mro__):
        return False
    return hasattr(examples, "__len__") and hasattr(examples, "__getitem__")


_TORCH_ITERABLE = ("torch.utils.data.dataset", "IterableDataset")
_MOST = 2**40  # examples; a permutation of them would not fit into memory


def differs_by_epoch(given: Any) -> bool:
    """Returns whether the examples may differ from epoch to epoch."""
    return is_function(given) or hasattr(given, "set_epoch")


def is_function(given: Any) -> bool:
    """Returns whether `given` is a function of the epoch."""
    return callable(given) and not _is_sized(given) and not hasattr(given, "__iter__")


# --- one step's batch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The batch of one step, on the mesh.

    **Arguments:**

    - `groups`: the result of `place_batch`.
    - `n_examples`, `n_tokens`: the numbers in the whole step, over all processes; `n_tokens` is None if the batch has no
        tokens. Rows of `groups` after the first `n_examples` are repetitions.
    - `position`, `state`: those of the step's `Slice`.
    - `rows`, `places`: this process's collated rows, and the number of each row's example.
    """

    groups: tuple[PyTree, ...]
    n_examples: int
    n_tokens: int | None
    position: int
    state: Any
    rows: PyTree
    places: Sequence[int]

    @cached_property
    def signature(self) -> Any:
        """The structure, shapes and dtypes, which determine the compiled program."""
        leaves, treedef = jax.tree.flatten(self.groups)
        return treedef, *((x.shape, x.dtype) for x in leaves)

    @property
    def micro_batch(self) -> PyTree:
        """The shapes of one micro-batch, as `loss_fn` receives it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.groups[0])


def batches(
    steps: Iterable[Slice],
    pool: CollatePool,
    size: BatchSize,
    mesh: Mesh,
    check: Callable[[int, PyTree, int], None] | None = None,
    *,
    use: RowUse | Callable[[PyTree], RowUse] = UNKNOWN,
    checks_end: bool = False,
) -> Prefetch:
    """Returns the batch of each step, prepared ahead by a thread; close it after use, see `Prefetch`.

    Only that thread reads examples and places batches, both in order.

    **Arguments:**

    - `pool`: calls `collate_fn`, for several steps at once; without workers, the thread itself calls it.
    - `check`: called by that thread with the number of each step, its collated rows, and the number of its examples in all
        processes.
    - `use`: what the loss does with rows, on which the micro-batches depend; or a function that finds it, called in the
        caller's thread with the shapes of all rows of the first step.
    - `checks_end`: whether `check` is also called after the last step, with no rows and 0.
    """
    known = use if isinstance(use, RowUse) else None

    def read_step(i: int, step: Slice) -> "_Step":
        cut = cut_of(i, step)
        rows = local_rows(cut, mesh)
        examples = read(step.examples, rows, step.places)
        return _Step(i, step, cut, rows, [step.places[row] for row in rows], examples, pool.start(examples))

    def cut_of(i: int, step: Slice) -> tuple[Group, ...]:
        if i == 0 and step.n_last is not None:  # so that a remainder that cannot be cut is an error now, not after an epoch
            size.cut(step.n_last, known or UNKNOWN, mesh)
        return size.cut(len(step.examples), known or UNKNOWN, mesh)

    def collated(given: "_Step") -> PyTree:
        batch = collate(lambda _: given.collated(), given.examples, given.places)
        if check is not None:
            check(given.i, batch, len(given.step.examples))
        return batch

    def prepared(given: "_Step", batch: PyTree) -> Batch:
        n_rows, rows = len(given.step.examples), size.micro_batch_for(known or UNKNOWN, mesh)
        # A remainder of full micro-batches runs in the program of a full step, unless the repeated rows would count.
        is_full = len(given.cut) == 1 and given.cut[0].rows == rows and (known or UNKNOWN).kind != "after"
        tokens = n_tokens(batch)  # of this process's rows; the rows of other processes have the same length
        return Batch(
            place_batch(batch, given.cut, mesh, given.rows, size.examples // rows if is_full else 0),
            n_rows,
            None if tokens is None else tokens * n_rows // len(given.rows),
            given.step.position,
            given.step.state,
            batch,
            given.places,
        )

    def every() -> Iterator[Any]:  # with `map`, StopIteration in a collate_fn would end the pass
        n, numbered = 0, enumerate(steps)
        if known is None and (first := next(numbered, None)) is not None:
            given = read_step(*first)
            batch = collated(given)
            _check_leading_dims(batch, len(given.examples), lambda: pool.start(given.examples[:1])())
            yield with_rows(batch, len(first[1].examples))  # `known` is set before this continues
            cut = cut_of(*first)
            if np.array_equal(local_rows(cut, mesh), given.rows):
                given = given._replace(cut=cut)
            else:  # this process needs other rows
                given = read_step(*first)
                batch = collate(lambda _: given.collated(), given.examples, given.places)
            yield prepared(given, batch)
            n += 1
        for given in drawn_ahead((read_step(i, step) for i, step in numbered), pool.n):
            yield prepared(given, collated(given))
            n += 1
        if check is not None and checks_end:
            check(n, {}, 0)

    upcoming = Prefetch(every())
    if not isinstance(use, RowUse):

        def find(shapes: PyTree) -> None:
            nonlocal known
            known = use(shapes)

        upcoming.hand_over(find)
    return upcoming


class _Step(NamedTuple):
    """A step whose examples have been read and are being collated."""

    i: int
    step: Slice
    cut: tuple[Group, ...]
    rows: np.ndarray
    places: Sequence[int]
    examples: list[Any]
    collated: Callable[[], PyTree]
