"""Examples to batches: how rows are cut, what `collate_fn` may return, the order, every kind of source, the thread ahead."""

import collections
import functools
import itertools
import random
import threading
import time
import traceback
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redeqx
from redeqx.data import _examples as _data
from redeqx.data._examples import batches, check_examples, collate, examples_of, n_tokens, size_of, slices
from redeqx.data._prefetch import Prefetch
from redeqx.data._rows import BatchSize, Group, cut_rows, pad_rows, place_batch
from redeqx.data._workers import Workers
from redeqx.machine._mesh import BATCH_AXES, make_mesh, n_batch_shards

# --- how rows are cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8, 24, 40])
def test_no_row_is_lost_and_no_device_gets_more_than_its_share(micro_batch_size, n_devices):
    for n_rows in range(1, 3 * micro_batch_size + 2):
        full, *rest = cut = cut_rows(n_rows, micro_batch_size, n_devices)
        assert sum(group.n * group.rows for group in cut) == n_rows
        assert all(1 <= group.rows <= micro_batch_size for group in cut)
        whole = [group for group in cut if group.rows % n_devices and group.rows != micro_batch_size]
        assert all(group.rows <= max(micro_batch_size // n_devices, 1) for group in whole)
        # Few programs: full micro-batches, the rest that divides, the tail that does not.
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
def test_cuts_are_exactly_these(n_rows, expected):
    assert cut_rows(n_rows, micro_batch_size=16, n_devices=8) == expected


@pytest.mark.parametrize(
    ("n_rows", "expected"),
    [
        (7, (Group(1, 7),)),
        (10, (Group(1, 10),)),  # no more than a device's 16 rows: one more micro-batch, and one loss to compile
        (8, (Group(1, 8),)),
        (18, (Group(1, 16), Group(1, 2))),
        (138, (Group(1, 128), Group(1, 10))),
    ],
)
def test_a_rest_that_a_device_can_compute_alone_is_not_cut(n_rows, expected):
    assert cut_rows(n_rows, micro_batch_size=128, n_devices=8) == expected


@pytest.mark.parametrize("n_rows", [1, 8, 11, 16, 31, 32])
@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (2, 2), (1, 8), (8, 1)])
def test_a_placed_batch_holds_every_row_once(shards, n_rows):
    mesh = make_mesh(*shards)
    n_shards = n_batch_shards(mesh)
    batch = {"x": np.arange(n_rows * 3).reshape(n_rows, 3), "y": (np.arange(n_rows),)}
    cut = cut_rows(n_rows, 2 * n_shards, mesh.size)
    placed = place_batch(batch, cut, mesh)
    for group, part in zip(cut, placed, strict=True):
        assert part["x"].shape == (group.n, group.rows, 3)
        splits = group.rows % n_shards == 0
        assert part["x"].sharding.spec == (P(None, BATCH_AXES) if splits else P())
        held = group.rows // n_shards if splits else group.rows
        assert held <= 2
        assert {shard.data.shape for shard in part["x"].addressable_shards} == {(group.n, held, 3)}
    rows = np.concatenate([np.asarray(part["y"][0]).reshape(-1) for part in placed])
    np.testing.assert_array_equal(rows, batch["y"][0])


def test_padding_repeats_the_last_row():
    batch = {"x": np.arange(6).reshape(3, 2), "y": np.arange(3)}
    padded = pad_rows(batch, 5)
    np.testing.assert_array_equal(padded["x"], [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]])
    np.testing.assert_array_equal(padded["y"], [0, 1, 2, 2, 2])
    assert pad_rows(batch, 3)["x"] is batch["x"]


def test_tokens_are_counted_where_the_batch_tells():
    ids = np.zeros((4, 7), np.int32)
    assert n_tokens({"ids": ids, "labels": ids, "x": np.zeros((4, 9, 2))}) == 28
    assert n_tokens({"x": np.zeros((4, 9), np.float32), "y": np.zeros(4, np.int32)}) is None


def test_tokens_of_a_step_are_those_of_all_processes(monkeypatch):
    """Of which each collates its own rows alone."""
    monkeypatch.setattr(_data, "local_rows", lambda cut, mesh: np.arange(0, 8, 4))
    monkeypatch.setattr(_data, "place_batch", lambda batch, *_: (batch,))
    steps, size = slices(list(range(16)), 8), BatchSize(8, 8)
    made = list(batches(steps, Workers(lambda examples: np.zeros((len(examples), 7), np.int32)), size, make_mesh()))
    assert [(batch.n_examples, batch.n_tokens, batch.groups[0].shape) for batch in made] == [(8, 56, (2, 7))] * 2


