"""LFM2: most layers have a short convolution between two gates, the others attention with norms of each head.

Source: *LFM2 Technical Report* (arXiv:2511.23404).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import LIST, POSITIVE
from .decoder import Decoder, DecoderConfig, MixerLayers, Names, Taps, rows
from .hf import Aliases, ConfigReader, Field, Only, Row, published


class _Inner(Row):
    """The inner width of the MLPs, which files commonly describe by a larger number that is adjusted."""

    keys = MappingProxyType({"d_mlp": "intermediate_size"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        size = reader.get("intermediate_size", 12288)
        factor = reader.get("block_ffn_dim_multiplier", 1.0, POSITIVE)
        multiple = reader.get("block_multiple_of", 256)
        if reader.get("block_auto_adjust_ff_dim", True):
            size = multiple * -(-int(factor * int(2 * size / 3)) // multiple)
        return {"d_mlp": size}

    def write(self, config: Any) -> dict[str, Any]:
        return {"intermediate_size": config.inner, "block_auto_adjust_ff_dim": False}


# The indices of the layers with attention are a list in files without `layer_types`.
_MIXERS = MixerLayers("conv", lambda reader, known: reader.get("full_attn_idxs", [*range(known["n_layers"])], LIST))
ROWS: tuple[Row, ...] = (Field("norm_eps"), Field("conv_L_cache", "conv_kernel"), Only("conv_bias", False))
WITHOUT = ("activation", "attention_dropout")  # fields that have no keys
_NAMES = {
    "operator_norm": "attention_norm",
    "self_attn.out_proj": "attention.output",
    "self_attn.q_layernorm": "attention.query_norm",
    "self_attn.k_layernorm": "attention.key_norm",
    "conv.in_proj": ("mixer.gate_in", "mixer.gate_out", "mixer.value"),
    "conv.conv.weight": Taps(("mixer.taps",)),
    "conv.out_proj": "mixer.output",
    "ffn_norm": "mlp_norm",
    "feed_forward.w1": "mlp.gate",
    "feed_forward.w2": "mlp.down",
    "feed_forward.w3": "mlp.up",
}


@dataclass(frozen=True)
class Lfm2Config(DecoderConfig):
    """The sizes of an LFM2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 65536, 128000
    d_model, d_mlp = 2560, 8192
    n_kv_heads = 8
    head_norm = "head"
    mixer, conv_kernel = "conv", 3
    rope_theta = 1000000.0
    norm_eps = 1e-5
    is_tied = True
    pad_token_id = 0

    model_type = "lfm2"
    rows = rows(*ROWS, _Inner(), _MIXERS, without=WITHOUT)
    aliases = Aliases(block_ff_dim="intermediate_size", tie_embedding="tie_word_embeddings")
    names = Names(_NAMES, norm="model.embedding_norm")
    sizes = published(
        {
            "350m": {"d_model": 1024, "d_mlp": 4608, "n_heads": 16},
            "700m": {"d_model": 1536, "d_mlp": 6912, "n_heads": 24},
            "1.2b": {"d_model": 2048},
            "2.6b": {"d_model": 2048, "d_mlp": 10752, "n_layers": 30,
                     "mixer_layers": tuple(i for i in range(30) if i not in (2, 5, 9, 13, 17, 21, 25, 28))},
        },
        n_layers=16,
        mixer_layers=(0, 1, 3, 4, 6, 7, 9, 11, 13, 15),
        eos_token_id=7,
    )  # fmt: skip


class Lfm2(Decoder, config=Lfm2Config, init=False):
    """An LFM2, from token ids to the logits of each next token. See `Decoder`."""
