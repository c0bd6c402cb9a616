"""Memory and traffic of a train step compiled for a GPU or TPU, with and without redeqx's rules. No accelerator is needed.

Models in bfloat16 with float32 parameters and AdamW: GPT-2 of 124 M parameters (16 x 1024 tokens), a LLaMA of 1.1 B with
4 grouped heads (8 x 2048 and 1 x 16384), adapters on Llama 3 8B (4 x 2048), ViT-L (128 images), Stable Diffusion's UNet (16
latents), and `stranger`, a plain Equinox model of `eqx.nn.MultiheadAttention` (12 x 768, 4 x 4096). Prints temporaries,
bytes read and written, and an upper bound on MFU from the published rates of the chip, assuming that memory traffic and
matmuls overlap. Nothing is run. Temporaries exclude cuDNN's workspace, because its plans need a GPU.

    pip install -e ".[topology-gpu]"        # --flax also needs `flax`
    python tests/benchmarks/accelerator.py [--topology gpu:h100-80gb:1 v5e:2x2] [--models gpt2 stranger] [--flax]

Takes about a minute per line, and three if loops are unrolled.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # there is no GPU to time kernels on

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from step_speed import Sizes, flax_gpt2, next_token_loss

import redeqx
from redeqx.compiled import Module, bytes_moved
from redeqx.models import lora
from redeqx.models.gpt2 import GPT2, GPT2Config
from redeqx.models.llama import Llama, LlamaConfig
from redeqx.models.nn import cross_entropy
from redeqx.models.unet import UNet, UNetConfig
from redeqx.models.vit import ViTConfig, ViTForImageClassification
from redeqx.tracing import matmul_flops

GIB = 2**30


class Block(eqx.Module):
    """A pre-norm block of `eqx.nn` layers under `jax.vmap`, as in many tutorials."""

    attention: eqx.nn.MultiheadAttention
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, d: int, n_heads: int, key: Any):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(n_heads, d, key=keys[0])
        self.norms = (eqx.nn.LayerNorm(d), eqx.nn.LayerNorm(d))
        self.up = eqx.nn.Linear(d, 4 * d, key=keys[1])
        self.down = eqx.nn.Linear(4 * d, d, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norms[0])(x).astype(x.dtype)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        h = jax.vmap(self.norms[1])(x).astype(x.dtype)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(h)))


class Stranger(eqx.Module):
    table: eqx.nn.Embedding
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.table = eqx.nn.Embedding(50304, 768, key=keys[0])
        self.blocks = eqx.filter_vmap(lambda key: Block(768, 12, key))(jax.random.split(keys[1], 12))
        self.head = eqx.nn.Linear(768, 50304, use_bias=False, key=keys[2])

    def __call__(self, ids: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, of: (eqx.combine(of, static)(x), None), jax.vmap(self.table)(ids), arrays)
        return jax.vmap(self.head)(x)


def chunked_loss(model: Any, ids: jax.Array, key: Any) -> redeqx.Loss:
    hidden = jax.vmap(model.hidden)(ids[:, :-1])
    return cross_entropy(hidden, ids[:, 1:], head=model.logits, chunk_size=4096 // len(ids))


def plain_loss(model: Any, ids: jax.Array, key: Any) -> jax.Array:
    logits = jax.vmap(model)(ids[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def mean_cross_entropy(model: Any, batch: Any, key: Any) -> jax.Array:
    logits = jax.vmap(model)(batch["pixels"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def denoising_loss(model: Any, batch: Any, key: Any) -> jax.Array:
    noisy, context = batch["noisy"].astype(jnp.bfloat16), batch["context"].astype(jnp.bfloat16)
    noise = jax.vmap(model)(noisy, batch["timestep"], context)
    return jnp.mean((noise.astype(jnp.float32) - batch["noise"]) ** 2)


def make_llama(key: Any) -> Llama:
    sizes = {"d_model": 2048, "d_mlp": 5632, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4}
    return Llama(LlamaConfig(vocab_size=32000, n_positions=16384, **sizes), key=key)


def make_lora(key: Any) -> Llama:
    """Llama 3 8B in bfloat16, with adapters in float32."""
    base = Llama(LlamaConfig.of("llama3-8b"), key=key)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, base)
    return lora.add(base, rank=16, where=("*.attention.query", "*.attention.value"), key=key)


def make_vit(key: Any) -> ViTForImageClassification:
    sizes = {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16, "n_classes": 1000}
    return ViTForImageClassification(ViTConfig(**sizes), key=key)


def tokens(n: int) -> np.ndarray:
    return np.zeros(n + 1, np.int32)


@dataclass(frozen=True)
class Case:
    """A model, its loss, and a batch of `rows` examples."""

    make: Callable[[Any], eqx.Module]
    loss_fn: Callable[..., Any]
    rows: int
    example: Any
    trainable: Callable[[Any], Any] = lambda model: eqx.is_inexact_array


_IMAGE = {"pixels": np.zeros((3, 224, 224), np.float32), "label": np.int32(0)}
_LATENT = np.zeros((4, 64, 64), np.float32)
_NOISED = {"noisy": _LATENT, "noise": _LATENT, "timestep": np.int32(0), "context": np.zeros((77, 768), np.float32)}
CASES = {
    "gpt2": Case(lambda key: GPT2(GPT2Config(vocab_size=50304).without_dropout(), key=key), chunked_loss, 16, tokens(1024)),
    "llama": Case(make_llama, chunked_loss, 8, tokens(2048)),
    "llama-long": Case(make_llama, chunked_loss, 1, tokens(16384)),
    "lora-8b": Case(make_lora, chunked_loss, 4, tokens(2048), lora.trainable),
    "vit-l": Case(make_vit, mean_cross_entropy, 128, _IMAGE),
    "unet": Case(lambda key: UNet(UNetConfig(context_size=768), key=key), denoising_loss, 16, _NOISED),
    "stranger": Case(Stranger, plain_loss, 4, tokens(4096)),
}
RULES = {
    "as written": {"fuse_attention": False, "remat": "none", "unroll": False, "stack_blocks": False},
    "fused attention": {"fuse_attention": True, "remat": "none", "unroll": False, "stack_blocks": False},
    "and remat of loops": {"fuse_attention": True, "remat": "matmuls", "unroll": False},  # equal blocks are one loop
    "and loops unrolled by size": {"fuse_attention": True, "remat": "matmuls"},
}


def measure(case: Case, topology: str, rules: dict[str, Any], n_fsdp_shards: int = 1) -> redeqx.DryRun:
    with redeqx.described(topology):
        deployer = redeqx.Deployer(n_fsdp_shards=n_fsdp_shards, verbose=False)
        model = deployer.init(lambda: case.make(jax.random.key(0)))
        trainer = redeqx.Trainer(
            deployer,
            model=model,
            optimizer=optax.adamw(1e-4),
            collate_fn=lambda examples: jax.tree.map(lambda *leaves: np.stack(leaves), *examples),
            loss_fn=case.loss_fn,
            trainable=case.trainable(model),
            compute=redeqx.Compute(redeqx.Precision("bfloat16", gradients=None), **rules),
        )
        return trainer.dry_run([case.example] * case.rows, batch_size=case.rows, search="none")


def measure_flax(topology: str) -> tuple[float, float, float, float]:
    """Measures GPT-2 written in flax with the same sizes and kernels.

    Returns GiB of temporaries, GiB read and written, the upper bound on MFU, and seconds to compile.
    """
    sizes = Sizes(n_layers=12, d_model=768, n_heads=12, vocab_size=50304, batch=16, seq=1024)
    model = flax_gpt2(sizes, jnp.bfloat16, partial(redeqx.attention, causal=True))
    optimizer = optax.adamw(1e-4)

    def step(params: Any, opt_state: Any, ids: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return next_token_loss(model.apply(params, ids).astype(jnp.float32), ids)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    with redeqx.described(topology) as machine:
        sharding = SingleDeviceSharding(machine.devices[0])
        on_device = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )
        ids = jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32, sharding=sharding)
        params = on_device(jax.eval_shape(model.init, jax.random.key(0), ids))
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, on_device(jax.eval_shape(optimizer.init, params)), ids)
        began = time.perf_counter()
        compiled = traced.lower().compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
        seconds = time.perf_counter() - began
    chip, moved = machine.chip, bytes_moved(Module.of(compiled.as_text() or ""))
    assert chip is not None
    ideal = sum(n / chip.rate(dtype) for dtype, n in matmul_flops(traced.jaxpr.jaxpr).items())
    temporaries: Any = compiled.memory_analysis()
    return temporaries.temp_size_in_bytes / GIB, moved / GIB, ideal / max(ideal, moved / chip.bandwidth), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", default=["gpu:h100-80gb:1"])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--n-fsdp-shards", type=int, default=1, help="of topologies with several chips")
    parser.add_argument("--flax", action="store_true", help="also GPT-2 in flax, with the same kernels")
    args = parser.parse_args()
    for topology in args.topology:
        print(
            f"{topology}\n{'':40}{'temporaries, GiB':>18}{'read + written, GiB':>21}{'MFU at most':>13}{'compiled in':>13}"
        )
        table(topology, args.models, args.rules, args.n_fsdp_shards)
        if args.flax and topology.startswith("gpu"):
            temporaries, moved, mfu, seconds = measure_flax(topology)
            print(f"{'gpt2':12}{'a flax twin':28}{temporaries:18.1f}{moved:21.0f}{mfu:>13.0%}{seconds:11.0f} s", flush=True)


def table(topology: str, models: list[str], rules_of: list[str], n_fsdp_shards: int) -> None:
    for name in models:
        for rules in rules_of:
            options = RULES[rules]
            if name != "stranger" and not options["fuse_attention"]:
                continue  # redeqx's own models call the kernel themselves
            run = measure(CASES[name], topology, options, n_fsdp_shards)
            step, estimate = run.steps["train"], run.estimate
            bound = "" if estimate is None else f"{estimate.mfu:.0%}"
            fits = "" if run.fits else "  does not fit"
            sizes = f"{step.temporaries / GIB:18.1f}{step.bytes_moved / GIB:21.0f}"
            print(f"{name:12}{rules:28}{sizes}{bound:>13}{step.compile_seconds:11.0f} s{fits}", flush=True)


if __name__ == "__main__":
    main()
