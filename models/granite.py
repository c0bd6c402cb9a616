"""Granite 3: LLaMA with factors of embeddings, scores, residual additions and logits; and the same with experts.

Source: Granite team, IBM 2024, *Granite 3.0 Language Models*.
"""

from dataclasses import dataclass, replace
from typing import Any

from ._kinds import COUNT, POSITIVE
from .decoder import Decoder, DecoderConfig, Experts, Names, rows
from .hf import Field, Fields, Row, published

FACTORS: tuple[Row, ...] = (
    *Fields(kind=POSITIVE, embedding_scale="embedding_multiplier", attention_scale="attention_multiplier"),
    *Fields(kind=POSITIVE, residual_scale="residual_multiplier", logit_divisor="logits_scaling"),
)
# The fields of all published models.
_PUBLISHED: dict[str, Any] = {
    "vocab_size": 49155,
    "n_kv_heads": 8,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "is_tied": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class GraniteConfig(DecoderConfig):
    """The sizes of a Granite 3. The defaults are those of transformers. See `DecoderConfig`."""

    attention_scale = 1.0

    model_type = "granite"
    rows = rows(Field("attention_bias"), Field("mlp_bias"), *FACTORS, without=("head_size",))
    sizes = published(
        {
            "3.1-2b": {"d_model": 2048, "d_mlp": 8192, "rope_theta": 5e6, "attention_scale": 1 / 64, "logit_divisor": 8.0},
            "3.1-8b": {"d_mlp": 12800, "attention_scale": 1 / 128, "logit_divisor": 16.0},
        },
        n_positions=131072, n_layers=40, n_heads=32, rope_theta=10000000.0, norm_eps=1e-5, **_PUBLISHED,
    )  # fmt: skip


class Granite(Decoder, config=GraniteConfig, init=False):
    """A Granite 3, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class GraniteMoeConfig(GraniteConfig):
    """The sizes of a Granite 3 with experts of width `d_mlp`. The defaults are those of transformers. See
    `DecoderConfig`."""

    n_experts, n_chosen = 8, 2

    model_type = "granitemoe"
    rows = rows(
        Field("attention_bias"),
        *FACTORS,
        *Fields(n_experts="num_local_experts", n_chosen="num_experts_per_tok"),
        without=("head_size",),
    )
    names = Names(
        {
            "block_sparse_moe.router.layer": "mlp.router",
            "block_sparse_moe.input_linear": Experts(("mlp.experts.gate", "mlp.experts.up")),
            "block_sparse_moe.output_linear": Experts(("mlp.experts.down",)),
        },
        experts="block_sparse_moe.experts",
    )
    sizes = published(
        {"3.0-1b-a400m": {"d_model": 1024, "n_layers": 24, "n_heads": 16, "n_experts": 32, "logit_divisor": 6.0}},
        n_positions=4096, d_mlp=512, n_chosen=8, attention_scale=1 / 64, **_PUBLISHED,
    )  # fmt: skip


class GraniteMoe(Decoder, config=GraniteMoeConfig, init=False):
    """A Granite 3 with experts, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    """The sizes of a Granite 3 with experts, and one that all tokens are sent to. The defaults are those of transformers.
    See `DecoderConfig`."""

    model_type = "granitemoeshared"
    rows = (*GraniteMoeConfig.rows, Field("shared_intermediate_size", "d_shared", COUNT))
    names = replace(
        GraniteMoeConfig.names,
        block={
            **GraniteMoeConfig.names.block,
            "shared_mlp.input_linear": ("mlp.shared.gate", "mlp.shared.up"),
            "shared_mlp.output_linear": "mlp.shared.down",
        },
    )


class GraniteMoeShared(Decoder, config=GraniteMoeSharedConfig, init=False):
    """Such a Granite 3, from token ids to the logits of each next token. See `Decoder`."""
