"""HyperCLOVA X: Granite 3 with norms after attention and MLP, too.

Source: *HyperCLOVA X THINK Technical Report* (arXiv:2506.22403).
"""

from dataclasses import dataclass

from ._kinds import POSITIVE
from .decoder import Choice, Decoder, LogitScale, Names, rows
from .granite import GraniteConfig
from .hf import Field, Fields


@dataclass(frozen=True)
class HyperCLOVAXConfig(GraniteConfig):
    """The sizes of a HyperCLOVA X. The defaults are those of transformers. See `DecoderConfig`."""

    attention_scale = None
    norm_places = "both"

    model_type = "hyperclovax"
    rows = rows(
        *Fields("attention_bias", "mlp_bias"),
        *Fields(kind=POSITIVE, embedding_scale="embedding_multiplier", attention_scale="attention_multiplier"),
        Field("residual_multiplier", "residual_scale", POSITIVE),
        LogitScale("logits_scaling"),
        Choice("use_post_norm", {"norm_places": ("pre", "both")}, default=True),
    )
    names = Names({"post_norm1": "attention_post_norm", "post_norm2": "mlp_post_norm"})


class HyperCLOVAX(Decoder, config=HyperCLOVAXConfig, init=False):
    """A HyperCLOVA X, from token ids to the logits of each next token. See `Decoder`."""
