"""Which batches of mixtures of experts fit machines that are not here, by their compilers: from shapes alone.

    pip install -e ".[topology-tpu]"                     # the TPU rows
    pip install -e ".[topology-gpu]"                     # the GPU rows, 4 GB
    python tests/benchmarks/experts.py                   # all; or some, by name: qwen3-h100 mixtral-v5e
    python tests/benchmarks/experts.py qwen3-h100 --rows 4 --layers 4 --explain
    python tests/benchmarks/experts.py qwen3-h100 --rows 1 --layers 2 --seq 65536 --sequence 8

- Qwen3-30B-A3B (48 layers, width 2048, 128 experts of 768, 8 for each token, 32 heads and 4 for keys of 128): all of its
  30.5 billion parameters are trained, by AdamW in float32 with bfloat16 products.
- Mixtral 8x7B (32 layers, width 4096, 8 experts of 14336, 2 for each token, 32 heads and 8 for keys): adapters of rank 16 on
  query, key, value and output, over a bfloat16 base.

Rows of 4096 tokens; blocks in a scan, recomputed in the backward pass; everything split over `fsdp`, or with `--sequence`
over devices that share the positions of a row. The batch is doubled until it does not fit. `--layers` compiles fewer layers,
to compare temporaries in a shorter time.

    python tests/benchmarks/experts.py --sent            # 8 H100; or --sent v5e:2x4

prints what a device sends for a layer of experts, in all passes: 16384 tokens of 1024 features in bfloat16, two of 8 experts
of 2048 for each, or eight of 32 experts of 512. *Sorted* sorts the tokens of all rows, as strangers do (`_mixtures.py`).
*Weights* are the sums of the experts' gradients; *whole experts* is what tokens take to the devices of whole experts and
back, by all-to-all. `--remat none` or `full` splits the residual stream on GPUs.
"""

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import _mixtures
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from redeqx.models import cross_entropy, lora
from redeqx.models.nn import (
    Attention,
    MixtureOfExperts,
    Routing,
    Stack,
    add_routing,
    apply_rotary,
    causal_mask,
    embed,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    rotation,
)


@dataclass(frozen=True)
class Config:
    vocab: int
    d: int
    n_layers: int
    n_kv_heads: int
    n_experts: int
    n_chosen: int
    d_expert: int
    theta: float
    has_norms: bool  # of queries and keys
    n_heads: int = 32
    size: int = 128


QWEN3 = Config(151936, 2048, 48, 4, 128, 8, 768, 1e6, has_norms=True)
MIXTRAL = Config(32000, 4096, 32, 8, 8, 2, 14336, 1e6, has_norms=False)


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    experts_norm: eqx.nn.RMSNorm
    experts: MixtureOfExperts

    def __init__(self, config: Config, key: Any):
        *keys, expert_key = jax.random.split(key, 5)
        d, heads, groups = config.d, config.n_heads * config.size, config.n_kv_heads * config.size
        sizes = {"query": (d, heads), "key": (d, groups), "value": (d, groups), "output": (heads, d)}
        layers = {
            name: normal_linear(*size, std=0.02, use_bias=False, key=key)
            for (name, size), key in zip(sizes.items(), keys, strict=True)
        }
        make_norm = partial(eqx.nn.RMSNorm, eps=1e-6, use_bias=False)
        of_heads = {f"{name}_norm": make_norm(config.size) if config.has_norms else None for name in ("query", "key")}
        self.attention = Attention(
            **layers, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, dropout=eqx.nn.Dropout(0.0), **of_heads
        )
        self.attention_norm, self.experts_norm = make_norm(d), make_norm(d)
        self.experts = MixtureOfExperts(d, config.d_expert, config.n_experts, config.n_chosen, key=expert_key)

    def __call__(self, carry: Any, mask: Any, cos: Any, sin: Any, *, key: Any = None) -> Any:
        x, total = carry
        rotary = partial(apply_rotary, cos=cos, sin=sin)
        x = x + self.attention(norm(self.attention_norm, x), mask=mask, rotary=rotary)[0]
        y, routing = self.experts(norm(self.experts_norm, x))
        return x + y, jax.tree.map(jnp.add, total, routing)


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    stack: Stack
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, key: Any):
        first, middle, last = jax.random.split(key, 3)
        self.embedding = normal_embedding(config.vocab, config.d, std=0.02, key=first)
        self.stack = Stack(partial(Block, config), config.n_layers, key=middle)
        self.norm = eqx.nn.RMSNorm(config.d, eps=1e-6, use_bias=False)
        self.head = normal_linear(config.d, config.vocab, std=0.02, use_bias=False, key=last)
        self.config = config

    def hidden(self, ids: Any) -> Any:
        config, seq = self.config, len(ids)
        cos, sin = rotation(jnp.arange(seq), config.size, config.theta, None)
        nothing = Routing(*(jnp.zeros(()) for _ in Routing.__dataclass_fields__))
        x, routing = self.stack((embed(self.embedding, ids), nothing), causal_mask(None, seq), cos, sin)
        return norm(self.norm, x), routing


