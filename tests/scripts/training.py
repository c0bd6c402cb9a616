"""A training run, complete or with one injected fault, that tests start as one process or several.

python -m redeqx launch --processes 2 tests/scripts/training.py --workdir DIR [--fault NAME]
"""

import argparse
import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx

parser = argparse.ArgumentParser()
parser.add_argument("--workdir", type=Path)
parser.add_argument("--devices", type=int, default=2, help="number of devices of this process")
parser.add_argument("--model", type=int, default=2)
parser.add_argument("--fsdp", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=16, help="examples a step")
parser.add_argument("--save-every", type=int, default=3)
parser.add_argument("--always", action="store_true", help="save all the time, instead of every few steps and each epoch")
parser.add_argument("--step-seconds", type=float, default=0.0, help="a step takes so much longer")
parser.add_argument("--heartbeat", type=float, default=30.0)
parser.add_argument("--start", type=float, default=300.0)
parser.add_argument("--hang", type=float)
parser.add_argument("--rest", action="store_true", help="epochs, evaluations and predictions that end in a smaller batch")
parser.add_argument("--ragged", action="store_true", help="rows are as long as the longest of their batch")
parser.add_argument("--centred", action="store_true", help="rows are centred by the mean of their batch")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--fault", default="none")
parser.add_argument("--at", type=int, default=8, help="the step before which the fault happens")
parser.add_argument("--in", type=int, default=1, dest="culprit", help="the process with the fault")
parser.add_argument("--params-only", action="store_true", help="save no optimizer state")
parser.add_argument("--stop-at", type=int, help="the step after which that process stops the fit")
parser.add_argument("--skip", action="store_true", help="skip steps that are not finite")
args = parser.parse_args()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", args.devices)

# Without `--rest`, each of the three steps compiles only once.
N, N_EVALUATED, N_PREDICTED = (101, 37, 19) if args.rest else (112, 32, 16)
options = {"on_nonfinite": "skip"} if args.skip else {}
deployer = redeqx.Deployer(
    jax_seed=args.culprit if args.fault == "seed" and os.environ.get("REDEQX_PROCESS_ID") == str(args.culprit) else 0,
    n_model_shards=args.model,
    n_fsdp_shards=args.fsdp,
    workdir=args.workdir,
    timeouts=redeqx.Timeouts(heartbeat=args.heartbeat, start=args.start, hang=args.hang),
)
is_culprit = deployer.peers.index == args.culprit or deployer.peers.n == 1


class Net(eqx.Module):
    up: eqx.nn.Linear
    drop: eqx.nn.Dropout
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(16, 64, key=keys[0]), eqx.nn.Linear(64, 8, key=keys[1])
        self.drop = eqx.nn.Dropout(args.dropout)

    def __call__(self, x, key):
        return self.down(self.drop(jax.nn.gelu(self.up(x)), key=key))


