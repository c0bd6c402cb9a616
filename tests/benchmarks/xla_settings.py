"""Effect of XLA settings on a compiled train step: temporaries, and collectives that overlap with matmuls.

A LLaMA of 8 scanned blocks (d 2048, grouped heads, bfloat16, float32 AdamW) under data, FSDP and tensor parallelism.
*Hidden* is the share of the bytes that one device sends by collectives with a matmul between their start and their end in
the schedule; *calls* is the number of collectives executed per step. Nothing is run.

    JAX_PLATFORMS=cpu python tests/benchmarks/xla_settings.py [--topology gpu:h100-80gb:8] [--settings xla_gpu_...=true ...]

Without `--settings`, tests redeqx's settings for the platform, each alone and all together.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # there is no GPU to time kernels on

import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

import redeqx
from redeqx.compiled import Module, collectives
from redeqx.data import BatchSize
from redeqx.dry_run._forecast import _options, _traced
from redeqx.machine import SETTINGS, describe
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.nn import cross_entropy
from redeqx.training import in_order

ROWS, TOKENS, BLOCKS = 2, 2048, 8


def loss_fn(model: Any, ids: jax.Array, key: Any) -> redeqx.Loss:
    hidden = jax.vmap(model.hidden)(ids[:, :-1])
    return cross_entropy(hidden, ids[:, 1:], head=model.logits, chunk_size=256)


def lowered(topology: str, n_model: int, n_fsdp: int) -> Any:
    """Returns the lowered train step of the model on a mesh."""
    config = LlamaConfig(
        vocab_size=32000, n_positions=TOKENS, d_model=2048, d_mlp=5632, n_layers=BLOCKS, n_heads=32, n_kv_heads=8
    )
    with redeqx.described(topology):
        deployer = redeqx.Deployer(
            n_model_shards=n_model, n_fsdp_shards=n_fsdp, verbose=False, compiler=redeqx.Compiler(settings=None)
        )
        trainer = redeqx.Trainer(
            deployer,
            model=deployer.init(lambda: Llama(config, key=jax.random.key(0))),
            optimizer=optax.adamw(1e-4),
            collate_fn=np.stack,
            loss_fn=loss_fn,
            compute=redeqx.Precision("bfloat16", gradients=None),
        )
        rows = ROWS * deployer.n_batch_shards
        size = BatchSize.of(deployer.mesh, ROWS, None)
        work = trainer._workload(in_order(np.zeros((rows, TOKENS + 1), np.int32), size), size)
        batch = jax.ShapeDtypeStruct((rows, TOKENS + 1), np.int32)
        program = work.program(work.plan_on(deployer.mesh, batch), work.strategy)
        return _traced(work, program, work.strategy, only_train=True)["train"].lower()


_MATMUL = re.compile(r"\b(dot|convolution)\(|__cublas|__cudnn|triton_gemm|__triton")


def hidden(text: str) -> tuple[int, float]:
    """Returns the collectives executed per step, and the share of their bytes with a matmul between start and end."""
    module = Module.of(text)
    has_matmul = {}

    def computes(name: str) -> bool:
        if name not in has_matmul:
            has_matmul[name] = False
            has_matmul[name] = any(_is_matmul(each) for each in module.computations.get(name, []))
        return has_matmul[name]

    def _is_matmul(instruction: Any) -> bool:
        text = f"{instruction.opcode}({instruction.rest}"
        return bool(_MATMUL.search(text)) or any(computes(called) for _, called in instruction.calls)

    overlapped = {start for schedule in module.computations.values() for start in _overlapped(schedule, _is_matmul)}
    found = [each for each in collectives(module) if each.group_size > 1]
    total = sum(each.moved for each in found)
    share = sum(each.moved for each in found if each.instruction in overlapped) / total if total else 0.0
    return sum({each.instruction: each.n_executions for each in found}.values()), share


def _overlapped(schedule: list[Any], is_matmul: Any) -> Iterator[str]:
    """Yields the names of a computation's collectives with a matmul between their start and their end."""
    open_: dict[str, bool] = {}
    for instruction in schedule:
        if instruction.opcode.endswith("-start"):
            open_[instruction.name] = False
        elif instruction.opcode.endswith("-done"):
            for name in instruction.operands:
                if open_.pop(name, False):
                    yield name
        elif is_matmul(instruction):
            open_ = dict.fromkeys(open_, True)


def measure(step: Any, topology: str, settings: dict[str, Any]) -> str:
    began = time.perf_counter()
    compiled = step.compile(compiler_options={**(_options(describe(topology)) or {}), **settings})
    calls, share = hidden(compiled.as_text())
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**30
    return f"{temporaries:10.2f}{calls:8}{share:9.0%}{time.perf_counter() - began:10.0f}"


def value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.lstrip("-").isdigit() else text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="gpu:h100-80gb:8")
    parser.add_argument("--n-model", type=int, default=1)
    parser.add_argument("--n-fsdp", type=int, default=8)
    parser.add_argument("--settings", nargs="*", default=[])
    args = parser.parse_args()
    step = lowered(args.topology, args.n_model, args.n_fsdp)
    given = {name: value(text) for name, text in (each.split("=", 1) for each in args.settings)}
    settings = given or SETTINGS["gpu" if args.topology.startswith("gpu") else "tpu"]
    print(f"{args.topology}, n_model={args.n_model}, n_fsdp={args.n_fsdp}")
    print(f"{'':60}{'temp, GiB':>10}{'calls':>8}{'hidden':>9}{'seconds':>10}")
    print(f"{'none':60}{measure(step, args.topology, {})}", flush=True)
    for name, each in settings.items():
        print(f"{f'{name}={each}':60}{measure(step, args.topology, {name: each})}", flush=True)
    if len(settings) > 1:
        print(f"{'all':60}{measure(step, args.topology, settings)}", flush=True)


if __name__ == "__main__":
    main()
