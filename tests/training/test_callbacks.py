"""Callbacks: call order, stopping, saving, weight averages, and callback state in resumed runs."""

import json
import os
import re
import signal
from typing import cast

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import redeqx
from redeqx.training._callbacks import Callbacks
from tests._processes import train

DATA = np.random.default_rng(0).normal(size=(22, 6)).astype(np.float32)  # three steps per epoch: 8, 8 and 6 examples


def loss_fn(model, batch, key):
    return ((jax.vmap(model)(batch[:, :5])[:, 0] - batch[:, 5]) ** 2).mean()


def make_trainer(workdir=None, *, optimizer=None, loggers=(), **kwargs):
    deployer = redeqx.Deployer(5, 2, 2, workdir=workdir, verbose=False, loggers=loggers)
    return redeqx.Trainer(
        deployer,
        model=eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)),
        optimizer=optimizer or optax.adam(1e-2),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        **kwargs,
    )


def fit(trainer, *callbacks, n_epochs=2, **kwargs):
    return trainer.fit(DATA, n_epochs=n_epochs, batch_size=8, callbacks=callbacks, **kwargs)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


class Killed(Exception):
    pass


class KillAt(redeqx.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            raise Killed


class RecordCalls(redeqx.Callback):
    """Records every call with its step and loss."""

    def __init__(self, calls, name="", every=1):
        self.calls, self.name, self.every = calls, name, every

    def record(self, what, trainer, loss=None):
        self.calls.append((self.name + what, trainer.step, loss))

    def on_fit_start(self, trainer):
        self.record("start", trainer)

    def on_step(self, trainer, metrics):
        self.record("step", trainer, metrics["loss"])

    def on_eval(self, trainer, metrics):
        self.record("eval", trainer, metrics["loss"])

    def on_epoch_end(self, trainer, metrics):
        self.record("epoch", trainer, metrics["loss"])

    def on_save(self, trainer, path):
        assert json.loads((path / "trainer.json").read_text())["step"] == trainer.step
        self.record(f"save {path.name}", trainer)

    def on_fit_end(self, trainer, metrics):
        self.record("end", trainer, metrics["loss"])


def losses(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_methods_are_called_in_order_once_metrics_are_known(tmp_path):
    calls = []
    metrics = fit(
        make_trainer(tmp_path), RecordCalls(calls, "a "), RecordCalls(calls, "b ", every=2),
        eval_examples=DATA[:5], eval_every_n_steps=2, save_every_n_steps=2,
    )  # fmt: skip
    assert [call[:2] for call in calls if call[0].startswith("a ")] == [
        ("a start", 0),
        ("a step", 1), ("a step", 2), ("a eval", 2), ("a save step_00000002", 2),
        ("a step", 3), ("a eval", 3), ("a epoch", 3),
        ("a step", 4), ("a eval", 4), ("a save step_00000004", 4),
        ("a step", 5), ("a step", 6), ("a eval", 6), ("a epoch", 6), ("a save step_00000006", 6),
        ("a end", 6),
    ]  # fmt: skip
    assert [call[1] for call in calls if call[0] == "b step"] == [2, 4, 6]
    assert [call[0] for call in calls[1:6]] == ["b start", "a step", "a step", "b step", "a eval"]
    assert {step: loss for name, step, loss in calls if name == "a step"} == losses(tmp_path)
    assert calls[-1] == ("b end", 6, metrics["loss"])


def test_metrics_are_read_two_steps_late_without_step_callbacks():
    """The loop keeps two steps queued unless a callback overrides `on_step`."""

    class OnlyFitEnd(redeqx.Callback):
        def on_fit_end(self, trainer, metrics):
            pass

    delays = {}

    class RecordDelays:
        def __init__(self):
            self.delays, self.trainer = [], None

        def log(self, metrics, step):
            self.delays.append(self.trainer.step - step)

    for name, callbacks in {"none": [], "end": [OnlyFitEnd()], "steps": [RecordCalls([])]}.items():
        log = RecordDelays()
        log.trainer = make_trainer(loggers=[log])
        fit(log.trainer, *callbacks)
        delays[name] = log.delays
    assert max(delays["none"]) == max(delays["end"]) == 2
    assert max(delays["steps"]) == 0


def test_callbacks_do_not_change_the_weights():
    plain, with_callback = make_trainer(), make_trainer()
    fit(plain)
    fit(with_callback, RecordCalls([]))
    assert bits((with_callback.model, with_callback.opt_state)) == bits((plain.model, plain.opt_state))


# --- stopping -----------------------------------------------------------------------------------------------------------


class StopAt(redeqx.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            trainer.stop()


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_stop_ends_the_fit_cleanly_and_the_next_run_resumes(step, tmp_path):
    calls, uninterrupted = [], make_trainer()
    fit(uninterrupted)
    trainer = make_trainer(tmp_path)
    metrics = fit(trainer, StopAt(step), RecordCalls(calls), eval_examples=DATA[:5])
    assert trainer.step == step
    assert [call[0] for call in calls][-3:] == ["eval", f"save step_0000000{step}", "end"] or step == 3
    assert metrics["loss"] == calls[-1][2]
    again = make_trainer(tmp_path)
    fit(again, StopAt(0), eval_examples=DATA[:5])
    assert again.step == 6
    assert bits((again.model, again.opt_state)) == bits((uninterrupted.model, uninterrupted.opt_state))


def test_stop_outside_fit_raises():
    with pytest.raises(ValueError, match="`stop`: expected inside `fit`, got called outside"):
        make_trainer().stop()


@pytest.mark.sweep
@pytest.mark.parametrize(("stopping_process", "step"), [(0, 4), (1, 14)])
def test_only_process_0_can_stop_a_fit(stopping_process, step, tmp_path):
    run = train(tmp_path, "--stop-at", 4, "--in", stopping_process, n_devices=2)
    assert run.code == 0, run.text
    index = json.loads((tmp_path / "ckpts/index.json").read_text())
    assert index["last"] == f"step_{step:08d}"


class ScriptedEvaluations:
    """Evaluations that return the given scores, one per epoch."""

    def __init__(self, *scores):
        self.scores = scores

    def fit(self, trainer, *callbacks, **kwargs):
        predictor = trainer.get_default_predictor(lambda model, batch, key: batch)
        return fit(
            trainer, *callbacks, n_epochs=len(self.scores), eval_examples=DATA[:5], eval_loss=False,
            eval_predictor=predictor, eval_metric_fn=lambda examples, outputs: {"score": self.scores[trainer.step // 3 - 1]},
            eval_sanity_check=False, **kwargs,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "options", "n_epochs"),
    [
        ((3.0, 2.0, 2.5, 2.1, 1.0), {}, 4),
        ((3.0, 2.0, 1.99, 1.98, 1.0), {"min_delta": 0.1}, 4),
        ((1.0, 2.0, 1.5, 2.5, 2.0), {"mode": "max"}, 5),
        ((float("nan"), float("nan"), 1.0), {}, 2),
    ],
)
def test_early_stopping_epochs(scores, options, n_epochs):
    trainer = make_trainer()
    assert ScriptedEvaluations(*scores).fit(trainer, redeqx.EarlyStopping("score", 2, **options)) == {
        "score": pytest.approx(scores[n_epochs - 1], nan_ok=True)
    }
    assert trainer.step == 3 * n_epochs


def test_early_stopping_resumes_and_does_not_retrain_a_stopped_run(tmp_path):
    scores = ScriptedEvaluations(3.0, 2.0, 2.5, 2.1, 1.0)
    with pytest.raises(Killed):
        scores.fit(make_trainer(tmp_path), redeqx.EarlyStopping("score", 2), KillAt(11), save_last_ckpt=True)
    trainer = make_trainer(tmp_path)
    stopping = redeqx.EarlyStopping("score", 2)
    scores.fit(trainer, stopping)
    assert trainer.step == 12
    again = make_trainer(tmp_path)
    assert scores.fit(again, redeqx.EarlyStopping("score", 2)) == {"score": 2.1}
    assert again.step == 12
    predictor = trainer.get_default_predictor(lambda model, batch, key: batch)
    trainer.fit(  # the next fit starts with fresh early stopping
        DATA, n_epochs=1, batch_size=8, callbacks=[stopping], eval_examples=DATA[:5], eval_predictor=predictor,
        eval_metric_fn=lambda examples, outputs: {"score": 5.0},
    )  # fmt: skip
    assert trainer.step == 15


def test_early_stopping_on_a_missing_metric_raises():
    with pytest.raises(ValueError, match=r"`EarlyStopping.metric`: expected one of \['loss'\], which the"):
        fit(make_trainer(), redeqx.EarlyStopping("score", 2), eval_examples=DATA[:5])


# --- saving -------------------------------------------------------------------------------------------------------------


def test_save_every_saves_after_the_given_minutes(tmp_path):
    calls = []
    fit(make_trainer(tmp_path), redeqx.SaveEvery(minutes=1e-9, every=2), RecordCalls(calls), save_end=False)
    assert [call[:2] for call in calls if call[0].startswith("save")] == [
        (f"save step_0000000{step}", step) for step in (2, 4, 6)
    ]
    calls.clear()
    fit(make_trainer(tmp_path / "never"), redeqx.SaveEvery(minutes=60), RecordCalls(calls), save_end=False)
    assert not [call for call in calls if call[0].startswith("save")]


def test_preemption_saves_and_raises_preempted(tmp_path):
    class SendSigterm(redeqx.Callback):
        def on_step(self, trainer, metrics):
            if trainer.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(tmp_path)
    with pytest.raises(redeqx.Preempted) as caught:
        fit(trainer, SendSigterm())
    assert (caught.value.code, caught.value.step, trainer.step) == (75, 2, 2)


# --- state --------------------------------------------------------------------------------------------------------------


class CountSteps(redeqx.Callback):
    """A callback whose state holds numbers and arrays."""

    def __init__(self):
        self.n, self.sums, self.loaded = 0, np.zeros((3,), np.float64), False

    def on_step(self, trainer, metrics):
        self.n += 1
        self.sums = self.sums + np.array([1.0, metrics["loss"], metrics["grad_norm"]])

    def state(self):
        return {"n": self.n, "sums": self.sums, "on.device": jax.numpy.full((2, 2), self.n, "bfloat16")}

    def load_state(self, state):
        self.n, self.sums, self.loaded = state["n"], state["sums"], True
        assert (state["on.device"] == np.full((2, 2), self.n)).all() and state["on.device"].dtype == "bfloat16"


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.sweep) for step in (1, 5))])
def test_callback_state_resumes_exactly(step, tmp_path):
    uninterrupted, again = CountSteps(), CountSteps()
    fit(make_trainer(tmp_path / "whole"), uninterrupted, save_every_n_steps=1)
    with pytest.raises(Killed):
        fit(make_trainer(tmp_path / "killed"), CountSteps(), KillAt(step + 1), save_every_n_steps=1)
    fit(make_trainer(tmp_path / "killed"), again)
    assert again.loaded
    assert again.n == uninterrupted.n == 6
    assert again.sums.tobytes() == uninterrupted.sums.tobytes()
    other, new = CountSteps(), CountSteps()
    fit(make_trainer(tmp_path / "killed"), redeqx.Callback(), other, new, n_epochs=3)  # the first one of the class resumes
    assert (other.loaded, other.n, new.loaded, new.n) == (True, 9, False, 3)


