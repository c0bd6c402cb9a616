"""SigLIP: both models and each alone, with and without the vision model's pooling, texts padded and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from redeqx.models.siglip import Siglip, SiglipConfig, SiglipTextConfig, SiglipVisionConfig, sigmoid_loss
from tests.models.families._case import Case, Training

VOCAB, SEQ, IMAGE = 43, 7, 8
BLOCKS = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3}
TEXT = {
    **BLOCKS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 9,
    "bos_token_id": 39,
    "eos_token_id": 40,
    "pad_token_id": 1,
}
VISION = {**BLOCKS, "image_size": IMAGE, "patch_size": 4}


def make_text(**kwargs):
    import transformers

    return transformers.SiglipTextModel(transformers.SiglipTextConfig(**{**TEXT, **kwargs})).eval()


def make_vision(**kwargs):
    import transformers

    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**{**VISION, **kwargs})).eval()


def make_siglip(**kwargs):
    import transformers

    return transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION, **kwargs)).eval()


def run(module, inputs):
    """Returns the hidden states, followed by the pooled one if there is one."""
    import torch

    given = torch.tensor(inputs["ids" if "ids" in inputs else "pixels"])
    options = {"attention_mask": torch.tensor(inputs["mask"]).long()} if "mask" in inputs else {}
    outputs = module(given, **options)
    if outputs.pooler_output is None:
        return outputs.last_hidden_state
    return torch.cat([outputs.last_hidden_state, outputs.pooler_output[:, None]], 1)


def call(model, row):
    if "pixels" in row:
        hidden = model(row["pixels"])
        return jnp.concatenate([hidden, model.pool(hidden)[None]]) if model.config.has_pooler else hidden
    hidden = model(row["ids"], mask=row.get("mask"))
    return jnp.concatenate([hidden, model.pool(hidden, row["ids"])[None]])


def run_siglip(module, inputs):
    """Returns both embeddings; that of the image is scaled as similarities are."""
    import torch

    outputs = module(torch.tensor(inputs["ids"]), torch.tensor(inputs["pixels"]))
    return torch.cat([outputs.text_embeds, outputs.image_embeds * module.logit_scale.exp() + module.logit_bias], 1)


def call_siglip(model, row):
    text, image = model(row["ids"], row["pixels"])
    return jnp.concatenate([text, model.logits_per_image(image[None], jnp.eye(len(text)))[0]])


rng = np.random.default_rng(0)
IDS = rng.integers(2, 39, (2, SEQ)).astype(np.int32)
RIGHT = np.arange(SEQ) < np.array([[SEQ], [4]])
PIXELS = rng.normal(size=(2, 3, IMAGE, IMAGE)).astype(np.float32)
LARGE = rng.normal(size=(2, 3, 11, 11)).astype(np.float32)

CASES = [
    Case("siglip", make_siglip, {"ids": IDS, "pixels": PIXELS}, run_siglip, call_siglip, gradients=True),
    Case("siglip-text", functools.partial(make_text, projection_size=12, hidden_size=12), {"ids": IDS}, run, call),
    Case(
        "siglip-text-padded",
        functools.partial(make_text, hidden_act="gelu"),
        {"ids": IDS, "mask": RIGHT},
        run,
        call,
        counts=np.concatenate([RIGHT, np.ones((2, 1), bool)], 1),
    ),
    Case("siglip-vision", functools.partial(make_vision, image_size=11), {"pixels": LARGE}, run, call, gradients=True),
    Case("siglip-vision-no-head", functools.partial(make_vision, vision_use_head=False), {"pixels": PIXELS}, run, call),
]


def loss_fn(model, batch, key):
    """The sigmoid of each image with each text of the batch."""
    del key
    texts, images = jax.vmap(model)(batch["ids"], batch["pixels"])
    return sigmoid_loss(model.logits_per_image(images, texts))


CONFIG = SiglipConfig(
    SiglipTextConfig(64, 8, d_model=32, d_ff=64, n_layers=2, n_heads=4, d_projection=32),
    SiglipVisionConfig(8, 4, d_model=32, d_ff=64, n_layers=2, n_heads=4),
)
TRAININGS = [
    Training(
        "siglip",
        lambda key: Siglip(CONFIG, key=key),
        [{"ids": rng.integers(0, 64, 8), "pixels": rng.normal(size=(3, 8, 8)).astype(np.float32)} for _ in range(16)],
        loss_fn,
        learning_rate=0.05,
    )
]
