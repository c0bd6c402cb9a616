"""One safetensors file: its layout, a writer from the first byte to the last, and a reader of slices.

`_tree_files` writes one from several processes, `_reader` loads a PyTree's leaves onto a mesh.

`safetensors.numpy.save_file` (0.8) silently writes arrays that are not C-contiguous in the wrong order, keeps the whole file
in memory and never fsyncs. Here every offset is computed before the first byte is written, so one tensor is in memory.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import array_leaves
from ..errors import brief, brief_name, damaged, is_size, parse_json
from ..storage import Location, StoredArray, StorePath, View, read_chunks, write_new
from ._shards import as_stored, held, shape_in_file

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
_MAX_HEADER = 10**8  # bytes; the limit of the safetensors library
_MAX_DIMS = 64  # NumPy's limit


# --- leaves ---------------------------------------------------------------------------------------------------------


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def to_host(leaf: Any) -> np.ndarray:
    """Returns the complete leaf in host memory, C-contiguous. A JAX array must be fully addressable."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf, order="C")
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(
            f"`array`: expected one that this process holds whole, got parts of {leaf.dtype} {leaf.shape}. Gather it first: "
            "`jax.experimental.multihost_utils.process_allgather(model, tiled=True)`."
        )
    return held(as_stored(leaf)).values()


# --- one file -------------------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor's dtype and shape, and its bytes `[start, stop)`, counted from the end of the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def check_savable(trees: Iterable[Any], float_dtype: Any = None) -> None:
    """Raises TypeError for a leaf of a dtype that safetensors lacks, such as complex128, before it is trained."""
    for tree in trees:
        for name, leaf in array_leaves(tree).items():
            # A NumPy array becomes one of JAX, which has 32 bits unless JAX may hold more.
            _spec_of(name, jax.eval_shape(jnp.asarray, leaf) if isinstance(leaf, np.ndarray) else leaf, float_dtype)


def _spec_of(name: str, leaf: Any, float_dtype: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Returns the dtype and the shape of a leaf in a file."""
    shape, dtype = shape_in_file(leaf)
    dtype = np.dtype(float_dtype if float_dtype is not None and is_float(dtype) else dtype)
    if dtype not in _CODES:
        known = ", ".join(map(str, _CODES))
        raise TypeError(f"`{name}`: expected a dtype that safetensors has ({known}), got {dtype}. Cast it first.")
    return dtype, shape


def header_of(
    leaves: Mapping[str, Any], float_dtype: Any, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Tensor], int]:
    """Returns header, ordered tensors and file size. They depend only on shapes and dtypes: all processes agree."""
    if float_dtype is not None and not is_float(np.dtype(float_dtype)):
        raise ValueError(f"`float_dtype`: expected a floating dtype, got {np.dtype(float_dtype)}. Pass None to cast none.")
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, leaf in leaves.items():
        if name == "__metadata__":
            raise ValueError("`__metadata__`: expected another name, got the one that safetensors keeps. Rename it.")
        specs[name] = _spec_of(name, leaf, float_dtype)
    tensors: dict[str, Tensor] = {}
    stop = 0
    # The widest dtype first, so that each tensor is aligned: safetensors allows no gaps.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        tensors[name] = Tensor(dtype, shape, start, stop)
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    fields |= {
        name: {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [tensor.start, tensor.stop]}
        for name, tensor in tensors.items()
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, tensors, 8 + len(text) + stop


def chunks_of(flat: np.ndarray, dtype: np.dtype) -> Iterator[memoryview]:
    """Yields the bytes of a one-dimensional array, cast to a dtype, in pieces."""
    n = CHUNK // dtype.itemsize
    for start in range(0, flat.size, n):
        yield flat[start : start + n].astype(dtype, copy=False).view(np.uint8).data


def check_arrays(leaves: Mapping[str, Any], float_dtype: Any = None) -> None:
    """Raises TypeError for a leaf that is only a shape, or cannot be stored."""
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"`{name}`: expected an array, got only its shape {leaf}. Create the arrays, then save.")
    header_of(leaves, float_dtype)


def file_size(leaves: Mapping[str, Any], float_dtype: Any = None) -> int:
    """Returns the bytes of the file that `write_tensors` would write; raises the same errors for dtypes. Accepts shapes."""
    return header_of(leaves, float_dtype)[2]


def write_tensors(
    path: Location, leaves: Mapping[str, Any], float_dtype: Any = None, metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Writes arrays by name to one safetensors file; returns its `{"size": bytes, "crc32": checksum}`.

    Writes from the first byte to the last, which any file system supports, and keeps one tensor at a time in host memory.
    The file is fsynced, but not committed atomically: `CheckpointManager.save` does that. An object appears when complete.

    **Arguments:**

    - `leaves`: JAX arrays (however sharded), NumPy arrays, typed PRNG keys, which are stored as their key data, or anything
        with `shape`, `dtype` and `__array__`, which is called when the tensor is written.
    - `float_dtype`: the dtype to which floating leaves are cast; others are never cast.

    Raises TypeError for a leaf whose dtype safetensors cannot store, OSError if the disk is full or the store refuses.
    """
    check_arrays(leaves)
    header, tensors, size = header_of(leaves, float_dtype, metadata)
    crc32 = 0

    def content() -> Iterator[memoryview | bytes]:
        nonlocal crc32
        crc32 = zlib.crc32(header)
        yield header
        for name, tensor in tensors.items():
            for chunk in chunks_of(to_host(leaves[name]).reshape(-1), tensor.dtype):
                crc32 = zlib.crc32(chunk, crc32)
                yield chunk

    if isinstance(path, StorePath):
        path.upload(content, size)
        return {"size": size, "crc32": crc32}
    write_new(path, content())
    return {"size": size, "crc32": crc32}


def _parsed(path: Location, name: str, field: Any) -> Tensor:
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
    return Tensor(DTYPES[code], tuple(shape), start, stop)


def open_tensors(path: Location) -> dict[str, View]:
    """Returns the tensors of any safetensors file, by name, as views that read only what is accessed: NumPy's, or in a store
    `StoredArray`s. Their dtypes may be JAX's extensions.

    Raises DamagedError if the header is not a safetensors header, or contradicts itself or the file's size.
    """
    size = path.stat().st_size
    if size < 8:
        raise damaged(path, "at least the 8 bytes of a header's length", f"{size} bytes")
    # Without a mapping: if the disk fails, a mapping kills the process without an exception.
    (length,) = struct.unpack("<Q", b"".join(read_chunks(path, 0, 8)))
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise damaged(path, f"a header of 2 to {min(size - 8, _MAX_HEADER)} bytes", f"a length of {length}")
    try:
        fields = parse_json(b"".join(read_chunks(path, 8, 8 + length)))
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
