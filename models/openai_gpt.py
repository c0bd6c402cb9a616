"""GPT (the first one): GPT-2 with norms after each addition, and none at the end.

Source: Radford et al. 2018, *Improving Language Understanding by Generative Pre-Training*.
"""

from dataclasses import dataclass, replace

from ._kinds import TEXT
from .decoder import GPT_ROWS, Decoder, rows
from .gpt2 import GPT2Config
from .hf import Field, published

_ACTIVATIONS = {"gelu": "gelu_new", "swish": "silu", "relu": "relu", "silu": "silu"}  # `afn`, and our names


def _named(config: "OpenAIGPTConfig") -> str:
    return next(name for name, activation in _ACTIVATIONS.items() if activation == config.activation)


@dataclass(frozen=True)
class OpenAIGPTConfig(GPT2Config):
    """The sizes and dropout rates of a GPT. The defaults are those of the published one. See `DecoderConfig`."""

    vocab_size, n_positions = 40478, 512
    norm_places = "sum"
    bos_token_id = eos_token_id = None

    model_type = "openai-gpt"
    architecture = "OpenAIGPTLMHeadModel"
    activations = ("gelu_new", "silu", "relu")
    scales_residual = False
    position_scale = 1.0
    rows = rows(
        *(row for row in GPT_ROWS if not {"activation", "d_mlp"} & row.keys.keys()),
        Field("afn", "activation", TEXT, load=lambda name, known: _ACTIVATIONS.get(name, name), save=_named),
        without=("n_kv_heads", "head_size", "rope_theta", "d_mlp"),
    )
    names = replace(
        GPT2Config.names,
        embedding="transformer.tokens_embed",
        others={"transformer.positions_embed.weight": "positions"},
        token_score="score",
    )
    sizes = published({"117m": {}})


class OpenAIGPT(Decoder, config=OpenAIGPTConfig, init=False):
    """A GPT, from token ids to the logits of each next token. See `Decoder`."""
