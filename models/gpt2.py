"""GPT-2: a pre-norm decoder with learned positions, GELU by tanh, and a tied output head.

Source: Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, and its code, github.com/openai/gpt-2.
Only the layout differs from that code: query, key and value are three layers instead of one, so that a plan shards each of
them by whole heads.

Dims: seq = tokens of one example, d = width of the model, heads x size = d.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

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
    fused,
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
    check_heads,
    check_length,
    check_rates,
    check_segments,
    check_sizes,
    embed,
    learned_positions,
    linear,
    norm,
    normal_embedding,
    normal_linear,
)

Carry = tuple[Array, Cache | None]  # passed from block to block: the residual stream [seq, d], and the cache


# Alternative names of keys, which transformers accepts too.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class GPT2Config(FolderConfig):
    """The sizes and dropout rates of GPT-2. The defaults are those of the smallest published one.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `d_model`: the width of the model; the MLP is four times as wide.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `embedding_dropout`, `attention_dropout`, `residual_dropout`: dropout rates in [0, 1).
    - `layer_norm_eps`: added to the variance in layer norms.
    - `is_tied`: whether the output head shares the embedding's weight.
    - `has_cross_attention`: whether each block also attends to a memory, as in a captioning decoder.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights; half of it for positions. The published 0.02 suits widths of 768
        and more; narrower models learn faster with a larger one.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide the width, and rates outside [0, 1).
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    layer_norm_eps: float = 1e-5
    is_tied: bool = True
    has_cross_attention: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    pad_token_id: int | None = None
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "n_positions", "d_model", "n_layers", "n_heads")
        check_heads(self)
        check_rates(self, "embedding_dropout", "attention_dropout", "residual_dropout")

    def without_dropout(self) -> "GPT2Config":
        """The same config without dropout."""
        return replace(self, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)

    @classmethod
    def gpt2(cls) -> "GPT2Config":
        """The published GPT-2 with 124 million parameters."""
        return cls()

    @classmethod
    def medium(cls) -> "GPT2Config":
        """The published GPT-2 with 355 million parameters."""
        return cls(d_model=1024, n_layers=24, n_heads=16)

    @classmethod
    def large(cls) -> "GPT2Config":
        """The published GPT-2 with 774 million parameters."""
        return cls(d_model=1280, n_layers=36, n_heads=20)

    @classmethod
    def xl(cls) -> "GPT2Config":
        """The published GPT-2 with 1.6 billion parameters."""
        return cls(d_model=1600, n_layers=48, n_heads=25)

    rows = (
        Written("model_type", "gpt2"),
        Only("activation_function", "gelu_new"),
        Only("scale_attn_weights", True, is_written=False),
        Only("scale_attn_by_inverse_layer_idx", False, is_written=False),
        Field("vocab_size"),
        Field("n_positions"),
        Field("n_embd", "d_model"),
        Only("n_inner", lambda known: (None, 4 * known["d_model"]), is_written=False),
        Field("n_layer", "n_layers", via=ConfigReader.layers),
        Field("n_head", "n_heads"),
        Field("embd_pdrop", "embedding_dropout", RATE),
        Field("attn_pdrop", "attention_dropout", RATE),
        Field("resid_pdrop", "residual_dropout", RATE),
        Field("layer_norm_epsilon", "layer_norm_eps"),
        Field("tie_word_embeddings", "is_tied"),
        Field("add_cross_attention", "has_cross_attention"),
        Tokens(),
        Field("initializer_range", "init_std"),
    )
    aliases = _ALIASES


def _residual_std(config: GPT2Config) -> float:
    """Returns the standard deviation for layers that add to the residual stream, two in each block. The paper scales it by 1
    / sqrt(additions)."""
    return config.init_std / (2 * config.n_layers) ** 0.5


def _attention(config: GPT2Config, key: PRNGKeyArray) -> Attention:
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, std = config.d_model, config.init_std
    return Attention(
        query=normal_linear(d, d, std=std, key=q_key),
        key=normal_linear(d, d, std=std, key=k_key),
        value=normal_linear(d, d, std=std, key=v_key),
        output=normal_linear(d, d, std=_residual_std(config), key=o_key),
        n_heads=config.n_heads,
        n_kv_heads=config.n_heads,
        dropout=eqx.nn.Dropout(config.attention_dropout),
    )


