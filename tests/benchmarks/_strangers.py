"""A LLaMA as someone writes it who has never heard of redeqx: `eqx.nn` layers for one sequence, in a Python list."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Turns the halves of each head `[T, heads, size]` by the angles of their positions."""
    n, size = x.shape[0], x.shape[-1]
    angles = jnp.arange(n)[:, None] / theta ** (jnp.arange(0, size, 2) / size)
    cos, sin = (fn(angles)[:, None].astype(x.dtype) for fn in (jnp.cos, jnp.sin))
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)
    n_groups: int = eqx.field(static=True)
    theta: float = eqx.field(static=True)

    def __init__(self, config: Any, *, key: jax.Array):
        d, size, keys = config.d_model, config.d_model // config.n_heads, jax.random.split(key, 4)
        self.n_heads, self.n_groups, self.theta = config.n_heads, config.n_kv_heads or config.n_heads, config.rope_theta
        self.query = eqx.nn.Linear(d, d, use_bias=False, key=keys[0])
        self.key = eqx.nn.Linear(d, self.n_groups * size, use_bias=False, key=keys[1])
        self.value = eqx.nn.Linear(d, self.n_groups * size, use_bias=False, key=keys[2])
        self.out = eqx.nn.Linear(d, d, use_bias=False, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        n = len(x)
        query, key, value = (jax.vmap(layer)(x) for layer in (self.query, self.key, self.value))
        query = rotated(query.reshape(n, self.n_heads, -1), self.theta)
        key = rotated(key.reshape(n, self.n_groups, -1), self.theta)
        key, value = (jnp.repeat(a, self.n_heads // self.n_groups, 1) for a in (key, value.reshape(n, self.n_groups, -1)))
        scores = jnp.einsum("thd,shd->hts", query, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores).astype(value.dtype)
        return jax.vmap(self.out)(jnp.einsum("hts,shd->thd", weights, value).reshape(n, -1))


class Block(eqx.Module):
    norms: list[eqx.nn.RMSNorm]
    attention: Attention
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: Any, *, key: jax.Array):
        d, hidden, keys = config.d_model, config.d_mlp, jax.random.split(key, 4)
        self.norms = [eqx.nn.RMSNorm(d, eps=1e-5, use_bias=False) for _ in range(2)]
        self.attention = Attention(config, key=keys[0])
        self.gate = eqx.nn.Linear(d, hidden, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(d, hidden, use_bias=False, key=keys[2])
        self.down = eqx.nn.Linear(hidden, d, use_bias=False, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(jax.vmap(self.norms[0])(x))
        h = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(self.down)(jax.nn.silu(jax.vmap(self.gate)(h)) * jax.vmap(self.up)(h))


class Llama(eqx.Module):
    table: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, config: Any, *, key: jax.Array):
        one, two, *keys = jax.random.split(key, config.n_layers + 2)
        self.table = eqx.nn.Embedding(config.vocab_size, config.d_model, key=one)
        self.blocks = [Block(config, key=key) for key in keys]
        self.norm = eqx.nn.RMSNorm(config.d_model, eps=1e-5, use_bias=False)
        self.head = eqx.nn.Linear(config.d_model, config.vocab_size, use_bias=False, key=two)

    def hidden(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.table)(ids)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x)

    def logits(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.head)(x) if x.ndim == 2 else jax.vmap(self.logits)(x)
