"""`Decoder` and `EncoderDecoder`: the call and the cached decoding that all language models here share.

Each family's own file defines its embedding, blocks and head. `generate` needs `encode`, `init_cache` and `decode`.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

from ..nn import Cache, check_length

NO_LABEL = -100  # a label that is ignored


class Decoder(eqx.Module):
    """A causal language model. A family gives its fields, `_run` and `logits`.

    Its config has `n_positions`, `n_layers`, `n_heads` and `d_model`.
    """

    config: eqx.AbstractVar[Any]
    embedding: eqx.AbstractVar[eqx.nn.Embedding]

    def __call__(
        self, ids: Int[Array, " seq"], *, mask: Bool[Array, " seq"] | None = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, "seq vocab"]:
        """The logits of the token after each of `ids`, given it and those before it.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `mask`: which of them are tokens, and not padding on either side; None for all. Positions count tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for more ids than positions.
        """
        return self.logits(self.hidden(ids, mask=mask, key=key))

    def hidden(
        self, ids: Int[Array, " seq"], *, mask: Bool[Array, " seq"] | None = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, "seq d"]:
        """What `logits` takes: the residual stream after all blocks, normed. The arguments are those of a call."""
        check_length("ids", ids.shape[0], self.config.n_positions)
        return self._run(ids, mask, None, key)[0]

    @abstractmethod
    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """The logits of the next tokens, from hidden states."""

    def init_cache(self, length: int) -> Cache:
        """An empty cache for one example of at most `length` tokens, padding included.

        Raises ValueError for more tokens than positions.
        """
        check_length("length", length, self.config.n_positions)
        n_kv_heads, size = self._kv_heads
        return Cache.empty(self.config.n_layers, length, n_kv_heads, size, self.embedding.weight.dtype)

    def decode(
        self, ids: Int[Array, " seq"], cache: Cache, *, mask: Bool[Array, " seq"] | None = None
    ) -> tuple[Float[Array, " vocab"], Cache]:
        """The logits of the token after the last of `ids`, which go on from those in the cache; and the cache with them.

        **Arguments:**

        - `ids`, `mask`: as for a call; padding is on the left, so that the last one is a token.
        """
        (seq,) = ids.shape
        cache = cache.begin(jnp.ones(seq, bool) if mask is None else mask)
        hidden, cache = self._run(ids, mask, cache, None)
        return self.logits(hidden[-1]), cache.end(seq)

    @property
    def _kv_heads(self) -> tuple[int, int]:
        """Heads of keys and values, and the width of one."""
        return self.config.n_heads, self.config.d_model // self.config.n_heads

    @abstractmethod
    def _run(
        self, ids: Int[Array, " seq"], mask: Bool[Array, " seq"] | None, cache: Any, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "seq d"], Any]:
        """Hidden states of `ids`, and the cache, which has begun with them, after all blocks have written to it."""


class EncoderDecoder(eqx.Module):
    """A model from a source text to a target text. A family gives its fields, `encode`, `_run` and `logits`.

    Its config has `n_decoder_layers`, `decoder_start_token_id` and `pad_token_id`, and `n_positions` where there is a limit.
    """

    config: eqx.AbstractVar[Any]
    embedding: eqx.AbstractVar[eqx.nn.Embedding]
    decoder: eqx.AbstractVar[Any]  # its `stack` is of blocks with `project_memory`

    def __call__(
        self,
        ids: Int[Array, " source"],
        decoder_ids: Int[Array, " target"],
        *,
        mask: Bool[Array, " source"] | None = None,
        decoder_mask: Bool[Array, " target"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "target vocab"]:
        """The logits of the token after each of `decoder_ids`, given `ids`, it, and those before it.

        **Arguments:**

        - `ids`, `decoder_ids`: token ids below `vocab_size`, at most `n_positions` of each where the model has a limit; the
            latter begin with `decoder_start_token_id`, as `shift_right` makes them.
        - `mask`, `decoder_mask`: which of them are tokens, and not padding on either side; None for all.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for more ids than positions.
        """
        return self.logits(self.hidden(ids, decoder_ids, mask=mask, decoder_mask=decoder_mask, key=key))

    def hidden(
        self,
        ids: Int[Array, " source"],
        decoder_ids: Int[Array, " target"],
        *,
        mask: Bool[Array, " source"] | None = None,
        decoder_mask: Bool[Array, " target"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "target d"]:
        """What `logits` takes: the decoder's residual stream after all blocks. The arguments are those of a call."""
        self._check_length("decoder_ids", decoder_ids.shape[0])
        encoder_key, decoder_key = (None, None) if key is None else jax.random.split(key)
        memory = self.encode(ids, mask=mask, key=encoder_key)
        return self._run(decoder_ids, decoder_mask, None, decoder_key, memory, mask)[0]

    @abstractmethod
    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """The logits of the next tokens, from hidden states."""

    @abstractmethod
    def encode(
        self, ids: Int[Array, " source"], *, mask: Bool[Array, " source"] | None = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, "source d"]:
        """The encoder's output for `ids`, to which the decoder attends. The arguments are those of a call."""

    def init_cache(
        self, length: int, memory: Float[Array, "source d"], memory_mask: Bool[Array, " source"] | None = None
    ) -> Cache:
        """An empty cache for one target of at most `length` tokens, padding included.

        **Arguments:**

        - `memory`: what `encode` returned; its keys and values are computed here, once.
        - `memory_mask`: the mask that `encode` was given.

        Raises ValueError for more tokens than positions.
        """
        self._check_length("length", length)
        pairs = self.decoder.stack.map(lambda block: block.project_memory(memory))
        n_kv_heads, size = self._kv_heads
        dtype = self.embedding.weight.dtype
        return Cache.empty(
            self.config.n_decoder_layers, length, n_kv_heads, size, dtype, memory=pairs, memory_mask=memory_mask
        )

    def decode(
        self, ids: Int[Array, " target"], cache: Cache, *, mask: Bool[Array, " target"] | None = None
    ) -> tuple[Float[Array, " vocab"], Cache]:
        """The logits of the token after the last of `ids`, which go on from those in the cache; and the cache with them.

        **Arguments:**

        - `ids`, `mask`: as the decoder's for a call; padding is on the left, so that the last one is a token.
        """
        (seq,) = ids.shape
        cache = cache.begin(jnp.ones(seq, bool) if mask is None else mask)
        hidden, cache = self._run(ids, mask, cache, None, None, cache.memory_mask)
        return self.logits(hidden[-1]), cache.end(seq)

    def shift_right(self, labels: Integer[Array, " target"]) -> Int[Array, " target"]:
        """The decoder's inputs for labels: `decoder_start_token_id`, then all but the last; padding where one is -100.

        Raises ValueError for a config without `pad_token_id`.
        """
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    @property
    @abstractmethod
    def _kv_heads(self) -> tuple[int, int]:
        """Heads of keys and values of the decoder, and the width of one."""

    def _check_length(self, what: str, length: int) -> None:
        n_positions = getattr(self.config, "n_positions", None)
        if n_positions is not None:
            check_length(what, length, n_positions)

    @abstractmethod
    def _run(
        self,
        ids: Int[Array, " target"],
        mask: Bool[Array, " target"] | None,
        cache: Any,
        key: PRNGKeyArray | None,
        memory: Float[Array, "source d"] | None,
        memory_mask: Bool[Array, " source"] | None,
    ) -> tuple[Float[Array, "target d"], Any]:
        """The decoder's hidden states, and the cache, which has begun with `ids`, after all blocks have written to it.

        **Arguments:**

        - `memory`: what is attended to; None with a cache, which holds its keys and values.
        """


def shift_right(labels: Integer[Array, " target"], start: int, pad: int | None) -> Int[Array, " target"]:
    """A decoder's inputs for labels: `start`, then all but the last; `pad` where one is -100.

    Raises ValueError where `pad` is None.
    """
    if pad is None:
        raise ValueError("`pad_token_id`: expected a token, got None. Give the config one.")
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # in bytes -100 is 156
    return jnp.roll(jnp.where(labels == NO_LABEL, pad, labels), 1).at[0].set(start)
