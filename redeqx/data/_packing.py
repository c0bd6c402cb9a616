"""Packed rows: several sequences of tokens in one row, so that little of it is padding.

Owns which sequences share a row, and the arrays of a row. `_packed_stream` packs iterables. A model keeps the sequences of a
row apart by `segments`; `redeqx.attention` and the families of `redeqx.models` take them.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import check_count

NO_LABEL = -100  # the default `ignore_index` of `cross_entropy`
_ROW_ARRAYS = ("segments", "positions")  # which a row has in addition to the arrays of its examples

Arrays = dict[str, np.ndarray]
Piece = tuple[int, int]  # the number of an example, and its first token: an example that is cut has several pieces
Size = tuple[int, ...]  # tokens, in the order of `RowFormat.lengths`


@dataclass(frozen=True)
class RowFormat:
    """What a row looks like: its sides, which are sequences that are packed together, and their lengths in tokens. The only
    side of rows without names is called None. `cut_long`: whether an example that is longer than a row is cut."""

    lengths: Mapping[str | None, int]
    cut_long: bool

    @classmethod
    def of(cls, length: Any, cut_long: bool) -> "RowFormat":
        """Checks the arguments of `pack`."""
        if not isinstance(length, Mapping):
            check_count(length, "length")
            return cls({None: int(length)}, cut_long)
        if not length:
            raise ValueError("`length`: expected a length for each side of a row, got {}. Pass a number for one side.")
        for side, n in length.items():
            check_count(n, f"length[{side!r}]")
        if cut_long:
            raise ValueError(
                f"`cut_long`: expected False with the {len(length)} sides of `length`, got True. "
                "Shorten the examples that are too long."
            )
        return cls({side: int(n) for side, n in length.items()}, cut_long)

    def read(self, example: Any, number: int) -> dict[str | None, Arrays]:
        """Returns the arrays of each side of an example. Raises an error if `pack` does not take it."""
        where = f"examples[{number}]"
        if None in self.lengths:
            return {None: _arrays_of(example, where)}
        if not isinstance(example, Mapping) or not self.lengths.keys() <= example.keys():
            names = ", ".join(map(repr, self.lengths))
            found = f"a dict of {', '.join(map(repr, example))}" if isinstance(example, Mapping) else type(example).__name__
            raise TypeError(f"`{where}`: expected a dict with {names}, as `length`, got {found}. Name both alike.")
        sides = {side: _arrays_of(example[side], f"{where}[{side!r}]") for side in self.lengths}
        sizes = {side: len(arrays["tokens"]) for side, arrays in sides.items()}
        if any(sizes.values()) and not all(sizes.values()):
            empty = next(side for side, n in sizes.items() if not n)
            raise ValueError(f"`{where}[{empty!r}]`: expected at least one token, got none. Leave the example out.")
        return sides

    def pieces(self, sides: dict[str | None, Arrays], number: int) -> Iterator[tuple[Piece, Size]]:
        """Yields the pieces of an example, which is one if it fits into a row. An example without tokens has none."""
        sizes = tuple(len(arrays["tokens"]) for arrays in sides.values())
        if self.cut_long:
            ((n,), (length,)) = sizes, self.lengths.values()
            yield from (((number, start), (min(length, n - start),)) for start in range(0, n, length))
            return
        for (side, length), n in zip(self.lengths.items(), sizes, strict=True):
            if n > length:
                where = f"examples[{number}]" + ("" if side is None else f"[{side!r}]")
                advice = "Pass `cut_long=True` to cut it, or a larger `length`." if side is None else "Shorten the example."
                raise ValueError(f"`{where}`: expected at most `length`, {length} tokens, got {n}. {advice}")
        if any(sizes):
            yield (number, 0), sizes

    def row(self, pieces: Sequence[tuple[int, dict[str | None, Arrays]]]) -> Any:
        """Returns a row, given the first token of each piece, and its example, as returned by `read`."""
        row: dict[str | None, Arrays] = {}
        for side, length in self.lengths.items():
            parts = [{name: x[start : start + length] for name, x in sides[side].items()} for start, sides in pieces]
            sizes = [len(part["tokens"]) for part in parts]
            segments = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
            arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} | {"segments": segments}
            row[side] = {
                name: np.pad(x, (0, length - len(x)), constant_values=NO_LABEL if name == "labels" else 0)
                for name, x in arrays.items()
            }
            n_padding = length - sum(sizes)
            row[side]["positions"] = np.concatenate([np.arange(n, dtype=np.int32) for n in (*sizes, n_padding)])
        return row.get(None, row)


def _arrays_of(given: Any, where: str) -> Arrays:
    """Returns the tokens of a sequence, the arrays beside them, and the labels, which are the next tokens if none are
    given."""
    if isinstance(given, Mapping) and "tokens" not in given:
        found = ", ".join(map(repr, given)) or "no key"
        raise TypeError(f"`{where}`: expected tokens, or a dict with 'tokens', got a dict with {found}. Name the tokens so.")
    named = dict(given) if isinstance(given, Mapping) else {"tokens": given}
    arrays = {name: _flat(x, where if x is given else f"{where}[{name!r}]") for name, x in named.items()}
    tokens = arrays["tokens"]
    if tokens.dtype != np.int32:
        raise TypeError(f"`{where}`: expected integers as tokens, got {tokens.dtype}. Encode the text first.")
    for name, array in arrays.items():
        if len(array) != len(tokens):
            raise ValueError(
                f"`{where}[{name!r}]`: expected a number for each of the {len(tokens)} tokens, got {len(array)}. "
                "Leave out what is not per token."
            )
        if name in _ROW_ARRAYS:
            raise ValueError(f"`{where}[{name!r}]`: expected other names than those of a row, got {name!r}. Leave it out.")
    if "labels" not in arrays:
        arrays["labels"] = np.append(tokens[1:], np.int32(NO_LABEL))[: len(tokens)]
    return arrays


def _flat(given: Any, where: str) -> np.ndarray:
    """Returns a flat array as int32, float32 or bool."""
    try:
        array = np.asarray(given)
    except ValueError:  # rows of different lengths
        array = np.empty((0, 0), object)
    if array.ndim != 1 or (array.dtype.kind not in "iufb" and array.size):
        found = type(given).__name__ if array.dtype.kind not in "iufb" else f"{array.dtype}{list(array.shape)}"
        raise TypeError(f"`{where}`: expected a flat array of numbers, got {found}. Pass one number per token.")
    kind = array.dtype.kind
    if kind in "iu" and array.size and not (array.max() <= _INT32.max and array.min() >= _INT32.min):
        raise ValueError(f"`{where}`: expected integers of 32 bits, got up to {array.max()}. Pass smaller ones.")
    if kind == "f" and array.size:
        return array.astype(np.float32)
    return array if kind == "b" else array.astype(np.int32)


_INT32 = np.iinfo(np.int32)


class Waiting:
    """The pieces that wait for a row, by size.

    A row takes the piece that has waited longest, and then, again and again, the largest one that still fits: the best fit
    for the row. No piece waits for ever, and the order of the rows is roughly that of the examples.
    """

    def __init__(self, lengths: Sequence[int]):
        """Takes the lengths of the sides of a row."""
        self._lengths = tuple(lengths)
        # A token of a short side counts more: all sides of a row are equally large.
        self._weights = tuple(math.prod(lengths) // n for n in lengths)
        self._sizes: list[tuple[int, Size]] = []  # each size of a waiting piece, after its weight, in ascending order
        self._pieces: dict[Size, deque[Piece]] = {}  # of each size, the oldest first
        self._order: deque[tuple[Piece, Size]] = deque()  # by age; contains pieces that have left from the middle too
        self._gone: set[Piece] = set()  # those
        self._total = 0  # the weights of all pieces

    def __len__(self) -> int:
        return len(self._order) - len(self._gone)

    @property
    def n_rows(self) -> float:
        """The number of rows that the pieces would fill without padding."""
        return self._total / self._weight(self._lengths)

    def __iter__(self) -> Iterator[Piece]:
        """Yields the pieces, the oldest first."""
        return (piece for piece, _ in self._order if piece not in self._gone)

    def add(self, piece: Piece, size: Size) -> None:
        """Adds a piece, as the youngest."""
        if size not in self._pieces:
            bisect.insort(self._sizes, (self._weight(size), size))
            self._pieces[size] = deque()
        self._pieces[size].append(piece)
        self._order.append((piece, size))
        self._total += self._weight(size)

    def take_row(self) -> list[Piece]:
        """Removes and returns the pieces of the next row."""
        size = self._order[0][1]
        row, left = [], self._lengths
        while size is not None:
            row.append(self._take(size))
            left = tuple(n - taken for n, taken in zip(left, size, strict=True))
            size = self._largest(left)
        while self._order and self._order[0][0] in self._gone:
            self._gone.remove(self._order.popleft()[0])
        return row

    def _take(self, size: Size) -> Piece:
        pieces = self._pieces[size]
        piece = pieces.popleft()
        self._gone.add(piece)
        self._total -= self._weight(size)
        if not pieces:
            del self._pieces[size]
            del self._sizes[bisect.bisect_left(self._sizes, (self._weight(size), size))]
        return piece

    def _largest(self, left: Size) -> Size | None:
        """Returns the largest size that fits into what is left of a row; None if none does."""
        first = bisect.bisect_right(self._sizes, (self._weight(left), left))
        for i in reversed(range(first)):  # the first one fits if a row has one side
            size = self._sizes[i][1]
            if all(n <= rest for n, rest in zip(size, left, strict=True)):
                return size
        return None

    def _weight(self, size: Size) -> int:
        return sum(weight * n for weight, n in zip(self._weights, size, strict=True))


class PackedRows(Sequence[Any]):
    """The packed rows of examples with `len()` and integer items; see `pack`. The examples of a row are read on access."""

    def __init__(self, examples: Any, row_format: RowFormat):
        self._examples, self._format = examples, row_format
        waiting = Waiting(tuple(row_format.lengths.values()))
        names: dict[Any, list[str]] = {}
        for number in range(len(examples)):
            sides = row_format.read(examples[number], number)
            check_same_arrays(names, sides, number)
            for piece, size in row_format.pieces(sides, number):
                waiting.add(piece, size)
        rows: list[list[Piece]] = []
        while waiting:
            rows.append(waiting.take_row())
        if not rows:
            raise ValueError("`examples`: expected at least one token, got none. Look at what was loaded.")
        self._pieces = np.array([piece for row in rows for piece in row], np.int64)
        self._ends = np.cumsum([0, *map(len, rows)])  # the number of pieces before each row

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        first, end = self._ends[range(len(self))[i] :][:2]
        pieces = self._pieces[first:end].tolist()
        return self._format.row([(start, self._format.read(self._examples[n], n)) for n, start in pieces])


def check_same_arrays(names: dict[Any, list[str]], sides: dict[str | None, Arrays], number: int) -> None:
    """Raises ValueError if an example has other arrays than the first one, whose names are kept in `names`."""
    for side, arrays in sides.items():
        if sorted(arrays) != names.setdefault(side, sorted(arrays)):
            where = f"examples[{number}]" + ("" if side is None else f"[{side!r}]")
            raise ValueError(
                f"`{where}`: expected the arrays of the first example, {', '.join(names[side])}, got "
                f"{', '.join(sorted(arrays))}. Give all examples the same."
            )