# --- collating ------------------------------------------------------------------------------------------------------


def collated(output, n_rows=3):
    return collate(lambda examples: output, [None] * n_rows)


def test_a_pytree_keeps_its_structure():
    output = {"x": np.zeros((3, 2), np.float32), "more": (np.zeros(3, np.int32), {"mask": np.ones((3, 1), bool)})}
    batch = collated(output)
    assert jax.tree.structure(batch) == jax.tree.structure(output)
    assert [leaf.dtype for leaf in jax.tree.leaves(batch)] == [leaf.dtype for leaf in jax.tree.leaves(output)]
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(batch))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.array([0.1, 0.2, 0.3]), np.float32),
        (np.array([1, 2, 3], np.int64), np.int32),
        (np.array([1, 2, 2**32 - 1], np.uint64), np.uint32),
        (np.array([1, 2, 3], np.uint8), np.uint8),
        (np.zeros(3, np.complex128), np.complex64),
        (np.zeros(3, np.float16), np.float16),
        (np.zeros(3, jnp.bfloat16), jnp.bfloat16),
        (np.zeros((3, 0), np.int64), np.int32),
        (np.zeros(3, bool), bool),
        (jnp.arange(3), np.int32),
    ],
)
def test_numbers_get_jax_s_width(given, dtype):
    leaf = collated(given)
    assert type(leaf) is np.ndarray
    assert leaf.dtype == dtype
    np.testing.assert_array_equal(leaf, np.asarray(given).astype(dtype))


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
            "`collate_fn` output `ids`: expected numbers, got an array of dtype object and shape (3,). "
            "Rows of different lengths make such arrays: pad them; tokenize text.",
        ),
        (
            {"text": np.array(["a", "b", "c"])},
            TypeError,
            "`collate_fn` output `text`: expected numbers, got an array of dtype <U1 and shape (3,). "
            "Rows of different lengths make such arrays: pad them; tokenize text.",
        ),
        (
            {"when": np.zeros(3, "datetime64[s]")},
            TypeError,
            "`collate_fn` output `when`: expected numbers, got an array of dtype datetime64[s] and shape (3,). "
            "Rows of different lengths make such arrays: pad them; tokenize text.",
        ),
        (
            {"row": np.zeros(3, [("a", np.int32), ("b", np.int32)])},
            TypeError,
            "`collate_fn` output `row`: expected numbers, got an array of dtype "
            "[('a', '<i4'), ('b', '<i4')] and shape (3,). "
            "Rows of different lengths make such arrays: pad them; tokenize text.",
        ),
        (
            {"temperature": 0.5},
            TypeError,
            "`collate_fn` output `temperature`: expected an array of 3 rows, got float. "
            "Return `np.array(...)` with one row for each example.",
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
            "`collate_fn` output `1`: expected 3 rows, one for each example, got shape (). The leading dim is the batch.",
        ),
        (
            {"x": np.zeros((2, 3))},
            ValueError,
            "`collate_fn` output `x`: expected 3 rows, one for each example, got shape (2, 3). "
            "The leading dim is the batch.",
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
def test_what_is_no_batch_is_named(output, error, message):
    with pytest.raises(error) as raised:
        collated(output)
    assert str(raised.value) == message


# --- order ----------------------------------------------------------------------------------------------------------


def taken(steps):
    return [list(step.examples) for step in steps]


def flat(steps):
    return [example for step in steps for example in step.examples]


def test_each_epoch_has_its_own_permutation_from_the_seed_alone():
    examples = list(range(23))
    orders = [flat(slices(examples, 5, seed=(0, 0, epoch))) for epoch in range(3)]
    assert all(sorted(order) == examples for order in orders)
    assert orders[0] != orders[1] != orders[2] != examples
    assert flat(slices(examples, 7, seed=(0, 0, 1))) == orders[1]  # whatever the batch size
    assert flat(slices(examples, 5, seed=(1, 0, 0))) != orders[0]
    assert flat(slices(examples, 5)) == examples


@pytest.mark.parametrize("seed", [None, (3, 0, 1)])
def test_a_pass_goes_on_from_any_position(seed):
    examples = list(range(17))
    whole = list(slices(examples, 4, seed=seed))
    assert [len(step.examples) for step in whole] == [4, 4, 4, 4, 1]
    assert [step.position for step in whole] == [4, 8, 12, 16, 17]
    for i, step in enumerate(whole):
        assert list(slices(examples, 4, seed=seed, position=step.position)) == whole[i + 1 :]


# --- sources --------------------------------------------------------------------------------------------------------


class Columns:
    """As `datasets.Dataset`: an integer gives a row, a slice gives a dict of columns, numpy integers are refused."""

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
    """As a grain dataset: each iterator has its own state. It counts what is read."""

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


class Opaque(Stateful):
    """As grain's DataLoader: the state of its iterators is bytes."""

    def __iter__(self):
        return OpaqueIterator(self)


class OpaqueIterator(StatefulIterator):
    def get_state(self):
        return self.i.to_bytes(4, "big")

    def set_state(self, state):
        self.i = int.from_bytes(state, "big")


class Loader:
    """As torch's StatefulDataLoader: the iterable has the state, and the next `iter` starts from one that was loaded."""

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


@pytest.mark.parametrize("given", [list(range(9)), np.arange(9), tuple(range(9)), range(9), Columns(9)], ids=type)
def test_what_has_integer_items_is_read_by_them(given):
    check_examples(given)
    assert size_of(given) == 9
    got = flat(slices(given, 4, seed=(0,)))
    assert sorted(row["x"] if isinstance(row, dict) else int(row) for row in got) == list(range(9))


def test_a_dataset_of_datasets_is_read_by_integers():
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    given = datasets.Dataset.from_dict({"x": list(range(9))})
    check_examples(given)
    got = flat(slices(given, 4, seed=(0,)))
    assert sorted(row["x"] for row in got) == list(range(9))
    assert flat(slices(given, 4, seed=(0,), position=4)) == got[4:]


def test_a_function_of_the_epoch_is_called_with_it():
    def given(epoch):
        return [epoch] * (epoch + 1)

    check_examples(given)  # without calling it
    assert examples_of(given, 2) == [2, 2, 2]
    assert examples_of([1], 2) == [1]


@pytest.mark.parametrize("kind", [Stateful, Opaque, Loader, Plain])
def test_an_iterable_goes_on_from_where_it_was(kind):
    check_examples(kind(11))
    assert size_of(kind(11)) is None
    given = kind(11)
    whole = list(slices(given, 3, seed=(0,)))
    assert taken(whole) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert [step.position for step in whole] == [3, 6, 9, 11]
    assert taken(slices(given, 3)) == taken(whole)  # and anew
    for i, step in enumerate(whole):
        again = kind(11)
        assert taken(slices(again, 3, position=step.position, state=step.state)) == taken(whole[i + 1 :])
        # With a state only the examples that are compared are read twice; without, what was seen is read past.
        assert again.n_read == 11 - (0 if kind is Plain else step.position - step.state["n_taken"])
        assert taken(slices(again, 3)) == taken(whole)  # the epoch after that begins at its begin
    assert (whole[0].state["state"] is None) == (kind is Plain)


def test_an_iterator_with_state_is_its_own_iterable():
    iterator = iter(Stateful(5))
    first, *rest = slices(iterator, 2)
    assert taken(rest) == [[2, 3], [4]]
    fresh = iter(Stateful(5))
    assert taken(slices(fresh, 2, position=first.position, state=first.state)) == taken(rest)


def test_a_dataset_of_grain_goes_on_from_its_state():
    grain = pytest.importorskip("grain", exc_type=ImportError)
    dataset = grain.MapDataset.range(11).to_iter_dataset()
    sampler = grain.samplers.SequentialSampler(11, grain.sharding.NoSharding())
    loader = grain.DataLoader(data_source=list(range(11)), sampler=sampler, worker_count=0)
    for given in (dataset, loader):
        whole = list(slices(given, 4))
        assert flat(whole) == list(range(11))
        assert whole[0].state["state"] is not None
        assert taken(slices(given, 4, position=4, state=whole[0].state)) == taken(whole[1:])


def test_an_iterable_of_datasets_is_told_the_epoch():
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    columns = datasets.Dataset.from_dict({"x": list(range(11))})
    shuffled = columns.to_iterable_dataset().shuffle(seed=0, buffer_size=11)
    first, second = (flat(slices(examples_of(shuffled, epoch), 4)) for epoch in range(2))
    assert first != second  # its order is drawn from the seed and the epoch
    assert flat(slices(examples_of(shuffled, 0), 4)) == first

    given = columns.to_iterable_dataset()
    whole = list(slices(examples_of(given, 0), 4))
    given = columns.to_iterable_dataset()
    step = whole[0]
    assert taken(slices(examples_of(given, 0), 4, position=step.position, state=step.state)) == taken(whole[1:])
    # Not told of another epoch it would begin again from the state that was loaded, and leave out what comes before.
    assert taken(slices(examples_of(given, 1), 4)) == taken(whole)


@dataclass
class WithState:
    """An iterable whose state is given."""

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
        ({"of_worker": {0: 3}}, "a dict with keys that are no strings"),
    ],
)
def test_a_state_that_json_would_not_give_back_is_refused(state, found):
    with pytest.raises(TypeError) as raised:
        next(slices(WithState(state), 2))
    assert str(raised.value) == (
        f"`train_examples.get_state()`: expected a state that JSON can store, got {found}. "
        "Return numbers, strings, lists, dicts with string keys, bytes, or arrays."
    )


