"""Command R and R7B: attention and MLP run in parallel after one layer norm without bias, and logits are scaled.

In Command R7B (`cohere2`) all but every fourth layer have a window, and only those have rotary positions.

Sources: the models' cards, huggingface.co/CohereLabs; *Command A* (arXiv:2504.00698).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, LayerTypes, LogitScale, rows
from .hf import Fields, Only, published

_SCALE = LogitScale("logit_scale", 0.0625)


@dataclass(frozen=True)
class CohereConfig(DecoderConfig):
    """The sizes of a Command R. The defaults are those with 35 billion parameters. See `DecoderConfig`."""

    vocab_size, n_positions = 256000, 8192
    d_model, d_mlp, n_layers, n_heads = 8192, 22528, 40, 64
    rope_theta, is_interleaved = 500000.0, True
    norm, norm_eps = "layer", 1e-5
    is_parallel = shares_norm = True
    logit_divisor = 16.0
    is_tied = True
    bos_token_id, eos_token_id, pad_token_id = 5, 255001, 0

    model_type = "cohere"
    rows = rows(
        *Fields("attention_bias", norm_eps="layer_norm_eps"),
        _SCALE,
        Only("use_qk_norm", False, None),
        without=("head_size",),
    )
    sizes = published({"command-r": {"n_positions": 131072, "rope_theta": 8000000.0}})


class Cohere(Decoder, config=CohereConfig, init=False):
    """A Command R, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """The sizes of a Command R7B. The defaults are those of transformers. See `DecoderConfig`."""

    window = 4096
    rope_theta = 10000.0

    model_type = "cohere2"
    window_period = 4
    rotates_windows_only = True
    rows = rows(
        *Fields("attention_bias", norm_eps="layer_norm_eps"),
        _SCALE,
        LayerTypes("sliding_window_pattern"),
        without=("head_size",),
    )
    sizes = published(
        {
            "7b": {"n_positions": 8192, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_mlp": 14336,
                   "rope_theta": 50000.0, "logit_divisor": 4.0}
        }
    )  # fmt: skip


class Cohere2(Decoder, config=Cohere2Config, init=False):
    """A Command R7B, from token ids to the logits of each next token. See `Decoder`."""
