"""What every image encoder computes: pre-norm blocks over the patches of an image, and tokens before them.

The values of `VisionConfig` say what it has. The block is that of `nn`.

Dims: channels = color channels, patches = rows x columns of one image, tokens = those before the patches, and patches, d =
width of the model, heads x size = d.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from redeqx._rounding import at_least_float32
from redeqx.errors import wrong

from ..hf import Pretrained, WeightMap, is_on_disk, leaves_of, same_layer, within
from ..nn import Attention, Block, Mlp, Stack, linear, norm, normal_attention, normal_linear, normal_mlp, pre_norm_block
from ._config import VisionConfig
from ._resize import bicubic


class AttentionPooling(eqx.Module):
    """A learned query's attention to all tokens, and an MLP."""

    probe: Float[Array, " d"]
    attention: Attention
    norm: eqx.nn.LayerNorm
    mlp: Mlp

    def __init__(self, config: VisionConfig, *, key: PRNGKeyArray):
        probe_key, *keys, mlp_key = jax.random.split(key, 6)
        d, stds, activation = config.d_model, config.block_stds, config.activation
        self.probe = stds.attention * jax.random.normal(probe_key, (d,))
        self.attention = normal_attention(d, config.n_heads, std=stds.attention, output_std=stds.output, keys=keys)
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.mlp = normal_mlp(d, config.d_ff, std=stds.up, down_std=stds.down, activation=activation, key=mlp_key)

    def __call__(self, hidden: Float[Array, "tokens d"]) -> Float[Array, " d"]:
        mixed, _ = self.attention(self.probe[None], memory=hidden)
        return (mixed + self.mlp(norm(self.norm, mixed)))[0]


def _pooler(config: VisionConfig, key: PRNGKeyArray) -> eqx.nn.Linear | AttentionPooling | None:
    if not config.has_pooler:
        return None
    if config.pooling == "attention":
        return AttentionPooling(config, key=key)
    return normal_linear(config.d_model, config.d_model, std=config.init_std, key=key)