@pytest.mark.parametrize("state", [None, 3, [1, {"a": [2.5, None]}], {"rng": np.random.default_rng(0).bit_generator.state}])
def test_a_state_of_plain_values_is_kept(state):
    assert next(slices(WithState(state), 2)).state["state"] == state


def test_an_iterator_that_is_used_up_is_said():
    iterator = iter(range(4))
    assert flat(slices(iterator, 3)) == [0, 1, 2, 3]
    with pytest.raises(ValueError) as raised:
        list(slices(iterator, 3))
    assert str(raised.value) == (
        "`train_examples`: expected at least one example, got an iterable with none, or one that is used up. "
        "Pass one that can be iterated anew, or a function of the epoch."
    )


@pytest.mark.parametrize("given", [[], np.zeros((0, 4)), Columns(0)], ids=type)
def test_no_examples_are_refused(given):
    with pytest.raises(ValueError) as raised:
        check_examples(given, "eval_examples")
    assert str(raised.value) == ("`eval_examples`: expected at least one example, got none. Look at what was loaded.")
    with pytest.raises(ValueError, match=r"^`train_examples\(2\)`: expected at least one example, got none\."):
        examples_of(lambda epoch: given, 2)


@pytest.mark.parametrize("given", ["text", b"bytes", {"x": [1, 2]}, 7, None])
def test_what_is_no_examples_is_refused(given):
    with pytest.raises(TypeError) as raised:
        check_examples(given)
    assert str(raised.value) == (
        "`train_examples`: expected examples with `len()` and integer items, an iterable, or a function of the epoch, got "
        f"{type(given).__name__}. Pass a list with one entry for each example."
    )


