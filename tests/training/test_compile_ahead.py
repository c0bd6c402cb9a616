"""The train step compiles in a thread while the model is placed: once, also from a checkpoint, and with its errors."""

import os
import signal
import threading
import time

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import compiler

import redeqx
from redeqx.training._compilation import Compilation

EVENT = "/jax/core/compile/backend_compile_duration"


class Model(eqx.Module):
    """Leaves whose arrays could differ from their shapes: a weak type, a host's dtype, a key."""

    linear: eqx.nn.Linear
    scale: jax.Array
    host: np.ndarray
    key: jax.Array

    def __init__(self):
        self.linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
        self.scale = jnp.asarray(2.0)  # weakly typed
        self.host = np.ones(8)  # float64, which becomes float32 on devices
        self.key = jax.random.key(1)

    def __call__(self, x):
        return self.scale * self.linear(x) * self.host + jax.random.normal(self.key, (8,))


def loss_fn(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2) + 0.0 * jax.random.normal(key)


def make_trainer(workdir=None, shards=(2, 2), **options):
    deployer = redeqx.Deployer(n_model_shards=shards[0], n_fsdp_shards=shards[1], workdir=workdir, verbose=False)
    options = {"optimizer": optax.adam(1e-2), "loss_fn": loss_fn, "model": Model(), **options}
    return redeqx.Trainer(deployer, collate_fn=np.stack, **options)


EXAMPLES = list(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))


def with_change(monkeypatch, change, prepare=lambda: None):
    """Calls `prepare` before each compilation that starts ahead, and `change` of it afterwards."""
    begin = Compilation.__init__

    def changed(self, *args):
        prepare()
        begin(self, *args)
        change(self)

    monkeypatch.setattr(Compilation, "__init__", changed)


@pytest.fixture
def compiled():
    """The thread of each compilation of a train step."""
    threads = []

    def record(event, duration_secs, **kwargs):
        if event == EVENT and "step_fn" in str(kwargs.get("fun_name")):
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield threads
    jax.monitoring.unregister_event_duration_listener(record)


OPTIONS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "hyperparameters in the state": {"optimizer": optax.inject_hyperparams(optax.adamw)(1e-2)},
    "bfloat16 parameters": {"compute": redeqx.Compute(redeqx.Precision(parameters="bfloat16"))},
    "skipped steps": {"on_nonfinite": "skip"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_step_compiles_once_in_a_thread(name, compiled):
    trainer = make_trainer(**OPTIONS[name])
    trainer.fit(EXAMPLES, batch_size=16, n_epochs=2)
    assert compiled == ["redeqx-compile"]
    assert trainer.step == 8


def test_a_loop_of_the_users_own_and_a_mesh_of_one_axis(compiled):
    trainer = make_trainer(shards=(1, 1))
    for _ in range(2):
        trainer.update(EXAMPLES[:16])
    assert compiled == ["redeqx-compile"]


class BatchNorm(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


def test_the_state_of_layers(compiled):
    model, state = eqx.nn.make_with_state(BatchNorm)()

    def loss_fn(model, state, batch, key):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
        return jnp.mean(out**2), state

    make_trainer(model=model, model_state=state, loss_fn=loss_fn).train(EXAMPLES, batch_size=16)
    assert compiled == ["redeqx-compile"]


def test_a_resumed_run_compiles_while_it_reads_its_checkpoint(tmp_path, compiled):
    make_trainer(tmp_path).fit(EXAMPLES, batch_size=16, n_epochs=1)
    trainer = make_trainer(tmp_path)
    trainer.fit(EXAMPLES, batch_size=16, n_epochs=2)
    assert compiled == ["redeqx-compile"] * 2 and trainer.step == 8


def test_an_evaluation_compiles_no_train_step(compiled):
    trainer = make_trainer()
    trainer.eval_loss(EXAMPLES, batch_size=16)
    assert compiled == []
    trainer.train(EXAMPLES, batch_size=16)  # the model is placed already
    assert compiled == ["MainThread"]


def test_another_batch_than_the_expected_one_compiles_by_itself(compiled, monkeypatch):
    trainer = make_trainer()
    with_change(monkeypatch, lambda ahead: setattr(ahead, "signature", "another"))
    trainer.train(EXAMPLES, batch_size=16)
    assert trainer.step == 4


def test_the_time_of_the_whole_compilation_is_printed(monkeypatch, capsys):
    with_change(monkeypatch, lambda ahead: setattr(ahead, "began", ahead.began - 100.0))
    deployer = redeqx.Deployer()
    trainer = redeqx.Trainer(deployer, model=Model(), optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn)
    trainer.train(EXAMPLES, batch_size=16)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compiled train step in")]
    assert "in 1:4" in line


def test_an_error_of_the_compiler_is_raised_by_the_update(monkeypatch):
    def fails(*args, **kwargs):
        threads.append(threading.current_thread().name)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    threads = []
    trainer = make_trainer(optimizer=optax.sgd(0.1))
    with_change(monkeypatch, Compilation.wait, lambda: monkeypatch.setattr(compiler, "backend_compile_and_load", fails))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        trainer.train(EXAMPLES, batch_size=16)
    assert threads[0] == "redeqx-compile"


def test_python_waits_at_exit_for_a_compilation_whose_wait_was_interrupted():
    """Else XLA's thread finds no interpreter when it ends, and aborts the process instead of the scheduler's exit code."""
    waits, ends, threads = threading.Event(), threading.Event(), []

    class Step:
        def lower(self):
            return self

        def compile(self):
            threads.append(threading.current_thread())
            assert waits.wait(60)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert ends.wait(60)

    def interrupt(number, frame):
        raise SystemExit(75)

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with pytest.raises(SystemExit):
            ahead = Compilation(Step(), (), "signature")
            waits.set()
            ahead.wait()
        assert threads[0].is_alive()
    finally:
        signal.signal(signal.SIGUSR2, before)
        ends.set()
    threads[0].join()