class Mlp(eqx.Module):
    """Two linear layers with GELU between them, the inner width four times the outer."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        d = config.d_model
        self.up = normal_linear(d, 4 * d, std=config.init_std, key=up_key)
        self.down = normal_linear(4 * d, d, std=_residual_std(config), key=down_key)

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, jax.nn.gelu(linear(self.up, x), approximate=True))


class Block(eqx.Module):
    """Attention, cross-attention (if configured) and MLP, each pre-norm and residual."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    cross_norm: eqx.nn.LayerNorm | None
    cross_attention: Attention | None
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp
    dropout: eqx.nn.Dropout

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        d, eps = config.d_model, config.layer_norm_eps
        self.attention_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.attention = _attention(config, attention_key)
        self.cross_norm = eqx.nn.LayerNorm(d, eps=eps) if config.has_cross_attention else None
        cross_key = jax.random.fold_in(key, 2)
        self.cross_attention = _attention(config, cross_key) if config.has_cross_attention else None
        self.mlp_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.mlp = Mlp(config, key=mlp_key)
        self.dropout = eqx.nn.Dropout(config.residual_dropout)

    def __call__(
        self,
        carry: Carry,
        mask: Mask,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, "1 memory"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        x, cache = carry
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        with jax.named_scope("attention"):
            mixed, cache = self.attention(norm(self.attention_norm, x), mask=mask, cache=cache, key=keys[0])
            x = x + self.dropout(mixed, key=keys[1])
        if self.cross_attention is not None and self.cross_norm is not None:
            cross_keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 1))
            with jax.named_scope("cross_attention"):
                pairs = self.project_memory(memory) if cache is None else cache.read_memory()
                normed = norm(self.cross_norm, x)
                mixed = self.cross_attention.attend_memory(normed, pairs, mask=memory_mask, key=cross_keys[0])
                x = x + self.dropout(mixed, key=cross_keys[1])
        with jax.named_scope("mlp"):
            x = x + self.dropout(self.mlp(norm(self.mlp_norm, x)), key=keys[2])
        return x, cache

    def project_memory(self, memory: Float[Array, "memory d"] | None) -> tuple[Array, Array]:
        """Returns the keys and values for the cross-attention."""
        assert self.cross_attention is not None and memory is not None
        return self.cross_attention.project_memory(memory)


