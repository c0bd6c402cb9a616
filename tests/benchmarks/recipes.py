"""Published recipes as they stand, compiled by redeqx for machines that are not here: from shapes alone.

    pip install -e ".[topology-gpu]"                             # the GPU rows, 4 GB
    pip install -e ".[topology-tpu]"                             # the TPU rows
    python tests/benchmarks/recipes.py                           # all rows, one after the other, each in its own process
    python tests/benchmarks/recipes.py --only llama3-8b-h100     # one, or some
    python tests/benchmarks/recipes.py --only llama3-8b-h100 --stranger --explain
    python tests/benchmarks/recipes.py --table                   # print what `--out` holds, compile nothing

Model, chips, batch, length and dtypes are the recipe's. What is recomputed is redeqx's choice: the first of the row's levels
that fits. `--stranger` compiles the same shape from `eqx.nn` layers in a Python list (`_strangers.py`), which knows nothing
of redeqx. Columns:

- needs: GiB of a device, and whether they fit.
- recomputed: FLOPs that the step computes twice, over those of the recipe; over the step's, where these are none or unknown.
- sent: bytes that a device sends over the axis `fsdp`, over those of ZeRO-3: each parameter is gathered in bfloat16 in the
    forward and in the backward pass, and its gradient is scattered in float32, once for each micro-batch.
- hidden: the share of the bytes of all collectives that is sent behind matmuls in the compiled order.
- bounds: seconds where everything overlaps, and where nothing does, at the chip's published rates.
- expected: seconds, at the rates that published runs reached on this chip (`forecast.py`).
- published: seconds of the recipe's step. Above the second bound redeqx would be faster even if nothing overlapped and every
    rate were reached; a chip reaches none.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # there is no GPU to time kernels on

import _strangers
import equinox as eqx
import experts
import jax
import numpy as np
import optax
from long_sequences import collate_fn, loss_fn

import redeqx
from redeqx.machine import FSDP
from redeqx.models.llama import Llama, LlamaConfig

CHUNK = 1024  # tokens of a row whose loss is computed at once


@dataclass(frozen=True)
class Recipe:
    """A published recipe.

    **Arguments:**

    - `config`: the model's sizes.
    - `rows`, `tokens`: of a device's micro-batch.
    - `seconds`: of a step, as published.
    - `recomputed`: what it computes twice: some of `"qkv"`, `"attention"`, `"out"`, `"gate and up"`; None if unknown.
    - `levels`: redeqx's levels of recomputation, in the order in which they are tried.
    - `shards`: of the Deployer; by default all devices are shards of `fsdp`.
    - `in_float32`: whether parameters and the optimizer's moments are stored in float32, as in most recipes, or in bfloat16.
    """

    config: Any
    machine: str
    rows: int
    tokens: int
    seconds: float
    source: str
    recomputed: tuple[str, ...] | None = ()
    levels: tuple[str, ...] = ("matmuls", "full", "offload")
    shards: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    in_float32: bool = True


ALL = ("qkv", "attention", "out", "gate and up")  # MaxText's default, where the source does not name another
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"  # H100 of 96 GB HBM2e, 2.4 TB/s and 500 W
TITAN_A100 = "pytorch/torchtitan, docs/performance.md"
TPU = "AI-Hypercomputer/tpu-recipes, training/trillium"
NGC = "catalog.ngc.nvidia.com, dgxc-benchmarking"
AUTOMODEL = "NVIDIA-NeMo/Automodel, docs/performance-summary.md"
LLAMA2_13B, LLAMA2_70B = LlamaConfig.of("llama2-13b"), LlamaConfig.of("llama2-70b")
LLAMA3_8B, LLAMA3_70B = LlamaConfig.of("llama3-8b"), LlamaConfig.of("llama3-70b")

# Tokens a second of a chip are as published; a step's seconds follow from them where the source does not name these.
RECIPES = {
    "llama3-8b-h100": Recipe(LLAMA3_8B, "gpu:h100-80gb:8", 2, 8192, 16384 / 6667, f"{TITAN}, table 1", None),
    "llama3-8b-h100-128": Recipe(LLAMA3_8B, "gpu:h100-80gb:16x8", 2, 8192, 16384 / 6514, f"{TITAN}, table 3", None),
    "llama3-8b-a100-64": Recipe(LLAMA3_8B, "gpu:a100-80gb:8x8", 1, 8192, 8192 / 2973, TITAN_A100, None),
    "llama3-70b-a100-64": Recipe(LLAMA3_70B, "gpu:a100-80gb:8x8", 1, 8192, 8192 / 331, TITAN_A100, ALL, ("full",)),
    "llama2-13b-a100-64": Recipe(LLAMA2_13B, "gpu:a100-80gb:8x8", 2, 4096, 8192 / 2162, TITAN_A100),
    "llama2-70b-a100-64": Recipe(LLAMA2_70B, "gpu:a100-80gb:8x8", 2, 4096, 8192 / 353, TITAN_A100, ALL, ("full",)),
    "llama3-70b-h100-128": Recipe(
        LLAMA3_70B, "gpu:h100-80gb:16x8", 2, 8192, 15.570, f"{NGC}, MaxText Llama3 70B 25.02", ALL, ("full",)
    ),
    "llama2-70b-h100-64": Recipe(
        LLAMA2_70B, "gpu:h100-80gb:8x8", 2, 4096, 7.908, f"{NGC}, MaxText Llama2 70B 25.01.1", ALL, ("full",)
    ),
    "llama3-70b-h200-256": Recipe(
        LLAMA3_70B, "gpu:h200-141gb:32x8", 2, 8192, 15.516, "AI-Hypercomputer/gpu-recipes, training/a3ultra", ALL
    ),
    "qwen3-30b-a3b-h100": Recipe(
        experts.QWEN3, "gpu:h100-80gb:8", 4, 4096, 21.773, f"{AUTOMODEL}; examples/benchmark/configs", None, ("full",),
        accumulate=16, in_float32=False,
    ),
    "mixtral-8x7b-v5p-128": Recipe(
        experts.MIXTRAL, "v5p:4x4x4", 36, 4096, 36 * 4096 / 2909,
        "AI-Hypercomputer/maxtext, docs/reference/models/tiering.md; tpu-recipes, training/v5p/Mixtral-8X7B-Maxtext",
        None, ("full",), in_float32=False,
    ),
    "llama3-8b-262k-h100": Recipe(  # with products in fp8
        LLAMA3_8B, "gpu:h100-80gb:8", 1, 262144, 32768 / 548, f"{TITAN}, table 2", ALL, ("30GiB", "full"),
        {"n_sequence_shards": 8},
    ),
    "llama3.1-8b-v6e-8": Recipe(
        LLAMA3_8B, "v6e:2x4", 3, 8192, 3.443, f"{TPU}/Llama3.1-8B-MaxText/v6e-8", ("attention", "gate and up"),
        ("4.7GiB", "offload"),  # "full" needs 31.4 of 31.2 GiB
    ),
    "llama3.1-70b-v6e-32": Recipe(
        LLAMA3_70B, "v6e:4x8", 2, 8192, 17.790, f"{TPU}/Llama3.1-70B-MaxText/v6e-32",
        ("attention", "out", "gate and up"), ("full", "offload"), in_float32=False,
    ),
    "mistral-7b-v6e-8": Recipe(
        replace(LLAMA3_8B, vocab_size=32000), "v6e:2x4", 6, 8192, 6.320, f"{TPU}/Mistral-7B-MaxText",
        ("attention", "gate and up"), ("offload",),
    ),
    "llama2-70b-v5p-128": Recipe(
        LLAMA2_70B, "v5p:4x4x4", 4, 4096, 16384 / 692,
        "AI-Hypercomputer/maxtext, docs/reference/models/tiering.md; benchmarks/maxtext_v5p_model_configs.py",
        ("gate and up",), ("full",),  # "matmuls" needs 245 of 95.7 GiB
    ),
    "llama3.1-70b-tpu7x-64": Recipe(  # 64 chips of two devices
        LLAMA3_70B, "tpu7x:4x4x4", 2, 8192, 12.20, "AI-Hypercomputer/tpu-recipes, training/ironwood",
        ("attention", "out", "gate and up"), ("full",),
    ),
}  # fmt: skip


# --- a row ----------------------------------------------------------------------------------------------------------------


def make_model(config: Any, key: jax.Array, *, stranger: bool) -> eqx.Module:
    if isinstance(config, experts.Config):
        return experts.Model(config, key)
    return _strangers.Llama(config, key=key) if stranger else Llama(config, key=key)


def make_trainer(recipe: Recipe, deployer: redeqx.Deployer, remat: str, *, stranger: bool) -> redeqx.Trainer:
    config, precision, optimizer = recipe.config, redeqx.Precision("bfloat16"), optax.adamw(1e-4)
    if not recipe.in_float32:
        precision = redeqx.Precision("bfloat16", parameters="bfloat16", rounding="stochastic")
        optimizer = redeqx.optimizers.adamw(1e-4, moments="bfloat16")
    has_experts = isinstance(config, experts.Config)
    if not has_experts:
        config = replace(config, n_positions=recipe.tokens)
    return redeqx.Trainer(
        deployer,
        model=deployer.init(lambda: make_model(config, jax.random.key(0), stranger=stranger)),
        optimizer=optimizer,
        collate_fn=np.stack if has_experts else partial(collate_fn, None),
        loss_fn=experts.loss_fn if has_experts else partial(loss_fn, CHUNK),
        compute=redeqx.Compute(precision, remat=remat),
        accumulate_grad_batches=recipe.accumulate,
    )


def measure(recipe: Recipe, *, stranger: bool, explain: bool) -> dict[str, Any]:
    """Compiles a recipe at the first of its levels that fits, or else at the last, and returns its numbers."""
    with redeqx.described(recipe.machine):
        n_devices = redeqx.Deployer(verbose=False).mesh.size
        shards: Mapping[str, Any] = recipe.shards or {"n_fsdp_shards": n_devices}
        deployer = redeqx.Deployer(verbose=False, **shards)
        for remat in recipe.levels:
            began = time.perf_counter()
            trainer = make_trainer(recipe, deployer, remat, stranger=stranger)
            n_rows = recipe.rows * deployer.n_batch_shards * recipe.accumulate
            rows = [np.zeros(recipe.tokens, np.int32)] * n_rows
            run = trainer.dry_run(rows, per_device_batch_size=recipe.rows, search="none")
            took = time.perf_counter() - began
            if explain:
                print(run, flush=True)
            if run.fits:
                break
    return numbers(recipe, run, remat, took)


def numbers(recipe: Recipe, run: Any, remat: str, took: float) -> dict[str, Any]:
    step, estimate, n_devices = run.steps["train"], run.estimate, run.plan.mesh.size
    sent, hidden, by_kind = 0.0, 0.0, dict[str, list[float]]()
    for each in step.collectives:
        sent += each.moved * (FSDP in each.axes(run.plan.mesh))
        kind = by_kind.setdefault(each.kind, [0.0, 0.0])
        kind[0] += each.moved
        kind[1] += each.moved * (each.hidden or 0.0)
        hidden += each.moved * (each.hidden or 0.0)
    moved = sum(each.moved for each in step.collectives)
    n_fsdp = run.plan.mesh.shape[FSDP]
    zero3 = 8 * run.plan.n_parameters * (n_fsdp - 1) / n_fsdp * recipe.accumulate
    flops, model_flops = sum(step.flops.values()), sum(run.model_flops.values())
    return {
        "remat": remat, "fits": run.fits, "needs": run.needs, "memory": run.machine.memory, "took": took,
        "n_devices": n_devices, "flops": flops / n_devices, "model_flops": model_flops / n_devices,
        "recipe_recomputes": None if recipe.recomputed is None else recomputed_flops(recipe) * recipe.accumulate,
        "bytes_moved": step.bytes_moved, "host_bytes": step.host_bytes, "sent": moved, "hidden": hidden,
        "over_fsdp": sent, "zero3": zero3, "by_kind": by_kind, "n_tokens": run.n_tokens,
        "estimate": None if estimate is None else asdict(estimate),
        "expected": None if run.expected is None else asdict(run.expected), "published": recipe.seconds,
    }  # fmt: skip


def layer_flops(recipe: Recipe) -> dict[str, float]:
    """Returns the FLOPs of a layer's products for a token, forward, without the keys of a causal mask."""
    config = recipe.config
    heads, groups = config.d_model, config.d_model * (config.n_kv_heads or config.n_heads) // config.n_heads
    return {
        "qkv": 2 * config.d_model * (heads + 2 * groups),
        "attention": 2 * recipe.tokens * heads,  # two products, half of the pairs
        "out": 2 * heads * config.d_model,
        "gate and up": 4 * config.d_model * config.d_mlp,
        "down": 2 * config.d_mlp * config.d_model,
    }


