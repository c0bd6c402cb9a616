"""Scripts whose processes pass, predict or train different data, and runs with two deployers."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import redeqx

pytestmark = pytest.mark.sweep

LIMIT = 150.0  # seconds; each takes about ten
HEAD = """
import os, sys
os.environ.setdefault("NPROC", "16")
import equinox as eqx, jax, numpy as np, optax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import redeqx

DATA = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)

def loss_fn(model, batch, key):
    return ((jax.vmap(model)(batch[:, :5])[:, 0] - batch[:, 5]) ** 2).mean()

def make_trainer(deployer, loss_fn=loss_fn, **kwargs):
    model = eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(0))
    kwargs = {"model": model, "optimizer": optax.adam(1e-2), "collate_fn": np.stack, **kwargs}
    return redeqx.Trainer(deployer, loss_fn=loss_fn, **kwargs)

def main():
    deployer = redeqx.Deployer(verbose=False, timeouts=redeqx.Timeouts(hang=60))
    index = jax.process_index()
"""


def begin(folder, body, *, guarded=True):
    script = folder / "script.py"
    end = 'if __name__ == "__main__":\n    main()\n'
    script.write_text(textwrap.dedent(HEAD) + textwrap.indent(textwrap.dedent(body), "    " * guarded) + end * guarded)
    command = [sys.executable, "-m", "redeqx", "launch", "--processes", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NPROC": "16"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder, body, **kwargs):
    with begin(folder, body, **kwargs) as process:
        try:
            out, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    return process.returncode, out


DIFFERENT = """
trainer = make_trainer(deployer)
predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch[:, :5]))
for n in (8, 4):
    trainer.update(DATA[:n])
for call in (
    lambda: trainer.update(DATA[: (8, 4)[index]]),
    lambda: trainer.eval_loss(DATA[: (32, 16)[index]], batch_size=8),
    lambda: predictor.predict(DATA[: (24, 16)[index]], batch_size=8),
):
    try:
        call()
    except ValueError as error:
        print(error, flush=True)
