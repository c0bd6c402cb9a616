"""Malicious files: each is either read correctly or refused with a clear error, and cannot make the reader allocate
memory."""

import json
import os
import re
import shutil
import struct
import tracemalloc
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors import deserialize

from redeqx.checkpoint import CheckpointManager, TensorReader, load_tree, write_tensors
from redeqx.errors import DamagedError, brief, brief_name, is_plain
from redeqx.models import from_pretrained, save_pretrained
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests._checkpoints import DTYPES, edit_manifest
from tests.models.families._case import random_model

DEEP = b"[" * 100_000
NINES = "9" * 4000  # Python parses at most 4300 digits
NESTED = "[" * 500 + "]" * 500  # a depth that the JSON parser accepts


@contextmanager
def little_memory(mb=4.0):
    """Checks that the code in this context allocates less than `mb` megabytes at its peak."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mb * 1e6


def refusal(path, fn, *args, error=ValueError):
    """Returns the message of the error that `fn` raises for a file, after `check_message`."""
    with pytest.raises(error) as raised:
        fn(*args)
    message = str(raised.value)
    check_message(path, message)
    return message


def check_message(path, message):
    # `{path}`: expected {rule}, got {found}. {Next step}.
    assert re.match(r"`[^`]+`: (`.*`: )?expected .*, got .*\s[A-Z][^\n]*\.( |$)", message, re.DOTALL), message
    assert str(path) in message and len(message) < 20_000 and message.encode() and "\0" not in message, message


# --- one file -------------------------------------------------------------------------------------------------------


def file_of(header, data=b"\0" * 8, length=None):
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def w(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def shaped(text, offsets="[0, 8]"):
    """A header whose shape is this JSON text, which `json.dumps` may not write."""
    return f'{{"w": {{"dtype": "F32", "shape": {text}, "data_offsets": {offsets}}}}}'


HEADERS = {
    "length 0": (file_of(w(), length=0), "a header of 2 to 69 bytes, got a length of 0"),
    "length 1": (file_of(w(), length=1), "a header of 2 to 69 bytes, got a length of 1"),
    "length beyond the file": (file_of(w(), length=10**7), "got a length of 10000000"),
    "length 2**63": (file_of(w(), length=2**63), "got a length of 9223372036854775808"),
    "length 2**64 - 1": (file_of(w(), length=2**64 - 1), "got a length of 18446744073709551615"),
    "length alone": (b"\x02" + b"\0" * 7, "a header of 2 to 0 bytes"),
    "seven bytes": (b"\x02" + b"\0" * 6, "at least the 8 bytes of a header's length, got 7 bytes"),
    "zeros": (b"\0" * 1000, "got a length of 0"),
    "not UTF-8": (file_of(b'{"\xff\xfe": 1}'), "a header of JSON, got 'utf-8' codec"),
    "UTF-16": (file_of(json.dumps(w()).encode("utf-16-le")), "a header of JSON, got Expecting property name"),
    "UTF-32": (file_of(json.dumps(w()).encode("utf-32-le")), "a header of JSON, got Expecting property name"),
    "byte order mark": (file_of(b"\xef\xbb\xbf{}", b""), "a header of JSON, got Unexpected UTF-8 BOM"),
    "two objects": (file_of(b"{}{}", b""), "a header of JSON, got Extra data"),
    "a list": (file_of([w()]), "a header that is a JSON object, got a list"),
    "null": (file_of(b"null"), "a header that is a JSON object, got a NoneType"),
    "deep lists": (file_of(DEEP), "a header of JSON, got maximum recursion depth"),
    "deep objects": (file_of(b'{"a":' * 100_000), "a header of JSON, got maximum recursion depth"),
    "deep metadata": (file_of(b'{"__metadata__":' + DEEP), "a header of JSON, got maximum recursion depth"),
    "a tensor twice": (file_of('{"w": {}, "w": {}}'), "a header of JSON, got a name that occurs twice"),
    "dtype twice": (file_of(json.dumps(w())[:-2] + ', "dtype": "F32"}}'), "a header of JSON, got a name that occurs"),
    "metadata twice": (file_of('{"__metadata__": {}, "__metadata__": {}}', b""), "a name that occurs twice"),
    "metadata a list": (file_of({"__metadata__": ["x"], **w()}), "a `__metadata__` of texts, got ['x']"),
    "metadata a text": (file_of({"__metadata__": "x", **w()}), "a `__metadata__` of texts, got 'x'"),
    "metadata null": (file_of({"__metadata__": None, **w()}), "a `__metadata__` of texts, got None"),
    "metadata of numbers": (file_of({"__metadata__": {"x": 1}, **w()}), "a `__metadata__` of texts, got {'x': 1}"),
    "metadata a tensor": (file_of({"__metadata__": w()["w"]}), "a `__metadata__` of texts, got {"),
    "a tensor that is a list": (file_of({"w": [1]}), "`w` to have dtype, shape and data_offsets, got [1]"),
    "nested": (file_of(f'{{"w": {NESTED}}}'), "`w` to have dtype, shape and data_offsets, got [[[...]]]"),
    "no offsets": (file_of({"w": {"dtype": "F32", "shape": [2]}}), "`w` to have dtype, shape and data_offsets"),
    "one offset": (file_of(w(data_offsets=[8])), "`w` to have dtype, shape and data_offsets"),
    "three offsets": (file_of(w(data_offsets=[0, 8, 8])), "`w` to have dtype, shape and data_offsets"),
    "offsets by name": (file_of(w(data_offsets={"0": 0, "1": 8})), "`w` to have dtype, shape and data_offsets"),
    "offsets a text": (file_of(w(data_offsets="08")), "`w` to have dtype, shape and data_offsets"),
    "offsets texts": (file_of(w(data_offsets=["0", "8"])), "two data_offsets in order, got ['0', '8']"),
    "offsets floats": (file_of(w(data_offsets=[0.0, 8.0])), "two data_offsets in order, got [0.0, 8.0]"),
    "offsets bools": (file_of(w(data_offsets=[False, 8])), "two data_offsets in order, got [False, 8]"),
    "offsets null": (file_of(w(data_offsets=[None, 8])), "two data_offsets in order, got [None, 8]"),
    "offset NaN": (file_of(shaped("[2]", "[NaN, 8]")), "two data_offsets in order, got [nan, 8]"),
    "offset Infinity": (file_of(shaped("[2]", "[0, Infinity]")), "two data_offsets in order, got [0, inf]"),
    "offset 1e400": (file_of(shaped("[2]", "[0, 1e400]")), "two data_offsets in order, got [0, inf]"),
    "offsets negative": (file_of(w(data_offsets=[-8, 0])), "two data_offsets in order, got [-8, 0]"),
    "offset -0.0": (file_of(w(data_offsets=[-0.0, 8])), "two data_offsets in order, got [-0.0, 8]"),
    "offsets swapped": (file_of(w(data_offsets=[8, 0])), "two data_offsets in order, got [8, 0]"),
    "offset 2**63": (file_of(w(data_offsets=[0, 2**63])), "two data_offsets in order, got [0, 9223372036854775808]"),
    "offsets that wrap": (
        file_of(w(data_offsets=[2**64, 2**64 + 8])),
        "two data_offsets in order, got [18446744073709551616",
    ),
    "offsets of 4000 digits": (file_of(shaped("[2]", f"[-{NINES}, {NINES}]")), "two data_offsets in order, got [-99999"),
    "offset of 5000 digits": (file_of(shaped("[2]", f"[0, {'9' * 5000}]")), "a header of JSON, got Exceeds the limit"),
    "offset in the middle": (file_of(w(data_offsets=[4, 12])), "`w` to begin at 0, where the previous one ends, got 4"),
    "beyond the file": (file_of(w(shape=[2**40], data_offsets=[0, 2**42])), "4398046511104 bytes of tensors, as the"),
    "less than the file": (file_of(w(), b"\0" * 9), "8 bytes of tensors, as the header says, got 9"),
    "no tensors": (file_of({}), "0 bytes of tensors, as the header says, got 8"),
    "shape a text": (file_of(w(shape="2")), "`w` to have dtype, shape and data_offsets"),
    "shape of bools": (file_of(w(shape=[True, 2])), "`w` to have a shape of sizes, got [True, 2]"),
    "shape of floats": (file_of(w(shape=[2.0])), "`w` to have a shape of sizes, got [2.0]"),
    "shape NaN": (file_of(shaped("[NaN]")), "`w` to have a shape of sizes, got [nan]"),
    "shape Infinity": (file_of(shaped("[-Infinity]")), "`w` to have a shape of sizes, got [-inf]"),
    "shape negative": (file_of(w(shape=[-2, -1])), "`w` to have a shape of sizes, got [-2, -1]"),
    "shape 2**64": (file_of(w(shape=[2**64 + 2])), "`w` to have a shape of sizes, got [18446744073709551618]"),
    "shape nested": (file_of(shaped(f"[{NESTED}]")), "`w` to have a shape of sizes, got [[[...]]]"),
    "shape that wraps": (file_of(w(shape=[2**33, 2**31])), "a shape that an array can have, got F32 [8589934592, 21474"),
    "shape whose bytes wrap": (file_of(w(shape=[2**62, 1])), "a shape that an array can have, got F32 [4611686018427387"),
    "empty, but too large": (file_of(w(shape=[0, 2**40, 2**40], data_offsets=[0, 0]), b""), "a shape that an array can"),
    "empty, beyond an index": (file_of(w(shape=[0, 2**63], data_offsets=[0, 0]), b""), "`w` to have a shape of sizes"),
    "65 dims": (file_of(w(shape=[1] * 65, data_offsets=[0, 4]), b"\0" * 4), "a shape that an array can have, got F32 [1, 1"),
    "10k dims": (file_of(w(shape=[2**62] * 10_000)), "`w` to have a shape that an array can have, got F32 [46116"),
    "dims of 4000 digits": (file_of(shaped(f"[{', '.join([NINES] * 200)}]")), "`w` to have a shape of sizes, got [9999"),
    "more than its shape": (file_of(w(shape=[1])), "`w` to take 4 bytes, as F32 [1] does, got 8"),
    "dtype unknown": (file_of(w(dtype="F128")), "F8_E5M2FNUZ, got F128."),
    "dtype in lower case": (file_of(w(dtype="f32")), "F8_E5M2FNUZ, got f32."),
    "dtype packed": (file_of(w(dtype="F4")), "F8_E5M2FNUZ, got F4."),
    "dtype long": (file_of(w(dtype="F" * 10**5)), "F8_E5M2FNUZ, got FFFF"),
    "dtype a number": (file_of(w(dtype=32)), "`w` to have dtype, shape and data_offsets"),
    "dtype a list": (file_of(w(dtype=["F32"])), "`w` to have dtype, shape and data_offsets"),
    "overlap": (file_of({"v": w()["w"], **w(data_offsets=[4, 12])}, b"\0" * 12), "`w` to begin at 8, where the previous"),
    "same bytes": (file_of({"v": w()["w"], **w()}), "`w` to begin at 8, where the previous one ends, got 0"),
    "inside": (file_of({"v": w()["w"], **w(shape=[1], data_offsets=[2, 6])}), "`w` to begin at 8, where the previous one"),
    "gap": (file_of({"v": w()["w"], **w(data_offsets=[12, 20])}, b"\0" * 20), "`w` to begin at 8, where the previous one"),
    "empty, out of place": (file_of({"v": w()["w"], **w(shape=[0], data_offsets=[4, 4])}), "`w` to begin at 8"),
    "long name": (file_of({"n" * 10**5: {}}), "nnn...nnn"),
    "name with NUL": (file_of({"a\0b": {}}), r"`a\x00b` to have dtype"),
    "name that is half a letter": (file_of('{"\\ud800": {}}'), r"`\ud800` to have dtype"),
    "name that moves the cursor": (file_of({"\x1b[2J\n": {}}), r"`\x1b[2J\n` to have dtype"),
}


@pytest.mark.parametrize("content, message", HEADERS.values(), ids=HEADERS)
def test_a_header(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with little_memory():
        said = refusal(path, TensorReader, path, error=DamagedError)
    assert f"`{path}`: expected " in said and message in said


def test_a_sparse_file_allocates_no_more_than_its_header(tmp_path):
    path = tmp_path / "x.safetensors"
    for length in (10**12 - 8, 10**8 + 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        os.truncate(path, 10**12)
        with little_memory():
            assert f"got a length of {length}" in refusal(path, TensorReader, path)


def test_files_that_are_not_regular(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")  # opening it would block until there is a writer
    assert "got 0 bytes" in refusal(tmp_path, TensorReader, tmp_path / "x.safetensors")


def test_unusual_but_valid_headers_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        file_of({"__metadata__": {}, "a\0\n": {**w()["w"], "more": 1}, "": w(shape=[0, 3])["w"] | {"data_offsets": [8, 8]}})
    )
    file = TensorReader(path)
    assert [(name, file.read(name).shape) for name in file.names()] == [("a\0\n", (2,)), ("", (0, 3))]
    assert "a\0\n" in file and "b" not in file
    path.write_bytes(file_of(w(shape=[1] * 64, data_offsets=[0, 4]), b"\0" * 4))
    assert TensorReader(path).read("w").shape == (1,) * 64


def test_a_mismatch_of_hostile_names_is_short(tmp_path):
    path, n = tmp_path / "x.safetensors", 1000
    path.write_bytes(file_of({f"{i}\ud800\n" + "n" * 1000: w(shape=[0], data_offsets=[0, 0])["w"] for i in range(n)}, b""))
    with little_memory(mb=60):
        said = refusal(path, load_tree, path, {f"layer.{i}": np.zeros(2) for i in range(300)})
    assert f"got {n + 300} that differ" in said and said.count("\n") == 12


# --- random mutations -----------------------------------------------------------------------------------------------

NASTY = [
    *(None, True, False, 0, 1, -1, 2, 8, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, int(NINES)),
    *(0.0, 8.0, 1e300, float("inf"), float("nan"), "", "x", "F32", "U8", "\0", "\ud800", "../x", "/etc/passwd", "n" * 3000),
    *([], [0], [8, 0], [0, 8], [1] * 70, [[0, 8]], [2**62, 4], [0, 2**62, 4], {}, {"w": {}}, json.loads(NESTED)),
]
TOKENS = [b"-", b"1", b"e9", b"NaN", b"[", b"]", b"{", b"}", b'"', b",", b"null", b"true", b"\xff", b"\0", b"9" * 25, b"\\u"]


def some(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def mutated_bytes(rng, content):
    content = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        at, stop = sorted(int(i) for i in rng.integers(0, len(content) + 1, 2))
        match int(rng.integers(6)):
            case 0:
                content[at : at + 1] = bytes([int(rng.integers(256))])
            case 1:
                content[at : at + 1] = bytes(byte ^ (1 << int(rng.integers(8))) for byte in content[at : at + 1])
            case 2:
                del content[at:]
            case 3:
                del content[at : min(stop, at + 40)]
            case 4:
                content[stop:stop] = content[at : min(stop, at + 40)]
            case 5:
                content[at:at] = some(rng, TOKENS)
    return bytes(content)


def mutated(rng, value):
    """Returns a JSON value with one node replaced, removed, renamed or duplicated, or with one integer changed."""
    inside = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    if not inside or rng.random() < 0.15:
        return value + int(rng.integers(-9, 10)) if type(value) is int and rng.random() < 0.5 else some(rng, NASTY)
    key, child = some(rng, inside)
    match int(rng.integers(10)):
        case 0:
            inside = [(k, v) for k, v in inside if k != key]
        case 1:
            inside = [
                (some(rng, ["", "x", "../x", "\0", "\ud800", "dtype", "n" * 300]) if k == key else k, v) for k, v in inside
            ]
        case 2:
            inside.append((f"{key}.", child))
        case _:
            inside = [(k, mutated(rng, v) if k == key else v) for k, v in inside]
    return dict(inside) if isinstance(value, dict) else [v for _, v in inside]


def tensors_of_header(content):
    """Reads a valid file by a minimal reader: `{name: (dtype's code, shape, bytes)}`."""
    (length,) = struct.unpack("<Q", content[:8])
    fields, data = json.loads(content[8 : 8 + length].decode()), content[8 + length :]
    fields.pop("__metadata__", None)
    places = sorted(field["data_offsets"] for field in fields.values())
    assert [0, *(stop for _, stop in places)] == [*(start for start, _ in places), len(data)]  # no overlap, no gap
    return {name: (f["dtype"], f["shape"], data[slice(*f["data_offsets"])]) for name, f in fields.items()}


def outcome(path, content):
    """Returns whether a file is read. Checks that the result matches the header, or else that the error is clear."""
    path.write_bytes(content)
    try:
        file = TensorReader(path)
        found = {name: file.read(name) for name in file.names()}
    except DamagedError as error:
        check_message(path, str(error))
        return False
    codes = {dtype: code for code, dtype in DTYPES.items()}
    found = {name: (codes[array.dtype], list(array.shape), array.tobytes()) for name, array in found.items()}
    assert found == tensors_of_header(content)
    return True


@pytest.fixture
def original(tmp_path):
    """A file with tensors of several dtypes: its path, header and data."""
    codes = list(DTYPES)[::4]
    leaves = {f"blocks.{i}.{code}": np.arange(i * 3).reshape(i, 3).astype(DTYPES[code]) for i, code in enumerate(codes)}
    path = tmp_path / "x.safetensors"
    write_tensors(path, {**leaves, "scalar": np.float32(1)}, metadata={"format": "np"})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return path, content[8 : 8 + length], content[8 + length :]


@pytest.mark.parametrize("how", ["bytes", "header", "json"])
def test_mutated_files(original, how):
    path, header, data = original
    rng = np.random.default_rng(0)
    n_read = 0
    with little_memory():
        for i in range(600):
            if how == "bytes":
                content = mutated_bytes(rng, file_of(header, data))
            elif how == "header":  # with the correct length
                content = file_of(mutated_bytes(rng, header), data)
            else:
                content = file_of(json.dumps(mutated(rng, json.loads(header))), data)
            try:
                is_read = outcome(path, content)
            except BaseException as error:
                error.add_note(f"mutation {i}: {content[:2000]!r}")
                raise
            n_read += is_read
            if is_read and b"\\ud" not in content:  # safetensors must accept it too
                assert len(deserialize(content)) == len(TensorReader(path).names()), content
    assert 0 < n_read < 300, n_read


# --- folders of checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 and 2, next to those of another run."""
    checkpoints = CheckpointManager(tmp_path / "run" / "ckpts")
    for here in (checkpoints, CheckpointManager(tmp_path / "elsewhere" / "ckpts")):
        for step in (1, 2):
            here.save(step, {"model": {"w": np.full(3, step, np.float32)}}, {"step": step}, ("last", f"tag{step}"))
    return checkpoints


