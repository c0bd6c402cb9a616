"""Examples: what counts as some, which ones each step gets, and the position after it.

It uses only `len()` and integer items of examples, or iterates over them. `_order` permutes those that have a length;
`_streams` keeps the position of an iterable.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import check_examples_kind, check_function
from ._order import permuted
from ._streams import Stream, checksum


@dataclass(frozen=True)
class Slice:
    """The examples of one step, read on access so that each process reads only its own, and the position after it."""

    examples: Sequence[Any]
    places: Sequence[int]  # the number of each example: its index, or its position in an iterable
    position: int  # the number of examples of the epoch up to the end of this step
    state: Any = None  # that of the `Stream` at the end of this step
    n_last: int | None = None  # the number of examples of the pass's last step; None if unknown


@dataclass(frozen=True)
class _Subset(Sequence[Any]):
    """The items of a sequence at these indices."""

    of: Any
    places: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        return self.of[self.places[i]]


def check_examples(given: Any, name: str = "train_examples", *, or_function: bool = True) -> None:
    """Checks that `given` are examples: an object with `len()` and integer items (a list, an array, a dataset), an iterable,
    or with `or_function`, a function of the epoch that returns one of these.

    The position of an iterable is saved by its (or its iterator's) `get_state` / `set_state` or `state_dict` /
    `load_state_dict`, if it has them.

    Raises TypeError for anything else, ValueError for no examples.
    """
    if is_function(given):
        if or_function:
            return check_function(given, name, ["epoch"])
        raise TypeError(f"`{name}`: expected examples, got a function, which only `fit` calls, with an epoch. Call it.")
    check_examples_kind(given, name)
    if isinstance(given, _NO_EXAMPLES) or not (_is_sized(given) or hasattr(given, "__iter__")):
        others = ", an iterable, or a function of the epoch" if or_function else ", or an iterable"
        raise TypeError(
            f"`{name}`: expected examples with `len()` and integer items{others}, got {type(given).__name__}. "
            "Pass a list with one entry for each example."
        )
    n = _checked_size(given, name)
    if n == 0:
        raise ValueError(f"`{name}`: expected at least one example, got none. Look at what was loaded.")
    if n is not None and n > _MOST:  # as grain's `repeat()`
        raise ValueError(
            f"`{name}`: expected a number of examples, got {n:,}, as from endless repeats. Remove them: `n_epochs` repeats."
        )


def examples_of(given: Any, epoch: int) -> Any:
    """Returns the examples of an epoch: `given`, or its result if it is a function of the epoch.

    If examples have `set_epoch`, it is called: an iterable of `datasets` shuffles by it, and then starts the epoch at its
    beginning even if a state was loaded in the epoch before.
    """
    if not is_function(given):
        if hasattr(given, "set_epoch"):
            given.set_epoch(epoch)
        return given
    examples = given(epoch)
    check_examples(examples, f"train_examples({epoch})", or_function=False)
    return examples


def size_of(examples: Any) -> int | None:
    """Returns the number of examples; None if it is known only after iterating over them."""
    return len(examples) if _is_sized(examples) else None


def _checked_size(examples: Any, name: str) -> int | None:
    try:
        return size_of(examples)
    except TypeError as error:  # of a class, an array without dims, a sparse matrix
        advice = "Pass a list with one entry for each example."
        raise TypeError(f"`{name}`: expected examples with `len()`, got one that raises: {error}. {advice}") from error


def known_size(examples: Any, name: str = "examples") -> int:
    """Returns the number of examples. Raises TypeError if it is known only after iterating over them, and for objects whose
    items are not examples."""
    check_examples_kind(examples, name)
    if (n := _checked_size(examples, name)) is None or isinstance(examples, _NO_EXAMPLES):
        found = type(examples).__name__
        raise TypeError(f"`{name}`: expected `len()` and integer items, got {found}. Pass a list of them.")
    return n


def slices(
    examples: Any,
    batch_size: int,
    *,
    seed: tuple[int, ...] | None = None,
    position: int = 0,
    state: Any = None,
    drop_remainder: bool = False,
    name: str = "train_examples",
    n: int | None = None,
) -> Iterator[Slice]:
    """Yields the slices of one pass over the examples from `position` on, `batch_size` examples each; the last slice has the
    remainder.

    **Arguments:**

    - `seed`: for the order, see `permuted`. None keeps the given one. The order of an iterable is always kept.
    - `position`, `state`: those of the `Slice` after which to continue.
    - `n`: the number of examples, if it was read before: a list may have changed since.

    Raises ValueError for an iterable without examples, and with `drop_remainder` for fewer examples than a batch; TypeError
    for an iterable whose state is not JSON.
    """
    n = size_of(examples) if n is None else n
    last = None if n is None else batch_size if drop_remainder else (n - position - 1) % batch_size + 1
    upcoming = Stream(examples, position, state, name) if n is None else _indices(n, seed, position)
    while taken := tuple(itertools.islice(upcoming, batch_size)):
        if drop_remainder and len(taken) < batch_size:
            break
        position += len(taken)
        if isinstance(upcoming, Stream):
            yield Slice(taken, range(position - len(taken), position), position, upcoming.state())
        else:
            yield Slice(_Subset(examples, taken), taken, position, n_last=last)
    if position:
        return
    if drop_remainder:
        raise ValueError(
            f"`{name}`: expected at least {batch_size} examples, a batch of them, as `drop_remainder=True`, got "
            f"{'fewer' if n is None else n}. Pass a smaller batch size, or keep the remainder."
        )
    raise ValueError(
        f"`{name}`: expected at least one example, got an iterable with none, or one that is used up. "
        "Pass one that can be iterated anew, or a function of the epoch."
    )


def _indices(n: int, seed: tuple[int, ...] | None, position: int) -> Iterator[int]:
    """Yields the indices of a pass from a position on. They are computed some at a time, as NumPy is slow for few."""
    if seed is None:
        yield from range(position, n)
        return
    for start in range(position, n, _AT_ONCE):
        yield from permuted(np.arange(start, min(start + _AT_ONCE, n)), n, seed).tolist()


_AT_ONCE = 1024


def n_slices(n: int, batch_size: int, drop_remainder: bool) -> int:
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
_MOST = 2**40  # examples
_NO_EXAMPLES = (str, bytes, Mapping)  # they have a length: of letters or names


def differs_by_epoch(given: Any) -> bool:
    """Returns whether the examples may differ from epoch to epoch."""
    return is_function(given) or hasattr(given, "set_epoch")


def is_function(given: Any) -> bool:
    """Returns whether `given` is a function of the epoch."""
    return callable(given) and not _is_sized(given) and not hasattr(given, "__iter__")
