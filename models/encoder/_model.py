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

from redeqx.errors import wrong

from ..hf import Pretrained, WeightMap, is_on_disk, leaves_of
from ..nn import (
    Block,
    Mask,
    SegmentMask,
    Stack,
    apply_rotary,
    check_length,
    check_segments,
    embed,
    learned_positions,
    linear,
    norm,
    normal_attention,
    normal_embedding,
    normal_linear,
    normal_mlp,
    rotation,
    token_mask,
    token_positions,
)
from ._config import EncoderConfig
from ._distances import Distances, buckets


def make_norm(config: EncoderConfig) -> eqx.nn.LayerNorm:
    return eqx.nn.LayerNorm(config.d_model, eps=config.layer_norm_eps, use_bias=config.norm_bias)


class Layers(eqx.Module):
    """What differs between layers with and without a window, in the order of layers."""

    is_local: Bool[Array, " layers"]
    angles: tuple[Float[Array, "2 seq 1 half"], Float[Array, "2 seq 1 half"]]  # cosines and sines, without and with a window
    window: int = eqx.field(static=True)

    def mask(self, mask: Mask | None, layer: Int[Array, ""]) -> Mask:
        """Returns the mask of a layer: tokens within the window, if it has one."""
        positions = jnp.arange(self.angles[0].shape[1])
        near = jnp.abs(positions[:, None] - positions) <= self.window
        near |= ~self.is_local[layer]
        if isinstance(mask, SegmentMask):
            return SegmentMask(near, mask.query_segments, mask.segments)
        return near if mask is None else near & mask

    def rotary(self, x: Float[Array, "seq heads size"], layer: Int[Array, ""]) -> Float[Array, "seq heads size"]:
        """Rotates each head of each token."""
        kind = self.is_local[layer].astype(jnp.int32)
        cos, sin = (jax.lax.dynamic_index_in_dim(angles, kind, keepdims=False) for angles in self.angles)
        return apply_rotary(x, cos, sin)


