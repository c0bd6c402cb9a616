"""Sarvam: GLM-4.5's experts with norms of each head, and in the larger one DeepSeek-V3's latent attention.

Source: the models' cards, huggingface.co/sarvamai.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .decoder import Choice, Decoder, Names, expert_names
from .deepseek_v3 import DeepseekV3Config
from .glm_moe import Glm4MoeConfig
from .hf import published

_OTHER = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}  # names in older files


@dataclass(frozen=True)
class SarvamMoEConfig(Glm4MoeConfig):
    """The sizes of a Sarvam. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 262144
    d_mlp: int | None = 8192
    n_layers: int = 19
    n_heads: int = 64
    n_kv_heads: int | None = 4
    head_size: int | None = 64
    head_norm: str | None = "head"
    rope_share: float = 1.0
    rope_theta: float = 8000000.0
    norm_eps: float = 1e-6
    n_chosen: int = 6
    d_expert: int | None = 1024
    d_shared: int = 1024
    router_scale: float = 2.5
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    init_std: float = 0.006

    model_type = "sarvam_moe"
    architecture = "Glm4MoeForCausalLM"
    rows = tuple(
        Choice("use_qk_norm", MappingProxyType({"head_norm": (None, "head")}), default=True)
        if "head_norm" in row.keys
        else row
        for row in Glm4MoeConfig.rows
    )
    aliases = MappingProxyType({**Glm4MoeConfig.aliases, **_OTHER, "use_qkv_bias": "attention_bias"})
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
    sizes = published({})


class SarvamMoE(Decoder, config=SarvamMoEConfig, init=False):
    """A Sarvam, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("Glm4MoeForCausalLM", "Glm4MoeModel", "SarvamMoEForCausalLM", "SarvamMoEModel")


@dataclass(frozen=True)
class SarvamMLAConfig(DeepseekV3Config):
    """The sizes of a Sarvam with latent attention. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 262144
    d_model: int = 4096
    d_mlp: int | None = 16384
    n_layers: int = 32
    n_heads: int = 64
    query_latent_size: int | None = None
    n_experts: int = 128
    n_dense: int = 1
    n_expert_groups: int = 1
    n_chosen_groups: int = 1
    init_std: float = 0.006

    model_type = "sarvam_mla"
    architecture = "DeepseekV3ForCausalLM"
    aliases = MappingProxyType({**DeepseekV3Config.aliases, **_OTHER})
    sizes = published({})


class SarvamMLA(Decoder, config=SarvamMLAConfig, init=False):
    """A Sarvam with latent attention, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("DeepseekV3ForCausalLM", "DeepseekV3Model", "SarvamMLAForCausalLM", "SarvamMLAModel")
