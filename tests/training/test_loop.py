"""`Trainer.fit`: the best checkpoint by a metric, the order of examples in each epoch, and restored signal handlers."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

NAN = math.nan
N = 20  # number of examples; they are powers of two, so that the sum of a step identifies them


class Killed(Exception):
    pass


class Model(eqx.Module):
    weight: jax.Array

    def __init__(self):
        self.weight = jnp.zeros(())


def loss_fn(model, batch, key):
    # The gradient is -1, so that the weight counts the steps.
    return redeqx.Loss(-model.weight, 1, {"examples": jnp.sum(batch)})


class RecordExamples:
    """A tracker that records the examples of each step, and can kill the run at a step."""

    def __init__(self, kill_at=None):
        self.steps, self.kill_at = [], kill_at

    def log(self, metrics, step):
        if "examples" in metrics:
            total = round(metrics["examples"])
            self.steps.append([i for i in range(N) if total >> i & 1])
        if step == self.kill_at:
            raise Killed


def make_trainer(workdir=None, *, kill_at=None, loggers=(), verbose=False):
    log = RecordExamples(kill_at)
    deployer = redeqx.Deployer(n_model_shards=8, workdir=workdir, verbose=verbose, loggers=[log, *loggers])
    trainer = redeqx.Trainer(
        deployer,
        model=Model(),
        optimizer=optax.sgd(1.0),
        collate_fn=lambda rows: np.array(rows, np.float32),
        loss_fn=loss_fn,
    )
    return trainer, log


# --- the best checkpoint ----------------------------------------------------------------------------------------------


def run(workdir, scores, *, kill_at=None):
    """Fit one epoch of one step per score; the evaluation after step `i` returns `scores[i - 1]`. Return the trainer."""
    trainer, _ = make_trainer(workdir, kill_at=kill_at)
    predictor = trainer.get_default_predictor(lambda model, batch, key: batch + model.weight)

    def score(examples, outputs):
        assert float(outputs[0]) == examples[0] + trainer.step  # evaluates the model of this step
        return {"score": scores[trainer.step - 1]}

    with contextlib.suppress(Killed):
        trainer.fit(
            [1.0],
            1,
            len(scores),
            eval_examples=[1.0],
            eval_loss=False,
            eval_predictor=predictor,
            eval_metric_fn=score,
            eval_sanity_check=False,
            save_argmax_ckpt_by_metrics=["score"],
            save_argmin_ckpt_by_metrics=["score"],
            save_last_ckpt=True,
            keep_last=1,
        )
    return trainer


def best_checkpoints(workdir):
    """Return for each tag its checkpoint's step by file name, its step by the saved weight, and its saved metric."""
    index = json.loads((workdir / "ckpts" / "index.json").read_text())
    trainer, _ = make_trainer(workdir)
    found = {}
    for tag in ("argmax_score", "argmin_score"):
        if tag in index:
            trainer.load_ckpt(tag)
            record = json.loads((workdir / "ckpts" / index[tag] / "trainer.json").read_text())
            found[tag] = (
                int(index[tag].split("_")[1]),
                round(float(trainer.model.weight)),
                float(record["metrics"]["score"]),
            )
    return found


@pytest.mark.parametrize(
    ("scores", "argmax_step", "argmin_step"),
    [
        ([0.5, 0.9, 0.2, 0.7], 2, 3),
        ([-3.0, -1.0, -2.0], 2, 1),
        ([NAN, 0.4, NAN, 0.6, NAN], 4, 2),  # NaN is never the best, wherever it occurs
        ([0.3, 0.3, 0.3], 1, 1),  # ties: the first one
        ([0.3, math.inf, -math.inf], 2, 3),
    ],
)
def test_best_checkpoint_is_from_the_best_evaluation(tmp_path, scores, argmax_step, argmin_step):
    run(tmp_path, scores)
    assert best_checkpoints(tmp_path) == {
        "argmax_score": (argmax_step, argmax_step, scores[argmax_step - 1]),
        "argmin_score": (argmin_step, argmin_step, scores[argmin_step - 1]),
    }


def test_no_best_checkpoint_if_all_scores_are_nan(tmp_path):
    run(tmp_path, [NAN, NAN])
    assert best_checkpoints(tmp_path) == {}


