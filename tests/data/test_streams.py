"""Iterables of examples: a resumed run continues with the same ones, from a verified state or by skipping examples."""

import itertools
import json
import random

import numpy as np
import pytest

from redeqx.data import sample_of, slices
from redeqx.data._streams import Stream


class IncompleteState:
    """Like a shuffle buffer of `datasets`: the state is the position in the source, without the contents of the buffer."""

    def __init__(self, n, buffer=5):
        self.n, self.buffer, self.i, self.loaded, self.n_read = n, buffer, 0, 0, 0

    def __iter__(self):
        buffered, rng = [], random.Random(0)
        for i in range(self.loaded + 1, self.n + 1):
            self.i, self.n_read = i, self.n_read + 1
            buffered.append(self.i)
            if len(buffered) == self.buffer:
                yield buffered.pop(rng.randrange(self.buffer))
        rng.shuffle(buffered)
        yield from buffered

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.loaded = state["i"]


class RandomCrops:
    """Iterators with a complete state, whose examples are random at each reading."""

    def __init__(self):
        self.n_read = 0

    def __iter__(self):
        return RandomCropsIterator(self)


class RandomCropsIterator:
    def __init__(self, source):
        self.source, self.i = source, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == 20:
            raise StopIteration
        self.i, self.source.n_read = self.i + 1, self.source.n_read + 1
        return self.i - 1, random.random()

    def get_state(self):
        return self.i

    def set_state(self, state):
        self.i = state


def all_examples(steps):
    return [example for step in steps for example in step.examples]


@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_incomplete_state_is_replaced_by_reading_from_the_start(batch_size):
    all_steps = list(slices(IncompleteState(40), batch_size))
    assert sorted(all_examples(all_steps)) == list(range(1, 41))
    for i, step in enumerate(all_steps[:-1]):
        examples = IncompleteState(40)
        assert all_examples(slices(examples, batch_size, position=step.position, state=step.state)) == all_examples(
            all_steps[i + 1 :]
        )
    examples = IncompleteState(40)
    examples.load_state_dict(all_steps[0].state["state"])
    assert len(list(examples)) < 40 - all_steps[0].position  # with the state alone, examples would be missing


def test_state_is_trusted_if_examples_are_random():
    first, *_ = slices(RandomCrops(), 6)
    examples = RandomCrops()
    rest = all_examples(slices(examples, 6, position=first.position, state=first.state))
    assert [i for i, _ in rest] == list(range(6, 20))
    assert examples.n_read == 14 + 8  # 8 are read twice for comparison; the examples before the position are not read


@pytest.mark.parametrize("examples", [list(range(50, 90)), [f"{i}" for i in range(40)]])
def test_changed_examples_warn(examples):
    step = next(slices(iter(range(40)), 6))
    with pytest.warns(UserWarning) as caught:
        all_examples(slices(iter(examples), 6, position=step.position, state=step.state))
    assert str(caught[0].message) == (
        "`train_examples`: expected, after 6 examples, those that followed when the checkpoint was saved, got others. This "
        "run does not continue the earlier one exactly: seed what draws the examples, and leave the data as it is."
    )


def test_examples_without_a_checksum_are_not_compared():
    step = next(slices((object() for _ in range(9)), 4))
    assert step.state == {"state": None, "next": None, "n_taken": 0}
    assert len(all_examples(slices((object() for _ in range(9)), 4, position=4, state=step.state))) == 5
    assert sample_of(["a", 1]) != sample_of(["a", 2]) and sample_of([{"x": np.arange(3)}]) is not None
    assert sample_of(["a", object()]) is None


class FixedState:
    """An iterable without end, with the given state; records what is set."""

    def __init__(self, state):
        self.state, self.loaded = state, []

    def __iter__(self):
        return iter(range(100))

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded.append(state)


def test_a_state_set_on_an_iterable_counts_for_its_next_iterator():
    """Which may read the position when it is made."""

    class Examples:
        at = 0

        def __iter__(self):
            start = self.at

            def items():
                for self.at in range(start + 1, 41):
                    yield self.at

            return items()

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    first, *rest = slices(Examples(), 6)
    examples = Examples()
    read = slices(examples, 6, position=first.position, state=first.state)
    assert next(read).examples == rest[0].examples and examples.at <= first.position + 6 + 8  # none is read again
    assert all_examples(read) == all_examples(rest[1:])


def test_bytes_and_arrays_in_a_state_are_kept_in_json():
    state = {"a": [b"x", np.arange(6, dtype=np.uint8).reshape(2, 3)], "b": {"c": np.float32(2.5), "d": None}}
    step = next(slices(FixedState(state), 2))
    resumed = FixedState({})
    next(slices(resumed, 2, position=step.position, state=json.loads(json.dumps(step.state))))
    found = resumed.loaded[0]
    assert found["a"][0] == b"x" and found["b"] == {"c": np.float32(2.5), "d": None}
    np.testing.assert_array_equal(found["a"][1], state["a"][1])
    assert found["a"][1].dtype == np.uint8 and found["a"][1].flags.writeable


class BeginsAnew:
    """An iterator that after its end begins anew, as loaders with a reset of their own do."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 21:
            self.n = 0
            raise StopIteration
        self.n += 1
        return self.n


def test_a_pass_ends_at_the_first_end_of_its_iterator():
    examples = BeginsAnew()
    for _ in range(2):
        passed = [step.examples for step in itertools.islice(slices(examples, 4), 10)]
        assert [*map(len, passed)] == [4, 4, 4, 4, 4, 1]
        assert [example for step in passed for example in step] == [*range(1, 22)]


def test_an_iterator_without_iter_is_read():
    """As `for` does, which asks the iterable for its iterator and no more."""

    class Bare:
        def __init__(self):
            self.items = iter(range(10))

        def __next__(self):
            return next(self.items)

    class Examples:
        def __iter__(self):
            return Bare()

    assert [step.examples for step in slices(Examples(), 4)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    stream = Stream(Examples())
    stream.state()
    assert [*stream] == [*range(10)]


def test_error_follows_the_batches_before_it():
    def failing_examples():
        yield from range(9)
        raise OSError("gone")

    steps = slices(failing_examples(), 4)
    assert [list(next(steps).examples) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="gone"):
        next(steps)
