"""XGLM: GPT-2 with scaled embeddings, and sinusoids in place of learned positions.

Source: Lin et al. 2021, *Few-shot Learning with Multilingual Language Models* (arXiv:2112.10668).
"""

from dataclasses import dataclass

from ._kinds import RATE, TEXT
from .decoder import Choice, Decoder, GPTConfig, Inner, Names, Shared, rows
from .hf import Aliases, ConfigReader, Field, Fixed, published


@dataclass(frozen=True)
class XGLMConfig(GPTConfig):
    """The sizes and dropout rates of an XGLM. The defaults are those of the smallest one. See `DecoderConfig`."""

    vocab_size = 256008
    d_model, n_layers, n_heads = 1024, 24, 16
    attention_bias = True
    position_offset = 2
    activation = "gelu"
    embedding_scale = None
    is_tied = True
    embedding_dropout = residual_dropout = attention_dropout = 0.1
    bos_token_id, pad_token_id = 0, 1

    model_type = "xglm"
    zeroes_padding = has_sinusoids = True
    rows = rows(
        *Fixed(is_written=False, layerdrop=0.0, activation_dropout=0.0, add_cross_attention=False),
        Field("d_model"),
        Inner("ffn_dim", None, default=4096, save=lambda config: config.inner),
        Field("num_layers", "n_layers", via=ConfigReader.layers),
        Field("attention_heads", "n_heads"),
        Field("activation_function", "activation", TEXT),
        Shared("dropout", "residual_dropout", "embedding_dropout"),
        Choice("scale_embedding", {"embedding_scale": (1.0, None)}, default=True),
        Field("attention_dropout", kind=RATE),
        Field("init_std"),
        without=("n_kv_heads", "head_size", "rope_theta", "norm_eps"),
    )
    aliases = Aliases(num_attention_heads="attention_heads", hidden_size="d_model", num_hidden_layers="num_layers")
    names = Names(
        {
            "self_attn_layer_norm": "attention_norm",
            "self_attn.out_proj": "attention.output",
            "final_layer_norm": "mlp_norm",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        norm="model.layer_norm",
        ignored=("model.embed_positions.*",),  # sinusoids in old files
    )
    sizes = published(
        {
            "564m": {},
            "1.7b": {"d_model": 2048},
            "2.9b": {"d_model": 2048, "n_layers": 48},
            "7.5b": {"d_model": 4096, "n_layers": 32, "n_heads": 32},
        }
    )


class XGLM(Decoder, config=XGLMConfig, init=False):
    """An XGLM, from token ids to the logits of each next token. See `Decoder`."""
