"""Checkpoints: file contents, interoperability, crashes, full disks and error messages."""

import errno
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import namedtuple
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from redeqx.checkpoint import CheckpointManager, TensorReader, load_tree, write_tensors
from tests._checkpoints import DTYPES
from tests._tree import named_leaves

# The safetensors library names these dtypes, but numpy cannot read them.
FP8 = [code for code in DTYPES if code.startswith("F8")]


def bits(array):
    return np.asarray(array).tobytes()


def make_mesh(shape, axes):
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


def every_dtype():
    """Arrays of each dtype, plus scalars, empty arrays and arrays that are not C-contiguous."""
    leaves = {code: np.arange(6).reshape(2, 3).astype(dtype) for code, dtype in DTYPES.items()}
    leaves["scalar"] = np.float32(2.5)
    leaves["zero_dim"] = jnp.array(7, jnp.int32)
    leaves["empty"] = np.zeros((0, 3), np.float32)
    leaves["transposed"] = np.arange(12, dtype=np.int16).reshape(3, 4).T
    leaves["strided"] = np.arange(12, dtype=np.float64)[::5]
    leaves["bf16_scalar"] = jnp.array(-1.5, jnp.bfloat16)
    return leaves


def run(script, *arguments, **kwargs):
    """Runs a script in a new Python process and returns its stdout. A failure shows its stderr."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- one file -------------------------------------------------------------------------------------------------------


def test_every_dtype_round_trips(tmp_path):
    leaves = every_dtype()
    sums = write_tensors(tmp_path / "x.safetensors", leaves)
    file = TensorReader(tmp_path / "x.safetensors")
    assert set(file.names()) == set(leaves) and sums["size"] == (tmp_path / "x.safetensors").stat().st_size
    for name, leaf in leaves.items():
        got = file.read(name)
        assert (got.dtype, got.shape, bits(got)) == (leaf.dtype, leaf.shape, bits(leaf)), name
        assert (file.view(name).dtype, file.view(name).shape) == (leaf.dtype, leaf.shape)
    assert bits(file.read("transposed", np.s_[1:3, 2:])) == bits(leaves["transposed"][1:3, 2:])


def test_random_shapes_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    dtypes = list(DTYPES.values())
    leaves = {}
    for i in range(60):
        shape = tuple(rng.integers(0, 6, size=rng.integers(0, 5)))
        array = rng.integers(0, 100, shape).astype(dtypes[rng.integers(len(dtypes))])
        leaves[f"leaf.{i}"] = array.transpose(rng.permutation(array.ndim))
    write_tensors(tmp_path / "x", leaves)
    file = TensorReader(tmp_path / "x")
    assert all(bits(file.read(name)) == bits(leaf) for name, leaf in leaves.items())


def test_file_is_valid_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    leaves = every_dtype()
    write_tensors(path, leaves)
    with safe_open(path, framework="np") as file:
        for name, leaf in leaves.items():
            view = file.get_slice(name)
            assert DTYPES[view.get_dtype()] == leaf.dtype and tuple(view.get_shape()) == leaf.shape
            if name not in FP8:
                assert bits(file.get_tensor(name)) == bits(leaf)
    readable = {name: leaf for name, leaf in leaves.items() if name not in FP8}
    write_tensors(path, readable)
    loaded = load_file(path)
    assert {name: (a.dtype, a.shape, bits(a)) for name, a in loaded.items()} == {
        name: (a.dtype, a.shape, bits(a)) for name, a in readable.items()
    }


def test_tensors_are_aligned_to_their_item_size(tmp_path):
    """A reader may then memory-map them. Holds for any leaf order, without gaps between tensors."""
    leaves = {code: np.zeros(n, dtype) for n, (code, dtype) in enumerate(DTYPES.items(), start=1)}
    write_tensors(tmp_path / "x", leaves)
    content = (tmp_path / "x").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for name, field in json.loads(content[8 : 8 + length]).items():
        assert (8 + length + field["data_offsets"][0]) % DTYPES[field["dtype"]].itemsize == 0, name


def test_reads_files_of_the_safetensors_library(tmp_path):
    leaves = {"b": np.arange(3, dtype=np.uint8), "a": np.ones((2, 2), np.float32), "e": np.zeros((0,), np.int64)}
    save_file(leaves, tmp_path / "x", metadata={"format": "np"})
    file = TensorReader(tmp_path / "x")
    assert set(file.names()) == {"a", "b", "e"}
    assert all(bits(file.read(name)) == bits(leaf) for name, leaf in leaves.items())


READER = """
import json, struct, sys
import numpy as np

