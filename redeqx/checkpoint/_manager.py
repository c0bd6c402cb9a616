"""The checkpoints of a run: saving, the index, and pruning.

`_folder` reads a folder of checkpoints; `_tree_files` writes the files with tensors, `_commit` turns them into a checkpoint,
`_lock` knows who may write. The trainer decides what a record contains, when to save, and how to resume.

On a disk, a checkpoint is written into a folder of another name, each file is fsynced, and the folder is renamed. The index
is replaced in the same way. Only then are old checkpoints removed, and they are renamed first. So every folder `step_*` is
complete. In an object store, the manifest is written last, and deleted first.

Each of several processes writes its own part; process 0 creates the folder, and commits it after all have written. If one
process fails, all raise its error.
"""

import atexit
import errno
import json
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from .._tree import array_leaves
from ..distributed import Peers, exit_now, say
from ..errors import check_count
from ..storage import Location, StorageError, StoreError, StorePath, next_step
from ._commit import Capabilities, Disk, Store
from ._folder import CheckpointFolder, order
from ._lock import Claim
from ._manifest import RESERVED, write_manifest
from ._safetensors import check_arrays
from ._tree_files import FilePerProcess, InPlace

_THREAD = "redeqx-save"  # of a background save


@dataclass(frozen=True)
class _Save:
    """One checkpoint to write: everything that is known before the first byte is written."""

    step: int
    name: str
    index: dict[str, str]  # before this save
    tags: Sequence[str]
    keep_last: int
    record: dict[str, Any]
    files: Mapping[str, Any]  # by kind of tree: those of `_tree_files`
    size: int  # bytes on the disk of this process
    free: int