make_trainer(deployer).fit(lambda epoch: DATA[: 64 - 8 * index * epoch], batch_size=8, n_epochs=2)
"""


def test_the_error_names_different_numbers_of_examples(tmp_path):
    code, out = run(tmp_path, DIFFERENT)
    said = " ".join(out.replace("[0] ", "").replace("[1] ", "").split())
    assert code == 1
    for expected in (
        "expected `the number of examples of a step` to be 8, as in process 0, got 4 in process 1.",
        "`eval_loss`: expected `len(examples)` to be 32, as in process 0, got 16 in process 1. Pass the same examples",
        "`predict`: expected `len(examples)` to be 24, as in process 0, got 16 in process 1. Pass the same examples",
        "`train_examples`: expected `the size of epoch 1` to be 64, as in process 0, got 56 in process 1.",
    ):
        assert expected in said, out


def test_hyperparameters_are_those_of_process_0(tmp_path):
    code, out = run(
        tmp_path,
        """
        trainer = make_trainer(deployer, optimizer=optax.inject_hyperparams(optax.sgd)(0.5))
        trainer.update(DATA[:8])
        trainer.set_hyperparams(learning_rate=(0.25, 0.125)[index])
        print(f"process {index}: {trainer.update(DATA[:8])['learning_rate']}", flush=True)
        trainer.opt_state.hyperparams["learning_rate"] = 1.0
        trainer.update(DATA[:8])
        """,
    )
    said = " ".join(out.split())
    assert code == 1 and all(f"process {i}: 0.25" in said for i in (0, 1)), out
    assert "`hyperparams.learning_rate` to be 0.25, as in process 0, got 0.125 in process 1" in said
    assert "`trainer.opt_state`: expected no change with several processes, got one of hyperparams.learning_rate." in said


def test_steps_of_different_trainers_are_not_compared(tmp_path):
    """The first trainer has prepared steps that it never takes."""
    code, out = run(
        tmp_path,
        """
        of_pairs = lambda model, batch, key: loss_fn(model, batch[:, 0], key)
        first, second = make_trainer(deployer), make_trainer(deployer, of_pairs)
        first.fit(DATA, batch_size=8, n_epochs=2, max_steps=3)
        for _ in range(2):
            second.fit(np.stack([DATA, DATA], 1), batch_size=8, max_steps=5)
        print("done", second.step)
        """,
    )
    assert code == 0 and out.count("done 10") == 2, out


def test_rows_of_another_shape_are_cut_by_what_the_loss_does_with_them(tmp_path):
    """In the second step rows are compared with each other, so that each process needs all 10. Of means it would need 6."""
    code, out = run(
        tmp_path,
        """
        def loss_of_two_kinds(model, batch, key):
            out = jax.vmap(jax.vmap(model))(batch[..., :5])[..., 0].mean(1)
            compared = -jax.nn.log_softmax(out[:, None] * out).diagonal().mean()
            return (out**2).mean() if batch.shape[1] == 1 else compared

        texts = [x[None] for x in DATA[:16]] + [np.stack([x, -x]) for x in DATA[16:26]]
        trainer = make_trainer(deployer, loss_of_two_kinds, optimizer=optax.sgd(0.1))
        model = trainer.model
        for step in (texts[:16], texts[16:]) * 2:
            grads = eqx.filter_jit(eqx.filter_grad(loss_of_two_kinds))(model, np.stack(step), None)
            model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        for _ in range(2):
            trainer.train(texts, batch_size=16)
        for x, y in zip(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (trainer.model, model))):
            np.testing.assert_allclose(x, y, atol=1e-6)
        print(f"process {index} compared", flush=True)
        """,
    )
    assert code == 0 and all(f"process {i} compared" in out for i in (0, 1)), out


def test_a_signal_reaches_the_fit_of_the_first_of_two_deployers(tmp_path):
    """One of two processes gets the signal; both save the same step."""
    body = f"""
    import time
    def slowly(examples):
        time.sleep(0.05)
        return np.stack(examples)
    first, _ = (redeqx.Deployer(workdir={str(tmp_path)!r} + "/" + name, timeouts=redeqx.Timeouts(hang=60)) for name in "ab")
    trainer = make_trainer(first, collate_fn=slowly)
    class Says(redeqx.Callback):
        def on_step(self, trainer, metrics):
            print("step", trainer.step, os.getpid(), flush=True)
    trainer.fit(DATA, batch_size=8, n_epochs=200, callbacks=[Says()])
    """
    with begin(tmp_path, body) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("[1] step 5 "):
                    os.kill(int(line.split()[-1]), signal.SIGTERM)
                    began = time.monotonic()
                    break
            out, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert process.returncode == 75 and "[0] preempted: step" in out, out
    assert time.monotonic() - began < 45
    assert (tmp_path / "a" / "ckpts" / "ckpts.json").exists() or list((tmp_path / "a" / "ckpts").glob("step_*"))


def test_save_every_reads_the_clock_of_process_0(tmp_path):
    """A process that saves alone, or not with the others, would wait for ever."""
    body = f"""
    deployer = redeqx.Deployer(workdir={str(tmp_path / "run")!r}, verbose=False, timeouts=redeqx.Timeouts(hang=60))
    trainer = make_trainer(deployer)
    for minutes in ((1e-9, 1e9), (1e9, 1e-9)):  # as the clocks of both processes may differ
        saved = []
        class Saved(redeqx.Callback):
            def on_save(self, trainer, path):
                saved.append(trainer.step)
        callbacks = [redeqx.SaveEvery(minutes[index], every=2), Saved()]
        trainer.fit(DATA, batch_size=8, save_end=False, callbacks=callbacks)
        print(f"process {{index}} saved {{saved}}", flush=True)
    """
    code, out = run(tmp_path, body)
    assert code == 0, out
    for i in (0, 1):
        assert re.findall(rf"process {i} saved (.*)", out) == ["[2, 4, 6, 8]", "[]"], out


def test_a_deployer_outside_of_the_main_guard_works_with_worker_processes(tmp_path):
    """The workers import the script, but do not belong to the run."""
    body = """
    deployer = redeqx.Deployer(verbose=False)

    if __name__ == "__main__":
        trainer = make_trainer(deployer, workers=redeqx.Workers(1, "processes"))
        trainer.fit(DATA, batch_size=8)
        print("done", trainer.step)
    """
    code, out = run(tmp_path, "\n".join(["pass", textwrap.dedent(body)]).replace("pass\n", ""), guarded=False)
    assert code == 0 and out.count("done 8") == 2, out


SAVES = """
    deployer = redeqx.Deployer(verbose=False, n_fsdp_shards=4, workdir=os.environ["RUN"])
    model = eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(0))
    trainer = redeqx.Trainer(deployer, model=model, loss_fn=loss_fn, optimizer=optax.adam(1e-2), collate_fn=np.stack)
    trainer.fit(DATA, batch_size=8)
    print("done", jax.process_count())
