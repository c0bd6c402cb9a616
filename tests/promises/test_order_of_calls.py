"""After any order of calls, a trainer has one plan, one position and one state: those of the trained model."""

import json
import re
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from tests._tree import named_leaves

DATA = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
BATCH = 8  # three steps an epoch, of one program


class Reversed(eqx.Module):
    """Two layers, the last one declared first."""

    second: eqx.nn.Linear
    first: eqx.nn.Linear

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.second = eqx.nn.Linear(8, 8, key=key1)
        self.first = eqx.nn.Linear(8, 8, key=key2)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


def collate_fn(examples):
    return np.pad(np.stack(examples), ((0, 0), (0, 2)))


def loss_fn(model, batch, key):
    return (jax.vmap(model)(batch) ** 2).mean()


def pred_fn(model, batch, key):
    return jax.vmap(model)(batch)


def make_trainer(workdir=None, *, shards=(4, 1), loggers=(), **kwargs):
    deployer = redeqx.Deployer(3, *shards, workdir=workdir, verbose=False, loggers=loggers)
    given = {"model": Reversed(jax.random.key(1)), "optimizer": optax.adam(1e-2), "loss_fn": loss_fn, **kwargs}
    return redeqx.Trainer(deployer, collate_fn=collate_fn, **given)


def fit(trainer, n_epochs=2, **kwargs):
    return trainer.fit(DATA, n_epochs=n_epochs, batch_size=BATCH, **kwargs)


def bits(tree):
    return {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(tree).items() if eqx.is_array(leaf)}


def specs(trainer):
    return {name: leaf.spec for name, leaf in trainer.plan.leaves.items()}


def index(workdir):
    return json.loads((workdir / "ckpts/index.json").read_text())


def record(workdir, tag="last"):
    return json.loads((workdir / "ckpts" / index(workdir)[tag] / "trainer.json").read_text())


# --- the model ----------------------------------------------------------------------------------------------------------


def test_a_rerun_of_a_finished_run_has_the_trained_model(tmp_path):
    whole = make_trainer(tmp_path)
    metrics = fit(whole, eval_examples=DATA[:5])
    for reads in (
        lambda trainer: (trainer.model, trainer.opt_state),
        lambda trainer: (trainer.opt_state, trainer.model)[::-1],
    ):
        again = make_trainer(tmp_path)
        assert fit(again, eval_examples=DATA[:5], eval_sanity_check=False) == metrics
        assert again.step == 6
        assert bits(reads(again)) == bits((whole.model, whole.opt_state))


def test_a_rerun_of_two_fits_has_the_model_of_the_second(tmp_path):
    def run(n_fits):
        trainer = make_trainer(tmp_path)
        for _ in range(n_fits):
            fit(trainer, 1)
        return trainer

    whole = run(2)
    again = run(1)
    assert again.step == 6
    assert bits(again.model) == bits(whole.model)


def test_a_prediction_before_the_second_fit_uses_the_restored_model(tmp_path):
    whole = make_trainer(tmp_path)
    fit(whole)
    wanted = whole.get_default_predictor(pred_fn).predict(DATA, batch_size=8)
    again = make_trainer(tmp_path)
    fit(again)
    np.testing.assert_array_equal(again.get_default_predictor(pred_fn).predict(DATA, batch_size=8), wanted)


def test_a_trainer_of_another_ones_model_leaves_it_its_arrays():
    first = make_trainer(name="first")
    fit(first, 1)
    before = bits((first.model, first.opt_state))
    for trained in ("all", "none but biases"):
        trainable = eqx.is_inexact_array if trained == "all" else lambda x: eqx.is_inexact_array(x) and x.ndim == 1
        second = make_trainer(model=first.model, optimizer=optax.sgd(0.1), trainable=trainable)
        second.update(list(DATA[:BATCH]))
        assert bits((first.model, first.opt_state)) == before
    frozen = bits(second.model.first.weight)
    first.update(list(DATA[:BATCH]))
    second.update(list(DATA[:BATCH]))
    assert bits(second.model.first.weight) == frozen


