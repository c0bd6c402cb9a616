"""BERT: a bidirectional post-norm encoder, with heads for masked tokens and for classes.

Source: Devlin et al. 2019, *BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*
(arXiv:1810.04805), and its code, github.com/google-research/bert. Positions are learned. It differs from that code in one
point: it has no next-sentence head.

Dims: seq = tokens of one example, d = width of the model, heads x size = d.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._kinds import RATE
from .hf import (
    Classes,
    ConfigReader,
    Field,
    FolderConfig,
    Only,
    Pretrained,
    StoredTensor,
    Tokens,
    WeightMap,
    Written,
    is_on_disk,
    layers,
    same,
    same_layer,
    within,
)
from .nn import (
    Attention,
    Mask,
    Stack,
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
    token_mask,
)

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True)
class BertConfig(FolderConfig):
    """The sizes and dropout rates of a BERT. The defaults are those of `transformers`, with the sizes of the smaller
    published model.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `n_token_types`: the number of token types. The published models distinguish a first sentence from a second.
    - `d_model`, `d_ff`: the width of the model, and the inner width of an MLP.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `n_classes`: the number of classes of a `BertForSequenceClassification`; 1 for regression. Their names are in `extra`:
        `id2label` and `label2id`.
    - `activation`: of the MLPs: `"gelu"` (by the error function), `"gelu_new"` (by tanh) or `"relu"`.
    - `dropout`: the dropout rate of embeddings and of additions to the residual stream, in [0, 1).
    - `attention_dropout`: the dropout rate of attention weights.
    - `classifier_dropout`: the dropout rate before a classifier's head; None uses `dropout`.
    - `layer_norm_eps`: added to the variance in layer norms.
    - `has_pooler`: whether a `Bert` without a head has a pooler, for `pool`. A classifier always has one, a masked language
        model never.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights. The published 0.02 suits widths of 768 and more; narrower models
        learn faster with a larger one.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide the width, rates outside [0, 1), and any other activation.
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
    remat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(
            self, "vocab_size", "n_positions", "n_token_types", "d_model", "d_ff", "n_layers", "n_heads", "n_classes"
        )
        check_heads(self)
        check_rates(self, "dropout", "attention_dropout")
        if self.classifier_dropout is not None:
            check_rates(self, "classifier_dropout")
        check_choice(self, "activation", _ACTIVATIONS)

    def without_dropout(self) -> "BertConfig":
        """The same config without dropout."""
        return replace(self, dropout=0.0, attention_dropout=0.0, classifier_dropout=0.0)

    @classmethod
    def bert_base_uncased(cls) -> "BertConfig":
        """The published BERT for lower-case English, with 109 million parameters."""
        return cls()

    @classmethod
    def bert_base_cased(cls) -> "BertConfig":
        """The published BERT for English, with 108 million parameters."""
        return cls(vocab_size=28996)

    @classmethod
    def bert_base_multilingual_cased(cls) -> "BertConfig":
        """The published BERT for 104 languages, with 178 million parameters."""
        return cls(vocab_size=119547)

    @classmethod
    def bert_large_uncased(cls) -> "BertConfig":
        """The published BERT for lower-case English, with 335 million parameters."""
        return cls(d_model=1024, d_ff=4096, n_layers=24, n_heads=16)

    @classmethod
    def bert_large_cased(cls) -> "BertConfig":
        """The published BERT for English, with 334 million parameters."""
        return replace(cls.bert_large_uncased(), vocab_size=28996)

    rows = (
        Written("model_type", "bert"),
        Only("position_embedding_type", "absolute"),
        Only("is_decoder", False),
        Only("add_cross_attention", False),
        Only("tie_word_embeddings", True),
        Field("vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        Field("type_vocab_size", "n_token_types"),
        Field("hidden_size", "d_model"),
        Field("intermediate_size", "d_ff"),
        Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
        Field("num_attention_heads", "n_heads"),
        Classes(),
        Only("hidden_act", *_ACTIVATIONS, name="activation"),
        Field("hidden_dropout_prob", "dropout", RATE),
        Field("attention_probs_dropout_prob", "attention_dropout", RATE),
        Field("classifier_dropout", kind=RATE),
        Field("layer_norm_eps"),
        Tokens(),
        Field("initializer_range", "init_std"),
        # `config.json` does not describe a pooler (see `Bert.read_config`).
    )


class Mlp(eqx.Module):
    """Two linear layers with an activation between them, the inner one wider."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        self.up = normal_linear(config.d_model, config.d_ff, std=config.init_std, key=up_key)
        self.down = normal_linear(config.d_ff, config.d_model, std=config.init_std, key=down_key)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, _ACTIVATIONS[self.activation](linear(self.up, x)))


class Block(eqx.Module):
    """Attention and MLP, each residual and post-norm."""

    attention: Attention
    attention_norm: eqx.nn.LayerNorm
    mlp: Mlp
    mlp_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
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


class Bert(Pretrained):
    """BERT without a head, from token ids to hidden states. Call it on one example; `jax.vmap` it over a batch.

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

    config_class = BertConfig
    model_types = ("bert",)
    architectures = ("BertModel",)

    embedding: eqx.nn.Embedding
    # Arrays instead of an `eqx.nn.Embedding` each, so that a plan does not shard their rows as a lookup table's: the
    # positions are added as a slice, and the token types have two rows.
    positions: Float[Array, "n_positions d"]
    token_types: Float[Array, "n_token_types d"]
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    pooler: eqx.nn.Linear | None
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), the padding token's row 0, biases 0, norms 1.
        """
        embedding_key, positions_key, types_key, stack_key, pooler_key = jax.random.split(key, 5)
        d, std = config.d_model, config.init_std
        embedding = normal_embedding(config.vocab_size, d, std=std, key=embedding_key)
        if config.pad_token_id is not None:
            embedding = eqx.nn.Embedding(weight=embedding.weight.at[config.pad_token_id].set(0))
        self.embedding = embedding
        self.positions = std * jax.random.normal(positions_key, (config.n_positions, d))
        self.token_types = std * jax.random.normal(types_key, (config.n_token_types, d))
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
        - `mask`: True for tokens, False for padding; None if all are tokens. Padding counts in positions.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only, positions start again in each, and each may have `n_positions` tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, and for a mask together with segments.
        """
        (seq,) = ids.shape
        check_segments(segments, mask, seq)
        if segments is None:
            check_length("ids", seq, self.config.n_positions)
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            types = self.token_types[0]
            if token_types is not None:  # a type out of range gives NaN, as a token id does
                types = self.token_types.at[token_types].get(mode="fill", wrap_negative_indices=False)
            x = embed(self.embedding, ids) + types + learned_positions(self.positions, None, seq, segments=segments)
            x = self.dropout(norm(self.norm, x), key=dropout_key)
        return self.stack(x, token_mask(mask, segments=segments), key=stack_key)

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
    def read_config(cls, folder: Path) -> BertConfig:
        """Reads the config of a folder. It has a pooler if the folder has the pooler's weights: `config.json` has no such
        key."""
        config, names = super().read_config(folder), ("pooler.dense.weight", "bert.pooler.dense.weight")
        return replace(config, has_pooler=is_on_disk(folder, cls.weights_name, *names, default=config.has_pooler))

    @staticmethod
    def weight_map(config: BertConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        pooler = () if config.has_pooler else ("pooler.*",)
        return WeightMap(
            tensors=_tensors(config),
            # A counter in old files, all heads, and an unwanted pooler.
            ignored=("embeddings.position_ids", "cls.*", "classifier.*", *pooler),
            aliases=(*_OLD_NORMS, (r"^bert\.", "")),
        )


_OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))  # as in TensorFlow