def recomputed_flops(recipe: Recipe) -> float:
    """Returns the FLOPs of a device's micro-batch that the recipe computes twice."""
    n = recipe.rows * recipe.tokens / recipe.shards.get("n_sequence_shards", 1)
    a_token = layer_flops(recipe)
    return n * recipe.config.n_layers * sum(a_token[what] for what in recipe.recomputed or ())


# --- the table ------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "recipe", "remat", "needs, GiB", "recomputed", "sent", "hidden", "bounds, s", "expected, s", "published, s",
    "compiled, s",
)  # fmt: skip


def cells(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in found:
        return (name, found["failed"])
    again = found["flops"] - found["model_flops"]
    recipe = found["recipe_recomputes"]
    over = f"{again / recipe:.2f}" if recipe else f"{again / found['flops']:.0%} of the step"
    estimate, expected = found["estimate"], found.get("expected")
    about = "" if expected is None else f"{'unlike: ' * bool(expected['outside'])}{expected['seconds']:.2f}"
    return (
        name, found["remat"],
        f"{found['needs'] / 2**30:.1f} of {found['memory'] / 2**30:.1f}{'' if found['fits'] else ', no'}",
        over, f"{found['over_fsdp'] / found['zero3']:.2f}" if found["zero3"] else "",
        f"{found['hidden'] / found['sent']:.0%}" if found["sent"] else "",
        "" if estimate is None else f"{estimate['step']:.2f} to {estimate['serial']:.2f}",
        about, f"{found['published']:.2f}", f"{found['took']:.0f}",
    )  # fmt: skip


def print_table(rows: list[tuple[str, ...]]) -> None:
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join((*row, *[""] * (len(COLUMNS) - len(row)))) + " |")