@pytest.mark.parametrize("shards", [(4, 1), pytest.param((1, 8), marks=pytest.mark.sweep)])
def test_arrays_that_a_step_has_replaced_raise_if_they_are_used_again(shards):
    """On several devices JAX 0.10.2 crashes if a function that has compiled for such an array is called with it."""
    model = redeqx.Deployer(3, *shards, verbose=False).init(lambda: Reversed(jax.random.key(1)))
    trainer = make_trainer(model=model, shards=shards)
    for _ in range(3):
        taken = [model, trainer.model, trainer.opt_state]
        for tree in taken * 2:  # the second call takes JAX's fast path
            jax.tree.map(jnp.sqrt, eqx.filter(tree, eqx.is_inexact_array))
        trainer.update(list(DATA[:BATCH]))
        for tree in taken:
            with pytest.raises(RuntimeError, match="deleted"):
                jax.tree.map(jnp.sqrt, eqx.filter(tree, eqx.is_inexact_array))
        model = trainer.model


def test_a_state_may_begin_as_the_arrays_of_the_model():
    """Such as target networks. The model's arrays are moved when they are placed by the plan of the loss."""
    deployer = redeqx.Deployer(3, 2, 4, verbose=False)
    model = deployer.init(lambda: eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(1)))

    def loss_fn(model, targets, batch, key):
        target = eqx.combine(targets, eqx.filter(model, eqx.is_array, inverse=True))
        return jnp.square(jax.vmap(model)(batch) - jax.vmap(target)(batch) - 1).mean(), targets

    trainer = redeqx.Trainer(
        deployer,
        model=model,
        model_state=eqx.filter(model, eqx.is_array),
        optimizer=optax.sgd(0.1),
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )
    assert trainer.update(list(np.ones((8, 64), np.float32)))["loss"] == 1


# --- the plan -----------------------------------------------------------------------------------------------------------


def predict_first(trainer):
    trainer.get_default_predictor(pred_fn).predict(DATA, batch_size=8)


def load_first(trainer):
    trainer.load_ckpt(trainer.deployer.workdir / "ckpts" / "step_00000000")


@pytest.mark.parametrize(
    ("how", "shards"),
    [
        ("predict", (4, 1)), ("load_ckpt", (2, 2)), ("opt_state", (2, 2)), ("opt_state, predict", (4, 1)),
        *(pytest.param(how, (4, 1), marks=pytest.mark.sweep) for how in ("eval_loss", "sanity check")),
        *(pytest.param(how, (2, 2), marks=pytest.mark.sweep) for how in ("second predictor", "predict")),
    ],
)  # fmt: skip
def test_the_plan_follows_the_loss_whatever_is_called_first(how, shards, tmp_path):
    plain = make_trainer(shards=shards)
    plain.train(DATA, batch_size=BATCH)
    without_loss = plain.deployer.plan(Reversed(jax.random.key(1)))
    assert specs(plain) != {name: leaf.spec for name, leaf in without_loss.leaves.items()}
    if how == "load_ckpt":
        make_trainer(tmp_path, shards=shards).save_ckpt()
    trainer = make_trainer(tmp_path, shards=shards)
    predictor = trainer.get_default_predictor(pred_fn)
    first = {
        "predict": predict_first,
        "load_ckpt": load_first,
        "eval_loss": lambda trainer: trainer.eval_loss(DATA, batch_size=8),
        "second predictor": lambda trainer: predictor.predict(DATA, batch_size=8),
        "opt_state": lambda trainer: trainer.opt_state,
        "opt_state, predict": lambda trainer: trainer.opt_state and predict_first(trainer),
    }
    if how == "sanity check":
        # A fit of an iterable, since it keeps the order of examples as `train` does.
        options = {"eval_examples": DATA, "eval_predictor": predictor, "eval_loss": False}
        trainer.fit(iter(DATA), batch_size=BATCH, eval_metric_fn=lambda examples, outputs: {"n": len(outputs)}, **options)
    else:
        first[how](trainer)
        trainer.train(DATA, batch_size=BATCH)
    assert specs(trainer) == specs(plain)
    for name, leaf in named_leaves((trainer.model, trainer.opt_state)).items():
        if eqx.is_array(leaf):
            assert leaf.sharding == named_leaves((plain.model, plain.opt_state))[name].sharding, name
    assert bits((trainer.model, trainer.opt_state)) == bits((plain.model, plain.opt_state))
    np.testing.assert_array_equal(
        predictor.predict(DATA, batch_size=8), plain.get_default_predictor(pred_fn).predict(DATA, batch_size=8)
    )


