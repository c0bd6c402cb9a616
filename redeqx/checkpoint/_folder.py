"""Reads a folder of checkpoints: finds it, lists the checkpoints, resolves their names, and loads their contents.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, unsharded
                        optimizer.safetensors
                        trainer.json         the manifest: the record, with size and crc32 of each file

If the processes cannot write into one file (`_tree_files`), there are `model-00001-of-00002.safetensors` and so on, and
`model.safetensors.index.json`. If they share no folder, each has its own part of a checkpoint, under the same name.

In an object store a checkpoint exists if its manifest does: this is written last, and deleted first.

`_manifest` owns the manifest in each checkpoint, `_reader` and `_safetensors` the other files. `_manager` writes them.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax.sharding import Sharding
from jaxtyping import PyTree

from .._tree import listed, nearest
from ..distributed import Peers
from ..errors import DamagedError, Once, brief, brief_name, warn
from ..storage import Location, StoreError, StorePath, exists, location
from ._base import Base
from ._manifest import (
    MANIFEST,
    TENSORS,
    Manifest,
    checked_entry,
    is_outside_link,
    kind_of,
    read_json,
    read_manifest,
    run_everywhere,
    verified_manifest,
)
from ._reader import INDEX, TensorReader, check_tree, load_tree

INDEX_FILE = "index.json"
_FOLDER = "ckpts"  # of a workdir
_MAX_KNOWN = 50  # at most so many checkpoints in one error
_NAME = re.compile(r"step_([0-9]{8,18})(?:_([0-9]{1,18}))?")


def order(name: str) -> tuple[int, int]:
    """Returns `(step, number of earlier checkpoints of that step)` for a checkpoint's name, `(-1, 0)` for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


