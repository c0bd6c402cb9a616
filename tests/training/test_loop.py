"""What a fit decides and leaves behind: the best checkpoint by a metric, the order of examples in each epoch of each fit,
signals that are handled as before."""

import contextlib
import itertools
import json
import math
import os
import re
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx

NAN = math.nan
N = 20  # examples, which are powers of two: the sum of a step's examples says which they are


class Killed(Exception):
    pass


class Model(eqx.Module):
    weight: jax.Array

    def __init__(self):
        self.weight = jnp.zeros(())


def loss_fn(model, batch, key):
    # The weight counts the steps: its gradient is -1.
    return redeqx.Loss(-model.weight, 1, {"examples": jnp.sum(batch)})


class Log:
    """A tracker that keeps the examples of each step, and can end the run at a step."""

    def __init__(self, kill_at=None):
        self.steps, self.kill_at = [], kill_at

    def log(self, metrics, step):
        if "examples" in metrics:
            total = round(metrics["examples"])
            self.steps.append([i for i in range(N) if total >> i & 1])
        if step == self.kill_at:
            raise Killed


def make_trainer(workdir=None, *, kill_at=None, loggers=(), verbose=False):
    log = Log(kill_at)
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
    """A fit of an epoch a score, one step each, whose evaluation after step `i` returns `scores[i - 1]`."""
    trainer, _ = make_trainer(workdir, kill_at=kill_at)
    predictor = trainer.get_default_predictor(lambda model, batch, key: batch + model.weight)

    def score(examples, outputs):
        assert float(outputs[0]) == examples[0] + trainer.step  # of the model at this step
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


def best_of(workdir):
    """For each tag the step of its checkpoint by name, and by the weight in it, and the metric that it says it has."""
    index = json.loads((workdir / "ckpts" / "index.json").read_text())
    trainer, _ = make_trainer(workdir)
    found = {}
    for tag in ("argmax_score", "argmin_score"):
        if tag in index:
            trainer.load_ckpt(tag)
            record = json.loads((workdir / "ckpts" / index[tag] / "trainer.json").read_text())
            found[tag] = (int(index[tag].split("_")[1]), round(float(trainer.model.weight)), record["metrics"]["score"])
    return found


@pytest.mark.parametrize(
    ("scores", "most", "least"),
    [
        ([0.5, 0.9, 0.2, 0.7], 2, 3),
        ([-3.0, -1.0, -2.0], 2, 1),
        ([NAN, 0.4, NAN, 0.6, NAN], 4, 2),  # what is no number is never the best, wherever it comes
        ([0.3, 0.3, 0.3], 1, 1),  # of equals the first
        ([0.3, math.inf, -math.inf], 2, 3),
    ],
)
def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path, scores, most, least):
    run(tmp_path, scores)
    assert best_of(tmp_path) == {
        "argmax_score": (most, most, scores[most - 1]),
        "argmin_score": (least, least, scores[least - 1]),
    }


def test_without_a_number_there_is_no_best(tmp_path):
    run(tmp_path, [NAN, NAN])
    assert best_of(tmp_path) == {}


@pytest.mark.parametrize("kill_at", [3, 4])
def test_the_best_so_far_outlives_a_resume(tmp_path, kill_at):
    """After it come an evaluation that is better than some before, and one that is better than all."""
    scores = [0.5, 0.9, 0.2, 0.8, 0.3]
    run(tmp_path, scores, kill_at=kill_at)
    run(tmp_path, scores)
    assert best_of(tmp_path) == {"argmax_score": (2, 2, 0.9), "argmin_score": (3, 3, 0.2)}


# --- the order of examples --------------------------------------------------------------------------------------------


def examples(n=N):
    return [2.0**i for i in range(n)]


def orders(log, n_steps):
    """The examples of each epoch, as the sets of its steps."""
    epochs = [log.steps[i : i + n_steps] for i in range(0, len(log.steps), n_steps)]
    return [tuple(map(tuple, epoch)) for epoch in epochs]


def test_every_epoch_of_every_fit_has_an_order_of_its_own():
    trainer, log = make_trainer()
    for _ in range(2):
        trainer.fit(examples(), 4, 2)
    found = orders(log, 5)
    assert len(found) == 4
    for epoch in found:
        assert sorted(i for step in epoch for i in step) == list(range(N))
        assert [len(step) for step in epoch] == [4] * 5
    assert len(set(found)) == 4
    # And the script has the same ones when it is run again.
    again, log = make_trainer()
    for _ in range(2):
        again.fit(examples(), 4, 2)
    assert orders(log, 5) == found


def test_a_second_fit_may_have_other_examples(tmp_path):
    """As many as it likes: in one run, and in one that is resumed in the second fit."""

    def script(workdir, kill_at=None):
        trainer, log = make_trainer(workdir, kill_at=kill_at)
        trainer.fit(examples(16), 4, 1, save_last_ckpt=True)
        trainer.fit(examples(12), 4, 2, save_every_n_steps=1)
        return log.steps, trainer

    steps, whole = script(tmp_path / "whole")
    assert [sorted(itertools.chain(*part)) for part in (steps[:4], steps[4:7], steps[7:])] == [
        [*range(n)] for n in (16, 12, 12)
    ]
    with pytest.raises(Killed):
        script(tmp_path / "killed", kill_at=8)
    rest, trainer = script(tmp_path / "killed")
    assert rest == steps[-len(rest) :]
    assert trainer.step == whole.step == 10
    assert float(trainer.model.weight) == 10.0


def test_a_resumed_run_says_how_many_steps_there_are_in_all(tmp_path, capsys):
    def script(**options):
        trainer, _ = make_trainer(tmp_path, **options)
        trainer.fit(examples(16), 4, 2, save_every_n_steps=1)

    with pytest.raises(Killed):
        script(kill_at=3)
    capsys.readouterr()
    script(verbose=True)
    said = re.findall(r"step (\d+)/(\d+)", capsys.readouterr().out)
    assert said
    assert {total for _, total in said} == {"8"}
    assert said[-1] == ("8", "8")


# --- signals ----------------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.mark.parametrize("ends", ["in the end", "by an exception", "told to stop"])
def test_after_a_fit_signals_are_handled_as_before(ends, tmp_path):
    """A fit that saves notes them while it runs."""
    heard, seen = [], []

    class Hurry:
        def log(self, metrics, step):
            seen.extend(number for number in SIGNALS if signal.getsignal(number) is not mine)
            if ends == "by an exception":
                raise Killed
            if ends == "told to stop" and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def mine(number, frame):
        heard.append(number)

    before = {number: signal.signal(number, mine) for number in SIGNALS}
    try:
        trainer, _ = make_trainer(tmp_path, loggers=[Hurry()])
        expected = {"by an exception": pytest.raises(Killed), "told to stop": pytest.raises(SystemExit)}
        with expected.get(ends, contextlib.nullcontext()):
            trainer.fit(examples(4), 1, 2, save_last_ckpt=True)
        assert signal.SIGTERM in seen
        assert [signal.getsignal(number) for number in SIGNALS] == [mine] * 3
        heard.clear()
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert heard == [*SIGNALS]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
