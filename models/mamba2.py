"""Mamba-2, also Codestral Mamba: a decoder whose layers have a state space, and neither attention nor an MLP.

Source: *Transformers are SSMs* (arXiv:2405.21060).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, Names, StateHeads, StepLimits, mamba_names, rows
from .hf import Field, Only, published


@dataclass(frozen=True)
class Mamba2Config(DecoderConfig):
    """The sizes of a Mamba-2. The defaults are those of transformers, which are Codestral Mamba's. See `DecoderConfig`.

    `n_positions` only limits texts, as the model has no positions. Initial steps and convolutions are drawn as in other
    decoders, not as `time_step_min` and others say, which are kept.
    """

    vocab_size: int = 32768
    n_positions: int = 2**20
    n_layers: int = 64
    n_heads: int = 1
    mixer: str = "mamba"
    conv_bias: bool = True
    state_groups: int = 8
    state_heads: int = 128
    state_value_size: int = 64
    norm_eps: float = 1e-5
    shares_norm: bool = True
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    init_std: float = 0.1

    model_type = "mamba2"
    attention_period, unrotated_period, has_one_part = 0, 1, True
    rows = rows(
        *(Field("layer_norm_epsilon", "norm_eps"), Field("conv_kernel"), Field("use_conv_bias", "conv_bias")),
        *(Field("n_groups", "state_groups"), Field("state_size"), Only("use_bias", False)),
        *(StateHeads("num_heads", "head_dim", "expand"), StepLimits()),
        Only("rescale_prenorm_residual", False),  # transformers 5.24 also divides the weights that it reads
        without=("n_positions", "d_mlp", "n_heads", "n_kv_heads", "head_size", "rope_theta", "attention_dropout"),
    )
    names = Names(
        {"norm": "attention_norm", **mamba_names("mixer")},
        layers="backbone.layers.{}.",
        embedding="backbone.embeddings",
        norm="backbone.norm_f",
        aliases=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    )
    sizes = published({"codestral-7b": {}})


class Mamba2(Decoder, config=Mamba2Config, init=False):
    """A Mamba-2, from token ids to the logits of each next token. See `Decoder`."""
