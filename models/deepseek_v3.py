"""DeepSeek-V3: latent attention, and experts that are chosen by sigmoids with a correction that balances them.

They are in groups, of which those with the two best experts are chosen. The last layer of its files, which predicts another
token, is not read. Folders of Kimi K2 (`kimi_k2`) have the same class and layout.

Source: *DeepSeek-V3* (arXiv:2412.19437).
"""

from dataclasses import dataclass

from ._kinds import COUNT
from .decoder import GROUPED, LATENT, LATENT_NAMES, Decoder, Names, expert_names, rows
from .deepseek import DeepseekV2Config
from .hf import Aliases, Field, Fixed, Only, published


@dataclass(frozen=True)
class DeepseekV3Config(DeepseekV2Config):
    """The sizes of a DeepSeek-V3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 129280, 4096
    d_model, d_mlp, n_layers, n_heads = 7168, 18432, 61, 128
    n_experts, n_chosen, d_expert, d_shared = 256, 8, 2048, 2048
    n_dense, router_score, router_scale, has_correction = 3, "sigmoid", 2.5, True
    renormalize = True
    n_expert_groups, n_chosen_groups = 8, 4
    bos_token_id, eos_token_id = 0, 1

    model_type = "deepseek_v3"
    rows = rows(
        *LATENT,
        *GROUPED,
        Field("first_k_dense_replace", "n_dense", COUNT),
        Field("attention_bias"),
        Only("moe_layer_freq", 1, is_written=False),
        Field("rope_interleave", "is_interleaved"),
        *Fixed(is_written=False, scoring_func="sigmoid", topk_method="noaux_tc"),
        Only("num_nextn_predict_layers", 0, 1, default=1),
        without=("n_kv_heads", "head_size"),
    )
    aliases = Aliases(num_local_experts="n_routed_experts", num_mtp_layers="num_nextn_predict_layers")
    names = Names({**expert_names(), **LATENT_NAMES}, ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"))
    sizes = published({"671b": {}})


class DeepseekV3(Decoder, config=DeepseekV3Config, init=False):
    """A DeepSeek-V3, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("deepseek_v3", "kimi_k2")
