"""Mistral and Mixtral: LLaMA with a window of the last tokens, and with a mixture of experts in place of each MLP.

In Ministral 3, queries grow with their position in long texts. Folders of `mistral3` also have an encoder of images: the
class reads their text model alone, `Mistral` in Mistral Small 3.1 and 3.2, `Ministral3` in Ministral 3.

Sources: Jiang et al. 2023, *Mistral 7B* (arXiv:2310.06825); Jiang et al. 2024, *Mixtral of Experts* (arXiv:2401.04088).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._kinds import NOT_NEGATIVE
from .decoder import PART_OF_LARGER, Decoder, DecoderConfig, LayerTypes, Names, Rope, Window, rows
from .hf import Aliases, ConfigReader, Fields, Only, published
from .nn import YarnScaling


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """The sizes of a Mistral. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions = 131072
    d_mlp = 14336
    n_kv_heads = 8
    window = 4096

    model_type = "mistral"
    part = "text_config"
    rows = rows(Window(), Only("model_type", "mistral", is_written=False))  # the text model may be of another type
    names = Names(**PART_OF_LARGER)
    sizes = published({"7b": {}}, n_positions=32768, norm_eps=1e-5)  # the first one, of September 2023


class Mistral(Decoder, config=MistralConfig, init=False):
    """A Mistral, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("mistral", "mistral3")


@dataclass(frozen=True)
class MinistralConfig(MistralConfig):
    """The sizes of a Ministral, whose layers may differ in their window. The defaults are those of transformers. See
    `DecoderConfig`."""

    model_type = "ministral"
    part = None
    rows = rows(LayerTypes())


class Ministral(Decoder, config=MinistralConfig, init=False):
    """A Ministral, from token ids to the logits of each next token. See `Decoder`."""


class GrowingRope(Rope):
    """Rotary positions, and among their parameters the growth of queries, which has no default there."""

    @property
    def keys(self) -> dict[str, str]:
        return {**super().keys, "query_growth": "llama_4_scaling_beta"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        said = {**reader.get("rope_parameters", {}), **reader.get("rope_scaling", {})}
        if not said:  # transformers reads a base by itself in no file
            reader.only("rope_theta", known["rope_theta"], None)
            return super().read(reader, known)
        growth = reader.nested("rope_parameters", said).get("llama_4_scaling_beta", kind=NOT_NEGATIVE)
        return {**super().read(reader, {**known, "rope_theta": 10000.0}), "query_growth": growth}

    def write(self, config: Any) -> dict[str, Any]:
        return {"rope_parameters": {**super().write(config)["rope_parameters"], "llama_4_scaling_beta": config.query_growth}}


_YARN = YarnScaling(16.0, 16384, 1.0, all_dims=1.0)


@dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    """The sizes of a Ministral 3. The defaults are those with 8 billion parameters. See `DecoderConfig`."""

    vocab_size, n_positions = 131072, 262144
    n_layers = 34
    head_size = 128
    window = None
    query_growth = 0.1
    rope_theta = 1000000.0
    rope_scaling = _YARN
    norm_eps = 1e-5
    pad_token_id = 11

    model_type = "ministral3"
    rows = rows(Window(), Only("model_type", "ministral3", is_written=False), GrowingRope(kinds=("default", "yarn")))
    sizes = published(
        {
            "3b": {"d_model": 3072, "d_mlp": 9216, "n_layers": 26, "is_tied": True},
            "8b": {},
            "14b": {"d_model": 5120, "d_mlp": 16384, "n_layers": 40, "rope_theta": 1e9},
        }
    )


class Ministral3(Decoder, config=Ministral3Config, init=False):
    """A Ministral 3, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("ministral3", "mistral3")


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """The sizes of a Mixtral. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions = 131072
    d_mlp = 14336
    n_kv_heads = 8
    rope_theta = 1000000.0
    norm_eps = 1e-5
    n_experts, n_chosen = 8, 2

    model_type = "mixtral"
    rows = rows(
        Window(),
        *Fields(n_experts="num_local_experts", n_chosen="num_experts_per_tok"),
        Only("router_jitter_noise", 0.0, is_written=False),
    )
    aliases = Aliases(num_experts="num_local_experts")
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
            "8x22b": {"vocab_size": 32768, "n_positions": 65536, "d_model": 6144, "d_mlp": 16384, "n_layers": 56,
                      "n_heads": 48},
        }
    )  # fmt: skip


class Mixtral(Decoder, config=MixtralConfig, init=False):
    """A Mixtral, from token ids to the logits of each next token. See `Decoder`."""
