"""OPT: a decoder with learned positions and ReLU, pre-norm except in the 350m model.

Source: Zhang et al. 2022, *OPT: Open Pre-trained Transformer Language Models*, and its code,
github.com/facebookresearch/metaseq.

Dims: seq = tokens of one example, d = width of the model, heads x size = d, embedding = width of the embedding, which is d
in all models but the one with 350 million parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from ._kinds import RATE
from .generation import Decoder, Generation
from .hf import (
    ConfigReader,
    Field,
    FolderConfig,
    Only,
    Pretrained,
    Tokens,
    WeightMap,
    Written,
    layers,
    same,
    same_layer,
)
from .nn import (
    Attention,
    Cache,
    Mask,
    Stack,
    causal_mask,
    check_choice,
    check_heads,
    check_rates,
    check_sizes,
    embed,
    learned_positions,
    linear,
    norm,
    normal_embedding,
    normal_linear,
)

Carry = tuple[Array, Cache | None]  # passed from block to block: the residual stream [seq, d], and the cache

_OFFSET = 2  # the table's rows before position 0: fairseq counts from the padding id, 1, and skips it
_ACTIVATIONS = {"relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}


@dataclass(frozen=True)
class OPTConfig(FolderConfig):
    """The sizes and dropout rates of OPT. The defaults are those of the smallest published one.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `d_model`: the width of the model.
    - `d_embedding`: the width of the embedding and the output head; None for `d_model`. If it differs, it is projected to
        `d_model` and back.
    - `d_mlp`: the inner width of the MLPs; None for four times `d_model`.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `activation`: `"relu"`, or `"gelu"` (by the error function).
    - `is_pre_norm`: whether a block is pre-norm instead of post-norm.
    - `has_final_norm`: whether there is a norm after the last block. It has no effect without `is_pre_norm`.
    - `has_bias`: whether the linear layers of the blocks have biases.
    - `has_norm_weights`: whether the norms have scales and biases.
    - `attention_dropout`, `residual_dropout`: dropout rates in [0, 1).
    - `is_tied`: whether the output head shares the embedding's weight.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights; 0.006 in the paper.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide the width, an unknown activation, and rates outside [0, 1).
    """

    vocab_size: int = 50272
    n_positions: int = 2048
    d_model: int = 768
    d_embedding: int | None = None
    d_mlp: int | None = None
    n_layers: int = 12
    n_heads: int = 12
    activation: str = "relu"
    is_pre_norm: bool = True
    has_final_norm: bool = True
    has_bias: bool = True
    has_norm_weights: bool = True
    attention_dropout: float = 0.0
    residual_dropout: float = 0.1
    is_tied: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        widths = [name for name in ("d_embedding", "d_mlp") if getattr(self, name) is not None]
        check_sizes(self, "vocab_size", "n_positions", "d_model", "n_layers", "n_heads", *widths)
        check_heads(self)
        check_rates(self, "attention_dropout", "residual_dropout")
        check_choice(self, "activation", _ACTIVATIONS)

    def without_dropout(self) -> "OPTConfig":
        """The same config without dropout."""
        return replace(self, attention_dropout=0.0, residual_dropout=0.0)

    @classmethod
    def opt_125m(cls) -> "OPTConfig":
        """The published OPT with 125 million parameters."""
        return cls()

    @classmethod
    def opt_350m(cls) -> "OPTConfig":
        """The published OPT called 350m, with 331 million parameters, the only post-norm model."""
        return cls(d_model=1024, d_embedding=512, n_layers=24, n_heads=16, is_pre_norm=False)

    @classmethod
    def opt_1_3b(cls) -> "OPTConfig":
        """The published OPT with 1.3 billion parameters."""
        return cls(d_model=2048, n_layers=24, n_heads=32)

    @classmethod
    def opt_2_7b(cls) -> "OPTConfig":
        """The published OPT with 2.7 billion parameters."""
        return cls(d_model=2560, n_layers=32, n_heads=32)

    @classmethod
    def opt_6_7b(cls) -> "OPTConfig":
        """The published OPT with 6.7 billion parameters."""
        return cls(d_model=4096, n_layers=32, n_heads=32)

    @classmethod
    def opt_13b(cls) -> "OPTConfig":
        """The published OPT with 13 billion parameters."""
        return cls(d_model=5120, n_layers=40, n_heads=40)

    @classmethod
    def opt_30b(cls) -> "OPTConfig":
        """The published OPT with 30 billion parameters."""
        return cls(d_model=7168, n_layers=48, n_heads=56)

    @classmethod
    def opt_66b(cls) -> "OPTConfig":
        """The published OPT with 66 billion parameters."""
        return cls(d_model=9216, n_layers=64, n_heads=72)

    rows = (
        Written("model_type", "opt"),
        Only("layerdrop", 0.0, is_written=False),
        Field("vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        Field("hidden_size", "d_model"),
        Field(
            "word_embed_proj_dim",
            "d_embedding",
            default=lambda known: known["d_model"],
            load=lambda size, known: None if size == known["d_model"] else size,
            save=lambda config: config.d_model if config.d_embedding is None else config.d_embedding,
        ),
        Field(
            "ffn_dim",
            "d_mlp",
            default=3072,
            load=lambda size, known: None if size == 4 * known["d_model"] else size,
            save=lambda config: 4 * config.d_model if config.d_mlp is None else config.d_mlp,
        ),
        Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
        Field("num_attention_heads", "n_heads"),
        Only("activation_function", *_ACTIVATIONS, name="activation"),
        Field("do_layer_norm_before", "is_pre_norm"),
        Field(
            "_remove_final_layer_norm",
            "has_final_norm",
            default=False,
            load=lambda is_removed, known: not is_removed,
            save=lambda config: not config.has_final_norm,
        ),
        Field("enable_bias", "has_bias"),
        Field("layer_norm_elementwise_affine", "has_norm_weights"),
        Field("attention_dropout", kind=RATE),
        Field("dropout", "residual_dropout", RATE),
        Field("tie_word_embeddings", "is_tied"),
        Tokens(),
        Field("init_std"),
    )


def _residual_std(config: OPTConfig) -> float:
    """Returns the standard deviation for layers that add to the residual stream, two in each block. The paper scales it by 1
    / sqrt(additions)."""
    return config.init_std / (2 * config.n_layers) ** 0.5


def _norm(config: OPTConfig) -> eqx.nn.LayerNorm:
    return eqx.nn.LayerNorm(config.d_model, use_weight=config.has_norm_weights, use_bias=config.has_norm_weights)


def _attention(config: OPTConfig, key: PRNGKeyArray) -> Attention:
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, std, use_bias = config.d_model, config.init_std, config.has_bias
    return Attention(
        query=normal_linear(d, d, std=std, use_bias=use_bias, key=q_key),
        key=normal_linear(d, d, std=std, use_bias=use_bias, key=k_key),
        value=normal_linear(d, d, std=std, use_bias=use_bias, key=v_key),
        output=normal_linear(d, d, std=_residual_std(config), use_bias=use_bias, key=o_key),
        n_heads=config.n_heads,
        n_kv_heads=config.n_heads,
        dropout=eqx.nn.Dropout(config.attention_dropout),
    )


class Mlp(eqx.Module):
    """Two linear layers with an activation between them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: OPTConfig, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        d, use_bias = config.d_model, config.has_bias
        d_mlp = 4 * d if config.d_mlp is None else config.d_mlp
        self.up = normal_linear(d, d_mlp, std=config.init_std, use_bias=use_bias, key=up_key)
        self.down = normal_linear(d_mlp, d, std=_residual_std(config), use_bias=use_bias, key=down_key)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, _ACTIVATIONS[self.activation](linear(self.up, x)))