class CheckpointFolder:
    """The checkpoints in a folder, read by one process, or by several that make the same calls in the same order."""

    def __init__(self, folder: Location, peers: Peers | None = None, log: Callable[[str], None] = lambda text: None):
        self.folder = folder  # it need not exist
        self._peers = peers or Peers()
        self._log = log  # called with a message about files that are copied between processes
        # Whether this process sees what the others write; on a disk this is unknown before a save.
        self._sees_all = self._peers.n == 1 or isinstance(folder, StorePath)
        self.damaged: dict[Location, DamagedError] = {}  # `save` does not count these among those it keeps
        self._warn_of_index = Once(warn)

    def index(self) -> dict[str, str]:
        """Returns the name of the checkpoint for each tag (`"last"`, ...).

        If the file is missing, damaged or names no last checkpoint, the index is rebuilt from the checkpoints that appear
        complete, with a warning, and the next save writes it.
        """
        path = self.folder / INDEX_FILE
        index, problem = {}, f"`{path}`: expected the name of the `last` checkpoint, got none."
        try:
            index = read_json(checked_entry(path)) if exists(path) else {}
        except DamagedError as error:
            problem = str(error).partition(" The file is damaged")[0]
        for tag, name in index.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                problem = f"`{path}`: expected the name of a checkpoint for {brief(tag)}, got {brief(name)}."
                index = {}
                break
        if "last" in index or not (names := self.names()):
            return index
        rebuilt, without = {}, []
        for name in names:
            if (manifest := self._manifest_if_complete(name)) is not None:
                rebuilt |= dict.fromkeys([*manifest.tags, "last"], name)
            else:
                without.append(name)
        rest = f", without {', '.join(listed(without, 3))}" if without else ""
        self._warn_of_index(f"{problem} It is rebuilt from the checkpoints that are complete{rest}.")
        return {**rebuilt, **index}

    def names(self) -> list[str]:
        """Returns the names of the existing checkpoints, oldest first."""
        if isinstance(self.folder, StorePath):
            found = [key.removesuffix(f"/{MANIFEST}") for key in self.folder.sizes() if key.endswith(f"/{MANIFEST}")]
        else:
            found = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(filter(_NAME.fullmatch, found), key=order)

    def _manifest_if_complete(self, name: str) -> Manifest | None:
        """Returns a checkpoint's manifest if all its files exist with the right sizes, else None."""
        if self.folder / name in self.damaged or is_outside_link(self.folder / name):
            return None
        try:
            return read_manifest(self.folder / name, is_part=not self._sees_all)
        except StoreError:  # its state is unknown
            raise
        except (ValueError, OSError):
            return None

    def is_resumable(self, name: str) -> bool | None:
        """Returns `Manifest.is_resumable` of a checkpoint; None for an incomplete one."""
        manifest = self._manifest_if_complete(name)
        return None if manifest is None else manifest.is_resumable

    def newest(self, is_whole: Callable[[Mapping[str, Any]], bool | None] | None = None) -> list[Location]:
        """Returns the folders of the checkpoints to resume from: the index's last one, then older ones, without those that
        are exports, if there are others. In every process it is the list of the process that has the newest.

        `is_whole`: whether the run's other trainers were saved at the time of a record too; None if this does not matter. If
        not for the newest step, but for the one before it, that comes first.
        """

        def is_whole_at(name: str) -> bool | None:
            manifest = self._manifest_if_complete(name)
            return None if manifest is None or is_whole is None else is_whole(manifest.record)

        def found() -> tuple[list[str], list[str]]:
            last, names = self.index().get("last"), self.names()
            if last is not None:
                checked_entry(self.folder / last)
                names = [*(name for name in names if order(name) < order(last)), last]
            names = [name for name in reversed(names) if name == last or not is_outside_link(self.folder / name)]
            resumable = {name: self.is_resumable(name) for name in names}
            exports = [name for name in names if resumable[name] is False and True in resumable.values()]
            names = [name for name in names if name not in exports]
            before = next((name for name in names if order(name)[0] < order(names[0])[0]), None)
            if before is not None and is_whole_at(names[0]) is False and is_whole_at(before):
                names = [before, *(name for name in names if name != before)]
            return names, exports

        everywhere = run_everywhere(self._peers, "newest", self.folder / INDEX_FILE, found)
        names, exports = max(everywhere, key=lambda found: max(map(order, found[0]), default=(-1, 0)))
        if names and (newest := max(names, key=order)) != names[0]:
            self._log(f"{self.folder}: other trainers were not saved with {newest}, so all resume from the save before it")
        if exports and order(exports[0]) > max(map(order, names)):
            self._log(f"{self.folder}: newer checkpoints are exports, without the optimizer's state or of another dtype")
        return [self.folder / name for name in names]

    def first_valid(
        self, paths: Sequence[Location], check: Callable[[Location, Mapping[str, Any]], None]
    ) -> tuple[Location | None, dict[str, Any]]:
        """Returns the first undamaged checkpoint of these, with its record; warns of those before it. `check` raises
        DamagedError for the record of a damaged one, and that error is raised if all are damaged."""
        problem = None
        for path in paths:
            if path not in self.damaged:
                try:
                    record = self.record(path)
                    check(path, record)
                    return path, record
                except DamagedError as error:
                    self.damaged[path] = error
            warn(f"{self.damaged[path]} It is skipped for the previous one.")
            problem = problem or self.damaged[path]
        if problem is not None:
            self.damaged.clear()  # all are verified again at the next attempt
            raise problem
        return None, {}

    def steps(self) -> list[int]:
        """Returns the steps of the existing checkpoints from which a run resumes, in order, each once."""
        return sorted({order(name)[0] for name in self.names() if self.is_resumable(name) is not False})

    def resolve(self, which: str | Location) -> Location:
        """Returns the folder of a checkpoint, the same in all processes even if only some have it. `which` is a tag of the
        index, the name of a checkpoint in this folder, or a path, as for `find_checkpoint`. Raises ValueError with a list of
        the existing checkpoints if there is none."""
        found = _first_found(self._peers, lambda: self._find(which))
        return self.folder / found if order(found)[0] >= 0 else location(found)

    def _find(self, which: str | Location) -> str:
        """Returns the name of a checkpoint of this folder, or the absolute path of one."""
        index, names = self.index(), self.names()
        name = index.get(str(which), str(which))
        if name in names:
            return checked_entry(self.folder / name).name
        path = location(which, "checkpoint")
        is_path = name == str(which) and (not isinstance(which, str) or os.sep in which)
        if is_path or (path / MANIFEST).is_file():
            found = _path_of(path)
            return os.path.abspath(found) if isinstance(found, Path) else str(found)
        if name != str(which):
            raise ValueError(
                f"`{self.folder}`: expected the checkpoint `{brief_name(name)}`, which the index names as {which!r}, got no "
                "such folder. Put it back, or pass another."
            )
        known = [*(brief_name(tag) for tag, name in index.items() if name in names), *names]
        expected = f"one of {', '.join(listed(known, _MAX_KNOWN))}" if known else "a checkpoint, of which there are none yet"
        raise ValueError(
            f"`{self.folder}`: expected {expected}, or the path of a checkpoint, got {str(which)!r}."
            f"{nearest(str(which), known)} Pass one of those."
        )

    def record(self, path: Location, kinds: Collection[str] | None = None) -> dict[str, Any]:
        """Returns the `record` of a checkpoint, as passed to `save`, after verifying size and checksum of each file.

        Files that only some processes see are copied to the others. `kinds` are the trees whose checksums are verified, None
        for all; of the others only the sizes are.

        Raises DamagedError if the checkpoint has an unknown version, or a file is missing, truncated, altered or unreadable.
        """
        with self._noting(path):
            manifest = verified_manifest(path, self._peers, self._log, kinds)
            if kinds is None:
                self.damaged.pop(path, None)
        return manifest.record

    @contextmanager
    def _noting(self, path: Location) -> Iterator[None]:
        """Notes a checkpoint as damaged if the context raises."""
        try:
            yield
        except DamagedError as error:
            self.damaged[path] = error
            raise

    def match(self, path: Location, kind: str, template: PyTree) -> None:
        """Raises, in all processes, the errors that `load` raises for a file's header. Reads no tensors."""
        self._read(path, kind, "check", lambda file: check_tree(TensorReader(file), template, kind))

    def match_base(self, path: Location, base: Base, leaves: Mapping[str, Any]) -> None:
        """Raises, in all processes, the errors of `Base.check`."""
        run_everywhere(self._peers, "check base", path / MANIFEST, lambda: base.check(path, leaves))

    def load(
        self, path: Location, kind: str, template: PyTree, shardings: Callable[[str], Sharding] | None = None
    ) -> PyTree:
        """Loads the tree `kind` of a checkpoint, such as `"model"`, as `load_tree`; `record` verifies its files before.

        Raises DamagedError if a file is unreadable, ValueError if the checkpoint has no such tree, or one that differs from
        the template. All processes raise the same error.
        """
        return self._read(path, kind, "load", lambda file: load_tree(file, template, shardings, kind))

    def _read(self, path: Location, kind: str, topic: str, act: Callable[[Location], Any]) -> Any:
        """Returns the result of calling a function with the file of a tree. If it raises in one process, all raise."""
        found = []
        with self._noting(path):
            file = path / f"{kind}{TENSORS}"
            run_everywhere(self._peers, f"{topic} {kind}", file, lambda: found.append(act(self._file(path, kind))))
        return found[0]

    def _file(self, path: Location, kind: str) -> Location:
        """Returns the file of one of a checkpoint's trees, or the index of its files. Raises ValueError if there is none."""
        file = checked_entry(path / f"{kind}.safetensors")
        file = file if file.is_file() else checked_entry(path / f"{kind}{INDEX}")
        if not file.is_file():
            kinds = ", ".join(sorted({kind_of(other.name) for other in path.glob("*.safetensors")}))
            if kind == "optimizer":
                raise ValueError(
                    f"`{path}`: expected the optimizer's state, got {kinds} alone, as `save_opt_states=False` saves it. "
                    "Load the model without it: `load_ckpt(..., load_opt_states=False)`."
                )
            raise ValueError(f"`{path}`: expected one of {kinds}, got {kind!r}. Save it, or load without it.")
        return file


