"""Hy3: LLaMA with norms of each head, and DeepSeek-V3's experts after a first layer without.

The last layer of its files, which predicts another token, is not read.

Source: the model's card, huggingface.co/tencent/Hy3-preview.
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, MlpTypes, Names, SharedExperts, expert_names, rows
from .hf import Aliases, Field, Fields, Only


@dataclass(frozen=True)
class HYV3Config(DecoderConfig):
    """The sizes of a Hy3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 120832, 131072
    d_mlp, n_layers, n_heads = 13312, 80, 64
    n_kv_heads, head_size = 8, 128
    head_norm = "head"
    rope_theta = 11158840.0
    norm_eps = 1e-5
    n_experts, n_chosen, d_expert, d_shared = 192, 8, 1536, 1536
    n_dense, router_score, router_scale, has_correction = 1, "sigmoid", 2.826, True
    bos_token_id = eos_token_id = None
    init_std = 0.006

    model_type = "hy_v3"
    wide_routers = ("router", "correction")
    rows = rows(
        Field("attention_bias"),
        Only("mlp_bias", False),
        *Fields(d_expert="moe_intermediate_size", n_experts="num_experts", n_chosen="num_experts_per_tok"),
        SharedExperts("num_shared_experts"),
        Field("router_scaling_factor", "router_scale"),
        MlpTypes(),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(
        {
            **{name: held for name, held in expert_names("shared_mlp", "router.gate").items() if held != "mlp.correction"},
            "mlp.expert_bias": "mlp.correction",
        },
        ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"),
    )


class HYV3(Decoder, config=HYV3Config, init=False):
    """A Hy3, from token ids to the logits of each next token. See `Decoder`."""
