"""BLOOM: a pre-norm decoder without positions, whose attention scores fall with the distance instead (ALiBi).

Source: *BLOOM* (arXiv:2211.05100).
"""

from dataclasses import dataclass

from ._kinds import RATE
from .decoder import ByHead, Decoder, GPTConfig, Names, rows
from .hf import Aliases, ConfigReader, Field, Only, published


@dataclass(frozen=True)
class BloomConfig(GPTConfig):
    """The sizes of a BLOOM. The defaults are those with 560 million parameters. See `DecoderConfig`. `n_positions` is the
    length of texts in training; the model computes longer ones too, if it is set to more."""

    vocab_size = 250880
    d_model, n_layers, n_heads = 1024, 24, 16
    attention_bias = True
    bias_range = 8.0
    activation = "gelu_pytorch_tanh"
    has_embedding_norm = True
    is_tied = True

    model_type = "bloom"
    architecture = "BloomForCausalLM"
    rows = rows(
        Field("seq_length", "n_positions"),
        Field("hidden_size", "d_model", default=64),
        Field("n_layer", "n_layers", default=2, via=ConfigReader.layers),
        Field("n_head", "n_heads", default=8),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("hidden_dropout", "residual_dropout", RATE),
        Only("apply_residual_connection_post_layernorm", False),
        without=("d_mlp", "n_kv_heads", "head_size", "rope_theta", "activation"),
    )
    aliases = Aliases(num_hidden_layers="n_layer", num_attention_heads="n_head", n_embed="hidden_size")
    names = Names(
        {
            "input_layernorm": "attention_norm",
            "self_attention.query_key_value": ByHead(("attention.query", "attention.key", "attention.value")),
            "self_attention.dense": "attention.output",
            "post_attention_layernorm": "mlp_norm",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.word_embeddings",
        others={"transformer.word_embeddings_layernorm": "embedding_norm"},
        norm="transformer.ln_f",
    )
    sizes = published(
        {
            "560m": {},
            "1b1": {"d_model": 1536},
            "1b7": {"d_model": 2048},
            "3b": {"d_model": 2560, "n_layers": 30, "n_heads": 32},
            "7b1": {"d_model": 4096, "n_layers": 30, "n_heads": 32},
            "176b": {"d_model": 14336, "n_layers": 70, "n_heads": 112},
        },
        pad_token_id=3,
    )


class Bloom(Decoder, config=BloomConfig, init=False):
    """A BLOOM, from token ids to the logits of each next token. See `Decoder`."""
