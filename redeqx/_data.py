"""From raw examples to batches on the mesh: order, cutting, collating, moving, and doing so ahead of the step.

Owns the order of examples (a permutation of each epoch, from the seed alone), how the rows of a batch are cut into
micro-batches that fit the mesh, the checks on what `collate_fn` returns, and the thread that prepares the next batch while
the current step runs. It asks examples only for `len()` and integer items, or to be iterated.
"""

import collections
import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ._mesh import replicated, split_rows
from ._paths import render

# --- how rows are cut -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Micro-batches of one size: `n` of them, of `rows` rows, split over the mesh's batch axes or whole on every device."""

    n: int
    rows: int
    split: bool


def cut_rows(n_rows: int, per_device_batch_size: int, n_shards: int) -> tuple[Group, ...]:
    """How `n_rows` rows are cut into micro-batches, none of which puts more than `per_device_batch_size` on a device.

    As many full micro-batches as there are; then the rest that still divides over the shards; then the few rows that do
    not, which every device computes whole. No row is dropped, and none is counted twice.

    **Arguments:**

    - `per_device_batch_size`: rows of a full micro-batch on each of the `n_shards` shards.
    """
    full = per_device_batch_size * n_shards
    n_full, rest = divmod(n_rows, full)
    n_even, tail = divmod(rest, n_shards)
    groups = [Group(n_full, full, True)] if n_full else []
    if n_even:
        groups.append(Group(1, n_even * n_shards, True))
    if tail:
        rows = max(size for size in range(1, min(tail, per_device_batch_size) + 1) if tail % size == 0)
        groups.append(Group(tail // rows, rows, False))
    return tuple(groups)


def place_batch(batch: PyTree[np.ndarray], groups: Iterable[Group], mesh: Mesh) -> tuple[PyTree[jax.Array], ...]:
    """The batch on the mesh: for each group the same PyTree with leaves `[n, rows, ...]`."""
    placed = []
    start = 0
    for group in groups:
        stop = start + group.n * group.rows
        sharding = split_rows(mesh, dim=1) if group.split else replicated(mesh)
        cut = [x[start:stop].reshape(group.n, group.rows, *x.shape[1:]) for x in jax.tree.leaves(batch)]
        placed.append(jax.tree.unflatten(jax.tree.structure(batch), jax.device_put(cut, sharding)))
        start = stop
    return tuple(placed)


def pad_rows(batch: PyTree[np.ndarray], n_rows: int) -> PyTree[np.ndarray]:
    """The batch with its last row repeated up to `n_rows` rows, for outputs that are cut off again row by row."""

    def pad(x: np.ndarray) -> np.ndarray:
        missing = n_rows - len(x)
        return np.concatenate([x, np.repeat(x[-1:], missing, axis=0)]) if missing else x

    return jax.tree.map(pad, batch)


# --- collating ------------------------------------------------------------------------------------------------------


def collate(collate_fn: Callable[[list], PyTree], examples: list) -> PyTree[np.ndarray]:
    """What `collate_fn` makes of the examples, checked: a PyTree of numpy arrays, each with a row an example.

    64-bit numbers become 32-bit ones, as everywhere in JAX, unless JAX runs in 64-bit mode.

    Raises TypeError for a leaf that is no array of numbers, ValueError for one without a row an example and for an integer
    that 32 bits do not hold.
    """
    batch = collate_fn(examples)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    if not leaves:
        raise TypeError(f"`collate_fn`: expected a PyTree of arrays, got {batch!r}. Return a dict of numpy arrays.")
    return jax.tree.unflatten(treedef, [_checked(render(path), leaf, len(examples)) for path, leaf in leaves])


def _checked(name: str, leaf: Any, n_rows: int) -> np.ndarray:
    if isinstance(leaf, list):
        lengths = sorted({len(x) for x in leaf if hasattr(x, "__len__")})
        found = f"a list of {len(leaf)}" + (f" with lengths {lengths[0]} to {lengths[-1]}" if lengths else "")
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array of {n_rows} rows, got {found}. "
            "Pad to one length and return `np.array(...)`."
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array of {n_rows} rows, got {type(leaf).__name__}. "
            "Return `np.array(...)` with a row an example."
        )
    array = np.asarray(leaf)
    if array.dtype.kind in "OUSmM":
        raise TypeError(
            f"`collate_fn` output `{name}`: expected numbers, got an array of dtype {array.dtype} and shape {array.shape}. "
            "Rows of different lengths make such arrays: pad them; tokenize text."
        )
    if array.ndim == 0 or len(array) != n_rows:
        raise ValueError(
            f"`collate_fn` output `{name}`: expected {n_rows} rows, one for each example, got shape {array.shape}. "
            "The leading dim is the batch."
        )
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))
    if narrow != array.dtype and array.dtype.kind in "iu" and array.size:
        info = np.iinfo(narrow)
        if array.min() < info.min or array.max() > info.max:
            raise ValueError(
                f"`collate_fn` output `{name}`: expected integers that {narrow} holds, got up to {array.max()}. "
                "Enable JAX's 64-bit mode (`jax_enable_x64`), or use smaller numbers."
            )
    return np.asarray(array, narrow)


