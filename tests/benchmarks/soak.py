"""Injects random faults into runs of two processes and restarts them; the final bits must equal those of an undisturbed run.

    python tests/benchmarks/soak.py [--faults 30] [--seed 0] [--epochs 240]

At random times, one or both processes are killed (SIGKILL), frozen until the other exits, or preempted (SIGTERM); then the
run is restarted. Parameters and optimizer state are compared bit for bit with those of an undisturbed run on the same
layout. Runs are repeated until all faults have been injected. Prints one line per fault; exits with 1 if the bits differ.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from redeqx.checkpoint import Checkpoints, TensorReader

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "training.py"
LIMIT = 300.0


def start(workdir, epochs):
    """Starts the two processes, without the launcher, so that a fault can hit only one of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "--workdir", str(workdir), "--devices", "2", "--epochs", str(epochs)]
    command += ["--save-every", "2", "--heartbeat", "3", "--start", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPROC": "16", "REDEQX_PROCESSES": "2"}
    environment["REDEQX_HOST0"] = f"127.0.0.1:{port}"
    return [
        subprocess.Popen(
            command, env={**environment, "REDEQX_PROCESS_ID": str(i)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for i in range(2)
    ]


def wait(processes):
    """Returns the exit codes; kills frozen processes once the others have exited."""
    until = time.monotonic() + LIMIT
    while (n_running := sum(process.poll() is None for process in processes)) and time.monotonic() < until:
        if n_running < len(processes):
            until = min(until, time.monotonic() + 5)  # the time that a process gets to exit after another
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def wait_for_steps(processes, workdir):
    """Waits until a new batch has been read, or a process has exited."""
    path, until = workdir / "rows_0_of_2.jsonl", time.monotonic() + LIMIT
    read = path.stat().st_size if path.exists() else 0
    while all(process.poll() is None for process in processes) and time.monotonic() < until:
        if path.exists() and path.stat().st_size > read:
            return
        time.sleep(0.05)


def hit(processes, fault, who):
    for i in who:
        if processes[i].poll() is None:
            processes[i].send_signal({"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGTERM}[fault])


def bits(workdir):
    path = Checkpoints(workdir / "ckpts").resolve("last")
    files = {kind: TensorReader(path / f"{kind}.safetensors") for kind in ("model", "optimizer")}
    return {f"{kind}:{name}": file.read(name).tobytes() for kind, file in files.items() for name in file.names()}


def step_of(workdir):
    checkpoints = Checkpoints(workdir / "ckpts")
    return checkpoints.record(checkpoints.resolve("last"))["step"] if "last" in checkpoints.index() else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=240, help="seven steps each")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    root = Path(tempfile.mkdtemp(prefix="redeqx-soak-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    began = time.monotonic()
    codes = wait(start(root / "whole", args.epochs))
    assert codes == [0, 0], codes
    seconds = time.monotonic() - began
    print(f"undisturbed: {step_of(root / 'whole')} steps in {seconds:.0f} s", flush=True)
    expected, n_faults, n_runs = bits(root / "whole"), 0, 0
    while n_faults < args.faults:
        n_runs += 1
        workdir, step, codes = root / f"run_{n_runs}", 0, [1, 1]
        while codes != [0, 0]:
            processes, what = start(workdir, args.epochs), "none"
            if n_faults < args.faults:
                fault, who = rng.choice(["kill", "kill", "freeze", "stop"]), [[0], [1], [0, 1]][rng.integers(3)]
                if rng.random() < 0.8:  # else at startup, during rendezvous and compilation
                    wait_for_steps(processes, workdir)
                time.sleep(rng.uniform(0.0, 4.0))
                if all(process.poll() is None for process in processes):
                    who = who if fault != "freeze" else who[:1]
                    hit(processes, fault, who)
                    n_faults, what = n_faults + 1, f"{fault} {who}"
            codes = wait(processes)
            before, step = step, step_of(workdir)
            print(f"{n_faults} faults, run {n_runs}: {what}: codes {codes}, step {before} -> {step}", flush=True)
            if step < before:
                print(f"expected no step to be lost, got {step} after {before}")
                return 1
        if bits(workdir) != expected:
            print(f"expected the bits of {root / 'whole'}, got others in {workdir}")
            return 1
    print(f"{n_faults} faults in {n_runs} runs, {time.monotonic() - began:.0f} s: all ended with the same bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
