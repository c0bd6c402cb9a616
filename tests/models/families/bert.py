"""BERT: with a pooler, for masked tokens with the tied head, for classes of texts and tokens, for regression; padded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.bert import BertConfig, BertForMaskedLM, BertForSequenceClassification
from tests.models.families._case import Case, Training

VOCAB, SEQ = 47, 7
SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 10,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def make(architecture, **kwargs):
    import transformers

    return getattr(transformers, architecture)(transformers.BertConfig(**{**SIZES, **kwargs})).eval()


make_base = functools.partial(make, "BertModel")
make_mlm = functools.partial(make, "BertForMaskedLM")
make_classifier = functools.partial(make, "BertForSequenceClassification")
make_tagger = functools.partial(make, "BertForTokenClassification", num_labels=4)


def arguments(inputs):
    import torch

    names = {"ids": "input_ids", "token_types": "token_type_ids", "mask": "attention_mask"}
    return {names[name]: torch.tensor(value).long() for name, value in inputs.items()}


def run(module, inputs):
    """Returns the hidden states, followed by the pooled one."""
    import torch

    outputs = module(**arguments(inputs))
    return torch.cat([outputs.last_hidden_state, outputs.pooler_output[:, None]], 1)


def call(model, row):
    hidden = model(**row)
    return jnp.concatenate([hidden, model.pool(hidden)[None]])


def run_logits(module, inputs):
    return module(**arguments(inputs)).logits


rng = np.random.default_rng(0)
IDS = rng.integers(1, VOCAB, (2, SEQ)).astype(np.int32)
TYPES = (np.arange(SEQ) >= np.array([[4], [2]])).astype(np.int32)
RIGHT = np.arange(SEQ) < np.array([[SEQ], [4]])
BATCH = {"ids": np.where(RIGHT, IDS, 0).astype(np.int32), "token_types": TYPES, "mask": RIGHT}
MANY = {"ids": rng.integers(1, VOCAB, (6, SEQ)).astype(np.int32), "mask": np.arange(SEQ) < np.arange(2, 8)[:, None]}
LABELS = {0: "no", 1: "yes", 2: "perhaps"}

CASES = [
    Case("bert", make_base, {"ids": IDS}, run, call, gradients=True),
    Case("bert-odd-head-size", functools.partial(make_base, hidden_size=21, type_vocab_size=3), BATCH, run, call),
    Case("bert-mlm", make_mlm, {"ids": IDS, "token_types": TYPES}, run_logits, gradients=True),
    Case("bert-mlm-padded", functools.partial(make_mlm, hidden_act="relu"), BATCH, run_logits, counts=RIGHT),
    Case(
        "bert-last-position",
        functools.partial(make_mlm, max_position_embeddings=SEQ, hidden_act="gelu_new", layer_norm_eps=1e-3),
        {"ids": IDS},
        run_logits,
    ),
    Case(
        "bert-classes",
        functools.partial(make_classifier, id2label=LABELS, label2id={label: i for i, label in LABELS.items()}),
        BATCH,
        run_logits,
        gradients=True,
    ),
    Case(
        "bert-regression",
        functools.partial(make_classifier, num_labels=1, problem_type="regression", classifier_dropout=0.3),
        MANY,
        run_logits,
    ),
    Case("bert-tokens", make_tagger, BATCH, run_logits, counts=RIGHT),
]


def mlm_loss(model, batch, key):
    """The cross-entropy of the masked tokens: every third one."""
    hidden = np.arange(batch["ids"].shape[1]) % 3 == 1
    inputs = jnp.where(hidden, 1, batch["ids"])
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(inputs, jax.random.split(key, len(inputs)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"])
    return Loss((losses * hidden).sum(), len(inputs) * hidden.sum())


def classes_loss(model, batch, key):
    """The cross-entropy of each text's class."""
    keys = jax.random.split(key, len(batch["ids"]))
    logits = jax.vmap(lambda ids, mask, key: model(ids, mask=mask, key=key))(batch["ids"], batch["mask"], keys)
    return Loss(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).sum(), len(logits))


CONFIG = BertConfig(64, 12, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_classes=4, init_std=0.1).without_dropout()
EXAMPLES = [{"ids": rng.integers(2, 64, 9), "mask": np.arange(9) < 5 + i % 5, "label": np.int32(i % 4)} for i in range(16)]
TRAININGS = [
    Training("bert-mlm", lambda key: BertForMaskedLM(CONFIG, key=key), EXAMPLES, mlm_loss),
    Training("bert-classes", lambda key: BertForSequenceClassification(CONFIG, key=key), EXAMPLES, classes_loss, 0.05),
]