numpy_dtypes = {"F32": "<f4", "F64": "<f8", "I32": "<i4", "U32": "<u4", "BOOL": "?", "BF16": "<u2"}
for path in sys.argv[2:]:
    data = open(path, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    arrays = {}
    for name, field in json.loads(data[8 : 8 + length]).items():
        start, stop = field["data_offsets"]
        array = np.frombuffer(data[8 + length + start : 8 + length + stop], numpy_dtypes[field["dtype"]])
        if field["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array.reshape(field["shape"])
    np.savez(path + ".npz", **arrays)
assert not {"jax", "ml_dtypes", "safetensors", "redeqx"} & set(sys.modules)
"""


def test_model_and_optimizer_are_readable_with_numpy_alone(tmp_path):
    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    optimizer = {"count": jnp.array(3, jnp.int32), "mu": eqx.filter(model, eqx.is_array), "done": jnp.array(True)}
    folder = CheckpointManager(tmp_path).save(1, {"model": half, "optimizer": optimizer}, {})
    paths = [folder / "model.safetensors", folder / "optimizer.safetensors"]
    run(READER, "", *paths)
    for path, tree in zip(paths, [half, optimizer], strict=True):
        arrays = {name: leaf for name, leaf in named_leaves(tree).items() if eqx.is_array(leaf)}
        with np.load(f"{path}.npz") as loaded:
            assert set(loaded) == set(arrays)
            for name, leaf in arrays.items():
                wide = leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
                assert loaded[name].dtype == wide.dtype and bits(loaded[name]) == bits(wide)


def test_float_dtype_casts_only_floats(tmp_path):
    leaves = {
        "w": jnp.linspace(0, 1, 2**23 + 50),  # more than is cast at once
        "n": jnp.arange(3),
        "c": jnp.ones(2, jnp.complex64),
        "b": jnp.array(True),
    }
    write_tensors(tmp_path / "x", leaves, jnp.bfloat16)
    file = TensorReader(tmp_path / "x")
    assert bits(file.read("w")) == bits(leaves["w"].astype(jnp.bfloat16))
    assert [file.view(name).dtype for name in "ncb"] == [np.int32, np.complex64, np.bool_]


def test_float_dtype_must_be_floating(tmp_path):
    with pytest.raises(ValueError, match=r"`float_dtype`: expected a floating dtype, got int32. Pass None to cast none."):
        write_tensors(tmp_path / "x", {"w": jnp.ones(3)}, jnp.int32)
    write_tensors(tmp_path / "x", {"w": jnp.ones(3)}, "bfloat16")
    assert TensorReader(tmp_path / "x").view("w").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "leaf, message",
    [
        (np.ones(2, np.complex128), "`blocks.0.w`: expected a dtype that safetensors has (bool, uint8,"),
        (np.ones(2, ">f4"), "got >f4. Cast it first."),
        (jnp.ones(2, jnp.int4), "got int4. Cast it first."),
        (np.array(["a"]), "got <U1. Cast"),
        (np.array([None]), "got object. Cast"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "`blocks.0.w`: expected an array, got only its shape"),
    ],
)
def test_leaf_that_cannot_be_stored_is_named(tmp_path, leaf, message):
    checkpoints = CheckpointManager(tmp_path / "ckpts")
    with pytest.raises(TypeError) as info:
        checkpoints.save(1, {"model": {"blocks": [{"w": leaf}]}}, {})
    assert message in str(info.value) and "`blocks.0.w`" in str(info.value)
    assert not (tmp_path / "ckpts").exists()


def test_reserved_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`__metadata__`: expected another name, got the one that safetensors keeps"):
        write_tensors(tmp_path / "x", {"__metadata__": np.ones(2)})


def header(fields, data=b"\0" * 8, length=None):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start=0, stop=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "expected at least the 8 bytes of a header's length, got 0 bytes"),
        (header({"w": entry()}, length=0), "expected a header of 2 to"),
        (header({"w": entry()}, length=10**12), "got a length of 1000000000000"),
        (header(b"not json"), "expected a header of JSON, got Expecting value"),
        (header(b'{"\xff": 1}'), "expected a header of JSON, got 'utf-8' codec"),
        (header(b"[" * 100_000), "expected a header of JSON, got maximum recursion depth"),
        (header([1]), "expected a header that is a JSON object, got a list"),
        (header(b'{"w": {}, "w": {}}'), "expected a header of JSON, got a name that occurs twice"),
        (header({"w": {"shape": [2]}}), "expected `w` to have dtype, shape and data_offsets, got {'shape': [2]}"),
        (header({"w": entry(dtype="F4")}), "expected `w` to be one of BOOL, U8"),
        (header({"w": entry(shape=(-1, -2))}), "expected `w` to have a shape of sizes, got [-1, -2]"),
        (header({"w": entry(shape=(3,))}), "expected `w` to take 12 bytes, as F32 [3] does, got 8"),
        (
            header({"v": entry(), "w": entry(4, 12)}, b"\0" * 12),
            "expected `w` to begin at 8, where the previous one ends, got",
        ),
        (
            header({"v": entry(), "w": entry(12, 20)}, b"\0" * 20),
            "expected `w` to begin at 8, where the previous one ends, got",
        ),
        (header({"w": entry()}, b"\0" * 7), "bytes of tensors, as the header says, got"),
        (header({"w": entry()}, b"\0" * 9), "bytes of tensors, as the header says, got"),
    ],
)
def test_damaged_file_reports_the_defect(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as info:
        TensorReader(path)
    assert f"`{path}`: " in str(info.value) and message in str(info.value)
    assert "The file is damaged or unfinished: load another checkpoint." in str(info.value)


def test_unknown_name_suggests_the_nearest(tmp_path):
    write_tensors(tmp_path / "x", {"layers.0.weight": np.ones(2)})
    with pytest.raises(ValueError, match=r"one of its 1 tensors, got `layer.0.weight`. Did you mean `layers.0.weight`"):
        TensorReader(tmp_path / "x").read("layer.0.weight")


def test_host_holds_one_tensor_at_a_time(tmp_path):
    mesh = make_mesh((8,), ("model",))
    n_bytes = 2**20
    leaves = {
        str(i): jax.device_put(jnp.full((512, 512), i, jnp.float32), NamedSharding(mesh, P(None, "model"))) for i in range(8)
    }
    jax.block_until_ready(leaves)
    tracemalloc.start()
    write_tensors(tmp_path / "x", leaves)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * n_bytes and held < n_bytes  # and no host copy stays alive with the arrays
    assert all(bits(TensorReader(tmp_path / "x").read(name)) == bits(leaf) for name, leaf in leaves.items())


# --- trees ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))


def test_loading_keeps_leaves_that_are_not_arrays(tmp_path, model):
    tree = {"model": model, "scale": 0.5, "name": "x", "none": None, "table": np.arange(4, dtype=np.int64)}
    write_tensors(tmp_path / "x", {n: a for n, a in named_leaves(tree).items() if eqx.is_array_like(a) and n != "scale"})
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) and isinstance(x, jax.Array) else x, tree)
    loaded = load_tree(tmp_path / "x", {**zeros, "table": np.zeros(4, np.int64)})
    assert eqx.tree_equal(loaded, tree)
    assert type(loaded["table"]) is np.ndarray and loaded["table"].dtype == np.int64  # not narrowed by JAX


def test_loads_onto_other_meshes(tmp_path):
    one = make_mesh((8,), ("model",))
    two = make_mesh((2, 4), ("data", "model"))
    w = jax.random.normal(jax.random.key(0), (16, 24))
    tree = {
        "column": jax.device_put(w, NamedSharding(one, P("model"))),
        "row": jax.device_put(w.astype(jnp.bfloat16), NamedSharding(one, P(None, "model"))),
        "whole": jax.device_put(w[0], NamedSharding(one, P())),
        "count": jax.device_put(jnp.array(3, jnp.int32), NamedSharding(one, P())),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(one, P("model"))),
    }
    write_tensors(tmp_path / "x", tree)
    specs = {"column": P("model", "data"), "row": P(("data", "model")), "keys": P("data")}
    template = jax.eval_shape(lambda: tree)

    def place(name):
        return NamedSharding(two, specs.get(name, P()))

    loaded = load_tree(tmp_path / "x", template, place)
    for name, leaf in tree.items():
        got = loaded[name]
        assert got.dtype == leaf.dtype and got.sharding.is_equivalent_to(place(name), got.ndim), name
        if name == "keys":
            assert jax.random.key_impl(got) == jax.random.key_impl(leaf)
            got, leaf = jax.random.key_data(got), jax.random.key_data(leaf)
        assert bits(got) == bits(leaf), name
    alone = load_tree(tmp_path / "x", template)  # no shardings given: one device
    assert bits(alone["row"]) == bits(tree["row"]) and len(alone["row"].devices()) == 1
    like = load_tree(tmp_path / "x", tree)  # by default, onto the shardings of the template's leaves
    assert jax.tree.map(lambda x: x.sharding, like) == jax.tree.map(lambda x: x.sharding, tree)


def test_each_device_reads_only_its_slices(tmp_path, monkeypatch):
    mesh = make_mesh((8,), ("model",))
    write_tensors(tmp_path / "x", {"w": np.arange(64.0, dtype=np.float32).reshape(16, 4)})
    view, rows = TensorReader.view, []

    class Spy(np.ndarray):
        def __getitem__(self, index):
            part = super().__getitem__(index)
            rows.append(part.shape)
            return part

    monkeypatch.setattr(TensorReader, "view", lambda self, name: view(self, name).view(Spy))
    template = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    load_tree(tmp_path / "x", template, lambda name: NamedSharding(mesh, P("model")))
    assert rows == [(2, 4)] * 8


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("abstract", [False, True])
def test_typed_keys_are_stored_as_key_data(tmp_path, impl, abstract):
    tree = {"key": jax.random.key(3, impl=impl), "keys": jax.random.split(jax.random.key(4, impl=impl), 5)}
    write_tensors(tmp_path / "x", tree)
    assert load_file(tmp_path / "x")["key"].dtype == np.uint32
    template = jax.eval_shape(lambda: tree) if abstract else jax.tree.map(jnp.zeros_like, tree)
    loaded = load_tree(tmp_path / "x", template)
    for name, key in tree.items():
        assert jax.random.key_impl(loaded[name]) == jax.random.key_impl(key)
        assert bits(jax.random.normal(loaded[name].ravel()[-1])) == bits(jax.random.normal(key.ravel()[-1]))


def test_floats_are_cast_to_the_template_dtype(tmp_path):
    write_tensors(tmp_path / "x", {"w": jnp.linspace(0, 1, 8), "h": jnp.ones(2, jnp.bfloat16)})
    template = {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16), "h": np.zeros(2, np.float32)}
    loaded = load_tree(tmp_path / "x", template)
    assert bits(loaded["w"]) == bits(jnp.linspace(0, 1, 8).astype(jnp.bfloat16))
    assert loaded["h"].dtype == np.float32 and loaded["h"].tolist() == [1.0, 1.0]


def test_narrowing_by_jax_is_refused(tmp_path):
    write_tensors(tmp_path / "x", {"n": np.array([2**40])})
    with pytest.raises(ValueError, match=r"`n`: expected int64, got int32 from JAX. Set `jax_enable_x64` to load it."):
        load_tree(tmp_path / "x", {"n": jax.ShapeDtypeStruct((1,), np.int64)})


def test_all_differing_tensors_are_named(tmp_path):
    write_tensors(
        tmp_path / "x",
        {"mlp.up.weight": np.ones((4, 2), np.float32), "norm": np.ones(3, np.float32), "n": np.ones(2, np.int32)},
    )
    template = {
        "mlp": {"up": {"wieght": jax.ShapeDtypeStruct((4, 2), jnp.float32)}},
        "norm": np.ones(5, np.float32),
        "n": np.ones(2, np.float32),
    }
    with pytest.raises(ValueError) as info:
        load_tree(tmp_path / "x", template, what="encoder")
    assert str(info.value) == (
        f"`{tmp_path / 'x'}`: expected the tensors of this encoder, got 4 that differ:\n"
        "  - `mlp.up.wieght`: expected float32 (4, 2), got none. Did you mean `mlp.up.weight`?\n"
        "  - `mlp.up.weight`: expected no tensor of this name, got float32 (4, 2). Did you mean `mlp.up.wieght`?\n"
        "  - `n`: expected float32 (2,), got int32 (2,).\n"
        "  - `norm`: expected float32 (5,), got float32 (3,).\n"
        "Build the encoder that was saved, or load the checkpoint of this one. "
        "If leaves were renamed, `redeqx.models.load_weights` maps the names."
    )
    with pytest.raises(ValueError, match=r"got 33 that differ:(.|\n)*and 23 more"):
        load_tree(tmp_path / "x", [np.ones(1)] * 30)


# --- the folder -----------------------------------------------------------------------------------------------------


def small_state(step):
    return {"model": {"w": np.full((50, 3), step, np.float32)}, "optimizer": {"mu": np.full(50, step, np.float32)}}


def verify_checkpoint(checkpoints, path):
    """Verifies that the whole checkpoint belongs to one step, and returns that step."""
    step = checkpoints.record(path)["step"]
    for kind, tree in small_state(step).items():
        assert eqx.tree_equal(checkpoints.load(path, kind, jtu.tree_map(np.zeros_like, tree)), tree)
    return step


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 100 and 200."""
    checkpoints = CheckpointManager(tmp_path / "run" / "ckpts")
    checkpoints.save(100, small_state(100), {"step": 100}, ("last", "argmin_loss"))
    checkpoints.save(200, small_state(200), {"step": 200})
    return checkpoints


def test_layout_on_disk(saved):
    assert json.loads((saved.folder / "index.json").read_text()) == {
        "last": "step_00000200",
        "argmin_loss": "step_00000100",
    }
    folder = saved.folder / "step_00000200"
    names = {"model.safetensors", "optimizer.safetensors", "trainer.json"}
    assert {path.name for path in folder.iterdir()} == names
    record = json.loads((folder / "trainer.json").read_text())
    assert (record["format"], record["version"], record["step"]) == ("redeqx", 1, 200)
    assert record["files"]["model.safetensors"]["size"] == (folder / "model.safetensors").stat().st_size
    assert {path.name for path in saved.folder.iterdir()} == {"index.json", "step_00000100", "step_00000200"}
    assert saved.record(folder) == {"step": 200}


def test_checkpoint_is_found_by_tag_name_or_path(saved, tmp_path):
    last = saved.folder / "step_00000200"
    assert saved.resolve("last") == saved.resolve("step_00000200") == saved.resolve(last) == saved.resolve(str(last))
    assert verify_checkpoint(saved, saved.resolve("argmin_loss")) == 100
    elsewhere = CheckpointManager(tmp_path / "elsewhere")
    assert elsewhere.names() == [] and elsewhere.index() == {} and elsewhere.resolve(last) == last
    with pytest.raises(ValueError) as info:
        saved.resolve("argmin_los")
    assert str(info.value) == (
        f"`{saved.folder}`: expected one of last, argmin_loss, step_00000100, step_00000200, or the path of a "
        "checkpoint, got 'argmin_los'. Did you mean `argmin_loss`? Pass one of those."
    )
    with pytest.raises(ValueError, match=r"expected a checkpoint, of which there are none yet, or the path"):
        elsewhere.resolve("last")
    shutil.rmtree(last)
    with pytest.raises(ValueError, match=r"expected the checkpoint `step_00000200`, which the index names as 'last'"):
        saved.resolve("last")
    with pytest.raises(ValueError, match=r"expected one of argmin_loss, step_00000100, or the path"):
        saved.resolve("best")


def test_pruning_keeps_tagged_and_newest(tmp_path):
    checkpoints = CheckpointManager(tmp_path)
    for step in range(1, 7):
        tags = ("last", "best") if step == 2 else ("last",)
        checkpoints.save(step, small_state(step), {"step": step}, tags, keep_last=3)
    assert checkpoints.names() == [f"step_{step:08d}" for step in (2, 4, 5, 6)]
    checkpoints.save(7, small_state(7), {"step": 7}, keep_last=0)
    assert checkpoints.names() == ["step_00000002", "step_00000007"]
    checkpoints.save(10**9, small_state(8), {"step": 8}, keep_last=1)
    assert checkpoints.names() == ["step_00000002", "step_1000000000"]
    with pytest.raises(ValueError, match=r"`keep_last`: expected at least 0, got -1"):
        checkpoints.save(9, small_state(9), {}, keep_last=-1)


def test_a_run_that_goes_on_from_an_earlier_checkpoint_keeps_as_many_of_its_own(tmp_path):
    """The one that it leaves is not among those from which it resumes, should its newest one be damaged."""
    checkpoints = CheckpointManager(tmp_path)
    for step in (6, 8, 10, 9):  # loads step 8 before the last save
        checkpoints.save(step, small_state(step), {"step": step}, keep_last=2)
    assert checkpoints.names() == ["step_00000008", "step_00000009", "step_00000010"]
    assert [path.name for path in checkpoints.newest()] == ["step_00000009", "step_00000008"]
    checkpoints.save(10, small_state(10), {"step": 10}, keep_last=2)
    assert checkpoints.names() == ["step_00000009", "step_00000010"]


def test_pruning_keeps_as_many_of_a_step_that_was_saved_again(tmp_path):
    checkpoints = CheckpointManager(tmp_path)
    for i in range(4):
        checkpoints.save(5, small_state(i), {"step": 5}, keep_last=2)
    assert checkpoints.names() == ["step_00000005_2", "step_00000005_3"]


def test_a_removal_that_is_cut_off_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    def cut_off(path):
        (path / "model.safetensors").unlink()
        raise KeyboardInterrupt

    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, small_state(1), {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, small_state(2), {"step": 2}, keep_last=1)
    assert checkpoints.names() == ["step_00000002"]
    checkpoints.save(3, small_state(3), {"step": 3}, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step_00000003"]


def test_committed_checkpoint_is_never_modified(saved):
    before = (saved.folder / "step_00000200" / "model.safetensors").read_bytes()
    path = saved.save(200, small_state(200), {"step": 200, "again": True}, ("best",))
    assert path.name == "step_00000200_1" and saved.names()[-1] == path.name
    assert saved.index() == {"last": "step_00000200", "argmin_loss": "step_00000100", "best": "step_00000200_1"}
    assert (saved.folder / "step_00000200" / "model.safetensors").read_bytes() == before
    # The third sorts after both. An untagged checkpoint older than a tagged one does not count as a leftover.
    assert saved.save(200, small_state(200), {"step": 200}, ("last",)).name == "step_00000200_2"


def test_leftovers_of_the_same_step_are_replaced(saved):
    leftovers = saved.folder / "step_00000300"
    leftovers.mkdir()
    (leftovers / "junk").touch()
    (saved.folder / ".tmp_step_00000250").mkdir()
    (saved.folder / ".tmp_index.json").touch()
    path = saved.save(300, small_state(300), {"step": 300})
    assert path == leftovers and verify_checkpoint(saved, path) == 300 and not (leftovers / "junk").exists()
    assert not list(saved.folder.glob(".tmp_*"))


def test_float_dtype_applies_only_to_the_model(saved):
    path = saved.save(300, small_state(300), {"step": 300}, float_dtype=jnp.bfloat16)
    assert TensorReader(path / "model.safetensors").view("w").dtype == jnp.bfloat16
    assert TensorReader(path / "optimizer.safetensors").view("mu").dtype == np.float32


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name, damage, message",
    [
        (
            "model.safetensors",
            lambda path: os.truncate(path, 100),
            r"model.safetensors`: expected \d+ bytes, got 100\.",
        ),
        ("model.safetensors", flip_a_byte, r"model.safetensors`: expected crc32 \d+, got \d+\. The file is damaged"),
        ("optimizer.safetensors", flip_a_byte, r"optimizer.safetensors`: expected crc32 \d+, got \d+\."),
        ("optimizer.safetensors", os.remove, r"optimizer.safetensors`: expected \d+ bytes, got no file\."),
        ("trainer.json", os.remove, r"expected the folder of a checkpoint, got none with a trainer.json"),
        ("trainer.json", lambda path: os.truncate(path, 50), r"trainer.json`: expected JSON, got Expecting"),
        ("trainer.json", lambda path: path.write_text("[]"), r"trainer.json`: expected a JSON object, got \[\]"),
        (
            "trainer.json",
            lambda path: path.write_text("{}"),
            r"trainer.json`: expected the manifest of a redeqx checkpoint",
        ),
        (
            "trainer.json",
            lambda path: path.write_text(path.read_text().replace("200", "201")),
            r"trainer.json`: expected a manifest of crc32 \d+, got \d+\. The file is damaged",
        ),
        (
            "trainer.json",
            lambda path: path.write_text(path.read_text().replace('"version": 1', '"version": 7')),
            r"trainer.json`: expected version 1, which this release reads, got 7\. Install the release of redeqx that",
        ),
    ],
)
def test_damaged_checkpoint_names_the_file(saved, name, damage, message):
    path = saved.resolve("last")
    damage(path / name)
    with pytest.raises(ValueError, match=message):
        saved.record(path)
    assert verify_checkpoint(saved, saved.resolve("argmin_loss")) == 100


def test_flipped_bytes_in_the_manifest_are_detected(saved):
    path = saved.resolve("last")
    content = (path / "trainer.json").read_bytes()
    for i in range(len(content)):
        (path / "trainer.json").write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        try:
            same = saved.record(path) == {"step": 200}
        except ValueError as error:
            same = "trainer.json`: expected" in str(error)
        assert same, content[: i + 1]  # whitespace does not matter


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"last": 3}', "expected the name of a checkpoint for 'last', got 3"),
        (
            b'{"last": "step_00000100", "argmax_score": "../../x"}',
            "expected the name of a checkpoint for 'argmax_score', got",
        ),
        (b"{", "expected JSON, got Expecting property name"),
        (b"", "expected JSON, got Expecting value"),
        (bytes(90), "expected JSON, got Expecting value"),
        (b"[]", r"expected a JSON object, got \[\]"),
        (b'{"last": "step_00000100", "last": "step_00000100"}', "expected JSON, got a name that occurs twice"),
    ],
)
def test_damaged_index_is_rebuilt_like_a_lost_one(saved, content, message):
    index = saved.folder / "index.json"
    before = json.loads(index.read_text())
    for again in (saved, CheckpointManager(saved.folder)):
        index.write_bytes(content)
        with pytest.warns(
            UserWarning, match=rf"index.json`: {message}.*\. It is rebuilt from the checkpoints that are complete"
        ):
            assert again.index() == before
        assert again.index() == before  # and says it only once
    path = again.save(300, small_state(300), {})
    assert json.loads(index.read_text()) == {**before, "last": path.name}
    assert CheckpointManager(saved.folder).resolve("last") == path


