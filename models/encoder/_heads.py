"""Encoders with a head: for masked tokens, for the class of a text, and for the class of each token."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..nn import ACTIVATIONS, linear, norm, normal_linear
from ._config import EncoderConfig
from ._model import Encoder, OfFamily, make_norm


class MaskedLM(OfFamily):
    """An encoder for masked language modeling, from token ids to the logits of the token at each position. Call it on one
    example.

    ```python
    model = BertForMaskedLM(BertConfig.of("base-uncased"), key=jax.random.key(0))
    logits = model(ids, mask=mask, key=key)  # [seq, vocab]
    ```

    The output head shares the embedding's weight. The pooler and the next-sentence head of a folder are dropped: published
    folders of BERT have both, and a folder saved here has neither.
    """

    head = "masked"
    suffixes = ("ForMaskedLM", "ForPreTraining")

    encoder: Encoder
    transform: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    logits_bias: Float[Array, " vocab"] | None
    config: Any = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights: those of `encoder` as without a head, the head's N(0, `init_std`²), its biases 0.
        """
        encoder_key, transform_key = jax.random.split(key)
        self.encoder = Encoder(replace(config, has_pooler=False), key=encoder_key)
        self.transform = _make_transform(config, transform_key)
        self.norm = make_norm(config)
        self.logits_bias = jnp.zeros(config.vocab_size) if config.logits_bias else None
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
        hidden = self.encoder(ids, token_types=token_types, mask=mask, segments=segments, key=key)
        with jax.named_scope("head"):
            activate = ACTIVATIONS[self.config.masked_activation]
            return norm(self.norm, activate(linear(self.transform, hidden)))

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the tokens, from the output of `hidden`."""
        with jax.named_scope("head"):
            logits = hidden @ self.encoder.embedding.weight.T
            return logits if self.logits_bias is None else logits + self.logits_bias


def _make_transform(config: EncoderConfig, key: PRNGKeyArray) -> eqx.nn.Linear:
    """Returns the linear layer of a head."""
    return normal_linear(config.d_model, config.d_model, std=config.output_std, use_bias=config.head_bias, key=key)


class _Classifier(OfFamily):
    """An encoder with a classification head, for texts or for tokens."""

    encoder: Encoder
    transform: eqx.nn.Linear | None  # in a classifier of texts, it replaces the pooler
    norm: eqx.nn.LayerNorm | None
    dropout: eqx.nn.Dropout
    classifier: eqx.nn.Linear
    config: Any = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights: those of `encoder` as without a head, the head's N(0, `init_std`²), its biases 0.
        """
        of_tokens = self.head == "tokens"
        has_transform = config.has_head_norm if of_tokens else config.has_transform
        encoder_key, classifier_key = jax.random.split(key)
        self.encoder = Encoder(replace(config, has_pooler=not of_tokens and not has_transform), key=encoder_key)
        self.transform = None
        if has_transform:
            transform_key, classifier_key = jax.random.split(classifier_key)
            self.transform = _make_transform(config, transform_key)
        self.norm = make_norm(config) if config.has_head_norm else None
        self.dropout = eqx.nn.Dropout(config.token_head_dropout if of_tokens else config.head_dropout)
        self.classifier = normal_linear(config.d_model, config.n_classes, std=config.init_std, key=classifier_key)
        self.config = config


class SequenceClassifier(_Classifier, init=False):
    """An encoder with a classification head, from token ids to the logits of each class, or to a number. Call it on one
    example.

    ```python
    model = BertForSequenceClassification(BertConfig.of("base-uncased"), key=jax.random.key(0))
    logits = model(ids, token_types=token_types, mask=mask, key=key)  # [n_classes]
    ```

    To use your own classes, put a pretrained encoder into a new classifier:

    ```python
    bert, config = Bert.from_pretrained(folder)
    model = BertForSequenceClassification(dataclasses.replace(config, n_classes=3), key=key)
    model = eqx.tree_at(lambda model: model.encoder, model, bert)
    ```

    For RoBERTa, pass `has_pooler=False` to `from_pretrained`: the folder of its classifier, which has a layer of its own,
    cannot hold a pooler.
    """

    head = "texts"
    suffixes = ("ForSequenceClassification",)

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        token_types: Int[Array, " seq"] | None = None,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " classes"]:
        """Returns the logits of each class; if there is one class, the predicted number. See `Bert` for the arguments.

        Padding must be on the right if the first token represents the text, as in all families but ModernBERT.
        """
        encoder_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        hidden = self.encoder(ids, token_types=token_types, mask=mask, key=encoder_key)
        if self.transform is None:
            pooled = self.encoder.pool(hidden)
        else:
            read = hidden[0]
            if self.config.pooling == "mean":  # of tokens, which sums in at least float32
                read = hidden.mean(0, where=None if mask is None else mask[:, None].astype(bool))
            pooled = self._transform(read, dropout_key)
        pooled = self.dropout(pooled, key=dropout_key)
        with jax.named_scope("head"):
            return linear(self.classifier, pooled)

    def _transform(self, pooled: Float[Array, " d"], key: PRNGKeyArray | None) -> Float[Array, " d"]:
        assert self.transform is not None
        if self.config.drops_twice:
            pooled = self.dropout(pooled, key=None if key is None else jax.random.fold_in(key, 1))
        with jax.named_scope("head"):
            pooled = ACTIVATIONS[self.config.head_activation](linear(self.transform, pooled))
            return pooled if self.norm is None else self.norm(pooled)


class TokenClassifier(_Classifier, init=False):
    """An encoder with a classification head for tokens, from token ids to the logits of each token's class, such as the kind
    of name that it is part of. Call it on one example.

    ```python
    model = BertForTokenClassification(BertConfig.of("base-cased"), key=jax.random.key(0))
    logits = model(ids, mask=mask, key=key)  # [seq, n_classes]
    ```
    """

    head = "tokens"
    suffixes = ("ForTokenClassification",)

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        token_types: Int[Array, " seq"] | None = None,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq classes"]:
        """Returns the logits of each token's class. See `Bert` for the arguments."""
        encoder_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        hidden = self.encoder(ids, token_types=token_types, mask=mask, segments=segments, key=encoder_key)
        with jax.named_scope("head"):
            if self.transform is not None and self.norm is not None:
                activate = ACTIVATIONS[self.config.head_activation]
                hidden = norm(self.norm, activate(linear(self.transform, hidden)))
            return linear(self.classifier, self.dropout(hidden, key=dropout_key))
