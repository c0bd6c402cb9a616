"""HyperCLOVA X: Granite 3 with norms after attention and MLP, too.

Source: *HyperCLOVA X THINK Technical Report* (arXiv:2506.22403).
"""

from dataclasses import dataclass
from types import MappingProxyType

from ._kinds import POSITIVE
from .decoder import Choice, Decoder, LogitScale, Names, rows
from .granite import GraniteConfig
from .hf import Field, published


@dataclass(frozen=True)
class HyperCLOVAXConfig(GraniteConfig):
    """The sizes of a HyperCLOVA X. The defaults are those of transformers. See `DecoderConfig`."""

    attention_scale: float | None = None
    norm_places: str = "both"

    model_type = "hyperclovax"
    rows = rows(
        Field("attention_bias"),
        Field("mlp_bias"),
        Field("embedding_multiplier", "embedding_scale", POSITIVE),
        Field("attention_multiplier", "attention_scale", POSITIVE),
        Field("residual_multiplier", "residual_scale", POSITIVE),
        LogitScale("logits_scaling"),
        Choice("use_post_norm", MappingProxyType({"norm_places": ("pre", "both")}), default=True),
    )
    names = Names({"post_norm1": "attention_post_norm", "post_norm2": "mlp_post_norm"})
    sizes = published({})


class HyperCLOVAX(Decoder, config=HyperCLOVAXConfig, init=False):
    """A HyperCLOVA X, from token ids to the logits of each next token. See `Decoder`."""