# --- averages -----------------------------------------------------------------------------------------------------------


def exponential_average(decay, models):
    average = models[0]
    for model in models[1:]:
        average = [decay * a + (1 - decay) * x for a, x in zip(average, model, strict=True)]
    return average


def arrays(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


class RecordModels(redeqx.Callback):
    def __init__(self):
        self.seen = []

    def on_fit_start(self, trainer):
        self.seen.append(arrays(trainer.model))

    def on_step(self, trainer, metrics):
        self.seen.append(arrays(trainer.model))


def test_ema_averages_the_weights_and_is_evaluated_and_saved(tmp_path):
    trainer, ema, models = make_trainer(tmp_path), redeqx.EMA(0.9), RecordModels()
    metrics = fit(trainer, ema, models, eval_examples=DATA[:5], save_argmin_ckpt_by_metrics=["ema_loss"])
    expected = exponential_average(0.9, models.seen)
    for actual, leaf in zip(arrays(ema.model), expected, strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)
    assert metrics.keys() == {"loss", "ema_loss"}
    assert metrics["ema_loss"] == trainer.eval_loss(DATA[:5], batch_size=8, model=ema.model) != metrics["loss"]
    index = json.loads((tmp_path / "ckpts/index.json").read_text())
    assert "argmin_ema_loss" in index
    saved = load_file(tmp_path / "ckpts" / index["last"] / "ema.safetensors")
    assert {name: leaf.tobytes() for name, leaf in saved.items()}.keys() == load_file(
        tmp_path / "ckpts" / index["last"] / "model.safetensors"
    ).keys()
    assert sorted(leaf.tobytes() for leaf in saved.values()) == sorted(bits(ema.model))
    # The average is sharded like the weights.
    assert ema.model.layers[0].weight.sharding == trainer.model.layers[0].weight.sharding


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_ema_resumes_exactly(step, tmp_path):
    uninterrupted, ema = make_trainer(tmp_path / "whole"), redeqx.EMA(0.9)
    fit(uninterrupted, ema, eval_examples=DATA[:5])
    with pytest.raises(Killed):
        killed = make_trainer(tmp_path / "killed")
        fit(killed, redeqx.EMA(0.9), KillAt(step + 1), eval_examples=DATA[:5], save_every_n_steps=1)
    trainer, again = make_trainer(tmp_path / "killed"), redeqx.EMA(0.9)
    fit(trainer, again, eval_examples=DATA[:5])
    assert bits(again.model) == bits(ema.model)
    assert bits((trainer.model, trainer.opt_state)) == bits((uninterrupted.model, uninterrupted.opt_state))
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_average_of_bfloat16_weights_is_kept_in_float32():
    """In bfloat16 a decay of 0.999 is 1: the average would stay where it began."""
    ema, deployer = redeqx.EMA(0.999), redeqx.Deployer(verbose=False)
    trainer = redeqx.Trainer(
        deployer, model={"w": jax.numpy.ones(8, jax.numpy.bfloat16)}, optimizer=optax.sgd(1.0), collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (model["w"].astype(np.float32) ** 2).sum() / 2 + 0 * batch.sum(),
    )  # fmt: skip
    trainer.fit(DATA, batch_size=8, max_steps=20, callbacks=[ema])
    assert not np.any(trainer.model["w"])  # from the first step on
    np.testing.assert_allclose(np.asarray(ema.model["w"], np.float32), 0.999**20, rtol=2**-8)


def test_ema_starts_from_trained_weights_and_continues_in_the_next_fit():
    trainer, ema, models = make_trainer(), redeqx.EMA(0.5), RecordModels()
    trainer.train(DATA, batch_size=8)
    for _ in range(2):
        fit(trainer, ema, models, n_epochs=1)
    assert len(models.seen) == 8  # the fourth and fifth are identical
    expected = exponential_average(0.5, [*models.seen[:4], *models.seen[5:]])
    for actual, leaf in zip(arrays(ema.model), expected, strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)
    plain = make_trainer()
    plain.train(DATA, batch_size=8)
    for _ in range(2):
        fit(plain, n_epochs=1)
    for actual, leaf in zip(arrays(trainer.model), arrays(plain.model), strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=1e-6, atol=1e-7)


def test_ema_can_be_added_when_resuming(tmp_path):
    """The average starts from the checkpoint's weights, also after a custom training loop."""
    custom_loop = make_trainer(tmp_path)
    for i in range(2):
        custom_loop.update(DATA[8 * i : 8 * i + 8])
    custom_loop.save_ckpt("plain")
    slow, fast, models = redeqx.EMA(0.9, name="slow"), redeqx.EMA(0.5, name="fast"), RecordModels()
    fit(custom_loop, slow, models, max_steps=4)
    for actual, leaf in zip(arrays(slow.model), exponential_average(0.9, models.seen), strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)
    again, more = make_trainer(tmp_path), RecordModels()
    fit(again, slow, fast, more, max_steps=6)
    assert again.step == 2 + 6  # updates before the fit do not count towards `max_steps`
    for actual, leaf in zip(arrays(slow.model), exponential_average(0.9, [*models.seen, *more.seen[1:]]), strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)
    for actual, leaf in zip(arrays(fast.model), exponential_average(0.5, more.seen), strict=True):
        np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)
    again.load_ckpt("plain")  # the checkpoint has no average, the trainer has two
    assert again.step == 2
    fit(again, slow, fast, max_steps=3)


