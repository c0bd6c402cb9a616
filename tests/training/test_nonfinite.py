"""Non-finite steps: they end the run, or with `on_nonfinite="skip"` leave model and optimizer state bitwise unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.training._metrics import _describe_nonfinite

NAN_EXAMPLE = 7


def loss_fn(model, batch, key):
    return jnp.square(jax.vmap(model)(batch)).mean()


def collate_fn(numbers):
    rows = np.stack([np.random.default_rng(i).normal(size=4) for i in numbers]).astype(np.float32)
    return np.where(np.asarray(numbers)[:, None] == NAN_EXAMPLE, np.nan, rows)


def make_trainer(workdir=None, *, shards=(2, 2), **options):
    deployer = redeqx.Deployer(0, *shards, workdir=workdir, verbose=False)
    model = eqx.nn.MLP(4, 2, 16, 1, key=jax.random.key(1))
    options = {"on_nonfinite": "skip", "model": model, "loss_fn": loss_fn, "optimizer": optax.adam(1e-2), **options}
    return redeqx.Trainer(deployer, collate_fn=collate_fn, **options)


def bits(trainer):
    leaves = jax.tree.leaves((eqx.filter(trainer.model, eqx.is_array), trainer.opt_state))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.mark.parametrize("shards", [(1, 1), (2, 2)])
def test_skipped_step_changes_nothing(shards):
    trainer = make_trainer(shards=shards)
    trainer.train([0, 1, 2, 3, 4, 5, 6, 8], 8 // trainer.deployer.n_batch_shards)
    before = bits(trainer)
    trainer.train([NAN_EXAMPLE] * 8, 8 // trainer.deployer.n_batch_shards)
    assert bits(trainer) == before
    assert (trainer.step, trainer.n_skipped) == (2, 1)
    trainer.train([0, 1, 2, 3, 4, 5, 6, 8], 8 // trainer.deployer.n_batch_shards)
    assert bits(trainer) != before


def loss_with_nan_gradient(model, batch, key):
    """Return a loss of zero whose gradient is NaN, as infinity times zero."""
    return jnp.sqrt(jnp.square(jax.vmap(model)(0 * jnp.nan_to_num(batch))).mean())


def test_nonfinite_gradient_of_a_finite_loss_is_skipped():
    model = eqx.nn.Linear(4, 2, use_bias=False, key=jax.random.key(1))
    trainer = make_trainer(loss_fn=loss_with_nan_gradient, model=model)
    before = bits(trainer)
    metrics = trainer.train(list(range(8)), 2)
    assert metrics["loss"] == 0 and np.isnan(metrics["grad_norm"])
    assert bits(trainer) == before
    assert (trainer.step, trainer.n_skipped) == (1, 1)
    with pytest.raises(ValueError, match=r"^`grad_norm` at step 1: expected the gradient's norm to be finite, got nan\."):
        make_trainer(loss_fn=loss_with_nan_gradient, model=model, on_nonfinite="raise").train(list(range(8)), 2)


COMPARE_ON_FINITE_STEPS = """
import jax

jax.config.update("jax_num_cpu_devices", 8)
from tests.training.test_nonfinite import bits, make_trainer

one, other = make_trainer(), make_trainer(on_nonfinite="raise")
for trainer in (one, other):
    trainer.train(list(range(8, 40)), 4)