def loss_fn(model: Model, ids: Any, key: Any) -> redeqx.Loss:
    hidden, routing = jax.vmap(model.hidden)(ids)
    labels = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    return add_routing(
        cross_entropy(hidden, labels, head=partial(linear, model.head), chunk_size=512), routing, balance_loss=1e-3
    )


def all_parameters(config: Config, key: Any) -> Model:
    return Model(config, key)


def with_adapters(config: Config, key: Any) -> Model:
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, Model(config, key))
    return lora.add(model, rank=16, where="*.attention.*", key=key)


@dataclass(frozen=True)
class Row:
    config: Config
    topology: str
    is_adapted: bool = False


ROWS = {
    "qwen3-h100": Row(QWEN3, "gpu:h100-80gb:8"),
    "mixtral-h100": Row(MIXTRAL, "gpu:h100-80gb:8", is_adapted=True),
    "qwen3-v5e": Row(QWEN3, "v5e:2x4"),
    "mixtral-v5e": Row(MIXTRAL, "v5e:2x4", is_adapted=True),
}


def dry_run(row: Row, n_rows: int, seq: int, remat: str, *, n_sequence: int, offload: bool) -> redeqx.DryRun:
    """Compiles one training step with `n_rows` rows a device, or of all devices that share a row's positions."""
    with redeqx.described(row.topology):
        n_devices = redeqx.Deployer(verbose=False).mesh.size
        shards = {"n_fsdp_shards": n_devices // n_sequence, "n_sequence_shards": n_sequence}
        deployer = redeqx.Deployer(**shards, verbose=False)
        make = with_adapters if row.is_adapted else all_parameters
        model = deployer.init(lambda: make(row.config, jax.random.key(0)))
        trainer = redeqx.Trainer(
            deployer, model=model, optimizer=optax.adamw(1e-4), loss_fn=loss_fn, collate_fn=np.stack,
            trainable=lora.trainable(model) if row.is_adapted else eqx.is_inexact_array,
            compute=redeqx.Compute("bfloat16", remat=remat, offload_opt_state=offload),
        )  # fmt: skip
        return trainer.dry_run(np.zeros((trainer.batch_size(n_rows), seq), np.int32), n_rows, search="none")


# --- what is sent -----------------------------------------------------------------------------------------------------

MESHES = {
    "data=8": {},
    "data=2, model=4": {"n_model_shards": 4},
    "model=8": {"n_model_shards": 8},
}
SIZES = {"2 of 8": (2, 8, 2048), "8 of 32": (8, 32, 512)}  # choices, experts, hidden features
ROWS_OF_TOKENS, N_TOKENS, D = 32, 512, 1024


class Residual(eqx.Module):
    """Layers of experts, each after a norm, with an embedding and a head."""

    embedding: jax.Array
    layers: list[Any]
    head: jax.Array

    def __init__(self, n_layers: int, key: Any, is_sorted: bool, n_chosen: int, n_experts: int, d_expert: int):
        keys = jax.random.split(key, n_layers + 2)
        self.embedding, self.head = jax.random.normal(keys[0], (D, D)), jax.random.normal(keys[1], (D, D)) / D**0.5
        if is_sorted:
            _mixtures.D, _mixtures.F, _mixtures.EXPERTS, _mixtures.TOP = D, d_expert, n_experts, n_chosen
            make: Any = lambda key: Sorted(*_mixtures.MIXTURES["sorted_tokens"](key))  # noqa: E731
        else:
            make = lambda key: MixtureOfExperts(D, d_expert, n_experts, n_chosen, key=key)  # noqa: E731
        self.layers = [make(key) for key in keys[2:]]

    def __call__(self, ids: Any) -> Any:
        x = self.embedding[ids]
        for layer in self.layers:
            h = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
            x = x + (layer(h) if isinstance(layer, Sorted) else jax.vmap(layer)(h)[0])
        return x @ self.head


class Sorted(eqx.Module):
    parameters: Any
    apply: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.apply(self.parameters, x)


def sent_by(topology: str, remat: str, mesh: Any, n_layers: int, *args: Any) -> dict[str, float]:
    """Returns the bytes that a device sends in a step, by the mesh axes over which it does."""
    with redeqx.described(topology):
        deployer = redeqx.Deployer(verbose=False, **mesh)
        trainer = redeqx.Trainer(
            deployer, model=deployer.init(lambda: Residual(n_layers, jax.random.key(0), *args)), optimizer=optax.sgd(0.1),
            loss_fn=_mixtures.loss_fn, collate_fn=np.stack, compute=redeqx.Compute("bfloat16", remat=remat),
        )  # fmt: skip
        batch = np.zeros((ROWS_OF_TOKENS, N_TOKENS), np.int32)
        run = trainer.dry_run(batch, batch_size=ROWS_OF_TOKENS, search="none")
        found = {"model": 0.0, "batch": 0.0}
        for each in run.steps["train"].collectives:
            found["model" if "model" in each.axes(deployer.mesh) else "batch"] += each.moved
        return found


def report_sent(topology: str, remat: str) -> None:
    columns = f"{'batch axes':>12s} {'weights':>12s} {'model':>12s} {'whole experts':>14s}"
    print(f"{'experts':8s} {'style':7s} {'mesh':24s} {columns}  MiB")
    for label, (n_chosen, n_experts, d_expert) in SIZES.items():
        n_weights = 3 * n_experts * D * d_expert
        for name, is_sorted in (("layer", False), ("sorted", True)):
            for of_mesh, mesh in MESHES.items():
                one, two = (sent_by(topology, remat, mesh, n, is_sorted, n_chosen, n_experts, d_expert) for n in (1, 2))
                n_model = mesh.get("n_model_shards", 1)
                n = 8 // n_model  # shards of the batch
                weights = 2 * (n - 1) / n * 2 * n_weights / n_model
                copies = ROWS_OF_TOKENS * N_TOKENS / n * n_chosen / n_model  # of a device's tokens, for their choices
                whole = 2 * 2 * copies * D * 2 * (n_model - 1) / n_model
                found = (two["batch"] - one["batch"], weights, two["model"] - one["model"], whole)
                print(
                    f"{label:8s} {name:7s} {of_mesh:24s}" + "".join(f" {each / 2**20:12.1f}" for each in found), flush=True
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rows", type=int, help="compile only this many rows a device")
    parser.add_argument("--most", type=int, default=16, help="rows a device at which the search ends")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=1, help="sequence shards")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--machine", help="instead of the row's, such as v5e:8x8")
    parser.add_argument("--remat", help="by default `full`, and with `--sent` `matmuls`")
    parser.add_argument("--offload", action="store_true", help="the optimizer state is in host memory")
    parser.add_argument("--sent", nargs="?", const="gpu:h100-80gb:8", metavar="TOPOLOGY", help="print what is sent")
    parser.add_argument("--explain", action="store_true", help="print the whole reports")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.sent:
        return report_sent(args.sent, args.remat or "matmuls")
    for name in args.names or ROWS:
        row = ROWS[name]
        row = replace(row, config=replace(row.config, n_layers=args.layers)) if args.layers else row
        row = replace(row, topology=args.machine) if args.machine else row
        n_rows = args.rows or 1
        while n_rows <= (args.rows or args.most):
            began = time.perf_counter()
            try:
                remat, n_sequence = args.remat or "full", args.sequence
                run = dry_run(row, n_rows, args.seq, remat, n_sequence=n_sequence, offload=args.offload)
            except ImportError as error:
                print(name, error, flush=True)
                break
            took = time.perf_counter() - began
            step = run.steps["train"]
            sent, temporaries = sum(each.moved for each in step.collectives) / 2**30, step.temporaries / 2**30
            each = "a device" if n_sequence == 1 else f"for {n_sequence} devices"
            print(
                f"{name}: {n_rows} x {args.seq} {each}: {run.verdict()}, {temporaries:.2f} GiB of temporaries, "
                f"{sent:.1f} GiB sent ({took:.0f} s)",
                flush=True,
            )
            if args.explain:
                print(run, flush=True)
            if not run.fits:
                break
            n_rows *= 2


if __name__ == "__main__":
    main()
