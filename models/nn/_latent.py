"""Multi-head latent attention: keys and values of all heads are computed from one small vector of each token.

This module owns its projections and what it caches, which is that vector; the softmax is that of `_attention`.

Source: *DeepSeek-V2* (arXiv:2405.04434), section 2.1.

Dims: seq = queries, source = the attended positions, rank = width of a latent vector, plain, rotary = dims of a head's
queries and keys without and with rotary positions, size = both, value = width of a head's values.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import Mask, mix_values
from ._cache import Cache
from ._layers import linear, norm


class LatentAttention(eqx.Module):
    """Attention whose keys and values come from latent vectors. Its last `n_rotary` dims of keys are the same in all heads.

    The cache holds a latent vector and a rotary key of each token, instead of keys and values of each head. A step of
    decoding multiplies the query with the projection of keys, and the result with that of values, so that keys and values
    of earlier tokens are not computed again.
    """

    query_down: eqx.nn.Linear | None  # to a latent vector of queries; None if queries are computed from `x`
    query_norm: eqx.nn.RMSNorm | None
    query: eqx.nn.Linear
    latent: eqx.nn.Linear  # to the latent vector, and the rotary dims of keys
    latent_norm: eqx.nn.RMSNorm
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)
    n_rotary: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    dropout: eqx.nn.Dropout = eqx.nn.Dropout(0.0)

    def __call__(
        self,
        x: Float[Array, "seq d"],
        *,
        mask: Mask | None = None,
        rotary: Callable[[Array], Array] | None = None,
        factors: Float[Array, "seq 1 1"] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "seq d"], Cache | None]:
        """Returns the attention output for each row of `x`, and the cache. See `Attention` for the arguments."""
        down = x if self.query_down is None else norm(self.query_norm, linear(self.query_down, x))
        queries = rearrange(linear(self.query, down), "seq (heads size) -> seq heads size", heads=self.n_heads)
        queries = queries if factors is None else queries * factors.astype(queries.dtype)
        plain, turned = queries[..., : -self.n_rotary], queries[..., -self.n_rotary :]
        found = linear(self.latent, x)
        latents, shared = norm(self.latent_norm, found[:, : -self.n_rotary]), found[:, None, -self.n_rotary :]
        if rotary is not None:
            turned, shared = rotary(turned), rotary(shared)
        stored = jnp.concatenate([latents, shared[:, 0]], axis=-1)[None]  # [1, source, rank + rotary]
        if cache is not None:
            cache, stored, _ = cache.write(stored, stored[..., :0])
        drops = not self.dropout.inference and self.dropout.p > 0
        is_plain = type(self.key) is eqx.nn.Linear and type(self.value) is eqx.nn.Linear  # not adapted
        if len(x) == 1 and is_plain and not drops:
            mixed = self._mix_latents(plain, turned, stored.astype(x.dtype), mask)
        else:
            mixed = self._mix_heads(jnp.concatenate([plain, turned], axis=-1), stored.astype(x.dtype), mask, key)
        return linear(self.output, rearrange(mixed, "seq heads value -> seq (heads value)")), cache

    def _mix_heads(self, queries, stored, mask, key) -> Float[Array, "seq heads value"]:
        """Computes the attention with keys and values of each head."""
        latents, shared = stored[0, :, : -self.n_rotary], stored[:, :, -self.n_rotary :]
        split = "source (heads size) -> heads source size"
        keys = rearrange(linear(self.key, latents), split, heads=self.n_heads)
        values = rearrange(linear(self.value, latents), split, heads=self.n_heads)
        keys = jnp.concatenate([keys, jnp.broadcast_to(shared, (self.n_heads, *shared.shape[1:]))], axis=-1)
        return mix_values(queries, keys, values, mask, self.scale, dropout=self.dropout, key=key)

    def _mix_latents(self, plain, turned, stored, mask) -> Float[Array, "seq heads value"]:
        """Computes the same from the latent vectors: all heads share them as keys and as values."""
        split = "(heads size) rank -> heads size rank"
        key, value = (rearrange(jnp.asarray(layer.weight), split, heads=self.n_heads) for layer in (self.key, self.value))
        queries = jnp.concatenate([jnp.einsum("shp,hpr->shr", plain, key), turned], axis=-1)
        latents = stored[..., : -self.n_rotary]
        mixed = mix_values(queries, stored, latents, mask, self.scale, dropout=self.dropout, key=None)
        return jnp.einsum("shr,hvr->shv", mixed, value)
