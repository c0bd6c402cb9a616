"""Phi-1 to 4: attention and MLP in parallel after one norm; from Phi-3 on LLaMA, with joint projections on disk.

Sources: *Textbooks Are All You Need* (arXiv:2306.11644, arXiv:2309.05463); *Phi-3* (arXiv:2404.14219); *Phi-4*
(arXiv:2412.08905).
"""

from dataclasses import dataclass

from ._kinds import RATE
from .decoder import Decoder, DecoderConfig, GPTConfig, Names, Rope, Window, rows
from .hf import Field, Fixed, published

_RESIDUAL = Field("resid_pdrop", "residual_dropout", RATE)


@dataclass(frozen=True)
class PhiConfig(GPTConfig):
    """The sizes of a Phi-1, 1.5 or 2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 51200
    d_model, d_mlp, n_layers = 2048, 8192, 24
    attention_bias = True
    rope_share = 0.5
    is_parallel = shares_norm = True
    head_bias = True

    model_type = "phi"
    rows = rows(
        Field("layer_norm_eps", "norm_eps"),
        Rope(has_share=True),
        Field("embd_pdrop", "embedding_dropout", RATE),
        _RESIDUAL,
        *Fixed(qk_layernorm=False, tie_word_embeddings=False),
        without=("is_tied", "head_size"),
    )
    names = Names(
        {"self_attn.dense": "attention.output", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}, norm="model.final_layernorm"
    )
    sizes = published(
        {
            "1.5": {"bos_token_id": None, "eos_token_id": None},
            "2": {"d_model": 2560, "d_mlp": 10240, "n_layers": 32, "rope_share": 0.4, "bos_token_id": 50256,
                  "eos_token_id": 50256, "embedding_dropout": 0.0, "residual_dropout": 0.1},
        }
    )  # fmt: skip


class Phi(Decoder, config=PhiConfig, init=False):
    """A Phi-1, 1.5 or 2, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """The sizes of a Phi-3 or 4. The defaults are those of Phi-3-mini-4k. See `DecoderConfig`."""

    vocab_size, n_positions = 32064, 4096
    d_model, d_mlp = 3072, 8192
    norm_eps = 1e-5
    eos_token_id = pad_token_id = 32000

    model_type = "phi3"
    rows = rows(
        Rope(has_share=True, kinds=("default", "longrope"), n_original=4096),
        Window(),
        _RESIDUAL,  # transformers does not read `embd_pdrop`
        Field("attention_bias"),
        without=("head_size",),
    )
    names = Names(
        {
            "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
            "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        }
    )
    sizes = published(
        {
            "3-mini-4k": {"window": 2047},
            "4": {"vocab_size": 100352, "n_positions": 16384, "d_model": 5120, "d_mlp": 17920, "n_layers": 40,
                  "n_heads": 40, "n_kv_heads": 10, "rope_theta": 250000.0, "bos_token_id": 100257, "eos_token_id": 100265,
                  "pad_token_id": 100349},
        }
    )  # fmt: skip


class Phi3(Decoder, config=Phi3Config, init=False):
    """A Phi-3 or 4, from token ids to the logits of each next token. See `Decoder`."""
