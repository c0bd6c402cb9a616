"""What every encoder computes: blocks of attention and MLP over the tokens of a text, each of which sees all others.

The values of `EncoderConfig` say what a block has. Attention and the stack are those of `nn`.

Dims: seq = tokens of one example, d = width of the model, heads x size = d.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx._tree import is_array_like, named_leaves

from ..hf import Pretrained, WeightMap, is_on_disk
from ..nn import (
    Attention,
    Mask,
    Stack,
    check_length,
    check_segments,
    embed,
    learned_positions,
    linear,
    norm,
    normal_embedding,
    normal_linear,
    token_mask,
)
from ._config import EncoderConfig
from ._rows import ACTIVATIONS


class Mlp(eqx.Module):
    """Two linear layers with an activation between them, the inner one wider."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        self.up = normal_linear(config.d_model, config.d_ff, std=config.init_std, key=up_key)
        self.down = normal_linear(config.d_ff, config.d_model, std=config.init_std, key=down_key)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, ACTIVATIONS[self.activation](linear(self.up, x)))


class Block(eqx.Module):
    """Attention and MLP, each residual and post-norm."""

    attention: Attention
    attention_norm: eqx.nn.LayerNorm
    mlp: Mlp
    mlp_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: EncoderConfig, *, key: PRNGKeyArray):
        q_key, k_key, v_key, o_key, mlp_key = jax.random.split(key, 5)
        d, eps, std = config.d_model, config.layer_norm_eps, config.init_std
        self.attention = Attention(
            query=normal_linear(d, d, std=std, key=q_key),
            key=normal_linear(d, d, std=std, key=k_key),
            value=normal_linear(d, d, std=std, key=v_key),
            output=normal_linear(d, d, std=std, key=o_key),
            n_heads=config.n_heads,
            n_kv_heads=config.n_heads,
            dropout=eqx.nn.Dropout(config.attention_dropout),
        )
        self.attention_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.mlp = Mlp(config, key=mlp_key)
        self.mlp_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "seq d"], mask: Mask | None, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "seq d"]:
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        with jax.named_scope("attention"):
            mixed, _ = self.attention(x, mask=mask, key=keys[0])
            x = norm(self.attention_norm, x + self.dropout(mixed, key=keys[1]))
        with jax.named_scope("mlp"):
            return norm(self.mlp_norm, x + self.dropout(self.mlp(x), key=keys[2]))


class OfFamily(Pretrained):
    """A model of a family: what its class knows follows from its `config_class`."""

    config_class: ClassVar[Any] = EncoderConfig
    head: ClassVar[str | None] = None  # the field of `Names` with the names of the head
    suffixes: ClassVar[tuple[str, ...]] = ("Model",)  # the ends of the names of transformers' classes; the first is written

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = cls.config_class.architectures
        cls.model_types = tuple(known)
        cls.architectures = tuple(name + suffix for name in known.values() for suffix in cls.suffixes)

    @classmethod
    def architecture(cls, config: Any) -> str:
        return config.architectures[config.model_type] + cls.suffixes[0]

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        model = eqx.filter_eval_shape(cls, config, key=jax.eval_shape(lambda: jax.random.key(0)))
        leaves = {name for name, leaf in named_leaves(model).items() if is_array_like(leaf)}
        return config.names.weight_map(leaves, config.n_layers, cls.head)


