"""Image captioning: a ViT encodes the image, and a GPT-2 with cross-attention generates the text.

Sources: Vinyals et al. 2015, *Show and Tell: A Neural Image Caption Generator*, for captioning with an encoder and a
decoder; Rothe et al. 2020, *Leveraging Pre-trained Checkpoints for Sequence Generation Tasks*, for joining two pretrained
models with new cross-attentions. It is the `VisionEncoderDecoderModel` of `transformers`, with these two models only.

Dims: channels = color channels, memory = 1 + patches of one image, target = tokens of one text, d = width of the decoder.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from redeqx._tree import map_named, named_leaves
from redeqx.errors import wrong

from .generation import EncoderDecoder, Generation
from .gpt2 import GPT2, GPT2Config
from .hf import ConfigReader, FolderConfig, Pretrained, Tokens, WeightMap, is_on_disk, published, same_layer, within
from .nn import Cache, linear, normal_linear
from .vit import ViT, ViTConfig


@dataclass(frozen=True)
class VisionEncoderDecoderConfig(FolderConfig):
    """The encoder and decoder of a captioner, and its special tokens. The defaults are the smallest published models.

    **Arguments:**

    - `encoder`, `decoder`: their configs. The decoder must have cross-attention. If their widths differ, the encoder's
        output is projected.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `decoder_start_token_id`: the id of the decoder's first token.
    - `generation`: the folder's defaults for the arguments of `generate`.

    Raises ValueError for a decoder without cross-attention.
    """

    encoder: ViTConfig = field(default_factory=ViTConfig)
    decoder: GPT2Config = field(default_factory=lambda: GPT2Config(has_cross_attention=True))
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    pad_token_id: int | None = None
    decoder_start_token_id: int = 50256
    generation: Generation | None = None

    def __post_init__(self) -> None:
        if not self.decoder.has_cross_attention:
            raise ValueError(
                "`decoder`: expected one with `has_cross_attention`=True, got False. Set it, or build the model by "
                "`VisionEncoderDecoder.from_encoder_decoder`, which initializes new cross-attentions."
            )

    @property
    def n_positions(self) -> int:
        """The maximum length of a text, in tokens."""
        return self.decoder.n_positions

    sizes = published({"239m": {"pad_token_id": 50256}})  # ViT-B/16 and the smallest GPT-2

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> "VisionEncoderDecoderConfig":
        """Returns the config that a `config.json` describes. It does not describe the encoder's pooler (see
        `read_config`)."""
        reader.only("is_encoder_decoder", True)
        encoder, decoder = (reader.part(half) for half in ("encoder", "decoder"))
        encoder.only("model_type", "vit")
        decoder.only("model_type", "gpt2")
        decoder.only("cross_attention_hidden_size", None)
        own = reader.tokens(decoder_start=None)
        generation = reader.generation(decoder)
        gpt2 = GPT2Config.from_hf(decoder)
        unused = {} if gpt2.generation is None else gpt2.generation.keys
        gpt2 = replace(gpt2, generation=None, extra={**gpt2.extra, **unused})
        # If the file itself has no special tokens, `generate` uses the decoder's.
        name = "decoder_start_token_id"
        start = own.pop(name)
        tokens = {token: getattr(gpt2, token) if value is None else value for token, value in own.items()}
        starts = (start, decoder.tokens(decoder_start=None)[name], tokens["bos_token_id"])
        start = next((token for token in starts if token is not None), None)
        return reader.build(
            cls,
            key_of=cls.key_of,
            encoder=ViTConfig.from_hf(encoder),
            decoder=gpt2,
            **tokens,
            decoder_start_token_id=reader.get(name) if start is None else start,
            generation=generation,
            extra=reader.rest(),
        )

    def to_hf(self) -> dict[str, Any]:
        return {
            "model_type": "vision-encoder-decoder",
            "is_encoder_decoder": True,
            "tie_word_embeddings": False,
            "encoder": {**self.encoder.extra, **self.encoder.to_hf()},
            "decoder": {**self.decoder.extra, **self.decoder.to_hf(), "is_decoder": True},
            **Tokens("decoder_start").write(self),
        }


class VisionEncoderDecoder(EncoderDecoder, Pretrained):
    """A captioner, from an image and the tokens of a text to the logits of each next token. Call it on one pair.

    ```python
    model, config = VisionEncoderDecoder.from_pretrained(folder)
    logits = jax.vmap(model)(pixels, jax.vmap(model.shift_right)(labels))  # [batch, target, vocab]
    ```

    `eqx.nn.inference_mode(model)` turns dropout off; otherwise a `key` is needed.
    """

    config_class = VisionEncoderDecoderConfig
    model_types = ("vision-encoder-decoder",)
    architectures = ("VisionEncoderDecoderModel",)

    encoder: ViT
    projection: eqx.nn.Linear | None  # None if the encoder and the decoder have the same width
    decoder: GPT2
    config: VisionEncoderDecoderConfig = eqx.field(static=True)

    def __init__(self, config: VisionEncoderDecoderConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the configs of the encoder and the decoder.
        - `key`: draws the weights: those of encoder and decoder as in their classes, the projection as the decoder's layers.
        """
        encoder_key, projection_key, decoder_key = jax.random.split(key, 3)
        self.encoder = ViT(config.encoder, key=encoder_key)
        d_encoder, d, std = config.encoder.d_model, config.decoder.d_model, config.decoder.init_std
        self.projection = None if d_encoder == d else normal_linear(d_encoder, d, std=std, key=projection_key)
        self.decoder = GPT2(config.decoder, key=decoder_key)
        self.config = config

    @classmethod
    def from_encoder_decoder(
        cls,
        encoder: ViT,
        decoder: GPT2,
        *,
        decoder_start_token_id: int | None = None,
        pad_token_id: int | None = None,
        key: PRNGKeyArray,
    ) -> "VisionEncoderDecoder":
        """Joins two pretrained models into a captioner. Its cross-attentions are new and still have to be trained.

        ```python
        encoder, _ = ViT.from_pretrained("vit-base-patch16-224", has_pooler=False)
        decoder, _ = GPT2.from_pretrained("gpt2")
        model = VisionEncoderDecoder.from_encoder_decoder(encoder, decoder, pad_token_id=50256, key=key)
        ```

        **Arguments:**

        - `encoder`, `decoder`: their weights are kept. If the decoder has cross-attentions, they are kept too.
        - `decoder_start_token_id`, `pad_token_id`: for the config; None takes the decoder's `bos_token_id` and
            `pad_token_id`.
        - `key`: draws the cross-attentions, and the projection if the widths differ, in the decoder's dtype.

        Raises ValueError if neither the arguments nor the decoder have a first token.
        """
        gpt2 = replace(decoder.config, has_cross_attention=True)
        start = gpt2.bos_token_id if decoder_start_token_id is None else decoder_start_token_id
        if start is None:
            raise wrong("decoder_start_token_id", "a token, since the decoder has no `bos_token_id`", "None", "Pass one.")
        config = VisionEncoderDecoderConfig(
            encoder=encoder.config,
            decoder=gpt2,
            bos_token_id=gpt2.bos_token_id,
            eos_token_id=gpt2.eos_token_id,
            pad_token_id=gpt2.pad_token_id if pad_token_id is None else pad_token_id,
            decoder_start_token_id=start,
        )
        halves = {"encoder": encoder, "decoder": decoder}
        given = {f"{half}.{name}": leaf for half, model in halves.items() for name, leaf in named_leaves(model).items()}

        @eqx.filter_jit  # drops the work for weights that are replaced
        def draw(key: PRNGKeyArray) -> dict[str, Array]:
            leaves = named_leaves(cls(config, key=key)).items()
            dtype = decoder.embedding.weight.dtype
            return {name: leaf.astype(dtype) for name, leaf in leaves if eqx.is_array(leaf) and name not in given}

        leaves = {**draw(key), **given}
        return map_named(lambda name, leaf: leaves.get(name, leaf), eqx.filter_eval_shape(cls, config, key=key))

    def logits(self, hidden: Float[Array, "*dims d"]) -> Float[Array, "*dims vocab"]:
        return self.decoder.logits(hidden)

    def encode(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "memory d"]:
        """Returns the encoder's output for an image, which the decoder attends to.

        **Arguments:**

        - `pixels`: one image of `[n_channels, image_size, image_size]`, normalized as the checkpoint expects.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for an image of another shape.
        """
        with jax.named_scope("encoder"):
            memory = self.encoder(pixels, key=key)
            return memory if self.projection is None else linear(self.projection, memory)

    def init_cache(
        self, length: int, memory: Float[Array, "memory d"], memory_mask: Bool[Array, " memory"] | None = None
    ) -> Cache:
        """Returns an empty cache for one text. See `EncoderDecoder.init_cache`."""
        return self.decoder.init_cache(length, memory, memory_mask)

    @property
    def embedding(self) -> eqx.nn.Embedding:
        """The decoder's."""
        return self.decoder.embedding

    def _run(
        self, ids, mask, cache, key, memory, memory_mask, segments=None, memory_segments=None
    ) -> tuple[Float[Array, "target d"], Any]:
        del segments, memory_segments
        with jax.named_scope("decoder"):
            return self.decoder.run(ids, mask, cache, key, None, memory, memory_mask)

    @classmethod
    def read_config(cls, folder: Path) -> VisionEncoderDecoderConfig:
        """Returns the config of a folder. Its encoder has a pooler if the folder has the pooler's weights; the captioner
        does not use it."""
        config, name = super().read_config(folder), "encoder.pooler.dense.weight"
        has_pooler = is_on_disk(folder, cls.weights_name, name, default=config.encoder.has_pooler)
        return replace(config, encoder=replace(config.encoder, has_pooler=has_pooler))

    @staticmethod
    def weight_map(config: VisionEncoderDecoderConfig) -> WeightMap:
        encoder, decoder = ViT.weight_map(config.encoder), GPT2.weight_map(config.decoder)
        projection = [] if config.encoder.d_model == config.decoder.d_model else ["projection"]
        return WeightMap(
            tensors=[
                *within("encoder.", "encoder.", encoder.tensors),
                *(name for leaf in projection for name in same_layer("enc_to_dec_proj", leaf)),
                *within("decoder.", "decoder.", decoder.tensors),
            ],
            ignored=(*(f"encoder.{name}" for name in encoder.ignored), *(f"decoder.{name}" for name in decoder.ignored)),
            copies={f"decoder.{copy}": f"decoder.{original}" for copy, original in decoder.copies.items()},
            untied_by=f"decoder.{decoder.untied_by}",
            modules=encoder.modules,
        )
