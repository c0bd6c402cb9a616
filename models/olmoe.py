"""OLMoE: LLaMA with experts, whose queries and keys of a token are normalized all at once; and FlexOlmo.

FlexOlmo is an OLMo 2 with the experts of an OLMoE.

Sources: *OLMoE: Open Mixture-of-Experts Language Models* (arXiv:2409.02060); *FlexOlmo* (arXiv:2507.07024).
"""

from dataclasses import dataclass
from types import MappingProxyType

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


@dataclass(frozen=True)
class FlexOlmoConfig(OlmoeConfig):
    """The sizes of a FlexOlmo, with experts of width `d_mlp`. The defaults are those of transformers. See
    `DecoderConfig`."""

    vocab_size: int = 100352
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    d_mlp: int | None = 11008
    rope_theta: float = 500000.0
    norm_eps: float = 1e-6
    norm_places: str = "post"
    n_experts: int = 7
    n_chosen: int = 5
    eos_token_id: int | tuple[int, ...] | None = 100257
    pad_token_id: int | None = 100277

    model_type = "flex_olmo"
    rows = rows(
        Field("attention_bias"),
        Field("num_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        Field("norm_topk_prob", "renormalize"),
    )
    aliases = MappingProxyType({"num_local_experts": "num_experts"})
    names = Names({**Olmo2Config.names.block, **expert_names()})
    sizes = published({})


class FlexOlmo(Decoder, config=FlexOlmoConfig, init=False):
    """A FlexOlmo, from token ids to the logits of each next token. See `Decoder`."""
