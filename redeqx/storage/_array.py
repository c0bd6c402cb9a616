"""An array in an object, or one whose bytes are computed; only those that are used are read.

It has the shape, dtype and views of a NumPy array: indexing, transposing, reshaping. `np.asarray` reads its values; `fetch`
reads several views at once, and their common bytes only once.

NumPy itself tracks the bytes of each view: every view has an array of addresses in reserved memory, which is never read.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ._requests import limits


class Readable(Protocol):
    """Bytes of which any range can be read: those of an object in a store (`StorePath`), or computed ones."""

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes `[start, stop)`."""
        ...


class StoredArray:
    """A view of a part of an object, as an array. `addresses` is an array with the shape, dtype and strides of the view, in
    reserved memory; `base` is the address that stands for the object's first byte."""

    def __init__(self, path: Readable, addresses: np.ndarray, base: int):
        self.path, self._addresses, self._base = path, addresses, base
        self.shape, self.ndim, self.dtype = addresses.shape, addresses.ndim, addresses.dtype
        self.size, self.nbytes = addresses.size, addresses.nbytes

    @classmethod
    def of(cls, path: Readable, size: int) -> "StoredArray":
        """Returns all bytes of an object of that size, as a one-dimensional array."""
        if size == 0:
            return cls(path, np.empty(0, np.uint8), 0)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        addresses = np.frombuffer(memory, np.uint8)
        return cls(path, addresses, addresses.ctypes.data)

    @property
    def T(self) -> "StoredArray":
        return self._like(self._addresses.T)

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, index: Any) -> "StoredArray":
        index = index if isinstance(index, tuple) else (index,)
        # With an ellipsis, an item is a view without dims; otherwise NumPy would read it.
        return self._like(self._addresses[index if any(part is ... for part in index) else (*index, ...)])

    def view(self, dtype: Any) -> "StoredArray":
        """Returns the same bytes with another dtype."""
        return self._like(self._addresses.view(dtype))

    def reshape(self, *shape: Any) -> "StoredArray":
        """As `numpy.ndarray.reshape`, for contiguous arrays."""
        return self._like(self._addresses.reshape(*shape))

    def transpose(self, *axes: Any) -> "StoredArray":
        """As `numpy.ndarray.transpose`."""
        return self._like(self._addresses.transpose(*axes))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # each call reads it again
        (values,) = fetch([self])
        return values if dtype is None else values.astype(dtype, copy=False)

    def _like(self, addresses: np.ndarray) -> "StoredArray":
        if addresses.size and not np.may_share_memory(addresses, self._addresses):
            raise ValueError(f"`{self.path}`: expected a view of its tensors, got a copy. Read it first: `np.asarray`.")
        return StoredArray(self.path, addresses, self._base)


View: TypeAlias = np.ndarray | StoredArray  # a tensor of a file, on a disk or in an object store


class _MergedDims:
    """The bytes of a view `[a, b, ...]`, as if they were next to each other in the file."""

    def __init__(self, split: View):
        self._split, self._row = split, math.prod(split.shape[2:]) * split.dtype.itemsize

    def read(self, start: int, stop: int) -> bytes:
        inner, first, last = self._split.shape[1], start // self._row, (stop - 1) // self._row
        outer, end = first // inner, last // inner + 1
        if end == outer + 1:  # part of one block
            read, base = self._split[outer, first % inner : last % inner + 1], first
        else:
            read, base = self._split[outer:end], outer * inner
        return np.asarray(read).tobytes()[start - base * self._row : stop - base * self._row]


def merge_dims(split: View) -> StoredArray:
    """Returns a view `[a, b, ...]` as an array `[a x b, ...]`, though its elements are not next to each other in the file.
    Only the items that are used are read, and those between them."""
    a, b, *rest = split.shape
    return StoredArray.of(_MergedDims(split), split.nbytes).view(split.dtype).reshape(a * b, *rest)


@dataclass(frozen=True)
class _Piece:
    """A part of a view, and where its values go. Its bytes have the addresses `[start, stop)`."""

    start: int
    stop: int
    addresses: np.ndarray
    out: np.ndarray


def fetch(views: Sequence[Any], dtype: Any = None) -> list[np.ndarray]:
    """Returns copies of views of one file, in C order, cast to a dtype if one is given.

    From an object, bytes that several views need are read once, and of the other bytes only small gaps. In addition to the
    copies a few parts of `limits.part` bytes are in memory.
    """
    if not all(isinstance(view, StoredArray) for view in views):
        return [np.array(view, dtype, order="C") for view in views]
    outs = [np.empty(view.shape, view.dtype if dtype is None else dtype) for view in views]
    pieces = [piece for view, out in zip(views, outs, strict=True) for piece in _pieces(view._addresses, out)]
    with ThreadPoolExecutor(limits.concurrent, "redeqx-read") as pool:
        reads = [pool.submit(_read, views[0].path, views[0]._base, group) for group in _groups(pieces)]
        try:
            for read in reads:
                read.result()
        except BaseException:  # the other requests would each be retried for minutes
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outs


def _pieces(addresses: np.ndarray, out: np.ndarray) -> Iterator[_Piece]:
    """Yields the pieces of a view, each within one part and without large gaps. Halves the view until they are."""
    if addresses.size == 0:
        return
    start, stop = byte_bounds(addresses)
    axes = [axis for axis, n in enumerate(addresses.shape) if n > 1]
    if not axes or (stop - start <= limits.part and stop - start - addresses.nbytes <= limits.gap):
        yield _Piece(start, stop, addresses, out)
        return
    outer = max(axes, key=lambda axis: abs(addresses.strides[axis]))
    for halves in zip(np.array_split(addresses, 2, outer), np.array_split(out, 2, outer), strict=True):
        yield from _pieces(*halves)


def _groups(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yields groups of pieces that one request reads: overlapping ones, and small ones close to each other."""
    group: list[_Piece] = []
    stop = 0
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.stop)):
        if group:
            is_near = piece.start - stop <= limits.gap and max(stop, piece.stop) - group[0].start <= limits.part
            if not (piece.start < stop or is_near):
                yield group
                group = []
        group.append(piece)
        stop = max(stop, piece.stop)
    if group:
        yield group


def _read(path: Readable, base: int, group: list[_Piece]) -> None:
    start, stop = group[0].start, max(piece.stop for piece in group)
    data = path.read(start - base, stop - base)
    for piece in group:
        addresses = piece.addresses
        offset = addresses.ctypes.data - start  # of the item at index 0, which with negative strides is not the first
        piece.out[...] = np.ndarray(addresses.shape, addresses.dtype, data, offset, addresses.strides)
