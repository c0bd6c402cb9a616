"""A pair of a text and an image encoder with a common embedding space.

Dims: seq = tokens of one text, projection = width of the common space.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._kinds import OBJECT
from ..hf import ConfigReader, FolderConfig, Pretrained, Row, WeightMap, leaves_of, reshaped, same, same_layer, within
from ..nn import linear, normal_linear
from ._config import VisionConfig
from ._model import VisionEncoder
from ._text import TextConfig, TextEncoder


@dataclass(frozen=True)
class Submodel(Row):
    """The config of a part of a model, an object inside the file."""

    key: str
    name: str
    config_class: Any

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
class PairConfig(FolderConfig):
    """The text and image encoders of a pair. See the families for the arguments."""

    text: TextConfig
    vision: VisionConfig

    width: ClassVar[Any] = None  # of the linear layers after both encoders; None for no such layers
    init_scale: ClassVar[Any]  # the initial logarithm of the factor of similarities
    init_bias: ClassVar[Any] = None  # the initial number that is added to them; None for no such number


class Pair(Pretrained):
    """A text and an image encoder, from a text and an image to an embedding of each, of length 1. Call it on one pair.

    ```python
    model = CLIP(CLIPConfig.of("vit-base-patch32"), key=jax.random.key(0))
    texts, images = jax.vmap(model)(ids, pixels)
    logits = model.logits_per_image(images, texts)
    labels = jnp.arange(len(logits))  # in a batch of pairs, each image matches its own text, and the reverse
    loss = cross_entropy(jnp.stack([logits, logits.T]), jnp.stack([labels, labels]))
    ```
    """

    config_class: ClassVar[Any] = PairConfig
    text_class: ClassVar[type[TextEncoder]]
    vision_class: ClassVar[type[VisionEncoder]]

    text: TextEncoder
    text_projection: eqx.nn.Linear | None
    vision: VisionEncoder
    vision_projection: eqx.nn.Linear | None
    logit_scale: Float[Array, ""]  # the logarithm of the factor
    logit_bias: Float[Array, ""] | None
    config: Any = eqx.field(static=True)

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the configs of both models.
        - `key`: draws the weights: those of the two models as in their classes, projections N(0, 1 / `d`).
        """
        text_key, vision_key, text_projection_key, vision_projection_key = jax.random.split(key, 4)

        def project(d: int, key: PRNGKeyArray) -> eqx.nn.Linear | None:
            return None if config.width is None else normal_linear(d, config.width, std=d**-0.5, use_bias=False, key=key)

        self.text = self.text_class(config.text, key=text_key)
        self.text_projection = project(config.text.d_model, text_projection_key)
        self.vision = self.vision_class(config.vision, key=vision_key)
        self.vision_projection = project(config.vision.d_model, vision_projection_key)
        self.logit_scale = jnp.full((), config.init_scale)
        self.logit_bias = None if config.init_bias is None else jnp.full((), config.init_bias)
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
        """Returns the embedding of a text, of length 1. See `TextEncoder` for the arguments."""
        with jax.named_scope("text"):
            return _embedding(self.text_projection, self.text.pool(self.text(ids, mask=mask, key=key), ids))

    def encode_image(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " projection"]:
        """Returns the embedding of an image, of length 1. See `VisionEncoder` for the arguments."""
        with jax.named_scope("vision"):
            return _embedding(self.vision_projection, self.vision.pool(self.vision(pixels, key=key)))

    def logits_per_image(
        self, images: Float[Array, "images projection"], texts: Float[Array, "texts projection"]
    ) -> Float[Array, "images texts"]:
        """Returns the cosine similarities of images and texts times `exp(logit_scale)`, plus `logit_bias` if there is one,
        one row for each image.

        **Arguments:**

        - `images`, `texts`: as `encode_image` and `encode_text` return them. Their numbers may differ.
        """
        logits = jnp.exp(self.logit_scale) * (images @ texts.T)
        return logits if self.logit_bias is None else logits + self.logit_bias

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        leaves = leaves_of(cls, config)
        parts = {"text": config.text, "vision": config.vision}
        tensors = [
            tensor
            for path, half in parts.items()
            for tensor in within(half.names.base, f"{path}.", half.names.tensors(leaves, half.n_layers, f"{path}."))
        ]
        if config.width is not None:
            tensors += same_layer("text_projection", "text_projection", use_bias=False)
            tensors += same_layer("visual_projection", "vision_projection", use_bias=False)
        numbers = [name for name in ("logit_scale", "logit_bias") if name in leaves]
        has_dim = config.init_bias is not None
        tensors += [reshaped(name, name, (1,), ()) if has_dim else same(name, name) for name in numbers]
        return WeightMap(tensors=tensors, ignored=("*.embeddings.position_ids",))


def _embedding(projection: eqx.nn.Linear | None, pooled: Float[Array, " d"]) -> Float[Array, " projection"]:
    x = pooled if projection is None else linear(projection, pooled)
    return (x / jnp.linalg.norm(x.astype(jnp.float32))).astype(x.dtype)
