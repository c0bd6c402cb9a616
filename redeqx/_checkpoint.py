"""Checkpoints: PyTrees of arrays as safetensors files, written so that a crash leaves the old one or the new one.

Owns the file (a safetensors writer and reader), the folder of one checkpoint and its checksums, the index that names
checkpoints, and what is pruned. What a run puts into its record, when it saves and how it resumes is the Trainer's.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, whole, however it was sharded
                        optimizer.safetensors
                        trainer.json         the record, with size and crc32 of each file

The writer is our own because `safetensors.numpy.save_file` (0.8) writes arrays that are not C-contiguous in the wrong
order, without an error, holds the whole file in memory and never fsyncs. This one knows every offset before the first
byte: it holds one tensor at a time, and each process of several could write its own shards in place.

A checkpoint is written into a folder of another name, fsynced file by file, and renamed; the index follows in the same
way; only then is anything removed, and that under another name too. So whatever is called `step_*` is complete.
"""

import errno
import json
import math
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from ._paths import is_array_like, map_named, named_leaves, nearest

FORMAT = "redeqx"
VERSION = 1
READABLE_VERSIONS = (1,)

# Every dtype that safetensors can name and numpy can hold, but the packed ones of 4 and 6 bits.
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

_INDEX = "index.json"
_RECORD = "trainer.json"
_TMP = ".tmp_"
_RESERVED = ("format", "version", "files", "crc32")  # what a record says of itself
_NAME = re.compile(r"step_(\d{8,})(?:_(\d+))?")
_CHUNK = 2**24  # bytes written at once: casts and checksums need that much more memory, whatever the tensor's size
_MAX_HEADER = 10**8  # bytes; the limit of the safetensors library
_MAX_PROBLEMS = 10  # tensors named by one error


# --- leaves ---------------------------------------------------------------------------------------------------------


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, which is stored as its key data."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _stored(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a leaf as a file holds it."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tuple(leaf.shape), leaf.dtype


def _arrays(tree: PyTree) -> dict[str, Any]:
    return {name: leaf for name, leaf in named_leaves(tree).items() if is_array_like(leaf)}


def _to_host(leaf: Any) -> np.ndarray:
    """The whole leaf in this process's memory, C-contiguous."""
    if isinstance(leaf, jax.Array):
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        # A fresh array over the same shards: the host copy that `np.asarray` makes stays with the array that it was asked
        # of, and with the tree's own arrays that would pile up a second model on the host.
        shards = [shard.data for shard in leaf.addressable_shards]
        leaf = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    return np.ascontiguousarray(leaf)


def _damaged(path: Path, rule: str, got: str) -> ValueError:
    return ValueError(f"`{path}`: expected {rule}, got {got}. The file is damaged or unfinished: load another checkpoint.")


