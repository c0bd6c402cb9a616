"""The processes' blocks cover every array exactly once, and their runs place them at the right offsets in the file."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from redeqx.checkpoint import _shards
from redeqx.checkpoint._shards import Block, as_stored, gathered, own_blocks, owners
from redeqx.machine import make_mesh

SPECS = {
    "replicated": P(),
    "columns": P(None, "model"),
    "rows": P("fsdp"),
    "both": P("fsdp", "model"),
    "both on one dim": P(("fsdp", "model")),
    "columns by all": P(None, ("data", "fsdp", "model")),
    "third": P(None, None, "model"),
    "first and third": P("fsdp", None, "model"),
}


def sharded_array(spec, shape=(8, 8, 4), dtype=np.float32):
    """A numpy array of distinct values, and the same array sharded over the eight devices."""
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return values, jax.device_put(values, NamedSharding(make_mesh(2, n_fsdp_shards=2), spec))


def assemble(blocks, shape, dtype):
    """The row-major array that the blocks' runs produce, and how often each item was written."""
    flat, times = np.zeros(int(np.prod(shape)), dtype), np.zeros(int(np.prod(shape)), int)
    for block in blocks:
        here, seen = block.values(), []
        assert here.shape == tuple(block.shape)
        assert here.flags.c_contiguous
        for there, at, n in block.runs(shape):
            flat[there : there + n] = here.reshape(-1)[at : at + n]
            times[there : there + n] += 1
            seen.append((there, at, n))
        assert seen == sorted(seen)
        assert [at for _, at, _ in seen] == np.cumsum([0, *(n for _, _, n in seen[:-1])]).tolist()
    return flat.reshape(shape), times


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_blocks_cover_the_array_once(spec, dtype):
    values, array = sharded_array(spec, dtype=dtype)
    blocks = own_blocks({"x": array})["x"]
    flat, times = assemble(blocks, values.shape, dtype)
    np.testing.assert_array_equal(flat, values)
    assert (times == 1).all()


def test_adjacent_shards_are_merged_into_one_block():
    """One process has all devices, so all shards merge."""
    for spec in SPECS.values():
        (block,) = own_blocks({"x": sharded_array(spec)[1]})["x"]
        assert (block.start, block.shape) == ((0, 0, 0), (8, 8, 4))
        assert list(block.runs((8, 8, 4))) == [(0, 0, 256)]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_single_shard_runs_match_the_array_layout(spec):
    values, array = sharded_array(spec)
    blocks = {}
    for shard in array.addressable_shards:
        start = tuple(part.indices(n)[0] for part, n in zip(shard.index, array.shape, strict=True))
        blocks[start] = Block(start, shard.data.shape, [(start, shard.data)])
    flat, times = assemble(blocks.values(), values.shape, values.dtype)
    np.testing.assert_array_equal(flat, values)
    assert (times == 1).all()


def test_runs_have_maximal_length():
    block = lambda start, shape: Block(start, shape, [])  # noqa: E731
    assert list(block((2, 0, 0), (2, 8, 4)).runs((8, 8, 4))) == [(64, 0, 64)]
    assert list(block((2, 4, 0), (2, 4, 4)).runs((8, 8, 4))) == [(80, 0, 16), (112, 16, 16)]
    assert list(block((0, 0, 2), (1, 2, 2)).runs((1, 2, 4))) == [(2, 0, 2), (6, 2, 2)]
    assert list(block((), ()).runs(())) == [(0, 0, 1)]
    assert sum(n for _, _, n in block((0, 0), (0, 4)).runs((0, 4))) == 0


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (5, 3)])
def test_arrays_of_any_shape_are_covered(shape):
    for leaf in (jnp.full(shape, 7.0), np.full(shape, 7.0)):
        (block,) = own_blocks({"x": leaf})["x"]
        flat, times = assemble([block], shape, leaf.dtype)
        np.testing.assert_array_equal(flat, np.asarray(leaf))
        assert (times == 1).all()