@pytest.mark.parametrize("first", [predict_first, lambda trainer: trainer.opt_state])
def test_a_loss_that_reads_no_weight_is_refused_whatever_is_called_first(first):
    trainer = make_trainer(loss_fn=lambda model, batch, key: batch.mean())
    first(trainer)
    with pytest.raises(ValueError, match="expected a loss that depends on a trainable leaf, got one that reads none of 4"):
        trainer.train(DATA, batch_size=BATCH)
    assert trainer.step == 0


READS = {
    "Trainer.model": lambda other: jax.vmap(other.model)(jnp.ones((2, 8))),
    "Trainer.eval_model": lambda other: other.eval_model.first.weight,
    "Trainer.opt_state": lambda other: other.opt_state[0].mu.first.weight,
    "Trainer.step": lambda other: jnp.asarray(other.step, jnp.float32),
    "Deployer.next_key": lambda other: jax.random.normal(other.deployer.next_key()),
}


@pytest.mark.parametrize("what", READS)
def test_a_loss_that_reads_what_changes_is_refused(what):
    other = make_trainer()
    trainer = make_trainer(loss_fn=lambda *args: loss_fn(*args) + READS[what](other).sum())
    with pytest.raises(ValueError, match=f"`{what}`: expected to be read outside of `loss_fn`.*Pass what changes in the ex"):
        trainer.update(DATA[:8])


@pytest.mark.sweep
def test_a_step_that_has_captured_weights_is_refused_once_they_are_trained():
    other = make_trainer()
    other.update(DATA[:8])
    captured, copied = other.model, jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, other.model)
    trainers = [
        make_trainer(loss_fn=lambda model, batch, key, of=of: (jax.vmap(of)(jax.vmap(model)(batch)) ** 2).mean())
        for of in (copied, captured)
    ]
    for trainer in trainers:
        trainer.update(DATA[:8])
        trainer.eval_loss(DATA[:8], batch_size=8)
    predictor = other.get_default_predictor(lambda model, batch, key: jax.vmap(captured)(batch))
    predictor.predict(DATA[:8], batch_size=8)
    other.update(DATA[:8])
    kept, stale = trainers
    kept.update(DATA[:8])
    kept.eval_loss(DATA[:8], batch_size=8)
    with pytest.raises(ValueError, match=r"`loss_fn`: expected arrays from outside to stay the same.*copy what shall stay"):
        stale.update(DATA[:8])
    with pytest.raises(ValueError, match=r"`loss_fn`: expected arrays from outside to stay the same.*copy what shall stay"):
        stale.eval_loss(DATA[:8], batch_size=8)
    with pytest.raises(ValueError, match=r"`pred_fn`: expected arrays from outside to stay the same.*copy what shall stay"):
        predictor.predict(DATA[:8], batch_size=8)


@pytest.mark.sweep
def test_the_plan_is_made_with_the_weights_as_the_step_casts_them():
    def needs_bfloat16(model, batch, key):
        if model.first.weight.dtype != jnp.bfloat16:
            raise TypeError(f"a kernel for bfloat16, got {model.first.weight.dtype}")
        return loss_fn(model, batch.astype(jnp.bfloat16), key)

    trainer = make_trainer(loss_fn=needs_bfloat16, compute=redeqx.Precision("bfloat16", gradients=None))
    trainer.train(DATA, batch_size=BATCH)
    plain = make_trainer()
    plain.train(DATA, batch_size=BATCH)
    assert specs(trainer) == specs(plain)
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))} == {np.dtype(np.float32)}


# --- the end of a run, and its continuation -----------------------------------------------------------------------------


def test_the_end_of_a_fit_is_saved_by_default(tmp_path):
    trainer = make_trainer(tmp_path / "a")
    fit(trainer)
    assert index(tmp_path / "a") == {"last": "step_00000006"}
    assert bits(trainer.model) == bits(load(tmp_path / "a").model)
    fit(make_trainer(tmp_path / "b"), save_end=False)
    assert not (tmp_path / "b" / "ckpts").exists()


def load(workdir, name="last"):
    trainer = make_trainer(workdir)
    trainer.load_ckpt(name)
    return trainer


