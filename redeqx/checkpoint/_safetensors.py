"""One safetensors file: writes arrays by name, reads slices of arrays.

Owns the file's layout, writers and reader. `_reader` loads a PyTree's leaves onto a mesh; `_manager` owns folders of files,
and makes them crash-safe.

`safetensors.numpy.save_file` (0.8) silently writes arrays that are not C-contiguous in the wrong order, keeps the whole file
in memory and never fsyncs. The writers here compute every offset before the first byte. So they keep one tensor in memory,
and several processes can each write their own shards in place.
"""

import errno
import json
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._tree import is_array_like, is_key, named_leaves
from ..errors import brief, brief_name, damaged, is_size, parse_json
from ..storage import Location, StoredArray, StorePath, View, open_new, open_old
from ._crc32 import Crc32, crc32_of
from ._shards import Block, whole

# Every dtype of safetensors that NumPy supports, except the packed ones of 4 and 6 bits.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

CHUNK = 2**24  # bytes per write: bounds the extra memory of casts and checksums
_LARGE = 2**20  # from this many bytes on, another thread writes
_WRITERS = 3  # threads: two write and one flushes; more are no faster
INCOMPLETE = errno.ENODATA
_MAX_HEADER = 10**8  # bytes; the limit of the safetensors library
_MAX_DIMS = 64  # NumPy's limit


# --- leaves ---------------------------------------------------------------------------------------------------------


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def stored(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of a leaf in a file."""
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tuple(leaf.shape), leaf.dtype


def array_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves that are stored in a file, by name. The others are part of the structure."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if is_array_like(leaf)}


def to_host(leaf: Any) -> np.ndarray:
    """Returns the complete leaf in host memory, C-contiguous. A JAX array must be fully addressable."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf, order="C")
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(
            f"`array`: expected one that this process holds whole, got parts of {leaf.dtype} {leaf.shape}. Gather it first: "
            "`jax.experimental.multihost_utils.process_allgather(model, tiled=True)`."
        )
    return whole(leaf)


# --- one file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """A tensor's dtype and shape, and its bytes `[start, stop)`, counted from the end of the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def _header_of(
    leaves: Mapping[str, Any], float_dtype: Any, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, _Tensor], int]:
    """Returns header, ordered tensors and file size. They depend only on shapes and dtypes: all processes agree."""
    if float_dtype is not None and not is_float(np.dtype(float_dtype)):
        raise ValueError(f"`float_dtype`: expected a floating dtype, got {np.dtype(float_dtype)}. Pass None to cast none.")
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, leaf in leaves.items():
        if name == "__metadata__":
            raise ValueError("`__metadata__`: expected another name, got the one that safetensors keeps. Rename it.")
        shape, dtype = stored(leaf)
        dtype = np.dtype(float_dtype if float_dtype is not None and is_float(dtype) else dtype)
        if dtype not in _CODES:
            known = ", ".join(map(str, _CODES))
            raise TypeError(f"`{name}`: expected a dtype that safetensors has ({known}), got {dtype}. Cast it first.")
        specs[name] = dtype, shape
    tensors: dict[str, _Tensor] = {}
    stop = 0
    # The widest dtype first, so that each tensor is aligned: safetensors allows no gaps.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        tensors[name] = _Tensor(dtype, shape, start, stop)
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    fields |= {
        name: {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [tensor.start, tensor.stop]}
        for name, tensor in tensors.items()
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, tensors, 8 + len(text) + stop


def _chunks(flat: np.ndarray, dtype: np.dtype) -> Iterator[memoryview]:
    """Yields the bytes of a one-dimensional array, cast to a dtype, in pieces."""
    n = CHUNK // dtype.itemsize
    for start in range(0, flat.size, n):
        yield flat[start : start + n].astype(dtype, copy=False).view(np.uint8).data


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _flush(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)  # macOS has no fdatasync


def check_arrays(leaves: Mapping[str, Any], float_dtype: Any = None) -> None:
    """Raises TypeError for a leaf that is only a shape, or cannot be stored."""
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"`{name}`: expected an array, got only its shape {leaf}. Create the arrays, then save.")
    _header_of(leaves, float_dtype)


def file_size(leaves: Mapping[str, Any], float_dtype: Any = None) -> int:
    """Returns the bytes of the file that `write_tensors` would write; raises the same errors for dtypes. Accepts shapes."""
    return _header_of(leaves, float_dtype)[2]


def tensors_size(leaves: Mapping[str, Any], float_dtype: Any = None) -> int:
    """Returns the bytes of the file's tensors alone."""
    header, _, size = _header_of(leaves, float_dtype)
    return size - len(header)


