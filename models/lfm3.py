"""LFM3: LFM2 with windows in half of the attentions, gates of heads, and norms after each part of a layer, too.

Source: the models' cards, huggingface.co/LiquidAI.
"""

from dataclasses import dataclass

from .decoder import KINDS, Choice, Decoder, MixedLayers, Names, Rope, rows
from .hf import Aliases, Fields
from .lfm import ROWS, Lfm2Config
from .nn import ProportionalScaling

_PROPORTIONAL = ProportionalScaling(0.5)


@dataclass(frozen=True)
class Lfm3Config(Lfm2Config):
    """The sizes of an LFM3. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 128000
    d_model, d_mlp, n_layers, n_heads = 2048, 7680, 24, 16
    n_kv_heads, head_size = 4, 128
    window = 256
    gates_attention = True
    conv_kernel = 7
    rope_scaling = _PROPORTIONAL
    local_rope_theta = 10000.0
    norm_places = "both"
    bos_token_id, eos_token_id, pad_token_id = 124894, 124900, 124893

    model_type = "lfm3"
    gates_heads = True
    rows = rows(
        *ROWS,
        MixedLayers("conv"),
        Rope(has_local=True, kinds=(*KINDS, "proportional")),
        *Fields("attention_bias", gates_attention="use_attention_gate"),
        Choice("use_sandwich_norm", {"norm_places": ("pre", "both")}, default=True),
        without=("activation",),
    )
    aliases = Aliases(rms_norm_eps="norm_eps")
    names = Names(
        {
            **{name: held for name, held in Lfm2Config.names.block.items() if not name.startswith("self_attn")},
            "self_attn.gate_proj": "attention.gate",
            "post_operator_norm": "attention_post_norm",
            "post_ffn_norm": "mlp_post_norm",
        },
        norm="model.embedding_norm",
    )

    @classmethod
    def default_mixers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with a convolution: the first one, and every odd one."""
        return tuple(i for i in range(n_layers) if i % 2 or i == 0)

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with the window: every fourth one after the first."""
        return tuple(range(4, n_layers, 4))


class Lfm3(Decoder, config=Lfm3Config, init=False):
    """An LFM3, from token ids to the logits of each next token. See `Decoder`."""
