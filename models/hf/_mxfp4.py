"""Weights in MXFP4: four bits for each number, and a common exponent of each 32. They are read as bfloat16.

A matrix is stored as two tensors, `NAME_blocks` and `NAME_scales`. `Unpacked` shows both as one, which is computed where it
is read, so that a device decodes only its own slices. bfloat16 holds every such number exactly.

Source: *OCP Microscaling Formats (MX) Specification* 1.0, 2023; the layout is that of gpt-oss.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from redeqx.checkpoint import TensorReader
from redeqx.storage import ComputedArray

_BLOCKS, _SCALES = "_blocks", "_scales"
# The numbers of four bits: a sign, two bits of exponent, and one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)
_BIAS = 127  # of exponents


class Mxfp4(ComputedArray):
    """A view `[*dims, n, size]` of packed numbers: blocks `[*dims, n, size / 32, 16]`, of which each byte holds two numbers,
    the first one in its low bits; and scales `[*dims, n, size / 32]`. Slices of the last dim are read, those of others are
    views."""

    def __init__(self, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales
        self.shape = (*scales.shape[:-1], 32 * scales.shape[-1])
        self.ndim, self.size, self.dtype = len(self.shape), math.prod(self.shape), np.dtype(jnp.bfloat16)

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        if len(index) < self.ndim:
            return Mxfp4(self._blocks[index], self._scales[index])
        *others, last = index
        start, stop, _ = last.indices(self.shape[-1])
        read = (*others, slice(start // 32, -(-stop // 32)))
        values = np.asarray(Mxfp4(self._blocks[read], self._scales[read]))
        return values[..., start % 32 : start % 32 + stop - start]

    def transpose(self, *axes: int) -> "Transposed":
        """Returns the view with its last two dims exchanged."""
        assert axes == (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        return Transposed(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # each call decodes it again
        values = np.empty(self.shape, self.dtype if dtype is None else dtype)
        for index in np.ndindex(*self.shape[:-2]):  # one matrix at a time, to save memory
            blocks, scales = (np.asarray(part[index]) for part in (self._blocks, self._scales))
            numbers = _NUMBERS[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, 32)
            values[index] = np.ldexp(numbers, scales[..., None].astype(np.int32) - _BIAS).reshape(self.shape[-2:])
        return values


class Transposed(ComputedArray):
    """A view `[*dims, size, n]` of packed numbers `[*dims, n, size]`."""

    def __init__(self, view: Mxfp4):
        self._view = view
        *dims, n, size = view.shape
        self.shape = (*dims, size, n)
        self.ndim, self.size, self.dtype = view.ndim, view.size, view.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def transpose(self, *axes: int) -> Mxfp4:
        """Returns the view with its last two dims exchanged."""
        assert axes == (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        return self._view

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.swapaxes(np.asarray(self._view, dtype), -1, -2)


class Unpacked:
    """The tensors of a folder, with those in MXFP4 as one of the name that they have without packing, `[*dims, in, out]`."""

    def __init__(self, source: TensorReader, packed: Mapping[str, str]):
        """**Arguments:**

        - `packed`: the names of blocks, by the name without packing.

        Raises ValueError for blocks without their scales, or of other shapes or dtypes than the format's.
        """
        self.path, self.paths, self._source, self._packed = source.path, source.paths, source, packed
        for name, disk in packed.items():
            blocks, scales = source.view(disk), source.view(name + _SCALES) if name + _SCALES in source else None
            if (
                scales is None
                or scales.ndim != 3
                or blocks.shape != (*scales.shape, 16)
                or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}
            ):
                found = "none" if scales is None else f"{scales.dtype} {scales.shape}"
                raise ValueError(
                    f"`{self.path}`: `{name}{_SCALES}`: expected uint8, one number for each block of `{disk}`, "
                    f"{blocks.dtype} {blocks.shape}, got {found}. Fetch the file again."
                )

    def names(self) -> list[str]:
        """Returns the names of the tensors, unpacked."""
        parts = {*self._packed.values(), *(name + _SCALES for name in self._packed)}
        return [*(name for name in self._source.names() if name not in parts), *self._packed]

    def view(self, name: str) -> Any:
        """Returns a tensor."""
        if name not in self._packed:
            return self._source.view(name)
        return Mxfp4(self._source.view(self._packed[name]), self._source.view(name + _SCALES)).transpose(0, 2, 1)


def unpacked(source: TensorReader, wanted: Collection[str]) -> TensorReader | Unpacked:
    """Returns the tensors of a folder, with those in MXFP4 unpacked if their names without packing are wanted."""
    bases = {name.removesuffix(_BLOCKS): name for name in source.names() if name.endswith(_BLOCKS)}
    packed = {base: name for base, name in bases.items() if base in wanted}
    return Unpacked(source, packed) if packed else source