class Block(eqx.Module):
    """Attention and MLP, each residual, and pre-norm or post-norm."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp
    dropout: eqx.nn.Dropout
    is_pre_norm: bool = eqx.field(static=True)

    def __init__(self, config: OPTConfig, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = _norm(config)
        self.attention = _attention(config, attention_key)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(config, key=mlp_key)
        self.dropout = eqx.nn.Dropout(config.residual_dropout)
        self.is_pre_norm = config.is_pre_norm

    def __call__(self, carry: Carry, mask: Mask, *, key: PRNGKeyArray | None = None) -> Carry:
        x, cache = carry
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        before, after = (norm, _unchanged) if self.is_pre_norm else (_unchanged, norm)
        with jax.named_scope("attention"):
            mixed, cache = self.attention(before(self.attention_norm, x), mask=mask, cache=cache, key=keys[0])
            x = after(self.attention_norm, x + self.dropout(mixed, key=keys[1]))
        with jax.named_scope("mlp"):
            computed = self.mlp(before(self.mlp_norm, x))
            x = after(self.mlp_norm, x + self.dropout(computed, key=keys[2]))
        return x, cache


def _unchanged(layer: eqx.nn.LayerNorm, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
    """Returns `x`; replaces `norm` where a block has none."""
    del layer
    return x


class OPT(Decoder, Pretrained):
    """OPT, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = OPT(OPTConfig.opt_125m(), key=jax.random.key(0))
    keys = jax.random.split(key, len(ids))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(ids, keys)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed.
    """

    config_class = OPTConfig
    model_types = ("opt",)
    architectures = ("OPTForCausalLM", "OPTModel")

    embedding: eqx.nn.Embedding
    project_in: eqx.nn.Linear | None  # None if the embedding has the model's width
    # An array instead of an `eqx.nn.Embedding`: it is mostly read as a slice, so a plan must not shard its rows.
    positions: Float[Array, "rows d"]
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm | None
    project_out: eqx.nn.Linear | None
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    config: OPTConfig = eqx.field(static=True)

    def __init__(self, config: OPTConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as in the paper: N(0, `init_std`²), layers that add to the residual stream scaled by `1 /
            sqrt(2 * n_layers)`, biases 0, norms 1. As in its code, the padding token's row is 0.
        """
        embedding_key, positions_key, stack_key, in_key, out_key, head_key = jax.random.split(key, 6)
        vocab, d, std = config.vocab_size, config.d_model, config.init_std
        d_embedding = d if config.d_embedding is None else config.d_embedding
        is_projected = d_embedding != d
        embedding = normal_embedding(vocab, d_embedding, std=std, key=embedding_key)
        if config.pad_token_id is not None:
            embedding = eqx.tree_at(lambda e: e.weight, embedding, embedding.weight.at[config.pad_token_id].set(0))
        self.embedding = embedding
        self.project_in = normal_linear(d_embedding, d, std=std, use_bias=False, key=in_key) if is_projected else None
        self.positions = std * jax.random.normal(positions_key, (config.n_positions + _OFFSET, d))
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = _norm(config) if config.is_pre_norm and config.has_final_norm else None
        self.project_out = normal_linear(d, d_embedding, std=std, use_bias=False, key=out_key) if is_projected else None
        self.head = None if config.is_tied else normal_linear(d_embedding, vocab, std=std, use_bias=False, key=head_key)
        self.config = config

    def logits(self, hidden: Float[Array, "*dims embedding"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""
        with jax.named_scope("head"):
            return hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)

    def _run(self, ids, mask, cache, key, segments=None) -> tuple[Float[Array, "seq embedding"], Any]:
        (seq,) = ids.shape
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids)
            x = x if self.project_in is None else linear(self.project_in, x)
            x = x + learned_positions(self.positions, mask, seq, cache, offset=_OFFSET, segments=segments)
        x, cache = self.stack((x, cache), causal_mask(mask, seq, cache, segments=segments), key=key)
        x = x if self.norm is None else norm(self.norm, x)
        x = x if self.project_out is None else linear(self.project_out, x)
        return x, cache

    @staticmethod
    def weight_map(config: OPTConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        use_bias, is_projected = config.has_bias, config.d_embedding not in (None, config.d_model)
        has_final_norm = config.is_pre_norm and config.has_final_norm
        norm_layer = same_layer if config.has_norm_weights else lambda disk, leaf: []
        block = [
            *norm_layer("self_attn_layer_norm", "attention_norm"),
            *same_layer("self_attn.q_proj", "attention.query", use_bias=use_bias),
            *same_layer("self_attn.k_proj", "attention.key", use_bias=use_bias),
            *same_layer("self_attn.v_proj", "attention.value", use_bias=use_bias),
            *same_layer("self_attn.out_proj", "attention.output", use_bias=use_bias),
            *norm_layer("final_layer_norm", "mlp_norm"),
            *same_layer("fc1", "mlp.up", use_bias=use_bias),
            *same_layer("fc2", "mlp.down", use_bias=use_bias),
        ]
        return WeightMap(
            tensors=[
                same("model.decoder.embed_tokens.weight", "embedding.weight"),
                *([same("model.decoder.project_in.weight", "project_in.weight")] if is_projected else []),
                same("model.decoder.embed_positions.weight", "positions"),
                *layers("model.decoder.layers.{}.", "stack.blocks.", config.n_layers, block),
                *(norm_layer("model.decoder.final_layer_norm", "norm") if has_final_norm else []),
                *([same("model.decoder.project_out.weight", "project_out.weight")] if is_projected else []),
                *([] if config.is_tied else [same("lm_head.weight", "head.weight")]),
            ],
            ignored=("model.decoder.version",),  # a version number in the files of the paper's code
            copies={"lm_head.weight": "model.decoder.embed_tokens.weight"} if config.is_tied else {},
            untied_by="tie_word_embeddings",
            # The Hub's files of 350m, 6.7b, 13b and 30b hold the base model, whose names lack the prefix.
            aliases=((r"^(?=decoder\.)", "model."),),
        )
