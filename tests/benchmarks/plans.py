"""Traffic and memory of a train step under each plan: replicated, dataflow, by hand. Nothing is timed.

    python tests/benchmarks/plans.py [STRUCTURE ...] [--meshes MESH ...]        # 8 simulated devices

For each structure of `_structures.py` and each family's tiny model, on each mesh (for families, (data=4, model=2) replaces
the first), prints in kB: the bytes that one device sends in a ring in a compiled step of `Trainer`, over the model axis and
over the axes that split the batch; and the bytes of its arguments and temporaries. Over the batch axes, `needed` is the
traffic if each weight that the fsdp axis splits is gathered twice and each gradient is summed once (by an all-reduce,
because the CPU compiler emits no reduce-scatter), and `strays` is the traffic of arrays that are not weights. `gathers`
(forward + backward) and `sums` are the maxima over weights.

With jax 0.10.2, over the model axis, on both meshes that have one:

- The dataflow plan sends exactly as many bytes as the specs by hand in 10 of 13 cases, fewer in two (grouped queries,
  experts), and 1.005 times as many in one (`separable_cnn`, whose head is also split).
- Equal parts of a split dim are resharded: `fused_glu` sends 721 kB, separate gate and up weights send 197; `fused_qkv`
  sends 786, heads first send 590; without the rule, XLA sends 1245 and 1065. No other split both sends less and needs less
  memory: `both` replicated sends 2032, split as a row 3801. Resharding the weight's parts instead would send less (295) if a
  shard of the batch has more tokens than the layer has inputs, and more otherwise.

Over the batch axes each weight is gathered at most once forward and once backward, and each gradient is summed once, over
data and fsdp together. The CPU compiler makes these exceptions. The TPU compiler, for eight chips of v5e, makes only the
first:

- The gradient of a tied weight is summed for each use: twice for a language model's table, three times for T5's. The TPU
  compiler sums it once if the fsdp axis splits the table and twice at data=8; it sums `transposed_autoencoder`'s once.
- In a loop over time (`gru`, `state_space`) it is summed in each of the 64 iterations; by the TPU compiler once, for `gru`.
- The gradient of a GroupNorm is summed before its image dims are reduced (most strays of UNet and VAE); by the TPU compiler
  as a vector.

The other strays are the rows read from position tables. Takes half an hour on two busy cores.
"""

import argparse
import fnmatch
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
import optax
from _structures import STRUCTURES, batched
from jax.sharding import NamedSharding

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.machine._mesh import BATCH_AXES
from redeqx.partition import Plan, _plan, order
from redeqx.partition._flow import Split
from redeqx.tracing import Trace

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.families._case import collect

MESHES = {  # n_model_shards, n_fsdp_shards; the families' tiny models, whose sizes divide over two, have two for four
    "data=2, model=4": (4, 1),
    "fsdp=8": (1, 8),
    "data=2, fsdp=2, model=2": (2, 2),
}
MIN_STORED_SIZE = 512  # elements, so that weights of tiny models are split like large ones
BATCH = 16
MAX_SCALAR = 64  # bytes
KINDS = ("replicated", "dataflow", "by hand")
COLUMN, ROW, BIAS = ("model", None), (None, "model"), ("model",)
LINEAR = {"*up.weight": COLUMN, "*up.bias": BIAS, "*down.weight": ROW}
ATTENTION = {f"*{name}_proj.weight": COLUMN for name in ("query", "key", "value")} | {"*output_proj.weight": ROW}
# Specs by hand, from Megatron-LM (arXiv:1909.08053) and the tensor-parallel forms of Mamba and MobileNet.
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
    """A model, its loss and its data."""

    model: Any
    loss_fn: Callable[..., Any]
    examples: list[Any]


class Found(NamedTuple):
    """Traffic and memory of a step under one plan, in bytes and counts.

    **Arguments:**

    - `model`, `batch`: the bytes that a device sends over the model axis, and over the axes that split the batch.
    - `needed`: the part of `batch` for two gathers of each weight that the fsdp axis splits and one sum of each gradient.
    - `strays`: the part of `batch` for arrays without the shape of a weight.
    - `held`: the bytes of arguments and temporaries.
    - `forward`, `backward`, `reductions`: how often a weight (not a vector) is gathered and its gradient is summed, at
        most; weights of the same shape are not distinguished, and their mean is used.
    """

    model: float
    batch: float
    needed: float
    strays: float
    held: float
    forward: float
    backward: float
    reductions: float


def jobs(names: list[str], n_model_shards: int, n_fsdp_shards: int) -> Iterator[tuple[str, redeqx.Deployer, Job]]:
    deployer = redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False)
    for name, make in STRUCTURES.items():
        if not names or name in names:
            made = make(jax.random.key(0))
            examples = list(np.zeros((BATCH, *made.example.shape), made.example.dtype))
            yield name, deployer, Job(made.model, batched(made.loss), examples)
    deployer = redeqx.Deployer(n_model_shards=min(n_model_shards, 2), n_fsdp_shards=n_fsdp_shards, verbose=False)
    for training in collect("TRAININGS"):
        if not names or training.name in names:
            yield training.name, deployer, Job(training.make(jax.random.key(0)), training.loss_fn, training.examples)


def stack(examples: list[Any]) -> Any:
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)


