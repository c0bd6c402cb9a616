"""CWM: LLaMA with a window in all but every fourth layer, of which the first has none.

Source: *CWM: An Open-Weights LLM for Research on Code Generation with World Models* (arXiv:2510.02387).
"""

from dataclasses import dataclass

from .decoder import Decoder, LayerTypes, rows
from .hf import Field
from .llama import LlamaConfig
from .nn import Llama3Scaling

_SCALING = Llama3Scaling(16.0, 1.0, 4.0, 8192)


@dataclass(frozen=True)
class CwmConfig(LlamaConfig):
    """The sizes of a CWM. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 128256, 131072
    d_model, d_mlp, n_layers, n_heads = 6144, 21504, 64, 48
    n_kv_heads, head_size = 8, 128
    window = 8192
    rope_theta = 1e6
    rope_scaling = _SCALING
    norm_eps = 1e-5
    bos_token_id, eos_token_id = 128000, (128001, 128008, 128009)

    model_type = "cwm"
    rows = rows(Field("mlp_bias"), LayerTypes())

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        return tuple(i for i in range(n_layers) if i % 4)


class Cwm(Decoder, config=CwmConfig, init=False):
    """A CWM, from token ids to the logits of each next token. See `Decoder`."""
