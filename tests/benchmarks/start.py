"""Seconds from the start of a process to its first step, with and without saved programs: LLaMA 1.1B on 8 simulated devices.

    python tests/benchmarks/start.py [--layers 22] [--width 2048]

TinyLlama's sizes in bfloat16 with zeros as values, SGD, 8 rows of 16 tokens: a start does not depend on values and tokens.
Runs without a cache; `redeqx dry-run --save`; a run that loads its programs, and saves a checkpoint; a run that resumes from
it. Prints seconds of the clock and of the processor, which hold on a busy machine too. The first step begins when the model
is placed and the last program before its end is compiled or loaded.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def now():
    return time.time() - float(os.environ["REDEQX_STARTED"]), time.process_time()


def report(what, seconds):
    print(f"  {seconds[0]:7.2f} s, {seconds[1]:7.2f} s of the processor: {what}", flush=True)


def train(n_layers, width, workdir):
    """The script of a run, which prints how far it is."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import redeqx
    from redeqx.models.llama import Llama, LlamaConfig

    report("imported", now())
    redeqx.simulate_devices(8)
    deployer = redeqx.Deployer(n_fsdp_shards=4, n_model_shards=2, workdir=workdir, verbose=False)
    heads = {"n_heads": width // 64, "n_kv_heads": max(2, width // 512)}
    config = LlamaConfig(
        vocab_size=32000, n_positions=2048, d_model=width, d_mlp=width * 11 // 4, n_layers=n_layers, **heads
    )
    key = jax.random.key(0)

    def zeros(x):
        return jnp.zeros(x.shape, "bfloat16") if isinstance(x, jax.ShapeDtypeStruct) else x

    def make():
        return jax.tree.map(zeros, eqx.filter_eval_shape(Llama, config, key=key))

    model = deployer.init(make)
    report("the model is made", now())

    def loss_fn(model, batch, key):
        logits = jax.vmap(model)(batch[:, :-1]).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    class Report(redeqx.Callback):
        def on_fit_start(self, trainer):
            self.began, self.ready = trainer.step, now()
            report("the model is placed", self.ready)
            jax.monitoring.register_event_duration_secs_listener(self._note)

        def _note(self, event, seconds, **what):
            if event == "/jax/core/compile/backend_compile_duration":
                self.ready = now()

        def on_step(self, trainer, metrics):
            if trainer.step == self.began + 1:
                report(f"step {trainer.step} begins", self.ready)

    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.sgd(1e-3), collate_fn=np.stack, loss_fn=loss_fn, on_nonfinite="skip"
    )
    examples = np.random.default_rng(0).integers(0, 32000, (64, 17)).astype(np.int32)
    n_done = len([*workdir.glob("ckpts/step_*")]) if workdir is not None else 0
    trainer.fit(examples, batch_size=8, max_steps=2 * (n_done + 1), save_end=workdir is not None, callbacks=[Report()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048, help="less takes less memory, of 10 GiB, and the same program")
    parser.add_argument("--workdir", type=Path, help="trains in this process")
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args()
    if args.train:
        return train(args.layers, args.width, args.workdir)
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, "--train", "--layers", str(args.layers), "--width", str(args.width)]
        saved, run = [f"{folder}/programs"], ["--workdir", f"{folder}/run"]
        dry_run = ["-m", "redeqx", "dry-run", "--topology", "cpu:8", "--search", "none", "--save", *saved]
        for title, command, cache in (
            ("without a cache", script, "0"),
            ("redeqx dry-run --save", [*dry_run, *script], "0"),
            ("with its programs", [*script, *run], *saved),
            ("with its programs, from a checkpoint", [*script, *run], *saved),
        ):
            print(title, flush=True)
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPROC": "16", "JAX_PLATFORMS": "cpu"}
            environment |= {"REDEQX_COMPILATION_CACHE": cache, "REDEQX_STARTED": str(time.time())}
            subprocess.run([sys.executable, *command], env=environment, check=True, timeout=900)
    return None


if __name__ == "__main__":
    main()
