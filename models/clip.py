"""CLIP: a text and a vision transformer with a common embedding space, and each of them alone.

Source: Radford et al. 2021, *Learning Transferable Visual Models From Natural Language Supervision*, and its code,
github.com/openai/CLIP. The text model is also the text encoder of Stable Diffusion. Only the layout differs from that code:
query, key and value are three layers instead of one, so that a plan shards each of them by whole heads.

Dims: seq = tokens of one text, patches = rows x columns of one image, tokens = 1 + patches, d = width of the text or vision
model, projection = width of the common space, heads x size = d.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._kinds import NUMBER, OBJECT, RATE
from .hf import (
    ConfigReader,
    Field,
    FolderConfig,
    Only,
    Pretrained,
    Row,
    StoredTensor,
    Tokens,
    WeightMap,
    Written,
    layers,
    same,
    same_layer,
    within,
)
from .nn import (
    Attention,
    Mask,
    Stack,
    causal_mask,
    check_heads,
    check_length,
    check_patches,
    check_rates,
    check_segments,
    check_sizes,
    embed,
    learned_positions,
    linear,
    norm,
    normal_embedding,
    normal_linear,
)

_ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


def _check_activation(config: "CLIPTextConfig | CLIPVisionConfig") -> None:
    if config.activation not in _ACTIVATIONS:
        raise ValueError(
            f"`activation`: expected one of {', '.join(_ACTIVATIONS)}, got {config.activation!r}. Pass one of them."
        )


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
    Only("hidden_act", *_ACTIVATIONS, name="activation"),
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
    - `activation`: `"quick_gelu"` as in OpenAI's models, or `"gelu"` as in OpenCLIP's models.
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
        _check_activation(self)

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
        _check_activation(self)
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


class Mlp(eqx.Module):
    """Two linear layers with an activation between them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, *, key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        d, d_ff = config.d_model, config.d_ff
        self.up = normal_linear(d, d_ff, std=(2 * d) ** -0.5, key=up_key)
        self.down = normal_linear(d_ff, d, std=_residual_std(config), key=down_key)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "seq d"]) -> Float[Array, "seq d"]:
        return linear(self.down, _ACTIVATIONS[self.activation](linear(self.up, x)))


def _residual_std(config: CLIPTextConfig | CLIPVisionConfig) -> float:
    """Returns the standard deviation for layers that add to the residual stream, two in each block."""
    return (config.d_model * 2 * config.n_layers) ** -0.5


