"""How long a sequence fits machines that are not here, by their compilers: one row, its positions over all devices.

    pip install -e ".[topology-gpu]"                                                   # 4 GB
    python tests/benchmarks/long_sequences.py 8b gpu:h100-80gb:8 --tokens 262144       # one length
    python tests/benchmarks/long_sequences.py 8b gpu:h100-80gb:8 --remat offload       # doubled until it does not fit
    python tests/benchmarks/long_sequences.py 8b gpu:h100-80gb:8 --tokens 32768 --sequence 2 --explain
    python tests/benchmarks/long_sequences.py 8b gpu:h100-80gb:8 --tokens 262144 --text 4096
    python tests/benchmarks/long_sequences.py 8b gpu:h100-80gb:8 --tokens 8192 --rows 4 --chunk 1024 --model-shards 8
    python tests/benchmarks/long_sequences.py 8b v6e:2x4 --sequence 1 --tokens 8192 --rows 3 --chunk 1024 --remat 8GiB
    python tests/benchmarks/long_sequences.py 8b gpu:rtx-4090:1 --tokens 40960 --base nf4 --chunk 1024 --remat offload

- 8b, 1b, 13b: the shapes of LLaMA 3 8B, LLaMA 3.2 1B and LLaMA 13B, all parameters trained by AdamW in float32,
  products in bfloat16, blocks recomputed in the backward pass, the loss in chunks of 8,192 tokens.
- `--base nf4`, `int8`, `bfloat16`: adapters of rank 32 on all linear layers of the blocks are trained on such a base, whose
  embedding and head are bfloat16.
- stranger: a decoder of 1.1 billion parameters from `eqx.nn` layers, with `eqx.nn.MultiheadAttention` and a mask, in a
  Python list. It knows nothing of redeqx.

Devices that are not shards of a sequence (`--sequence`) or of a layer (`--model-shards`) are fsdp shards, each with rows of
its own. `--residual` says whether model shards split positions between layers too, or each has the whole of them.
"""

import argparse
import dataclasses
import math
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redeqx
from redeqx.models import cross_entropy, lora
from redeqx.models.llama import Llama, LlamaConfig

CHUNK = 8192
RESIDUAL = {None: None, "split": True, "whole": False}  # by default as `Compute` chooses


class StrangersBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, d: int, key: jax.Array):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(d // 128, d, key=one)
        self.mlp = eqx.nn.MLP(d, d, 4 * d, 1, jax.nn.gelu, key=two)
        self.norms = [eqx.nn.LayerNorm(d), eqx.nn.LayerNorm(d)]

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Stranger(eqx.Module):
    table: eqx.nn.Embedding
    blocks: list[StrangersBlock]
    head: eqx.nn.Linear

    def __init__(self, vocab: int = 32000, d: int = 2048, n_layers: int = 20, *, key: jax.Array):
        one, two, *keys = jax.random.split(key, 2 + n_layers)
        self.table, self.head = eqx.nn.Embedding(vocab, d, key=one), eqx.nn.Linear(d, vocab, key=two)
        self.blocks = [StrangersBlock(d, key) for key in keys]

    def hidden(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.table)(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.head)(x) if x.ndim == 2 else jax.vmap(self.logits)(x)


def make_model(name: str, n_tokens: int, n_layers: int | None, key: jax.Array) -> eqx.Module:
    if name == "stranger":
        return Stranger(n_layers=n_layers or 20, key=key)
    config = LlamaConfig.of("llama-13b" if name == "13b" else "llama3-8b")
    if name == "1b":
        config = dataclasses.replace(config, d_model=2048, d_mlp=8192, n_layers=16, head_size=64, is_tied=True)
    return Llama(dataclasses.replace(config, n_positions=n_tokens, n_layers=n_layers or config.n_layers), key=key)


def make_adapted(name: str, n_tokens: int, n_layers: int | None, base: str, key: jax.Array) -> eqx.Module:
    model = make_model(name, n_tokens, n_layers, key)
    model = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, model)
    if base != "bfloat16":
        model = lora.quantise(model, where="stack.blocks.*", kind=base)
    return lora.add(model, rank=32, where="stack.blocks.*", key=key)


