"""From examples to batches: cutting rows, `collate_fn` outputs, order, every kind of source, and prefetching."""

import collections
import contextlib
import functools
import itertools
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx.data import (
    BatchSize,
    CollatePool,
    Group,
    Prefetch,
    batches,
    check_examples,
    collate,
    drawn_ahead,
    examples_of,
    known_size,
    size_of,
    slices,
)
from redeqx.dims import UNKNOWN
from redeqx.machine import make_mesh, n_batch_shards

# --- cutting rows ---------------------------------------------------------------------------------------------------


def cut_rows(n_rows, micro_batch_size, n_devices):
    mesh = make_mesh(devices=jax.devices()[:n_devices])
    return BatchSize(micro_batch_size, micro_batch_size).cut(n_rows, UNKNOWN, mesh)


def placed_batches(collate_fn, examples, size, mesh):
    with contextlib.closing(batches(slices(examples, size.examples), CollatePool(collate_fn), size, mesh)) as steps:
        return list(steps)


@pytest.mark.parametrize("n_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8, 24, 40])
def test_cut_rows_keeps_every_row_and_limits_rows_per_device(micro_batch_size, n_devices):
    for n_rows in range(1, 3 * micro_batch_size + 2):
        full, *rest = cut = cut_rows(n_rows, micro_batch_size, n_devices)
        assert sum(group.n * group.rows for group in cut) == n_rows
        assert all(1 <= group.rows <= micro_batch_size for group in cut)
        undivided = [group for group in cut if group.rows % n_devices and group.rows != micro_batch_size]
        assert all(group.rows <= max(micro_batch_size // n_devices, 1) for group in undivided)
        # At most three groups: full micro-batches, the divisible remainder, the indivisible rest.
        assert full.n * full.rows == n_rows or len(rest) <= 2


@pytest.mark.parametrize(
    ("n_rows", "expected"),
    [
        (32, (Group(2, 16),)),
        (24, (Group(1, 16), Group(1, 8))),
        (26, (Group(1, 16), Group(1, 8), Group(1, 2))),
        (31, (Group(1, 16), Group(1, 8), Group(7, 1))),
        (8, (Group(1, 8),)),
        (6, (Group(3, 2),)),
        (1, (Group(1, 1),)),
    ],
)
def test_cut_rows_groups(n_rows, expected):
    assert cut_rows(n_rows, micro_batch_size=16, n_devices=8) == expected


@pytest.mark.parametrize(
    ("n_rows", "expected"),
    [
        (7, (Group(1, 7),)),
        (10, (Group(1, 10),)),  # at most the 16 rows of one device: one more micro-batch, and one program to compile
        (8, (Group(1, 8),)),
        (18, (Group(1, 16), Group(1, 2))),
        (138, (Group(1, 128), Group(1, 10))),
    ],
)
def test_small_remainder_is_not_cut_further(n_rows, expected):
    assert cut_rows(n_rows, micro_batch_size=128, n_devices=8) == expected


@pytest.mark.parametrize("n_rows", [1, 8, 11, 16, 31, 32])
@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (2, 2), (1, 8), (8, 1)])
def test_placed_batch_contains_every_row_once(shards, n_rows):
    mesh = make_mesh(*shards)
    n_shards = n_batch_shards(mesh)
    batch = {"x": np.arange(n_rows * 3).reshape(n_rows, 3), "y": (np.arange(n_rows),)}
    size = BatchSize(max(n_rows, 2 * n_shards), 2 * n_shards)
    cut = size.cut(n_rows, UNKNOWN, mesh)
    (placed,) = (step.groups for step in placed_batches(lambda rows: batch, range(n_rows), size, mesh))
    for group, part in zip(cut, placed, strict=True):
        assert part["x"].shape == (group.n, group.rows, 3)
        splits = group.rows % n_shards == 0
        assert part["x"].sharding.spec == (P(None, ("data", "fsdp")) if splits else P())
        n_local_rows = group.rows // n_shards if splits else group.rows
        assert n_local_rows <= 2
        assert {shard.data.shape for shard in part["x"].addressable_shards} == {(group.n, n_local_rows, 3)}
    rows = np.concatenate([np.asarray(part["y"][0]).reshape(-1) for part in placed])
    np.testing.assert_array_equal(rows, batch["y"][0])


@pytest.mark.parametrize("n_devices", [1, 2, 8])
def test_padding_repeats_the_last_row(n_devices):
    mesh, size = make_mesh(devices=jax.devices()[:n_devices]), BatchSize(3, 8, pads=True)
    full, last = placed_batches(lambda rows: {"x": np.array(rows), "y": 2.0 * np.array(rows)}, range(5), size, mesh)
    np.testing.assert_array_equal(full.groups[0]["x"], [[0, 1, 2, 2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(last.groups[0]["x"], [[3, 4, 4, 4, 4, 4, 4, 4]])
    np.testing.assert_array_equal(last.groups[0]["y"], [[6, 8, 8, 8, 8, 8, 8, 8]])
    assert (full.n_examples, last.n_examples) == (3, 2)
    assert full.signature == last.signature  # one program


@pytest.mark.parametrize(
    ("rows", "n_tokens"),
    [
        (lambda n: {"ids": np.zeros((n, 7), np.int32), "labels": np.zeros((n, 7), int), "x": np.zeros((n, 9, 2))}, 28),
        (lambda n: {"x": np.zeros((n, 9), np.float32), "y": np.zeros(n, np.int32)}, None),
    ],
)
def test_tokens_are_those_of_the_token_ids(rows, n_tokens):
    steps = placed_batches(lambda examples: rows(len(examples)), range(8), BatchSize(4, 4), make_mesh())
    assert [(step.n_examples, step.n_tokens) for step in steps] == [(4, n_tokens)] * 2


# --- collating ------------------------------------------------------------------------------------------------------


def collate_output(output, n_rows=3):
    return collate(lambda examples: output, [None] * n_rows)


def test_collate_keeps_the_pytree_structure():
    output = {"x": np.zeros((3, 2), np.float32), "more": (np.zeros(3, np.int32), {"mask": np.ones((3, 1), bool)})}
    batch = collate_output(output)
    assert jax.tree.structure(batch) == jax.tree.structure(output)
    assert [leaf.dtype for leaf in jax.tree.leaves(batch)] == [leaf.dtype for leaf in jax.tree.leaves(output)]
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(batch))


@pytest.mark.parametrize(
    ("output", "dtype"),
    [
        (np.array([0.1, 0.2, 0.3]), np.float32),
        (np.array([1, 2, 3], np.int64), np.int32),
        (np.array([1, 2, 2**32 - 1], np.uint64), np.uint32),
        (np.array([1, 2, 3], np.uint8), np.uint8),
        (np.zeros(3, np.complex128), np.complex64),
        (np.zeros(3, np.float16), np.float16),
        (np.zeros(3, jnp.bfloat16), jnp.bfloat16),
        (np.zeros(3, jnp.float8_e4m3fnuz), jnp.float8_e4m3fnuz),  # whose character is that of a long double
        (np.zeros((3, 0), np.int64), np.int32),
        (np.zeros(3, bool), bool),
        (jnp.arange(3), np.int32),
        (np.arange(3, dtype=">f4"), np.float32),  # as in files whose bytes are in the other order
        (np.arange(3, dtype=">i8"), np.int32),
    ],
)
def test_collate_converts_to_jax_dtypes(output, dtype):
    leaf = collate_output(output)
    assert type(leaf) is np.ndarray
    assert leaf.dtype == dtype
    np.testing.assert_array_equal(leaf, np.asarray(output).astype(dtype))


@dataclass
class Unregistered:
    x: np.ndarray


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (
            {"ids": [[1, 2], [3], [4, 5, 6]]},
            TypeError,
            "`collate_fn` output `ids`: expected an array of 3 rows, got a list of 3 with lengths 1 to 3. "
            "Pad to one length and return `np.array(...)`.",
        ),
        (
            {"inputs": {"y": [1, 2, 3]}},
            TypeError,
            "`collate_fn` output `inputs.y`: expected an array of 3 rows, got a list of 3. Return `np.array(...)`.",
        ),
        (
            {"ids": np.array([[1, 2], [3], [4, 5, 6]], dtype=object)},
            TypeError,
            "`collate_fn` output `ids`: expected numbers, got rows of 1 to 3 items. Pad them to one length.",
        ),
        (
            {"y": np.array([0.5, None, 1], dtype=object)},
            TypeError,
            "`collate_fn` output `y`: expected numbers, got None in 1 of 3 entries, the first is entry 1. "
            "Replace them by numbers.",
        ),
        (
            {"y": np.array([{}, {}, {}])},
            TypeError,
            "`collate_fn` output `y`: expected numbers, got an array of dtype object that holds: dict. "
            "Return arrays of numbers.",
        ),
        (
            {"text": np.array(["a", "b", "c"])},
            TypeError,
            "`collate_fn` output `text`: expected numbers, got text in 3 entries. Tokenize it, or leave it out.",
        ),
        (
            {"ids": ["a", "bc", "d"]},  # a list is not called one of other lengths, to be made an array
            TypeError,
            "`collate_fn` output `ids`: expected numbers, got text in 3 entries. Tokenize it, or leave it out.",
        ),
        (
            {"when": np.zeros(3, "datetime64[s]")},
            TypeError,
            "`collate_fn` output `when`: expected numbers, got an array of dtype datetime64[s] that holds: datetime. "
            "Return arrays of numbers.",
        ),
        (
            {"took": np.zeros(3, "timedelta64[s]")},
            TypeError,
            "`collate_fn` output `took`: expected numbers, got an array of dtype timedelta64[s] that holds: timedelta. "
            "Return arrays of numbers.",
        ),
        (
            {"x": np.zeros(3, np.longdouble)},
            TypeError,
            f"`collate_fn` output `x`: expected numbers, got an array of dtype {np.dtype(np.longdouble)} that "
            "holds: longdouble. Return arrays of numbers.",
        ),
        (
            {"row": np.zeros(3, [("a", np.int32), ("b", np.int32)])},
            TypeError,
            "`collate_fn` output `row`: expected numbers, got an array of dtype "
            "[('a', '<i4'), ('b', '<i4')] that holds: tuple. Return arrays of numbers.",
        ),
        (
            {"x": np.ma.masked_equal([1.0, 2.0, 3.0], 2.0)},
            TypeError,
            "`collate_fn` output `x`: expected an array without a mask, got a masked array. Fill it, `array.filled(0)`, "
            "and return `~np.ma.getmaskarray(array)` as another output, for the loss to use.",
        ),
        (
            {"keys": jax.random.split(jax.random.key(0), 3)},
            TypeError,
            "`collate_fn` output `keys`: expected numbers, got random keys. Split the key of `loss_fn`, or return "
            "`np.asarray(jax.random.key_data(keys))`, and call `jax.random.wrap_key_data` in the loss.",
        ),
        (
            {"temperature": 0.5},
            TypeError,
            "`collate_fn` output `temperature`: expected an array of 3 rows, got float. "
            "Return `np.array(...)` with one row for each example.",
        ),
        (
            Unregistered(np.zeros(3)),
            TypeError,
            "`collate_fn` output `value`: expected an array of 3 rows, got Unregistered. "
            "Register this dataclass with `jax.tree_util.register_dataclass`, or return a dict.",
        ),
        (
            "abc",
            TypeError,
            "`collate_fn` output `value`: expected an array of 3 rows, got str. "
            "Return `np.array(...)` with one row for each example.",
        ),
        (
            (np.zeros(3), np.float32(1.0)),
            ValueError,
            "`collate_fn` output `1`: expected 3 rows, one for each example, got shape (). "
            "The leading dim is the batch: repeat a number of the whole batch, `np.full(3, number)`.",
        ),
        (
            {"x": np.zeros((2, 3))},
            ValueError,
            "`collate_fn` output `x`: expected 3 rows, one for each example, got shape (2, 3). "
            "The leading dim is the batch.",
        ),
        (
            {"nodes": np.zeros((7, 3))},
            ValueError,
            "`collate_fn` output `nodes`: expected 3 rows, one for each example, got shape (7, 3). The leading dim is the "
            "batch: pad examples of different lengths, such as graphs, to one length, in place of joining them.",
        ),
        (
            {"ids": np.array([1, 2, 2**31])},
            ValueError,
            "`collate_fn` output `ids`: expected integers that int32 holds, got up to 2147483648. "
            "Enable JAX's 64-bit mode (`jax_enable_x64`), or use smaller numbers.",
        ),
        (
            {"ids": np.array([1, 2, -(2**31) - 1])},
            ValueError,
            "`collate_fn` output `ids`: expected integers that int32 holds, got down to -2147483649. "
            "Enable JAX's 64-bit mode (`jax_enable_x64`), or use smaller numbers.",
        ),
        ({}, TypeError, "`collate_fn`: expected a PyTree of arrays, got {}. Return a dict of numpy arrays."),
        (None, TypeError, "`collate_fn`: expected a PyTree of arrays, got None. Return a dict of numpy arrays."),
    ],
)
def test_invalid_collate_outputs_raise(output, error, message):
    with pytest.raises(error) as raised:
        collate_output(output)
    assert str(raised.value) == message


# --- order ----------------------------------------------------------------------------------------------------------


def examples_by_step(steps):
    return [list(step.examples) for step in steps]


def all_examples(steps):
    return [example for step in steps for example in step.examples]


def test_each_epoch_has_its_own_permutation_determined_by_the_seed():
    examples = list(range(23))
    orders = [all_examples(slices(examples, 5, seed=(0, 0, epoch))) for epoch in range(3)]
    assert all(sorted(order) == examples for order in orders)
    assert orders[0] != orders[1] != orders[2] != examples
    assert all_examples(slices(examples, 7, seed=(0, 0, 1))) == orders[1]  # independent of the batch size
    assert all_examples(slices(examples, 5, seed=(1, 0, 0))) != orders[0]
    assert all_examples(slices(examples, 5)) == examples


@pytest.mark.parametrize("seed", [None, (3, 0, 1)])
def test_pass_resumes_from_any_position(seed):
    examples = list(range(17))
    all_steps = list(slices(examples, 4, seed=seed))
    assert [len(step.examples) for step in all_steps] == [4, 4, 4, 4, 1]
    assert [step.position for step in all_steps] == [4, 8, 12, 16, 17]
    for i, step in enumerate(all_steps):
        assert list(slices(examples, 4, seed=seed, position=step.position)) == all_steps[i + 1 :]


# --- sources --------------------------------------------------------------------------------------------------------


class Columns:
    """Like `datasets.Dataset`: an integer returns a row, a slice returns a dict of columns, NumPy integers raise."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if isinstance(i, slice):
            return {"x": list(range(self.n))[i]}
        if type(i) is not int:
            raise TypeError(f"an index of type {type(i).__name__}")
        return {"x": i}


@dataclass
class Stateful:
    """Like a grain dataset: each iterator has its own state. Counts the examples that are read."""

    n: int
    n_read: int = 0

    def __iter__(self):
        return StatefulIterator(self)


class StatefulIterator:
    def __init__(self, source):
        self.source, self.i = source, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == self.source.n:
            raise StopIteration
        self.i += 1
        self.source.n_read += 1
        return self.i - 1

    def get_state(self):
        return {"i": self.i}

    def set_state(self, state):
        self.i = state["i"]


class BytesState(Stateful):
    """Like grain's DataLoader: the state of its iterators is bytes."""

    def __iter__(self):
        return BytesStateIterator(self)


class BytesStateIterator(StatefulIterator):
    def get_state(self):
        return self.i.to_bytes(4, "big")

    def set_state(self, state):
        self.i = int.from_bytes(state, "big")


class Loader:
    """Like torch's StatefulDataLoader: the iterable has the state, and the next `iter` starts from the loaded one."""

    def __init__(self, n):
        self.n, self.i, self.loaded, self.n_read = n, 0, None, 0

    def __iter__(self):
        start, self.loaded = self.loaded or 0, None
        for i in range(start, self.n):
            self.n_read += 1
            self.i = i + 1
            yield i

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.loaded = state["i"]


class Plain:
    """An iterable without state."""

    def __init__(self, n):
        self.n, self.n_read = n, 0

    def __iter__(self):
        for i in range(self.n):
            self.n_read += 1
            yield i


@pytest.mark.parametrize("examples", [list(range(9)), np.arange(9), tuple(range(9)), range(9), Columns(9)], ids=type)
def test_indexable_sources_are_read_by_integers(examples):
    check_examples(examples)
    assert size_of(examples) == 9
    actual = all_examples(slices(examples, 4, seed=(0,)))
    assert sorted(row["x"] if isinstance(row, dict) else int(row) for row in actual) == list(range(9))


def test_hugging_face_dataset_is_read_by_integers():
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    examples = datasets.Dataset.from_dict({"x": list(range(9))})
    check_examples(examples)
    actual = all_examples(slices(examples, 4, seed=(0,)))
    assert sorted(row["x"] for row in actual) == list(range(9))
    assert all_examples(slices(examples, 4, seed=(0,), position=4)) == actual[4:]


def test_function_of_the_epoch_is_called_with_the_epoch():
    def examples(epoch):
        return [epoch] * (epoch + 1)

    check_examples(examples)  # does not call the function
    assert examples_of(examples, 2) == [2, 2, 2]
    assert examples_of([1], 2) == [1]


@pytest.mark.parametrize("kind", [Stateful, BytesState, Loader, Plain])
def test_iterable_resumes_from_its_state_or_position(kind):
    check_examples(kind(11))
    assert size_of(kind(11)) is None
    examples = kind(11)
    all_steps = list(slices(examples, 3, seed=(0,)))
    assert examples_by_step(all_steps) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert [step.position for step in all_steps] == [3, 6, 9, 11]
    assert examples_by_step(slices(examples, 3)) == examples_by_step(all_steps)  # a second pass starts from the beginning
    for i, step in enumerate(all_steps):
        again = kind(11)
        assert examples_by_step(slices(again, 3, position=step.position, state=step.state)) == examples_by_step(
            all_steps[i + 1 :]
        )
        # With a state, only the examples used for comparison are read twice; without one, earlier examples are skipped.
        assert again.n_read == 11 - (0 if kind is Plain else step.position - step.state["n_taken"])
        assert examples_by_step(slices(again, 3)) == examples_by_step(all_steps)  # the next epoch starts from the beginning
    assert (all_steps[0].state["state"] is None) == (kind is Plain)


def test_stateful_iterator_is_accepted_and_resumes():
    iterator = iter(Stateful(5))
    first, *rest = slices(iterator, 2)
    assert examples_by_step(rest) == [[2, 3], [4]]
    fresh = iter(Stateful(5))
    assert examples_by_step(slices(fresh, 2, position=first.position, state=first.state)) == examples_by_step(rest)


def test_grain_sources_resume_from_their_state():
    grain = pytest.importorskip("grain", exc_type=ImportError)
    dataset = grain.MapDataset.range(11).to_iter_dataset()
    sampler = grain.samplers.SequentialSampler(11, grain.sharding.NoSharding())
    loader = grain.DataLoader(data_source=list(range(11)), sampler=sampler, worker_count=0)
    for examples in (dataset, loader):
        all_steps = list(slices(examples, 4))
        assert all_examples(all_steps) == list(range(11))
        assert all_steps[0].state["state"] is not None
        assert examples_by_step(slices(examples, 4, position=4, state=all_steps[0].state)) == examples_by_step(all_steps[1:])


def test_hugging_face_iterable_dataset_receives_the_epoch():
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    columns = datasets.Dataset.from_dict({"x": list(range(11))})
    shuffled = columns.to_iterable_dataset().shuffle(seed=0, buffer_size=11)
    first, second = (all_examples(slices(examples_of(shuffled, epoch), 4)) for epoch in range(2))
    assert first != second  # the order depends on the seed and the epoch
    assert all_examples(slices(examples_of(shuffled, 0), 4)) == first

    examples = columns.to_iterable_dataset()
    all_steps = list(slices(examples_of(examples, 0), 4))
    examples = columns.to_iterable_dataset()
    step = all_steps[0]
    assert examples_by_step(
        slices(examples_of(examples, 0), 4, position=step.position, state=step.state)
    ) == examples_by_step(all_steps[1:])
    # Without `set_epoch` it would start again from the loaded state and leave out earlier examples.
    assert examples_by_step(slices(examples_of(examples, 1), 4)) == examples_by_step(all_steps)


@dataclass
class FixedState:
    """An iterable that always returns the given state."""

    state: object

    def __iter__(self):
        return iter(range(4))

    def get_state(self):
        return self.state

    def set_state(self, state):
        raise AssertionError


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"rng": np.array([None])}, "a part that is a ndarray"),
        (random.Random(0).getstate(), "a part that is a tuple"),
        ({"of_worker": {0: 3}}, "a part that is a dict"),
    ],
)
def test_state_that_json_cannot_store_raises(state, found):
    with pytest.raises(TypeError) as raised:
        next(slices(FixedState(state), 2))
    assert str(raised.value) == (
        f"`train_examples.get_state()`: expected a state that JSON can store, got {found}. "
        "Return numbers, strings, lists, dicts with string keys, bytes, or arrays."
    )


