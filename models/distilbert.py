"""DistilBERT: BERT with half of the layers and without token types and pooler, trained to imitate it.

Source: Sanh et al. 2019, *DistilBERT, a distilled version of BERT* (arXiv:1910.01108), and its code in
github.com/huggingface/transformers.
"""

from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import RATE, TEXT
from .encoder import Encoder, EncoderConfig, MaskedLM, Names, SequenceClassifier, TokenClassifier, rows
from .hf import Aliases, ConfigReader, Field, Fields, published


@dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """The sizes and dropout rates of a DistilBERT: an `EncoderConfig` with other defaults, which are those of `transformers`
    and of the published model for lower-case English.

    Positions may have been initialized by sines (`sinusoidal_pos_embds`); they are weights like others.
    """

    n_token_types = 0
    n_layers = 6
    classifier_dropout = 0.2
    has_pooler = False
    head_activation = "relu"
    model_type = "distilbert"

    architectures = MappingProxyType({"distilbert": "DistilBert"})
    has_transform = True
    names = Names(
        base="distilbert.",
        encoder={
            "embedding": "embeddings.word_embeddings",
            "positions": "embeddings.position_embeddings.weight",
            "norm": "embeddings.LayerNorm",
        },
        layers="transformer.layer.{}.",
        block={
            "attention.query": "attention.q_lin",
            "attention.key": "attention.k_lin",
            "attention.value": "attention.v_lin",
            "attention.output": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "mlp.up": "ffn.lin1",
            "mlp.down": "ffn.lin2",
            "mlp_norm": "output_layer_norm",
        },
        masked={"transform": "vocab_transform", "norm": "vocab_layer_norm", "logits_bias": "vocab_projector.bias"},
        texts={"transform": "pre_classifier", "classifier": "classifier"},
        heads=("vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*"),
        unused=(),
        decoder="vocab_projector",
    )
    rows = rows(
        {"distilbert": {}},
        *Fields(d_model="dim", d_ff="hidden_dim"),
        Field("n_layers", via=ConfigReader.layers),
        Field("n_heads"),
        Field("activation", kind=TEXT),
        *Fields("dropout", "attention_dropout", kind=RATE, classifier_dropout="seq_classif_dropout"),
        without=("n_token_types", "layer_norm_eps"),
    )
    aliases = Aliases(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers")

    block_dropouts = property(lambda config: (0.0, 0.0, config.dropout))
    token_head_dropout = property(lambda config: config.dropout)

    sizes = published({"uncased": {}, "cased": {"vocab_size": 28996}, "multilingual-cased": {"vocab_size": 119547}})


class DistilBert(Encoder, config=DistilBertConfig, init=False):
    """DistilBERT without a head, from token ids to hidden states: see `Encoder`."""


class DistilBertForMaskedLM(MaskedLM, config=DistilBertConfig, init=False):
    """DistilBERT for masked language modeling: see `MaskedLM`."""


class DistilBertForSequenceClassification(SequenceClassifier, config=DistilBertConfig, init=False):
    """DistilBERT with a classification head for texts: see `SequenceClassifier`."""


class DistilBertForTokenClassification(TokenClassifier, config=DistilBertConfig, init=False):
    """DistilBERT with a classification head for tokens: see `TokenClassifier`."""
