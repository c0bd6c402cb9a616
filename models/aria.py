"""Aria, its text model: LLaMA with experts in all layers, some of which get all tokens.

Folders of `aria` also have an encoder of images: the class reads their text model alone.

Source: *Aria: An Open Multimodal Native Mixture-of-Experts Model* (arXiv:2410.05993).
"""

from dataclasses import dataclass

from .decoder import PART_OF_LARGER, Decoder, DecoderConfig, Experts, Names, SharedExperts, expert_names, rows
from .hf import Fields, Only


@dataclass(frozen=True)
class AriaTextConfig(DecoderConfig):
    """The sizes of an Aria for text. The defaults are those of transformers. See `DecoderConfig`."""

    d_mlp = None
    n_experts, n_chosen, d_expert, d_shared = 8, 2, 4096, 8192
    pad_token_id = 2

    model_type = "aria_text"
    part = "text_config"
    activations = ("silu",)  # that of the experts, whatever files say
    rows = rows(
        *Fields("attention_bias", d_expert="intermediate_size", n_experts="moe_num_experts", n_chosen="moe_topk"),
        Only("mlp_bias", False),
        SharedExperts("moe_num_shared_experts"),
        without=("d_mlp",),
    )
    names = Names(
        {
            **{name: held for name, held in expert_names(gate="router").items() if ".experts" not in name},
            "mlp.experts.fc1": Experts(("mlp.experts.gate", "mlp.experts.up"), is_transposed=True),
            "mlp.experts.fc2": Experts(("mlp.experts.down",), is_transposed=True),
        },
        **PART_OF_LARGER,
    )


class AriaText(Decoder, config=AriaTextConfig, init=False):
    """The text model of an Aria, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("aria_text", "aria")
