"""Bamba: LLaMA with Mamba-2 in place of attention in most layers, and half of each head rotary in the others.

Source: Ganti et al. 2024, *Bamba: Inference-Efficient Hybrid Mamba2 Model*, huggingface.co/blog/bamba.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import LIST
from .decoder import Decoder, DecoderConfig, MixerLayers, Names, Rope, mamba_names, mamba_rows, rows
from .hf import Aliases, ConfigReader, Fields, Only, published


def _attention(reader: ConfigReader, known: Mapping[str, Any]) -> Sequence[int]:
    """Returns the indices of the layers with attention."""
    found = reader.get("attn_layer_indices", [], LIST)
    if not all(type(i) is int and 0 <= i < known["n_layers"] for i in found):
        raise reader.refuse("attn_layer_indices", found, f"indices of {known['n_layers']} layers")
    return found


class _Layers(MixerLayers):
    """The layers with Mamba-2, of which files list the others."""

    keys = MappingProxyType({"mixer_layers": "attn_layer_indices"})

    def write(self, config: Any) -> dict[str, Any]:
        return {"attn_layer_indices": [i for i, is_mixer in enumerate(config.mixers) if not is_mixer]}


@dataclass(frozen=True)
class BambaConfig(DecoderConfig):
    """The sizes of a Bamba. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 128000, 262144
    d_mlp = 14336
    n_kv_heads = 8
    mixer, conv_bias = "mamba", True
    state_groups, state_heads, state_size, state_value_size = 1, 128, 256, 64
    rope_share = 0.5
    norm_eps = 1e-5
    pad_token_id = 0

    model_type = "bamba"
    attention_period = 0
    rows = rows(
        Only("partial_rotary_factor", 0.5, None, is_written=False),  # transformers ignores it outside of `rope_parameters`
        Rope(has_share=True),
        *Fields("attention_bias", "mlp_bias"),
        _Layers("linear_attention", _attention),
        *mamba_rows(),
    )
    aliases = Aliases(layers_block_type="layer_types")
    names = Names(
        {
            "pre_ff_layernorm": "mlp_norm",
            **{f"feed_forward.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
            **mamba_names(),
        },
        norm="model.final_layernorm",
    )
    sizes = published(
        {"9b": {"mixer_layers": tuple(i for i in range(32) if i not in (9, 18, 27)), "state_size": 128}},
        vocab_size=128256,
        bos_token_id=128000,
        eos_token_id=128001,
    )


class Bamba(Decoder, config=BambaConfig, init=False):
    """A Bamba, from token ids to the logits of each next token. See `Decoder`."""
