"""Layers of several kinds: groups of blocks that a stack repeats, and the second embedding of each layer.

`_layers.py` says which kinds there are. A block is that of `_block.py`.

Dims: seq = tokens of one example, d = width of the model, size = width of the second embedding in each layer.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..nn import Cache, embed, linear, normal_embedding, normal_linear, times
from ._block import Block, Carry
from ._config import DecoderConfig
from ._layers import Layers, different


class Blocks(eqx.Module):
    """Blocks of different kinds, one after another, which a stack repeats, so that compile time does not grow with depth."""

    layers: tuple[Block, ...]
    remat: bool = eqx.field(static=True)
    # Of blocks whose attentions differ: the indices of a block's mask, of its angles, and of the cache's arrays; its index
    # among the layers of these, in the first group; and the number of such layers in a group. With its own mask, a kernel
    # sees that it is causal.
    places: tuple[tuple[int, int, int, int, int], ...] | None = eqx.field(static=True, default=None)

    @classmethod
    def of_kinds(cls, config: DecoderConfig, layers: Layers, *, key: PRNGKeyArray) -> "Blocks":
        """Returns the first layers of a stack, which the others repeat."""
        kinds = layers.kinds[: layers.period]
        keys = jax.random.split(key, len(kinds))
        blocks = tuple(Block(config, kind=kind, key=key) for kind, key in zip(kinds, keys, strict=True))
        masks, angles = (different(values)[1][layers.first :] for values in (config.windows, config.ropes))
        stores = [kind.store for kind in kinds]
        places = (
            (masks[i], angles[i], store, stores[:i].count(store), stores.count(store)) for i, store in enumerate(stores)
        )
        return cls(blocks, config.remat, tuple(places))

    def __call__(self, carry: Carry, *args: Any, key: PRNGKeyArray | None = None) -> Carry:
        """Returns the carry after these blocks. See `Block`. If attentions differ, the carry's index is that of the group,
        and the second embeddings `[blocks, seq, size]` may follow the arguments."""
        keys = (None,) * len(self.layers) if key is None else jax.random.split(key, len(self.layers))
        if self.places is None:
            for block, key in zip(self.layers, keys, strict=True):
                carry = self._run(block, carry, args, None, key)
            return carry
        x, cache, index, routing = carry
        assert index is not None
        masks, angles, segments, counts, *inputs = args
        counter = cache.layer if isinstance(cache, Cache) else index
        for i, (block, place, key) in enumerate(zip(self.layers, self.places, keys, strict=True)):
            mask, angle, store, first, n = place
            cache = None if cache is None else cache.at(store, index * n + first)
            given = (masks[mask : mask + 1], angles[angle : angle + 1], None, segments, counts)
            own = inputs[0][i] if inputs else None
            x, cache, _, routing = self._run(block, (x, cache, None, routing), given, own, key)
        return x, None if cache is None else cache.at(None, counter), index + 1, routing

    def _run(self, block, carry, args, layer_input, key) -> Carry:
        def call(block, carry, args, layer_input, key) -> Carry:
            return block(carry, *args, layer_input=layer_input, key=key)

        # Inside a scan, as in `Stack`, no barrier is needed.
        run = eqx.filter_checkpoint(call, prevent_cse=False) if self.remat else call
        return run(block, carry, args, layer_input, key)


class LayerInputs(eqx.Module):
    """A second embedding of each token for each layer, and a projection of the first one, which is added to it."""

    embedding: eqx.nn.Embedding
    projection: eqx.nn.Linear
    norm: eqx.nn.RMSNorm
    n_layers: int = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, *, key: PRNGKeyArray):
        size, std, self.n_layers = config.d_layer_input, config.init_std, config.n_layers
        n_rows = config.vocab_size if config.n_layer_inputs is None else config.n_layer_inputs
        embedding_key, projection_key = jax.random.split(key)
        self.embedding = normal_embedding(n_rows, self.n_layers * size, std=std, key=embedding_key)
        self.projection = normal_linear(config.d_model, self.n_layers * size, std=std, use_bias=False, key=projection_key)
        self.norm = eqx.nn.RMSNorm(size, eps=config.norm_eps, use_bias=False)

    def __call__(self, ids: Int[Array, " seq"], x: Float[Array, "seq d"]) -> Float[Array, "layers seq size"]:
        """Returns the inputs of each layer.

        **Arguments:**

        - `x`: the embeddings of the tokens `ids`, scaled.
        """
        split = "seq (layers size) -> layers seq size"
        own = rearrange(embed(self.embedding, ids), split, layers=self.n_layers)
        own = own * jnp.asarray(own.shape[-1] ** 0.5, own.dtype)
        projected = rearrange(times(linear(self.projection, x), x.shape[-1] ** -0.5), split, layers=self.n_layers)
        return times(jax.vmap(jax.vmap(self.norm))(projected) + own, 2**-0.5)
