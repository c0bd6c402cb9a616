"""T5: tied and scaled, gated and untied, both between; relative positions past the last bucket; the encoder alone."""

import functools

import jax
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.t5 import T5, T5Config
from tests.models.families._case import Case, Training

VOCAB, SOURCE, TARGET = 53, 11, 9
# With eight buckets, the last one begins at 4 tokens in the encoder, at 7 in the decoder.
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 8,
    "decoder_start_token_id": 0,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # transformers 5 ties it anyway


def make(name="T5", kind="ForConditionalGeneration", has_head=False, **kwargs):
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **kwargs})
    module = getattr(transformers, f"{name}{kind}")(config).eval()
    if has_head:  # a separate head is loaded only if the file has one
        module.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, config.d_model))
    return module


def run(module, inputs):
    import torch

    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    masks = {"attention_mask": tensors.get("mask"), "decoder_attention_mask": tensors.get("decoder_mask")}
    masks = {name: mask.long() for name, mask in masks.items() if mask is not None}
    return module(tensors["ids"], decoder_input_ids=tensors["decoder_ids"], **masks).logits


def run_encoder(module, inputs):
    import torch

    return module(torch.tensor(inputs["ids"]), torch.tensor(inputs["mask"]).long()).last_hidden_state


rng = np.random.default_rng(0)
INPUTS = {
    "ids": rng.integers(0, VOCAB, (2, SOURCE)).astype(np.int32),
    "decoder_ids": rng.integers(0, VOCAB, (2, TARGET)).astype(np.int32),
}
RIGHT = np.arange(SOURCE) < np.array([[SOURCE], [7]])  # the second source has four padding tokens on the right
LEFT = np.arange(TARGET) >= np.array([[0], [3]])  # and its target three on the left
PADDED = {**INPUTS, "mask": RIGHT, "decoder_mask": LEFT}

CASES = [
    Case("t5", make, INPUTS, run, gradients=True),
    Case("t5-padded", make, PADDED, run, counts=LEFT, generates=True),
    Case("t5-v1.1", functools.partial(make, has_head=True, **GATED), INPUTS, run, gradients=True),
    Case("t5-v1.1-tied", functools.partial(make, **GATED), INPUTS, run),
    Case("t5-silu", functools.partial(make, feed_forward_proj="gated-silu", has_head=True), INPUTS, run),
    # Heads whose total width is not the model's, more layers in the decoder, an odd number of buckets, up to 128 tokens.
    Case(
        "t5-sizes",
        functools.partial(
            make,
            d_kv=5,
            num_layers=1,
            num_decoder_layers=3,
            relative_attention_num_buckets=9,
            relative_attention_max_distance=128,
        ),
        PADDED,
        run,
        counts=LEFT,
    ),
    Case("t5-mt5", functools.partial(make, "MT5", has_head=True), INPUTS, run),
    Case(
        "t5-encoder",
        functools.partial(make, kind="EncoderModel"),
        {"ids": INPUTS["ids"], "mask": RIGHT},
        run_encoder,
        counts=RIGHT,
        gradients=True,
    ),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each token of the target."""

    def logits(row, key):
        return model(row["ids"], model.shift_right(row["labels"]), mask=row["mask"], key=key)

    logits = jax.vmap(logits)(batch, jax.random.split(key, len(batch["ids"])))
    labels = batch["labels"]
    return Loss(optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), labels.size)


CONFIG = T5Config(
    64, d_model=32, d_kv=8, d_ff=48, n_layers=2, n_decoder_layers=2, n_heads=4, mlp="gated-gelu", n_buckets=8, max_distance=8
).without_dropout()
TRAININGS = [
    Training(
        "t5",
        lambda key: T5(CONFIG, key=key),
        [
            {"ids": ids, "mask": np.arange(10) < n, "labels": labels}
            for ids, n, labels in zip(
                rng.integers(0, 64, (16, 10)), rng.integers(5, 11, 16), rng.integers(0, 64, (16, 6)), strict=True
            )
        ],
        loss_fn,
    )
]