class Block(eqx.Module):
    """Attention and MLP, each pre-norm and residual. Both models use it."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, *, key: PRNGKeyArray):
        q_key, k_key, v_key, o_key, mlp_key = jax.random.split(key, 5)
        d, eps, std = config.d_model, config.layer_norm_eps, config.d_model**-0.5
        self.attention_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.attention = Attention(
            query=normal_linear(d, d, std=std, key=q_key),
            key=normal_linear(d, d, std=std, key=k_key),
            value=normal_linear(d, d, std=std, key=v_key),
            output=normal_linear(d, d, std=_residual_std(config), key=o_key),
            n_heads=config.n_heads,
            n_kv_heads=config.n_heads,
            dropout=eqx.nn.Dropout(config.attention_dropout),
        )
        self.mlp_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.mlp = Mlp(config, key=mlp_key)

    def __call__(
        self, x: Float[Array, "seq d"], mask: Mask | None = None, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "seq d"]:
        with jax.named_scope("attention"):
            x = x + self.attention(norm(self.attention_norm, x), mask=mask, key=key)[0]
        with jax.named_scope("mlp"):
            return x + self.mlp(norm(self.mlp_norm, x))


_BLOCK = [
    *same_layer("layer_norm1", "attention_norm"),
    *same_layer("self_attn.q_proj", "attention.query"),
    *same_layer("self_attn.k_proj", "attention.key"),
    *same_layer("self_attn.v_proj", "attention.value"),
    *same_layer("self_attn.out_proj", "attention.output"),
    *same_layer("layer_norm2", "mlp_norm"),
    *same_layer("mlp.fc1", "mlp.up"),
    *same_layer("mlp.fc2", "mlp.down"),
]
_JOINT_TENSORS = ("text_projection.weight", "visual_projection.weight", "logit_scale")  # a CLIP's other tensors


class CLIPText(Pretrained):
    """CLIP's text model, from token ids to hidden states, as Stable Diffusion uses them. Call it on one text.

    ```python
    model = CLIPText(CLIPTextConfig.stable_diffusion_1(), key=jax.random.key(0))
    hidden = jax.vmap(model)(ids)  # [batch, seq, d]
    pooled = jax.vmap(model.pool)(hidden, ids)  # [batch, d]
    ```

    `CLIPText.from_pretrained` also reads the text model from the folder of a complete CLIP.
    """

    config_class = CLIPTextConfig
    model_types = ("clip_text_model", "clip")
    architectures = ("CLIPTextModel",)

    embedding: eqx.nn.Embedding
    positions: Float[Array, "n_positions d"]
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm
    config: CLIPTextConfig = eqx.field(static=True)

    def __init__(self, config: CLIPTextConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights. Embedding and positions are N(0, `init_std`²). Matrices are as in OpenAI's code: N(0, 1 /
            `d`), with half that variance for the MLP's first layer, and scaled by `1 / sqrt(2 * n_layers)` for layers that
            add to the residual stream. Biases are 0, norms 1.
        """
        embedding_key, positions_key, stack_key = jax.random.split(key, 3)
        d, std = config.d_model, config.init_std
        self.embedding = normal_embedding(config.vocab_size, d, std=std, key=embedding_key)
        self.positions = std * jax.random.normal(positions_key, (config.n_positions, d))
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        segments: Int[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the normalized hidden state of each token, given that token and all before it.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them.
        - `mask`: True for tokens, False for padding; None if all are tokens, as in Stable Diffusion. Padding counts in
            positions.
        - `segments`: the segments of a packed row, as `redeqx.data.pack` returns them, in place of a mask. A token attends
            to its own segment only, positions start again in each, and each may have `n_positions` tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError if there are more ids than positions, and for a mask together with segments.
        """
        (seq,) = ids.shape
        check_segments(segments, mask, seq)
        if segments is None:
            check_length("ids", seq, self.config.n_positions)
        with jax.named_scope("embedding"):
            x = embed(self.embedding, ids) + learned_positions(self.positions, None, seq, segments=segments)
        return norm(self.norm, self.stack(x, causal_mask(mask, seq, segments=segments), key=key))

    def pool(self, hidden: Float[Array, "seq d"], ids: Int[Array, " seq"]) -> Float[Array, " d"]:
        """Returns the hidden state that represents the text: at its first `eos_token_id`, or at its first id if it has
        none."""
        eos = self.config.eos_token_id
        # Folders written before transformers 4.31 have 2 with any tokenizer; the actual end token was the last id of the
        # vocabulary.
        return hidden[jnp.argmax(ids if eos == 2 else ids == eos)]

    @staticmethod
    def weight_map(config: CLIPTextConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        return WeightMap(
            tensors=_text_tensors(config),
            ignored=("embeddings.position_ids", "vision_model.*", *_JOINT_TENSORS),
            # The prefix of transformers before version 5, and of a complete CLIP.
            aliases=((r"^text_model\.", ""),),
        )


def _text_tensors(config: CLIPTextConfig) -> list[StoredTensor]:
    return [
        same("embeddings.token_embedding.weight", "embedding.weight"),
        same("embeddings.position_embedding.weight", "positions"),
        *layers("encoder.layers.{}.", "stack.blocks.", config.n_layers, _BLOCK),
        *same_layer("final_layer_norm", "norm"),
    ]


class CLIPVision(Pretrained):
    """CLIP's vision model, from pixels to the hidden states of a class token and all patches. Call it on one image.

    ```python
    model = CLIPVision(CLIPVisionConfig(), key=jax.random.key(0))
    hidden = jax.vmap(model)(pixels)  # [batch, 1 + patches, d]
    pooled = jax.vmap(model.pool)(hidden)  # [batch, d]
    ```

    `CLIPVision.from_pretrained` also reads the vision model from the folder of a complete CLIP.
    """

    config_class = CLIPVisionConfig
    model_types = ("clip_vision_model", "clip")
    architectures = ("CLIPVisionModel",)

    patches: eqx.nn.Conv2d
    class_token: Float[Array, " d"]
    positions: Float[Array, "tokens d"]
    input_norm: eqx.nn.LayerNorm
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm  # applied when pooling
    config: CLIPVisionConfig = eqx.field(static=True)

    def __init__(self, config: CLIPVisionConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights. Patch embedding and positions are N(0, `init_std`²), the class token is N(0, 1 / `d`),
            and blocks are as in `CLIPText`.
        """
        patches_key, class_key, positions_key, stack_key = jax.random.split(key, 4)
        d, std, eps, size = config.d_model, config.init_std, config.layer_norm_eps, config.patch_size
        patches = eqx.nn.Conv2d(config.n_channels, d, size, stride=size, use_bias=False, key=patches_key)
        weight = std * jax.random.normal(patches_key, patches.weight.shape)
        self.patches = eqx.tree_at(lambda conv: conv.weight, patches, weight)
        self.class_token = d**-0.5 * jax.random.normal(class_key, (d,))
        self.positions = std * jax.random.normal(positions_key, (1 + config.n_patches, d))
        self.input_norm = eqx.nn.LayerNorm(d, eps=eps)
        self.stack = Stack(lambda key: Block(config, key=key), config.n_layers, remat=config.remat, key=stack_key)
        self.norm = eqx.nn.LayerNorm(d, eps=eps)
        self.config = config

    def __call__(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens d"]:
        """Returns the hidden states of the class token (first) and of each patch, row by row, before the final norm.

        **Arguments:**

        - `pixels`: one image of `[n_channels, image_size, image_size]`, normalized as the checkpoint expects.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for an image of another shape.
        """
        wanted = (self.config.n_channels, self.config.image_size, self.config.image_size)
        if pixels.shape != wanted:
            raise ValueError(f"`pixels`: expected {wanted}, got {pixels.shape}. Resize the image, channels first.")
        with jax.named_scope("embedding"):
            patches = self.patches(pixels.astype(self.patches.weight.dtype))
            x = jnp.concatenate([self.class_token[None], rearrange(patches, "d rows columns -> (rows columns) d")])
            x = norm(self.input_norm, x + self.positions)
        return self.stack(x, key=key)

    def pool(self, hidden: Float[Array, "tokens d"]) -> Float[Array, " d"]:
        """Returns the hidden state that represents the image: the class token's, normalized."""
        return self.norm(hidden[0])

    @staticmethod
    def weight_map(config: CLIPVisionConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        return WeightMap(
            tensors=_vision_tensors(config),
            ignored=("embeddings.position_ids", "text_model.*", *_JOINT_TENSORS),
            aliases=((r"^vision_model\.", ""),),  # as in `CLIPText`
        )


def _vision_tensors(config: CLIPVisionConfig) -> list[StoredTensor]:
    return [
        same("embeddings.patch_embedding.weight", "patches.weight"),
        same("embeddings.class_embedding", "class_token"),
        same("embeddings.position_embedding.weight", "positions"),
        *same_layer("pre_layrnorm", "input_norm"),  # sic
        *layers("encoder.layers.{}.", "stack.blocks.", config.n_layers, _BLOCK),
        *same_layer("post_layernorm", "norm"),
    ]


class CLIP(Pretrained):
    """CLIP, from a text and an image to an embedding of each, of length 1. Call it on one pair.

    ```python
    model = CLIP(CLIPConfig.clip_vit_base_patch32(), key=jax.random.key(0))
    texts, images = jax.vmap(model)(ids, pixels)
    logits = model.logits_per_image(images, texts)
    labels = jnp.arange(len(logits))  # in a batch of pairs, each image matches its own text, and the reverse
    loss = cross_entropy(jnp.stack([logits, logits.T]), jnp.stack([labels, labels]))
    ```
    """

    config_class = CLIPConfig
    model_types = ("clip",)
    architectures = ("CLIPModel",)

    text: CLIPText
    text_projection: eqx.nn.Linear
    vision: CLIPVision
    vision_projection: eqx.nn.Linear
    logit_scale: Float[Array, ""]  # the logarithm of the factor
    config: CLIPConfig = eqx.field(static=True)

    def __init__(self, config: CLIPConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the configs of both models.
        - `key`: draws the weights: those of the two models as in `CLIPText` and `CLIPVision`, projections N(0, 1 / `d`).
        """
        text_key, vision_key, text_projection_key, vision_projection_key = jax.random.split(key, 4)

        def project(d: int, key: PRNGKeyArray) -> eqx.nn.Linear:
            return normal_linear(d, config.d_projection, std=d**-0.5, use_bias=False, key=key)

        self.text = CLIPText(config.text, key=text_key)
        self.text_projection = project(config.text.d_model, text_projection_key)
        self.vision = CLIPVision(config.vision, key=vision_key)
        self.vision_projection = project(config.vision.d_model, vision_projection_key)
        self.logit_scale = jnp.full((), config.init_logit_scale)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        pixels: Float[Array, "channels height width"],
        *,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " projection"], Float[Array, " projection"]]:
        """Returns the embeddings of a text and of an image. See `encode_text` and `encode_image` for the arguments."""
        text_key, image_key = (None, None) if key is None else jax.random.split(key)
        return self.encode_text(ids, mask=mask, key=text_key), self.encode_image(pixels, key=image_key)

    def encode_text(
        self, ids: Int[Array, " seq"], *, mask: Bool[Array, " seq"] | None = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, " projection"]:
        """Returns the embedding of a text, of length 1. See `CLIPText` for the arguments."""
        with jax.named_scope("text"):
            pooled = self.text.pool(self.text(ids, mask=mask, key=key), ids)
            return _normalize(linear(self.text_projection, pooled))

    def encode_image(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " projection"]:
        """Returns the embedding of an image, of length 1. See `CLIPVision` for the arguments."""
        with jax.named_scope("vision"):
            pooled = self.vision.pool(self.vision(pixels, key=key))
            return _normalize(linear(self.vision_projection, pooled))

    def logits_per_image(
        self, images: Float[Array, "images projection"], texts: Float[Array, "texts projection"]
    ) -> Float[Array, "images texts"]:
        """Returns the cosine similarities of images and texts times `exp(logit_scale)`, one row for each image.

        **Arguments:**

        - `images`, `texts`: as `encode_image` and `encode_text` return them. Their numbers may differ.
        """
        return jnp.exp(self.logit_scale) * (images @ texts.T)

    @staticmethod
    def weight_map(config: CLIPConfig) -> WeightMap:
        """Maps the tensors of a Hugging Face folder to the tree's leaves."""
        return WeightMap(
            tensors=[
                *within("text_model.", "text.", _text_tensors(config.text)),
                *same_layer("text_projection", "text_projection", use_bias=False),
                *within("vision_model.", "vision.", _vision_tensors(config.vision)),
                *same_layer("visual_projection", "vision_projection", use_bias=False),
                same("logit_scale", "logit_scale"),
            ],
            ignored=("*.embeddings.position_ids",),
        )


def _normalize(x: Float[Array, " d"]) -> Float[Array, " d"]:
    return (x / jnp.linalg.norm(x.astype(jnp.float32))).astype(x.dtype)
