"""BERT: a bidirectional post-norm encoder, with heads for masked tokens and for classes.

Source: Devlin et al. 2019, *BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*
(arXiv:1810.04805), and its code, github.com/google-research/bert. Positions are learned. It differs from that code in one
point: it has no next-sentence head.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxtyping import PRNGKeyArray

from .encoder import Encoder, EncoderConfig, MaskedLM, SequenceClassifier, TokenClassifier, rows


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The sizes and dropout rates of a BERT: an `EncoderConfig`, whose defaults are BERT's. The defaults are those of
    `transformers`, with the sizes of the smaller published model."""

    architectures = MappingProxyType({"bert": "Bert"})
    rows = rows({"bert": {}})

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


class Bert(Encoder):
    """BERT without a head, from token ids to hidden states: see `Encoder`."""

    config_class = BertConfig

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        super().__init__(config, key=key)


class BertForMaskedLM(MaskedLM):
    """BERT for masked language modeling: see `MaskedLM`."""

    config_class = BertConfig

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        super().__init__(config, key=key)


class BertForSequenceClassification(SequenceClassifier):
    """BERT with a classification head for texts: see `SequenceClassifier`."""

    config_class = BertConfig

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        super().__init__(config, key=key)


class BertForTokenClassification(TokenClassifier):
    """BERT with a classification head for tokens: see `TokenClassifier`."""

    config_class = BertConfig

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        super().__init__(config, key=key)
