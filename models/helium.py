"""Helium: LLaMA whose rotary positions pair each even dim with the next.

Source: Kyutai 2025, the model's card, huggingface.co/kyutai/helium-1-2b.
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, rows
from .hf import Field


@dataclass(frozen=True)
class HeliumConfig(DecoderConfig):
    """The sizes of a Helium. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 48000
    n_positions: int = 4096
    d_model: int = 2560
    d_mlp: int | None = 7040
    n_layers: int = 24
    n_heads: int = 20
    head_size: int | None = 128
    output_bias: bool | None = False
    rope_theta: float = 100000.0
    is_interleaved: bool = True
    norm_eps: float = 1e-8
    pad_token_id: int | None = 3

    model_type = "helium"
    rows = rows(Field("attention_bias"), Field("mlp_bias"))


class Helium(Decoder, config=HeliumConfig, init=False):
    """A Helium, from token ids to the logits of each next token. See `Decoder`."""
