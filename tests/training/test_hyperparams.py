"""Hyperparameters in the optimizer's state: set between updates, logged, saved, and compared with the script's at a resume.

The loss has a gradient of 1 for each weight, so that an update of SGD moves the weights by the learning rate.
"""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

DATA = np.ones((8, 4), np.float32)


class Weights(eqx.Module):
    weight: jax.Array
    other: jax.Array

    def __init__(self):
        self.weight, self.other = jnp.zeros(3), jnp.zeros(3)


def loss_fn(model, batch, key):
    return (model.weight.sum() + model.other.sum()) * batch.mean()


def sgd(learning_rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate)


def make_trainer(optimizer, workdir=None, *, verbose=False, **kwargs):
    deployer = redeqx.Deployer(0, workdir=workdir, verbose=verbose)
    if isinstance(optimizer, float):
        optimizer = sgd(optimizer)
    return redeqx.Trainer(deployer, model=Weights(), optimizer=optimizer, collate_fn=np.stack, loss_fn=loss_fn, **kwargs)


def moved(trainer, n=1):
    """Returns by how much `n` updates move the weights downwards."""
    before = np.asarray(trainer.model.weight)
    for _ in range(n):
        trainer.update(DATA)
    [by] = set((before - np.asarray(trainer.model.weight)).tolist())
    return by


def bits(trainer):
    leaves = jax.tree.leaves((eqx.filter(trainer.model, eqx.is_array), trainer.opt_state))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


# --- a changed script ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["resume", "fit", "load_ckpt"])
def test_a_resumed_run_takes_the_learning_rate_that_the_script_has_changed(how, tmp_path, capsys):
    first = make_trainer(0.5, tmp_path)
    first.update(DATA)
    first.save_ckpt()
    capsys.readouterr()
    trainer = make_trainer(0.0, tmp_path, verbose=True)
    if how == "fit":
        trainer.fit(DATA, batch_size=8, n_epochs=2)
        assert trainer.step == 3
    else:
        getattr(trainer, how)()
        assert moved(trainer) == 0
    np.testing.assert_array_equal(trainer.model.weight, -0.5)
    said = "hyperparameter `learning_rate`: 0, as in this script, before 0.5"
    assert said in " ".join(capsys.readouterr().out.split())


def test_it_is_compared_within_averages_copies_and_chains(tmp_path, capsys):
    def run(rate, n_epochs):
        optimizer = optax.chain(optax.clip_by_global_norm(1e9), redeqx.optimizers.ema(sgd(rate), 0.5))
        trainer = make_trainer(optimizer, tmp_path, compute=redeqx.Precision(parameters="bfloat16"))
        trainer.fit(DATA, batch_size=8, n_epochs=n_epochs)
        return np.asarray(trainer.model.weight, np.float32)

    np.testing.assert_array_equal(run(0.5, 1), -0.5)
    np.testing.assert_array_equal(run(0.25, 2), -0.75)


def halving(learning_rate=1.0):
    """An optimizer that halves the learning rate in its own state."""
    inner = sgd(learning_rate)

    def update(grads, state, params=None):
        updates, state = inner.update(grads, state, params)
        rate = state.hyperparams["learning_rate"] / 2
        return updates, state._replace(hyperparams={"learning_rate": rate})

    return optax.GradientTransformation(inner.init, update)


def test_what_an_optimizer_has_computed_is_kept_if_the_script_is_the_same(tmp_path):
    first = make_trainer(halving(), tmp_path)
    assert moved(first, 2) == 1.5
    first.save_ckpt()
    again = make_trainer(halving(), tmp_path)
    assert again.resume() == 2 and moved(again) == 0.25


def test_it_is_compared_with_the_script_of_the_previous_resume(tmp_path):
    first = make_trainer(halving(), tmp_path)
    first.update(DATA)
    first.save_ckpt()
    changed = make_trainer(halving(2.0), tmp_path)
    assert changed.resume() == 1 and moved(changed) == 2.0
    changed.save_ckpt()
    again = make_trainer(halving(2.0), tmp_path)
    assert again.resume() == 2 and moved(again) == 1.0  # what the optimizer has computed since


# --- set during the run -------------------------------------------------------------------------------------------------


def test_a_value_is_used_from_the_next_update_on_and_logged(tmp_path):
    trainer = make_trainer(0.5, tmp_path)
    assert moved(trainer) == 0.5
    trainer.set_hyperparams(learning_rate=0.25)
    assert dict(trainer.hyperparams) == {"learning_rate": 0.25}
    assert moved(trainer, 2) == 0.5
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows] == [0.5, 0.25, 0.25]