def loaded(checkpoints, which):
    path = checkpoints.resolve(which)
    record = checkpoints.record(path)
    return record, checkpoints.load(path, "model", {"w": np.zeros(3, np.float32)})["w"].tolist()


def rebuilt(index, read):
    """The warning of a reader of a damaged index, which finds the newest checkpoint without it."""
    with pytest.warns(UserWarning) as warned:
        assert read(CheckpointManager(index.parent)) == "step_00000002"
    (text,) = (str(each.message) for each in warned)
    assert str(index) in text and len(text) < 1000 and text.isprintable()
    return text


INDEXES = {
    "a list": ("[]", r"a JSON object, got \[\]"),
    "nothing": ("", "JSON, got Expecting value"),
    "not UTF-8": (b'{"last": "\xff"}', "JSON, got 'utf-8' codec"),
    "deep": (DEEP, "JSON, got maximum recursion depth"),
    "nested": (f'{{"last": {NESTED}}}', r"the name of a checkpoint for 'last', got \[\[\[\.\.\.\]\]\]\."),
    "twice": ('{"last": "step_00000001", "last": "step_00000002"}', "JSON, got a name that occurs twice"),
    "long": ({"last": "x" * 10**5}, r"for 'last', got 'xxx.*\.\.\.xxx"),
    "many digits": ({"last": "step_" + "1" * 10**5}, "for 'last', got 'step_111"),
    "other digits": ({"last": "step_" + "\u0661" * 8}, "for 'last', got 'step_"),
    "a tag that moves the cursor": ({"\x1b[2J\ud800": 1}, r"for '\\x1b\[2J\\ud800', got 1\."),
    **{
        repr(name): (
            {"tag1": "step_00000001", "last": name},
            "index.json`: expected the name of a checkpoint for 'last', got",
        )
        for name in [
            *("../../elsewhere/ckpts/step_00000001", "/etc", "step_00000001/../step_00000002", "step_00000001/", "."),
            *("..", "", "step_00000001\0", "step_00000001\n", ".tmp_step_00000001", "index.json", "\ud800", "step_1"),
            *(None, True, 1, 1.5, float("nan"), [], ["step_00000001"], {}, {"step_00000001": 1}),
        ]
    },
}


