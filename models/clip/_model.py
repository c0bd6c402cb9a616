"""CLIP's two transformers, and both with their common embedding space.

Dims: seq = tokens of one text, patches = rows x columns of one image, tokens = 1 + patches, d = width of the text or vision
model, projection = width of the common space.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..hf import Pretrained, StoredTensor, WeightMap, layers, same, same_layer, within
from ..nn import (
    PreNormBlock,
    Stack,
    causal_mask,
    check_length,
    check_segments,
    embed,
    learned_positions,
    linear,
    norm,
    normal_embedding,
    normal_linear,
)
from ._config import CLIPConfig, CLIPTextConfig, CLIPVisionConfig


def _make_stack(config: CLIPTextConfig | CLIPVisionConfig, key: PRNGKeyArray) -> Stack[PreNormBlock]:
    """Returns the blocks of either model."""
    d = config.d_model

    def make_block(key: PRNGKeyArray) -> PreNormBlock:
        return PreNormBlock(
            config,
            std=d**-0.5,
            up_std=(2 * d) ** -0.5,
            output_std=(d * 2 * config.n_layers) ** -0.5,  # two layers of each block add to the residual stream
            activation=config.activation,
            key=key,
        )

    return Stack(make_block, config.n_layers, remat=config.remat, key=key)


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
    stack: Stack[PreNormBlock]
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
        self.stack = _make_stack(config, stack_key)
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
    stack: Stack[PreNormBlock]
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
        self.stack = _make_stack(config, stack_key)
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
