"""GPT-NeoX, also Pythia: attention and MLP run in parallel, each after its own layer norm; and Persimmon, one after another.

Sources: Black et al. 2022, *GPT-NeoX-20B* (arXiv:2204.06745); Biderman et al. 2023, *Pythia* (arXiv:2304.01373);
Elsen et al. 2023, *Releasing Persimmon-8B*, adept.ai/blog/persimmon-8b.
"""

from dataclasses import dataclass

from .decoder import ByHead, Choice, Decoder, GPTConfig, Names, Rope, Shared, rows
from .hf import Aliases, Field, Fields, Only, published


@dataclass(frozen=True)
class GPTNeoXConfig(GPTConfig):
    """The sizes of a GPT-NeoX. The defaults are those with 20 billion parameters. See `DecoderConfig`."""

    vocab_size = 50432
    d_model, d_mlp, n_layers, n_heads = 6144, 24576, 44, 64
    attention_bias = True
    rope_share = 0.25
    is_parallel = True
    activation = "gelu"
    bos_token_id, eos_token_id = 0, 2

    model_type = "gpt_neox"
    rows = rows(
        *Fields("attention_bias", norm_eps="layer_norm_eps", is_parallel="use_parallel_residual"),
        Shared("hidden_dropout", "residual_dropout", "embedding_dropout"),
        Rope(has_share=True),
        # transformers would rotate a share of these dims instead of those that a head has.
        Only("head_dim", lambda known: (known["d_model"] // known["n_heads"], None), is_written=False),
        without=("head_size", "n_kv_heads"),
    )
    aliases = Aliases(rotary_pct="partial_rotary_factor", rotary_emb_base="rope_theta")
    names = Names(
        {
            "input_layernorm": "attention_norm",
            "attention.query_key_value": ByHead(("attention.query", "attention.key", "attention.value")),
            "attention.dense": "attention.output",
            "post_attention_layernorm": "mlp_norm",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        layers="gpt_neox.layers.{}.",
        embedding="gpt_neox.embed_in",
        token_score="classifier",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),  # in old files
    )
    sizes = published(
        {
            "pythia-160m": {"vocab_size": 50304, "d_model": 768, "d_mlp": 3072, "n_layers": 12, "n_heads": 12},
            "pythia-1.4b": {"vocab_size": 50304, "d_model": 2048, "d_mlp": 8192, "n_layers": 24, "n_heads": 16},
            "pythia-6.9b": {"d_model": 4096, "d_mlp": 16384, "n_layers": 32, "n_heads": 32},
            "20b": {},
        }
    )


class GPTNeoX(Decoder, config=GPTNeoXConfig, init=False):
    """A GPT-NeoX or Pythia, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class PersimmonConfig(GPTNeoXConfig):
    """The sizes of a Persimmon. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 262144, 16384
    d_model, d_mlp, n_layers = 4096, 16384, 36
    head_norm = "head"
    rope_share = 0.5
    is_parallel = False
    activation = "relu2"
    bos_token_id = 1

    model_type = "persimmon"
    rows = rows(
        Field("layer_norm_eps", "norm_eps"),
        # transformers applies it to the output of the MLP only.
        Only("hidden_dropout", 0.0, name="residual_dropout"),
        Choice("qk_layernorm", {"head_norm": (None, "head")}, default=True),
        Rope(has_share=True),
        Only("head_dim", lambda known: (known["d_model"] // known["n_heads"], None), is_written=False),
        without=("head_size", "n_kv_heads"),
    )
    aliases = Aliases()
    names = Names(
        {
            "self_attn.query_key_value": ByHead(("attention.query", "attention.key", "attention.value")),
            "self_attn.dense": "attention.output",
            "self_attn.q_layernorm": "attention.query_norm",
            "self_attn.k_layernorm": "attention.key_norm",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        norm="model.final_layernorm",
    )


class Persimmon(Decoder, config=PersimmonConfig, init=False):
    """A Persimmon, from token ids to the logits of each next token. See `Decoder`."""