@pytest.mark.parametrize("content, message", INDEXES.values(), ids=INDEXES)
def test_an_index(saved, content, message):
    path = saved.folder / "index.json"
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with little_memory():
        for read in (
            lambda folder: folder.index()["last"],
            lambda folder: folder.newest()[0].name,
            lambda folder: folder.resolve("last").name,
            lambda folder: folder.resolve("step_00000002").name,
        ):
            assert re.search(message, rebuilt(path, read), re.DOTALL)


def test_an_index_that_names_a_missing_checkpoint(saved):
    (saved.folder / "index.json").write_text('{"last": "step_00000007"}')
    expected = "expected the checkpoint `step_00000007`, which the index names as 'last', got no such folder."
    assert expected in refusal(saved.folder, saved.resolve, "last")
    assert "got none with a trainer.json" in refusal(saved.folder, saved.record, saved.newest()[0])


def test_an_index_that_is_not_a_file(saved):
    index = saved.folder / "index.json"
    index.unlink()
    os.mkfifo(index)
    newest = lambda folder: folder.index()["last"]  # noqa: E731
    assert "index.json`: expected JSON, got no regular file" in rebuilt(index, newest)
    index.unlink()
    index.mkdir()
    assert "index.json`: expected JSON, got no regular file" in rebuilt(index, newest)
    index.rmdir()
    index.symlink_to(saved.folder.parent / "nowhere.json")
    assert "got a link to" in refusal(index, saved.index)


