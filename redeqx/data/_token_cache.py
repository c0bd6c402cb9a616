"""Token cache: a folder of tokens, made once from texts and read by every later run.

    cache/tokens.uint16.bin    all tokens, one document after another; uint32 if the vocabulary needs it
    cache/ends.bin             where each document ends, in tokens from the start, int64
    cache/manifest.json        their counts, sizes and checksums, and a description of their source

All numbers are little-endian, so `np.memmap(path, "uint16", "r")` reads the tokens on any machine. The files are written
to a temporary folder next to the final one, fsynced, and moved by renaming the folder: a cache is complete or absent. A
killed build continues from what it had written. Of several processes, also on several hosts or in several runs, one builds
while the others wait.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from ..checkpoint import Lock, LockedError, write_json
from ..errors import brief, check_folder, check_function, is_size, load_json, with_names
from ..monitor import Console
from ..storage import disk_path, fsync_folder, open_new, open_old, replacing
from ._examples import check_examples, is_function, size_of
from ._streams import checksum
from ._tokens import TokenRows
from ._workers import ArgumentNames, CollatePool, Workers, drawn_ahead

MANIFEST, PROGRESS, ENDS = "manifest.json", "progress.json", "ends.bin"
FORMAT = "redeqx tokens"
_VERSION = 1
_TEXTS_A_CALL = 64
_SECONDS_BETWEEN_SAVES = 30.0
_SECONDS_BETWEEN_LOOKS = 0.5  # while waiting for another process's build
_CHUNK = 2**24  # bytes per read
_ARGUMENTS = ArgumentNames("tokenize", "n_workers", "n_workers", "n_workers=0")


class TokenCache(Sequence[Any]):
    """The documents in a folder of `token_cache`: `len()` is their number, item `i` an int32 array of document `i`'s tokens.

    `tokens` is a memory-mapped array `[n_tokens]` of all tokens, uint16 or uint32; `ends` is where each document ends, int64
    `[n_documents]`.

    Raises ValueError for a folder that is not a token cache, and for files whose size differs from the build's.
    """

    def __init__(self, folder: str | Path):
        self.folder = disk_path(folder, "folder")
        self.manifest = _read(self.folder)
        for name, sums in self.manifest["files"].items():
            path = self.folder / name
            if (size := path.stat().st_size if path.is_file() else None) != sums["size"]:
                raise _damaged(path, f"{sums['size']} bytes", "no file" if size is None else str(size))
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self.tokens: np.ndarray = np.memmap(self.folder / _tokens_file(self.manifest["dtype"]), dtype, "r")
        self.ends: np.ndarray = np.memmap(self.folder / ENDS, "<i8", "r")

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        return np.array(self.tokens[self.ends[i - 1] if i else 0 : self.ends[i]], np.int32)

    def rows(self, length: int, *, stride: int | None = None, segments: bool = False) -> TokenRows:
        """Returns rows of `length` tokens across the documents' borders, see `TokenRows`.

        **Arguments:**

        - `stride`: from row to row, in tokens; by default `length`.
        - `segments`: whether items are dicts that also number each row's documents.
        """
        return TokenRows(self.tokens, length, stride=stride, ends=self.ends if segments else None)

    def verify(self) -> None:
        """Reads all files. Raises ValueError if a checksum differs from the build's."""
        for name, sums in self.manifest["files"].items():
            if (crc32 := _crc32(self.folder / name)) != sums["crc32"]:
                raise _damaged(self.folder / name, f"crc32 {sums['crc32']}", str(crc32))