def find_checkpoint(
    path: Location, peers: Peers, log: Callable[[str], None] = lambda text: None
) -> tuple[CheckpointFolder, Location]:
    """Returns the folder of checkpoints that a path refers to, and the checkpoint in it, the same in all processes even if
    only some have it.

    The path is that of a checkpoint's folder, a workdir, its `ckpts`, or a name in their index. Raises ValueError if there
    is none.
    """
    found = location(_first_found(peers, lambda: str(_path_of(path))))
    return CheckpointFolder(found.parent, peers, log), found


def _first_found(peers: Peers, find: Callable[[], str]) -> str:
    """Returns the result of the first process in which `find` raises no ValueError; raises its error if there is none. An
    OSError of one process is raised in all."""
    problems: list[ValueError] = []

    def found() -> str | None:
        try:
            return find()
        except ValueError as error:
            problems.append(error)
            return None

    each = peers.together("resolve", found, kinds=(StoreError, OSError))
    if not any(each):
        raise problems[0]
    return next(filter(None, each))


def _path_of(path: Location) -> Location:
    """Returns the checkpoint's folder of `find_checkpoint`, if it is on this process's disk."""
    if isinstance(path, Path) and path.name in ("", ".."):  # such as `.`: its name is needed below
        path = path.resolve()
    if (path / MANIFEST).is_file():
        return path
    candidates = [(path / _FOLDER, "last"), (path, "last"), (path.parent, path.name)]
    name, above = path.name, path.parent
    while above != above.parent:  # a name has slashes after that of a metric
        candidates.append((above if above.name == _FOLDER else above / _FOLDER, name))
        name, above = f"{above.name}/{name}", above.parent
    for folder, name in candidates:
        checkpoints = CheckpointFolder(folder)
        has_any = (folder / INDEX_FILE).is_file() or checkpoints.names()  # if the index is lost
        if has_any and ("/" not in name or name in checkpoints.index()):
            return checkpoints.resolve(name)
    got = "a folder without one" if path.is_dir() else "a file" if exists(path) else "nothing there"
    raise ValueError(
        f"`{path}`: expected a checkpoint (`runs/x/ckpts/step_00000100`), a workdir that holds some, or a name of its index "
        f"(`runs/x/ckpts/last`), got {got}. Pass one of those. `redeqx.load` reads a safetensors file too, "
        "`redeqx.models.from_pretrained` a folder of Hugging Face."
    )
