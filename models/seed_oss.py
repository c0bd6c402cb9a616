"""Seed-OSS: LLaMA with biases of queries, keys and values.

Source: the model's card, huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from dataclasses import dataclass

from ._kinds import RATE
from .decoder import Decoder, DecoderConfig, rows
from .hf import Field, Fields, published


@dataclass(frozen=True)
class SeedOssConfig(DecoderConfig):
    """The sizes of a Seed-OSS. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 155136, 524288
    d_mlp, n_layers, n_heads = 27648, 64, 80
    n_kv_heads, head_size = 8, 128
    attention_bias, output_bias = True, False
    residual_dropout = attention_dropout = 0.1
    bos_token_id, pad_token_id = 0, 1

    model_type = "seed_oss"
    rows = rows(
        *Fields("attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"),
        Field("residual_dropout", kind=RATE),
    )
    sizes = published({"36b": {"d_model": 5120, "rope_theta": 10000000.0}})


class SeedOss(Decoder, config=SeedOssConfig, init=False):
    """A Seed-OSS, from token ids to the logits of each next token. See `Decoder`."""