def test_a_json_file_of_a_terabyte(saved):
    for path in (saved.folder / "index.json", saved.folder / "step_00000002" / "trainer.json"):
        os.truncate(path, 10**12)
        with little_memory():
            if path.name == "index.json":
                text = rebuilt(path, lambda folder: folder.index()["last"])
            else:
                text = refusal(path, lambda: CheckpointManager(saved.folder).record(saved.folder / "step_00000002"))
            assert "expected JSON, got 1000000000000 bytes, more than 100000000" in text


@pytest.mark.parametrize(
    "name",
    [
        "../step_00000001/model.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "model\0",
        "\n",
        "\ud800",
        "n" * 300,
    ],
)
def test_a_record_that_names_other_files(saved, name):
    folder = saved.folder / "step_00000002"
    edit_manifest(folder, lambda record: record["files"].update({name: {"size": 8, "crc32": 0}}))
    said = refusal(folder / "trainer.json", saved.record, folder, error=DamagedError)
    assert "trainer.json`: expected `tags`, and `files` of its folder with size and crc32, got " in said
    assert not is_plain(name)


SUMS = [
    *(None, 1, [], {}, "8", {"size": 8}, {"crc32": 8}, {"size": None, "crc32": 1}, {"size": 80.0, "crc32": 1}),
    *({"size": True, "crc32": 1}, {"size": -1, "crc32": 1}, {"size": 2**63, "crc32": 1}, {"size": int(NINES), "crc32": 1}),
    *({"size": 8, "crc32": "1"}, {"size": 8, "crc32": None}, {"size": 8, "crc32": [1]}, {"size": [8], "crc32": 1}),
    {"size": json.loads(NESTED), "crc32": 1},
]


