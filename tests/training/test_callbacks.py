"""Callbacks: call order, stopping, saving, and callback state in resumed runs."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import cast

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx

DATA = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)  # three steps per epoch, of one program


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
        ("a step", 1), ("a eval", 2), ("a step", 2), ("a save step_00000002", 2),
        ("a step", 3), ("a eval", 3), ("a epoch", 3),
        ("a eval", 4), ("a step", 4), ("a save step_00000004", 4),
        ("a step", 5), ("a step", 6), ("a eval", 6), ("a epoch", 6), ("a save step_00000006", 6),
        ("a end", 6),
    ]  # fmt: skip
    assert [call[1] for call in calls if call[0] == "b step"] == [2, 4, 6]
    assert [call[0] for call in calls[1:7]] == ["b start", "a step", "a eval", "b eval", "a step", "b step"]
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


@pytest.mark.sweep
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


@pytest.mark.parametrize(("metric", "mode", "expected"), [("loss", "min", (0.3, 1)), ("score", "max", (None, 0))])
def test_early_stopping_takes_over_the_state_of_its_own_metric_alone(metric, mode, expected):
    """Of a resumed run, whose script has stopped by another one."""
    before, stopping = redeqx.EarlyStopping("loss", 2), redeqx.EarlyStopping(metric, 2, mode)
    before.best, before.n_worse = 0.3, 1
    stopping.load_state(before.state())
    assert (stopping.best, stopping.n_worse) == expected


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


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class TakeTime(redeqx.Callback):
    """A step takes a second, and more while a checkpoint is written, which lasts for one step."""

    def __init__(self, clock, saving, save_every):
        self.clock, self.saving, self.save_every, self.saved = clock, saving, save_every, []

    def on_fit_start(self, trainer):
        save = trainer.save_ckpt

        def save_and_note(**kwargs):
            self.saved.append(trainer.step)
            return save(**kwargs)

        trainer.save_ckpt = save_and_note

    def on_step(self, trainer, metrics):
        self.clock.now += 1 + self.saving * (self.saved[-1:] == [trainer.step - 1])
        while self.save_every.is_saving:
            time.sleep(0.001)


# A save that costs 0.5 s may be repeated after 25 s, as 2 % of them are 0.5 s: the step after the save takes 1.5 s, the
# next 24 end at 25.5 s. The first step compiles, so the second is the first whose time is known.
@pytest.mark.parametrize(
    ("saving", "n_epochs", "saved"), [(0.0, 4, [*range(2, 13)]), (0.5, 20, [2, 27, 52])], ids=["free", "costly"]
)
def test_always_saves_as_often_as_it_costs_little(saving, n_epochs, saved, monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    always = redeqx.SaveEvery("always", every=1, keep_last=100)
    fit(make_trainer(tmp_path), take_time := TakeTime(clock, saving, always), always, n_epochs=n_epochs, keep_last=100)
    assert take_time.saved == saved and not always.is_saving
    names = {path.name for path in (tmp_path / "ckpts").glob("step_*")}
    assert names > {f"step_{step:08}" for step in saved}  # and that of the end of the fit


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


@pytest.mark.parametrize(
    ("state", "got"), [([1.0], r"\[1.0\]"), ({"n": {1}}, "Object of type set"), ({"n": {1: 2}}, "the key 1")]
)
def test_a_callback_state_that_a_checkpoint_cannot_hold_is_named(state, got, tmp_path):
    class Keeps(redeqx.Callback):
        def state(self):
            return state

    with pytest.raises(TypeError, match=rf"`Keeps_0.state`: expected a dict of arrays, and .*, got {got}"):
        fit(make_trainer(tmp_path), redeqx.Callback(), Keeps())


def test_interrupted_fit_continues_in_the_same_process_with_its_callback_state():
    trainer, counts = make_trainer(), CountSteps()
    with pytest.raises(Killed):
        fit(trainer, counts, KillAt(4))
    fit(trainer, counts)
    assert counts.n == 6


# --- profiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
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
        lambda: make_trainer().fit(DATA, 1, callbacks=redeqx.Callback()),
        TypeError,
    ),
    "`callbacks[0].every`: expected at least 1, got 0.": (lambda: fit(make_trainer(), NeverStops()), ValueError),
    "`patience`: expected at least 1, got 0.": (lambda: redeqx.EarlyStopping("loss", 0), ValueError),
    "`mode`: expected 'min' or 'max', got 'most'.": (lambda: redeqx.EarlyStopping("loss", 1, "most"), ValueError),
    "`min_delta`: expected a number of at least 0, got -1.0.": (
        lambda: redeqx.EarlyStopping("loss", 1, min_delta=-1.0),
        ValueError,
    ),
    "`minutes`: expected a number above 0, or 'always', got 0.": (lambda: redeqx.SaveEvery(0), ValueError),
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
    "`minutes`: expected a number above 0, or 'always', got '3'.": (lambda: redeqx.SaveEvery(cast(float, "3")), TypeError),
    "`model`: `layers.0.weight`: expected shape (16, 5), as in the trained model, got shape (8, 5).": (
        lambda: make_trainer().eval_loss(DATA, 1, model=eqx.nn.MLP(5, 1, 8, 1, key=jax.random.key(0))),
        ValueError,
    ),
    "`max_steps`: expected at least 1 or None, got 0.": (lambda: fit(make_trainer(), max_steps=0), ValueError),
    "`then`: expected a function of `(path)`, got 3.": (lambda: make_trainer().save_ckpt(then=cast(Callable, 3)), TypeError),
    "`fit`: expected the arguments `(train_examples, per_device_batch_size, n_epochs, *, max_steps, ": (
        lambda: make_trainer().fit(DATA, 1, callback=[]),
        TypeError,
    ),
    "`fit`: expected the arguments `(train_examples, per_device_batch_size, n_epochs, *, max_steps, batch_size, ": (
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


# --- failing callbacks --------------------------------------------------------------------------------------------------


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


# --- what saves mean for the fit around them -----------------------------------------------------------------------------


def index(workdir):
    return json.loads((workdir / "ckpts" / "index.json").read_text())


def record(workdir, name):
    return json.loads((workdir / "ckpts" / name / "trainer.json").read_text())


class SaveAtEpochs(redeqx.Callback):
    """Saves at the end of each epoch, and records that it was called."""

    def __init__(self, name="own", **options):
        self.name, self.options, self.called = name, options, []

    def on_epoch_end(self, trainer, metrics):
        self.called.append(trainer.step)
        trainer.save_ckpt(self.name, **self.options)


def test_a_run_resumes_from_its_newest_full_checkpoint_whatever_exports_follow(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.resume()
    trainer.update(DATA[:8])
    trainer.save_ckpt()
    expected = bits(trainer.model)
    for step in (2, 3, 4):
        trainer.update(DATA[:8])
        trainer.save_ckpt(f"export_{step}", save_opt_states=False)
    again = make_trainer(tmp_path)
    assert again.resume() == 1 and bits(again.model) == expected
    assert index(tmp_path)["last"] == "step_00000004"
    again.load_ckpt("last", load_opt_states=False)
    assert bits(again.model) == bits(trainer.model)


def test_a_run_does_not_resume_from_weights_that_were_cast_to_be_exported(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.resume()
    trainer.update(DATA[:8])
    trainer.save_ckpt()
    trainer.update(DATA[:8])
    trainer.save_ckpt("half", save_float_dtype="bfloat16")
    assert make_trainer(tmp_path).resume() == 1


def test_an_export_at_the_last_step_does_not_take_the_place_of_the_final_save(tmp_path):
    fit(make_trainer(tmp_path), SaveAtEpochs("export", save_opt_states=False))
    again = make_trainer(tmp_path)
    fit(again, SaveAtEpochs("export", save_opt_states=False), n_epochs=3)
    assert again.step == 9


@pytest.mark.parametrize("how", ["max_steps", "stop"])
def test_the_end_of_an_epoch_is_called_when_the_fit_ends_there(how, tmp_path):
    saving = SaveAtEpochs()
    ends = {"max_steps": 3} if how == "max_steps" else {}
    stops = [StopAt(3)] if how == "stop" else []
    fit(make_trainer(tmp_path), saving, *stops, save_ckpt_every_k_epochs=1, **ends)
    assert saving.called == [3] and index(tmp_path)["epoch_1"].startswith("step_00000003")


def test_each_fit_keeps_the_checkpoints_of_its_own_epochs(tmp_path):
    trainer = make_trainer(tmp_path)
    for _ in range(2):
        fit(trainer, save_ckpt_every_k_epochs=1)
    steps = {name: int(folder[5:13]) for name, folder in index(tmp_path).items()}
    assert steps == {"epoch_1": 3, "epoch_2": 6, "fit_2_epoch_1": 9, "fit_2_epoch_2": 12, "last": 12}


class SaveOnEval(redeqx.Callback):
    """Saves after each evaluation, and ends the process as a kill would right after the save of a step."""

    def __init__(self, kill_at):
        self.kill_at = kill_at

    def on_eval(self, trainer, metrics):
        trainer.save_ckpt("mine")
        if trainer.step == self.kill_at:
            raise Killed


def test_the_best_checkpoint_is_named_by_the_first_save_that_knows_it(tmp_path):
    with pytest.raises(Killed):
        fit(make_trainer(tmp_path), SaveOnEval(6), eval_examples=DATA, save_argmin_ckpt_by_metrics=["loss"])
    best = record(tmp_path, index(tmp_path)["last"])["best"]["argmin_loss"]
    assert best["step"] == int(index(tmp_path)["argmin_loss"][5:13]) == 6


def test_a_checkpoint_has_the_metrics_of_its_own_step_and_a_done_fit_returns_the_newest(tmp_path):
    options = {"eval_examples": DATA, "eval_every_n_steps": 2, "save_every_n_steps": 1, "keep_last": 9}
    trainer = make_trainer(tmp_path)
    result = fit(trainer, SaveAtEpochs(keep_last=9), n_epochs=1, **options)
    assert [bool(record(tmp_path, f"step_{step:08d}")["metrics"]) for step in (1, 2, 3)] == [False, True, True]
    assert record(tmp_path, "step_00000001")["evaluation"] == {"step": 0, "metrics": {}}
    assert fit(make_trainer(tmp_path), SaveAtEpochs(keep_last=9), n_epochs=1, **options) == result
    assert result["loss"] == record(tmp_path, index(tmp_path)["last"])["metrics"]["loss"]


@pytest.mark.parametrize(("of_fit", "of_callback"), [(5, 2), (2, 5)])
def test_a_save_in_a_fit_keeps_what_another_one_keeps(of_fit, of_callback, tmp_path):
    fit(make_trainer(tmp_path), SaveAtEpochs(keep_last=of_callback), save_every_n_steps=1, keep_last=of_fit)
    assert {int(path.name[5:13]) for path in (tmp_path / "ckpts").glob("step_*")} == {2, 3, 4, 5, 6}


def test_a_save_after_a_fit_keeps_what_the_fit_kept(tmp_path):
    trainer = make_trainer(tmp_path)
    fit(trainer, save_every_n_steps=1, keep_last=5)
    kept = lambda: {int(path.name[5:13]) for path in (tmp_path / "ckpts").glob("step_*")}  # noqa: E731
    trainer.save_ckpt("final")
    assert kept() == {2, 3, 4, 5, 6}
    trainer.save_ckpt("final", keep_last=1)  # as asked for
    assert kept() == {6}


def test_a_checkpoint_is_not_loaded_inside_a_fit(tmp_path):
    class Load(redeqx.Callback):
        def on_epoch_end(self, trainer, metrics):
            trainer.load_ckpt("epoch_1")

    with pytest.raises(ValueError, match="`load_ckpt`: expected after `fit` or `train`, got called inside it"):
        fit(make_trainer(tmp_path), Load(), save_ckpt_every_k_epochs=1)


def test_stop_in_the_check_before_training_does_not_end_the_fit():
    trainer = make_trainer()

    def stop_if_good(examples, outputs):
        if len(outputs):
            trainer.stop()
        return {"score": 1.0}

    predictor = trainer.get_default_predictor(lambda model, batch, key: batch)
    fit(trainer, eval_examples=DATA, eval_predictor=predictor, eval_metric_fn=stop_if_good, n_epochs=3)
    assert trainer.step == 3  # the first epoch, after which all examples are evaluated


def test_an_error_of_a_fit_is_not_replaced_by_that_of_a_callback_state():
    class Bad(redeqx.Callback):
        def on_step(self, trainer, metrics):
            raise Killed

        def state(self):
            raise RuntimeError("no state")

    with pytest.raises(Killed) as error:
        fit(make_trainer(), Bad())
    assert error.value.__notes__ == ["A callback's `state` failed after it: RuntimeError: no state"]


def two_fits(workdir, n_between=0):
    """Two fits with an evaluation each, updates between them, and the results of both."""
    trainer = make_trainer(workdir)
    first = trainer.fit(DATA, batch_size=8, n_epochs=1, eval_examples=DATA[:8])
    for _ in range(n_between):
        trainer.update(DATA[:8])
    return trainer, first, trainer.fit(DATA, batch_size=8, n_epochs=1, eval_examples=DATA[8:])


def test_each_fit_of_a_finished_script_returns_its_own_metrics_again(tmp_path, capsys):
    _, *results = two_fits(tmp_path)
    again, *found = two_fits(tmp_path)
    assert found == results and results[0] != results[1] and again.step == 6


def test_a_checkpoint_loaded_between_fits_keeps_what_the_first_one_returned(tmp_path):
    def script():
        trainer = make_trainer(tmp_path)
        options = {"save_argmin_ckpt_by_metrics": ["loss"], "eval_every_n_steps": 1}
        first = trainer.fit(DATA, batch_size=8, n_epochs=2, eval_examples=DATA[:8], **options)
        trainer.load_ckpt("argmin_loss")
        return first, trainer.fit(DATA, batch_size=8, n_epochs=3, eval_examples=DATA[8:])

    first, again = script(), script()
    assert again[0] == first[0] != first[1]


def test_updates_between_fits_that_a_run_has_taken_already_are_named(tmp_path):
    two_fits(tmp_path, 2)
    with pytest.warns(UserWarning, match=r"expected an update before fit 2 .* was at step 8") as warned:
        two_fits(tmp_path, 2)
    assert len(warned) == 1
