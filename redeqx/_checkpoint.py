"""Checkpoints: folders of safetensors files, written so that a crash leaves the old one or the new one.

Owns the folder of one checkpoint and its checksums, the index that names checkpoints, and what is pruned. The files are
`_safetensors`; what a run puts into its record, when it saves and how it resumes is the Trainer's.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, whole, however it was sharded
                        optimizer.safetensors
                        trainer.json         the record, with size and crc32 of each file

A checkpoint is written into a folder of another name, fsynced file by file, and renamed; the index follows in the same
way; only then is anything removed, and that under another name too. So whatever is called `step_*` is complete.

Of several processes each writes its own shards into the same files, on a file system that all of them see; process 0 makes
the folder and the files, and puts them in place once all have written. What one of them cannot do, all of them raise.
"""

import errno
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Sharding
from jaxtyping import PyTree

from ._crc32 import Crc32, crc32_of
from ._paths import nearest
from ._peers import Peers
from ._safetensors import (
    CHUNK,
    Writer,
    array_leaves,
    brief,
    brief_name,
    damaged,
    is_plain,
    is_size,
    load_json,
    load_tree,
    need_arrays,
)
from ._shards import Block, own_blocks

FORMAT = "redeqx"
VERSION = 1
READABLE_VERSIONS = (1,)

