"""The transformer of Stable Diffusion 3 and 3.5 (MMDiT, `SD3Transformer2DModel`): predicts the velocity of noisy latents.

Patches of the latents and tokens of the text are two sequences with weights of their own, which attend to each other. The
timestep and a pooled text scale and shift what every layer sees (Peebles and Xie 2022, AdaLN-Zero).

Source: Esser et al. 2024, *Scaling Rectified Flow Transformers for High-Resolution Image Synthesis* (arXiv:2403.03206), and
`diffusers`, in whose layout the weights are stored.

Dims: c = channels of the latents, h x w = height and width, seq = patches, source = tokens of the text, context = width of
their hidden states, pooled = width of the pooled text, d = width of the model.
"""

import functools
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Num, PRNGKeyArray

from redeqx.errors import wrong

from ._kinds import COUNT
from .diffusion import TimeEmbedding, diffusers, sinusoids
from .hf import (
    ConfigReader,
    Field,
    Fields,
    FolderConfig,
    Only,
    Pretrained,
    StoredTensor,
    WeightMap,
    layers,
    leaves_of,
    published,
    reshaped,
    stored,
)
from .nn import Attention, Mlp, Stack, attend_jointly, check_sizes, linear, norm, normal_mlp

_EPS = 1e-6  # added to the variance in all norms here
_WAVE_SIZE = 256  # the width of a timestep's sinusoids


