"""The folder of a run's checkpoints: saving, loading, the index, and pruning.

`_manifest` owns the manifest in each checkpoint, `_layouts` and `_safetensors` the other files. The trainer decides what a
record contains, when to save, and how to resume.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, unsharded
                        optimizer.safetensors
                        trainer.json         the manifest: the record, with size and crc32 of each file

If several processes cannot write one file (`_layouts`), there are `model-00001-of-00002.safetensors` and so on, and
`model.safetensors.index.json`. If they share no folder, each has its own part of a checkpoint, under the same name, and all
parts are complete before any index names it.

A checkpoint is written into a folder of another name, each file is fsynced, and the folder is renamed. The index is replaced
in the same way. Only then are old checkpoints removed, and they are renamed first. So every folder `step_*` is complete.

Each of several processes writes its own part; process 0 creates the folder, and renames it after all have written. If one
process fails, all raise its error.
"""

import errno
import gc
import json
import os
import re
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Sharding
from jaxtyping import PyTree

from .._tree import listed, nearest
from ..distributed import Peers
from ..errors import DamagedError, brief, brief_name, check_count
from ._layouts import Capabilities, FileEach, InPlace, Layout, probe
from ._lock import Lock, LockedError
from ._manifest import (
    MANIFEST,
    RESERVED,
    TENSORS,
    TMP,
    Manifest,
    agree_on_manifest,
    agreed,
    leads_out,
    own,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)
from ._reader import INDEX, TensorReader, check_tree, load_tree
from ._safetensors import TensorFile, array_leaves, file_size, need_arrays