class CheckpointManager(CheckpointFolder):
    """The checkpoints of one run, in one folder. Only one run at a time writes into it, any number may read."""

    def __init__(
        self,
        folder: Location,
        peers: Peers | None = None,
        log: Callable[[str], None] = lambda text: None,
        run: Any = None,
        before_commit: Callable[[], None] = lambda: None,
        root: Any = None,
    ):
        """**Arguments:**

        - `folder`: created by the first save.
        - `log`: called once with a message about missing capabilities of the folder's file system.
        - `run`: an object that all trainers of one run share. Only one of them may write into a folder.
        - `root`: the folder that the user named, if `folder` is deeper than directly below it.
        - `before_commit`: called by process 0 before a checkpoint is committed, possibly in the thread of a background save.
        """
        super().__init__(folder, peers, log)
        self._commits = Store(folder) if isinstance(folder, StorePath) else Disk(folder, root or folder.parent)
        self._before_commit = before_commit
        # Without a reference to this object: it must be freed, and the lock released, as soon as nobody uses it.
        self._claim = Claim(folder, self._peers, run, partial(self._commits.lock, log))
        self._capabilities: Capabilities | None = None  # tested by the first save
        self._saving: Future[None] | None = None  # the background save
        self._has_remains = False  # whether something could not be removed, which was logged
        self._remains: set[str] = set()  # the checkpoints among it, which the next run tries to remove again

    def save(
        self,
        step: int,
        trees: Mapping[str, PyTree],
        record: Mapping[str, Any],
        tags: Sequence[str] = ("last",),
        keep_last: int = 2,
        float_dtype: Any = None,
        then: Callable[[Location], None] | None = None,
    ) -> Location:
        """Writes a checkpoint, points the tags at it, then prunes; returns its folder.

        If the process is killed at any moment, the index names complete checkpoints: the old ones, or the new one.

        **Arguments:**

        - `trees`: `"model"`, `"optimizer"` and so on. The array leaves of each become a file.
        - `record`: JSON for `trainer.json`, without the names `format`, `version`, `tags`, `files` and `crc32`.
        - `keep_last`: the number of newest checkpoints to keep, in addition to those that the index names.
        - `float_dtype`: of the model's floating leaves. The other trees keep theirs.
        - `then`: makes this a background save, and is called with the folder once it is committed. `save` returns as soon as
            the arrays are copied to the host; a thread writes the copies, and `check` and `wait` raise its errors. Without
            it, `save` returns when everything is on disk.

        Raises OSError if the disk is too small, with the bytes needed and free; TypeError for a leaf or a record that cannot
        be stored. In both cases the earlier checkpoints are unchanged.
        """
        self.wait()
        check_count(keep_last, "keep_last", 0, advice="Pass the number of checkpoints to keep.")
        try:
            # Converted through JSON, so that a reader computes the same checksum: keys become strings, tuples become lists.
            plain = json.loads(json.dumps(record))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"`record`: expected values that JSON can hold, got {error}. Convert it before saving."
            ) from error
        assert not set(RESERVED) & plain.keys()
        trees_ = {kind: (array_leaves(tree), float_dtype if kind == "model" else None) for kind, tree in trees.items()}
        for leaves, dtype in trees_.values():
            check_arrays(leaves, dtype)
        self._claim.hold()
        if self._capabilities is None:
            self._together("save tests", self._commits.create)
            self._capabilities = self._commits.capabilities(self._peers, self._log)
        capabilities = self._capabilities
        self._sees_all = self._peers.n == 1 or capabilities.is_shared
        files: dict[str, InPlace | FilePerProcess] = {
            kind: InPlace(kind, *tree)
            if capabilities.in_place
            else FilePerProcess(kind, *tree, self._peers.index, capabilities.is_shared)
            for kind, tree in trees_.items()
        }
        size = sum(file.size for file in files.values())
        begun = self._per_folder("save begins", lambda: self._begin(step, size))
        name, free = max((name for name, _, _ in begun), key=order), min(free for _, free, _ in begun)
        index = begun[self._peers.index if len(begun) > 1 else 0][2]
        for file in files.values():
            if then is not None or file.needs_copy:
                file.copy()
        save = _Save(step, name, index, tags, keep_last, plain, files, size, free)
        if then is None:
            self._write(save)
            return self.folder / name

        def write_then() -> None:
            self._write(save)
            then(self.folder / name)

        pool = ThreadPoolExecutor(1, _THREAD)
        self._saving = saving = pool.submit(write_then)
        pool.shutdown(wait=False)  # its thread ends with the save, for which the end of a script waits
        _unread.add(saving)
        saving.add_done_callback(lambda done: None if done.exception() else _unread.discard(done))
        return self.folder / name

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which no other run, and no other trainer of this run, writes into the folder.

        Raises LockedError if another one writes into it.
        """
        self._claim.hold()
        self._claim.is_kept = True
        try:
            yield
        finally:
            self._claim.is_kept = False
            if self._saving is None or self._saving.done():  # otherwise it stays locked until this process ends
                self._claim.release()

    def check(self) -> None:
        """Raises the error of the background save, with its traceback, if it has failed; never waits."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the background save; raises as `check` does, and RuntimeError in the thread of one, which would wait for
        itself."""
        if threading.current_thread().name.startswith(_THREAD):
            raise RuntimeError(
                "`then`: expected a function that saves and loads no checkpoints, got one that does, in the save's thread. "
                "Do it in a callback's `on_save`, or after `save_ckpt` without `then`."
            )
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            finally:
                _unread.discard(saving)

    def settle(self) -> None:
        """As `wait`, for a run that fails: raises nothing. With several processes it does not wait, as others may have
        ended."""
        if self._saving is not None and self._peers.n == 1:
            self._saving.exception()

    def _per_folder(self, topic: str, act: Callable[[], Any]) -> list[Any]:
        """As `Peers.together`, once per folder: in process 0 if all processes share one, otherwise in every process."""
        assert self._capabilities is not None
        found = self._together(topic, act, alone=self._capabilities.is_shared)
        return found[:1] if self._capabilities.is_shared else found

    def _together(self, topic: str, act: Callable[[], Any], *, alone: bool = False) -> list[Any]:
        """As `Peers.together`, but apart from the saves of another trainer, whose thread may save at the same time."""
        return self._peers.together(
            f"{topic} {self.folder.name}", act, alone=alone, kinds=(StoreError, StorageError, OSError)
        )

    def _begin(self, step: int, needed: int) -> tuple[str, int, dict[str, str]]:
        """Makes the folder and room in it; returns the name of the new checkpoint of that step, the free bytes, and the
        index."""
        self._commits.create()
        self._claim.check()
        self._clear(self._commits.sweep)
        # A checkpoint that the index names is never touched. Any other one of this step is left from a crash.
        index = self.index()
        taken = [repeat for other, repeat in map(order, index.values()) if other == step]
        repeat = 1 + max(taken, default=-1)
        for other in self.names():
            if (step, repeat) <= order(other) < (step + 1, 0) and not self._remove(other):
                repeat = 1 + order(other)[1]
        name = f"step_{step:08d}" + (f"_{repeat}" if repeat else "")
        return name, self._commits.check_space(name, needed), index

    def _remove(self, name: str) -> bool:
        """Removes a checkpoint, unless that failed before: a run without the permission would ask for more at each save.
        Returns whether it is gone."""
        if name not in self._remains and not self._clear(partial(self._commits.remove, name)):
            self._remains.add(name)
        return name not in self._remains

    def _clear(self, remove: Callable[[], None]) -> bool:
        """Removes what nothing needs any more; returns whether it is gone. A store that refuses, as without a permission to
        delete, or does not answer, ends no run: nothing is lost."""
        try:
            remove()
        except StoreError as error:
            if not self._has_remains:
                self._log(f"{self.folder}: old checkpoints stay, as the store did not remove them. {error.strerror}")
            self._has_remains = True
            return False
        return True

    def _write(self, save: _Save) -> None:
        """Runs a save: creates the files, writes every process's part, commits the checkpoint."""
        assert self._capabilities is not None
        files = save.files
        target: Any = self._commits.target(save.name)
        index = {**save.index, **dict.fromkeys(save.tags, save.name)}

        def create() -> None:
            if isinstance(target, Path):
                target.mkdir()
            for file in files.values():
                file.create(target)

        def commit() -> None:
            sums: dict[str, dict[str, int]] = {}
            for kind, file in files.items():
                sums |= file.finish(target, [each[kind] for each in written])
            if isinstance(target, StorePath):  # on a disk, the folder of a run that was frozen is gone, so the commit fails
                self._claim.check()
            self._before_commit()
            write_manifest(target, save.record, save.tags, sums)
            self._commits.commit(save.name)

        def write_index() -> None:
            self._commits.write_index(index)
            self._peers.committed = save.step  # before the others answer: one of them may be gone

        try:
            self._per_folder("save created", create)
            written = self._together("save written", lambda: {kind: file.write(target) for kind, file in files.items()})
            self._per_folder("save complete", commit)
            # After all folders are committed, so that every process has what an index names.
            self._per_folder("save committed", write_index)
        except OSError as error:
            if not isinstance(error, StorageError):  # else the disk is not at fault
                self._commits.check_root()
            raise StorageError(error.errno, _why(error, save), str(self.folder / save.name)) from None
        finally:
            # Not in a store: if another run has taken over the folder, its files would look like remains.
            if isinstance(self._commits, Disk) and (self._peers.index == 0 or not self._capabilities.is_shared):
                with suppress(OSError):  # must not hide the error of the save; the next save sweeps again
                    self._commits.sweep()
        self._peers.committed, self._claim.has_saved = save.step, True
        self._per_folder("save pruned", lambda: self._prune(save))

    def _prune(self, save: _Save) -> None:
        """Removes checkpoints older than the complete ones of the `keep_last` newest steps, unless the index names them.

        Of a step that was saved more than once, as many are kept. A damaged one does not count, and is removed with the
        older ones. The newest one from which a run resumes is never removed. Later ones than that of `save`, which a run
        leaves that goes on from an earlier one, do not count.
        """
        names, n = [name for name in self.names() if order(name) <= order(save.name)], max(save.keep_last, 1)
        manifests = {name: manifest for name in names if (manifest := self._manifest_if_complete(name)) is not None}
        resumable = next((name for name in reversed(manifests) if manifests[name].is_resumable), None)
        complete, named = [*manifests] or names, {*self.index().values(), resumable}
        by_step: dict[int, list[str]] = {}
        for name in complete:
            by_step.setdefault(order(name)[0], []).append(name)
        kept = [name for of_step in list(by_step.values())[-n:] for name in of_step[-n:]]
        for name in names:
            is_old = name not in kept if name in complete else order(name) < order(kept[0])
            if name not in named and (is_old or save.keep_last == 0):
                self._remove(name)


_unread: set[Future[None]] = set()  # background saves whose error nobody has raised


@atexit.register
def _report_unread() -> None:
    """Prints the errors of background saves that a script did not wait for, and ends it with exit code 1."""
    errors = [error for saving in _unread if saving.done() and (error := saving.exception()) is not None]
    for error in errors:
        say(f"redeqx: a background save failed after the last step.\n{''.join(traceback.format_exception(error))}")
    if errors:
        exit_now(1)


def _why(error: OSError, save: _Save) -> str:
    """Returns the reason for a save that could not be written, and the next step."""
    if isinstance(error, StoreError):
        return f"{error.strerror}. Earlier checkpoints are complete: run the script again to continue from the last one"
    if isinstance(error, StorageError):  # such as of a folder that another run has taken over: it says what to do
        return str(error.strerror)
    if error.errno == errno.ENOENT:
        return (
            "expected a folder that nothing else deletes or unmounts while a checkpoint is written there, got "
            f"{error.strerror!r}. Other checkpoints there may be gone too: save elsewhere"
        )
    return (
        f"expected to write {save.size} bytes, got {error.strerror!r} with {save.free} bytes free at first. "
        f"Earlier checkpoints are complete. {next_step(error)}"
    )
