"""T5's two stacks, both together, and the encoder alone.

Dims: source, target = tokens of one example in the encoder and the decoder (seq = either), d = width of the model, heads x
size = width of an attention, buckets = ranges of distances.
"""

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..generation import EncoderDecoder
from ..hf import Pretrained, StoredTensor, WeightMap, is_tied_on_disk, layers, same
from ..nn import (
    Attention,
    Block,
    Cache,
    Mask,
    Mlp,
    Stack,
    check_segments,
    embed,
    finite,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    times,
    token_mask,
)
from ._config import T5Config


def _linear(in_size: int, out_size: int, std: float, key: PRNGKeyArray) -> eqx.nn.Linear:
    return normal_linear(in_size, out_size, std=std, use_bias=False, key=key)


def _attention(config: T5Config, key: PRNGKeyArray) -> Attention:
    """Attention without scaling of its scores. The initial queries are smaller by the same factor instead."""
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, width, factor = config.d_model, config.n_heads * config.d_kv, config.init_factor
    return Attention(
        query=_linear(d, width, factor * (d * config.d_kv) ** -0.5, q_key),
        key=_linear(d, width, factor * d**-0.5, k_key),
        value=_linear(d, width, factor * d**-0.5, v_key),
        output=_linear(width, d, factor * width**-0.5, o_key),
        n_heads=config.n_heads,
        n_kv_heads=config.n_heads,
        dropout=eqx.nn.Dropout(config.dropout),
        scale=1.0,
    )