@pytest.mark.parametrize("kill_at", [3, 4])
def test_best_checkpoint_survives_a_resume(tmp_path, kill_at):
    """After the resume, one evaluation beats only some of the earlier ones, and one beats all."""
    scores = [0.5, 0.9, 0.2, 0.8, 0.3]
    run(tmp_path, scores, kill_at=kill_at)
    run(tmp_path, scores)
    assert best_checkpoints(tmp_path) == {"argmax_score": (2, 2, 0.9), "argmin_score": (3, 3, 0.2)}


def test_a_removed_best_checkpoint_does_not_end_a_resumed_run(tmp_path):
    scores = [0.5, 0.9, 0.2, 0.8]
    run(tmp_path, scores, kill_at=4)
    index = json.loads((tmp_path / "ckpts" / "index.json").read_text())
    shutil.rmtree(tmp_path / "ckpts" / index["argmax_score"])
    trainer = run(tmp_path, scores)
    assert trainer.step == 4
    with pytest.raises(ValueError, match=r"which the index names as 'argmax_score', got no such folder"):
        trainer.load_ckpt("argmax_score")


def test_sets_to_evaluate_have_names(tmp_path):
    """Each has metrics of its own, by which checkpoints are chosen, and the numbers of the set alone."""
    trainer, _ = make_trainer(tmp_path)
    predictor = trainer.get_default_predictor(lambda model, batch, key: batch + model.weight)
    sets = {"dev": [1.0, 2.0, 4.0], "test": [8.0]}

    def score(examples, outputs):
        assert [float(output) - trainer.step for output in outputs] in (examples, examples[:1])
        return {"score": sum(examples) - trainer.step}

    options = {"eval_predictor": predictor, "eval_metric_fn": score, "save_argmin_ckpt_by_metrics": ["dev_score"]}
    result = trainer.fit([1.0], 1, 2, eval_examples=sets, **options)
    alone = {name: {"loss": trainer.eval_loss(examples, 1), "score": sum(examples) - 2} for name, examples in sets.items()}
    assert {name: value for name, value in result.items() if not name.endswith("examples")} == {
        f"{name}_{metric}": value for name, metrics in alone.items() for metric, value in metrics.items()
    }
    assert (result["dev_examples"], result["test_examples"]) == (7 / 3, 8.0)  # of batches of one
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["eval_dev_score"] == 5.0 and records[-1]["eval_test_score"] == 6.0
    trainer.load_ckpt("argmin_dev_score")
    assert trainer.step == 2
    for wrong, message in [
        ({}, r"`eval_examples`: expected at least one set by name, got none"),
        ({"dev": []}, r"`eval_examples\['dev'\]`: expected at least one example, got none"),
        ({"a/b": [1.0]}, r"`eval_examples`: expected names that are not empty and without `/`, got 'a/b'"),
        ({"": [1.0]}, r"`eval_examples`: expected names that are not empty and without `/`, got ''"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer.fit([1.0], 1, 3, eval_examples=wrong)


def test_sets_are_evaluated_in_one_order():
    """Processes evaluate each set together, and the order of their dicts may differ, as that of a set of names does."""
    calls = []
    trainer, _ = make_trainer()
    predictor = trainer.get_default_predictor(lambda model, batch, key: batch + model.weight)
    sets = {"b": [2.0], "a": [1.0]}
    options = {"eval_predictor": predictor, "eval_metric_fn": lambda examples, outputs: calls.append(examples) or {"n": 1}}
    trainer.fit([1.0], 1, 1, eval_examples=sets, eval_sanity_check=False, **options)
    assert calls == [[1.0], [2.0]]


def test_an_error_of_an_evaluation_names_the_set():
    trainer, _ = make_trainer()
    with pytest.raises(ValueError) as raised:
        trainer.fit([1.0], 1, 1, eval_examples={"dev": [1.0], "test": ["text"]})
    assert "Raised by the evaluation of `eval_examples['test']`." in raised.value.__notes__


# --- the order of examples --------------------------------------------------------------------------------------------


def examples(n=N):
    return [2.0**i for i in range(n)]


def epochs_of(log, n_steps):
    """Return the examples of each epoch, grouped by step."""
    epochs = [log.steps[i : i + n_steps] for i in range(0, len(log.steps), n_steps)]
    return [tuple(map(tuple, epoch)) for epoch in epochs]


def test_every_epoch_of_every_fit_has_its_own_order():
    trainer, log = make_trainer()
    for _ in range(2):
        trainer.fit(examples(), 4, 2)
    found = epochs_of(log, 5)
    assert len(found) == 4
    for epoch in found:
        assert sorted(i for step in epoch for i in step) == list(range(N))
        assert [len(step) for step in epoch] == [4] * 5
    assert len(set(found)) == 4
    # Running the script again gives the same orders.
    again, log = make_trainer()
    for _ in range(2):
        again.fit(examples(), 4, 2)
    assert epochs_of(log, 5) == found


def test_every_second_epoch_is_saved_by_its_number_and_examples_are_counted(tmp_path):
    """Three steps an epoch: the last has the remainder."""
    trainer, _ = make_trainer(tmp_path)
    trainer.fit(list(range(N)), batch_size=8, n_epochs=5, save_ckpt_every_k_epochs=2)
    index = json.loads((tmp_path / "ckpts/index.json").read_text())
    records = {tag: json.loads((tmp_path / "ckpts" / name / "trainer.json").read_text()) for tag, name in index.items()}
    assert {tag: record["step"] for tag, record in records.items()} == {"epoch_2": 6, "epoch_4": 12, "last": 15}
    assert {tag: record["n_examples"] for tag, record in records.items()} == {"epoch_2": 40, "epoch_4": 80, "last": 100}


def test_second_fit_can_use_other_examples(tmp_path):
    """The number of examples can differ, also in a run that is resumed during the second fit."""

    def script(workdir, kill_at=None):
        trainer, log = make_trainer(workdir, kill_at=kill_at)
        trainer.fit(examples(16), 4, 1, save_last_ckpt=True)
        trainer.fit(examples(12), 4, 2, save_every_n_steps=1)
        return log.steps, trainer

    steps, uninterrupted = script(tmp_path / "whole")
    assert [sorted(itertools.chain(*part)) for part in (steps[:4], steps[4:7], steps[7:])] == [
        [*range(n)] for n in (16, 12, 12)
    ]
    with pytest.raises(Killed):
        script(tmp_path / "killed", kill_at=8)
    rest, trainer = script(tmp_path / "killed")
    assert rest == steps[-len(rest) :]
    assert trainer.step == uninterrupted.step == 10
    assert float(trainer.model.weight) == 10.0


def test_resumed_run_shows_the_total_number_of_steps(tmp_path, capsys):
    def script(**options):
        trainer, _ = make_trainer(tmp_path, **options)
        trainer.fit(examples(16), 4, 2, save_every_n_steps=1)

    with pytest.raises(Killed):
        script(kill_at=3)
    capsys.readouterr()
    script(verbose=True)
    progress = re.findall(r"step (\d+)/(\d+)", capsys.readouterr().out)
    assert progress
    assert {total for _, total in progress} == {"8"}
    assert progress[-1] == ("8", "8")


# --- signals ----------------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.mark.parametrize("how_fit_ends", ["normally", "by an exception", "by preemption"])
def test_signal_handlers_are_restored_after_a_fit(how_fit_ends, tmp_path):
    """A fit that saves checkpoints installs its own handlers while it runs."""
    received, replaced = [], []

    class CheckHandlers:
        def log(self, metrics, step):
            replaced.extend(number for number in SIGNALS if signal.getsignal(number) is not own_handler)
            if how_fit_ends == "by an exception":
                raise Killed
            if how_fit_ends == "by preemption" and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def own_handler(number, frame):
        received.append(number)

    previous_handlers = {number: signal.signal(number, own_handler) for number in SIGNALS}
    try:
        trainer, _ = make_trainer(tmp_path, loggers=[CheckHandlers()])
        expected = {"by an exception": pytest.raises(Killed), "by preemption": pytest.raises(SystemExit)}
        with expected.get(how_fit_ends, contextlib.nullcontext()):
            trainer.fit(examples(4), 1, 2, save_last_ckpt=True)
        assert signal.SIGTERM in replaced
        assert [signal.getsignal(number) for number in SIGNALS] == [own_handler] * 3
        received.clear()
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert received == [*SIGNALS]
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
