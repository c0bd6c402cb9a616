"""GPT-Neo: GPT-2 with a window in every other layer, and scores that are not scaled.

Source: Black et al. 2021, *GPT-Neo*, github.com/EleutherAI/gpt-neo.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ._kinds import LIST, RATE, SIZE, TEXT
from .decoder import Decoder, GPTConfig, Inner, Names, rows
from .hf import Aliases, ConfigReader, Field, Fields, Row, published


class _AttentionTypes(Row):
    """The layers with a window: lists of kinds, each with the number of its repetitions."""

    keys = MappingProxyType({"windowed_layers": "attention_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = known["n_layers"]
        types = reader.get("attention_types", [[["global", "local"], n_layers // 2]], LIST)
        try:
            kinds = [kind for some, n in types for _ in range(n) for kind in some]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != n_layers or not {*kinds} <= {"global", "local"}:
            raise reader.refuse("attention_types", types, f"[[[global or local, ...], times], ...] of {n_layers} layers")
        reader.get("attention_layers", None)  # the same, one by one
        found = tuple(i for i, kind in enumerate(kinds) if kind == "local")
        return {"windowed_layers": None if found == known["config_class"].default_layers(n_layers) else found}

    def write(self, config: Any) -> dict[str, Any]:
        return {"attention_types": [[["global" if window is None else "local" for window in config.windows], 1]]}


@dataclass(frozen=True)
class GPTNeoConfig(GPTConfig):
    """The sizes of a GPT-Neo. The defaults are those with 1.3 billion parameters. See `DecoderConfig`."""

    vocab_size = 50257
    d_model, n_layers, n_heads = 2048, 24, 16
    window = 256
    output_bias = True
    attention_scale = 1.0
    position_offset = 0
    is_tied = True
    bos_token_id = eos_token_id = 50256

    model_type = "gpt_neo"
    rows = rows(
        Inner("intermediate_size"),
        Field("num_layers", "n_layers", via=ConfigReader.layers),
        Field("num_heads", "n_heads"),
        Field("window_size", "window", SIZE),
        _AttentionTypes(),
        Field("activation_function", "activation", TEXT),
        Field("layer_norm_epsilon", "norm_eps"),
        *Fields("attention_dropout", kind=RATE, embedding_dropout="embed_dropout", residual_dropout="resid_dropout"),
        without=("n_kv_heads", "head_size", "rope_theta"),
    )
    aliases = Aliases(num_attention_heads="num_heads", num_hidden_layers="num_layers")
    names = Names(
        {
            "ln_1": "attention_norm",
            "attn.attention.q_proj": "attention.query",
            "attn.attention.k_proj": "attention.key",
            "attn.attention.v_proj": "attention.value",
            "attn.attention.out_proj": "attention.output",
            "ln_2": "mlp_norm",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        token_score="classifier",
        others={"transformer.wpe.weight": "positions"},
        # Attention masks in old files.
        ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
    )
    sizes = published(
        {
            "125m": {"d_model": 768, "n_layers": 12, "n_heads": 12},
            "1.3b": {},
            "2.7b": {"d_model": 2560, "n_layers": 32, "n_heads": 20},
        }
    )

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers that have the window if the config does not say which."""
        return tuple(range(1, n_layers, 2))


class GPTNeo(Decoder, config=GPTNeoConfig, init=False):
    """A GPT-Neo, from token ids to the logits of each next token. See `Decoder`."""
