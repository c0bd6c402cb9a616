"""`VisionConfig`: the values of an image encoder. They say all that differs between families."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .._kinds import RATE, SIZE
from ..hf import BLOCKS, DROPOUT, Classes, ConfigReader, Field, Fields, FolderConfig, Row, Written, check_fixed
from ..nn import ACTIVATIONS, BlockStds, check_choice, check_heads, check_patches, check_rates, check_sizes

# Fields that are not in `config.json`.
_FREE = ("has_pooler", "n_classes", "remat", "extra")


def _side(reader: ConfigReader, key: str, default: int) -> int:
    """Reads height and width, which must be equal here. A file may contain one number or both."""
    value = reader.get(key, None)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise reader.refuse(key, value, "one number of pixels for height and width")
        return SIZE.check(reader.path, key, value[0])
    return reader.get(key, default)


# The rows that most families share: of the image, of the blocks, of both in ViT's names, and of a text encoder.
PATCHES: tuple[Row, ...] = (
    Written("model_type", lambda config: config.model_type),
    Field("image_size", via=_side),
    Field("patch_size", via=_side),
    Field("num_channels", "n_channels"),
)
TRANSFORMER: tuple[Row, ...] = (*BLOCKS, Field("intermediate_size", "d_ff"), Field("attention_dropout", kind=RATE))
VIT: tuple[Row, ...] = (
    *PATCHES,
    *BLOCKS,
    *DROPOUT,
    Classes(),
    *Fields(has_qkv_bias="qkv_bias", init_std="initializer_range"),
)
TEXTS: tuple[Row, ...] = (
    Written("model_type", lambda config: config.model_type),
    *Fields("vocab_size", n_positions="max_position_embeddings"),
    *TRANSFORMER,
)


@dataclass(frozen=True)
class VisionConfig(FolderConfig):
    """The sizes of an image encoder, and everything else that differs between families. The defaults here are ViT's.

    A family's config has other defaults. Fields that the family's `config.json` has no key for are the same in each of its
    models: another value raises an error.

    **Arguments:**

    - `image_size`, `patch_size`, `n_channels`: the height and width of an image and of a patch, in pixels, and the number of
        color channels.
    - `d_model`, `d_ff`: the width of the model, and the inner width of an MLP; with a gate, the MLP has two thirds of it.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `n_classes`: the number of classes of a classifier. Their names are in `extra`: `id2label` and `label2id`.
    - `dropout`: the dropout rate of embeddings and of additions to the residual stream, in [0, 1).
    - `attention_dropout`: the dropout rate of attention weights.
    - `layer_norm_eps`: added to the variance in layer norms.
    - `activation`: the function in the MLPs, by its name in `transformers`.
    - `has_qkv_bias`: whether query, key and value have biases.
    - `has_pooler`: whether `pool` has layers of its own. A classifier never has them.
    - `init_std`: standard deviation of the initial weights. The published 0.02 suits widths of 768 and more; narrower models
        learn faster with a larger one.
    - `has_class_token`: whether there is a token before the patches that represents the image.
    - `n_registers`: the number of further tokens before the patches, without positions (arXiv:2309.16588).
    - `has_mask_token`: whether there is a vector that replaces masked patches.
    - `has_patch_bias`, `has_input_norm`: whether the patch embedding has a bias, and whether the input of the first block is
        normalized.
    - `layer_scale`: the initial factors of additions to the residual stream (arXiv:2103.17239); None for no such factors.
    - `is_gated`: whether the MLP has a gate (arXiv:2002.05202).
    - `resizing`: how positions are interpolated for images of another size: `"bicubic"`, `"antialiased"`; None if all images
        have one size.
    - `pooling`: what `pool` returns: `"dense"`, the class token after one more linear layer and tanh; `"norm"`, the class
        token after the final norm, which other tokens do not have; `"first"`, the class token; `"attention"`, a learned
        query's attention to all tokens, and an MLP.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).

    Raises ValueError for sizes below 1, a patch larger than the image, heads that do not divide the width, rates outside
    [0, 1), any other activation, and values that the family does not have.
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
    has_class_token: bool = True
    n_registers: int = 0
    has_mask_token: bool = False
    has_patch_bias: bool = True
    has_input_norm: bool = False
    layer_scale: float | None = None
    is_gated: bool = False
    resizing: str | None = None
    pooling: str = "dense"
    remat: bool = False

    names: ClassVar[Any]  # `Names`, also as a property
    model_type: ClassVar[str]
    reads_patches: ClassVar[bool] = False  # whether a classifier reads the mean of all patches too

    def __post_init__(self) -> None:
        check_fixed(self, _FREE)
        check_sizes(self, "image_size", "patch_size", "n_channels", "d_model", "d_ff", "n_layers", "n_heads", "n_classes")
        check_heads(self)
        check_rates(self, "dropout", "attention_dropout")
        check_patches(self)
        check_choice(self, "activation", ACTIVATIONS)

    @property
    def side(self) -> int:
        """The number of patches in a row and in a column. Pixels beyond the last complete patch are ignored."""
        return self.image_size // self.patch_size

    @property
    def n_patches(self) -> int:
        """The number of patches of an image."""
        return self.side**2

    @property
    def n_first(self) -> int:
        """The number of tokens before the patches."""
        return self.has_class_token + self.n_registers

    @property
    def d_inner(self) -> int:
        """The inner width of an MLP."""
        return (int(self.d_ff * 2 / 3) + 7) // 8 * 8 if self.is_gated else self.d_ff

    @property
    def mlp_activation(self) -> str:
        """The activation in the MLPs: with a gate always SiLU, as in the original."""
        return "silu" if self.is_gated else self.activation

    @property
    def block_dropout(self) -> float:
        """The dropout rate of additions to the residual stream."""
        return self.dropout

    @property
    def stds(self) -> tuple[float, float, float]:
        """The standard deviations of the initial patch embedding, of the tokens before it, and of positions."""
        return self.init_std, self.init_std, self.init_std

    @property
    def block_stds(self) -> BlockStds:
        """Those of the initial weights of blocks."""
        return BlockStds(*[self.init_std] * 4)
