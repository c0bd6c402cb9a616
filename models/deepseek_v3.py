"""DeepSeek-V3: latent attention, and experts that are chosen by sigmoids with a correction that balances them.

They are in groups, of which those with the two best experts are chosen. The last layer of its files, which predicts another
token, is not read. Folders of Kimi K2 (`kimi_k2`) have the same class and layout.

Source: *DeepSeek-V3* (arXiv:2412.19437).
"""

from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import COUNT
from .decoder import GROUPED, LATENT, LATENT_NAMES, Decoder, Names, expert_names, rows
from .deepseek import DeepseekV2Config
from .hf import Field, Only, published


@dataclass(frozen=True)
class DeepseekV3Config(DeepseekV2Config):
    """The sizes of a DeepSeek-V3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 129280
    n_positions: int = 4096
    d_model: int = 7168
    d_mlp: int | None = 18432
    n_layers: int = 61
    n_heads: int = 128
    n_experts: int = 256
    n_chosen: int = 8
    d_expert: int | None = 2048
    d_shared: int = 2048
    n_dense: int = 3
    n_expert_groups: int = 8
    n_chosen_groups: int = 4
    router_score: str = "sigmoid"
    router_scale: float = 2.5
    has_correction: bool = True
    renormalize: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1

    model_type = "deepseek_v3"
    rows = rows(
        *LATENT,
        *GROUPED,
        Field("first_k_dense_replace", "n_dense", COUNT),
        Field("attention_bias"),
        Only("moe_layer_freq", 1, is_written=False),
        Field("rope_interleave", "is_interleaved"),
        Only("scoring_func", "sigmoid", is_written=False),
        Only("topk_method", "noaux_tc", is_written=False),
        Only("num_nextn_predict_layers", 0, 1, default=1),
        without=("n_kv_heads", "head_size"),
    )
    aliases = MappingProxyType({"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"})
    names = Names({**expert_names(), **LATENT_NAMES}, ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"))
    sizes = published({"671b": {}})


class DeepseekV3(Decoder, config=DeepseekV3Config, init=False):
    """A DeepSeek-V3, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("deepseek_v3", "kimi_k2")
