"""What attention and grouped matmuls share: abstract values, padding, precisions, each device's part, logs of fallbacks."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

LANES = 128  # of a TPU's vector unit; its kernels take multiples of it
_DEFAULTS = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)


def make_aval(shape: Sequence[int], dtype: Any, like: Any) -> Any:
    """Returns an abstract value that varies over the same mesh axes as `like` inside `jax.shard_map`."""
    sharding = like.sharding.update(spec=P(*[None] * len(shape)))
    return like.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def pad(x: Any, dim: int, multiple: int, value: Any = 0) -> Any:
    """Appends entries to a dim, up to a multiple of a number."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == dim % x.ndim else 0) for i in range(x.ndim)], constant_values=value)


def blocks_of(x: Any, size: int, dim: int = 1, value: Any = 0) -> Any:
    """Returns the blocks of `size` entries of a dim, along a new first dim; the last one is padded."""
    x = pad(x, dim, size, value)
    return jnp.moveaxis(x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :]), dim, 0)


def joined(blocks: Any, n: int, dim: int = 1) -> Any:
    """Returns the first `n` entries of a dim, given its blocks."""
    x = jnp.moveaxis(blocks, 0, dim)
    x = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(x, 0, n, axis=dim)


def default_precision() -> Any:
    """Returns the precision that `jax.default_matmul_precision` currently sets, as the settings take it."""
    config: Any = jax.config  # which declares no attribute for its options
    name = config.jax_default_matmul_precision
    if name is None:
        return None
    presets = jax.lax.DotAlgorithmPreset.__members__
    return presets[name] if name in presets else jax.lax.Precision(name)


def is_default(precision: Any) -> bool:
    """Whether a precision, or a pair of them, is the platform's default, as Pallas's kernels for TPUs need for float32."""
    return set(precision if isinstance(precision, tuple) else (precision,)) <= set(_DEFAULTS)


def on_each_device(mesh: Mesh | AbstractMesh, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns `fn`, called on each device with its parts of the operands."""
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@cache
def log_fallback(how: str, reason: str) -> None:
    """Logs, once per reason, that a platform's kernel is not used."""
    logging.getLogger("redeqx").info("%s: %s", how, reason)
