"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts. In Qwen2-MoE all tokens are also sent to one that is gated.

Sources: *Qwen2* (arXiv:2407.10671); *Qwen3* (arXiv:2505.09388).
"""

from dataclasses import dataclass

from .decoder import EXPERTS, Decoder, Names, expert_names, rows
from .hf import Aliases, Field, Fields, Only, published
from .qwen import Qwen2Config, Qwen3Config

_EXPERTS = (*EXPERTS, Only("use_sliding_window", False))


@dataclass(frozen=True)
class Qwen2MoeConfig(Qwen2Config):
    """The sizes of a Qwen2 with experts. The defaults are those of transformers. See `DecoderConfig`."""

    d_model, d_mlp, n_layers, n_heads = 2048, 5632, 24, 16
    n_kv_heads = None
    n_experts, n_chosen, d_expert, d_shared = 60, 4, 1408, 5632
    renormalize, gates_shared = False, True

    model_type = "qwen2_moe"
    rows = rows(
        *Fields(d_shared="shared_expert_intermediate_size", attention_bias="qkv_bias"),
        *_EXPERTS,
        Only("layer_types", lambda known: (None, ["full_attention"] * known["n_layers"]), is_written=False),
        without=("head_size",),
    )
    names = Names(expert_names("shared_expert"))
    sizes = published(
        {
            "1.5-a2.7b": {"n_positions": 8192},
            "57b-a14b": {"d_model": 3584, "d_mlp": 18944, "n_layers": 28, "n_heads": 28, "n_kv_heads": 4, "n_experts": 64,
                         "n_chosen": 8, "d_expert": 2560, "d_shared": 20480, "n_positions": 131072},
        },
        rope_theta=1e6,
        bos_token_id=151643,
        eos_token_id=151643,
    )  # fmt: skip


class Qwen2Moe(Decoder, config=Qwen2MoeConfig, init=False):
    """A Qwen2 with experts, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """The sizes of a Qwen3 with experts. The defaults are those of transformers. See `DecoderConfig`."""

    d_model, d_mlp, n_layers = 2048, 6144, 24
    n_kv_heads, head_size = 4, None
    n_experts, n_chosen, d_expert = 128, 8, 768
    renormalize = False

    model_type = "qwen3_moe"
    rows = rows(Field("attention_bias"), *_EXPERTS)
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(expert_names())
    sizes = published(
        {
            "30b-a3b": {"n_layers": 48},
            "235b-a22b": {"d_model": 4096, "d_mlp": 12288, "d_expert": 1536, "n_layers": 94, "n_heads": 64},
        },
        n_positions=40960, head_size=128, rope_theta=1e6, renormalize=True, bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip


class Qwen3Moe(Decoder, config=Qwen3MoeConfig, init=False):
    """A Qwen3 with experts, from token ids to the logits of each next token. See `Decoder`."""
