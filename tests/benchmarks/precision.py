"""The held-out loss of a language model in each precision: a small GPT-2 on the source of Python's standard library.

GPT-2 of 2 layers (width 64, 2 heads) over bytes, 8 x 64 tokens per step, AdamW, on the data of `examples/language_modeling`.
For each seed, all precisions have the same initial weights and order of batches. "As optax rounds" stores parameters and
adds updates in bfloat16, as in a script that casts its model: small updates are lost. Fp8 is emulated on CPUs.

    python tests/benchmarks/precision.py [--steps 300] [--seeds 0 1 2]

Takes 25 minutes on 2 busy cores, mostly compilation.
"""

import argparse
import os
import tempfile

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="redeqx-precision-"))  # seeds share programs
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from examples.language_modeling.texts import read_texts
from redeqx.models import cross_entropy
from redeqx.models.gpt2 import GPT2, GPT2Config

ROWS, TOKENS, N_HELD_OUT = 8, 64, 256
LEARNING_RATE = 3e-3
HALF = {"compute": "bfloat16", "parameters": "bfloat16"}
PRECISIONS: dict[str, Any] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "bfloat16 parameters, float32 copies": redeqx.Precision(**HALF),
    "bfloat16 parameters, stochastic rounding": redeqx.Precision(**HALF, rounding="stochastic"),
    "bfloat16 parameters, as optax rounds": None,
}


def loss_fn(model: Any, ids: jax.Array, key: Any) -> redeqx.Loss:
    return cross_entropy(jax.vmap(model)(ids[:, :-1]), ids[:, 1:])


def rows_of(text: str) -> np.ndarray:
    """Returns the bytes of a text as int32 `[rows, TOKENS + 1]`."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return ids[: len(ids) // (TOKENS + 1) * (TOKENS + 1)].reshape(-1, TOKENS + 1)


def bits_per_byte(precision: Any, seed: int, train: np.ndarray, held_out: np.ndarray, n_steps: int) -> float:
    deployer = redeqx.Deployer(jax_seed=seed, verbose=False)
    config = GPT2Config(256, TOKENS, 64, 2, 2, init_std=0.02 * 12**0.5).without_dropout()
    model = GPT2(config, key=jax.random.key(seed))
    if precision is None:
        model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if hasattr(x, "astype") else x, model)
    schedule = deployer.get_lr_schedule_fn(n_steps * ROWS, ROWS, 1, LEARNING_RATE, warmup_steps=20)
    trainer = redeqx.Trainer(
        deployer,
        model=model,
        optimizer=optax.adamw(schedule),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        compute=redeqx.Compute(precision=precision),
    )
    rows = np.random.default_rng(seed).permutation(len(train))[: n_steps * ROWS]
    trainer.train(list(train[rows]), batch_size=ROWS)
    return trainer.eval_loss(list(held_out), batch_size=ROWS) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    train, held_out = map(rows_of, read_texts(None))
    print(f"{'bits per held-out byte':44}{'mean':>8}   by seed")
    for name, precision in PRECISIONS.items():
        found = [bits_per_byte(precision, seed, train, held_out[:N_HELD_OUT], args.steps) for seed in args.seeds]
        print(f"{name:44}{np.mean(found):8.4f}   {'  '.join(f'{x:.4f}' for x in found)}", flush=True)


if __name__ == "__main__":
    main()
