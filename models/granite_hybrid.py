"""Granite 4: Granite 3, also without positions, with Mamba-2 in most layers, and with experts beside an MLP for all tokens.

Source: the models' cards, huggingface.co/ibm-granite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ._kinds import COUNT
from .decoder import Decoder, MixerLayers, Names, Shared, mamba_names, mamba_rows, rows
from .granite import FACTORS, GraniteConfig, GraniteMoeConfig
from .hf import Aliases, ConfigReader, Field, Row, published


class _Positions(Row):
    """Whether layers have rotary positions: all, or none."""

    keys = MappingProxyType({"unrotated_layers": "position_embedding_type"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        kind = reader.only("position_embedding_type", None, "rope", "nope")
        return {"unrotated_layers": () if kind == "rope" else None}

    def write(self, config: Any) -> dict[str, Any]:
        return {"position_embedding_type": "rope" if any(config.rotated) else None}


def _mlp(size: int) -> dict[str, int]:
    """Returns the inner widths of a model without experts."""
    return dict.fromkeys(("d_mlp", "d_shared", "d_expert"), size)


def _states(n_heads: int) -> dict[str, Any]:
    """Returns the values of a model with Mamba-2 in nine of ten layers, and without positions."""
    mixers = tuple(i for i in range(40) if i % 10 != 5)
    sizes = {"n_heads": 12, "state_heads": n_heads, "state_size": 128}
    return {**sizes, "mixer_layers": mixers, "unrotated_layers": None, "rope_theta": 1e4}


@dataclass(frozen=True)
class GraniteMoeHybridConfig(GraniteConfig):
    """The sizes of a Granite 4, of which `d_mlp` is that of the MLP, also beside experts. The defaults are those of
    transformers. See `DecoderConfig`."""

    d_mlp = 1024
    mixer, conv_bias = "mamba", True
    state_groups, state_heads, state_size, state_value_size = 1, 128, 256, 64
    n_experts, n_chosen, d_expert, d_shared = 8, 2, 11008, 1024

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
        MixerLayers("linear_attention"),
        *mamba_rows(),
        without=("head_size",),
    )
    aliases = Aliases(layers_block_type="layer_types")
    names = replace(GraniteMoeConfig.names, block={**GraniteMoeConfig.names.block, **mamba_names()})
    sizes = published(
        {
            "350m": {"n_positions": 32768, "d_model": 1024, **_mlp(2048), "n_layers": 28, "attention_scale": 1 / 64,
                     "residual_scale": 0.263, "logit_divisor": 4.0},
            "1b": {"d_model": 2048, **_mlp(4096), "attention_scale": 1 / 128, "logit_divisor": 8.0},
            "micro": {"d_model": 2560, **_mlp(8192), "n_heads": 40, "n_kv_heads": 8,
                      "attention_scale": 1 / 64, "logit_divisor": 10.0},
            "h-350m": {**_states(48), "n_positions": 32768, "d_model": 768, **_mlp(2048), "n_layers": 32,
                       "mixer_layers": tuple(i for i in range(32) if i not in (10, 13, 17, 27)), "state_value_size": 32,
                       "attention_scale": 1 / 64, "residual_scale": 0.246, "logit_divisor": 3.0},
            "h-1b": {**_states(48), "d_model": 1536, **_mlp(4096), "attention_scale": 1 / 128, "logit_divisor": 6.0},
            "h-micro": {**_states(64), "d_model": 2048, **_mlp(8192), "n_heads": 32, "n_kv_heads": 8,
                        "attention_scale": 1 / 64, "logit_divisor": 8.0},
            "h-tiny": {**_states(48), "d_model": 1536, **_mlp(1024), "d_expert": 512, "n_experts": 64, "n_chosen": 6,
                       "attention_scale": 1 / 128, "logit_divisor": 6.0},
            "h-small": {**_states(128), **_mlp(1536), "d_expert": 768, "n_experts": 72, "n_chosen": 10, "n_heads": 32,
                        "n_kv_heads": 8, "attention_scale": 1 / 128, "logit_divisor": 16.0},
        },
        vocab_size=100352, n_positions=131072, n_layers=40, n_heads=16, n_kv_heads=4, n_experts=0, n_chosen=0,
        unrotated_layers=(), rope_theta=1e7, norm_eps=1e-5, embedding_scale=12.0, residual_scale=0.22, is_tied=True,
        bos_token_id=100257, eos_token_id=100257, pad_token_id=100256,
    )  # fmt: skip

    def disk_names(self) -> Names:
        """Returns the names of tensors on disk. The MLP has the same ones without experts and beside them."""
        mlp = "mlp.shared" if self.n_experts else "mlp"
        shared = {"shared_mlp.input_linear": (f"{mlp}.gate", f"{mlp}.up"), "shared_mlp.output_linear": f"{mlp}.down"}
        return replace(self.names, block={**self.names.block, **shared})


class GraniteMoeHybrid(Decoder, config=GraniteMoeHybridConfig, init=False):
    """A Granite 4, from token ids to the logits of each next token. See `Decoder`."""
