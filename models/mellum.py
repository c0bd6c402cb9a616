"""Mellum 2: Qwen3 with experts, windows in some layers, and another base of rotary positions in those.

Source: the models' cards, huggingface.co/JetBrains.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .decoder import Decoder, LayerTypes, MlpTypes, Names, Rope, expert_names, rows
from .hf import Field, published
from .qwen_moe import Qwen3MoeConfig


@dataclass(frozen=True)
class MellumConfig(Qwen3MoeConfig):
    """The sizes of a Mellum 2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 98304
    n_positions: int = 131072
    d_model: int = 2304
    d_mlp: int | None = 7168
    n_layers: int = 28
    head_size: int | None = 128
    window: int | None = 1024
    rope_theta: float = 500000.0
    local_rope_theta: float | None = 10000.0
    n_experts: int = 64
    d_expert: int | None = 896
    renormalize: bool = True

    model_type = "mellum"
    window_period = 1
    rows = rows(
        Field("attention_bias"),
        Field("moe_intermediate_size", "d_expert"),
        Field("num_local_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        Field("norm_topk_prob", "renormalize"),
        LayerTypes(),
        MlpTypes(),
        Rope(has_local=True),
    )
    aliases = MappingProxyType({"num_experts": "num_local_experts"})
    names = Names(expert_names(), ignored=("*.rotary_emb.inv_freq", "mtp.*"))
    sizes = published({})


class Mellum(Decoder, config=MellumConfig, init=False):
    """A Mellum 2, from token ids to the logits of each next token. See `Decoder`."""
