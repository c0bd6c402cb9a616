"""Data libraries: what `fit` reads from each, and that a resumed run continues with the same examples.

`datasets` and `grain` come with the `dev` extra, torch and torchdata with `parity`.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.data import TokenRows, check_examples, examples_of, size_of, slices

N, BATCH = 23, 4


def example_number(example):
    return int(example["x"] if isinstance(example, dict) else example)


def read_steps(make_source, epoch=0, **position):
    steps = slices(examples_of(make_source(), epoch), BATCH, **position)
    return [([example_number(example) for example in step.examples], step) for step in steps]


def assert_continues(make_source, expected=None, epoch=0, after=(0, 1, 3, 4)):
    """Check that a new object continues after each step of `after`; return the order of the whole epoch."""
    check_examples(make_source())
    whole = read_steps(make_source, epoch)
    taken = [numbers for numbers, _ in whole]
    order = [example_number for numbers in taken for example_number in numbers]
    assert order == expected if expected is not None else sorted(order) == list(range(N))
    for i in (i for i in after if i < len(whole)):
        step = whole[i][1]
        rest = read_steps(make_source, epoch, position=step.position, state=step.state)
        assert [numbers for numbers, _ in rest] == taken[i + 1 :], f"after step {i}"
    return order


def train(make_source, workdir, stop=None):
    """Train two epochs, or to step `stop`; return the model's bits, the collated numbers and the last step."""
    seen = []

    def collate_fn(examples):
        seen.extend(map(example_number, examples))
        return np.array([example_number(example) for example in examples], np.float32)

    class Stop(redeqx.Callback):
        def on_step(self, trainer, metrics):
            if trainer.step == stop:
                trainer.stop()

    trainer = redeqx.Trainer(
        redeqx.Deployer(workdir=workdir, verbose=False),
        model=jnp.ones(3),
        optimizer=optax.adam(0.1),
        collate_fn=collate_fn,
        loss_fn=lambda model, batch, key: ((model.sum() * batch / N + jax.random.normal(key)) ** 2).mean(),
    )
    trainer.fit(make_source(), batch_size=BATCH, n_epochs=2, callbacks=[Stop()])
    return np.asarray(trainer.model).tobytes(), seen, trainer.step


def tokenize(row):
    return {"x": int(row["text"])}


def cached_map(folder):
    """Return tokenized rows; a later call finds them in the cache of `datasets`."""
    import datasets

    if not (folder / "texts.txt").exists():  # the cache knows a file by its time
        (folder / "texts.txt").write_text("\n".join(map(str, range(N))))
    made = set(folder.glob("cache/**/*.arrow"))
    rows = datasets.Dataset.from_text(str(folder / "texts.txt"), cache_dir=str(folder / "cache"))
    rows = rows.map(tokenize, remove_columns="text")
    assert not made or made == set(folder.glob("cache/**/*.arrow"))
    return rows


def mixture(grain):
    """Return an endless mixture, as in the guide: 70 % of numbers from 0, 30 % of seven numbers from 100."""
    sources = [grain.MapDataset.range(N), grain.MapDataset.range(100, 107)]
    return grain.MapDataset.mix([source.shuffle(seed=0).repeat() for source in sources], weights=[0.7, 0.3])


def source_factory(kind, folder):
    """Return a function that creates a new object of a library, as a restarted script does."""
    if "datasets" in kind:
        datasets = pytest.importorskip("datasets", exc_type=ImportError)
        rows = datasets.Dataset.from_dict({"x": list(range(N))})
        if "map" in kind:
            return partial(cached_map, folder)
        if "stream" in kind:
            return lambda: rows.to_iterable_dataset(num_shards=3).shuffle(seed=0, buffer_size=7)
        return lambda: rows
    if "grain" in kind:
        grain = pytest.importorskip("grain", exc_type=ImportError)
        numbers = grain.MapDataset.range(N).shuffle(seed=1)
        if "mixture by epoch" in kind:
            return lambda: lambda epoch: mixture(grain)[N * epoch : N * (epoch + 1)]
        if "mixture" in kind:
            return lambda: mixture(grain)[:N].to_iter_dataset()
        if "workers" in kind:
            pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()
            return lambda: numbers.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
        return lambda: numbers.to_iter_dataset() if "iterable" in kind else numbers
    torch = pytest.importorskip("torch", exc_type=ImportError)
    stateful = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    loader = stateful.StatefulDataLoader if "stateful" in kind else torch.utils.data.DataLoader
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"} if "workers" in kind else {}
    return lambda: loader(list(range(N)), batch_size=None, **workers)


