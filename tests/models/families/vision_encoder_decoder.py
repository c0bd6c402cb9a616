"""ViT and GPT-2 in one: of equal and of different widths, with tied and untied decoders, padded on either side."""

import functools

import jax
import numpy as np

from redeqx.models import cross_entropy
from redeqx.models.gpt2 import GPT2Config
from redeqx.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from redeqx.models.vit import ViTConfig
from tests.models.families._case import Case, Training

VOCAB, SEQ, IMAGE, START = 43, 6, 8, 3


def make(d_encoder=24, **kwargs):
    import transformers

    encoder = transformers.ViTConfig(
        image_size=IMAGE,
        patch_size=4,
        hidden_size=d_encoder,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    sizes = {"vocab_size": VOCAB, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3, "bos_token_id": 1}
    decoder = transformers.GPT2Config(**{**sizes, "eos_token_id": 2, **kwargs})
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = START, 0
    return transformers.VisionEncoderDecoderModel(config).eval()


def run(module, inputs):
    """Uses positions that do not count padding, as our model does."""
    import torch

    extra = {}
    if "decoder_mask" in inputs:
        mask = torch.tensor(inputs["decoder_mask"]).long()
        extra = {"decoder_attention_mask": mask, "decoder_position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return module(torch.tensor(inputs["pixels"]), torch.tensor(inputs["decoder_ids"]), **extra).logits


rng = np.random.default_rng(0)
INPUTS = {
    "pixels": rng.normal(size=(2, 3, IMAGE, IMAGE)).astype(np.float32),
    "decoder_ids": rng.integers(3, VOCAB, (2, SEQ)).astype(np.int32),
}
PADDED = (np.arange(SEQ) < 4) ^ np.array([[False], [True]])  # the first row is padded on the right, the second on the left


def call(model, row):
    """The first argument has the name of the base, so it is passed by position."""
    return model(row["pixels"], row["decoder_ids"], decoder_mask=row.get("decoder_mask"))


CASES = [
    Case("vision-encoder-decoder", make, INPUTS, run, call, gradients=True, generates=True),
    Case(
        "vision-encoder-decoder-projected",
        functools.partial(make, d_encoder=16, tie_word_embeddings=False),
        INPUTS,
        run,
        call,
        gradients=True,
    ),
    Case("vision-encoder-decoder-padded", make, {**INPUTS, "decoder_mask": PADDED}, run, call, counts=PADDED),
]


def loss_fn(model, batch, key):
    """The cross-entropy of the labels; -100 is ignored."""

    def logits(pixels, labels, key):
        return model(pixels, model.shift_right(labels), key=key)

    keys = jax.random.split(key, len(batch["labels"]))
    return cross_entropy(jax.vmap(logits)(batch["pixels"], batch["labels"], keys), batch["labels"])


def example(i):
    labels = np.where(np.arange(6) < 6 - i % 3, rng.integers(3, 64, 6), -100)
    return {"pixels": rng.normal(size=(3, 8, 8)).astype(np.float32), "labels": labels}


CONFIG = VisionEncoderDecoderConfig(
    ViTConfig(8, 4, d_model=16, d_ff=32, n_layers=2, n_heads=4, has_pooler=False, init_std=0.1),
    GPT2Config(64, 8, d_model=32, n_layers=2, n_heads=4, has_cross_attention=True, init_std=0.1),
    pad_token_id=0,
    decoder_start_token_id=1,
).without_dropout()
TRAININGS = [
    Training(
        "vision-encoder-decoder",
        lambda key: VisionEncoderDecoder(CONFIG, key=key),
        [example(i) for i in range(16)],
        loss_fn,
    )
]