def loss_fn(chunk: int, model: eqx.Module, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    if (segments := batch.get("segments")) is None:
        hidden = jax.vmap(model.hidden)(batch["ids"])
    else:
        hidden = jax.vmap(lambda ids, segments: model.hidden(ids, segments=segments))(batch["ids"], segments)
    return cross_entropy(hidden, batch["labels"], head=model.logits, chunk_size=min(chunk, hidden.shape[1]))


def collate_fn(text: int | None, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    ids = np.stack(rows)
    labels = np.concatenate([ids[:, 1:], np.full((len(ids), 1), -100, ids.dtype)], axis=1)
    batch = {"ids": ids, "labels": labels}
    if text is not None:
        batch["segments"] = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32) // text, ids.shape)
    return batch


def forecast(args: argparse.Namespace, n_tokens: int):
    with redeqx.described(args.machine):
        n_devices = redeqx.Deployer(verbose=False).mesh.size // args.model_shards
        n_sequence = args.sequence or (n_devices if args.model_shards == 1 else 1)
        n_fsdp = n_devices // n_sequence
        deployer = redeqx.Deployer(
            n_model_shards=args.model_shards, n_fsdp_shards=n_fsdp, n_sequence_shards=n_sequence, verbose=False
        )
        make = partial(make_model, args.model, n_tokens, args.layers, jax.random.key(0))
        if args.base:
            make = partial(make_adapted, args.model, n_tokens, args.layers, args.base, jax.random.key(0))
        model = deployer.init(make)
        trainer = redeqx.Trainer(
            deployer,
            model=model,
            trainable=lora.trainable(model) if args.base else eqx.is_inexact_array,
            optimizer=optax.adamw(1e-4),
            collate_fn=partial(collate_fn, args.text),
            loss_fn=partial(loss_fn, args.chunk),
            compute=redeqx.Compute("bfloat16", remat=args.remat, split_residual=RESIDUAL[args.residual]),
        )
        return trainer.dry_run([np.zeros(n_tokens, np.int32)] * (n_fsdp * args.rows), per_device_batch_size=args.rows)


def row(run, n_tokens: int, seconds: float) -> str:
    step, estimate = run.steps["train"], run.estimate
    sent = sum(each.moved for each in step.collectives) / 2**30
    speed = "" if estimate is None or not run.n_tokens else f"{run.n_tokens / estimate.step:10,.0f} tokens/s at most"
    flops = sum(step.flops.values()) / run.plan.mesh.size
    host = f"{step.host_bytes / 2**30:6.2f} GiB to and from the host  " if step.host_bytes else ""
    memory = f"{run.needs / 2**30:6.1f} GiB, {step.temporaries / 2**30:.2f} temporaries"
    return (
        f"{n_tokens:>11,} tokens  {memory}  {'fits' if run.fits else 'no  '}  {flops:8.3g} FLOPs a device  "
        f"{host}{sent:7.1f} GiB sent  {speed}  ({seconds:.0f} s to compile)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("8b", "1b", "13b", "stranger"))
    parser.add_argument("machine", help="such as gpu:h100-80gb:8, gpu:h100-80gb:8x8, v5e:4x4")
    parser.add_argument("--tokens", type=int, default=None, help="one length; by default doubled from 16,384 on")
    parser.add_argument("--sequence", type=int, default=None, help="sequence shards; by default all devices")
    parser.add_argument("--model-shards", type=int, default=1)
    parser.add_argument(
        "--residual", choices=("split", "whole"), help="how positions between layers are arranged over model shards"
    )
    parser.add_argument("--rows", type=int, default=1, help="of a batch shard")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a row whose loss is computed at once")
    parser.add_argument("--remat", default="full", help="as for Compute, such as full, offload or 6GiB")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--base", choices=("nf4", "int8", "bfloat16"), help="train adapters on a base of this precision")
    parser.add_argument("--text", type=int, help="packed rows, of texts of so many tokens that do not attend to each other")
    parser.add_argument("--explain", action="store_true", help="print the whole report")
    args = parser.parse_args()
    print(f"{args.model} on {args.machine}, remat {args.remat}")
    lengths = [args.tokens] if args.tokens else [2**14 * 2**i for i in range(int(math.log2(2**26 / 2**14)))]
    for n_tokens in lengths:
        began = time.perf_counter()
        run = forecast(args, n_tokens)
        print(row(run, n_tokens, time.perf_counter() - began), flush=True)
        if args.explain:
            print(run)
        if not run.fits:
            break


if __name__ == "__main__":
    main()