# --- one file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """What one tensor is, and where: bytes `[start, stop)`, counted from the end of the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def _layout(leaves: Mapping[str, Any], float_dtype: Any) -> tuple[bytes, dict[str, _Tensor], int]:
    """The header, the tensors in the file's order, and the file's size, from shapes and dtypes alone: every process that
    asks gets the same answer."""
    if float_dtype is not None and not _is_float(np.dtype(float_dtype)):
        raise ValueError(f"`float_dtype`: expected a floating dtype, got {np.dtype(float_dtype)}. Pass None to cast none.")
    specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"`{name}`: expected an array, got only its shape {leaf}. Create the arrays, then save.")
        if name == "__metadata__":
            raise ValueError("`__metadata__`: expected another name, got the one that safetensors keeps. Rename it.")
        shape, dtype = _stored(leaf)
        dtype = np.dtype(float_dtype if float_dtype is not None and _is_float(dtype) else dtype)
        if dtype not in _CODES:
            known = ", ".join(map(str, _CODES))
            raise TypeError(f"`{name}`: expected a dtype that safetensors has ({known}), got {dtype}. Cast it first.")
        specs[name] = dtype, shape
    tensors: dict[str, _Tensor] = {}
    stop = 0
    # The widest first, so that each tensor is aligned to its items: safetensors allows no gap between two.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        tensors[name] = _Tensor(dtype, shape, start, stop)
    fields = {
        name: {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [tensor.start, tensor.stop]}
        for name, tensor in tensors.items()
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, tensors, 8 + len(text) + stop


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def write_tensors(path: Path, leaves: Mapping[str, Any], float_dtype: Any = None) -> dict[str, int]:
    """Writes arrays by name as one safetensors file, and returns its `{"size": bytes, "crc32": checksum}`.

    The host holds one whole tensor at a time. The file is fsynced but not put in place atomically: that is what
    `Checkpoints.save` does.

    **Arguments:**

    - `leaves`: JAX arrays (however sharded), numpy arrays, or typed PRNG keys, which are stored as their key data.
    - `float_dtype`: the dtype to which floating leaves are cast; others are never cast.

    Raises TypeError for a leaf whose dtype safetensors cannot store, OSError where the disk is full.
    """
    header, tensors, size = _layout(leaves, float_dtype)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(fd, 0, size)  # a full disk says so here, before any work
        _pwrite(fd, memoryview(header)[8:], 8)
        crc32 = zlib.crc32(header)
        for name, tensor in tensors.items():
            flat = _to_host(leaves[name]).reshape(-1)
            offset, step = len(header) + tensor.start, _CHUNK // tensor.dtype.itemsize
            for start in range(0, flat.size, step):
                chunk = flat[start : start + step].astype(tensor.dtype, copy=False).view(np.uint8).data
                _pwrite(fd, chunk, offset)
                crc32 = zlib.crc32(chunk, crc32)
                offset += len(chunk)
        # The header's length comes last: until then the file says that its header is empty, and no reader takes it.
        _pwrite(fd, memoryview(header)[:8], 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"size": size, "crc32": crc32}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that occurs twice")
    return fields


def _parse(path: Path, name: str, field: Any) -> _Tensor:
    match field:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise _damaged(path, f"`{name}` to have dtype, shape and data_offsets", f"{field}")
    if code not in DTYPES:
        raise _damaged(path, f"`{name}` to be one of {', '.join(DTYPES)}", code)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise _damaged(path, f"`{name}` to have a shape of sizes", f"{shape}")
    n_bytes = math.prod(shape) * DTYPES[code].itemsize
    if stop - start != n_bytes:
        raise _damaged(path, f"`{name}` to take {n_bytes} bytes, as {code} {shape} does", f"{stop - start}")
    return _Tensor(DTYPES[code], tuple(shape), start, stop)


class TensorFile:
    """A safetensors file, its header read and checked, whose tensors are read slice by slice."""

    def __init__(self, path: Path):
        """**Arguments:**

        - `path`: any safetensors file, also another library's.

        Raises ValueError where the header is no safetensors header, or disagrees with itself or with the file's size.
        """
        self.path = path
        size = path.stat().st_size
        if size < 8:
            raise _damaged(path, "at least the 8 bytes of a header's length", f"{size} bytes")
        content = np.memmap(path, dtype=np.uint8, mode="r")
        (length,) = struct.unpack("<Q", content[:8].tobytes())
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise _damaged(path, f"a header of 2 to {min(size - 8, _MAX_HEADER)} bytes", f"a length of {length}")
        try:
            fields = json.loads(content[8 : 8 + length].tobytes(), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
            raise _damaged(path, "a header of JSON", str(error)) from error
        if not isinstance(fields, dict):
            raise _damaged(path, "a header that is a JSON object", f"a {type(fields).__name__}")
        fields.pop("__metadata__", None)
        self._data = content[8 + length :]
        self._tensors = {name: _parse(path, name, field) for name, field in fields.items()}
        stop = 0
        for name, tensor in sorted(self._tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
            if tensor.start != stop:
                raise _damaged(path, f"`{name}` to begin at {stop}, where the one before ends", f"{tensor.start}")
            stop = tensor.stop
        if stop != self._data.size:
            raise _damaged(path, f"{stop} bytes of tensors, as the header says", f"{self._data.size}")

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the header's order."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        """A tensor's dtype, as numpy (with JAX's extensions) names it."""
        return self._tensor(name).dtype

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """A tensor, or what `index` (as for `numpy.ndarray`) selects from it, as a copy; nothing else is read.

        Raises ValueError where the file has no tensor of that name.
        """
        tensor = self._tensor(name)
        # A copy: JAX on CPU would otherwise share the file's pages, and follow whatever happens to the file.
        return np.array(self._data[tensor.start : tensor.stop].view(tensor.dtype).reshape(tensor.shape)[index])

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise ValueError(
                f"`{self.path}`: expected one of its {len(self._tensors)} tensors, got `{name}`."
                f"{nearest(name, self._tensors)} `names` lists them."
            )
        return self._tensors[name]


def _mismatches(file: TensorFile, wanted: Mapping[str, Any]) -> list[str]:
    """What keeps a file's tensors from being the wanted leaves, one line for each."""
    there = set(file.names)
    missing = [name for name in wanted if name not in there]
    extra = [name for name in file.names if name not in wanted]
    lines = []
    for name in missing:
        shape, dtype = _stored(wanted[name])
        lines.append(f"`{name}`: expected {dtype} {shape}, got none.{nearest(name, extra)}")
    for name in extra:
        got = f"{file.dtype(name)} {file.shape(name)}"
        lines.append(f"`{name}`: expected no tensor of this name, got {got}.{nearest(name, missing)}")
    for name, leaf in wanted.items():
        if name in there:
            (shape, dtype), got = _stored(leaf), (file.shape(name), file.dtype(name))
            if shape != got[0] or (dtype != got[1] and not (_is_float(dtype) and _is_float(got[1]))):
                lines.append(f"`{name}`: expected {dtype} {shape}, got {got[1]} {got[0]}.")
    return lines


def load_tree(
    path: Path,
    template: PyTree,
    shardings: Callable[[str], Sharding] | None = None,
    what: str = "model",
) -> PyTree:
    """The template with its arrays read from a safetensors file; each device reads only its own slices.

    **Arguments:**

    - `path`: the file.
    - `template`: a PyTree whose array leaves give names, shapes and dtypes: JAX arrays, typed PRNG keys,
        `jax.ShapeDtypeStruct`s, or numpy arrays, which stay numpy arrays. A floating tensor is cast to the template's
        floating dtype. Leaves that are no arrays are handed on as they are.
    - `shardings`: from a leaf's name to its sharding; by default the leaf's own, if it has one.
    - `what`: what errors call the template.

    Raises ValueError that names the tensors that are missing, extra, of another shape or of another kind of dtype.
    """
    file = TensorFile(path)
    lines = _mismatches(file, _arrays(template))
    if lines:
        more = [f"and {len(lines) - _MAX_PROBLEMS} more"] if len(lines) > _MAX_PROBLEMS else []
        listed = "\n  - ".join(lines[:_MAX_PROBLEMS] + more)
        raise ValueError(
            f"`{path}`: expected the tensors of this {what}, got {len(lines)} that differ:\n  - {listed}\n"
            f"Build the {what} that was saved, or load the checkpoint of this one."
        )

    def restore(name: str, leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        shape, dtype = _stored(leaf)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return file.read(name).astype(dtype, copy=False)
        sharding = leaf.sharding if shardings is None else shardings(name)
        if sharding is None:
            array = jnp.asarray(file.read(name).astype(dtype, copy=False))
        else:
            # A key's sharding serves its data too: the one dim that data have more comes last, and is whole.
            array = jax.make_array_from_callback(
                shape, sharding, lambda index: file.read(name, index).astype(dtype, copy=False)
            )
        if array.dtype != dtype:
            raise ValueError(f"`{name}`: expected {dtype}, got {array.dtype} from JAX. Set `jax_enable_x64` to load it.")
        if _is_key(leaf):
            # `key_impl` wants an array, where the template may hold only a shape.
            return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), leaf.dtype)))
        return array

    return map_named(restore, template)


# --- the folder of checkpoints --------------------------------------------------------------------------------------


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise _damaged(path, "a JSON object", repr(value))
    return value


def _crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _record_crc32(record: Mapping[str, Any]) -> int:
    """The checksum that a record carries of itself: of its JSON in sorted order, so that white space is free."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _order(name: str) -> tuple[int, int]:
    """`(step, how many of that step came before)` from a checkpoint's name, `(-1, 0)` from any other."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


class Checkpoints:
    """The checkpoints of one run, in one folder; written by one process at a time, read by any number."""

    def __init__(self, folder: Path):
        """**Arguments:**

        - `folder`: made by the first save.
        """
        self.folder = folder

    def index(self) -> dict[str, str]:
        """The name of the checkpoint that each tag (`"last"`, ...) stands for."""
        path = self.folder / _INDEX
        index = _read_json(path) if path.exists() else {}
        for tag, name in index.items():
            if not isinstance(name, str):
                raise ValueError(f"`{path}`: expected the name of a checkpoint for {tag!r}, got {name!r}. Correct it.")
        return index

    def names(self) -> list[str]:
        """The names of the checkpoints that are there, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_order)

    def resolve(self, which: str | Path) -> Path:
        """The folder of a checkpoint.

        **Arguments:**

        - `which`: a tag of the index, the name of a checkpoint, or the path of one, here or elsewhere.

        Raises ValueError that lists what there is.
        """
        index, names = self.index(), self.names()
        name = index.get(str(which), str(which))
        if name in names:
            return self.folder / name
        if (Path(which) / _RECORD).is_file():
            return Path(which)
        known = [*index, *names]
        listed = f"one of {', '.join(known)}" if known else "a checkpoint, of which there are none yet"
        raise ValueError(
            f"`{self.folder}`: expected {listed}, or the path of a checkpoint, got {str(which)!r}."
            f"{nearest(str(which), known)} Pass one of those."
        )

    def record(self, path: Path) -> dict[str, Any]:
        """What `save` was given as `record`, once size and checksum of each of the checkpoint's files are found right.

        Raises ValueError where the checkpoint is of an unknown version, or a file is missing, truncated or altered.
        """
        file = path / _RECORD
        if not file.is_file():
            raise ValueError(f"`{path}`: expected the folder of a checkpoint, got none with a {_RECORD}. Pass one.")
        record = _read_json(file)
        if record.get("format") != FORMAT:
            raise ValueError(
                f"`{file}`: expected the record of a {FORMAT} checkpoint, got another file. Pass the path of one."
            )
        if (version := record.get("version")) not in READABLE_VERSIONS:
            raise ValueError(
                f"`{file}`: expected version {' or '.join(map(str, READABLE_VERSIONS))}, which this release "
                f"reads, got {version}. Install the release of {FORMAT} that wrote it, or a later one."
            )
        if (crc32 := record.pop("crc32", None)) != _record_crc32(record):
            raise _damaged(file, f"a record of crc32 {crc32}", str(_record_crc32(record)))
        for name, expected in record["files"].items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected["size"]:
                raise _damaged(file, f"{expected['size']} bytes", "no file" if size is None else str(size))
            if (crc32 := _crc32(file)) != expected["crc32"]:
                raise _damaged(file, f"crc32 {expected['crc32']}", str(crc32))
        return {key: value for key, value in record.items() if key not in _RESERVED}

    def load(self, path: Path, kind: str, template: PyTree, shardings: Callable[[str], Sharding] | None = None) -> PyTree:
        """`load_tree` of one of a checkpoint's trees; `record` is what verifies the checksums.

        **Arguments:**

        - `kind`: `"model"`, `"optimizer"` or `"model_state"`.

        Raises ValueError where the checkpoint has no such tree, or not one like the template.
        """
        file = path / f"{kind}.safetensors"
        if not file.is_file():
            there = ", ".join(sorted(other.stem for other in path.glob("*.safetensors")))
            raise ValueError(f"`{path}`: expected one of {there}, got {kind!r}. Save it, or load without it.")
        return load_tree(file, template, shardings, what=kind)

    def save(
        self,
        step: int,
        trees: Mapping[str, PyTree],
        record: Mapping[str, Any],
        tags: Sequence[str] = ("last",),
        keep_last: int = 2,
        float_dtype: Any = None,
    ) -> Path:
        """Writes a checkpoint, points the tags at it, then prunes; returns its folder.

        Killed at any moment, it leaves the index naming complete checkpoints: the old ones, or the new one.

        **Arguments:**

        - `step`: optimizer updates done so far.
        - `trees`: `"model"`, `"optimizer"` and whatever else: each becomes a file of its array leaves.
        - `record`: what JSON can hold, for `trainer.json`; `format`, `version`, `files` and `crc32` are taken.
        - `tags`: what the index shall call it.
        - `keep_last`: how many of the newest checkpoints stay, besides those that the index names.
        - `float_dtype`: the dtype to which the model's floating leaves are cast. The other trees keep theirs.

        Raises OSError where the disk has not enough room, with the bytes needed and free; TypeError for a leaf or a
        record that cannot be stored. Either way the checkpoints that were there stay as they were.
        """
        if keep_last < 0:
            raise ValueError(f"`keep_last`: expected at least 0, got {keep_last}. Pass how many checkpoints shall stay.")
        try:
            # There and back, so that the checksum is of what a reader will see: keys are strings, tuples are lists.
            plain = json.loads(json.dumps(record))
        except (TypeError, ValueError) as error:
            raise TypeError(f"`record`: expected what JSON can hold, got {error}. Convert it before saving.") from error
        assert not set(_RESERVED) & plain.keys()
        files = {kind: (_arrays(tree), float_dtype if kind == "model" else None) for kind, tree in trees.items()}
        needed = sum(_layout(leaves, dtype)[2] for leaves, dtype in files.values())
        index = self.index()

        self.folder.mkdir(parents=True, exist_ok=True)
        _fsync_folder(self.folder.parent)
        self._sweep()
        # A checkpoint that the index names is never touched; another one of this step is a crash's debris.
        taken = [repeat for other, repeat in map(_order, index.values()) if other == step]
        repeat = 1 + max(taken, default=-1)
        target = self.folder / (f"step_{step:08d}" + (f"_{repeat}" if repeat else ""))
        for name in self.names():
            if _order(name)[0] == step and _order(name)[1] >= repeat:
                self._remove(name)

        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC, f"expected {needed} bytes free, got {free}. Make room, or save elsewhere", str(target)
            )
        tmp = self.folder / f"{_TMP}{target.name}"
        try:
            tmp.mkdir()
            sums = {f"{kind}.safetensors": write_tensors(tmp / f"{kind}.safetensors", *files[kind]) for kind in files}
            full = {**plain, "format": FORMAT, "version": VERSION, "files": sums}
            _write_json(tmp / _RECORD, {**full, "crc32": _record_crc32(full)})
            _fsync_folder(tmp)
            os.rename(tmp, target)
            _fsync_folder(self.folder)
            new_index = self.folder / f"{_TMP}{_INDEX}"
            _write_json(new_index, {**index, **dict.fromkeys(tags, target.name)})
            os.replace(new_index, self.folder / _INDEX)
            _fsync_folder(self.folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"expected to write {needed} bytes, got {error.strerror!r} with {free} bytes free at first. Earlier "
                "checkpoints are whole. Make room, or save elsewhere",
                str(target),
            ) from error
        finally:
            self._sweep()

        kept = {*self.index().values(), *self.names()[-keep_last:][:keep_last]}
        for name in self.names():
            if name not in kept:
                self._remove(name)
        return target

    def _sweep(self) -> None:
        """Removes what an unfinished save or removal has left."""
        for path in self.folder.glob(f"{_TMP}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _remove(self, name: str) -> None:
        # Under another name first, so that killed halfway it leaves no folder that looks like a checkpoint.
        doomed = self.folder / f"{_TMP}{name}"
        os.rename(self.folder / name, doomed)
        shutil.rmtree(doomed)