"""
COMMON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NPROC": "16"}


@pytest.fixture(scope="module")
def of_redeqx_launch(tmp_path_factory):
    """A script, and its run by `redeqx launch`."""
    folder = tmp_path_factory.mktemp("launched")
    head = HEAD.partition("    deployer =")[0].replace(
        "import redeqx\n",
        'if "OWN" in os.environ:\n    jax.distributed.initialize(*eval(os.environ["OWN"]))\nimport redeqx\n',
    )
    script = folder / "script.py"
    script.write_text(head + SAVES + 'if __name__ == "__main__":\n    main()\n')
    launched = subprocess.run(
        [sys.executable, "-m", "redeqx", "launch", "--processes", "2", str(script)],
        env={**COMMON, "RUN": str(folder / "run")},
        timeout=LIMIT,
        check=False,
    )
    assert launched.returncode == 0
    return script, folder / "run"


@pytest.mark.parametrize("launcher", ["jax.distributed.initialize", "SLURM"])
def test_other_launchers_save_the_checkpoint_of_redeqx_launch(of_redeqx_launch, tmp_path, launcher):
    """Every tensor is whole: none of them holds zeros in the place of another process's part."""
    script, expected = of_redeqx_launch
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environments = {
        "jax.distributed.initialize": lambda i: {"OWN": repr((f"127.0.0.1:{port}", 2, i))},
        "SLURM": lambda i: {
            "SLURM_JOB_ID": str(port),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": str(i),
            "HOME": str(tmp_path),
        },
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**COMMON, "RUN": str(tmp_path / "own"), **environments[launcher](i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, out in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and "done 2" in out, out
    for name in ("model", "optimizer"):
        saved = [(run / f"ckpts/step_00000008/{name}.safetensors").read_bytes() for run in (expected, tmp_path / "own")]
        assert saved[0] == saved[1]
    model = redeqx.load(tmp_path / "own", eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)))
    assert all(np.abs(np.asarray(leaf)).min() > 0 for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


ROWS = """
from contextlib import closing
from redeqx.data import BatchSize, CollatePool, batches, slices

sizes = []

def collate_fn(examples):
    sizes.append(len(examples))
    return np.stack(examples)

def of_all(model, batch, key):
    return jax.nn.logsumexp(jax.vmap(model)(batch[:, :5])[:, 0])

size = BatchSize.of(deployer.mesh, None, 14)
tokens = np.zeros((14, 7), np.int32)
with closing(batches(slices(tokens, 14), CollatePool(collate_fn), size, deployer.mesh)) as upcoming:
    print("tokens", next(upcoming).n_tokens, "of rows", sizes, flush=True)
model = eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(0))
print("plain", float(of_all(model, DATA[:14], None)), flush=True)
print("loss", make_trainer(deployer, of_all).update(DATA[:14])["loss"], flush=True)
pred_fn = lambda model, batch, key: jax.vmap(model)(batch[:, :5])[:, 0]
predictor = redeqx.Predictor(deployer, model=model, collate_fn=np.stack, pred_fn=pred_fn)
(found,), expected = predictor.predict(DATA[:1], batch_size=4), model(DATA[0, :5])[0]  # a process has no row of its own
print("one row", np.allclose(found, expected, rtol=1e-6), flush=True)
"""


POSITIONS = """
def attend(model, batch, key):
    x = batch[:, :, :4]  # the rows of each device are those of all, and each computes some of their positions
    out = jax.vmap(lambda x: model(x, x, x, mask=np.tri(16, dtype=bool)))(x)
    return ((jax.numpy.cumsum(out, 1) - batch[:, :, 4:]) ** 2).mean()

texts = DATA[:, :1].reshape(4, 16, 1) + np.arange(8, dtype=np.float32) / 8
model = eqx.nn.MultiheadAttention(4, 4, key=jax.random.key(0))
loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(attend))(model, texts, None)
across = redeqx.Deployer(verbose=False, n_sequence_shards=4)
trainer = make_trainer(across, attend, model=model, optimizer=optax.sgd(1.0))
print("alike", np.allclose(trainer.update(texts)["loss"], loss, rtol=1e-6), flush=True)
moved = jax.tree.map(lambda old, new: old - new, *(eqx.filter(each, eqx.is_array) for each in (model, trainer.model)))
for found, grad in zip(jax.tree.leaves(moved), jax.tree.leaves(grads), strict=True):
    print("alike", np.allclose(found, grad, rtol=1e-4, atol=1e-5), flush=True)
try:
    trainer.update(texts[: (4, 2)[index]])
except ValueError as error:
    print(error, flush=True)
"""


def test_two_processes_split_the_positions_of_rows_that_they_share(tmp_path):
    code, out = run(tmp_path, POSITIONS)
    assert code == 0 and out.count("alike True") == 10 and "alike False" not in out, out
    assert "expected" in out and "process 1" in out, out


def test_each_process_reads_the_rows_that_its_devices_need_once(tmp_path):
    """12 rows over four devices, and two on each of them; but all rows for a loss that mixes them, once that is known."""
    code, out = run(tmp_path, ROWS)
    assert code == 0 and re.findall(r"tokens (\d+) of rows \[(\d+)\]", out) == [("98", "8")] * 2, out
    losses = [float(loss) for loss in re.findall(r"(?:plain|loss) (\d\S+)", out)]
    assert len(losses) == 4 and out.count("one row True") == 2, out
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