print(bits(one) == bits(other))
"""


@pytest.mark.parametrize("optimizer", [optax.sgd(optax.linear_schedule(0.0, 1.0, 10)), optax.sgd(0.1)])
def test_skipped_steps_do_not_advance_the_recorded_rate(optimizer):
    """Whether the optimizer counts its updates or not."""
    trainer = make_trainer(optimizer=optimizer, lr_schedule_fn=optax.linear_schedule(0.0, 1.0, 10))
    batches = [[0, 1, 2, 3], [NAN_EXAMPLE] * 4, [4, 5, 6, 8], [0, 1, 2, 3]]
    rates = [trainer.update(batch)["learning_rate"] for batch in batches]
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.1, 0.2], rtol=1e-6)


@pytest.mark.sweep
def test_skipping_does_not_change_finite_steps():
    """Runs with XLA's default flags: in unoptimised machine code the check changes how a sum is rounded."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    completed = subprocess.run(
        [sys.executable, "-c", COMPARE_ON_FINITE_STEPS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert completed.stdout == "True\n", completed.stderr


def test_a_model_that_an_error_left_broken_is_named_as_the_cause(tmp_path):
    """A cell of a notebook that is run again: neither the rate nor its finite batch is the cause."""
    trainer = make_trainer(tmp_path, on_nonfinite="raise")
    trainer.train([8, 9], batch_size=2)
    trainer.save_ckpt()
    with pytest.raises(ValueError, match=r"^`loss` at step 2: .* Its batch is not finite"):
        trainer.train([NAN_EXAMPLE] * 2, batch_size=2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"The model has not been finite since step 2, which raised\. Load"):
            trainer.train([8, 9], batch_size=2)
    trainer.load_ckpt()
    trainer.train([8, 9], batch_size=2)
    with pytest.raises(ValueError, match=r"^`loss` at step 3: .* Its batch is not finite"):
        trainer.train([NAN_EXAMPLE] * 2, batch_size=2)


def test_a_model_that_stayed_finite_is_not_named_as_the_cause():
    """The loss is infinite for a bad batch, and its gradient is not."""

    def spoilt(model, batch, key):
        bad = jnp.where(jnp.isnan(batch).any(), jnp.inf, 0.0)
        return loss_fn(model, jnp.nan_to_num(batch), key) + jax.lax.stop_gradient(bad)

    trainer = make_trainer(on_nonfinite="raise", loss_fn=spoilt)
    for step in (1, 3):
        with pytest.raises(ValueError, match=rf"^`loss` at step {step}: .* Its batch is not finite"):
            trainer.train([NAN_EXAMPLE] * 2, batch_size=2)
        trainer.train([8, 9], batch_size=2)


def test_unread_metrics_of_a_failed_pass_are_dropped_by_load_ckpt(tmp_path):
    """Metrics are read a few steps late; those of steps undone by a load must not appear in the next pass."""
    trainer = make_trainer(tmp_path, on_nonfinite="raise")
    trainer.train(list(range(8, 16)), 2)
    trainer.save_ckpt()
    expected = bits(trainer)

    def failing_examples():
        yield from [NAN_EXAMPLE] * 16
        raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged"):
        trainer.train(failing_examples(), 2)
    assert trainer.step > 1
    trainer.load_ckpt()
    assert bits(trainer) == expected
    trainer.train(list(range(16, 48)), 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_n_skipped_survives_a_resume(tmp_path):
    class Killed(Exception):
        pass

    def examples_of_epoch(epoch):
        if epoch == 2:
            raise Killed
        return list(range(16))

    uninterrupted = make_trainer(tmp_path / "whole")
    uninterrupted.fit(list(range(16)), 2, 3, save_last_ckpt=True)
    assert uninterrupted.n_skipped == 3
    with pytest.raises(Killed):
        make_trainer(tmp_path / "killed").fit(examples_of_epoch, 2, 3, save_last_ckpt=True)
    resumed = make_trainer(tmp_path / "killed")
    resumed.fit(list(range(16)), 2, 3, save_last_ckpt=True)
    assert resumed.n_skipped == 3
    assert bits(resumed) == bits(uninterrupted)


def test_save_by_a_tracker_counts_skipped_steps_whose_metrics_are_unread(tmp_path):
    """Metrics are read two steps late: the tracker hears of step 2 when step 4 is queued, and step 3 was skipped."""

    class Saver:
        def log(self, metrics, step):
            if step == 2:
                saved.append((trainer.step, trainer.save_ckpt()))

    saved = []
    deployer = redeqx.Deployer(0, workdir=tmp_path, verbose=False, loggers=[Saver()])
    model = eqx.nn.MLP(4, 2, 16, 1, key=jax.random.key(1))
    options = {"model": model, "optimizer": optax.adam(1e-2), "collate_fn": collate_fn, "loss_fn": loss_fn}
    trainer = redeqx.Trainer(deployer, on_nonfinite="skip", **options)
    trainer.train([*range(8, 24), *[NAN_EXAMPLE] * 8, *range(24, 40)], 1)
    ((step, path),) = saved
    assert (step, json.loads((path / "trainer.json").read_text())["n_skipped"]) == (4, 1)
    assert trainer.n_skipped == 1
    trainer.load_ckpt(path.name)
    assert (trainer.step, trainer.n_skipped) == (4, 1)


class Counting(eqx.Module):
    index: eqx.nn.StateIndex
    weight: jax.Array

    def __init__(self):
        self.index, self.weight = eqx.nn.StateIndex(jnp.zeros((), jnp.int32)), jnp.ones(())


def test_skipped_step_leaves_the_model_state_unchanged():
    def counting_loss(model, state, batch, key):
        state = state.set(model.index, state.get(model.index) + 1)
        return jnp.square(model.weight * batch).mean(), state

    model, state = eqx.nn.make_with_state(Counting)()
    trainer = make_trainer(model=model, model_state=state, loss_fn=counting_loss)
    for numbers in (range(8, 16), [NAN_EXAMPLE] * 8, range(16, 24)):
        trainer.train(list(numbers), batch_size=8)
    assert trainer.n_skipped == 1
    assert int(trainer.model_state.get(trainer.model.index)) == 2


def test_too_many_consecutive_skips_raise():
    trainer = make_trainer(on_nonfinite=2)
    with pytest.raises(
        ValueError, match=r"^`loss` at step 3: expected the loss to be finite, got nan for 3 steps one after the"
    ):
        trainer.train([NAN_EXAMPLE] * 32, 2)
    trainer = make_trainer(on_nonfinite=2)
    trainer.train(([NAN_EXAMPLE] * 8 + list(range(8, 16))) * 3, 2)  # never two in a row
    assert trainer.n_skipped == 3


def test_complex_nan_and_infinite_values_are_distinguished():
    batch = np.ones((3, 2), np.complex64)
    batch[1, 0] = complex(1, np.nan)
    assert _describe_nonfinite("x", batch, [4, 5, 6]) == "`x` has NaN in 1 of 3 rows, the first from example 5"
    batch[1, 0] = complex(np.inf, 0)
    assert _describe_nonfinite("x", batch, [4, 5, 6]) == "`x` has infinite values in 1 of 3 rows, the first from example 5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "`on_nonfinite`: expected 'raise' or 'skip', got 'ignore'. Pass one of the two."),
        (
            {"on_nonfinite": -1},
            "`on_nonfinite`: expected at least 0, got -1. Pass how many steps in a row may be skipped, or 'raise'.",
        ),
    ],
)
def test_invalid_arguments_raise(options, message):
    with pytest.raises(ValueError) as raised:
        make_trainer(**options)
    assert str(raised.value) == message