class _Norm(eqx.nn.RMSNorm):
    """An RMSNorm that rounds to float16 if its weight is: the residual stream is float32 then."""

    def __init__(self, config: T5Config):
        super().__init__(config.d_model, eps=config.layer_norm_eps, use_bias=False)

    def __call__(self, x: Float[Array, " d"], *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(x, *args, **kwargs)
        assert self.weight is not None
        return out.astype(jnp.float16) if self.weight.dtype == jnp.float16 else out


class _Mlp(Mlp):
    """An MLP whose outputs, of sizes that float16 does not have, are computed in float32 then, as in transformers."""

    def keeps_float32(self, dtype: Any) -> tuple[str, ...]:
        """Returns the fields that are not cast to this dtype (see `redeqx._tree`)."""
        return ("down",) if jnp.dtype(dtype) == jnp.float16 else ()

    def project(self, inner: Float[Array, "seq inner"]) -> Float[Array, "seq d"]:
        """Applies the last layer."""
        return linear(self.down, finite(inner).astype(jnp.float32) if inner.dtype == jnp.float16 else inner)


class RelativeBias(eqx.Module):
    """A bias on each head's scores for each bucket of distances, shared by all layers of a stack."""

    # An array instead of an `eqx.nn.Embedding`, because every device reads all of its rows.
    table: Float[Array, "buckets heads"]
    max_distance: int = eqx.field(static=True)
    is_causal: bool = eqx.field(static=True)  # if True, later positions share the bucket of distance 0; the mask hides them

    def __init__(self, config: T5Config, *, is_causal: bool, key: PRNGKeyArray):
        std = config.init_factor * config.d_model**-0.5
        self.table = std * jax.random.normal(key, (config.n_buckets, config.n_heads))
        self.max_distance = config.max_distance
        self.is_causal = is_causal

    def __call__(self, queries: Int[Array, " seq"], sources: Int[Array, " source"]) -> Float[Array, "heads seq source"]:
        """Returns the biases for all pairs of query and source positions."""
        n_buckets = len(self.table) if self.is_causal else len(self.table) // 2
        bucket = jnp.asarray(_buckets(n_buckets, self.max_distance))
        back = queries[:, None] - sources
        if self.is_causal:
            found = bucket[jnp.clip(back, 0, self.max_distance)]
        else:
            found = bucket[jnp.minimum(jnp.abs(back), self.max_distance)] + jnp.where(back < 0, n_buckets, 0)
        return rearrange(self.table[found], "seq source heads -> heads seq source")


def _buckets(n_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of each distance from 0 to `max_distance`. Larger distances share its bucket.

    It is computed by numpy in float32 to round as the original does. A device's own logarithm would move some boundaries.
    """
    n_exact = n_buckets // 2
    distances = np.arange(max_distance + 1, dtype=np.int32)
    ratios = np.log(np.maximum(distances, 1).astype(np.float32) / n_exact) / math.log(max_distance / n_exact)
    ranges = n_exact + (ratios * (n_buckets - n_exact)).astype(np.int32)
    return np.where(distances < n_exact, distances, np.minimum(ranges, n_buckets - 1))


def _mlp(config: T5Config, key: PRNGKeyArray) -> _Mlp:
    gate_key, up_key, down_key = jax.random.split(key, 3)
    d, d_ff, factor = config.d_model, config.d_ff, config.init_factor
    return _Mlp(
        gate=_linear(d, d_ff, factor * d**-0.5, gate_key) if config.is_gated else None,
        up=_linear(d, d_ff, factor * d**-0.5, up_key),
        down=_linear(d_ff, d, factor * d_ff**-0.5, down_key),
        dropout=eqx.nn.Dropout(config.dropout),
        activation=config.activation,
    )


def _block(config: T5Config, key: PRNGKeyArray, *, is_decoder: bool) -> Block:
    attention_key, cross_key, mlp_key = jax.random.split(key, 3)
    return Block(
        attention=_attention(config, attention_key),
        attention_norm=_Norm(config),
        cross_attention=_attention(config, cross_key) if is_decoder else None,
        cross_norm=_Norm(config) if is_decoder else None,
        mlp=_mlp(config, mlp_key),
        mlp_norm=_Norm(config),
        dropout=eqx.nn.Dropout(config.dropout),
        is_pre_norm=True,
    )


class TransformerStack(eqx.Module):
    """The encoder or the decoder: its relative position biases, its blocks, and the final norm."""

    positions: RelativeBias
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    norm: eqx.nn.RMSNorm

    def __init__(self, config: T5Config, *, is_decoder: bool, key: PRNGKeyArray):
        positions_key, stack_key = jax.random.split(key)
        n_layers = config.n_decoder_layers if is_decoder else config.n_layers
        self.positions = RelativeBias(config, is_causal=is_decoder, key=positions_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        make = functools.partial(_block, config, is_decoder=is_decoder)
        self.stack = Stack(make, n_layers, remat=config.remat, key=stack_key)
        self.norm = _Norm(config)

    def __call__(
        self,
        x: Float[Array, "seq d"],
        mask: Mask | None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Mask | None = None,
        *,
        segments: Int[Array, " seq"] | None = None,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "seq d"], Cache | None]:
        del segments  # masks have them, and a distance between two segments does not matter
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        # Distances are between slots. Padding before the first token shifts all tokens equally.
        start, length = (0, len(x)) if cache is None else (cache.index, cache.mask.shape[0])
        bias = self.positions(start + jnp.arange(len(x)), jnp.arange(length))
        x = self.dropout(x, key=keys[0])
        x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x  # the residual stream (see `_Mlp`)
        x, cache, _ = self.stack((x, cache, None), mask, memory, memory_mask, bias, key=keys[1])
        return self.dropout(norm(self.norm, x), key=keys[2]), cache


class T5(EncoderDecoder, Pretrained):
    """T5, from the token ids of a source and of a target to the logits of each next token of the target.

    Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = T5(T5Config.of("small"), key=jax.random.key(0))
    logits = model(ids, model.shift_right(labels), mask=mask, key=key)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed. Examples may be of any length.
    """

    config_class = T5Config
    model_types = ("t5", "mt5")
    architectures = (
        "T5ForConditionalGeneration",
        "T5WithLMHeadModel",  # the name in the first folders
        "MT5ForConditionalGeneration",
    )

    embedding: eqx.nn.Embedding
    encoder: TransformerStack
    decoder: TransformerStack
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    config: T5Config = eqx.field(static=True)

    def __init__(self, config: T5Config, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as the paper's code does: the embedding N(0, 1), queries N(0, 1 / (`d_model` `d_kv`)), all
            other layers N(0, 1 / inputs), relative positions N(0, 1 / `d_model`). All standard deviations are multiplied by
            `init_factor`. Norms are 1.
        """
        embedding_key, encoder_key, decoder_key, head_key = jax.random.split(key, 4)
        vocab, d, factor = config.vocab_size, config.d_model, config.init_factor
        self.embedding = normal_embedding(vocab, d, std=factor, key=embedding_key)
        self.encoder = TransformerStack(config, is_decoder=False, key=encoder_key)
        self.decoder = TransformerStack(config, is_decoder=True, key=decoder_key)
        self.head = None if config.is_tied else _linear(d, vocab, factor * d**-0.5, head_key)
        self.config = config

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        with jax.named_scope("head"):
            if self.config.is_scaled:
                hidden = times(hidden, self.config.d_model**-0.5)
            return hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)

    @property
    def _kv_heads(self) -> tuple[int, int]:
        return self.config.n_heads, self.config.d_kv

    @classmethod
    def architecture(cls, config: T5Config) -> str:
        return {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}[config.model_type]

    @classmethod
    def read_config(cls, folder: Path) -> T5Config:
        """Reads the config of a folder. It is tied if the folder has no output head that differs from the embedding.

        Only the tensors show this: transformers 5 always writes that the head is tied, but loads a separate head if the file
        has one.
        """
        config = super().read_config(folder)
        names = "lm_head.weight", "shared.weight"
        return replace(config, is_tied=is_tied_on_disk(folder, cls.weights_name, *names, default=config.is_tied))

    @staticmethod
    def weight_map(config: T5Config) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves. Relative positions are in the first layer of each
        stack."""
        copies = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
        return WeightMap(
            tensors=[
                same("shared.weight", "embedding.weight"),
                *_stack_tensors("encoder", config, is_decoder=False),
                *_stack_tensors("decoder", config, is_decoder=True),
                *([] if config.is_tied else [same("lm_head.weight", "head.weight")]),
            ],
            # An unused table in the first files.
            ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
            copies={**copies, "lm_head.weight": "shared.weight"} if config.is_tied else copies,
        )


class T5Encoder(Pretrained):
    """T5's encoder alone, from token ids to a vector for each. Call it on one example; `jax.vmap` it over a batch.

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed. `T5Encoder.from_pretrained` also reads the
    encoder of a complete T5.
    """

    config_class = T5Config
    model_types = ("t5", "mt5")
    architectures = ("T5EncoderModel", "MT5EncoderModel")

    embedding: eqx.nn.Embedding
    encoder: TransformerStack
    config: T5Config = eqx.field(static=True)

    def __init__(self, config: T5Config, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and the dropout rate. Those of the decoder are not used.
        - `key`: draws the weights as in `T5`.
        """
        embedding_key, encoder_key = jax.random.split(key)
        self.embedding = normal_embedding(config.vocab_size, config.d_model, std=config.init_factor, key=embedding_key)
        self.encoder = TransformerStack(config, is_decoder=False, key=encoder_key)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the encoder's output for each token.

        **Arguments:**

        - `ids`: token ids below `vocab_size`.
        - `mask`: True for tokens, False for padding on either side; None if all are tokens.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for a mask together with segments.
        """
        check_segments(segments, mask, len(ids))
        with jax.named_scope("encoder"):
            return self.encoder(embed(self.embedding, ids), token_mask(mask, segments=segments), key=key)[0]

    @classmethod
    def architecture(cls, config: T5Config) -> str:
        return {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel"}[config.model_type]

    @staticmethod
    def weight_map(config: T5Config) -> WeightMap:
        return WeightMap(
            tensors=[same("shared.weight", "embedding.weight"), *_stack_tensors("encoder", config, is_decoder=False)],
            ignored=("decoder.*", "lm_head.weight"),
            copies={"encoder.embed_tokens.weight": "shared.weight"},
        )


def _stack_tensors(side: str, config: T5Config, *, is_decoder: bool) -> list[StoredTensor]:
    """Returns the tensors of the encoder or the decoder. `side` is its name on disk and in the tree."""

    def attention(layer: str, disk: str, norm: str, leaf: str) -> list[StoredTensor]:
        roles = {"q": "query", "k": "key", "v": "value", "o": "output"}
        projections = [same(f"{layer}.{disk}.{role}.weight", f"{leaf}.{name}.weight") for role, name in roles.items()]
        return [same(f"{layer}.layer_norm.weight", f"{norm}.weight"), *projections]

    block = attention("layer.0", "SelfAttention", "attention_norm", "attention")
    if is_decoder:
        block += attention("layer.1", "EncDecAttention", "cross_norm", "cross_attention")
    last = "layer.2" if is_decoder else "layer.1"
    mlp = {"wi": "up"} if config.mlp == "relu" else {"wi_0": "gate", "wi_1": "up"}
    block.append(same(f"{last}.layer_norm.weight", "mlp_norm.weight"))
    for disk, leaf in {**mlp, "wo": "down"}.items():
        block.append(same(f"{last}.DenseReluDense.{disk}.weight", f"mlp.{leaf}.weight"))
    n_layers = config.n_decoder_layers if is_decoder else config.n_layers
    return [
        same(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{side}.positions.table"),
        *layers(f"{side}.block.{{}}.", f"{side}.stack.blocks.", n_layers, block),
        same(f"{side}.final_layer_norm.weight", f"{side}.norm.weight"),
    ]