def test_ema_can_be_removed_when_resuming(tmp_path):
    plain = make_trainer()
    fit(plain, max_steps=4)
    fit(make_trainer(tmp_path), redeqx.EMA(0.9), redeqx.EMA(0.5, name="fast"), max_steps=2)
    loaded, resumed = make_trainer(tmp_path), make_trainer(tmp_path)
    loaded.load_ckpt()
    assert loaded.step == 2 and jax.tree.structure(loaded.opt_state) == jax.tree.structure(plain.opt_state)
    fit(resumed, max_steps=4)
    assert bits((resumed.model, resumed.opt_state)) == bits((plain.model, plain.opt_state))


def test_averages_are_matched_by_name_when_resuming(tmp_path):
    def make_averages():
        return redeqx.EMA(0.9, name="a"), redeqx.EMA(0.5, name="b")

    plain = make_trainer()
    fit(plain, *make_averages(), max_steps=2)
    for kept in ("ab", "ba", "a", "b", "bc"):
        workdir, (a, b) = tmp_path / kept, make_averages()
        fit(make_trainer(workdir), a, b, max_steps=2)
        expected = {"a": bits(a.model), "b": bits(b.model)}
        new = {"a": redeqx.EMA(0.9, name="a"), "b": redeqx.EMA(0.5, name="b"), "c": redeqx.EMA(0.5, name="c")}
        again, seen = make_trainer(workdir), {}

        class RecordAverages(redeqx.Callback):
            def on_fit_start(self, trainer, seen=seen, new=new, kept=kept):
                seen.update({name: bits(new[name].model) for name in kept})

        fit(again, *(new[name] for name in kept), RecordAverages(), max_steps=3)
        assert {name: seen[name] for name in kept if name in expected} == {
            name: model for name, model in expected.items() if name in kept
        }


