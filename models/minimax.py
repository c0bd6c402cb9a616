"""MiniMax-M2: LLaMA with experts that are chosen by sigmoids, and queries and keys of a token normalized all at once.

Half of each head is rotary. Layers that predict further tokens are not in its files.

Source: the model's card, huggingface.co/MiniMaxAI/MiniMax-M2.
"""

from dataclasses import dataclass

from ._kinds import SIZE
from .decoder import Decoder, DecoderConfig, Names, Rope, rows
from .hf import Aliases, Field, Fields, Fixed, published
from .mistral import MixtralConfig

# The dims of a head that are rotary, in old files; in newer ones `Rope` reads their share.
_ROTARY = Field(
    "rotary_dim",
    "rope_share",
    SIZE,
    default=lambda known: known["rope_share"] * known["head_size"],
    load=lambda size, known: size / known["head_size"],
    is_written=False,
)


@dataclass(frozen=True)
class MiniMaxM2Config(DecoderConfig):
    """The sizes of a MiniMax-M2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 200064, 196608
    d_model, d_mlp, n_layers, n_heads = 3072, 1536, 62, 48
    n_kv_heads, head_size = 8, 128
    head_norm = "all"
    rope_theta = 5000000.0
    n_experts, n_chosen = 256, 8
    router_score, has_correction = "sigmoid", True
    bos_token_id, eos_token_id = 200034, 200020

    model_type = "minimax_m2"
    rows = rows(
        *Fields(n_experts="num_local_experts", n_chosen="num_experts_per_tok"),
        _ROTARY,
        Rope(has_share=True),
        *Fixed(is_written=False, router_jitter_noise=0.0, scoring_func="sigmoid", shared_intermediate_size=0),
        *Fixed(is_written=False, use_qk_norm=True, use_routing_bias=True),
    )
    aliases = Aliases(num_experts="num_local_experts")
    names = Names({**MixtralConfig.names.block, "block_sparse_moe.e_score_correction_bias": "mlp.correction"})
    sizes = published({"m2": {"rope_share": 0.5}})


class MiniMaxM2(Decoder, config=MiniMaxM2Config, init=False):
    """A MiniMax-M2, from token ids to the logits of each next token. See `Decoder`."""
