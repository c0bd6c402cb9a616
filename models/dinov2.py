"""DINOv2, also with registers: ViT whose additions to the residual stream are scaled, for images of any size.

Sources: Oquab et al. 2023, *DINOv2: Learning Robust Visual Features without Supervision* (arXiv:2304.07193); Darcet et al.
2023, *Vision Transformers Need Registers* (arXiv:2309.16588); their code, github.com/facebookresearch/dinov2. Positions are
interpolated as in `transformers`: with registers by antialiasing, else without. Whole layers are never dropped.
"""

from dataclasses import dataclass

from redeqx.errors import wrong

from ._kinds import COUNT, NUMBER, SIZE
from .hf import Field, Only, Row, published
from .vision import VIT, ImageClassifier, Names, VisionConfig, VisionEncoder


def _names(base: str, *, is_gated: bool) -> Names:
    inner = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    gated = {"mlp.gate mlp.up": "mlp.weights_in", "mlp.down": "mlp.weights_out"}
    return Names(
        base=base,
        encoder={
            "patches": "embeddings.patch_embeddings.projection",
            "class_token": "embeddings.cls_token",
            "registers": "embeddings.register_tokens",
            "mask_token": "embeddings.mask_token",
            "positions": "embeddings.position_embeddings",
            "norm": "layernorm",
        },
        layers="encoder.layer.{}.",
        block={
            "attention_norm": "norm1",
            "attention.query": "attention.attention.query",
            "attention.key": "attention.attention.key",
            "attention.value": "attention.attention.value",
            "attention.output": "attention.output.dense",
            "attention_scale": "layer_scale1.lambda1",
            "mlp_norm": "norm2",
            **(gated if is_gated else inner),
            "mlp_scale": "layer_scale2.lambda1",
        },
        leading={"class_token": 2, "registers": 1, "mask_token": 1, "positions": 1},
        others=("classifier.*",),
        modules=(
            (r"attention\.attention\.(query|key|value)$", r"attention.\1"),
            (r"(?<=\.attention\.)(q|k|v)(uery|ey|alue)$", r"\1_proj"),
            (r"attention\.output\.dense$", "attention.o_proj"),
            (r"mlp\.weights_out$", "mlp.down_proj"),
        ),
    )


_ROWS: tuple[Row, ...] = (
    *VIT,
    Field(
        "mlp_ratio",
        "d_ff",
        SIZE,
        default=4,
        load=lambda ratio, known: ratio * known["d_model"],
        save=lambda config: config.d_ff // config.d_model,
    ),
    Field("layerscale_value", "layer_scale", NUMBER),
    Only("drop_path_rate", 0.0),
    Field("use_swiglu_ffn", "is_gated"),
)
_SIZES = published(
    {
        "small": {"d_model": 384, "d_ff": 1536, "n_heads": 6},
        "base": {},
        "large": {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16},
        "giant": {"d_model": 1536, "d_ff": 6144, "n_layers": 40, "n_heads": 24, "is_gated": True},
    },
    image_size=518,
    patch_size=14,
)


@dataclass(frozen=True)
class Dinov2Config(VisionConfig):
    """The sizes and dropout rates of a DINOv2: a `VisionConfig` with other defaults, which are those of `transformers`.
    `d_ff` is a multiple of `d_model`. `dropout` is that of embeddings only."""

    patch_size = 14
    layer_norm_eps = 1e-6
    has_pooler, has_mask_token = False, True
    layer_scale = 1.0
    resizing, pooling = "bicubic", "first"

    model_type = "dinov2"
    reads_patches = True
    sizes = _SIZES
    rows = (*_ROWS, Field("use_mask_token", "has_mask_token"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_ff % self.d_model:
            raise wrong("d_ff", f"a multiple of `d_model`={self.d_model}", self.d_ff, "`config.json` has the ratio.")

    names = property(lambda config: _names(f"{config.model_type}.", is_gated=config.is_gated))
    block_dropout = property(lambda config: 0.0)


@dataclass(frozen=True)
class Dinov2WithRegistersConfig(Dinov2Config):
    """The sizes and dropout rates of a DINOv2 with registers."""

    patch_size = 16
    resizing = "antialiased"
    n_registers = 4

    model_type = "dinov2_with_registers"
    sizes = _SIZES
    rows = (*_ROWS, Field("num_register_tokens", "n_registers", COUNT))


class Dinov2(VisionEncoder, config=Dinov2Config, init=False):
    """DINOv2 without a head: see `VisionEncoder`. `Dinov2.from_pretrained` also reads the folder of a classifier."""

    architectures = ("Dinov2Model",)


class Dinov2ForImageClassification(ImageClassifier, config=Dinov2Config, init=False):
    """DINOv2 with a classification head, which reads the class token and the mean of the patches: see `ImageClassifier`."""

    architectures = ("Dinov2ForImageClassification",)


class Dinov2WithRegisters(VisionEncoder, config=Dinov2WithRegistersConfig, init=False):
    """DINOv2 with registers, without a head: see `VisionEncoder`."""

    architectures = ("Dinov2WithRegistersModel",)


class Dinov2WithRegistersForImageClassification(ImageClassifier, config=Dinov2WithRegistersConfig, init=False):
    """DINOv2 with registers and a classification head: see `Dinov2ForImageClassification`."""

    architectures = ("Dinov2WithRegistersForImageClassification",)
