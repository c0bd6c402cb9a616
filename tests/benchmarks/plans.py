"""What a train step sends and needs under each plan: all whole, the walk's, the dataflow's, by hand. Nothing is timed.

    python tests/benchmarks/plans.py [STRUCTURE ...]        # 8 simulated devices

For each structure of `_structures.py`, at (data=2, model=4), and each family's tiny model, at (data=4, model=2): bytes that
one device sends over the model axis in a compiled step of `Trainer` (in a ring, `redeqx._hlo`), and bytes that it holds:
arguments and temporaries. `all whole` sends nothing, and holds the most.

With jax 0.10.2: the dataflow sends what the specs by hand do, to the byte, in 10 of 13 cases; less in two (grouped queries,
experts) and 1.005 of it in one (`separable_cnn`, whose head is split too). Where the walk splits the same leaves it never
sends more, and less where the walk's guess is wrong: 0.62 of it for the UNet, 0.60 for ViT, 0.58 for OPT-350m, 0.88 for the
VAE; what the walk does not know it leaves whole. It may hold more: 1.33 times for `patches_and_blocks`, 1.15 for ViT, whose
activations the walk's plan leaves split. Six minutes.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
import optax
from _structures import STRUCTURES, batched

import redeqx
from redeqx import _hlo
from redeqx._plan import Plan

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.families._case import collect

BATCH = 16
COLUMN, ROW, BIAS = ("model", None), (None, "model"), ("model",)
LINEAR = {"*up.weight": COLUMN, "*up.bias": BIAS, "*down.weight": ROW}
ATTENTION = {f"*{name}_proj.weight": COLUMN for name in ("query", "key", "value")} | {"*output_proj.weight": ROW}
# Specs by hand, as Megatron-LM (arXiv:1909.08053), Mamba's and MobileNet's tensor-parallel forms have them.
BY_HAND: dict[str, dict[str, Any]] = {
    "mlp": {f"layers.{i}.{leaf}": spec for i in (0, 2) for leaf, spec in (("weight", COLUMN), ("bias", BIAS))}
    | {"layers.1.weight": ROW, "layers.3.weight": ROW},
    "swiglu_gate_up_down": {"a.weight": COLUMN, "b.weight": COLUMN, "c.weight": ROW},
    "swiglu_down_gate_up": {"a.weight": ROW, "b.weight": COLUMN, "c.weight": COLUMN},
    "swiglu_gate_down_up": {"a.weight": COLUMN, "b.weight": ROW, "c.weight": COLUMN},
    "block": LINEAR | ATTENTION,
    "parallel_block": LINEAR | ATTENTION,
    "fused_qkv_heads_first": {"qkv": COLUMN, "output": ROW, "up": COLUMN, "down": ROW},
    "einsum_attention": {
        **dict.fromkeys("qkv", (None, "model", None)), "o": ("model", None, None), "up": ROW, "down": COLUMN
    },
    "grouped_query": {"q": COLUMN, "o": ROW},
    "language_model": LINEAR | ATTENTION | {"embedding.weight": COLUMN},
    "mixture_of_experts": {"up": (None, None, "model"), "down": (None, "model", None)},
    "separable_cnn": {"*.0.weight": ("model",), "*.0.bias": BIAS, "*.1.weight": ("model",), "*.1.bias": BIAS,
                      "*.2.weight": ROW},
    "low_rank_adapter": {"up": COLUMN, "b": COLUMN, "down": ROW},
}  # fmt: skip


class Job(NamedTuple):
    """What is trained."""

    model: Any
    loss_fn: Callable[..., Any]
    examples: list[Any]


def jobs(names: list[str]) -> Iterator[tuple[str, redeqx.Deployer, Job]]:
    """The structures at (data=2, model=4), then the families' tiny models, whose sizes divide over two, at (4, 2)."""
    deployer = redeqx.Deployer(n_model_shards=4, verbose=False)
    for name, make in STRUCTURES.items():
        if not names or name in names:
            made = make(jax.random.key(0))
            examples = list(np.zeros((BATCH, *made.example.shape), made.example.dtype))
            yield name, deployer, Job(made.model, batched(made.loss), examples)
    deployer = redeqx.Deployer(n_model_shards=2, verbose=False)
    for training in collect("TRAININGS"):
        if not names or training.name in names:
            yield training.name, deployer, Job(training.make(jax.random.key(0)), training.loss_fn, training.examples)


def stack(examples: list[Any]) -> Any:
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)


def measure(deployer: redeqx.Deployer, job: Job, plan: Plan) -> tuple[float, float]:
    """Bytes sent over the model axis, and bytes held."""
    trainer = redeqx.Trainer(
        deployer, model=job.model, optimizer=optax.adam(1e-3), collate_fn=stack, loss_fn=job.loss_fn, plan=plan
    )
    compiled = trainer.compile(job.examples, len(job.examples) // deployer.mesh.shape["data"])
    n_model = deployer.mesh.shape["model"]
    sent = 0.0
    for collective in _hlo.collectives(compiled.as_text()):
        group = np.array(collective.group)
        if collective.group_size > 1 and len(set(group // n_model)) == 1 and collective.bytes > 64:
            sent += collective.moved
    memory = compiled.memory_analysis()
    return sent, memory.argument_size_in_bytes + memory.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STRUCTURE")
    parser.add_argument("--explain", action="store_true", help="print the dataflow's plans")
    args = parser.parse_args()
    redeqx.simulate_devices(8)
    kinds = ("whole", "walk", "dataflow", "by hand")
    print(
        f"{'kB':24}"
        + "".join(f"{'sent: ' + kind:>15}" for kind in kinds[1:])
        + "".join(f"{'held: ' + k:>15}" for k in kinds)
    )
    for name, deployer, job in jobs(args.names):
        plans = {
            "whole": deployer.plan(job.model, overrides={"*": None}),
            "walk": deployer.plan(job.model),
            "dataflow": deployer.plan(job.model, job.loss_fn, stack(job.examples)),
        }
        if name in BY_HAND:
            plans["by hand"] = deployer.plan(job.model, overrides={**BY_HAND[name], "*": None})
        found = {kind: measure(deployer, job, plan) for kind, plan in plans.items()}
        sent, held = ([f"{found[kind][i] / 1e3:.1f}" if kind in found else "-" for kind in kinds] for i in (0, 1))
        print(f"{name:24}" + "".join(f"{cell:>15}" for cell in (*sent[1:], *held)), flush=True)
        if args.explain:
            print(plans["dataflow"].explain(), flush=True)


if __name__ == "__main__":
    main()
