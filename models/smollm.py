"""SmolLM3: LLaMA without rotary positions in every fourth layer.

Source: Bakouch et al. 2025, *SmolLM3*, huggingface.co/blog/smollm3. SmolLM 1 and 2 are folders of LLaMA.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import SIZE
from .decoder import Decoder, DecoderConfig, every, read_layer_types, rows
from .hf import ConfigReader, Field, Only, Row, published


class _Unrotated(Row):
    """The layers without rotary positions: 0 in `no_rope_layers`."""

    keys = MappingProxyType({"unrotated_layers": "no_rope_layers"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers, usual = known["n_layers"], known["config_class"].unrotated_period
        has = reader.get("no_rope_layers", [])
        lacks = every(reader.get("no_rope_layer_interval", usual, SIZE), n_layers)
        if has:
            if len(has) != n_layers or not set(has) <= {0, 1}:
                raise reader.refuse("no_rope_layers", has, f"0 or 1 for each of {n_layers} layers")
            lacks = tuple(i for i, value in enumerate(has) if value == 0)
        read_layer_types(reader, n_layers, (), has_window=False)  # transformers follows it without `use_sliding_window` too
        return {"unrotated_layers": None if lacks == every(usual, n_layers) else lacks}

    def write(self, config: Any) -> dict[str, Any]:
        return {"no_rope_layers": [int(is_rotated) for is_rotated in config.rotated]}


@dataclass(frozen=True)
class SmolLM3Config(DecoderConfig):
    """The sizes of a SmolLM3. The defaults are those with 3 billion parameters. See `DecoderConfig`."""

    vocab_size, n_positions = 128256, 32768
    d_model, n_layers, n_heads = 2048, 36, 16
    n_kv_heads = 4
    rope_theta = 2000000.0
    is_tied = True
    bos_token_id, eos_token_id, pad_token_id = 128000, 128001, 128004

    model_type = "smollm3"
    unrotated_period = 4
    rows = rows(
        _Unrotated(), Field("attention_bias"), Field("mlp_bias"), Only("use_sliding_window", False), without=("head_size",)
    )
    sizes = published({"3b": {"n_positions": 65536, "rope_theta": 5000000.0}})


class SmolLM3(Decoder, config=SmolLM3Config, init=False):
    """A SmolLM3, from token ids to the logits of each next token. See `Decoder`."""