@pytest.mark.parametrize("sums", SUMS, ids=brief)
def test_a_record_with_wrong_checksums(saved, sums):
    folder = saved.folder / "step_00000002"
    edit_manifest(folder, lambda record: record["files"].update({"model.safetensors": sums}))
    said = refusal(folder / "trainer.json", saved.record, folder, error=DamagedError)
    assert "trainer.json`: expected `tags`, and `files` of its folder with size and crc32, got " in said


@pytest.mark.parametrize("files", [None, [], "model.safetensors", 1, ["model.safetensors"], ...], ids=str)
def test_a_record_without_files(saved, files):
    folder = saved.folder / "step_00000002"
    edit_manifest(folder, lambda record: {k: v for k, v in {**record, "files": files}.items() if v is not ...})
    assert "`files` of its folder with size and crc32, got " in refusal(folder, saved.record, folder, error=DamagedError)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "a JSON object, got []"),
        ("[" * 10**5, "JSON, got maximum recursion depth"),
        ('{"format": "redeqx", "format": "redeqx"}', "JSON, got a name that occurs twice"),
        ("{}", "the manifest of a redeqx checkpoint, got another file"),
        (f'{{"format": "redeqx", "version": {NESTED}}}', "version 1, which this release reads, got [[[...]]]"),
        (f'{{"format": "redeqx", "version": {NINES}}}', "version 1, which this release reads, got 99999"),
        (f'{{"format": "redeqx", "version": 1, "crc32": {NESTED}}}', "a manifest of crc32 [[[...]]], got "),
        (f'{{"format": "redeqx", "version": 1, "crc32": "{"x" * 10**5}"}}', "a manifest of crc32 'xxx"),
        ('{"format": "redeqx", "version": 1}', "a manifest of crc32 None, got "),
    ],
    ids=lambda value: brief(value)[:50],
)
def test_a_record(saved, content, message):
    folder = saved.folder / "step_00000002"
    (folder / "trainer.json").write_text(content)
    with little_memory():
        assert message in refusal(folder / "trainer.json", saved.record, folder)