@pytest.mark.parametrize("state", [None, 3, [1, {"a": [2.5, None]}], {"rng": np.random.default_rng(0).bit_generator.state}])
def test_state_of_json_values_is_kept(state):
    assert next(slices(FixedState(state), 2)).state["state"] == state


def test_exhausted_iterator_raises():
    iterator = iter(range(4))
    assert all_examples(slices(iterator, 3)) == [0, 1, 2, 3]
    with pytest.raises(ValueError) as raised:
        list(slices(iterator, 3))
    assert str(raised.value) == (
        "`train_examples`: expected at least one example, got an iterable with none, or one that is used up. "
        "Pass one that can be iterated anew, or a function of the epoch."
    )


@pytest.mark.parametrize("examples", [[], np.zeros((0, 4)), Columns(0)], ids=type)
def test_empty_examples_raise(examples):
    with pytest.raises(ValueError) as raised:
        check_examples(examples, "eval_examples")
    assert str(raised.value) == ("`eval_examples`: expected at least one example, got none. Look at what was loaded.")
    with pytest.raises(ValueError, match=r"^`train_examples\(2\)`: expected at least one example, got none\."):
        examples_of(lambda epoch: examples, 2)


@pytest.mark.parametrize(
    "column", [[1, 2], range(2), collections.UserList([1, 2]), []], ids=["list", "range", "sequence", "empty"]
)
def test_columns_by_name_are_no_examples(column):
    with pytest.raises(TypeError, match="expected one item per example, got a dict, whose items have names"):
        check_examples({"x": column})