def test_finished_fit_passes_its_average_on_when_rerun(tmp_path):
    def script(workdir, *callbacks):
        trainer, ema = make_trainer(workdir), redeqx.EMA(0.9)
        fit(trainer, n_epochs=1)
        fit(trainer, ema, *callbacks, n_epochs=2, save_every_n_steps=1)
        return bits((ema.model, trainer.model, trainer.opt_state))

    uninterrupted = script(tmp_path / "whole")
    with pytest.raises(Killed):
        script(tmp_path / "killed", KillAt(6))
    assert script(tmp_path / "killed") == uninterrupted


def test_loading_an_incompatible_checkpoint_leaves_the_average_unchanged(tmp_path):
    other = redeqx.Trainer(
        redeqx.Deployer(workdir=tmp_path / "other", verbose=False),
        model=eqx.nn.MLP(5, 1, 8, 1, key=jax.random.key(1)),
        optimizer=optax.adam(1e-2),
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )
    path = other.save_ckpt()
    trainer, ema = make_trainer(tmp_path / "own"), redeqx.EMA(0.9)
    fit(trainer, ema)
    before = bits((trainer.model, trainer.opt_state, ema.model))
    with pytest.raises(ValueError, match="differ"):
        trainer.load_ckpt(path)
    assert bits((trainer.model, trainer.opt_state, ema.model)) == before


