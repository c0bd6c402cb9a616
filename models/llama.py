"""LLaMA 1, 2, 3 and 3.1: RMSNorm, SwiGLU, grouped key/value heads and rotary positions. Other decoders vary these.

Sources: Touvron et al. 2023, *LLaMA* (arXiv:2302.13971) and *Llama 2* (arXiv:2307.09288); Dubey et al. 2024, *The Llama 3
Herd of Models* (arXiv:2407.21783). As in transformers, and unlike in Meta's code, rotary positions pair the first half of a
head's dims with the second half, instead of each even dim with the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .decoder import Decoder, DecoderConfig, rows
from .hf import Field, published
from .nn import Llama3Scaling, check_heads

_LLAMA3 = {"8b": {"d_mlp": 14336}, "70b": {"d_model": 8192, "d_mlp": 28672, "n_layers": 80, "n_heads": 64}}
_OF_LLAMA3 = {
    "vocab_size": 128256,
    "n_positions": 8192,
    "n_kv_heads": 8,
    "rope_theta": 500000.0,
    "norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _named(model: str, sizes: Mapping[str, Mapping[str, Any]], **common: Any) -> Mapping[str, Mapping[str, Any]]:
    return published({f"{model}-{size}": fields for size, fields in sizes.items()}, **common)


_SIZES = {
    **_named(
        "llama",
        {
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "33b": {"d_model": 6656, "d_mlp": 17920, "n_layers": 60, "n_heads": 52},  # called 30b on the Hub
            "65b": {"d_model": 8192, "d_mlp": 22016, "n_layers": 80, "n_heads": 64, "norm_eps": 1e-5},
        },
    ),
    **_named(
        "llama2",
        {
            "7b": {},
            "13b": {"d_model": 5120, "d_mlp": 13824, "n_layers": 40, "n_heads": 40},
            "70b": {"d_model": 8192, "d_mlp": 28672, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8},
        },
        n_positions=4096,
        norm_eps=1e-5,
    ),
    **_named("llama3", _LLAMA3, **_OF_LLAMA3),
    **_named(
        "llama3.1",
        {**_LLAMA3, "405b": {"d_model": 16384, "d_mlp": 53248, "n_layers": 126, "n_heads": 128}},
        **{**_OF_LLAMA3, "n_positions": 131072, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192)},
    ),
}


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The sizes of a LLaMA. The defaults are those of the first one with 7 billion parameters. See `DecoderConfig`."""

    model_type = "llama"
    sizes = _SIZES
    rows = rows(Field("attention_bias"), Field("mlp_bias"))

    def __post_init__(self) -> None:
        check_heads(self)  # transformers checks it even with a `head_size`
        super().__post_init__()


class Llama(Decoder, config=LlamaConfig, init=False):
    """A LLaMA, from token ids to the logits of each next token. See `Decoder`."""
