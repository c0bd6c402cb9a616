"""Rows of the keys of `config.json` that say which layers have a window, and what layers without one have."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .._kinds import COUNT, LIST, OBJECT, SIZE
from ..hf import ConfigReader, Field, Row


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

    keys = MappingProxyType({"window": "sliding_window", "windowed_layers": "layer_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = known["n_layers"]
        default = usual = known["config_class"].default_layers(n_layers)
        window = reader.get("sliding_window", None if reader.has("sliding_window") else known["window"], SIZE)
        if self.period is not None and not reader.get("layer_types", []):  # beside it, EXAONE's folders have a word
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

    keys = MappingProxyType({"global_head_size": "global_head_dim", "global_kv_heads": "num_global_key_value_heads"})

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


@dataclass(frozen=True)
class MlpTypes(Row):
    """The kind of each layer's MLP. Only the first ones may be without experts.

    **Arguments:**

    - `first`: a key of their number, for files without `mlp_layer_types`; None if there is none.
    """

    first: str | None = None

    keys = MappingProxyType({"n_dense": "mlp_layer_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = known["n_layers"]
        n_dense = known["n_dense"] if self.first is None else reader.get(self.first, known["n_dense"], COUNT)
        types = reader.get("mlp_layer_types", ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense), LIST)
        n_dense = types.count("dense")
        if types != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
            raise reader.refuse("mlp_layer_types", types, f"dense layers, and then sparse ones, {n_layers} in all")
        return {"n_dense": n_dense}

    def write(self, config: Any) -> dict[str, Any]:
        return {"mlp_layer_types": ["dense"] * config.n_dense + ["sparse"] * (config.n_layers - config.n_dense)}
