"""`EncoderDecoder`: the call and the cached decoding of all models from one sequence to another.

A family's file defines its embedding, blocks and output head. `generate` uses `encode`, `init_cache` and `decode`.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray, Shaped

from redeqx.errors import wrong

from ..nn import Cache, causal_mask, check_length, check_segments, embed, token_mask

NO_LABEL = -100  # labels with this value are ignored


class EncoderDecoder(eqx.Module):
    """A model from a source text, a recording or an image to a target text. A family defines its fields and `logits`.

    The config must have `n_decoder_layers`, `n_decoder_heads`, `d_model`, `decoder_start_token_id` and `pad_token_id`, and
    `n_positions` if the length is limited.
    """

    config: eqx.AbstractVar[Any]
    embedding: eqx.AbstractVar[eqx.nn.Embedding]
    # Called with the embedded tokens, masks, a cache and a key. The blocks of the decoder's `stack` have `project_memory`.
    encoder: eqx.AbstractVar[Any]
    decoder: eqx.AbstractVar[Any]

    def __call__(
        self,
        ids: Shaped[Array, "*input"],
        decoder_ids: Int[Array, " target"],
        *,
        mask: Bool[Array, " source"] | None = None,
        decoder_mask: Bool[Array, " target"] | None = None,
        segments: Int[Array, " source"] | None = None,
        decoder_segments: Int[Array, " target"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "target vocab"]:
        """Returns the logits of the token that follows each of `decoder_ids`, given `ids`, that token and all before it.

        **Arguments:**

        - `ids`, `decoder_ids`: token ids below `vocab_size`, at most `n_positions` of each if the model has a limit. In
            Whisper, the features of a recording take the place of `ids`, and in a captioner the pixels of an image.
            `decoder_ids` start with `decoder_start_token_id`, as `shift_right` returns them.
        - `mask`, `decoder_mask`: True for tokens, False for padding on either side; None if all are tokens. A recording or
            an image has no `mask`.
        - `segments`, `decoder_segments`: the segments of a packed row of texts, as `redeqx.data.pack` returns them, in place
            of both masks. A token attends to its own segment only, positions start again in each, and each may have
            `n_positions` tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, for segments of one side only, and for a mask together with
        segments.
        """
        masks = {"mask": mask, "decoder_mask": decoder_mask, "segments": segments, "decoder_segments": decoder_segments}
        return self.logits(self.hidden(ids, decoder_ids, **masks, key=key))

    def hidden(
        self,
        ids: Shaped[Array, "*input"],
        decoder_ids: Int[Array, " target"],
        *,
        mask: Bool[Array, " source"] | None = None,
        decoder_mask: Bool[Array, " target"] | None = None,
        segments: Int[Array, " source"] | None = None,
        decoder_segments: Int[Array, " target"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "target d"]:
        """Returns the input of `logits`: the decoder's residual stream after all blocks. See `__call__` for the
        arguments."""
        if (segments is None) != (decoder_segments is None):
            missing, given = ("segments", "decoder_segments") if segments is None else ("decoder_segments", "segments")
            raise wrong(missing, f"segments with `{given}`", "None", "Pass both, or neither.")
        check_segments(segments, mask, len(ids))
        check_segments(decoder_segments, decoder_mask, len(decoder_ids), "decoder_")
        if decoder_segments is None:
            self._check_length("decoder_ids", len(decoder_ids))
        encoder_key, decoder_key = (None, None) if key is None else jax.random.split(key)
        given = {name: array for name, array in {"mask": mask, "segments": segments}.items() if array is not None}
        memory = self.encode(ids, **given, key=encoder_key)
        return self._run(decoder_ids, decoder_mask, None, decoder_key, memory, mask, decoder_segments, segments)[0]

    @abstractmethod
    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""

    def encode(
        self,
        ids: Int[Array, " source"],
        *,
        mask: Bool[Array, " source"] | None = None,
        segments: Int[Array, " source"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "source d"]:
        """Returns the encoder's output for `ids`, which the decoder attends to. See `__call__` for the arguments."""
        check_segments(segments, mask, len(ids))
        if segments is None:
            self._check_length("ids", len(ids))
        with jax.named_scope("encoder"):
            return self.encoder(self._embed(ids), token_mask(mask, segments=segments), segments=segments, key=key)[0]

    def init_cache(
        self, length: int, memory: Float[Array, "source d"], memory_mask: Bool[Array, " source"] | None = None
    ) -> Cache:
        """Returns an empty cache for one target of at most `length` tokens, including padding.

        **Arguments:**

        - `memory`: the output of `encode`. Its keys and values are computed here, once.
        - `memory_mask`: the mask that was passed to `encode`.

        Raises ValueError if `length` exceeds the number of positions.
        """
        self._check_length("length", length)
        pairs = self.decoder.stack.map(lambda block: block.project_memory(memory))
        n_kv_heads, size = self._kv_heads
        dtype = self.embedding.weight.dtype
        return Cache.empty(
            self.config.n_decoder_layers, length, n_kv_heads, size, dtype, memory=pairs, memory_mask=memory_mask
        )

    def decode(
        self, ids: Int[Array, " target"], cache: Cache, *, mask: Bool[Array, " target"] | None = None, every: bool = False
    ) -> tuple[Float[Array, "*target vocab"], Cache]:
        """Continues the target in the cache with `ids`: the logits of the token that follows, and the updated cache.

        **Arguments:**

        - `ids`, `mask`: as `decoder_ids` and `decoder_mask` of a call, but with padding on the left only, so that the last
            id is a token.
        - `every`: whether to return the logits of the tokens that follow each of `ids`, as a call does.
        """
        (seq,) = ids.shape
        cache = cache.begin(jnp.ones(seq, bool) if mask is None else mask)
        hidden, cache = self._run(ids, mask, cache, None, None, cache.memory_mask)
        return self.logits(hidden if every else hidden[-1]), cache.end(seq)

    def shift_right(self, labels: Integer[Array, " target"]) -> Int[Array, " target"]:
        """Returns the decoder's inputs for these labels: `decoder_start_token_id`, then all labels but the last. Labels of
        -100 become padding.

        Raises ValueError if the config has no `pad_token_id`.
        """
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)

    @property
    def _kv_heads(self) -> tuple[int, int]:
        """The number of key and value heads of the decoder, and the width of a head."""
        return self.config.n_decoder_heads, self.config.d_model // self.config.n_decoder_heads

    def _check_length(self, what: str, length: int) -> None:
        n_positions = getattr(self.config, "n_positions", None)
        if n_positions is not None:
            check_length(what, length, n_positions)

    def _embed(self, ids: Int[Array, " seq"]) -> Float[Array, "seq d"]:
        """Returns the rows of the embedding, to which a family may do something."""
        return embed(self.embedding, ids)

    def _run(
        self,
        ids: Int[Array, " target"],
        mask: Bool[Array, " target"] | None,
        cache: Any,
        key: PRNGKeyArray | None,
        memory: Float[Array, "source d"] | None,
        memory_mask: Bool[Array, " source"] | None,
        segments: Int[Array, " target"] | None = None,
        memory_segments: Int[Array, " source"] | None = None,
    ) -> tuple[Float[Array, "target d"], Any]:
        """Returns the decoder's hidden states after all blocks, and the cache that they have written to. The caller has
        called `cache.begin`.

        **Arguments:**

        - `memory`: the encoder's output; None with a cache, which holds its keys and values.
        """
        attended = token_mask(memory_mask, segments=memory_segments, query_segments=segments)
        with jax.named_scope("decoder"):
            sees = causal_mask(mask, len(ids), cache, segments=segments)
            return self.decoder(self._embed(ids), sees, memory, attended, segments=segments, cache=cache, key=key)


def shift_right(labels: Integer[Array, " target"], start: int, pad: int | None) -> Int[Array, " target"]:
    """Returns a decoder's inputs for these labels: `start`, then all labels but the last. Labels of -100 become `pad`.

    Raises ValueError if `pad` is None.
    """
    if pad is None:
        raise wrong("pad_token_id", "a token", "None", "Set it in the config.")
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))  # in uint8, -100 is 156
    return jnp.roll(jnp.where(labels == NO_LABEL, pad, labels), 1).at[0].set(start)
