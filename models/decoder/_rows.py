"""The keys of `config.json` that decoders share, in LLaMA's names, and rows for what differs: windows, layers, positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._kinds import RATE, SIZE, TEXT
from ..hf import KINDS, ConfigReader, Field, Row, Tokens, Written, rope_from_hf
from ..nn import DynamicScaling, LongScaling


def _head_size(size: int | None, known: Mapping[str, Any]) -> int | None:
    """Reads `head_size`: None if it follows from the width, unless the family has a size of its own."""
    is_own = known["head_size"] is not None
    return size if is_own or size is None or size != known["d_model"] // known["n_heads"] else None


@dataclass(frozen=True)
class Rope(Row):
    """The base, the scaling and the share of the rotary positions.

    **Arguments:**

    - `has_share`: whether only a share of each head may be rotary.
    - `has_local`: whether layers with a window may have another base.
    - `kinds`: the scalings that the family has.
    - `n_original`: the default of `original_max_position_embeddings`, which then is a key of its own; None for
        `n_positions`.
    """

    has_share: bool = False
    has_local: bool = False
    kinds: tuple[str, ...] = KINDS
    n_original: int | None = None

    @property
    def keys(self) -> dict[str, str]:
        share = {"rope_share": "partial_rotary_factor"} if self.has_share else {}
        local = {"local_rope_theta": "rope_local_base_freq"} if self.has_local else {}
        return {"rope_theta": "rope_theta", "rope_scaling": "rope_parameters", **share, **local}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        rope = rope_from_hf(
            reader,
            known["n_positions"],
            theta=known["rope_theta"],
            share=known["rope_share"] if self.has_share else None,
            has_local=self.has_local,
            local=known["local_rope_theta"],
            n_original=self.n_original,
            kinds=self.kinds,
        )
        found = {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
        found |= {"rope_share": rope.share} if self.has_share else {}
        found |= {"local_rope_theta": rope.local_theta} if self.has_local else {}
        if isinstance(rope.scaling, DynamicScaling):  # it is for texts longer than the original ones
            found["n_positions"] = int(rope.scaling.factor * rope.scaling.n_original)
        return found

    def write(self, config: Any) -> dict[str, Any]:
        scaling = {"rope_type": "default"} if config.rope_scaling is None else config.rope_scaling.to_hf()
        rope = {"rope_theta": config.rope_theta, **scaling}
        if self.has_share:
            rope["partial_rotary_factor"] = config.rope_share
        if self.has_local:
            local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
            return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
        if self.n_original is not None and isinstance(config.rope_scaling, LongScaling):
            return {"rope_parameters": rope, "original_max_position_embeddings": config.rope_scaling.n_original}
        return {"rope_parameters": rope}


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


def Window() -> Field:
    """Returns the row of a window that all layers have."""
    return Field("sliding_window", "window", SIZE, null=None)


@dataclass(frozen=True)
class LayerTypes(Row):
    """The window, and the layers that have it.

    **Arguments:**

    - `period`: an older key of the number of layers after which one without a window comes.
    """

    period: str | None = None

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
        windowed = read_layer_types(reader, n_layers, default, has_window=window is not None)
        if window is None:
            return {"window": None, "windowed_layers": None}
        return {"window": window, "windowed_layers": None if windowed == usual else windowed}

    def write(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": config.window, "layer_types": layer_types(config)}


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
)


def rows(*changed: Row, without: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Returns LLaMA's rows with some changed or added: a row replaces those that hold one of its fields.

    **Arguments:**

    - `without`: fields whose rows are left out.
    """
    replaced = {name for row in changed for name in row.keys} | set(without)
    return (*(row for row in ROWS if replaced.isdisjoint(row.keys)), *changed)
