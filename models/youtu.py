"""Youtu-LLM: DeepSeek-V3's latent attention without experts.

Source: the model's card, huggingface.co/tencent/Youtu-LLM-2B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .decoder import LATENT, LATENT_NAMES, Decoder, DecoderConfig, Names, rows
from .hf import Field, published


def _init_std(known: Mapping[str, Any]) -> float:
    return 2 / (5 * known["d_model"]) ** 0.5


@dataclass(frozen=True)
class YoutuConfig(DecoderConfig):
    """The sizes of a Youtu, which has latent attention and no experts. The defaults are those of transformers. See
    `DecoderConfig`."""

    vocab_size: int = 128256
    n_positions: int = 131072
    d_model: int = 2048
    d_mlp: int | None = 6144
    n_heads: int = 16
    latent_size: int | None = 512
    query_latent_size: int | None = 1536
    plain_size: int = 128
    shared_rotary_size: int = 64
    value_size: int = 128
    is_interleaved: bool = True
    is_tied: bool = True
    bos_token_id: int | None = 128000
    eos_token_id: int | tuple[int, ...] | None = 128001
    init_std: float = 2 / (5 * 2048) ** 0.5

    model_type = "youtu"
    embedding_std = 2.0
    rows = rows(
        *LATENT,
        Field("attention_bias"),
        Field("rope_interleave", "is_interleaved"),
        Field("initializer_range", "init_std", default=_init_std),
        without=("n_kv_heads", "head_size"),
    )
    names = Names(LATENT_NAMES)
    sizes = published({})


class Youtu(Decoder, config=YoutuConfig, init=False):
    """A Youtu, from token ids to the logits of each next token. See `Decoder`."""
