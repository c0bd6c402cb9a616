"""T5: a pre-norm encoder-decoder without biases in its layers, with relative position biases.

Source: Raffel et al. 2020, *Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer*
(arXiv:1910.10683), and its code, github.com/google-research/text-to-text-transfer-transformer. Version 1.1, with gated MLPs
and a separate output head, is Shazeer 2020, *GLU Variants Improve Transformer* (arXiv:2002.05202). mT5 (arXiv:2010.11934) is
version 1.1 with another vocabulary. As in transformers, each stack has one table of position biases, which its layers share.
Positions enter only as distances, so examples may have any length.

Dims: source, target = tokens of one example in the encoder and the decoder (seq = either), d = width of the model, heads x
size = width of an attention, buckets = ranges of distances.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._kinds import RATE
from .generation import EncoderDecoder, Generation
from .hf import (
    ConfigReader,
    Field,
    FolderConfig,
    ModelType,
    Only,
    Pretrained,
    StoredTensor,
    Tokens,
    WeightMap,
    is_tied_on_disk,
    layers,
    same,
)
from .nn import (
    Attention,
    Cache,
    Mask,
    Stack,
    causal_mask,
    check_rates,
    check_segments,
    check_sizes,
    embed,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    token_mask,
)

Carry = tuple[Array, Cache | None]  # passed from block to block: the residual stream [seq, d], and the cache

_MLPS = ("relu", "gated-gelu", "gated-silu")
# The defaults of each `model_type` for keys that are absent from `config.json`, where they are not the config's own
# defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {},
    "mt5": {"vocab_size": 250112, "d_ff": 1024, "n_layers": 8, "n_heads": 6, "mlp": "gated-gelu"},
}


# Alternative names of keys, which transformers accepts too.
_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
_MAX_DISTANCE = 2**20  # in tokens; the maximum size of the table of distances


def _activation(mlp: str) -> str:
    """Returns the name of an MLP's activation in `transformers`."""
    return "gelu_new" if mlp == "gated-gelu" else mlp.removeprefix("gated-")