class Encoder(OfFamily):
    """An encoder without a head, from token ids to hidden states. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = Bert(BertConfig.bert_base_uncased(), key=jax.random.key(0))
    hidden = model(ids, token_types=token_types, mask=mask, key=key)  # [seq, d]
    pooled = model.pool(hidden)  # [d]
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; then no key is needed.

    `Bert.from_pretrained` also reads the folders of models with a head, without the head. The model has a pooler if the
    folder has the pooler's weights. If a model without a pooler is saved, `transformers` initializes a new one when it loads
    the folder.
    """

    embedding: eqx.nn.Embedding
    # Arrays instead of an `eqx.nn.Embedding` each, so that a plan does not shard their rows as a lookup table's: the
    # positions are added as a slice, and the token types have two rows.
    positions: Float[Array, "n_positions d"]
    token_types: Float[Array, "n_token_types d"] | None
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    pooler: eqx.nn.Linear | None
    config: Any = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), the padding token's row 0, biases 0, norms 1.
        """
        embedding_key, positions_key, types_key, stack_key, pooler_key = jax.random.split(key, 5)
        d, std, n_types = config.d_model, config.init_std, config.n_token_types
        embedding = normal_embedding(config.vocab_size, d, std=std, key=embedding_key)
        if config.pad_token_id is not None:
            embedding = eqx.nn.Embedding(weight=embedding.weight.at[config.pad_token_id].set(0))
        self.embedding = embedding
        first = config.first_position
        positions = std * jax.random.normal(positions_key, (first + config.n_positions, d))
        self.positions = positions.at[first - 1].set(0) if first else positions
        self.token_types = std * jax.random.normal(types_key, (n_types, d)) if n_types else None
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.pooler = normal_linear(d, d, std=std, key=pooler_key) if config.has_pooler else None
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        token_types: Int[Array, " seq"] | None = None,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the hidden state of each token, given all of them.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `token_types`: the type of each token: 0 in the first sentence, 1 in the second; None if all are 0.
        - `mask`: True for tokens, False for padding; None if all are tokens. Padding counts in positions, except that in
            RoBERTa the padding token has none.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only, positions start again in each, and each may have `n_positions` tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, for a mask together with segments, and for token types in a
        model without them.
        """
        (seq,) = ids.shape
        check_segments(segments, mask, seq)
        if segments is None:
            check_length("ids", seq, self.config.n_positions)
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            x = self._embed(ids, token_types) + self._positions(ids, segments)
            x = self.dropout(norm(self.norm, x), key=dropout_key)
        return self.stack(x, token_mask(mask, segments=segments), key=stack_key)

    def _embed(self, ids: Int[Array, " seq"], token_types: Int[Array, " seq"] | None) -> Float[Array, "seq d"]:
        if self.token_types is None:
            if token_types is not None:
                raise ValueError(
                    f"`token_types`: expected None for {self.config.model_type!r}, got {list(token_types.shape)}. This "
                    "family has no token types: omit them."
                )
            return embed(self.embedding, ids)
        types = self.token_types[0]
        if token_types is not None:  # a type out of range gives NaN, as a token id does
            types = self.token_types.at[token_types].get(mode="fill", wrap_negative_indices=False)
        return embed(self.embedding, ids) + types

    def _positions(self, ids: Int[Array, " seq"], segments: Int[Array, " seq"] | None) -> Float[Array, "seq d"]:
        """Returns the vector of each token's position."""
        pad = self.config.pad_token_id
        if self.config.position_kind == "learned":
            return learned_positions(self.positions, None, len(ids), segments=segments)
        is_token = ids != pad
        counts = jnp.cumsum(is_token)
        if segments is not None:  # less the tokens before the segment
            starts = segments != jnp.roll(segments, 1)
            counts -= jax.lax.cummax(jnp.where(starts, counts - is_token, 0))
        return self.positions.at[jnp.where(is_token, counts, 0) + pad].get(mode="fill")

    def pool(self, hidden: Float[Array, "seq d"]) -> Float[Array, " d"]:
        """Returns the vector that represents the text: the first token's hidden state after one more linear layer and tanh.

        Raises ValueError if the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError(
                "`has_pooler`: expected True, got False: this model has no pooler. Take the first token's `hidden[0]`."
            )
        with jax.named_scope("pooler"):
            return jnp.tanh(linear(self.pooler, hidden[0]))

    @classmethod
    def read_config(cls, folder: Path) -> Any:
        """Reads the config of a folder. It has a pooler if the folder has the pooler's weights: `config.json` has no such
        key."""
        config = super().read_config(folder)
        if "pooler" not in config.names.encoder:
            return config
        name = f"{config.names.encoder['pooler']}.weight"
        names = (name, config.names.base + name)
        return replace(config, has_pooler=is_on_disk(folder, cls.weights_name, *names, default=config.has_pooler))
