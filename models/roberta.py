"""RoBERTa and XLM-RoBERTa: BERT whose positions count tokens only, with another head for masked tokens and for classes.

Source: Liu et al. 2019, *RoBERTa: A Robustly Optimized BERT Pretraining Approach* (arXiv:1907.11692), and Conneau et al.
2020, *Unsupervised Cross-lingual Representation Learning at Scale* (arXiv:1911.02116). In their code,
github.com/facebookresearch/fairseq, a token's row of positions is the number of tokens up to it, plus the id of padding.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .encoder import BERT, Encoder, EncoderConfig, MaskedLM, Names, SequenceClassifier, TokenClassifier, rows
from .hf import Field, published

_LARGE = {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16}
_XLM = {"vocab_size": 250002, "model_type": "xlm-roberta"}


@dataclass(frozen=True)
class RobertaConfig(EncoderConfig):
    """The sizes and dropout rates of a RoBERTa: an `EncoderConfig` with other defaults. The defaults are those of
    `transformers`, which are not the published models'.

    **Arguments:**

    - `n_positions`: the maximum length of an example. `max_position_embeddings` is that and `pad_token_id + 1`.
    - `model_type`: `"roberta"`, or `"xlm-roberta"` for the same model with the vocabulary of 100 languages.

    Raises ValueError as `EncoderConfig` does, and without a `pad_token_id`.
    """

    vocab_size, n_positions = 50265, 510
    position_kind = "counted"
    mlm_activation = "gelu"
    bos_token_id, eos_token_id, pad_token_id = 0, 2, 1
    model_type = "roberta"

    architectures = MappingProxyType({"roberta": "Roberta", "xlm-roberta": "XLMRoberta"})
    has_transform = drops_twice = True
    names = Names(
        base="roberta.",
        masked={"transform": "lm_head.dense", "norm": "lm_head.layer_norm", "logits_bias": "lm_head.bias"},
        texts={"transform": "classifier.dense", "classifier": "classifier.out_proj"},
        heads=("lm_head.*", "classifier.*"),
        unused=(),
        decoder="lm_head.decoder",
    )
    rows = rows(
        {"roberta": {}, "xlm-roberta": {"vocab_size": 30522}},
        *BERT,
        Field(
            "max_position_embeddings",
            "n_positions",
            default=512,
            load=lambda n_rows, known: n_rows - 1 - (known["pad_token_id"] or 0),
            save=lambda config: config.n_positions + config.first_position,
        ),
    )
    sizes = published(
        {"base": {}, "large": _LARGE, "xlm-base": _XLM, "xlm-large": {**_LARGE, **_XLM}},
        n_positions=512,
        n_token_types=1,
        layer_norm_eps=1e-5,
    )


class Roberta(Encoder, config=RobertaConfig, init=False):
    """RoBERTa without a head, from token ids to hidden states: see `Encoder`."""


class RobertaForMaskedLM(MaskedLM, config=RobertaConfig, init=False):
    """RoBERTa for masked language modeling: see `MaskedLM`."""


class RobertaForSequenceClassification(SequenceClassifier, config=RobertaConfig, init=False):
    """RoBERTa with a classification head for texts: see `SequenceClassifier`."""


class RobertaForTokenClassification(TokenClassifier, config=RobertaConfig, init=False):
    """RoBERTa with a classification head for tokens: see `TokenClassifier`."""
