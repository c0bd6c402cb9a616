"""BERT: a bidirectional post-norm encoder, with heads for masked tokens and for classes.

Source: Devlin et al. 2019, *BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*
(arXiv:1810.04805), and its code, github.com/google-research/bert. Positions are learned. It differs from that code in one
point: it has no next-sentence head.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .encoder import BERT, Encoder, EncoderConfig, MaskedLM, SequenceClassifier, TokenClassifier, rows
from .hf import published

_LARGE = {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16}


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The sizes and dropout rates of a BERT: an `EncoderConfig`, whose defaults are BERT's. The defaults are those of
    `transformers`, with the sizes of the smaller published model."""

    architectures = MappingProxyType({"bert": "Bert"})
    rows = rows({"bert": {}}, *BERT)
    sizes = published(
        {
            "base-uncased": {},
            "base-cased": {"vocab_size": 28996},
            "base-multilingual-cased": {"vocab_size": 119547},
            "large-uncased": _LARGE,
            "large-cased": {**_LARGE, "vocab_size": 28996},
        }
    )


class Bert(Encoder, config=BertConfig, init=False):
    """BERT without a head, from token ids to hidden states: see `Encoder`."""


class BertForMaskedLM(MaskedLM, config=BertConfig, init=False):
    """BERT for masked language modeling: see `MaskedLM`."""


class BertForSequenceClassification(SequenceClassifier, config=BertConfig, init=False):
    """BERT with a classification head for texts: see `SequenceClassifier`."""


class BertForTokenClassification(TokenClassifier, config=BertConfig, init=False):
    """BERT with a classification head for tokens: see `TokenClassifier`."""
