"""`CausalLMConfig`: the values of a decoder. They say all that differs between families."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from ..generation import Generation
from ..hf import FolderConfig
from ..nn import ACTIVATIONS, Scaling, check_choice, check_heads, check_rates, check_sizes
from ._names import Names
from ._rows import ROWS, Shared

Self = TypeVar("Self", bound="CausalLMConfig")

_FREE = {"remat", "generation", "extra"}  # fields that are not in `config.json`


@dataclass(frozen=True)
class CausalLMConfig(FolderConfig):
    """The sizes of a decoder, and everything else that differs between families. The defaults here are LLaMA's.

    A family's config has other defaults. Fields that the family's `config.json` has no key for are the same in each of its
    models: another value raises an error.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `d_model`: the width of the model.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block.
    - `d_mlp`: the inner width of the MLPs; None for four times `d_model`.
    - `n_kv_heads`: the number of key and value heads, a divisor of `n_heads`; None for `n_heads`.
    - `head_size`: the width of one head; None for `d_model / n_heads`.
    - `window`: the number of tokens that each token attends to, including itself; None for all tokens before it.
    - `windowed_layers`: the indices of the layers with the window; None for those of the family, which commonly are all.
    - `d_embedding`: the width of the embedding and the output head; None for `d_model`. If it differs, it is projected to
        `d_model` and back.
    - `attention_bias`, `output_bias`: whether query, key and value have biases, and the output; None for the same.
    - `attention_scale`: the factor of attention scores; None for `head_size ** -0.5`.
    - `attention_cap`: attention scores are `cap * tanh(score / cap)`; None for no cap.
    - `has_sinks`: whether each head has a score that takes attention weight, and has no value.
    - `head_norm`: whether queries and keys are normalized: `"head"` for each head by itself, `"all"` for all heads at once,
        None if not.
    - `position_offset`: the row of position 0 in a table of learned positions; None for rotary positions.
    - `rope_theta`, `rope_scaling`: the base of the rotary frequencies, and their scaling; None for no scaling.
    - `rope_share`: the share of each head's dims that are rotary, the first ones.
    - `local_rope_theta`: the base in layers with a window, without scaling; None if they do as the others.
    - `unrotated_layers`: the indices of the layers without rotary positions; None for those of the family.
    - `is_interleaved`: whether rotary positions pair each even dim with the next, instead of the halves of the dims.
    - `norm`: `"rms"`, `"offset_rms"` (the leaf is the scale minus one), `"layer"`, or `"plain_layer"` (without leaves).
    - `norm_bias`: whether layer norms have biases.
    - `norm_eps`: added to the mean square, or variance, in norms.
    - `norm_places`: where the norms of a block are: `"pre"`, before attention and MLP; `"post"`, after them, before their
        outputs are added; `"both"`; or `"sum"`, after the addition.
    - `has_final_norm`: whether there is a norm after the last block. With `"sum"` there is none.
    - `is_parallel`: whether attention and MLP have the same input, and both outputs are added to it.
    - `shares_norm`: whether they also have the same norm.
    - `activation`: the function in the MLP, by its name in `transformers`.
    - `is_gated`, `mlp_bias`: whether the MLP has a gate, and whether its layers have biases.
    - `n_experts`, `n_chosen`: the number of experts in place of each MLP, and of those that a token is sent to; 0 for no
        experts.
    - `renormalize`: whether the weights of the chosen experts are divided by their sum.
    - `residual_scale`: the factor of what each layer adds to the residual stream.
    - `embedding_scale`: the factor of embeddings; None for the square root of `d_model`.
    - `is_tied`: whether the output head shares the embedding's weight.
    - `head_bias`: whether the output head has a bias.
    - `logit_divisor`, `logit_cap`: logits are divided by the first, then `cap * tanh(logit / cap)`; None for no cap.
    - `embedding_dropout`, `attention_dropout`, `residual_dropout`: dropout rates in [0, 1).
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.
    - `extra`: keys of a folder's `config.json` that do not change the model. They are saved with it.

    Raises ValueError for sizes below 1, heads that do not divide, rates outside [0, 1), unknown choices, and values that the
    family does not have.
    """

    vocab_size: int = 32000
    n_positions: int = 2048
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    d_mlp: int | None = 11008
    n_kv_heads: int | None = None
    head_size: int | None = None
    window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    d_embedding: int | None = None
    attention_bias: bool = False
    output_bias: bool | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    has_sinks: bool = False
    head_norm: str | None = None
    position_offset: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    rope_share: float = 1.0
    local_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] | None = None
    is_interleaved: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    norm_eps: float = 1e-6
    norm_places: str = "pre"
    has_final_norm: bool = True
    is_parallel: bool = False
    shares_norm: bool = False
    activation: str = "silu"
    is_gated: bool = True
    mlp_bias: bool = False
    n_experts: int = 0
    n_chosen: int = 0
    renormalize: bool = True
    residual_scale: float = 1.0
    embedding_scale: float | None = 1.0
    is_tied: bool = False
    head_bias: bool = False
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)

    model_type: ClassVar[str] = ""  # in `config.json`
    architecture: ClassVar[str] = ""  # the class of transformers
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})  # the fields of published models, for `of`
    scales_residual: ClassVar[bool] = False  # initial weights that add to the residual stream: by 1 / sqrt(2 * n_layers)
    position_scale: ClassVar[float] = 1.0  # initial weights of learned positions
    window_period: ClassVar[int | None] = None  # every so manieth layer has no window
    unrotated_period: ClassVar[int | None] = None  # every so manieth layer has no rotary positions
    names: ClassVar[Names] = Names()
    rows = ROWS

    def __post_init__(self) -> None:
        if self.n_kv_heads == self.n_heads:
            object.__setattr__(self, "n_kv_heads", None)
        self._check_fixed()
        optional = ("d_mlp", "n_kv_heads", "head_size", "window", "d_embedding", *(["n_experts"] if self.n_chosen else []))
        check_sizes(self, "vocab_size", "n_positions", "d_model", "n_layers", "n_heads")
        check_sizes(self, *(name for name in optional if getattr(self, name) is not None))
        if self.head_size is None:
            check_heads(self)
        if self.n_heads % self.groups:
            raise ValueError(
                f"`n_kv_heads`: expected a divisor of `n_heads`={self.n_heads}, got {self.n_kv_heads}. "
                "Each must serve the same number of heads."
            )
        if self.position_offset is None:
            self._check_rotary()
        check_rates(self, "embedding_dropout", "attention_dropout", "residual_dropout")
        check_choice(self, "activation", ACTIVATIONS)
        check_choice(self, "norm", ("rms", "offset_rms", "layer", "plain_layer"))
        check_choice(self, "norm_places", ("pre", "post", "both", "sum"))
        if self.n_chosen > self.n_experts:
            raise ValueError(
                f"`n_chosen`: expected at most `n_experts`={self.n_experts}, got {self.n_chosen}. Choose fewer."
            )
        for name in ("windowed_layers", "unrotated_layers"):
            value = getattr(self, name)
            if value is not None and not set(value) <= set(range(self.n_layers)):
                raise ValueError(
                    f"`{name}`: expected numbers below `n_layers`={self.n_layers}, got {value}. Count from 0, or pass None."
                )

        for row in self.rows:
            values = {name: getattr(self, name) for name in row.fields} if isinstance(row, Shared) else {}
            if len(set(values.values())) > 1:
                said = ", ".join(f"{name}={value}" for name, value in values.items())
                raise ValueError(f"`{next(iter(values))}`: expected the same as {', '.join(values)}, got {said}. Set all.")

    def _check_rotary(self) -> None:
        if self.rotary_size % 2 or not 2 <= self.rotary_size <= self.size:
            whole = self.rope_share == 1
            raise ValueError(
                f"`{'head_size' if whole else 'rope_share'}`: expected an even number{'' if whole else ' of rotary dims'}, "
                f"got {self.rotary_size}. Rotary positions pair {'its halves' if whole else 'dims'}."
            )

    def _check_fixed(self) -> None:
        """Raises ValueError for a field that the family's `config.json` cannot hold, so that no folder is another model."""
        held = {name for row in self.rows for name in row.keys} | _FREE
        for known in fields(self):
            value = getattr(self, known.name)
            if known.name not in held and value != known.default:
                raise ValueError(
                    f"`{known.name}`: expected {known.default!r}, as in every {self.model_type!r} model, got {value!r}. Its "
                    "`config.json` has no key for another value: make another family's config."
                )

    @property
    def groups(self) -> int:
        """The number of key and value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def size(self) -> int:
        """The width of a head."""
        return self.d_model // self.n_heads if self.head_size is None else self.head_size

    @property
    def rotary_size(self) -> int:
        """The number of rotary dims of a head."""
        return int(self.size * self.rope_share + 1e-9)  # a share may be the quotient of two sizes

    @property
    def rope(self) -> tuple[float, Scaling | None]:
        """The base of the rotary frequencies, and their scaling."""
        return self.rope_theta, self.rope_scaling

    @property
    def inner(self) -> int:
        """The inner width of the MLPs, or of each expert."""
        return 4 * self.d_model if self.d_mlp is None else self.d_mlp

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer without one."""
        has = self.default_layers(self.n_layers) if self.windowed_layers is None else self.windowed_layers
        return tuple(self.window if i in has else None for i in range(self.n_layers))

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        lacks = self.unrotated_layers
        if lacks is None:
            lacks = every(self.unrotated_period, self.n_layers)
        return tuple(i not in lacks for i in range(self.n_layers))

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers that have the window if the config does not say which."""
        lacks = every(cls.window_period, n_layers)
        return tuple(i for i in range(n_layers) if i not in lacks)

    def without_dropout(self: Self) -> Self:
        """The same config without dropout."""
        return replace(self, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)

    @classmethod
    def of(cls: type[Self], size: str) -> Self:
        """Returns the config of a published model of this family, by its size, such as `"7b"`.

        Raises ValueError, with the known sizes, for another.
        """
        return cls(**sized(size, cls.sizes))


def sized(size: str, sizes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a published size. Raises ValueError for another."""
    if size not in sizes:
        raise ValueError(f"`size`: expected one of {', '.join(sizes)}, got {size!r}. For other sizes set the fields.")
    return dict(sizes[size])


def published(sizes: Mapping[str, Mapping[str, Any]], **common: Any) -> Mapping[str, Mapping[str, Any]]:
    """Returns the fields of published models by size, with fields that all of them have."""
    return MappingProxyType({size: MappingProxyType({**common, **fields}) for size, fields in sizes.items()})


def every(period: int | None, n_layers: int) -> tuple[int, ...]:
    """Returns the indices of every `period`-th layer; none if it is None."""
    return () if period is None else tuple(range(period - 1, n_layers, period))
