"""Helium: LLaMA whose rotary positions pair each even dim with the next.

Source: Kyutai 2025, the model's card, huggingface.co/kyutai/helium-1-2b.
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, rows
from .hf import Field


@dataclass(frozen=True)
class HeliumConfig(DecoderConfig):
    """The sizes of a Helium. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 48000, 4096
    d_model, d_mlp, n_layers, n_heads = 2560, 7040, 24, 20
    head_size = 128
    output_bias = False
    rope_theta, is_interleaved = 100000.0, True
    norm_eps = 1e-8
    pad_token_id = 3

    model_type = "helium"
    rows = rows(Field("attention_bias"), Field("mlp_bias"))


class Helium(Decoder, config=HeliumConfig, init=False):
    """A Helium, from token ids to the logits of each next token. See `Decoder`."""