def _tensors(config: BertConfig) -> list[StoredTensor]:
    block = [
        *same_layer("attention.self.query", "attention.query"),
        *same_layer("attention.self.key", "attention.key"),
        *same_layer("attention.self.value", "attention.value"),
        *same_layer("attention.output.dense", "attention.output"),
        *same_layer("attention.output.LayerNorm", "attention_norm"),
        *same_layer("intermediate.dense", "mlp.up"),
        *same_layer("output.dense", "mlp.down"),
        *same_layer("output.LayerNorm", "mlp_norm"),
    ]
    return [
        same("embeddings.word_embeddings.weight", "embedding.weight"),
        same("embeddings.position_embeddings.weight", "positions"),
        same("embeddings.token_type_embeddings.weight", "token_types"),
        *same_layer("embeddings.LayerNorm", "norm"),
        *layers("encoder.layer.{}.", "stack.blocks.", config.n_layers, block),
        *(same_layer("pooler.dense", "pooler") if config.has_pooler else []),
    ]


class BertForMaskedLM(Pretrained):
    """BERT for masked language modeling, from token ids to the logits of the token at each position. Call it on one example.

    ```python
    model = BertForMaskedLM(BertConfig.bert_base_uncased(), key=jax.random.key(0))
    logits = model(ids, mask=mask, key=key)  # [seq, vocab]
    ```

    The output head shares the embedding's weight. The pooler and the next-sentence head of a folder are dropped: published
    folders have both, and a folder saved here has neither.
    """

    config_class = BertConfig
    model_types = ("bert",)
    architectures = ("BertForMaskedLM", "BertForPreTraining")

    bert: Bert
    transform: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    logits_bias: Float[Array, " vocab"]
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights: those of `bert` as in `Bert`, the head's N(0, `init_std`²), its biases 0.
        """
        bert_key, transform_key = jax.random.split(key)
        self.bert = Bert(replace(config, has_pooler=False), key=bert_key)
        self.transform = normal_linear(config.d_model, config.d_model, std=config.init_std, key=transform_key)
        self.norm = eqx.nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.logits_bias = jnp.zeros(config.vocab_size)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        token_types: Int[Array, " seq"] | None = None,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq vocab"]:
        """Returns the logits of the token at each position. See `Bert` for the arguments."""
        return self.logits(self.hidden(ids, token_types=token_types, mask=mask, segments=segments, key=key))

    def hidden(
        self,
        ids: Int[Array, " seq"],
        *,
        token_types: Int[Array, " seq"] | None = None,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the input of `logits`: the hidden state of each token, transformed and normalized. See `Bert` for the
        arguments."""
        hidden = self.bert(ids, token_types=token_types, mask=mask, segments=segments, key=key)
        with jax.named_scope("head"):
            activate = _ACTIVATIONS[self.config.activation]
            return norm(self.norm, activate(linear(self.transform, hidden)))

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the tokens, from the output of `hidden`."""
        with jax.named_scope("head"):
            return hidden @ self.bert.embedding.weight.T + self.logits_bias

    @staticmethod
    def weight_map(config: BertConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        return WeightMap(
            tensors=[
                *within("bert.", "bert.", _tensors(replace(config, has_pooler=False))),
                *same_layer("cls.predictions.transform.dense", "transform"),
                *same_layer("cls.predictions.transform.LayerNorm", "norm"),
                same("cls.predictions.bias", "logits_bias"),
            ],
            ignored=("bert.embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*"),
            copies={
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
            aliases=_OLD_NORMS,
        )


class BertForSequenceClassification(Pretrained):
    """BERT with a classification head, from token ids to the logits of each class, or to a number. Call it on one example.

    ```python
    model = BertForSequenceClassification(BertConfig.bert_base_uncased(), key=jax.random.key(0))
    logits = model(ids, token_types=token_types, mask=mask, key=key)  # [n_classes]
    ```

    To use your own classes, put a pretrained `Bert` into a new classifier:

    ```python
    bert, config = Bert.from_pretrained(folder)
    model = BertForSequenceClassification(dataclasses.replace(config, n_classes=3), key=key)
    model = eqx.tree_at(lambda model: model.bert, model, bert)
    ```
    """

    config_class = BertConfig
    model_types = ("bert",)
    architectures = ("BertForSequenceClassification",)

    bert: Bert
    dropout: eqx.nn.Dropout
    classifier: eqx.nn.Linear
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights: those of `bert` as in `Bert`, the head's N(0, `init_std`²).
        """
        bert_key, classifier_key = jax.random.split(key)
        self.bert = Bert(replace(config, has_pooler=True), key=bert_key)
        rate = config.dropout if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = eqx.nn.Dropout(rate)
        self.classifier = normal_linear(config.d_model, config.n_classes, std=config.init_std, key=classifier_key)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        token_types: Int[Array, " seq"] | None = None,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " classes"]:
        """Returns the logits of each class; if there is one class, the predicted number. See `Bert` for the arguments.

        Padding must be on the right, because the first token represents the text.
        """
        bert_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        hidden = self.bert(ids, token_types=token_types, mask=mask, key=bert_key)
        pooled = self.dropout(self.bert.pool(hidden), key=dropout_key)
        with jax.named_scope("head"):
            return linear(self.classifier, pooled)

    @staticmethod
    def weight_map(config: BertConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        names = _tensors(replace(config, has_pooler=True))
        return WeightMap(
            tensors=[*within("bert.", "bert.", names), *same_layer("classifier", "classifier")],
            ignored=("bert.embeddings.position_ids",),
            aliases=_OLD_NORMS,
        )
