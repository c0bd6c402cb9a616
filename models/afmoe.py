"""AFMoE, the architecture of Trinity: EXAONE 4's windows, a gated attention, norms on both sides, and DeepSeek's experts.

Source: the models' cards, huggingface.co/arcee-ai.
"""

from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import COUNT
from .decoder import Choice, Decoder, LayerTypes, Names, SharedExperts, expert_names, rows
from .exaone import Exaone4Config
from .hf import Field, Only, published


@dataclass(frozen=True)
class AfmoeConfig(Exaone4Config):
    """The sizes of an AFMoE. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 200192
    n_positions: int = 16384
    d_model: int = 2048
    d_mlp: int | None = 6144
    n_heads: int = 16
    head_size: int | None = 128
    window: int | None = 1024
    gates_attention: bool = True
    norm_places: str = "both"
    n_experts: int = 64
    n_chosen: int = 6
    d_expert: int | None = 1408
    d_shared: int = 2816
    n_dense: int = 1
    router_score: str = "sigmoid"
    has_correction: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    model_type = "afmoe"
    wide_routers = ("correction",)
    rows = rows(
        LayerTypes("global_attn_every_n_layers"),
        Field("num_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        Field("moe_intermediate_size", "d_expert"),
        SharedExperts("num_shared_experts"),
        Field("num_dense_layers", "n_dense", COUNT),
        Field("route_scale", "router_scale"),
        Choice("mup_enabled", MappingProxyType({"embedding_scale": (1.0, None)}), default=False),
        Only("attention_bias", False),
    )
    names = Names(
        {
            "self_attn.gate_proj": "attention.gate",
            "post_attention_layernorm": "attention_post_norm",
            "pre_mlp_layernorm": "mlp_norm",
            "post_mlp_layernorm": "mlp_post_norm",
            **{name: held for name, held in expert_names(gate="router.gate").items() if held != "mlp.correction"},
            "mlp.expert_bias": "mlp.correction",
        }
    )
    sizes = published({})

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions: those with a window."""
        return tuple(window is not None for window in self.windows)


class Afmoe(Decoder, config=AfmoeConfig, init=False):
    """An AFMoE, from token ids to the logits of each next token. See `Decoder`."""
