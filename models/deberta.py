"""DeBERTa-v3: a post-norm encoder whose attention adds products with vectors of distances, in place of positions.

Sources: He et al. 2020, *DeBERTa: Decoding-enhanced BERT with Disentangled Attention* (arXiv:2006.03654); He et al. 2021,
*DeBERTaV3* (arXiv:2111.09543); their code, github.com/microsoft/DeBERTa. The models of version 2 have a convolution after
the first block: their folders are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import INTEGER, RATE, TEXT
from .encoder import Encoder, EncoderConfig, MaskedLM, Names, SequenceClassifier, TokenClassifier, rows
from .hf import ConfigReader, Field, Only, Row, published


class _Terms(Row):
    """The products that are added to the scores: a list, or a text with bars."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        value = reader.get("pos_att_type", None)
        terms = value.lower().split("|") if isinstance(value, str) else value if isinstance(value, list) else []
        if sorted(str(term).strip() for term in terms) != ["c2p", "p2c"]:
            raise reader.refuse("pos_att_type", value, "c2p and p2c")
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        return {"pos_att_type": ["p2c", "c2p"]}


def _names(*, is_legacy: bool) -> Names:
    head = "cls.predictions.transform." if is_legacy else "lm_predictions.lm_head."
    return Names(
        base="deberta.",
        encoder={
            "embedding": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings.weight",
            "norm": "embeddings.LayerNorm",
            "distances": "encoder.rel_embeddings.weight",
            "distance_norm": "encoder.LayerNorm",
        },
        block={
            "attention.query": "attention.self.query_proj",
            "attention.key": "attention.self.key_proj",
            "attention.value": "attention.self.value_proj",
            "attention.output": "attention.output.dense",
            "attention_norm": "attention.output.LayerNorm",
            "mlp.up": "intermediate.dense",
            "mlp.down": "output.dense",
            "mlp_norm": "output.LayerNorm",
        },
        masked={
            "transform": f"{head}dense",
            "norm": f"{head}LayerNorm",
            "logits_bias": "cls.predictions.bias" if is_legacy else f"{head}bias",
        },
        texts={"transform": "pooler.dense", "classifier": "classifier"},
        heads=("cls.*", "lm_predictions.*", "mask_predictions.*", "pooler.*", "classifier.*"),
        # Published folders have several heads; absolute positions are left from training.
        unused=("mask_predictions.*", "lm_predictions.*" if is_legacy else "cls.*", "*.position_embeddings.weight"),
    )


@dataclass(frozen=True)
class DebertaConfig(EncoderConfig):
    """The sizes and dropout rates of a DeBERTa-v3: an `EncoderConfig` with other defaults, which are those of the published
    base model.

    **Arguments:**

    - `is_legacy`: whether the head for masked tokens has BERT's names, as `transformers` writes it by default. The published
        folders have another one, without the key that says so: pass `is_legacy=False` to `from_pretrained`.
    """

    vocab_size, n_token_types = 128100, 0
    layer_norm_eps = 1e-7
    position_kind, n_buckets = "distances", 256
    has_pooler = False
    head_activation = "gelu"
    model_type = "deberta-v2"
    is_legacy: bool = True

    architectures = MappingProxyType({"deberta-v2": "DebertaV2"})
    has_transform = True
    rows = rows(
        {"deberta-v2": {}},
        Only("relative_attention", True, default=False),
        Only("position_biased_input", False, default=True),
        Only("share_att_key", True, default=False),
        Only("norm_rel_ebd", "layer_norm", default="none"),
        Only("conv_kernel_size", 0),
        Only("pooler_dropout", 0, 0.0),
        Only("type_vocab_size", 0),
        Field("hidden_size", "d_model", default=1536),
        Only("embedding_size", lambda known: (None, known["d_model"]), is_written=False),
        _Terms(),
        Field("intermediate_size", "d_ff", default=6144),
        Field("num_hidden_layers", "n_layers", default=24, via=ConfigReader.layers),
        Field("num_attention_heads", "n_heads", default=24),
        Field(
            "position_buckets",
            "n_buckets",
            INTEGER,
            default=-1,
            load=lambda n, known: max(n, 0),
            save=lambda config: config.n_buckets or -1,
        ),
        Field(
            "max_relative_positions",
            "max_distance",
            INTEGER,
            default=-1,
            load=lambda n, known: None if n < 1 else n,
            save=lambda config: -1 if config.max_distance is None else config.max_distance,
        ),
        Field("pooler_hidden_act", "head_activation", TEXT),
        Field("cls_dropout", "classifier_dropout", RATE),
        Field("legacy", "is_legacy"),
        without=("n_token_types",),
    )

    names = property(lambda config: _names(is_legacy=config.is_legacy))
    token_head_dropout = property(lambda config: config.dropout)

    sizes = published(
        {
            "xsmall": {"d_model": 384, "d_ff": 1536, "n_layers": 12, "n_heads": 6},
            "small": {"n_layers": 6},
            "base": {},
            "large": {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16},
        }
    )


class Deberta(Encoder, config=DebertaConfig, init=False):
    """DeBERTa without a head, from token ids to hidden states: see `Encoder`."""


class DebertaForMaskedLM(MaskedLM, config=DebertaConfig, init=False):
    """DeBERTa for masked language modeling: see `MaskedLM`."""


class DebertaForSequenceClassification(SequenceClassifier, config=DebertaConfig, init=False):
    """DeBERTa with a classification head for texts: see `SequenceClassifier`."""


class DebertaForTokenClassification(TokenClassifier, config=DebertaConfig, init=False):
    """DeBERTa with a classification head for tokens: see `TokenClassifier`."""
