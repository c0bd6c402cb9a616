"""Mamba, also Falcon-Mamba: a decoder whose layers have the first Mamba's state space, and neither attention nor an MLP.

Sources: *Mamba* (arXiv:2312.00752); *Falcon Mamba* (arXiv:2410.05355).
"""

from dataclasses import dataclass

from .decoder import Decoder, DecoderConfig, DrawnSteps, Names, ScanWidth, StepRank, mamba1_names, rows
from .hf import Field, Only, Row, published


def alone(*own: Row) -> tuple[Row, ...]:
    """Returns these rows and those of all models whose layers have only a state space."""
    return rows(
        Field("layer_norm_epsilon", "norm_eps"),
        Field("conv_kernel"),
        Field("use_conv_bias", "conv_bias"),
        Field("state_size"),
        *own,
        Only("use_bias", False),
        Only("rescale_prenorm_residual", False),  # transformers 5.24 also divides the weights that it reads
        without=("n_positions", "d_mlp", "n_heads", "n_kv_heads", "head_size", "rope_theta", "attention_dropout"),
    )


@dataclass(frozen=True)
class MambaConfig(DecoderConfig):
    """The sizes of a Mamba. The defaults are those of transformers, which are those of no published model. See
    `DecoderConfig`.

    `n_positions` only limits texts, as the model has no positions. Initial convolutions are drawn as in other decoders.
    """

    vocab_size, n_positions = 50280, 2**20
    d_model, n_heads = 768, 1
    mixer, conv_bias = "mamba1", True
    state_groups, state_heads, state_size, state_value_size = 1, 1, 16, 1536
    norm_eps = 1e-5
    shares_norm = True
    is_tied = True
    bos_token_id = eos_token_id = pad_token_id = 0
    init_std = 0.1

    model_type = "mamba"
    attention_period, unrotated_period, has_one_part = 0, 1, True
    rows = alone(ScanWidth("expand", "intermediate_size"), StepRank("time_step_rank"), DrawnSteps(of_weights=True))
    names = Names(
        {"norm": "attention_norm", **mamba1_names("mixer")},
        layers="backbone.layers.{}.",
        embedding="backbone.embeddings",
        norm="backbone.norm_f",
        aliases=((r"^backbone\.embedding\.", "backbone.embeddings."),),
    )
    sizes = published(
        {
            "130m": {"n_layers": 24},
            "370m": {"n_layers": 48, "d_model": 1024, "state_value_size": 2048},
            "790m": {"n_layers": 48, "d_model": 1536, "state_value_size": 3072},
            "1.4b": {"n_layers": 48, "d_model": 2048, "state_value_size": 4096},
            "2.8b": {"n_layers": 64, "d_model": 2560, "state_value_size": 5120},
        }
    )


class Mamba(Decoder, config=MambaConfig, init=False):
    """A Mamba, from token ids to the logits of each next token. See `Decoder`."""


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    """The sizes of a Falcon-Mamba: Mamba with norms of queries, keys and steps. The defaults are those of transformers. See
    `DecoderConfig`."""

    model_type = "falcon_mamba"
    scan_norm = "plain"
    rows = (*MambaConfig.rows, Only("mixer_rms_eps", 1e-6))
    sizes = published(
        {"7b": {"vocab_size": 65024, "d_model": 4096, "state_value_size": 8192, "n_layers": 64, "is_tied": False}},
        eos_token_id=11,
        pad_token_id=11,
    )


class FalconMamba(Decoder, config=FalconMambaConfig, init=False):
    """A Falcon-Mamba, from token ids to the logits of each next token. See `Decoder`."""
