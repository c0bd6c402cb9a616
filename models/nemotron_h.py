"""Nemotron-H and Nemotron 3 Nano: each layer is one of Mamba-2, attention without positions, an MLP and experts.

Sources: *Nemotron-H* (arXiv:2504.03624); *Nemotron Nano 2* (arXiv:2508.14444).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from ._kinds import TEXT
from .decoder import GROUPED, OLDER, Decoder, DecoderConfig, DrawnSteps, Names, StepLimits, expert_names, mamba_names, rows
from .hf import Aliases, ConfigReader, Field, Fields, Fixed, Row, published

_LETTERS = {"M": "mixer", "E": "experts", "*": "attention", "-": "mlp"}  # of `hybrid_override_pattern`
_KINDS = {"linear_attention": "mixer", "moe": "experts", "full_attention": "attention", "mlp": "mlp"}


def _parts(pattern: str) -> dict[str, Any]:
    """Returns the number of layers, and the part of each."""
    return {"n_layers": len(pattern), "parts": tuple(_LETTERS[letter] for letter in pattern)}


class _Parts(Row):
    """The part of each layer, as a list, or in older files as letters. Their number is that of the layers."""

    keys = MappingProxyType({"parts": "layers_block_type", "n_layers": "num_hidden_layers"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: reader.get(key, None) for key in ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")}
        key, names = ("layers_block_type", _KINDS) if found["layers_block_type"] else ("hybrid_override_pattern", _LETTERS)
        parts = tuple(names.get(OLDER.get(name, name), "") for name in found[key] or _LETTERS)
        if not all(parts):
            raise reader.refuse(key, found[key], f"{', '.join(names)} for each layer")
        return {"n_layers": reader.check_layers(key, len(parts)), "parts": parts}

    def check(self, config: Any) -> None:
        if config.parts is None:
            raise wrong("parts", "the part of each layer", "None", "Each has only one.")

    def write(self, config: Any) -> dict[str, Any]:
        return {"layers_block_type": [next(kind for kind in _KINDS if _KINDS[kind] == part) for part in config.parts]}


@dataclass(frozen=True)
class NemotronHConfig(DecoderConfig):
    """The sizes of a Nemotron-H. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 131072, 4096
    d_mlp, n_layers = 21504, 4
    n_kv_heads, head_size = 8, 128
    mixer, conv_bias = "mamba", True
    state_groups, state_heads, state_value_size = 8, 128, 64
    step_limits = (0.001, math.inf)
    norm_eps = 1e-5
    shares_norm = True
    activation, is_gated = "relu2", False
    n_experts, n_chosen, d_expert, d_shared = 8, 2, 7688, 7688
    router_score, has_correction = "sigmoid", True
    pad_token_id = 0
    parts = ("mixer", "experts", "attention", "mlp")

    model_type = "nemotron_h"
    wide_routers = ("router", "correction")
    unrotated_period, mixer_activation, has_one_part = 1, "silu", True
    rows = rows(
        _Parts(),
        *(row for row in GROUPED if "d_shared" not in row.keys),
        *Fields(d_shared="moe_shared_expert_intermediate_size", norm_eps="layer_norm_epsilon"),
        Field("mlp_hidden_act", "activation", TEXT),
        *Fields("attention_bias", "mlp_bias", "conv_kernel", conv_bias="use_conv_bias", state_groups="n_groups"),
        *Fields(state_size="ssm_state_size", state_heads="mamba_num_heads", state_value_size="mamba_head_dim"),
        StepLimits("time_step_min"),
        DrawnSteps(),
        *Fixed(mamba_hidden_act="silu", use_bias=False, mamba_proj_bias=False, moe_latent_size=None, sliding_window=None),
        without=("rope_theta",),
    )
    aliases = Aliases(
        layer_types="layers_block_type", num_local_experts="n_routed_experts", mamba_dt_min="time_step_min",
        mamba_dt_max="time_step_max", mamba_dt_init_floor="time_step_floor", mamba_n_groups="n_groups",
        mamba_d_conv="conv_kernel", mamba_conv_bias="use_conv_bias",
    )  # fmt: skip
    names = Names(
        {
            "norm": "attention_norm",
            "mixer.up_proj": "mlp.up",
            "mixer.down_proj": "mlp.down",
            **{f"mixer.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value", "output")},
            **mamba_names("mixer"),
            **{name.replace("mlp.", "mixer.", 1): module for name, module in expert_names().items()},
        },
        experts="mixer.experts",
        embedding="model.embeddings",
        norm="model.norm_f",
        ignored=("mtp.*",),
        aliases=((r"^backbone\.", "model."),),
    )
    sizes = published(
        {
            "nano-9b-v2": {"d_model": 4480, "d_mlp": 15680, "n_heads": 40, "state_value_size": 80, "n_positions": 131072}
            | _parts("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
            "3-nano-30b-a3b": {"d_model": 2688, "d_mlp": 1856, "n_kv_heads": 2, "state_heads": 64, "n_positions": 262144,
                               "n_experts": 128, "n_chosen": 6, "d_expert": 1856, "d_shared": 3712, "router_scale": 2.5}
            | _parts("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        }
    )  # fmt: skip


class NemotronH(Decoder, config=NemotronHConfig, init=False):
    """A Nemotron-H, from token ids to the logits of each next token. See `Decoder`."""
