"""CLIP: a text and a vision transformer with a common embedding space, and each of them alone.

Source: Radford et al. 2021, *Learning Transferable Visual Models From Natural Language Supervision*, and its code,
github.com/openai/CLIP. The text model is also the text encoder of Stable Diffusion. Only the layout differs from that code:
query, key and value are three layers instead of one, so that a plan shards each of them by whole heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._kinds import NUMBER, SIZE
from .hf import ConfigReader, Field, Only, Tokens, Written, published
from .nn import BlockStds, check_sizes
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

_JOINT = ("text_projection.weight", "visual_projection.weight", "logit_scale")  # a CLIP's other tensors


class _TextTokens(Tokens):
    """The special tokens of CLIP. Exactly one end token is required, because a text is pooled at it."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        tokens = super().read(reader, known)
        if not isinstance(tokens["eos_token_id"], int):
            raise reader.refuse("eos_token_id", tokens["eos_token_id"], "one id, at which a text is pooled")
        return tokens


def _block_stds(config: Any) -> BlockStds:
    """N(0, 1 / `d`), with half that variance for the MLP's first layer, and scaled for the two layers of each block that add
    to the residual stream."""
    d, output = config.d_model, (config.d_model * 2 * config.n_layers) ** -0.5
    return BlockStds(d**-0.5, output, (2 * d) ** -0.5, output)


@dataclass(frozen=True)
class CLIPTextConfig(TextConfig):
    """The sizes and dropout rate of CLIP's text model: a `TextConfig`, whose defaults are those of the smallest one. The
    `activation` is `"quick_gelu"` in OpenAI's models, `"gelu"` in OpenCLIP's models."""

    model_type = "clip_text_model"
    names = text_names(*_JOINT)
    rows = (*TEXTS, _TextTokens(), Only("is_causal", True, is_written=False), Field("initializer_range", "init_std"))
    block_stds = property(_block_stds)

    # Of Stable Diffusion 1, OpenAI's ViT-L/14; and 2, OpenCLIP's ViT-H/14 without its last block.
    sizes = published(
        {
            "sd1": {"d_model": 768, "d_ff": 3072, "n_heads": 12},
            "sd2": {"d_model": 1024, "d_ff": 4096, "n_layers": 23, "n_heads": 16, "activation": "gelu"},
        }
    )


@dataclass(frozen=True)
class CLIPTextWithProjectionConfig(CLIPTextConfig):
    """The sizes of a text model with a linear layer after pooling: a `CLIPTextConfig` with `d_projection`."""

    d_projection = 512

    has_projection_bias = False
    names = Names(
        {path: f"text_model.{name}" for path, name in CLIPTextConfig.names.encoder.items()}
        | {"projection": "text_projection"},
        base="",
        layers="text_model.encoder.layers.{}.",
        others=("text_model.embeddings.position_ids",),
    )
    rows = (*CLIPTextConfig.rows, Field("projection_dim", "d_projection", SIZE))

    # The second one of Stable Diffusion XL and 3, OpenCLIP's ViT-bigG/14; and the first one of 3, OpenAI's ViT-L/14.
    sizes = published(
        {
            "sdxl": {"d_model": 1280, "d_ff": 5120, "n_layers": 32, "n_heads": 20, "activation": "gelu",
                     "d_projection": 1280},
            "sd3": {"d_model": 768, "d_ff": 3072, "n_heads": 12, "d_projection": 768},
        }
    )  # fmt: skip


@dataclass(frozen=True)
class CLIPVisionConfig(VisionConfig):
    """The sizes and dropout rate of CLIP's vision model: a `VisionConfig` with other defaults, which are those of the
    published ViT-B/32. `init_std` is that of the initial patch embedding and positions."""

    patch_size = 32
    layer_norm_eps = 1e-5
    activation = "quick_gelu"
    has_pooler = has_patch_bias = False
    has_input_norm = True
    pooling = "norm"

    model_type = "clip_vision_model"
    part = "vision_config"
    names = Names(
        {
            "patches": "embeddings.patch_embedding",
            "class_token": "embeddings.class_embedding",
            "positions": "embeddings.position_embedding.weight",
            "input_norm": "pre_layrnorm",  # sic
            "norm": "post_layernorm",
        },
        base="vision_model.",
        others=("embeddings.position_ids", "text_model.*", *_JOINT),
    )
    rows = (*PATCHES, *TRANSFORMER, Field("initializer_range", "init_std"))
    stds = property(lambda config: (config.init_std, config.d_model**-0.5, config.init_std))
    block_stds = property(_block_stds)


@dataclass(frozen=True)
class CLIPConfig(PairConfig):
    """The text and vision models of a CLIP and their common space. The defaults are those of the published ViT-B/32.

    **Arguments:**

    - `text`, `vision`: the configs of the two models.
    - `d_projection`: the width of the common space.
    - `init_logit_scale`: the initial logarithm of the factor that scales similarities.

    Raises ValueError for a `d_projection` below 1.
    """

    text: CLIPTextConfig = field(default_factory=CLIPTextConfig)
    vision: CLIPVisionConfig = field(default_factory=CLIPVisionConfig)
    d_projection: int = 512
    init_logit_scale: float = 2.6592

    rows = (
        Written("model_type", "clip"),
        Submodel("text_config", "text", CLIPTextConfig),
        Submodel("vision_config", "vision", CLIPVisionConfig),
        Field("projection_dim", "d_projection"),
        Field("logit_scale_init_value", "init_logit_scale", NUMBER),
    )

    width = property(lambda config: config.d_projection)
    init_scale = property(lambda config: config.init_logit_scale)

    def __post_init__(self) -> None:
        check_sizes(self, "d_projection")

    sizes = published(
        {
            "vit-base-patch32": {},
            "vit-base-patch16": {"vision": CLIPVisionConfig(patch_size=16)},
            "vit-large-patch14": {
                "text": CLIPTextConfig.of("sd1"),
                "vision": CLIPVisionConfig(patch_size=14, d_model=1024, d_ff=4096, n_layers=24, n_heads=16),
                "d_projection": 768,
            },
        }
    )


class CLIPText(TextEncoder, config=CLIPTextConfig, init=False):
    """CLIP's text model, as Stable Diffusion uses it: see `TextEncoder`."""

    model_types = ("clip_text_model", "clip")
    architectures = ("CLIPTextModel",)


class CLIPTextWithProjection(TextEncoder, config=CLIPTextWithProjectionConfig, init=False):
    """CLIP's text model with the linear layer to the common space after pooling, as Stable Diffusion XL and 3 use it."""

    model_types = ("clip_text_model",)
    architectures = ("CLIPTextModelWithProjection",)


class CLIPVision(VisionEncoder, config=CLIPVisionConfig, init=False):
    """CLIP's vision model: see `VisionEncoder`. Hidden states are those before the final norm, which is part of `pool`."""

    model_types = ("clip_vision_model", "clip")
    architectures = ("CLIPVisionModel",)


class CLIP(Pair, config=CLIPConfig, init=False):
    """CLIP, from a text and an image to an embedding of each: see `Pair`."""

    model_types = ("clip",)
    architectures = ("CLIPModel",)
    text_class = CLIPText
    vision_class = CLIPVision
