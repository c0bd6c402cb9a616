"""OPT: a decoder with learned positions and ReLU, pre-norm except in the 350m model.

Source: Zhang et al. 2022, *OPT: Open Pre-trained Transformer Language Models*, and its code,
github.com/facebookresearch/metaseq.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ._kinds import RATE, TEXT
from .decoder import CausalLM, CausalLMConfig, Names, rows
from .hf import ConfigReader, Field, Only, Row


class _Choice(Row):
    """A key that is true or false, for a field or two with one of two values."""

    def __init__(self, key: str, fields: Mapping[str, tuple[Any, Any]], *, default: bool):
        """**Arguments:**

        - `fields`: the values of each field, if the key is false, and if it is true.
        - `default`: the value of an absent key.
        """
        self.key, self.fields, self.default = key, fields, default

    @property
    def keys(self) -> dict[str, str]:
        return dict.fromkeys(self.fields, self.key)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        value = reader.get(self.key, self.default)
        return {name: values[value] for name, values in self.fields.items()}

    def write(self, config: Any) -> dict[str, Any]:
        name, values = next(iter(self.fields.items()))
        return {self.key: getattr(config, name) == values[1]}


@dataclass(frozen=True)
class OPTConfig(CausalLMConfig):
    """The sizes and dropout rates of OPT. The defaults are those of the smallest published one. See `CausalLMConfig`."""

    vocab_size: int = 50272
    d_model: int = 768
    d_mlp: int | None = None
    n_layers: int = 12
    n_heads: int = 12
    attention_bias: bool = True
    position_offset: int | None = 2  # fairseq counts from the padding id, 1, and skips it
    norm: str = "layer"
    norm_bias: bool = True
    norm_eps: float = 1e-5
    activation: str = "relu"
    is_gated: bool = False
    mlp_bias: bool = True
    is_tied: bool = True
    residual_dropout: float = 0.1
    bos_token_id: int | None = 2
    pad_token_id: int | None = 1

    model_type = "opt"
    architecture = "OPTForCausalLM"
    scales_residual = True
    rows = rows(
        Only("layerdrop", 0.0, is_written=False),
        Field(
            "word_embed_proj_dim",
            "d_embedding",
            default=lambda known: known["d_model"],
            load=lambda size, known: None if size == known["d_model"] else size,
            save=lambda config: config.d_model if config.d_embedding is None else config.d_embedding,
        ),
        Field(
            "ffn_dim",
            "d_mlp",
            default=3072,
            load=lambda size, known: None if size == 4 * known["d_model"] else size,
            save=lambda config: config.inner,
        ),
        Field("activation_function", "activation", TEXT),
        _Choice("do_layer_norm_before", MappingProxyType({"norm_places": ("sum", "pre")}), default=True),
        _Choice("_remove_final_layer_norm", MappingProxyType({"has_final_norm": (True, False)}), default=False),
        _Choice("enable_bias", MappingProxyType({"attention_bias": (False, True), "mlp_bias": (False, True)}), default=True),
        _Choice("layer_norm_elementwise_affine", MappingProxyType({"norm": ("plain_layer", "layer")}), default=True),
        Field("dropout", "residual_dropout", RATE),
        Field("init_std"),
        without=("n_kv_heads", "head_size", "rope_theta", "norm_eps"),
    )
    names = Names(
        {
            "self_attn_layer_norm": "attention_norm",
            "self_attn.out_proj": "attention.output",
            "final_layer_norm": "mlp_norm",
            "fc1": "mlp.up",
            "fc2": "mlp.down",
        },
        layers="model.decoder.layers.{}.",
        embedding="model.decoder.embed_tokens",
        norm="model.decoder.final_layer_norm",
        others=MappingProxyType(
            {
                "model.decoder.project_in": "project_in",
                "model.decoder.embed_positions.weight": "positions",
                "model.decoder.project_out": "project_out",
            }
        ),
        ignored=("model.decoder.version",),  # a version number in the files of the paper's code
        # The Hub's files of 350m, 6.7b, 13b and 30b hold the base model, whose names lack the prefix.
        aliases=((r"^(?=decoder\.)", "model."),),
    )

    @classmethod
    def opt_125m(cls) -> "OPTConfig":
        """The published OPT with 125 million parameters."""
        return cls()

    @classmethod
    def opt_350m(cls) -> "OPTConfig":
        """The published OPT called 350m, with 331 million parameters, the only one with norms after additions."""
        return cls(d_model=1024, d_embedding=512, n_layers=24, n_heads=16, norm_places="sum")

    @classmethod
    def opt_1_3b(cls) -> "OPTConfig":
        """The published OPT with 1.3 billion parameters."""
        return cls(d_model=2048, n_layers=24, n_heads=32)

    @classmethod
    def opt_2_7b(cls) -> "OPTConfig":
        """The published OPT with 2.7 billion parameters."""
        return cls(d_model=2560, n_layers=32, n_heads=32)

    @classmethod
    def opt_6_7b(cls) -> "OPTConfig":
        """The published OPT with 6.7 billion parameters."""
        return cls(d_model=4096, n_layers=32, n_heads=32)

    @classmethod
    def opt_13b(cls) -> "OPTConfig":
        """The published OPT with 13 billion parameters."""
        return cls(d_model=5120, n_layers=40, n_heads=40)

    @classmethod
    def opt_30b(cls) -> "OPTConfig":
        """The published OPT with 30 billion parameters."""
        return cls(d_model=7168, n_layers=48, n_heads=56)

    @classmethod
    def opt_66b(cls) -> "OPTConfig":
        """The published OPT with 66 billion parameters."""
        return cls(d_model=9216, n_layers=64, n_heads=72)


class OPT(CausalLM):
    """OPT, from token ids to the logits of each next token. See `CausalLM`."""

    config_class = OPTConfig
    architectures = ("OPTForCausalLM", "OPTModel")

    def __init__(self, config: OPTConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as in the paper: N(0, `init_std`²), layers that add to the residual stream scaled by `1 /
            sqrt(2 * n_layers)`, biases 0, norms 1. As in its code, the padding token's row is 0.
        """
        super().__init__(config, key=key)
        if config.pad_token_id is not None:
            weight = self.embedding.weight.at[config.pad_token_id].set(0)
            self.embedding = eqx.tree_at(lambda e: e.weight, self.embedding, weight)
