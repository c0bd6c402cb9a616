"""GPT-J: a decoder with rotary positions whose attention and MLP run in parallel after one norm.

Only a part of each head is rotary. The output head has a bias.

Source: Wang and Komatsuzaki 2021, *GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model*, and its code,
github.com/kingoflolz/mesh-transformer-jax. Only the initial weights differ from that code: they are drawn as in
`transformers`.

Dims: seq = tokens of one example, d = width of the model, heads x size = d, pairs = half of the rotary dims of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ._kinds import RATE, SIZE
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
    check_heads,
    check_rates,
    check_sizes,
    embed,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    token_positions,
)

Carry = tuple[Array, Cache | None]  # passed from block to block: the residual stream [seq, d], and the cache
Rotation = tuple[Float[Array, "seq 1 pairs"], Float[Array, "seq 1 pairs"]]  # cosines and sines


# Alternative names of keys, which transformers accepts too.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class GPTJConfig(FolderConfig):
    """The sizes and dropout rates of GPT-J. The defaults are those of the published one.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens. No weight depends on it.
    - `d_model`: the width of the model.
    - `d_mlp`: the MLP's inner width; None for four times `d_model`.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `rotary_size`: the number of rotary dims of each head, which are its first ones; even.
    - `embedding_dropout`, `attention_dropout`, `residual_dropout`: dropout rates in [0, 1).
    - `layer_norm_eps`: added to the variance in layer norms.
    - `is_tied`: whether the output head shares the embedding's weight. Its bias is separate in either case.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide the width, a `rotary_size` that is odd or larger than a
    head, and rates outside [0, 1).
    """

    vocab_size: int = 50400
    n_positions: int = 2048
    d_model: int = 4096
    d_mlp: int | None = None
    n_layers: int = 28
    n_heads: int = 16
    rotary_size: int = 64
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    is_tied: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    pad_token_id: int | None = None
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "n_positions", "d_model", "n_layers", "n_heads")
        if self.d_mlp is not None:
            check_sizes(self, "d_mlp")
        check_heads(self)
        check_rates(self, "embedding_dropout", "attention_dropout", "residual_dropout")
        size = self.d_model // self.n_heads
        if self.rotary_size % 2 or not 2 <= self.rotary_size <= size:
            raise ValueError(
                f"`rotary_size`: expected an even number from 2 to `d_model` / `n_heads`={size}, got {self.rotary_size}. "
                "Rotary positions use whole pairs of a head's dims."
            )

    def without_dropout(self) -> "GPTJConfig":
        """The same config without dropout."""
        return replace(self, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)

    @classmethod
    def gptj_6b(cls) -> "GPTJConfig":
        """The published GPT-J with 6 billion parameters."""
        return cls()

    rows = (
        Written("model_type", "gptj"),
        Only("activation_function", "gelu_new"),
        Field("vocab_size"),
        Field("n_positions"),
        Field("n_embd", "d_model"),
        Field("n_inner", "d_mlp", SIZE, load=lambda size, known: None if size == 4 * known["d_model"] else size),
        Field("n_layer", "n_layers", via=ConfigReader.layers),
        Field("n_head", "n_heads"),
        Field("rotary_dim", "rotary_size", null=lambda known: known["d_model"] // known["n_heads"]),
        Field("embd_pdrop", "embedding_dropout", RATE),
        Field("attn_pdrop", "attention_dropout", RATE),
        Field("resid_pdrop", "residual_dropout", RATE),
        Field("layer_norm_epsilon", "layer_norm_eps"),
        Field("tie_word_embeddings", "is_tied"),
        Tokens(),
        Field("initializer_range", "init_std"),
    )
    aliases = _ALIASES


def rotation(positions: Int[Array, " seq"], size: int) -> Rotation:
    """Cosines and sines of the rotary angles of `size / 2` pairs of dims. Later pairs have lower frequencies."""
    frequencies = 10000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = rearrange(positions[:, None] * frequencies, "seq pairs -> seq 1 pairs")
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: Float[Array, "seq heads size"], rotation: Rotation) -> Float[Array, "seq heads size"]:
    """Rotates the first dims of each head. Dims 0 and 1 are a pair, 2 and 3 the next."""
    cos, sin = rotation
    n_rotary = 2 * cos.shape[-1]
    a, b = rearrange(x[..., :n_rotary], "seq heads (pairs two) -> two seq heads pairs", two=2)
    both = jnp.stack([a * cos - b * sin, b * cos + a * sin])
    both = rearrange(both, "two seq heads pairs -> seq heads (pairs two)").astype(x.dtype)
    return jnp.concatenate([both, x[..., n_rotary:]], axis=-1)


def _attention(config: GPTJConfig, key: PRNGKeyArray) -> Attention:
    q_key, k_key, v_key, o_key = jax.random.split(key, 4)
    d, std = config.d_model, config.init_std
    return Attention(
        query=normal_linear(d, d, std=std, use_bias=False, key=q_key),
        key=normal_linear(d, d, std=std, use_bias=False, key=k_key),
        value=normal_linear(d, d, std=std, use_bias=False, key=v_key),
        output=normal_linear(d, d, std=std, use_bias=False, key=o_key),
        n_heads=config.n_heads,
        n_kv_heads=config.n_heads,
        dropout=eqx.nn.Dropout(config.attention_dropout),
    )


class Mlp(eqx.Module):
    """Two linear layers with GELU (by tanh) between them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        d, std = config.d_model, config.init_std
        d_mlp = 4 * d if config.d_mlp is None else config.d_mlp
        self.up = normal_linear(d, d_mlp, std=std, key=up_key)
        self.down = normal_linear(d_mlp, d, std=std, key=down_key)

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, jax.nn.gelu(linear(self.up, x), approximate=True))


