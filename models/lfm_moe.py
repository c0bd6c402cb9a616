"""LFM2 with experts: the first layers have an MLP, the others experts that are chosen by sigmoids with a correction.

Source: *LFM2 Technical Report* (arXiv:2511.23404).
"""

from dataclasses import dataclass

from ._kinds import COUNT, LIST
from .decoder import Decoder, MixerLayers, Names, rows
from .hf import Aliases, Field, Fields, published
from .lfm import ROWS, WITHOUT, Lfm2Config


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config):
    """The sizes of an LFM2 with experts. The defaults are those of transformers. See `DecoderConfig`."""

    d_model, d_mlp = 2048, 7168
    n_experts, n_chosen, d_expert = 32, 4, 1792
    n_dense, router_score, has_correction = 2, "sigmoid", True

    model_type = "lfm2_moe"
    router_eps, wide_routers = 1e-6, ("correction",)
    rows = rows(
        *ROWS,
        MixerLayers("conv", lambda reader, known: reader.get("layer_types", kind=LIST)[:0]),  # which files must have
        *Fields(d_expert="moe_intermediate_size", n_experts="num_experts", n_chosen="num_experts_per_tok"),
        Field("num_dense_layers", "n_dense", COUNT),
        *Fields(renormalize="norm_topk_prob", router_scale="routed_scaling_factor", has_correction="use_expert_bias"),
        without=WITHOUT,
    )
    aliases = Aliases(tie_embedding="tie_word_embeddings")
    names = Names(
        {
            **Lfm2Config.names.block,
            "feed_forward.gate": "mlp.router",
            "feed_forward.expert_bias": "mlp.correction",
            "feed_forward.experts.{}.w1": "mlp.experts.gate",
            "feed_forward.experts.{}.w2": "mlp.experts.down",
            "feed_forward.experts.{}.w3": "mlp.experts.up",
        },
        norm="model.embedding_norm",
        experts="feed_forward.experts",
    )
    sizes = published(
        {"8b-a1b": {"n_layers": 24}},
        mixer_layers=tuple(i for i in range(24) if i not in (2, 6, 10, 14, 18, 21)),
        eos_token_id=7,
    )


class Lfm2Moe(Decoder, config=Lfm2MoeConfig, init=False):
    """An LFM2 with experts, from token ids to the logits of each next token. See `Decoder`."""
