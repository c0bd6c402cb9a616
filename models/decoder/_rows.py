"""The keys of `config.json` that decoders share, in LLaMA's names, and rows for what differs: windows, layers, positions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .._kinds import COUNT, LIST, OBJECT, RATE, SIZE, TEXT, Kind
from ..hf import Classes, ConfigReader, Field, Only, Row, Tokens, Written
from ..nn import DynamicScaling
from ._rope import Rope


def _head_size(size: int | None, known: Mapping[str, Any]) -> int | None:
    """Reads `head_size`: None if it follows from the width, unless the family has a size of its own."""
    is_own = known["head_size"] is not None
    return size if is_own or size is None or size != known["d_model"] // known["n_heads"] else None


def _n_positions(config: Any) -> int:
    """Returns `max_position_embeddings`, which for a dynamic scaling is the original length."""
    scaling = config.rope_scaling
    return scaling.n_original if isinstance(scaling, DynamicScaling) else config.n_positions


class Shared(Row):
    """A key for several fields, which always have the same value."""

    def __init__(self, key: str, *fields: str):
        self.key, self.fields = key, fields

    @property
    def keys(self) -> dict[str, str]:
        return dict.fromkeys(self.fields, self.key)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(self.fields, reader.get(self.key, known[self.fields[0]]))

    def write(self, config: Any) -> dict[str, Any]:
        return {self.key: getattr(config, self.fields[0])}

    def check(self, config: Any) -> None:
        values = {name: getattr(config, name) for name in self.fields}
        if len({*values.values()}) > 1:
            said = ", ".join(f"{name}={value}" for name, value in values.items())
            raise ValueError(f"`{self.fields[0]}`: expected the same as {', '.join(values)}, got {said}. Set all.")


def FirstLayers(key: str = "mlp_only_layers") -> Field:
    """Returns the row of the indices of layers without experts. Only the first ones are implemented."""

    def read(reader: ConfigReader, key: str, default: int) -> int:
        layers = reader.get(key, [*range(default)], LIST)
        if layers != [*range(len(layers))]:
            raise reader.refuse(key, layers, "the first layers, [0, 1, ...]")
        return len(layers)

    return Field(key, "n_dense", via=read, save=lambda config: [*range(config.n_dense)])


def SharedExperts(key: str = "n_shared_experts") -> Field:
    """Returns the row of the number of experts that all tokens are sent to. They are computed as one, of their common
    width. It comes after the row of `d_expert`."""
    return Field(
        key,
        "d_shared",
        COUNT,
        default=lambda known: known["d_shared"] // known["d_expert"],
        load=lambda n, known: n * known["d_expert"],
        save=lambda config: config.d_shared // config.expert,
    )


class _Head(Row):
    """The classes of a folder whose model has a head for classes."""

    @property
    def keys(self) -> dict[str, str]:
        return {"n_classes": "num_labels", "classifier_dropout": "classifier_dropout"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        if not reader.is_classifier:
            return {}
        dropout = reader.get("classifier_dropout", None, RATE)
        usual = known["classifier_dropout"]
        dropout = reader.get("hidden_dropout", usual, RATE) if dropout is None else dropout  # as transformers
        return {"n_classes": reader.n_classes(), "classifier_dropout": dropout}

    def write(self, config: Any) -> dict[str, Any]:
        if config.n_classes is None:
            return {}
        return {**Classes().write(config), "classifier_dropout": config.classifier_dropout}


# The keys of latent attention, and of experts, as DeepSeek names them.
LATENT: tuple[Row, ...] = (
    Field("kv_lora_rank", "latent_size"),
    Field("q_lora_rank", "query_latent_size", SIZE, null=None),
    Field("qk_nope_head_dim", "plain_size"),
    Field("qk_rope_head_dim", "shared_rotary_size"),
    Field("v_head_dim", "value_size"),
    Only("num_key_value_heads", lambda known: (known["n_heads"], None), save=lambda config: config.n_heads),
)
ROUTED: tuple[Row, ...] = (
    Field("moe_intermediate_size", "d_expert"),
    Field("n_routed_experts", "n_experts"),
    Field("num_experts_per_tok", "n_chosen"),
    SharedExperts(),
    Field("routed_scaling_factor", "router_scale"),
)
EXPERTS: tuple[Row, ...] = (  # in Qwen's names
    Field("moe_intermediate_size", "d_expert"),
    Field("num_experts", "n_experts"),
    Field("num_experts_per_tok", "n_chosen"),
    Field("norm_topk_prob", "renormalize"),
    Only("decoder_sparse_step", 1),
    FirstLayers(),
)
GROUPED: tuple[Row, ...] = (
    *ROUTED,
    Field("n_group", "n_expert_groups"),
    Field("topk_group", "n_chosen_groups"),
    Field("norm_topk_prob", "renormalize"),
)


def Inner(key: str, kind: Kind | None = SIZE, **options: Any) -> Field:
    """Returns the row of the inner width of the MLPs, which is four times the width by default."""
    return Field(key, "d_mlp", kind, load=lambda size, known: None if size == 4 * known["d_model"] else size, **options)


# The keys of GPT-2 that GPT-J has too, and alternative names of them.
GPT_ROWS: tuple[Row, ...] = (
    Field("activation_function", "activation", TEXT),
    Field("n_positions"),
    Field("n_embd", "d_model"),
    Inner("n_inner"),
    Field("n_layer", "n_layers", via=ConfigReader.layers),
    Field("n_head", "n_heads"),
    Field("embd_pdrop", "embedding_dropout", RATE),
    Field("attn_pdrop", "attention_dropout", RATE),
    Field("resid_pdrop", "residual_dropout", RATE),
    Field("layer_norm_epsilon", "norm_eps"),
)
GPT_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
)


class Choice(Row):
    """A key that is true or false, for a field or two with one of two values."""

    def __init__(self, key: str, fields: Mapping[str, tuple[Any, Any]], *, default: bool):
        """**Arguments:**

        - `fields`: the values of each field, if the key is false, and if it is true.
        - `default`: the value of an absent key.
        """
        self.key, self.fields, self.default = key, fields, default

    @property
    def keys(self) -> dict[str, str]:
        return dict.fromkeys(self.fields, self.key)

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        value = reader.get(self.key, self.default)
        return {name: values[value] for name, values in self.fields.items()}

    def write(self, config: Any) -> dict[str, Any]:
        name, values = next(iter(self.fields.items()))
        return {self.key: getattr(config, name) == values[1]}


def Window() -> Field:
    """Returns the row of a window that all layers have."""
    return Field("sliding_window", "window", SIZE, null=None)


@dataclass(frozen=True)
class LayerTypes(Row):
    """The window, and the layers that have it.

    **Arguments:**

    - `period`: an older key of the number of layers after which one without a window comes.
    - `first`: a key of the first layer with the window, for files without `layer_types`, and its default.
    """

    period: str | None = None
    first: tuple[str, int] | None = None

    @property
    def keys(self) -> dict[str, str]:
        return {"window": "sliding_window", "windowed_layers": "layer_types"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = known["n_layers"]
        default = usual = known["config_class"].default_layers(n_layers)
        window = reader.get("sliding_window", None if reader.has("sliding_window") else known["window"], SIZE)
        if self.period is not None:
            period = reader.get(self.period, None, SIZE)
            if period is not None:
                default = tuple(i for i in range(n_layers) if (i + 1) % period)
        if self.first is not None:
            default = tuple(range(reader.get(*self.first, COUNT), n_layers))
        windowed = read_layer_types(reader, n_layers, default, has_window=window is not None)
        if window is None:
            return {"window": None, "windowed_layers": None}
        return {"window": window, "windowed_layers": None if windowed == usual else windowed}

    def write(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": config.window, "layer_types": layer_types(config)}


class GlobalHeads(Row):
    """The heads of layers without a window: in keys of their own, or in `per_layer_config`, as transformers writes them."""

    @property
    def keys(self) -> dict[str, str]:
        return {"global_head_size": "global_head_dim", "global_kv_heads": "num_global_key_value_heads"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        size = reader.get("global_head_dim", known["global_head_size"], SIZE)
        groups = reader.get("num_global_key_value_heads", None, SIZE)
        by_layer = reader.get("per_layer_config", None, OBJECT)
        if by_layer is None:  # transformers reads the number of heads with this key alone
            return {"global_head_size": size, "global_kv_heads": groups if known["keys_are_values"] else None}
        n_layers, windowed = known["n_layers"], known["windowed_layers"]
        windowed = known["config_class"].default_layers(n_layers) if windowed is None else windowed
        own = next(iter(by_layer.values()), {})
        wanted = dict.fromkeys((i for i in range(n_layers) if i not in windowed), own) if own else {}
        sizes = {int(i) if i.isdigit() else i: sizes for i, sizes in by_layer.items()}
        if sizes != wanted or not own.keys() <= {"head_dim", "num_key_value_heads"}:
            raise reader.refuse("per_layer_config", by_layer, "the same heads in all layers without a window, and no others")
        return {
            "global_head_size": own.get("head_dim", known["head_size"]),
            "global_kv_heads": own.get("num_key_value_heads"),
        }

    def write(self, config: Any) -> dict[str, Any]:
        return {key: getattr(config, field) for field, key in self.keys.items()}


class Switched(Row):
    """Keys of sizes that count if another key is true."""

    def __init__(self, switch: str, **fields: str):
        """**Arguments:**

        - `fields`: the key of each field. The first one is 0 if the switch is off.
        """
        self.switch, self.fields = switch, fields

    @property
    def keys(self) -> dict[str, str]:
        return self.fields

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        is_on = reader.get(self.switch, False)
        default = () if is_on else (None,)
        found = {field: reader.get(key, *default, kind=SIZE) for field, key in self.fields.items()}
        return found if is_on else {}

    def write(self, config: Any) -> dict[str, Any]:
        values = {key: getattr(config, field) or None for field, key in self.fields.items()}
        return {self.switch: getattr(config, next(iter(self.fields))) > 0, **values}


def read_layer_types(reader: ConfigReader, n_layers: int, default: tuple[int, ...], *, has_window: bool) -> tuple[int, ...]:
    """Returns the indices of the layers with a window in `layer_types`; `default` if the key is absent."""
    types = reader.get("layer_types", [])
    if not types:
        return default
    accepted = ("full_attention", *(["sliding_attention"] if has_window else []))
    if len(types) != n_layers or not all(kind in accepted for kind in types):
        raise reader.refuse("layer_types", types, f"{' or '.join(accepted)} for each of {n_layers} layers")
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def layer_types(config: Any) -> list[str]:
    """Returns the `layer_types` of a config."""
    return ["full_attention" if window is None else "sliding_attention" for window in config.windows]


# Older names of the kinds of layers.
OLDER: Mapping[str, str] = MappingProxyType({"mamba": "linear_attention", "attention": "full_attention"})


@dataclass(frozen=True)
class MixerLayers(Row):
    """The layers with a mixer in place of attention.

    **Arguments:**

    - `kind`: their name in `layer_types`.
    - `attention`: a function of the reader and the known fields that returns the indices of the others in files without
        `layer_types`.
    """

    kind: str
    attention: Callable[[ConfigReader, Mapping[str, Any]], Sequence[int]] = lambda reader, known: ()

    @property
    def keys(self) -> dict[str, str]:
        return {"mixer_layers": "layer_types"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers, kinds = known["n_layers"], (self.kind, "full_attention")
        default = self.attention(reader, known)
        types = reader.get("layer_types", []) or [kinds[i in default] for i in range(n_layers)]
        types = [OLDER.get(kind, kind) for kind in types]
        if len(types) != n_layers or not all(kind in kinds for kind in types):
            raise reader.refuse("layer_types", types, f"{' or '.join(kinds)} for each of {n_layers} layers")
        found = tuple(i for i, kind in enumerate(types) if kind == self.kind)
        return {"mixer_layers": None if found == known["config_class"].default_mixers(n_layers) else found}

    def write(self, config: Any) -> dict[str, Any]:
        return {"layer_types": [self.kind if is_mixer else "full_attention" for is_mixer in config.mixers]}


def _every_other(reader: ConfigReader, known: Mapping[str, Any]) -> Sequence[int]:
    """Returns the indices of the layers with attention if the file has at most their distance."""
    period = reader.get("full_attention_interval", known["config_class"].attention_period, SIZE)
    return range(period - 1, known["n_layers"], period)


DELTA: tuple[Row, ...] = (
    MixerLayers("linear_attention", _every_other),
    Field("linear_num_key_heads", "state_groups"),
    Field("linear_num_value_heads", "state_heads"),
    Field("linear_key_head_dim", "state_size"),
    Field("linear_value_head_dim", "state_value_size"),
    Field("linear_conv_kernel_dim", "conv_kernel"),
)


_INFINITE = {"__float__": "Infinity"}  # as transformers writes it


class _StateSpace(Row):
    """The heads of a Mamba-2, whose common width is a multiple of the model's."""

    @property
    def keys(self) -> dict[str, str]:
        return {
            "state_heads": "mamba_n_heads",
            "state_value_size": "mamba_d_head",
        }

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        inner = reader.get("mamba_expand", 2) * known["d_model"]
        heads, size = reader.get("mamba_n_heads", 128), reader.get("mamba_d_head", None)
        if not known["mixer_layers"]:
            return {}
        size = inner // heads if size in (None, "auto") else SIZE.check(reader.path, "mamba_d_head", size)
        if heads * size != inner:
            raise reader.refuse("mamba_d_head", size, f"`mamba_expand` * `hidden_size` / `mamba_n_heads`, {inner / heads:g}")
        return {"state_heads": heads, "state_value_size": size}

    def check(self, config: Any) -> None:
        width = config.state_heads * config.state_value_size
        if any(config.mixers) and width % config.d_model:
            raise ValueError(
                f"`state_value_size`: expected one whose product with `state_heads`={config.state_heads} is a multiple of "
                f"`d_model`={config.d_model}, got {config.state_value_size}. No `mamba_expand` is between two numbers."
            )

    def write(self, config: Any) -> dict[str, Any]:
        if not any(config.mixers):  # transformers checks the sizes anyway
            return {"mamba_n_heads": 1, "mamba_d_head": "auto"}
        heads, size = config.state_heads, config.state_value_size
        return {"mamba_n_heads": heads, "mamba_d_head": size, "mamba_expand": heads * size // config.d_model}


class StepLimits(Row):
    """The limits of the steps of a Mamba-2."""

    @property
    def keys(self) -> dict[str, str]:
        return {"step_limits": "time_step_limit"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        found = reader.get("time_step_limit", [0.0, math.inf], LIST)
        limits = tuple(math.inf if value == _INFINITE else value for value in found)
        if len(limits) != 2 or not all(isinstance(value, int | float) for value in limits) or not 0 <= limits[0] < limits[1]:
            raise reader.refuse("time_step_limit", found, "two numbers, the second of which is larger")
        return {"step_limits": (float(limits[0]), float(limits[1]))}

    def write(self, config: Any) -> dict[str, Any]:
        least, most = config.step_limits
        if not least and most == math.inf:
            return {}
        return {"time_step_limit": [least, most if most < math.inf else _INFINITE]}


MAMBA: tuple[Row, ...] = (
    MixerLayers("linear_attention"),
    Field("mamba_n_groups", "state_groups"),
    Field("mamba_d_state", "state_size"),
    Field("mamba_d_conv", "conv_kernel"),
    Field("mamba_conv_bias", "conv_bias"),
    Only("mamba_proj_bias", False),
    _StateSpace(),
    StepLimits(),
)
ROWS: tuple[Row, ...] = (
    Written("model_type", lambda config: config.model_type),
    Field("vocab_size"),
    Field("max_position_embeddings", "n_positions", save=_n_positions),
    Field("hidden_size", "d_model"),
    Field("intermediate_size", "d_mlp"),
    Field("num_hidden_layers", "n_layers", via=ConfigReader.layers),
    Field("num_attention_heads", "n_heads"),
    Field("num_key_value_heads", "n_kv_heads", SIZE, null=None, save=lambda config: config.groups),
    Field("head_dim", "head_size", SIZE, load=_head_size, save=lambda config: config.size),
    Rope(),
    Field("hidden_act", "activation", TEXT),
    Field("rms_norm_eps", "norm_eps"),
    Field("attention_dropout", kind=RATE),
    Field("tie_word_embeddings", "is_tied"),
    Tokens(),
    Field("initializer_range", "init_std"),
    _Head(),
)


def rows(*changed: Row, without: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Returns LLaMA's rows with some changed or added: a row replaces those that hold one of its fields.

    **Arguments:**

    - `without`: fields whose rows are left out.
    """
    replaced = {name for row in changed for name in row.keys} | set(without)
    return (*(row for row in ROWS if replaced.isdisjoint(row.keys)), *changed)
