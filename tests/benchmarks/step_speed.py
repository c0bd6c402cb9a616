"""Time per training step: redeqx's Trainer, a flax twin under plain `jax.jit`, Redco's Trainer, HF's Trainer on torch.

GPT-2 of 6 layers, width 384, 6 heads, vocabulary 8192, on 8 x 256 tokens, float32, AdamW, no dropout, one device: the
same maths, sizes and data for all. Each contender has its own process, compiled and warm. They take turns, one at a time,
so that a slow period of the machine affects all of them.

- Differences in what is timed are to the disadvantage of redeqx. Its time is that of the whole call that trains `--steps`
  steps, including collation, logging and set-up; so is Redco's. HF's starts at its first step, after set-up. The twin's
  batches are collated beforehand, and it reads nothing back. Redco trains the twin's flax module.
- The three Trainers compute and log the gradient norm, as they always do; the twin does not.
- The ratio is the median over the rounds of a contender's time over the twin's in the same round.
- Processor time, of all threads, is less disturbed by other processes. That of torch includes threads that wait for others.

    pip install torch==2.13.0       # first, so that you choose the build: CPU's is enough
    pip install -e ".[bench]"
    python tests/benchmarks/step_speed.py --rounds 6 --steps 2

Measured on 2 cores beside some other work, 26 November 2026, 5 rounds of 2 steps: twin 1765 ms; over it redeqx 0.87
(quartiles 0.82, 0.94), plain 1.09, redco 1.06, hf 0.94. Peak memory: redeqx 1,237 MiB, twin 1,467, plain 1,707, redco 2,235,
hf 1,616.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sizes:
    n_layers: int = 6
    d_model: int = 384
    n_heads: int = 6
    vocab_size: int = 8192
    batch: int = 8
    seq: int = 256

    def examples(self, n_steps: int) -> list[np.ndarray]:
        """Returns rows of token ids, each drawn near the previous one, so that the data can be learned."""
        rng = np.random.default_rng(0)
        steps = rng.integers(0, 64, (n_steps * self.batch, self.seq))
        return list((np.cumsum(steps, axis=1) % self.vocab_size).astype(np.int32))


# Trains `n_steps` steps; returns their seconds, and the loss of each.
Run = Callable[[int], tuple[float, list[float]]]
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01


def next_token_loss(logits: Any, ids: Any) -> Any:
    """Returns the mean cross-entropy of all tokens but the first, as in `GPT2LMHeadModel`."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


# --- the contenders: each creates its model and returns a function that trains it -------------------------------------


def equinox_gpt2(sizes: Sizes) -> Any:
    import jax

    from redeqx.models.gpt2 import GPT2, GPT2Config

    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.seq,
        d_model=sizes.d_model,
        n_layers=sizes.n_layers,
        n_heads=sizes.n_heads,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
    )
    return GPT2(config, key=jax.random.key(0))


def redeqx(sizes: Sizes) -> Run:
    import jax
    import optax

    from redeqx import Deployer, Trainer

    losses: list[float] = []

    class Losses:
        def log(self, metrics: dict[str, float], step: int) -> None:
            losses.append(metrics["loss"])

    trainer = Trainer(
        Deployer(loggers=[Losses()]),
        model=equinox_gpt2(sizes),
        optimizer=optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        collate_fn=np.stack,
        loss_fn=lambda model, ids, key: next_token_loss(jax.vmap(model)(ids), ids),
    )

    def run(n_steps: int) -> tuple[float, list[float]]:
        examples = sizes.examples(n_steps)
        losses.clear()
        began = time.perf_counter()
        trainer.train(examples, sizes.batch)
        return time.perf_counter() - began, losses

    return run