def run_row(name: str, out: Path, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Compiles a row in a process of its own, which is killed after the timeout."""
    command = [sys.executable, __file__, "--row", name, "--out", str(args.out)]
    command += ["--stranger"] * args.stranger + ["--explain"] * args.explain
    try:
        done = subprocess.run(command, timeout=args.timeout, stderr=subprocess.PIPE, text=True)
        failed = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]
    except subprocess.TimeoutExpired:
        failed = f"not compiled within {args.timeout:.0f} s"
    if failed:
        out.write_text(json.dumps({"failed": failed}))
    say(" | ".join(cells(name, json.loads(out.read_text()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--stranger", action="store_true", help="the same shape from `eqx.nn` layers, in a Python list")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each row")
    parser.add_argument("--out", type=Path, default=Path("recipes"), help="a folder for each row's numbers")
    parser.add_argument("--explain", action="store_true", help="print the whole reports")
    parser.add_argument("--table", action="store_true", help="print the rows that are in the folder")
    parser.add_argument("--row", choices=RECIPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    suffix = "-stranger" if args.stranger else ""
    if args.row:
        found = measure(RECIPES[args.row], stranger=args.stranger, explain=args.explain)
        (args.out / f"{args.row}{suffix}.json").write_text(json.dumps(found, indent=1) + "\n")
        return
    files = {name: args.out / f"{name}{suffix}.json" for name in args.only}
    if not args.table:
        for name, file in files.items():
            run_row(name, file, args, lambda text: print(text, flush=True))
    print_table([cells(name, json.loads(file.read_text())) for name, file in files.items() if file.exists()])


if __name__ == "__main__":
    main()
