"""Checkpoints: folders of safetensors files, written so that a crash leaves the old one or the new one.

Owns the folder of one checkpoint and its checksums, the index that names checkpoints, and what is pruned. The files are
`_safetensors`; what a run puts into its record, when it saves and how it resumes is the Trainer's.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, whole, however it was sharded
                        optimizer.safetensors
                        trainer.json         the record, with size and crc32 of each file

A checkpoint is written into a folder of another name, fsynced file by file, and renamed; the index follows in the same
way; only then is anything removed, and that under another name too. So whatever is called `step_*` is complete.
"""

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Sharding
from jaxtyping import PyTree

from ._paths import nearest
from ._safetensors import CHUNK, array_leaves, damaged, file_size, load_tree, need_arrays, write_tensors

FORMAT = "redeqx"
VERSION = 1
READABLE_VERSIONS = (1,)

_INDEX = "index.json"
_RECORD = "trainer.json"
_TMP = ".tmp_"
_RESERVED = ("format", "version", "files", "crc32")  # what a record says of itself
_NAME = re.compile(r"step_(\d{8,})(?:_(\d+))?")


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
        raise damaged(path, "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise damaged(path, "a JSON object", repr(value))
    return value


def _crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
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
            raise damaged(file, f"a record of crc32 {crc32}", str(_record_crc32(record)))
        for name, expected in record["files"].items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected["size"]:
                raise damaged(file, f"{expected['size']} bytes", "no file" if size is None else str(size))
            if (crc32 := _crc32(file)) != expected["crc32"]:
                raise damaged(file, f"crc32 {expected['crc32']}", str(crc32))
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
        files = {kind: (array_leaves(tree), float_dtype if kind == "model" else None) for kind, tree in trees.items()}
        for leaves, _ in files.values():
            need_arrays(leaves)
        needed = sum(file_size(leaves, dtype) for leaves, dtype in files.values())
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