def plans_of(name: str, deployer: redeqx.Deployer, job: Job) -> dict[str, Plan]:
    plans = {
        "replicated": deployer.plan(job.model, overrides={"*": None}),
        "dataflow": deployer.plan(job.model, job.loss_fn, stack(job.examples)),
    }
    if name in BY_HAND:
        plans["by hand"] = by_hand(plans["replicated"], BY_HAND[name])
    return plans


def specs(plan: Plan) -> list[Any]:
    return [leaf.spec for leaf in plan.leaves.values()]


def by_hand(replicated: Plan, specs: dict[str, Any]) -> Plan:
    """Returns the plan with the model axis as in the specs, and the fsdp axis as in all plans."""
    leaves = {}
    for name, leaf in replicated.leaves.items():
        spec = next((spec for pattern, spec in specs.items() if fnmatch.fnmatch(name, pattern)), ())
        split = Split(spec.index("model") if "model" in spec else None, "by hand")
        leaves[name] = replace(leaf, spec=_plan._spec(leaf.shape, math.prod(leaf.shape), 0, split, replicated.mesh)[0])
    return replace(replicated, leaves=leaves)


def canonical_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape that is the same for all transposes of an array."""
    return tuple(sorted(size for size in shape if size != 1))


def measure(deployer: redeqx.Deployer, job: Job, plan: Plan) -> Found:
    mesh, batch = deployer.mesh, stack(job.examples)
    trainer = redeqx.Trainer(
        deployer, model=job.model, optimizer=optax.adam(1e-3), collate_fn=stack, loss_fn=job.loss_fn, plan=plan
    )
    compiled = trainer.compile(job.examples, len(job.examples) // deployer.n_batch_shards)
    stacked = order(Trace.of(job.loss_fn, job.model, batch, jax.random.key(0)), 1).stacked
    weights: Counter[tuple[int, ...]] = Counter()  # with the shapes in which layers compute
    n_fsdp, n_batch, needed = mesh.shape["fsdp"], deployer.n_batch_shards, 0.0
    for name, leaf in plan.leaves.items():
        used = NamedSharding(mesh, plan.spec_in_use(name)).shard_shape(leaf.shape)
        n_stacked = stacked.get(name, 0)
        weights[canonical_shape(used[n_stacked:])] += math.prod(used[:n_stacked])
        n_bytes, is_split = math.prod(used) * leaf.dtype.itemsize, plan.spec_in_use(name) != leaf.spec
        needed += n_bytes * 2 * ((n_batch - 1) / n_batch + is_split * (n_fsdp - 1) / n_fsdp)
    sent, times = defaultdict[str, float](float), defaultdict[str, Counter[tuple[int, ...]]](Counter)
    for collective in collectives(Module.of(compiled.as_text())):
        if collective.group_size == 1 or collective.bytes <= MAX_SCALAR:
            continue
        is_batch, shape = not {*BATCH_AXES}.isdisjoint(collective.axes(mesh)), canonical_shape(collective.shape)
        sent["batch" if is_batch else "model"] += collective.moved
        if is_batch and shape not in weights:
            sent["strays"] += collective.moved
        elif is_batch and len(shape) > 1:
            direction = "backward" if collective.is_backward else "forward"
            times[direction if collective.kind == "all-gather" else "reductions"][shape] += collective.n_executions
    most = {kind: max(n / weights[shape] for shape, n in counts.items()) for kind, counts in times.items()}
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Found(
        sent["model"], sent["batch"], needed, sent["strays"], held,
        *(most.get(kind, 0.0) for kind in ("forward", "backward", "reductions")),
    )  # fmt: skip


def columns(found: dict[str, Found]) -> dict[str, str]:
    """Returns one row of the table, by column name."""

    def kb(kind: str, field: str) -> str:
        return f"{getattr(found[kind], field) / 1e3:.1f}" if kind in found else "-"

    best = found["dataflow"]
    return {
        **{f"model: {kind}": kb(kind, "model") for kind in KINDS[1:]},
        "batch: dataflow": kb("dataflow", "batch"),
        "needed": kb("dataflow", "needed"),
        "strays": kb("dataflow", "strays"),
        "gathers": f"{best.forward:.2g} + {best.backward:.2g}",
        "sums": f"{best.reductions:.2g}",
        **{f"held: {kind}": kb(kind, "held") for kind in KINDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STRUCTURE")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--explain", action="store_true", help="print the dataflow's plans")
    args = parser.parse_args()
    redeqx.simulate_devices(8)
    _plan.MIN_STORED_SIZE = MIN_STORED_SIZE
    for mesh_name in args.meshes:
        print(f"\n{mesh_name}; kB")
        for i, (name, deployer, job) in enumerate(jobs(args.names, *MESHES[mesh_name])):
            plans, found = plans_of(name, deployer, job), dict[str, Found]()
            for kind, plan in plans.items():  # equal plans are compiled once
                alike = (found[other] for other in found if specs(plans[other]) == specs(plan))
                found[kind] = next(alike, None) or measure(deployer, job, plan)
            row = columns(found)
            if i == 0:
                print(f"{'':24}" + "".join(f"{column:>18}" for column in row))
            print(f"{name:24}" + "".join(f"{cell:>18}" for cell in row.values()), flush=True)
            if args.explain:
                print(plans["dataflow"].explain(), flush=True)


if __name__ == "__main__":
    main()
