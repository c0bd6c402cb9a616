"""Iterables of examples: a resumed run continues with the same ones, by a state that proves right or by reading on."""

import json
import random

import numpy as np
import pytest

from redeqx.data._examples import slices
from redeqx.data._streams import Stream, _from_json, _to_json, checksum


class Lossy:
    """As a shuffle buffer of `datasets`: its state is the position of its source, without what the buffer holds."""

    def __init__(self, n, buffer=5):
        self.n, self.buffer, self.i, self.loaded, self.n_read = n, buffer, 0, 0, 0

    def __iter__(self):
        held, rng = [], random.Random(0)
        for i in range(self.loaded + 1, self.n + 1):
            self.i, self.n_read = i, self.n_read + 1
            held.append(self.i)
            if len(held) == self.buffer:
                yield held.pop(rng.randrange(self.buffer))
        rng.shuffle(held)
        yield from held

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.loaded = state["i"]


class Crops:
    """Its iterators have a complete state, and its examples differ at each reading."""

    def __init__(self):
        self.n_read = 0

    def __iter__(self):
        return CropsIterator(self)


class CropsIterator:
    def __init__(self, of):
        self.of, self.i = of, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == 20:
            raise StopIteration
        self.i, self.of.n_read = self.i + 1, self.of.n_read + 1
        return self.i - 1, random.random()

    def get_state(self):
        return self.i

    def set_state(self, state):
        self.i = state


def flat(steps):
    return [example for step in steps for example in step.examples]


@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_a_state_that_leaves_something_out_is_replaced_by_reading(batch_size):
    whole = list(slices(Lossy(40), batch_size))
    assert sorted(flat(whole)) == list(range(1, 41))
    for i, step in enumerate(whole[:-1]):
        given = Lossy(40)
        assert flat(slices(given, batch_size, position=step.position, state=step.state)) == flat(whole[i + 1 :])
    given = Lossy(40)
    given.load_state_dict(whole[0].state["state"])
    assert len(list(given)) < 40 - whole[0].position  # by its state alone examples would be missing


def test_a_state_is_trusted_where_examples_differ_at_each_reading():
    first, *_ = slices(Crops(), 6)
    given = Crops()
    rest = flat(slices(given, 6, position=first.position, state=first.state))
    assert [i for i, _ in rest] == list(range(6, 20))
    assert given.n_read == 14 + 8  # the first ones twice, and none of those that came before


@pytest.mark.parametrize("given", [list(range(50, 90)), [f"{i}" for i in range(40)]])
def test_other_examples_are_said(given):
    step = next(slices(iter(range(40)), 6))
    with pytest.warns(UserWarning) as caught:
        flat(slices(iter(given), 6, position=step.position, state=step.state))
    assert str(caught[0].message) == (
        "`train_examples`: expected, after 6 examples, those that followed when the checkpoint was saved, got others. This "
        "run does not continue the earlier one exactly: seed what draws the examples, and leave the data as it is."
    )


def test_what_cannot_be_compared_is_not():
    step = next(slices((object() for _ in range(9)), 4))
    assert step.state == {"state": None, "next": None, "n_taken": 0}
    assert len(flat(slices((object() for _ in range(9)), 4, position=4, state=step.state))) == 5
    assert checksum("a", 1) != checksum("a", 2) and checksum({"x": np.arange(3)}) is not None
    assert checksum("a", object()) is None


def test_a_state_of_an_earlier_release_is_read():
    state = next(slices(Crops(), 6)).state["state"]
    assert [i for i, _ in flat(slices(Crops(), 6, position=6, state=state))] == list(range(6, 20))


def test_bytes_and_arrays_come_back_from_json():
    state = {"a": [b"x", np.arange(6, dtype=np.uint8).reshape(2, 3)], "b": {"c": np.float32(2.5), "d": None}}
    stored = json.loads(json.dumps(_to_json(state, "state")))
    found = _from_json(stored)
    assert found["a"][0] == b"x" and found["b"] == {"c": np.float32(2.5), "d": None}
    np.testing.assert_array_equal(found["a"][1], state["a"][1])
    assert found["a"][1].dtype == np.uint8 and found["a"][1].flags.writeable


def test_an_error_comes_after_the_batches_before_it():
    def failing():
        yield from range(9)
        raise OSError("gone")

    steps = slices(failing(), 4)
    assert [list(next(steps).examples) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="gone"):
        next(steps)


def test_a_state_may_be_asked_for_again_before_the_next_example():
    stream = Stream(range(5))
    assert [next(stream), next(stream)] == [0, 1]
    saved = stream.state()
    assert stream.state() == saved
    again = Stream(range(5), 2, saved)
    assert again.state() == saved
    assert list(again) == list(stream) == [2, 3, 4]
