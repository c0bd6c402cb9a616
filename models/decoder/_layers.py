"""The kinds of attention of a decoder, if they differ in more than windows and positions, and how a stack repeats them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redeqx.errors import wrong

from ..nn import check_sizes

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True)
class LayerKind:
    """What layers of one kind have.

    **Arguments:**

    - `window`: the number of tokens that each token attends to; None for all tokens before it.
    - `size`, `groups`: the width of a head, and the number of key and value heads.
    - `d_mlp`: the inner width of the MLP.
    - `store`: the index of the arrays of the cache that hold the layer's keys and values. Kinds that share them have the
        same.
    - `has_keys`, `has_values`: False for a layer that attends to keys and values of an earlier one, and for one whose values
        are its keys.
    """

    window: int | None
    size: int
    groups: int
    d_mlp: int
    store: int
    has_keys: bool = True
    has_values: bool = True


@dataclass(frozen=True)
class Layers:
    """Consecutive layers of a model that are in one `Stack`.

    **Arguments:**

    - `field`: the model's field with the stack.
    - `first`: the index of the first layer.
    - `kinds`: the kind of each layer.
    """

    field: str
    first: int
    kinds: tuple[LayerKind, ...]

    @property
    def period(self) -> int:
        """The number of layers after which the kinds repeat."""
        return period_of(self.kinds)


def period_of(kinds: Sequence[Hashable]) -> int:
    """Returns the smallest number of kinds that, repeated, are all of them."""
    n, kinds = len(kinds), tuple(kinds)
    return next(p for p in range(1, n + 1) if n % p == 0 and kinds == kinds[:p] * (n // p))


def different(values: Sequence[Value]) -> tuple[list[Value], tuple[int, ...]]:
    """Returns the different values of layers, and the index of each layer's."""
    found = list(dict.fromkeys(values))
    return found, tuple(found.index(value) for value in values)


def kinds_of(config: Any) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer's attention, for a family `by_kind`."""
    stores = list(dict.fromkeys(window is None for window in config.windows))
    found = []
    for i, window in enumerate(config.windows):
        is_full, shares = window is None, i >= config.n_layers - config.n_shared
        own = config.global_head_size, config.global_kv_heads
        size, groups = own if is_full else (None, None)
        kind = LayerKind(
            window,
            size=config.size if size is None else size,
            groups=config.groups if groups is None else groups,
            d_mlp=config.inner * (2 if shares and config.widens_shared else 1),
            store=stores.index(is_full),
            has_keys=not shares,
            has_values=not shares and not (is_full and config.keys_are_values),
        )
        found.append(kind)
    return tuple(found)


def layers_of(config: Any) -> tuple[Layers, ...]:
    """Returns the layers of each stack: those with keys and values of their own come before the others."""
    kinds, n_own = kinds_of(config), config.n_layers - config.n_shared
    if not config.n_shared:
        return (Layers("stack", 0, kinds),)
    return Layers("first", 0, kinds[:n_own]), Layers("stack", n_own, kinds[n_own:])


def check_kinds(config: Any) -> None:
    """Raises ValueError for kinds that do not fit together."""
    optional = ("global_head_size", "global_kv_heads", "n_layer_inputs")
    check_sizes(config, *(name for name in optional if getattr(config, name) is not None))
    windows, n_own = config.windows, config.n_layers - config.n_shared
    if n_own < 1 or not {w is None for w in windows[n_own:]} <= {w is None for w in windows[:n_own]}:
        rule = f"a layer with keys and values for each kind of the last ones, of `n_layers`={config.n_layers}"
        raise wrong("n_shared", rule, config.n_shared, "Share fewer.")
    if config.n_heads % (config.global_kv_heads or 1):
        rule = f"a divisor of `n_heads`={config.n_heads}"
        raise wrong("global_kv_heads", rule, config.global_kv_heads, "Each must serve the same number of heads.")
    if config.global_kv_heads is not None and not config.keys_are_values:
        raise wrong("global_kv_heads", "None without `keys_are_values`", config.global_kv_heads, "Set both, or none.")
    if (config.global_head_size or 2) % 2:
        raise wrong("global_head_size", "an even number", config.global_head_size, "Rotary positions pair its halves.")