def test_checkpoint_saved_after_the_fit_contains_the_average(tmp_path):
    trainer, ema = make_trainer(tmp_path), redeqx.EMA(0.9)
    fit(trainer, ema)
    trainer.save_ckpt("final")
    assert bits(redeqx.load(tmp_path / "ckpts/final", like=trainer.model, kind="ema")) == bits(ema.model)


def test_two_averages_with_the_same_name_raise():
    expected_message = r"`callbacks`: expected averages with names of their own, got 'ema' twice\. Pass `EMA\(name='slow'\)`"
    with pytest.raises(ValueError, match=expected_message):
        fit(make_trainer(), redeqx.EMA(0.9), redeqx.EMA(0.5))


def test_interrupted_fit_continues_in_the_same_process_with_its_callback_state():
    trainer, counts = make_trainer(), CountSteps()
    with pytest.raises(Killed):
        fit(trainer, counts, KillAt(4))
    fit(trainer, counts)
    assert counts.n == 6


def test_averages_ignore_skipped_steps():
    trainer = make_trainer(on_nonfinite="skip")
    slow, fast, models = redeqx.EMA(0.9, name="slow"), redeqx.EMA(0.5, name="fast"), RecordModels()
    examples = np.concatenate([DATA[:16], np.full((1, 6), np.nan, np.float32)])  # one of three steps is non-finite
    trainer.fit(examples, batch_size=8, callbacks=[slow, fast, models])
    assert trainer.n_skipped == 1
    pairs = zip(models.seen, models.seen[1:], strict=False)
    kept = [models.seen[0], *(after for before, after in pairs if not np.array_equal(before[0], after[0]))]
    assert len(kept) == 3
    for ema in (slow, fast):
        for actual, leaf in zip(arrays(ema.model), exponential_average(ema.decay, kept), strict=True):
            np.testing.assert_allclose(actual, leaf, rtol=2e-5, atol=1e-7)


