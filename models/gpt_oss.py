"""gpt-oss: attention with sinks, windows in every other layer, and experts with biases and a clipped gate.

Folders in MXFP4 are read as bfloat16.

Source: OpenAI 2025, *gpt-oss-120b & gpt-oss-20b Model Card* (arXiv:2508.10925), and its code, github.com/openai/gpt-oss.
"""

import math
from dataclasses import dataclass

from ._kinds import POSITIVE
from .decoder import Decoder, DecoderConfig, Experts, LayerTypes, Names, rows
from .hf import Aliases, Field, Fields, Only, published
from .nn import YarnScaling

_YARN = YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, truncate=False)


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """The sizes of a gpt-oss; `d_mlp` is that of experts. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 201088, 131072
    d_model, d_mlp, n_layers, n_heads = 2880, 2880, 36, 64
    n_kv_heads, head_size = 8, 64
    window = 128
    attention_bias = True
    has_sinks = True
    rope_theta = 150000.0
    rope_scaling = _YARN
    norm_eps = 1e-5
    activation = "quick_gelu"
    n_experts, n_chosen = 128, 4
    expert_bias, expert_limit = True, 7.0
    bos_token_id = eos_token_id = None

    model_type = "gpt_oss"
    window_period = 2
    rows = rows(
        Field("attention_bias"),
        LayerTypes(),
        *Fields(n_experts="num_local_experts", n_chosen="num_experts_per_tok"),
        Field("swiglu_limit", "expert_limit", POSITIVE),
        Only("swiglu_alpha", 1.702, is_written=False),
        Only("hidden_act", "silu"),  # transformers does not read it
        without=("activation",),
    )
    aliases = Aliases(num_experts="num_local_experts")
    names = Names(
        {
            "self_attn.sinks": "attention.sinks",
            "mlp.router": "mlp.router",
            "mlp.experts.gate_up_proj": Experts(("mlp.experts.gate", "mlp.experts.up"), True, True, ("", "_bias")),
            "mlp.experts.down_proj": Experts(("mlp.experts.down",), True, ends=("", "_bias")),
        }
    )
    sizes = published(
        {"20b": {"n_layers": 24, "n_experts": 32}, "120b": {}}, eos_token_id=(200002, 199999, 200012), pad_token_id=199999
    )


class GptOss(Decoder, config=GptOssConfig, init=False):
    """A gpt-oss, from token ids to the logits of each next token. See `Decoder`."""
