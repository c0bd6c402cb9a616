"""ERNIE 4.5: LLaMA whose rotary positions pair each even dim with the next; and the same with experts.

Source: Baidu 2025, *ERNIE 4.5 Technical Report*, ernie.baidu.com.
"""

from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import COUNT
from .decoder import Decoder, DecoderConfig, Names, Shared, SharedExperts, Wide, expert_names, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class Ernie4_5Config(DecoderConfig):
    """The sizes of a dense ERNIE 4.5. The defaults are those with 0.36 billion parameters. See `DecoderConfig`."""

    vocab_size: int = 103424
    n_positions: int = 131072
    rope_theta: float = 500000.0
    d_model: int = 1024
    n_layers: int = 18
    n_heads: int = 16
    d_mlp: int | None = 3072
    n_kv_heads: int | None = 2
    head_size: int | None = 128
    is_interleaved: bool = True
    norm_eps: float = 1e-5
    is_tied: bool = True
    pad_token_id: int | None = 0

    model_type = "ernie4_5"
    rows = rows(Shared("use_bias", "attention_bias", "mlp_bias"), without=("attention_dropout",))
    sizes = published({"0.3b": {}})


class Ernie4_5(Decoder, config=Ernie4_5Config, init=False):
    """A dense ERNIE 4.5, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Ernie4_5MoeConfig(Ernie4_5Config):
    """The sizes of an ERNIE 4.5 with experts. The defaults are those with 21 billion parameters. See `DecoderConfig`."""

    d_model: int = 2560
    n_layers: int = 28
    n_heads: int = 20
    d_mlp: int | None = 12288
    n_kv_heads: int | None = 4
    head_size: int | None = None
    n_experts: int = 64
    n_chosen: int = 6
    d_expert: int | None = 1536
    n_dense: int = 1
    has_correction: bool = True
    d_shared: int = 3072

    model_type = "ernie4_5_moe"
    wide_routers = ("router", "correction")
    architecture = "Ernie4_5_MoeForCausalLM"
    rows = rows(
        Only("use_bias", False),
        Field("moe_intermediate_size", "d_expert"),
        Field("moe_num_experts", "n_experts"),
        Field("moe_k", "n_chosen"),
        SharedExperts("moe_num_shared_experts"),
        Field("moe_layer_start_index", "n_dense", COUNT),
        Only("moe_layer_end_index", lambda known: (-1, known["n_layers"] - 1), save=lambda config: config.n_layers - 1),
        Only("moe_layer_interval", 1),
        Only("moe_norm_min", 1e-12),
        without=("attention_dropout",),
    )
    aliases = MappingProxyType({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    names = Names(
        {
            **{name: held for name, held in expert_names().items() if held != "mlp.correction"},
            "mlp.moe_statics.e_score_correction_bias": Wide("mlp.correction"),
        }
    )
    sizes = published({"21b-a3b": {}})


class Ernie4_5Moe(Decoder, config=Ernie4_5MoeConfig, init=False):
    """An ERNIE 4.5 with experts, from token ids to the logits of each next token. See `Decoder`."""
