"""Collectives of one train step: redeqx's plan against specs written by hand. Nothing is timed.

    python tests/benchmarks/collectives.py            # 8 simulated devices

For each model and mesh, compares the compiled step of `Trainer` with a plain jitted step that has Megatron's specs (and,
for FSDP, gathers each weight by hand where it is used). Prints for each kind of collective and mesh axes the number of
arrays per step, and the bytes that one device sends for them in a ring. Arrays that the compiler sends together are counted
separately; those of at most 64 bytes (the loss, norms) are ignored. If the fsdp axis splits weights, also lists for each
weight the gathers in the forward and backward pass and the reductions of its gradient, and all collectives of activations
over the axes that split the batch.

Models: `redeqx.models.gpt2` (scanned), with and without remat, against `_megatron.py`; and a user's model of plain
`eqx.nn` layers in a list of blocks, against the same model with specs by hand.

- The CPU compiler never emits a reduce-scatter. It emits an all-reduce of twice the bytes instead, on both sides.
- It also sums the input gradients of query, key and value separately; the GPU compiler adds them first. `fused` is the same
  step with one matmul for the three, as in Megatron-LM.
- Both sides split the embedding along its vocabulary. With the fsdp axis on the other dim, an all-to-all of activations
  would replace the all-reduce of the table for the gradient of the lookup: 1.3 of 16.7 MB less at fsdp=8.

With jax 0.10.2, in all nine cases: 1.000 of the bytes by hand, 0.85 to 1.00 of the count; per weight of a block one gather
forward, one backward, one reduction; no collective of activations. The gradient of a tied embedding is reduced twice, for
the lookup and for the head, on both sides. Takes two minutes.
"""

import argparse
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import _megatron
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import redeqx
from redeqx._tree import map_named, named_leaves
from redeqx.compiled import Collective, Module, collectives
from redeqx.models.gpt2 import GPT2, GPT2Config

MESHES = {
    "data=2, model=4": (4, 1),
    "fsdp=8": (1, 8),
    "data=2, fsdp=2, model=2": (2, 2),
}  # n_model_shards, n_fsdp_shards
BATCH, SEQ = 16, 80
SIZES = {"d": 192, "n_heads": 8, "vocab_size": 1024, "n_positions": SEQ}
MAX_SCALAR = 64  # bytes


# --- a user's model ---------------------------------------------------------------------------------------------------


class Block(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, d: int, n_heads: int, *, key):
        keys = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(d)
        self.attention = eqx.nn.MultiheadAttention(n_heads, d, key=keys[0])
        self.mlp_norm = eqx.nn.LayerNorm(d)
        self.up = eqx.nn.Linear(d, 4 * d, key=keys[1])
        self.down = eqx.nn.Linear(4 * d, d, key=keys[2])

    def __call__(self, x):  # [seq, d]
        h = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(h, h, h, mask=jnp.tri(len(x), dtype=bool))
        h = jax.vmap(self.mlp_norm)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(h)))


class LanguageModel(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, n_layers: int, d: int, n_heads: int, vocab_size: int, *, key):
        keys = jax.random.split(key, n_layers + 2)
        self.embedding = eqx.nn.Embedding(vocab_size, d, key=keys[0])
        self.blocks = [Block(d, n_heads, key=block_key) for block_key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(d)
        self.head = eqx.nn.Linear(d, vocab_size, key=keys[1])

    def __call__(self, ids):  # [seq]
        x = jax.vmap(self.embedding)(ids)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model: Any, ids: jax.Array, key: Any = None) -> jax.Array:
    logits = jax.vmap(model)(ids)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def spec_by_hand(name: str) -> P:
    """Returns Megatron's spec for a weight of the user's model, with the fsdp axis on the other dim."""
    if name == "embedding.weight":
        return P(("model", "fsdp"), None)
    if re.search(r"(query_proj|key_proj|value_proj|up|head)\.weight$", name):
        return P("model", "fsdp")
    if re.search(r"(output_proj|down)\.weight$", name):
        return P("fsdp", "model")
    return P("model") if re.search(r"(up|head)\.bias$", name) else P()