def test_the_end_is_saved_once(tmp_path):
    fit(make_trainer(tmp_path), save_last_ckpt=True)
    names = sorted(path.name for path in (tmp_path / "ckpts").glob("step_*"))
    assert names == ["step_00000003", "step_00000006"]
    fit(make_trainer(tmp_path), save_last_ckpt=True)  # already finished: nothing is written
    assert sorted(path.name for path in (tmp_path / "ckpts").glob("step_*")) == names


@pytest.mark.parametrize(
    "how", ["fit", *(pytest.param(how, marks=pytest.mark.sweep) for how in ("save_ckpt", "load and save"))]
)
def test_more_epochs_are_trained_in_the_next_run(how, tmp_path):
    whole = make_trainer()
    fit(whole, 3)
    first = make_trainer(tmp_path)
    fit(first, 2, save_end=how == "fit")
    if how != "fit":
        first.save_ckpt()
    if how == "load and save":
        load(tmp_path).save_ckpt()
    again = make_trainer(tmp_path)
    fit(again, 3)
    assert again.step == 9
    assert bits((again.model, again.opt_state)) == bits((whole.model, whole.opt_state))


@pytest.mark.sweep
def test_one_pass_before_a_fit_does_not_hide_the_earlier_run(tmp_path):
    """A script that calls `train` before its `fit` still resumes the fit when it is started again."""

    def run(n_epochs):
        trainer = make_trainer(tmp_path)
        trainer.train(DATA, batch_size=BATCH)
        fit(trainer, n_epochs)
        return trainer

    run(1)
    again = run(2)
    assert again.step == 9  # three of `train`, six of the two epochs
    whole = make_trainer()
    whole.train(DATA, batch_size=BATCH)
    fit(whole, 2)
    assert bits(again.model) == bits(whole.model)


@pytest.mark.sweep
def test_a_run_that_starts_from_another_checkpoint_is_resumed(tmp_path):
    pretrained = make_trainer(tmp_path / "pretrained")
    fit(pretrained, 1, eval_examples=DATA[:5], save_argmin_ckpt_by_metrics=["loss"])

    def run(n_epochs):
        trainer = make_trainer(tmp_path / "tuned")
        trainer.load_ckpt(tmp_path / "pretrained/ckpts" / index(tmp_path / "pretrained")["last"])
        assert trainer.step == 3
        fit(trainer, n_epochs, eval_examples=DATA[:5], save_argmin_ckpt_by_metrics=["loss"])
        return trainer

    tuned = run(1)
    assert tuned.step == 6  # it trained its own epoch
    assert "argmin_loss" in index(tmp_path / "tuned")  # from this run, not from the other
    assert run(2).step == 9  # resumes this run, instead of starting again


# --- callbacks and trackers ---------------------------------------------------------------------------------------------


class SaveAt(redeqx.Callback):
    """Saves after a step."""

    def __init__(self, step):
        self.step, self.saved = step, None

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            self.saved = trainer.save_ckpt("hook").name


class LateSaveAt:
    """A tracker that saves when a step is logged. By then later steps have run, but their metrics have not been read."""

    def __init__(self, step):
        self.step, self.trainer = step, None

    def log(self, metrics, step):
        if step == self.step and "loss" in metrics:
            self.trainer.save_ckpt("hook")


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.sweep) for step in (1, 3, 6))])
def test_a_checkpoint_saved_by_a_callback_resumes_to_the_same_bits(step, tmp_path):
    hook, whole = SaveAt(step), make_trainer(tmp_path)
    fit(whole, save_end=False, callbacks=[hook])
    assert index(tmp_path)["last"] == hook.saved == f"step_{step:08d}"  # nothing was saved after it
    again = make_trainer(tmp_path)
    fit(again)
    assert again.step == whole.step == 6
    assert bits((again.model, again.opt_state)) == bits((whole.model, whole.opt_state))


def test_a_tracker_does_not_save_a_step_with_a_nonfinite_loss(tmp_path):
    examples = [*DATA[:16], *np.full((8, 6), np.nan, np.float32), *DATA[:8]]
    hook = LateSaveAt(2)  # by then step 3 has run, but its loss has not been read
    hook.trainer = trainer = make_trainer(tmp_path, loggers=[hook])
    with pytest.raises(ValueError, match="`loss` at step 3: expected the loss to be finite, got nan"):
        trainer.train(examples, batch_size=BATCH)
    assert not (tmp_path / "ckpts").exists()


