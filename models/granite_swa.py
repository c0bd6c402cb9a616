"""Granite Swash: Granite 3 with windows in most layers and attention sinks; and the same with experts.

Source: the models' cards, huggingface.co/ibm-granite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ._kinds import LIST, NOT_NEGATIVE
from .decoder import Decoder, Experts, LayerTypes
from .granite import GraniteConfig, GraniteMoeSharedConfig
from .hf import ConfigReader, Row


class _Bases(Row):
    """The base of rotary positions in each layer, 0 for none: one in layers with a window, and one in the others. It comes
    after the rows of layers and of rotary positions."""

    keys = MappingProxyType({"unrotated_layers": "layer_rope_theta", "local_rope_theta": "layer_rope_theta"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers, usual = known["n_layers"], known["rope_theta"]
        bases = reader.get("layer_rope_theta", [usual] * n_layers, LIST)
        bases = [NOT_NEGATIVE.check(reader.path, "layer_rope_theta", base) for base in bases]
        windowed = known["windowed_layers"]
        windowed = known["config_class"].default_layers(n_layers) if windowed is None else windowed
        windowed = () if known["window"] is None else windowed
        local, others = ({base for i, base in enumerate(bases) if (i in windowed) == has} - {0.0} for has in (True, False))
        has_one = len(local) < 2 and len(others) < 2 and (known["rope_scaling"] is None or len(local | others) < 2)
        if len(bases) != n_layers or not has_one:
            raise reader.refuse(
                "layer_rope_theta", bases, f"{n_layers} numbers: 0, one for layers with a window, and one for the others"
            )
        base = next(iter(others or local), usual)
        return {
            "rope_theta": base,
            "local_rope_theta": next(iter(local - {base}), None),
            "unrotated_layers": tuple(i for i, base in enumerate(bases) if not base) or None,
        }

    def write(self, config: Any) -> dict[str, Any]:
        return {"layer_rope_theta": [0.0 if rope is None else rope[1] for rope in config.ropes]}


@dataclass(frozen=True)
class GraniteSWAConfig(GraniteConfig):
    """The sizes of a Granite Swash. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 100352, 8192
    d_model, d_mlp, n_layers, n_heads = 2560, 8192, 24, 20
    n_kv_heads = 4
    window = 128
    has_sinks = True
    norm_eps = 1e-5
    is_tied = True
    bos_token_id = eos_token_id = 100257

    model_type = "granite_swa"
    rows = (*GraniteConfig.rows, LayerTypes(), _Bases())
    names = replace(GraniteConfig.names, block={"self_attn.sinks": "attention.sinks"})

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window: all but every fourth, from the first on."""
        return tuple(i for i in range(n_layers) if i % 4)


class GraniteSWA(Decoder, config=GraniteSWAConfig, init=False):
    """A Granite Swash, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class GraniteMoeSWAConfig(GraniteMoeSharedConfig):
    """The sizes of a Granite Swash with experts. The defaults are those of transformers. See `DecoderConfig`."""

    window = 128
    has_sinks = True

    model_type = "granitemoe_swa"
    rows = (*GraniteMoeSharedConfig.rows, LayerTypes(), _Bases())
    names = replace(
        GraniteMoeSharedConfig.names,
        block={
            **{disk: held for disk, held in GraniteMoeSharedConfig.names.block.items() if disk.startswith("shared_mlp")},
            "self_attn.sinks": "attention.sinks",
            "block_sparse_moe.router": "mlp.router",
            "block_sparse_moe.experts.gate_up_proj": Experts(("mlp.experts.gate", "mlp.experts.up"), ends=("", "_bias")),
            "block_sparse_moe.experts.down_proj": Experts(("mlp.experts.down",), ends=("", "_bias")),
        },
    )

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window, as without experts."""
        return GraniteSWAConfig.default_layers(n_layers)


class GraniteMoeSWA(Decoder, config=GraniteMoeSWAConfig, init=False):
    """A Granite Swash with experts, from token ids to the logits of each next token. See `Decoder`."""
