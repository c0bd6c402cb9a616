"""StarCoder 1 and SantaCoder (GPT-BigCode): GPT-2 with one head of keys and values for all heads of queries.

Sources: *StarCoder* (arXiv:2305.06161); *SantaCoder* (arXiv:2301.03988).
"""

from dataclasses import dataclass

from .decoder import GPT_ALIASES, GPT_ROWS, ByHead, Choice, Decoder, GPTConfig, Names, rows
from .hf import Fixed, published


@dataclass(frozen=True)
class GPTBigCodeConfig(GPTConfig):
    """The sizes of a GPT-BigCode. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 50257, 1024
    d_model, n_layers, n_heads = 768, 12, 12
    n_kv_heads = 1
    attention_bias = True
    position_offset = 0
    activation = "gelu_pytorch_tanh"
    is_tied = True
    embedding_dropout = residual_dropout = attention_dropout = 0.1
    bos_token_id = eos_token_id = 50256

    model_type = "gpt_bigcode"
    scales_residual = True
    rows = rows(
        *GPT_ROWS,
        Choice("multi_query", {"n_kv_heads": (None, 1)}, default=True),
        *Fixed(scale_attn_weights=True, add_cross_attention=False),
        without=("head_size", "rope_theta"),
    )
    aliases = GPT_ALIASES
    names = Names(
        {
            "ln_1": "attention_norm",
            "attn.c_attn": ByHead(("attention.query", "attention.key", "attention.value"), lambda config: config.groups),
            "attn.c_proj": "attention.output",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        others={"transformer.wpe.weight": "positions"},
        token_score="classifier",
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    )
    sizes = published(
        {
            "1b": {"d_model": 2048, "n_layers": 24, "n_heads": 16},
            "3b": {"d_model": 2816, "n_layers": 36, "n_heads": 22},
            "7b": {"d_model": 4096, "n_layers": 42, "n_heads": 32},
            "15b": {"d_model": 6144, "n_layers": 40, "n_heads": 48},
        },
        {"vocab_size": 49152, "n_positions": 8192, "bos_token_id": 0, "eos_token_id": 0},
    )


class GPTBigCode(Decoder, config=GPTBigCodeConfig, init=False):
    """A GPT-BigCode, from token ids to the logits of each next token. See `Decoder`."""