def _indices(reader: ConfigReader, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Reads a list of the indices of blocks."""
    return tuple(COUNT.check(reader.path, key, i) for i in reader.get(key, list(default)))


_MAX_POSITIONS = 2**31  # numbers; the published models have 4e8 at most


@dataclass(frozen=True)
class MMDiTConfig(FolderConfig):
    """The sizes of a multimodal diffusion transformer. The defaults are those of diffusers.

    **Arguments:**

    - `in_channels`, `out_channels`: the channels of the noisy latents, and of the prediction.
    - `patch_size`: the height and width of a patch, in pixels of the latents.
    - `n_layers`, `n_heads`, `head_size`: the number of blocks, and the number and width of their heads.
    - `context_size`, `pooled_size`: the widths of a text's hidden states, and of the vector that represents it.
    - `max_patches`: the largest number of patches in a row or in a column. Smaller latents take the positions in the middle.
    - `dual_layers`: the indices of the blocks in which patches also attend to patches alone.
    - `head_norm`: the norm of each head's queries and keys: `"rms_norm"`, or None.
    - `sample_size`: the height and width of the training samples, in pixels of the latents. Positions are as far apart as in
        such a sample.
    - `remat`: whether the backward pass recomputes each block.

    Raises ValueError for sizes below 1, a width that four does not divide, more positions than 8 GiB hold, a sample that is
    smaller than a patch, and indices of no block.
    """

    in_channels: int = 16
    out_channels: int = 16
    patch_size: int = 2
    n_layers: int = 18
    n_heads: int = 18
    head_size: int = 64
    context_size: int = 4096
    pooled_size: int = 2048
    max_patches: int = 96
    dual_layers: tuple[int, ...] = ()
    head_norm: str | None = None
    sample_size: int = 128
    remat: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "in_channels", "out_channels", "patch_size", "n_layers", "n_heads", "head_size")
        check_sizes(self, "context_size", "pooled_size", "max_patches", "sample_size")
        if self.d_model % 4:
            raise wrong("n_heads", "a width `n_heads * head_size` that 4 divides", self.d_model, "Change one.")
        if self.max_patches**2 * self.d_model > _MAX_POSITIONS:
            rule = f"positions of at most {_MAX_POSITIONS} numbers"
            raise wrong("max_patches", rule, f"{self.max_patches}**2 vectors of {self.d_model}", "Decrease it.")
        if self.sample_size < self.patch_size:
            raise wrong("sample_size", f"at least `patch_size`={self.patch_size}", self.sample_size, "Increase it.")
        if not all(0 <= i < self.n_layers for i in self.dual_layers):
            raise wrong("dual_layers", f"indices below `n_layers`={self.n_layers}", self.dual_layers, "Count from 0.")
        if self.head_norm not in (None, "rms_norm"):
            raise wrong("head_norm", "None or 'rms_norm'", repr(self.head_norm), "Pass one of them.")

    @property
    def d_model(self) -> int:
        """The width of the model."""
        return self.n_heads * self.head_size

    @property
    def runs(self) -> tuple[tuple[int, bool, bool], ...]:
        """Blocks of equal structure in sequence: their number, whether patches also attend to patches alone, and whether the
        text is not needed after them."""
        kinds = [(i in self.dual_layers, i == self.n_layers - 1) for i in range(self.n_layers)]
        return tuple((len(list(blocks)), *kind) for kind, blocks in groupby(kinds))

    # 2,085, 2,470 and 8,146 million parameters, with positions.
    sizes = published(
        {
            "sd3-medium": {"n_layers": 24, "n_heads": 24, "max_patches": 192},
            "sd3.5-medium": {"n_layers": 24, "n_heads": 24, "max_patches": 384, "dual_layers": tuple(range(13)),
                             "head_norm": "rms_norm"},
            "sd3.5-large": {"n_layers": 38, "n_heads": 38, "max_patches": 192, "head_norm": "rms_norm"},
        }
    )  # fmt: skip

    rows = (
        *diffusers("SD3Transformer2DModel"),
        Field("in_channels"),
        Field("out_channels", default=16, null=lambda known: known["in_channels"]),
        Field("patch_size"),
        Field("num_layers", "n_layers", via=ConfigReader.layers),
        *Fields(n_heads="num_attention_heads", head_size="attention_head_dim", context_size="joint_attention_dim"),
        Field("pooled_projection_dim", "pooled_size"),
        Only(
            "caption_projection_dim",
            lambda known: [known["n_heads"] * known["head_size"]],
            default=1152,
            save=lambda config: config.d_model,
        ),
        Field("pos_embed_max_size", "max_patches"),
        Field("dual_attention_layers", "dual_layers", via=_indices),
        Only("qk_norm", None, "rms_norm", name="head_norm"),
        Field("sample_size"),
    )


def positions_of(config: MMDiTConfig) -> np.ndarray:
    """Returns the vectors of positions, sines and cosines of column and row, `[max_patches * max_patches, d]` in float32."""
    n, quarter = config.max_patches, config.d_model // 4
    places = np.arange(n, dtype=np.float32) / (n / (config.sample_size // config.patch_size))
    angles = places.astype(np.float64)[:, None] / 10000 ** (np.arange(quarter) / quarter)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    columns, rows = np.broadcast_to(waves[None], (n, n, 2 * quarter)), np.broadcast_to(waves[:, None], (n, n, 2 * quarter))
    return rearrange(np.concatenate([columns, rows], axis=2), "rows columns d -> (rows columns) d").astype(np.float32)


# --- parts ------------------------------------------------------------------------------------------------------------


class Modulation(eqx.Module):
    """A linear layer from the embedded timestep and text to factors, initially 0: shifts, scales and gates."""

    linear: eqx.nn.Linear
    n: int = eqx.field(static=True)

    def __init__(self, d: int, n: int, *, key: PRNGKeyArray):
        layer = eqx.nn.Linear(d, n * d, key=key)
        self.linear = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if eqx.is_array(leaf) else leaf, layer)
        self.n = n

    def __call__(self, time: Float[Array, " d"]) -> list[Float[Array, " d"]]:
        return jnp.split(self.linear(jax.nn.silu(time)), self.n)


def _modulated(x: Float[Array, "seq d"], scale: Float[Array, " d"], shift: Float[Array, " d"]) -> Float[Array, "seq d"]:
    """Returns normalized rows, scaled and shifted."""
    plain = eqx.nn.LayerNorm(x.shape[1], eps=_EPS, use_weight=False, use_bias=False)
    return norm(plain, x) * (1 + scale) + shift


def _attention(config: MMDiTConfig, key: PRNGKeyArray, *, has_output: bool = True) -> Attention:
    d = config.d_model
    make_norm = lambda: eqx.nn.RMSNorm(config.head_size, eps=_EPS, use_bias=False) if config.head_norm else None  # noqa: E731
    query, key_, value, output = (eqx.nn.Linear(d, d, key=key) for key in jax.random.split(key, 4))
    n_heads, layers = config.n_heads, (query, key_, value, output if has_output else None)
    return Attention(*layers, n_heads=n_heads, n_kv_heads=n_heads, query_norm=make_norm(), key_norm=make_norm())


def _mlp(config: MMDiTConfig, key: PRNGKeyArray) -> Mlp:
    d = config.d_model
    std, down_std = (3 * d) ** -0.5, (12 * d) ** -0.5  # those of torch's uniform distributions
    return normal_mlp(d, 4 * d, std=std, down_std=down_std, activation="gelu_pytorch_tanh", key=key)


class JointBlock(eqx.Module):
    """Joint attention of patches and text, and an MLP for each. All are pre-norm, residual, modulated and gated."""

    norm1: Modulation
    norm1_context: Modulation
    attn: Attention
    context_attn: Attention
    attn2: Attention | None  # of patches to patches alone
    ff: Mlp
    ff_context: Mlp | None

    def __init__(self, config: MMDiTConfig, *, is_dual: bool, is_last: bool, key: PRNGKeyArray):
        keys = jax.random.split(key, 7)
        d = config.d_model
        self.norm1 = Modulation(d, 9 if is_dual else 6, key=keys[0])
        self.norm1_context = Modulation(d, 2 if is_last else 6, key=keys[1])
        self.attn = _attention(config, keys[2])
        self.context_attn = _attention(config, keys[3], has_output=not is_last)
        self.attn2 = _attention(config, keys[4]) if is_dual else None
        self.ff = _mlp(config, keys[5])
        self.ff_context = None if is_last else _mlp(config, keys[6])

    def __call__(
        self,
        streams: tuple[Float[Array, "seq d"], Float[Array, "source d"]],
        time: Float[Array, " d"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "seq d"], Float[Array, "source d"]]:
        del key  # there is no dropout
        x, context = streams
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *dual = self.norm1(time)
        if self.ff_context is None:
            context_scale, context_shift, *of_context = self.norm1_context(time)
        else:
            context_shift, context_scale, *of_context = self.norm1_context(time)
        normed = _modulated(context, context_scale, context_shift)
        mixed, context_mixed = attend_jointly((self.attn, self.context_attn), (_modulated(x, scale, shift), normed))
        assert mixed is not None
        before, x = x, x + gate * mixed
        if self.attn2 is not None:
            dual_shift, dual_scale, dual_gate = dual
            x = x + dual_gate * self.attn2(_modulated(before, dual_scale, dual_shift))[0]
        x = x + mlp_gate * self.ff(_modulated(x, mlp_scale, mlp_shift))
        if self.ff_context is not None and context_mixed is not None:
            context_gate, mlp_shift, mlp_scale, mlp_gate = of_context
            context = context + context_gate * context_mixed
            context = context + mlp_gate * self.ff_context(_modulated(context, mlp_scale, mlp_shift))
        return x, context


class MMDiT(Pretrained):
    """A transformer that predicts the velocity of noisy latents. Call it on one example; `jax.vmap` it over a batch.

    ```python
    model = MMDiT(MMDiTConfig.of("sd3-medium"), key=jax.random.key(0))
    velocities = jax.vmap(model)(samples, timesteps, contexts, pooled)
    ```

    `models.schedulers.FlowMatchEuler` adds noise for training and computes the denoising steps. `positions` are constants of
    the folder: they have no gradient.
    """

    config_class = MMDiTConfig
    model_types = ("SD3Transformer2DModel",)
    architectures = ("SD3Transformer2DModel",)
    weights_name = "diffusion_pytorch_model"

    patches: eqx.nn.Conv2d
    positions: Float[Array, "positions d"]
    time_embedding: TimeEmbedding
    pooled_embedding: TimeEmbedding
    context_embedding: eqx.nn.Linear
    runs: list[Stack[JointBlock]]  # equal blocks are one stack (`MMDiTConfig.runs`)
    norm_out: Modulation
    proj_out: eqx.nn.Linear
    config: MMDiTConfig = eqx.field(static=True)

    def __init__(self, config: MMDiTConfig, *, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes.
        - `key`: draws the weights as torch does, with the variance of a uniform distribution in ±1 / sqrt(inputs). Those of
            modulations are 0, as in AdaLN-Zero, so that each block begins as the identity.
        """
        keys = jax.random.split(key, 5 + len(config.runs))
        d, size = config.d_model, config.patch_size
        self.patches = eqx.nn.Conv2d(config.in_channels, d, size, stride=size, key=keys[0])
        self.positions = jnp.asarray(positions_of(config))
        self.time_embedding = TimeEmbedding(_WAVE_SIZE, d, key=keys[1])
        self.pooled_embedding = TimeEmbedding(config.pooled_size, d, key=keys[2])
        self.context_embedding = eqx.nn.Linear(config.context_size, d, key=keys[3])
        self.norm_out = Modulation(d, 2, key=keys[4])  # of zeros
        self.proj_out = eqx.nn.Linear(d, size * size * config.out_channels, key=keys[4])
        self.runs = []
        for (n, is_dual, is_last), key in zip(config.runs, keys[5:], strict=True):
            make = functools.partial(JointBlock, config, is_dual=is_dual, is_last=is_last)
            self.runs.append(Stack(lambda key, make=make: make(key=key), n, remat=config.remat, key=key))
        self.config = config

    def __call__(
        self,
        sample: Float[Array, "c h w"],
        timestep: Num[Array, ""] | int | float,
        context: Float[Array, "source context"],
        pooled: Float[Array, " pooled"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "out h w"]:
        """Returns the predicted velocity: noise minus clean latents.

        **Arguments:**

        - `sample`: noisy latents, of a height and width that the size of a patch divides.
        - `timestep`: the noise level in (0, 1] times 1000.
        - `context`, `pooled`: the hidden states of a text, and the vector that represents it.
        - `key`: not used, as there is no dropout.

        Raises ValueError for latents that are no whole number of patches, or more than `max_patches` in a row or column.
        """
        del key
        time = self.time_embedding(sinusoids(jnp.asarray(timestep), _WAVE_SIZE).astype(sample.dtype))
        time = time + self.pooled_embedding(pooled)
        with jax.named_scope("embedding"):
            crop, patches = self._crop(sample), self.patches(sample)
            x = rearrange(patches, "d rows columns -> (rows columns) d") + crop.astype(sample.dtype)
            streams = (x, linear(self.context_embedding, context))
        for run in self.runs:
            streams = run(streams, time)
        scale, shift = self.norm_out(time)
        out = linear(self.proj_out, _modulated(streams[0], scale, shift))
        p, rows = self.config.patch_size, patches.shape[1]
        return rearrange(out, "(rows columns) (p q out) -> out (rows p) (columns q)", rows=rows, p=p, q=p)

    def _crop(self, sample: Float[Array, "c h w"]) -> Float[Array, "seq d"]:
        """Returns the positions in the middle, for the patches of a sample."""
        n, size = self.config.max_patches, self.config.patch_size
        rows, columns = (side // size for side in sample.shape[1:])
        if any(side % size or not size <= side <= n * size for side in sample.shape[1:]):
            rule = f"a height and width that are multiples of `patch_size`={size}, of at most {n * size}"
            raise wrong("sample", rule, list(sample.shape), "Resize the image.")
        top, left = (n - rows) // 2, (n - columns) // 2
        grid = rearrange(jax.lax.stop_gradient(self.positions), "(rows columns) d -> rows columns d", rows=n)
        return rearrange(grid[top : top + rows, left : left + columns], "rows columns d -> (rows columns) d")

    @classmethod
    def weight_map(cls, config: MMDiTConfig) -> WeightMap:
        leaves, d = leaves_of(cls, config), config.d_model
        tensors: list[StoredTensor] = [
            *stored(_OUTSIDE, leaves),
            reshaped("pos_embed.proj.bias", "patches.bias", (d,), (d, 1, 1)),
            reshaped("pos_embed.pos_embed", "positions", (1, config.max_patches**2, d), (config.max_patches**2, d)),
        ]
        first = 0
        for i, (n, *_) in enumerate(config.runs):
            block = layers("transformer_blocks.{}.", f"runs.{i}.blocks.", n, stored(_BLOCK, leaves, f"runs.{i}.blocks."))
            tensors += [replace(tensor, first_layer=first) for tensor in block]
            first += n
        return WeightMap(tensors)


_OUTSIDE = MappingProxyType(
    {
        "time_embedding.linear_1": "time_text_embed.timestep_embedder.linear_1",
        "time_embedding.linear_2": "time_text_embed.timestep_embedder.linear_2",
        "pooled_embedding.linear_1": "time_text_embed.text_embedder.linear_1",
        "pooled_embedding.linear_2": "time_text_embed.text_embedder.linear_2",
        "context_embedding": "context_embedder",
        "norm_out.linear": "norm_out.linear",
        "proj_out": "proj_out",
        "patches.weight": "pos_embed.proj.weight",
    }
)
_BLOCK = MappingProxyType(
    {
        "norm1.linear": "norm1.linear",
        "norm1_context.linear": "norm1_context.linear",
        **{
            f"{leaf}.{name}": f"{attention}.{disk}"
            for attention in ("attn", "attn2")
            for leaf, name, disk in (
                (attention, "query", "to_q"),
                (attention, "key", "to_k"),
                (attention, "value", "to_v"),
                (attention, "output", "to_out.0"),
                (attention, "query_norm", "norm_q"),
                (attention, "key_norm", "norm_k"),
            )
        },
        "context_attn.query": "attn.add_q_proj",
        "context_attn.key": "attn.add_k_proj",
        "context_attn.value": "attn.add_v_proj",
        "context_attn.output": "attn.to_add_out",
        "context_attn.query_norm": "attn.norm_added_q",
        "context_attn.key_norm": "attn.norm_added_k",
        "ff.up": "ff.net.0.proj",
        "ff.down": "ff.net.2",
        "ff_context.up": "ff_context.net.0.proj",
        "ff_context.down": "ff_context.net.2",
    }
)
