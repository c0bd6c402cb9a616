"""ViT: a pre-norm transformer over the patches of an image and a class token.

Source: Dosovitskiy et al. 2021, *An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale*
(arXiv:2010.11929), and its code, github.com/google-research/vision_transformer. It differs from that code in two points, as
`transformers` does: 1e-12 is added to variances instead of 1e-6, and all initial weights are drawn from a normal
distribution.
"""

from dataclasses import dataclass

from .hf import Field, Only, published
from .vision import VIT, ImageClassifier, Names, VisionConfig, VisionEncoder


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """The sizes and dropout rates of a ViT: a `VisionConfig`, whose defaults are ViT's. The defaults are those of
    `transformers`, with the sizes of the published ViT-B/16."""

    model_type = "vit"
    names = Names(
        base="vit.",
        encoder={
            "patches": "embeddings.patch_embeddings.projection",
            "class_token": "embeddings.cls_token",
            "positions": "embeddings.position_embeddings",
            "norm": "layernorm",
            "pooler": "pooler.dense",
        },
        layers="encoder.layer.{}.",
        block={
            "attention_norm": "layernorm_before",
            "attention.query": "attention.attention.query",
            "attention.key": "attention.attention.key",
            "attention.value": "attention.attention.value",
            "attention.output": "attention.output.dense",
            "mlp_norm": "layernorm_after",
            "mlp.up": "intermediate.dense",
            "mlp.down": "output.dense",
        },
        leading={"class_token": 2, "positions": 1},
        others=("classifier.*",),
        # The names of transformers 5's modules in memory, which differ from those in files.
        modules=(
            (r"encoder\.layer\.(\{\}|\d+)\.attention\.attention\.(query|key|value)", r"layers.\1.attention.\2"),
            (r"(?<=\.attention\.)(q|k|v)(uery|ey|alue)$", r"\1_proj"),
            (r"encoder\.layer\.(\{\}|\d+)\.attention\.output\.dense", r"layers.\1.attention.o_proj"),
            (r"encoder\.layer\.(\{\}|\d+)\.intermediate\.dense", r"layers.\1.mlp.fc1"),
            (r"encoder\.layer\.(\{\}|\d+)\.output\.dense", r"layers.\1.mlp.fc2"),
        ),
    )
    rows = (
        *VIT,
        Field("intermediate_size", "d_ff"),
        Only("pooler_act", "tanh"),
        Only("pooler_output_size", lambda known: (None, known["d_model"]), save=lambda config: config.d_model),
        # `config.json` does not describe a pooler (see `VisionEncoder.read_config`).
    )
    sizes = published(
        {
            "base-patch16": {},
            "large-patch16": {"d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16},
            "huge-patch14": {"patch_size": 14, "d_model": 1280, "d_ff": 5120, "n_layers": 32, "n_heads": 16},
        },
        n_classes=1000,  # of ImageNet
    )


class ViT(VisionEncoder, config=ViTConfig, init=False):
    """ViT without a head: see `VisionEncoder`. `ViT.from_pretrained` also reads the folder of a classifier; the model then
    has no pooler. If a model without a pooler is saved, `transformers` initializes a new one when it loads the folder."""

    architectures = ("ViTModel",)


class ViTForImageClassification(ImageClassifier, config=ViTConfig, init=False):
    """ViT with a classification head: see `ImageClassifier`."""

    architectures = ("ViTForImageClassification",)
