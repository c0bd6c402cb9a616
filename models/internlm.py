"""InternLM 3 and IQuest-Coder: LLaMA with keys of their own.

Sources: the models' cards, huggingface.co/internlm and huggingface.co/IQuestLab.
"""

from dataclasses import dataclass

from redeqx.errors import wrong

from .decoder import Decoder
from .hf import Aliases, Only, published
from .llama import LlamaConfig
from .nn import DynamicScaling


@dataclass(frozen=True)
class InternLM3Config(LlamaConfig):
    """The sizes of an InternLM 3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 128512, 32768
    d_mlp, n_layers = 10240, 48
    n_kv_heads, head_size = 2, 128
    norm_eps = 1e-5
    pad_token_id = 2

    model_type = "internlm3"
    architecture = "LlamaForCausalLM"
    aliases = Aliases(qkv_bias="attention_bias", bias="mlp_bias")
    sizes = published({"8b": {"n_positions": 196608, "rope_theta": 50000000.0, "rope_scaling": DynamicScaling(6.0, 32768)}})

    def __post_init__(self) -> None:
        if self.attention_bias != self.mlp_bias:
            raise wrong("mlp_bias", f"the same as `attention_bias`, {self.attention_bias}", self.mlp_bias, "Set both.")
        super().__post_init__()


class InternLM3(Decoder, config=InternLM3Config, init=False):
    """An InternLM 3, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("LlamaForCausalLM", "LlamaModel", "InternLM3ForCausalLM", "InternLM3Model")


@dataclass(frozen=True)
class IQuestCoderConfig(LlamaConfig):
    """The sizes of an IQuest-Coder. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 76800, 131072
    d_model, d_mlp, n_layers, n_heads = 5120, 27648, 80, 40
    n_kv_heads, head_size = 8, 128
    norm_eps = 1e-5

    model_type = "iquestcoder"
    architecture = "LlamaForCausalLM"
    rows = (
        *LlamaConfig.rows,
        Only("clip_qkv", None, is_written=False),
        Only("use_sliding_window", False, None, is_written=False),
    )


class IQuestCoder(Decoder, config=IQuestCoderConfig, init=False):
    """An IQuest-Coder, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("LlamaForCausalLM", "LlamaModel", "IQuestCoderForCausalLM", "IQuestCoderModel")
