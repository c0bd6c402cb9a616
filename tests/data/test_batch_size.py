"""`batch_size`, the examples per update: the same run on every mesh, few compiled programs, and checks when resuming."""

import contextlib
import logging

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx
from redeqx.data import BatchSize
from redeqx.dims import RowUse
from redeqx.machine import make_mesh

DATA = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def loss_fn(model, batch, key):
    return ((jax.vmap(model)(batch[:, :5])[:, 0] - batch[:, 5]) ** 2).mean()


class RecordLosses:
    def __init__(self):
        self.seen = []

    def log(self, metrics, step):
        if "grad_norm" in metrics:
            self.seen.append(metrics["loss"])


class Messages(list):
    """The messages printed by a deployer."""


def make_trainer(workdir=None, *, shards=(2, 2), accumulate=1, loggers=(), monkeypatch=None, **kwargs):
    deployer = redeqx.Deployer(3, *shards, workdir=workdir, verbose=False, loggers=loggers)
    messages = Messages()
    deployer.console.info = lambda message, title=None: messages.append(message)
    options = {"optimizer": optax.sgd(0.05), "loss_fn": loss_fn, **kwargs}
    trainer = redeqx.Trainer(
        deployer,
        model=eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)),
        collate_fn=np.stack,
        accumulate_grad_batches=accumulate,
        **options,
    )
    trainer.messages = messages
    return trainer


def arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


@contextlib.contextmanager
def compiled(name):
    """Yield a list of the programs of this name that are compiled within the context."""
    logger, programs = logging.getLogger("jax"), []
    handler = logging.Handler()
    handler.emit = lambda record: programs.append(1) if f"Compiling jit({name})" in record.getMessage() else None
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield programs
    finally:
        logger.removeHandler(handler)


def message(error, fn, *args, **kwargs):
    with pytest.raises(error) as raised:
        fn(*args, **kwargs)
    return str(raised.value)


# --- sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "rows", "batch_size", "accumulate", "expected"),
    [
        ((2, 1), 15, None, 1, (60, 60)),
        ((2, 1), 15, None, 3, (180, 60)),
        ((1, 1), None, 64, 1, (64, 64)),
        ((8, 1), None, 64, 1, (64, 64)),
        ((2, 2), None, 64, 4, (64, 16)),
        ((2, 1), None, 60, 1, (60, 56)),
        ((1, 1), None, 60, 4, (60, 8)),
        ((4, 2), None, 5, 1, (5, 8)),
        ((1, 1), None, 47, 3, (47, 16)),  # 16 + 16 + 15; micro-batches of 8 would be six
    ],
)
def test_examples_and_micro_batch_sizes(shards, rows, batch_size, accumulate, expected):
    size = BatchSize.of(make_mesh(*shards), rows, batch_size, accumulate)
    assert (size.examples, size.micro_batch) == expected


@pytest.mark.parametrize(
    ("n", "micro_batch", "expected"),
    [(120, 64, 40), (128, 64, 64), (120, 60, 60), (297, 64, 64), (50, 64, 64), (None, 64, 64), (96, 64, 48)],
)
def test_evaluation_batches_are_split_evenly_if_possible(n, micro_batch, expected):
    assert BatchSize(micro_batch, micro_batch).evenly(n, 8).micro_batch == expected


@pytest.mark.parametrize(
    ("n_devices", "use", "expected"),
    [
        (1, RowUse("separable"), 50),
        (1, RowUse("separable", group=2), 50),
        (1, RowUse("separable", group=4), 64),  # 50 would divide a group
        (1, RowUse("mixed"), 64),  # its value depends on the rows of a batch: those that the user chose
    ],
)
def test_evaluation_batches_are_split_as_the_loss_allows(n_devices, use, expected):
    assert BatchSize(64, 64).evenly(100, n_devices, use).micro_batch == expected


EXPECTED_ONE_OF_TWO = "`per_device_batch_size`, `batch_size`: expected one of the two, got {}"


@pytest.mark.parametrize("method", ["fit", "train", "eval_loss", "eval_metrics", "compile", "predict", "dry_run"])
def test_exactly_one_batch_size_argument_is_required(method):
    trainer = make_trainer()
    predictor = trainer.get_default_predictor(lambda model, batch, key: batch)
    call = predictor.predict if method == "predict" else getattr(trainer, method)
    assert message(ValueError, call, DATA) == EXPECTED_ONE_OF_TWO.format("neither. Pass `batch_size`, examples per update.")
    assert message(ValueError, call, DATA, 4, batch_size=8) == EXPECTED_ONE_OF_TWO.format(
        "4 and 8. Pass `batch_size` alone: it sets the rows per device."
    )
    assert message(ValueError, call, DATA, batch_size=0) == (
        "`batch_size`: expected at least 1, got 0. Pass a positive number."
    )
    assert trainer.step == 0


def test_two_evaluation_batch_sizes_raise():
    assert message(ValueError, make_trainer().fit, DATA, 1, eval_per_device_batch_size=2, eval_batch_size=8) == (
        "`eval_per_device_batch_size`, `eval_batch_size`: expected one of the two, got 2 and 8. "
        "Pass `eval_batch_size` alone: it sets the rows per device."
    )


