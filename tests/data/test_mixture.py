"""Mixtures: exact shares, no example repeated before all are used, and the same examples after a restart."""

import collections
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.data import Mixture, MixtureStream, slices


def labelled_examples(name, n):
    return [(name, i) for i in range(n)]


def count_by_source(examples):
    return collections.Counter(name for name, _ in examples)


@pytest.mark.parametrize(
    ("weights", "size", "expected"),
    [
        ([0.7, 0.3], 10, [7, 3]),
        ([0.7, 0.3], 15, [11, 4]),  # 10.5 and 4.5: ties are rounded up for the first source
        ([1, 1, 1], 10, [4, 3, 3]),
        ([2, 3, 5], 1000, [200, 300, 500]),
        ([0.1, 0.2, 0.7], 7, [1, 1, 5]),
        ([99_999, 1], 100_000, [99_999, 1]),
    ],
)
def test_mixture_shares_are_exact(weights, size, expected):
    sources = {f"{i}": (labelled_examples(f"{i}", 4), weight) for i, weight in enumerate(weights)}
    mixture = Mixture(sources, size=size)
    assert list(mixture.shares.values()) == expected
    assert len(mixture) == size
    assert count_by_source(mixture) == {f"{i}": n for i, n in enumerate(expected)}


def test_default_epoch_size_is_the_total_of_the_sources():
    assert len(Mixture({"a": (labelled_examples("a", 5), 1), "b": (labelled_examples("b", 8), 1)})) == 13


