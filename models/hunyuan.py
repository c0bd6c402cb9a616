"""Hunyuan (dense): LLaMA with norms of each head after rotary positions, whose base is raised for long texts.

Source: the models' cards.
"""

from dataclasses import dataclass

from .decoder import KINDS, Decoder, DecoderConfig, Names, Rope, rows
from .hf import Field


@dataclass(frozen=True)
class HunyuanConfig(DecoderConfig):
    """The sizes of a dense Hunyuan. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 290943
    head_norm: str | None = "head"
    norms_rotated: bool = True
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0

    model_type = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    rows = rows(Field("attention_bias"), Rope(kinds=(*KINDS, "alpha")))
    names = Names(
        {
            "self_attn.query_layernorm": "attention.query_norm",
            "self_attn.key_layernorm": "attention.key_norm",
        }
    )


class Hunyuan(Decoder, config=HunyuanConfig, init=False):
    """A dense Hunyuan, from token ids to the logits of each next token. See `Decoder`."""
