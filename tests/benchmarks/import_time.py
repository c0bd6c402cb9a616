"""The time of `import redeqx` relative to its required dependencies.

    python tests/benchmarks/import_time.py [--rounds 10] [--slowest 15]

Each round runs three processes in turn: `import jax, equinox, optax`; `import redeqx`; and `import redeqx.models`. Prints
the median seconds of each process, and their ratios. A first round, which is not counted, compiles the files. `--slowest`
also prints the slowest modules other than those of jax, equinox and optax, by their own time.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from statistics import median

BASE = "jax, equinox, optax"
IMPORTED = (BASE, "redeqx", "redeqx.models")


def seconds(imported, env):
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {imported}"], env=env, check=True, timeout=100)
    return time.perf_counter() - began


def slowest(n, env):
    """Returns the `n` slowest modules that `import redeqx` adds: own milliseconds and name."""
    code = f"import {BASE}, sys; print('now', file=sys.stderr, flush=True); import redeqx"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], env=env, capture_output=True, text=True, check=True, timeout=100
    )
    rows = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr.partition("\nnow\n")[2])
    return sorted(((int(us) / 1000, name) for us, name in rows), reverse=True)[:n]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slowest", type=int, default=0, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        rounds = [[seconds(imported, env) for imported in IMPORTED] for _ in range(args.rounds + 1)][1:]
        modules = slowest(args.slowest, env)
    medians = [median(column) for column in zip(*rounds, strict=True)]
    for imported, taken in zip(IMPORTED, medians, strict=True):
        print(f"import {imported:20} {taken:6.3f} s   {taken / medians[0]:.2f}")
    for ms, name in modules:
        print(f"{ms:8.1f} ms  {name}")


if __name__ == "__main__":
    main()
