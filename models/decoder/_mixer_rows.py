"""Rows of the keys of `config.json` of mixers: which layers have one, and the sizes of delta rules, Mamba-1 and Mamba-2."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redeqx.errors import wrong

from .._kinds import LIST, SIZE
from ..hf import ConfigReader, Field, Fields, Only, Row
from ._steps import InitialSteps

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

    keys = MappingProxyType({"mixer_layers": "layer_types"})

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


@dataclass(frozen=True)
class MixedLayers(Row):
    """The layers with a mixer in place of attention, and those whose attention has a window.

    **Arguments:**

    - `kind`: the name of the first ones in `layer_types`.
    """

    kind: str

    keys = MappingProxyType({"window": "sliding_window", "windowed_layers": "layer_types", "mixer_layers": "layer_types"})

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        n_layers, config_class = known["n_layers"], known["config_class"]
        usual = config_class.default_mixers(n_layers), config_class.default_layers(n_layers)
        window = reader.get("sliding_window", None if reader.has("sliding_window") else known["window"], SIZE)
        types = reader.get("layer_types", []) or self._types(n_layers, *usual)
        accepted = (self.kind, "full_attention", *(["sliding_attention"] if window is not None else []))
        if len(types) != n_layers or not all(kind in accepted for kind in types):
            raise reader.refuse("layer_types", types, f"{' or '.join(accepted)} for each of {n_layers} layers")
        mixers, windowed = (
            tuple(i for i, kind in enumerate(types) if kind == name) for name in (self.kind, "sliding_attention")
        )
        return {
            "window": window,
            "windowed_layers": None if window is None or windowed == usual[1] else windowed,
            "mixer_layers": None if mixers == usual[0] else mixers,
        }

    def write(self, config: Any) -> dict[str, Any]:
        mixers, windowed = ([i for i, has in enumerate(layers) if has] for layers in (config.mixers, config.windows))
        return {"sliding_window": config.window, "layer_types": self._types(config.n_layers, mixers, windowed)}

    def _types(self, n_layers: int, mixers: Sequence[int], windowed: Sequence[int]) -> list[str]:
        kinds = {**dict.fromkeys(windowed, "sliding_attention"), **dict.fromkeys(mixers, self.kind)}
        return [kinds.get(i, "full_attention") for i in range(n_layers)]


def _every_other(reader: ConfigReader, known: Mapping[str, Any]) -> Sequence[int]:
    """Returns the indices of the layers with attention if the file has at most their distance."""
    period = reader.get("full_attention_interval", known["config_class"].attention_period, SIZE)
    return range(period - 1, known["n_layers"], period)


DELTA: tuple[Row, ...] = (
    MixerLayers("linear_attention", _every_other),
    *Fields(state_groups="linear_num_key_heads", state_heads="linear_num_value_heads", state_size="linear_key_head_dim"),
    *Fields(state_value_size="linear_value_head_dim", conv_kernel="linear_conv_kernel_dim"),
)


_INFINITE = {"__float__": "Infinity"}  # as transformers writes it


@dataclass(frozen=True)
class StateHeads(Row):
    """The heads of a Mamba-2, whose common width is a multiple of the model's.

    **Arguments:**

    - `heads`, `size`, `expand`: the keys of their number and of the width of one, and of the multiple.
    - `width`: the key of another common width, and its default; None if there is none.
    """

    heads: str = "mamba_n_heads"
    size: str = "mamba_d_head"
    expand: str = "mamba_expand"
    width: tuple[str, int] | None = None

    @property
    def keys(self) -> dict[str, str]:
        return {"state_heads": self.heads, "state_value_size": self.size}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        inner, expected = reader.get(self.expand, 2) * known["d_model"], f"`{self.expand}` * `hidden_size`"
        if self.width is not None:
            key, default = self.width
            said = reader.get(key, None if reader.has(key) else default, SIZE)
            inner, expected = (inner, expected) if said is None else (said, f"`{key}`")
        heads, size = reader.get(self.heads, 128), reader.get(self.size, None)
        mixers = known["mixer_layers"]
        if not (known["config_class"].default_mixers(known["n_layers"]) if mixers is None else mixers):
            return {}
        size = inner // heads if size in (None, "auto") else SIZE.check(reader.path, self.size, size)
        if heads * size != inner:
            raise reader.refuse(self.size, size, f"{expected} / `{self.heads}`, {inner / heads:g}")
        return {"state_heads": heads, "state_value_size": size}

    def check(self, config: Any) -> None:
        width = config.state_heads * config.state_value_size
        if self.width is None and any(config.mixers) and width % config.d_model:
            rule = f"one whose product with `state_heads`={config.state_heads} is a multiple of `d_model`={config.d_model}"
            raise wrong("state_value_size", rule, config.state_value_size, f"No `{self.expand}` is between two numbers.")

    def write(self, config: Any) -> dict[str, Any]:
        if not any(config.mixers):  # transformers checks the sizes anyway
            return {self.heads: 1, self.size: "auto"}
        heads, size = config.state_heads, config.state_value_size
        common = {self.expand: heads * size // config.d_model} if self.width is None else {self.width[0]: heads * size}
        return {self.heads: heads, self.size: size, **common}


@dataclass(frozen=True)
class ScanWidth(Row):
    """The width of a Mamba-1.

    **Arguments:**

    - `expand`: the key of its multiple of the model's width.
    - `width`: the key of the width itself; None if there is none.
    """

    expand: str
    width: str | None = None

    @property
    def keys(self) -> dict[str, str]:
        return {"state_value_size": self.width or self.expand}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        width = reader.get(self.expand, 2) * known["d_model"]
        return {"state_value_size": width if self.width is None else reader.get(self.width, width)}

    def check(self, config: Any) -> None:
        if self.width is None and config.state_value_size % config.d_model:
            rule = f"a multiple of `d_model`={config.d_model}"
            raise wrong("state_value_size", rule, config.state_value_size, f"No `{self.expand}` is between two numbers.")

    def write(self, config: Any) -> dict[str, Any]:
        if self.width is None:
            return {self.expand: config.state_value_size // config.d_model}
        return {self.width: config.state_value_size}


def StepRank(key: str) -> Field:
    """Returns the row of the width of the vector that steps of a Mamba-1 are computed from."""

    def read(reader: ConfigReader, key: str, default: int | None) -> int | None:
        found = reader.get(key, None)
        return default if found in (None, "auto") else SIZE.check(reader.path, key, found)

    usual = lambda size, known: None if size == -(-known["d_model"] // 16) else size  # noqa: E731
    return Field(key, "step_rank", via=read, load=usual, save=lambda config: config.rank)


@dataclass(frozen=True)
class StepLimits(Row):
    """The limits of the steps of a Mamba-2.

    **Arguments:**

    - `least`: the key of the first one, in a family without a second one.
    """

    least: str | None = None

    @property
    def keys(self) -> dict[str, str]:
        return {"step_limits": self.least or "time_step_limit"}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        if self.least is not None:
            return {"step_limits": (reader.get(self.least, known["step_limits"][0]), math.inf)}
        found = reader.get("time_step_limit", [0.0, math.inf], LIST)
        limits = tuple(math.inf if value == _INFINITE else value for value in found)
        if len(limits) != 2 or not all(isinstance(value, int | float) for value in limits) or not 0 <= limits[0] < limits[1]:
            raise reader.refuse("time_step_limit", found, "two numbers, the second of which is larger")
        return {"step_limits": (float(limits[0]), float(limits[1]))}

    def check(self, config: Any) -> None:
        if self.least is not None and config.step_limits[1] < math.inf:
            raise wrong("step_limits", "no largest step", config.step_limits, "Set the second to infinity.")
        if self.least is not None and config.step_limits[0] != config.initial_steps.least:
            rule = f"the `least` of `step_limits`, {config.step_limits[0]}"
            raise wrong("initial_steps", rule, config.initial_steps.least, f"`{self.least}` is both: set both.")

    def write(self, config: Any) -> dict[str, Any]:
        least, most = config.step_limits
        if self.least is not None:
            return {self.least: least}
        if not least and most == math.inf:
            return {}
        return {"time_step_limit": [least, most if most < math.inf else _INFINITE]}


class DrawnSteps(Row):
    """The initial steps of a state space."""

    keys = MappingProxyType({"initial_steps": "time_step_max"})

    def __init__(self, *, of_weights: bool = False):
        """**Arguments:**

        - `of_weights`: whether there are keys of their weights, too, as for a Mamba-1.
        """
        self.of_weights = of_weights
        self.numbers = {"least": "time_step_min", "most": "time_step_max", "floor": "time_step_floor"}
        self.numbers |= {"scale": "time_step_scale"} if of_weights else {}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        usual = known["initial_steps"]
        found: dict[str, Any] = {name: reader.get(key, getattr(usual, name)) for name, key in self.numbers.items()}
        if self.of_weights:
            found["is_constant"] = reader.only("time_step_init_scheme", "random", "constant") == "constant"
        return {"initial_steps": InitialSteps(**found)}

    def check(self, config: Any) -> None:
        steps = config.initial_steps
        is_positive = max(min(steps.least, steps.most), steps.floor) > 0
        if not (is_positive and all(0 <= n < math.inf for n in (steps.least, steps.most, steps.floor, steps.scale))):
            rule = "finite numbers of at least 0, and a positive shortest step"
            raise wrong("initial_steps", rule, steps, "Leave `floor` out, say.")
        if not self.of_weights and (steps.scale != 1 or steps.is_constant):
            rule = "no `scale` or `is_constant`"
            raise wrong("initial_steps", rule, steps, "Leave them out: steps of a Mamba-2 have no such weights.")

    def write(self, config: Any) -> dict[str, Any]:
        steps = config.initial_steps
        scheme = {"time_step_init_scheme": "constant" if steps.is_constant else "random"} if self.of_weights else {}
        return {**{key: getattr(steps, name) for name, key in self.numbers.items()}, **scheme}


def mamba_rows(width: tuple[str, int] | None = None) -> tuple[Row, ...]:
    """Returns the rows of the sizes of a Mamba-2, which come after that of the layers with one.

    **Arguments:**

    - `width`: the key of the common width of its heads, if it has one, and its default.
    """
    return (
        *Fields(state_groups="mamba_n_groups", state_size="mamba_d_state", conv_kernel="mamba_d_conv"),
        Field("mamba_conv_bias", "conv_bias"),
        Only("mamba_proj_bias", False),
        StateHeads(width=width),
        StepLimits(),
    )
