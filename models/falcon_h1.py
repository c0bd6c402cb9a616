"""Falcon-H1: each layer has attention and Mamba-2 side by side, and factors that let sizes share their learning rates (muP).

Source: *Falcon-H1* (arXiv:2507.22448).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import LIST, POSITIVE
from .bamba import BambaConfig
from .decoder import Decoder, Factors, LogitScale, Names, mamba_names, mamba_rows, rows
from .hf import Aliases, ConfigReader, Field, Fields, Only, Row, published

_SINGLE = {
    "attention_input": "attention_in_multiplier",
    "attention_output": "attention_out_multiplier",
    "key": "key_multiplier",
    "mixer_input": "ssm_in_multiplier",
    "mixer_output": "ssm_out_multiplier",
}
# Of published models, as their `config.json` have them; `states` in the order of the fields here.
_PUBLISHED = {
    "0.5b": Factors(
        attention_output=0.9375,
        key=0.39062499999999994,
        mixer_input=1.25,
        mixer_output=0.23570226039551587,
        states=(0.5, 0.3535533905932738, 0.25, 0.3535533905932738, 0.3535533905932738),
        gate=0.8838834764831844,
        mlp_output=0.5859375,
    ),
    "1.5b-deep": Factors(
        attention_output=0.5,
        key=0.17677669529663687,
        mixer_input=1.0,
        mixer_output=0.23570226039551587,
        states=(0.5, 0.1767766952966369, 0.25, 0.3535533905932738, 0.3535533905932738),
        gate=0.7071067811865476,
        mlp_output=0.3125,
    ),
    "7b": Factors(
        attention_output=0.10416666666666667,
        key=0.030690398488999456,
        mixer_input=0.4166666666666667,
        mixer_output=0.11785113019775793,
        states=(0.5, 0.1767766952966369, 0.25, 0.3535533905932738, 0.3535533905932738),
        gate=0.2946278254943948,
        mlp_output=0.032552083333333336,
    ),
    "34b": Factors(
        attention_output=0.0375,
        key=0.011048543456039804,
        mixer_input=0.25,
        mixer_output=0.08838834764831845,
        states=(0.5, 0.1767766952966369, 0.25, 0.3535533905932738, 0.3535533905932738),
        gate=0.1767766952966369,
        mlp_output=0.011160714285714284,
    ),
}
_ORDER = (3, 2, 1, 0, 4)  # of gates, values, keys, queries and steps in `ssm_multipliers`


class _Factors(Row):
    """The factors in each layer."""

    keys = MappingProxyType({"factors": "ssm_multipliers"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        def many(key: str, n: int) -> list[float]:
            found = reader.get(key, [1.0] * n, LIST)
            if len(found) != n:
                raise reader.refuse(key, found, f"{n} factors")
            return [POSITIVE.check(reader.path, key, factor) for factor in found]

        states, (gate, output) = many("ssm_multipliers", 5), many("mlp_multipliers", 2)
        single = {name: reader.get(key, 1.0, POSITIVE) for name, key in _SINGLE.items()}
        of_states = tuple(states[i] for i in _ORDER)
        return {"factors": Factors(**single, states=of_states, gate=gate, mlp_output=output)}

    def write(self, config: Any) -> dict[str, Any]:
        factors = config.factors
        single = {key: getattr(factors, name) for name, key in _SINGLE.items()}
        states = [factors.states[i] for i in _ORDER]
        return {**single, "ssm_multipliers": states, "mlp_multipliers": [factors.gate, factors.mlp_output]}


@dataclass(frozen=True)
class FalconH1Config(BambaConfig):
    """The sizes of a Falcon-H1. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions = 8192
    has_both = True
    state_value_size = 8
    norms_states, norms_first = False, True
    rope_share = 1.0

    model_type = "falcon_h1"
    aliases = Aliases()
    rows = rows(
        *Fields("attention_bias", "mlp_bias"),
        *mamba_rows(("mamba_d_ssm", 1024)),
        *Fields(norms_states="mamba_rms_norm", norms_first="mamba_norm_before_gate"),
        Only("projectors_bias", False),
        Field("embedding_multiplier", "embedding_scale", POSITIVE),
        LogitScale("lm_head_multiplier"),
        _Factors(),
    )
    names = Names(
        {
            "pre_ff_layernorm": "mlp_norm",
            **{f"feed_forward.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
            **mamba_names(),
        },
        norm="model.final_layernorm",
    )
    sizes = published(
        {
            "0.5b": {"vocab_size": 32784, "n_positions": 16384, "d_model": 1024, "d_mlp": 2048, "n_layers": 36, "n_heads": 8,
                     "head_size": 64, "state_value_size": 64, "state_size": 128, "norms_states": False,
                     "logit_divisor": 25.6, "factors": _PUBLISHED["0.5b"]},
            "1.5b-deep": {"vocab_size": 65537, "n_positions": 131072, "d_model": 1280, "d_mlp": 3072, "n_layers": 66,
                          "n_heads": 6, "state_value_size": 64, "logit_divisor": 32.0, "factors": _PUBLISHED["1.5b-deep"]},
            "7b": {"vocab_size": 130049, "d_model": 3072, "d_mlp": 12288, "n_layers": 44, "n_heads": 12,
                   "logit_divisor": 76.8, "factors": _PUBLISHED["7b"]},
            "34b": {"vocab_size": 261120, "d_model": 5120, "d_mlp": 21504, "n_layers": 72, "n_heads": 20, "n_kv_heads": 4,
                    "state_heads": 32, "state_groups": 2, "logit_divisor": 128.0, "factors": _PUBLISHED["34b"]},
        },
        n_positions=262144, n_kv_heads=2, head_size=128, state_heads=24, state_value_size=128, norms_states=True,
        norms_first=False, rope_theta=1e11, embedding_scale=5.656854249492381, eos_token_id=11,
    )  # fmt: skip


class FalconH1(Decoder, config=FalconH1Config, init=False):
    """A Falcon-H1, from token ids to the logits of each next token. See `Decoder`."""