class Writer:
    """Writes one safetensors file in place, from one process or from several, each with its own blocks.

    One process calls `create` before all call `write`, and `finish` afterwards.

    **Arguments:**

    - `leaves`, `float_dtype`: as for `write_tensors`; only the leaves' shapes and dtypes are used.
    """

    def __init__(self, leaves: Mapping[str, Any], float_dtype: Any = None):
        self._header, self._tensors, self.size = _header_of(leaves, float_dtype)

    def create(self, path: Path) -> None:
        """Creates the file with its full size."""
        fd = open_new(path)
        try:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(fd, 0, self.size)  # raises if the disk is full, before any work
        finally:
            os.close(fd)

    def write(self, path: Path, blocks: Mapping[str, Sequence[Block]]) -> tuple[int, list[int]]:
        """Writes blocks by tensor name, and calls fsync; returns their contribution to the file's crc32, and how many items
        of each tensor were written."""
        contribution, n_items = 0, []
        fd = open_old(path, os.O_WRONLY)
        try:
            # Threads write and flush while this one casts the next bytes and updates the checksum.
            with ThreadPoolExecutor(_WRITERS, "redeqx-write") as pool:
                flush = pool.submit(_flush, fd)
                for name, tensor in self._tensors.items():
                    n_items.append(sum(math.prod(block.shape) for block in blocks.get(name, ())))
                    for block in blocks.get(name, ()):
                        contribution ^= self._write_block(fd, tensor, block, pool)
                        if flush.done():
                            flush.result()
                            flush = pool.submit(_flush, fd)
                flush.result()
            os.fsync(fd)
        finally:
            os.close(fd)
        return contribution, n_items

    def _write_block(self, fd: int, tensor: _Tensor, block: Block, pool: ThreadPoolExecutor) -> int:
        crc32, begin = Crc32(), len(self._header) + tensor.start
        flat = block.values().reshape(-1)
        written: deque[Future[None]] = deque()
        for there, at, n in block.runs(tensor.shape):
            offset = begin + there * tensor.dtype.itemsize
            for chunk in _chunks(flat[at : at + n], tensor.dtype):
                if len(chunk) >= _LARGE:
                    if len(written) == _WRITERS - 1:  # bounds the queue of cast chunks on a slow disk
                        written.popleft().result()
                    written.append(pool.submit(_pwrite, fd, chunk, offset))
                else:
                    _pwrite(fd, chunk, offset)
                crc32.add(chunk, offset)
                offset += len(chunk)
        for future in written:
            future.result()
        return crc32.contribution(self.size)

    def finish(self, path: Path, written: Sequence[tuple[int, Sequence[int]]]) -> dict[str, int]:
        """Writes the header, and calls fsync; returns the file's `{"size": bytes, "crc32": checksum}`.

        **Arguments:**

        - `written`: the result of each process's `write`.

        Raises OSError if they did not write every item of every tensor.
        """
        for i, (name, tensor) in enumerate(self._tensors.items()):
            expected, found = math.prod(tensor.shape), sum(n_items[i] for _, n_items in written)
            if found != expected:
                raise incomplete(path, f"all {expected} numbers of `{name}`", f"{found} from {len(written)} process(es)")
        crc32 = Crc32()
        crc32.add(self._header, 0)
        fd = open_old(path, os.O_WRONLY)
        try:
            _pwrite(fd, memoryview(self._header)[8:], 8)
            # The header's length is written last: until then it is 0, and every reader refuses the file.
            _pwrite(fd, memoryview(self._header)[:8], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        return {
            "size": self.size,
            "crc32": crc32_of([crc32.contribution(self.size), *(each for each, _ in written)], self.size),
        }


def incomplete(path: Location, rule: str, got: str) -> OSError:
    """Returns the error, of errno `INCOMPLETE`, for a save in which some process did not take part."""
    why = f"expected {rule}, got {got}: JAX has {jax.process_count()}, and some hold the rest"
    return OSError(INCOMPLETE, f"{why}. Let redeqx start all of them: `Deployer(n_processes=, host0_address=)`", str(path))


def write_tensors(
    path: Location, leaves: Mapping[str, Any], float_dtype: Any = None, metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Writes arrays by name to one safetensors file; returns its `{"size": bytes, "crc32": checksum}`.

    Writes from the first byte to the last, which any file system supports, and keeps one tensor at a time in host memory.
    The file is fsynced, but not committed atomically: `Checkpoints.save` does that. An object appears when complete.

    **Arguments:**

    - `leaves`: JAX arrays (however sharded), NumPy arrays, typed PRNG keys, which are stored as their key data, or anything
        with `shape`, `dtype` and `__array__`, which is called when the tensor is written.
    - `float_dtype`: the dtype to which floating leaves are cast; others are never cast.
    - `metadata`: strings for the header's `__metadata__`.

    Raises TypeError for a leaf whose dtype safetensors cannot store, OSError if the disk is full or the store refuses.
    """
    check_arrays(leaves)
    header, tensors, size = _header_of(leaves, float_dtype, metadata)
    crc32 = 0

    def content() -> Iterator[memoryview | bytes]:
        nonlocal crc32
        crc32 = zlib.crc32(header)
        yield header
        for name, tensor in tensors.items():
            for chunk in _chunks(to_host(leaves[name]).reshape(-1), tensor.dtype):
                crc32 = zlib.crc32(chunk, crc32)
                yield chunk

    if isinstance(path, StorePath):
        path.upload(content, size)
        return {"size": size, "crc32": crc32}
    with os.fdopen(open_new(path), "wb") as file:
        for chunk in content():
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "crc32": crc32}


def _read_range(path: Location, start: int, stop: int) -> bytes:
    """Returns bytes of a file, without a mapping: if the disk fails, a mapping kills the process without an exception."""
    if isinstance(path, StorePath):
        return path.read(start, stop)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _parsed(path: Location, name: str, field: Any) -> _Tensor:
    """Returns the entry of a header, checked by itself."""
    name = brief_name(name)
    match field:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]}:
            pass
        case _:
            raise damaged(path, f"`{name}` to have dtype, shape and data_offsets", brief(field))
    if code not in DTYPES:
        raise damaged(path, f"`{name}` to be one of {', '.join(DTYPES)}", brief_name(code))
    if not (is_size(start) and is_size(stop) and start <= stop):
        raise damaged(path, f"`{name}` to have two data_offsets in order", brief([start, stop]))
    if not all(map(is_size, shape)):
        raise damaged(path, f"`{name}` to have a shape of sizes", brief(shape))
    # The product of all sizes except zeros must not overflow: NumPy refuses such shapes. At most as many dims as NumPy
    # supports are multiplied, since a header has room for millions.
    n_bytes = math.prod(size for size in shape[:_MAX_DIMS] if size) * DTYPES[code].itemsize
    if len(shape) > _MAX_DIMS or not is_size(n_bytes):
        raise damaged(path, f"`{name}` to have a shape that an array can have", f"{code} {brief(shape)}")
    n_bytes = 0 if 0 in shape else n_bytes
    if stop - start != n_bytes:
        raise damaged(path, f"`{name}` to take {n_bytes} bytes, as {code} {brief(shape)} does", f"{stop - start}")
    return _Tensor(DTYPES[code], tuple(shape), start, stop)


def open_tensors(path: Location) -> dict[str, View]:
    """Returns the tensors of any safetensors file, by name, as views that read only what is accessed: NumPy's, or in a store
    `StoredArray`s. Their dtypes may be JAX's extensions.

    Raises DamagedError if the header is not a safetensors header, or contradicts itself or the file's size.
    """
    size = path.stat().st_size
    if size < 8:
        raise damaged(path, "at least the 8 bytes of a header's length", f"{size} bytes")
    (length,) = struct.unpack("<Q", _read_range(path, 0, 8))
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise damaged(path, f"a header of 2 to {min(size - 8, _MAX_HEADER)} bytes", f"a length of {length}")
    try:
        fields = parse_json(_read_range(path, 8, 8 + length))
    except ValueError as error:
        raise damaged(path, "a header of JSON", str(error)) from error
    if not isinstance(fields, dict):
        raise damaged(path, "a header that is a JSON object", f"a {type(fields).__name__}")
    match metadata := fields.pop("__metadata__", {}):
        case dict() if all(isinstance(text, str) for text in metadata.values()):
            pass
        case _:
            raise damaged(path, "a `__metadata__` of texts", brief(metadata))
    tensors = {name: _parsed(path, name, field) for name, field in fields.items()}
    stop = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != stop:
            raise damaged(path, f"`{brief_name(name)}` to begin at {stop}, where the previous one ends", f"{tensor.start}")
        stop = tensor.stop
    if stop != size - 8 - length:
        raise damaged(path, f"{stop} bytes of tensors, as the header says", f"{size - 8 - length}")
    content = np.memmap(path, np.uint8, mode="r") if isinstance(path, Path) else StoredArray.of(path, size)
    data: Any = content[8 + length :]
    return {name: data[each.start : each.stop].view(each.dtype).reshape(each.shape) for name, each in tensors.items()}