# --- the same run on every mesh -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [16, pytest.param(12, marks=pytest.mark.sweep)])
def test_run_is_the_same_on_every_mesh(batch_size):
    """With batch sizes that divide over the devices and that do not; the last batch of an epoch is smaller."""
    runs = []
    for shards in [(1, 1), (2, 2), (8, 1)]:
        losses = RecordLosses()
        trainer = make_trainer(shards=shards, loggers=[losses])
        trainer.fit(DATA, batch_size=batch_size, n_epochs=2)
        runs.append((losses.seen, trainer.eval_loss(DATA, batch_size=16), arrays(trainer.model)))
    assert len(runs[0][0]) == 2 * -(-len(DATA) // batch_size)
    for losses, evaluated, params in runs[1:]:
        np.testing.assert_allclose(losses, runs[0][0], rtol=1e-5)
        np.testing.assert_allclose(evaluated, runs[0][1], rtol=1e-5)
        for found, desired in zip(params, runs[0][2], strict=True):
            np.testing.assert_allclose(found, desired, rtol=2e-5, atol=1e-6)


def test_per_device_batch_size_and_batch_size_give_the_same_run():
    by_rows, by_examples = make_trainer(accumulate=2), make_trainer(accumulate=2)
    by_rows.train(DATA, 4)
    by_examples.train(DATA, batch_size=4 * 4 * 2)
    for found, desired in zip(arrays(by_examples.model), arrays(by_rows.model), strict=True):
        assert found.tobytes() == desired.tobytes()


# --- number of compiled programs ----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_remainder_of_full_micro_batches_reuses_the_program():
    """40 examples, 32 per step in four micro-batches; the last step has one micro-batch and reuses the program."""
    losses = RecordLosses()

    def noisy(model, batch, key):
        return loss_fn(model, batch + 0.1 * jax.random.normal(key, batch.shape), key)

    trainer = make_trainer(accumulate=4, loggers=[losses], loss_fn=noisy)
    with compiled("step_fn") as programs:
        trainer.train(DATA, batch_size=32)
    assert len(programs) == 1
    at_once = RecordLosses()
    undivided = make_trainer(shards=(8, 1), loggers=[at_once], loss_fn=noisy)
    undivided.train(DATA, batch_size=32)
    np.testing.assert_allclose(losses.seen, at_once.seen, rtol=1e-5)
    for found, desired in zip(arrays(trainer.model), arrays(undivided.model), strict=True):
        np.testing.assert_allclose(found, desired, rtol=1e-5, atol=1e-6)


def test_padding_micro_batches_do_not_change_the_model_state():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "batch", mode="batch")

    def with_state(model, state, batch, key):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
        return (out**2).mean(), state

    final_states = []
    for batch_size, accumulate in [(32, 4), (8, 1)]:
        deployer = redeqx.Deployer(3, 1, 8, verbose=False)
        trainer = redeqx.Trainer(
            deployer, model=model, model_state=state, optimizer=optax.sgd(0.0), collate_fn=np.stack, loss_fn=with_state,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        trainer.train(DATA, batch_size=batch_size)
        final_states.append(arrays(trainer.model_state))
    for found, desired in zip(*final_states, strict=True):
        np.testing.assert_allclose(found, desired, rtol=1e-6)


def test_evenly_split_evaluation_compiles_once():
    trainer = make_trainer()
    with compiled("eval_fn") as programs:
        whole = trainer.eval_loss(DATA, batch_size=40)
        # Without even splits: two of 16 and one of 8.
        assert trainer.eval_loss(DATA, batch_size=16) == pytest.approx(whole, rel=1e-6)
    assert len(programs) == 2


@pytest.mark.parametrize("n", [9, 20])
def test_evaluation_of_fewer_examples_than_a_batch_but_more_than_a_micro_batch(n):
    """As with `batch_size=10` on eight devices: the micro-batches have eight rows."""
    trainer = make_trainer(shards=(2, 1))
    whole = np.mean([trainer.eval_loss(DATA[i : i + 1], batch_size=1) for i in range(n)])
    assert make_trainer(shards=(2, 1)).eval_loss(DATA[:n], batch_size=n + 1) == pytest.approx(whole, rel=1e-5)


def test_drop_remainder_drops_incomplete_batches():
    trainer = make_trainer()
    with compiled("step_fn") as programs:
        trainer.fit(DATA, batch_size=16, n_epochs=2, drop_remainder=True)
    assert trainer.step == 4 and len(programs) == 1
    trainer.train(iter(DATA), batch_size=16, drop_remainder=True)
    assert trainer.step == 6
    trainer.train(DATA[:32], batch_size=16, drop_remainder=True)
    assert trainer.step == 8  # nothing to drop
    for examples, found in ((DATA, "40"), (iter(DATA), "fewer")):
        assert message(ValueError, trainer.train, examples, batch_size=64, drop_remainder=True) == (
            f"`examples`: expected at least 64 examples, a batch of them, as `drop_remainder=True`, got {found}. "
            "Pass a smaller batch size, or keep the remainder."
        )


# --- checks when resuming -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_epoch_run(tmp_path_factory):
    """The workdir of a run that has completed one epoch."""
    workdir = tmp_path_factory.mktemp("begun")
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    trainer = make_trainer(workdir, accumulate=2, optimizer=optax.sgd(schedule), lr_schedule_fn=schedule)
    trainer.fit(DATA, batch_size=16, eval_examples=DATA[:8])
    return workdir


def resume(
    one_epoch_run,
    tmp_path,
    data=DATA,
    *,
    batch_size=16,
    rows=None,
    accumulate=2,
    n_steps=10,
    shards=(2, 2),
    decay=(),
    trainable=eqx.is_inexact_array,
    eval_examples=DATA[:8],
    **kwargs,
):
    schedule = optax.linear_schedule(0.1, 0.0, n_steps)
    workdir = tmp_path / "run"
    __import__("shutil").copytree(one_epoch_run, workdir)
    optimizer = optax.chain(optax.identity(), optax.scale_by_learning_rate(schedule), *decay)  # with `decay=()` that of SGD
    options = {"optimizer": optimizer, "lr_schedule_fn": schedule, "trainable": trainable}
    trainer = make_trainer(workdir, accumulate=accumulate, shards=shards, **options)
    trainer.fit(data, rows, n_epochs=2, batch_size=batch_size, eval_examples=eval_examples, **kwargs)
    return [text for text in trainer.messages if "that differ:" in text]


@pytest.mark.parametrize("kwargs", [{"batch_size": 32}, {"batch_size": None, "rows": 2, "shards": (1, 1), "accumulate": 1}])
def test_resume_with_another_batch_size_raises(kwargs, one_epoch_run, tmp_path):
    found = kwargs["batch_size"] or 16
    if found == 16:  # another mesh with the same number of examples per update: the same run
        assert resume(one_epoch_run, tmp_path, **kwargs) == [
            "resumed with settings that differ: `accumulate_grad_batches` 1, before 2"
        ]
        return
    assert message(ValueError, resume, one_epoch_run, tmp_path, **kwargs) == (
        f"`batch_size`: expected 16 examples per update, as in the resumed run, got {found}. "
        "Pass `batch_size=16`, which sets the rows per device on any mesh, or choose another workdir."
    )


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, []),
        ({"accumulate": 1}, ["`accumulate_grad_batches` 1, before 2"]),
        ({"drop_remainder": True}, ["`drop_remainder` True, before False"]),
        ({"n_steps": 20}, ["a learning rate at step 3 of 0.09, before 0.08"]),
        ({"data": DATA[::-1].copy()}, ["other examples"]),
        ({"eval_examples": {"dev": DATA[:8]}}, ["other examples to evaluate"]),
        ({"eval_examples": DATA[:9]}, ["other examples to evaluate"]),
        ({"eval_examples": None}, []),
        ({"trainable": lambda leaf: np.ndim(leaf) == 2}, ["other trained leaves"]),  # the state has none of them
        (  # of the same tensors
            {"decay": [optax.add_decayed_weights(0.1)]},
            ["`optimizer` EmptyState, ScaleByScheduleState, EmptyState, before EmptyState, ScaleByScheduleState"],
        ),
    ],
)
def test_resume_reports_other_differences(kwargs, expected, one_epoch_run, tmp_path):
    assert resume(one_epoch_run, tmp_path, **kwargs) == [f"resumed with settings that differ: {text}" for text in expected]