def compile_by_hand(model: LanguageModel, mesh: Mesh) -> jax.stages.Compiled:
    params, static = eqx.partition(model, eqx.is_array)
    placed = map_named(lambda name, _: NamedSharding(mesh, spec_by_hand(name)), params)

    def plain(params, ids):
        return loss_fn(eqx.combine(params, static), ids)

    def gathered(params, ids):
        return plain(map_named(lambda name, w: _megatron.gather_at_use(w, spec_by_hand(name), mesh), params), ids)

    is_fsdp = mesh.shape["fsdp"] > 1
    loss = jax.checkpoint(gathered, policy=_megatron.keep_nothing_gathered) if is_fsdp else plain
    return _megatron.compile_adamw_step(loss, params, placed, jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32), mesh)


# --- both sides, compiled ---------------------------------------------------------------------------------------------


def compile_redeqx(model: Any, n_model_shards: int, n_fsdp_shards: int) -> tuple[jax.stages.Compiled, Mesh]:
    deployer = redeqx.Deployer(n_model_shards=n_model_shards, n_fsdp_shards=n_fsdp_shards, verbose=False)
    trainer = redeqx.Trainer(deployer, model=model, optimizer=optax.adamw(1e-3), collate_fn=np.stack, loss_fn=loss_fn)
    mesh = deployer.mesh
    examples = list(np.zeros((BATCH, SEQ), np.int32))
    return trainer.compile(examples, BATCH // (mesh.shape["data"] * mesh.shape["fsdp"])), mesh


def gpt2(n_layers: int, remat: bool) -> GPT2:
    config = GPT2Config(
        vocab_size=SIZES["vocab_size"],
        n_positions=SIZES["n_positions"],
        d_model=SIZES["d"],
        n_layers=n_layers,
        n_heads=SIZES["n_heads"],
        embedding_dropout=0.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
        remat=remat,
    )
    return GPT2(config, key=jax.random.key(0))


# --- their collectives ---------------------------------------------------------------------------------------------------


def totals(found: Iterable[Collective], mesh: Mesh) -> dict[str, tuple[int, float]]:
    """Returns for each kind and axes the arrays moved per step and the bytes that one device sends."""
    sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for collective in found:
        what = f"{collective.kind} over {'+'.join(collective.axes(mesh))}"
        count, moved = sums[what]
        sums[what] = count + collective.n_executions, moved + collective.moved
    return sums


def print_totals(sides: dict[str, list[Collective]], mesh: Mesh) -> None:
    tables = {side: totals(found, mesh) for side, found in sides.items()}
    print(f"    {'':36}" + "".join(f"{side:>22}" for side in sides))
    for what in sorted({what for table in tables.values() for what in table}):
        cells = [table.get(what, (0, 0.0)) for table in tables.values()]
        print(f"    {what:36}" + "".join(f"{count:>8} {moved / 1e6:10.3f} MB" for count, moved in cells))
    sums = [tuple(map(sum, zip(*table.values(), strict=True))) for table in tables.values()]
    print(f"    {'all':36}" + "".join(f"{count:>8.0f} {moved / 1e6:10.3f} MB" for count, moved in sums))
    (count, moved), (count_by_hand, moved_by_hand) = sums[:2]
    print(f"    redeqx / by hand: {count / count_by_hand:.2f} of the count, {moved / moved_by_hand:.3f} of the bytes")


def is_activation(shape: tuple[int, ...]) -> bool:
    """Whether an array has a batch and a sequence dim, possibly merged; no weight has such a shape."""
    rows = {rows for rows in range(2, BATCH + 1) if BATCH % rows == 0}
    lengths = {SEQ, SEQ - 1}  # the loss drops the last logits
    merged = {n * length for n in rows for length in lengths}
    return any(size in merged for size in shape) or bool(lengths & {*shape} and rows & {*shape})


def print_per_weight(model: Any, n_layers: int, found: list[Collective], mesh: Mesh) -> None:
    """Prints for each weight that the fsdp axis splits its gathers forward and backward and its reductions per step."""

    def canonical(shape: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(size for size in shape if size != 1))

    weights: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)).items():
        stacked = name.startswith("stack.")
        shape = leaf.shape[1:] if stacked else leaf.shape
        weights[canonical(shape)] += [name] * (n_layers if stacked else 1)

    def owner(collective: Collective) -> tuple[int, ...] | None:
        """Returns the shape of the weight that a collective moves, maybe split by the model axis, or as a gradient shard."""
        shape, n_model, n_fsdp = canonical(collective.shape), mesh.shape["model"], mesh.shape["fsdp"]
        candidates = []
        for whole in weights:
            dims = range(len(whole))
            scaled = {whole}
            for factor in (n_model, n_fsdp):
                scaled |= {canonical((*s[:i], s[i] // factor, *s[i + 1 :])) for s in scaled for i in dims if i < len(s)}
            if shape in scaled:
                candidates.append(whole)
        return max(candidates, key=lambda whole: (whole == shape, -math.prod(whole)), default=None)

    tally: dict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
    unexplained: list[Collective] = []
    activations: list[Collective] = []
    for collective in found:
        axes = "+".join(collective.axes(mesh))
        if is_activation(collective.shape):
            if axes != "model":
                activations.append(collective)
            continue
        weight = owner(collective)
        if weight is None or collective.kind not in ("all-gather", "all-reduce", "reduce-scatter"):
            unexplained.append(collective)
        elif collective.kind == "all-gather":
            tally[weight]["backward" if collective.is_backward else "forward"] += collective.n_executions
        else:
            tally[weight]["reduced" if "fsdp" in axes else "reduced over data"] += collective.n_executions
    print(f"    {'a weight and step:':36}  gathers: forward  backward   reductions: fsdp  data alone")
    for shape, names in weights.items():
        counts = tally[shape]
        if not counts["forward"] + counts["backward"]:
            continue  # too small to split: its full gradient is all-reduced
        forward, backward, reduced, data = (
            counts[what] / len(names) for what in ("forward", "backward", "reduced", "reduced over data")
        )
        short = ", ".join(sorted({re.sub(r"^.*\.(?=\w+\.\w+$)", "", name) for name in names}))
        size = " x ".join(map(str, shape))
        print(f"      {size:14}{forward:27g}{backward:10g}{reduced:19g}{data:12g}   {short}")
    for what, group in (
        ("activations over the batch's axes", activations),
        ("neither weight nor activation", unexplained),
    ):
        print(f"    {what}: {'none' if not group else ''}")
        for c in group:
            print(f"      {c.n_executions} x {c.kind} of {c.shape} over {'+'.join(c.axes(mesh))}: {c.op_name[-60:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=("gpt2", "gpt2-remat", "user"), default=["gpt2", "gpt2-remat", "user"]
    )
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    redeqx.simulate_devices(8)
    print(f"batch {BATCH} x {SEQ}, {args.layers} layers, {SIZES}, AdamW, float32")
    for kind in args.models:
        for mesh_name in args.meshes:
            remat = kind == "gpt2-remat"
            if kind == "user":
                model: Any = LanguageModel(
                    args.layers, SIZES["d"], SIZES["n_heads"], SIZES["vocab_size"], key=jax.random.key(0)
                )
            else:
                model = gpt2(args.layers, remat)
            compiled, mesh = compile_redeqx(model, *MESHES[mesh_name])
            steps = {"redeqx": compiled}
            if kind == "user":
                steps["by hand"] = compile_by_hand(model, mesh)
            else:
                by_hand = {"batch": BATCH, "seq": SEQ, "n_layers": args.layers, "remat": remat, **SIZES}
                steps["by hand"] = _megatron.compile_step(mesh, fused=False, **by_hand)
                steps["by hand, fused"] = _megatron.compile_step(mesh, fused=True, **by_hand)
            found = {
                side: [c for c in collectives(Module.of(step.as_text() or "")) if c.bytes > MAX_SCALAR]
                for side, step in steps.items()
            }
            print(f"\n{kind}, {mesh_name}", flush=True)
            print_totals(found, mesh)
            temporaries = ", ".join(
                f"{getattr(s.memory_analysis(), 'temp_size_in_bytes', 0) / 1e6:.1f} ({side})" for side, s in steps.items()
            )
            print(f"    temporaries, MB a device: {temporaries}")
            if not all(c.exact for c in found["redeqx"]):
                print("    some loops have unknown trip counts, and are counted once")
            if mesh.shape["fsdp"] > 1:
                print_per_weight(model, args.layers, found["redeqx"], mesh)


if __name__ == "__main__":
    main()