@with_names
def token_cache(
    folder: str | Path,
    texts: Iterable[Any],
    tokenize: Callable[[Any], Sequence[int]],
    *,
    n_workers: int = 0,
    made_of: str = "",
    verbose: bool = True,
) -> TokenCache:
    """Returns the tokens of these texts, from a folder that the first call makes and later calls read.

    A later call compares its arguments with the source of the cache: `made_of`, the number of texts, and the first, middle
    and last text with their tokens (for an iterable, the first). Every process of a run calls it; one builds, and on disks
    that are not shared, one per disk.

    **Arguments:**

    - `folder`: the folder of the cache. An incomplete cache is written next to it.
    - `texts`: strings or anything else that `tokenize` takes; with `len()` and integer items, or an iterable.
    - `tokenize`: returns the tokens of one text, integers from 0 to 2**31 - 1, including the one that ends a document.
    - `n_workers`: processes that tokenize; 0 for only this one. They need a `tokenize` and texts that can be pickled, and a
        script that does its work under `if __name__ == "__main__":`. The cache does not depend on their number.
    - `made_of`: a description of texts and tokenizer, such as "wiki 2026-01, llama 3".
    - `verbose`: whether to print the progress.

    Raises ValueError for a cache of other texts or another tokenizer, for a folder that is something else, and for texts
    without any token; TypeError if `tokenize` returns anything but integers.
    """
    folder = disk_path(folder, "folder")
    check_folder(folder, "folder")
    if not isinstance(made_of, str):
        raise TypeError(f"`made_of`: expected a text, got {brief(made_of)}. Pass a string, such as 'wiki 2026-01, llama 3'.")
    check_function(tokenize, "tokenize", ["text"])
    if is_function(texts):
        raise TypeError("`texts`: expected texts, got a function. Call it.")
    check_examples(texts, "texts")
    workers = CollatePool(partial(_tokenized, tokenize), Workers(n_workers, "processes"), _ARGUMENTS)
    console = Console(None, verbose=verbose)
    made = _Source(texts, tokenize, made_of)
    has_said = False
    with closing(workers):
        while not (folder / MANIFEST).exists():
            if folder.exists() and any(folder.iterdir()):
                raise ValueError(
                    f"`folder`: expected a token cache, or no folder, got {folder}, which holds other files. Pass another."
                )
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock = Lock(folder, console.info)
            except LockedError:
                if not has_said:
                    console.info(f"{folder}: waiting for the process that builds it")
                    has_said = True
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                continue
            try:
                if not (folder / MANIFEST).exists():
                    _build(folder, made, workers, console, lock)
                    return TokenCache(folder)
            finally:
                lock.release()
    cache = TokenCache(folder)
    made.compare(cache)
    return cache


