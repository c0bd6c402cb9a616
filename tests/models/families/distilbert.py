"""DistilBERT: without a head, for masked tokens, for classes of texts and of tokens; padded."""

import functools

import numpy as np

from redeqx.models.distilbert import DistilBertConfig, DistilBertForSequenceClassification
from tests.models.families._case import Case, Training
from tests.models.families.bert import EXAMPLES, classes_loss, run_logits

VOCAB, SEQ = 47, 7
SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
    "dim": 24,
    "hidden_dim": 40,
    "n_layers": 2,
    "n_heads": 3,
}


def make(architecture, **kwargs):
    import transformers

    config = transformers.DistilBertConfig(**{**SIZES, **kwargs})
    return getattr(transformers, f"DistilBert{architecture}")(config).eval()


def run(module, inputs):
    import torch

    return module(torch.tensor(inputs["ids"]).long(), torch.tensor(inputs["mask"]).long()).last_hidden_state


rng = np.random.default_rng(0)
RIGHT = np.arange(SEQ) < np.array([[SEQ], [4]])
BATCH = {"ids": np.where(RIGHT, rng.integers(1, VOCAB, (2, SEQ)), 0).astype(np.int32), "mask": RIGHT}

CASES = [
    Case("distilbert", functools.partial(make, "Model"), BATCH, run, counts=RIGHT),
    Case(
        "distilbert-mlm",
        functools.partial(make, "ForMaskedLM", activation="relu"),
        {"ids": BATCH["ids"][:1]},
        run_logits,
        gradients=True,
    ),
    Case(
        "distilbert-classes",
        functools.partial(make, "ForSequenceClassification", num_labels=3, sinusoidal_pos_embds=True),
        BATCH,
        run_logits,
    ),
    Case("distilbert-tokens", functools.partial(make, "ForTokenClassification"), BATCH, run_logits, counts=RIGHT),
]

CONFIG = DistilBertConfig(64, 12, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_classes=4, init_std=0.1).without_dropout()
TRAININGS = [
    Training("distilbert", lambda key: DistilBertForSequenceClassification(CONFIG, key=key), EXAMPLES, classes_loss, 0.05)
]