class Block(eqx.Module):
    """Attention and MLP in parallel: both take the same normalized input, and both outputs are added to the input."""

    norm: eqx.nn.LayerNorm
    attention: Attention
    mlp: Mlp
    dropout: eqx.nn.Dropout

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.attention = _attention(config, attention_key)
        self.mlp = Mlp(config, key=mlp_key)
        self.dropout = eqx.nn.Dropout(config.residual_dropout)

    def __call__(
        self,
        carry: Carry,
        mask: Mask,
        rotation: Rotation,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Carry:
        x, cache = carry
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        normed = norm(self.norm, x)
        with jax.named_scope("attention"):
            rotary = lambda x: apply_rotary(x, rotation)  # noqa: E731
            mixed, cache = self.attention(normed, mask=mask, rotary=rotary, cache=cache, key=keys[0])
        with jax.named_scope("mlp"):
            computed = self.mlp(normed)
        return x + (self.dropout(mixed, key=keys[1]) + self.dropout(computed, key=keys[2])), cache


class GPTJ(Decoder, Pretrained):
    """GPT-J, from token ids to the logits of each next token. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = GPTJ(GPTJConfig.gptj_6b(), key=jax.random.key(0))
    keys = jax.random.split(key, len(ids))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(ids, keys)
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed.
    """

    config_class = GPTJConfig
    model_types = ("gptj",)
    architectures = ("GPTJForCausalLM",)

    embedding: eqx.nn.Embedding
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear | None  # None if the output head shares the embedding's weight
    head_bias: Float[Array, " vocab"] | None  # the head's bias in that case
    config: GPTJConfig = eqx.field(static=True)

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), biases 0, norms 1.
        """
        embedding_key, stack_key, head_key = jax.random.split(key, 3)
        vocab, d, std = config.vocab_size, config.d_model, config.init_std
        self.embedding = normal_embedding(vocab, d, std=std, key=embedding_key)
        self.dropout = eqx.nn.Dropout(config.embedding_dropout)
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.head = None if config.is_tied else normal_linear(d, vocab, std=std, key=head_key)
        self.head_bias = jnp.zeros(vocab) if config.is_tied else None
        self.config = config

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""
        with jax.named_scope("head"):
            if self.head is not None:
                return linear(self.head, hidden)
            assert self.head_bias is not None
            return hidden @ self.embedding.weight.T + self.head_bias

    def _run(self, ids, mask, cache, key, segments=None) -> tuple[Float[Array, "seq d"], Any]:
        (seq,) = ids.shape
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            x = self.dropout(embed(self.embedding, ids), key=dropout_key)
        angles = rotation(token_positions(mask, seq, cache, segments=segments), self.config.rotary_size)
        x, cache = self.stack((x, cache), causal_mask(mask, seq, cache, segments=segments), angles, key=stack_key)
        return norm(self.norm, x), cache

    @staticmethod
    def weight_map(config: GPTJConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        block = [
            *same_layer("ln_1", "norm"),
            *same_layer("attn.q_proj", "attention.query", use_bias=False),
            *same_layer("attn.k_proj", "attention.key", use_bias=False),
            *same_layer("attn.v_proj", "attention.value", use_bias=False),
            *same_layer("attn.out_proj", "attention.output", use_bias=False),
            *same_layer("mlp.fc_in", "mlp.up"),
            *same_layer("mlp.fc_out", "mlp.down"),
        ]
        return WeightMap(
            tensors=[
                *same_layer("transformer.wte", "embedding", use_bias=False),
                *layers("transformer.h.{}.", "stack.blocks.", config.n_layers, block),
                *same_layer("transformer.ln_f", "norm"),
                *([same("lm_head.bias", "head_bias")] if config.is_tied else same_layer("lm_head", "head")),
            ],
            # Attention masks and a table of angles in old files.
            ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions"),
            copies={"lm_head.weight": "transformer.wte.weight"} if config.is_tied else {},
            untied_by="tie_word_embeddings",
        )
