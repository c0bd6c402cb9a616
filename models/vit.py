"""ViT: a pre-norm transformer over the patches of an image and a class token.

Source: Dosovitskiy et al. 2021, *An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale*
(arXiv:2010.11929), and its code, github.com/google-research/vision_transformer. It differs from that code in two points, as
`transformers` does: 1e-12 is added to variances instead of 1e-6, and all initial weights are drawn from a normal
distribution.

Dims: channels = color channels, patches = rows x columns of one image, tokens = 1 + patches, d = width of the model,
heads x size = d.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PRNGKeyArray

from ._kinds import RATE, SIZE, TEXT
from .hf import (
    Classes,
    ConfigReader,
    Field,
    FolderConfig,
    Only,
    Pretrained,
    StoredTensor,
    WeightMap,
    Written,
    is_on_disk,
    layers,
    reshaped,
    same_layer,
    within,
)
from .nn import (
    ACTIVATIONS,
    PreNormBlock,
    Stack,
    check_choice,
    check_heads,
    check_patches,
    check_rates,
    check_sizes,
    linear,
    norm,
    normal_linear,
)


def _side(reader: ConfigReader, key: str, default: int) -> int:
    """Reads height and width, which must be equal here. A file may contain one number or both."""
    value = reader.get(key, None)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise reader.refuse(key, value, "one number of pixels for height and width")
        return SIZE.check(reader.path, key, value[0])
    return reader.get(key, default)


@dataclass(frozen=True)
class ViTConfig(FolderConfig):
    """The sizes and dropout rates of a ViT. The defaults are those of `transformers`, with the sizes of the published
    ViT-B/16.

    **Arguments:**

    - `image_size`, `patch_size`, `n_channels`: the height and width of an image and of a patch, in pixels, and the number of
        color channels.
    - `d_model`, `d_ff`: the width of the model, and the inner width of an MLP.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `n_classes`: the number of classes of a `ViTForImageClassification`. Their names are in `extra`: `id2label` and
        `label2id`.
    - `dropout`: the dropout rate of embeddings and of additions to the residual stream, in [0, 1).
    - `attention_dropout`: the dropout rate of attention weights.
    - `layer_norm_eps`: added to the variance in layer norms.
    - `activation`: the function in the MLPs, by its name in `transformers`.
    - `has_qkv_bias`: whether query, key and value have biases.
    - `has_pooler`: whether a `ViT` without a head has a pooler, for `pool`. A classifier never has one.
    - `init_std`: standard deviation of the initial weights. The published 0.02 suits widths of 768 and more; narrower models
        learn faster with a larger one.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, a patch larger than the image, heads that do not divide the width, and rates outside
    [0, 1).
    """

    image_size: int = 224
    patch_size: int = 16
    n_channels: int = 3
    d_model: int = 768
    d_ff: int = 3072
    n_layers: int = 12
    n_heads: int = 12
    n_classes: int = 2
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-12
    activation: str = "gelu"
    has_qkv_bias: bool = True
    has_pooler: bool = True
    init_std: float = 0.02
    remat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "image_size", "patch_size", "n_channels", "d_model", "d_ff", "n_layers", "n_heads", "n_classes")
        check_heads(self)
        check_rates(self, "dropout", "attention_dropout")
        check_patches(self)
        check_choice(self, "activation", ACTIVATIONS)

    @property
    def n_patches(self) -> int:
        """The number of patches of an image. Pixels beyond the last complete patch are ignored."""
        return (self.image_size // self.patch_size) ** 2

    def without_dropout(self) -> "ViTConfig":
        """The same config without dropout."""
        return replace(self, dropout=0.0, attention_dropout=0.0)

    @classmethod
    def vit_base_patch16_224(cls) -> "ViTConfig":
        """The published ViT-B/16 for the 1000 classes of ImageNet, with 87 million parameters."""
        return cls(n_classes=1000)

    @classmethod
    def vit_large_patch16_224(cls) -> "ViTConfig":
        """The published ViT-L/16 for the 1000 classes of ImageNet, with 304 million parameters."""
        return cls(d_model=1024, d_ff=4096, n_layers=24, n_heads=16, n_classes=1000)

    @classmethod
    def vit_huge_patch14(cls) -> "ViTConfig":
        """The published ViT-H/14 for the 1000 classes of ImageNet, with 632 million parameters."""
        return cls(patch_size=14, d_model=1280, d_ff=5120, n_layers=32, n_heads=16, n_classes=1000)

    rows = (
        Written("model_type", "vit"),
        Field("image_size", via=_side),
        Field("patch_size", via=_side),
        Field("num_channels", "n_channels"),
        Field("hidden_size", "d_model"),
        Field("intermediate_size", "d_ff"),
        Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
        Field("num_attention_heads", "n_heads"),
        Classes(),
        Field("hidden_act", "activation", TEXT),
        Field("hidden_dropout_prob", "dropout", RATE),
        Field("attention_probs_dropout_prob", "attention_dropout", RATE),
        Field("layer_norm_eps"),
        Field("qkv_bias", "has_qkv_bias"),
        Only("pooler_act", "tanh"),
        Only("pooler_output_size", lambda known: (None, known["d_model"]), save=lambda config: config.d_model),
        Field("initializer_range", "init_std"),
        # `config.json` does not describe a pooler (see `ViT.read_config`).
    )


class ViT(Pretrained):
    """ViT without a head, from pixels to the hidden states of a class token and all patches. Call it on one image.

    ```python
    model = ViT(ViTConfig.vit_base_patch16_224(), key=jax.random.key(0))
    hidden = jax.vmap(model)(pixels)  # [batch, 1 + patches, d]
    pooled = jax.vmap(model.pool)(hidden)  # [batch, d]
    ```

    `eqx.nn.inference_mode(model)` turns dropout off, if the config has any.

    `ViT.from_pretrained` also reads the folder of a classifier, without its head. The model then has no pooler. If a model
    without a pooler is saved, `transformers` initializes a new one when it loads the folder.
    """

    config_class = ViTConfig
    model_types = ("vit",)
    architectures = ("ViTModel",)

    patches: eqx.nn.Conv2d
    class_token: Float[Array, " d"]
    positions: Float[Array, "tokens d"]
    dropout: eqx.nn.Dropout
    stack: Stack[PreNormBlock]
    norm: eqx.nn.LayerNorm
    pooler: eqx.nn.Linear | None
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights as `transformers` does: N(0, `init_std`²), biases 0, norms 1.
        """
        patches_key, class_key, positions_key, stack_key, pooler_key = jax.random.split(key, 5)
        d, std, size = config.d_model, config.init_std, config.patch_size
        patches = eqx.nn.Conv2d(config.n_channels, d, size, stride=size, key=patches_key)
        weight = std * jax.random.normal(patches_key, patches.weight.shape)
        self.patches = eqx.tree_at(lambda conv: (conv.weight, conv.bias), patches, (weight, jnp.zeros((d, 1, 1))))
        self.class_token = std * jax.random.normal(class_key, (d,))
        self.positions = std * jax.random.normal(positions_key, (1 + config.n_patches, d))
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.stack = Stack(
            lambda key: PreNormBlock(
                config,
                std=std,
                activation=config.activation,
                qkv_bias=config.has_qkv_bias,
                dropout=config.dropout,
                key=key,
            ),
            config.n_layers,
            remat=config.remat,
            key=stack_key,
        )
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.pooler = normal_linear(d, d, std=std, key=pooler_key) if config.has_pooler else None
        self.config = config

    def __call__(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens d"]:
        """Returns the normalized hidden states of the class token (first) and of each patch, row by row.

        **Arguments:**

        - `pixels`: one image of `[n_channels, image_size, image_size]`, normalized as the checkpoint expects.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for an image of another shape.
        """
        wanted = (self.config.n_channels, self.config.image_size, self.config.image_size)
        if pixels.shape != wanted:
            raise ValueError(f"`pixels`: expected {wanted}, got {pixels.shape}. Resize the image, channels first.")
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("embedding"):
            patches = self.patches(pixels.astype(self.patches.weight.dtype))
            x = jnp.concatenate([self.class_token[None], rearrange(patches, "d rows columns -> (rows columns) d")])
            x = self.dropout(x + self.positions, key=dropout_key)
        return norm(self.norm, self.stack(x, key=stack_key))

    def pool(self, hidden: Float[Array, "tokens d"]) -> Float[Array, " d"]:
        """Returns the vector that represents the image: the class token's hidden state after one more linear layer and tanh.

        Raises ValueError if the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError(
                "`has_pooler`: expected True, got False: this model has no pooler. Take the class token's `hidden[0]`."
            )
        with jax.named_scope("pooler"):
            return jnp.tanh(linear(self.pooler, hidden[0]))

    @classmethod
    def read_config(cls, folder: Path) -> ViTConfig:
        """Reads the config of a folder. It has a pooler if the folder has the pooler's weights: `config.json` has no such
        key."""
        config, name = super().read_config(folder), "pooler.dense.weight"
        return replace(config, has_pooler=is_on_disk(folder, cls.weights_name, name, default=config.has_pooler))

    @staticmethod
    def weight_map(config: ViTConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        return WeightMap(
            tensors=_tensors(config),
            # The head of a classifier, and an unwanted pooler.
            ignored=("classifier.*", *(() if config.has_pooler else ("pooler.*",))),
            aliases=((r"^vit\.", ""),),
            modules=_MODULES,
        )


# The names of transformers 5's modules in memory, which differ from those in files.
_MODULES = (
    (r"encoder\.layer\.(\{\}|\d+)\.attention\.attention\.(query|key|value)", r"layers.\1.attention.\2"),
    (r"(?<=\.attention\.)(q|k|v)(uery|ey|alue)$", r"\1_proj"),
    (r"encoder\.layer\.(\{\}|\d+)\.attention\.output\.dense", r"layers.\1.attention.o_proj"),
    (r"encoder\.layer\.(\{\}|\d+)\.intermediate\.dense", r"layers.\1.mlp.fc1"),
    (r"encoder\.layer\.(\{\}|\d+)\.output\.dense", r"layers.\1.mlp.fc2"),
)


def _tensors(config: ViTConfig) -> list[StoredTensor]:
    d, n_tokens, use_bias = config.d_model, 1 + config.n_patches, config.has_qkv_bias
    block = [
        *same_layer("layernorm_before", "attention_norm"),
        *same_layer("attention.attention.query", "attention.query", use_bias=use_bias),
        *same_layer("attention.attention.key", "attention.key", use_bias=use_bias),
        *same_layer("attention.attention.value", "attention.value", use_bias=use_bias),
        *same_layer("attention.output.dense", "attention.output"),
        *same_layer("layernorm_after", "mlp_norm"),
        *same_layer("intermediate.dense", "mlp.up"),
        *same_layer("output.dense", "mlp.down"),
    ]
    patches = "embeddings.patch_embeddings.projection"
    return [
        *same_layer(patches, "patches", use_bias=False),
        reshaped(f"{patches}.bias", "patches.bias", (d,), (d, 1, 1)),
        reshaped("embeddings.cls_token", "class_token", (1, 1, d), (d,)),
        reshaped("embeddings.position_embeddings", "positions", (1, n_tokens, d), (n_tokens, d)),
        *layers("encoder.layer.{}.", "stack.blocks.", config.n_layers, block),
        *same_layer("layernorm", "norm"),
        *(same_layer("pooler.dense", "pooler") if config.has_pooler else []),
    ]


class ViTForImageClassification(Pretrained):
    """ViT with a head, from pixels to the logits of each class. Call it on one image.

    ```python
    model = ViTForImageClassification(ViTConfig.vit_base_patch16_224(), key=jax.random.key(0))
    logits = jax.vmap(model)(pixels)  # [batch, n_classes]
    ```

    To use your own classes, put a pretrained `ViT` into a new classifier:

    ```python
    vit, config = ViT.from_pretrained(folder, has_pooler=False)
    model = ViTForImageClassification(dataclasses.replace(config, n_classes=10), key=key)
    model = eqx.tree_at(lambda model: model.vit, model, vit)
    ```
    """

    config_class = ViTConfig
    model_types = ("vit",)
    architectures = ("ViTForImageClassification",)

    vit: ViT
    classifier: eqx.nn.Linear
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights: those of `vit` as in `ViT`, the head's N(0, `init_std`²).
        """
        vit_key, classifier_key = jax.random.split(key)
        self.vit = ViT(replace(config, has_pooler=False), key=vit_key)
        self.classifier = normal_linear(config.d_model, config.n_classes, std=config.init_std, key=classifier_key)
        self.config = config

    def __call__(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " classes"]:
        """Returns the logits of each class. See `ViT` for the arguments."""
        hidden = self.vit(pixels, key=key)
        with jax.named_scope("head"):
            return linear(self.classifier, hidden[0])

    @staticmethod
    def weight_map(config: ViTConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        names = _tensors(replace(config, has_pooler=False))
        tensors = [*within("vit.", "vit.", names), *same_layer("classifier", "classifier")]
        return WeightMap(tensors=tensors, modules=_MODULES)
