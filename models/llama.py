"""LLaMA 1, 2, 3 and 3.1: RMSNorm, SwiGLU, grouped key/value heads and rotary positions. Other decoders vary these.

Sources: Touvron et al. 2023, *LLaMA* (arXiv:2302.13971) and *Llama 2* (arXiv:2307.09288); Dubey et al. 2024, *The Llama 3
Herd of Models* (arXiv:2407.21783). As in transformers, and unlike in Meta's code, rotary positions pair the first half of a
head's dims with the second half, instead of each even dim with the next.
"""

from dataclasses import dataclass, replace

from .decoder import CausalLM, CausalLMConfig, rows
from .hf import Field, sized
from .nn import Llama3Scaling, check_heads

_LLAMA3 = {"8b": {"d_mlp": 14336}, "70b": {"d_model": 8192, "d_mlp": 28672, "n_layers": 80, "n_heads": 64}}


@dataclass(frozen=True)
class LlamaConfig(CausalLMConfig):
    """The sizes of a LLaMA. The defaults are those of the first one with 7 billion parameters. See `CausalLMConfig`."""

    model_type = "llama"
    rows = rows(Field("attention_bias"), Field("mlp_bias"))

    def __post_init__(self) -> None:
        check_heads(self)  # transformers checks it even with a `head_size`
        super().__post_init__()

    @classmethod
    def llama(cls, size: str) -> "LlamaConfig":
        """The first LLaMA: `"7b"`, `"13b"`, `"33b"` (called 30b on the Hub) or `"65b"`."""
        sizes = {
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "33b": {"d_model": 6656, "d_mlp": 17920, "n_layers": 60, "n_heads": 52},
            "65b": {"d_model": 8192, "d_mlp": 22016, "n_layers": 80, "n_heads": 64, "norm_eps": 1e-5},
        }
        return cls(**sized(size, sizes))

    @classmethod
    def llama2(cls, size: str) -> "LlamaConfig":
        """Llama 2: `"7b"`, `"13b"` or `"70b"`."""
        sizes = {
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "70b": {"d_model": 8192, "d_mlp": 28672, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8},
        }
        return cls(n_positions=4096, norm_eps=1e-5, **sized(size, sizes))

    @classmethod
    def llama3(cls, size: str) -> "LlamaConfig":
        """Llama 3: `"8b"` or `"70b"`."""
        return cls(
            vocab_size=128256,
            n_positions=8192,
            n_kv_heads=8,
            rope_theta=500000.0,
            norm_eps=1e-5,
            bos_token_id=128000,
            eos_token_id=128001,
            **sized(size, _LLAMA3),
        )

    @classmethod
    def llama3_1(cls, size: str) -> "LlamaConfig":
        """Llama 3.1: `"8b"`, `"70b"` or `"405b"`."""
        sizes = {**_LLAMA3, "405b": {"d_model": 16384, "d_mlp": 53248, "n_layers": 126, "n_heads": 128}}
        scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
        return replace(cls.llama3("8b"), n_positions=131072, rope_scaling=scaling, **sized(size, sizes))


class Llama(CausalLM):
    """A LLaMA, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = LlamaConfig
    __init__ = CausalLM.__init__