def test_a_record_near_the_depth_limit(saved):
    """At depths between the limits of the JSON parser and of the JSON writer, each manifest is refused."""
    folder, said = saved.folder / "step_00000002", set()
    for depth in (*range(700, 1000), *range(1000, 200_000, 1999)):  # the limits of Python 3.11, and of later ones
        text = '{"format": "redeqx", "version": 1, "crc32": 1, "x": ' + "[" * depth + "]" * depth + "}"
        (folder / "trainer.json").write_text(text)
        said.add(refusal(folder / "trainer.json", saved.record, folder, error=DamagedError).split(", got")[0])
    assert len(said) >= 2


def test_links_that_leave_a_checkpoint(saved, tmp_path):
    folder, other = saved.folder / "step_00000002", tmp_path / "elsewhere" / "ckpts" / "step_00000002"
    for name in ("model.safetensors", "trainer.json"):
        kept = (folder / name).read_bytes()
        for target in (other / name, "../step_00000001/" + name):
            (folder / name).unlink()
            (folder / name).symlink_to(target)
            assert f"{name}`: expected an entry that a save created, got a link to " in refusal(folder, saved.record, folder)
            if name == "model.safetensors":
                assert "got a link to " in refusal(folder, saved.load, folder, "model", {"w": np.zeros(3, np.float32)})
        for target in (tmp_path / "nowhere", name):  # the second one is a link to itself
            (folder / name).unlink()
            (folder / name).symlink_to(target)
            refusal(folder, saved.record, folder)
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    (folder / "model.safetensors").rename(folder / "real")
    (folder / "model.safetensors").symlink_to("real")  # a link within the checkpoint
    assert loaded(saved, "last") == ({"step": 2}, [2.0] * 3)