def _block(config: EncoderConfig, key: PRNGKeyArray, *, has_attention_norm: bool = True) -> Block:
    *keys, mlp_key = jax.random.split(key, 5)
    d, std, has_bias = config.d_model, config.init_std, config.attention_bias
    of_attention, of_mlp, of_output = config.block_dropouts
    return Block(
        attention=normal_attention(
            d,
            config.n_heads,
            std=std,
            output_std=config.output_std,
            biases=(has_bias,) * 4,
            dropout=config.attention_dropout,
            # Three products are added, where there is one otherwise.
            scale=(3 * d // config.n_heads) ** -0.5 if config.position_kind == "distances" else None,
            keys=keys,
        ),
        attention_norm=make_norm(config) if has_attention_norm else None,
        cross_attention=None,
        cross_norm=None,
        mlp=normal_mlp(
            d,
            config.d_ff,
            std=std,
            down_std=config.output_std,
            activation=config.activation,
            is_gated=config.is_gated,
            use_bias=config.mlp_bias,
            dropout=of_mlp,
            key=mlp_key,
        ),
        mlp_norm=make_norm(config),
        dropout=eqx.nn.Dropout(of_output),
        is_pre_norm=config.norm_places == "pre",
        attention_dropout=eqx.nn.Dropout(of_attention),
    )


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
        return config.names.weight_map(leaves_of(cls, config), config.n_layers, cls.head)


class Encoder(OfFamily):
    """An encoder without a head, from token ids to hidden states. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = Bert(BertConfig.of("base-uncased"), key=jax.random.key(0))
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
    positions: Float[Array, "n_positions d"] | None
    token_types: Float[Array, "n_token_types d"] | None
    distances: Float[Array, "distances d"] | None
    distance_norm: eqx.nn.LayerNorm | None
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    first: Block | None  # the first block, if it differs from the others
    stack: Stack[Block]
    final_norm: eqx.nn.LayerNorm | None
    pooler: eqx.nn.Linear | None
    config: Any = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), the padding token's row 0, biases 0, norms 1.
        """
        embedding_key, positions_key, types_key, stack_key, pooler_key = jax.random.split(key, 5)
        d, std, n_types = config.d_model, config.init_std, config.n_token_types
        self.embedding = normal_embedding(config.vocab_size, d, std=std, zero=config.pad_token_id, key=embedding_key)
        self.positions = self.distances = self.distance_norm = None
        if config.position_kind == "distances":
            self.distances = std * jax.random.normal(positions_key, (2 * config.distance_span, d))
            self.distance_norm = make_norm(config)
        elif config.position_kind != "rotary":
            first = config.first_position
            table = std * jax.random.normal(positions_key, (first + config.n_positions, d))
            self.positions = table.at[first - 1].set(0) if first else table
        self.token_types = std * jax.random.normal(types_key, (n_types, d)) if n_types else None
        self.norm = make_norm(config)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.first, self.final_norm, n_layers = None, None, config.n_layers
        if config.norm_places == "pre":
            first_key, stack_key = jax.random.split(stack_key)
            self.first, n_layers = _block(config, first_key, has_attention_norm=False), n_layers - 1
            self.final_norm = make_norm(config)
        self.stack = Stack(lambda key: _block(config, key), n_layers, remat=config.remat, key=stack_key)
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
            x = self._embed(ids, token_types)
            x = x if self.positions is None else x + self._positions(self.positions, ids, segments)
            x = self.dropout(norm(self.norm, x), key=dropout_key)
        layers = self._layers(seq, segments) if self.config.position_kind == "rotary" else None
        carry = (x, None, None if layers is None else jnp.int32(0))
        given = (token_mask(mask, segments=segments), None, None, self._distances(seq), layers)
        if self.first is not None:
            first_key, stack_key = (None, None) if stack_key is None else jax.random.split(stack_key)
            carry = self.first(carry, *given, key=first_key)
        x, *_ = self.stack(carry, *given, key=stack_key)
        return norm(self.final_norm, x)

    def _embed(self, ids: Int[Array, " seq"], token_types: Int[Array, " seq"] | None) -> Float[Array, "seq d"]:
        if self.token_types is None:
            if token_types is not None:
                rule = f"None for {self.config.model_type!r}"
                raise wrong("token_types", rule, list(token_types.shape), "This family has no token types: omit them.")
            return embed(self.embedding, ids)
        types = self.token_types[0]
        if token_types is not None:  # a type out of range gives NaN, as a token id does
            types = self.token_types.at[token_types].get(mode="fill", wrap_negative_indices=False)
        return embed(self.embedding, ids) + types

    def _distances(self, seq: int) -> Distances | None:
        """Returns the vectors of distances, and where they are read."""
        if self.distances is None or self.distance_norm is None:
            return None
        config = self.config
        rows = buckets(seq, config.distance_span, config.n_buckets, config.largest_distance)
        return Distances(norm(self.distance_norm, self.distances), jnp.asarray(rows), self.dropout)

    def _layers(self, seq: int, segments: Int[Array, " seq"] | None) -> Layers:
        """Returns what differs between layers: rotary positions, and who attends to whom."""
        config, positions = self.config, token_positions(None, seq, segments=segments)
        thetas = (config.rope_theta, config.local_rope_theta)
        angles = [rotation(positions, config.d_model // config.n_heads, theta) for theta in thetas]
        cos, sin = (jnp.stack(arrays) for arrays in zip(*angles, strict=True))
        return Layers(jnp.array(config.local_layers), (cos, sin), config.window)

    def _positions(
        self, table: Float[Array, "n_positions d"], ids: Int[Array, " seq"], segments: Int[Array, " seq"] | None
    ) -> Float[Array, "seq d"]:
        """Returns the vector of each token's position."""
        pad = self.config.pad_token_id
        if self.config.position_kind == "learned":
            return learned_positions(table, None, len(ids), segments=segments)
        is_token = ids != pad
        counts = jnp.cumsum(is_token)
        if segments is not None:  # less the tokens before the segment
            starts = segments != jnp.roll(segments, 1)
            counts -= jax.lax.cummax(jnp.where(starts, counts - is_token, 0))
        return table.at[jnp.where(is_token, counts, 0) + pad].get(mode="fill")

    def pool(self, hidden: Float[Array, "seq d"]) -> Float[Array, " d"]:
        """Returns the vector that represents the text: the first token's hidden state after one more linear layer and tanh.

        Raises ValueError if the model has no pooler.
        """
        if self.pooler is None:
            raise wrong("has_pooler", "True", "False: this model has no pooler", "Take the first token's `hidden[0]`.")
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
