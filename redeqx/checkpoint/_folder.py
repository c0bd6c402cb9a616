"""Reading a folder of checkpoints: which there are, which one a name means, what is in it.

    ckpts/index.json                         {"last": "step_00000400", "argmax_rouge2": "step_00000300"}
    ckpts/step_00000400/model.safetensors    every array leaf by its name, unsharded
                        optimizer.safetensors
                        trainer.json         the manifest: the record, with size and crc32 of each file

If several processes cannot write one file (`_layouts`), there are `model-00001-of-00002.safetensors` and so on, and
`model.safetensors.index.json`. If they share no folder, each has its own part of a checkpoint, under the same name.

In an object store there is a checkpoint where there is a manifest: it is written last, and deleted first.

`_manifest` owns the manifest in each checkpoint, `_reader` and `_safetensors` the other files. `_manager` writes them.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax.sharding import Sharding
from jaxtyping import PyTree

from .._tree import listed, nearest
from ..distributed import Peers
from ..errors import DamagedError, brief, brief_name, warn
from ..storage import Location, StoreError, StorePath, exists, location
from ._manifest import MANIFEST, TENSORS, Manifest, agree_on_manifest, agreed, leads_out, own, read_json, read_manifest
from ._reader import INDEX, TensorReader, check_tree, load_tree
from ._safetensors import TensorFile

INDEX_FILE = "index.json"
_MAX_KNOWN = 50  # names of checkpoints that one error lists
_NAME = re.compile(r"step_([0-9]{8,18})(?:_([0-9]{1,18}))?")


def order(name: str) -> tuple[int, int]:
    """`(step, number of earlier checkpoints of that step)` from a checkpoint's name, `(-1, 0)` from any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


