"""GLM-4.5: DeepSeek-V3's experts with GLM's attention; and Solar Open, with LLaMA's.

The last layer of its files, which predicts another token, is not read.

Source: *GLM-4.5* (arXiv:2508.06471), and the models' cards, huggingface.co/zai-org and huggingface.co/upstage.
"""

from dataclasses import dataclass

from ._kinds import COUNT
from .decoder import GROUPED, Choice, Decoder, DecoderConfig, Names, Rope, expert_names, rows
from .hf import Aliases, Field, Only, published


@dataclass(frozen=True)
class Glm4MoeConfig(DecoderConfig):
    """The sizes of a GLM-4.5. The defaults are those of transformers, with its heads. See `DecoderConfig`."""

    vocab_size, n_positions = 151552, 131072
    d_mlp, n_layers, n_heads = 10944, 46, 96
    n_kv_heads, head_size = 8, 128
    output_bias = False
    rope_share = 0.5
    norm_eps = 1e-5
    n_experts, n_chosen, d_expert, d_shared = 128, 8, 1408, 1408
    n_dense, router_score, has_correction = 1, "sigmoid", True
    bos_token_id = eos_token_id = None

    model_type = "glm4_moe"
    wide_routers = ("router", "correction")
    rows = rows(
        *GROUPED,
        Field("first_k_dense_replace", "n_dense", COUNT),
        Field("attention_bias"),
        Choice("use_qk_norm", {"head_norm": (None, "head")}, default=False),
        Rope(has_share=True),
        Only("num_nextn_predict_layers", 0, 1, default=1),
    )
    aliases = Aliases(num_local_experts="n_routed_experts", num_mtp_layers="num_nextn_predict_layers")
    names = Names(expert_names(), ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"))
    sizes = published(
        {
            "4.5-air": {},
            "4.5": {"d_model": 5120, "d_mlp": 12288, "n_layers": 92, "n_experts": 160, "d_expert": 1536, "d_shared": 1536,
                    "n_dense": 3, "head_norm": "head", "router_scale": 2.5},
        },
        attention_bias=True, rope_theta=1e6, eos_token_id=(151329, 151336, 151338), pad_token_id=151329,
    )  # fmt: skip


class Glm4Moe(Decoder, config=Glm4MoeConfig, init=False):
    """A GLM-4.5, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class SolarOpenConfig(Glm4MoeConfig):
    """The sizes of a Solar Open, which has experts in all layers. The defaults are those of transformers. See
    `DecoderConfig`."""

    vocab_size = 196608
    n_layers, n_heads = 48, 64
    rope_theta, rope_share = 1e6, 1.0
    d_expert = d_shared = 1280
    n_dense = 0

    model_type = "solar_open"
    rows = rows(*GROUPED, Field("attention_bias"), without=("d_mlp",))
    aliases = Aliases(num_local_experts="n_routed_experts")
    names = Names(expert_names())


class SolarOpen(Decoder, config=SolarOpenConfig, init=False):
    """A Solar Open, from token ids to the logits of each next token. See `Decoder`."""
