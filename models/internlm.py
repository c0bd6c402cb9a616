"""InternLM 3 and IQuest-Coder: LLaMA with keys of their own.

Sources: the models' cards, huggingface.co/internlm and huggingface.co/IQuestLab.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .decoder import Decoder
from .hf import Only, published
from .llama import LlamaConfig
from .nn import DynamicScaling


@dataclass(frozen=True)
class InternLM3Config(LlamaConfig):
    """The sizes of an InternLM 3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 128512
    n_positions: int = 32768
    d_mlp: int | None = 10240
    n_layers: int = 48
    n_kv_heads: int | None = 2
    head_size: int | None = 128
    norm_eps: float = 1e-5
    pad_token_id: int | None = 2

    model_type = "internlm3"
    architecture = "LlamaForCausalLM"
    aliases = MappingProxyType({"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    sizes = published({"8b": {"n_positions": 196608, "rope_theta": 50000000.0, "rope_scaling": DynamicScaling(6.0, 32768)}})

    def __post_init__(self) -> None:
        if self.attention_bias != self.mlp_bias:
            raise ValueError(
                f"`mlp_bias`: expected the same as `attention_bias`, {self.attention_bias}, got {self.mlp_bias}. Set both."
            )
        super().__post_init__()


class InternLM3(Decoder, config=InternLM3Config, init=False):
    """An InternLM 3, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("LlamaForCausalLM", "LlamaModel", "InternLM3ForCausalLM", "InternLM3Model")


@dataclass(frozen=True)
class IQuestCoderConfig(LlamaConfig):
    """The sizes of an IQuest-Coder. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 76800
    n_positions: int = 131072
    d_model: int = 5120
    d_mlp: int | None = 27648
    n_layers: int = 80
    n_heads: int = 40
    n_kv_heads: int | None = 8
    head_size: int | None = 128
    norm_eps: float = 1e-5

    model_type = "iquestcoder"
    architecture = "LlamaForCausalLM"
    rows = (
        *LlamaConfig.rows,
        Only("clip_qkv", None, is_written=False),
        Only("use_sliding_window", False, None, is_written=False),
    )
    sizes = published({})


class IQuestCoder(Decoder, config=IQuestCoderConfig, init=False):
    """An IQuest-Coder, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("LlamaForCausalLM", "LlamaModel", "IQuestCoderForCausalLM", "IQuestCoderModel")