def test_loading_an_unsaved_tree_raises(saved):
    with pytest.raises(ValueError, match=r"expected one of model, optimizer, got 'model_state'. Save it, or load"):
        saved.load(saved.resolve("last"), "model_state", {})


def test_manifest_values_must_be_json(saved):
    with pytest.raises(TypeError, match=r"`record`: expected values that JSON can hold, got Object of type ndarray"):
        saved.save(300, small_state(300), {"state": np.ones(2)})
    assert saved.names() == ["step_00000100", "step_00000200"]
    path = saved.save(300, small_state(300), {"step": 300, 1: 0.1, "t": (1, 2), "worst": math.inf})
    assert saved.record(path) == {"step": 300, "1": 0.1, "t": [1, 2], "worst": math.inf}


# --- full disks and crashes -----------------------------------------------------------------------------------------


def assert_untouched(checkpoints):
    assert {path.name for path in checkpoints.folder.iterdir()} == {"index.json", "step_00000100", "step_00000200"}
    assert [verify_checkpoint(checkpoints, checkpoints.resolve(name)) for name in checkpoints.index()] == [200, 100]


def test_insufficient_space_is_reported_before_writing(saved, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(OSError, match=r"step_00000300`: expected \d{3,} bytes free, got 10. Make room, ") as info:
        saved.save(300, small_state(300), {"step": 300})
    assert info.value.errno == errno.ENOSPC
    assert_untouched(saved)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "mkdir", "rename"])
