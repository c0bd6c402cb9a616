"""Kolibri: EXAONE 4 with norms before attention and MLP, too, and with many small experts, which are chosen by their logits.

Source: the models' cards, huggingface.co/Aleph-Alpha.
"""

from dataclasses import dataclass

from .decoder import Decoder, LayerTypes, Names, expert_names, rows
from .exaone import Exaone4Config
from .hf import Aliases, Fields


@dataclass(frozen=True)
class Kolibri1Config(Exaone4Config):
    """The sizes of a Kolibri. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 128000, 262144
    d_model, d_mlp, n_layers, n_heads = 2560, None, 50, 48
    n_kv_heads, head_size = 4, 128
    window = 513
    norm_eps, norm_places = 1e-6, "both"
    n_experts, n_chosen, d_expert, d_shared = 384, 6, 512, 512
    renormalize, router_score, has_correction = False, "sigmoid", True
    bos_token_id = eos_token_id = None

    model_type = "kolibri1"
    window_period = 5
    chooses_by_logits = True
    router_eps, wide_routers = 0.0, ("router", "correction")
    rows = rows(
        LayerTypes(),
        *Fields(n_experts="num_experts", n_chosen="num_experts_per_tok", renormalize="norm_topk_prob"),
        *Fields(d_expert="moe_intermediate_size", d_shared="shared_expert_intermediate_size"),
        without=("d_mlp",),
    )
    aliases = Aliases(num_local_experts="num_experts")
    names = Names(
        {
            **{name: held for name, held in expert_names().items() if held != "mlp.correction"},
            "moe.router.expert_bias": "mlp.correction",
            "post_attn_norm": "attention_post_norm",
            "post_ffn_norm": "mlp_post_norm",
        }
    )


class Kolibri1(Decoder, config=Kolibri1Config, init=False):
    """A Kolibri, from token ids to the logits of each next token. See `Decoder`."""
