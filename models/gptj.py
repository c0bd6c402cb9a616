"""GPT-J, also CodeGen: a decoder with rotary positions whose attention and MLP run in parallel after one norm.

Only a part of each head is rotary. The output head has a bias.

Source: Wang and Komatsuzaki 2021, *GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model*, and its code,
github.com/kingoflolz/mesh-transformer-jax. Only the initial weights differ from that code: they are drawn as in
`transformers`. Nijkamp et al. 2022, *CodeGen* (arXiv:2203.13474).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from redeqx.errors import wrong

from ._kinds import SIZE
from .decoder import GPT_ALIASES, GPT_ROWS, ByHead, Decoder, GPTConfig, Names, rows
from .hf import Field, published


def _head(known: Mapping[str, Any]) -> int:
    """Returns the width of a head. More heads than dims are refused later."""
    return max(known["d_model"] // known["n_heads"], 1)


@dataclass(frozen=True)
class GPTJConfig(GPTConfig):
    """The sizes and dropout rates of GPT-J. The defaults are those of the published one. See `DecoderConfig`."""

    vocab_size = 50400
    n_layers, n_heads = 28, 16
    output_bias = False
    rope_share, is_interleaved = 0.25, True
    is_parallel = shares_norm = True
    head_bias = True
    bos_token_id = eos_token_id = 50256

    model_type = "gptj"
    rows = rows(
        *GPT_ROWS,
        Field(
            "rotary_dim",
            "rope_share",
            SIZE,
            default=64,
            null=_head,
            load=lambda n, known: n / _head(known),
            save=lambda config: config.rotary_size,
        ),
        without=("n_kv_heads", "head_size", "rope_theta"),
    )
    aliases = GPT_ALIASES
    names = Names(
        {
            "ln_1": "attention_norm",
            "attn.q_proj": "attention.query",
            "attn.k_proj": "attention.key",
            "attn.v_proj": "attention.value",
            "attn.out_proj": "attention.output",
            "mlp.fc_in": "mlp.up",
            "mlp.fc_out": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        # Attention masks and a table of angles in old files.
        ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions"),
    )

    sizes = published({"6b": {}})


class GPTJ(Decoder, config=GPTJConfig, init=False):
    """GPT-J, from token ids to the logits of each next token. See `Decoder`."""


class _Width(Field):
    """The width of a CodeGen, whose files hold queries, values and keys by quarters."""

    def check(self, config: Any) -> None:
        if config.d_model % 4:
            raise wrong("d_model", "a multiple of 4", config.d_model, "Files hold queries by quarters.")


@dataclass(frozen=True)
class CodeGenConfig(GPTJConfig):
    """The sizes and dropout rates of a CodeGen. The defaults are those of transformers. See `DecoderConfig`."""

    model_type = "codegen"
    rows = tuple(_Width("n_embd", "d_model") if "d_model" in row.keys else row for row in GPTJConfig.rows)
    names = replace(
        GPTJConfig.names,
        block={
            "ln_1": "attention_norm",
            "attn.out_proj": "attention.output",
            "mlp.fc_in": "mlp.up",
            "mlp.fc_out": "mlp.down",
            "attn.qkv_proj": ByHead(("attention.query", "attention.value", "attention.key"), heads=lambda config: 4),
        },
        ignored=("*.attn.causal_mask",),
    )
    sizes = published(
        {
            "350m": {"d_model": 1024, "n_layers": 20, "rope_share": 0.5},
            "2b": {"d_model": 2560, "n_layers": 32, "n_heads": 32, "rope_share": 0.8},
            "6b": {"n_layers": 33},
            "16b": {"d_model": 6144, "n_layers": 34, "n_heads": 24},
        },
        vocab_size=51200,
        bos_token_id=1,
    )


class CodeGen(Decoder, config=CodeGenConfig, init=False):
    """A CodeGen, from token ids to the logits of each next token. See `Decoder`."""
