"""Table 1 of RedCoast (arXiv:2310.16355): which models train on which machines, by the real compilers, without the machines.

    pip install -e ".[topology-tpu]"            # the TPU rows
    pip install -e ".[topology-gpu]"            # the GPU rows, 4 GB
    python tests/benchmarks/table1.py           # all; or some, by name: OPT-13B LLaMA-7B

Each row is one full-parameter training step in float32 with AdamW, with layers scanned and recomputed in the backward pass,
at the length given in the paper. The largest batch is found by compiling: it is doubled until it does not fit, then bisected
until the interval is an eighth of it. Also prints the longest compilation time and the peak memory of the host.

The paper's 1080 Ti of 10 GB is described as a 2080 Ti with 10 GB, because CUDA 13's compiler supports none older.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import redeqx
from redeqx.models import cross_entropy
from redeqx.models.bart import Bart, BartConfig
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.gptj import GPTJ, GPTJConfig
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.opt import OPT, OPTConfig
from redeqx.models.t5 import T5, T5Config

GB = 10**9


@dataclass(frozen=True)
class Row:
    """A model, its length in tokens, and the machine; `paper` is the paper's statement."""

    name: str
    make: Callable[..., Any]
    config: Any
    seq: int
    topology: str
    n_model_shards: int
    paper: str
    n_fsdp_shards: int = 1
    memory: int | None = None
    compute_dtype: Any = None


ROWS = (
    Row("BART-large", Bart, BartConfig.of("large"), 1024, "gpu:rtx-2080ti:2", 2, "2 x 1080 Ti (10 GB)", memory=10 * GB),
    Row("GPT2-large", GPT2, GPT2Config.of("774m"), 512, "gpu:rtx-2080ti:2", 2, "2 x 1080 Ti (10 GB)", memory=10 * GB),
    Row("LLaMA-7B", Llama, LlamaConfig.of("llama-7b"), 1024, "gpu:a100-40gb:4", 4, "4 x A100 (40 GB)"),
    Row("GPT-J-6B", GPTJ, GPTJConfig.of("6b"), 1024, "gpu:a100-40gb:4", 4, "4 x A100 (40 GB)"),
    Row("OPT-13B on A100", OPT, OPTConfig.of("13b"), 1024, "gpu:a100-40gb:4", 4, "not listed for 4 x A100"),
    Row("T5-XXL-11B", T5, T5Config.of("v1.1-xxl"), 512, "v4:2x2x2", 8, "2 hosts x 4 TPU v4"),
    Row("OPT-13B", OPT, OPTConfig.of("13b"), 1024, "v4:2x2x2", 8, "2 hosts x 4 TPU v4"),
    Row("OPT-13B with FSDP", OPT, OPTConfig.of("13b"), 1024, "v4:2x2x2", 2, "2 hosts x 4 TPU v4", n_fsdp_shards=4),
    Row("OPT-66B", OPT, OPTConfig.of("66b"), 512, "v4:4x4x4", 8, "16 hosts x 4 TPU v4", n_fsdp_shards=8),
    Row(
        "LLaMA-3.1-405B", Llama, LlamaConfig.of("llama3.1-405b"), 8192, "v5p:4x8x8", 8, "past the paper", n_fsdp_shards=32,
        compute_dtype="bfloat16",
    ),
)  # fmt: skip


def without_dropout(config: Any) -> Any:
    config = config.without_dropout() if hasattr(config, "without_dropout") else config
    return replace(config, remat=True)


def loss_fn(model: Any, batch: dict[str, Any], key: Any) -> redeqx.Loss:
    ids = batch["ids"]
    if "decoder_ids" in batch:
        return cross_entropy(jax.vmap(model)(ids, batch["decoder_ids"]), batch["decoder_ids"])
    return cross_entropy(jax.vmap(model)(ids), ids)


def collate_fn(examples: list[Any]) -> dict[str, np.ndarray]:
    return {"ids": np.stack(examples)}


def collate_pairs(examples: list[Any]) -> dict[str, np.ndarray]:
    """Collates source and target of a sequence-to-sequence model, both of the full length."""
    ids = np.stack(examples)
    return {"ids": ids, "decoder_ids": ids}


def dry_run(row: Row, n_rows: int) -> redeqx.DryRun:
    """Compiles one training step with `n_rows` rows per position of the fsdp axis."""
    with redeqx.described(row.topology, memory=row.memory):
        deployer = redeqx.Deployer(n_model_shards=row.n_model_shards, n_fsdp_shards=row.n_fsdp_shards, verbose=False)
        config = without_dropout(row.config)
        model = eqx.nn.inference_mode(deployer.init(lambda: row.make(config, key=jax.random.key(0))))
        trainer = redeqx.Trainer(
            deployer, model=model, optimizer=optax.adamw(1e-4), loss_fn=loss_fn,
            compute=redeqx.Precision(row.compute_dtype, gradients=None),
            collate_fn=collate_pairs if row.make in (Bart, T5) else collate_fn,
        )  # fmt: skip
        examples = np.zeros((trainer.batch_size(n_rows), row.seq), np.int32)
        return trainer.dry_run(examples, n_rows, search="none")


def search(row: Row, most: int) -> Iterator[tuple[int, redeqx.DryRun, float]]:
    """Yields the dry runs of the search for the largest batch, each with its rows and seconds."""
    fits, fails, n_rows = 0, None, 1
    while fails is None or fails - fits > max(1, fits // 8):
        began = time.perf_counter()
        run = dry_run(row, n_rows)
        yield n_rows, run, time.perf_counter() - began
        fits, fails = (n_rows, fails) if run.fits else (fits, n_rows)
        if fits >= most:
            return
        n_rows = min(2 * fits, most) if fails is None else (fits + fails) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--most", type=int, default=64, help="rows at which the search ends")
    parser.add_argument("--explain", action="store_true", help="print each row's whole report")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    table = []
    for row in ROWS:
        if args.names and row.name not in args.names:
            continue
        largest, needs, seconds = 0, "", []
        try:
            for n_rows, run, took in search(row, args.most):
                seconds.append(took)
                print(f"{row.name}: {n_rows} rows: {run.verdict()} ({took:.0f} s)", flush=True)
                if run.fits:
                    largest, best = n_rows * row.n_fsdp_shards, run
                    needs = f"{run.needs / 2**30:.1f} of {run.machine.memory / 2**30:.1f}"
        except ImportError as error:
            print(error, flush=True)
            continue
        if largest and args.explain:
            print(best, flush=True)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        fits = f"batch {largest}" if largest else "refused"
        table.append(
            (f"{row.name} ({row.seq})", row.paper, row.topology, fits, needs, f"{max(seconds):.0f} s", f"{memory:.1f}")
        )
    head = ("model (length)", "the paper", "compiled for", "largest", "GiB a device", "longest", "host GiB")
    widths = [max(len(line[i]) for line in (head, *table)) for i in range(len(head))]
    for line in (head, *table):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