def test_loading_and_fitting_inside_a_fit_are_refused(tmp_path):
    calls = {
        "load_ckpt": lambda trainer: trainer.load_ckpt(),
        "train": lambda trainer: trainer.train(DATA, batch_size=BATCH),
    }
    for name, call in calls.items():
        trainer = make_trainer(tmp_path / name)
        predictor = trainer.get_default_predictor(pred_fn)

        def metric_fn(examples, outputs, trainer=trainer, call=call):
            call(trainer)

        with pytest.raises(ValueError, match=f"`(fit`, `)?{name}`: expected"):
            fit(
                trainer, save_every_n_steps=1, eval_examples=DATA[:5], eval_every_n_steps=1,
                eval_predictor=predictor, eval_metric_fn=metric_fn, eval_sanity_check=False,
            )  # fmt: skip


def test_an_interrupted_fit_continues_in_the_same_process():
    class Interrupted(Exception):
        pass

    class Interrupts(redeqx.Callback):
        def on_step(self, trainer, metrics):
            if trainer.step == 4:
                raise Interrupted

    whole, trainer = make_trainer(), make_trainer()
    fit(whole)
    with pytest.raises(Interrupted):
        fit(trainer, callbacks=[Interrupts()])
    fit(trainer)
    assert trainer.step == 6
    assert bits((trainer.model, trainer.opt_state)) == bits((whole.model, whole.opt_state))
    fit(trainer, 1)  # the next fit is a new one
    assert trainer.step == 9


# --- data ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_epochs_of_a_function_may_differ_in_length(tmp_path):
    def curriculum(epoch):
        return DATA[: 8 * (epoch + 1)] if epoch < 2 else DATA

    trainer = make_trainer(tmp_path)
    trainer.fit(curriculum, batch_size=BATCH, n_epochs=3)
    assert trainer.step == 1 + 2 + 3
    whole = bits((trainer.model, trainer.opt_state))

    class Stop(Exception):
        pass

    class StopAt(redeqx.Callback):
        def __init__(self, step):
            self.step = step

        def on_step(self, trainer, metrics):
            if trainer.step == self.step:
                raise Stop

    def killed_after_save(workdir, at):
        options = {"save_every_n_steps": 1, "callbacks": [StopAt(at + 1)]}
        make_trainer(workdir).fit(curriculum, batch_size=BATCH, n_epochs=3, **options)

    for at in (1, 2, 4):  # at the end of an epoch, and within the others
        workdir = tmp_path / str(at)
        with pytest.raises(Stop):
            killed_after_save(workdir, at)
        again = make_trainer(workdir)
        again.fit(curriculum, batch_size=BATCH, n_epochs=3)
        assert bits((again.model, again.opt_state)) == whole

    again = make_trainer(tmp_path / "4")
    # The interrupted epoch must have the same length again. The checkpoint is that of step 4, in the third epoch.
    (workdir / "ckpts").rename(tmp_path / "kept")
    with pytest.raises(Stop):
        killed_after_save(workdir, 4)
    with pytest.raises(ValueError, match="`train_examples`: expected 24, as in the resumed run, got 19"):
        again.fit(lambda epoch: DATA[:19], batch_size=BATCH, n_epochs=3)


class OneAtATime:
    """A `collate_fn` that records its calls, and whether two ran at the same time."""

    def __init__(self):
        self.calls, self.lock, self.overlapped = [], threading.Lock(), False

    def __call__(self, examples):
        if not self.lock.acquire(blocking=False):
            self.overlapped = True
            return collate_fn(examples)
        try:
            time.sleep(0.002)
            self.calls.append(float(np.sum(examples)))
            return collate_fn(examples)
        finally:
            self.lock.release()


