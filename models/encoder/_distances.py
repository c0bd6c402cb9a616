"""Attention to distances of tokens, as in DeBERTa: queries and keys have products with vectors of distances too.

Source: He et al. 2020, *DeBERTa: Decoding-enhanced BERT with Disentangled Attention* (arXiv:2006.03654), and version 2 of
its code, github.com/microsoft/DeBERTa: far distances share buckets, and the layers of queries and keys project the vectors.

Dims: seq = tokens of one example, d = width of the model, heads x size = d, span = buckets of distances on one side.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..nn import Attention, linear


def buckets(seq: int, span: int, n_buckets: int, largest: int) -> Int[np.ndarray, "seq seq"]:
    """Returns the row of the vector of each query's distance to each key.

    **Arguments:**

    - `span`: half of the number of vectors.
    - `n_buckets`: the distances below half of it have their own vectors, and others share one by their logarithm; 0 for none
        that are shared.
    - `largest`: the distance of the last bucket, and all beyond.
    """
    distances = np.arange(seq)[:, None] - np.arange(seq)
    if n_buckets:
        middle = n_buckets // 2
        # In float32, as in the original: another rounding would be another bucket.
        ratio = np.maximum(np.abs(distances), 1).astype(np.float32) / np.float32(middle)
        step = np.log(np.float32((largest - 1) / middle))
        far = np.ceil(np.log(ratio) / step * np.float32(middle - 1)).astype(int) + middle
        distances = np.where(np.abs(distances) <= middle, distances, np.sign(distances) * far)
    return np.clip(distances + span, 0, 2 * span - 1).astype(np.int32)


class Distances(eqx.Module):
    """The vectors of distances in one example, which all layers share."""

    vectors: Float[Array, "distances d"]
    rows: Int[Array, "seq seq"]
    dropout: eqx.nn.Dropout

    def __call__(
        self, attention: Attention, key: PRNGKeyArray | None
    ) -> Callable[[Array, Array], Float[Array, "heads seq seq"]]:
        """Returns a function from queries and keys to what is added to their scores: the scaled products of each query with
        the vector of its distance to the key, and of each key with it."""
        scale = attention.scale
        assert scale is not None
        vectors = self.dropout(self.vectors, key=None if key is None else jax.random.fold_in(key, 1))
        split = lambda layer: rearrange(linear(layer, vectors), "n (heads size) -> heads n size", heads=attention.n_heads)  # noqa: E731
        of_keys, of_queries = split(attention.key), split(attention.query)

        def products(queries: Float[Array, "seq heads size"], keys: Float[Array, "seq heads size"]) -> Array:
            by_query = jnp.einsum("qhs,hns->hqn", queries, of_keys)
            by_key = jnp.einsum("khs,hns->hkn", keys, of_queries)
            pick = jax.vmap(lambda table, rows: jnp.take_along_axis(table, rows, -1), (0, None))
            return (pick(by_query, self.rows) + rearrange(pick(by_key, self.rows.T), "heads k q -> heads q k")) * scale

        return products
