"""Mellum 2: Qwen3 with experts, windows in some layers, and another base of rotary positions in those.

Source: the models' cards, huggingface.co/JetBrains.
"""

from dataclasses import dataclass

from .decoder import Decoder, LayerTypes, MlpTypes, Names, Rope, expert_names, rows
from .hf import Aliases, Fields
from .qwen_moe import Qwen3MoeConfig


@dataclass(frozen=True)
class MellumConfig(Qwen3MoeConfig):
    """The sizes of a Mellum 2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 98304, 131072
    d_model, d_mlp, n_layers = 2304, 7168, 28
    head_size = 128
    window = 1024
    rope_theta, local_rope_theta = 500000.0, 10000.0
    n_experts, d_expert = 64, 896
    renormalize = True

    model_type = "mellum"
    window_period = 1
    rows = rows(
        *Fields("attention_bias", d_expert="moe_intermediate_size", n_experts="num_local_experts"),
        *Fields(n_chosen="num_experts_per_tok", renormalize="norm_topk_prob"),
        LayerTypes(),
        MlpTypes(),
        Rope(has_local=True),
    )
    aliases = Aliases(num_experts="num_local_experts")
    names = Names(expert_names(), ignored=("*.rotary_emb.inv_freq", "mtp.*"))


class Mellum(Decoder, config=MellumConfig, init=False):
    """A Mellum 2, from token ids to the logits of each next token. See `Decoder`."""
