"""Granite 3: LLaMA with factors of embeddings, scores, residual additions and logits.

Source: Granite team, IBM 2024, *Granite 3.0 Language Models*.
"""

from dataclasses import dataclass

from jaxtyping import PRNGKeyArray

from ._kinds import POSITIVE
from .decoder import CausalLM, CausalLMConfig, published, rows
from .hf import Field


@dataclass(frozen=True)
class GraniteConfig(CausalLMConfig):
    """The sizes of a Granite 3. The defaults are those of transformers. See `CausalLMConfig`."""

    attention_scale: float | None = 1.0

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    rows = rows(
        Field("attention_bias"),
        Field("mlp_bias"),
        Field("embedding_multiplier", "embedding_scale", POSITIVE),
        Field("attention_multiplier", "attention_scale", POSITIVE),
        Field("residual_multiplier", "residual_scale", POSITIVE),
        Field("logits_scaling", "logit_divisor", POSITIVE),
        without=("head_size",),
    )
    sizes = published(
        {
            "3.1-2b": {"d_model": 2048, "d_mlp": 8192, "rope_theta": 5e6, "attention_scale": 1 / 64, "logit_divisor": 8.0},
            "3.1-8b": {"d_mlp": 12800, "attention_scale": 1 / 128, "logit_divisor": 16.0},
        },
        vocab_size=49155,
        n_positions=131072,
        n_layers=40,
        n_heads=32,
        n_kv_heads=8,
        rope_theta=10000000.0,
        norm_eps=1e-5,
        embedding_scale=12.0,
        residual_scale=0.22,
        is_tied=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


class Granite(CausalLM):
    """A Granite 3, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = GraniteConfig

    def __init__(self, config: GraniteConfig, *, key: PRNGKeyArray):
        super().__init__(config, key=key)
