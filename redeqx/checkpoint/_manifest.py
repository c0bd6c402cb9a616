"""The manifest of a checkpoint, `trainer.json`: the record of the run, and the size and checksum of each other file.

Owns that file and the verification of the others: each process reads its share of them, or on its own disk all of them,
after missing files have been copied from other processes.
"""

import json
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import multihost_utils

from ..distributed import Peers
from ..errors import DamagedError, brief, damaged, is_plain, is_size, load_json, unreadable
from ..storage import Location, StoreError, StorePath, exists, read_chunks, replacing, write_new
from ._crc32 import crc32_of, crc32_of_range
from ._safetensors import CHUNK

FORMAT = "redeqx"
VERSION = 1
MANIFEST = "trainer.json"
RESERVED = ("format", "version", "tags", "files", "crc32")  # the manifest's own fields
TENSORS = ".safetensors"  # the suffix of files with tensors
TMP = ".tmp_"  # the prefix of names that are not part of a checkpoint yet


def write_json(path: Location, value: Any) -> dict[str, int]:
    """Writes an object, or a file with fsync; returns its `{"size": bytes, "crc32": checksum}`."""
    text = json.dumps(value, indent=1).encode()
    if isinstance(path, StorePath):
        path.write_bytes(text)
    else:
        write_new(path, [text])
    return {"size": len(text), "crc32": zlib.crc32(text)}


def read_json(path: Location) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises DamagedError for any other file."""
    try:
        value = load_json(path)
    except StoreError:  # not an error of this file, whose contents are unknown
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise damaged(path, "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise damaged(path, "a JSON object", brief(value))
    return value


def is_outside_link(path: Location) -> bool:
    """Returns whether an entry of a folder is a link that leads out of the folder. A save creates no links."""
    if not isinstance(path, Path):
        return False  # a store has no links
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))


def checked_entry(path: Location) -> Location:
    """Returns an entry of a checkpoint's folder. Raises ValueError if it is a link that leads out of the folder."""
    if isinstance(path, Path) and is_outside_link(path):
        raise ValueError(
            f"`{path}`: expected an entry that a save created, got a link to {os.path.realpath(path)}. Put a copy in its "
            "place, or pass the path of a checkpoint elsewhere."
        )
    return path


def write_manifest(
    folder: Location, record: Mapping[str, Any], tags: Sequence[str], files: Mapping[str, Mapping[str, int]]
) -> None:
    """Writes the manifest, and calls fsync. Of each other file it has `{"size": bytes, "crc32": checksum}` by name, and the
    tags in the index, from which a lost index is rebuilt."""
    full = {**record, "format": FORMAT, "version": VERSION, "tags": list(tags), "files": files}
    write_json(folder / MANIFEST, {**full, "crc32": _own_crc32(full)})


def run_everywhere(peers: Peers, topic: str, file: Location, act: Callable[[], Any]) -> list[Any]:
    """As `Peers.together`, for an `act` that reads: all processes raise DamagedError if the system cannot read the file,
    StoreError if an object store does not answer, and any ValueError of `act`."""

    def read() -> Any:
        try:
            return act()
        except StoreError:
            raise
        except OSError as error:
            raise unreadable(file, error) from error

    return peers.together(topic, read, kinds=(DamagedError, StoreError, ValueError))


class Manifest(NamedTuple):
    """A checkpoint as its `trainer.json` describes it: see `write_manifest`."""

    record: dict[str, Any]
    tags: list[str]
    files: dict[str, dict[str, int]]

    @property
    def is_resumable(self) -> bool:
        """Whether a run resumes from it: not from the weights alone, or from weights that were cast to be exported."""
        return self.record.get("resumable", True) and any(kind_of(file) == "optimizer" for file in self.files)


def read_manifest(folder: Location, *, is_part: bool = False) -> Manifest:
    """Returns the manifest of a checkpoint, after checking that all of its files exist here with the right sizes (with
    `is_part`, some may be on the disks of other processes). Their contents are not read.

    Raises DamagedError for any other folder, ValueError for a file that is a link that leads out of it.
    """
    manifest = _parsed(folder)
    sizes = folder.sizes() if isinstance(folder, StorePath) else None  # in one request
    for name, expected in manifest.files.items():
        file = checked_entry(folder / name)
        try:
            size = sizes.get(name) if sizes is not None else file.stat().st_size if file.is_file() else None
        except OSError as error:
            raise unreadable(file, error) from error
        if size != expected["size"] and not (size is None and is_part):
            raise damaged(file, f"{expected['size']} bytes", "no file" if size is None else str(size))
    return manifest


