"""Packed rows: every token is in one, sequences stay apart, little is padding, and a stopped stream goes on as it was."""

import itertools
import json

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.data import pack, slices

LENGTH = 64


def sequences(n, seed=0, most=LENGTH):
    """Sequences of distinct tokens with many lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.5, 1.0, n), 1, most).astype(int)
    ends = np.cumsum(lengths)
    return [np.arange(end - size, end) + 1 for end, size in zip(ends, lengths, strict=True)]


def unpacked(row):
    """Returns the sequences of a row, read token by token from its segments; checks its other arrays against them."""
    found = {}
    for i, (token, segment, position, label) in enumerate(
        zip(*(row[name].tolist() for name in ("tokens", "segments", "positions", "labels")), strict=True)
    ):
        last = i + 1 == len(row["tokens"]) or row["segments"][i + 1] != segment
        if segment == 0:
            assert (token, label) == (0, -100) and not row["segments"][i:].any()
            continue
        assert position == len(found.setdefault(segment, [])), "positions restart in each segment"
        assert label == (-100 if last else row["tokens"][i + 1])
        found[segment].append(token)
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


def equal(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        jax.tree.map(np.testing.assert_array_equal, row, other)


def test_every_sequence_is_in_one_row():
    given = sequences(500)
    rows = pack(given, LENGTH)
    assert all(array.shape == (LENGTH,) and array.dtype == np.int32 for row in rows for array in row.values())
    found = sorted(tuple(sequence) for row in rows for sequence in unpacked(row))
    assert found == sorted(tuple(sequence.tolist()) for sequence in given)

    equal(rows, pack([sequence.tolist() for sequence in given], LENGTH))
    equal(rows[1:7:2], [rows[1], rows[3], rows[5]])
    equal([rows[-1]], [rows[len(rows) - 1]])
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("n_waiting", [1, 8, 256, None])
def test_little_is_padding(n_waiting):
    given = sequences(2000)
    rows = list(pack(given, LENGTH) if n_waiting is None else pack(iter(given), LENGTH, n_waiting=n_waiting))
    padding = np.mean([row["segments"] == 0 for row in rows])
    assert padding < {1: 0.1, 8: 0.1, 256: 0.003, None: 0.003}[n_waiting]
    assert np.mean([1 - len(sequence) / LENGTH for sequence in given]) > 0.7  # one row each


def test_rows_are_filled_by_the_best_fit():
    given = [[1] * 5, [2] * 3, [3] * 4, [4] * 2, [5] * 1, [6] * 8]
    rows = pack(given, 8)
    assert [row["tokens"].tolist() for row in rows] == [[1] * 5 + [2] * 3, [3] * 4 + [4] * 2 + [5, 0], [6] * 8]


def test_a_long_example_is_cut_into_segments_that_still_predict_the_next_token():
    given = [np.arange(1, 12), np.arange(20, 23)]
    rows = list(pack(given, 4, cut_long=True))
    assert [row["tokens"].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0], [20, 21, 22, 0]]
    assert [row["labels"].tolist() for row in rows] == [
        [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, -100, -100], [21, 22, -100, -100]
    ]  # fmt: skip
    assert [row["positions"].tolist()[:3] for row in rows] == [[0, 1, 2]] * 4
    equal(rows, list(pack(iter(given), 4, cut_long=True)))


def test_numbers_per_token_are_packed_with_the_tokens():
    examples = [
        {"tokens": [1, 2, 3], "labels": [-100, 3, 9], "weight": [0.5, 1, 2]},
        {"tokens": [4], "labels": [5], "weight": [3.0]},
    ]
    (row,) = pack(examples, 6)
    assert row["labels"].tolist() == [-100, 3, 9, 5, -100, -100]
    assert row["weight"].tolist() == [0.5, 1, 2, 3, 0, 0] and row["weight"].dtype == np.float32
    assert row["segments"].tolist() == [1, 1, 1, 2, 0, 0] and row["positions"].tolist() == [0, 1, 2, 0, 0, 1]


def test_sources_and_targets_share_segments():
    rng = np.random.default_rng(0)
    examples = [
        {"source": rng.integers(1, 99, rng.integers(1, 33)), "target": rng.integers(1, 99, rng.integers(1, 17))}
        for _ in range(300)
    ]
    rows = pack(examples, {"source": 64, "target": 32})
    pairs = []
    for row in rows:
        assert row["source"]["tokens"].shape == (64,) and row["target"]["tokens"].shape == (32,)
        pairs += zip(*(unpacked(row[side]) for side in ("source", "target")), strict=True)
    wanted = [(example["source"].tolist(), example["target"].tolist()) for example in examples]
    assert sorted(map(tuple, pairs)) == sorted(wanted)
    assert len(rows) < 1.1 * max(sum(len(p[0]) for p in pairs) / 64, sum(len(p[1]) for p in pairs) / 32)


# --- streams ------------------------------------------------------------------------------------------------------------


class Source:
    """An iterable, with a state or without; counts what is read."""

    def __init__(self, examples):
        self.examples, self.n_read = examples, 0

    def __iter__(self):
        for example in self.examples:
            self.n_read += 1
            yield example


class StatefulSource(Source):
    start = i = 0

    def __iter__(self):
        self.i, self.start = self.start, 0
        while self.i < len(self.examples):
            self.i, self.n_read = self.i + 1, self.n_read + 1
            yield self.examples[self.i - 1]

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.start = state["i"]


def test_a_stream_reads_as_far_ahead_as_it_is_told():
    source = Source(sequences(2000))
    rows = iter(pack(source, LENGTH, n_waiting=50))
    for n, row in enumerate(itertools.islice(rows, 60), start=1):
        unpacked(row)
        assert source.n_read <= 50 + 8 + n * LENGTH
    assert source.n_read < 60 * 6 + 50
    equal(list(pack(iter(sequences(300)), LENGTH, n_waiting=300)), pack(sequences(300), LENGTH))


@pytest.mark.parametrize("kind", [Source, StatefulSource])
@pytest.mark.parametrize("options", [{}, {"cut_long": True}])
def test_a_stopped_stream_goes_on_with_the_same_rows(kind, options):
    given = sequences(400, most=3 * LENGTH if options else LENGTH)
    stream = lambda: pack(kind(given), LENGTH, n_waiting=30, **options)  # noqa: E731
    rows = list(stream())
    steps = list(slices(stream(), 3))
    equal([row for step in steps for row in step.examples], rows)
    for step in steps[:-1:7]:
        source = kind(given)
        resumed = slices(
            pack(source, LENGTH, n_waiting=30, **options),
            3,
            position=step.position,
            state=json.loads(json.dumps(step.state)),
        )
        equal([row for later in resumed for row in later.examples], rows[step.position :])
        if kind is StatefulSource and step is not steps[0]:
            assert source.n_read < len(given)  # the examples before the oldest that waits are not read


def test_state_of_an_iterator_is_small_and_needs_no_examples():
    rows = iter(pack(StatefulSource(sequences(3000)), LENGTH, n_waiting=20))
    list(itertools.islice(rows, 200))
    state = json.loads(json.dumps(rows.state_dict()))
    assert len(json.dumps(state)) < 2000
    later = iter(pack(StatefulSource(sequences(3000)), LENGTH, n_waiting=20))
    later.load_state_dict(state)
    equal(list(rows), list(later))


class Bigram(eqx.Module):
    logits: jax.Array


def bigram_loss(model, batch, key):
    has_label = batch["labels"] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model.logits[batch["tokens"]], jax.numpy.maximum(batch["labels"], 0)
    )
    return redeqx.Loss((losses * has_label).sum(), has_label.sum())


def fit(stream, workdir, max_steps):
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False, workdir=workdir),
        model=Bigram(jax.numpy.zeros((50, 50))),
        optimizer=optax.sgd(0.5),
        collate_fn=lambda rows: {name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels")},
        loss_fn=bigram_loss,
    )
    trainer.fit(stream(), batch_size=8, max_steps=max_steps, save_every_n_steps=3, save_last_ckpt=True)
    return np.asarray(trainer.model.logits)


def test_a_stopped_fit_ends_with_the_same_bits(tmp_path):
    given = [sequence % 50 for sequence in sequences(600)]
    stream = lambda: pack(Source(given), LENGTH, n_waiting=40)  # noqa: E731
    whole = fit(stream, tmp_path / "whole", 12)
    fit(stream, tmp_path / "stopped", 5)
    np.testing.assert_array_equal(fit(stream, tmp_path / "stopped", 12), whole)


def test_rows_have_set_epoch_if_the_examples_do():
    class Shuffled(Source):
        def set_epoch(self, epoch):
            self.examples = list(reversed(self.examples)) if epoch else self.examples

    stream = pack(Shuffled([[1, 1], [2, 2]]), 2)
    stream.set_epoch(1)
    assert [row["tokens"].tolist() for row in stream] == [[2, 2], [1, 1]]
    assert not hasattr(pack(Source([[1]]), 2), "set_epoch")


@pytest.mark.parametrize("kind", ["datasets, shuffled", "grain"])
def test_streams_of_libraries_go_on_with_the_same_rows(kind):
    """The state of `datasets` leaves out its shuffle buffer: the examples before the position are then read again."""
    given = [{"tokens": sequence.tolist()} for sequence in sequences(120)]

    def stream():
        if kind == "grain":
            grain = pytest.importorskip("grain", exc_type=ImportError)
            examples = grain.MapDataset.source(given).shuffle(seed=0).to_iter_dataset()
        else:
            datasets = pytest.importorskip("datasets", exc_type=ImportError)
            examples = datasets.Dataset.from_list(given).to_iterable_dataset(num_shards=3).shuffle(seed=0, buffer_size=7)
        return pack(examples, LENGTH, n_waiting=20)

    rows = list(stream())
    assert sorted(token for row in rows for token in row["tokens"].tolist() if token) == sorted(
        token for example in given for token in example["tokens"]
    )
    steps = list(slices(stream(), 2))
    for step in steps[:-1:3]:
        resumed = slices(stream(), 2, position=step.position, state=json.loads(json.dumps(step.state)))
        equal([row for later in resumed for row in later.examples], rows[step.position :])


# --- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "length", "options", "error", "message"),
    [
        ([[1], [1, 2, 3]], 2, {}, ValueError, "`examples[1]`: expected at most `length`, 2 tokens, got 3. Pass `cut_long"),
        ([[1]], 0, {}, ValueError, "`length`: expected at least 1, got 0."),
        ([[1]], {}, {}, ValueError, "`length`: expected a length for each side of a row, got {}."),
        ([[1]], {"a": "x"}, {}, TypeError, "`length['a']`: expected an integer, got 'x'."),
        ([[1]], 2, {"n_waiting": 0}, ValueError, "`n_waiting`: expected at least 1, got 0."),
        ([[]], 2, {}, ValueError, "`examples`: expected at least one token, got none."),
        ([], 2, {}, ValueError, "`examples`: expected at least one example, got none."),
        (lambda epoch: [[1]], 2, {}, TypeError, "`lambda epoch: pack(examples(epoch), length)`."),
        (["text"], 2, {}, TypeError, "`examples[0]`: expected a flat array of numbers, got str. Pass one number per token."),
        ([[[1], [2, 3]]], 2, {}, TypeError, "`examples[0]`: expected a flat array of numbers, got list."),
        ([[0.5]], 2, {}, TypeError, "`examples[0]`: expected integers as tokens, got float32. Encode the text first."),
        ([[2**40]], 2, {}, ValueError, f"`examples[0]`: expected integers of 32 bits, got up to {2**40}."),
        ([{"ids": [1]}], 2, {}, TypeError, "`examples[0]`: expected tokens, or a dict with 'tokens', got a dict with"),
        (
            [{"tokens": [1, 2], "labels": [1]}], 2, {}, ValueError,
            "`examples[0]['labels']`: expected a number for each of the 2 tokens, got 1.",
        ),
        (
            [{"tokens": [1], "segments": [1]}], 2, {}, ValueError,
            "`examples[0]['segments']`: expected other names than those of a row, got 'segments'.",
        ),
        (
            [[1], {"tokens": [1], "weight": [1.0]}], 2, {}, ValueError,
            "`examples[1]`: expected the arrays of the first example, labels, tokens, got labels, tokens, weight.",
        ),
        ([{"a": [1]}], {"a": 2, "b": 2}, {}, TypeError, "`examples[0]`: expected a dict with 'a', 'b', as `length`, got"),
        ([[1]], {"a": 2}, {}, TypeError, "`examples[0]`: expected a dict with 'a', as `length`, got list."),
        ([{"a": [1], "b": []}], {"a": 2, "b": 2}, {}, ValueError, "`examples[0]['b']`: expected at least one token, got"),
        (
            [{"a": [1], "b": [1, 2, 3]}], {"a": 2, "b": 2}, {}, ValueError,
            "`examples[0]['b']`: expected at most `length`, 2 tokens, got 3. Shorten the example.",
        ),
        ([{"a": [1]}], {"a": 2}, {"cut_long": True}, ValueError, "`cut_long`: expected False with the 1 sides of `length`"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(examples, length, options, error, message):
    with pytest.raises(error) as raised:
        pack(examples, length, **options)
    assert message in str(raised.value)


def test_a_stream_refuses_an_example_when_it_is_read():
    rows = iter(pack(iter([[1, 2]] * 9 + [[1, 2, 3]]), 2, n_waiting=4))
    assert [next(rows)["tokens"].tolist() for _ in range(3)] == [[1, 2]] * 3
    with pytest.raises(ValueError, match=r"`examples\[9\]`: expected at most `length`, 2 tokens, got 3"):
        list(rows)
