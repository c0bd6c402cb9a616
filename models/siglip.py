"""SigLIP: a text and a vision transformer with a common embedding space, trained by a sigmoid for each pair.

Source: Zhai et al. 2023, *Sigmoid Loss for Language Image Pre-Training* (arXiv:2303.15343), and its code,
github.com/google-research/big_vision. Texts are padded to `n_positions` tokens, and padding is attended to. The models of
SigLIP 2 with a fixed size of images are of this type too.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redeqx import Loss
from redeqx._rounding import at_least_float32
from redeqx.errors import wrong

from ._kinds import SIZE
from .hf import Field, Tokens, Written, published
from .nn import BlockStds
from .vision import (
    PATCHES,
    TEXTS,
    TRANSFORMER,
    Names,
    Pair,
    PairConfig,
    Submodel,
    TextConfig,
    TextEncoder,
    VisionConfig,
    VisionEncoder,
    text_names,
)

_JOINT = ("logit_scale", "logit_bias")  # a SigLIP's other tensors


def sigmoid_loss(logits: Float[Array, "images texts"]) -> Loss:
    """Computes SigLIP's loss of a batch of pairs, in which each image matches its own text only: the sum of all binary
    cross-entropies, and the number of images as weight.

    **Arguments:**

    - `logits`: the similarities of the batch, as `Siglip.logits_per_image` returns them.

    Raises ValueError if there are more images than texts, or the reverse.
    """
    if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
        raise wrong("logits", "one row and one column for each pair", logits.shape, "Pass whole pairs.")
    wide = logits.astype(at_least_float32(logits.dtype))
    matches = jnp.eye(len(wide), dtype=bool)
    return Loss(-jax.nn.log_sigmoid(jnp.where(matches, wide, -wide)).sum(), len(wide))


def _block_stds(config: Any) -> BlockStds:
    """Those of a uniform distribution by Glorot and Bengio."""
    d, mlp = config.d_model, (2 / (config.d_model + config.d_ff)) ** 0.5
    return BlockStds(d**-0.5, d**-0.5, mlp, mlp)


@dataclass(frozen=True)
class SiglipTextConfig(TextConfig):
    """The sizes and dropout rate of SigLIP's text model: a `TextConfig` whose defaults are those of the base models."""

    vocab_size, n_positions = 32000, 64
    d_model, n_heads = 768, 12
    d_ff = 3072
    is_causal, pools_last = False, True
    d_projection = 768
    layer_norm_eps = 1e-6
    activation = "gelu_pytorch_tanh"

    model_type = "siglip_text_model"
    names = text_names(*_JOINT)
    rows = (*TEXTS, Tokens(), Field("projection_size", "d_projection", SIZE, default=lambda known: known["d_model"]))
    embedding_std = property(lambda config: config.d_model**-0.5)
    block_stds = property(_block_stds)


@dataclass(frozen=True)
class SiglipVisionConfig(VisionConfig):
    """The sizes and dropout rate of SigLIP's vision model: a `VisionConfig` with other defaults, which are those of the
    published base models. `has_pooler` says whether the folder has the pooling by attention."""

    layer_norm_eps = 1e-6
    activation = "gelu_pytorch_tanh"
    has_class_token = False
    pooling = "attention"

    model_type = "siglip_vision_model"
    part = "vision_config"
    names = Names(
        {
            "patches": "embeddings.patch_embedding",
            "positions": "embeddings.position_embedding.weight",
            "norm": "post_layernorm",
            "pooler.probe": "head.probe",
            "pooler.attention.query pooler.attention.key pooler.attention.value": "head.attention.in_proj_*",
            "pooler.attention.output": "head.attention.out_proj",
            "pooler.norm": "head.layernorm",
            "pooler.mlp.up": "head.mlp.fc1",
            "pooler.mlp.down": "head.mlp.fc2",
        },
        base="vision_model.",
        leading={"pooler.probe": 2},
        others=("embeddings.position_ids", "text_model.*", *_JOINT),
    )
    rows = (*PATCHES, *TRANSFORMER, Field("vision_use_head", "has_pooler"))
    block_stds = property(_block_stds)

    stds = property(lambda c: ((c.n_channels * c.patch_size**2) ** -0.5, c.d_model**-0.5, c.d_model**-0.5))


_LARGE: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16}
_LARGE_TEXT = SiglipTextConfig(**_LARGE, d_projection=1024)
_SO400M: dict[str, Any] = {"d_model": 1152, "d_ff": 4304, "n_layers": 27, "n_heads": 16}


@dataclass(frozen=True)
class SiglipConfig(PairConfig):
    """The text and vision models of a SigLIP. The defaults are those of the published base model for images of 224 pixels.

    **Arguments:**

    - `text`, `vision`: the configs of the two models, whose vectors have one width. The vision model has a pooler.

    Raises ValueError for vectors of two widths, and for a vision model without a pooler.
    """

    text: SiglipTextConfig = field(default_factory=SiglipTextConfig)
    vision: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)

    rows = (
        Written("model_type", "siglip"),
        Submodel("text_config", "text", SiglipTextConfig),
        Submodel("vision_config", "vision", SiglipVisionConfig),
    )
    init_scale = 2.302585  # the logarithm of 10, as in the article
    init_bias = -10.0
    sizes = published(
        {
            "base-patch16-224": {},
            "base-patch16-256": {"vision": SiglipVisionConfig(image_size=256)},
            "base-patch16-384": {"vision": SiglipVisionConfig(image_size=384)},
            "large-patch16-256": {"text": _LARGE_TEXT, "vision": SiglipVisionConfig(**_LARGE, image_size=256)},
            "large-patch16-384": {"text": _LARGE_TEXT, "vision": SiglipVisionConfig(**_LARGE, image_size=384)},
            "so400m-patch14-384": {"text": SiglipTextConfig(**_SO400M, d_projection=1152),
                                   "vision": SiglipVisionConfig(**_SO400M, image_size=384, patch_size=14)},
        }
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.text.d_projection != self.vision.d_model:
            rule = f"a `d_projection` of the vision model's `d_model`={self.vision.d_model}"
            raise wrong("text", rule, self.text.d_projection, "Make them equal.")
        if not self.vision.has_pooler:
            raise wrong("vision", "a model with `has_pooler`", "False", "Load the vision model alone.")


class SiglipText(TextEncoder, config=SiglipTextConfig, init=False):
    """SigLIP's text model: see `TextEncoder`."""

    model_types = ("siglip_text_model", "siglip")
    architectures = ("SiglipTextModel",)


class SiglipVision(VisionEncoder, config=SiglipVisionConfig, init=False):
    """SigLIP's vision model: see `VisionEncoder`."""

    model_types = ("siglip_vision_model", "siglip")
    architectures = ("SiglipVisionModel",)


class Siglip(Pair, config=SiglipConfig, init=False):
    """SigLIP, from a text and an image to an embedding of each: see `Pair`. Train it by `sigmoid_loss`.

    ```python
    model = Siglip(SiglipConfig.of("base-patch16-224"), key=jax.random.key(0))
    texts, images = jax.vmap(model)(ids, pixels)
    loss = sigmoid_loss(model.logits_per_image(images, texts))
    ```
    """

    model_types = ("siglip",)
    architectures = ("SiglipModel",)
    text_class = SiglipText
    vision_class = SiglipVision