def n_tokens(batch: PyTree[np.ndarray]) -> int | None:
    """Tokens in a batch where it tells: the size of its largest integer leaf of shape `[rows, seq]`, else None."""
    return max((x.size for x in jax.tree.leaves(batch) if x.ndim == 2 and x.dtype.kind in "iu"), default=None)


# --- examples and their order -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """The examples of one step: the list, how many of the epoch came up to its end, and the iterator's state there."""

    examples: list
    position: int
    state: Any = None


def check_examples(given: Any, name: str = "train_examples") -> None:
    """Check that `given` is examples: an object with `len()` and integer items (a list, an array, a dataset); or a function
    of the epoch that returns one; or an iterable, whose position is kept by `get_state` / `set_state` or `state_dict` /
    `load_state_dict` where it (or its iterator) has them.

    Raises TypeError for anything else, ValueError for no examples.
    """
    if _is_function(given):
        return
    if isinstance(given, str | bytes | dict) or not (_is_sized(given) or hasattr(given, "__iter__")):
        raise TypeError(
            f"`{name}`: expected examples with `len()` and integer items, an iterable, or a function of the epoch, got "
            f"{type(given).__name__}. Pass a list with an entry an example."
        )
    if size_of(given) == 0:
        raise ValueError(f"`{name}`: expected at least one example, got none. Look at what was loaded.")


def examples_of(given: Any, epoch: int, name: str = "train_examples") -> Any:
    """The examples of that epoch: what was given, or what the given function of the epoch returns."""
    if not _is_function(given):
        return given
    examples = given(epoch)
    check_examples(examples, f"{name}({epoch})")
    return examples


def size_of(examples: Any) -> int | None:
    """How many examples there are; None where only iterating tells."""
    return len(examples) if _is_sized(examples) else None


def slices(
    examples: Any,
    batch_size: int,
    *,
    seed: tuple[int, ...] | None = None,
    position: int = 0,
    state: Any = None,
    name: str = "train_examples",
) -> Iterator[Slice]:
    """One pass over the examples from `position` on, `batch_size` at a time, at the end what is left.

    **Arguments:**

    - `seed`: of the order, which is a permutation; None, and every iterable, keeps the order as it is.
    - `position`, `state`: as a `Slice` of an earlier run had them.

    Raises ValueError for an iterable without any example, TypeError for one whose state JSON does not hold.
    """
    n = size_of(examples)
    if n is not None:
        order = np.arange(n) if seed is None else np.random.default_rng(seed).permutation(n)
        for start in range(position, n, batch_size):
            rows = order[start : start + batch_size]
            yield Slice([examples[int(row)] for row in rows], start + len(rows))
        return
    iterator = _resumed(examples, position, state)
    while taken := list(itertools.islice(iterator, batch_size)):
        position += len(taken)
        yield Slice(taken, position, _state_of(examples, iterator, name))
    if position == 0:
        raise ValueError(
            f"`{name}`: expected at least one example, got an iterable with none, or one that is used up. "
            "Pass one that can be iterated anew, or a function of the epoch."
        )


_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def _is_sized(examples: Any) -> bool:
    return hasattr(examples, "__len__") and hasattr(examples, "__getitem__")


def _is_function(given: Any) -> bool:
    return callable(given) and not _is_sized(given) and not hasattr(given, "__iter__")


def _state_of(iterable: Any, iterator: Any, name: str) -> Any:
    """The position of an iterator, or of the iterable behind it, where they can tell; as JSON holds it."""
    for holder in (iterator, iterable):
        for get, set_ in _STATE_METHODS:
            if hasattr(holder, get) and hasattr(holder, set_):
                state = getattr(holder, get)()
                try:
                    return json.loads(json.dumps(state))
                except TypeError as error:
                    raise TypeError(
                        f"`{name}.{get}()`: expected a state that JSON holds, got {type(state).__name__} ({error}). "
                        "Return numbers, strings, lists and dicts."
                    ) from error
    return None


def _resumed(iterable: Any, position: int, state: Any) -> Iterator[Any]:
    """An iterator from `position` on: by its state where it has one, else by reading past what was seen."""
    if position and state is not None:
        iterator = iter(iterable)
        for holder in (iterator, iterable):
            for _, set_ in _STATE_METHODS:
                if hasattr(holder, set_):
                    getattr(holder, set_)(state)
                    # An iterable that holds the state itself (not its iterator) starts from it at the next `iter`.
                    return iterator if holder is iterator else iter(iterable)
    iterator = iter(iterable)
    collections.deque(itertools.islice(iterator, position), maxlen=0)
    return iterator


# --- ahead of the step --------------------------------------------------------------------------------------------------


def prefetch(items: Iterator[Any], depth: int = 2) -> Iterator[Any]:
    """The same items, prepared by a thread up to `depth` ahead; its exceptions are raised here, with their tracebacks."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(entry: tuple[str, Any]) -> None:
        while not stopped.is_set():
            try:
                return ready.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(("item", item))
                if stopped.is_set():
                    return
            put(("end", None))
        except BaseException as error:  # handed to the thread that reads: it is that thread's error
            put(("error", error))

    thread = threading.Thread(target=work, name="redeqx-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "item":
                yield value
            elif kind == "error":
                raise value
            else:
                return
    finally:
        stopped.set()
        thread.join()
