"""AFMoE, the architecture of Trinity: EXAONE 4's windows, a gated attention, norms on both sides, and DeepSeek's experts.

Source: the models' cards, huggingface.co/arcee-ai.
"""

from dataclasses import dataclass

from ._kinds import COUNT
from .decoder import Choice, Decoder, DecoderConfig, LayerTypes, Names, SharedExperts, expert_names, rows
from .hf import Field, Fields, Only


@dataclass(frozen=True)
class AfmoeConfig(DecoderConfig):
    """The sizes of an AFMoE. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 200192, 16384
    d_model, d_mlp, n_heads = 2048, 6144, 16
    head_size = 128
    window = 1024
    gates_attention = True
    head_norm = "head"
    norm_eps, norm_places = 1e-5, "both"
    n_experts, n_chosen, d_expert, d_shared = 64, 6, 1408, 2816
    n_dense, router_score, has_correction = 1, "sigmoid", True
    bos_token_id = eos_token_id = None

    model_type = "afmoe"
    wide_routers = ("correction",)
    window_period = 4
    rotates_windows_only = True
    rows = rows(
        LayerTypes("global_attn_every_n_layers"),
        *Fields(n_experts="num_experts", n_chosen="num_experts_per_tok", d_expert="moe_intermediate_size"),
        SharedExperts("num_shared_experts"),
        Field("num_dense_layers", "n_dense", COUNT),
        Field("route_scale", "router_scale"),
        Choice("mup_enabled", {"embedding_scale": (1.0, None)}, default=False),
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


class Afmoe(Decoder, config=AfmoeConfig, init=False):
    """An AFMoE, from token ids to the logits of each next token. See `Decoder`."""
