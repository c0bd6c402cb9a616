"""Hy3: LLaMA with norms of each head, and DeepSeek-V3's experts after a first layer without.

The last layer of its files, which predicts another token, is not read.

Source: the model's card, huggingface.co/tencent/Hy3-preview.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .decoder import Decoder, DecoderConfig, MlpTypes, Names, SharedExperts, expert_names, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class HYV3Config(DecoderConfig):
    """The sizes of a Hy3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 120832
    n_positions: int = 131072
    d_mlp: int | None = 13312
    n_layers: int = 80
    n_heads: int = 64
    n_kv_heads: int | None = 8
    head_size: int | None = 128
    head_norm: str | None = "head"
    rope_theta: float = 11158840.0
    norm_eps: float = 1e-5
    n_experts: int = 192
    n_chosen: int = 8
    d_expert: int | None = 1536
    d_shared: int = 1536
    n_dense: int = 1
    router_score: str = "sigmoid"
    router_scale: float = 2.826
    has_correction: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    init_std: float = 0.006

    model_type = "hy_v3"
    wide_routers = ("router", "correction")
    rows = rows(
        Field("attention_bias"),
        Only("mlp_bias", False),
        Field("moe_intermediate_size", "d_expert"),
        Field("num_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        SharedExperts("num_shared_experts"),
        Field("router_scaling_factor", "router_scale"),
        MlpTypes(),
    )
    aliases = MappingProxyType({"num_local_experts": "num_experts"})
    names = Names(
        {
            **{name: held for name, held in expert_names("shared_mlp", "router.gate").items() if held != "mlp.correction"},
            "mlp.expert_bias": "mlp.correction",
        },
        ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"),
    )
    sizes = published({})


class HYV3(Decoder, config=HYV3Config, init=False):
    """A Hy3, from token ids to the logits of each next token. See `Decoder`."""
