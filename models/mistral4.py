"""Mistral Small 4: DeepSeek's latent attention, whose queries grow with their position, and experts that a softmax chooses.

Folders of `mistral3` also have an encoder of images: `Mistral4` reads their text model alone.

Source: the model's card, huggingface.co/mistralai/Mistral-Small-4-119B-2603.
"""

from dataclasses import dataclass

from ._kinds import COUNT
from .decoder import LATENT, LATENT_NAMES, PART_OF_LARGER, ROUTED, Decoder, DecoderConfig, Experts, Names, expert_names, rows
from .hf import Aliases, Field, Fields, Fixed, Only, published
from .mistral import GrowingRope
from .nn import YarnScaling


@dataclass(frozen=True)
class Mistral4Config(DecoderConfig):
    """The sizes of a Mistral Small 4. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 131072, 1048576
    d_mlp, n_layers = 12288, 36
    query_growth = 0.1
    latent_size, query_latent_size = 256, 1024
    plain_size, shared_rotary_size, value_size = 64, 64, 128
    is_interleaved = True
    rope_scaling = YarnScaling(128.0, 8192, 1.0, all_dims=1.0)
    n_experts, n_chosen, d_expert, d_shared = 128, 4, 2048, 2048
    pad_token_id = 11

    model_type = "mistral4"
    part = "text_config"
    rows = rows(
        *LATENT,
        *ROUTED,
        GrowingRope(
            kinds=("yarn",),
            share=lambda known: known["shared_rotary_size"] / (known["plain_size"] + known["shared_rotary_size"]),
        ),
        Field("first_k_dense_replace", "n_dense", COUNT),
        *Fields("attention_bias", renormalize="norm_topk_prob", is_interleaved="rope_interleave"),
        Only("head_dim", lambda known: (known["plain_size"] + known["shared_rotary_size"], None), is_written=False),
        *Fixed(n_group=1, topk_group=1),
        Only("model_type", "mistral4", is_written=False),  # the text model may be of another type
        without=("n_kv_heads", "head_size"),
    )
    aliases = Aliases(num_local_experts="n_routed_experts")
    names = Names(
        {
            **{disk: held for disk, held in expert_names().items() if "{}" not in disk},
            **LATENT_NAMES,
            "mlp.experts.gate_up_proj": Experts(("mlp.experts.gate", "mlp.experts.up"), ends=("", "_bias")),
            "mlp.experts.down_proj": Experts(("mlp.experts.down",), ends=("", "_bias")),
        },
        **PART_OF_LARGER,
    )
    sizes = published({"small": {}})


class Mistral4(Decoder, config=Mistral4Config, init=False):
    """A Mistral Small 4, from token ids to the logits of each next token. See `Decoder`."""

    model_types = ("mistral4", "mistral3")