@pytest.mark.parametrize(
    "sets", [{"train": Columns(4), "test": Columns(2)}, {"train": [{"x": 1}], "test": [{"x": 2}]}], ids=["splits", "lists"]
)
def test_sets_by_name_are_no_examples(sets):
    with pytest.raises(TypeError) as raised:
        check_examples(sets)
    assert str(raised.value) == (
        "`train_examples`: expected one item per example, got a dict of sets of examples. "
        "Pass one of them, such as the one at 'train'."
    )


@pytest.mark.parametrize("examples", ["text", b"bytes", 7, None])
def test_invalid_examples_raise(examples):
    with pytest.raises(TypeError) as raised:
        check_examples(examples)
    assert str(raised.value) == (
        "`train_examples`: expected examples with `len()` and integer items, an iterable, or a function of the epoch, got "
        f"{type(examples).__name__}. Pass a list with one entry for each example."
    )


@pytest.mark.parametrize("examples", [np.array(5.0), list], ids=["array", "class"])
def test_examples_whose_length_raises(examples):
    with pytest.raises(
        TypeError, match=r"^`eval_examples`: expected examples with `len\(\)`, got one that raises: .*\. Pass a"
    ):
        check_examples(examples, "eval_examples")
    with pytest.raises(TypeError, match=r"^`examples`: expected examples with `len\(\)`, got one that raises: .*\. Pass a"):
        known_size(examples)


