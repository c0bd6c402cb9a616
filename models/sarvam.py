"""Sarvam: GLM-4.5's experts with norms of each head, and in the larger one DeepSeek-V3's latent attention.

Source: the models' cards, huggingface.co/sarvamai.
"""

from dataclasses import dataclass

from .decoder import Choice, Decoder, Names, expert_names
from .deepseek_v3 import DeepseekV3Config
from .glm_moe import Glm4MoeConfig
from .hf import Aliases

_OTHER = Aliases(num_experts="n_routed_experts", num_shared_experts="n_shared_experts")  # names in older files


@dataclass(frozen=True)
class SarvamMoEConfig(Glm4MoeConfig):
    """The sizes of a Sarvam. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 262144
    d_mlp, n_layers, n_heads = 8192, 19, 64
    n_kv_heads, head_size = 4, 64
    head_norm = "head"
    rope_theta, rope_share = 8000000.0, 1.0
    norm_eps = 1e-6
    n_chosen, d_expert, d_shared = 6, 1024, 1024
    router_scale = 2.5
    eos_token_id, pad_token_id = 1, 0
    init_std = 0.006

    model_type = "sarvam_moe"
    architecture = "Glm4MoeForCausalLM"
    rows = tuple(
        Choice("use_qk_norm", {"head_norm": (None, "head")}, default=True) if "head_norm" in row.keys else row
        for row in Glm4MoeConfig.rows
    )
    aliases = Aliases(**Glm4MoeConfig.aliases, **_OTHER, use_qkv_bias="attention_bias")
    names = Names(
        {
            **{name: held for name, held in expert_names().items() if held != "mlp.correction"},
            "mlp.gate.expert_bias": "mlp.correction",
            "attention.query_key_value": ("attention.query", "attention.key", "attention.value"),
            "attention.query_layernorm": "attention.query_norm",
            "attention.key_layernorm": "attention.key_norm",
            "attention.dense": "attention.output",
        },
        embedding="model.word_embeddings",
        ignored=Glm4MoeConfig.names.ignored,
    )


class SarvamMoE(Decoder, config=SarvamMoEConfig, init=False):
    """A Sarvam, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("Glm4MoeForCausalLM", "Glm4MoeModel", "SarvamMoEForCausalLM", "SarvamMoEModel")


@dataclass(frozen=True)
class SarvamMLAConfig(DeepseekV3Config):
    """The sizes of a Sarvam with latent attention. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 262144
    d_model, d_mlp, n_layers, n_heads = 4096, 16384, 32, 64
    query_latent_size = None
    n_experts = 128
    n_dense = 1
    n_expert_groups = n_chosen_groups = 1
    init_std = 0.006

    model_type = "sarvam_mla"
    architecture = "DeepseekV3ForCausalLM"
    aliases = Aliases(**DeepseekV3Config.aliases, **_OTHER)


class SarvamMLA(Decoder, config=SarvamMLAConfig, init=False):
    """A Sarvam with latent attention, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("DeepseekV3ForCausalLM", "DeepseekV3Model", "SarvamMLAForCausalLM", "SarvamMLAModel")
