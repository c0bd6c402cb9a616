"""Apertus: LLaMA with norms of each head, and an MLP without a gate whose activation (xIELU) has parameters.

Source: *Apertus* (arXiv:2509.14233).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Names, rows
from .hf import Field, published
from .nn import ACTIVATIONS, Llama3Scaling

_SCALING = Llama3Scaling(factor=8.0, low=1.0, high=4.0, n_original=8192)


@dataclass(frozen=True)
class ApertusConfig(DecoderConfig):
    """The sizes of an Apertus. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 131072, 65536
    d_mlp = 14336
    head_norm = "head"
    rope_theta = 12000000.0
    rope_scaling = _SCALING
    norm_eps = 1e-5
    activation, is_gated = "xielu", False
    pad_token_id = 3

    model_type = "apertus"
    architecture = "ApertusForCausalLM"
    activations = (*ACTIVATIONS, "xielu")
    rows = rows(Field("attention_bias"))
    names = Names(
        {
            "attention_layernorm": "attention_norm",
            "feedforward_layernorm": "mlp_norm",
            **{f"mlp.act_fn.{name}": f"mlp.xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
        }
    )
    sizes = published(
        {"8b": {"d_mlp": 21504}, "70b": {"d_model": 8192, "d_mlp": 43008, "n_layers": 80, "n_heads": 64}}, n_kv_heads=8
    )


class Apertus(Decoder, config=ApertusConfig, init=False):
    """An Apertus, from token ids to the logits of each next token. See `Decoder`."""