def test_a_long_list_of_arrays_is_not_read_to_check_it():
    """A list of a million arrays took more than a second, at each evaluation several times."""

    class Unread(list):
        def __iter__(self):
            raise AssertionError("read")

        def __getitem__(self, i):
            raise AssertionError("read")

    check_examples(Unread([np.zeros(3)] * 1000))


# --- items drawn ahead ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 20])
def test_items_are_drawn_ahead_in_order_and_let_go(n):
    class Item:
        pass

    drawn = []

    def items():
        for _ in range(10):
            drawn.append(weakref.ref(item := Item()))
            yield item
            del item

    alive = []
    for i, _ in enumerate(drawn_ahead(items(), n)):
        assert len(drawn) == min(i + n + 1, 10) and drawn[i]() is not None
        alive.append(sum(ref() is not None for ref in drawn))
    assert len(alive) == 10 and max(alive) <= n + 2 and alive[-1] <= 2


def test_an_error_of_drawing_follows_the_items_before_it():
    seen = []
    with pytest.raises(KeyError, match="item 5"):
        seen.extend(drawn_ahead(fails_at(5), 3))
    assert seen == [0, 1, 2, 3, 4]


# --- prefetching ------------------------------------------------------------------------------------------------------


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("redeqx-prefetch")]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_prefetch_keeps_the_order(n, depth):
    assert list(Prefetch(iter(range(n)), depth)) == list(range(n))
    assert not prefetch_threads()