def test_every_example_is_used_before_any_repeats():
    mixture = Mixture(
        {"large": (labelled_examples("large", 23), 0.6), "small": (labelled_examples("small", 3), 0.4)}, size=10, seed=1
    )
    seen = {"large": [], "small": []}
    for epoch in range(12):
        mixture.set_epoch(epoch)
        for name, i in mixture:
            seen[name].append(i)
    assert len(seen["large"]) == 72 and len(seen["small"]) == 48
    for name, n in (("large", 23), ("small", 3)):
        passes = [seen[name][start : start + n] for start in range(0, len(seen[name]) // n * n, n)]
        assert all(sorted(each) == list(range(n)) for each in passes)
        assert len({tuple(each) for each in passes}) > 1  # not all in the same order


def test_sources_are_interleaved_evenly():
    mixture = Mixture({"a": (labelled_examples("a", 50), 3), "b": (labelled_examples("b", 50), 1)}, size=40)
    for n in range(4, 41, 4):
        assert count_by_source(mixture[:n]) == {"a": 3 * n // 4, "b": n // 4}


def test_epoch_order_depends_only_on_the_seed_and_the_epoch():
    sources = {"a": (labelled_examples("a", 50), 1), "b": (labelled_examples("b", 7), 1)}
    mixture = Mixture(sources, size=20)
    epochs = []
    for epoch in range(3):
        mixture.set_epoch(epoch)
        epochs.append(list(mixture))
    fresh = Mixture(sources, size=20)
    fresh.set_epoch(2)
    assert list(fresh) == epochs[2] and fresh[-1] == epochs[2][-1]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(Mixture(sources, size=20, seed=1)) != epochs[0]
    with pytest.raises(IndexError):
        fresh[20]


def test_adding_a_source_keeps_the_order_of_the_others():
    a = {"a": (labelled_examples("a", 50), 1)}
    from_a = [x for x in Mixture({**a, "b": (labelled_examples("b", 9), 1)}, size=20) if x[0] == "a"]
    assert from_a == list(Mixture(a, size=10))


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        ([1], {}, TypeError, "`sources`: expected a dict of `(examples, weight)` by name, got list. Write `Mixture({"),
        ({}, {}, TypeError, "`sources`: expected a dict of `(examples, weight)` by name, got none."),
        (
            {"a": [1]},
            {},
            TypeError,
            "`sources['a']`: expected `(examples, weight)` by a name, got list. Pass a tuple of both.",
        ),
        ({"a": ([1], "x")}, {}, TypeError, "`sources['a']`: expected a number as the weight, got str. Pass 0.5, say."),
        ({"a": ([1], 0)}, {}, ValueError, "`sources['a']`: expected a positive weight, got 0. Leave a source out"),
        ({"a": ([1], float("nan"))}, {}, ValueError, "`sources['a']`: expected a positive weight, got nan."),
        ({"a": ([], 1)}, {}, ValueError, "`sources['a']`: expected at least one example, got none."),
        (
            {"a": (iter([1]), 1)},
            {},
            TypeError,
            "`sources['a']`: expected examples with `len()` and integer items that no epoch",
        ),
        ({"a": (Mixture({"b": ([1], 1)}), 1)}, {}, TypeError, "got Mixture. Mix iterables with `MixtureStream`; list a"),
        ({"a": ([1], 1)}, {"size": 0}, ValueError, "`size`: expected at least 1 or None, got 0."),
        (
            {"a": ([1], 99), "b": ([1], 1)},
            {"size": 10},
            ValueError,
            "`size`: expected examples of each source in an epoch, got 10, of which `b` has none by its weight. Pass 100 or",
        ),
    ],
)
def test_invalid_mixtures_raise(sources, options, error, message):
    with pytest.raises(error) as raised:
        Mixture(sources, **options)
    assert message in str(raised.value)


# --- streams ----------------------------------------------------------------------------------------------------------


def random_sources(seed, n):
    rng = np.random.default_rng(seed)
    return {f"{i}": (labelled_examples(f"{i}", 3 + i), float(weight)) for i, weight in enumerate(rng.exponential(size=n))}


@pytest.mark.parametrize(
    "sources",
    [
        {"a": (labelled_examples("a", 5), 0.7), "b": (labelled_examples("b", 3), 0.3)},
        random_sources(0, 3),
        random_sources(1, 11),
        random_sources(2, 40),
    ],
    ids=len,
)
def test_every_prefix_of_a_stream_has_the_given_shares(sources):
    weights = np.array([weight for _, weight in sources.values()])
    weights /= weights.sum()
    taken = dict.fromkeys(sources, 0)
    for n, (name, _) in enumerate(itertools.islice(MixtureStream(sources), 600), 1):
        taken[name] += 1
        assert np.abs(np.array(list(taken.values())) - weights * n).max() < 1


def ordered_source(name, n):
    """Return a source that is read in its own order and whose examples contain the epoch."""
    return lambda epoch: ((f"{name}{epoch}", i) for i in range(n))


SOURCES = {
    "list": (labelled_examples("list", 7), 0.5),
    "iterable": (ordered_source("iterable", 4), 0.2),
    "range": (range(3), 0.3),
}


def test_sources_of_a_stream_restart():
    taken = list(itertools.islice(MixtureStream(SOURCES), 40))
    assert [x for x in taken if "iterable" in str(x)] == [(f"iterable{i // 4}", i % 4) for i in range(8)]
    from_list = [x[1] for x in taken if "list" in str(x)]
    assert sorted(from_list[:7]) == sorted(from_list[7:14]) == list(range(7)) and from_list[:7] != from_list[7:14]


@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_stream_resumes_from_its_state(batch_size):
    all_steps = list(itertools.islice(slices(MixtureStream(SOURCES), batch_size), 12))
    for i, step in enumerate(all_steps[:-1]):
        rest = slices(MixtureStream(SOURCES), batch_size, position=step.position, state=step.state)
        assert [x.examples for x in itertools.islice(rest, 11 - i)] == [x.examples for x in all_steps[i + 1 :]]


class Lines:
    """An iterable without a state, such as a text file."""

    def __iter__(self):
        return (f"line {i}" for i in range(5))


def test_stream_of_sources_without_a_state_resumes_at_its_position():
    sources = {"lines": (Lines(), 0.6), "list": (list(range(7)), 0.4)}
    whole, resumed = iter(MixtureStream(sources)), iter(MixtureStream(sources))
    list(itertools.islice(whole, 12))
    resumed.set_state(whole.get_state())
    assert list(itertools.islice(resumed, 12)) == list(itertools.islice(whole, 12))


def test_exhausted_source_raises():
    stream = iter(MixtureStream({"once": (iter(range(3)), 1), "list": ([0], 1)}))
    with pytest.raises(ValueError) as raised:
        list(stream)
    assert str(raised.value) == (
        "`sources['once']`: expected examples in each pass, got none in pass 1. Pass what can be read again, or a function "
        "of the pass: `lambda epoch: ...`."
    )


def test_state_of_other_sources_raises():
    state = next(slices(MixtureStream(SOURCES), 4)).state
    with pytest.raises(ValueError, match=r"^`sources`: expected those of the resumed run, \['iterable', 'list', 'range'\]"):
        next(slices(MixtureStream({"other": ([1], 1)}), 4, position=4, state=state))


# --- through a Trainer ------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def run(examples, workdir=None, fail_at=None, **length):
    """Train; return the examples of each step and the bits of the final weights."""
    steps = []

    def collate(examples):
        if len(steps) == fail_at:
            raise Killed
        steps.append(list(examples))
        return {"x": np.array([[i] for _, i in examples], np.float32)}

    trainer = redeqx.Trainer(
        redeqx.Deployer(n_model_shards=8, workdir=workdir, verbose=False),
        model=eqx.nn.Linear(1, 2, key=jax.random.key(0)),
        optimizer=optax.sgd(1e-4, momentum=0.9),
        collate_fn=collate,
        loss_fn=lambda model, batch, key: jnp.mean((jax.vmap(model)(batch["x"]) - batch["x"]) ** 2),
    )
    trainer.fit(examples, batch_size=4, save_every_n_steps=workdir and 1, **length)
    return steps, np.asarray(trainer.model.weight).tobytes()


MIXED = {"a": (labelled_examples("a", 23), 0.75), "b": (labelled_examples("b", 5), 0.25)}


@pytest.mark.parametrize("kind", ["mixture", "stream"])
def test_fit_resumes_in_a_mixture(kind, tmp_path, capsys):
    def make():
        return Mixture(MIXED, size=12) if kind == "mixture" else MixtureStream(MIXED)

    length = {"n_epochs": 4} if kind == "mixture" else {"max_steps": 12}
    all_steps, weights = run(make(), **length)
    assert len(all_steps) >= 12 and count_by_source(itertools.chain(*all_steps[:12])) == {"a": 36, "b": 12}
    if kind == "mixture":
        assert len({x for x in itertools.chain(*all_steps) if x[0] == "a"}) == 23  # more than the 9 of one epoch
    with pytest.raises(Killed):
        run(make(), tmp_path, fail_at=8, **length)
    rest, resumed_weights = run(make(), tmp_path, **length)
    start = all_steps.index(rest[0])  # an endless stream prepares some steps that are not run
    assert 2 <= start <= 8 and start + len(rest) >= 12
    assert rest[: 12 - start] == all_steps[start:12] and resumed_weights == weights
    assert "other examples" not in capsys.readouterr().out
