"""BART: a post-norm encoder-decoder with learned positions and one shared embedding, also for the output head.

Source: Lewis et al. 2020, *BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation, Translation,
and Comprehension* (arXiv:1910.13461), and its code, github.com/facebookresearch/fairseq (examples/bart). Unlike that code,
training never drops whole layers: the published models have a rate of 0 for this. Another rate is kept and saved again.

Dims: source, target = tokens of one example in the encoder and the decoder (seq = either), d = width of the model.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ._kinds import RATE, TEXT
from .generation import EncoderDecoder, Generation
from .hf import (
    Aliases,
    ConfigReader,
    Field,
    Fields,
    Fixed,
    FolderConfig,
    Only,
    Pretrained,
    StoredTensor,
    Tokens,
    WeightMap,
    Written,
    layers,
    published,
    reshaped,
    same,
    same_layer,
)
from .nn import (
    ACTIVATIONS,
    Attention,
    Block,
    Cache,
    Mask,
    Stack,
    check_choice,
    check_heads,
    check_rates,
    check_sizes,
    learned_positions,
    norm,
    normal_attention,
    normal_embedding,
    normal_mlp,
    times,
)

_FORCED = "forced_bos_token_id"

# The rows of both sides, which Whisper shares.
SIDES = (
    Field("encoder_layers", "n_layers", via=ConfigReader.layers),
    Field("decoder_layers", "n_decoder_layers", via=ConfigReader.layers),
    *Fields(n_heads="encoder_attention_heads", n_decoder_heads="decoder_attention_heads", d_ff="encoder_ffn_dim"),
    Field("decoder_ffn_dim", "d_decoder_ff"),
    Field("activation_function", "activation", TEXT),
    *Fields("dropout", "attention_dropout", "activation_dropout", kind=RATE),
)


def _forced_first_token(is_forced: bool, known: Mapping[str, Any]) -> int | None:
    """Returns the token that generated texts begin with. If the flag of old files is set, and the file names no such token,
    it is the start of a text."""
    token = known[_FORCED]
    return known["bos_token_id"] if is_forced and token is None else token


@dataclass(frozen=True)
class BartConfig(FolderConfig):
    """The sizes and dropout rates of a BART. The defaults are those of `transformers`, with the sizes of the larger
    published model.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of a source and of a target, in tokens.
    - `d_model`: the width of the model.
    - `n_layers`, `n_decoder_layers`: the number of blocks of the encoder and of the decoder.
    - `n_heads`, `n_decoder_heads`: the number of heads in their attentions; both divide `d_model`.
    - `d_ff`, `d_decoder_ff`: the inner widths of their MLPs.
    - `activation`: the function in the MLPs, by its name in `transformers`.
    - `dropout`: the dropout rate of embeddings and of additions to the residual stream, in [0, 1).
    - `attention_dropout`, `activation_dropout`: the dropout rates of attention weights, and inside the MLPs.
    - `is_scaled`: whether embeddings are multiplied by `sqrt(d_model)`.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `decoder_start_token_id`: the id of the decoder's first token.
    - `forced_bos_token_id`, `forced_eos_token_id`: in generation, the token that is always first, and the one that is always
        at the last position; None leaves the choice to the model.
    - `init_std`: standard deviation of the initial weights. The published 0.02 suits widths of 768 and more; narrower models
        learn faster with a larger one.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.

    Raises ValueError for sizes below 1, heads that do not divide the width, rates outside [0, 1), and any other activation.
    """

    vocab_size: int = 50265
    n_positions: int = 1024
    d_model: int = 1024
    n_layers: int = 12
    n_decoder_layers: int = 12
    n_heads: int = 16
    n_decoder_heads: int = 16
    d_ff: int = 4096
    d_decoder_ff: int = 4096
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    is_scaled: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1
    decoder_start_token_id: int = 2
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = 2
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None

    is_pre_norm: ClassVar[bool] = False  # norms are before attention and MLP, and after the last block
    has_key_bias: ClassVar[bool] = True
    # The row of position 0: fairseq counts from the row after the padding token's, which is 1.
    first_position: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "n_positions", "d_model", "n_layers", "n_decoder_layers", "n_heads")
        check_sizes(self, "n_decoder_heads", "d_ff", "d_decoder_ff")
        check_heads(self)
        check_heads(self, heads="n_decoder_heads")
        check_rates(self, "dropout", "attention_dropout", "activation_dropout")
        check_choice(self, "activation", ACTIVATIONS)

    sizes = published(
        {
            "base": {"d_model": 768, "d_ff": 3072, "d_decoder_ff": 3072, "n_layers": 6, "n_decoder_layers": 6,
                     "n_heads": 12, "n_decoder_heads": 12, "forced_bos_token_id": 0},
            "large": {},
        },
        attention_dropout=0.1,
        activation_dropout=0.1,
    )  # fmt: skip
    rows = (
        Written("model_type", "bart"),
        *Fixed(is_encoder_decoder=True, tie_word_embeddings=True),
        *Fixed(is_written=False, is_decoder=False, is_causal=True),
        # Keys of the first versions of transformers, which had other models under this model's name.
        *Fixed(is_written=False, normalize_before=False, normalize_embedding=True, add_final_layer_norm=False),
        Only("static_position_embeddings", False, is_written=False),
        *Fields("vocab_size", "d_model", n_positions="max_position_embeddings"),
        *SIDES,
        Field("scale_embedding", "is_scaled"),
        Tokens("decoder_start", "forced_bos", "forced_eos"),
        Field(  # a flag of old files, in place of the token itself
            "force_bos_token_to_be_generated",
            _FORCED,
            default=False,
            load=_forced_first_token,
            is_written=False,
        ),
        Field("init_std"),
    )
    aliases = Aliases(
        hidden_size="d_model", num_attention_heads="encoder_attention_heads", num_hidden_layers="encoder_layers"
    )


def _block(config: BartConfig, key: PRNGKeyArray, *, is_decoder: bool) -> Block:
    attention_key, cross_key, mlp_key = jax.random.split(key, 3)
    d, std = config.d_model, config.init_std
    n_heads = config.n_decoder_heads if is_decoder else config.n_heads

    def attention(key: PRNGKeyArray) -> Attention:
        biases, keys = (True, config.has_key_bias, True, True), [*jax.random.split(key, 4)]
        return normal_attention(d, n_heads, std=std, biases=biases, dropout=config.attention_dropout, keys=keys)

    return Block(
        attention=attention(attention_key),
        attention_norm=eqx.nn.LayerNorm(d),
        cross_attention=attention(cross_key) if is_decoder else None,
        cross_norm=eqx.nn.LayerNorm(d) if is_decoder else None,
        mlp=normal_mlp(
            d,
            config.d_decoder_ff if is_decoder else config.d_ff,
            std=std,
            down_std=std,
            activation=config.activation,
            dropout=config.activation_dropout,
            key=mlp_key,
        ),
        mlp_norm=eqx.nn.LayerNorm(d),
        dropout=eqx.nn.Dropout(config.dropout),
        is_pre_norm=config.is_pre_norm,
    )


class TransformerStack(eqx.Module):
    """The encoder or the decoder: its positions, its blocks, and a norm of embeddings before or of outputs after them."""

    # An array instead of an `eqx.nn.Embedding`: it is added as a slice, so no plan may shard its rows as a table's.
    positions: Float[Array, "rows d"]
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    is_pre_norm: bool = eqx.field(static=True)
    first_position: int = eqx.field(static=True)

    def __init__(self, config: BartConfig, *, is_decoder: bool, n_rows: int, key: PRNGKeyArray):
        positions_key, stack_key = jax.random.split(key)
        self.positions = config.init_std * jax.random.normal(positions_key, (n_rows, config.d_model))
        self.norm = eqx.nn.LayerNorm(config.d_model)
        self.dropout = eqx.nn.Dropout(config.dropout)
        n_layers = config.n_decoder_layers if is_decoder else config.n_layers
        make = functools.partial(_block, config, is_decoder=is_decoder)
        self.stack = Stack(make, n_layers, remat=config.remat, key=stack_key)
        self.is_pre_norm, self.first_position = config.is_pre_norm, config.first_position

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
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        if segments is None:
            # Positions are slots: padding counts, as in the original.
            start = self.first_position if cache is None else self.first_position + cache.index
            x = x + jax.lax.dynamic_slice_in_dim(self.positions, start, len(x))
        else:
            x = x + learned_positions(self.positions, None, len(x), offset=self.first_position, segments=segments)
        x = self.dropout(x if self.is_pre_norm else norm(self.norm, x), key=dropout_key)
        x, cache, _ = self.stack((x, cache, None), mask, memory, memory_mask, key=stack_key)
        return norm(self.norm, x) if self.is_pre_norm else x, cache


class Bart(EncoderDecoder, Pretrained):
    """BART, from the token ids of a source and of a target to the logits of each next token of the target. Call it on one
    example; `jax.vmap` it over a batch.

    ```python
    model = Bart(BartConfig.of("base"), key=jax.random.key(0))
    logits = model(ids, model.shift_right(labels), mask=mask, key=key)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed.
    """

    config_class = BartConfig
    model_types = ("bart",)
    architectures = ("BartForConditionalGeneration", "BartModel")

    embedding: eqx.nn.Embedding
    encoder: TransformerStack
    decoder: TransformerStack
    # Zero in every published model, and never trained: its gradient is stopped, because it is a buffer in the original.
    logits_bias: Float[Array, " vocab"]
    config: BartConfig = eqx.field(static=True)

    def __init__(self, config: BartConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), the padding token's row 0, biases 0, norms 1.
        """
        embedding_key, encoder_key, decoder_key = jax.random.split(key, 3)
        vocab, d, pad = config.vocab_size, config.d_model, config.pad_token_id
        self.embedding = normal_embedding(vocab, d, std=config.init_std, zero=pad, key=embedding_key)
        n_rows = config.n_positions + config.first_position
        self.encoder = TransformerStack(config, is_decoder=False, n_rows=n_rows, key=encoder_key)
        self.decoder = TransformerStack(config, is_decoder=True, n_rows=n_rows, key=decoder_key)
        self.logits_bias = jnp.zeros(config.vocab_size)
        self.config = config

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        with jax.named_scope("head"):
            return hidden @ self.embedding.weight.T + jax.lax.stop_gradient(self.logits_bias)

    def _embed(self, ids: Int[Array, " seq"]) -> Float[Array, "seq d"]:
        x = super()._embed(ids)
        return times(x, self.config.d_model**0.5) if self.config.is_scaled else x

    @staticmethod
    def weight_map(config: BartConfig) -> WeightMap:
        vocab = config.vocab_size
        copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
        return WeightMap(
            tensors=[
                same("model.shared.weight", "embedding.weight"),
                *stack_tensors("encoder", config),
                *stack_tensors("decoder", config),
                reshaped("final_logits_bias", "logits_bias", (1, vocab), (vocab,)),
            ],
            ignored=("model.encoder.version", "model.decoder.version"),
            copies=dict.fromkeys(copies, "model.shared.weight"),
            # Folders of the base model, such as the published ones on the Hub, whose names lack the prefix and which have no
            # output head.
            aliases=((r"^(?=(shared|encoder|decoder)\.)", "model."),),
            zeros=("final_logits_bias",),
        )


def stack_tensors(side: str, config: BartConfig) -> list[StoredTensor]:
    """Returns the tensors of the encoder or the decoder. `side` is its name on disk and in the tree."""
    is_decoder = side == "decoder"
    n_layers = config.n_decoder_layers if is_decoder else config.n_layers

    def attention(disk: str, leaf: str) -> list[StoredTensor]:
        roles = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
        return [
            name
            for role, part in roles.items()
            for name in same_layer(f"{disk}.{role}", f"{leaf}.{part}", use_bias=config.has_key_bias or part != "key")
        ]

    block = [*attention("self_attn", "attention"), *same_layer("self_attn_layer_norm", "attention_norm")]
    if is_decoder:
        block += [*attention("encoder_attn", "cross_attention"), *same_layer("encoder_attn_layer_norm", "cross_norm")]
    block += [*same_layer("fc1", "mlp.up"), *same_layer("fc2", "mlp.down"), *same_layer("final_layer_norm", "mlp_norm")]
    return [
        same(f"model.{side}.embed_positions.weight", f"{side}.positions"),
        *same_layer(f"model.{side}.{'layer_norm' if config.is_pre_norm else 'layernorm_embedding'}", f"{side}.norm"),
        *layers(f"model.{side}.layers.{{}}.", f"{side}.stack.blocks.", n_layers, block),
    ]
