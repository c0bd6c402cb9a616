"""A save detects a folder's capabilities by writing to it; a file per process holds the same arrays as one file."""

import errno
import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import load_file

from redeqx.checkpoint import TensorReader, _tree_files, find_checkpoint
from redeqx.checkpoint._commit import Capabilities, Disk
from redeqx.checkpoint._tree_files import FilePerProcess, InPlace
from redeqx.distributed import Peers
from redeqx.machine import make_mesh


def arrays():
    mesh = make_mesh(2, n_fsdp_shards=2)
    draw = np.random.default_rng(0)
    return {
        "split": jax.device_put(draw.normal(size=(8, 16)).astype(np.float32), NamedSharding(mesh, P("fsdp", "model"))),
        "whole": jax.device_put(draw.normal(size=(6,)).astype(np.float32), NamedSharding(mesh, P())),
        "count": jnp.asarray(3),
        "empty": np.zeros((0, 4), np.float16),
        "host": draw.normal(size=(5, 3)).T,
        "key": jax.random.key(7),
    }


def as_numpy(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


# --- probing a folder -------------------------------------------------------------------------------------------------


class ScriptedPeers(Peers):
    """One of two processes. `other` maps a topic to the other's contribution, by default the same as this one's."""

    def __init__(self, index, other):
        super().__init__(2, index)
        self.other = other

    def gather(self, topic, value=None, timeout=None):
        other = self.other[topic]() if topic in self.other else value
        return [value, other] if self.index == 0 else [other, value]


def test_a_checkpoint_on_the_disk_of_another_process_is_found(tmp_path):
    there = tmp_path / "ckpts" / "step_00000001"
    folder, found = find_checkpoint(tmp_path / "nowhere", ScriptedPeers(1, {"resolve": lambda: [str(there), None]}))
    assert found == there and folder.folder == there.parent


def write_mark(path, index):
    """Writes to the probe file as another process does."""
    with open(path, "r+b") as file:
        file.seek(16 * index)
        file.write(f"process {index}".encode().ljust(16))


def capabilities(folder, peers):
    return Disk(folder, folder).capabilities(peers, lambda text: None)


def test_single_process_folder_has_both_capabilities(tmp_path):
    assert capabilities(tmp_path, Peers()) == Capabilities(is_shared=True, in_place=True)
    assert not list(tmp_path.iterdir())


def test_two_process_folder_has_both_capabilities(tmp_path):
    path = tmp_path / ".tmp_probe"
    peers = ScriptedPeers(0, {"probe marked": partial(write_mark, path, 1)})
    assert capabilities(tmp_path, peers) == Capabilities(is_shared=True, in_place=True)
    assert not list(tmp_path.iterdir())


def test_folder_invisible_to_a_peer_is_not_shared(tmp_path):
    for index in (0, 1):
        peers = ScriptedPeers(index, {"probe seen": lambda index=index: index == 1, "probe read": lambda: False})
        assert capabilities(tmp_path, peers) == Capabilities(is_shared=False, in_place=False)
    assert not list(tmp_path.iterdir())


def test_missing_write_of_a_peer_disables_in_place(tmp_path):
    assert capabilities(tmp_path, ScriptedPeers(0, {})) == Capabilities(is_shared=True, in_place=False)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE])
def test_pwrite_errors_disable_in_place(tmp_path, monkeypatch, number):
    def refuse(fd, data, offset):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert capabilities(tmp_path, Peers()) == Capabilities(is_shared=True, in_place=False)
    assert not list(tmp_path.iterdir())


