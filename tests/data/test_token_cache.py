"""Token caches: built once and atomically by any number of workers and processes, and rows that contain every token."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redeqx.data import TokenCache, TokenRows, _token_cache, token_cache

TEXTS = [f"text number {i} " * (i % 7) for i in range(150)]
ROOT = Path(__file__).parents[2]


def tokenize(text):
    """Return one token per byte, followed by the end token 1."""
    return [*text.encode(), 1]


def tokenize_to_large_numbers(text):
    return [70_000 if text.startswith("text number 99 ") else len(text)]


def tokenize_shifted(text):
    return [token + 1 for token in tokenize(text)]


class CountingTokenizer:
    """A tokenizer that counts its texts, and can fail at one of them."""

    def __init__(self, fail_at=None):
        self.n, self.fail_at = 0, fail_at

    def __call__(self, text):
        if self.n == self.fail_at:
            raise KeyboardInterrupt
        self.n += 1
        return tokenize(text)


def build_cache(folder, texts=TEXTS, tokenize=tokenize, **options):
    return token_cache(folder, texts, tokenize, verbose=False, **options)


def file_contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [5, 6, 9, 10, 11, 23])
@pytest.mark.parametrize("stride", [None, 1, 4, 5])
def test_rows_contain_every_token(n_tokens, stride):
    rows = TokenRows(np.arange(n_tokens, dtype=np.uint16), 5, stride=stride)
    assert all(row.dtype == np.int32 and row.shape == (5,) for row in rows)
    assert {int(token) for row in rows for token in row} == set(range(n_tokens))
    starts = [int(row[0]) for row in rows]
    assert starts == sorted(set(starts)) and len(starts) == len(rows)
    assert starts[:-1] == [(stride or 5) * i for i in range(len(rows) - 1)] and starts[-1] == n_tokens - 5
    assert [row.tolist() for row in rows[1:]] == [row.tolist() for row in rows][1:]
    assert rows[-1].tolist() == rows[len(rows) - 1].tolist()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_segments_number_the_documents_in_a_row():
    rows = TokenRows(np.arange(12), 6, ends=np.array([2, 6, 6, 7, 11, 12]))
    assert [row["segments"].tolist() for row in rows] == [[1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 2, 3]]
    assert [row["tokens"].tolist() for row in rows] == [list(range(6)), list(range(6, 12))]
    assert rows[0]["segments"].dtype == np.int32


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([1, 2], {}, TypeError, "`tokens`: expected a flat array of integers, got list. Pass those of all documents as one"),
        (np.ones(9), {}, TypeError, "`tokens`: expected a flat array of integers, got float64[9]."),
        (np.arange(3), {}, ValueError, "`tokens`: expected at least a row of 4, got 3. Pass a smaller `length`."),
        (np.arange(9), {"stride": 5}, ValueError, "`stride`: expected at most `length`, 4, got 5, which leaves tokens out."),
        (np.arange(9), {"stride": 0}, ValueError, "`stride`: expected at least 1 or None, got 0."),
    ],
)
def test_invalid_rows_raise(tokens, options, error, message):
    with pytest.raises(error) as raised:
        TokenRows(tokens, 4, **options)
    assert message in str(raised.value)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_cache_contains_the_tokens_of_each_text(tmp_path):
    cache = build_cache(tmp_path / "cache")
    assert [row.tolist() for row in cache] == [tokenize(text) for text in TEXTS]
    assert cache.tokens.dtype == np.uint16 and len(cache.tokens) == cache.ends[-1] == sum(map(len, TEXTS)) + len(TEXTS)
    assert os.listdir(tmp_path) == ["cache"]
    rows = cache.rows(64, segments=True)
    assert rows[0]["tokens"].tolist() == np.concatenate(list(cache))[:64].tolist()
    assert rows[0]["segments"][:2].tolist() == [1, 2]
    cache.verify()
    flat = np.memmap(tmp_path / "cache" / "tokens.uint16.bin", "uint16", "r")  # readable without the library
    assert np.array_equal(flat, cache.tokens)


def test_existing_cache_tokenizes_only_samples(tmp_path):
    build_cache(tmp_path / "cache")
    tokenizer = CountingTokenizer()
    assert len(build_cache(tmp_path / "cache", TEXTS, tokenizer)) == 150
    assert tokenizer.n == 3
    assert len(TokenCache(tmp_path / "cache")) == 150


def test_iterable_gives_the_same_cache_as_a_list(tmp_path):
    build_cache(tmp_path / "list")
    build_cache(tmp_path / "iterable", (text for text in TEXTS))
    caches = [TokenCache(tmp_path / name) for name in ("list", "iterable")]
    assert np.array_equal(caches[0].tokens, caches[1].tokens) and np.array_equal(caches[0].ends, caches[1].ends)
    assert len(build_cache(tmp_path / "iterable", (text for text in TEXTS))) == 150


def test_large_tokens_are_stored_as_uint32(tmp_path):
    cache = build_cache(tmp_path / "cache", TEXTS, tokenize_to_large_numbers)
    assert cache.tokens.dtype == np.uint32
    assert [row.tolist() for row in cache] == [tokenize_to_large_numbers(text) for text in TEXTS]
    cache.verify()
    assert sorted(os.listdir(tmp_path / "cache")) == ["ends.bin", "manifest.json", "tokens.uint32.bin"]


@pytest.mark.sweep
def test_workers_write_the_same_files(tmp_path):
    build_cache(tmp_path / "alone")
    build_cache(tmp_path / "workers", n_workers=2)
    assert file_contents(tmp_path / "alone") == file_contents(tmp_path / "workers")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("as_iterable", [False, True])
def test_killed_build_resumes(as_iterable, tmp_path, monkeypatch):
    monkeypatch.setattr(_token_cache, "_SECONDS_BETWEEN_SAVES", 0.0)
    make_texts = (lambda: (text for text in TEXTS)) if as_iterable else lambda: TEXTS
    build_cache(tmp_path / "whole", make_texts())
    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path / "cache", make_texts(), CountingTokenizer(fail_at=140))
    assert sorted(os.listdir(tmp_path)) == [".tmp_cache", "whole"]
    with (tmp_path / ".tmp_cache" / "tokens.uint16.bin").open("ab") as file:
        file.write(b"written after the last record")
    tokenizer_of_rest = CountingTokenizer()
    build_cache(tmp_path / "cache", make_texts(), tokenizer_of_rest)
    assert tokenizer_of_rest.n == 150 - 128 + (1 if as_iterable else 3)
    assert file_contents(tmp_path / "cache") == file_contents(tmp_path / "whole")


@pytest.mark.parametrize("change", ["tokenizer", "record", "file"])
def test_build_that_cannot_resume_starts_over(change, tmp_path, monkeypatch):
    monkeypatch.setattr(_token_cache, "_SECONDS_BETWEEN_SAVES", 0.0)
    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path / "cache", TEXTS, CountingTokenizer(fail_at=140))
    unfinished = tmp_path / ".tmp_cache"
    if change == "record":
        (unfinished / "progress.json").write_text("{")
    if change == "file":
        (unfinished / "ends.bin").write_bytes(b"")
    cache = build_cache(tmp_path / "cache", TEXTS, tokenize_shifted if change == "tokenizer" else tokenize)
    assert cache[3].tolist() == (tokenize_shifted if change == "tokenizer" else tokenize)(TEXTS[3])
    cache.verify()


@pytest.mark.parametrize(
    ("texts", "fn", "options", "message"),
    [
        (
            TEXTS,
            tokenize,
            {"made_of": "b"},
            "expected one made of 'b', got a cache made of 'a'. Pass another folder, or delete",
        ),
        (TEXTS[:-1], tokenize, {}, "expected that of 149 texts, got a cache of 150."),
        (["other", *TEXTS[1:]], tokenize, {}, "expected text 0 of crc32 "),
        ([*TEXTS[:-1], "other"], tokenize, {}, "expected text 149 of crc32 "),
        (TEXTS, tokenize_shifted, {}, "expected tokens of text 0 as `tokenize` returns them, [2], got a cache with [1]."),
    ],
)
def test_cache_of_other_texts_or_tokens_raises(texts, fn, options, message, tmp_path):
    build_cache(tmp_path / "cache", made_of="a")
    with pytest.raises(ValueError) as raised:
        build_cache(tmp_path / "cache", texts, fn, **{"made_of": "a", **options})
    assert str(raised.value).startswith(f"`{tmp_path / 'cache'}`: ") and message in str(raised.value)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (
            "text",
            TypeError,
            "`tokenize`: expected a flat list of integers, got 'text' of text 0. Return the tokens' numbers",
        ),
        ([1.5], TypeError, "`tokenize`: expected a flat list of integers, got [1.5] of text 0."),
        ([3, -1], ValueError, "`tokenize`: expected integers from 0 to 2147483647, got -1 to 3 of text 0."),
        ([], ValueError, "`texts`: expected tokens, got none of 150 texts. Look at what `tokenize` returns."),
    ],
)
def test_invalid_tokens_raise(returned, error, message, tmp_path):
    with pytest.raises(error) as raised:
        build_cache(tmp_path / "cache", TEXTS, lambda text: returned)
    assert message in str(raised.value)


def test_unpicklable_tokenizer_with_workers_raises(tmp_path):
    with pytest.raises(TypeError) as raised:
        build_cache(tmp_path / "cache", TEXTS, lambda text: [1], n_workers=2)
    assert "`tokenize`: expected a function that can be pickled, as `n_workers` sends it to processes, got one that" in str(
        raised.value
    )
    assert "or pass `n_workers=0`." in str(raised.value)


def test_folder_with_other_files_raises(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"^`folder`: expected a token cache, or no folder, got .*, which holds other"):
        build_cache(tmp_path)
    with pytest.raises(ValueError, match=r"expected a token cache, got no manifest.json. Make one with `token_cache`\."):
        TokenCache(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "bit flip", "missing", "manifest", "version"])
def test_damaged_cache_raises(damage, tmp_path):
    cache = build_cache(tmp_path / "cache")
    file = tmp_path / "cache" / ("manifest.json" if damage in ("manifest", "version") else "tokens.uint16.bin")
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "bit flip":
        file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        with pytest.raises(ValueError, match=r"tokens\.uint16\.bin`: expected crc32"):
            TokenCache(tmp_path / "cache").verify()
        return
    elif damage == "version":
        file.write_text(json.dumps({**cache.manifest, "version": 2}))
    else:
        file.write_bytes(data[:-2])
    with pytest.raises(ValueError, match="of version 1, which this" if damage == "version" else "The cache is damaged"):
        TokenCache(tmp_path / "cache")


@pytest.mark.sweep
def test_concurrent_processes_build_the_cache_once(tmp_path):
    """Independent processes: each tokenizes the samples, and exactly one of them tokenizes all texts."""
    script = """
import sys, time
from redeqx.data import token_cache
n = 0
def tokenize(text):
    global n
    n += 1
    time.sleep(0.002)
    return [len(text)]
cache = token_cache(sys.argv[1], ["a" * i for i in range(300)], tokenize, verbose=False)
assert cache.tokens.tolist() == list(range(300))
print(n)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = sorted(int(run.communicate(timeout=200)[0]) for run in runs)
    assert counts == [3, 3, 303]
    assert os.listdir(tmp_path) == ["cache"]


def test_progress_is_shown(tmp_path, capsys):
    token_cache(tmp_path / "cache", TEXTS, tokenize)
    printed = capsys.readouterr().out
    assert "tokenize  text 64/150" in printed and "text 150/150" in printed
    assert (
        f"{tmp_path / 'cache'}: 12,150 tokens of 150 texts" in " ".join(printed.split()) or "tokens of 150 texts" in printed
    )
    token_cache(tmp_path / "cache", TEXTS, tokenize)
    assert capsys.readouterr().out == ""