def test_disk_full_during_a_save(saved, monkeypatch, call):
    real, calls = getattr(os, call), []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) > {"pwrite": 3, "fsync": 3}.get(call, 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError) as info:
            saved.save(300, small_state(300), {"step": 300})
    message = str(info.value)
    assert info.value.errno == errno.ENOSPC and message.startswith(f"`{saved.folder / 'step_00000300'}`: expected ")
    assert "bytes, got 'No space left on device' with" in message and "Earlier checkpoints are complete" in message
    assert_untouched(saved)
    assert verify_checkpoint(saved, saved.save(300, small_state(300), {"step": 300})) == 300


def test_steps_do_not_wait_until_folders_are_flushed(tmp_path, monkeypatch):
    checkpoints, flushed, flush = CheckpointManager(tmp_path / "ckpts"), [], os.fsync
    tree = {"model": {"x": np.zeros(3)}}
    checkpoints.save(1, tree, {})

    def note(descriptor):
        flushed.append(threading.current_thread())
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    checkpoints.save(2, tree, {}, then=lambda path: None)
    checkpoints.wait()
    assert flushed and threading.main_thread() not in flushed
    shutil.rmtree(tmp_path / "ckpts")
    checkpoints.save(3, tree, {}, then=lambda path: None)
    checkpoints.wait()
    assert threading.main_thread() in flushed  # the new folder must be in the one above before anything is said to be there


