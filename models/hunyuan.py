"""Hunyuan (dense): LLaMA with norms of each head after rotary positions, whose base is raised for long texts.

Source: the models' cards.
"""

from dataclasses import dataclass

from .decoder import KINDS, Decoder, DecoderConfig, Names, Rope, rows
from .hf import Field


@dataclass(frozen=True)
class HunyuanConfig(DecoderConfig):
    """The sizes of a dense Hunyuan. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 290943
    head_norm = "head"
    norms_rotated = True
    norm_eps = 1e-5
    pad_token_id = 0

    model_type = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    rows = rows(Field("attention_bias"), Rope(kinds=(*KINDS, "alpha")))
    names = Names({"self_attn.query_layernorm": "attention.query_norm", "self_attn.key_layernorm": "attention.key_norm"})


class Hunyuan(Decoder, config=HunyuanConfig, init=False):
    """A dense Hunyuan, from token ids to the logits of each next token. See `Decoder`."""
