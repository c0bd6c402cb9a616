"""A checkpoint's `trainer.json`: what a run says of itself, and size and checksum of each file beside it.

Owns that file, and the proof that the others are what it says: each process reads its share of them, or all of those on a
disk of its own, once it has got from other processes what is missing there.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from ._crc32 import Crc32, crc32_of
from ._peers import Peers
from ._safetensors import CHUNK
from ._untrusted import brief, damaged, is_plain, is_size, load_json

FORMAT = "redeqx"
VERSION = 1
READABLE_VERSIONS = (1,)
RECORD = "trainer.json"
RESERVED = ("format", "version", "files", "crc32")  # what a record says of itself
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


def write_record(folder: Path, record: Mapping[str, Any], files: Mapping[str, Mapping[str, int]]) -> None:
    """Write a record, and fsync.

    **Arguments:**

    - `record`: what JSON can hold, without the names in `RESERVED`.
    - `files`: `{"size": bytes, "crc32": checksum}` of each file beside it, by its name.
    """
    full = {**record, "format": FORMAT, "version": VERSION, "files": files}
    write_json(folder / RECORD, {**full, "crc32": _crc32_of_record(full)})


def read_record(folder: Path, peers: Peers, say: Callable[[str], None]) -> dict[str, Any]:
    """What `write_record` was given as `record`, once the files are found to be what it says of them.

    All processes call it together, and it raises in all of them.

    Raises ValueError where the folder has no record, or one of an unknown version; DamagedError where a file is missing,
    truncated or altered.
    """
    is_shared = _complete(folder, peers, say)
    file = folder / RECORD
    if not file.is_file():
        raise ValueError(f"`{folder}`: expected the folder of a checkpoint, got none with a {RECORD}. Pass one.")
    record = read_json(own(file))
    if record.get("format") != FORMAT:
        raise ValueError(f"`{file}`: expected the record of a {FORMAT} checkpoint, got another file. Pass the path of one.")
    if (version := record.get("version")) not in READABLE_VERSIONS:
        raise ValueError(
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
    for name, expected in _files(file, record).items():
        _verify(own(folder / name), expected, peers, is_shared)
    return {key: value for key, value in record.items() if key not in RESERVED}


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


def _verify(file: Path, expected: Mapping[str, int], peers: Peers, is_shared: bool) -> None:
    """Raise DamagedError, in all processes, where a file has another size or checksum."""
    # Of one file each process reads its share; of files on disks of their own, each all of its own.
    n, me = (peers.n, peers.index) if is_shared else (1, 0)
    size = file.stat().st_size if file.is_file() else None
    share = 0 if size is None else _crc32(file, size * me // n, size * (me + 1) // n).contribution(size)
    found = peers.gather("verify", [size, share])
    for size, _ in found:
        if size != expected["size"]:
            raise damaged(file, f"{expected['size']} bytes", "no file" if size is None else str(size))
    shares = [share for _, share in found]
    for whole in [shares] if is_shared else [[share] for share in shares]:
        if (crc32 := crc32_of(whole, expected["size"])) != expected["crc32"]:
            raise damaged(file, f"crc32 {expected['crc32']}", str(crc32))


def _crc32(path: Path, start: int, stop: int) -> Crc32:
    """Of the bytes `[start, stop)` of a file."""
    crc32 = Crc32()
    with open(path, "rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
            crc32.add(chunk, start)
            start += len(chunk)
    return crc32


def _complete(folder: Path, peers: Peers, say: Callable[[str], None]) -> bool:
    """Bring the files that only some processes see to the others; whether all see one folder."""
    if peers.n == 1:
        return True

    def seen() -> dict[str, list[int]]:
        files = folder.iterdir() if folder.is_dir() else []
        stats = {file.name: file.stat() for file in files if not leads_out(file) and file.is_file()}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items() if not name.startswith(TMP)}

    found = peers.together("files", seen)
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
