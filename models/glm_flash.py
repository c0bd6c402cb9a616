"""GLM-4.7-Flash: DeepSeek-V3's experts and latent attention.

The last layer of its files, which predicts another token, is not read.

Source: the model's card, huggingface.co/zai-org/GLM-4.7-Flash.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import LIST
from .decoder import GROUPED, LATENT, LATENT_NAMES, Decoder, Names, expert_names, rows
from .deepseek_v3 import DeepseekV3Config
from .hf import ConfigReader, Field, Row, published


class _MlpTypes(Row):
    """The kind of each layer's MLP. Only the first ones may be without experts."""

    keys = MappingProxyType({"n_dense": "mlp_layer_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = known["n_layers"]
        types = reader.get("mlp_layer_types", ["dense", *["sparse"] * (n_layers - 1)], LIST)
        n_dense = types.count("dense")
        if types != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
            raise reader.refuse("mlp_layer_types", types, f"dense layers, and then sparse ones, {n_layers} in all")
        return {"n_dense": n_dense}

    def write(self, config: Any) -> dict[str, Any]:
        return {"mlp_layer_types": ["dense"] * config.n_dense + ["sparse"] * (config.n_layers - config.n_dense)}


@dataclass(frozen=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """The sizes of a GLM-4.7-Flash. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 154880
    n_positions: int = 202752
    d_model: int = 2048
    d_mlp: int | None = 10240
    n_layers: int = 47
    n_heads: int = 20
    query_latent_size: int | None = 768
    plain_size: int = 192
    value_size: int = 256
    norm_eps: float = 1e-5
    n_experts: int = 64
    n_chosen: int = 4
    d_expert: int | None = 1536
    d_shared: int = 1536
    n_dense: int = 1
    router_scale: float = 1.8
    n_expert_groups: int = 1
    n_chosen_groups: int = 1

    model_type = "glm4_moe_lite"
    wide_routers = ("router", "correction")
    rows = rows(
        *LATENT,
        *GROUPED,
        _MlpTypes(),
        Field("attention_bias"),
        Field("rope_interleave", "is_interleaved"),
        without=("n_kv_heads", "head_size"),
    )
    aliases = MappingProxyType({"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"})
    names = Names({**expert_names(), **LATENT_NAMES}, ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"))
    sizes = published({})


class Glm4MoeLite(Decoder, config=Glm4MoeLiteConfig, init=False):
    """A GLM-4.7-Flash, from token ids to the logits of each next token. See `Decoder`."""
