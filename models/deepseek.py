"""DeepSeek-V2: latent attention, and experts of which some get all tokens, after a first layer without experts.

Source: *DeepSeek-V2* (arXiv:2405.04434).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import COUNT, SIZE
from .decoder import LATENT, LATENT_NAMES, ROUTED, Decoder, DecoderConfig, Names, expert_names, rows
from .hf import Aliases, ConfigReader, Field, Only, Row, published


class _Groups(Row):
    """The groups of experts, which V2 has only by one of its methods."""

    keys = MappingProxyType({"n_expert_groups": "n_group", "n_chosen_groups": "topk_group"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        method = reader.only("topk_method", "greedy", "group_limited_greedy")
        n_groups, n_chosen = reader.get("n_group", 1, SIZE), reader.get("topk_group", 1, SIZE)
        return {"n_expert_groups": n_groups, "n_chosen_groups": n_chosen} if method != "greedy" else {}

    def write(self, config: Any) -> dict[str, Any]:
        n_groups = config.n_expert_groups
        method = "greedy" if n_groups == config.n_chosen_groups else "group_limited_greedy"
        return {"topk_method": method, "n_group": n_groups, "topk_group": config.n_chosen_groups}


@dataclass(frozen=True)
class DeepseekV2Config(DecoderConfig):
    """The sizes of a DeepSeek-V2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 102400
    latent_size, query_latent_size = 512, 1536
    plain_size, shared_rotary_size, value_size = 128, 64, 128
    is_interleaved = True
    n_experts, n_chosen, d_expert, d_shared = 64, 6, 1407, 2814
    renormalize = False

    model_type = "deepseek_v2"
    wide_routers = ("router", "correction")
    rows = rows(
        *LATENT,
        *ROUTED,
        Field("first_k_dense_replace", "n_dense", COUNT),
        Field("attention_bias"),
        Only("moe_layer_freq", 1, is_written=False),
        _Groups(),
        Only("mlp_bias", False),
        Only("scoring_func", "softmax", is_written=False),
        Only("norm_topk_prob", False, None),
        without=("n_kv_heads", "head_size"),
    )
    aliases = Aliases(num_experts="n_routed_experts")
    names = Names({**expert_names(), **LATENT_NAMES})
    sizes = published(
        {
            "lite": {"d_model": 2048, "d_mlp": 10944, "n_layers": 27, "n_heads": 16, "query_latent_size": None,
                     "d_expert": 1408, "d_shared": 2816},
            "236b": {"d_model": 5120, "d_mlp": 12288, "n_layers": 60, "n_heads": 128, "n_experts": 160, "router_scale": 16.0,
                     "n_expert_groups": 8, "n_chosen_groups": 3, "d_expert": 1536, "d_shared": 3072},
        },
        n_dense=1,
        bos_token_id=100000,
        eos_token_id=100001,
    )  # fmt: skip


class DeepseekV2(Decoder, config=DeepseekV2Config, init=False):
    """A DeepSeek-V2, from token ids to the logits of each next token. See `Decoder`."""
