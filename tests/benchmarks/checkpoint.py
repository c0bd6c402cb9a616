"""Speed of saving and restoring checkpoints relative to the disk, and the cost of a background save for the steps.

    python tests/benchmarks/checkpoint.py [--gib 1.0] [--rounds 3]      # 8 simulated devices; with a folder: --folder DIR
    python -m redeqx launch --processes 2 tests/benchmarks/checkpoint.py    # 4 in each of 2 processes, no gathering
    python tests/benchmarks/checkpoint.py --always [--steps 60]    # only: a step with `SaveEvery("always")` over one without

Each round measures in turn: `dd` with fsync of the same number of bytes, which like a save writes a new file and removes the
previous one; `CheckpointManager.save`; gathering the arrays on the host and `safetensors.numpy.save_file`;
`CheckpointManager.load`; steps of a jitted function over the same arrays, alone and during a background save. Prints
medians, and the peak memory of this process minus its memory before.

`--always`: fits of an MLP (33 million parameters, SGD with momentum: 256 MiB), in turns without saves and with them.
"""

import argparse
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("NPROC", "16")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

import redeqx
from redeqx.checkpoint import CheckpointManager
from redeqx.distributed import start
from redeqx.machine import make_mesh


def seconds(act):
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Peak:
    """A context manager that measures the peak memory of this process in bytes, minus its memory at entry."""

    def __enter__(self):
        self._open, self._before, self.bytes = True, resident(), 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self):
        while self._open:
            self.bytes = max(self.bytes, resident() - self._before)
            time.sleep(0.005)

    def __exit__(self, *_):
        self._open = False
        self._thread.join()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def copy(path, before, n_bytes):
    dd = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={n_bytes // 2**24}", "conv=fsync"]
    subprocess.run(dd, check=True, capture_output=True)
    before.unlink(missing_ok=True)


class Times(redeqx.Callback):
    """Notes when each step has ended, and the checkpoints."""

    def __init__(self, folder):
        self.folder, self.times, self.saved = folder, [], set()

    def on_step(self, trainer, metrics):
        self.times.append((time.perf_counter(), time.process_time()))
        self.saved |= {path.name for path in self.folder.glob("ckpts/step_*")}


def always(folder, n_steps, rounds):
    """Prints the time of a step with `SaveEvery("always")`, and without, by the clock and of the processor."""
    width, rows = 2048, 128
    examples = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    found, n_saved = {"alone": [], "always": []}, []  # seconds of a step, by the clock and of the processor
    for i in range(rounds):
        for case, seconds in found.items():
            workdir = folder / f"{case}_{i}"
            deployer = redeqx.Deployer(n_fsdp_shards=4, workdir=workdir, verbose=False)
            key = deployer.next_key()
            trainer = redeqx.Trainer(
                deployer,
                model=deployer.init(lambda key=key: eqx.nn.MLP(width, width, width, 7, key=key)),
                optimizer=optax.sgd(1e-3, 0.9),
                collate_fn=np.stack,
                loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
            )
            times = Times(workdir)
            callbacks = [times, redeqx.SaveEvery("always", every=1)] if case == "always" else [times]
            trainer.fit(examples, batch_size=rows, max_steps=n_steps, save_end=False, callbacks=callbacks)
            first, last = times.times[1], times.times[-1]  # the step before compiles
            seconds.append([(b - a) / (n_steps - 2) for a, b in zip(first, last, strict=True)])
            n_saved += [len(times.saved)] if case == "always" else []
            shutil.rmtree(workdir)
    for i, clock in enumerate(("by the clock", "of the processor")):
        alone, saving = ([each[i] for each in found[case]] for case in ("alone", "always"))
        ratio = median(a / b for a, b in zip(saving, alone, strict=True))
        text = f"{median(alone) * 1e3:.0f} ms alone, {median(saving) * 1e3:.0f} with saves, {ratio:.3f} of it"
        print(f"a step, {clock}: {text}")
    print(f"saves: {n_saved}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // int(os.environ.get("REDEQX_PROCESSES", "1")))
    if args.always:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            always(Path(folder), args.steps, args.rounds)
        return
    peers = start(None, None, None, None, None)
    alone = peers.n == 1
    mesh = make_mesh(4)
    n, width = 16, 4096
    rows = int(args.gib * 2**30 / 4 / width / n) // 8 * 8
    specs = [P("model", None), P(None, "model")]
    shardings = [NamedSharding(mesh, specs[i % 2]) for i in range(n)]
    make = jax.jit(lambda: [jnp.full((rows, width), i, jnp.float32) for i in range(n)], out_shardings=shardings)
    arrays = make()
    n_bytes = sum(array.nbytes for array in arrays)
    names = [f"layer_{i}" for i in range(n)]
    step = jax.jit(lambda arrays: [jnp.sin(x) for x in arrays], donate_argnums=0, out_shardings=shardings)
    arrays = jax.block_until_ready(step(arrays))
    template = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in zip(names, arrays, strict=True)
    }
    folder = args.folder / "redeqx_checkpoint_benchmark"
    folder.mkdir(exist_ok=not alone)
    found = {key: [] for key in ("dd", "save", "gather", "load", "step", "stall", "with a save")}
    memory = {}
    try:
        checkpoints = CheckpointManager(folder / "ckpts", peers)
        for i in range(args.rounds):
            if peers.index == 0:
                found["dd"].append(seconds(lambda i=i: copy(folder / f"dd_{i}", folder / f"dd_{i - 1}", n_bytes)))
            peers.gather("dd")
            tree = dict(zip(names, arrays, strict=True))
            with Peak() as peak:
                found["save"].append(
                    seconds(lambda i=i, tree=tree: checkpoints.save(2 * i, {"model": tree}, {}, keep_last=1))
                )
            memory["save"] = max(memory.get("save", 0), peak.bytes)

            def gather(tree=tree):
                save_file({name: np.array(x) for name, x in tree.items()}, folder / "gathered.safetensors")
                with open(folder / "gathered.safetensors", "rb+") as file:
                    os.fsync(file.fileno())

            if alone:
                with Peak() as peak:
                    found["gather"].append(seconds(gather))
                memory["gather"] = max(memory.get("gather", 0), peak.bytes)
            subprocess.run(["sync"], check=True)
            path = checkpoints.resolve("last")
            found["load"].append(
                seconds(
                    lambda path=path: jax.block_until_ready(
                        checkpoints.load(path, "model", template, lambda name: template[name].sharding)
                    )
                )
            )
            for _ in range(5):
                began = time.perf_counter()
                arrays = jax.block_until_ready(step(arrays))
                found["step"].append(time.perf_counter() - began)
            tree = dict(zip(names, arrays, strict=True))
            with Peak() as peak:
                stall = seconds(
                    lambda i=i, tree=tree: checkpoints.save(
                        2 * i + 1, {"model": tree}, {}, keep_last=1, then=lambda path: None
                    )
                )
                del tree
                found["stall"].append(stall)
                for _ in range(5):
                    began = time.perf_counter()
                    arrays = jax.block_until_ready(step(arrays))
                    found["with a save"].append(time.perf_counter() - began)
                checkpoints.wait()
            memory["background"] = max(memory.get("background", 0), peak.bytes)
    finally:
        peers.gather("end")
        if peers.index == 0:
            shutil.rmtree(folder)
    if peers.index != 0:
        return
    of = {key: median(values) for key, values in found.items() if values}
    gib, largest = n_bytes / 2**30, max(x.nbytes for x in arrays) / 2**20
    mib = {key: f"{value / 2**20:,.0f} MiB more at its most" for key, value in memory.items()}
    print(f"{gib:.2f} GiB in {n} arrays, the largest {largest:,.0f} MiB, over {mesh.size} devices of {peers.n} process(es)")
    print(f"  dd with fsync      {gib / of['dd']:6.2f} GiB/s")
    print(f"  save               {gib / of['save']:6.2f} GiB/s, {of['dd'] / of['save']:.2f} of dd; {mib['save']}")
    if alone:
        print(f"  gather, save_file  {gib / of['gather']:6.2f} GiB/s, {of['dd'] / of['gather']:.2f} of dd; {mib['gather']}")
    print(f"  load               {gib / of['load']:6.2f} GiB/s, {of['dd'] / of['load']:.2f} of dd")
    print(f"  a step             {of['step'] * 1e3:6.0f} ms alone, {of['with a save'] * 1e3:.0f} ms during a save")
    print(f"  the stall          {of['stall'] * 1e3:6.0f} ms to copy the arrays; {mib['background']}")


if __name__ == "__main__":
    main()