# --- ahead of the step ------------------------------------------------------------------------------------------------


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "redeqx-prefetch"]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_come_in_their_order(n, depth):
    assert list(Prefetch(iter(range(n)), depth)) == list(range(n))
    assert not threads()


def test_the_next_item_is_prepared_while_one_is_used():
    used, prepared = threading.Event(), threading.Event()

    def items():
        yield 1
        assert used.wait(10)  # the reader holds the first item
        prepared.set()
        yield 2

    ahead = Prefetch(items())
    assert next(ahead) == 1
    used.set()
    assert prepared.wait(10)  # and still holds it: it has not asked for the second
    assert list(ahead) == [2]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_runs_no_further_ahead_than_its_depth(depth):
    made = []

    def items():
        for i in itertools.count():
            made.append(i)
            yield i

    ahead = Prefetch(items(), depth)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.2)  # time to run away
    assert len(made) <= 3 + depth + 1  # what was read, what is queued, and one in the thread's hand
    ahead.close()
    assert not threads()


def fails_at(n):
    for i in range(10):
        if i == n:
            raise KeyError(f"item {i}")
        yield i


def test_an_error_comes_after_the_items_before_it_with_its_traceback():
    got = []
    with pytest.raises(KeyError, match="item 3") as raised:
        got.extend(Prefetch(fails_at(3)))
    assert got == [0, 1, 2]
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "fails_at"
    assert not threads()


def test_closing_early_ends_the_thread_and_its_source():
    closed = threading.Event()

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    ahead = Prefetch(items())
    assert next(ahead) == 0
    assert len(threads()) == 1
    ahead.close()
    assert not threads()
    assert closed.wait(10)


def test_what_is_never_asked_starts_no_thread():
    ahead = Prefetch(fails_at(0))
    assert not threads()
    ahead.close()


