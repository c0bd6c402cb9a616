"""Mistral and Mixtral: LLaMA with a window of the last tokens, and with a mixture of experts in place of each MLP.

Sources: Jiang et al. 2023, *Mistral 7B* (arXiv:2310.06825); Jiang et al. 2024, *Mixtral of Experts* (arXiv:2401.04088).
"""

from dataclasses import dataclass
from types import MappingProxyType

from .decoder import CausalLM, CausalLMConfig, LayerTypes, Names, Window, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class MistralConfig(CausalLMConfig):
    """The sizes of a Mistral. The defaults are those of transformers. See `CausalLMConfig`."""

    n_positions: int = 131072
    d_mlp: int | None = 14336
    n_kv_heads: int | None = 8
    window: int | None = 4096

    model_type = "mistral"
    rows = rows(Window())
    sizes = published({"7b": {}}, n_positions=32768, norm_eps=1e-5)  # the first one, of September 2023


class Mistral(CausalLM):
    """A Mistral, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = MistralConfig
    __init__ = CausalLM.__init__


@dataclass(frozen=True)
class MinistralConfig(MistralConfig):
    """The sizes of a Ministral, whose layers may differ in their window. The defaults are those of transformers. See
    `CausalLMConfig`."""

    model_type = "ministral"
    rows = rows(LayerTypes())
    sizes = published({})


class Ministral(CausalLM):
    """A Ministral, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = MinistralConfig
    __init__ = CausalLM.__init__


@dataclass(frozen=True)
class MixtralConfig(CausalLMConfig):
    """The sizes of a Mixtral. The defaults are those of transformers. See `CausalLMConfig`."""

    n_positions: int = 131072
    d_mlp: int | None = 14336
    n_kv_heads: int | None = 8
    rope_theta: float = 1000000.0
    norm_eps: float = 1e-5
    n_experts: int = 8
    n_chosen: int = 2

    model_type = "mixtral"
    rows = rows(
        Window(),
        Field("num_local_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        Only("router_jitter_noise", 0.0, is_written=False),
    )
    aliases = MappingProxyType({"num_experts": "num_local_experts"})
    names = Names(
        {
            "block_sparse_moe.gate": "mlp.router",
            "block_sparse_moe.experts.{}.w1": "mlp.experts.gate",
            "block_sparse_moe.experts.{}.w2": "mlp.experts.down",
            "block_sparse_moe.experts.{}.w3": "mlp.experts.up",
        }
    )
    sizes = published(
        {
            "8x7b": {"n_positions": 32768},
            "8x22b": {
                "vocab_size": 32768,
                "n_positions": 65536,
                "d_model": 6144,
                "d_mlp": 16384,
                "n_layers": 56,
                "n_heads": 48,
            },
        }
    )


class Mixtral(CausalLM):
    """A Mixtral, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = MixtralConfig
    __init__ = CausalLM.__init__