def test_next_item_is_prepared_while_the_current_one_is_used():
    used, prepared = threading.Event(), threading.Event()

    def items():
        yield 1
        assert used.wait(10)  # the reader holds the first item
        prepared.set()
        yield 2

    prefetch = Prefetch(items())
    assert next(prefetch) == 1
    used.set()
    assert prepared.wait(10)  # the reader still holds it and has not requested the second
    assert list(prefetch) == [2]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_prefetch_is_limited_by_its_depth(depth):
    produced = []

    def items():
        for i in itertools.count():
            produced.append(i)
            yield i

    prefetch = Prefetch(items(), depth)
    assert [next(prefetch) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.2)  # time to run too far ahead
    assert len(produced) <= 3 + depth + 1  # the items read, those queued, and one held by the thread
    prefetch.close()
    assert not prefetch_threads()


def fails_at(n):
    for i in range(10):
        if i == n:
            raise KeyError(f"item {i}")
        yield i


def test_prefetch_error_follows_earlier_items_with_its_traceback():
    actual = []
    with pytest.raises(KeyError, match="item 3") as raised:
        actual.extend(Prefetch(fails_at(3)))
    assert actual == [0, 1, 2]
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "fails_at"
    assert not prefetch_threads()


def test_closing_early_ends_the_thread_and_closes_the_source():
    closed = threading.Event()

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    prefetch = Prefetch(items())
    assert next(prefetch) == 0
    assert len(prefetch_threads()) == 1
    prefetch.close()
    assert not prefetch_threads()
    assert closed.wait(10)


