"""StarCoder 1 and SantaCoder (GPT-BigCode): GPT-2 with one head of keys and values for all heads of queries.

Sources: *StarCoder* (arXiv:2305.06161); *SantaCoder* (arXiv:2301.03988).
"""

from dataclasses import dataclass, replace

from .decoder import GPT_ROWS, ByHead, Choice, Decoder, rows
from .gpt2 import GPT2Config
from .hf import Fixed, published


@dataclass(frozen=True)
class GPTBigCodeConfig(GPT2Config):
    """The sizes of a GPT-BigCode. The defaults are those of transformers. See `DecoderConfig`."""

    n_kv_heads = 1
    activation = "gelu_pytorch_tanh"

    model_type = "gpt_bigcode"
    position_scale = 1.0
    rows = rows(
        *GPT_ROWS,
        Choice("multi_query", {"n_kv_heads": (None, 1)}, default=True),
        *Fixed(scale_attn_weights=True, add_cross_attention=False),
        without=("head_size", "rope_theta"),
    )
    names = replace(
        GPT2Config.names,
        block={
            **GPT2Config.names.block,
            "attn.c_attn": ByHead(("attention.query", "attention.key", "attention.value"), lambda config: config.groups),
        },
        is_transposed=False,
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    )
    sizes = published(
        {
            "1b": {"d_model": 2048, "n_layers": 24, "n_heads": 16},
            "3b": {"d_model": 2816, "n_layers": 36, "n_heads": 22},
            "7b": {"d_model": 4096, "n_layers": 42, "n_heads": 32},
            "15b": {"d_model": 6144, "n_layers": 40, "n_heads": 48},
        },
        vocab_size=49152, n_positions=8192, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


class GPTBigCode(Decoder, config=GPTBigCodeConfig, init=False):
    """A GPT-BigCode, from token ids to the logits of each next token. See `Decoder`."""
