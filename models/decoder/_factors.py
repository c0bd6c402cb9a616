"""`Factors`: what a block multiplies its inputs and outputs with, beside the weights, as models trained with muP do.

Factors of embeddings, attention scores, residual additions and logits are values of `DecoderConfig` themselves.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Factors:
    """The factors in each layer of a decoder.

    **Arguments:**

    - `attention_input`, `attention_output`: of what attention reads, and of what it returns.
    - `key`: of keys.
    - `mixer_input`, `mixer_output`: of what a mixer reads, and of what it returns.
    - `states`: of what a mixer with states projects: queries, keys, values, gates and steps.
    - `gate`, `mlp_output`: of the MLP's gate before its activation, and of what the MLP returns.
    """

    attention_input: float = 1.0
    attention_output: float = 1.0
    key: float = 1.0
    mixer_input: float = 1.0
    mixer_output: float = 1.0
    states: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    mlp_output: float = 1.0


PLAIN = Factors()
