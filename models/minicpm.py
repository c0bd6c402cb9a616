"""MiniCPM 3: DeepSeek's latent attention without experts, with factors of embeddings, residual additions and logits.

Source: *MiniCPM* (arXiv:2404.06395), and the model's card, huggingface.co/openbmb/MiniCPM3-4B.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from ._kinds import POSITIVE, SIZE
from .decoder import LATENT, LATENT_NAMES, Decoder, DecoderConfig, Names, rows
from .hf import ConfigReader, Field, Fields, Row


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
            rule = f"`d_model`={config.d_model} over a whole number"
            raise wrong("logit_divisor", rule, config.logit_divisor, "Files hold that number.")

    def write(self, config: Any) -> dict[str, Any]:
        root = math.sqrt(config.n_layers)
        depth = config.residual_scale * root
        near = [float(f"{depth:.{n}g}") for n in range(1, 18)] + [math.nextafter(depth, end) for end in (0, math.inf)]
        depth = next((value for value in near if value / root == config.residual_scale), depth)  # the shortest one
        return {"scale_depth": depth, "dim_model_base": round(config.d_model / config.logit_divisor)}


@dataclass(frozen=True)
class MiniCPM3Config(DecoderConfig):
    """The sizes of a MiniCPM 3. The defaults are those of the published one, without its scaling. See `DecoderConfig`."""

    vocab_size, n_positions = 73448, 32768
    d_model, d_mlp, n_layers, n_heads = 2560, 6400, 62, 40
    latent_size, query_latent_size = 256, 768
    plain_size, shared_rotary_size, value_size = 64, 32, 64
    norm_eps = 1e-5
    residual_scale, embedding_scale, logit_divisor = 1.4 / math.sqrt(62), 12.0, 10.0
    is_tied = True
    init_std = 0.1

    model_type = "minicpm3"
    rounds_embedding_scale = True
    rows = rows(
        *(row for row in LATENT if "value_size" not in row.keys),
        Field("v_head_dim", "value_size", SIZE, default=lambda known: known["d_model"] // known["n_heads"]),
        *Fields("attention_bias", "mlp_bias"),
        Field("scale_emb", "embedding_scale", POSITIVE),
        _Factors(),
        without=("n_kv_heads", "head_size"),
    )
    names = Names(LATENT_NAMES)


class MiniCPM3(Decoder, config=MiniCPM3Config, init=False):
    """A MiniCPM 3, from token ids to the logits of each next token. See `Decoder`."""
