"""Injects random faults into runs of two processes and restarts them; the final bits must equal those of an undisturbed run.

    python tests/benchmarks/soak.py [--faults 30] [--seed 0] [--epochs 240]
    python tests/benchmarks/soak.py --kill-every 60 --processes 4 --epochs 429 --step-seconds 0.5    # 3,000 steps

At random times, one or both processes are killed (SIGKILL), frozen until the other exits, or preempted (SIGTERM); then the
run is restarted. Parameters and optimizer state are compared bit for bit with those of an undisturbed run on the same
layout. Runs are repeated until all faults have been injected. Prints one line per fault; exits with 1 if the bits differ.

With `--kill-every`, one process is killed whenever that many steps were taken since the start, and `SaveEvery("always")`
saves. Prints the share of the steps that were kept, not taken again, and the time by cause.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from redeqx.checkpoint import CheckpointManager, TensorReader

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "training.py"
LIMIT = 300.0


def start(workdir, epochs, n=2, options=("--save-every", "2")):
    """Starts the processes, without the launcher, so that a fault can hit only one of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "--workdir", str(workdir), "--devices", str(4 // n), "--epochs", str(epochs)]
    # A killed process is noticed by its connection; four that share a busy machine may not run for a minute.
    command += [*options, "--heartbeat", "3" if n == 2 else "200", "--start", "20" if n == 2 else "200"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPROC": "16", "REDEQX_PROCESSES": str(n)}
    environment["REDEQX_HOST0"] = f"127.0.0.1:{port}"
    return [
        subprocess.Popen(
            command, env={**environment, "REDEQX_PROCESS_ID": str(i)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for i in range(n)
    ]


def wait(processes, limit=LIMIT):
    """Returns the exit codes; kills frozen processes once the others have exited."""
    until = time.monotonic() + limit
    while (n_running := sum(process.poll() is None for process in processes)) and time.monotonic() < until:
        if n_running < len(processes):
            patience = 5 if len(processes) == 2 else 60  # the time that a process gets to exit after another
            until = min(until, time.monotonic() + patience)
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
    path = CheckpointManager(workdir / "ckpts").resolve("last")
    files = {kind: TensorReader(path / f"{kind}.safetensors") for kind in ("model", "optimizer")}
    return {f"{kind}:{name}": file.read(name).tobytes() for kind, file in files.items() for name in file.names()}


def step_of(workdir):
    checkpoints = CheckpointManager(workdir / "ckpts")
    return checkpoints.record(checkpoints.resolve("last"))["step"] if "last" in checkpoints.index() else 0


def last_row(path, since=0):
    """Returns the last row of a file of JSON lines; an empty dict if there is none, or none since a time (ns)."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() and path.stat().st_mtime_ns > since else []
    return json.loads(lines[-1]) if lines else {}


def kill_regularly(args, root, rng):
    """Kills a process after every so many steps; returns the exit code."""
    n, total = args.processes, 7 * args.epochs
    codes = wait(start(root / "whole", args.epochs, n, ["--always"]), LIMIT + total)
    assert codes == [0] * n, codes
    print(f"undisturbed: {step_of(root / 'whole')} steps", flush=True)
    workdir, n_taken, n_kills = root / "killed", 0, 0
    options = ["--always", "--step-seconds", str(args.step_seconds)]
    while codes != [0] * n or not n_taken:
        begins = reached = step_of(workdir)
        since = time.time_ns()  # until they begin to record, the last step is that of those that were killed
        processes, has_killed = start(workdir, args.epochs, n, options), False
        until = time.monotonic() + LIMIT + args.kill_every * (args.step_seconds + 1)
        while all(process.poll() is None for process in processes) and time.monotonic() < until:
            reached = max(reached, last_row(workdir / "metrics.jsonl", since).get("step", 0))
            if begins + args.kill_every <= reached < total - 1:
                hit(processes, "kill", [rng.integers(n)])
                has_killed = True
                break
            time.sleep(0.02)
        codes = wait(processes, LIMIT)
        reached = max(reached, last_row(workdir / "metrics.jsonl", since).get("step", 0))
        n_taken, n_kills = n_taken + reached - begins, n_kills + has_killed
        print(f"{n_kills} kills: codes {codes}, steps {begins} to {reached}, saved {step_of(workdir)}", flush=True)
    print(f"{total} steps of {n_taken} taken: {total / n_taken:.1%} kept with {n_kills} kills")
    row = last_row(workdir / "speed.jsonl")
    print({name: x for name, x in row.items() if name.startswith(("seconds_", "goodput"))})
    same = bits(workdir) == bits(root / "whole")
    print("the bits of the undisturbed run" if same else f"expected the bits of {root / 'whole'}, got others in {workdir}")
    return 0 if same else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=240, help="seven steps each")
    parser.add_argument("--kill-every", type=int, help="steps")
    parser.add_argument("--processes", type=int, default=4, choices=(1, 2, 4), help="with --kill-every; four devices in all")
    parser.add_argument("--step-seconds", type=float, default=0.5, help="with --kill-every: how much longer a step takes")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    root = Path(tempfile.mkdtemp(prefix="redeqx-soak-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if args.kill_every is not None:
        return kill_regularly(args, root, rng)
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
