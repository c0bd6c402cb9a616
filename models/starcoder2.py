"""StarCoder2: a pre-norm decoder with layer norms, biases everywhere, a window, and an MLP without a gate.

Source: Lozhkov et al. 2024, *StarCoder 2 and The Stack v2* (arXiv:2402.19173).
"""

from dataclasses import dataclass

from ._kinds import RATE
from .decoder import Decoder, GPTConfig, Names, Shared, Window, rows
from .hf import Field, Fields, published


@dataclass(frozen=True)
class Starcoder2Config(GPTConfig):
    """The sizes of a StarCoder2. The defaults are those of transformers. See `DecoderConfig`."""

    vocab_size, n_positions = 49152, 4096
    d_model, d_mlp, n_layers, n_heads = 3072, 12288, 30, 24
    n_kv_heads = 2
    attention_bias = True
    activation = "gelu_pytorch_tanh"
    is_tied = True
    bos_token_id = eos_token_id = 50256
    init_std = 0.018042

    model_type = "starcoder2"
    rows = rows(
        Field("norm_epsilon", "norm_eps"),
        *Fields("embedding_dropout", "residual_dropout", kind=RATE),
        Shared("use_bias", "attention_bias", "mlp_bias"),
        Window(),
        without=("head_size",),
    )
    names = Names({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"})
    sizes = published(
        {
            "3b": {"rope_theta": 999999.4420358813},
            "7b": {"d_model": 4608, "d_mlp": 18432, "n_layers": 32, "n_heads": 36, "n_kv_heads": 4, "rope_theta": 1e6},
            "15b": {"d_model": 6144, "d_mlp": 24576, "n_layers": 40, "n_heads": 48, "n_kv_heads": 4, "rope_theta": 1e5,
                    "is_tied": False},
        },
        n_positions=16384, window=4096, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


class Starcoder2(Decoder, config=Starcoder2Config, init=False):
    """A StarCoder2, from token ids to the logits of each next token. See `Decoder`."""