def test_links_that_leave_the_folder_of_checkpoints(saved, tmp_path):
    other = tmp_path / "elsewhere" / "ckpts" / "step_00000002"
    for step in (1, 2):
        shutil.rmtree(saved.folder / f"step_{step:08}")
        (saved.folder / f"step_{step:08}").symlink_to(other)
        for which in (f"tag{step}", f"step_{step:08}"):
            assert f"step_{step:08}`: expected an entry that a save created, got a link to" in refusal(
                saved.folder, saved.resolve, which
            )
        if step == 1:  # it is skipped, not followed
            assert [path.name for path in saved.newest()] == ["step_00000002"]
    assert "got a link to " in refusal(saved.folder, saved.newest)
    # A path that the user names is followed.
    assert loaded(saved, saved.folder / "step_00000002") == loaded(saved, other) == ({"step": 2}, [2.0] * 3)
    # A save neither writes nor removes through a link.
    saved.save(3, {"model": {"w": np.full(3, 3, np.float32)}}, {"step": 3}, ("last", "tag1", "tag2"), keep_last=0)
    assert saved.names() == ["step_00000003"] and loaded(saved, "last") == ({"step": 3}, [3.0] * 3)
    assert {path.name for path in other.iterdir()} == {"model.safetensors", "trainer.json"}


def test_a_linked_workdir_works(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved.folder)
    assert loaded(CheckpointManager(tmp_path / "link"), "last") == ({"step": 2}, [2.0] * 3)


@pytest.mark.parametrize("file", [pytest.param("index.json", marks=pytest.mark.sweep), "step_00000002/trainer.json"])
def test_mutated_json(saved, file):
    """The checksum of a manifest is corrected, so that the later checks run too."""
    path, folder = saved.folder / file, saved.folder / "step_00000002"
    text = path.read_bytes()
    rng = np.random.default_rng(1)
    n_read = 0
    with little_memory():
        for i in range(240):
            if i % 3 == 0:
                path.write_bytes(mutated_bytes(rng, text))
            elif file == "index.json":
                path.write_text(json.dumps(mutated(rng, json.loads(text))))
            else:
                path.write_bytes(text)
                try:
                    edit_manifest(folder, lambda record: as_dict(mutated(rng, record)))
                except RecursionError:
                    continue
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "(?s).* It is rebuilt from the checkpoints", UserWarning)
                    record, values = loaded(saved, "last" if file == "index.json" else folder)
            except ValueError as error:
                check_message(saved.folder, str(error))
                continue
            except BaseException as error:
                error.add_note(f"mutation {i}: {path.read_bytes()[:2000]!r}")
                raise
            n_read += 1
            if file == "index.json":
                assert values == [record["step"]] * 3
            else:
                held = json.loads(path.read_text())
                same = {
                    key: value for key, value in held.items() if key not in ("format", "version", "tags", "files", "crc32")
                }
                assert brief_json(record) == brief_json(same) and values == [2.0] * 3
    assert n_read == 240 if file == "index.json" else 0 < n_read < 160, n_read  # an index is rebuilt


def as_dict(value):
    return value if isinstance(value, dict) else {"value": value}


def brief_json(value):
    return json.dumps(value, sort_keys=True)  # NaN is not equal to itself


# --- Hugging Face folders -------------------------------------------------------------------------------------------

CONFIG = GPT2Config(40, 12, d_model=16, n_layers=2, n_heads=2)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_pretrained(random_model(GPT2, CONFIG), CONFIG, tmp_path_factory.mktemp("gpt2"), max_shard_size="8KB")


@pytest.fixture
def folder(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "a" / "gpt2")
    shutil.copytree(gpt2, tmp_path / "other")
    return tmp_path / "a" / "gpt2"


NAME = "transformer.wte.weight"


@pytest.mark.parametrize(
    "shard",
    [
        *("../other/model.safetensors", "../../other/model-00001-of-00004.safetensors", "/etc/passwd", "", ".", "..", "a/b"),
        *("x\0", "\ud800", "x\n", "n" * 300, "é" * 200, None, 1, True, [], {}, json.loads(NESTED), int(NINES), "a\\b"),
    ],
    ids=brief,
)
def test_an_index_of_shards(folder, shard):
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"][NAME] = shard
    index.write_text(json.dumps(fields))
    with little_memory():
        said = refusal(index, TensorReader.find, folder, "model")
    assert f"`{index}`: `{NAME}`: expected a file of this folder, got {brief(shard)}, which points outside or is no" in said


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "got JSONDecodeError"),
        ("[]", "got TypeError"),
        ("{}", "got KeyError"),
        ('{"weight_map": []}', "got AttributeError"),
        ('{"weight_map": null}', "got AttributeError"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "a name that occurs twice"),
        ("[" * 10**5, "maximum recursion depth"),
        ('{"weight_map":' * 10**5, "maximum recursion depth"),
        ('{"weight_map": {"\udcff' + "n" * 10**5, "got UnicodeDecodeError: 'utf-8' codec"),
    ],
    ids=lambda value: ascii(value[:30]),
)
def test_an_invalid_index_of_shards(folder, content, message):
    index = folder / "model.safetensors.index.json"
    index.write_text(content, errors="surrogateescape")
    with little_memory():
        said = refusal(index, TensorReader.find, folder, "model")
    assert said.startswith(f"`{index}`: expected JSON with a `weight_map`, got ") and message in said