def _parsed(folder: Location) -> Manifest:
    file = folder / MANIFEST
    if not exists(file):
        raise DamagedError(f"`{folder}`: expected the folder of a checkpoint, got none with a {MANIFEST}. Pass one.")
    record = read_json(checked_entry(file))
    if record.get("format") != FORMAT:
        raise DamagedError(
            f"`{file}`: expected the manifest of a {FORMAT} checkpoint, got another file. Pass the path of one."
        )
    if (version := record.get("version")) != VERSION:
        raise DamagedError(
            f"`{file}`: expected version {VERSION}, which this release reads, got {brief(version)}. Install the release of "
            f"{FORMAT} that wrote it, or a later one."
        )
    crc32 = record.pop("crc32", None)
    try:
        own_crc32 = _own_crc32(record)
    except RecursionError as error:  # nested so deeply that it can be read but not written
        raise damaged(file, "a manifest that can be written again", str(error)) from error
    if crc32 != own_crc32:
        raise damaged(file, f"a manifest of crc32 {brief(crc32)}", str(own_crc32))
    match record:
        case {"tags": list(tags), "files": dict(files)} if all(map(_is_file, files.items())):
            plain = {key: value for key, value in record.items() if key not in RESERVED}
            return Manifest(plain, tags, files)
    raise damaged(file, "`tags`, and `files` of its folder with size and crc32", brief(record))


def kind_of(name: str) -> str:
    """Returns the kind of tree that a file holds: `"model"` for `model.safetensors`, `model.safetensors.index.json` and
    `model-00001-of-00002.safetensors`."""
    return re.sub(r"(-\d+-of-\d+)?\.safetensors(\.index\.json)?$", "", name)


def verified_manifest(folder: Location, peers: Peers, log: Callable[[str], None], kinds: Collection[str] | None) -> Manifest:
    """As `read_manifest`, for all processes together, after copying files to the processes that lack them, and verifying the
    checksums of the files of the trees `kinds`, or of all. In a shared folder each process reads its share of every file,
    otherwise those on its own disk.

    Raises as `read_manifest` does, and DamagedError for a wrong checksum, in all processes.
    """
    is_shared = _complete(folder, peers, log)
    manifests: list[Manifest] = []
    run_everywhere(peers, "manifest", folder / MANIFEST, lambda: manifests.append(read_manifest(folder)))
    (manifest,) = manifests
    index, n = (peers.index, peers.n) if is_shared else (0, 1)
    for name, expected in manifest.files.items():
        if kinds is not None and kind_of(name) not in kinds:
            continue
        file, size = folder / name, expected["size"]
        share = partial(crc32_of_range, file, size * index // n, size * (index + 1) // n, size)
        found = run_everywhere(peers, "verify", file, share)
        for parts in [found] if is_shared else [[part] for part in found]:
            if (crc32 := crc32_of(parts, size)) != expected["crc32"]:
                raise damaged(file, f"crc32 {expected['crc32']}", str(crc32))
    return manifest


def _own_crc32(fields: Mapping[str, Any]) -> int:
    """Returns the checksum that a manifest stores of itself: of its JSON as `json.dumps` writes it, with sorted keys."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _is_file(item: tuple[Any, Any]) -> bool:
    """Returns whether this is a name of a file in the manifest's folder, with its size and checksum."""
    name, sums = item
    return is_plain(name) and isinstance(sums, dict) and is_size(sums.get("size")) and is_size(sums.get("crc32"))


def _complete(folder: Location, peers: Peers, log: Callable[[str], None]) -> bool:
    """Copies files to processes that lack them. Returns whether all processes see the same folder."""
    if peers.n == 1 or isinstance(folder, StorePath):
        return True

    def seen() -> dict[str, list[int]]:
        files = folder.iterdir() if folder.is_dir() else []
        stats = {file.name: file.stat() for file in files if not is_outside_link(file) and file.is_file()}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items() if not name.startswith(TMP)}

    found = run_everywhere(peers, "files", folder, seen)
    if all(each == found[0] for each in found):
        return True
    for name in sorted({name for each in found for name in each}):
        having = [i for i, each in enumerate(found) if name in each]
        if len(having) < peers.n:
            log(f"{folder / name}: copied from process {having[0]} to processes that lack it")
            _copy(folder / name, found[having[0]][name][0], peers, having)
    return False


def _copy(file: Path, size: int, peers: Peers, having: Sequence[int]) -> None:
    """Copies a file from the first process that has it to those that lack it."""
    is_source = peers.index == having[0]

    def received() -> Iterator[memoryview]:
        for start in range(0, size, CHUNK):
            n = min(CHUNK, size - start)
            chunk = np.zeros(CHUNK, np.uint8)  # all of one size, so that only one program is compiled
            if is_source:
                chunk[:n] = np.frombuffer(b"".join(read_chunks(file, start, start + n)), np.uint8)
            words = multihost_utils.broadcast_one_to_all(chunk.view(np.uint32), is_source=is_source)
            yield np.asarray(words).view(np.uint8)[:n].data

    if peers.index in having:
        deque(received(), maxlen=0)  # all processes take part
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as beside:
        write_new(beside, received())
