"""OLMoE: LLaMA with experts, whose queries and keys of a token are normalized all at once.

Source: *OLMoE: Open Mixture-of-Experts Language Models* (arXiv:2409.02060).
"""

from dataclasses import dataclass

from .decoder import Decoder, Names, expert_names, rows
from .hf import Field, Only, published
from .olmo import Olmo2Config


@dataclass(frozen=True)
class OlmoeConfig(Olmo2Config):
    """The sizes of an OLMoE, with experts of width `d_mlp`. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions: int = 4096
    d_model: int = 2048
    n_layers: int = 16
    n_heads: int = 16
    d_mlp: int | None = 2048
    n_experts: int = 64
    n_chosen: int = 8
    renormalize: bool = False
    norm_places: str = "pre"

    model_type = "olmoe"
    rows = rows(
        Field("attention_bias"),
        Field("num_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        Field("norm_topk_prob", "renormalize"),
        Only("clip_qkv", None),
        without=("head_size",),
    )
    names = Names(expert_names())
    sizes = published({"1b-7b": {"d_mlp": 1024}})


class Olmoe(Decoder, config=OlmoeConfig, init=False):
    """An OLMoE, from token ids to the logits of each next token. See `Decoder`."""
