"""A checkpoint's `trainer.json`: what a run says of itself, and size and checksum of each file beside it.

Owns that file, and the proof that the others are what it says: each process reads its share of them, or all of those on a
disk of its own, once it has got from other processes what is missing there.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from ..distributed import Peers
from ..errors import DamagedError, brief, damaged, is_plain, is_size, load_json, unreadable
from ._crc32 import crc32_of, crc32_of_range
from ._safetensors import CHUNK

FORMAT = "redeqx"
VERSION = 1
READABLE_VERSIONS = (1,)
RECORD = "trainer.json"
RESERVED = ("format", "version", "tags", "files", "crc32")  # what a record says of itself
TENSORS = ".safetensors"  # what the name of a file of tensors ends with
TMP = ".tmp_"  # what a name begins with that is no part of a checkpoint yet


def write_json(path: Path, value: Any) -> None:
    """Write a file, and fsync."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises DamagedError for another file."""
    try:
        value = load_json(path)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise damaged(path, "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise damaged(path, "a JSON object", brief(value))
    return value


def leads_out(path: Path) -> bool:
    """Whether an entry of a folder is a link to somewhere outside of that folder: a save leaves no links."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def own(path: Path) -> Path:
    """An entry of a folder of ours. Raises ValueError where it is a link that leads out of the folder."""
    if leads_out(path):
        raise ValueError(
            f"`{path}`: expected what a save left there, got a link to {os.path.realpath(path)}. Put a copy in its place, "
            "or pass the path of a checkpoint elsewhere."
        )
    return path


def write_record(
    folder: Path, record: Mapping[str, Any], tags: Sequence[str], files: Mapping[str, Mapping[str, int]]
) -> None:
    """Write a record, and fsync.

    **Arguments:**

    - `record`: what JSON can hold, without the names in `RESERVED`.
    - `tags`: what the index will call the checkpoint, so that a lost index can be put together again.
    - `files`: `{"size": bytes, "crc32": checksum}` of each file beside it, by its name.
    """
    full = {**record, "format": FORMAT, "version": VERSION, "tags": list(tags), "files": files}
    write_json(folder / RECORD, {**full, "crc32": _crc32_of_record(full)})


def agreed(peers: Peers, topic: str, file: Path, act: Callable[[], Any]) -> list[Any]:
    """What every process's `act()` returns (JSON), in their order; where one of them raises, all raise the same.

    Raises DamagedError for the file that the system cannot read, and whatever ValueError `act` raises.
    """
    value = raised = None
    try:
        value = act()
    except OSError as error:
        raised = unreadable(file, error)
    except ValueError as error:
        raised = error
    problem = None if raised is None else [isinstance(raised, DamagedError), str(raised)]
    found = peers.gather(topic, [value, problem])
    if raised is not None and peers.n == 1:
        raise raised
    for _, problem in found:
        if problem is not None:
            raise (DamagedError if problem[0] else ValueError)(problem[1]) from raised
    return [value for value, _ in found]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint as its `trainer.json` describes it.

    **Arguments:**

    - `record`: what `write_record` was given.
    - `tags`: what the index called it; none where the first releases wrote it.
    - `files`: size and checksum of each file beside the record.
    """

    folder: Path
    record: dict[str, Any]
    tags: list[str]
    files: dict[str, dict[str, int]]


def read_manifest(folder: Path, *, is_part: bool = False) -> Manifest:
    """The description of a checkpoint whose files are there in their sizes, as this process sees it; none is read.

    **Arguments:**

    - `is_part`: whether files may be missing, which are on the disks of other processes.

    Raises DamagedError for any other folder, ValueError for a file that is a link to somewhere else.
    """
    manifest = _parsed(folder)
    for name, expected in manifest.files.items():
        file = own(folder / name)
        try:
            size = file.stat().st_size if file.is_file() else None
        except OSError as error:
            raise unreadable(file, error) from error
        if size != expected["size"] and not (size is None and is_part):
            raise damaged(file, f"{expected['size']} bytes", "no file" if size is None else str(size))
    return manifest


def _parsed(folder: Path) -> Manifest:
    file = folder / RECORD
    if not os.path.lexists(file):
        raise DamagedError(f"`{folder}`: expected the folder of a checkpoint, got none with a {RECORD}. Pass one.")
    record = read_json(own(file))
    if record.get("format") != FORMAT:
        raise DamagedError(
            f"`{file}`: expected the record of a {FORMAT} checkpoint, got another file. Pass the path of one."
        )
    if (version := record.get("version")) not in READABLE_VERSIONS:
        raise DamagedError(
            f"`{file}`: expected version {' or '.join(map(str, READABLE_VERSIONS))}, which this release "
            f"reads, got {brief(version)}. Install the release of {FORMAT} that wrote it, or a later one."
        )
    crc32 = record.pop("crc32", None)
    try:
        own_crc32 = _crc32_of_record(record)
    except RecursionError as error:  # what can just be read may be too deep to be written again
        raise damaged(file, "a record that can be written again", str(error)) from error
    if crc32 != own_crc32:
        raise damaged(file, f"a record of crc32 {brief(crc32)}", str(own_crc32))
    tags = record.get("tags", [])
    if not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise damaged(file, "`tags` to be a list of names", brief(tags))
    plain = {key: value for key, value in record.items() if key not in RESERVED}
    return Manifest(folder, plain, tags, _files(file, record))


class Checks:
    """Verifies the files of a checkpoint, each byte read once and by one process.

    Of one file each process reads its share; of files on disks of their own, each all of its own.
    """

    def __init__(self, manifest: Manifest, peers: Peers, is_shared: bool):
        self._manifest, self._peers, self._is_shared = manifest, peers, is_shared

    def contribution(self, file: Path, start: int = 0, stop: int | None = None) -> int:
        """What this process's share of the bytes `[start, stop)` of a file, all by default, contributes to its checksum."""
        if file.name not in self._manifest.files:
            raise damaged(self._manifest.folder / RECORD, f"size and crc32 of {file.name}", "none")
        index, n = (self._peers.index, self._peers.n) if self._is_shared else (0, 1)
        size = self._manifest.files[file.name]["size"]
        length = (size if stop is None else stop) - start
        share = crc32_of_range(file, start + length * index // n, start + length * (index + 1) // n)
        return share.contribution(size)

    def compare(self, name: str, contributions: Sequence[int]) -> None:
        """Raise DamagedError for a file that has another checksum than the manifest says.

        **Arguments:**

        - `contributions`: of every process, over all the bytes of the file.
        """
        expected = self._manifest.files[name]
        for parts in [list(contributions)] if self._is_shared else [[part] for part in contributions]:
            if (crc32 := crc32_of(parts, expected["size"])) != expected["crc32"]:
                raise damaged(self._manifest.folder / name, f"crc32 {expected['crc32']}", str(crc32))

    def verify(self, names: Iterable[str]) -> None:
        """Read whole files; raises DamagedError, in all processes, for one that is not what the manifest says."""
        for name in names:
            file = self._manifest.folder / name
            self.compare(name, agreed(self._peers, "verify", file, partial(self.contribution, file)))


def agree_on_manifest(folder: Path, peers: Peers, say: Callable[[str], None]) -> tuple[Manifest, Checks]:
    """As `read_manifest`, of all processes together, once files that a process lacks have been copied to it. Files that hold
    no tensors are verified; `Checks` verifies the others.

    Raises as `read_manifest` does, in all processes.
    """
    is_shared = _complete(folder, peers, say)
    manifests: list[Manifest] = []
    agreed(peers, "manifest", folder / RECORD, lambda: manifests.append(read_manifest(folder)))
    (manifest,) = manifests
    checks = Checks(manifest, peers, is_shared)
    checks.verify(name for name in manifest.files if not name.endswith(TENSORS))
    return manifest, checks


def _crc32_of_record(record: Mapping[str, Any]) -> int:
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


def _complete(folder: Path, peers: Peers, say: Callable[[str], None]) -> bool:
    """Bring the files that only some processes see to the others; whether all see one folder."""
    if peers.n == 1:
        return True

    def seen() -> dict[str, list[int]]:
        files = folder.iterdir() if folder.is_dir() else []
        stats = {file.name: file.stat() for file in files if not leads_out(file) and file.is_file()}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items() if not name.startswith(TMP)}

    found = agreed(peers, "files", folder, seen)
    if all(each == found[0] for each in found):
        return True
    for name in sorted({name for each in found for name in each}):
        having = [i for i, each in enumerate(found) if name in each]
        if len(having) < peers.n:
            say(f"{folder / name}: copied from process {having[0]} to those that have it not")
            _copy(folder / name, found[having[0]][name][0], peers, having)
    return False


def _copy(file: Path, size: int, peers: Peers, having: Sequence[int]) -> None:
    """Copy a file from the first process that has it to those that have not."""
    lacks = peers.index not in having
    beside = file.with_name(f"{TMP}{file.name}")
    if lacks:
        file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        source = files.enter_context(open(file, "rb")) if peers.index == having[0] else None
        copy = files.enter_context(open(beside, "wb")) if lacks else None
        for start in range(0, size, CHUNK):
            n = min(CHUNK, size - start)
            words = np.zeros(CHUNK // 4, np.uint32)  # always as many, so that one program is compiled
            if source is not None:
                words.view(np.uint8)[:n] = np.frombuffer(source.read(n), np.uint8)
            words = np.asarray(multihost_utils.broadcast_one_to_all(words, is_source=source is not None))
            if copy is not None:
                copy.write(words.view(np.uint8)[:n].data)
        if copy is not None:
            copy.flush()
            os.fsync(copy.fileno())
    if lacks:
        os.rename(beside, file)
