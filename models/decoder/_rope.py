"""`Rope`: the keys of `config.json` that describe rotary positions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redeqx.errors import brief

from .._kinds import LIST, OBJECT, POSITIVE, SIZE, Kind
from ..hf import ConfigReader, Row
from ..nn import (
    AlphaScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
)

_BASE = Kind(float, "a finite number above 1", lambda value: 1 < value <= 1e300)
_SHARE = Kind(float, "a share in (0, 1]", lambda value: 0 < value <= 1)

# The `rope_type` of each scaling, and the keys of its fields.
_ORIGINAL = "original_max_position_embeddings"
_KEYS: Mapping[type, tuple[str, dict[str, str]]] = {
    LinearScaling: ("linear", {"factor": "factor"}),
    Llama3Scaling: (
        "llama3",
        {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor", "n_original": _ORIGINAL},
    ),
    YarnScaling: (
        "yarn",
        {"factor": "factor", "n_original": _ORIGINAL, "attention_factor": "attention_factor", "fast": "beta_fast",
         "slow": "beta_slow", "truncate": "truncate", "all_dims": "mscale_all_dim"},
    ),
    DynamicScaling: ("dynamic", {"factor": "factor", "n_original": _ORIGINAL}),
    AlphaScaling: ("dynamic", {"alpha": "alpha"}),
    LongScaling: (
        "longrope",
        {"short": "short_factor", "long": "long_factor", "n_original": _ORIGINAL, "attention_factor": "attention_factor"},
    ),
    ProportionalScaling: ("proportional", {"share": "partial_rotary_factor", "factor": "factor"}),
}  # fmt: skip
KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True)
class Rope(Row):
    """The base, the scaling and the share of the rotary positions: in `rope_parameters`, or in the older `rope_theta`,
    `rope_scaling` and `partial_rotary_factor`.

    **Arguments:**

    - `has_share`: whether only a share of each head may be rotary.
    - `has_local`: whether layers with a window may have another base.
    - `kinds`: the accepted values of `rope_type`; and "alpha" if the "dynamic" one may have a fixed factor of that name.
    - `n_original`: the default of `original_max_position_embeddings`, which then is a key of its own; None for
        `n_positions`.
    - `share`: a function of the known fields that returns the share that files may name, if it follows from sizes; None for
        the whole head.
    """

    has_share: bool = False
    has_local: bool = False
    kinds: tuple[str, ...] = KINDS
    n_original: int | None = None
    share: Callable[[Mapping[str, Any]], float] | None = None

    @property
    def keys(self) -> dict[str, str]:
        share = {"rope_share": "partial_rotary_factor"} if self.has_share else {}
        local = {"local_rope_theta": "rope_local_base_freq"} if self.has_local else {}
        return {"rope_theta": "rope_theta", "rope_scaling": "rope_parameters", **share, **local}

    def read(self, reader: ConfigReader, known: Mapping[str, Any]) -> dict[str, Any]:
        newer, older = reader.get("rope_parameters", {}), reader.get("rope_scaling", {})
        is_said = bool(newer or older)  # null stands for the family's scaling, as an absent key does
        theta, found = known["rope_theta"], {}
        if self.has_local:
            local = reader.get("rope_local_base_freq", known["local_rope_theta"], _BASE)
            if "full_attention" in newer or "sliding_attention" in newer:
                newer, local = _by_layer(reader, newer, theta, local)
            found["local_rope_theta"] = local
        for name in newer.keys() & older.keys():
            _check_same(reader, name, newer[name], older[name], "rope_scaling")
        fields = {**newer, **older}
        rope = reader.nested("rope_parameters", fields).aliased({"type": "rope_type"})
        found["rope_theta"] = _either(reader, rope, "rope_theta", theta, _BASE)
        for name, value in fields.items():
            if isinstance(value, Mapping):
                raise rope.refuse(name, value, "a number, the same for all layers")
        if self.has_share:
            found["rope_share"] = _either(reader, rope, "partial_rotary_factor", known["rope_share"], _SHARE)
        else:
            is_proportional = rope.get("rope_type", "default") == "proportional"  # whose share is part of the scaling
            for where in (reader,) if is_proportional else (reader, rope):
                where.only("partial_rotary_factor", 1.0 if self.share is None else self.share(known), None)
        scaling = known["rope_scaling"]
        if is_said:
            scaling = _scaling(reader, rope, known["n_positions"], self.n_original, self.kinds)
        found["rope_scaling"] = scaling
        if isinstance(scaling, DynamicScaling):  # it is for texts longer than the original ones
            found["n_positions"] = int(scaling.factor * scaling.n_original)
        return found

    def write(self, config: Any) -> dict[str, Any]:
        rope = {"rope_theta": config.rope_theta, **_written(config.rope_scaling)}
        if self.has_share:
            rope["partial_rotary_factor"] = config.rope_share
        if self.has_local:
            local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
            return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
        if self.n_original is not None and isinstance(config.rope_scaling, LongScaling):
            return {"rope_parameters": rope, "original_max_position_embeddings": config.rope_scaling.n_original}
        return {"rope_parameters": rope}


def _by_layer(
    keys: ConfigReader, newer: Mapping[str, Any], theta: float, local: float | None
) -> tuple[Mapping[str, Any], float]:
    """Returns the parameters of layers without a window, and the base in those with one."""
    own = keys.nested("rope_parameters", newer)
    full, sliding = (own.get(name, {}, OBJECT) for name in ("full_attention", "sliding_attention"))
    for name in newer.keys() - {"full_attention", "sliding_attention"}:
        raise own.refuse(name, newer[name], "parameters of full_attention and sliding_attention")
    windowed = own.nested("sliding_attention", sliding).aliased({"type": "rope_type"})
    windowed.only("rope_type", "default")
    return full, windowed.get("rope_theta", theta if local is None else local, _BASE)


def _scaling(
    keys: ConfigReader, rope: ConfigReader, n_positions: int, n_original: int | None, kinds: tuple[str, ...]
) -> Scaling | None:
    kind = rope.get("rope_type", "default")
    kind = {"su": "longrope", "deepseek_yarn": "yarn"}.get(kind, kind)  # names in old files
    if kind not in kinds or kind == "alpha":
        raise rope.refuse("rope_type", kind, " or ".join(repr(known) for known in kinds if known != "alpha"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.get("factor", kind=POSITIVE))
    if kind == "proportional":
        return ProportionalScaling(rope.get("partial_rotary_factor", 1.0, _SHARE), rope.get("factor", 1.0, POSITIVE))
    if kind == "dynamic" and "alpha" in kinds and (alpha := rope.get("alpha", 0.0)):
        return AlphaScaling(alpha)
    if kind == "dynamic":
        return DynamicScaling(rope.get("factor", kind=POSITIVE), n_positions)
    n_original = _either(keys, rope, "original_max_position_embeddings", n_original or n_positions, SIZE)
    assert n_original is not None
    if kind == "llama3":
        factor, low, high = (rope.get(name, kind=POSITIVE) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise ValueError(
                f"`{rope.path}`: `high_freq_factor`: expected more than `low_freq_factor`={low}, got {high}. Correct it."
            )
        return Llama3Scaling(factor, low, high, n_original)
    factor = rope.get("factor", n_positions / n_original, POSITIVE)
    if kind == "longrope":
        growth = math.sqrt(1 + math.log(factor) / math.log(n_original)) if factor > 1 else 1.0
        short, long = (
            tuple(POSITIVE.check(rope.path, name, value) for value in rope.get(name, kind=LIST))
            for name in ("short_factor", "long_factor")
        )
        return LongScaling(short, long, n_original, rope.get("attention_factor", growth, POSITIVE))
    numerator, all_dims = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    numerator, denominator = (numerator, all_dims) if numerator and all_dims else (1.0, 0.0)
    growth = 0.1 * math.log(max(factor, 1.0))
    return YarnScaling(
        factor=factor,
        n_original=n_original,
        attention_factor=rope.get("attention_factor", (growth * numerator + 1) / (growth * denominator + 1), POSITIVE),
        fast=rope.get("beta_fast", 32.0, POSITIVE),
        slow=rope.get("beta_slow", 1.0, POSITIVE),
        truncate=rope.get("truncate", True),
        all_dims=all_dims,
    )


def _written(scaling: Scaling | None) -> dict[str, Any]:
    """Returns the keys of a scaling."""
    if scaling is None:
        return {"rope_type": "default"}
    kind, keys = _KEYS[type(scaling)]
    values = {key: getattr(scaling, name) for name, key in keys.items()}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if not values.get("mscale_all_dim", 1):
        del values["mscale_all_dim"]
    more = {"factor": 1.0} if isinstance(scaling, AlphaScaling) else {}
    return {"rope_type": kind, **values, **more}


def _either(keys: ConfigReader, rope: ConfigReader, name: str, default: Any, kind: Kind) -> Any:
    """Returns a key that files hold either among the model's own keys or among those of the rotary positions."""
    outer, inner = keys.get(name, None, kind), rope.get(name, None, kind)
    if outer is not None and inner is not None:
        _check_same(keys, name, outer, inner, "rope_parameters")
    return next((value for value in (inner, outer) if value is not None), default)


def _check_same(keys: ConfigReader, name: str, value: Any, other: Any, where: str) -> None:
    if value != other:
        raise ValueError(
            f"`{keys.path}`: `{name}`: expected one value, got {brief(value)}, and {brief(other)} in `{where}`. Correct one "
            "of the two, or remove it."
        )