# --- profiles -----------------------------------------------------------------------------------------------------------


def test_profile_writes_a_trace_and_a_table(tmp_path):
    trainer = make_trainer(tmp_path)
    assert trainer.compiled_step is None
    fit(trainer, redeqx.Profile(range(3, 5)))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    (table,) = (tmp_path / "profile").rglob("profile.txt")
    header, *rows, total = table.read_text().splitlines()
    assert header.split() == ["time", "share", "times", "kind", "operation", "line"] and len(rows) == 10
    assert total.startswith("of ") and total.endswith("; a device's mean over 8")
    assert any(re.search(r"\.py:\d+$", row) for row in rows)
    with pytest.raises(Killed):  # the trace is stopped anyway
        fit(make_trainer(tmp_path / "killed"), redeqx.Profile(range(1, 5)), KillAt(2))
    jax.profiler.start_trace(str(tmp_path / "own"))
    jax.profiler.stop_trace()


# --- invalid arguments --------------------------------------------------------------------------------------------------


class NeverStops(redeqx.Callback):
    every = 0


INVALID_ARGUMENTS = {
    "`callbacks[0]`: expected a `redeqx.Callback`, got the class Callback. Pass an": (
        lambda: fit(make_trainer(), redeqx.Callback),
        TypeError,
    ),
    "`callbacks`: expected a list, got Callback. Write [callback].": (
        lambda: Callbacks.check(redeqx.Callback()),
        TypeError,
    ),
    "`callbacks[0].every`: expected at least 1, got 0.": (lambda: fit(make_trainer(), NeverStops()), ValueError),
    "`patience`: expected at least 1, got 0.": (lambda: redeqx.EarlyStopping("loss", 0), ValueError),
    "`mode`: expected 'min' or 'max', got 'most'.": (lambda: redeqx.EarlyStopping("loss", 1, "most"), ValueError),
    "`min_delta`: expected a number of at least 0, got -1.0.": (
        lambda: redeqx.EarlyStopping("loss", 1, min_delta=-1.0),
        ValueError,
    ),
    "`minutes`: expected a number above 0, got 0.": (lambda: redeqx.SaveEvery(0), ValueError),
    "`SaveEvery`: expected a `workdir` to write to, got None.": (
        lambda: fit(make_trainer(), redeqx.SaveEvery(1)),
        ValueError,
    ),
    "`Profile.steps`: expected a range of steps from 1 on, got range(0, 3).": (
        lambda: redeqx.Profile(range(3)),
        ValueError,
    ),
    "`Profile`: expected a `workdir` to write to, got None.": (
        lambda: fit(make_trainer(), redeqx.Profile(range(1, 3))),
        ValueError,
    ),
    "`min_delta`: expected a number of at least 0, got 'a'.": (
        lambda: redeqx.EarlyStopping("loss", 1, min_delta=cast(float, "a")),
        TypeError,
    ),
    "`minutes`: expected a number above 0, got '3'.": (lambda: redeqx.SaveEvery(cast(float, "3")), TypeError),
    "`decay`: expected a number from 0 to below 1, got 1.0.": (lambda: redeqx.EMA(1.0), ValueError),
    "`decay`: expected a number from 0 to below 1, got 'ema'.": (lambda: redeqx.EMA(cast(float, "ema")), TypeError),
    "`name`: expected an identifier that names no other file, got 'model'.": (
        lambda: redeqx.EMA(name="model"),
        ValueError,
    ),
    "`EMA.model`: expected a fit that has started, got none.": (lambda: redeqx.EMA().model, ValueError),
    "`model`: `layers.0.weight`: expected shape (16, 5), as in the trained model, got shape (8, 5).": (
        lambda: make_trainer().eval_loss(DATA, 1, model=eqx.nn.MLP(5, 1, 8, 1, key=jax.random.key(0))),
        ValueError,
    ),
    "`max_steps`: expected at least 1 or None, got 0.": (lambda: fit(make_trainer(), max_steps=0), ValueError),
    "`fit(callback=)`: expected an argument of redeqx, got an unknown one. Did you mean `callbacks`?": (
        lambda: make_trainer().fit(DATA, 1, callback=[]),
        TypeError,
    ),
    "`fit`: expected only `train_examples`, `per_device_batch_size`, `n_epochs` without a name, got 4 such arguments.": (
        lambda: make_trainer().fit(DATA, 1, 1, DATA),
        TypeError,
    ),
    "`examples`: expected `len()` and integer items, got": (lambda: make_trainer().update(iter(DATA)), TypeError),
}


