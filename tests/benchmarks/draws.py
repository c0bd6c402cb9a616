"""What draws by row cost: the step of a GPT-2 with dropout, in micro-batches whose rows draw by their numbers.

It takes turns with a hand-written loop over the same micro-batches, whose key is folded with the index of the micro-batch,
and with `Trainer`'s step of the same model without dropout. A turn is some updates of one batch that is already collated.
Ratios are computed within a round; printed are their medians.

    python tests/benchmarks/draws.py              # one device
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import redeqx
from redeqx.models.gpt2 import GPT2, GPT2Config

ROWS, SEQ, N_MICRO_BATCHES = 16, 64, 4
OPTIMIZER = optax.adamw(1e-3)


def make_model(rate: float) -> GPT2:
    config = GPT2Config(
        vocab_size=512,
        n_positions=SEQ,
        d_model=128,
        n_layers=2,
        n_heads=4,
        embedding_dropout=rate,
        attention_dropout=rate,
        residual_dropout=rate,
    )
    return GPT2(config, key=jax.random.key(0))


def loss_fn(model: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
    logits = jax.vmap(lambda row, key: model(row, key=key))(ids, jax.random.split(key, len(ids)))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def by_trainer(rate: float, ids: np.ndarray) -> Callable[[], Any]:
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False),
        model=make_model(rate),
        optimizer=OPTIMIZER,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        accumulate_grad_batches=N_MICRO_BATCHES,
    )
    return lambda: trainer.update(ids)["loss"]


def by_hand(rate: float, ids: np.ndarray) -> Callable[[], Any]:
    arrays, static = eqx.partition(make_model(rate), eqx.is_array)
    parts = ids.reshape(N_MICRO_BATCHES, -1, SEQ)

    @jax.jit
    def step(arrays: Any, state: Any, parts: jax.Array, key: jax.Array) -> Any:
        def add(sums: Any, xs: Any) -> Any:
            i, part = xs
            loss = lambda arrays: loss_fn(eqx.combine(arrays, static), part, jax.random.fold_in(key, i))  # noqa: E731
            return jax.tree.map(lambda x, y: x + y / N_MICRO_BATCHES, sums, jax.value_and_grad(loss)(arrays)), None

        zeros = jax.tree.map(lambda x: x * 0, (0.0, arrays))
        (loss, grads), _ = jax.lax.scan(add, zeros, (np.arange(N_MICRO_BATCHES), parts))
        updates, state = OPTIMIZER.update(grads, state, arrays)
        return optax.apply_updates(arrays, updates), state, loss, optax.global_norm(grads)

    carry = [arrays, OPTIMIZER.init(arrays)]

    def turn() -> Any:
        carry[0], carry[1], loss, _ = step(carry[0], carry[1], parts, jax.random.key(0))
        return float(loss)

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, 512, (ROWS, SEQ)).astype(np.int32)
    sides = {"by row": by_trainer(0.1, ids), "by hand": by_hand(0.1, ids), "no dropout": by_trainer(0.0, ids)}
    for update in sides.values():
        update()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, update in sides.items():
            began = time.perf_counter()
            for _ in range(args.steps):
                update()
            seconds[name].append((time.perf_counter() - began) / args.steps)
    for name, times in seconds.items():
        ratio = statistics.median(own / time for own, time in zip(seconds["by row"], times, strict=True))
        print(f"{name:12} {1e3 * statistics.median(times):8.1f} ms a step; by row over it: {ratio:.2f}")


if __name__ == "__main__":
    main()
