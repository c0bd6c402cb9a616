"""A.X-K1: DeepSeek-V3 with a norm after its experts.

Published files have that norm in layers without experts, too, where it is not used; and no correction of the router.

Source: the model's card, huggingface.co/skt/A.X-K1.
"""

from dataclasses import dataclass, replace
from typing import Any

from .decoder import GROUPED, LATENT, LATENT_NAMES, Decoder, MlpTypes, Names, expert_names, rows
from .deepseek_v3 import DeepseekV3Config
from .hf import Aliases, Field, Only, WeightMap


@dataclass(frozen=True)
class AXK1Config(DeepseekV3Config):
    """The sizes of an A.X-K1. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 163840, 32768
    n_heads = 64
    n_experts, n_dense = 192, 1
    bos_token_id = eos_token_id = 163691

    model_type = "axk1"
    norms_experts = True
    rows = rows(
        *LATENT,
        *GROUPED,
        MlpTypes("first_k_dense_replace"),
        Field("attention_bias"),
        Field("rope_interleave", "is_interleaved"),
        Only("moe_layer_freq", 1, is_written=False),
        Only("scoring_func", "sigmoid", is_written=False),
        without=("n_kv_heads", "head_size"),
    )
    aliases = Aliases(num_local_experts="n_routed_experts")
    names = Names(
        {**expert_names(), **LATENT_NAMES, "post_mlp_layernorm": "mlp_post_norm"},
        ignored=("*.rotary_emb.inv_freq", "*.post_mlp_layernorm.*"),
    )


class AXK1(Decoder, config=AXK1Config, init=False):
    """An A.X-K1, from token ids to the logits of each next token. See `Decoder`."""

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves. A router without a correction has one of zeros."""
        found = super().weight_map(config)
        corrections = (tensor for tensor in found.tensors if tensor.leaves[0].endswith("mlp.correction"))
        return replace(found, zeros=tuple(name for tensor in corrections for name in tensor.on_disk))