def test_without_a_thread_the_reader_prepares_what_it_reads():
    seen = []

    def items(name):
        for i in range(3):
            seen.append((name, i, threading.current_thread().name))
            yield i
        raise KeyError("the end")

    ahead, inline = Prefetch(items("ahead")), Prefetch(items("inline"), 0)
    assert next(ahead) == 0
    assert seen and not any(name == "inline" for name, _, _ in seen)
    actual = []
    with pytest.raises(KeyError, match="the end"):
        actual.extend(inline)  # the other one has prepared what it may, as both may read one tokenizer
    assert actual == [0, 1, 2] and list(inline) == []
    assert [(name, i) for name, i, _ in seen] == [*(("ahead", i) for i in range(3)), *(("inline", i) for i in range(3))]
    assert {thread for name, _, thread in seen if name == "inline"} == {threading.current_thread().name}
    ahead.close()


def test_unused_prefetch_starts_no_thread():
    prefetch = Prefetch(fails_at(0))
    assert not prefetch_threads()
    prefetch.close()


def test_a_script_ends_while_an_item_never_comes():
    script = """
import threading
from redeqx.data import Prefetch

def items():
    yield 1
    threading.Event().wait()

prefetch = Prefetch(items())
print(next(prefetch))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.sweep
def test_a_thread_may_read_on_after_the_main_thread_has_ended():
    script = """
