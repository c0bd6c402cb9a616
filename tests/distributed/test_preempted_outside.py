"""A scheduler's signal outside of a fit ends the script with exit code 75, after saving what a rerun needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 120.0  # seconds; each run takes about ten
SCRIPT = """
import multiprocessing, os, signal, sys, threading, time, warnings
os.environ.setdefault("NPROC", "16")
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import redeqx

where, number = sys.argv[1], getattr(signal, sys.argv[2])
first = redeqx.Deployer(workdir="first", verbose=False) if where == "second" else None
deployer = redeqx.Deployer(workdir=None if where == "worker" else "run", verbose=False, n_model_shards=2)
is_first = jax.process_index() == 0
trainer = redeqx.Trainer(
    deployer, model=eqx.nn.Linear(3, 2, key=jax.random.key(0)), optimizer=optax.adam(0.1), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
)
rows = [np.ones(3, np.float32)] * 16

def send():
    if is_first:
        os.kill(os.getpid(), number)

class Sends(list):
    def __getitem__(self, i):
        send()
        return rows[0]

if where in ("slow", "twice"):  # a save that takes longer than processes wait for each other
    redeqx.distributed._interrupts._GRACE, fsync = 2.0, os.fsync
    def slow(fd, waits=[4.0], is_twice=where == "twice"):
        if waits and is_twice:
            threading.Timer(1.0, send).start()
        time.sleep(waits.pop() if waits else 0)
        fsync(fd)
    os.fsync, where = slow, "loop"
if where == "data":
    send()
    time.sleep(30)
if where == "loop":
    for step in range(trainer.resume(), 10):
        trainer.update(rows)
        if trainer.step == 4:
            send()
if where in ("inside", "second"):
    for step in range(trainer.resume(), 10):
        trainer.update(Sends(rows) if trainer.step == 4 else rows)
if where == "bare":
    for step in range(10):
        trainer.update(rows)
        if trainer.step == 4:
            send()
if where == "evaluation":
    trainer.fit(rows, batch_size=8, n_epochs=2)
    trainer.eval_loss(Sends(rows), batch_size=8)
    time.sleep(30)
if where == "saving":
    fsync = os.fsync
    def send_then_sync(file):
        send()
        fsync(file)
    os.fsync = send_then_sync
    trainer.update(rows)
    trainer.save_ckpt()
    time.sleep(30)
if where == "failing":
    def fail(file):
        raise RuntimeError("no disk")
    trainer.resume()
    trainer.update(rows)
    os.fsync = fail
    send()
    time.sleep(30)
if where == "thread":
    fit = threading.Thread(target=lambda: trainer.fit(rows * 400, batch_size=8, n_epochs=2))
    fit.start()
    while trainer.step < 5:
        time.sleep(0.01)
    send()
    fit.join()
    time.sleep(30)
if where == "child":
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join(20)
    print("child", child.exitcode)
if where == "worker":
    def make():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            redeqx.Deployer(workdir="elsewhere", verbose=False)
        print(*(each.message for each in caught))
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
if where == "own":
    signal.signal(number, lambda *_: print("own"))
    send()
    redeqx.Deployer(workdir="other", verbose=False)
    send()
print("ended at", trainer.step)
"""


def run(folder, *arguments, n=1):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NPROC": "16"}
    (folder / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "redeqx", "launch", "--processes", str(n)] if n > 1 else [sys.executable]
    return subprocess.run(
        [*launch, "script.py", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT,
        check=False,
    )  # fmt: skip


def saved(folder):
    return sorted(path.name for path in (folder / "run").glob("ckpts/step_*"))


@pytest.mark.parametrize(
    ("where", "number", "step"),
    [
        ("saving", "SIGTERM", 1),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in [
            ("loop", "SIGTERM", 4), ("failing", "SIGTERM", None),
            ("bare", "SIGTERM", None), ("evaluation", "SIGTERM", 4),
            ("data", "SIGUSR1", None), ("second", "SIGTERM", 5),  # within an update of the second of two deployers
        ]),
    ],
)  # fmt: skip
def test_a_signal_outside_of_a_fit_saves_and_ends_with_75(tmp_path, where, number, step):
    ended = run(tmp_path, where, number)
    assert ended.returncode == 75, ended.stderr
    assert "ended at" not in ended.stdout
    assert "redeqx: preempted outside of `fit`. Leaving with exit code 75: run it again to go on.\n" in ended.stderr
    assert saved(tmp_path) == ([] if step is None else [f"step_{step:08d}"])
    if where == "failing":
        assert "redeqx: preempted: the newest step could not be saved: no disk\n" in ended.stderr
    if where == "loop":
        assert f"redeqx: preempted: step {step} is saved\n" in ended.stderr
        again = run(tmp_path, "inside", number)
        assert (again.returncode, again.stdout) == (75, ""), again.stderr
        assert saved(tmp_path)[-1] == "step_00000005"  # the update within which the signal came


@pytest.mark.sweep
@pytest.mark.parametrize(("where", "n"), [("twice", 1), ("slow", 2)])
def test_nothing_ends_the_script_before_its_save_is_complete(tmp_path, where, n):
    """Neither a second signal, nor the limit within which several processes reach the same update."""
    ended = run(tmp_path, where, "SIGTERM", n=n)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 75, output
    (name,) = saved(tmp_path)
    assert f"redeqx: preempted: step {int(name[5:])} is saved\n" in output


@pytest.mark.sweep
def test_a_fit_in_another_thread_saves_and_ends_the_process(tmp_path):
    ended = run(tmp_path, "thread", "SIGTERM")
    assert ended.returncode == 75, ended.stderr
    (name,) = saved(tmp_path)
    assert 5 <= int(name[5:]) < 400


@pytest.mark.sweep
@pytest.mark.parametrize("where", ["data", "inside"])
def test_all_processes_end_with_75(tmp_path, where):
    """Only the first gets the signal. Of a loop, all save the same update."""
    ended = run(tmp_path, where, "SIGTERM", n=2)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    output = ended.stdout + ended.stderr
    assert "ended at" not in output
    if where == "data":
        assert saved(tmp_path) == []
        return
    (name,) = saved(tmp_path)
    assert 5 <= int(name[5:]) <= 7
    assert len(re.findall(f"preempted: step {int(name[5:])} is saved", output)) == 2, output
    again = run(tmp_path, "loop", "SIGTERM")
    assert (again.returncode, again.stdout) == (0, "ended at 10\n"), again.stderr


@pytest.mark.sweep
def test_signals_of_children_stay_theirs(tmp_path):
    ended = run(tmp_path, "child", "SIGTERM")
    assert (ended.returncode, ended.stdout) == (0, "child -15\nended at 0\n"), ended.stderr


@pytest.mark.sweep
def test_a_handler_of_the_script_stays(tmp_path):
    ended = run(tmp_path, "own", "SIGTERM")
    assert (ended.returncode, ended.stdout) == (0, "own\nown\nended at 0\n"), ended.stderr


@pytest.mark.sweep
def test_a_deployer_outside_of_the_main_thread_says_what_a_signal_does(tmp_path):
    ended = run(tmp_path, "worker", "SIGTERM")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        "`Deployer`: expected in the main thread, which handles signals, got another one: SIGTERM "
    )
