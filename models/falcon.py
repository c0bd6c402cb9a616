"""Falcon: attention and MLP run in parallel, with one or a few heads of keys and values, and no biases.

Falcon-RW has biases and ALiBi in place of rotary positions, and computes the MLP after attention. Falcon 3 has LLaMA's model
type.

Sources: *The Falcon Series of Open Language Models* (arXiv:2311.16867); *The RefinedWeb Dataset* (arXiv:2306.01116).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ._kinds import RATE, SIZE, TEXT
from .decoder import ByHead, Choice, Decoder, GPTConfig, Inner, Names, Shared, rows
from .hf import Aliases, ConfigReader, Field, Only, Row, published


class _Architecture(Row):
    """The heads of keys and values, and the norms, which follow from five keys."""

    keys = MappingProxyType(
        {"n_kv_heads": "num_kv_heads", "shares_norm": "num_ln_in_parallel_attn", "is_parallel": "parallel_attn"}
    )

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        is_new = reader.get("new_decoder_architecture", False)
        n_kv_heads = reader.get("num_kv_heads", None, SIZE)  # the old architecture ignores it
        if not is_new:
            n_kv_heads = 1 if reader.get("multi_query", True) else None
        is_parallel = reader.get("parallel_attn", True)
        n_norms = reader.get("num_ln_in_parallel_attn", 2 if is_new else 1, SIZE)
        if is_new and not is_parallel:
            raise reader.refuse("parallel_attn", False, "true with `new_decoder_architecture`")
        shares_norm = is_parallel and not (is_new and n_norms == 2)
        return {"n_kv_heads": n_kv_heads, "is_parallel": is_parallel, "shares_norm": shares_norm}

    def write(self, config: Any) -> dict[str, Any]:
        return {
            "new_decoder_architecture": config.is_new,
            "num_kv_heads": config.groups,
            "multi_query": config.groups == 1 != config.n_heads,
            "parallel_attn": config.is_parallel,
            "num_ln_in_parallel_attn": 2 if config.is_parallel and not config.shares_norm else 1,
        }


_RW = {"vocab_size": 50304, "n_kv_heads": None, "bias_range": 8.0, "is_parallel": False, "shares_norm": False}
_RW |= {"attention_bias": True, "mlp_bias": True, "bos_token_id": 1}


@dataclass(frozen=True)
class FalconConfig(GPTConfig):
    """The sizes of a Falcon. The defaults are those with 7 billion parameters. See `DecoderConfig`."""

    vocab_size = 65024
    d_model, n_heads = 4544, 71
    n_kv_heads = 1
    is_parallel = shares_norm = True
    activation, mlp_bias = "gelu", False
    is_tied = True
    bos_token_id = eos_token_id = 11

    model_type = "falcon"
    scales_bias = True
    rows = rows(
        _Architecture(),
        Inner("ffn_hidden_size"),
        Field("activation", kind=TEXT),
        Field("layer_norm_epsilon", "norm_eps"),
        Shared("bias", "attention_bias", "mlp_bias"),
        Field("hidden_dropout", "residual_dropout", RATE),
        # transformers applies it to nothing, or to what attention adds to the residual stream.
        Only("attention_dropout", 0.0, name="attention_dropout"),
        Choice("alibi", {"bias_range": (None, 8.0)}, default=False),
        without=("head_size",),
    )
    aliases = Aliases(n_embed="hidden_size")
    names = Names(
        {
            "self_attention.query_key_value": ByHead(
                ("attention.query", "attention.key", "attention.value"), lambda config: config.groups
            ),
            "self_attention.dense": "attention.output",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        layers="transformer.h.{}.",
        embedding="transformer.word_embeddings",
        norm="transformer.ln_f",
        token_score="classifier",
    )
    sizes = published(
        {
            "7b": {},
            "40b": {"d_model": 8192, "n_layers": 60, "n_heads": 128, "n_kv_heads": 8, "shares_norm": False},
            "rw-1b": {"d_model": 2048, "n_layers": 24, "n_heads": 32, "eos_token_id": 2, **_RW},
            "rw-7b": {"d_model": 4096, "n_layers": 36, "n_heads": 64, **_RW},
        }
    )

    @property
    def is_new(self) -> bool:
        """Whether this is the architecture of the model with 40 billion parameters."""
        return (self.is_parallel and not self.shares_norm) or 1 < self.groups < self.n_heads

    def disk_names(self) -> Names:
        """Returns the names of tensors on disk. The new architecture has other norms."""
        if not (self.is_parallel and not self.shares_norm):
            return self.names
        return replace(self.names, block={**self.names.block, "ln_attn": "attention_norm", "ln_mlp": "mlp_norm"})


class Falcon(Decoder, config=FalconConfig, init=False):
    """A Falcon, from token ids to the logits of each next token. See `Decoder`."""
