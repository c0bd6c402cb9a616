"""LLaVA: a decoder that reads images, whose features take the places of image tokens in a text.

Source: Liu et al. 2023, *Improved Baselines with Visual Instruction Tuning* (arXiv:2310.03744), and its code,
github.com/haotian-liu/LLaVA. The image encoder is CLIP's or SigLIP's, and the decoder any of `redeqx.models.decoder`. All
images have one size: tiles and images of other sizes, as in LLaVA-NeXT, are not here.

Dims: channels = color channels, patches = features of one image, seq = tokens of one text, d = width of the decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from redeqx.errors import check_choice, wrong

from ._kinds import INTEGER, TEXT
from .clip import CLIPVision, CLIPVisionConfig
from .decoder import FAMILIES, Decoder, DecoderConfig
from .generation import Generation
from .hf import ConfigReader, FolderConfig, Pretrained, WeightMap, published, same_layer, within
from .llama import LlamaConfig
from .nn import ACTIVATIONS, Cache, check_choice as check_one_of, check_length, embed, linear, normal_linear
from .siglip import SiglipVision
from .vision import VisionConfig, VisionEncoder

_ENCODERS: Mapping[str, type[VisionEncoder]] = {"clip_vision_model": CLIPVision, "siglip_vision_model": SiglipVision}
_CLIP_L: dict[str, Any] = {"image_size": 336, "patch_size": 14, "d_model": 1024, "d_ff": 4096, "n_layers": 24, "n_heads": 16}


@dataclass(frozen=True)
class LlavaConfig(FolderConfig):
    """The image encoder and the decoder of a LLaVA, and what joins them. The defaults are those of LLaVA 1.5 7B.

    **Arguments:**

    - `vision`, `text`: their configs: of CLIP's or SigLIP's vision model, and of a decoder whose embeddings are not scaled.
    - `image_token_id`: the token whose places the features of images take, one for each patch.
    - `feature_layers`: the numbers of blocks of the image encoder before the hidden states that are read; negative numbers
        count from after the last, which is -1.
    - `drops_first`: whether the first token of the image encoder is left out, which is CLIP's class token.
    - `projector_activation`, `projector_bias`: of the two layers from features to the decoder.
    - `generation`: the folder's defaults for the arguments of `generate`.

    Raises ValueError for other encoders, for a decoder with scaled embeddings, and for layers that the encoder lacks.
    """

    vision: VisionConfig = field(default_factory=lambda: CLIPVisionConfig(**_CLIP_L))
    text: DecoderConfig = field(default_factory=lambda: replace(LlamaConfig.of("llama2-7b"), vocab_size=32064))
    image_token_id: int = 32000
    feature_layers: tuple[int, ...] = (-2,)
    drops_first: bool = True
    projector_activation: str = "gelu"
    projector_bias: bool = True
    generation: Generation | None = None

    def __post_init__(self) -> None:
        check_choice(self.vision.model_type, "vision.model_type", (*_ENCODERS,))
        check_choice(self.text.model_type, "text.model_type", (*FAMILIES,))
        check_one_of(self, "projector_activation", ACTIVATIONS)
        if self.text.embedding_scale != 1 or self.text.d_embedding not in (None, self.text.d_model):
            rule = "a decoder that does not scale or project embeddings"
            raise wrong("text", rule, repr(self.text.model_type), "Choose another one.")
        n_layers = self.vision.n_layers
        if not self.feature_layers or not all(-n_layers - 1 <= layer <= n_layers for layer in self.feature_layers):
            rule = f"numbers from {-n_layers - 1} to {n_layers}, the encoder's blocks"
            raise wrong("feature_layers", rule, self.feature_layers, "Count from 0, or from -1 backwards.")
        if not 0 <= self.image_token_id < self.text.vocab_size:
            rule = f"a token below `vocab_size`={self.text.vocab_size}"
            raise wrong("image_token_id", rule, self.image_token_id, "Enlarge the vocabulary.")

    @property
    def n_features(self) -> int:
        """The number of features of an image, each of which takes the place of one image token."""
        return self.vision.n_first + self.vision.n_patches - self.drops_first

    # The decoder's, for `generate`.
    n_positions = property(lambda config: config.text.n_positions)
    vocab_size = property(lambda config: config.text.vocab_size)
    bos_token_id = property(lambda config: config.text.bos_token_id)
    eos_token_id = property(lambda config: config.text.eos_token_id)
    pad_token_id = property(lambda config: config.text.pad_token_id)

    # LLaVA 1.5, with 7.06 and 13.35 thousand million parameters.
    sizes = published({"7b": {}, "13b": {"text": replace(LlamaConfig.of("llama2-13b"), vocab_size=32064)}})

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> "LlavaConfig":
        vision, text = reader.part("vision_config"), reader.part("text_config")
        kind = vision.only("model_type", *_ENCODERS)
        family = FAMILIES[text.only("model_type", "llama", *FAMILIES)]
        decoder = family.config_class.from_hf(text)
        tokens = reader.tokens(bos=decoder.bos_token_id, eos=decoder.eos_token_id, pad=decoder.pad_token_id)
        generation = reader.generation(text)
        decoder = replace(decoder, **tokens, generation=None)
        reader.only("tie_word_embeddings", *((False, True) if decoder.is_tied else (False,)))
        layers = reader.get("vision_feature_layer", None)
        layers = layers if isinstance(layers, list) else [-2 if layers is None else layers]
        layers = tuple(INTEGER.check(reader.path, "vision_feature_layer", n) for n in layers)
        reader = reader.aliased({"image_token_id": "image_token_index"})
        return reader.build(
            cls,
            key_of=cls.key_of,
            vision=_ENCODERS[kind].config_class.from_hf(vision),
            text=decoder,
            image_token_id=reader.get("image_token_index", 32000, INTEGER),
            feature_layers=layers,
            drops_first=reader.only("vision_feature_select_strategy", "default", "full") == "default",
            projector_activation=reader.get("projector_hidden_act", "gelu", TEXT),
            projector_bias=reader.get("multimodal_projector_bias", True),
            generation=generation,
            extra=reader.rest(),
        )

    def to_hf(self) -> dict[str, Any]:
        layers = self.feature_layers
        return {
            "model_type": "llava",
            "vision_config": {**self.vision.extra, **self.vision.to_hf()},
            "text_config": {**self.text.extra, **self.text.to_hf()},
            "image_token_index": self.image_token_id,
            "image_seq_length": self.n_features,
            "vision_feature_layer": layers[0] if len(layers) == 1 else [*layers],
            "vision_feature_select_strategy": "default" if self.drops_first else "full",
            "projector_hidden_act": self.projector_activation,
            "multimodal_projector_bias": self.projector_bias,
            "tie_word_embeddings": self.text.is_tied,
        }


class Llava(Pretrained):
    """LLaVA, from the tokens of a text with images to the logits of each next token. Call it on one example.

    ```python
    model, config = Llava.from_pretrained(folder)
    logits = jax.vmap(model)(ids, pixels)  # ids [batch, seq], pixels [batch, images, channels, height, width]
    tokens = generate(model, ids, pixels=pixels, max_new_tokens=64)
    ```

    In `ids`, each image has `config.n_features` tokens of `config.image_token_id`, as the processor of a folder writes them.
    """

    config_class = LlavaConfig
    model_types = ("llava",)
    architectures = ("LlavaForConditionalGeneration",)

    vision: VisionEncoder
    projector_in: eqx.nn.Linear
    projector_out: eqx.nn.Linear
    text: Decoder
    config: LlavaConfig = eqx.field(static=True)

    def __init__(self, config: LlavaConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the configs of both models.
        - `key`: draws the weights: those of the two models as in their classes, the projector as the decoder's layers.
        """
        vision_key, in_key, out_key, text_key = jax.random.split(key, 4)
        d, std, has_bias = config.text.d_model, config.text.init_std, config.projector_bias
        d_read = config.vision.d_model * len(config.feature_layers)
        self.vision = _ENCODERS[config.vision.model_type](config.vision, key=vision_key)
        self.projector_in = normal_linear(d_read, d, std=std, use_bias=has_bias, key=in_key)
        self.projector_out = normal_linear(d, d, std=std, use_bias=has_bias, key=out_key)
        self.text = FAMILIES[config.text.model_type](config.text, key=text_key)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, " seq"],
        pixels: Float[Array, "images channels height width"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq vocab"]:
        """Returns the logits of the token that follows each of `ids`, given that token, all before it, and their images.

        **Arguments:**

        - `ids`: token ids below `vocab_size`, at most `n_positions` of them, with `n_features` image tokens for each image.
            Another number of image tokens gives NaN.
        - `pixels`: the images in the order of the text, normalized as the checkpoint expects; None for a text without.
        - `mask`: True for tokens, False for padding on either side; None if all are tokens.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for images of another shape, and if there are more ids than positions.
        """
        return self.logits(self.hidden(ids, pixels, mask=mask, key=key))

    def hidden(
        self,
        ids: Int[Array, " seq"],
        pixels: Float[Array, "images channels height width"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq d"]:
        """Returns the input of `logits`. See `__call__` for the arguments."""
        check_length("ids", len(ids), self.config.n_positions)
        vision_key, text_key = (None, None) if key is None else jax.random.split(key)
        return self.text.run(self._embed(ids, pixels, vision_key), mask, None, text_key)[0]

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        """Returns the logits of the next tokens, from hidden states."""
        return self.text.logits(hidden)

    def see(
        self, pixels: Float[Array, "images channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "features d"]:
        """Returns the features of images, one image after another, as the decoder reads them."""

        def of_image(image: Array, key: PRNGKeyArray | None) -> Array:
            found = jnp.concatenate(self.vision.features(image, self.config.feature_layers, key=key), -1)
            return found[1:] if self.config.drops_first else found

        with jax.named_scope("vision"):
            keys = None if key is None else jax.random.split(key, len(pixels))
            read = rearrange(jax.vmap(of_image)(pixels, keys), "images features d -> (images features) d")
        with jax.named_scope("projector"):
            activate = ACTIVATIONS[self.config.projector_activation]
            return linear(self.projector_out, activate(linear(self.projector_in, read)))

    def _embed(self, ids: Array, pixels: Array | None, key: PRNGKeyArray | None = None) -> Float[Array, "seq d"]:
        embedded = embed(self.text.embedding, ids)
        if pixels is None:
            return embedded
        is_image = ids == self.config.image_token_id
        # Without an image there is no row to take: a text of a batch without images has no image token either.
        features = self.see(pixels, key=key) if len(pixels) else jnp.full_like(embedded[:1], jnp.nan)
        taken = features[jnp.clip(jnp.cumsum(is_image) - 1, 0, len(features) - 1)]
        taken = jnp.where(is_image.sum() == len(features), taken, jnp.nan)  # which a training run detects
        return jnp.where(is_image[:, None], taken.astype(embedded.dtype), embedded)

    def init_cache(self, length: int) -> Cache:
        """Returns an empty cache for one example. See `Decoder.init_cache`."""
        return self.text.init_cache(length)

    def decode(
        self,
        ids: Int[Array, " seq"],
        cache: Cache,
        *,
        mask: Bool[Array, " seq"] | None = None,
        every: bool = False,
        pixels: Float[Array, "images channels height width"] | None = None,
    ) -> tuple[Float[Array, "*seq vocab"], Cache]:
        """Continues the sequence in the cache with `ids`, and with the images in them. See `Decoder.decode`."""
        cache = cache.begin(jnp.ones(len(ids), bool) if mask is None else mask)
        hidden, written = self.text.run(self._embed(ids, pixels), mask, cache, None)
        return self.logits(hidden if every else hidden[-1]), written.end(len(ids))

    @classmethod
    def weight_map(cls, config: LlavaConfig) -> WeightMap:
        vision = _ENCODERS[config.vision.model_type].weight_map(config.vision)
        text = FAMILIES[config.text.model_type].weight_map(config.text)
        bias = config.projector_bias
        language, tower = "language_model.", "vision_tower."
        return WeightMap(
            tensors=[
                *within(language, "text.", text.tensors),
                *same_layer("multi_modal_projector.linear_1", "projector_in", use_bias=bias),
                *same_layer("multi_modal_projector.linear_2", "projector_out", use_bias=bias),
                *within(tower, "vision.", vision.tensors),
            ],
            ignored=(*(tower + name for name in vision.ignored), *(language + name for name in text.ignored)),
            copies={language + copy: language + original for copy, original in text.copies.items()},
            untied_by="tie_word_embeddings",
            modules=(
                (r"^(?=vision_tower|multi_modal)", "model."),
                (r"^language_model\.model\.", "model.language_model."),
                (r"^language_model\.lm_head$", "lm_head"),
            ),
            aliases=(
                # Names in memory, which some folders have.
                (r"^model\.(?=vision_tower|multi_modal)", ""),
                (r"^model\.language_model\.", "language_model.model."),
                (r"^lm_head\.", "language_model.lm_head."),
                (r"^vision_tower\.vision_model\.", "vision_tower."),  # before transformers 5
            ),
        )
