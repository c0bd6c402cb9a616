"""Checkpoints: folders of safetensors files, written so that a crash leaves the old one or the new one.

Owns the folder of checkpoints, the index that names them, and what is pruned. The record beside the files and their
checksums are `_manifest`, the files `_layouts` and `_safetensors`; what a run puts into its record, when it saves and how it
resumes is the Trainer's.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, whole, however it was sharded
                        optimizer.safetensors
                        trainer.json         the record, with size and crc32 of each file

Where one file cannot be written by all (`_layouts`), it is `model-00001-of-00002.safetensors` and so on, and
`model.safetensors.index.json`; and where the processes share no folder, each has its own part of a checkpoint, of the same
name, and all of them put it in place before any index names it.

A checkpoint is written into a folder of another name, fsynced file by file, and renamed; the index follows in the same
way; only then is anything removed, and that under another name too. So whatever is called `step_*` is complete.

Of several processes each writes its own part; process 0 makes the folder, and puts it in place once all have written. What
one of them cannot do, all of them raise.
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
from ..errors import DamagedError, brief, brief_name
from ._layouts import FileEach, InPlace, Layout, Ways, probe
from ._lock import Lock, LockedError
from ._manifest import (
    RECORD,
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
    write_record,
)
from ._reader import INDEX, Source, check_tree, load_tree
from ._safetensors import TensorFile, array_leaves, file_size, need_arrays

_INDEX = "index.json"
_MAX_KNOWN = 50  # names of checkpoints listed by one error
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
    layout: Layout
    free: int


# The one of this process that writes into a folder, or did so last; by the folder's real path.
_owners: "weakref.WeakValueDictionary[str, Checkpoints]" = weakref.WeakValueDictionary()


class Checkpoints:
    """The checkpoints of one run, in one folder; written by one run at a time, read by any number."""

    def __init__(
        self,
        folder: Path,
        peers: Peers | None = None,
        say: Callable[[str], None] = lambda text: None,
        run: Any = None,
    ):
        """**Arguments:**

        - `folder`: made by the first save.
        - `peers`: the processes that write and read together: each makes the same calls in the same order.
        - `say`: told, once, what the folder's file system does not allow.
        - `run`: what those of one run have in common, of which only one writes into a folder.
        """
        self.folder = folder
        self._has_place = folder.parent.is_dir()  # and so must have it at every save
        self._peers = peers or Peers()
        self._say = say
        self._ways: Ways | None = None  # until the first save has tried
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the save in the background
        self._run = run
        self._lock: Lock | None = None  # of process 0
        self._is_claimed = self._is_kept = self._is_taken = False  # to write; through a fit; by another since
        self._has_saved = False
        self._damaged: dict[str, DamagedError] = {}  # by the checkpoint's name, what was found wrong with it

    def index(self) -> dict[str, str]:
        """The name of the checkpoint that each tag (`"last"`, ...) stands for.

        A file that is missing, or that names no last checkpoint, is made up for by what the checkpoints' own files say.
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
        """The names of the checkpoints that are there, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_order)

    def _lost_index(self) -> dict[str, str]:
        """What the index would say of the checkpoints that are complete, as far as a look at them tells."""
        index: dict[str, str] = {}
        for name in self.names():
            if (manifest := self._glance(name)) is not None:
                index |= dict.fromkeys([*manifest.tags, "last"], name)
        return index

    def _glance(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint whose files are all there in their sizes; None of any other. Nothing else is read."""
        if name in self._damaged or leads_out(self.folder / name):
            return None
        sees_all = self._peers.n == 1 or (self._ways is not None and self._ways.is_shared)
        try:
            return read_manifest(self.folder / name, is_part=not sees_all)
        except (ValueError, OSError):
            return None

    def newest(self) -> list[Path]:
        """The folders of the checkpoints to go on from, the one that the index calls last first, then older ones; in every
        process as the one finds them that has the newest.

        Warns where the index names no last checkpoint, and all that are there are taken, from the newest on.
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
        """The folder of a checkpoint; where only some processes have it, all get it from those.

        **Arguments:**

        - `which`: a tag of the index, the name of a checkpoint, or the path of one, here or elsewhere.

        Raises ValueError that lists what there is.
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
        """The name of a checkpoint here, or the whole path of one."""
        index, names = self.index(), self.names()
        name = index.get(str(which), str(which))
        if name in names:
            return own(self.folder / name).name
        if (Path(which) / RECORD).is_file():
            return os.path.abspath(which)
        if isinstance(which, Path) or os.sep in which:
            got = "is not there" if not os.path.lexists(which) else f"holds no {RECORD}"
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
        """What `save` was given as `record`, once size and checksum of each of the checkpoint's files are found right.

        What only some processes see of it, the others get from them.

        **Arguments:**

        - `tensors`: whether to read the files of tensors too; without, of these the sizes alone are verified, and
            `load(verify=True)` does the rest.

        Raises DamagedError where the checkpoint is of an unknown version, or a file is missing, truncated, altered or cannot
        be read.
        """
        with self._noting(path):
            manifest, checks = agree_on_manifest(path, self._peers, self._say)
            if tensors:
                checks.verify(name for name in manifest.files if name.endswith(TENSORS))
                self._damaged.pop(path.name, None)
        return manifest.record

    @contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        """Remember which checkpoints are damaged, of which `save` keeps none in the place of one that is not."""
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
        """What was found wrong with a checkpoint; None where nothing was."""
        return self._damaged.get(path.name) if path.parent == self.folder else None

    def forget_damage(self) -> None:
        """Look at every checkpoint anew."""
        self._damaged.clear()

    def match(self, path: Path, kind: str, template: PyTree) -> None:
        """Raise, in all processes, what `load` would raise of a file's header: it reads no tensors."""
        with self._noting(path):
            file = path / f"{kind}{TENSORS}"
            agreed(self._peers, f"check {kind}", file, lambda: check_tree(Source(self._file(path, kind)), template, kind))

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
        - `verify`: whether to verify the checksums while the tensors are read; else `record` has done so.

        Raises DamagedError where a file is not what was saved, or cannot be read; ValueError where the checkpoint has no
        such tree, or not one like the template. All processes raise the same.
        """
        with self._noting(path):
            checks = agree_on_manifest(path, self._peers, self._say)[1] if verify else None
            trees: list[PyTree] = []

            def read() -> dict[str, int]:
                file = self._file(path, kind)
                sums: dict[str, int] = {}

                def add(file: TensorFile, start: int, stop: int) -> None:
                    assert checks is not None
                    sums[file.path.name] = sums.get(file.path.name, 0) ^ checks.contribution(file.path, start, stop)

                if checks is not None:
                    for each in Source(file).files:
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
        """The file of one of a checkpoint's trees, or the index of its files. Raises ValueError where there is none."""
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
        assert not set(RESERVED) & plain.keys()
        leaves = {kind: array_leaves(tree) for kind, tree in trees.items()}
        for each in leaves.values():
            need_arrays(each)
        files = {kind: (each, float_dtype if kind == "model" else None) for kind, each in leaves.items()}
        for each, dtype in files.values():
            file_size(each, dtype)  # raises for what cannot be stored
        name = max(self._peers.together("save named", lambda: self._name(step)), key=_order)
        self.claim()
        ways = self._ways = self._ways or self._try_ways()
        layout = InPlace(files) if ways.in_place else FileEach(files, self._peers.index, ways.is_shared)
        free = min(self._per_folder("save begins", lambda: self._make_room(name, layout.size)))
        if then is not None or not ways.in_place:
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
        """Keep other runs from writing into the folder meanwhile, and other trainers of this one.

        Raises LockedError where another one writes into it.
        """
        self.claim()
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            if self._thread is None or not self._thread.is_alive():  # else until this process ends
                self._is_claimed = False
                if self._lock is not None:
                    self._lock.release()
                self._lock = None

    def claim(self) -> None:
        """Keep other runs from writing into the folder, until this object or the process ends.

        Raises LockedError, in all processes, where another run writes into it, or another trainer of this script.
        """
        if self._is_claimed:
            return
        key = os.path.realpath(self.folder)
        if _owners.get(key) not in (None, self):
            gc.collect()  # a trainer that nobody uses any more has cycles
        before = _owners.get(key)
        problem = None
        if self._peers.index == 0:
            try:
                if before is not None and before is not self:
                    self._check_owner(before)
                    self._lock, before._lock = before._lock, None
                self._lock = self._lock or Lock(self.folder, self._say)
            except LockedError as error:
                problem = error
        said = self._peers.gather("claim", None if problem is None else str(problem))[0]
        if said is not None:
            raise problem or LockedError(said)
        if before is not None and before is not self:
            before._is_claimed, before._is_taken = False, True
        self._is_claimed, self._is_taken = True, False
        _owners[key] = self

    def _check_owner(self, owner: "Checkpoints") -> None:
        """Raise LockedError where this one must not take over from another of this process.

        One of another run may, so that a script that is run again in a notebook goes on, if that is over; but not back.
        """
        is_one_run = owner._run is not None and owner._run is self._run
        if owner._is_kept or (owner._has_saved and (is_one_run or self._is_taken)):
            raise LockedError(
                f"`workdir`: expected a folder that no other trainer writes into, got {self.folder}, into which another "
                "Trainer of this script saves. Give each a workdir of its own: `Deployer(workdir=...)`."
            )

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

    def _per_folder(self, topic: str, act: Callable[[], Any]) -> list[Any]:
        """As `Peers.together`, of one process for each folder: process 0 where all see one, else every process."""
        assert self._ways is not None
        found = self._peers.together(topic, act, alone=self._ways.is_shared)
        return found[:1] if self._ways.is_shared else found

    def _name(self, step: int) -> str:
        """What the checkpoint of that step will be called; makes the folder."""
        self._need_place()
        self.folder.mkdir(parents=True, exist_ok=True)
        _fsync_folder(self.folder.parent)
        # A checkpoint that the index names is never touched; another one of this step is a crash's debris.
        taken = [repeat for other, repeat in map(_order, self.index().values()) if other == step]
        repeat = 1 + max(taken, default=-1)
        return f"step_{step:08d}" + (f"_{repeat}" if repeat else "")

    def _try_ways(self) -> Ways:
        try:
            ways = probe(self.folder / f"{TMP}probe", self._peers)
        except OSError as error:
            why = f"expected a folder that can be written, got {error.strerror!r}. Make room, or save elsewhere"
            raise OSError(error.errno, why, str(self.folder)) from error
        if not ways.is_shared:
            self._say(
                f"{self.folder}: not shared by all {self._peers.n} processes, so that each keeps a part of every checkpoint "
                "on a disk of its own. To go on, all of them are needed: better is a `workdir` that every host mounts"
            )
        elif not ways.in_place and self._peers.n > 1:
            self._say(f"{self.folder}: no file there can be written by several processes, so that each writes its own")
        return ways

    def _make_room(self, name: str, needed: int) -> int:
        """Remove what is in the way of a checkpoint of that name; returns the bytes that are free."""
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
        """The save itself: the files, every process's part in them, then what makes them a checkpoint."""
        assert self._ways is not None
        try:
            self._per_folder("save created", lambda: self._create(save))
            written = self._peers.together("save written", lambda: save.layout.write(self._tmp(save)))
            self._per_folder("save complete", lambda: self._put_in_place(save, written))
            # Once all folders have it: what an index names, every process has.
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
            if self._peers.index == 0 or not self._ways.is_shared:
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
        write_record(tmp, save.record, save.tags, save.layout.finish(tmp, written))
        _fsync_folder(tmp)
        os.rename(tmp, self.folder / save.name)
        _fsync_folder(self.folder)

    def _point(self, save: _Save) -> None:
        new_index = self.folder / f"{TMP}{_INDEX}"
        write_json(new_index, {**save.index, **dict.fromkeys(save.tags, save.name)})
        os.replace(new_index, self.folder / _INDEX)
        _fsync_folder(self.folder)

    def _prune(self, keep_last: int) -> None:
        """Remove what is older than the newest checkpoints that are complete, unless the index names it.

        One that is damaged is not counted, and goes when those before it go.
        """
        named, names = set(self.index().values()), self.names()
        complete = [name for name in names if self._glance(name) is not None] or names
        oldest = _order(complete[-max(keep_last, 1) :][0])
        for name in names:
            if name not in named and (_order(name) < oldest or keep_last == 0):
                self._remove(name)

    def _sweep(self) -> None:
        """Removes what an unfinished save or removal has left."""
        for path in self.folder.glob(f"{TMP}*"):
            _delete(path)

    def _remove(self, name: str) -> None:
        # Under another name first, so that killed halfway it leaves no folder that looks like a checkpoint.
        doomed = self.folder / f"{TMP}{name}"
        os.rename(self.folder / name, doomed)
        _delete(doomed)
