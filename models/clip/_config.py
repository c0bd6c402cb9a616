"""The configs of CLIP: of its text model, of its vision model, and of both."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._kinds import NUMBER, OBJECT, RATE, TEXT
from ..hf import ConfigReader, Field, FolderConfig, Row, Tokens, Written
from ..nn import ACTIVATIONS, check_choice, check_heads, check_patches, check_rates, check_sizes


def _submodel_keys(reader: ConfigReader, name: str) -> ConfigReader:
    """Returns the keys of one model: the object `name` if the file describes both models, else the file's own keys."""
    return reader.part(name) if reader.get(name, None) is not None else reader


class _TextTokens(Tokens):
    """The special tokens of CLIP. Exactly one end token is required, because a text is pooled at it."""

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        tokens = super().read(reader, known)
        if not isinstance(tokens["eos_token_id"], int):
            raise reader.refuse("eos_token_id", tokens["eos_token_id"], "one id, at which a text is pooled")
        return tokens


# The rows that describe the blocks of either model.
_TRANSFORMER = (
    Field("hidden_size", "d_model"),
    Field("intermediate_size", "d_ff"),
    Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
    Field("num_attention_heads", "n_heads"),
    Field("hidden_act", "activation", TEXT),
    Field("attention_dropout", kind=RATE),
    Field("layer_norm_eps"),
)


