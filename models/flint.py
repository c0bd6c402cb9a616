"""Flint: Qwen3 with experts that are chosen by sigmoids, windows, and attention sinks.

Only layers with a window have rotary positions.

Source: the model's card, huggingface.co/RecursiveSI/flint.
"""

from dataclasses import dataclass

from .decoder import EXPERTS, Decoder, DecoderConfig, LayerTypes, Names, expert_names, rows
from .hf import Aliases, Field


@dataclass(frozen=True)
class FlintConfig(DecoderConfig):
    """The sizes of a Flint. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 150144, 262144
    d_model, d_mlp, n_layers = 2048, 6144, 49
    n_kv_heads, head_size = 4, 128
    window = 513
    head_norm = "head"
    has_sinks = True
    n_experts, n_chosen, d_expert, d_shared = 256, 6, 512, 1024
    n_dense, router_score = 2, "sigmoid"
    bos_token_id = eos_token_id = None

    model_type = "flint"
    wide_routers = ("router",)
    rotates_windows_only = True
    rows = rows(Field("attention_bias"), Field("shared_expert_intermediate_size", "d_shared"), LayerTypes(), *EXPERTS)
    aliases = Aliases(num_local_experts="num_experts")
    names = Names({**expert_names("shared_expert"), "self_attn.softmax_offset": "attention.sinks"})

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window: not the first two, every fourth of the others, and the last."""
        return tuple(i for i in range(2, n_layers - 1) if i % 4 != 1)


class Flint(Decoder, config=FlintConfig, init=False):
    """A Flint, from token ids to the logits of each next token. See `Decoder`."""
