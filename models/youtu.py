"""Youtu-LLM: DeepSeek-V3's latent attention without experts.

Source: the model's card, huggingface.co/tencent/Youtu-LLM-2B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .decoder import LATENT, LATENT_NAMES, Decoder, DecoderConfig, Names, rows
from .hf import Field, Fields


def _init_std(known: Mapping[str, Any]) -> float:
    return 2 / (5 * known["d_model"]) ** 0.5


@dataclass(frozen=True)
class YoutuConfig(DecoderConfig):
    """The sizes of a Youtu, which has latent attention and no experts. The defaults are those of transformers. See
    `DecoderConfig`."""

    vocab_size, n_positions = 128256, 131072
    d_model, d_mlp, n_heads = 2048, 6144, 16
    latent_size, query_latent_size = 512, 1536
    plain_size, shared_rotary_size, value_size = 128, 64, 128
    is_interleaved = True
    is_tied = True
    bos_token_id, eos_token_id = 128000, 128001
    init_std = 2 / (5 * 2048) ** 0.5

    model_type = "youtu"
    embedding_std = 2.0
    rows = rows(
        *LATENT,
        *Fields("attention_bias", is_interleaved="rope_interleave"),
        Field("initializer_range", "init_std", default=_init_std),
        without=("n_kv_heads", "head_size"),
    )
    names = Names(LATENT_NAMES)


class Youtu(Decoder, config=YoutuConfig, init=False):
    """A Youtu, from token ids to the logits of each next token. See `Decoder`."""