def test_collate_fn_is_called_by_one_thread_at_a_time_in_the_same_order():
    def run(delay):
        collate = OneAtATime()
        deployer = redeqx.Deployer(3, verbose=False)
        trainer = redeqx.Trainer(
            deployer, model=Reversed(jax.random.key(1)), optimizer=optax.sgd(0.1), collate_fn=collate, loss_fn=loss_fn
        )
        predictor = trainer.get_default_predictor(
            lambda model, batch, key: (time.sleep(delay), pred_fn(model, batch, key))[1]
        )

        def metric_fn(examples, outputs):
            time.sleep(delay)
            return {"n": len(outputs)}

        trainer.fit(
            np.concatenate([DATA] * 4), batch_size=8, n_epochs=2, eval_examples=DATA, eval_batch_size=8,
            eval_predictor=predictor, eval_metric_fn=metric_fn, eval_every_n_steps=2,
        )  # fmt: skip
        return collate

    first, second = run(0.0), run(0.02)
    assert not first.overlapped and not second.overlapped
    assert first.calls == second.calls


# --- schedules ----------------------------------------------------------------------------------------------------------


def test_the_logged_learning_rate_is_correct_after_skipped_steps():
    class Rates:
        def __init__(self):
            self.seen = {}

        def log(self, metrics, step):
            self.seen[step] = metrics["learning_rate"]

    schedule = optax.linear_schedule(1.0, 0.0, 10)
    rates = Rates()
    trainer = make_trainer(
        loggers=[rates], optimizer=optax.sgd(schedule), lr_schedule_fn=schedule, on_nonfinite="skip",
        loss_fn=lambda model, batch, key: jnp.where(batch.max() > 1e3, jnp.nan, 1.0) * model.first.bias.mean() * 8,
    )  # fmt: skip
    bad = np.full((8, 6), 1e4, np.float32)
    before = np.asarray(trainer.model.first.bias)[0]
    trainer.train(np.concatenate([DATA[:8], bad, DATA[:8], bad, DATA[:8]]), batch_size=8)
    assert trainer.n_skipped == 2
    np.testing.assert_allclose([rates.seen[step] for step in (1, 2, 3, 4, 5)], [1.0, 0.9, 0.9, 0.8, 0.8], rtol=1e-6)
    # Each update subtracts its logged learning rate from every bias.
    np.testing.assert_allclose(np.asarray(trainer.model.first.bias)[0], before - (1.0 + 0.9 + 0.8), rtol=1e-5)


def test_the_count_of_skipped_steps_continues_after_a_resume(tmp_path):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    bad = np.full((8, 6), np.nan, np.float32)
    kwargs = {"optimizer": optax.sgd(1e-3), "lr_schedule_fn": schedule, "on_nonfinite": "skip"}
    first = make_trainer(tmp_path, **kwargs)
    first.train(np.concatenate([DATA[:8], bad]), batch_size=8)
    first.save_ckpt()
    again = make_trainer(tmp_path, **kwargs)
    again.load_ckpt()
    assert again.train(DATA[:8], batch_size=8)["learning_rate"] == pytest.approx(0.9)


# --- two trainers of one deployer ---------------------------------------------------------------------------------------


def make_two(deployer):
    options = {"optimizer": optax.sgd(0.1), "collate_fn": collate_fn, "loss_fn": loss_fn}
    return [redeqx.Trainer(deployer, model=Reversed(jax.random.key(i)), **options) for i in range(2)]


def test_trainers_that_take_turns_do_not_mix_their_records(tmp_path):
    deployer = redeqx.Deployer(3, workdir=tmp_path, verbose=False)
    actor, critic = make_two(deployer)
    actor.update(DATA[:8])
    critic.update(DATA[:8])
    before = bits(actor.model)
    with pytest.raises(ValueError, match="`Trainer`: expected that one trainer of a name records after the other"):
        actor.update(DATA[:8])
    assert actor.step == 1 and bits(actor.model) == before  # before the step is computed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def make_actor_and_critic(workdir):
    deployer = redeqx.Deployer(3, workdir=workdir, verbose=False)
    options = {"optimizer": optax.adam(0.1), "collate_fn": collate_fn, "loss_fn": loss_fn}
    names = ("actor", "critic")
    return [redeqx.Trainer(deployer, model=Reversed(jax.random.key(i)), name=n, **options) for i, n in enumerate(names)]


def take_turns(actor, critic, until):
    while actor.step < until:
        critic.update(DATA[:8])
        if critic.step % 2 == 0:  # two updates of the critic for each of the actor
            actor.update(DATA[:8])