class VisionEncoder(Pretrained):
    """An image encoder without a head, from pixels to the hidden states of all tokens. Call it on one image.

    ```python
    model = ViT(ViTConfig.of("base-patch16"), key=jax.random.key(0))
    hidden = jax.vmap(model)(pixels)  # [batch, 1 + patches, d]
    pooled = jax.vmap(model.pool)(hidden)  # [batch, d]
    ```

    `eqx.nn.inference_mode(model)` turns dropout off, if the config has any.

    `from_pretrained` of a family also reads the folders of its classifiers and of larger models, without the rest.
    """

    config_class: ClassVar[Any] = VisionConfig

    patches: eqx.nn.Conv2d
    class_token: Float[Array, " d"] | None
    registers: Float[Array, "n_registers d"] | None
    mask_token: Float[Array, " d"] | None
    positions: Float[Array, "positions d"]  # of the class token and the patches
    input_norm: eqx.nn.LayerNorm | None
    dropout: eqx.nn.Dropout
    stack: Stack[Block]
    norm: eqx.nn.LayerNorm
    pooler: eqx.nn.Linear | AttentionPooling | None
    config: Any = eqx.field(static=True)

    def __init__(self, config: VisionConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights from normal distributions with the variances of the original: `config.stds` and
            `config.block_stds`. Registers and the mask token are 0, biases 0, norms 1.
        """
        patches_key, class_key, positions_key, stack_key, pooler_key = jax.random.split(key, 5)
        d, size = config.d_model, config.patch_size
        patch_std, token_std, position_std = config.stds
        has_bias = config.has_patch_bias
        patches = eqx.nn.Conv2d(config.n_channels, d, size, stride=size, use_bias=has_bias, key=patches_key)
        weight = patch_std * jax.random.normal(patches_key, patches.weight.shape)
        patches = eqx.tree_at(lambda conv: conv.weight, patches, weight)
        self.patches = eqx.tree_at(lambda conv: conv.bias, patches, jnp.zeros((d, 1, 1))) if has_bias else patches
        self.class_token = token_std * jax.random.normal(class_key, (d,)) if config.has_class_token else None
        self.registers = jnp.zeros((config.n_registers, d)) if config.n_registers else None
        self.mask_token = jnp.zeros(d) if config.has_mask_token else None
        n_positions = config.has_class_token + config.n_patches
        self.positions = position_std * jax.random.normal(positions_key, (n_positions, d))
        self.input_norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps) if config.has_input_norm else None
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.stack = Stack(
            lambda key: pre_norm_block(
                config,
                stds=config.block_stds,
                activation=config.mlp_activation,
                d_inner=config.d_inner,
                qkv_bias=config.has_qkv_bias,
                is_gated=config.is_gated,
                layer_scale=config.layer_scale,
                dropout=config.block_dropout,
                key=key,
            ),
            config.n_layers,
            remat=config.remat,
            key=stack_key,
        )
        self.norm = eqx.nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.pooler = _pooler(config, pooler_key)
        self.config = config

    def __call__(
        self,
        pixels: Float[Array, "channels height width"],
        *,
        masked: Bool[Array, " patches"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens d"]:
        """Returns the hidden states of the class token and of registers, if there are any, and of each patch, row by row.
        They are normalized, except in CLIP, whose final norm is part of `pool`.

        **Arguments:**

        - `pixels`: one image of `[n_channels, image_size, image_size]`, normalized as the checkpoint expects. Families with
            `resizing` also take images of other sizes of at least one patch.
        - `masked`: True for patches that the mask token replaces; None for none.
        - `key`: for dropout; not needed in inference.

        Raises ValueError for an image of another shape, and for masked patches without a mask token.
        """
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        x, *_ = self.stack((self._embed(pixels, masked, dropout_key), None, None), None, key=stack_key)
        return x if self.config.pooling == "norm" else norm(self.norm, x)

    def features(
        self, pixels: Float[Array, "channels height width"], layers: Sequence[int], *, key: PRNGKeyArray | None = None
    ) -> list[Float[Array, "tokens d"]]:
        """Returns the hidden states before and after blocks, which are not normalized.

        **Arguments:**

        - `layers`: the number of blocks before each of them; a negative number counts from after the last, which is -1.
        - `pixels`, `key`: as for a call.
        """
        dropout_key, stack_key = (None, None) if key is None else jax.random.split(key)
        after = [layer % (self.config.n_layers + 1) for layer in layers]
        carry = (self._embed(pixels, None, dropout_key), None, None)
        return [x for x, *_ in self.stack.collect(carry, None, after=after, key=stack_key)]

    def _embed(self, pixels: Array, masked: Array | None, key: PRNGKeyArray | None) -> Float[Array, "tokens d"]:
        self._check(pixels, masked)
        with jax.named_scope("embedding"):
            patches = self.patches(pixels.astype(self.patches.weight.dtype))
            x = rearrange(patches, "d rows columns -> (rows columns) d")
            if masked is not None:
                assert self.mask_token is not None
                x = jnp.where(masked[:, None], self.mask_token, x)
            x = x if self.class_token is None else jnp.concatenate([self.class_token[None], x])
            x = x + self._positions(*patches.shape[1:])
            if self.registers is not None:
                x = jnp.concatenate([x[:1], self.registers, x[1:]])
            return self.dropout(norm(self.input_norm, x), key=key)

    def _check(self, pixels: Array, masked: Array | None) -> None:
        config = self.config
        wanted: tuple[Any, ...] = (config.n_channels, config.image_size, config.image_size)
        size, resizes = config.patch_size, config.resizing is not None
        if resizes and pixels.ndim == 3 and pixels.shape[0] == wanted[0] and min(pixels.shape[1:]) >= size:
            wanted = pixels.shape
        if pixels.shape != wanted:
            raise wrong("pixels", wanted, pixels.shape, "Resize the image, channels first.")
        if masked is None:
            return
        if self.mask_token is None:
            rule = f"None for {config.model_type!r}"
            raise wrong("masked", rule, list(masked.shape), "This model has no mask token: omit it.")
        n_patches = (wanted[1] // size) * (wanted[2] // size)
        if masked.shape != (n_patches,):
            raise wrong("masked", f"({n_patches},), one for each patch", masked.shape, "Flatten it row by row.")

    def _positions(self, rows: int, columns: int) -> Float[Array, "positions d"]:
        """Returns the vectors of positions, interpolated for an image of another size."""
        side = self.config.side
        if (rows, columns) == (side, side):
            return self.positions
        antialias = self.config.resizing == "antialiased"
        down, across = (bicubic(side, new, antialias=antialias) for new in (rows, columns))
        n_first = int(self.config.has_class_token)
        grid = rearrange(self.positions[n_first:], "(rows columns) d -> rows columns d", rows=side)
        wide = jnp.einsum("ri,cj,ijd->rcd", down, across, grid.astype(at_least_float32(grid.dtype)))
        resized = rearrange(wide.astype(grid.dtype), "rows columns d -> (rows columns) d")
        return jnp.concatenate([self.positions[:n_first], resized])

    def pool(self, hidden: Float[Array, "tokens d"]) -> Float[Array, " d"]:
        """Returns the vector that represents the image, from the hidden states (see `VisionConfig.pooling`).

        Raises ValueError if the model has no pooler, but needs one.
        """
        pooling = self.config.pooling
        if pooling == "first":
            return hidden[0]
        with jax.named_scope("pooler"):
            if pooling == "norm":
                return self.norm(hidden[0])
            if self.pooler is None:
                token = "class token's `hidden[0]`" if self.config.has_class_token else "mean `hidden.mean(0)`"
                raise wrong("has_pooler", "True", "False: this model has no pooler", f"Take the {token}.")
            if isinstance(self.pooler, AttentionPooling):
                return self.pooler(hidden)
            return jnp.tanh(linear(self.pooler, hidden[0]))

    @classmethod
    def read_config(cls, folder: Path) -> Any:
        """Reads the config of a folder. For a linear pooler, `config.json` has no key: the model has one if the folder has
        its weights."""
        config = super().read_config(folder)
        if config.pooling != "dense":
            return config
        name = f"{config.names.encoder['pooler']}.weight"
        return replace(config, has_pooler=is_on_disk(folder, cls.weights_name, name, default=config.has_pooler))

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        names = config.names
        unwanted = (f"{names.encoder['pooler']}.*",) if "pooler" in names.encoder and not config.has_pooler else ()
        return WeightMap(
            tensors=names.tensors(leaves_of(cls, config), config.n_layers),
            ignored=(*names.others, *unwanted),
            aliases=((rf"^{names.base[:-1]}\.", ""),),
            modules=names.modules,
        )


class ImageClassifier(Pretrained):
    """An image encoder with a head, from pixels to the logits of each class. Call it on one image.

    ```python
    model = ViTForImageClassification(ViTConfig.of("base-patch16"), key=jax.random.key(0))
    logits = jax.vmap(model)(pixels)  # [batch, n_classes]
    ```

    To use your own classes, put a pretrained encoder into a new classifier:

    ```python
    vit, config = ViT.from_pretrained(folder, has_pooler=False)
    model = ViTForImageClassification(dataclasses.replace(config, n_classes=10), key=key)
    model = eqx.tree_at(lambda model: model.encoder, model, vit)
    ```
    """

    config_class: ClassVar[Any] = VisionConfig

    encoder: VisionEncoder
    classifier: eqx.nn.Linear
    config: Any = eqx.field(static=True)

    def __init__(self, config: VisionConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes and dropout rates.
        - `key`: draws the weights: those of `encoder` as without a head, the head's N(0, `init_std`²).
        """
        encoder_key, classifier_key = jax.random.split(key)
        d = config.d_model * (2 if config.reads_patches else 1)
        self.encoder = VisionEncoder(replace(config, has_pooler=False), key=encoder_key)
        self.classifier = normal_linear(d, config.n_classes, std=config.init_std, key=classifier_key)
        self.config = config

    def __call__(
        self, pixels: Float[Array, "channels height width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " classes"]:
        """Returns the logits of each class. See `VisionEncoder` for the arguments."""
        hidden = self.encoder(pixels, key=key)
        with jax.named_scope("head"):
            read = hidden[0]
            if self.config.reads_patches:
                read = jnp.concatenate([read, hidden[self.config.n_first :].mean(0)])
            return linear(self.classifier, read)

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        names = config.names
        tensors = within(names.base, "encoder.", names.tensors(leaves_of(cls, config), config.n_layers, "encoder."))
        return WeightMap(tensors=[*tensors, *same_layer("classifier", "classifier")], modules=names.modules)