def test_a_save_waits_for_the_background_save_before_it(tmp_path):
    def slow(path):
        time.sleep(0.5)
        ended.append(path.name)

    checkpoints, ended = CheckpointManager(tmp_path), []
    checkpoints.save(1, small_state(1), {}, then=slow)
    checkpoints.save(2, small_state(2), {})
    assert ended == ["step_00000001"]


def test_error_of_a_background_save_is_raised_once(tmp_path):
    def fails(path):
        raise OSError("unplugged")

    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, {"model": {"x": np.zeros(3)}}, {}, then=fails)
    with pytest.raises(OSError, match="unplugged"):
        checkpoints.wait()
    checkpoints.check()
    checkpoints.save(2, {"model": {"x": np.zeros(3)}}, {}, then=fails)
    with pytest.raises(OSError, match="unplugged"):  # at a later step, which does not wait
        for _ in range(600):
            checkpoints.check()
            time.sleep(0.05)


def test_a_save_within_the_thread_of_a_save_is_refused(tmp_path):
    """It would wait for itself without end, and so would the end of the script."""
    checkpoints, tree = CheckpointManager(tmp_path), {"model": {"x": np.zeros(3)}}
    checkpoints.save(1, tree, {}, then=lambda path: checkpoints.save(2, tree, {}))
    with pytest.raises(RuntimeError, match=r"`then`: expected a function that saves and loads no checkpoints.*`on_save`"):
        checkpoints.wait()
    assert checkpoints.names() == ["step_00000001"]