_INDEX = "index.json"
_RECORD = "trainer.json"
_TMP = ".tmp_"
_MAX_KNOWN = 50  # names of checkpoints listed by one error
_RESERVED = ("format", "version", "files", "crc32")  # what a record says of itself
_NAME = re.compile(r"step_([0-9]{8,18})(?:_([0-9]{1,18}))?")


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
        value = load_json(path)
    except ValueError as error:
        raise damaged(path, "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise damaged(path, "a JSON object", brief(value))
    return value


def _leads_out(path: Path) -> bool:
    """Whether an entry of a folder is a link to somewhere outside of that folder: a save leaves no links."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def _own(path: Path) -> Path:
    """An entry of a folder of ours. Raises ValueError where it is a link that leads out of the folder."""
    if _leads_out(path):
        raise ValueError(
            f"`{path}`: expected what a save left there, got a link to {os.path.realpath(path)}. Put a copy in its place, "
            "or pass the path of a checkpoint elsewhere."
        )
    return path


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _crc32(path: Path, start: int, stop: int) -> Crc32:
    """Of the bytes `[start, stop)` of a file."""
    crc32 = Crc32()
    with open(path, "rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
            crc32.add(chunk, start)
            start += len(chunk)
    return crc32


def _record_crc32(record: Mapping[str, Any]) -> int:
    """The checksum that a record carries of itself: of its JSON in sorted order, so that white space is free."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _files(path: Path, record: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Size and checksum of each file beside a record, by its name."""
    files = record.get("files")
    if not isinstance(files, dict):
        raise damaged(path, "`files` by name", brief(files))
    for name, sums in files.items():
        if not is_plain(name):
            raise damaged(path, "names of files in its folder", brief(name))
        match sums:
            case {"size": size, "crc32": crc32} if is_size(size) and is_size(crc32):
                pass
            case _:
                raise damaged(path, f"size and crc32 of {brief(name)}", brief(sums))
    return files


def _order(name: str) -> tuple[int, int]:
    """`(step, how many of that step came before)` from a checkpoint's name, `(-1, 0)` from any other."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


@dataclass(frozen=True)
class _Save:
    """One checkpoint to be written: all that is known before the first byte."""

    step: int
    name: str
    index: dict[str, str]  # as it was before
    tags: Sequence[str]
    keep_last: int
    record: dict[str, Any]
    files: dict[str, Writer]
    blocks: dict[str, dict[str, list[Block]]]
    free: int

    @property
    def needed(self) -> int:
        return sum(file.size for file in self.files.values())


class Checkpoints:
    """The checkpoints of one run, in one folder; written by one run at a time, read by any number."""

    def __init__(self, folder: Path, peers: Peers | None = None):
        """**Arguments:**

        - `folder`: made by the first save.
        - `peers`: the processes that write and read together: each makes the same calls in the same order.
        """
        self.folder = folder
        self._has_place = folder.parent.is_dir()  # and so must have it at every save
        self._peers = peers or Peers()
        self._is_shared = self._peers.n == 1  # whether it is known that all processes see the folder
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the save in the background

    def index(self) -> dict[str, str]:
        """The name of the checkpoint that each tag (`"last"`, ...) stands for."""
        path = self.folder / _INDEX
        index = _read_json(_own(path)) if os.path.lexists(path) else {}
        for tag, name in index.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ValueError(
                    f"`{path}`: expected the name of a checkpoint for {brief(tag)}, got {brief(name)}. Correct it."
                )
        return index

    def names(self) -> list[str]:
        """The names of the checkpoints that are there, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_order)

    def newest(self) -> list[Path]:
        """The folders of the checkpoints to go on from, the one that the index calls last first, then older ones; in every
        process as process 0 finds them."""

        def found() -> list[str]:
            last = self.index().get("last")
            if last is None:
                return []
            _own(self.folder / last)
            older = [name for name in reversed(self.names()) if _order(name) < _order(last)]
            return [last, *(name for name in older if not _leads_out(self.folder / name))]

        return [self.folder / name for name in self._together("newest", found, alone=True)[0]]

    def resolve(self, which: str | Path) -> Path:
        """The folder of a checkpoint.

        **Arguments:**

        - `which`: a tag of the index, the name of a checkpoint, or the path of one, here or elsewhere.

        Raises ValueError that lists what there is.
        """
        index, names = self.index(), self.names()
        name = index.get(str(which), str(which))
        if name in names:
            return _own(self.folder / name)
        if (Path(which) / _RECORD).is_file():
            return Path(which)
        known = [*map(brief_name, index), *names]
        more = [f"{len(known) - _MAX_KNOWN} more"] if len(known) > _MAX_KNOWN else []
        listed = f"one of {', '.join(known[:_MAX_KNOWN] + more)}" if known else "a checkpoint, of which there are none yet"
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
        record = _read_json(_own(file))
        if record.get("format") != FORMAT:
            raise ValueError(
                f"`{file}`: expected the record of a {FORMAT} checkpoint, got another file. Pass the path of one."
            )
        if (version := record.get("version")) not in READABLE_VERSIONS:
            raise ValueError(
                f"`{file}`: expected version {' or '.join(map(str, READABLE_VERSIONS))}, which this release "
                f"reads, got {brief(version)}. Install the release of {FORMAT} that wrote it, or a later one."
            )
        crc32 = record.pop("crc32", None)
        try:
            own_crc32 = _record_crc32(record)
        except RecursionError as error:  # what can just be read may be too deep to be written again
            raise damaged(file, "a record that can be written again", str(error)) from error
        if crc32 != own_crc32:
            raise damaged(file, f"a record of crc32 {brief(crc32)}", str(own_crc32))
        n, me = self._peers.n, self._peers.index
        for name, expected in _files(file, record).items():
            file = _own(path / name)
            size = file.stat().st_size if file.is_file() else None
            # Each process reads its share of the file.
            shares = [] if size is None else [size * i // n for i in range(n + 1)]
            share = 0 if size is None else _crc32(file, shares[me], shares[me + 1]).contribution(size)
            found = self._peers.gather("verify", [size, share])
            sizes = [size for size, _ in found]
            if (size := next((size for size in sizes if size != expected["size"]), None)) or sizes[0] != expected["size"]:
                raise damaged(file, f"{expected['size']} bytes", "no file" if size is None else str(size))
            if (crc32 := crc32_of([share for _, share in found], expected["size"])) != expected["crc32"]:
                raise damaged(file, f"crc32 {expected['crc32']}", str(crc32))
        return {key: value for key, value in record.items() if key not in _RESERVED}

    def load(self, path: Path, kind: str, template: PyTree, shardings: Callable[[str], Sharding] | None = None) -> PyTree:
        """`load_tree` of one of a checkpoint's trees; `record` is what verifies the checksums.

        **Arguments:**

        - `kind`: `"model"`, `"optimizer"` or `"model_state"`.

        Raises ValueError where the checkpoint has no such tree, or not one like the template.
        """
        file = _own(path / f"{kind}.safetensors")
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
        then: Callable[[Path], None] | None = None,
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
        - `then`: for a save in the background, what to call with the folder once it is committed. It returns as soon as the
            arrays are copied to the host; a thread writes the copies, and `check` and `wait` raise what it raises. Without,
            it returns when all is on disk.

        Raises OSError where the disk has not enough room, with the bytes needed and free; TypeError for a leaf or a
        record that cannot be stored. Either way the checkpoints that were there stay as they were.
        """
        self.wait()
        if keep_last < 0:
            raise ValueError(f"`keep_last`: expected at least 0, got {keep_last}. Pass how many checkpoints shall stay.")
        try:
            # There and back, so that the checksum is of what a reader will see: keys are strings, tuples are lists.
            plain = json.loads(json.dumps(record))
        except (TypeError, ValueError) as error:
            raise TypeError(f"`record`: expected what JSON can hold, got {error}. Convert it before saving.") from error
        assert not set(_RESERVED) & plain.keys()
        leaves = {kind: array_leaves(tree) for kind, tree in trees.items()}
        for each in leaves.values():
            need_arrays(each)
        sizes = {kind: Writer(Path(), each, float_dtype if kind == "model" else None).size for kind, each in leaves.items()}
        name, free = self._together("save begins", lambda: self._begin(step, sum(sizes.values())), alone=True)[0]
        self._need_shared()
        tmp = self.folder / f"{_TMP}{name}"
        files = {
            f"{kind}.safetensors": Writer(tmp / f"{kind}.safetensors", each, float_dtype if kind == "model" else None)
            for kind, each in leaves.items()
        }
        blocks = {f"{kind}.safetensors": own_blocks(each) for kind, each in leaves.items()}
        if then is not None:
            blocks = {
                file: {name: [block.copied() for block in each] for name, each in by_name.items()}
                for file, by_name in blocks.items()
            }
        save = _Save(step, name, self.index(), tags, keep_last, plain, files, blocks, free)
        if then is None:
            self._write(save)
        else:
            self._thread = threading.Thread(target=self._write_behind, args=(save, then), name="redeqx-save")
            self._thread.start()
        return self.folder / name

    def check(self) -> None:
        """Raise what the save in the background has failed with, with its own traceback; else return at once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when the save in the background has ended; raises as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def settle(self) -> None:
        """As `wait`, where an error ends the run already; of several processes others may be gone: then nothing waits."""
        if self._thread is not None and self._peers.n == 1:
            self._thread.join()

    def _write_behind(self, save: _Save, then: Callable[[Path], None]) -> None:
        try:
            self._write(save)
            then(self.folder / save.name)
        except BaseException as error:  # handed to the thread that takes the steps
            self._error = error

    def _together(self, topic: str, act: Callable[[], Any], *, alone: bool = False) -> list[Any]:
        """What every process's `act()` returns (JSON), or process 0's alone; an OSError of one is raised by all."""
        value = error = None
        if not alone or self._peers.index == 0:
            try:
                value = act()
            except OSError as raised:
                error = raised
        given = [value, None if error is None else [error.errno, error.strerror or str(error), str(error.filename)]]
        found = self._peers.gather(topic, given)
        if error is not None:
            raise error
        for index, (_, problem) in enumerate(found):
            if problem is not None:
                raise OSError(problem[0], f"{problem[1]} (process {index})", problem[2])
        return [value for value, _ in found]

    def _begin(self, step: int, needed: int) -> tuple[str, int]:
        """Make room for a checkpoint of that step; its name, and the bytes that are free."""
        index = self.index()
        self._need_place()
        self.folder.mkdir(parents=True, exist_ok=True)
        _fsync_folder(self.folder.parent)
        self._sweep()
        # A checkpoint that the index names is never touched; another one of this step is a crash's debris.
        taken = [repeat for other, repeat in map(_order, index.values()) if other == step]
        repeat = 1 + max(taken, default=-1)
        name = f"step_{step:08d}" + (f"_{repeat}" if repeat else "")
        for other in self.names():
            if _order(other)[0] == step and _order(other)[1] >= repeat:
                self._remove(other)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"expected {needed} bytes free, got {free}. Make room, or save elsewhere",
                str(self.folder / name),
            )
        return name, free

    def _need_shared(self) -> None:
        """Raise OSError where some process does not see what process 0 writes here; asked once."""
        if self._is_shared:
            return
        probe = self.folder / f"{_TMP}probe"
        self._together("probe written", lambda: _write_json(probe, os.getpid()), alone=True)
        found = self._peers.gather("probe seen", probe.exists())
        self._together("probe removed", probe.unlink, alone=True)
        if not all(found):
            why = (
                f"expected a folder that all {self._peers.n} processes share, got one that process {found.index(False)} "
                "sees nothing in. Pass a `workdir` on a file system that every host mounts"
            )
            raise OSError(errno.ENOENT, why, str(self.folder))
        self._is_shared = True

    def _need_place(self) -> None:
        workdir = self.folder.parent
        if self._has_place and not workdir.is_dir():
            why = "expected the run's folder, which was there at its start, got none. Mount it again, or save elsewhere"
            raise OSError(errno.ENOENT, why, str(workdir))

    def _write(self, save: _Save) -> None:
        """The save itself: files of the full size, every process's blocks in them, then what makes it a checkpoint."""
        try:
            self._together("save created", lambda: self._create(save), alone=True)
            written = self._together(
                "save written", lambda: {name: f.write(save.blocks[name]) for name, f in save.files.items()}
            )
            self._together("save committed", lambda: self._commit(save, written), alone=True)
        except OSError as error:
            self._need_place()
            raise OSError(
                error.errno,
                f"expected to write {save.needed} bytes, got {error.strerror!r} with {save.free} bytes free at first. "
                "Earlier checkpoints are whole. Make room, or save elsewhere",
                str(self.folder / save.name),
            ) from error
        finally:
            if self._peers.index == 0:
                self._sweep()
        self._peers.committed = save.step
        self._together("save pruned", lambda: self._prune(save.keep_last), alone=True)

    def _create(self, save: _Save) -> None:
        (self.folder / f"{_TMP}{save.name}").mkdir()
        for file in save.files.values():
            file.create()

    def _commit(self, save: _Save, written: Sequence[Mapping[str, int]]) -> None:
        tmp = self.folder / f"{_TMP}{save.name}"
        sums = {name: file.finish([each[name] for each in written]) for name, file in save.files.items()}
        full = {**save.record, "format": FORMAT, "version": VERSION, "files": sums}
        _write_json(tmp / _RECORD, {**full, "crc32": _record_crc32(full)})
        _fsync_folder(tmp)
        os.rename(tmp, self.folder / save.name)
        _fsync_folder(self.folder)
        new_index = self.folder / f"{_TMP}{_INDEX}"
        _write_json(new_index, {**save.index, **dict.fromkeys(save.tags, save.name)})
        os.replace(new_index, self.folder / _INDEX)
        _fsync_folder(self.folder)

    def _prune(self, keep_last: int) -> None:
        kept = {*self.index().values(), *self.names()[-keep_last:][:keep_last]}
        for name in self.names():
            if name not in kept:
                self._remove(name)

    def _sweep(self) -> None:
        """Removes what an unfinished save or removal has left."""
        for path in self.folder.glob(f"{_TMP}*"):
            _delete(path)

    def _remove(self, name: str) -> None:
        # Under another name first, so that killed halfway it leaves no folder that looks like a checkpoint.
        doomed = self.folder / f"{_TMP}{name}"
        os.rename(self.folder / name, doomed)
        _delete(doomed)
