"""PhiMoE (Phi-3.5-MoE, Phi-tiny-MoE): LLaMA with layer norms, and with experts that a sparse mixer weighs.

Sources: *Phi-3* (arXiv:2404.14219); *GRIN* (arXiv:2409.12136); *SlimMoE* (arXiv:2506.18349).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ._kinds import POSITIVE
from .decoder import Decoder, Rope, Window, rows
from .hf import Aliases, ConfigReader, Field, Fields, Only, published
from .mistral import MixtralConfig
from .nn import LongScaling


class _Rope(Rope):
    """Rotary positions whose LongRoPE names the factor of queries and keys: one for short texts, and one for long ones."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read(reader, known)
        if not isinstance(found["rope_scaling"], LongScaling):
            return found
        fields = {**reader.get("rope_parameters", {}), **reader.get("rope_scaling", {})}
        rope = reader.nested("rope_parameters", fields)
        factor = rope.get("short_mscale", kind=POSITIVE)
        rope.only("long_mscale", factor)
        return found | {"rope_scaling": replace(found["rope_scaling"], attention_factor=factor)}

    def write(self, config: Any) -> dict[str, Any]:
        written, scaling = super().write(config), config.rope_scaling
        if isinstance(scaling, LongScaling):
            written["rope_parameters"] |= dict.fromkeys(("short_mscale", "long_mscale"), scaling.attention_factor)
        return written


@dataclass(frozen=True)
class PhimoeConfig(MixtralConfig):
    """The sizes of a PhiMoE. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 32064
    d_mlp = 6400
    norm, norm_bias = "layer", True
    n_experts = 16
    router_score = "sparsemixer"
    renormalize = False

    model_type = "phimoe"
    aliases = Aliases()
    rows = rows(
        _Rope(kinds=("default", "longrope")),
        Window(),
        *Fields("attention_bias", head_bias="lm_head_bias", n_experts="num_local_experts"),
        Only("num_experts_per_tok", 2),
        Field("router_jitter_noise", "router_jitter"),
    )
    names = MixtralConfig.names
    sizes = published(  # 3.5 without LongRoPE, which its folder has for texts of more than 4,096 tokens
        {"3.5": {}, "tiny": {"d_mlp": 448, "n_heads": 16, "n_kv_heads": 4, "head_size": 128, "window": 2047}},
        n_positions=4096, rope_theta=10000.0, attention_bias=True, head_bias=True, eos_token_id=32000,
    )  # fmt: skip


class Phimoe(Decoder, config=PhimoeConfig, init=False):
    """A PhiMoE, from token ids to the logits of each next token. See `Decoder`."""

    architectures = ("PhimoeForCausalLM", "PhiMoEForCausalLM", "PhimoeModel")  # the second one in the published folders
