"""`DecoderConfig`: the values of a decoder. They say all that differs between families."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ..generation import Generation
from ..hf import FolderConfig, check_fixed
from ..nn import ACTIVATIONS, Scaling
from ._checks import check_values
from ._factors import PLAIN, Factors
from ._layers import kinds_of, period_of
from ._names import Names
from ._rows import ROWS
from ._steps import DRAWN, InitialSteps

Self = TypeVar("Self", bound="DecoderConfig")

_FREE = {"remat", "generation", "extra"}  # fields that are not in `config.json`


@dataclass(frozen=True)
class DecoderConfig(FolderConfig):
    """The sizes of a decoder, and everything else that differs between families. The defaults here are LLaMA's.

    A family's config has other defaults. Fields that the family's `config.json` has no key for are the same in each of its
    models: another value raises an error.

    **Arguments:**

    - `vocab_size`: the number of rows of the embedding. They can be sharded if `n_model_shards` divides it.
    - `n_positions`: the maximum length of an example, in tokens.
    - `d_model`: the width of the model.
    - `n_layers`, `n_heads`: the number of blocks, and of heads in each block.
    - `d_mlp`: the inner width of the MLPs, and of experts; None for four times `d_model`.
    - `n_kv_heads`: the number of key and value heads, a divisor of `n_heads`; None for `n_heads`.
    - `head_size`: the width of one head; None for `d_model / n_heads`.
    - `is_causal`: whether tokens attend to themselves and those before them. If not, they attend to all tokens, or to those
        at most half a window away, and the model does not generate: its hidden states represent a text.
    - `window`: the number of tokens that each token attends to, including itself; None for all tokens before it.
    - `windowed_layers`: the indices of the layers with the window; None for those of the family, which commonly are all.
    - `d_embedding`: the width of the embedding and the output head; None for `d_model`. If it differs, it is projected to
        `d_model` and back.
    - `attention_bias`, `output_bias`: whether query, key and value have biases, and the output; None for the same.
    - `attention_scale`: the factor of attention scores; None for `head_size ** -0.5`.
    - `query_growth`: queries are multiplied with `1 + query_growth * log(1 + floor(position / n_original))`, in which
        `n_original` is that of `rope_scaling`; 0 if they are not.
    - `attention_cap`: attention scores are `cap * tanh(score / cap)`; None for no cap.
    - `latent_size`: the width of the vector of each token that keys and values of all heads are computed from (see
        `LatentAttention`); None if they are computed from the residual stream.
    - `query_latent_size`: the same for queries.
    - `plain_size`, `shared_rotary_size`, `value_size`: with `latent_size`, the dims of a head without and with rotary
        positions, and the width of its values. `head_size` is None.
    - `gates_attention`: whether what the heads return is multiplied with a gate for each number.
    - `mixer_layers`: the indices of the layers with a mixer in place of attention; None for those of the family.
    - `parts`: in models whose layers have only one part, that of each layer: `"attention"`, `"mixer"`, `"mlp"` or
        `"experts"`; None if each has one of the first two.
    - `mixer`: its kind: `"delta"`, a gated delta rule (`GatedDelta`), `"mamba"` or `"mamba1"`, a state space (`Mamba2`,
        `Mamba1`), or `"conv"`, a short convolution (`ShortConv`).
    - `has_both`: whether layers with a mixer also have attention. Both read the same, and their outputs are added.
    - `conv_kernel`, `conv_bias`: the number of tokens that a convolution of a mixer reads; and of a state space, whether it
        has a bias.
    - `state_groups`, `state_heads`: of a mixer with states, the number of heads of queries and keys, and of heads of values.
    - `state_size`, `state_value_size`: the width of a head of queries and keys, and of values.
    - `step_limits`: the least and the largest step of a Mamba-2.
    - `initial_steps`: how long the steps of a state space are before training.
    - `step_rank`: the width of the vector that steps of a Mamba-1 are computed from; None for a sixteenth of `d_model`.
    - `norms_states`, `norms_first`: whether what heads of a state space return is normalized; and before their gate.
    - `global_head_size`, `global_kv_heads`: the width of a head, and the number of key and value heads, in layers without a
        window; None for the same as in the others.
    - `keys_are_values`: whether layers without a window have no values: these are the keys, before their norm.
    - `has_value_norm`: whether values of each head are normalized, without a scale.
    - `n_shared`: the number of layers, the last ones, that have no keys and values. They attend to those of the last layer
        before them that has a window, or has none, as they do.
    - `has_sinks`: whether each head has a score that takes attention weight, and has no value.
    - `head_norm`: whether queries and keys are normalized: `"head"` for each head by itself, `"all"` for all heads at once,
        None if not.
    - `norms_rotated`: whether these norms come after rotary positions, instead of before them.
    - `attention_clip`: the largest size of the numbers in queries, keys and values; None for no limit.
    - `position_offset`: the row of position 0 in a table of learned positions; None for rotary positions, or none.
    - `bias_range`: scores have biases in place of positions (see `distance_bias`), with slopes down to two to the power of
        minus this; None for none.
    - `rope_theta`, `rope_scaling`: the base of the rotary frequencies, and their scaling; None for no scaling.
    - `rope_share`: the share of each head's dims that are rotary, the first ones.
    - `local_rope_theta`: the base in layers with a window, without scaling; None if they do as the others.
    - `unrotated_layers`: the indices of the layers without rotary positions; None for those of the family.
    - `is_interleaved`: whether rotary positions pair each even dim with the next, instead of the halves of the dims.
    - `norm`: `"rms"`, `"layer"`, `"offset_rms"`, `"offset_layer"` (the weight is the scale minus one), or `"plain_rms"`,
        `"plain_layer"` (without leaves).
    - `norm_bias`: whether layer norms have biases.
    - `norm_eps`: added to the mean square, or variance, in norms.
    - `norm_places`: where the norms of a block are: `"pre"`, before attention and MLP; `"post"`, after them, before their
        outputs are added; `"both"`; or `"sum"`, after the addition.
    - `has_final_norm`: whether there is a norm after the last block. With `"sum"` there is none.
    - `is_parallel`: whether attention and MLP have the same input, and both outputs are added to it.
    - `shares_norm`: whether they also have the same norm.
    - `activation`: the function in the MLP, by its name in `transformers`.
    - `is_gated`, `mlp_bias`: whether the MLP has a gate, and whether its layers have biases.
    - `widens_shared`: whether the MLPs of the last `n_shared` layers have twice the inner width.
    - `d_layer_input`, `n_layer_inputs`: the width of a second embedding of each token, in each layer; 0 for none; and the
        number of its rows; None for `vocab_size`.
    - `has_layer_scale`: whether the residual stream after each block is multiplied with a number that is not trained.
    - `n_experts`, `n_chosen`: the number of experts in place of each MLP, and of those that a token is sent to; 0 for no
        experts. See `MixtureOfExperts` for the following ones.
    - `adds_experts`: whether experts are added to the MLP, with norms of their own, instead of taking its place.
    - `d_expert`: the inner width of an expert; None for `d_mlp`.
    - `n_dense`: the number of layers, the first ones, that have an MLP and no experts.
    - `expert_layers`: the indices of the layers with experts; None for those of the family, which commonly are all.
    - `renormalize`: whether the weights of the chosen experts are divided by their sum.
    - `router_score`, `router_jitter`, `router_scale`, `has_correction`, `n_expert_groups`, `n_chosen_groups`: how a router
        chooses experts, and weighs them.
    - `d_shared`, `gates_shared`, `averages_shared`: the inner width of the expert that all tokens are sent to; 0 for none;
        whether it is gated; and whether its output and that of the others are averaged, not added.
    - `expert_bias`, `expert_limit`: whether routers and experts have biases, and the limit of experts' gates.
    - `residual_scale`: the factor of what each layer adds to the residual stream.
    - `factors`: further factors in each layer.
    - `has_embedding_norm`: whether embeddings are normalized.
    - `embedding_scale`: the factor of embeddings; None for the square root of `d_model`.
    - `is_tied`: whether the output head shares the embedding's weight.
    - `has_head`: whether there is an output head. Folders of models of embeddings may have none; `hidden` needs none.
    - `head_bias`: whether the output head has a bias.
    - `logit_divisor`, `logit_cap`: logits are divided by the first, then `cap * tanh(logit / cap)`; None for no cap.
    - `embedding_dropout`, `attention_dropout`, `residual_dropout`: dropout rates in [0, 1).
    - `has_cross_attention`: whether each block also attends to a memory, as in a decoder of captions.
    - `n_classes`, `classifier_dropout`: the classes of a `SequenceClassifier` or `TokenClassifier`, and the dropout before
        the head of the latter; None for a language model.
    - `bos_token_id`, `eos_token_id`, `pad_token_id`: the ids of a text's first and last token, and of padding.
    - `init_std`: standard deviation of the initial weights.
    - `remat`: whether the backward pass recomputes each block (see `Stack`).
    - `generation`: the folder's defaults for the arguments of `generate`.

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
    is_causal: bool = True
    window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    d_embedding: int | None = None
    attention_bias: bool = False
    output_bias: bool | None = None
    attention_scale: float | None = None
    query_growth: float = 0.0
    attention_cap: float | None = None
    latent_size: int | None = None
    query_latent_size: int | None = None
    plain_size: int = 0
    shared_rotary_size: int = 0
    value_size: int = 0
    gates_attention: bool = False
    mixer_layers: tuple[int, ...] | None = None
    parts: tuple[str, ...] | None = None
    mixer: str = "delta"
    has_both: bool = False
    conv_kernel: int = 4
    conv_bias: bool = False
    state_groups: int = 16
    state_heads: int = 32
    state_size: int = 128
    state_value_size: int = 128
    step_limits: tuple[float, float] = (0.0, math.inf)
    initial_steps: InitialSteps = DRAWN
    step_rank: int | None = None
    norms_states: bool = True
    norms_first: bool = False
    global_head_size: int | None = None
    global_kv_heads: int | None = None
    keys_are_values: bool = False
    has_value_norm: bool = False
    n_shared: int = 0
    has_sinks: bool = False
    head_norm: str | None = None
    norms_rotated: bool = False
    attention_clip: float | None = None
    position_offset: int | None = None
    bias_range: float | None = None
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
    widens_shared: bool = False
    d_layer_input: int = 0
    n_layer_inputs: int | None = None
    has_layer_scale: bool = False
    n_experts: int = 0
    n_chosen: int = 0
    adds_experts: bool = False
    d_expert: int | None = None
    n_dense: int = 0
    expert_layers: tuple[int, ...] | None = None
    renormalize: bool = True
    router_score: str = "softmax"
    router_jitter: float = 0.01
    router_scale: float = 1.0
    has_correction: bool = False
    n_expert_groups: int = 1
    n_chosen_groups: int = 1
    d_shared: int = 0
    gates_shared: bool = False
    averages_shared: bool = False
    expert_bias: bool = False
    expert_limit: float | None = None
    residual_scale: float = 1.0
    factors: Factors = PLAIN
    has_embedding_norm: bool = False
    embedding_scale: float | None = 1.0
    is_tied: bool = False
    has_head: bool = True
    head_bias: bool = False
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    has_cross_attention: bool = False
    n_classes: int | None = None
    classifier_dropout: float = 0.1
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    init_std: float = 0.02
    remat: bool = False
    generation: Generation | None = None

    model_type: ClassVar[str] = ""  # in `config.json`
    architecture: ClassVar[str] = ""  # the class of transformers; by default it is named as the config is
    scales_residual: ClassVar[bool] = False  # initial weights that add to the residual stream: by 1 / sqrt(2 * n_layers)
    embedding_std: ClassVar[float] = 1.0  # of initial embeddings, over `init_std`
    position_scale: ClassVar[float] = 1.0  # the same of learned positions
    has_sinusoids: ClassVar[bool] = False  # in place of learned positions, but for the row of the padding id, which is zero
    zeroes_padding: ClassVar[bool] = False  # whether the initial embedding of padding is 0
    rounds_embedding_scale: ClassVar[bool] = False  # to the dtype of the embedding, before the product
    window_period: ClassVar[int | None] = None  # the n of "every n-th layer has no window"
    unrotated_period: ClassVar[int | None] = None  # the same for rotary positions
    rotates_windows_only: ClassVar[bool] = False  # layers without a window have no rotary positions
    rotates_back: ClassVar[bool] = False  # rotary angles are negative
    mixer_activation: ClassVar[str | None] = None  # after the convolutions of a mixer; None for that of the MLP
    attention_period: ClassVar[int | None] = None  # the n of "every n-th layer has attention", others a mixer; 0 for none
    has_one_part: ClassVar[bool] = False  # layers have attention or a mixer, or an MLP or experts, and no more
    activations: ClassVar[tuple[str, ...]] = tuple(ACTIVATIONS)  # those that the family has
    by_kind: ClassVar[bool] = False  # layers differ in more than windows and positions: see `LayerKind`
    scales_bias: ClassVar[bool] = False  # biases of scores are scaled as scores are, and rounded to bfloat16
    norms_experts: ClassVar[bool] = False  # what experts return is normalized, not what an MLP does
    chooses_by_logits: ClassVar[bool] = False  # experts are chosen by logits, to which corrections are added, not by scores
    gates_heads: ClassVar[bool] = False  # a gated attention has one gate for each head, not for each number
    router_eps: ClassVar[float] = 1e-20  # added to the sum of sigmoids that weights are divided by
    wide_routers: ClassVar[tuple[str, ...]] = ()  # of routers, what is float32 in models of 16 bits
    # Added to the mean square in the norms of latent vectors, and in those of a Mamba-1 that have no weights.
    latent_eps: ClassVar[float] = 1e-6
    scan_norm: ClassVar[str | None] = None  # of queries, keys and steps of a Mamba-1: "rms", or "plain" without leaves
    names: ClassVar[Names] = Names()
    rows = ROWS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "architecture" not in cls.__dict__:
            cls.architecture = f"{cls.__name__.removesuffix('Config')}ForCausalLM"

    def __post_init__(self) -> None:
        if self.n_kv_heads == self.n_heads:
            object.__setattr__(self, "n_kv_heads", None)
        if self.is_tied:
            object.__setattr__(self, "has_head", True)
        check_fixed(self, _FREE)
        check_values(self)
        for row in self.rows:
            row.check(self)

    @property
    def groups(self) -> int:
        """The number of key and value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def size(self) -> int:
        """The width of a head's queries and keys."""
        if self.latent_size is not None:
            return self.plain_size + self.shared_rotary_size
        return self.d_model // self.n_heads if self.head_size is None else self.head_size

    @property
    def rotary_size(self) -> int:
        """The number of rotary dims of a head."""
        if self.latent_size is not None:
            return self.shared_rotary_size
        return int(self.size * self.rope_share + 1e-9)  # a share may be the quotient of two sizes

    @property
    def rope(self) -> tuple[float, Scaling | None]:
        """The base of the rotary frequencies, and their scaling."""
        return self.rope_theta, self.rope_scaling

    @property
    def ropes(self) -> tuple[tuple[int, float, Scaling | None] | None, ...]:
        """The rotary dims of a head, the base of the frequencies and their scaling, in each layer; None for a layer without
        rotary positions."""
        sizes = [kind.size for kind in kinds_of(self)] if self.by_kind else [self.rotary_size] * self.n_layers
        rope, local = self.rope, self.local_rope_theta
        return tuple(
            (None if not rotated else (size, local, None) if local is not None and window else (size, *rope))
            for size, window, rotated in zip(sizes, self.windows, self.rotated, strict=True)
        )

    @property
    def inner(self) -> int:
        """The inner width of the MLPs."""
        return 4 * self.d_model if self.d_mlp is None else self.d_mlp

    @property
    def expert(self) -> int:
        """The inner width of each expert."""
        return self.inner if self.d_expert is None else self.d_expert

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer without one."""
        has = self.default_layers(self.n_layers) if self.windowed_layers is None else self.windowed_layers
        return tuple(self.window if i in has else None for i in range(self.n_layers))

    @property
    def rotated(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        if self.rotates_windows_only:
            return tuple(window is not None for window in self.windows)
        lacks = every(self.unrotated_period, self.n_layers) if self.unrotated_layers is None else self.unrotated_layers
        return tuple(i not in lacks for i in range(self.n_layers))

    @property
    def mixers(self) -> tuple[bool, ...]:
        """Whether each layer has a mixer."""
        if self.parts is not None:
            return tuple(part == "mixer" for part in self.parts)
        has = self.default_mixers(self.n_layers) if self.mixer_layers is None else self.mixer_layers
        return tuple(i in has for i in range(self.n_layers))

    @property
    def layer_parts(self) -> tuple[str, ...]:
        """The part of each layer that is not the same in all: `"attention"`, `"mixer"`, `"both"`, or in layers of one part
        another."""
        mixer = "both" if self.has_both else "mixer"
        return tuple(mixer if is_mixer else "attention" for is_mixer in self.mixers) if self.parts is None else self.parts

    @property
    def dense(self) -> tuple[bool, ...]:
        """Whether each layer has an MLP and no experts, if it has either."""
        has = self.default_experts(self.n_layers) if self.expert_layers is None else self.expert_layers
        return tuple(not self.n_experts or i < self.n_dense or i not in has for i in range(self.n_layers))

    @property
    def n_first_stack(self) -> int:
        """The number of layers without experts that are a stack of their own; 0 if all are without."""
        return self.n_dense if self.n_dense < self.n_layers else 0

    @property
    def rank(self) -> int:
        """The width of the vector that steps of a Mamba-1 are computed from."""
        return -(-self.d_model // 16) if self.step_rank is None else self.step_rank

    @property
    def n_attentions(self) -> int:
        """The number of layers with attention."""
        return sum(part in ("attention", "both") for part in self.layer_parts)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return not all(self.dense) and (self.parts is None or "experts" in self.parts)

    def kinds(self, first: int, n_layers: int) -> tuple[tuple[str, bool], ...]:
        """Returns the part of each of these layers, and whether it has no experts, only for the first ones, which the others
        repeat."""
        layers = tuple(zip(self.layer_parts, self.dense, strict=True))[first : first + n_layers]
        return layers[: period_of(layers)]

    @classmethod
    def stem(cls) -> str:
        """Returns the start of the names of transformers' classes."""
        return cls.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")

    @classmethod
    def base_architecture(cls) -> str:
        """Returns the class of transformers without a head."""
        return cls.stem() + "Model"

    def disk_names(self) -> Names:
        """Returns the names of tensors on disk. A family's may depend on its values: queries have another one if they come
        from a latent vector."""
        if self.query_latent_size is None:
            return self.names
        return replace(self.names, block={**self.names.block, "self_attn.q_b_proj": "attention.query"})

    @classmethod
    def default_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers that have the window if the config does not say which."""
        lacks = every(cls.window_period, n_layers)
        return tuple(i for i in range(n_layers) if i not in lacks)

    @classmethod
    def default_mixers(cls, n_layers: int) -> tuple[int, ...]:
        """Returns the indices of the layers with a mixer if the config does not say which."""
        has_attention = every(cls.attention_period, n_layers)
        return () if cls.attention_period is None else tuple(i for i in range(n_layers) if i not in has_attention)

    @classmethod
    def default_experts(cls, n_layers: int) -> Sequence[int]:
        """Returns the indices of the layers with experts, after the first `n_dense`, if the config does not say which."""
        return range(n_layers)

    def without_dropout(self: Self) -> Self:
        """The same config without dropout."""
        of_head = {} if self.n_classes is None else {"classifier_dropout": 0.0}  # no folder has it without classes
        return replace(self, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0, **of_head)


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """The values that GPT-2 shares with other families: layer norms, and an MLP with biases and without a gate. See
    `DecoderConfig`."""

    d_mlp = None
    norm, norm_bias, norm_eps = "layer", True, 1e-5
    activation, is_gated, mlp_bias = "gelu_new", False, True


def every(period: int | None, n_layers: int) -> tuple[int, ...]:
    """Returns the indices of every `period`-th layer; none if it is None or 0."""
    return tuple(range(period - 1, n_layers, period)) if period else ()