def test_trainers_with_names_take_turns_save_and_resume_in_one_workdir(tmp_path):
    whole = make_actor_and_critic(tmp_path / "whole")
    take_turns(*whole, until=4)

    stopped = make_actor_and_critic(tmp_path / "stopped")
    take_turns(*stopped, until=2)
    for trainer in stopped:
        assert trainer.save_ckpt().parent == tmp_path / "stopped" / "ckpts" / trainer.name
    take_turns(*stopped, until=3)  # lost

    again = make_actor_and_critic(tmp_path / "stopped")
    assert [trainer.resume() for trainer in again] == [2, 4]
    take_turns(*again, until=4)
    for resumed, trainer in zip(again, whole, strict=True):
        assert bits(resumed.model) == bits(trainer.model) and bits(resumed.opt_state) == bits(trainer.opt_state)
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "stopped")]
    assert sorted(rows[0]) == sorted(rows[1]) and len(rows[0]) == 12
    assert {name for row in rows[0] for name in json.loads(row)} >= {"actor/loss", "critic/grad_norm", "step"}


def test_a_trainer_with_a_name_keeps_the_records_of_one_without(tmp_path):
    """A teacher, and then a student, in one script; run again, as after a kill."""
    expected = [("eval_loss", step) for step in (3, 6)] + [("loss", step) for step in range(1, 7)]
    expected += [("student/loss", step) for step in (1, 2, 3)]
    for _ in range(2):
        deployer = redeqx.Deployer(3, workdir=tmp_path, verbose=False)
        options = {"optimizer": optax.adam(1e-2), "collate_fn": collate_fn, "loss_fn": loss_fn}
        teacher = redeqx.Trainer(deployer, model=Reversed(jax.random.key(1)), **options)
        fit(teacher, eval_examples=DATA[:8])
        fit(redeqx.Trainer(deployer, model=Reversed(jax.random.key(2)), name="student", **options), 1)
        rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert sorted((name, row["step"]) for row in rows for name in row if name.endswith("loss")) == expected


def test_a_name_is_an_identifier():
    for name in ("../critic", "step_00000001", "last"):
        with pytest.raises(ValueError, match=rf"`name`: expected an identifier .* got '{re.escape(name)}'"):
            make_trainer(name=name)


@pytest.mark.parametrize("workdirs", [(None, None), ("actor", "critic")])
def test_trainers_take_turns_with_workdirs_of_their_own_or_without_records(workdirs, tmp_path):
    if workdirs == (None, None):
        actor, critic = make_two(redeqx.Deployer(3, verbose=False))
    else:
        deployers = [redeqx.Deployer(3, workdir=tmp_path / name, verbose=False) for name in workdirs]
        actor, critic = make_two(deployers[0])[0], make_two(deployers[1])[1]
    for _ in range(3):
        actor.update(DATA[:8])
        critic.update(DATA[:8])
    assert (actor.step, critic.step) == (3, 3)
    for name, trainer in zip(workdirs, (actor, critic), strict=True):
        if name is not None:
            assert trainer.save_ckpt().parent.parent == tmp_path / name
            rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]


def test_trainers_one_after_the_other_record_in_one_workdir(tmp_path):
    pretrained, tuned = make_two(redeqx.Deployer(3, workdir=tmp_path, verbose=False))
    pretrained.train(DATA, batch_size=8)
    fit(tuned, 1)  # the one that saves
    tuned.train(DATA, batch_size=8)
    rows = [json.loads(row)["step"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[:3] == [1, 2, 3] and tuned.step == 6
    pretrained.eval_loss(DATA, batch_size=8)  # records nothing


@pytest.mark.parametrize("call", ["fit", "resume"])
def test_a_leaf_that_no_checkpoint_can_hold_raises_before_training(call, tmp_path):
    """It is frozen. The first save, after hours, would be too late."""

    class Coded(eqx.Module):
        codes: jax.Array
        net: Reversed

        def __call__(self, x):
            return self.net(x) * self.codes.astype(x.dtype).sum()

    model = Coded(jnp.ones(3, jnp.float8_e4m3b11fnuz), Reversed(jax.random.key(1)))
    trainer = make_trainer(tmp_path, model=model)
    with pytest.raises(TypeError, match=r"^`codes`: expected a dtype that safetensors has .*got float8_e4m3b11fnuz\. Cast"):
        fit(trainer) if call == "fit" else trainer.resume()
    assert trainer.step == 0
    fit(trainer, save_end=False)
    assert trainer.step == 6
