"""Media: how checkpoints are added to a folder and removed: by renaming on a disk, by writing the manifest last in a store.

`_manager` decides what is written, kept and removed, and when; `_layouts` and `_safetensors` own the files with tensors.
"""

import contextlib
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..distributed import Peers
from ..storage import Location, StorePath, fsync_folder, make_subfolder, replacing
from ._folder import INDEX_FILE, order
from ._layouts import Capabilities, probe
from ._manifest import MANIFEST, TMP, write_json, write_manifest


class Medium(ABC):
    """The folder of a run's checkpoints, for the process that holds its claim.

    A checkpoint is written to `place(name)`, and exists after `commit`. A kill at any moment leaves the committed
    checkpoints, and remains that `sweep` removes.
    """

    folder: Location

    @abstractmethod
    def check_exists(self) -> None:
        """Raises OSError if the parent folder existed at the start of the run, and is gone."""

    @abstractmethod
    def create(self) -> None:
        """Creates the folder."""

    @abstractmethod
    def make_parent(self) -> None:
        """Creates the folder's parent, if the run's folder exists."""

    @abstractmethod
    def capabilities(self, peers: Peers, log: Callable[[str], None]) -> Capabilities:
        """Returns the folder's capabilities. All processes call it. Raises OSError if it cannot be written."""

    @abstractmethod
    def check_space(self, name: str, n_bytes: int) -> int:
        """Returns the free bytes. Raises OSError if a checkpoint does not fit."""

    @abstractmethod
    def place(self, name: str) -> Location:
        """Returns where the files of a new checkpoint are written."""

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Prepares `place(name)`."""

    @abstractmethod
    def commit(
        self, name: str, record: Mapping[str, Any], tags: Sequence[str], files: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Turns the files at `place(name)` into a checkpoint. The arguments are those of `write_manifest`."""

    @abstractmethod
    def write_index(self, index: Mapping[str, str]) -> None:
        """Replaces the index."""

    @abstractmethod
    def sweep(self) -> None:
        """Removes the remains of unfinished saves and removals."""

    @abstractmethod
    def finish(self) -> None:
        """Called when a save has ended, even if it failed."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a checkpoint."""

    @abstractmethod
    def failure(self, error: OSError, name: str, n_bytes: int, free: int) -> OSError:
        """Returns the error for a save that could not be written."""


def medium_of(folder: Location, root: Any) -> Medium:
    """Returns the medium of a folder below `root`, which a user named."""
    return Store(folder) if isinstance(folder, StorePath) else Disk(folder, root)