@dataclass(frozen=True)
class CLIPTextConfig(FolderConfig):
    """The sizes and dropout rate of CLIP's text model. The defaults are those of the smallest published one.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding.
    - `n_positions`: the maximum length of a text, in tokens.
    - `d_model`, `d_ff`: the width of the model, and the inner width of an MLP.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block; `n_heads` divides `d_model`.
    - `activation`: the function in the MLPs, by its name in `transformers`: `"quick_gelu"` in OpenAI's models, `"gelu"` in
        OpenCLIP's models.
    - `attention_dropout`: the dropout rate of attention weights, in [0, 1).
    - `layer_norm_eps`: added to the variance in layer norms.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding. A text is
        pooled at its first `eos_token_id`. Old folders have 2, which is not the tokenizer's end token; then a text is
        pooled at its largest id.
    - `init_std`: standard deviation of the initial embeddings and positions. That of the other weights depends on their
        sizes.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide the width, a rate outside [0, 1), and any other activation.
    """

    vocab_size: int = 49408
    n_positions: int = 77
    d_model: int = 512
    d_ff: int = 2048
    n_layers: int = 12
    n_heads: int = 8
    activation: str = "quick_gelu"
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    bos_token_id: int | None = 49406
    eos_token_id: int = 49407
    pad_token_id: int | None = 1
    init_std: float = 0.02
    remat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "n_positions", "d_model", "d_ff", "n_layers", "n_heads")
        check_heads(self)
        check_rates(self, "attention_dropout")
        check_choice(self, "activation", ACTIVATIONS)

    def without_dropout(self) -> "CLIPTextConfig":
        """The same config without dropout."""
        return replace(self, attention_dropout=0.0)

    @classmethod
    def stable_diffusion_1(cls) -> "CLIPTextConfig":
        """The text encoder of Stable Diffusion 1, which is that of OpenAI's ViT-L/14, with 123 million parameters."""
        return cls(d_model=768, d_ff=3072, n_heads=12)

    @classmethod
    def stable_diffusion_2(cls) -> "CLIPTextConfig":
        """The text encoder of Stable Diffusion 2: OpenCLIP's ViT-H/14 without its last block, 340 million parameters."""
        return cls(d_model=1024, d_ff=4096, n_layers=23, n_heads=16, activation="gelu")

    rows = (
        Written("model_type", "clip_text_model"),
        Field("vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        *_TRANSFORMER,
        _TextTokens(),
        Field("initializer_range", "init_std"),
    )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> "CLIPTextConfig":
        """Returns the config that a `config.json` describes, as the file itself or as the `text_config` of a complete
        CLIP."""
        return super().from_hf(_submodel_keys(reader, "text_config"))


@dataclass(frozen=True)
class CLIPVisionConfig(FolderConfig):
    """The sizes and dropout rate of CLIP's vision model. The defaults are those of the published ViT-B/32.

    **Arguments:**

    - `image_size`, `patch_size`, `n_channels`: the height and width of an image and of a patch, in pixels, and the number of
        color channels.
    - `init_std`: standard deviation of the initial patch embedding and positions. That of the other weights depends on their
        sizes.
    - The other fields are those of `CLIPTextConfig`.

    Raises ValueError for sizes below 1, a patch larger than the image, heads that do not divide the width, a rate outside
    [0, 1), and any other activation.
    """

    image_size: int = 224
    patch_size: int = 32
    n_channels: int = 3
    d_model: int = 768
    d_ff: int = 3072
    n_layers: int = 12
    n_heads: int = 12
    activation: str = "quick_gelu"
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    init_std: float = 0.02
    remat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "image_size", "patch_size", "n_channels", "d_model", "d_ff", "n_layers", "n_heads")
        check_heads(self)
        check_rates(self, "attention_dropout")
        check_choice(self, "activation", ACTIVATIONS)
        check_patches(self)

    @property
    def n_patches(self) -> int:
        """The number of patches of an image. Pixels beyond the last complete patch are ignored."""
        return (self.image_size // self.patch_size) ** 2

    def without_dropout(self) -> "CLIPVisionConfig":
        """The same config without dropout."""
        return replace(self, attention_dropout=0.0)

    rows = (
        Written("model_type", "clip_vision_model"),
        Field("image_size"),
        Field("patch_size"),
        Field("num_channels", "n_channels"),
        *_TRANSFORMER,
        Field("initializer_range", "init_std"),
    )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> "CLIPVisionConfig":
        """Returns the config that a `config.json` describes, as the file itself or as the `vision_config` of a complete
        CLIP."""
        return super().from_hf(_submodel_keys(reader, "vision_config"))


@dataclass(frozen=True)
class _Submodel(Row):
    """The config of the text or the vision model, an object inside the file."""

    key: str
    name: str
    config_class: type[CLIPTextConfig] | type[CLIPVisionConfig]

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        # Old files contain each config twice. transformers uses the one with the suffix `_dict`, and its own defaults for
        # keys that are missing there.
        fields, older = reader.get(self.key, {}), reader.get(f"{self.key}_dict", None, OBJECT)
        half = reader.nested(self.key, fields if older is None else older)
        return {self.name: self.config_class.from_hf(half)}

    def write(self, config: Any) -> dict[str, Any]:
        half = getattr(config, self.name)
        return {self.key: {**half.extra, **half.to_hf()}}


@dataclass(frozen=True)
class CLIPConfig(FolderConfig):
    """The text and vision models of a CLIP and their common space. The defaults are those of the published ViT-B/32.

    **Arguments:**

    - `text`, `vision`: the configs of the two models.
    - `d_projection`: the width of the common space.
    - `init_logit_scale`: the initial logarithm of the factor that scales similarities.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for a `d_projection` below 1.
    """

    text: CLIPTextConfig = field(default_factory=CLIPTextConfig)
    vision: CLIPVisionConfig = field(default_factory=CLIPVisionConfig)
    d_projection: int = 512
    init_logit_scale: float = 2.6592
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_sizes(self, "d_projection")

    def without_dropout(self) -> "CLIPConfig":
        """The same config without dropout in either model."""
        return replace(self, text=self.text.without_dropout(), vision=self.vision.without_dropout())

    @classmethod
    def clip_vit_base_patch32(cls) -> "CLIPConfig":
        """The published ViT-B/32 with 151 million parameters."""
        return cls()

    @classmethod
    def clip_vit_base_patch16(cls) -> "CLIPConfig":
        """The published ViT-B/16 with 150 million parameters."""
        return cls(vision=CLIPVisionConfig(patch_size=16))

    @classmethod
    def clip_vit_large_patch14(cls) -> "CLIPConfig":
        """The published ViT-L/14 with 428 million parameters."""
        return cls(
            text=CLIPTextConfig.stable_diffusion_1(),
            vision=CLIPVisionConfig(patch_size=14, d_model=1024, d_ff=4096, n_layers=24, n_heads=16),
            d_projection=768,
        )

    rows = (
        Written("model_type", "clip"),
        _Submodel("text_config", "text", CLIPTextConfig),
        _Submodel("vision_config", "vision", CLIPVisionConfig),
        Field("projection_dim", "d_projection"),
        Field("logit_scale_init_value", "init_logit_scale", NUMBER),
    )
