"""OLMoE: LLaMA with experts, whose queries and keys of a token are normalized all at once.

Source: *OLMoE: Open Mixture-of-Experts Language Models* (arXiv:2409.02060).
"""

from dataclasses import dataclass

from .decoder import CausalLM, CausalLMConfig, Names, expert_names, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class OlmoeConfig(CausalLMConfig):
    """The sizes of an OLMoE, with experts of width `d_mlp`. The defaults are those of transformers. See `CausalLMConfig`."""

    vocab_size: int = 50304
    n_positions: int = 4096
    d_model: int = 2048
    n_layers: int = 16
    n_heads: int = 16
    d_mlp: int | None = 2048
    head_norm: str | None = "all"
    norm_eps: float = 1e-5
    n_experts: int = 64
    n_chosen: int = 8
    renormalize: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1

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


class Olmoe(CausalLM, config=OlmoeConfig, init=False):
    """An OLMoE, from token ids to the logits of each next token. See `CausalLM`."""
