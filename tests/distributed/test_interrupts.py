"""All processes of a preempted run stop after the same step, whichever is preempted and wherever each one is."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.distributed import Member, Peers, Preemption, Watch

LIMIT = 30.0
N_STEPS = 12


@pytest.fixture
def pair():
    """Two connected processes, each run by a thread. Each test has its own: a late message of one reaches no other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peers = [Peers(2, i) for i in (0, 1)]
    members = [Member(each.n, each.index, "127.0.0.1", port, "127.0.0.1") for each in peers]
    run_in_threads([partial(each.meet, member, LIMIT) for each, member in zip(peers, members, strict=True)])
    yield peers
    for each in peers:
        each._left.update((0, 1))
    for each in peers:
        for link in each._links.values():
            with contextlib.suppress(OSError):
                link._socket.shutdown(socket.SHUT_RDWR)
            link.close()


def run_in_threads(fns):
    """The result of each function, each run in its own thread."""
    ended = {}
    threads = [threading.Thread(target=lambda i=i, fn=fn: ended.update({i: fn()}), daemon=True) for i, fn in enumerate(fns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return [ended[i] for i in range(len(fns))]


def fit(preemption, collective, preempted_at=None, n_steps=N_STEPS):
    """The step after which the fit stops, None if it completes. The steps of several processes wait for each other, as
    collectives do."""
    with preemption.listening():
        for step in range(1, n_steps + 1):
            if step == preempted_at:
                preemption._notice()
            collective.wait(LIMIT)
            if preemption.is_due(step):
                return step
    return None


@pytest.mark.parametrize("preempted", [(1, None), (None, 1), (4, None), (None, 4), (3, 5), (5, 5), (6, 4)])
@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_all_processes_stop_after_the_same_step(pair, monkeypatch, preempted, delay):
    """However long the message takes: a process that waits in a collective cannot be asked for its step."""
    handle = Preemption._handle
    monkeypatch.setattr(Preemption, "_handle", lambda self, is_interrupt: (time.sleep(delay), handle(self, is_interrupt)))
    preemptions, collective = [Preemption(each) for each in pair], threading.Barrier(2)
    found = run_in_threads([partial(fit, each, collective, at) for each, at in zip(preemptions, preempted, strict=True)])
    assert found[0] == found[1]
    first = min(at for at in preempted if at is not None)
    assert first < found[0] <= first + 2


def test_fit_without_preemption_completes(pair):
    preemptions, collective = [Preemption(each) for each in pair], threading.Barrier(2)
    assert run_in_threads([partial(fit, each, collective) for each in preemptions]) == [None, None]


def test_single_process_stops_after_the_step_of_its_preemption():
    preemption = Preemption(Peers())
    assert fit(preemption, threading.Barrier(1), preempted_at=3) == 3
    assert fit(preemption, threading.Barrier(1)) is None  # a later fit starts anew


def test_preemption_too_late_for_one_fit_stops_the_next(pair, monkeypatch):
    """One process is preempted at its last step; the other gets the message between its two fits."""
    handle, ended, handled = Preemption._handle, threading.Event(), threading.Event()

    def handle_late(self, is_interrupt):
        ended.wait(LIMIT)
        handle(self, is_interrupt)
        handled.set()

    monkeypatch.setattr(Preemption, "_handle", handle_late)
    preemptions = [Preemption(each) for each in pair]
    first, second = threading.Barrier(2), threading.Barrier(2)

    def twice(index):
        stopped = fit(preemptions[index], first, N_STEPS if index == 0 else None)
        if index == 1:
            ended.set()
            assert handled.wait(LIMIT)
        return stopped, fit(preemptions[index], second)

    # Both know of it when the second fit begins, so one of them contributes its first step, and none a later one.
    assert run_in_threads([partial(twice, index) for index in (0, 1)]) == [(None, 2)] * 2


@pytest.mark.parametrize("preempted", [0, 1])
def test_no_process_stops_alone_after_another_has_ended(pair, monkeypatch, preempted):
    """One process is preempted a step before the end; the other gets the message too late. Both stop in the next fit."""
    handle, ended = Preemption._handle, threading.Event()
    monkeypatch.setattr(Preemption, "_handle", lambda self, is_interrupt: (ended.wait(LIMIT), handle(self, is_interrupt)))
    preemptions = [Preemption(each) for each in pair]
    first, second = threading.Barrier(2), threading.Barrier(2)

    def twice(index):
        stopped = fit(preemptions[index], first, N_STEPS - 1 if index == preempted else None)
        if index != preempted:
            ended.set()
        return stopped, fit(preemptions[index], second)

    found = run_in_threads([partial(twice, index) for index in (0, 1)])
    assert found[0] == found[1]
    assert found[0][0] is None
    assert 2 <= found[0][1] <= 3


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------


class Model(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


def make_trainer(at, fn, workdir=None):
    """A trainer whose loader calls `fn` once, when step `at - 1` is done."""
    done = []

    def collate_fn(numbers):
        if trainer.step >= at - 1 and not done:
            done.append(fn())
        return np.asarray(numbers, np.float32)[:, None]

    def loss_fn(model, batch, key):
        return jnp.square(jax.vmap(model)(batch) - 1.0).mean()

    deployer = redeqx.Deployer(workdir=workdir, verbose=False)
    model, optimizer = Model(jnp.ones(())), optax.adam(1e-2)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optimizer, collate_fn=collate_fn, loss_fn=loss_fn)
    return trainer


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def fit_all(trainer):
    trainer.fit(list(range(160)), 1, 1)
    return trainer.step


def test_ctrl_c_in_a_notebook_saves_and_the_trainer_continues(tmp_path, monkeypatch, capfd):
    """The kernel survives; each example is used once, and the result equals that of an uninterrupted run."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer, hook = make_trainer(5, press_ctrl_c, tmp_path / "stopped"), sys.excepthook
    with pytest.raises(KeyboardInterrupt) as caught:
        fit_all(trainer)
    stopped = trainer.step
    assert 4 <= stopped < 20  # another thread sends the signal, as early as at the end of step 4
    assert str(caught.value) == f"step {stopped} is saved"
    assert {entry.path.name for entry in caught.traceback} == {"test_interrupts.py"}  # a cell shows no redeqx frames
    assert "redeqx: Ctrl-C: stopping after this step, to save it" in capfd.readouterr().err
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    whole = make_trainer(5, lambda: None, tmp_path / "whole")
    assert fit_all(trainer) == fit_all(whole) == 20
    np.testing.assert_array_equal(trainer.model.weight, whole.model.weight)


def test_rerun_after_ctrl_c_continues_after_the_step_it_names(tmp_path, monkeypatch):
    """In a new process, that is: from the files alone, which hold what a resume needs even if the fit's others do not."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    options = {"save_opt_states": False, "save_float_dtype": "bfloat16", "save_end": False}
    stopped = make_trainer(5, press_ctrl_c, tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt) as caught:
        stopped.fit(list(range(160)), 1, 1, **options)
    again = make_trainer(21, lambda: None, tmp_path / "stopped")
    again.resume()
    assert str(caught.value) == f"step {again.step} is saved"
    assert again.step == stopped.step
    np.testing.assert_array_equal(again.model.weight, stopped.model.weight)
    whole = make_trainer(21, lambda: None)
    again, seen = make_trainer(21, lambda: None, tmp_path / "stopped"), Steps()
    again.fit(list(range(160)), 1, 1, callbacks=[seen], **options)
    assert seen.steps == list(range(stopped.step + 1, 21))
    fit_all(whole)
    np.testing.assert_array_equal(again.model.weight, whole.model.weight)


class Steps(redeqx.Callback):
    def __init__(self):
        self.steps = []

    def on_step(self, trainer, metrics):
        self.steps.append(trainer.step)


@pytest.mark.parametrize("pressed", [0, 1])
def test_ctrl_c_in_one_process_ends_all_as_interrupted_after_the_same_step(pair, monkeypatch, pressed):
    """Not as preempted, which a scheduler would requeue."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    preemptions, collective = [Preemption(each) for each in pair], threading.Barrier(2)

    def stopped(index):
        preemption = preemptions[index]
        with preemption.listening():
            for step in range(1, N_STEPS + 1):
                if (index, step) == (pressed, 3):
                    preemption._interrupt()
                collective.wait(LIMIT)
                if preemption.is_due(step):
                    try:
                        preemption.end(step, lambda line: None)
                    except BaseException as error:
                        return type(error), str(error)
        return None

    found = run_in_threads([partial(stopped, index) for index in (0, 1)])
    assert found[0] == found[1]
    assert found[0] in [(KeyboardInterrupt, f"step {step} is saved") for step in (4, 5, 6)]


class PressesInSave(redeqx.Callback):
    """Presses Ctrl-C while the first checkpoint is saved."""

    def __init__(self):
        self.n = 0

    def state(self):
        self.n += 1
        if self.n == 1:
            press_ctrl_c()
        return {"n": 0}

    def restore(self, state):
        del state


def press_twice():
    press_ctrl_c()
    time.sleep(0.3)
    press_ctrl_c()
    time.sleep(0.3)


@pytest.mark.parametrize("where", ["save", "step", "evaluation"])
def test_a_second_ctrl_c_in_a_notebook_ends_one_fit_and_not_the_next(tmp_path, monkeypatch, where):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer = make_trainer(5, {"save": press_ctrl_c, "step": press_twice, "evaluation": lambda: None}[where], tmp_path)
    metrics, callbacks = [], [PressesInSave()] if where == "save" else []

    def metric_fn(examples, outputs):
        metrics.append(trainer.step)
        if where == "evaluation" and len(metrics) == 1:
            press_twice()
        return {"score": 1.0}

    def fit():
        predictor = trainer.get_default_predictor(lambda model, batch, key: batch)
        trainer.fit(
            list(range(160)), 1, 1, callbacks=callbacks, eval_examples=[1], eval_sanity_check=False, eval_loss=False,
            eval_predictor=predictor, eval_metric_fn=metric_fn, eval_every_n_steps=7,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        fit()
    assert trainer.step < 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit()
    assert trainer.step == 20 and metrics[-1] == 20


def test_ctrl_c_without_a_workdir_interrupts_immediately_without_thread_frames():
    trainer = make_trainer(5, lambda: (press_ctrl_c(), time.sleep(0.5)))
    with pytest.raises(KeyboardInterrupt) as caught:
        fit_all(trainer)
    files = {Path(entry.path).name for entry in caught.traceback}
    assert not files & {"threading.py", "queue.py"}
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert trainer.step < 20


def test_ctrl_c_after_the_last_step_interrupts_the_script(tmp_path):
    trainer = make_trainer(20, lambda: None, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            list(range(160)),
            1,
            1,
            eval_examples=[1],
            eval_sanity_check=False,
            eval_loss=False,
            eval_predictor=trainer.get_default_predictor(lambda model, batch, key: batch),
            eval_metric_fn=lambda examples, outputs: press_ctrl_c() or {"score": 1.0},
        )
    assert trainer.step == 20


def test_watch_is_off_after_train(monkeypatch):
    """A notebook may stay idle after `train` for any length of time."""
    trainer = make_trainer(5, lambda: None)
    trainer.train(list(range(24)), 1)
    assert trainer.step == 3
    assert trainer.deployer.watch._last is None
    trainer.eval_loss(list(range(8)), 1)
    assert trainer.deployer.watch._last is None


def test_watch_thread_ends_with_its_loop():
    def watching():
        return [thread for thread in threading.enumerate() if thread.name == "redeqx-watch"]

    before = watching()
    watch = Watch(Peers(), seconds=60.0)
    for step in (1, 2):  # a second loop is watched too
        with watch.on():
            watch.beat(step)
            (thread,) = [thread for thread in watching() if thread not in before]
        thread.join(10)
        assert not thread.is_alive()


def test_watch_resumes_after_a_pause():
    """Steps after an evaluation or a compilation are watched like those before it."""
    watch = Watch(Peers(), seconds=None)
    with watch.on():
        with watch.paused():
            assert watch._last is None
        assert watch._last is None  # no step was expected before the pause
        watch.beat(1)
        with watch.paused():
            assert watch._last is None
        assert watch._last is not None
    assert watch._last is None
