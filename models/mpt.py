"""MPT: a pre-norm decoder without biases and positions, whose attention scores fall with the distance instead (ALiBi).

Source: *Introducing MPT-7B* (MosaicML, 2023).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._kinds import OBJECT, POSITIVE, RATE
from .decoder import Decoder, DecoderConfig, Names, Shared, rows
from .hf import Aliases, ConfigReader, Field, Fields, Fixed, published


class _Attention(Shared):
    """The object with the keys of attention. Its dropout rate is that of additions to the residual stream, too."""

    @property
    def keys(self) -> dict[str, str]:
        return dict.fromkeys((*self.fields, "attention_scale", "attention_clip"), self.key)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        own = reader.nested(self.key, reader.get(self.key, {}, OBJECT))
        own.only("attn_type", "multihead_attention")
        own.only("alibi", True)
        own.only("alibi_bias_max", 8)
        for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id", "rope"):
            own.only(name, False)
        return {
            **dict.fromkeys(self.fields, own.get("attn_pdrop", 0.0, RATE)),
            "attention_scale": own.get("softmax_scale", None, POSITIVE),
            "attention_clip": own.get("clip_qkv", None, POSITIVE),
        }

    def write(self, config: Any) -> dict[str, Any]:
        own = {
            "attn_type": "multihead_attention",
            "attn_pdrop": config.attention_dropout or 0,  # transformers refuses 0.0
            "alibi": True,
            "alibi_bias_max": 8,
            "clip_qkv": config.attention_clip,
            "softmax_scale": config.attention_scale,
        }
        return {self.key: own}


@dataclass(frozen=True)
class MptConfig(DecoderConfig):
    """The sizes of an MPT. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size = 50368
    d_model, d_mlp, n_layers, n_heads = 2048, None, 24, 16
    bias_range = 8.0
    norm, norm_eps = "layer", 1e-5
    activation, is_gated = "gelu", False
    is_tied = True
    bos_token_id = eos_token_id = None

    model_type = "mpt"
    architecture = "MptForCausalLM"
    rows = rows(
        *Fields("d_model", n_positions="max_seq_len"),
        Field("n_layers", via=ConfigReader.layers),
        *Fields("n_heads", norm_eps="layer_norm_epsilon"),
        _Attention("attn_config", "attention_dropout", "residual_dropout"),
        *Fixed(expansion_ratio=4, no_bias=True, logit_scale=None),
        without=("d_mlp", "n_kv_heads", "head_size", "rope_theta", "activation"),
    )
    aliases = Aliases(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads")
    names = Names(
        {
            "norm_1": "attention_norm",
            "attn.Wqkv": ("attention.query", "attention.key", "attention.value"),
            "attn.out_proj": "attention.output",
            "norm_2": "mlp_norm",
            "ffn.up_proj": "mlp.up",
            "ffn.down_proj": "mlp.down",
        },
        layers="transformer.blocks.{}.",
        embedding="transformer.wte",
        norm="transformer.norm_f",
    )
    sizes = published(
        {
            "7b": {"d_model": 4096, "n_layers": 32, "n_heads": 32},
            "30b": {"d_model": 7168, "n_layers": 48, "n_heads": 64, "n_positions": 8192},
        },
        vocab_size=50432,
    )


class Mpt(Decoder, config=MptConfig, init=False):
    """An MPT, from token ids to the logits of each next token. See `Decoder`."""