class Examples:
    """An example is its index, from which `collate_fn` makes its row. Faults occur while an example is read."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        if trainer.step >= args.at - 1 and is_culprit and not fired.is_set():
            FAULTS.get(args.fault, lambda: None)()
        return i


fired = threading.Event()


def report_fault(what):
    """Prints when the fault happened, so that tests can time what follows."""
    fired.set()
    print(f"fault {what} at {time.time():.3f}", flush=True)


def fails():
    report_fault("raise")
    raise RuntimeError("the loader is broken")


def kills():
    report_fault("kill")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    report_fault("hang")
    time.sleep(600)


def stops():
    report_fault("stop")
    os.kill(os.getpid(), signal.SIGSTOP)


def signals(*numbers):
    def send():
        report_fault("signal")
        for number in numbers:
            os.kill(os.getpid(), number)

    return send


def forks():
    """Child processes that end, are terminated or fail must not affect the other processes."""
    report_fault("fork")
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
    sleeping = fork.Process(target=time.sleep, args=(600,))
    sleeping.start()
    sleeping.terminate()
    sleeping.join(20)
    if (pid := os.fork()) == 0:
        raise RuntimeError("the child's own")
    print("children", sleeping.exitcode, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def interrupts_twice():
    signals(signal.SIGINT)()
    time.sleep(0.7)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)


def vanishes():
    report_fault("vanish")
    args.workdir.rename(args.workdir.with_name("gone"))


def steps_clock():
    """Steps the wall clock of all processes, which a library preloaded by the test reads from a file."""
    report_fault("clock")
    for seconds in (20, 5):  # forward, and back by 15
        Path(os.environ["CLOCK_STEP"]).write_bytes(seconds.to_bytes(8, "little"))
        time.sleep(4)  # the runtime compares heartbeats meanwhile


FAULTS = {
    "vanished": vanishes,
    "clock": steps_clock,
    "raise": fails,
    "kill": kills,
    "hang": hangs,
    "stop": stops,
    "int": signals(signal.SIGINT),
    "int_twice": interrupts_twice,
    "twice": signals(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1),
}


def collate_fn(numbers):
    if args.workdir is not None:
        peers = deployer.peers
        path = args.workdir / f"rows_{peers.index}_of_{peers.n}.jsonl"
        with suppress(FileNotFoundError), open(path, "a") as file:
            file.write(json.dumps([trainer.step, numbers]) + "\n")
    length = 20 if args.fault == "shape" and is_culprit and trainer.step >= args.at - 1 else 16
    rows = [np.random.default_rng(i).normal(size=24).astype(np.float32) for i in numbers]
    length = 16 + max(i % 8 for i in numbers) if args.ragged else length
    x, y = np.stack([row[:length] for row in rows]), np.stack([row[16:] for row in rows])
    if args.fault == "nan":
        x = np.where(np.asarray(numbers)[:, None] == 7, np.nan, x)
    return {"x": x - x.mean(0) if args.centred else x, "y": y}


def loss_fn(model, batch, key):
    keys = jax.random.split(key, len(batch["x"]))
    return jnp.square(jax.vmap(model)(batch["x"][:, :16], keys) - batch["y"]).mean() * (batch["x"].shape[1] / 16)


def break_call(call, number):
    """Makes a system call fail as on a full or read-only disk, once the first save has succeeded."""
    before = getattr(os, call)

    def fail(*arguments, **keywords):
        if (args.workdir / "ckpts" / "index.json").exists() and is_culprit:
            raise OSError(number, os.strerror(number))
        return before(*arguments, **keywords)

    setattr(os, call, fail)


if args.fault == "disk":
    break_call("pwrite", errno.ENOSPC)
if args.fault == "readonly":
    break_call("mkdir", errno.EROFS)

if args.fault == "sequential":  # as on a mounted object store

    def unsupported(*arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    os.pwrite = os.posix_fallocate = unsupported
if args.fault == "unshared" and is_culprit:  # as a folder of the same name on a local disk
    deployer._workdir = args.workdir.with_name("elsewhere")
    deployer._workdir.mkdir(exist_ok=True)


def has_fault(fault):
    return is_culprit and args.fault == fault


if args.fault == "weights":  # initialized by each process itself
    model = Net(jax.random.key(2 if is_culprit else 1))
else:
    model = deployer.init(lambda: Net(jax.random.key(2 if has_fault("init") else 1)))
trainer = redeqx.Trainer(
    deployer,
    model=model,
    optimizer=optax.adamw(2e-2 if has_fault("rate") else 1e-2),
    collate_fn=collate_fn,
    loss_fn=loss_fn,
    **options,
)


class Stop(redeqx.Callback):
    def on_step(self, trainer, metrics):
        if trainer.step == args.stop_at and is_culprit:
            trainer.stop()


class Wait(redeqx.Callback):
    def on_step(self, trainer, metrics):
        time.sleep(args.step_seconds)


callbacks: list[redeqx.Callback] = [] if args.stop_at is None else [Stop()]
callbacks += ([Wait()] if args.step_seconds else []) + ([redeqx.SaveEvery("always", every=1)] if args.always else [])
if args.fault == "forks" and is_culprit:
    forks()
if args.fault == "ends" and is_culprit:
    sys.exit(0)
if args.fault == "metric":  # computed from each process's own rows: it rises in one process and falls in another
    options = {
        "eval_predictor": trainer.get_default_predictor(lambda model, batch, key: batch["y"]),
        "eval_metric_fn": lambda examples, outputs: {"score": -trainer.step if is_culprit else trainer.step},
        "save_argmax_ckpt_by_metrics": ["score"],
        "eval_every_n_steps": 3,
    }
else:
    options = {}
metrics = trainer.fit(
    Examples(),
    args.batch // deployer.n_batch_shards,
    args.epochs,
    eval_examples=list(range(N, N + N_EVALUATED)),
    save_every_n_steps=args.save_every if args.workdir and not args.always else None,
    save_last_ckpt=args.workdir is not None and not args.always,
    save_opt_states=not args.params_only,
    callbacks=callbacks,
    **options,
)
predictor = trainer.get_default_predictor(
    lambda model, batch, key: jax.vmap(lambda x: model(x[:16], None) * (len(x) / 16))(batch["x"])
)
outputs = np.stack(predictor.predict(list(range(N, N + N_PREDICTED)), 2))
if deployer.peers.index == 0:
    print(json.dumps({"metrics": metrics, "outputs": float(np.abs(outputs).sum())}))
sys.exit(0)
