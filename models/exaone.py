"""EXAONE 4: LLaMA with norms after attention and MLP, and with norms of each head.

If there are layers with a window, only those have rotary positions.

Source: *EXAONE 4.0* (arXiv:2507.11407).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, LayerTypes, Names, rows
from .hf import published


@dataclass(frozen=True)
class Exaone4Config(DecoderConfig):
    """The sizes of an EXAONE 4. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 102400
    d_mlp: int | None = 16384
    window: int | None = 4096
    head_norm: str | None = "head"
    norm_eps: float = 1e-5
    norm_places: str = "post"
    bos_token_id: int | None = 0

    model_type = "exaone4"
    window_period = 4
    rows = rows(LayerTypes("sliding_window_pattern"))
    names = Names({"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"})
    sizes = published(
        {
            "1.2b": {
                "n_positions": 65536,
                "d_model": 2048,
                "n_layers": 30,
                "n_heads": 32,
                "n_kv_heads": 8,
                "d_mlp": 4096,
                "window": None,
                "rope_theta": 1000000.0,
                "is_tied": True,
            }
        }
    )

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions: those with a window, or all if there is none."""
        return tuple(self.window is None or window is not None for window in self.windows)


class Exaone4(Decoder, config=Exaone4Config, init=False):
    """An EXAONE 4, from token ids to the logits of each next token. See `Decoder`."""
