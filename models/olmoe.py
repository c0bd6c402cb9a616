"""OLMoE: LLaMA with experts, whose queries and keys of a token are normalized all at once; and FlexOlmo.

FlexOlmo is an OLMo 2 with the experts of an OLMoE.

Sources: *OLMoE: Open Mixture-of-Experts Language Models* (arXiv:2409.02060); *FlexOlmo* (arXiv:2507.07024).
"""

from dataclasses import dataclass

from .decoder import Decoder, Names, expert_names, rows
from .hf import Aliases, Field, Fields, Only, published
from .olmo import Olmo2Config


@dataclass(frozen=True)
class OlmoeConfig(Olmo2Config):
    """The sizes of an OLMoE, with experts of width `d_mlp`. The defaults are those of transformers. See `DecoderConfig`."""

    n_positions = 4096
    d_model, d_mlp, n_layers, n_heads = 2048, 2048, 16, 16
    norm_places = "pre"
    n_experts, n_chosen = 64, 8
    renormalize = False

    model_type = "olmoe"
    rows = rows(
        *Fields("attention_bias", n_experts="num_experts", n_chosen="num_experts_per_tok"),
        Field("norm_topk_prob", "renormalize"),
        Only("clip_qkv", None),
        without=("head_size",),
    )
    names = Names(expert_names())
    sizes = published({"1b-7b": {"d_mlp": 1024}})


class Olmoe(Decoder, config=OlmoeConfig, init=False):
    """An OLMoE, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class FlexOlmoConfig(OlmoeConfig):
    """The sizes of a FlexOlmo, with experts of width `d_mlp`. The defaults are those of transformers. See
    `DecoderConfig`."""

    vocab_size = 100352
    d_model, d_mlp, n_layers, n_heads = 4096, 11008, 32, 32
    rope_theta = 500000.0
    norm_eps, norm_places = 1e-6, "post"
    n_experts, n_chosen = 7, 5
    eos_token_id, pad_token_id = 100257, 100277

    model_type = "flex_olmo"
    rows = rows(
        *Fields("attention_bias", n_experts="num_experts", n_chosen="num_experts_per_tok"),
        Field("norm_topk_prob", "renormalize"),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names({**Olmo2Config.names.block, **expert_names()})


class FlexOlmo(Decoder, config=FlexOlmoConfig, init=False):
    """A FlexOlmo, from token ids to the logits of each next token. See `Decoder`."""
