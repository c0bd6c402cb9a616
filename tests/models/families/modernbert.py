"""ModernBERT: layers with and without a window, for masked tokens, for classes of texts and of tokens; biases, padding."""

import functools

import numpy as np

from redeqx.models.modernbert import ModernBertConfig, ModernBertForMaskedLM
from tests.models.families._case import Case, Training
from tests.models.families.bert import run_logits
from tests.models.families.roberta import loss_fn

VOCAB, SEQ = 47, 9
SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 12,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "local_attention": 4,  # a token attends to two on each side
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}


def make(architecture, **kwargs):
    import transformers

    config = transformers.ModernBertConfig(**{**SIZES, **kwargs})
    return getattr(transformers, f"ModernBert{architecture}")(config).eval()


def run(module, inputs):
    import torch

    return module(torch.tensor(inputs["ids"]).long(), torch.tensor(inputs["mask"]).long()).last_hidden_state


rng = np.random.default_rng(0)
IDS = rng.integers(3, VOCAB, (2, SEQ)).astype(np.int32)
MASK = np.ones((2, SEQ), bool)
MASK[0, :2] = MASK[1, 5:] = False
BATCH = {"ids": np.where(MASK, IDS, 0).astype(np.int32), "mask": MASK}
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

CASES = [
    Case("modernbert", functools.partial(make, "Model"), BATCH, run, counts=MASK),
    Case("modernbert-mlm", functools.partial(make, "ForMaskedLM", **BIASES), {"ids": IDS[:1]}, run_logits, gradients=True),
    Case(
        "modernbert-mlm-layers",
        functools.partial(make, "ForMaskedLM", layer_types=TYPES, rope_parameters=ROPES, decoder_bias=False),
        BATCH,
        run_logits,
        counts=MASK,
    ),
    Case(
        "modernbert-classes",
        functools.partial(make, "ForSequenceClassification", num_labels=3, classifier_pooling="mean"),
        BATCH,
        run_logits,
        gradients=True,
    ),
    Case(
        "modernbert-first-token",
        functools.partial(make, "ForSequenceClassification", num_hidden_layers=2, classifier_activation="relu"),
        {"ids": IDS},
        run_logits,
    ),
    Case(
        "modernbert-tokens",
        functools.partial(make, "ForTokenClassification", **BIASES, global_attn_every_n_layers=2),
        BATCH,
        run_logits,
        counts=MASK,
    ),
]

CONFIG = ModernBertConfig(
    64,
    12,
    d_model=32,
    d_ff=48,
    n_layers=4,
    n_heads=4,
    window=2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    init_std=0.1,
)
TRAININGS = [
    Training(
        "modernbert-mlm",
        lambda key: ModernBertForMaskedLM(CONFIG, key=key),
        [{"ids": rng.integers(3, 64, 9)} for _ in range(16)],
        loss_fn,
    )
]