import threading, time
from redeqx.data import Prefetch

def read():
    main.join()  # the interpreter waits for this thread
    print(list(Prefetch(iter(range(3)))))

main = threading.main_thread()
threading.Thread(target=read).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[0, 1, 2]", done.stderr


def test_many_interrupted_passes_leave_no_thread():
    for stop in range(20):
        for item in Prefetch(iter(range(10))):
            if item == stop % 10:
                break
    assert not prefetch_threads()


# --- through a Trainer --------------------------------------------------------------------------------------------------


class RecordExamples:
    """A `collate_fn` that records the examples of each step, and can fail at one of its calls."""

    def __init__(self, fail_at=None):
        self.steps, self.fail_at = [], fail_at

    def __call__(self, examples):
        if len(self.steps) == self.fail_at:
            raise KeyboardInterrupt
        numbers = [int(e["x"]) if isinstance(e, dict) else int(e) for e in examples]
        self.steps.append(numbers)
        return {"x": np.array(numbers, np.float32)[:, None] / 10}


def make_trainer(seen, workdir=None):
    return redeqx.Trainer(
        redeqx.Deployer(n_model_shards=8, workdir=workdir, verbose=False),
        model=eqx.nn.Linear(1, 2, key=jax.random.key(0)),
        optimizer=optax.sgd(0.01, momentum=0.9),
        collate_fn=seen,
        loss_fn=lambda model, batch, key: jnp.mean((jax.vmap(model)(batch["x"]) - batch["x"]) ** 2),
    )


@pytest.fixture(scope="module")
def trainer_and_seen():
    """One trainer for all sources, so that its step is compiled once."""
    seen = RecordExamples()
    return make_trainer(seen), seen