def test_a_folder_that_is_deleted_during_a_save_is_named(tmp_path, monkeypatch):
    checkpoints, real = CheckpointManager(tmp_path / "run"), os.open
    checkpoints.save(1, {"model": {"x": np.zeros(3)}}, {})

    def gone(path, *args, **kwargs):
        if "step_00000002" in str(path) and checkpoints.folder.exists():
            os.rename(checkpoints.folder, tmp_path / f"gone-{time.monotonic_ns()}")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", gone)
        with pytest.raises(OSError, match="expected a folder that nothing else deletes or unmounts while") as info:
            checkpoints.save(2, {"model": {"x": np.zeros(3)}}, {})
    assert info.value.errno == errno.ENOENT and "Make room" not in str(info.value)


def test_failed_large_write_is_reported(saved, monkeypatch):
    """Worker threads write large tensors; their errors must reach the caller."""
    real = os.pwrite

    def full(fd, data, offset):
        if len(data) >= 2**20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"got 'No space left on device' with \d+ bytes free at first") as info:
            saved.save(300, {"model": {"w": np.ones(2**19, np.float32)}}, {"step": 300})
    assert info.value.errno == errno.ENOSPC
    assert_untouched(saved)


def test_files_are_synced_before_they_are_named(tmp_path, monkeypatch):
    """Models a power failure: a file keeps the content, and a folder the entries, of its last fsync."""
    on_disk, named = {}, []
    fsync, renames = os.fsync, {name: getattr(os, name) for name in ("rename", "replace")}

    def content(path):
        return path.read_bytes() if path.is_file() else {entry.name for entry in path.iterdir()}

    def flush(fd):
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        on_disk[path] = content(path)

    def move(name, source, target):
        source, target = Path(source), Path(target)
        if target.name == "index.json":
            assert on_disk[source] == source.read_bytes()
            # The checkpoints named in the index were renamed and synced first.
            assert set(json.loads(source.read_text()).values()) <= on_disk[folder]
        elif target.name.startswith("step_"):
            assert on_disk[source] == content(source)
            assert all(on_disk[file] == file.read_bytes() for file in source.iterdir())
        renames[name](source, target)
        named.append(target.name)
        on_disk.pop(target.parent, None)  # the new entry is not synced yet

    folder = tmp_path / "run" / "ckpts"
    monkeypatch.setattr(os, "fsync", flush)
    for name in renames:
        monkeypatch.setattr(os, name, partial(move, name))
    checkpoints = CheckpointManager(folder)
    for step in (100, 200):
        checkpoints.save(step, small_state(step), {"step": step})
        assert {"index.json", f"step_{step:08d}"} <= on_disk[folder]
        assert "ckpts" in on_disk[folder.parent]
    assert named == ["step_00000100", "index.json", "step_00000200", "index.json"]


