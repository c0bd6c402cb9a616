"""Flint: Qwen3 with experts that are chosen by sigmoids, windows, and attention sinks.

Only layers with a window have rotary positions.

Source: the model's card, huggingface.co/RecursiveSI/flint.
"""

from dataclasses import dataclass
from types import MappingProxyType

from .decoder import EXPERTS, Decoder, DecoderConfig, LayerTypes, Names, expert_names, rows
from .hf import Field, published


@dataclass(frozen=True)
class FlintConfig(DecoderConfig):
    """The sizes of a Flint. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 150144
    n_positions: int = 262144
    d_model: int = 2048
    d_mlp: int | None = 6144
    n_layers: int = 49
    n_kv_heads: int | None = 4
    head_size: int | None = 128
    window: int | None = 513
    has_sinks: bool = True
    head_norm: str | None = "head"
    n_experts: int = 256
    n_chosen: int = 6
    d_expert: int | None = 512
    d_shared: int = 1024
    n_dense: int = 2
    router_score: str = "sigmoid"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    model_type = "flint"
    wide_routers = ("router",)
    rows = rows(Field("attention_bias"), Field("shared_expert_intermediate_size", "d_shared"), LayerTypes(), *EXPERTS)
    aliases = MappingProxyType({"num_local_experts": "num_experts"})
    names = Names({**expert_names("shared_expert"), "self_attn.softmax_offset": "attention.sinks"})
    sizes = published({})

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window: not the first two, every fourth of the others, and the last."""
        return tuple(i for i in range(2, n_layers - 1) if i % 4 != 1)

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions: those with a window."""
        return tuple(window is not None for window in self.windows)


class Flint(Decoder, config=FlintConfig, init=False):
    """A Flint, from token ids to the logits of each next token. See `Decoder`."""