class CheckpointFolder:
    """The checkpoints in a folder, read by one process, or by several that make the same calls in the same order."""

    def __init__(self, folder: Location, peers: Peers | None = None, log: Callable[[str], None] = lambda text: None):
        """**Arguments:**

        - `folder`: on a disk or in an object store. It need not exist.
        - `peers`: the processes that read together.
        - `log`: called with what is copied to processes that lack it.
        """
        self.folder = folder
        self._peers = peers or Peers()
        self._log = log
        # Whether this process sees what the others write; on a disk it is not known before a save.
        self._sees_all = self._peers.n == 1 or isinstance(folder, StorePath)
        self._damaged: dict[str, DamagedError] = {}  # by checkpoint name

    def index(self) -> dict[str, str]:
        """Returns the name of the checkpoint for each tag (`"last"`, ...).

        If the file is missing, or names no last checkpoint, the index is rebuilt from the checkpoints' manifests.
        """
        index = self._written_index()
        return index if "last" in index else {**self._lost_index(), **index}

    def _written_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        index = read_json(own(path)) if exists(path) else {}
        for tag, name in index.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ValueError(
                    f"`{path}`: expected the name of a checkpoint for {brief(tag)}, got {brief(name)}. Correct it."
                )
        return index

    def names(self) -> list[str]:
        """Returns the names of the existing checkpoints, oldest first."""
        if isinstance(self.folder, StorePath):
            found = [key.removesuffix(f"/{MANIFEST}") for key in self.folder.sizes() if key.endswith(f"/{MANIFEST}")]
        else:
            found = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(filter(_NAME.fullmatch, found), key=order)

    def exist(self) -> bool:
        """Returns whether the folder has an index, or a checkpoint though its index is lost."""
        return (self.folder / INDEX_FILE).is_file() or bool(self.names())

    def _lost_index(self) -> dict[str, str]:
        """Returns the index, rebuilt from the checkpoints that appear complete."""
        index: dict[str, str] = {}
        for name in self.names():
            if (manifest := self._glance(name)) is not None:
                index |= dict.fromkeys([*manifest.tags, "last"], name)
        return index

    def _glance(self, name: str) -> Manifest | None:
        """Returns the manifest of a checkpoint whose files all exist in their sizes, otherwise None. Nothing else is
        read."""
        if name in self._damaged or leads_out(self.folder / name):
            return None
        try:
            return read_manifest(self.folder / name, is_part=not self._sees_all)
        except StoreError:  # nothing is known of it
            raise
        except (ValueError, OSError):
            return None

    def newest(self) -> list[Location]:
        """Returns the folders of the checkpoints to resume from: the last one by the index, then older ones. In every
        process the list is that of the process which has the newest.

        Warns if the index names no last checkpoint; then all existing ones are listed, the newest first.
        """

        def found() -> list[str]:
            last, names = self._written_index().get("last"), self.names()
            if last is not None:
                own(self.folder / last)
                names = [*(name for name in names if order(name) < order(last)), last]
            return [name for name in reversed(names) if name == last or not leads_out(self.folder / name)]

        everywhere = agreed(
            self._peers, "newest", self.folder / INDEX_FILE, lambda: [self._written_index().get("last"), found()]
        )
        last, names = max(everywhere, key=lambda each: order(each[1][0]) if each[1] else (-1, 0))
        if names and last is None:
            why = "no such file" if not exists(self.folder / INDEX_FILE) else "none of that name"
            warn(
                f"`{self.folder / INDEX_FILE}`: expected the name of the `last` checkpoint, got {why}. "
                f"The newest one that is complete is taken.",
            )
        return [self.folder / name for name in names]

    def resolve(self, which: str | Location) -> Location:
        """Returns the folder of a checkpoint, the same in all processes even if only some have it.

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
        return self.folder / found if order(found)[0] >= 0 else location(found)

    def _find(self, which: str | Location) -> str:
        """Returns the name of a checkpoint of this folder, or the absolute path of one."""
        index, names = self.index(), self.names()
        name = index.get(str(which), str(which))
        if name in names:
            return own(self.folder / name).name
        path = location(which, "checkpoint")
        if (path / MANIFEST).is_file():
            return os.path.abspath(path) if isinstance(path, Path) else str(path)
        if not isinstance(which, str) or os.sep in which:
            got = "is not there" if not exists(path) else f"holds no {MANIFEST}"
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

    def record(self, path: Location, *, tensors: bool = True) -> dict[str, Any]:
        """Returns the `record` of a checkpoint, as given to `save`, after size and checksum of each file are verified.

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
    def _noting(self, path: Location) -> Iterator[None]:
        """Remembers damaged checkpoints, so that `save` does not count them among those it keeps."""
        try:
            yield
        except DamagedError as error:
            self.note_damage(path, error)
            raise

    def note_damage(self, path: Location, error: DamagedError) -> None:
        """Remembers that a checkpoint is damaged."""
        if path.parent == self.folder:
            self._damaged[path.name] = error

    def damage(self, path: Location) -> DamagedError | None:
        """Returns the error that was found in a checkpoint, or None."""
        return self._damaged.get(path.name) if path.parent == self.folder else None

    def forget_damage(self) -> None:
        """Forgets which checkpoints are damaged, so that all are read again."""
        self._damaged.clear()

    def match(self, path: Location, kind: str, template: PyTree) -> None:
        """Raises, in all processes, the errors that `load` raises for a file's header. Reads no tensors."""
        with self._noting(path):

            def check() -> None:
                check_tree(TensorReader(self._file(path, kind)), template, kind)

            agreed(self._peers, f"check {kind}", path / f"{kind}{TENSORS}", check)

    def load(
        self,
        path: Location,
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

    def _file(self, path: Location, kind: str) -> Location:
        """Returns the file of one of a checkpoint's trees, or the index of its files. Raises ValueError if there is none."""
        file = own(path / f"{kind}.safetensors")
        file = file if file.is_file() else own(path / f"{kind}{INDEX}")
        if not file.is_file():
            there = ", ".join(sorted({re.split(r"[-.]", other.name)[0] for other in path.glob("*.safetensors")}))
            raise ValueError(f"`{path}`: expected one of {there}, got {kind!r}. Save it, or load without it.")
        return file
