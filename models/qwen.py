"""Qwen2 and Qwen3: LLaMA with biases, and with norms of each head.

Sources: *Qwen2* (arXiv:2407.10671); *Qwen3* (arXiv:2505.09388).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import COUNT, SIZE
from .decoder import Decoder, DecoderConfig, layer_types, read_layer_types, rows
from .hf import ConfigReader, Field, Row, published


class _Windows(Row):
    """The window, which only some layers have, and only if the file turns it on."""

    keys = MappingProxyType({"window": "sliding_window", "windowed_layers": "layer_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = known["n_layers"]
        window = reader.get("sliding_window", None if reader.has("sliding_window") else 4096, SIZE)
        if not reader.get("use_sliding_window", False):
            window = None
        first = reader.get("max_window_layers", 28, COUNT)  # the layers before it have no window
        windowed = read_layer_types(reader, n_layers, tuple(range(first, n_layers)), has_window=window is not None)
        if window is None or not windowed:
            return {}
        return {"window": window, "windowed_layers": None if len(windowed) == n_layers else windowed}

    def write(self, config: Any) -> dict[str, Any]:
        return {
            "sliding_window": config.window,
            "use_sliding_window": config.window is not None,
            "layer_types": layer_types(config),
        }


@dataclass(frozen=True)
class Qwen2Config(DecoderConfig):
    """The sizes of a Qwen2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 151936, 32768
    d_mlp = 22016
    n_kv_heads = 32
    attention_bias, output_bias = True, False
    bos_token_id = eos_token_id = None

    model_type = "qwen2"
    rows = rows(_Windows())
    sizes = published(
        {
            "0.5b": {"d_model": 896, "d_mlp": 4864, "n_layers": 24, "n_heads": 14, "n_kv_heads": 2, "is_tied": True},
            "1.5b": {"d_model": 1536, "d_mlp": 8960, "n_layers": 28, "n_heads": 12, "n_kv_heads": 2, "is_tied": True},
            "7b": {"vocab_size": 152064, "d_model": 3584, "d_mlp": 18944, "n_layers": 28, "n_heads": 28, "n_kv_heads": 4},
            "72b": {"vocab_size": 152064, "d_model": 8192, "d_mlp": 29568, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8,
                    "norm_eps": 1e-5},
        },
        n_positions=131072, rope_theta=1e6, bos_token_id=151643, eos_token_id=151643,
    )  # fmt: skip


class Qwen2(Decoder, config=Qwen2Config, init=False):
    """A Qwen2, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """The sizes of a Qwen3. The defaults are those of transformers; `of` returns the chat models. See `DecoderConfig`."""

    head_size = 128
    attention_bias, output_bias = False, None
    head_norm = "head"

    model_type = "qwen3"
    rows = rows(Field("attention_bias"), _Windows())
    sizes = published(
        {
            "0.6b": {"d_model": 1024, "d_mlp": 3072, "n_layers": 28, "n_heads": 16, "is_tied": True},
            "1.7b": {"d_model": 2048, "d_mlp": 6144, "n_layers": 28, "n_heads": 16, "is_tied": True},
            "4b": {"d_model": 2560, "d_mlp": 9728, "n_layers": 36, "is_tied": True},
            "8b": {"d_mlp": 12288, "n_layers": 36},
            "14b": {"d_model": 5120, "d_mlp": 17408, "n_layers": 40, "n_heads": 40},
            "32b": {"d_model": 5120, "d_mlp": 25600, "n_layers": 64, "n_heads": 64},
        },
        n_positions=40960, n_kv_heads=8, rope_theta=1e6, bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip


class Qwen3(Decoder, config=Qwen3Config, init=False):
    """A Qwen3, from token ids to the logits of each next token. See `Decoder`."""