_INDEX = "index.json"
_MAX_KNOWN = 50  # names of checkpoints that one error lists
_NAME = re.compile(r"step_([0-9]{8,18})(?:_([0-9]{1,18}))?")


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _order(name: str) -> tuple[int, int]:
    """`(step, number of earlier checkpoints of that step)` from a checkpoint's name, `(-1, 0)` from any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


@dataclass(frozen=True)
class _Save:
    """One checkpoint to write: everything that is known before the first byte."""

    step: int
    name: str
    index: dict[str, str]  # before this save
    tags: Sequence[str]
    keep_last: int
    record: dict[str, Any]
    layout: Layout
    free: int


# By the folder's real path, the object of this process that writes into it, or was the last to do so.
_owners: "weakref.WeakValueDictionary[str, Checkpoints]" = weakref.WeakValueDictionary()


class Checkpoints:
    """The checkpoints of one run, in one folder. One run at a time writes into it, any number may read."""

    def __init__(
        self,
        folder: Path,
        peers: Peers | None = None,
        log: Callable[[str], None] = lambda text: None,
        run: Any = None,
    ):
        """**Arguments:**

        - `folder`: created by the first save.
        - `peers`: the processes that write and read together. Each makes the same calls in the same order.
        - `log`: called, once, with what the folder's file system does not support.
        - `run`: an object that all trainers of one run share. Only one of them may write into a folder.
        """
        self.folder = folder
        self._has_place = folder.parent.is_dir()  # then every save needs it
        self._peers = peers or Peers()
        self._log = log
        self._capabilities: Capabilities | None = None  # tested by the first save
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the save in the background
        self._run = run
        self._lock: Lock | None = None  # of process 0
        self._is_claimed = False  # the folder is this object's to write into
        self._is_kept = False  # and stays so until a fit ends
        self._is_taken = False  # another object has taken it over
        self._has_saved = False
        self._damaged: dict[str, DamagedError] = {}  # by checkpoint name

    def index(self) -> dict[str, str]:
        """The name of the checkpoint for each tag (`"last"`, ...).

        If the file is missing, or names no last checkpoint, the index is rebuilt from the checkpoints' manifests.
        """
        index = self._written_index()
        return index if "last" in index else {**self._lost_index(), **index}

    def _written_index(self) -> dict[str, str]:
        path = self.folder / _INDEX
        index = read_json(own(path)) if os.path.lexists(path) else {}
        for tag, name in index.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ValueError(
                    f"`{path}`: expected the name of a checkpoint for {brief(tag)}, got {brief(name)}. Correct it."
                )
        return index

    def names(self) -> list[str]:
        """The names of the existing checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_order)

    def _lost_index(self) -> dict[str, str]:
        """The index, rebuilt from the checkpoints that appear complete."""
        index: dict[str, str] = {}
        for name in self.names():
            if (manifest := self._glance(name)) is not None:
                index |= dict.fromkeys([*manifest.tags, "last"], name)
        return index

    def _glance(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint whose files all exist in their sizes, otherwise None. Nothing else is read."""
        if name in self._damaged or leads_out(self.folder / name):
            return None
        sees_all = self._peers.n == 1 or (self._capabilities is not None and self._capabilities.is_shared)
        try:
            return read_manifest(self.folder / name, is_part=not sees_all)
        except (ValueError, OSError):
            return None

    def newest(self) -> list[Path]:
        """The folders of the checkpoints to resume from: the last one by the index, then older ones. In every process the
        list is that of the process which has the newest.

        Warns if the index names no last checkpoint; then all existing ones are listed, the newest first.
        """

        def found() -> list[str]:
            last, names = self._written_index().get("last"), self.names()
            if last is not None:
                own(self.folder / last)
                names = [*(name for name in names if _order(name) < _order(last)), last]
            return [name for name in reversed(names) if name == last or not leads_out(self.folder / name)]

        everywhere = agreed(
            self._peers, "newest", self.folder / _INDEX, lambda: [self._written_index().get("last"), found()]
        )
        last, names = max(everywhere, key=lambda each: _order(each[1][0]) if each[1] else (-1, 0))
        if names and last is None:
            why = "no such file" if not os.path.lexists(self.folder / _INDEX) else "none of that name"
            warnings.warn(
                f"`{self.folder / _INDEX}`: expected the name of the `last` checkpoint, got {why}. "
                f"The newest one that is complete is taken.",
                stacklevel=5,
            )
        return [self.folder / name for name in names]

    def resolve(self, which: str | Path) -> Path:
        """The folder of a checkpoint, the same in all processes even if only some have it.

        **Arguments:**

        - `which`: a tag of the index, or the name or the path of a checkpoint, here or elsewhere.

        Raises ValueError with a list of the checkpoints that exist.
        """
        problem, found = None, None
        try:
            found = self._find(which)
        except ValueError as error:
            problem = error
        found = next((name for name in self._peers.gather("resolve", found) if name is not None), None)
        if found is None:
            assert problem is not None
            raise problem
        return self.folder / found

    def _find(self, which: str | Path) -> str:
        """The name of a checkpoint of this folder, or the absolute path of one."""
        index, names = self.index(), self.names()
        name = index.get(str(which), str(which))
        if name in names:
            return own(self.folder / name).name
        if (Path(which) / MANIFEST).is_file():
            return os.path.abspath(which)
        if isinstance(which, Path) or os.sep in which:
            got = "is not there" if not os.path.lexists(which) else f"holds no {MANIFEST}"
            raise ValueError(
                f"`{which}`: expected the folder of a checkpoint, got one that {got}. "
                "Pass a folder `step_...` of a workdir's `ckpts`, or a name such as `last`."
            )
        known = [*map(brief_name, index), *names]
        there = f"one of {', '.join(listed(known, _MAX_KNOWN))}" if known else "a checkpoint, of which there are none yet"
        raise ValueError(
            f"`{self.folder}`: expected {there}, or the path of a checkpoint, got {str(which)!r}."
            f"{nearest(str(which), known)} Pass one of those."
        )

    def record(self, path: Path, *, tensors: bool = True) -> dict[str, Any]:
        """The `record` of a checkpoint, as given to `save`, after size and checksum of each file are verified.

        Files that only some processes see are copied to the others.

        **Arguments:**

        - `tensors`: whether to verify the checksums of the files with tensors too. If False, only their sizes are, and
            `load(verify=True)` does the rest.

        Raises DamagedError if the checkpoint is of an unknown version, or a file is missing, truncated, altered or
        unreadable.
        """
        with self._noting(path):
            manifest, checks = agree_on_manifest(path, self._peers, self._log)
            if tensors:
                checks.verify(name for name in manifest.files if name.endswith(TENSORS))
                self._damaged.pop(path.name, None)
        return manifest.record

    @contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        """Remember damaged checkpoints, so that `save` does not count them among those it keeps."""
        try:
            yield
        except DamagedError as error:
            self.note_damage(path, error)
            raise

    def note_damage(self, path: Path, error: DamagedError) -> None:
        """Remember that a checkpoint is damaged."""
        if path.parent == self.folder:
            self._damaged[path.name] = error

    def damage(self, path: Path) -> DamagedError | None:
        """The error that was found in a checkpoint, or None."""
        return self._damaged.get(path.name) if path.parent == self.folder else None

    def forget_damage(self) -> None:
        """Forget which checkpoints are damaged, so that all are read again."""
        self._damaged.clear()

    def match(self, path: Path, kind: str, template: PyTree) -> None:
        """Raise, in all processes, the errors that `load` raises for a file's header. Reads no tensors."""
        with self._noting(path):

            def check() -> None:
                check_tree(TensorReader(self._file(path, kind)), template, kind)

            agreed(self._peers, f"check {kind}", path / f"{kind}{TENSORS}", check)

    def load(
        self,
        path: Path,
        kind: str,
        template: PyTree,
        shardings: Callable[[str], Sharding] | None = None,
        *,
        verify: bool = False,
    ) -> PyTree:
        """`load_tree` of one of a checkpoint's trees.

        **Arguments:**

        - `kind`: `"model"`, `"optimizer"` or `"model_state"`.
        - `verify`: whether to verify the checksums while the tensors are read. If False, `record` has done so.

        Raises DamagedError if a file is altered or unreadable, ValueError if the checkpoint has no such tree, or one that
        differs from the template. All processes raise the same error.
        """
        with self._noting(path):
            checks = agree_on_manifest(path, self._peers, self._log)[1] if verify else None
            trees: list[PyTree] = []

            def read() -> dict[str, int]:
                file = self._file(path, kind)
                sums: dict[str, int] = {}

                def add(file: TensorFile, start: int, stop: int) -> None:
                    assert checks is not None
                    sums[file.path.name] = sums.get(file.path.name, 0) ^ checks.contribution(file.path, start, stop)

                if checks is not None:
                    for each in TensorReader(file).files:
                        add(each, 0, each.begin)
                add_tensor = None if checks is None else lambda file, name: add(file, *file.span(name))
                trees.append(load_tree(file, template, shardings, kind, add_tensor))
                return sums

            found = agreed(self._peers, f"load {kind}", path / f"{kind}{TENSORS}", read)
            for name in found[0]:
                assert checks is not None
                checks.compare(name, [sums[name] for sums in found])
        (tree,) = trees
        return tree

    def _file(self, path: Path, kind: str) -> Path:
        """The file of one of a checkpoint's trees, or the index of its files. Raises ValueError if there is none."""
        file = own(path / f"{kind}.safetensors")
        file = file if file.is_file() else own(path / f"{kind}{INDEX}")
        if not file.is_file():
            there = ", ".join(sorted({re.split(r"[-.]", other.name)[0] for other in path.glob("*.safetensors")}))
            raise ValueError(f"`{path}`: expected one of {there}, got {kind!r}. Save it, or load without it.")
        return file

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
        """Write a checkpoint, point the tags at it, then prune; returns its folder.

        If it is killed at any moment, the index names complete checkpoints: the old ones, or the new one.

        **Arguments:**

        - `step`: optimizer updates done so far.
        - `trees`: `"model"`, `"optimizer"` and so on. The array leaves of each become a file.
        - `record`: JSON for `trainer.json`, without the names `format`, `version`, `tags`, `files` and `crc32`.
        - `tags`: the names for it in the index.
        - `keep_last`: the number of newest checkpoints to keep, besides those that the index names.
        - `float_dtype`: the dtype to which the model's floating leaves are cast. The other trees keep theirs.
        - `then`: makes this a save in the background, and is called with the folder once it is committed. The call returns
            as soon as the arrays are copied to the host; a thread writes the copies, and `check` and `wait` raise its
            errors. Without it, the call returns when everything is on disk.

        Raises OSError if the disk is too small, with the bytes needed and free; TypeError for a leaf or a record that
        cannot be stored. In both cases the earlier checkpoints are unchanged.
        """
        self.wait()
        check_count(keep_last, "keep_last", 0, advice="Pass the number of checkpoints to keep.")
        try:
            # Through JSON, so that the checksum is that of a reader: keys become strings, tuples become lists.
            plain = json.loads(json.dumps(record))
        except (TypeError, ValueError) as error:
            raise TypeError(f"`record`: expected what JSON can hold, got {error}. Convert it before saving.") from error
        assert not set(RESERVED) & plain.keys()
        leaves = {kind: array_leaves(tree) for kind, tree in trees.items()}
        for each in leaves.values():
            need_arrays(each)
        files = {kind: (each, float_dtype if kind == "model" else None) for kind, each in leaves.items()}
        for each, dtype in files.values():
            file_size(each, dtype)  # raises for what cannot be stored
        name = max(self._peers.together("save named", lambda: self._name(step)), key=_order)
        self.claim()
        capabilities = self._capabilities = self._capabilities or self._test_capabilities()
        layout = InPlace(files) if capabilities.in_place else FileEach(files, self._peers.index, capabilities.is_shared)
        free = min(self._per_folder("save begins", lambda: self._make_room(name, layout.size)))
        if then is not None or not capabilities.in_place:
            layout.copy()
        save = _Save(step, name, self.index(), tags, keep_last, plain, layout, free)
        if then is None:
            self._write(save)
        else:
            self._thread = threading.Thread(target=self._write_behind, args=(save, then), name="redeqx-save")
            self._thread.start()
        return self.folder / name

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which no other run, and no other trainer of this run, writes into the folder.

        Raises LockedError if another one writes into it.
        """
        self.claim()
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            if self._thread is None or not self._thread.is_alive():  # otherwise it stays locked until this process ends
                self._is_claimed = False
                if self._lock is not None:
                    self._lock.release()
                self._lock = None

    def claim(self) -> None:
        """Lock the folder for this run, until this object is collected or the process ends.

        Raises LockedError, in all processes, if another run or another trainer of this script writes into it.
        """
        if self._is_claimed:
            return
        key = os.path.realpath(self.folder)
        if _owners.get(key) not in (None, self):
            gc.collect()  # an unused trainer is collected only with its cycles
        before = _owners.get(key)
        problem = None
        if self._peers.index == 0:
            try:
                if before is not None and before is not self:
                    self._check_owner(before)
                    self._lock, before._lock = before._lock, None
                self._lock = self._lock or Lock(self.folder, self._log)
            except LockedError as error:
                problem = error
        refusal = self._peers.gather("claim", None if problem is None else str(problem))[0]
        if refusal is not None:
            raise problem or LockedError(refusal)
        if before is not None and before is not self:
            before._is_claimed, before._is_taken = False, True
        self._is_claimed, self._is_taken = True, False
        _owners[key] = self

    def _check_owner(self, owner: "Checkpoints") -> None:
        """Raise LockedError if this object must not take the folder over from another one of this process.

        It may if the other one belongs to another run that is not in a fit, so that a script can be run again in a notebook;
        but the other run may not take the folder back.
        """
        is_one_run = owner._run is not None and owner._run is self._run
        if owner._is_kept or (owner._has_saved and (is_one_run or self._is_taken)):
            raise LockedError(
                f"`workdir`: expected a folder that no other trainer writes into, got {self.folder}, into which another "
                "Trainer of this script saves. Give each a workdir of its own: `Deployer(workdir=...)`."
            )

    def check(self) -> None:
        """Raise the error of the save in the background, with its traceback, if it has failed; never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait for the save in the background; raises as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def settle(self) -> None:
        """As `wait`, when an error ends the run. With several processes it does not wait, as others may have ended."""
        if self._thread is not None and self._peers.n == 1:
            self._thread.join()

    def _write_behind(self, save: _Save, then: Callable[[Path], None]) -> None:
        try:
            self._write(save)
            then(self.folder / save.name)
        except BaseException as error:  # handed to the thread that takes the steps
            self._error = error

    def _per_folder(self, topic: str, act: Callable[[], Any]) -> list[Any]:
        """As `Peers.together`, once for each folder: in process 0 if all share one, otherwise in every process."""
        assert self._capabilities is not None
        found = self._peers.together(topic, act, alone=self._capabilities.is_shared)
        return found[:1] if self._capabilities.is_shared else found

    def _name(self, step: int) -> str:
        """The name of the new checkpoint of that step; creates the folder."""
        self._need_place()
        self.folder.mkdir(parents=True, exist_ok=True)
        _fsync_folder(self.folder.parent)
        # A checkpoint that the index names is never touched. Another one of this step is left from a crash.
        taken = [repeat for other, repeat in map(_order, self.index().values()) if other == step]
        repeat = 1 + max(taken, default=-1)
        return f"step_{step:08d}" + (f"_{repeat}" if repeat else "")

    def _test_capabilities(self) -> Capabilities:
        try:
            capabilities = probe(self.folder / f"{TMP}probe", self._peers)
        except OSError as error:
            why = f"expected a folder that can be written, got {error.strerror!r}. Make room, or save elsewhere"
            raise OSError(error.errno, why, str(self.folder)) from error
        if not capabilities.is_shared:
            self._log(
                f"{self.folder}: not shared by all {self._peers.n} processes, so each keeps its part of every checkpoint on "
                "its own disk. Resuming needs all of the parts: a `workdir` that every host mounts is better"
            )
        elif not capabilities.in_place and self._peers.n > 1:
            self._log(f"{self.folder}: several processes cannot write one file there, so each writes its own")
        return capabilities

    def _make_room(self, name: str, needed: int) -> int:
        """Remove what a checkpoint of that name would overwrite; returns the free bytes."""
        if self._lock is not None:
            self._lock.check()
        self._sweep()
        for other in self.names():
            if _order(other)[0] == _order(name)[0] and _order(other) >= _order(name):
                self._remove(other)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"expected {needed} bytes free, got {free}. Make room, or save elsewhere",
                str(self.folder / name),
            )
        return free

    def _need_place(self) -> None:
        workdir = self.folder.parent
        if self._has_place and not workdir.is_dir():
            why = "expected the run's folder, which was there at its start, got none. Mount it again, or save elsewhere"
            raise OSError(errno.ENOENT, why, str(workdir))

    def _write(self, save: _Save) -> None:
        """The save itself: create the files, write every process's part, put the checkpoint in place."""
        assert self._capabilities is not None
        try:
            self._per_folder("save created", lambda: self._create(save))
            written = self._peers.together("save written", lambda: save.layout.write(self._tmp(save)))
            self._per_folder("save complete", lambda: self._put_in_place(save, written))
            # After all folders have it: every process has what an index names.
            self._per_folder("save committed", lambda: self._point(save))
        except OSError as error:
            self._need_place()
            raise OSError(
                error.errno,
                f"expected to write {save.layout.size} bytes, got {error.strerror!r} with {save.free} bytes free at first. "
                "Earlier checkpoints are whole. Make room, or save elsewhere",
                str(self.folder / save.name),
            ) from error
        finally:
            if self._peers.index == 0 or not self._capabilities.is_shared:
                self._sweep()
        self._peers.committed, self._has_saved = save.step, True
        self._per_folder("save pruned", lambda: self._prune(save.keep_last))

    def _tmp(self, save: _Save) -> Path:
        return self.folder / f"{TMP}{save.name}"

    def _create(self, save: _Save) -> None:
        self._tmp(save).mkdir()
        save.layout.create(self._tmp(save))

    def _put_in_place(self, save: _Save, written: Sequence[Mapping[str, Any]]) -> None:
        tmp = self._tmp(save)
        write_manifest(tmp, save.record, save.tags, save.layout.finish(tmp, written))
        _fsync_folder(tmp)
        os.rename(tmp, self.folder / save.name)
        _fsync_folder(self.folder)

    def _point(self, save: _Save) -> None:
        new_index = self.folder / f"{TMP}{_INDEX}"
        write_json(new_index, {**save.index, **dict.fromkeys(save.tags, save.name)})
        os.replace(new_index, self.folder / _INDEX)
        _fsync_folder(self.folder)

    def _prune(self, keep_last: int) -> None:
        """Remove the checkpoints that are older than the `keep_last` newest complete ones, unless the index names them.

        A damaged one does not count, and is removed with those before it.
        """
        named, names = set(self.index().values()), self.names()
        complete = [name for name in names if self._glance(name) is not None] or names
        oldest = _order(complete[-max(keep_last, 1) :][0])
        for name in names:
            if name not in named and (_order(name) < oldest or keep_last == 0):
                self._remove(name)

    def _sweep(self) -> None:
        """Remove the remains of unfinished saves and removals."""
        for path in self.folder.glob(f"{TMP}*"):
            _delete(path)

    def _remove(self, name: str) -> None:
        # Renamed first: if it is killed halfway, no folder that looks like a checkpoint is left.
        doomed = self.folder / f"{TMP}{name}"
        os.rename(self.folder / name, doomed)
        _delete(doomed)
