"""The keys of `config.json` that encoders share, in BERT's names."""

from collections.abc import Mapping
from typing import Any

from .._kinds import RATE
from ..hf import BLOCKS, DROPOUT, Classes, Field, Fields, Fixed, ModelType, Only, Row, Tokens

ROWS: tuple[Row, ...] = (
    Only("tie_word_embeddings", True),
    *Fields("vocab_size", n_positions="max_position_embeddings", n_token_types="type_vocab_size"),
    Field("intermediate_size", "d_ff"),
    *BLOCKS,
    *DROPOUT,
    Classes(),
    Field("classifier_dropout", kind=RATE),
    Tokens(),
    Field("initializer_range", "init_std"),
    # `config.json` does not describe a pooler (see `Encoder.read_config`).
)
# What else BERT and RoBERTa can be in transformers.
BERT: tuple[Row, ...] = (*Fixed(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),)


def rows(model_types: Mapping[str, Mapping[str, Any]], *changed: Row, without: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Returns BERT's rows with some changed or added: a row replaces those that hold one of its fields.

    **Arguments:**

    - `model_types`: the model types of the family, with each type's own defaults.
    - `without`: fields whose rows are left out.
    """
    replaced = {name for row in changed for name in row.keys} | set(without)
    return (ModelType(model_types), *(row for row in ROWS if replaced.isdisjoint(row.keys)), *changed)
