"""Granite 4: Granite 3, also without positions, and with experts beside an MLP that all tokens are sent to.

Layers with Mamba-2 in place of attention are refused: the models with `h` in their names.

Source: the models' cards, huggingface.co/ibm-granite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ._kinds import COUNT, LIST
from .decoder import CausalLM, Names, Shared, rows
from .granite import FACTORS, GraniteConfig, GraniteMoeConfig
from .hf import ConfigReader, Field, Row, published


class _Positions(Row):
    """Whether layers have rotary positions: all, or none."""

    @property
    def keys(self) -> dict[str, str]:
        return {"unrotated_layers": "position_embedding_type"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        kind = reader.only("position_embedding_type", None, "rope", "nope")
        return {"unrotated_layers": () if kind == "rope" else None}

    def write(self, config: Any) -> dict[str, Any]:
        return {"position_embedding_type": "rope" if any(config.rotated) else None}


class _Layers(Row):
    """The kind of each layer, by its newer or its older name."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        types = reader.get("layer_types", ["linear_attention"] * known["n_layers"], LIST)
        if len(types) != known["n_layers"] or not all(kind in ("full_attention", "attention") for kind in types):
            raise reader.refuse("layer_types", types, f"full_attention for each of {known['n_layers']} layers")
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        # transformers checks the sizes of Mamba in any model. Its defaults, or those of the file, fit a width of 64 n.
        sizes = {"mamba_n_heads": 1, "mamba_d_head": "auto"} if config.d_model % 64 else {}
        return {"layer_types": ["full_attention"] * config.n_layers, **sizes}


def _mlp(size: int) -> dict[str, int]:
    """Returns the inner widths of a model without experts."""
    return dict.fromkeys(("d_mlp", "d_shared", "d_expert"), size)


@dataclass(frozen=True)
class GraniteMoeHybridConfig(GraniteConfig):
    """The sizes of a Granite 4, of which `d_mlp` is that of the MLP, also beside experts. The defaults are those of
    transformers. See `CausalLMConfig`."""

    d_mlp: int | None = 1024
    d_shared: int = 1024
    d_expert: int | None = 11008
    n_experts: int = 8
    n_chosen: int = 2

    model_type = "granitemoehybrid"
    unrotated_period = 1
    rows = rows(
        Field("attention_bias"),
        *FACTORS,
        Field("intermediate_size", "d_expert"),
        Shared("shared_intermediate_size", "d_mlp", "d_shared"),
        Field("num_local_experts", "n_experts", COUNT),
        Field("num_experts_per_tok", "n_chosen", COUNT, load=lambda n_chosen, known: n_chosen if known["n_experts"] else 0),
        _Positions(),
        _Layers(),
        without=("head_size",),
    )
    aliases = MappingProxyType({"layers_block_type": "layer_types"})
    names = GraniteMoeConfig.names
    sizes = published(
        {
            "350m": {"n_positions": 32768, "d_model": 1024, **_mlp(2048), "n_layers": 28, "attention_scale": 1 / 64}
            | {"residual_scale": 0.263, "logit_divisor": 4.0},
            "1b": {"d_model": 2048, **_mlp(4096), "attention_scale": 1 / 128, "logit_divisor": 8.0},
            "micro": {"d_model": 2560, **_mlp(8192), "n_heads": 40, "n_kv_heads": 8}
            | {"attention_scale": 1 / 64, "logit_divisor": 10.0},
        },
        vocab_size=100352,
        n_positions=131072,
        n_layers=40,
        n_heads=16,
        n_kv_heads=4,
        n_experts=0,
        n_chosen=0,
        unrotated_layers=(),
        rope_theta=1e7,
        norm_eps=1e-5,
        embedding_scale=12.0,
        residual_scale=0.22,
        is_tied=True,
        bos_token_id=100257,
        eos_token_id=100257,
        pad_token_id=100256,
    )

    def disk_names(self) -> Names:
        """Returns the names of tensors on disk. The MLP has the same ones without experts and beside them."""
        mlp = "mlp.shared" if self.n_experts else "mlp"
        shared = {
            "shared_mlp.input_linear": (f"{mlp}.gate", f"{mlp}.up"),
            "shared_mlp.output_linear": f"{mlp}.down",
        }
        return replace(self.names, block={**self.names.block, **shared})


class GraniteMoeHybrid(CausalLM):
    """A Granite 4, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = GraniteMoeHybridConfig
    __init__ = CausalLM.__init__
