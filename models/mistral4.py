"""Mistral Small 4: DeepSeek's latent attention, whose queries grow with their position, and experts that a softmax chooses.

Folders of `mistral3` also have an encoder of images: `Mistral4` reads their text model alone.

Source: the model's card, huggingface.co/mistralai/Mistral-Small-4-119B-2603.
"""

from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import COUNT
from .decoder import (
    LATENT,
    LATENT_NAMES,
    PART_OF_LARGER,
    ROUTED,
    Decoder,
    DecoderConfig,
    Experts,
    Names,
    expert_names,
    rows,
)
from .hf import Field, Only, published
from .mistral import GrowingRope
from .nn import Scaling, YarnScaling


@dataclass(frozen=True)
class Mistral4Config(DecoderConfig):
    """The sizes of a Mistral Small 4. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 131072
    n_positions: int = 1048576
    d_mlp: int | None = 12288
    n_layers: int = 36
    query_growth: float = 0.1
    latent_size: int | None = 256
    query_latent_size: int | None = 1024
    plain_size: int = 64
    shared_rotary_size: int = 64
    value_size: int = 128
    rope_scaling: Scaling | None = YarnScaling(128.0, 8192, 1.0, all_dims=1.0)  # noqa: RUF009  # frozen
    is_interleaved: bool = True
    n_experts: int = 128
    n_chosen: int = 4
    d_expert: int | None = 2048
    d_shared: int = 2048
    pad_token_id: int | None = 11

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
        Field("norm_topk_prob", "renormalize"),
        Field("rope_interleave", "is_interleaved"),
        Field("attention_bias"),
        Only("head_dim", lambda known: (known["plain_size"] + known["shared_rotary_size"], None), is_written=False),
        Only("n_group", 1),
        Only("topk_group", 1),
        Only("model_type", "mistral4", is_written=False),  # the text model may be of another type
        without=("n_kv_heads", "head_size"),
    )
    aliases = MappingProxyType({"num_local_experts": "n_routed_experts"})
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
