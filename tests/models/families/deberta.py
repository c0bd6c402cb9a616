"""DeBERTa: distances in buckets and without, near and far, for masked tokens with both heads, for classes; padded."""

import functools

import numpy as np

from redeqx.models.deberta import DebertaConfig, DebertaForMaskedLM
from tests.models.families._case import Case, Training
from tests.models.families.bert import mlm_loss

VOCAB, SEQ = 47, 12
SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 16,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "relative_attention": True,
    "position_buckets": 6,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}


def make(architecture, **kwargs):
    import transformers

    return getattr(transformers, architecture)(transformers.DebertaV2Config(**{**SIZES, **kwargs})).eval()


def arguments(inputs):
    import torch

    names = {"ids": "input_ids", "mask": "attention_mask"}
    return {names[name]: torch.tensor(value).long() for name, value in inputs.items()}


def run(module, inputs):
    return module(**arguments(inputs)).last_hidden_state


def run_logits(module, inputs):
    return module(**arguments(inputs)).logits


make_base = functools.partial(make, "DebertaV2Model")
make_mlm = functools.partial(make, "DebertaV2ForMaskedLM")
rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB, (2, SEQ)).astype(np.int32)
RIGHT = np.arange(SEQ) < np.array([[SEQ], [7]])
BATCH = {"ids": np.where(RIGHT, IDS, 0).astype(np.int32), "mask": RIGHT}

CASES = [
    Case("deberta", make_base, {"ids": IDS}, run, gradients=True),
    Case("deberta-near", functools.partial(make_base, position_buckets=-1, max_relative_positions=5), {"ids": IDS}, run),
    Case("deberta-mlm", functools.partial(make_mlm, hidden_act="relu"), BATCH, run_logits, counts=RIGHT),
    Case("deberta-mlm-own-head", functools.partial(make_mlm, legacy=False), {"ids": IDS}, run_logits, gradients=True),
    Case(
        "deberta-classes",
        functools.partial(make, "DebertaV2ForSequenceClassification", num_labels=3, pooler_hidden_act="tanh"),
        BATCH,
        run_logits,
        gradients=True,
    ),
    Case("deberta-tokens", functools.partial(make, "DebertaV2ForTokenClassification"), BATCH, run_logits, counts=RIGHT),
]

CONFIG = DebertaConfig(64, 12, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_buckets=8, init_std=0.1).without_dropout()
EXAMPLES = [{"ids": rng.integers(2, 64, 9)} for _ in range(16)]
TRAININGS = [Training("deberta", lambda key: DebertaForMaskedLM(CONFIG, key=key), EXAMPLES, mlm_loss)]
