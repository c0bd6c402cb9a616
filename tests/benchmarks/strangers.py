"""Third-party models from PyPI, with and without redeqx's rules.

ESM-2 of esm2quinox (150 M parameters, scanned), the ViTs of jaxonmodels and equimo (both ViT-B/16 in Python lists of
blocks), and a decoder whose attention is written with `jnp.einsum`. Prints for each the memory and traffic of a train step
compiled for a GPU or TPU, as in `accelerator.py`, and, for a small model on the CPU in float32, by how much the rules change
the loss and its gradients. Packages that are not installed are skipped.

    pip install --no-deps esm2quinox jaxonmodels equimo loguru lz4 requests semver beartype
    python tests/benchmarks/strangers.py [--topology gpu:h100-80gb:1] [--models esm2 einsum]
"""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from accelerator import GIB, RULES, Case, measure, tokens
from einops import rearrange

from redeqx.machine import GPUS
from redeqx.tracing import transformed
from redeqx.transforms import FuseAttention, PickByComparison, RematLoops, StackBlocks, UnrollLoops


class EinsumBlock(eqx.Module):
    """A block as in the code of many papers: fused query, key and value, a mask of minus infinity, `jnp.einsum`."""

    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array
    n_heads: int = eqx.field(static=True)

    def __init__(self, d: int, n_heads: int, key: Any):
        shapes = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
        draws = [0.02 * jax.random.normal(key, shape) for key, shape in zip(jax.random.split(key, 4), shapes, strict=True)]
        self.qkv, self.out, self.up, self.down = draws
        self.n_heads = n_heads

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = rearrange(_norm(x) @ self.qkv, "t (three h d) -> three h t d", three=3, h=self.n_heads)
        scores = jnp.einsum("htd,hsd->hts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
        mixed = jnp.einsum("hts,hsd->htd", jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype), v)
        x = x + rearrange(mixed, "h t d -> t (h d)") @ self.out
        return x + jax.nn.silu(_norm(x) @ self.up) @ self.down


def _norm(x: jax.Array) -> jax.Array:
    return (x / jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)).astype(x.dtype)


class EinsumDecoder(eqx.Module):
    table: jax.Array
    blocks: EinsumBlock

    def __init__(self, vocab: int, d: int, n_heads: int, n_layers: int, key: Any):
        self.table = 0.02 * jax.random.normal(key, (vocab, d))
        self.blocks = jax.vmap(lambda key: EinsumBlock(d, n_heads, key))(jax.random.split(key, n_layers))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, block: (block(x), None), self.table[ids], self.blocks)
        return x @ self.table.T


def next_token_loss(model: Any, ids: jax.Array, key: Any) -> jax.Array:
    log_probs = jax.nn.log_softmax(jax.vmap(model)(ids[:, :-1]).astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean()


def same_token_loss(model: Any, ids: jax.Array, key: Any) -> jax.Array:
    logits = jax.vmap(model)(ids).logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()


def class_loss(model: Any, batch: Any, key: Any) -> jax.Array:
    out = jax.vmap(lambda pixels: model(pixels, key=key))(batch["pixels"].astype(jax.tree.leaves(model)[0].dtype))
    out = out[0] if isinstance(out, tuple) else out
    return optax.softmax_cross_entropy_with_integer_labels(out.astype(jnp.float32), batch["label"]).mean()


def esm2(layers: int, d: int, heads: int, key: Any) -> Any:
    import esm2quinox

    return esm2quinox.ESM2(layers, d, heads, False, key)


def jaxonmodels_vit(layers: int, d: int, heads: int, key: Any) -> Any:
    from jaxonmodels.models.vit import VisionTransformer

    return VisionTransformer(224, 16, d, layers, heads, 1000, key=key)


def equimo_vit(layers: int, d: int, heads: int, key: Any) -> Any:
    from equimo.models.vit import VisionTransformer

    return VisionTransformer(224, 3, d, 16, heads, [layers], num_classes=1000, key=key)


def einsum(layers: int, d: int, heads: int, key: Any) -> Any:
    return EinsumDecoder(512 if d < 128 else 50304, d, heads, layers, key)


_IMAGE = {"pixels": np.zeros((3, 224, 224), np.float32), "label": np.int32(0)}
# For each: its package, the sizes of the large model, and those of the small one.
MODELS: dict[str, tuple[str, Callable[..., Any], Case, tuple[int, int, int]]] = {
    "esm2": ("esm2quinox", esm2, Case(lambda key: esm2(30, 640, 20, key), same_token_loss, 16, tokens(1023)), (3, 40, 4)),
    "jaxonmodels": (
        "jaxonmodels", jaxonmodels_vit,
        Case(lambda key: jaxonmodels_vit(12, 768, 12, key), class_loss, 128, _IMAGE), (4, 48, 4),
    ),
    "equimo": (
        "equimo", equimo_vit, Case(lambda key: equimo_vit(12, 768, 12, key), class_loss, 128, _IMAGE), (4, 48, 4)
    ),
    "einsum": ("jax", einsum, Case(lambda key: einsum(12, 768, 12, key), next_token_loss, 8, tokens(2048)), (3, 48, 4)),
}  # fmt: skip


def difference(make: Callable[..., Any], sizes: tuple[int, int, int], case: Case) -> float:
    """Returns the largest relative difference of a small model's loss and gradients with and without the rules."""
    rng = np.random.default_rng(0)
    arrays, static = eqx.partition(make(*sizes, jax.random.key(0)), eqx.is_inexact_array)
    n_weights = len(jax.tree.leaves(arrays))

    def draw(x: Any) -> Any:
        shape = (2, *np.shape(x)) if np.ndim(x) != 1 else (2, 65)
        return rng.normal(size=shape).astype(np.float32) if x.dtype == np.float32 else rng.integers(4, 24, shape)

    batch = jax.tree.map(draw, case.example)

    def loss(arrays: Any, batch: Any) -> jax.Array:
        return case.loss_fn(eqx.combine(arrays, static), batch, jax.random.key(1))

    rules = [StackBlocks([()] * n_weights), UnrollLoops(GPUS["h100-80gb"].chip), RematLoops("matmuls")]
    rules += [FuseAttention(), PickByComparison()]
    found, wanted = (jax.jit(jax.value_and_grad(fn))(arrays, batch) for fn in (transformed(loss, rules), loss))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-6)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="gpu:h100-80gb:1")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["as written", "and loops unrolled by size"])
    args = parser.parse_args()
    for name in args.models:
        package, make, case, small = MODELS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: `{package}` is not installed")
            continue
        print(f"{name}: gradients differ by {difference(make, small, case):.1e}", flush=True)
        for rules in args.rules:
            run = measure(case, args.topology, RULES[rules])
            step, estimate = run.steps["train"], run.estimate
            bound = "" if estimate is None else f", MFU at most {estimate.mfu:.0%}"
            sizes = f"{step.temporaries / GIB:.1f} GiB of temporaries, {step.bytes_moved / GIB:.0f} GiB read and written"
            print(f"  {rules}: {sizes}{bound}, compiled in {step.compile_seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
