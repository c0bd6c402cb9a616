"""Decoders with a head for classes, in place of the output head: of a text, and of each token.

One class stands for all families: the config says which one.

Dims: seq = tokens of one example, embedding = width of hidden states, which commonly is that of the model.
"""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx.errors import wrong

from ..hf import Pretrained, StoredTensor, WeightMap, shapes_of, within
from ..nn import linear, normal_linear
from ._config import DecoderConfig
from ._model import FAMILIES, Decoder

Self = TypeVar("Self", bound="_Classifier")


class _Classifier(Pretrained):
    """A decoder without its output head, and a linear layer."""

    config_class: ClassVar[Any] = DecoderConfig
    model_types: ClassVar[Any] = FAMILIES
    suffix: ClassVar[str] = ""  # of the names of transformers' classes
    score_bias: ClassVar[bool] = False

    decoder: Decoder
    dropout: eqx.nn.Dropout
    score: eqx.nn.Linear
    config: Any = eqx.field(static=True)

    def __init__(self, config: DecoderConfig, *, decoder: Decoder | None = None, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: that of a family, with `n_classes`.
        - `decoder`: a trained language model, whose output head is dropped; None for one with initial weights.
        - `key`: draws the weights: those of `decoder` as with its own head, and the score's N(0, `init_std`²).

        Raises ValueError for a config without `n_classes`.
        """
        if config.n_classes is None:
            raise wrong("n_classes", "the number of classes", "None", "Set it in the config.")
        decoder_key, score_key = jax.random.split(key)
        decoder = FAMILIES[config.model_type](config, key=decoder_key) if decoder is None else decoder
        heads = lambda model: (model.head, model.head_bias)  # noqa: E731
        self.decoder = eqx.tree_at(heads, decoder, (None, None), is_leaf=lambda x: x is None)
        self.dropout = eqx.nn.Dropout(config.classifier_dropout)
        width = config.d_model if config.d_embedding is None else config.d_embedding
        options = {"std": config.init_std, "use_bias": self.score_bias}
        self.score = normal_linear(width, config.n_classes, **options, key=score_key)
        self.config = config

    @classmethod
    def of(cls: type[Self], model: Decoder, n_classes: int, *, key: PRNGKeyArray) -> Self:
        """Returns a classifier of a trained language model, to be trained: for one class, a reward model.

        **Arguments:**

        - `key`: draws the weights of the new layer.
        """
        return cls(replace(model.config, n_classes=n_classes), decoder=model, key=key)

    @classmethod
    def config_of(cls, model_type: str) -> type[DecoderConfig]:
        return FAMILIES[model_type].config_class

    @classmethod
    def architectures_of(cls, model_type: str) -> tuple[str, ...]:
        return (FAMILIES[model_type].config_class.stem() + cls.suffix,)

    @classmethod
    def architecture(cls, config: Any) -> str:
        return config.stem() + cls.suffix

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        names = config.disk_names()
        decoder = names.weight_map(shapes_of(cls, config).decoder, config)
        score = names.token_score if cls.score_bias else names.score
        ends = ("weight", "bias") if cls.score_bias else ("weight",)
        head = [StoredTensor(f"{score}.{end}", (f"score.{end}",)) for end in ends]
        return replace(decoder, tensors=[*within("", "decoder.", decoder.tensors), *head], copies={}, untied_by=None)


class SequenceClassifier(_Classifier):
    """A decoder with a head for classes, from token ids to the logits of each class, or to a number. Call it on one example.

    ```python
    model = SequenceClassifier(LlamaConfig(n_classes=2), key=jax.random.key(0))
    logits = model(ids, mask=mask)  # [n_classes]
    ```
    """

    suffix = "ForSequenceClassification"

    def __call__(
        self, ids: Int[Array, " seq"], *, mask: Bool[Array, " seq"] | None = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, " n_classes"]:
        """Returns the logits of the classes, from the hidden state of the last token.

        **Arguments:**

        - `ids`: token ids below `vocab_size`.
        - `mask`: True for tokens, False for padding on either side. Without it, all are tokens, and the last one is that
            before ids equal to the config's `pad_token_id`.
        - `key`: for dropout; not needed in inference.
        """
        hidden = self.decoder.hidden(ids, mask=mask, key=key)
        places = jnp.arange(len(ids))
        if mask is not None:
            last = jnp.max(jnp.where(mask, places, 0))
        elif self.config.pad_token_id is None:
            last = places[-1]
        else:
            last = jnp.max(jnp.where(ids != self.config.pad_token_id, places, 0))
        with jax.named_scope("head"):
            return linear(self.score, hidden[last])


class TokenClassifier(_Classifier):
    """A decoder with a head for classes, from token ids to the logits of each token's classes. Call it on one example.

    ```python
    model = TokenClassifier(LlamaConfig(n_classes=9), key=jax.random.key(0))
    logits = model(ids, mask=mask, key=key)  # [seq, n_classes]
    ```
    """

    suffix = "ForTokenClassification"
    score_bias = True

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq n_classes"]:
        """Returns the logits of each token's classes. See `Decoder` for the arguments."""
        keys = (None, None) if key is None else jax.random.split(key)
        hidden = self.decoder.hidden(ids, mask=mask, segments=segments, key=keys[0])
        with jax.named_scope("head"):
            return linear(self.score, self.dropout(hidden, key=keys[1]))
