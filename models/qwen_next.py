"""Qwen3-Next: three of four layers have a gated delta rule, the others a gated attention, and all have many small experts.

The layers that predict further tokens, `mtp` in its files, are not read.

Sources: Qwen team 2025, *Qwen3-Next*; *Gated Delta Networks* (arXiv:2412.06464); *Gated Attention* (arXiv:2505.06708).
"""

from dataclasses import dataclass

from .decoder import DELTA, DELTA_NAMES, EXPERTS, ByHead, Decoder, DecoderConfig, Names, Rope, expert_names, rows
from .hf import Aliases, Field, published


def _key_heads(config: DecoderConfig) -> int:
    return config.state_groups


@dataclass(frozen=True)
class Qwen3NextConfig(DecoderConfig):
    """The sizes of a Qwen3-Next. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 151936, 32768
    d_model, d_mlp, n_layers, n_heads = 2048, 5632, 48, 16
    n_kv_heads, head_size = 2, 256
    head_norm = "head"
    gates_attention = True
    rope_share = 0.25
    norm = "offset_rms"
    n_experts, n_chosen, d_expert, d_shared = 512, 10, 512, 512
    gates_shared = True
    bos_token_id = eos_token_id = None

    model_type = "qwen3_next"
    attention_period = 4
    rows = rows(
        *DELTA, Rope(has_share=True), Field("attention_bias"), Field("shared_expert_intermediate_size", "d_shared"), *EXPERTS
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(
        {
            **expert_names("shared_expert"),
            **DELTA_NAMES,
            "linear_attn.in_proj_qkvz": ByHead(("mixer.query", "mixer.key", "mixer.value", "mixer.gate"), _key_heads),
            "linear_attn.in_proj_ba": ByHead(("mixer.strength", "mixer.decay"), _key_heads),
        },
        ignored=("*.rotary_emb.inv_freq", "mtp.*"),
    )
    sizes = published(
        {"80b-a3b": {"d_mlp": 5120}}, n_positions=262144, rope_theta=1e7, bos_token_id=151643, eos_token_id=151645
    )


class Qwen3Next(Decoder, config=Qwen3NextConfig, init=False):
    """A Qwen3-Next, from token ids to the logits of each next token. See `Decoder`."""
