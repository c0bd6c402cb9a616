"""Mamba-2, also Codestral Mamba: a decoder whose layers have a state space, and neither attention nor an MLP.

Source: *Transformers are SSMs* (arXiv:2405.21060).
"""

from dataclasses import dataclass, replace

from .decoder import Decoder, DrawnSteps, StateHeads, StepLimits, mamba_names
from .hf import Field, published
from .mamba import MambaConfig, alone


@dataclass(frozen=True)
class Mamba2Config(MambaConfig):
    """The sizes of a Mamba-2. The defaults are those of transformers, which are Codestral Mamba's. See `MambaConfig`."""

    vocab_size = 32768
    d_model, n_layers = 4096, 64
    mixer = "mamba"
    state_groups, state_heads, state_size, state_value_size = 8, 128, 128, 64
    is_tied = False
    eos_token_id, pad_token_id = 2, 1

    model_type = "mamba2"
    rows = alone(
        Field("n_groups", "state_groups"), StateHeads("num_heads", "head_dim", "expand"), StepLimits(), DrawnSteps()
    )
    names = replace(MambaConfig.names, block={"norm": "attention_norm", **mamba_names("mixer")})
    sizes = published({"codestral-7b": {}})


class Mamba2(Decoder, config=Mamba2Config, init=False):
    """A Mamba-2, from token ids to the logits of each next token. See `Decoder`."""