def plain(sizes: Sizes) -> Run:
    """Trains the model of `redeqx` without its Trainer, to separate the cost of the model from that of the Trainer."""
    import equinox as eqx
    import jax
    import optax

    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    @eqx.filter_jit(donate="all")
    def step(model, opt_state, ids):
        loss, grads = eqx.filter_value_and_grad(lambda model: next_token_loss(jax.vmap(model)(ids), ids))(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    model = equinox_gpt2(sizes)
    return loop(step, (model, optimizer.init(eqx.filter(model, eqx.is_array))), sizes)


def flax_gpt2(sizes: Sizes, dtype: Any = None, attention: Callable[..., Any] | None = None) -> Any:
    """GPT-2 in flax.linen, from `ids [batch, seq]` to logits; the blocks are unrolled, as linen users write them.

    **Arguments:**

    - `dtype`: the dtype of computation; parameters are in float32.
    - `attention`: maps `(q, k, v)` to causal attention; `jax.nn.dot_product_attention` by default.
    """
    import flax.linen as nn
    import jax

    attend = attention or partial(jax.nn.dot_product_attention, is_causal=True)
    layers = {"dtype": dtype}

    kernel = nn.initializers.normal(0.02)
    residual_kernel = nn.initializers.normal(0.02 / (2 * sizes.n_layers) ** 0.5)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            heads = (*x.shape[:2], sizes.n_heads, -1)
            h = nn.LayerNorm(epsilon=1e-5, **layers)(x)
            q, k, v = (
                nn.Dense(sizes.d_model, kernel_init=kernel, name=name, **layers)(h).reshape(heads)
                for name in ("query", "key", "value")
            )
            h = attend(q, k, v).reshape(x.shape)
            x = x + nn.Dense(sizes.d_model, kernel_init=residual_kernel, name="output", **layers)(h)
            h = nn.LayerNorm(epsilon=1e-5, **layers)(x)
            h = nn.gelu(nn.Dense(4 * sizes.d_model, kernel_init=kernel, name="up", **layers)(h))
            return x + nn.Dense(sizes.d_model, kernel_init=residual_kernel, name="down", **layers)(h)

    class GPT2(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embedding = nn.Embed(sizes.vocab_size, sizes.d_model, embedding_init=kernel, name="embedding", **layers)
            positions = self.param("positions", nn.initializers.normal(0.01), (sizes.seq, sizes.d_model))
            x = embedding(ids) + positions.astype(dtype or positions.dtype)
            for _ in range(sizes.n_layers):
                x = Block()(x)
            return embedding.attend(nn.LayerNorm(epsilon=1e-5, **layers)(x))

    return GPT2()


def twin(sizes: Sizes) -> Run:
    import jax
    import optax

    model = flax_gpt2(sizes)
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(params, opt_state, ids):
        loss, grads = jax.value_and_grad(lambda params: next_token_loss(model.apply(params, ids), ids))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, sizes.seq), np.int32))
    return loop(step, (params, jax.jit(optimizer.init)(params)), sizes)


def loop(step: Callable[..., Any], state: Any, sizes: Sizes) -> Run:
    """Runs the hand-written loop; batches are collated before the timer starts, and nothing is read back before it ends."""
    import jax

    def run(n_steps: int) -> tuple[float, list[float]]:
        nonlocal state
        batches = np.split(np.stack(sizes.examples(n_steps)), n_steps)
        losses = []
        began = time.perf_counter()
        for ids in batches:
            *state, loss = step(*state, ids)
            losses.append(loss)
        jax.block_until_ready(state)
        return time.perf_counter() - began, list(map(float, losses))

    return run


def redco(sizes: Sizes) -> Run:
    import jax
    import optax
    from redco import Deployer, Trainer

    model = flax_gpt2(sizes)
    losses: list[Any] = []

    class Recording(Deployer):
        def log_metrics(self, metrics, step):
            losses.append(metrics["loss"])
            super().log_metrics(metrics=metrics, step=step)

    def loss_fn(rng, state, params, batch, is_training):
        return next_token_loss(state.apply_fn({"params": params}, batch["ids"]), batch["ids"])

    trainer = Trainer(
        deployer=Recording(jax_seed=0),
        collate_fn=lambda examples: {"ids": np.stack(examples)},
        apply_fn=model.apply,
        loss_fn=loss_fn,
        params=jax.jit(model.init)(jax.random.key(0), np.zeros((1, sizes.seq), np.int32))["params"],
        optimizer=optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
    )

    def run(n_steps: int) -> tuple[float, list[float]]:
        examples = sizes.examples(n_steps)
        losses.clear()
        began = time.perf_counter()
        trainer.train(examples, sizes.batch)
        jax.block_until_ready(trainer.state)
        return time.perf_counter() - began, list(map(float, losses))

    return run


