"""DINOv2: with and without registers and gates, masked patches, images of other sizes, and classes."""

import functools

import numpy as np

from redeqx.models.dinov2 import Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification
from tests.models.families._case import Case, Training
from tests.models.families.vit import loss_fn

SIZES = {"image_size": 12, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}


def make(architecture="Dinov2Model", **kwargs):
    import transformers

    cls = getattr(transformers, architecture)
    return cls(cls.config_class(**{**SIZES, **kwargs})).eval()


def run(module, inputs):
    import torch

    masked = torch.tensor(inputs["masked"]) if "masked" in inputs else None
    return module(torch.tensor(inputs["pixels"]), bool_masked_pos=masked).last_hidden_state


def run_classifier(module, inputs):
    import torch

    return module(torch.tensor(inputs["pixels"])).logits


rng = np.random.default_rng(0)
PIXELS = rng.normal(size=(2, 3, 12, 12)).astype(np.float32)
OTHERS = {"smaller": (2, 3, 8, 8), "wider": (2, 3, 21, 32)}
OTHERS = {name: rng.normal(size=shape).astype(np.float32) for name, shape in OTHERS.items()}
MASKED = rng.integers(0, 2, (2, 9)).astype(bool)
REGISTERS = functools.partial(make, "Dinov2WithRegistersModel")

CASES = [
    Case("dinov2", make, {"pixels": PIXELS, "masked": MASKED}, run, gradients=True),
    Case("dinov2-smaller", functools.partial(make, use_mask_token=False), {"pixels": OTHERS["smaller"]}, run),
    Case("dinov2-wider", functools.partial(make, mlp_ratio=2), {"pixels": OTHERS["wider"]}, run, gradients=True),
    Case(
        "dinov2-registers",
        functools.partial(REGISTERS, use_swiglu_ffn=True, hidden_act="relu"),
        {"pixels": PIXELS, "masked": MASKED},
        run,
        gradients=True,
    ),
    Case("dinov2-registers-smaller", functools.partial(REGISTERS, qkv_bias=False), {"pixels": OTHERS["smaller"]}, run),
    Case("dinov2-registers-wider", functools.partial(REGISTERS, num_register_tokens=1), {"pixels": OTHERS["wider"]}, run),
    Case(
        "dinov2-classes",
        functools.partial(make, "Dinov2ForImageClassification", num_labels=5, use_swiglu_ffn=True),
        {"pixels": PIXELS},
        run_classifier,
        gradients=True,
    ),
    Case(
        "dinov2-registers-classes",
        functools.partial(make, "Dinov2WithRegistersForImageClassification", num_labels=3),
        {"pixels": PIXELS},
        run_classifier,
    ),
]

CONFIG = Dinov2WithRegistersConfig(
    8, 2, d_model=32, d_ff=64, n_layers=2, n_heads=4, n_classes=4, n_registers=3, init_std=0.1
)
TRAININGS = [
    Training(
        "dinov2",
        lambda key: Dinov2WithRegistersForImageClassification(CONFIG, key=key),
        [{"pixels": rng.normal(size=(3, 8, 8)).astype(np.float32), "label": np.int32(i % 4)} for i in range(16)],
        loss_fn,
        learning_rate=0.02,
    )
]
