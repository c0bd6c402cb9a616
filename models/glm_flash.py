"""GLM-4.7-Flash: DeepSeek-V3's experts and latent attention.

The last layer of its files, which predicts another token, is not read.

Source: the model's card, huggingface.co/zai-org/GLM-4.7-Flash.
"""

from dataclasses import dataclass

from .decoder import GROUPED, LATENT, LATENT_NAMES, Decoder, MlpTypes, Names, expert_names, rows
from .deepseek_v3 import DeepseekV3Config
from .hf import Aliases, Fields


@dataclass(frozen=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """The sizes of a GLM-4.7-Flash. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 154880, 202752
    d_model, d_mlp, n_layers, n_heads = 2048, 10240, 47, 20
    query_latent_size = 768
    plain_size, value_size = 192, 256
    norm_eps = 1e-5
    n_experts, n_chosen, d_expert, d_shared = 64, 4, 1536, 1536
    n_dense, router_scale = 1, 1.8
    n_expert_groups = n_chosen_groups = 1

    model_type = "glm4_moe_lite"
    wide_routers = ("router", "correction")
    rows = rows(
        *LATENT,
        *GROUPED,
        MlpTypes(),
        *Fields("attention_bias", is_interleaved="rope_interleave"),
        without=("n_kv_heads", "head_size"),
    )
    aliases = Aliases(num_local_experts="n_routed_experts", head_dim="qk_rope_head_dim")
    names = Names({**expert_names(), **LATENT_NAMES}, ignored=("*.rotary_emb.inv_freq", "model.layers.{n_layers}.*"))


class Glm4MoeLite(Decoder, config=Glm4MoeLiteConfig, init=False):
    """A GLM-4.7-Flash, from token ids to the logits of each next token. See `Decoder`."""