class GPT2(Decoder, Pretrained):
    """GPT-2, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = GPT2(GPT2Config.gpt2(), key=jax.random.key(0))
    keys = jax.random.split(key, len(ids))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(ids, keys)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed.
    """

    config_class = GPT2Config
    model_types = ("gpt2",)
    architectures = ("GPT2LMHeadModel", "GPT2Model")

    embedding: eqx.nn.Embedding
    # An array instead of an `eqx.nn.Embedding`: it is mostly read as a slice, so a plan must not shard its rows.
    positions: Float[Array, "n_positions d"]
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as OpenAI's code does: N(0, `init_std`²), positions N(0, (`init_std` / 2)²), layers that
            add to the residual stream scaled by `1 / sqrt(2 * n_layers)`, biases 0, norms 1.
        """
        embedding_key, positions_key, stack_key = jax.random.split(key, 3)
        vocab, d, std = config.vocab_size, config.d_model, config.init_std
        self.embedding = normal_embedding(vocab, d, std=std, key=embedding_key)
        self.positions = std / 2 * jax.random.normal(positions_key, (config.n_positions, d))
        self.dropout = eqx.nn.Dropout(config.embedding_dropout)
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        head_key = jax.random.fold_in(key, 1)
        self.head = None if config.is_tied else normal_linear(d, vocab, std=std, use_bias=False, key=head_key)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq vocab"]:
        """Returns the logits of the token that follows each of `ids`, given that token and all before it.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `mask`: True for tokens, False for padding on either side; None if all are tokens. Positions count tokens only.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only, positions start again in each, and each may have `n_positions` tokens.
        - `memory`, `memory_mask`: the sequence for the cross-attentions, and True for its rows that are attended to. None if
            there are no cross-attentions.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, for a mask or a memory together with segments, and for a
        memory without cross-attentions or the reverse.
        """
        hidden = self.hidden(ids, mask=mask, segments=segments, memory=memory, memory_mask=memory_mask, key=key)
        return self.logits(hidden)

    def hidden(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the input of `logits`: the residual stream after all blocks and the final norm. See `__call__` for the
        arguments."""
        check_segments(segments, mask, len(ids))
        if segments is None:
            check_length("ids", len(ids), self.config.n_positions)
        elif memory is not None:
            raise ValueError(
                f"`segments`: expected None with a memory, got {list(segments.shape)}. Pass one text with its memory."
            )
        self._check_memory(memory)
        return self._run(ids, mask, None, key, segments, memory, memory_mask)[0]

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""
        with jax.named_scope("head"):
            return hidden @ self.embedding.weight.T if self.head is None else linear(self.head, hidden)

    def init_cache(
        self,
        length: int,
        memory: Float[Array, "memory d"] | None = None,
        memory_mask: Bool[Array, " memory"] | None = None,
    ) -> Cache:
        """Returns an empty cache for one example of at most `length` tokens, including padding.

        **Arguments:**

        - `memory`, `memory_mask`: as for a call. The memory's keys and values are computed here, once.

        Raises ValueError if `length` exceeds the number of positions, and for a memory without cross-attentions or the
        reverse.
        """
        self._check_memory(memory)
        pairs = None
        if memory is not None:
            pairs = self.stack.map(lambda block: block.project_memory(memory))
        cache = super().init_cache(length)
        return eqx.tree_at(lambda c: (c.memory, c.memory_mask), cache, (pairs, memory_mask), is_leaf=lambda x: x is None)

    def _check_memory(self, memory: Float[Array, "memory d"] | None) -> None:
        if (memory is not None) != self.config.has_cross_attention:
            wanted, got = "one" if memory is None else "None", "None" if memory is None else memory.shape
            raise ValueError(
                f"`memory`: expected {wanted} with `has_cross_attention`={self.config.has_cross_attention}, got {got}. "
                "Change one of the two."
            )

    def _run(self, ids, mask, cache, key, segments=None, memory=None, memory_mask=None) -> tuple[Float[Array, "seq d"], Any]:
        (seq,) = ids.shape
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        memory_mask = memory_mask if cache is None else cache.memory_mask
        memory_mask = None if memory_mask is None else memory_mask[None]
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids) + learned_positions(self.positions, mask, seq, cache, segments=segments)
            x = self.dropout(x, key=dropout_key)
        sees = causal_mask(mask, seq, cache, segments=segments)
        x, cache = self.stack((x, cache), sees, memory, memory_mask, key=stack_key)
        return norm(self.norm, x), cache

    @staticmethod
    def weight_map(config: GPT2Config) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves. There, matrices are `[in, out]`, and query, key
        and value are one."""
        block = [
            *same_layer("ln_1", "attention_norm"),
            *fused("attn.c_attn", ("attention.query", "attention.key", "attention.value"), is_transposed=True),
            *same_layer("attn.c_proj", "attention.output", is_transposed=True),
            *same_layer("ln_2", "mlp_norm"),
            *same_layer("mlp.c_fc", "mlp.up", is_transposed=True),
            *same_layer("mlp.c_proj", "mlp.down", is_transposed=True),
        ]
        if config.has_cross_attention:
            block += [
                *same_layer("ln_cross_attn", "cross_norm"),
                *same_layer("crossattention.q_attn", "cross_attention.query", is_transposed=True),
                *fused("crossattention.c_attn", ("cross_attention.key", "cross_attention.value"), is_transposed=True),
                *same_layer("crossattention.c_proj", "cross_attention.output", is_transposed=True),
            ]
        return WeightMap(
            tensors=[
                same("transformer.wte.weight", "embedding.weight"),
                same("transformer.wpe.weight", "positions"),
                *layers("transformer.h.{}.", "stack.blocks.", config.n_layers, block),
                *same_layer("transformer.ln_f", "norm"),
                *([] if config.is_tied else [same("lm_head.weight", "head.weight")]),
            ],
            # Attention masks in old files.
            ignored=("*.attn.bias", "*.attn.masked_bias", "*.crossattention.bias", "*.crossattention.masked_bias"),
            copies={"lm_head.weight": "transformer.wte.weight"} if config.is_tied else {},
            untied_by="tie_word_embeddings",
            # The Hub's first files hold the base model, whose names lack the prefix.
            aliases=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
        )
