"""GPT-2: learned positions, norms before each part, GELU by tanh, the head tied to the embedding.

Source: Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, and its code,
github.com/openai/gpt-2. It differs from that code in its layout only: query, key and value are three layers in place of
one, so that a plan splits each by whole heads.

Dims: seq = tokens of one example, d = width of the model, heads x size = d.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int, PRNGKeyArray

from redeqx import register_attention

from ._layers import embed, layer_norm, linear, normal_embedding, normal_linear
from ._stack import Stack


@dataclass(frozen=True)
class GPT2Config:
    """The sizes and rates of a GPT-2; the defaults are the smallest published one.

    **Arguments:**

    - `vocab_size`: rows of the embedding. Sizes that `n_model_shards` divides can be split.
    - `n_positions`: the longest example, in tokens.
    - `d_model`: the width; the MLP is four times as wide.
    - `n_layers`, `n_heads`: blocks, and heads in each; `n_heads` divides `d_model`.
    - `embedding_dropout`, `attention_dropout`, `residual_dropout`: rates in [0, 1).
    - `layer_norm_eps`: added to the variance.
    - `init_std`: standard deviation of the first weights; half of it for positions. The published 0.02 is for widths of
        768 and more: narrow models learn sooner from a larger one.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).

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
    init_std: float = 0.02
    remat: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "n_positions", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}`: expected at least 1, got {getattr(self, name)}. Pass a positive size.")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"`n_heads`: expected a divisor of `d_model`={self.d_model}, got {self.n_heads}. "
                "Choose a width that is a multiple of the heads."
            )
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}`: expected a rate in [0, 1), got {getattr(self, name)}. Pass 0 for none.")

    @classmethod
    def gpt2(cls) -> "GPT2Config":
        """The published GPT-2 of 124 million parameters."""
        return cls()

    @classmethod
    def medium(cls) -> "GPT2Config":
        """The published GPT-2 of 355 million parameters."""
        return cls(d_model=1024, n_layers=24, n_heads=16)

    @classmethod
    def large(cls) -> "GPT2Config":
        """The published GPT-2 of 774 million parameters."""
        return cls(d_model=1280, n_layers=36, n_heads=20)

    @classmethod
    def xl(cls) -> "GPT2Config":
        """The published GPT-2 of 1.6 billion parameters."""
        return cls(d_model=1600, n_layers=48, n_heads=25)


def _residual_std(config: GPT2Config) -> float:
    """For what is added to the residual stream, twice a block: the paper scales it by 1 / sqrt(additions)."""
    return config.init_std / (2 * config.n_layers) ** 0.5


class Attention(eqx.Module):
    """Causal self-attention of several heads."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    output: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        d = config.d_model
        self.query = normal_linear(d, d, std=config.init_std, key=q_key)
        self.key = normal_linear(d, d, std=config.init_std, key=k_key)
        self.value = normal_linear(d, d, std=config.init_std, key=v_key)
        self.dropout = eqx.nn.Dropout(config.attention_dropout)
        self.output = normal_linear(d, d, std=_residual_std(config), key=o_key)
        self.n_heads = config.n_heads

    def __call__(self, x: Float[Array, "seq d"], *, key: PRNGKeyArray | None = None) -> Float[Array, "seq d"]:
        q, k, v = (
            rearrange(linear(layer, x), "seq (heads size) -> seq heads size", heads=self.n_heads)
            for layer in (self.query, self.key, self.value)
        )
        if self.dropout.inference or self.dropout.p == 0:
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = self._attend_with_dropout(q, k, v, key)
        return linear(self.output, rearrange(mixed, "seq heads size -> seq (heads size)"))

    def _attend_with_dropout(
        self,
        q: Float[Array, "seq heads size"],
        k: Float[Array, "seq heads size"],
        v: Float[Array, "seq heads size"],
        key: PRNGKeyArray | None,
    ) -> Float[Array, "seq heads size"]:
        """Attention spelt out, for `jax.nn.dot_product_attention` drops no weights; softmax in float32, as there."""
        seq, _, size = q.shape
        scores = jnp.einsum("qhs,khs->hqk", q, k, preferred_element_type=jnp.float32) * size**-0.5
        scores = jnp.where(jnp.tri(seq, dtype=bool), scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(v.dtype)
        return jnp.einsum("hqk,khs->qhs", self.dropout(weights, key=key), v)


register_attention(Attention, query="query", key="key", value="value", output="output", heads="n_heads")


class Mlp(eqx.Module):
    """Two layers, the inner one four times as wide."""

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
    """Attention and MLP, each normed before and added to the residual stream after."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp
    dropout: eqx.nn.Dropout

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.attention = Attention(config, key=attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.mlp = Mlp(config, key=mlp_key)
        self.dropout = eqx.nn.Dropout(config.residual_dropout)

    def __call__(self, x: Float[Array, "seq d"], *, key: PRNGKeyArray | None = None) -> Float[Array, "seq d"]:
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        with jax.named_scope("attention"):
            mixed = self.attention(layer_norm(self.attention_norm, x), key=keys[0])
            x = x + self.dropout(mixed, key=keys[1])
        with jax.named_scope("mlp"):
            x = x + self.dropout(self.mlp(layer_norm(self.mlp_norm, x)), key=keys[2])
        return x


class GPT2(eqx.Module):
    """GPT-2, from token ids to the logits of each next token. Called on one example; `jax.vmap` it over a batch.

    ```python
    model = GPT2(GPT2Config.gpt2(), key=jax.random.key(0))
    keys = jax.random.split(key, len(ids))
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(ids, keys)
    ```

    `eqx.nn.inference_mode(model)` takes dropout out, and no key is needed then.
    """

    embedding: eqx.nn.Embedding
    # An array and not an `eqx.nn.Embedding`: it is added as a slice, never looked up, so it must not be split along its
    # rows as a lookup table is.
    positions: Float[Array, "n_positions d"]
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: sizes and rates.
        - `key`: draws the weights as OpenAI's code does: N(0, `init_std`²), positions N(0, (`init_std` / 2)²), what is
            added to the residual stream scaled by `1 / sqrt(2 * n_layers)`, biases 0, norms 1.
        """
        embedding_key, positions_key, stack_key = jax.random.split(key, 3)
        self.embedding = normal_embedding(config.vocab_size, config.d_model, std=config.init_std, key=embedding_key)
        self.positions = config.init_std / 2 * jax.random.normal(positions_key, (config.n_positions, config.d_model))
        self.dropout = eqx.nn.Dropout(config.embedding_dropout)
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = eqx.nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.config = config

    def __call__(self, ids: Int[Array, " seq"], *, key: PRNGKeyArray | None = None) -> Float[Array, "seq vocab"]:
        """The logits of the token after each of `ids`, given it and those before it.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for more ids than positions.
        """
        (seq,) = ids.shape
        if seq > self.config.n_positions:
            raise ValueError(
                f"`ids`: expected at most `n_positions`={self.config.n_positions} tokens, got {seq}. "
                "Cut the example, or make the model with more positions."
            )
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            x = self.dropout(embed(self.embedding, ids) + self.positions[:seq], key=dropout_key)
        x = self.stack(x, key=stack_key)
        with jax.named_scope("head"):
            return layer_norm(self.norm, x) @ self.embedding.weight.T