def test_a_value_that_is_set_before_the_loss_is_known_stays():
    """The loss says that no leaf decays, so that the optimizer's state has another structure from then on."""

    @optax.inject_hyperparams
    def optimizer(learning_rate):
        momentum = optax.masked(optax.trace(0.0), redeqx.optimizers.decay_mask)
        return optax.chain(momentum, optax.scale_by_learning_rate(learning_rate))

    trainer = make_trainer(optimizer(0.5))
    trainer.set_hyperparams(learning_rate=0.25)
    before = jax.tree.structure(trainer.opt_state)
    assert moved(trainer) == trainer.hyperparams["learning_rate"] == 0.25
    assert jax.tree.structure(trainer.opt_state) != before


class Halves(redeqx.Callback):
    """Halves the learning rate at each evaluation."""

    def on_eval(self, trainer, metrics):
        trainer.set_hyperparams(learning_rate=trainer.hyperparams["learning_rate"] / 2)


class Stop(Exception):
    pass


class StopAt(redeqx.Callback):
    def on_step(self, trainer, metrics):
        if trainer.step == 5:
            raise Stop


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_a_callback_s_values_are_resumed_also_against_a_changed_script(rate, tmp_path, capsys):
    options = {"batch_size": 4, "n_epochs": 4, "eval_examples": DATA, "eval_every_n_steps": 1, "save_every_n_steps": 2}
    whole = make_trainer(1.0, tmp_path / "whole")
    whole.fit(DATA, callbacks=[Halves()], **options)
    np.testing.assert_array_equal(whole.model.weight, -sum(0.5**i for i in range(8)))
    with pytest.raises(Stop):
        make_trainer(1.0, tmp_path / "parts").fit(DATA, callbacks=[Halves(), StopAt()], **options)
    again = make_trainer(rate, tmp_path / "parts", verbose=True)
    again.fit(DATA, callbacks=[Halves()], **options)
    assert bits(again) == bits(whole)
    assert (tmp_path / "parts/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    said = "`learning_rate`: 0.0625, as set during the run, and not 4 as in this script."
    assert (said in " ".join(capsys.readouterr().out.split())) == (rate == 4.0)


def test_a_value_that_was_set_outlasts_several_resumes(tmp_path):
    for rate in (1.0, 4.0, 8.0):  # the script changes before each
        trainer = make_trainer(rate, tmp_path)
        if not trainer.resume():
            trainer.update(DATA)
            trainer.set_hyperparams(learning_rate=0.5)
        assert moved(trainer) == 0.5
        trainer.save_ckpt()


def test_a_value_set_before_the_run_belongs_to_the_script(tmp_path):
    def run(rate, n_epochs):
        trainer = make_trainer(1.0, tmp_path)
        trainer.set_hyperparams(learning_rate=rate)
        trainer.fit(DATA, batch_size=8, n_epochs=n_epochs)
        return np.asarray(trainer.model.weight)[0]

    assert run(0.5, 1) == -0.5
    assert run(0.25, 2) == -0.75


def test_a_value_written_into_the_state_is_set(tmp_path):
    trainer = make_trainer(optax.chain(optax.identity(), sgd(0.5)), tmp_path)
    state = trainer.opt_state
    state[1].hyperparams["learning_rate"] = 0.25
    assert moved(trainer) == 0.25
    state[1].hyperparams["learning_rate"] = 2.0  # also into a state of before
    trainer.save_ckpt()
    trainer.set_hyperparams(learning_rate=1.0)
    assert trainer.opt_state[1].hyperparams["learning_rate"] == 1.0 and moved(trainer) == 1.0
    again = make_trainer(optax.chain(optax.identity(), sgd(0.5)), tmp_path)
    assert again.resume() == 1 and moved(again) == 2.0
    again.opt_state[1].hyperparams["rate"] = 1.0
    with pytest.raises(ValueError, match=r"`1\.hyperparams\.rate`: expected one of learning_rate, got no such name"):
        again.update(DATA)


# --- names and values ---------------------------------------------------------------------------------------------------


def test_a_wrong_name_or_value_is_refused(tmp_path):
    def refuses(trainer, error, message, **values):
        with pytest.raises(error, match=message):
            trainer.set_hyperparams(**values)

    trainer = make_trainer(optax.inject_hyperparams(optax.adam)(0.5))
    refuses(trainer, ValueError, "`learning_rat`: expected one of .*b1.*Did you mean `learning_rate`", learning_rat=1.0)
    refuses(trainer, TypeError, "`learning_rate`: expected a number, got '1'", learning_rate="1")
    refuses(trainer, TypeError, r"`learning_rate`: expected a number, got \[1.0, 2.0\]", learning_rate=[1.0, 2.0])
    refuses(trainer, ValueError, "`learning_rate`: expected a number, got nan", b1=0.1, learning_rate=float("nan"))
    assert trainer.hyperparams["b1"] == pytest.approx(0.9)  # none is set
    with pytest.raises(TypeError, match="does not support item assignment"):
        trainer.hyperparams["learning_rate"] = 1.0
    refuses(make_trainer(optax.sgd(0.5)), ValueError, "`learning_rate`: expected an optimizer with hyper", learning_rate=1.0)
    scheduled = make_trainer(sgd(optax.linear_schedule(1.0, 0.0, 4)))
    refuses(scheduled, ValueError, "`learning_rate`: expected .* as a number, got one with a schedule", learning_rate=1.0)
    assert moved(scheduled) == 1.0 and dict(scheduled.hyperparams) == {"learning_rate": 1.0}


def test_hyperparameters_of_the_same_name_are_set_by_the_whole_one():
    labels = Weights.__new__(Weights)
    object.__setattr__(labels, "weight", "a")
    object.__setattr__(labels, "other", "b")
    trainer = make_trainer(optax.multi_transform({"a": sgd(0.5), "b": sgd(0.25)}, labels))
    a, b = (f"inner_states.{name}.inner_state.hyperparams.learning_rate" for name in "ab")
    assert dict(trainer.hyperparams) == {a: 0.5, b: 0.25}
    with pytest.raises(ValueError, match=f"`learning_rate`: expected one hyperparameter, got {a}, {b}"):
        trainer.set_hyperparams(learning_rate=1.0)
    trainer.set_hyperparams(**{a: 2.0})
    assert moved(trainer) == 2.0
    np.testing.assert_array_equal(trainer.model.other, -0.25)


def test_a_mask_that_optax_takes_for_a_schedule_is_refused():
    def decayed(learning_rate, mask):
        return optax.chain(optax.add_decayed_weights(0.5, mask), optax.sgd(learning_rate))

    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "weight" in jax.tree_util.keystr(path), params)

    trainer = make_trainer(optax.inject_hyperparams(decayed)(1.0, mask=mask))
    with pytest.raises(ValueError, match=r"got `mask`, a function .* static_args='mask'"):
        trainer.update(DATA)
    trainer = make_trainer(optax.inject_hyperparams(decayed, static_args="mask")(1.0, mask=mask))
    for _ in range(2):
        trainer.update(DATA)
    np.testing.assert_array_equal(trainer.model.weight, -1.5)  # -1, then -(1 + 0.5 * -1)
    np.testing.assert_array_equal(trainer.model.other, -2)


