"""Tensors in an object are read by ranges: each needed byte once, with few extra bytes."""

import itertools
import json
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import redeqx
from redeqx import models
from redeqx.checkpoint import load_tree, write_tensors
from redeqx.cli import main
from redeqx.machine import make_mesh
from redeqx.storage import StoredArray, StoreError, StorePath, fetch, limits, location, merge_dims


@pytest.fixture
def small_requests(monkeypatch):
    """A function that limits requests to a few bytes, so that small arrays need many, and returns the ranges that are read
    from then on."""

    def limit():
        monkeypatch.setattr(limits, "part", 256)
        monkeypatch.setattr(limits, "gap", 32)
        read, ranges = StorePath.read, []

        def note(self, start, stop):
            ranges.append((start, stop))
            return read(self, start, stop)

        monkeypatch.setattr(StorePath, "read", note)
        return ranges

    return limit


VIEWS = {
    "all": lambda x: x,
    "rows": lambda x: x[3:9],
    "columns": lambda x: x[:, 5:7],
    "steps": lambda x: x[::-2, 1::3],
    "transposed": lambda x: x.T[4:8],
    "reshaped": lambda x: x.reshape(4, 3, 20)[1:3, :, ::4].transpose(2, 0, 1),
    "item": lambda x: x[2, 3],
    "row": lambda x: x[-1],
    "none": lambda x: x[5:5],
    "scalar": lambda x: x[1:2, 1:2].reshape(()),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_views_match_numpy(bucket, small_requests, dtype):
    values = np.arange(240).reshape(12, 20).astype(dtype)
    path = location(f"{bucket}/x")
    path.write_bytes(b"header" + values.tobytes())
    small_requests()
    whole = StoredArray.of(path, 6 + values.nbytes)[6:].view(dtype).reshape(12, 20)
    for name, view in VIEWS.items():
        found, expected = view(whole), view(values)
        assert found.shape == expected.shape and found.dtype == expected.dtype, name
        assert np.array_equal(np.asarray(found), expected), name
    together = fetch([view(whole) for view in VIEWS.values()], "float64")
    for name, found in zip(VIEWS, together, strict=True):
        assert found.dtype == np.float64 and np.array_equal(found, VIEWS[name](values)), name
    with pytest.raises(ValueError, match=r"expected a view of its tensors, got a copy\. Read it first: `np\.asarray`"):
        whole[[3, 1]]


@pytest.mark.parametrize("part", [16, 64, 2**20])
@pytest.mark.parametrize("shape", [(1, 12, 3), (4, 9, 5), (3, 8)])
def test_merged_dims_match_numpy(monkeypatch, part, shape):
    """As those of one head after another, of queries alone, in a tensor that also has the keys."""
    monkeypatch.setattr(limits, "part", part)
    monkeypatch.setattr(limits, "gap", 4)
    split = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)[:, 2:7]
    found, expected = merge_dims(split), split.reshape(-1, *shape[2:])
    for view in (lambda x: x, lambda x: x[1:4], lambda x: x[::2], lambda x: x.T, lambda x: x[2:2]):
        np.testing.assert_array_equal(np.asarray(view(found)), view(expected))


def test_failed_request_is_reported_before_the_others_are_sent(monkeypatch):
    monkeypatch.setattr(limits, "part", 256)
    requests = []

    def fail(self, start, stop):
        requests.append(start)
        time.sleep(0.02)
        raise StoreError("expected the store to answer")

    monkeypatch.setattr(StorePath, "read", fail)
    with pytest.raises(StoreError, match="expected the store to answer"):
        fetch([StoredArray.of(StorePath("s3", "bucket", "x"), 256 * 200)])
    assert len(requests) < 100


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P(None, ("data", "model")), P()])
def test_each_byte_is_read_once_for_all_devices(bucket, small_requests, spec):
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    path = location(f"{bucket}/x.safetensors")
    write_tensors(path, {"w": values})
    mesh = make_mesh(4, 1)
    ranges = small_requests()
    tree = load_tree(path, {"w": jax.ShapeDtypeStruct((64, 48), np.float32)}, lambda name: NamedSharding(mesh, spec))
    assert np.array_equal(tree["w"], values)
    header = path.stat().st_size - values.nbytes
    read = sorted((start, stop) for start, stop in ranges if start >= header)
    assert read[0][0] == header and read[-1][1] == header + values.nbytes
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(read))  # no byte twice


def test_rows_of_another_process_are_not_read(bucket, small_requests):
    """Reads what one device needs, as if the other rows belonged to another process."""
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    path = location(f"{bucket}/x")
    path.write_bytes(values.tobytes())
    ranges = small_requests()
    whole = StoredArray.of(path, values.nbytes).view(np.float32).reshape(64, 48)
    assert np.array_equal(np.asarray(whole[16:32]), values[16:32])
    assert sum(stop - start for start, stop in ranges) == values[16:32].nbytes
    ranges.clear()
    assert np.array_equal(np.asarray(whole[:, :12]), values[:, :12])  # with gaps of 144 bytes, which are not read
    assert sum(stop - start for start, stop in ranges) == values[:, :12].nbytes


@pytest.fixture
def folder(bucket, tmp_path):
    """A small GPT-2 as a Hugging Face folder, on disk and in the store."""
    config = models.gpt2.GPT2Config(vocab_size=64, n_positions=16, d_model=32, n_heads=2, n_layers=2)
    model = models.gpt2.GPT2(config, key=jax.random.key(0))
    models.save_pretrained(model, config, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "hf").iterdir():
        location(f"{bucket}/hf/{path.name}").write_bytes(path.read_bytes())
    return tmp_path / "hf"


def leaves_of(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model) if hasattr(leaf, "shape")]


@pytest.mark.sweep
def test_reads_a_hugging_face_folder_in_place(bucket, folder):
    deployer = redeqx.Deployer(0, 2, 2, verbose=False)
    for kwargs in ({}, {"deployer": deployer, "dtype": "float16"}):
        here, config = models.from_pretrained(folder, **kwargs)
        there, same = models.from_pretrained(f"{bucket}/hf", **kwargs)
        assert config == same and same.extra.files == {"tokenizer.json": b"{}"}
        for a, b in zip(leaves_of(here), leaves_of(there), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b)
    with pytest.raises(ValueError, match=rf"`{bucket}/no`: expected a folder, got nothing there"):
        models.from_pretrained(f"{bucket}/no")


@pytest.mark.sweep
def test_reads_a_hugging_face_folder_from_a_failing_store(bucket, folder, server, short_pauses):
    here, _ = models.from_pretrained(folder)
    count, faults = itertools.count(), itertools.cycle((500, "cut", 503))
    server.fault = lambda method, path: next(faults) if next(count) % 3 == 0 else None
    there, _ = models.from_pretrained(f"{bucket}/hf")
    assert next(count) > 5
    for a, b in zip(leaves_of(here), leaves_of(there), strict=True):
        assert np.array_equal(a, b)


def test_command_line_reads_store_addresses(bucket, folder, capsys):
    assert main(["inspect", f"{bucket}/hf", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    main(["inspect", str(folder), "--json"])
    here = json.loads(capsys.readouterr().out)
    assert there["tensors"] == here["tensors"] and there["path"] == f"{bucket}/hf" and there["files"] == here["files"]
