"""The keys of a `config.json` that describe rotary positions."""

import math
from collections.abc import Mapping
from typing import Any

from redeqx.errors import brief

from .._kinds import POSITIVE, SIZE, Kind
from ..nn import LinearScaling, Llama3Scaling, Scaling, YarnScaling
from ._reader import ConfigReader

_BASE = Kind(float, "a finite number above 1", lambda value: 1 < value <= 1e300)


def rope_from_hf(keys: ConfigReader, n_positions: int) -> tuple[float, Scaling | None]:
    """Returns the base and the scaling in a `config.json`: from `rope_parameters`, or the older `rope_theta` and
    `rope_scaling`."""
    newer, older = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    for name in newer.keys() & older.keys():
        _check_same(keys, name, newer[name], older[name], "rope_scaling")
    fields = {**newer, **older}
    rope = keys.nested("rope_parameters", fields).aliased({"type": "rope_type"})
    theta = _either(keys, rope, "rope_theta", 10000.0, _BASE)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            raise rope.refuse(name, value, "a number, the same for all layers")
    for where in (keys, rope):
        where.only("partial_rotary_factor", 1.0, None)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.refuse("rope_type", kind, "'default', 'linear', 'llama3' or 'yarn'")
    if kind == "linear":
        return theta, LinearScaling(rope.get("factor", kind=POSITIVE))
    n_original = _either(keys, rope, "original_max_position_embeddings", n_positions, SIZE)
    if kind == "llama3":
        factor, low, high = (rope.get(name, kind=POSITIVE) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise ValueError(
                f"`{rope.path}`: `high_freq_factor`: expected more than `low_freq_factor`={low}, got {high}. Correct it."
            )
        return theta, Llama3Scaling(factor, low, high, n_original)
    factor = rope.get("factor", n_positions / n_original, POSITIVE)
    numerator, denominator = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    if not (numerator and denominator):
        numerator, denominator = 1.0, 0.0
    growth = 0.1 * math.log(max(factor, 1.0))
    return theta, YarnScaling(
        factor=factor,
        n_original=n_original,
        attention_factor=rope.get("attention_factor", (growth * numerator + 1) / (growth * denominator + 1), POSITIVE),
        fast=rope.get("beta_fast", 32.0, POSITIVE),
        slow=rope.get("beta_slow", 1.0, POSITIVE),
        truncate=rope.get("truncate", True),
    )


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
