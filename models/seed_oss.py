"""Seed-OSS: LLaMA with biases of queries, keys and values.

Source: the model's card, huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from dataclasses import dataclass

from ._kinds import RATE
from .decoder import Decoder, DecoderConfig, rows
from .hf import Field, published


@dataclass(frozen=True)
class SeedOssConfig(DecoderConfig):
    """The sizes of a Seed-OSS. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 155136
    n_positions: int = 524288
    n_layers: int = 64
    n_heads: int = 80
    d_mlp: int | None = 27648
    n_kv_heads: int | None = 8
    head_size: int | None = 128
    attention_bias: bool = True
    output_bias: bool | None = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1

    model_type = "seed_oss"
    rows = rows(
        Field("attention_bias"),
        Field("attention_out_bias", "output_bias"),
        Field("mlp_bias"),
        Field("residual_dropout", kind=RATE),
    )
    sizes = published({"36b": {"d_model": 5120, "rope_theta": 10000000.0}})


class SeedOss(Decoder, config=SeedOssConfig, init=False):
    """A Seed-OSS, from token ids to the logits of each next token. See `Decoder`."""
