"""Nemotron-4 and Minitron: layer norms whose weight is the scale minus one, squared ReLU, and half of each head rotary.

Source: *Nemotron-4 15B* (arXiv:2402.16819); *Minitron* (arXiv:2407.14679).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Rope, rows
from .hf import Field, published


@dataclass(frozen=True)
class NemotronConfig(DecoderConfig):
    """The sizes of a Nemotron. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 256000
    n_positions: int = 4096
    d_model: int = 6144
    d_mlp: int | None = 24576
    n_heads: int = 48
    rope_share: float = 0.5
    norm: str = "offset_layer"
    norm_eps: float = 1e-5
    activation: str = "relu2"
    is_gated: bool = False
    init_std: float = 0.0134
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 3

    model_type = "nemotron"
    rows = rows(Field("norm_eps"), Field("attention_bias"), Field("mlp_bias"), Rope(has_share=True))
    sizes = published({"minitron-4b": {"d_model": 3072, "d_mlp": 9216, "n_heads": 24, "n_kv_heads": 8}})


class Nemotron(Decoder, config=NemotronConfig, init=False):
    """A Nemotron, from token ids to the logits of each next token. See `Decoder`."""
