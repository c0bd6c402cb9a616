"""BART: positions with an offset of two rows that count padding, post-norm, encoder and decoder of different sizes."""

import functools

import jax
import numpy as np

from redeqx.models.bart import Bart, BartConfig
from redeqx.models.nn import cross_entropy
from tests.models.families._case import Case, Training

VOCAB, SOURCE, TARGET = 47, 8, 6


def make(**kwargs):
    import transformers

    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 12, "d_model": 24}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 3, f"{side}_ffn_dim": 40}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**{**sizes, **kwargs})).eval()


def run(module, inputs):
    import torch

    names = {"input_ids": "ids", "decoder_input_ids": "decoder_ids"}
    masks = {"attention_mask": "mask", "decoder_attention_mask": "decoder_mask"}
    given = {name: torch.tensor(inputs[ours]) for name, ours in names.items()}
    given |= {name: torch.tensor(inputs[ours]).long() for name, ours in masks.items() if ours in inputs}
    return module(**given).logits


rng = np.random.default_rng(0)
INPUTS = {
    "ids": rng.integers(3, VOCAB, (2, SOURCE)).astype(np.int32),
    "decoder_ids": rng.integers(3, VOCAB, (2, TARGET)).astype(np.int32),
}
LEFT = np.arange(TARGET) >= np.array([[0], [2]])  # the second row has two padding tokens on the left
# The first source is padded on the right, the second on the left.
PADDED = {"mask": (np.arange(SOURCE) < 5) ^ np.array([[False], [True]]), "decoder_mask": LEFT}
UNEQUAL = {"decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}

CASES = [
    Case("bart", make, INPUTS, run, gradients=True),
    Case("bart-padded", make, {**INPUTS, **PADDED}, run, counts=LEFT, generates=True),
    Case("bart-scaled", functools.partial(make, scale_embedding=True), INPUTS, run, gradients=True),
    Case("bart-unequal", functools.partial(make, **UNEQUAL), INPUTS, run),
    Case("bart-last-position", functools.partial(make, max_position_embeddings=SOURCE), INPUTS, run),
    Case("bart-relu", functools.partial(make, activation_function="relu"), INPUTS, run),
]


def loss_fn(model, batch, key):
    """The cross-entropy of the labels; -100 is ignored."""

    def logits(ids, mask, labels, key):
        return model(ids, model.shift_right(labels), mask=mask, key=key)

    keys = jax.random.split(key, len(batch["ids"]))
    return cross_entropy(jax.vmap(logits)(batch["ids"], batch["mask"], batch["labels"], keys), batch["labels"])


def example(i):
    ids = rng.integers(3, 64, 10)
    mask = np.arange(10) < 10 - i % 3
    return {"ids": np.where(mask, ids, 1), "mask": mask, "labels": np.where(np.arange(8) < 8 - i % 4, ids[:8], -100)}


SIZES = {"vocab_size": 64, "n_positions": 16, "d_model": 32, "n_layers": 2, "n_decoder_layers": 2, "n_heads": 4}
CONFIG = BartConfig(**SIZES, n_decoder_heads=4, d_ff=64, d_decoder_ff=64, init_std=0.1).without_dropout()
TRAININGS = [Training("bart", lambda key: Bart(CONFIG, key=key), [example(i) for i in range(16)], loss_fn)]