class Disk(Medium):
    """A folder in a file system."""

    def __init__(self, folder: Path, root: Path):
        self.folder: Path = folder
        self._root = root
        self._has_root = root.is_dir()  # if so, every save needs it

    def check_exists(self) -> None:
        if self._has_root and not self._root.is_dir():
            why = "expected the run's folder, which existed at its start, got none. Mount it again, or save elsewhere"
            raise OSError(errno.ENOENT, why, str(self._root))

    def make_parent(self) -> None:
        if self._root.is_dir():
            make_subfolder(self.folder.parent, self._root)

    def create(self) -> None:
        make_subfolder(self.folder, self._root)
        for folder in (self.folder.parent, *self.folder.parent.parents):
            fsync_folder(folder)
            if folder == self._root:
                break

    def capabilities(self, peers: Peers, log: Callable[[str], None]) -> Capabilities:
        try:
            capabilities = probe(self.folder / f"{TMP}probe", peers)
        except OSError as error:
            why = f"expected a folder that can be written, got {error.strerror!r}. Make room, or save elsewhere"
            raise OSError(error.errno, why, str(self.folder)) from error
        if not capabilities.is_shared:
            log(
                f"{self.folder}: not shared by all {peers.n} processes, so each keeps its part of every checkpoint on "
                "its own disk. Resuming needs all of the parts: a `workdir` that every host mounts is better"
            )
        elif not capabilities.in_place and peers.n > 1:
            log(f"{self.folder}: several processes cannot write one file there, so each writes its own")
        return capabilities

    def check_space(self, name: str, n_bytes: int) -> int:
        free = shutil.disk_usage(self.folder).free
        if n_bytes > free:
            raise OSError(
                errno.ENOSPC,
                f"expected {n_bytes} bytes free, got {free}. Make room, or save elsewhere",
                str(self.folder / name),
            )
        return free

    def place(self, name: str) -> Path:
        return self.folder / f"{TMP}{name}"

    def prepare(self, name: str) -> None:
        self.place(name).mkdir()

    def commit(
        self, name: str, record: Mapping[str, Any], tags: Sequence[str], files: Mapping[str, Mapping[str, int]]
    ) -> None:
        tmp = self.place(name)
        write_manifest(tmp, record, tags, files)
        fsync_folder(tmp)
        os.rename(tmp, self.folder / name)
        fsync_folder(self.folder)

    def write_index(self, index: Mapping[str, str]) -> None:
        with replacing(self.folder / INDEX_FILE) as beside:
            write_json(beside, index)
        fsync_folder(self.folder)

    def sweep(self) -> None:
        for path in self.folder.glob(f"{TMP}*"):
            _delete(path)

    def finish(self) -> None:
        with contextlib.suppress(OSError):  # must not hide the error of the save; the next save sweeps again
            self.sweep()

    def remove(self, name: str) -> None:
        # Renamed first, so that a kill leaves no partial folder that looks like a checkpoint.
        doomed = self.folder / f"{TMP}{name}"
        os.rename(self.folder / name, doomed)
        _delete(doomed)

    def failure(self, error: OSError, name: str, n_bytes: int, free: int) -> OSError:
        return OSError(
            error.errno,
            f"expected to write {n_bytes} bytes, got {error.strerror!r} with {free} bytes free at first. "
            "Earlier checkpoints are complete. Make room, or save elsewhere",
            str(self.folder / name),
        )


class Store(Medium):
    """A prefix in an object store, where nothing can be renamed, and an object appears when it is complete.

    A checkpoint's files are written to their final place; without a manifest they are the remains of a killed save.
    """

    def __init__(self, folder: StorePath):
        self.folder: StorePath = folder

    def check_exists(self) -> None:
        """Does nothing: a store has no folders that could be missing."""

    def create(self) -> None:
        """Does nothing: a store has no folders to create."""

    def make_parent(self) -> None:
        """Does nothing: a store has no folders to create."""

    def capabilities(self, peers: Peers, log: Callable[[str], None]) -> Capabilities:
        del peers, log
        # The shards of several processes are strided runs of a tensor, but the parts of an object are contiguous, at least
        # 5 MiB large, and must be sent by one client in most libraries. So each process writes its own files.
        return Capabilities(is_shared=True, in_place=False)

    def check_space(self, name: str, n_bytes: int) -> int:
        return 0  # a store does not report it, and has enough

    def place(self, name: str) -> StorePath:
        return self.folder / name

    def prepare(self, name: str) -> None:
        """Does nothing: an object needs no folder."""

    def commit(
        self, name: str, record: Mapping[str, Any], tags: Sequence[str], files: Mapping[str, Mapping[str, int]]
    ) -> None:
        write_manifest(self.place(name), record, tags, files)

    def write_index(self, index: Mapping[str, str]) -> None:
        write_json(self.folder / INDEX_FILE, index)

    def sweep(self) -> None:
        keys = self.folder.sizes()
        complete = {key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")}
        folders = {key: key.partition("/")[0] for key in keys if "/" in key}
        self.folder.delete(key for key, name in folders.items() if order(name)[0] >= 0 and name not in complete)

    def finish(self) -> None:
        """Does not sweep: if another run has taken over the folder, its files would look like remains. The next save sweeps,
        after checking the lock."""

    def remove(self, name: str) -> None:
        path = self.folder / name
        (path / MANIFEST).unlink()  # first, so that a kill leaves no partial checkpoint
        path.delete(path.sizes())

    def failure(self, error: OSError, name: str, n_bytes: int, free: int) -> OSError:
        del n_bytes, free
        return OSError(
            error.errno,
            f"{error.strerror}. Earlier checkpoints are complete: run the script again to continue from the last one",
            str(self.folder / name),
        )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