@dataclass(frozen=True)
class T5Config(FolderConfig):
    """The sizes and the dropout rate of a T5. The defaults are those of the smallest published model of the original
    version.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `d_model`, `d_ff`: the width of the model, and the inner width of its MLPs.
    - `d_kv`: the width of one head. `n_heads * d_kv` may differ from `d_model`.
    - `n_layers`, `n_decoder_layers`: the number of blocks of the encoder and of the decoder.
    - `n_heads`: the number of heads in each attention.
    - `mlp`: `"relu"` as in the original, `"gated-gelu"` (by tanh) as in version 1.1, or `"gated-silu"`.
    - `n_buckets`, `max_distance`: the number of position biases of each head, at least 4, and the distance above which all
        tokens share one. Half of the buckets (a quarter in each direction in the encoder) contain one distance each; the
        others contain ranges of increasing length.
    - `dropout`: the rate of all dropouts, in [0, 1).
    - `layer_norm_eps`: added to the mean square in norms.
    - `is_tied`: whether the output head shares the embedding's weight; not in version 1.1.
    - `is_scaled`: whether logits are multiplied by `d_model ** -0.5`; not in version 1.1.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first token (T5 uses none) and last token, and of
        padding.
    - `decoder_start_token_id`: the id of the decoder's first token.
    - `init_factor`: multiplies the standard deviations of the initial weights.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `model_type`: `"t5"`, or `"mt5"`, whose logits are never scaled in transformers.
    - `generation`: the folder's defaults for the arguments of `generate`.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, rates outside [0, 1), buckets that do not fit `max_distance`, and any other MLP.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    n_layers: int = 6
    n_decoder_layers: int = 6
    n_heads: int = 8
    mlp: str = "relu"
    n_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.1
    layer_norm_eps: float = 1e-6
    is_tied: bool = True
    is_scaled: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    decoder_start_token_id: int = 0
    init_factor: float = 1.0
    remat: bool = False
    model_type: str = "t5"
    generation: Generation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "d_model", "d_kv", "d_ff", "n_layers", "n_decoder_layers", "n_heads")
        check_rates(self, "dropout")
        if self.n_buckets < 4:
            raise ValueError(f"`n_buckets`: expected at least 4, got {self.n_buckets}. Each direction needs two.")
        if self.max_distance <= self.n_buckets // 2:
            raise ValueError(
                f"`max_distance`: expected more than half of `n_buckets`={self.n_buckets}, got {self.max_distance}. "
                "That many distances have their own bucket."
            )
        if self.max_distance > _MAX_DISTANCE:
            raise ValueError(f"`max_distance`: expected at most {_MAX_DISTANCE}, got {self.max_distance}. Lower it.")
        if self.mlp not in _MLPS:
            raise ValueError(f"`mlp`: expected one of {', '.join(_MLPS)}, got {self.mlp!r}. Pass one of them.")
        if self.model_type not in _DEFAULTS:
            raise ValueError(f"`model_type`: expected 't5' or 'mt5', got {self.model_type!r}. Pass one of them.")
        if self.model_type == "mt5" and self.is_scaled:
            raise ValueError("`is_scaled`: expected False with `model_type`='mt5', got True. Make it a 't5'.")

    def without_dropout(self) -> "T5Config":
        """The same config without dropout."""
        return replace(self, dropout=0.0)

    @classmethod
    def t5_small(cls) -> "T5Config":
        """The published T5 with 61 million parameters."""
        return cls()

    @classmethod
    def t5_base(cls) -> "T5Config":
        """The published T5 with 223 million parameters."""
        return cls(d_model=768, d_ff=3072, n_layers=12, n_decoder_layers=12, n_heads=12)

    @classmethod
    def t5_large(cls) -> "T5Config":
        """The published T5 with 738 million parameters."""
        return cls(d_model=1024, d_ff=4096, n_layers=24, n_decoder_layers=24, n_heads=16)

    @classmethod
    def t5_3b(cls) -> "T5Config":
        """The published T5 with 2.9 billion parameters."""
        return cls(d_model=1024, d_kv=128, d_ff=16384, n_layers=24, n_decoder_layers=24, n_heads=32)

    @classmethod
    def t5_11b(cls) -> "T5Config":
        """The published T5 with 11.3 billion parameters."""
        return cls(d_model=1024, d_kv=128, d_ff=65536, n_layers=24, n_decoder_layers=24, n_heads=128)

    @classmethod
    def v1_1_small(cls) -> "T5Config":
        """Version 1.1 (and Flan-T5) with 77 million parameters."""
        return cls._v1_1(d_model=512, d_ff=1024, n_layers=8, n_heads=6)

    @classmethod
    def v1_1_base(cls) -> "T5Config":
        """Version 1.1 (and Flan-T5) with 248 million parameters."""
        return cls._v1_1(d_model=768, d_ff=2048, n_layers=12, n_heads=12)

    @classmethod
    def v1_1_large(cls) -> "T5Config":
        """Version 1.1 (and Flan-T5) with 783 million parameters."""
        return cls._v1_1(d_model=1024, d_ff=2816, n_layers=24, n_heads=16)

    @classmethod
    def v1_1_xl(cls) -> "T5Config":
        """Version 1.1 (and Flan-T5) with 2.8 billion parameters."""
        return cls._v1_1(d_model=2048, d_ff=5120, n_layers=24, n_heads=32)

    @classmethod
    def v1_1_xxl(cls) -> "T5Config":
        """Version 1.1 (and Flan-T5) with 11.1 billion parameters."""
        return cls._v1_1(d_model=4096, d_ff=10240, n_layers=24, n_heads=64)

    @classmethod
    def _v1_1(cls, *, n_layers: int, **sizes: int) -> "T5Config":
        original = cls(mlp="gated-gelu", is_tied=False, is_scaled=False)
        return replace(original, n_layers=n_layers, n_decoder_layers=n_layers, **sizes)

    rows = (
        ModelType(_DEFAULTS),
        Only("is_decoder", False, is_written=False),
        Field("vocab_size"),
        Field("d_model"),
        Field("d_kv"),
        Field("d_ff"),
        Field("num_layers", "n_layers", via=ConfigReader.layers),
        Field("num_decoder_layers", "n_decoder_layers", via=ConfigReader.layers, default=lambda known: known["n_layers"]),
        Field("num_heads", "n_heads"),
        Only("feed_forward_proj", *_MLPS, name="mlp"),
        # transformers derives these two keys from `feed_forward_proj`. If a file has them, they take precedence there.
        Only("dense_act_fn", lambda known: (_activation(known["mlp"]),), is_written=False),
        Only("is_gated_act", lambda known: (known["mlp"].startswith("gated-"),), is_written=False),
        Field("relative_attention_num_buckets", "n_buckets"),
        Field("relative_attention_max_distance", "max_distance"),
        Field("dropout_rate", "dropout", RATE),
        Field("layer_norm_epsilon", "layer_norm_eps"),
        # transformers 4 scales the logits of a tied head. transformers 5 ties by the tensors in the file (see
        # `T5.read_config`) and scales by `scale_decoder_outputs`.
        Field("tie_word_embeddings", "is_tied"),
        Field(
            "scale_decoder_outputs",
            "is_scaled",
            default=lambda known: known["is_tied"],
            load=lambda is_scaled, known: is_scaled and known["model_type"] == "t5",
        ),
        Tokens("decoder_start"),
        Field("initializer_factor", "init_factor"),
    )
    aliases = _ALIASES


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


def _norm(config: T5Config) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(config.d_model, eps=config.layer_norm_eps, use_bias=False)


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


class Mlp(eqx.Module):
    """Two linear layers with an activation between them, or a product with an activated gate."""

    gate: eqx.nn.Linear | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    kind: str = eqx.field(static=True)

    def __init__(self, config: T5Config, *, key: PRNGKeyArray):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        d, d_ff, factor = config.d_model, config.d_ff, config.init_factor
        self.gate = None if config.mlp == "relu" else _linear(d, d_ff, factor * d**-0.5, gate_key)
        self.up = _linear(d, d_ff, factor * d**-0.5, up_key)
        self.down = _linear(d_ff, d, factor * d_ff**-0.5, down_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.kind = config.mlp

    def __call__(self, x: Float[Array, "seq d"], *, key: PRNGKeyArray | None = None) -> Float[Array, "seq d"]:
        inner = linear(self.up, x)
        if self.gate is None:
            inner = jax.nn.relu(inner)
        elif self.kind == "gated-gelu":
            inner = jax.nn.gelu(linear(self.gate, x), approximate=True) * inner
        else:
            inner = jax.nn.silu(linear(self.gate, x)) * inner
        return linear(self.down, self.dropout(inner, key=key))


class Block(eqx.Module):
    """Attention, cross-attention (in the decoder) and MLP, each pre-norm and residual."""

    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    cross_norm: eqx.nn.RMSNorm | None
    cross_attention: Attention | None
    mlp_norm: eqx.nn.RMSNorm
    mlp: Mlp
    dropout: eqx.nn.Dropout

    def __init__(self, config: T5Config, *, is_decoder: bool, key: PRNGKeyArray):
        attention_key, cross_key, mlp_key = jax.random.split(key, 3)
        self.attention_norm = _norm(config)
        self.attention = _attention(config, attention_key)
        self.cross_norm = _norm(config) if is_decoder else None
        self.cross_attention = _attention(config, cross_key) if is_decoder else None
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(config, key=mlp_key)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self,
        carry: Carry,
        mask: Mask | None,
        bias: Float[Array, "heads seq source"],
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Mask | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        x, cache = carry
        keys = (None,) * 6 if key is None else jax.random.split(key, 6)
        with jax.named_scope("attention"):
            normed = norm(self.attention_norm, x)
            mixed, cache = self.attention(normed, mask=mask, bias=bias, cache=cache, key=keys[0])
            x = x + self.dropout(mixed, key=keys[1])
        if self.cross_attention is not None and self.cross_norm is not None:
            with jax.named_scope("cross_attention"):
                pairs = self.project_memory(memory) if cache is None else cache.read_memory()
                normed = norm(self.cross_norm, x)
                mixed = self.cross_attention.attend_memory(normed, pairs, mask=memory_mask, key=keys[2])
                x = x + self.dropout(mixed, key=keys[3])
        with jax.named_scope("mlp"):
            x = x + self.dropout(self.mlp(norm(self.mlp_norm, x), key=keys[4]), key=keys[5])
        return x, cache

    def project_memory(self, memory: Float[Array, "memory d"] | None) -> tuple[Array, Array]:
        """Returns the keys and values for a decoder's cross-attention."""
        assert self.cross_attention is not None and memory is not None
        return self.cross_attention.project_memory(memory)


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
        make = lambda key: Block(config, is_decoder=is_decoder, key=key)  # noqa: E731
        self.stack = Stack(make, n_layers, remat=config.remat, key=stack_key)
        self.norm = _norm(config)

    def __call__(
        self,
        x: Float[Array, "seq d"],
        mask: Mask | None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Mask | None = None,
        *,
        cache: Cache | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        # Distances are between slots. Padding before the first token shifts all tokens equally.
        start, length = (0, len(x)) if cache is None else (cache.index, cache.mask.shape[0])
        bias = self.positions(start + jnp.arange(len(x)), jnp.arange(length))
        x = self.dropout(x, key=keys[0])
        x, cache = self.stack((x, cache), mask, bias, memory, memory_mask, key=keys[1])
        return self.dropout(norm(self.norm, x), key=keys[2]), cache


class T5(EncoderDecoder, Pretrained):
    """T5, from the token ids of a source and of a target to the logits of each next token of the target.

    Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = T5(T5Config.t5_small(), key=jax.random.key(0))
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
        """Returns the logits of the next tokens, from hidden states."""
        with jax.named_scope("head"):
            if self.config.is_scaled:
                hidden = hidden * self.config.d_model**-0.5
            return hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)

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
        with jax.named_scope("encoder"):
            return self.encoder(embed(self.embedding, ids), token_mask(mask, segments=segments), key=key)[0]

    @property
    def _kv_heads(self) -> tuple[int, int]:
        return self.config.n_heads, self.config.d_kv

    def _run(
        self, ids, mask, cache, key, memory, memory_mask, segments=None, memory_segments=None
    ) -> tuple[Float[Array, "target d"], Any]:
        memory_mask = token_mask(memory_mask, segments=memory_segments, query_segments=segments)
        with jax.named_scope("decoder"):
            x = embed(self.embedding, ids)
            sees = causal_mask(mask, ids.shape[0], cache, segments=segments)
            return self.decoder(x, sees, memory, memory_mask, cache=cache, key=key)

    @classmethod
    def architecture(cls, config: T5Config) -> str:
        """Returns the name of the `transformers` class that loads a saved folder."""
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
        """Returns the name of the `transformers` class that loads a saved folder."""
        return {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel"}[config.model_type]

    @staticmethod
    def weight_map(config: T5Config) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
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