SHUFFLED = {
    "list": lambda: list(range(11)),
    "array": lambda: np.arange(11),
    "columns": lambda: Columns(11),
    "function": lambda: lambda epoch: list(range(11)),
}
IN_ORDER = {
    "stateful": lambda: Stateful(11),
    "bytes": lambda: BytesState(11),
    "loader": lambda: Loader(11),
    "plain": lambda: Plain(11),
    "generators": lambda: lambda epoch: (i for i in range(11)),
}


@pytest.mark.parametrize("source", [*SHUFFLED, *IN_ORDER])
def test_fit_reads_every_example_once_per_epoch(source, trainer_and_seen):
    trainer, seen = trainer_and_seen
    seen.steps.clear()
    first_step = trainer.step
    trainer.fit({**SHUFFLED, **IN_ORDER}[source](), 4, 2)
    assert [len(step) for step in seen.steps] == [4, 4, 3] * 2
    assert trainer.step == first_step + 6
    epochs = [list(itertools.chain(*steps)) for steps in (seen.steps[:3], seen.steps[3:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(11))] * 2
    if source in IN_ORDER:
        assert epochs == [list(range(11))] * 2
    else:
        assert epochs[0] != epochs[1] != list(range(11))


def run(examples, workdir=None, fail_at=None):
    """Train two epochs; return the examples of each step and the bits of the final weights."""
    seen = RecordExamples(fail_at)
    trainer = make_trainer(seen, workdir)
    trainer.fit(examples, 2, 2, save_every_n_steps=None if workdir is None else 1)
    return seen.steps, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.model) if eqx.is_array(leaf)]


@functools.cache
def uninterrupted_run(in_order):
    return run(Plain(11) if in_order else list(range(11)))


@pytest.mark.parametrize(
    "source", ["list", "stateful", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("loader", "plain"))]
)
def test_fit_resumes_in_the_middle_of_an_epoch(source, tmp_path):
    make = {**SHUFFLED, **IN_ORDER}[source]
    with pytest.raises(KeyboardInterrupt):
        run(make(), tmp_path, fail_at=9)  # the tenth step of twelve: the fourth of the second epoch
    examples = make()
    rest, weights = run(examples, tmp_path)
    all_steps, desired = uninterrupted_run(source in IN_ORDER)
    assert 3 <= len(rest) <= 6
    assert rest == all_steps[-len(rest) :]
    assert weights == desired
    if source in ("stateful", "loader"):
        assert sum(map(len, rest)) <= examples.n_read < 11  # earlier examples are read again only for comparison


def small_trainer(collate_fn=lambda examples: np.array(examples, np.float32)[:, None]):
    return redeqx.Trainer(
        redeqx.Deployer(verbose=False),
        model=eqx.nn.Linear(1, 1, key=jax.random.key(0)),
        optimizer=optax.sgd(0.01),
        collate_fn=collate_fn,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
    )


def test_stop_iteration_in_collate_fn_raises():
    def collate_fn(examples):
        if 7 in examples:
            next(iter([]))
        return np.array(examples, np.float32)[:, None]

    trainer = small_trainer(collate_fn)
    for call in (trainer.fit, trainer.eval_loss):
        with pytest.raises(RuntimeError, match="generator raised StopIteration"):
            call(list(range(20)), batch_size=2)


def test_mappings_as_examples_raise(tmp_path):
    np.savez(tmp_path / "columns.npz", x=np.arange(4))
    for columns in (collections.UserDict(x=[1, 2], y=[3, 4]), np.load(tmp_path / "columns.npz")):
        with pytest.raises(TypeError, match=r"expected one item per example, got a (UserDict|NpzFile)"):
            check_examples(columns)


def test_examples_of_excessive_length_raise():
    with pytest.raises(ValueError, match=r"expected a number of examples, got 1,125,.* as from endless repeats"):
        check_examples(range(2**50))


def test_function_of_the_epoch_outside_fit_raises():
    trainer = small_trainer()
    for call in (trainer.train, trainer.eval_loss):
        with pytest.raises(TypeError, match="`examples`: expected examples, got a function, which only `fit` calls"):
            call(lambda epoch: [1.0, 2.0], batch_size=2)


def test_fit_without_an_update_does_not_constrain_later_fits():
    trainer = small_trainer()
    with pytest.raises(ValueError, match="could not convert"):
        trainer.fit(["a"] * 8, batch_size=4)
    trainer.fit([float(i) for i in range(10)], batch_size=2)
    assert trainer.step == 5
