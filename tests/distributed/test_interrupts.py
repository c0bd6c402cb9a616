"""All processes of a run that is told to stop do so after the same step, whichever it is and wherever each of them is."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redeqx
from redeqx.distributed._interrupts import Preemption, Watch
from redeqx.distributed._peers import Peers

LIMIT = 30.0
N_STEPS = 12


@pytest.fixture(scope="module")
def pair():
    """Two processes that have met, each a thread here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peers = [Peers(2, i) for i in (0, 1)]
    together([partial(each.meet, "127.0.0.1", port, bind="127.0.0.1", timeout=LIMIT) for each in peers])
    yield peers
    for each in peers:
        each._left.update((0, 1))
    for each in peers:
        for link in each._links.values():
            with contextlib.suppress(OSError):
                link._socket.shutdown(socket.SHUT_RDWR)
            link.close()


def together(acts):
    """What each returns, in threads of their own."""
    ended = {}
    threads = [
        threading.Thread(target=lambda i=i, act=act: ended.update({i: act()}), daemon=True) for i, act in enumerate(acts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return [ended[i] for i in range(len(acts))]


def fit(preemption, collective, told_at=None, n_steps=N_STEPS):
    """The step after which it stops, None for its end; the steps of several processes wait for each other, as collectives
    do."""
    with preemption.listening():
        for step in range(1, n_steps + 1):
            if step == told_at:
                preemption._notice()
            collective.wait(LIMIT)
            if preemption.is_due(step):
                return step
    return None


@pytest.mark.parametrize("told", [(1, None), (None, 1), (4, None), (None, 4), (3, 5), (5, 5), (6, 4)])
@pytest.mark.parametrize("late", [0.0, 0.05])
def test_all_stop_after_the_same_step(pair, monkeypatch, told, late):
    """However long the word of it takes: who waits in a collective for another cannot be asked where it is."""
    handle = Preemption._handle
    monkeypatch.setattr(Preemption, "_handle", lambda self, is_interrupt: (time.sleep(late), handle(self, is_interrupt)))
    preemptions, collective = [Preemption(each) for each in pair], threading.Barrier(2)
    found = together([partial(fit, each, collective, at) for each, at in zip(preemptions, told, strict=True)])
    assert found[0] == found[1]
    first = min(at for at in told if at is not None)
    assert first < found[0] <= first + 2


def test_who_is_not_told_never_stops(pair):
    preemptions, collective = [Preemption(each) for each in pair], threading.Barrier(2)
    assert together([partial(fit, each, collective) for each in preemptions]) == [None, None]


def test_one_process_stops_after_the_step_in_which_it_is_told():
    preemption = Preemption(Peers())
    assert fit(preemption, threading.Barrier(1), told_at=3) == 3
    assert fit(preemption, threading.Barrier(1)) is None  # a fit after it begins anew


def test_where_it_is_too_late_for_one_fit_the_next_one_stops(pair):
    preemptions = [Preemption(each) for each in pair]
    first, second = threading.Barrier(2), threading.Barrier(2)

    def twice(preemption, told_at):
        return fit(preemption, first, told_at), fit(preemption, second)

    found = together([partial(twice, preemptions[0], N_STEPS), partial(twice, preemptions[1], None)])
    assert found[0] == found[1]
    assert found[0][0] is None
    assert 2 <= found[0][1] <= 3


@pytest.mark.parametrize("told", [0, 1])
def test_none_stops_alone_where_another_has_ended(pair, monkeypatch, told):
    """Told a step before the end, which the other hears of after its end: neither stops in this fit, both do in the next."""
    handle, ended = Preemption._handle, threading.Event()
    monkeypatch.setattr(Preemption, "_handle", lambda self, is_interrupt: (ended.wait(LIMIT), handle(self, is_interrupt)))
    preemptions = [Preemption(each) for each in pair]
    first, second = threading.Barrier(2), threading.Barrier(2)

    def twice(index):
        stopped = fit(preemptions[index], first, N_STEPS - 1 if index == told else None)
        if index != told:
            ended.set()
        return stopped, fit(preemptions[index], second)

    found = together([partial(twice, index) for index in (0, 1)])
    assert found[0] == found[1]
    assert found[0][0] is None
    assert 2 <= found[0][1] <= 3


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------


class Model(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


def trainer_that(at, act, workdir=None):
    """A trainer whose loader does that once, when the step before that one is done."""
    done = []

    def collate_fn(numbers):
        if trainer.step >= at - 1 and not done:
            done.append(act())
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


def test_ctrl_c_in_a_notebook_saves_and_the_same_trainer_goes_on(tmp_path, monkeypatch, capfd):
    """The kernel stays; the examples are each used once, and the numbers are those of a run that nobody stopped."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer, hook = trainer_that(5, press_ctrl_c, tmp_path / "stopped"), sys.excepthook
    with pytest.raises(KeyboardInterrupt) as caught:
        fit_all(trainer)
    stopped = trainer.step
    assert 4 <= stopped < 20  # it is pressed by another thread, as early as in the fourth step's own last moments
    assert str(caught.value) == f"step {stopped} is saved"
    assert {entry.path.name for entry in caught.traceback} == {"test_interrupts.py"}  # a cell shows no frames of redeqx
    assert "redeqx: Ctrl-C: stopping after this step, to save it" in capfd.readouterr().err
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    whole = trainer_that(5, lambda: None, tmp_path / "whole")
    assert fit_all(trainer) == fit_all(whole) == 20
    np.testing.assert_array_equal(trainer.model.weight, whole.model.weight)


def test_ctrl_c_without_a_workdir_interrupts_at_once_and_shows_no_frames_of_threads():
    trainer = trainer_that(5, lambda: (press_ctrl_c(), time.sleep(0.5)))
    with pytest.raises(KeyboardInterrupt) as caught:
        fit_all(trainer)
    files = {entry.path.name for entry in caught.traceback}
    assert not files & {"threading.py", "queue.py"}
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert trainer.step < 20


def test_ctrl_c_after_the_last_step_interrupts_the_script(tmp_path):
    trainer = trainer_that(20, lambda: None, tmp_path)
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


def test_the_watch_is_off_after_train(monkeypatch):
    """A notebook may stay as long as it likes after it."""
    trainer = trainer_that(5, lambda: None)
    trainer.train(list(range(24)), 1)
    assert trainer.step == 3
    assert trainer.deployer._run.watch._last is None
    trainer.eval_loss(list(range(8)), 1)
    assert trainer.deployer._run.watch._last is None


def test_nothing_watches_a_loop_that_was_left():
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


def test_a_pause_ends_and_a_step_is_expected_again():
    """What comes after an evaluation or a compilation is watched as what came before it."""
    watch = Watch(Peers(), seconds=None)
    with watch.on():
        with watch.paused():
            assert watch._last is None
        assert watch._last is None  # nothing was expected before
        watch.beat(1)
        with watch.paused():
            assert watch._last is None
        assert watch._last is not None
    assert watch._last is None