def test_an_index_of_hostile_names(folder):
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    shard = fields["weight_map"][NAME]
    index.write_text(json.dumps({"weight_map": {"\x1b[2J\ud800" + "n" * 10**5: shard}}))
    assert r"expected the tensor `\x1b[2J\ud800nnn" in refusal(folder, TensorReader.find, folder, "model")


def test_a_folder_of_the_hub_cache_is_read(folder):
    """Its files are links to blobs in another folder."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(f"../blobs/{i}")
    assert from_pretrained(folder)[1] == CONFIG


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_deep_config(folder, file):
    (folder / file).write_text("[" * 10**5)
    assert f"{file}`: expected JSON, got maximum recursion depth" in refusal(folder / file, from_pretrained, folder)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("h.0.attn.c_attn.weight", lambda a: a[0, 0], "expected (16, 48), as in `config.json`, got ()."),
        ("h.0.attn.c_attn.bias", lambda a: a[0], "expected (48,), as in `config.json`, got ()."),
        (
            "h.0.attn.c_attn.weight",
            lambda a: np.pad(a, ((0, 0), (0, 2))),
            "expected (16, 48), as in `config.json`, got (16, 50)",
        ),
        (
            "h.0.attn.c_attn.weight",
            lambda a: a.reshape(4, 4, 48),
            "expected (16, 48), as in `config.json`, got (4, 4, 48)",
        ),
        ("h.1.ln_1.weight", lambda a: a[0], "expected (16,), as in `config.json`, got ()."),
        ("wte.weight", lambda a: a[..., None], "expected (40, 16), as in `config.json`, got (40, 16, 1)."),
        ("wte.weight", lambda a: a[0, 0], "expected (40, 16), as in `config.json`, got ()."),
        ("wte.weight", lambda a: a.astype(np.int32), "expected float32 or a similar dtype, got int32."),
        ("h.1.ln_1.weight", lambda a: a.astype(bool), "expected float32 or a similar dtype, got bool."),
        ("h.1.ln_1.weight", lambda a: a.astype(DTYPES["F8_E4M3"]), "expected floats of 16 bits or more, got float8_e4m3fn"),
        (
            "h.1.ln_1.weight\n\x1b[2J",
            lambda a: a,
            r"`transformer.h.1.ln_1.weight\n\x1b[2J`: expected no tensor of this name",
        ),
        ("lm_head.weight", lambda a: np.float32(1), "`lm_head.weight`: expected the same values as"),
    ],
)
def test_tensors_of_other_shapes_and_kinds(folder, name, change, message):
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: TensorReader(folder / shard).read(name) for name, shard in names.items()}
    name = name if name in ("lm_head.weight",) else f"transformer.{name}"
    tensors[name] = np.asarray(change(tensors.get(name, np.zeros(3, np.float32))))
    (folder / "model.safetensors.index.json").unlink()
    write_tensors(folder / "model.safetensors", tensors)
    assert message in refusal(folder / "model.safetensors", from_pretrained, folder)


def test_mutated_indexes_of_shards(folder):
    index = folder / "model.safetensors.index.json"
    text = index.read_bytes()
    right = json.loads(text)["weight_map"]
    rng = np.random.default_rng(2)
    n_read = 0
    with little_memory():
        for i in range(200):
            index.write_bytes(mutated_bytes(rng, text) if i % 2 else json.dumps(mutated(rng, json.loads(text))).encode())
            try:
                source = TensorReader.find(folder, "model")
            except ValueError as error:
                check_message(folder, str(error))
                continue
            except BaseException as error:
                error.add_note(f"mutation {i}: {index.read_bytes()[:2000]!r}")
                raise
            n_read += 1
            assert set(source.names()) <= set(right)
            assert {*source.paths} <= {folder / shard for shard in right.values()}
    assert 0 < n_read < 150, n_read


# --- error messages -------------------------------------------------------------------------------------------------


def test_brief_shortens_values():
    assert brief_name("blocks.0.attn weight") == "blocks.0.attn weight"
    assert len(brief("x" * 10**6)) == 200 and len(brief([[["x" * 10**6] * 10**3] * 10**3] * 10**3)) < 10_000
    assert all(is_plain(name) for name in ("model.safetensors", "a b", "é", "..a", "n" * 255))
    assert not any(is_plain(name) for name in ("n" * 256, "é" * 128, 1, None, b"x"))