# --- the logged learning rate -------------------------------------------------------------------------------------------


class Rates:
    def __init__(self):
        self.seen = []

    def log(self, metrics, step):
        self.seen.append(metrics["learning_rate"])


def test_the_rate_of_accumulated_updates_is_that_of_their_schedule(tmp_path, recwarn):
    schedule = optax.linear_schedule(1.0, 0.0, 3)
    optimizer = optax.MultiSteps(optax.sgd(schedule), 2)
    trainer = make_trainer(optimizer, tmp_path, lr_schedule_fn=schedule)
    trainer.fit(np.ones((6, 4), np.float32), batch_size=1, n_epochs=1)  # as steps, the schedule is over after three
    assert not recwarn.list
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([row["learning_rate"] for row in rows], [1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(trainer.model.weight, -2.0, rtol=1e-6)


def test_a_resumed_schedule_of_accumulated_updates_is_not_reported_as_changed(tmp_path, capsys):
    schedule = optax.linear_schedule(1.0, 0.0, 8)

    def run(schedule, n_epochs):
        capsys.readouterr()
        optimizer = optax.MultiSteps(optax.sgd(schedule), 2)
        trainer = make_trainer(optimizer, tmp_path, lr_schedule_fn=schedule, verbose=True)
        trainer.fit(DATA, batch_size=4, n_epochs=n_epochs)
        return capsys.readouterr().out

    run(schedule, 2)
    assert "settings that differ" not in run(schedule, 3)
