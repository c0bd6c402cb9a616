"""dots.llm1: DeepSeek-V3's experts with attention whose queries and keys are normalized.

Source: *dots.llm1 Technical Report* (arXiv:2506.05767).
"""

from dataclasses import dataclass

from ._kinds import COUNT
from .decoder import GROUPED, Decoder, DecoderConfig, LayerTypes, Names, expert_names, rows
from .hf import Aliases, Field, published


@dataclass(frozen=True)
class Dots1Config(DecoderConfig):
    """The sizes of a dots.llm1. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 152064
    d_model, d_mlp, n_layers = 4608, 10944, 62
    window, windowed_layers = 4096, ()
    head_norm = "head"
    n_experts, n_chosen, d_expert, d_shared = 128, 6, 1408, 2816
    router_score, has_correction = "sigmoid", True
    renormalize = False
    bos_token_id = eos_token_id = None

    model_type = "dots1"
    wide_routers = ("router", "correction")
    rows = rows(
        *GROUPED,
        Field("first_k_dense_replace", "n_dense", COUNT),
        Field("attention_bias"),
        LayerTypes(first=("max_window_layers", 62)),
    )
    aliases = Aliases(num_local_experts="n_routed_experts")
    names = Names(expert_names())
    sizes = published(
        {
            "142b": {"n_positions": 32768, "d_model": 4096, "n_dense": 1, "renormalize": True, "router_scale": 2.5,
                     "rope_theta": 1e7, "eos_token_id": 151643}
        }
    )  # fmt: skip


class Dots1(Decoder, config=Dots1Config, init=False):
    """A dots.llm1, from token ids to the logits of each next token. See `Decoder`."""