class _Source:
    """The source of a cache: its texts, with samples of them and of their tokens."""

    def __init__(self, texts: Any, tokenize: Callable[[Any], Sequence[int]], words: str):
        self.texts = texts
        n = self.n = size_of(texts)
        self._first: list[Any] = []
        if n is None:
            self._iterator = iter(texts)
            self._first = list(islice(self._iterator, 1))
            samples = dict(enumerate(self._first))
        else:
            samples = {i: texts[i] for i in (0, n // 2, n - 1)}
        self._tokens = {i: _tokenized(tokenize, [(i, text)])[0] for i, text in samples.items()}
        self.record = {
            "made_of": words,
            "n_texts": n,
            "texts": {str(i): checksum(text) for i, text in samples.items()},
            "tokens": {str(i): checksum(tokens) for i, tokens in self._tokens.items()},
        }

    def after(self, start: int) -> Iterator[tuple[int, Any]]:
        """Returns the texts from a number on, each with its number. Those of an iterable can be read only once."""
        if self.n is not None:
            return ((i, self.texts[i]) for i in range(start, self.n))
        return islice(enumerate(chain(self._first, self._iterator)), start, None)

    def compare(self, cache: TokenCache) -> None:
        """Raises ValueError for a cache from another source."""
        made = cache.manifest["made_of"]

        def refuse(mine: str, its: str) -> None:
            raise ValueError(
                f"`{cache.folder}`: expected {mine}, got a cache {its}. Pass another folder, or delete this one."
            )

        if made["made_of"] != self.record["made_of"]:
            refuse(f"one made of {brief(self.record['made_of'])}", f"made of {brief(made['made_of'])}")
        if self.n is not None and self.n != len(cache):
            refuse(f"that of {self.n} texts", f"of {len(cache)}")
        for i, tokens in self._tokens.items():
            mine, its = self.record["texts"][str(i)], made["texts"].get(str(i))
            if None not in (mine, its) and mine != its:
                refuse(f"text {i} of crc32 {mine}", f"where it has {its}")
            if not np.array_equal(tokens, cache[i]):
                refuse(
                    f"tokens of text {i} as `tokenize` returns them, {brief(tokens.tolist())}",
                    f"with {brief(cache[i].tolist())}",
                )


def _tokenized(
    tokenize: Callable[[Any], Sequence[int]], texts: list[tuple[int, Any]]
) -> tuple[Int[np.ndarray, " n_tokens"], Int[np.ndarray, " n_texts"]]:
    """Tokenizes several numbered texts; returns their concatenated tokens, and the number of tokens of each."""
    each = []
    for i, text in texts:
        tokens = np.asarray(tokenize(text))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(
                f"`tokenize`: expected a flat list of integers, got {brief(tokens.tolist())} of text {i}. "
                "Return the tokens' numbers, such as `.ids` of an encoding."
            )
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
            raise ValueError(
                f"`tokenize`: expected integers from 0 to {2**31 - 1}, got {tokens.min()} to {tokens.max()} of text {i}. "
                "Return the tokens' numbers in the vocabulary."
            )
        each.append(tokens.astype(np.uint32))
    return np.concatenate(each), np.array([len(tokens) for tokens in each], np.int64)


def _build(folder: Path, made: _Source, workers: CollatePool, console: Console, lock: Lock) -> None:
    """Makes the cache, or continues from what an earlier process has written."""
    with closing(_Writer(folder.with_name(f".tmp_{folder.name}"), made.record)) as writer:
        if writer.n_documents:
            console.info(f"{folder}: continuing after {writer.n_documents:,} texts")
        texts = made.after(writer.n_documents)
        calls = (workers.start(some) for some in iter(lambda: list(islice(texts, _TEXTS_A_CALL)), []))
        line = console.progress(n_steps=made.n, first_step=writer.n_documents, title="tokenize", unit="text")
        with line:
            for result in drawn_ahead(calls, 2 * workers.n):
                tokens, lengths = result()
                writer.add(tokens, lengths)
                line.update(writer.n_documents, metrics={}, n_examples=len(lengths), n_tokens=len(tokens))
        if not writer.n_tokens:
            raise ValueError(
                f"`texts`: expected tokens, got none of {writer.n_documents} texts. Look at what `tokenize` returns."
            )
        lock.check()
        writer.finish(folder)
    console.info(f"{folder}: {writer.n_tokens:,} tokens of {writer.n_documents:,} texts")


class _Writer:
    """Appends documents to a folder next to the cache, and records from time to time how much of it is safely on disk."""

    def __init__(self, folder: Path, made_of: dict[str, Any]):
        self._folder, self._made_of = folder, made_of
        self.n_documents = self.n_tokens = 0
        self._dtype, self._crc32 = "uint16", {"tokens": 0, "ends": 0}
        self._saved_at = time.monotonic()
        self._files: dict[str, Any] = {}
        for path in (folder, folder / PROGRESS):
            if path.is_symlink():
                path.unlink()
        try:
            progress = load_json(folder / PROGRESS)
            if progress["made_of"] != made_of:
                raise ValueError("made of something else")
            self.n_documents, self.n_tokens = progress["n_documents"], progress["n_tokens"]
            self._dtype, self._crc32 = progress["dtype"], progress["crc32"]
            self._open()
        except (OSError, ValueError, KeyError, TypeError):  # nothing to continue from
            self.close()
            self.n_documents = self.n_tokens = 0
            self._dtype, self._crc32 = "uint16", {"tokens": 0, "ends": 0}
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self._open()

    def _open(self) -> None:
        """Opens both files, and truncates them to the record."""
        for dtype in {"uint16", "uint32"} - {self._dtype}:
            (self._folder / _tokens_file(dtype)).unlink(missing_ok=True)
        tokens, ends = self._folder / _tokens_file(self._dtype), self._folder / ENDS
        sizes = {tokens: self.n_tokens * np.dtype(self._dtype).itemsize, ends: self.n_documents * 8}
        if any(size and path.stat().st_size < size for path, size in sizes.items()):
            raise ValueError("files that are shorter than recorded")
        for of, path in (("tokens", tokens), ("ends", ends)):
            self._files[of] = os.fdopen(open_old(path, os.O_WRONLY | os.O_APPEND) if sizes[path] else open_new(path), "ab")
            self._files[of].truncate(sizes[path])

    def add(self, tokens: Int[np.ndarray, " n_tokens"], lengths: Int[np.ndarray, " n_documents"]) -> None:
        """Appends documents: their tokens, and the number of each one's tokens."""
        if len(tokens) and tokens.max() > np.iinfo(self._dtype).max:
            self._widen()
        self._write("tokens", tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())
        self._write("ends", (self.n_tokens + np.cumsum(lengths)).astype("<i8").tobytes())
        self.n_tokens += len(tokens)
        self.n_documents += len(lengths)
        if time.monotonic() > self._saved_at + _SECONDS_BETWEEN_SAVES:
            self._save()

    def _write(self, of: str, data: bytes) -> None:
        self._files[of].write(data)
        self._crc32[of] = zlib.crc32(data, self._crc32[of])

    def _widen(self) -> None:
        """Writes the tokens so far as uint32."""
        self._files["tokens"].close()
        narrow, self._dtype, self._crc32["tokens"] = self._folder / _tokens_file(self._dtype), "uint32", 0
        self._files["tokens"] = os.fdopen(open_new(self._folder / _tokens_file(self._dtype)), "wb")
        with open(narrow, "rb") as file:
            while data := file.read(_CHUNK):
                self._write("tokens", np.frombuffer(data, "<u2").astype("<u4").tobytes())
        self._save()
        narrow.unlink()

    def _sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _save(self) -> None:
        """Records what has been written so far, once it is on disk."""
        self._sync()
        counts = {"n_documents": self.n_documents, "n_tokens": self.n_tokens, "dtype": self._dtype, "crc32": self._crc32}
        with replacing(self._folder / PROGRESS) as beside:
            write_json(beside, {"made_of": self._made_of, **counts})
        self._saved_at = time.monotonic()

    def finish(self, folder: Path) -> None:
        """Writes the manifest, and renames the folder to its final name."""
        self._sync()
        names = {"tokens": _tokens_file(self._dtype), "ends": ENDS}
        sizes = {of: self._files[of].tell() for of in names}
        files = {names[of]: {"size": sizes[of], "crc32": self._crc32[of]} for of in names}
        counts = {"n_documents": self.n_documents, "n_tokens": self.n_tokens, "dtype": self._dtype}
        head = {"format": FORMAT, "version": _VERSION}
        (self._folder / PROGRESS).unlink(missing_ok=True)
        write_json(self._folder / MANIFEST, {**head, **counts, "files": files, "made_of": self._made_of})
        os.rename(self._folder, folder)
        fsync_folder(folder.parent)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _tokens_file(dtype: str) -> str:
    return f"tokens.{dtype}.bin"


def _read(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a cache."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"`{folder}`: expected a token cache, got no {MANIFEST}. Make one with `token_cache`.")
    try:
        manifest = load_json(path)
    except ValueError as error:
        raise _damaged(path, "JSON", str(error)) from error
    match manifest:
        case {"format": str(of), "version": version} if (of, version) != (FORMAT, _VERSION):
            raise ValueError(
                f"`{path}`: expected {FORMAT!r} of version {_VERSION}, which this release reads, got {brief((of, version))}."
                " Pass another folder, or install the release that wrote it."
            )
        case {
            "dtype": "uint16" | "uint32" as dtype,
            "n_tokens": n_tokens,
            "n_documents": n_documents,
            "files": {"ends.bin": {"size": ends, "crc32": _}, **others},
            "made_of": {"made_of": _, "n_texts": _, "texts": {}},
            "format": _,
        } if (
            is_size(n_tokens)
            and is_size(n_documents)
            and ends == 8 * n_documents
            and others.keys() == {_tokens_file(dtype)}
            and others[_tokens_file(dtype)].get("size") == n_tokens * np.dtype(dtype).itemsize
        ):
            return manifest
    raise _damaged(path, "the manifest of a token cache", json.dumps(manifest)[:80])


def _damaged(path: Path, rule: str, got: str) -> ValueError:
    return ValueError(f"`{path}`: expected {rule}, got {got}. The cache is damaged: delete its folder, and build it anew.")


def _crc32(path: Path) -> int:
    crc32 = 0
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
            crc32 = zlib.crc32(data, crc32)
    return crc32