def hf(sizes: Sizes) -> Run:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.seq,
        n_embd=sizes.d_model,
        n_layer=sizes.n_layers,
        n_head=sizes.n_heads,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    losses: list[float] = []
    began = ended = 0.0

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            nonlocal began
            if state.global_step == 0:
                began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            nonlocal ended
            ended = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        per_device_train_batch_size=sizes.batch,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )

    def rows_of(n_steps: int) -> list[dict[str, Any]]:
        ids = [torch.from_numpy(row).long() for row in sizes.examples(n_steps)]
        return [{"input_ids": row, "labels": row} for row in ids]

    rows = rows_of(1)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()])

    def run(n_steps: int) -> tuple[float, list[float]]:
        losses.clear()
        rows[:] = rows_of(n_steps)
        trainer.train()
        return ended - began, losses

    return run


CONTENDERS: dict[str, Callable[[Sizes], Run]] = {
    "twin": twin,
    "redeqx": redeqx,
    "plain": plain,
    "redco": redco,
    "hf": hf,
}


# --- processes that take turns ----------------------------------------------------------------------------------------


def serve(name: str, sizes: Sizes) -> None:
    """Runs a contender's process: reads numbers of steps from stdin, and replies with times, a loss and peak bytes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries out of the replies
    run = CONTENDERS[name](sizes)
    for line in sys.stdin:
        began = time.process_time()
        seconds, losses = run(int(line))
        processor = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reply = {"seconds": seconds, "processor": processor, "loss": losses[0], "peak": peak}
        print(json.dumps(reply), file=replies, flush=True)


class Worker:
    """The parent's handle of a contender's process."""

    def __init__(self, name: str, sizes: Sizes, log: Any):
        self.name = name
        command = [sys.executable, __file__, "--worker", name, "--sizes", json.dumps(asdict(sizes))]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )

    def run(self, n_steps: int) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{n_steps}\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply:
            raise RuntimeError(f"`{self.name}`: expected an answer, got the end of its process. Read the log.")
        return json.loads(reply)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # ends its loop
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9, help="turns that each contender takes, at least 2")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", default="{}", help="JSON of the sizes to change, such as '{\"n_layers\": 2}'")
    args = parser.parse_args()
    sizes = Sizes(**json.loads(args.sizes))
    if args.worker:
        return serve(args.worker, sizes)

    workers: list[Worker] = []
    with tempfile.NamedTemporaryFile("w+", prefix="step_speed_", suffix=".log", delete=False) as log:
        print(f"{sizes}\n{os.cpu_count()} cores; what the contenders print goes to {log.name}", flush=True)
        try:
            last: dict[str, dict[str, float]] = {}
            for name in args.contenders:  # in turn: compilation uses all cores
                workers.append(Worker(name, sizes, log))
                # The same batch three times: equal losses show equal computations. Redco compiles its second step again.
                first, *more = [workers[-1].run(1) for _ in range(3)]
                workers[-1].run(args.steps)
                losses = ", ".join(f"{reply['loss']:.3f}" for reply in (first, *more))
                print(f"  {name}: first step {first['seconds']:.1f} s; losses on one batch {losses}", flush=True)
            times: dict[str, list[float]] = {name: [] for name in args.contenders}
            processor: dict[str, list[float]] = {name: [] for name in args.contenders}
            for turn in range(args.rounds):
                # Another order in each round, so that no contender always runs after the same one.
                for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
                    last[worker.name] = reply = worker.run(args.steps)
                    times[worker.name].append(1e3 * reply["seconds"] / args.steps)
                    processor[worker.name].append(1e3 * reply["processor"] / args.steps)
        finally:
            for worker in workers:
                worker.close()

    reference = times.get("twin") or times[args.contenders[0]]
    print(f"\n{args.rounds} rounds of {args.steps} steps\n")
    print(f"{'':8}  ms/step: median  lowest  highest   over the twin  (quartiles)      processor: lowest  peak memory")
    for name, taken in times.items():
        ratios = [mine / its for mine, its in zip(taken, reference, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(
            f"{name:8}  {statistics.median(taken):15.0f}  {min(taken):6.0f}  {max(taken):7.0f}"
            f"  {statistics.median(ratios):14.3f}  ({low:.3f}, {high:.3f})  {min(processor[name]):17.0f}"
            f"  {last[name]['peak'] / 2**20:8,.0f} MiB"
        )


if __name__ == "__main__":
    main()