def test_resume_with_another_number_of_examples_raises(one_epoch_run, tmp_path):
    assert message(ValueError, resume, one_epoch_run, tmp_path, DATA[:39]) == (
        "`train_examples`: expected 40, as in the resumed run, got 39. "
        "The order of the examples would differ. For new examples choose another workdir."
    )


def test_randomly_augmented_examples_are_not_reported_as_different(tmp_path):
    class Augmented:
        def __init__(self):
            self.rng = np.random.default_rng()

        def __len__(self):
            return len(DATA)

        def __getitem__(self, i):
            return DATA[i] + self.rng.normal(size=6).astype(np.float32)

    for n_epochs in (1, 2):
        trainer = make_trainer(tmp_path)
        trainer.fit(Augmented(), batch_size=16, n_epochs=n_epochs)
        assert not [text for text in trainer.messages if "that differ:" in text]


# --- schedules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kwargs", "n_steps"), [({}, 2 * 3), ({"drop_remainder": True}, 2 * 2)])
def test_schedule_length_follows_from_batch_size(kwargs, n_steps):
    schedule = make_trainer().deployer.get_lr_schedule_fn(40, n_epochs=2, learning_rate=1.0, batch_size=16, **kwargs)
    assert float(schedule(n_steps - 1)) == pytest.approx(1 / n_steps)
    assert float(schedule(n_steps)) == 0.0


def test_schedule_without_learning_rate_raises():
    assert message(TypeError, make_trainer().deployer.get_lr_schedule_fn, 40, batch_size=16) == (
        "`learning_rate`: expected a number, got None. Pass that of the updates after the warm-up."
    )
