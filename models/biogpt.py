"""BioGPT: GPT-2 with scaled embeddings, and positions from the third row of their table on, as in OPT.

Source: *BioGPT: Generative Pre-trained Transformer for Biomedical Text Generation and Mining* (arXiv:2210.10341).
"""

from dataclasses import dataclass

from ._kinds import RATE
from .decoder import Choice, Decoder, GPTConfig, Names, Shared, rows
from .hf import Field, Fixed, published


@dataclass(frozen=True)
class BioGptConfig(GPTConfig):
    """The sizes and dropout rates of a BioGPT. The defaults are those of the smaller one. See `DecoderConfig`."""

    vocab_size, n_positions = 42384, 1024
    d_model, d_mlp, n_layers, n_heads = 1024, 4096, 24, 16
    attention_bias = True
    position_offset = 2
    activation = "gelu"
    embedding_scale = None
    is_tied = True
    embedding_dropout = residual_dropout = attention_dropout = 0.1
    bos_token_id, pad_token_id = 0, 1

    model_type = "biogpt"
    zeroes_padding = True
    rows = rows(
        *Fixed(layerdrop=0.0, activation_dropout=0.0),
        Shared("hidden_dropout_prob", "residual_dropout", "embedding_dropout"),
        Field("attention_probs_dropout_prob", "attention_dropout", RATE),
        Choice("scale_embedding", {"embedding_scale": (1.0, None)}, default=True),
        without=("n_kv_heads", "head_size", "rope_theta", "norm_eps"),  # norms have 1e-5, whatever `layer_norm_eps` says
    )
    names = Names(
        {
            "self_attn_layer_norm": "attention_norm",
            "self_attn.out_proj": "attention.output",
            "final_layer_norm": "mlp_norm",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        layers="biogpt.layers.{}.",
        embedding="biogpt.embed_tokens",
        norm="biogpt.layer_norm",
        head="output_projection",
        token_score="classifier",
        others={"biogpt.embed_positions.weight": "positions"},
    )
    sizes = published({"base": {}})


class BioGpt(Decoder, config=BioGptConfig, init=False):
    """A BioGPT, from token ids to the logits of each next token. See `Decoder`."""
