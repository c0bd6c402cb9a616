"""ViT: with and without a pooler, as a classifier with class names; queries without biases, pixels beyond the patches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.vit import ViTConfig, ViTForImageClassification
from tests.models.families._case import Case, Training

IMAGE = 8
SIZES = {
    "image_size": IMAGE,
    "patch_size": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
LABELS = {0: "crane", 1: "maillot", 2: "crane", 3: "quail", 4: "ibex"}  # as in ImageNet, one name occurs twice


def make(**kwargs):
    import transformers

    return transformers.ViTModel(transformers.ViTConfig(**{**SIZES, **kwargs})).eval()


def make_classifier(**kwargs):
    import transformers

    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**SIZES, **kwargs})).eval()


def run(module, inputs):
    """Returns the hidden states, followed by the pooled one."""
    import torch

    outputs = module(torch.tensor(inputs["pixels"]))
    return torch.cat([outputs.last_hidden_state, outputs.pooler_output[:, None]], 1)


def call(model, row):
    hidden = model(row["pixels"])
    return jnp.concatenate([hidden, model.pool(hidden)[None]])


def run_classifier(module, inputs):
    import torch

    return module(torch.tensor(inputs["pixels"])).logits


rng = np.random.default_rng(0)
PIXELS = rng.normal(size=(2, 3, IMAGE, IMAGE)).astype(np.float32)
GREY = rng.normal(size=(2, 1, 11, 11)).astype(np.float32)

CASES = [
    Case("vit", make, {"pixels": PIXELS}, run, call, gradients=True),
    Case(
        "vit-no-qkv-bias",
        functools.partial(make, qkv_bias=False, layer_norm_eps=1e-3, hidden_act="relu"),
        {"pixels": PIXELS},
        run,
        call,
    ),
    Case(
        "vit-pixels-left-over",
        functools.partial(make, image_size=11, num_channels=1, hidden_size=16, num_attention_heads=4),
        {"pixels": GREY},
        run,
        call,
    ),
    Case(
        "vit-classes",
        functools.partial(make_classifier, id2label=LABELS, label2id={label: i for i, label in LABELS.items()}),
        {"pixels": PIXELS},
        run_classifier,
        gradients=True,
    ),
    Case("vit-two-classes", functools.partial(make_classifier, image_size=[8, 8]), {"pixels": PIXELS}, run_classifier),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each image's class."""
    logits = jax.vmap(lambda pixels, key: model(pixels, key=key))(
        batch["pixels"], jax.random.split(key, len(batch["pixels"]))
    )
    return Loss(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).sum(), len(logits))


CONFIG = ViTConfig(8, 2, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_classes=4, init_std=0.1)
TRAININGS = [
    Training(
        "vit",
        lambda key: ViTForImageClassification(CONFIG, key=key),
        [{"pixels": rng.normal(size=(3, 8, 8)).astype(np.float32), "label": np.int32(i % 4)} for i in range(16)],
        loss_fn,
        learning_rate=0.02,
    )
]
