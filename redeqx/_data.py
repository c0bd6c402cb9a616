"""From raw examples to batches on the mesh: order, cutting, collating, moving, and doing so ahead of the step.

Owns the order of examples (a permutation of each epoch, from the seed alone), how the rows of a batch are cut into
micro-batches that fit the mesh, the checks on what `collate_fn` returns, and the thread that prepares the next batch while
the current step runs. It asks examples only for `len()` and integer items, or to be iterated.
"""

import base64
import collections
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ._arguments import check_count, check_examples_kind, check_function
from ._mesh import MODEL, n_batch_shards, replicated, split_rows
from ._paths import render
from ._user_code import OfExamples

# --- how rows are cut -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """`n` micro-batches of `rows` rows each."""

    n: int
    rows: int


@dataclass(frozen=True)
class BatchSize:
    """How many examples an update takes, and how many rows each of its micro-batches has, over the whole mesh."""

    examples: int
    micro_batch: int
    by_examples: bool = False  # whether the user gave `batch_size`

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        per_device_batch_size: int | None,
        batch_size: int | None,
        n_micro_batches: int = 1,
        *,
        prefix: str = "",
        n_devices: int | None = None,
    ) -> "BatchSize":
        """The sizes that the user asked for, by rows a device or by examples an update.

        With `batch_size` the micro-batches have a multiple of `n_devices` rows: how they are cut depends neither on how the
        devices are arranged nor, where `batch_size / n_micro_batches` divides over the devices, on how many there are.

        **Arguments:**

        - `n_micro_batches`: micro-batches an update.
        - `prefix`: of the arguments' names in errors.
        - `n_devices`: the number of devices, where it is not the mesh's.

        Raises ValueError unless exactly one of the two sizes is given, and for a size below 1.
        """
        names = f"`{prefix}per_device_batch_size`, `{prefix}batch_size`"
        if per_device_batch_size is None and batch_size is None:
            raise ValueError(
                f"{names}: expected one of the two, got neither. Pass `{prefix}batch_size`, examples an update."
            )
        if per_device_batch_size is not None and batch_size is not None:
            raise ValueError(
                f"{names}: expected one of the two, got {per_device_batch_size} and {batch_size}. "
                f"Pass `{prefix}batch_size` alone: the rows a device follow from it."
            )
        n_devices = n_devices or mesh.size
        if batch_size is not None:
            check_count(batch_size, f"{prefix}batch_size")
            rows = -(-batch_size // n_micro_batches) // n_devices * n_devices
            return cls(batch_size, rows or n_devices, by_examples=True)
        check_count(per_device_batch_size, f"{prefix}per_device_batch_size")
        assert per_device_batch_size is not None
        rows = per_device_batch_size * (n_devices // mesh.shape[MODEL])
        return cls(rows * n_micro_batches, rows)

    @property
    def n_micro_batches(self) -> int:
        """Full micro-batches of a full update."""
        return self.examples // self.micro_batch

    def evenly(self, n: int | None, n_devices: int) -> "BatchSize":
        """For evaluations of `n` examples in all: the largest micro-batch, down to half of this one, that leaves no
        remainder, which would be another program to compile; this one where there is none."""
        if n is None or n <= self.micro_batch:
            return self
        smallest = -(-self.micro_batch // 2)
        sizes = (
            rows for rows in range(self.micro_batch // n_devices * n_devices, smallest - 1, -n_devices) if n % rows == 0
        )
        rows = self.micro_batch if n % self.micro_batch == 0 else next(sizes, self.micro_batch)
        return BatchSize(rows, rows)


def cut_rows(n_rows: int, micro_batch_size: int, n_devices: int) -> tuple[Group, ...]:
    """How the rows of a step are cut into micro-batches: full ones; the rest that still divides over the devices; then the
    few rows that do not, no more of them at once than a device has of a full one, since every device computes them whole.

    No row is dropped or counted twice. The cut does not depend on how the devices are arranged, so neither do the keys of
    its micro-batches. (XLA would split uneven rows too, but then got the gradient of an embedding wrong: by 3 % for 11 rows
    on 8 CPU devices, jaxlib 0.10.2.)
    """
    n_full, rest = divmod(n_rows, micro_batch_size)
    tail = rest % n_devices
    most = min(max(micro_batch_size // n_devices, 1), tail)
    rows = max((size for size in range(1, most + 1) if tail % size == 0), default=1)
    groups = (Group(n_full, micro_batch_size), Group(1, rest - tail), Group(tail // rows, rows))
    return tuple(group for group in groups if group.n and group.rows)


def group_sharding(group: Group, mesh: Mesh) -> NamedSharding:
    """Where the leaves `[n, rows, ...]` of a group live: rows split over the batch axes where they divide, else whole."""
    return split_rows(mesh, dim=1) if group.rows % n_batch_shards(mesh) == 0 else replicated(mesh)


def rows_here(cut: Iterable[Group], mesh: Mesh) -> np.ndarray:
    """The rows of a step that this process's devices need, in their order: all of them where it has all devices."""
    cut = tuple(cut)
    if not mesh.is_multi_process:
        return np.arange(sum(group.n * group.rows for group in cut))
    needed, start = [], 0
    for group in cut:
        rows = start + np.arange(group.n * group.rows).reshape(group.n, group.rows)
        indices = group_sharding(group, mesh).addressable_devices_indices_map(rows.shape).values()
        needed += [rows[index].reshape(-1) for index in indices]
        start += rows.size
    return np.unique(np.concatenate(needed))


def place_batch(
    batch: PyTree[np.ndarray],
    cut: Iterable[Group],
    mesh: Mesh,
    rows: np.ndarray | None = None,
    n_micro_batches: int = 0,
) -> tuple[PyTree[jax.Array], ...]:
    """The batch on the mesh: for each group the same PyTree with leaves `[n, rows, ...]`.

    **Arguments:**

    - `rows`: which of the step's rows the batch has, as `rows_here` gives them; all of them by default.
    - `n_micro_batches`: at least so many micro-batches in the first group: its last one is repeated.
    """
    placed = []
    start = 0
    for i, group in enumerate(cut):
        places = start + np.arange(group.n * group.rows).reshape(group.n, group.rows)
        start += places.size
        if i == 0 and group.n < n_micro_batches:
            places = np.concatenate([places, np.repeat(places[-1:], n_micro_batches - group.n, axis=0)])
        placed.append(place_rows(batch, places, group_sharding(group, mesh), rows))
    return tuple(placed)


def place_rows(
    batch: PyTree[np.ndarray], places: np.ndarray, sharding: NamedSharding, rows: np.ndarray | None = None
) -> PyTree[jax.Array]:
    """The batch's rows of these numbers on the mesh; the leading dims are those of `places`.

    **Arguments:**

    - `rows`: as for `place_batch`.
    """
    if sharding.is_fully_addressable:
        first, last = int(places.flat[0]), int(places.flat[-1])
        # Rows that follow each other are a view.
        taken = slice(first, last + 1) if last + 1 - first == places.size else places.reshape(-1)
        leaves = [x[taken].reshape(*places.shape, *x.shape[1:]) for x in jax.tree.leaves(batch)]
        return jax.tree.unflatten(jax.tree.structure(batch), jax.device_put(leaves, sharding))
    assert rows is not None

    def put(x: np.ndarray) -> jax.Array:
        def piece(index: Any) -> np.ndarray:
            return x[np.searchsorted(rows, places[index[: places.ndim]])]

        return jax.make_array_from_callback((*places.shape, *x.shape[1:]), sharding, piece)

    return jax.tree.map(put, batch)


def pad_rows(batch: PyTree[np.ndarray], n_rows: int) -> PyTree[np.ndarray]:
    """The batch with its last row repeated up to `n_rows` rows, for outputs that are cut off again row by row."""

    def pad(x: np.ndarray) -> np.ndarray:
        missing = n_rows - len(x)
        return np.concatenate([x, np.repeat(x[-1:], missing, axis=0)]) if missing else x

    return jax.tree.map(pad, batch)


# --- collating ------------------------------------------------------------------------------------------------------


def read(examples: Any, indices: Iterable[Any], places: Sequence[int] | None = None) -> list[Any]:
    """These items of the examples; an error in reading one tells its number.

    **Arguments:**

    - `places`: the number of each example, where that is not its index.
    """
    items = []
    for i in map(int, indices):
        with OfExamples("Raised in reading example", [i if places is None else places[i]]):
            items.append(examples[i])
    return items


def collate(collate_fn: Callable[[list], PyTree], examples: list, places: Sequence[int] | None = None) -> PyTree[np.ndarray]:
    """What `collate_fn` makes of the examples, checked: a PyTree of numpy arrays, each with a row an example.

    64-bit numbers become 32-bit ones, as everywhere in JAX, unless JAX runs in 64-bit mode.

    **Arguments:**

    - `places`: the examples' numbers, which an error tells; by default they are the first.

    Raises TypeError for a leaf that is no array of numbers, ValueError for one without a row an example and for an integer
    that 32 bits do not hold.
    """
    with OfExamples("`collate_fn` was called with examples", range(len(examples)) if places is None else places):
        return _checked_batch(collate_fn(examples), len(examples))


def _checked_batch(batch: PyTree, n_rows: int) -> PyTree[np.ndarray]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    if not leaves:
        raise TypeError(f"`collate_fn`: expected a PyTree of arrays, got {batch!r}. Return a dict of numpy arrays.")
    return jax.tree.unflatten(treedef, [_checked(render(path), leaf, n_rows) for path, leaf in leaves])


def collated_shapes(collate_fn: Callable[[list], PyTree], examples: Sequence[Any]) -> PyTree:
    """The shapes of what `collate` returns."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), collate(collate_fn, list(examples)))


def micro_batch_shapes(collate_fn: Callable[[list], PyTree], examples: Sequence[Any], size: BatchSize, mesh: Mesh) -> PyTree:
    """The shapes of the first micro-batch of a step of these examples, as `loss_fn` sees it."""
    rows = cut_rows(len(examples), size.micro_batch, mesh.size)[0].rows
    shapes = collated_shapes(collate_fn, examples)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), shapes)


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
    if not (array.dtype == bool or jnp.issubdtype(array.dtype, np.number)):
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
            found = f"up to {array.max()}" if array.max() > info.max else f"down to {array.min()}"
            raise ValueError(
                f"`collate_fn` output `{name}`: expected integers that {narrow} holds, got {found}. "
                "Enable JAX's 64-bit mode (`jax_enable_x64`), or use smaller numbers."
            )
    return np.asarray(array, narrow)


def n_tokens(batch: PyTree[np.ndarray]) -> int | None:
    """Tokens in a batch where it tells: the size of its largest integer leaf of shape `[rows, seq]`, else None."""
    return max((x.size for x in jax.tree.leaves(batch) if x.ndim == 2 and x.dtype.kind in "iu"), default=None)


# --- examples and their order ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """The examples of one step, how many of the epoch came up to its end, and the iterator's state there.

    `examples` are read as they are asked for: a process of several asks for its own.
    """

    examples: Sequence[Any]
    position: int
    state: Any = None

    @property
    def places(self) -> Sequence[int]:
        """The number of each example: in what has integer items, or in the order that an iterable has them."""
        if isinstance(self.examples, _Picked):
            return self.examples.places
        return range(self.position - len(self.examples), self.position)


@dataclass(frozen=True)
class _Picked(Sequence[Any]):
    """Items of what has `len()` and integer items, at those places."""

    of: Any
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        return [self[j] for j in range(*i.indices(len(self)))] if isinstance(i, slice) else self.of[self.places[i]]


def check_examples(given: Any, name: str = "train_examples") -> None:
    """Check that `given` is examples: an object with `len()` and integer items (a list, an array, a dataset); or a function
    of the epoch that returns one; or an iterable, whose position is kept by `get_state` / `set_state` or `state_dict` /
    `load_state_dict` where it (or its iterator) has them.

    Raises TypeError for anything else, ValueError for no examples.
    """
    if is_function(given):
        return check_function(given, name, ["epoch"])
    check_examples_kind(given, name)
    if isinstance(given, str | bytes | dict) or not (_is_sized(given) or hasattr(given, "__iter__")):
        raise TypeError(
            f"`{name}`: expected examples with `len()` and integer items, an iterable, or a function of the epoch, got "
            f"{type(given).__name__}. Pass a list with an entry an example."
        )
    if size_of(given) == 0:
        raise ValueError(f"`{name}`: expected at least one example, got none. Look at what was loaded.")


def examples_of(given: Any, epoch: int, name: str = "train_examples") -> Any:
    """The examples of that epoch: what was given, or what the given function of the epoch returns.

    An iterable with `set_epoch` is told the epoch: one of `datasets` shuffles by it, and begins the next epoch at its begin
    though a state was loaded for this one.
    """
    if not is_function(given):
        if size_of(given) is None and hasattr(given, "set_epoch"):
            given.set_epoch(epoch)
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
    drop_remainder: bool = False,
    name: str = "train_examples",
) -> Iterator[Slice]:
    """One pass over the examples from `position` on, `batch_size` at a time, at the end what is left.

    **Arguments:**

    - `seed`: of the order, which is a permutation; None, and every iterable, keeps the order as it is.
    - `position`, `state`: as a `Slice` of an earlier run had them.
    - `drop_remainder`: whether what is left at the end, fewer than `batch_size`, is dropped.

    Raises ValueError for an iterable without any example, TypeError for one whose state JSON does not hold.
    """
    n = size_of(examples)
    if n is not None:
        if drop_remainder and n < batch_size:
            raise ValueError(
                f"`{name}`: expected at least {batch_size} examples, a batch of them, as `drop_remainder=True`, got {n}. "
                "Pass a smaller batch size, or keep the remainder."
            )
        order = np.arange(n) if seed is None else np.random.default_rng(seed).permutation(n)
        for start in range(position, n - batch_size + 1 if drop_remainder else n, batch_size):
            places = tuple(order[start : start + batch_size].tolist())
            yield Slice(_Picked(examples, places), start + len(places))
        return
    iterator = _resumed(examples, position, state)
    while taken := list(itertools.islice(iterator, batch_size)):
        if drop_remainder and len(taken) < batch_size:
            break
        position += len(taken)
        yield Slice(taken, position, _state_of(examples, iterator, name))
    if position == 0:
        fewest, found = (f"{batch_size} examples", "fewer") if drop_remainder else ("one example", "none")
        raise ValueError(
            f"`{name}`: expected at least {fewest}, got an iterable with {found}, or one that is used up. "
            "Pass one that can be iterated anew, or a function of the epoch."
        )


def n_slices(n: int, batch_size: int, drop_remainder: bool = False) -> int:
    """How many slices `slices` makes of `n` examples."""
    return n // batch_size if drop_remainder else -(-n // batch_size)


def sample_of(examples: Any) -> int | None:
    """A checksum of the first, the middle and the last example, by which others are noticed; None where there is no telling:
    of iterables, of items that are drawn anew each time, and of those that are not of numbers and text."""
    n = size_of(examples)
    if not n:
        return None

    def checksum() -> int:
        return zlib.crc32(b"".join(_bytes_of(examples[i]) for i in (0, n // 2, n - 1)))

    try:
        found = checksum()
        return found if checksum() == found else None
    except Exception:  # an example that cannot be read is an error of the step that needs it
        return None


def _bytes_of(example: Any) -> bytes:
    match example:
        case str() | bytes() | bool() | int() | float() | None:
            return repr(example).encode()
        case dict():
            return b"{" + b",".join(_bytes_of(key) + b":" + _bytes_of(value) for key, value in example.items()) + b"}"
        case list() | tuple():
            return b"[" + b",".join(map(_bytes_of, example)) + b"]"
        case np.ndarray() | np.generic() | jax.Array() if example.dtype != object:
            return f"{example.dtype}{example.shape}".encode() + np.asarray(example).tobytes()
    raise TypeError(type(example).__name__)


_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_BYTES = "bytes in base 64"


def _is_sized(examples: Any) -> bool:
    return hasattr(examples, "__len__") and hasattr(examples, "__getitem__")


def is_function(given: Any) -> bool:
    """Whether examples are given as a function of the epoch."""
    return callable(given) and not _is_sized(given) and not hasattr(given, "__iter__")


def _state_of(iterable: Any, iterator: Any, name: str) -> Any:
    """The position of an iterator, or of the iterable behind it, where they can tell; as JSON holds it."""
    for holder in (iterator, iterable):
        for get, set_ in _STATE_METHODS:
            if hasattr(holder, get) and hasattr(holder, set_):
                return _to_json(getattr(holder, get)(), f"{name}.{get}()")
    return None


def _to_json(state: Any, where: str) -> Any:
    """A state as JSON gives it back; bytes, as grain's DataLoader has them, as text in base 64."""
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode("ascii")}
    try:
        plain = json.loads(json.dumps(state))
        why = "" if plain == state else "which it gives back as another value"
    except TypeError as error:
        plain, why = None, str(error)
    if why:
        raise TypeError(
            f"`{where}`: expected a state that JSON holds, got {type(state).__name__} ({why}). "
            "Return numbers, strings, lists, dicts with string keys, or bytes."
        )
    return plain


def _from_json(state: Any) -> Any:
    return base64.b64decode(state[_BYTES]) if isinstance(state, dict) and state.keys() == {_BYTES} else state


def _resumed(iterable: Any, position: int, state: Any) -> Iterator[Any]:
    """An iterator from `position` on: by its state where it has one, else by reading past what was seen."""
    if position and state is not None:
        iterator = iter(iterable)
        for holder in (iterator, iterable):
            for _, set_ in _STATE_METHODS:
                if hasattr(holder, set_):
                    getattr(holder, set_)(_from_json(state))
                    # An iterable that holds the state itself (not its iterator) starts from it at the next `iter`.
                    return iterator if holder is iterator else iter(iterable)
    iterator = iter(iterable)
    collections.deque(itertools.islice(iterator, position), maxlen=0)
    return iterator


# --- one step's batch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What one step is given, on the mesh.

    **Arguments:**

    - `groups`: as `place_batch` makes them.
    - `n_micro_batches`: how many of the first group's micro-batches count; those after them are repetitions.
    - `n_examples`, `n_tokens`: of the whole step; `n_tokens` where the batch tells.
    - `position`, `state`: as its `Slice` had them.
    - `rows`, `places`: this process's rows as they were collated, and the number of each one's example.
    """

    groups: tuple[PyTree, ...]
    n_micro_batches: int
    n_examples: int
    n_tokens: int | None
    position: int
    state: Any
    rows: PyTree
    places: Sequence[int]

    @property
    def signature(self) -> Any:
        """What a program compiled for it depends on."""
        leaves, treedef = jax.tree.flatten(self.groups)
        return treedef, *((x.shape, x.dtype) for x in leaves)

    @property
    def micro_batch(self) -> PyTree:
        """The shapes of one micro-batch, as `loss_fn` sees it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.groups[0])


def batches(
    steps: Iterable[Slice],
    collate_fn: Callable[[list], PyTree],
    size: BatchSize,
    mesh: Mesh,
    check: Callable[[int, PyTree], None] | None = None,
) -> "Prefetch":
    """The batch of each step, prepared ahead by a thread; to be closed, as `Prefetch` says.

    **Arguments:**

    - `check`: called by that thread with the number of each step and its collated rows.
    """

    def prepare(i: int, step: Slice) -> Batch:
        n_rows = len(step.examples)
        cut = cut_rows(n_rows, size.micro_batch, mesh.size)
        # A remainder of full micro-batches runs in the program of a full step.
        is_full = len(cut) == 1 and cut[0].rows == size.micro_batch
        rows = rows_here(cut, mesh)
        places = [step.places[row] for row in rows]
        batch = collate(collate_fn, read(step.examples, rows, step.places), places)
        if check is not None:
            check(i, batch)
        tokens = n_tokens(batch)  # of this process's rows; the others' are as long
        return Batch(
            place_batch(batch, cut, mesh, rows, size.n_micro_batches if is_full else 0),
            cut[0].n,
            n_rows,
            None if tokens is None else tokens * n_rows // len(rows),
            step.position,
            step.state,
            batch,
            places,
        )

    return Prefetch(prepare(i, step) for i, step in enumerate(steps))


# --- ahead of the step -----------------------------------------------------------------------------------------------


class _Shelf:
    """What a thread has prepared and its reader has not taken yet."""

    def __init__(self, items: Iterator[Any], depth: int):
        self.items: Iterator[Any] | None = items
        self.depth = depth
        self.ready: collections.deque[Any] = collections.deque()
        self.is_done = False  # no more comes
        self.error: BaseException | None = None  # after what is ready
        self.change = threading.Condition()

    def fill(self) -> None:
        """Prepare items up to the depth, until the last, an error, or `is_done`."""
        items, self.items = self.items, None
        assert items is not None
        error = None
        try:
            while True:
                with self.change:
                    self.change.wait_for(lambda: self.is_done or len(self.ready) < self.depth)
                    if self.is_done:
                        return
                item = next(items)
                with self.change:
                    self.ready.append(item)
                    self.change.notify_all()
        except StopIteration:
            pass
        except BaseException as raised:  # handed to the thread that reads: it is that thread's error
            error = raised
        finally:
            with self.change:
                self.is_done, self.error = True, error
                self.change.notify_all()


class Prefetch(Iterator[Any]):
    """The same items, prepared by a thread up to `depth` ahead; its exceptions are raised here, with their tracebacks.

    Who may stop before the end closes it: else the thread lives as long as a traceback that holds the caller's frame.

    A user's generator or tokenizer is not made for two threads: before the thread of a second one starts, those that the
    same reader has under way have prepared all that they may, and rest. So the order of a reader's items is always the same.
    """

    _under_way: ClassVar["weakref.WeakSet[Prefetch]"] = weakref.WeakSet()

    def __init__(self, items: Iterator[Any], depth: int = 2):
        self._shelf = _Shelf(items, depth)
        self._thread: threading.Thread | None = None
        self._reader = threading.get_ident()

    def peek(self) -> Any:
        """The next item, which stays the next; None after the last."""
        self._start()
        shelf = self._shelf
        with shelf.change:
            _briefly(lambda: shelf.change.wait_for(lambda: shelf.ready or shelf.is_done))
            if shelf.ready:
                return shelf.ready[0]
            error, shelf.error = shelf.error, None
        self.close()
        if error is not None:
            raise error
        return None

    def __next__(self) -> Any:
        if self.peek() is None and not self._shelf.ready:
            raise StopIteration
        with self._shelf.change:
            item = self._shelf.ready.popleft()
            self._shelf.change.notify_all()
        return item

    def settle(self) -> None:
        """Return once the thread prepares nothing until an item is taken."""
        if self._thread is not None:
            with self._shelf.change:
                self._shelf.change.wait_for(lambda: self._shelf.is_done or len(self._shelf.ready) >= self._shelf.depth)

    def close(self) -> None:
        """End the thread, and wait for it."""
        with self._shelf.change:
            self._shelf.is_done, self._shelf.items = True, None
            self._shelf.ready.clear()
            self._shelf.change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            _briefly(self._thread.join)
        self._under_way.discard(self)

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        if self._thread is not None or self._shelf.items is None:
            return
        self._reader = threading.get_ident()
        for other in list(self._under_way):
            if other._reader == self._reader:
                other.settle()
        self._under_way.add(self)
        # The thread holds the shelf, not this: what nobody reads any more is collected, and ends it.
        self._thread = threading.Thread(target=self._shelf.fill, name="redeqx-prefetch", daemon=True)
        self._thread.start()


def _briefly(wait: Callable[[], Any]) -> Any:
    """What it returns; a Ctrl-C meanwhile shows where the user's script was, and no frames of queues and threads."""
    try:
        return wait()
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None