def test_missing_folder_raises(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        capabilities(tmp_path / "nowhere", Peers())


# --- a file per process -----------------------------------------------------------------------------------------------


def files_of(trees, cls, *args):
    """The files of each tree, of one process."""
    return {kind: cls(kind, *tree, *args) for kind, tree in trees.items()}


def save_all(each, folder):
    """Saves with the files of each process, one after the other, and returns the checksums."""
    folder.mkdir()
    for files in each:
        for file in files.values():
            file.copy()
    for file in each[0].values():
        file.create(folder)
    sums = {}
    for kind, file in each[0].items():
        sums |= file.finish(folder, [files[kind].write(folder) for files in each])
    return sums


def n_bytes(files):
    return sum(file.size for file in files.values())


def assert_checksums(folder, sums):
    import zlib

    found = {path.name: {"size": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())} for path in folder.iterdir()}
    assert found == sums


def test_both_ways_write_identical_files_for_one_process(tmp_path):
    trees = {"model": (arrays(), jnp.bfloat16), "optimizer": (arrays(), None)}
    one = save_all([files_of(trees, InPlace)], tmp_path / "in_place")
    each = save_all([files_of(trees, FilePerProcess, 0, True)], tmp_path / "each")
    assert one == each
    assert_checksums(tmp_path / "each", each)
    for name in one:
        assert (tmp_path / "in_place" / name).read_bytes() == (tmp_path / "each" / name).read_bytes()
    expected = sum(sums["size"] for sums in one.values())
    assert n_bytes(files_of(trees, InPlace)) == n_bytes(files_of(trees, FilePerProcess, 0, True)) == expected


def test_several_processes_write_whole_arrays_and_an_index(tmp_path, monkeypatch):
    leaves = arrays()
    owner = {"split": 0, "whole": 2, "count": 0, "empty": 2, "host": 0, "key": 2}
    monkeypatch.setattr(_tree_files, "owners", lambda leaves: {name: owner[name] for name in leaves})
    # Each object stands for one of three processes; this process holds all arrays.
    monkeypatch.setattr(_tree_files, "gathered", lambda leaf, who: as_numpy(leaf) if who == current["process"] else None)
    current = {}

    class ProcessFiles(FilePerProcess):
        def copy(self):
            current["process"] = self._index
            super().copy()

    trees = {"model": (leaves, jnp.bfloat16), "optimizer": ({"count": leaves["count"]}, None)}
    folder = tmp_path / "each"
    sums = save_all([files_of(trees, ProcessFiles, i, True) for i in range(3)], folder)
    assert_checksums(folder, sums)
    assert sorted(sums) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors",
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {0: "model-00001-of-00002.safetensors", 2: "model-00002-of-00002.safetensors"}
    assert index["weight_map"] == {name: files[i] for name, i in sorted(owner.items())}
    by_file = [load_file(folder / file) for file in files.values()]  # read as another library would
    assert index["metadata"] == {"total_size": sum(a.nbytes for each in by_file for a in each.values())}
    found = TensorReader.find(folder, "model")
    assert set(found.names()) == set(leaves)
    for name, leaf in leaves.items():
        expected = as_numpy(leaf)
        if jnp.issubdtype(expected.dtype, jnp.floating):
            expected = expected.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(found.read(name), expected)
    shared = sum(sums[file]["size"] for file in sums if not file.endswith(".json"))
    assert abs(n_bytes(files_of(trees, FilePerProcess, 1, True)) - shared) < 200  # one header in place of two
    assert [n_bytes(files_of(trees, FilePerProcess, i, False)) for i in (0, 2)] == [
        sums[files[0]]["size"] + sums["optimizer.safetensors"]["size"],
        sums[files[2]]["size"] + 16,  # an optimizer file without tensors, which is not written
    ]


def test_copies_outlive_the_arrays(tmp_path):
    leaves = arrays()
    expected = {name: as_numpy(leaf).copy() for name, leaf in leaves.items()}
    files = FilePerProcess("model", leaves, None, 0, True)
    files.copy()
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array):
            leaf.delete()
    leaves["host"][:] = 0
    files.write(tmp_path)
    found = TensorReader(tmp_path / "model.safetensors")
    for name, values in expected.items():
        np.testing.assert_array_equal(found.read(name), values)
