"""Hunyuan: LLaMA with norms of each head after rotary positions, whose base grows in long texts; and with experts.

Source: the models' cards.
"""

from dataclasses import dataclass

from ._kinds import SIZE
from .decoder import KINDS, Decoder, DecoderConfig, Names, Rope, Shared, expert_names, rows
from .hf import Aliases, ConfigReader, Field


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


def _n_chosen(reader: ConfigReader, key: str, default: int) -> int:
    """Reads the number of experts that a token is sent to, which published files hold for each layer."""
    value = reader.get(key, None)
    if isinstance(value, list):
        if len({*value}) != 1:
            raise reader.refuse(key, value, "the same number for all layers")
        value = value[0]
    return default if value is None else SIZE.check(reader.path, key, value)


@dataclass(frozen=True)
class HunyuanMoeConfig(HunyuanConfig):
    """The sizes of a Hunyuan with experts, and an MLP of the same width for all tokens. The defaults are those of
    transformers. See `DecoderConfig`."""

    n_experts, n_chosen, d_shared = 1, 1, 11008

    model_type = "hunyuan_v1_moe"
    architecture = "HunYuanMoEV1ForCausalLM"
    rows = (
        *(row for row in HunyuanConfig.rows if "d_mlp" not in row.keys),
        Shared("intermediate_size", "d_mlp", "d_shared"),
        Field("num_experts", "n_experts"),
        Field("moe_topk", "n_chosen", via=_n_chosen),
    )
    aliases = Aliases(num_experts_per_tok="moe_topk", num_local_experts="num_experts")
    names = Names({**HunyuanConfig.names.block, **expert_names("shared_mlp", "gate.wg")})


class HunyuanMoe(Decoder, config=HunyuanMoeConfig, init=False):
    """A Hunyuan with experts, from token ids to the logits of each next token. See `Decoder`."""
