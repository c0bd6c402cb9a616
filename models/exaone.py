"""EXAONE 4: LLaMA with norms after attention and MLP, and with norms of each head; and K-EXAONE, with DeepSeek's experts.

If there are layers with a window, only those have rotary positions.

Sources: *EXAONE 4.0* (arXiv:2507.11407); the card of K-EXAONE, huggingface.co/LGAI-EXAONE.
"""

from dataclasses import dataclass

from .decoder import GROUPED, Decoder, DecoderConfig, LayerTypes, MlpTypes, Names, SharedExperts, expert_names, rows
from .hf import Field, published


@dataclass(frozen=True)
class Exaone4Config(DecoderConfig):
    """The sizes of an EXAONE 4. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 102400
    d_mlp = 16384
    window = 4096
    head_norm = "head"
    norm_eps, norm_places = 1e-5, "post"
    bos_token_id = 0

    model_type = "exaone4"
    window_period = 4
    rows = rows(LayerTypes("sliding_window_pattern"))
    names = Names({"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"})
    sizes = published(
        {
            "1.2b": {"n_positions": 65536, "d_model": 2048, "n_layers": 30, "n_heads": 32, "n_kv_heads": 8, "d_mlp": 4096,
                     "window": None, "rope_theta": 1000000.0, "is_tied": True}
        }
    )  # fmt: skip

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions: those with a window, or all if there is none."""
        return tuple(self.window is None or window is not None for window in self.windows)


class Exaone4(Decoder, config=Exaone4Config, init=False):
    """An EXAONE 4, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class ExaoneMoeConfig(Exaone4Config):
    """The sizes of a K-EXAONE. The defaults are those of transformers. See `DecoderConfig`."""

    norm_places = "pre"
    n_experts, n_chosen, d_expert, d_shared = 64, 8, 1024, 1024
    n_dense, router_score, router_scale, has_correction = 1, "sigmoid", 2.5, True
    bos_token_id, eos_token_id, pad_token_id = 1, 53, 0

    model_type = "exaone_moe"
    wide_routers = ("router", "correction")
    rows = rows(
        LayerTypes("sliding_window_pattern"),
        *(row for row in GROUPED if row.keys.keys().isdisjoint({"n_experts", "d_shared"})),
        Field("num_experts", "n_experts"),
        SharedExperts("num_shared_experts"),
        MlpTypes("first_k_dense_replace"),
    )
    names = Names(
        {
            **{name: held for name, held in expert_names().items() if held != "mlp.correction"},
            "mlp.e_score_correction_bias": "mlp.correction",
        },
        ignored=("*.rotary_emb.inv_freq", "mtp.*"),
    )


class ExaoneMoe(Decoder, config=ExaoneMoeConfig, init=False):
    """A K-EXAONE, from token ids to the logits of each next token. See `Decoder`."""
