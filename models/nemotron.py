"""Nemotron-4 and Minitron: layer norms whose weight is the scale minus one, squared ReLU; and Jais 2.

Half of each head is rotary in the first ones.

Source: *Nemotron-4 15B* (arXiv:2402.16819); *Minitron* (arXiv:2407.14679); the cards of Jais 2,
huggingface.co/inceptionai.
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Rope, rows
from .hf import Field, published


@dataclass(frozen=True)
class NemotronConfig(DecoderConfig):
    """The sizes of a Nemotron. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 256000, 4096
    d_model, d_mlp, n_heads = 6144, 24576, 48
    rope_share = 0.5
    norm, norm_eps = "offset_layer", 1e-5
    activation, is_gated = "relu2", False
    bos_token_id, eos_token_id = 2, 3
    init_std = 0.0134

    model_type = "nemotron"
    rows = rows(Field("norm_eps"), Field("attention_bias"), Field("mlp_bias"), Rope(has_share=True))
    sizes = published({"minitron-4b": {"d_model": 3072, "d_mlp": 9216, "n_heads": 24, "n_kv_heads": 8}})


class Nemotron(Decoder, config=NemotronConfig, init=False):
    """A Nemotron, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Jais2Config(DecoderConfig):
    """The sizes of a Jais 2, which has plain layer norms, and whole heads that are rotary. The defaults are those of
    transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 150272, 8192
    d_model, d_mlp, n_heads = 3328, 26624, 26
    attention_bias = True
    norm, norm_bias, norm_eps = "layer", True, 1e-5
    activation, is_gated, mlp_bias = "relu2", False, True
    bos_token_id, eos_token_id = 0, 150024

    model_type = "jais2"
    rows = rows(Field("layer_norm_eps", "norm_eps"), Field("attention_bias"), Field("mlp_bias"))


class Jais2(Decoder, config=Jais2Config, init=False):
    """A Jais 2, from token ids to the logits of each next token. See `Decoder`."""
