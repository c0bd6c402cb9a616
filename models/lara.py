"""Lara Mini: layers with a gated delta rule, with a window, and with neither, all of which have many small experts.

Only layers with a window have rotary positions.

Source: the models' cards, huggingface.co/translated.
"""

from dataclasses import dataclass

from .decoder import DELTA, DELTA_NAMES, Decoder, DecoderConfig, Experts, MixedLayers, Names, expert_names, rows
from .hf import Aliases, Fields

_DELTA = (*(row for row in DELTA if "mixer_layers" not in row.keys), MixedLayers("linear_attention"))
_PROJECTIONS = ("query", "key", "value", "gate", "strength", "decay")  # of a delta rule, in the order of the files


@dataclass(frozen=True)
class LaraMiniConfig(DecoderConfig):
    """The sizes of a Lara Mini. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 151936, 131072
    d_model, d_mlp, n_layers, n_heads = 1024, None, 34, 16
    n_kv_heads, head_size = 4, 128
    window = 512
    head_norm = "head"
    state_groups, state_heads = 8, 16
    n_experts, n_chosen, d_expert, d_shared = 128, 4, 512, 512
    is_tied = True
    bos_token_id, eos_token_id = None, 151643

    model_type = "lara_mini"
    rotates_windows_only = True
    wide_routers = ("router",)
    rows = rows(
        *_DELTA,
        *Fields("attention_bias", n_experts="num_experts", n_chosen="num_experts_per_tok", renormalize="norm_topk_prob"),
        *Fields(d_expert="moe_intermediate_size", d_shared="shared_expert_intermediate_size"),
        without=("d_mlp",),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(
        {
            **{name: held for name, held in expert_names("shared_expert").items() if ".experts" not in name},
            "mlp.experts.gate_up_proj": Experts(("mlp.experts.gate", "mlp.experts.up"), ends=("", "_bias")),
            "mlp.experts.down_proj": Experts(("mlp.experts.down",), ends=("", "_bias")),
            **{name: held for name, held in DELTA_NAMES.items() if name.startswith("linear_attn") and held != "mixer.norm"},
            "linear_attn.in_proj": tuple(f"mixer.{name}" for name in _PROJECTIONS),
            "linear_attn.out_norm": "mixer.norm",
        }
    )

    @classmethod
    def default_mixers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with a delta rule: the first and the third of each five."""
        return tuple(i for i in range(n_layers) if i % 5 in (0, 2))

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window: the second and the last of each five."""
        return tuple(i for i in range(n_layers) if i % 5 in (1, 4))


class LaraMini(Decoder, config=LaraMiniConfig, init=False):
    """A Lara Mini, from token ids to the logits of each next token. See `Decoder`."""