FULL_DISK = """
import errno, resource, shutil, sys
from collections import namedtuple
from pathlib import Path
import numpy as np
from redeqx.checkpoint import CheckpointManager

checkpoints = CheckpointManager(Path(sys.argv[1]))
checkpoints.save(1, {"model": {"w": np.ones(50_000, np.float32)}}, {"step": 1})
if sys.argv[2] == "EFBIG":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
large = {"model": {"w": np.ones(500_000, np.float32)}}
if sys.argv[2] == "ENOSPC":
    try:
        checkpoints.save(2, large, {"step": 2})
        raise SystemExit("saved more than the disk holds")
    except OSError as error:
        assert error.errno == errno.ENOSPC and "bytes free, got" in str(error), error
    shutil.disk_usage = lambda path: namedtuple("usage", "free")(10**9)  # another writer fills the disk meanwhile
try:
    checkpoints.save(2, large, {"step": 2})
    raise SystemExit("saved more than the disk holds")
except OSError as error:
    assert error.errno == getattr(errno, sys.argv[2]) and "expected to write 2000" in str(error), error
assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["index.json", "step_00000001"]
assert checkpoints.record(checkpoints.resolve("last")) == {"step": 1}
"""


@pytest.mark.sweep
def test_file_size_limit(tmp_path):
    run(FULL_DISK, tmp_path, "EFBIG")


