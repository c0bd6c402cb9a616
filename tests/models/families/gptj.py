"""GPT-J: interleaved rotary positions on a part of each head, parallel attention and MLP, a head with a bias."""

import functools

import jax
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.gptj import GPTJ, GPTJConfig
from tests.models.families._case import Case, Training

VOCAB, SEQ = 44, 9


def make(**kwargs):
    import transformers

    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    config = transformers.GPTJConfig(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **kwargs})
    return transformers.GPTJForCausalLM(config).eval()


def run(module, inputs):
    """Uses the positions of `generate`, which do not count padding."""
    import torch

    extra = {}
    if "mask" in inputs:
        mask = torch.tensor(inputs["mask"]).long()
        extra = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return module(torch.tensor(inputs["ids"]), **extra).logits


rng = np.random.default_rng(0)
IDS = rng.integers(0, VOCAB, (2, SEQ)).astype(np.int32)
LEFT = np.arange(SEQ) >= np.array([[0], [3]])  # the second row has three padding tokens on the left
RIGHT = np.arange(SEQ) < np.array([[SEQ], [6]])

CASES = [
    Case("gptj", make, {"ids": IDS}, run, gradients=True),
    Case("gptj-left-padded", make, {"ids": IDS, "mask": LEFT}, run, counts=LEFT, generates=True),
    Case("gptj-right-padded", make, {"ids": IDS, "mask": RIGHT}, run, counts=RIGHT),
    Case("gptj-tied", functools.partial(make, tie_word_embeddings=True, n_inner=40), {"ids": IDS}, run, gradients=True),
    Case("gptj-whole-head", functools.partial(make, rotary_dim=8, n_positions=SEQ), {"ids": IDS}, run),
    Case("gptj-three-pairs", functools.partial(make, n_embd=24, n_head=2, rotary_dim=6), {"ids": IDS}, run),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each next token."""
    inputs, labels = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(inputs, jax.random.split(key, len(inputs)))
    return Loss(optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), labels.size)


CONFIG = GPTJConfig(64, 16, d_model=32, n_layers=2, n_heads=4, rope_share=0.5, init_std=0.1)
TRAININGS = [
    Training("gptj", lambda key: GPTJ(CONFIG, key=key), [{"ids": row} for row in rng.integers(0, 64, (16, 9))], loss_fn)
]
