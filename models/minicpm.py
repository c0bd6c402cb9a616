"""MiniCPM 3: DeepSeek's latent attention without experts, with factors of embeddings, residual additions and logits.

Source: *MiniCPM* (arXiv:2404.06395), and the model's card, huggingface.co/openbmb/MiniCPM3-4B.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import POSITIVE, SIZE
from .decoder import LATENT, LATENT_NAMES, Decoder, DecoderConfig, Names, rows
from .hf import ConfigReader, Field, Row, published


class _Factors(Row):
    """The factors of residual additions and of logits, which depend on the number of layers and on the width."""

    keys = MappingProxyType({"residual_scale": "scale_depth", "logit_divisor": "dim_model_base"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        depth, base = (None if reader.has(key) else usual for key, usual in (("scale_depth", 1.4), ("dim_model_base", 256)))
        depth, base = reader.get("scale_depth", depth, POSITIVE), reader.get("dim_model_base", base, SIZE)
        return {
            "residual_scale": 1.0 if depth is None else depth / math.sqrt(known["n_layers"]),
            "logit_divisor": 1.0 if base is None else known["d_model"] / base,
        }

    def check(self, config: Any) -> None:
        base = config.d_model / config.logit_divisor
        if round(base) < 1 or config.d_model / round(base) != config.logit_divisor:
            raise ValueError(
                f"`logit_divisor`: expected `d_model`={config.d_model} over a whole number, got {config.logit_divisor}. "
                "Files hold that number."
            )

    def write(self, config: Any) -> dict[str, Any]:
        root = math.sqrt(config.n_layers)
        depth = config.residual_scale * root
        near = [float(f"{depth:.{n}g}") for n in range(1, 18)] + [math.nextafter(depth, end) for end in (0, math.inf)]
        depth = next((value for value in near if value / root == config.residual_scale), depth)  # the shortest one
        return {"scale_depth": depth, "dim_model_base": round(config.d_model / config.logit_divisor)}


@dataclass(frozen=True)
class MiniCPM3Config(DecoderConfig):
    """The sizes of a MiniCPM 3. The defaults are those of the published one, without its scaling. See `DecoderConfig`."""

    vocab_size: int = 73448
    n_positions: int = 32768
    d_model: int = 2560
    d_mlp: int | None = 6400
    n_layers: int = 62
    n_heads: int = 40
    latent_size: int | None = 256
    query_latent_size: int | None = 768
    plain_size: int = 64
    shared_rotary_size: int = 32
    value_size: int = 64
    norm_eps: float = 1e-5
    residual_scale: float = 1.4 / math.sqrt(62)
    embedding_scale: float | None = 12.0
    is_tied: bool = True
    logit_divisor: float = 10.0
    init_std: float = 0.1

    model_type = "minicpm3"
    rounds_embedding_scale = True
    rows = rows(
        *(row for row in LATENT if "value_size" not in row.keys),
        Field(
            "v_head_dim",
            "value_size",
            SIZE,
            default=lambda known: known["d_model"] // known["n_heads"],
        ),
        Field("attention_bias"),
        Field("mlp_bias"),
        Field("scale_emb", "embedding_scale", POSITIVE),
        _Factors(),
        without=("n_kv_heads", "head_size"),
    )
    names = Names(LATENT_NAMES)
    sizes = published({})


class MiniCPM3(Decoder, config=MiniCPM3Config, init=False):
    """A MiniCPM 3, from token ids to the logits of each next token. See `Decoder`."""
