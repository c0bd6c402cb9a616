"""GPT-2: fused and transposed projections, learned positions, tied and untied heads, with a cross-attention."""

import functools

import jax
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.gpt2 import GPT2, GPT2Config
from tests.models.families._case import Case, Training

VOCAB, SEQ = 61, 9


def make(**kwargs):
    import transformers

    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3, "bos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, "eos_token_id": 2, **kwargs})).eval()


def run(module, inputs):
    """Uses the positions of `generate`, which do not count padding."""
    import torch

    ids = torch.tensor(inputs["ids"])
    extra = {}
    if "mask" in inputs:
        mask = torch.tensor(inputs["mask"])
        extra = {"attention_mask": mask.long(), "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    if "memory" in inputs:
        extra["encoder_hidden_states"] = torch.tensor(inputs["memory"])
        extra["encoder_attention_mask"] = torch.tensor(inputs["memory_mask"]).long()
    return module(ids, **extra).logits


rng = np.random.default_rng(0)
IDS = rng.integers(0, VOCAB, (2, SEQ)).astype(np.int32)
LEFT = np.arange(SEQ) >= np.array([[0], [3]])  # the second row has three padding tokens on the left
MEMORY = {
    "memory": rng.normal(size=(2, 5, 24)).astype(np.float32),
    "memory_mask": np.arange(5) < np.array([[5], [3]]),
}

CASES = [
    Case("gpt2", make, {"ids": IDS}, run, gradients=True),
    Case("gpt2-padded", make, {"ids": IDS, "mask": LEFT}, run, counts=LEFT, generates=True),
    Case("gpt2-untied", functools.partial(make, tie_word_embeddings=False), {"ids": IDS}, run),
    Case("gpt2-last-position", functools.partial(make, n_positions=SEQ), {"ids": IDS}, run),
    Case("gpt2-cross-attention", functools.partial(make, add_cross_attention=True), {"ids": IDS, **MEMORY}, run),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each next token."""
    inputs, labels = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(inputs, jax.random.split(key, len(inputs)))
    return Loss(optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), labels.size)


CONFIG = GPT2Config(64, 16, d_model=32, n_layers=2, n_heads=4, init_std=0.1).without_dropout()
TRAININGS = [
    Training("gpt2", lambda key: GPT2(CONFIG, key=key), [{"ids": row} for row in rng.integers(0, 64, (16, 9))], loss_fn)
]
