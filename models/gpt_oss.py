"""gpt-oss: attention with sinks, windows in every other layer, and experts with biases and a clipped gate.

Folders in MXFP4 are read as bfloat16.

Source: OpenAI 2025, *gpt-oss-120b & gpt-oss-20b Model Card* (arXiv:2508.10925), and its code, github.com/openai/gpt-oss.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import POSITIVE
from .decoder import Decoder, DecoderConfig, Experts, LayerTypes, Names, rows
from .hf import Field, Only, published
from .nn import Scaling, YarnScaling

_YARN = YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, truncate=False)


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """The sizes of a gpt-oss; `d_mlp` is that of experts. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size: int = 201088
    n_positions: int = 131072
    d_model: int = 2880
    d_mlp: int | None = 2880
    n_layers: int = 36
    n_heads: int = 64
    n_kv_heads: int | None = 8
    head_size: int | None = 64
    window: int | None = 128
    attention_bias: bool = True
    has_sinks: bool = True
    rope_theta: float = 150000.0
    rope_scaling: Scaling | None = _YARN
    norm_eps: float = 1e-5
    activation: str = "quick_gelu"
    n_experts: int = 128
    n_chosen: int = 4
    expert_bias: bool = True
    expert_limit: float | None = 7.0
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    model_type = "gpt_oss"
    window_period = 2
    rows = rows(
        Field("attention_bias"),
        LayerTypes(),
        Field("num_local_experts", "n_experts"),
        Field("num_experts_per_tok", "n_chosen"),
        Field("swiglu_limit", "expert_limit", POSITIVE),
        Only("swiglu_alpha", 1.702, is_written=False),
        Only("hidden_act", "silu"),  # transformers does not read it
        without=("activation",),
    )
    aliases = MappingProxyType({"num_experts": "num_local_experts"})
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
