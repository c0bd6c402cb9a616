"""ERNIE 4.5: LLaMA whose rotary positions pair each even dim with the next; and the same with experts.

Source: Baidu 2025, *ERNIE 4.5 Technical Report*, ernie.baidu.com.
"""

from dataclasses import dataclass

from ._kinds import COUNT
from .decoder import Decoder, DecoderConfig, Names, Shared, SharedExperts, Wide, expert_names, rows
from .hf import Aliases, Field, Fields, Fixed, Only, published


@dataclass(frozen=True)
class Ernie4_5Config(DecoderConfig):
    """The sizes of a dense ERNIE 4.5. The defaults are those with 0.36 billion parameters. See `DecoderConfig`."""

    vocab_size, n_positions = 103424, 131072
    d_model, d_mlp, n_layers, n_heads = 1024, 3072, 18, 16
    n_kv_heads, head_size = 2, 128
    rope_theta, is_interleaved = 500000.0, True
    norm_eps = 1e-5
    is_tied = True
    pad_token_id = 0

    model_type = "ernie4_5"
    rows = rows(Shared("use_bias", "attention_bias", "mlp_bias"), without=("attention_dropout",))
    sizes = published({"0.3b": {}})


class Ernie4_5(Decoder, config=Ernie4_5Config, init=False):
    """A dense ERNIE 4.5, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Ernie4_5MoeConfig(Ernie4_5Config):
    """The sizes of an ERNIE 4.5 with experts. The defaults are those with 21 billion parameters. See `DecoderConfig`."""

    d_model, d_mlp, n_layers, n_heads = 2560, 12288, 28, 20
    n_kv_heads, head_size = 4, None
    n_experts, n_chosen, d_expert, d_shared = 64, 6, 1536, 3072
    n_dense, has_correction = 1, True

    model_type = "ernie4_5_moe"
    wide_routers = ("router", "correction")
    architecture = "Ernie4_5_MoeForCausalLM"
    rows = rows(
        Only("use_bias", False),
        *Fields(d_expert="moe_intermediate_size", n_experts="moe_num_experts", n_chosen="moe_k"),
        SharedExperts("moe_num_shared_experts"),
        Field("moe_layer_start_index", "n_dense", COUNT),
        Only("moe_layer_end_index", lambda known: (-1, known["n_layers"] - 1), save=lambda config: config.n_layers - 1),
        *Fixed(moe_layer_interval=1, moe_norm_min=1e-12),
        without=("attention_dropout",),
    )
    aliases = Aliases(num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    names = Names(
        {
            **{name: held for name, held in expert_names().items() if held != "mlp.correction"},
            "mlp.moe_statics.e_score_correction_bias": Wide("mlp.correction"),
        }
    )
    sizes = published({"21b-a3b": {}})


class Ernie4_5Moe(Decoder, config=Ernie4_5MoeConfig, init=False):
    """An ERNIE 4.5 with experts, from token ids to the logits of each next token. See `Decoder`."""
