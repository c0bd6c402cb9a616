"""Whisper: texts padded and not, sizes that differ between encoder and decoder, another activation."""

import functools

import jax
import numpy as np

from redeqx.models.nn import cross_entropy
from redeqx.models.whisper import Whisper, WhisperConfig
from tests.models.families._case import Case, Training

VOCAB, MELS, FRAMES, TARGET = 47, 8, 20, 6
SIZES = {
    "vocab_size": VOCAB,
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 24,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "decoder_start_token_id": 4,
    "begin_suppress_tokens": None,
}


def make(**kwargs):
    import transformers

    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**SIZES, **kwargs})).eval()


def run(module, inputs):
    import torch

    module.model.encoder.embed_positions.requires_grad_(False)  # as in a module that is not loaded from a folder
    mask = torch.tensor(inputs["decoder_mask"]).long() if "decoder_mask" in inputs else None
    ids = torch.tensor(inputs["decoder_ids"]).long()
    return module(torch.tensor(inputs["features"]), decoder_input_ids=ids, decoder_attention_mask=mask).logits


rng = np.random.default_rng(0)
INPUTS = {
    "features": rng.normal(size=(2, MELS, FRAMES)).astype(np.float32),
    "decoder_ids": rng.integers(3, VOCAB, (2, TARGET)).astype(np.int32),
}
LEFT = np.arange(TARGET) >= np.array([[0], [2]])
UNEQUAL = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 28}


def call(model, row):
    """The first argument has the name of the base, so it is passed by position."""
    return model(row["features"], row["decoder_ids"], decoder_mask=row.get("decoder_mask"))


RELU = {"activation_function": "relu", "max_target_positions": TARGET}
PADDED = {**INPUTS, "decoder_mask": LEFT}

CASES = [
    Case("whisper", make, INPUTS, run, call, gradients=True),
    Case("whisper-padded", functools.partial(make, **UNEQUAL), PADDED, run, call, counts=LEFT),
    Case("whisper-relu", functools.partial(make, **RELU), INPUTS, run, call),
]


def loss_fn(model, batch, key):
    """The cross-entropy of the labels."""
    logits = jax.vmap(lambda features, labels, key: model(features, model.shift_right(labels), key=key))(
        batch["features"], batch["labels"], jax.random.split(key, len(batch["labels"]))
    )
    return cross_entropy(logits, batch["labels"])


SIZES_OURS = {"d_model": 32, "n_layers": 2, "n_decoder_layers": 2, "n_heads": 4, "n_decoder_heads": 4, "d_ff": 64}
CONFIG = WhisperConfig(
    64,
    16,
    **SIZES_OURS,
    d_decoder_ff=64,
    n_mels=8,
    n_source_positions=8,
    pad_token_id=1,
    decoder_start_token_id=4,
    init_std=0.1,
)
TRAININGS = [
    Training(
        "whisper",
        lambda key: Whisper(CONFIG, key=key),
        [
            {"features": rng.normal(size=(8, 16)).astype(np.float32), "labels": rng.integers(3, 64, 6).astype(np.int32)}
            for _ in range(16)
        ],
        loss_fn,
        zero_gradient=(),
    )
]