@pytest.mark.sweep
def test_full_tmpfs(tmp_path):
    # A tmpfs in a private mount namespace, which ends with the process.
    own_mounts = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && '
    if not shutil.which("unshare") or subprocess.run([*own_mounts, f"{mount} true", tmp_path], timeout=20).returncode:
        pytest.skip("this machine allows no mount namespaces; the test above limits the size of files instead")
    command = [*own_mounts, f'{mount} exec "$1" -c "$2" "$0" ENOSPC', tmp_path, sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


KILLED = """
import os, shutil, signal, sys, warnings
from pathlib import Path
import numpy as np
from redeqx.checkpoint import CheckpointManager, TensorReader

warnings.simplefilter("ignore")  # os.fork beside JAX: no backend has started here
STEPS = ("posix_fallocate", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
root = Path(sys.argv[1])

def tree(step):
    return {"model": {"w": np.full((50, 3), step, np.float32)}, "optimizer": {"mu": np.full(50, step)}}

def save(checkpoints, step, **kwargs):
    checkpoints.save(step, tree(step), {"step": step}, keep_last=1, **kwargs)

def die_at(n):
    calls = 0
    def wrap(name, real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == n:
                if name == "pwrite":  # torn in the middle
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in STEPS:
        setattr(os, name, wrap(name, getattr(os, name)))

def check_unfinished(folder, step):
    # What was killed while it was written is refused by every reader, or complete.
    for file in folder.glob(".tmp_*/model.safetensors"):
        try:
            found = TensorReader(file).read("w")
        except ValueError:
            refused.append(file)
            continue
        assert (found == found.flat[0]).all() and found.flat[0] in (100, 150, 200, step)

def verified(checkpoints):
    steps = {}
    for tag in checkpoints.index():
        path = checkpoints.resolve(tag)
        step = steps[tag] = checkpoints.record(path)["step"]
        for kind, want in tree(step).items():
            got = checkpoints.load(path, kind, {name: np.zeros_like(a) for name, a in want.items()})
            assert all(np.array_equal(got[name], a) for name, a in want.items())
    for name in checkpoints.names():
        checkpoints.record(checkpoints.resolve(name))  # the unnamed are complete too
    return steps

first = CheckpointManager(root / "first")
save(first, 100, tags=("last", "best"))
save(first, 150)
save(first, 200)
n, seen, refused = 0, [], []
while True:
    n += 1
    copy = CheckpointManager(root / str(n))
    shutil.copytree(first.folder, copy.folder)
    pid = os.fork()
    if pid == 0:
        die_at(n)
        save(copy, STEP)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    check_unfinished(copy.folder, STEP)
    steps = verified(copy)
    assert steps["best"] == 100 and steps["last"] in (200, STEP), (n, steps)
    seen.append(Path(copy.index()["last"]).name)
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (n, status)
    save(copy, STEP)  # after the crash, the same again
    assert verified(copy) == {"last": STEP, "best": 100}
    assert not [path for path in copy.folder.iterdir() if path.name.startswith(".")]
old = [name == "step_00000200" for name in seen]
assert old == sorted(old, reverse=True) and old[0] and not old[-1] and refused, seen
print(n - 1, sum(old))
"""


@pytest.mark.parametrize("step", [200, 300])
@pytest.mark.sweep
def test_save_killed_at_every_system_call(tmp_path, step):
    """Step 300 is a new checkpoint; step 200 is saved next to a committed checkpoint of the same step."""
    n_kills, n_old = map(int, run(KILLED.replace("STEP)", f"{step})").replace("STEP,", f"{step},"), tmp_path).split())
    assert n_kills > 20 and 0 < n_old < n_kills


@pytest.mark.sweep
def test_casting_save_bounds_its_memory(tmp_path, monkeypatch):
    """On a disk slower than the casts, cast chunks do not accumulate in memory."""
    leaves, pwrite = {"w": np.ones(2**26, np.float32)}, os.pwrite

    def slow(fd, data, offset):
        time.sleep(0.02)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    tracemalloc.start()
    CheckpointManager(tmp_path).save(1, {"model": leaves}, {}, float_dtype=jnp.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**24  # of 128 MB: two chunks being written, one queued, and numpy's temporary arrays for a cast