def test_host_arrays_are_in_c_order():
    values = np.arange(12.0).reshape(3, 4).T
    (block,) = own_blocks({"x": values})["x"]
    assert (block.start, block.shape) == ((0, 0), (4, 3))
    np.testing.assert_array_equal(assemble([block], (4, 3), values.dtype)[0], values)


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(("data", "fsdp", "model"))])
def test_keys_are_stored_as_key_data(spec):
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(make_mesh(2, n_fsdp_shards=2), spec))
    data = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(np.asarray(as_stored(keys)), data)
    flat, times = assemble(own_blocks({"x": keys})["x"], data.shape, data.dtype)
    np.testing.assert_array_equal(flat, data)
    assert (times == 1).all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_copies_outlive_the_array(spec):
    values, array = sharded_array(spec)
    (block,) = own_blocks({"x": array})["x"]
    copy = block.copied()
    array.delete()
    assert array.is_deleted()
    del block
    assert (copy.start, copy.shape) == ((0, 0, 0), (8, 8, 4))
    np.testing.assert_array_equal(copy.values(), values)
    assert all(isinstance(shard, np.ndarray) for _, shard in copy.shards)


def test_copies_are_independent_of_host_arrays():
    values = np.arange(4)
    (block,) = own_blocks({"x": values})["x"]
    copy = block.copied()
    values += 1
    np.testing.assert_array_equal(copy.values(), [0, 1, 2, 3])


# --- several processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


class Array:
    """One process's view of an array over several processes: without the values of the other processes' shards."""

    def __init__(self, values, index_of, me):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.sharding = SimpleNamespace(devices_indices_map=lambda shape: index_of, device_set=set(index_of))
        self.addressable_shards = [
            SimpleNamespace(device=device, data=values[index])
            for device, index in index_of.items()
            if device.process_index == me
        ]


