"""CLIP: both activations, texts pooled at their end or at the largest id, padded; text and vision models alone, and both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from redeqx.models import cross_entropy
from redeqx.models.clip import CLIP, CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from tests.models.families._case import Case, Training

VOCAB, SEQ, EOS, IMAGE = 43, 7, 40, 8

TEXT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 9,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 39,
    "eos_token_id": EOS,
    "pad_token_id": 1,
}
VISION = {
    "image_size": IMAGE,
    "patch_size": 4,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def make_text(**kwargs):
    import transformers

    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**{**TEXT, **kwargs})).eval()


def make_projection(**kwargs):
    import transformers

    return transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**{**TEXT, **kwargs})).eval()


def run_projection(module, inputs):
    """Returns the penultimate hidden states and the pooled vector, which has the same width here."""
    import torch

    outputs = module(torch.tensor(inputs["ids"]), output_hidden_states=True)
    return torch.cat([outputs.hidden_states[-2], outputs.text_embeds[:, None]], 1)


def call_projection(model, row):
    penultimate, last = model.features(row["ids"], [-2, -1])
    return jnp.concatenate([penultimate, model.pool(jax.vmap(model.norm)(last), row["ids"])[None]])


def make_vision(**kwargs):
    import transformers

    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**VISION, **kwargs})).eval()


def make_clip(**kwargs):
    import transformers

    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=12, **kwargs)
    return transformers.CLIPModel(config).eval()


def run_text(module, inputs):
    """Returns the hidden states, followed by the pooled one."""
    import torch

    mask = torch.tensor(inputs["mask"]).long() if "mask" in inputs else None
    outputs = module(torch.tensor(inputs["ids"]), attention_mask=mask)
    return torch.cat([outputs.last_hidden_state, outputs.pooler_output[:, None]], 1)


def call_text(model, row):
    hidden = model(row["ids"], mask=row.get("mask"))
    return jnp.concatenate([hidden, model.pool(hidden, row["ids"])[None]])


def run_vision(module, inputs):
    import torch

    outputs = module(torch.tensor(inputs["pixels"]))
    return torch.cat([outputs.last_hidden_state, outputs.pooler_output[:, None]], 1)


def call_vision(model, row):
    hidden = model(row["pixels"])
    return jnp.concatenate([hidden, model.pool(hidden)[None]])


def run_clip(module, inputs):
    """Returns both embeddings; that of the image is scaled as similarities are."""
    import torch

    ids, mask = torch.tensor(inputs["ids"]), torch.tensor(inputs["mask"]).long()
    outputs = module(ids, torch.tensor(inputs["pixels"]), attention_mask=mask)
    return torch.cat([outputs.text_embeds, outputs.image_embeds * module.logit_scale.exp()], 1)


def call_clip(model, row):
    text, image = model(row["ids"], row["pixels"], mask=row["mask"])
    return jnp.concatenate([text, model.logits_per_image(image[None], jnp.eye(len(text)))[0]])


rng = np.random.default_rng(0)
IDS = rng.integers(2, 39, (2, SEQ)).astype(np.int32)
IDS[0, -1] = EOS
IDS[1, 3:] = EOS  # the first ends the text, the others pad it, as in Stable Diffusion's tokenizer
RIGHT = np.arange(SEQ) < np.array([[SEQ], [4]])
LEGACY = IDS.copy()
LEGACY[:, 2], LEGACY[0, 4] = 2, VOCAB - 1  # a text is not pooled at id 2, the end token of such a config
PIXELS = rng.normal(size=(2, 3, IMAGE, IMAGE)).astype(np.float32)

CASES = [
    Case("clip", make_clip, {"ids": IDS, "pixels": PIXELS, "mask": RIGHT}, run_clip, call_clip, gradients=True),
    Case("clip-text", make_text, {"ids": IDS}, run_text, call_text, gradients=True),
    Case(
        "clip-text-padded",
        functools.partial(make_text, hidden_act="gelu"),
        {"ids": IDS, "mask": RIGHT},
        run_text,
        call_text,
        counts=np.concatenate([RIGHT, np.ones((2, 1), bool)], 1),
    ),
    Case("clip-text-largest-id", functools.partial(make_text, eos_token_id=2), {"ids": LEGACY}, run_text, call_text),
    Case(
        "clip-text-projection",
        functools.partial(make_projection, projection_dim=16),
        {"ids": IDS},
        run_projection,
        call_projection,
        gradients=True,
    ),
    Case("clip-vision", make_vision, {"pixels": PIXELS}, run_vision, call_vision, gradients=True),
    Case(
        "clip-vision-pixels-left-over",
        functools.partial(make_vision, image_size=11, hidden_act="gelu"),
        {"pixels": rng.normal(size=(2, 3, 11, 11)).astype(np.float32)},
        run_vision,
        call_vision,
    ),
]


def loss_fn(model, batch, key):
    """The contrastive loss: which text of the batch belongs to an image, and the reverse."""
    del key
    texts, images = jax.vmap(model)(batch["ids"], batch["pixels"])
    logits, labels = model.logits_per_image(images, texts), jnp.arange(len(texts))
    return cross_entropy(jnp.stack([logits, logits.T]), jnp.stack([labels, labels]))


CONFIG = CLIPConfig(
    CLIPTextConfig(64, 8, d_model=32, d_ff=64, n_layers=2, n_heads=4, eos_token_id=63, init_std=0.1),
    CLIPVisionConfig(8, 4, d_model=32, d_ff=64, n_layers=2, n_heads=4, init_std=0.1),
    d_projection=16,
)
TRAININGS = [
    Training(
        "clip",
        lambda key: CLIP(CONFIG, key=key),
        [
            {"ids": np.append(rng.integers(0, 63, 7), 63), "pixels": rng.normal(size=(3, 8, 8)).astype(np.float32)}
            for _ in range(16)
        ],
        loss_fn,
        learning_rate=0.05,
    )
]
