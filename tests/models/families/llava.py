"""LLaVA: with CLIP and SigLIP, LLaMA and a tied Qwen2; one and several images and layers; padded on the left."""

import functools

import numpy as np

from redeqx.models.clip import CLIPVisionConfig
from redeqx.models.llama import LlamaConfig
from redeqx.models.llava import Llava, LlavaConfig
from redeqx.models.nn import cross_entropy
from tests.models.families._case import Case, Training

VOCAB, IMAGE_TOKEN, IMAGE = 43, 40, 8
TEXT = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
}
VISION = {
    "model_type": "clip_vision_model",
    "image_size": IMAGE,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def make(text=None, vision=None, **kwargs):
    import transformers

    config = transformers.LlavaConfig(
        text_config={**TEXT, **(text or {})},
        vision_config={**VISION, **(vision or {})},
        image_token_index=IMAGE_TOKEN,
        **kwargs,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def run(module, inputs):
    import torch

    mask = torch.tensor(inputs["mask"]).long() if "mask" in inputs else None
    pixels = torch.tensor(inputs["pixels"]).flatten(0, 1)
    return module(input_ids=torch.tensor(inputs["ids"]).long(), pixel_values=pixels, attention_mask=mask).logits


rng = np.random.default_rng(0)


def texts(n_images, n_features, length=14):
    """Returns ids with the places of images at the beginning and after three tokens."""
    ids = rng.integers(3, 40, (2, length)).astype(np.int32)
    for i in range(n_images):
        start = 2 + i * (n_features + 1)
        ids[:, start : start + n_features] = IMAGE_TOKEN
    return ids


PIXELS = rng.normal(size=(2, 2, 3, IMAGE, IMAGE)).astype(np.float32)
LEFT = np.arange(14) >= np.array([[0], [2]])
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
QWEN = {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True}

CASES = [
    Case("llava", make, {"ids": texts(1, 4), "pixels": PIXELS[:, :1]}, run, gradients=True),
    Case(
        "llava-siglip",
        functools.partial(make, QWEN, SIGLIP, vision_feature_layer=-1, vision_feature_select_strategy="full"),
        {"ids": texts(2, 4), "pixels": PIXELS},
        run,
        gradients=True,
    ),
    Case(
        "llava-padded",
        functools.partial(make, vision_feature_layer=[-3, 1], multimodal_projector_bias=False, projector_hidden_act="relu"),
        {"ids": texts(2, 4), "pixels": PIXELS, "mask": LEFT},
        run,
        counts=LEFT,
    ),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each next token that is no image."""
    del key
    import jax
    import jax.numpy as jnp

    logits = jax.vmap(model)(batch["ids"], batch["pixels"])
    labels = batch["ids"][:, 1:]
    return cross_entropy(logits[:, :-1], jnp.where(labels == 60, -100, labels))


def example():
    ids = rng.integers(3, 60, 12)
    ids[1:5] = 60
    return {"ids": ids, "pixels": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)}


CONFIG = LlavaConfig(
    CLIPVisionConfig(8, 4, d_model=16, d_ff=32, n_layers=2, n_heads=2, init_std=0.1),
    LlamaConfig(vocab_size=64, n_positions=16, d_model=32, d_mlp=64, n_layers=2, n_heads=4, n_kv_heads=2, init_std=0.1),
    image_token_id=60,
)
TRAININGS = [
    Training(
        "llava",
        lambda key: Llava(CONFIG, key=key),
        [example() for _ in range(16)],
        loss_fn,
        zero_gradient=("*key.bias", "vision.norm.*", "vision.stack.*"),
    )
]
