"""GPT-J: a decoder with rotary positions whose attention and MLP run in parallel after one norm.

Only a part of each head is rotary. The output head has a bias.

Source: Wang and Komatsuzaki 2021, *GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model*, and its code,
github.com/kingoflolz/mesh-transformer-jax. Only the initial weights differ from that code: they are drawn as in
`transformers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxtyping import PRNGKeyArray

from ._kinds import RATE, SIZE, TEXT
from .decoder import CausalLM, CausalLMConfig, Names, rows
from .hf import ConfigReader, Field, Row


class _RotaryDim(Row):
    """The number of rotary dims of a head, of which the config has the share."""

    @property
    def keys(self) -> dict[str, str]:
        return {"rope_share": "rotary_dim"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        size = max(known["d_model"] // known["n_heads"], 1)  # more heads than dims are refused later
        return {"rope_share": reader.get("rotary_dim", size if reader.has("rotary_dim") else 64, SIZE) / size}

    def write(self, config: Any) -> dict[str, Any]:
        return {"rotary_dim": config.rotary_size}


@dataclass(frozen=True)
class GPTJConfig(CausalLMConfig):
    """The sizes and dropout rates of GPT-J. The defaults are those of the published one. See `CausalLMConfig`."""

    vocab_size: int = 50400
    d_mlp: int | None = None
    n_layers: int = 28
    n_heads: int = 16
    output_bias: bool | None = False
    rope_share: float = 0.25
    is_interleaved: bool = True
    norm: str = "layer"
    norm_bias: bool = True
    norm_eps: float = 1e-5
    is_parallel: bool = True
    shares_norm: bool = True
    activation: str = "gelu_new"
    is_gated: bool = False
    mlp_bias: bool = True
    head_bias: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    model_type = "gptj"
    architecture = "GPTJForCausalLM"
    rows = rows(
        Field("activation_function", "activation", TEXT),
        Field("n_positions"),
        Field("n_embd", "d_model"),
        Field("n_inner", "d_mlp", SIZE, load=lambda size, known: None if size == 4 * known["d_model"] else size),
        Field("n_layer", "n_layers", via=ConfigReader.layers),
        Field("n_head", "n_heads"),
        _RotaryDim(),
        Field("embd_pdrop", "embedding_dropout", RATE),
        Field("attn_pdrop", "attention_dropout", RATE),
        Field("resid_pdrop", "residual_dropout", RATE),
        Field("layer_norm_epsilon", "norm_eps"),
        without=("n_kv_heads", "head_size", "rope_theta"),
    )
    aliases = MappingProxyType(
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        }
    )
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

    @classmethod
    def gptj_6b(cls) -> "GPTJConfig":
        """The published GPT-J with 6 billion parameters."""
        return cls()


class GPTJ(CausalLM):
    """GPT-J, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = GPTJConfig

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        super().__init__(config, key=key)
