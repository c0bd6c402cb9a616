"""`EncoderConfig`: the values of an encoder. They say all that differs between families."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from redeqx.errors import wrong

from ..hf import FolderConfig, check_fixed
from ..nn import ACTIVATIONS, check_choice, check_heads, check_rates, check_sizes
from ._names import Names

# Fields that are not in `config.json`, or in rows of several fields.
_FREE = {"n_classes", "bos_token_id", "eos_token_id", "pad_token_id", "model_type", "remat", "extra"}


@dataclass(frozen=True)
class EncoderConfig(FolderConfig):
    """The sizes of an encoder, and everything else that differs between families. The defaults here are BERT's.

    A family's config has other defaults. Fields that the family's `config.json` has no key for are the same in each of its
    models: another value raises an error.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `n_token_types`: the number of token types; 0 for a family without them. BERT distinguishes a first sentence from a
        second.
    - `d_model`, `d_ff`: the width of the model, and the inner width of an MLP.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `n_classes`: the number of classes of a classifier of texts or tokens; 1 for regression. Their names are in `extra`:
        `id2label` and `label2id`.
    - `activation`: the function in the MLPs, by its name in `transformers`.
    - `dropout`: the dropout rate of embeddings and of additions to the residual stream, in [0, 1).
    - `attention_dropout`: the dropout rate of attention weights.
    - `classifier_dropout`: the dropout rate before a classifier's head; None uses `dropout`.
    - `layer_norm_eps`: added to the variance in layer norms.
    - `has_pooler`: whether a model without a head has a pooler, for `pool`. A masked language model never has one, and a
        classifier only if its head is the pooler, as in BERT.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights. The published 0.02 suits widths of 768 and more; narrower models
        learn faster with a larger one.
    - `position_kind`: what tells the order of tokens: `"learned"`, a vector for each position; `"counted"`, the same, but
        the padding token has no position, and the table begins with `pad_token_id + 1` more rows; `"rotary"`; `"distances"`,
        products of queries and keys with vectors of distances (arXiv:2006.03654).
    - `n_buckets`, `max_distance`: of distances. If `n_buckets` is not 0, distances up to half of it have their own vectors,
        and others share one by their logarithm up to `max_distance`; None for `n_positions`.
    - `rope_theta`, `local_rope_theta`: the base of the rotary frequencies, and that of layers with a window.
    - `window`: the largest distance of two tokens that attend to each other in layers with a window.
    - `windowed_layers`: the indices of the layers with the window; None for those of the family, which commonly are none.
    - `norm_places`: where the norms of a block are: `"post"`, after additions to the residual stream; `"pre"`, before
        attention and MLP. Then the first layer's attention has none, as embeddings are normalized, and the output has one.
    - `norm_bias`, `attention_bias`, `mlp_bias`: whether these layers have biases.
    - `is_gated`: whether the MLP has a gate (arXiv:2002.05202).
    - `pooling`: what a classifier of texts reads: `"cls"`, the first token, or `"mean"`, the mean of all tokens.
    - `head_activation`, `head_bias`: of the linear layer in a classifier's head.
    - `mlm_activation`: of the linear layer in the head for masked tokens; None for `activation`.
    - `logits_bias`: whether the logits of masked tokens have a bias.
    - `model_type`: which of the family's types it is, if the family has several.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).

    Raises ValueError for sizes below 1, heads that do not divide the width, rates outside [0, 1), any other activation, and
    values that the family does not have.
    """

    vocab_size: int = 30522
    n_positions: int = 512
    n_token_types: int = 2
    d_model: int = 768
    d_ff: int = 3072
    n_layers: int = 12
    n_heads: int = 12
    n_classes: int = 2
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    layer_norm_eps: float = 1e-12
    has_pooler: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = 0
    init_std: float = 0.02
    position_kind: str = "learned"
    n_buckets: int = 0
    max_distance: int | None = None
    rope_theta: float = 10000.0
    local_rope_theta: float = 10000.0
    window: int = 64
    windowed_layers: tuple[int, ...] | None = None
    norm_places: str = "post"
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    is_gated: bool = False
    pooling: str = "cls"
    head_activation: str = "tanh"
    head_bias: bool = True
    mlm_activation: str | None = None
    logits_bias: bool = True
    model_type: str = "bert"
    remat: bool = False

    # The model types of the family, and the start of the names of transformers' classes for each.
    architectures: ClassVar[Mapping[str, str]] = MappingProxyType({})
    has_transform: ClassVar[bool] = False  # whether a classifier of texts has a linear layer in place of the pooler
    drops_twice: ClassVar[bool] = False  # whether it has dropout before that layer too
    has_head_norm: ClassVar[bool] = False  # whether a classifier, also of tokens, has that layer and a norm after it
    names: ClassVar[Any] = Names()  # `Names`, also as a property

    def __post_init__(self) -> None:
        check_fixed(self, _FREE | ({"has_pooler"} if "pooler" in self.names.encoder else set()))
        has_types = type(self).n_token_types > 0
        check_sizes(self, "vocab_size", "n_positions", *(["n_token_types"] if has_types else []), "d_model", "d_ff")
        check_sizes(self, "n_layers", "n_heads", "n_classes")
        check_heads(self)
        check_rates(self, "dropout", "attention_dropout")
        if self.classifier_dropout is not None:
            check_rates(self, "classifier_dropout")
        check_choice(self, "activation", ACTIVATIONS)
        check_choice(self, "pooling", ("cls", "mean"))
        check_choice(self, "head_activation", ACTIVATIONS)
        check_choice(self, "model_type", self.architectures)
        if self.windowed_layers is not None and not set(self.windowed_layers) <= set(range(self.n_layers)):
            rule = f"numbers below `n_layers`={self.n_layers}"
            raise wrong("windowed_layers", rule, self.windowed_layers, "Count from 0, or pass None.")
        if self.position_kind == "rotary" and self.d_model // self.n_heads % 2:
            step = "Rotary positions pair the halves of a head."
            raise wrong("n_heads", "heads of an even width", f"{self.d_model // self.n_heads} with {self.n_heads}", step)
        if self.position_kind == "counted" and (self.pad_token_id is None or self.pad_token_id < 0):
            raise wrong("pad_token_id", "a token id", self.pad_token_id, "Positions are counted from the row after it.")

    @property
    def first_position(self) -> int:
        """The row of position 0 in the table of positions."""
        return 0 if self.pad_token_id is None or self.position_kind == "learned" else self.pad_token_id + 1

    @property
    def largest_distance(self) -> int:
        """The distance of the last vector, and of all beyond."""
        return self.n_positions if self.max_distance is None else self.max_distance

    @property
    def distance_span(self) -> int:
        """The number of vectors of distances on each side."""
        return self.n_buckets or self.largest_distance

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer has the window."""
        has = self.windowed_layers or ()
        return tuple(i in has for i in range(self.n_layers))

    @property
    def block_dropouts(self) -> tuple[float, float, float]:
        """The dropout rates of the attention's output, inside the MLP, and of its output."""
        return self.dropout, 0.0, self.dropout

    @property
    def output_std(self) -> float:
        """The standard deviation of the initial weights of layers that add to the residual stream."""
        return self.init_std

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the last layer of a classifier of texts."""
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout

    @property
    def masked_activation(self) -> str:
        """The activation in the head for masked tokens."""
        return self.activation if self.mlm_activation is None else self.mlm_activation

    @property
    def token_head_dropout(self) -> float:
        """The dropout rate before the last layer of a classifier of tokens."""
        return self.head_dropout
