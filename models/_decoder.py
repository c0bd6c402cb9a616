"""`Decoder`: being called, and decoding with a cache, as every decoder-only language model of this folder does."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._attention import Cache
from ._config import check_length
from ._folder import Pretrained


class Decoder(Pretrained):
    """A causal language model. A family gives its fields, `_run` and `logits`.

    Its config has `n_positions`, `n_layers`, `n_heads` and `d_model`.
    """

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
