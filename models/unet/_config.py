"""`UNetConfig`: the sizes of the UNet, and the types of its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from .._kinds import COUNT, LIST, RATE, SIZE
from ..diffusion import check_groups, diffusers, layers_of_blocks, one_or_many, size_of_sample, sizes_of_blocks
from ..hf import ConfigReader, Field, Fields, Fixed, FolderConfig, Only, Row, published
from ..nn import check_rates, check_sizes

_DOWN = {"DownBlock2D": False, "CrossAttnDownBlock2D": True}  # whether a block of this type has attention
_UP = {"UpBlock2D": False, "CrossAttnUpBlock2D": True}


def _attention_of_blocks(key: str, name: str, types: Mapping[str, bool]) -> Row:
    """Returns the row of a field that says which blocks have attention, stored as the names of their types."""

    def read(reader: ConfigReader, key: str, default: tuple[bool, ...]) -> tuple[bool, ...]:
        found = reader.get(key, None, LIST)
        for kind in found or ():
            if not isinstance(kind, str) or kind not in types:
                raise reader.refuse(key, kind, " or ".join(map(repr, types)))
        return default if found is None else tuple(types[kind] for kind in found)

    written = {attends: kind for kind, attends in types.items()}
    return Field(key, name, via=read, save=lambda config: [written[attends] for attends in getattr(config, name)])


_ADDED = {"added_wave_size": "addition_time_embed_dim", "added_size": "projection_class_embeddings_input_dim"}


class _Added(Row):
    """The keys of what is added to the embedded timestep; without an `addition_embed_type` the others have no meaning."""

    keys = MappingProxyType(_ADDED)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        if reader.only("addition_embed_type", None, "text_time") is None:
            return {}
        return {name: reader.get(key, kind=SIZE) for name, key in _ADDED.items()}

    def write(self, config: Any) -> dict[str, Any]:
        if config.added_size is None:
            return {}
        return {"addition_embed_type": "text_time"} | {key: getattr(config, name) for name, key in _ADDED.items()}


@dataclass(frozen=True)
class UNetConfig(FolderConfig):
    """The sizes of a UNet. The defaults are those of diffusers, which are close to those of Stable Diffusion 1.

    A field that may hold a tuple has one entry for each block, from the outermost to the innermost. A single value applies
    to all blocks.

    **Arguments:**

    - `in_channels`, `out_channels`: the channels of the noisy latents, and of the prediction.
    - `block_channels`: the channels of the down blocks; the up blocks have them in reverse order. Each block but the last
        halves height and width. The first number is also the width of a timestep's sinusoids.
    - `down_attention`, `up_attention`: which blocks have attention, each in the order in which they run.
    - `layers_per_block`: the number of residual blocks in a down block. An up block has one more.
    - `transformer_layers`: the number of transformer blocks (self-attention, cross-attention and MLP) after each residual
        block.
    - `n_heads`: the number of heads; it divides the channels of its block. `config.json` calls it `attention_head_dim`.
    - `context_size`: the width of the context.
    - `only_cross_attention`: whether both attentions of a transformer block attend to the context.
    - `use_linear_projection`: whether the layers around attention are stored as linear layers instead of convolutions. They
        compute the same function.
    - `added_size`, `added_wave_size`: in SDXL, the width of a pooled text and of the sinusoids of sizes, which are embedded
        and added to the embedded timestep, and the width of the sinusoids of one number; None for no such part.
    - `norm_groups`, `norm_eps`: the number of groups of the group norms, which divides all `block_channels`, and the number
        added to their variance.
    - `dropout`: the dropout rate in the residual blocks, in [0, 1).
    - `flips_sin_to_cos`, `freq_shift`: whether cosines come before sines in a timestep's sinusoids, and the number that is
        subtracted from half of their count in the formula of the frequencies.
    - `centers_input`: whether samples are in [0, 1] and must be scaled to [-1, 1].
    - `conv_in_kernel`, `conv_out_kernel`: the kernel size of the first and the last convolution, in pixels.
    - `sample_size`: the height and width of the training samples, in pixels, for pipelines. Other sizes can be denoised too.
    - `remat`: whether the backward pass recomputes each residual block and each transformer.

    Raises ValueError for sizes below 1, for tuples whose length is not that of `block_channels`, for groups and heads that
    do not divide their channels, and for rates outside [0, 1).
    """

    in_channels: int = 4
    out_channels: int = 4
    block_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    down_attention: tuple[bool, ...] = (True, True, True, False)
    up_attention: tuple[bool, ...] = (False, True, True, True)
    layers_per_block: int | tuple[int, ...] = 2
    transformer_layers: int | tuple[int, ...] = 1
    n_heads: int | tuple[int, ...] = 8
    context_size: int = 1280
    only_cross_attention: bool | tuple[bool, ...] = False
    use_linear_projection: bool = False
    added_size: int | None = None
    added_wave_size: int | None = None
    norm_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0
    flips_sin_to_cos: bool = True
    freq_shift: int = 0
    centers_input: bool = False
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    sample_size: int | tuple[int, ...] | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "in_channels", "out_channels", "context_size", "norm_groups", "conv_in_kernel", "conv_out_kernel")
        check_groups(self.block_channels, self.norm_groups)
        if (self.added_size is None) != (self.added_wave_size is None):
            raise ValueError(
                f"`added_size` and `added_wave_size`: expected both or neither, got {self.added_size} and "
                f"{self.added_wave_size}. Pass both."
            )
        if self.added_size is not None:
            check_sizes(self, "added_size", "added_wave_size")
        check_rates(self, "dropout")
        n_blocks = len(self.block_channels)
        sizes = ("layers_per_block", "transformer_layers", "n_heads")
        for name in ("down_attention", "up_attention", *sizes, "only_cross_attention"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != n_blocks:
                raise wrong(name, f"{n_blocks}, one per block of `block_channels`", value, "Pass one each.")
        for name in sizes:
            if min(self.per_block(name)) < 1:
                raise wrong(name, "at least 1", getattr(self, name), "Pass a positive size.")
        attends = (*self.down_attention[:-1], True)  # the middle block always has attention
        up_attends = self.up_attention[::-1]
        for i, (channels, heads) in enumerate(zip(self.block_channels, self.per_block("n_heads"), strict=True)):
            if (attends[i] or up_attends[i]) and channels % heads:
                raise wrong("n_heads", f"a divisor of `block_channels[{i}]`={channels}", heads, "Pass one per block.")

    def per_block(self, name: str) -> tuple[Any, ...]:
        """Returns a field's value for each block, from the outermost to the innermost."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * len(self.block_channels)

    @property
    def time_size(self) -> int:
        """The width of the embedded timestep."""
        return 4 * self.block_channels[0]

    @property
    def wave_options(self) -> dict[str, Any]:
        """The options of `sinusoids`."""
        return {"flips_sin_to_cos": self.flips_sin_to_cos, "freq_shift": self.freq_shift}

    # Stable Diffusion 1.1 to 1.5, 2.0 and 2.1, and the base model of XL 1.0: 860, 866 and 2,567 million parameters.
    sizes = published(
        {
            "sd1": {"context_size": 768, "sample_size": 64},
            "sd2": {"context_size": 1024, "n_heads": (5, 10, 20, 20), "use_linear_projection": True, "sample_size": 96},
            "sdxl": {"block_channels": (320, 640, 1280), "down_attention": (False, True, True),
                     "up_attention": (True, True, False), "transformer_layers": (1, 2, 10), "n_heads": (5, 10, 20),
                     "context_size": 2048, "use_linear_projection": True, "added_size": 2816, "added_wave_size": 256,
                     "sample_size": 128},
            "sdxl-refiner": {"block_channels": (384, 768, 1536, 1536), "down_attention": (False, True, True, False),
                             "up_attention": (False, True, True, False), "transformer_layers": (4, 4, 4, 4),
                             "n_heads": (6, 12, 24, 24), "context_size": 1280, "use_linear_projection": True,
                             "added_size": 2560, "added_wave_size": 256, "sample_size": 128},
        }
    )  # fmt: skip

    rows = (
        *diffusers("UNet2DConditionModel"),
        # Each value is also that of an absent key.
        *Fixed(is_written=False, mid_block_type="UNetMidBlock2DCrossAttn", mid_block_scale_factor=1, downsample_padding=1),
        *Fixed(is_written=False, num_attention_heads=None, reverse_transformer_layers_per_block=None),
        *Fixed(is_written=False, dual_cross_attention=False, attention_type="default", encoder_hid_dim=None),
        *Fixed(is_written=False, encoder_hid_dim_type=None, class_embed_type=None, num_class_embeds=None),
        *Fixed(is_written=False, class_embeddings_concat=False, resnet_time_scale_shift="default"),
        *Fixed(is_written=False, time_embedding_type="positional", time_embedding_dim=None, time_embedding_act_fn=None),
        *Fixed(is_written=False, timestep_post_act=None, time_cond_proj_dim=None),
        Only("act_fn", "silu", "swish"),  # two names for the same function
        *Fields("in_channels", "out_channels"),
        Field("block_out_channels", "block_channels", via=sizes_of_blocks),
        _attention_of_blocks("down_block_types", "down_attention", _DOWN),
        _attention_of_blocks("up_block_types", "up_attention", _UP),
        Field("layers_per_block", via=layers_of_blocks),
        Field("transformer_layers_per_block", "transformer_layers", via=layers_of_blocks),
        Field("attention_head_dim", "n_heads", via=one_or_many),
        Field("cross_attention_dim", "context_size"),
        Field("only_cross_attention", via=one_or_many),
        _Added(),
        *Fields("use_linear_projection", norm_groups="norm_num_groups", norm_eps="norm_eps"),
        Field("dropout", kind=RATE),
        Field("flip_sin_to_cos", "flips_sin_to_cos"),
        Field("freq_shift", kind=COUNT),
        *Fields("conv_in_kernel", "conv_out_kernel", centers_input="center_input_sample"),
        Field("sample_size", via=size_of_sample),
    )