def test_many_passes_leave_no_thread_behind():
    for stop in range(20):
        for item in Prefetch(iter(range(10))):
            if item == stop % 10:
                break
    assert not threads()


# --- through a Trainer --------------------------------------------------------------------------------------------------


class Seen:
    """A `collate_fn` that keeps the examples of each step, and may fail at one of its calls."""

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
def trainer():
    """One for every source: its step is compiled once."""
    return make_trainer(Seen())


SHUFFLED = {
    "list": lambda: list(range(11)),
    "array": lambda: np.arange(11),
    "columns": lambda: Columns(11),
    "function": lambda: lambda epoch: list(range(11)),
}
IN_ORDER = {
    "stateful": lambda: Stateful(11),
    "bytes": lambda: Opaque(11),
    "loader": lambda: Loader(11),
    "plain": lambda: Plain(11),
    "generators": lambda: lambda epoch: (i for i in range(11)),
}


@pytest.mark.parametrize("source", [*SHUFFLED, *IN_ORDER])
def test_a_fit_takes_every_example_once_an_epoch(source, trainer):
    seen = trainer._engine.recipe.collate_fn
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


def run(given, workdir=None, fail_at=None):
    """The steps of two epochs, and the bits of the weights at their end."""
    seen = Seen(fail_at)
    trainer = make_trainer(seen, workdir)
    trainer.fit(given, 2, 2, save_every_n_steps=None if workdir is None else 1)
    return seen.steps, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.model) if eqx.is_array(leaf)]


@functools.cache
def never_stopped(in_order):
    return run(Plain(11) if in_order else list(range(11)))


@pytest.mark.parametrize(
    "source", ["list", "stateful", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("loader", "plain"))]
)
def test_a_fit_goes_on_in_the_middle_of_an_epoch(source, tmp_path):
    make = {**SHUFFLED, **IN_ORDER}[source]
    with pytest.raises(KeyboardInterrupt):
        run(make(), tmp_path, fail_at=9)  # the tenth step of twelve: the fourth of the second epoch
    given = make()
    rest, weights = run(given, tmp_path)
    whole, wanted = never_stopped(source in IN_ORDER)
    assert 3 <= len(rest) <= 6
    assert rest == whole[-len(rest) :]
    assert weights == wanted
    if source in ("stateful", "loader"):
        assert sum(map(len, rest)) <= given.n_read < 11  # what was seen is not read again, but to be compared


def small_trainer(collate_fn=lambda examples: np.array(examples, np.float32)[:, None]):
    return redeqx.Trainer(
        redeqx.Deployer(verbose=False),
        model=eqx.nn.Linear(1, 1, key=jax.random.key(0)),
        optimizer=optax.sgd(0.01),
        collate_fn=collate_fn,
        loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
    )


def test_a_collate_fn_that_raises_stop_iteration_does_not_end_the_pass():
    def collate_fn(examples):
        if 7 in examples:
            next(iter([]))
        return np.array(examples, np.float32)[:, None]

    trainer = small_trainer(collate_fn)
    for call in (trainer.fit, trainer.eval_loss):
        with pytest.raises(RuntimeError, match="generator raised StopIteration"):
            call(list(range(20)), batch_size=2)


def test_mappings_are_no_examples(tmp_path):
    np.savez(tmp_path / "columns.npz", x=np.arange(4))
    for columns in (collections.UserDict(x=[1, 2], y=[3, 4]), np.load(tmp_path / "columns.npz")):
        with pytest.raises(TypeError, match=r"expected examples with `len.*got (UserDict|NpzFile)"):
            check_examples(columns)


def test_endless_examples_with_a_length_are_refused():
    with pytest.raises(ValueError, match=r"expected a number of examples, got 1,125,.* as from endless repeats"):
        check_examples(range(2**50))


def test_a_function_of_the_epoch_is_for_fit_alone():
    trainer = small_trainer()
    for call in (trainer.train, trainer.eval_loss):
        with pytest.raises(TypeError, match="`examples`: expected examples, got a function, which only `fit` calls"):
            call(lambda epoch: [1.0, 2.0], batch_size=2)


def test_a_fit_that_made_no_update_binds_no_later_one():
    trainer = small_trainer()
    with pytest.raises(ValueError, match="could not convert"):
        trainer.fit(["a"] * 8, batch_size=4)
    trainer.fit([float(i) for i in range(10)], batch_size=2)
    assert trainer.step == 5