@pytest.mark.parametrize("expected", INVALID_ARGUMENTS)
def test_invalid_arguments_raise(expected):
    make, kind = INVALID_ARGUMENTS[expected]
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value).startswith(expected)


# --- failing callbacks and models of callbacks --------------------------------------------------------------------------


class Failing(redeqx.Callback):
    """Raises in the given methods and records whether it was closed."""

    def __init__(self, *methods):
        self.methods, self.is_closed = methods, False

    def on_step(self, trainer, metrics):
        if "on_step" in self.methods:
            raise Killed

    def close(self):
        self.is_closed = True
        if "close" in self.methods:
            raise RuntimeError("close")


def test_failing_close_keeps_the_first_error_and_closes_the_other_callbacks():
    first, second = Failing("close"), Failing("on_step")
    with pytest.raises(Killed) as raised:
        fit(make_trainer(), first, second)
    assert raised.value.__notes__ == ["A callback's `close` failed after it: RuntimeError: close"]
    assert first.is_closed and second.is_closed
    with pytest.raises(RuntimeError, match="close"):
        fit(make_trainer(), Failing("close"))


def test_early_stopping_without_evaluation_raises():
    with pytest.raises(ValueError, match="`eval_examples`: expected examples and something to evaluate, got none"):
        fit(make_trainer(), redeqx.EarlyStopping("loss", 2))


class ModelCreatedAtStart(redeqx.Callback):
    """Creates its own model when the fit starts."""

    def on_fit_start(self, trainer):
        self.model = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, trainer.model)

    def models(self, trainer):
        return {"zeros": self.model}


def test_callback_can_create_its_model_at_fit_start():
    actual = fit(make_trainer(), ModelCreatedAtStart(), n_epochs=1, eval_examples=DATA[:5])
    assert actual["zeros_loss"] == pytest.approx(float((DATA[:5, 5] ** 2).mean()), rel=1e-5)


def test_average_of_a_fit_completed_in_an_earlier_run_is_available(tmp_path):
    def run(max_steps):
        ema, trainer = redeqx.EMA(0.5), make_trainer(tmp_path)
        fit(trainer, ema, n_epochs=1)
        seen = bits(ema.model)
        fit(trainer, ema, max_steps=max_steps)
        return seen, bits(ema.model)

    run(2)
    seen, after = run(4)
    assert len(seen) == len(after) and seen != after


def test_average_restarts_from_loaded_weights(tmp_path):
    trainer, ema = make_trainer(tmp_path, optimizer=optax.sgd(0.1)), redeqx.EMA(0.9)
    fit(trainer, n_epochs=1, max_steps=1)
    first = trainer.save_ckpt("first")
    fit(trainer, ema)
    assert bits(ema.model) != bits(trainer.model)
    trainer.load_ckpt(first, load_opt_states=False)
    assert bits(ema.model) == bits(trainer.model)
    fit(trainer, ema, max_steps=1)  # a step donates the buffers of the weights and the average
    assert bits(ema.model) != bits(trainer.model)
