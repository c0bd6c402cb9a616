"""RoBERTa and XLM-R: with a pooler, for masked tokens, for classes of texts and of tokens; padded on the left and inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from redeqx.models import cross_entropy
from redeqx.models.roberta import RobertaConfig, RobertaForMaskedLM
from tests.models.families._case import Case, Training
from tests.models.families.bert import call, run, run_logits

VOCAB, SEQ, PAD = 47, 7, 1
SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ + PAD + 1,  # as many positions as tokens
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def make(architecture, prefix="Roberta", **kwargs):
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **kwargs})
    return getattr(transformers, f"{prefix}{architecture}")(config).eval()


make_classifier = functools.partial(make, "ForSequenceClassification", num_labels=3)

rng = np.random.default_rng(0)
IDS = rng.integers(5, VOCAB, (2, SEQ)).astype(np.int32)
MASK = np.ones((2, SEQ), bool)
MASK[0, :3] = MASK[1, 5:] = False  # on the left and on the right
PADDED = np.where(MASK, IDS, PAD).astype(np.int32)
PADDED[1, 2] = PAD  # a padding token that is attended to has no position either
RIGHT = np.arange(SEQ) < np.array([[SEQ], [4]])
TEXTS = {"ids": np.where(RIGHT, IDS, PAD).astype(np.int32), "mask": RIGHT}

CASES = [
    Case("roberta", functools.partial(make, "Model"), {"ids": IDS}, run, call, gradients=True),
    Case("roberta-mlm", functools.partial(make, "ForMaskedLM"), {"ids": IDS}, run_logits, gradients=True),
    Case(
        "roberta-mlm-padded",
        functools.partial(make, "ForMaskedLM", hidden_act="relu", type_vocab_size=1, layer_norm_eps=1e-5),
        {"ids": PADDED, "mask": MASK},
        run_logits,
        counts=MASK,
    ),
    Case("roberta-classes", make_classifier, TEXTS, run_logits),
    Case(
        "roberta-tokens",
        functools.partial(make, "ForTokenClassification", num_labels=5),
        {"ids": PADDED, "mask": MASK, "token_types": (np.arange(SEQ) > 3) * np.ones((2, 1), np.int32)},
        run_logits,
        counts=MASK,
    ),
    Case(
        "xlm-roberta-classes",
        functools.partial(make_classifier, prefix="XLMRoberta", pad_token_id=4, max_position_embeddings=12),
        {"ids": np.where(RIGHT, IDS, 4).astype(np.int32), "mask": RIGHT},
        run_logits,
        gradients=True,
    ),
]


def loss_fn(model, batch, key):
    """The cross-entropy of the masked tokens: every third one."""
    del key
    is_hidden = np.arange(batch["ids"].shape[1]) % 3 == 1
    hidden = jax.vmap(model.hidden)(jnp.where(is_hidden, 2, batch["ids"]))
    return cross_entropy(hidden, jnp.where(is_hidden, batch["ids"], -100), head=model.logits)


CONFIG = RobertaConfig(64, 12, d_model=32, d_ff=64, n_layers=2, n_heads=4, init_std=0.1).without_dropout()
TRAININGS = [
    Training(
        "roberta-mlm",
        lambda key: RobertaForMaskedLM(CONFIG, key=key),
        [{"ids": rng.integers(3, 64, 9)} for _ in range(16)],
        loss_fn,
    )
]
