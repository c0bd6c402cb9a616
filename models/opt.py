"""OPT: a decoder with learned positions and ReLU, pre-norm except in the 350m model.

Source: Zhang et al. 2022, *OPT: Open Pre-trained Transformer Language Models*, and its code,
github.com/facebookresearch/metaseq.
"""

from dataclasses import dataclass

from ._kinds import RATE, TEXT
from .decoder import Choice, Decoder, GPTConfig, Inner, Names, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class OPTConfig(GPTConfig):
    """The sizes and dropout rates of OPT. The defaults are those of the smallest published one. See `DecoderConfig`."""

    vocab_size = 50272
    d_model, n_layers, n_heads = 768, 12, 12
    attention_bias = True
    activation = "relu"
    is_tied = True
    residual_dropout = 0.1
    bos_token_id, pad_token_id = 2, 1
    position_offset = 2  # fairseq counts from the padding id, 1, and skips it

    model_type = "opt"
    scales_residual = zeroes_padding = True
    rows = rows(
        Only("layerdrop", 0.0, is_written=False),
        Field(
            "word_embed_proj_dim",
            "d_embedding",
            default=lambda known: known["d_model"],
            load=lambda size, known: None if size == known["d_model"] else size,
            save=lambda config: config.d_model if config.d_embedding is None else config.d_embedding,
        ),
        Inner("ffn_dim", None, default=3072, save=lambda config: config.inner),
        Field("activation_function", "activation", TEXT),
        Choice("do_layer_norm_before", {"norm_places": ("sum", "pre")}, default=True),
        Choice("_remove_final_layer_norm", {"has_final_norm": (True, False)}, default=False),
        Choice("enable_bias", {"attention_bias": (False, True), "mlp_bias": (False, True)}, default=True),
        Choice("layer_norm_elementwise_affine", {"norm": ("plain_layer", "layer")}, default=True),
        Field("dropout", "residual_dropout", RATE),
        Field("init_std"),
        without=("n_kv_heads", "head_size", "rope_theta", "norm_eps"),
    )
    names = Names(
        {
            "self_attn_layer_norm": "attention_norm",
            "self_attn.out_proj": "attention.output",
            "final_layer_norm": "mlp_norm",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        layers="model.decoder.layers.{}.",
        embedding="model.decoder.embed_tokens",
        norm="model.decoder.final_layer_norm",
        others={
            "model.decoder.project_in": "project_in",
            "model.decoder.embed_positions.weight": "positions",
            "model.decoder.project_out": "project_out",
        },
        ignored=("model.decoder.version",),  # a version number in the files of the paper's code
    )
    sizes = published(
        {
            "125m": {},
            # The only one with norms after additions.
            "350m": {"d_model": 1024, "d_embedding": 512, "n_layers": 24, "n_heads": 16, "norm_places": "sum"},
            "1.3b": {"d_model": 2048, "n_layers": 24, "n_heads": 32},
            "2.7b": {"d_model": 2560, "n_layers": 32, "n_heads": 32},
            "6.7b": {"d_model": 4096, "n_layers": 32, "n_heads": 32},
            "13b": {"d_model": 5120, "n_layers": 40, "n_heads": 40},
            "30b": {"d_model": 7168, "n_layers": 48, "n_heads": 56},
            "66b": {"d_model": 9216, "n_layers": 64, "n_heads": 72},
        }
    )


class OPT(Decoder, config=OPTConfig, init=False):
    """OPT, from token ids to the logits of each next token. See `Decoder`.

    The initial weights are those of the paper: N(0, `init_std`²), layers that add to the residual stream scaled by `1 /
    sqrt(2 * n_layers)`, biases 0, norms 1. As in its code, the padding token's row is 0.
    """
