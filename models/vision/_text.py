"""The text encoders of CLIP and SigLIP: pre-norm blocks over the tokens of a text, and the vector that represents it.

Dims: seq = tokens of one text, d = width of the model, projection = width of the vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..hf import FolderConfig, Pretrained, WeightMap, check_fixed, leaves_of
from ..nn import (
    ACTIVATIONS,
    Block,
    BlockStds,
    Mask,
    Stack,
    causal_mask,
    check_choice,
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
    pre_norm_block,
    token_mask,
)
from ._names import Names


@dataclass(frozen=True)
class TextConfig(FolderConfig):
    """The sizes of a text encoder, and everything else that differs between families. The defaults here are CLIP's.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding.
    - `n_positions`: the maximum length of a text, in tokens.
    - `d_model`, `d_ff`: the width of the model, and the inner width of an MLP.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `activation`: the function in the MLPs, by its name in `transformers`.
    - `attention_dropout`: the dropout rate of attention weights, in [0, 1).
    - `layer_norm_eps`: added to the variance in layer norms.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial embeddings and positions. That of the other weights depends on their
        sizes.
    - `is_causal`: whether a token attends only to itself and to those before it.
    - `pools_last`: whether a text is pooled at its last place, even if that is padding; otherwise at its first
        `eos_token_id`. Old folders of CLIP have 2, which is not the tokenizer's end token; then a text is pooled at its
        largest id.
    - `d_projection`: the width of a linear layer after pooling; None for no such layer.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).

    Raises ValueError for sizes below 1, heads that do not divide the width, a rate outside [0, 1), any other activation, and
    values that the family does not have.
    """

    vocab_size: int = 49408
    n_positions: int = 77
    d_model: int = 512
    d_ff: int = 2048
    n_layers: int = 12
    n_heads: int = 8
    activation: str = "quick_gelu"
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    bos_token_id: int | None = 49406
    eos_token_id: Any = 49407
    pad_token_id: int | None = 1
    init_std: float = 0.02
    is_causal: bool = True
    pools_last: bool = False
    d_projection: int | None = None
    remat: bool = False

    model_type: ClassVar[str]
    names: ClassVar[Names]
    part = "text_config"
    has_projection_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fixed(self, ("remat", "extra"))
        check_sizes(self, "vocab_size", "n_positions", "d_model", "d_ff", "n_layers", "n_heads")
        if self.d_projection is not None:
            check_sizes(self, "d_projection")
        check_heads(self)
        check_rates(self, "attention_dropout")
        check_choice(self, "activation", ACTIVATIONS)

    @property
    def embedding_std(self) -> float:
        """The standard deviation of the initial embeddings and positions."""
        return self.init_std

    @property
    def block_stds(self) -> BlockStds:
        """Those of the initial weights of blocks."""
        raise NotImplementedError


class TextEncoder(Pretrained):
    """A text encoder, from token ids to hidden states, and to the vector that represents a text. Call it on one text.

    ```python
    model = CLIPText(CLIPTextConfig.of("sd1"), key=jax.random.key(0))
    hidden = jax.vmap(model)(ids)  # [batch, seq, d]
    pooled = jax.vmap(model.pool)(hidden, ids)  # [batch, d]
    ```

    `from_pretrained` of a family also reads the text model from the folder of a complete pair.
    """

    config_class: ClassVar[Any] = TextConfig

    embedding: eqx.nn.Embedding
    positions: Float[Array, "n_positions d"]
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm
    projection: eqx.nn.Linear | None
    config: Any = eqx.field(static=True)

    def __init__(self, config: TextConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights from normal distributions with the variances of the original: `config.embedding_std` and
            `config.block_stds`. Biases are 0, norms 1.
        """
        embedding_key, positions_key, stack_key, projection_key = jax.random.split(key, 4)
        d, std, projection = config.d_model, config.embedding_std, config.d_projection
        self.embedding = normal_embedding(config.vocab_size, d, std=std, key=embedding_key)
        self.positions = std * jax.random.normal(positions_key, (config.n_positions, d))
        make = lambda key: pre_norm_block(  # noqa: E731
            config, stds=config.block_stds, activation=config.activation, d_inner=config.d_ff, key=key
        )
        self.stack = Stack(make, config.n_layers, remat=config.remat, key=stack_key)
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        make_linear = lambda size: normal_linear(  # noqa: E731
            d, size, std=d**-0.5, use_bias=config.has_projection_bias, key=projection_key
        )
        self.projection = None if projection is None else make_linear(projection)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the normalized hidden state of each token: in CLIP given that token and all before it, else given all.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `mask`: True for tokens, False for padding; None if all are tokens, as in Stable Diffusion and in SigLIP, which
            attends to padding. Padding counts in positions.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only, positions start again in each, and each may have `n_positions` tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, and for a mask together with segments.
        """
        x, sees = self._embed(ids, mask, segments)
        return norm(self.norm, self.stack((x, None, None), sees, key=key)[0])

    def features(
        self,
        ids: Int[Array, " seq"],
        layers: Sequence[int],
        *,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> list[Float[Array, "seq d"]]:
        """Returns the hidden states before and after blocks, which are not normalized.

        **Arguments:**

        - `layers`: the number of blocks before each of them; a negative number counts from after the last, which is -1.
        - `ids`, `mask`, `key`: as for a call.
        """
        after = [layer % (self.config.n_layers + 1) for layer in layers]
        x, sees = self._embed(ids, mask, None)
        return [x for x, *_ in self.stack.collect((x, None, None), sees, after=after, key=key)]

    def _embed(self, ids: Array, mask: Array | None, segments: Array | None) -> tuple[Float[Array, "seq d"], Mask | None]:
        """Returns the input of the first block, and the mask of all blocks."""
        (seq,) = ids.shape
        check_segments(segments, mask, seq)
        if segments is None:
            check_length("ids", seq, self.config.n_positions)
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids) + learned_positions(self.positions, None, seq, segments=segments)
        if self.config.is_causal:
            return x, causal_mask(mask, seq, segments=segments)
        return x, token_mask(mask, segments=segments)

    def pool(self, hidden: Float[Array, "seq d"], ids: Int[Array, " seq"]) -> Float[Array, " projection"]:
        """Returns the vector that represents the text: the hidden state at its first `eos_token_id`, or at its first id if
        it has none; in SigLIP that of the last place, after a linear layer. `hidden` is normalized, as a call returns it."""
        if self.config.pools_last:
            pooled = hidden[-1]
        else:
            eos = self.config.eos_token_id
            # Folders written before transformers 4.31 have 2 with any tokenizer; the actual end token was the last id of the
            # vocabulary.
            pooled = hidden[jnp.argmax(ids if eos == 2 else ids == eos)]
        return pooled if self.projection is None else linear(self.projection, pooled)

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        names = config.names
        return WeightMap(
            tensors=names.tensors(leaves_of(cls, config), config.n_layers),
            ignored=names.others,
            # The prefix of transformers before version 5, and of a complete pair.
            aliases=((rf"^{names.base[:-1]}\.", ""),),
        )