def run_in_each_process(monkeypatch, n, leaves_of, function=own_blocks):
    """The results of `function` in each of `n` processes with the leaves `leaves_of(me, devices)`."""
    devices = [Device(i, i * n // 8) for i in range(8)]
    found = []
    for me in range(n):
        with monkeypatch.context() as patch:
            there = SimpleNamespace(
                Array=Array, process_index=lambda me=me: me, process_count=lambda: n, dtypes=jax.dtypes, random=jax.random
            )
            patch.setattr(_shards, "jax", there)
            found.append(function(leaves_of(me, devices)))
    return found


@pytest.mark.parametrize("n", [2, 4, 8])
def test_processes_write_each_array_once_with_balanced_load(monkeypatch, n):
    """Replicated and sharded arrays: loads differ by at most the largest shard plus an eighth of the mean load."""
    draw = np.random.default_rng(n)
    arrays = {f"{k} parts {i}": (draw.normal(size=(8, draw.integers(1, 50))), k) for i in range(10) for k in (1, 2, 4, 8)}

    def leaves(me, devices):
        return {
            name: Array(values, {each: part(each.id % k, k) for each in devices}, me) for name, (values, k) in arrays.items()
        }

    found = run_in_each_process(monkeypatch, n, leaves)
    for name, (values, _) in arrays.items():
        flat, times = assemble([block for each in found for block in each[name]], values.shape, values.dtype)
        np.testing.assert_array_equal(flat, values)
        assert (times == 1).all()
    load = [sum(int(np.prod(block.shape)) for blocks in each.values() for block in blocks) for each in found]
    most = max(values.size // k for values, k in arrays.values()) + sum(load) / n / 8
    assert max(load) - min(load) <= most, load


@pytest.mark.parametrize("function", [own_blocks, owners])
def test_load_is_balanced_by_bytes(monkeypatch, function):
    """Not by items: wide and narrow dtypes alternate, with equal item counts, replicated on every device."""
    dtypes = [np.float64, np.int8] * 16

    def leaves(me, devices):
        whole = dict.fromkeys(devices, part(0, 1))
        return {f"leaf {i:02}": Array(np.zeros((8, 32), dtype), whole, me) for i, dtype in enumerate(dtypes)}

    found = run_in_each_process(monkeypatch, 2, leaves, function)
    n_bytes = {f"leaf {i:02}": 256 * np.dtype(dtype).itemsize for i, dtype in enumerate(dtypes)}
    is_first = {name: bool(answer) if function is own_blocks else answer == 0 for name, answer in found[0].items()}
    load, total = sum(n for name, n in n_bytes.items() if is_first[name]), sum(n_bytes.values())
    assert abs(2 * load - total) <= 256 * 8 + total / 2 / 8


def test_process_writes_all_columns_of_an_array_it_started(monkeypatch):
    """Both processes hold full copies, split by columns over their devices: each writes eight of sixteen as one block."""

    def leaves(me, devices):
        columns = {each: (slice(None), slice(2 * (each.id % 4), 2 * (each.id % 4) + 2)) for each in devices}
        return {f"layer_{i}": Array(np.full((8, 8), i), columns, me) for i in range(16)}

    found = run_in_each_process(monkeypatch, 2, leaves)
    assert [[len(blocks) for blocks in each.values()] for each in found] == [[1, 0] * 8, [0, 1] * 8]


def part(i, k):
    """The index of part `i` of `k` equal parts of eight rows."""
    return slice(8 // k * i, 8 // k * (i + 1)), slice(None)


def test_host_arrays_are_written_by_process_0(monkeypatch):
    """They count toward its load, so an equally large device array goes to the other process."""
    leaf = np.ones((8, 4))
    found = run_in_each_process(
        monkeypatch, 2, lambda me, devices: {"host": leaf, "device": Array(leaf, dict.fromkeys(devices, part(0, 1)), me)}
    )
    assert [{name: len(blocks) for name, blocks in each.items()} for each in found] == [
        {"host": 1, "device": 0},
        {"host": 0, "device": 1},
    ]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_owners_hold_their_whole_arrays_with_balanced_load(monkeypatch, n):
    """Arrays are split over one process's devices or over all; every process computes the same owners."""
    draw = np.random.default_rng(n)
    arrays = {f"{k} parts {i}": (np.zeros((8, draw.integers(1, 50))), k) for i in range(10) for k in (1, 8 // n, 8)}

    def leaves(me, devices):
        return {
            name: Array(values, {each: part(each.id % k, k) for each in devices}, me) for name, (values, k) in arrays.items()
        }

    found, *others = run_in_each_process(monkeypatch, n, leaves, owners)
    assert all(other == found for other in others)
    load = [sum(arrays[name][0].nbytes for name in arrays if found[name] == i) for i in range(n)]
    assert max(load) - min(load) <= max(values.nbytes for values, _ in arrays.values())


def test_owner_is_the_process_that_holds_the_whole_array(monkeypatch):
    """Each process holds half of the first array; only the last device holds the second."""

    def leaves(me, devices):
        halves = {each: part(each.id // 4, 2) for each in devices}
        return {
            "halves": Array(np.zeros((8, 9)), halves, me),
            "last": Array(np.zeros((8, 2)), {devices[-1]: part(0, 1)}, me),
        }

    for found in run_in_each_process(monkeypatch, 2, leaves, owners):
        assert found == {"halves": 0, "last": 1}
    with_host = run_in_each_process(monkeypatch, 2, lambda me, devices: {**leaves(me, devices), "host": np.zeros(3)}, owners)
    assert [each["host"] for each in with_host] == [0, 0]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gathered_arrays_outlive_the_array(spec):
    values, array = sharded_array(spec)
    whole = gathered(array, 0)
    assert gathered(array, 1) is None
    array.delete()
    assert isinstance(whole, np.ndarray)
    np.testing.assert_array_equal(whole, values)


def test_gathering_compiles_once_for_arrays_of_one_kind():
    """With several processes each save to an object store gathers each array, whose program would compile each time."""
    names = []

    def record(event, duration_secs, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name"))

    arrays = [sharded_array(P("fsdp", "model"), (24, 40))[1] for _ in range(3)]
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        for array in arrays:
            assert gathered(array, 1) is None  # of another process, which has no copy
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert len(names) == 1