SWEEP = [
    pytest.param(x, marks=pytest.mark.sweep)
    for x in (
        "datasets rows",
        "datasets stream",
        "grain map",
        "grain iterable",
        "grain workers",
        "grain mixture by epoch",
        "datasets map",
    )
]
PARITY = [  # these need torch
    pytest.param(x, marks=[pytest.mark.parity, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")])
    for x in ("torch stateful workers",)
]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["grain mixture stream", *SWEEP, *PARITY])
def test_stopped_fit_resumes_to_the_same_bits(kind, tmp_path):
    make_source = source_factory(kind, tmp_path)
    bits, numbers, steps = train(make_source, tmp_path / "whole")
    assert (len(numbers), steps) == (2 * N, 12)
    for stop in (8,) if "workers" in kind else (2, 8):  # one in each epoch; workers, which take long to start, in the second
        workdir = tmp_path / str(stop)
        assert train(make_source, workdir, stop)[2] == stop
        resumed, _, at = train(make_source, workdir)
        assert resumed == bits and at == steps


# --- datasets ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def columns():
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    return datasets.Dataset.from_dict({"x": list(range(N))})


def test_hugging_face_rows_have_a_length(columns):
    assert size_of(columns) == N
    assert sorted(example_number(row) for step in slices(columns, BATCH, seed=(0,)) for row in step.examples) == list(
        range(N)
    )


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("change", ["unchanged", "map", "map in batches", "filter", "numpy"])
def test_hugging_face_stream_resumes(change, n_shards, columns):
    def make_source():
        stream = columns.to_iterable_dataset(num_shards=n_shards)
        match change:
            case "map":
                return stream.map(lambda row: {"x": row["x"] + 1})
            case "map in batches":
                return stream.map(lambda rows: {"x": [x + 1 for x in rows["x"]]}, batched=True, batch_size=5)
            case "filter":
                return stream.filter(lambda row: row["x"] % 2)
            case "numpy":
                return stream.with_format("numpy")
        return stream

    add = 1 if "map" in change else 0
    assert_continues(make_source, [x + add for x in range(N) if change != "filter" or x % 2])


@pytest.mark.parametrize("n_shards", [1, 3])
def test_hugging_face_shuffle_buffer_loses_no_examples(n_shards, columns):
    """The state omits the contents of the buffer: with the state alone, a resumed run would lose those examples."""

    def make_source():
        return columns.to_iterable_dataset(num_shards=n_shards).shuffle(seed=0, buffer_size=7)

    orders = [assert_continues(make_source, epoch=epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    step = read_steps(make_source)[2][1]
    stream = make_source()
    stream.load_state_dict(step.state["state"])
    assert len(list(stream)) < N - step.position  # if this fails, datasets now saves its buffers


@pytest.mark.parametrize("buffer", [0, 7])
def test_resumed_stream_can_be_read_again_from_the_beginning(buffer, columns):
    """Not from the loaded state, as an evaluation or another trainer may read the same object."""
    stream = columns.to_iterable_dataset()
    stream = stream.shuffle(seed=0, buffer_size=buffer) if buffer else stream
    whole = [example_number(row) for row in stream]
    step = next(itertools.islice(slices(stream, BATCH), 2, None))
    rest = [
        example_number(row)
        for later in slices(stream, BATCH, position=step.position, state=step.state)
        for row in later.examples
    ]
    assert rest == whole[step.position :]
    assert [example_number(row) for later in slices(stream, BATCH) for row in later.examples] == whole


def test_resumed_stream_starts_the_next_epoch_from_the_beginning(columns):
    def make_source():
        return columns.to_iterable_dataset(num_shards=3).shuffle(seed=0, buffer_size=7)

    step = read_steps(make_source)[2][1]
    stream = make_source()
    read_steps(lambda: stream, 0, position=step.position, state=step.state)
    assert [numbers for numbers, _ in read_steps(lambda: stream, 1)] == [
        numbers for numbers, _ in read_steps(make_source, 1)
    ]


# --- grain ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grain():
    return pytest.importorskip("grain", exc_type=ImportError)


def test_grain_map_dataset_has_a_length(grain):
    dataset = grain.MapDataset.range(N).shuffle(seed=1).map(lambda x: 2 * x)
    assert size_of(dataset) == N
    assert sorted(example_number(x) for step in slices(dataset, BATCH, seed=(0,)) for x in step.examples) == list(
        range(0, 2 * N, 2)
    )


@pytest.mark.parametrize("kind", ["iterable", "filter", "window", "mix", "loader"])
def test_grain_iterable_resumes(kind, grain):
    def make_source():
        dataset = grain.MapDataset.range(N).shuffle(seed=1)
        match kind:
            case "filter":
                return dataset.to_iter_dataset().filter(lambda x: x % 2 == 0)
            case "window":
                return grain.experimental.WindowShuffleIterDataset(dataset.to_iter_dataset(), window_size=5, seed=1)
            case "mix":
                other = grain.MapDataset.range(100, 107)
                return grain.IterDataset.mix([dataset.to_iter_dataset(), other.to_iter_dataset()], weights=[0.7, 0.3])
            case "loader":
                shards = grain.sharding.NoSharding()
                sampler = grain.samplers.IndexSampler(N, shard_options=shards, shuffle=True, num_epochs=1, seed=3)
                return grain.DataLoader(data_source=list(range(N)), sampler=sampler, worker_count=0)
        return dataset.to_iter_dataset()

    expected = None
    if kind in ("filter", "mix"):
        expected = [example_number(x) for x in make_source()]
    assert_continues(make_source, expected)


def test_grain_mixture_has_exact_shares_and_uses_every_example_before_one_repeats(grain):
    """As the guide says."""
    parts = [[int(x) for x in mixture(grain)[30 * epoch : 30 * (epoch + 1)]] for epoch in range(4)]
    assert [sum(x >= 100 for x in part) for part in parts] == [9] * 4
    numbers = [x for part in parts for x in part if x < 100]
    first, second = numbers[:N], numbers[N : 2 * N]
    assert sorted(first) == sorted(second) == list(range(N)) and first != second


# --- numpy ------------------------------------------------------------------------------------------------------------


def test_memory_map_is_read_in_rows(tmp_path):
    np.arange(N * 8, dtype=np.uint16).tofile(tmp_path / "train.bin")
    tokens = np.memmap(tmp_path / "train.bin", np.uint16, "r")
    for examples in (tokens.reshape(-1, 8), TokenRows(tokens, 8)):
        rows = [row for step in slices(examples, BATCH, seed=(0,)) for row in step.examples]
        assert sorted(int(row[0]) for row in rows) == list(range(0, 8 * N, 8))


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls `set_vital`
@pytest.mark.parametrize("kind", ["loader", "workers", "stateful", "stateful, shuffled", "stateful workers"])
def test_torch_loader_resumes(kind):
    """Workers are spawned, as JAX warns about forking a process with its threads."""
    torch = pytest.importorskip("torch", exc_type=ImportError)
    stateful = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)

    def make_source():
        loader = stateful.StatefulDataLoader if "stateful" in kind else torch.utils.data.DataLoader
        workers = {"num_workers": 2, "multiprocessing_context": "spawn"} if "workers" in kind else {}
        order = {"shuffle": True, "generator": torch.Generator().manual_seed(0)} if "shuffled" in kind else {}
        return loader(list(range(N)), batch_size=None, **workers, **order)

    after = (3,) if "workers" in kind else (0, 1, 3)
    assert assert_continues(make_source, after=after) != list(range(N)) or "shuffled" not in kind


@pytest.mark.parity
def test_torch_iterable_dataset_can_have_a_length():
    """It inherits a `__getitem__` that raises."""
    torch = pytest.importorskip("torch", exc_type=ImportError)

    class Numbers(torch.utils.data.IterableDataset):
        def __len__(self):
            return N

        def __iter__(self):
            return iter(range(N))

    check_examples(Numbers())
    assert [example for step in slices(Numbers(), BATCH) for example in step.examples] == list(range(N))


def test_torch_dataset_has_a_length():
    torch = pytest.importorskip("torch", exc_type=ImportError)
    dataset = torch.utils.data.TensorDataset(torch.arange(N))
    check_examples(dataset)
    actual = [int(row[0]) for step in slices(dataset, BATCH, seed=(0,)) for row in step.examples]
    assert sorted(actual) == list(range(N)) and actual != list(range(N))
