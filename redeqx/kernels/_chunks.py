"""Which queries and keys each device computes if positions are split, and how it gets them.

A device gathers the keys and values of all devices, or with a window only those of its neighbours. With a causal mask, the
last device would have most of the work. So positions are 2n chunks for n devices, and device `i` computes the `i`-th chunk
from the start and the `i`-th from the end (zig-zag). They are exchanged inside the attention: no other operation sees this
order. A chunk reads only the keys that it may attend to. Their number differs by device, so there is a branch for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..machine import axes_of
from ._setting import QUERY_DIMS, AttentionSetting

Operands = dict[str, Any]


def map_queries(extras: Operands, fn: Callable[[Any, int], Any]) -> Operands:
    """Returns the optional operands, with `fn(x, dim)` in place of each that differs by query."""
    dims = {name: QUERY_DIMS[name] for name, x in extras.items() if name in QUERY_DIMS and x.shape[QUERY_DIMS[name]] > 1}
    return {name: fn(x, dims[name]) if name in dims else x for name, x in extras.items()}


def of_columns(extras: Operands, first: Any, n: int) -> Operands:
    """Returns the optional operands of `n` keys, from the `first` on."""
    take = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=n, axis=-1)
    of_keys: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("bias", "mask", "key_segments"), take),
        "lengths": lambda x: jnp.clip(x - first, 0, n),
    }
    return {name: of_keys[name](x) if name in of_keys else x for name, x in extras.items()}


def halo(setting: AttentionSetting, n_queries: int, n_keys: int) -> tuple[int, int] | None:
    """Returns how many keys of the devices before and after it a device with `n_queries` needs, of the `n_keys` of all
    devices; None if it needs those of more devices."""
    if setting.window is None or setting.dropout or n_keys != n_queries * setting.n_shards(1):
        return None
    before, after = _reach(setting)
    return (before, after) if before <= n_queries else None


def _reach(setting: AttentionSetting) -> tuple[int, int]:
    """Returns how many keys before and after a query its window may cover: even numbers, which cuDNN needs."""
    assert setting.window is not None
    n = setting.window - 1 + (setting.window - 1) % 2
    return n, 0 if setting.causal else n


@dataclass(frozen=True)
class Chunk:
    """Consecutive queries of a device, and the keys that they may attend to.

    **Arguments:**

    - `setting`: with the offset of the queries among these keys.
    - `rows`: which of the device's queries.
    - `columns`: which of the positions of all keys.
    - `first`: the position of the device's first key.
    """

    setting: AttentionSetting
    rows: slice
    columns: slice
    first: int

    def queries(self, x: Any, dim: int = 1) -> Any:
        return x[(slice(None),) * dim + (self.rows,)]

    @property
    def _own(self) -> slice:
        return slice(self.columns.start - self.first, self.columns.stop - self.first)

    def keys(self, x: Any) -> Any:
        return x[:, self._own]

    def add_keys(self, total: Any, x: Any) -> Any:
        """Adds an array of these keys to one of all keys of the device."""
        return total.at[:, self._own].add(x)

    def pad_columns(self, x: Any, n_keys: int) -> Any:
        """Returns `[..., S]` for all keys, with zeros for others."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(self.columns.start, n_keys - self.columns.stop)])

    def extras(self, extras: Operands) -> Operands:
        """Returns the optional operands of these queries and keys."""
        out = of_columns(extras, self.columns.start, self.columns.stop - self.columns.start)
        return map_queries(out, self.queries)


class Layout:
    """How an attention is computed over the devices that split its positions; the number of queries must divide."""

    def __init__(self, setting: AttentionSetting, q: Any, k: Any, extras: Operands):
        assert setting.split is not None
        rows, heads = setting.mesh_axes(q, k)
        if setting.dropout:  # a device draws which weights to drop for all heads
            heads = None
        self.setting, self.mesh = replace(setting, split=None), setting.split.mesh  # the setting of one device
        self.axis, self.n = setting.split.spec[1], setting.n_shards(1)  # what splits positions, and into how many parts
        self.n_queries, self.n_keys = q.shape[1], k.shape[1]  # of all devices
        axis, n_own = self.axis, self.n_queries // self.n
        # Whether each device computes two chunks. They have an even size, which cuDNN needs.
        self.is_zigzag = setting.causal and setting.window is None and not setting.dropout and n_own % 4 == 0
        # The keys that a device reads of those before and after it; None if it gathers all keys.
        self.halo = halo(setting, n_own, self.n_keys)
        # The specs of the operands. Optional operands are whole along keys.
        self.queries, self.log_sums = P(rows, axis, heads, None), P(rows, heads, axis)
        self.keys = P(rows, axis if self.n_keys % self.n == 0 else None, heads, None)

        def spec_of(name: str, x: Any) -> P:
            row = rows if x.shape[0] > 1 else None
            if name in ("bias", "mask"):
                return P(row, heads if x.shape[1] > 1 else None, axis if x.shape[2] > 1 else None, None)
            return P(row, axis) if name == "query_segments" else P(row)

        self.extras = {name: spec_of(name, x) for name, x in extras.items()}

    def axes_without(self, spec: P) -> tuple[str, ...]:
        """Returns the mesh axes that split queries, but not an array of this spec."""
        own = {axis for entry in spec for axis in axes_of(entry)}
        return tuple(axis for entry in self.queries for axis in axes_of(entry) if axis not in own)

    # --- on a device --------------------------------------------------------------------------------------------------

    @property
    def drops_keys(self) -> bool:
        """Whether a chunk reads only some keys. With dropout it reads all, so that the same weights are dropped."""
        return not self.setting.dropout and (self.setting.causal or self.setting.window is not None)

    @property
    def may_lack_keys(self) -> bool:
        """Whether a query may attend to the mean of all keys, most of which its device may not have."""
        has_mask = bool({"mask", "lengths", "query_segments"} & set(self.setting.names))
        return (has_mask and self.setting.in_ring) or (self.drops_keys and (has_mask or self.n_queries > self.n_keys))

    def on_each_device(self, fn: Callable[..., Any], *operands: Any) -> Any:
        """Calls `fn(index, *operands)` with this device's index along the axis, which is static."""
        if not self.drops_keys and not self.setting.dropout:  # all devices do the same
            return fn(0, *operands)
        return jax.lax.switch(jax.lax.axis_index(self.axis), [partial(fn, i) for i in range(self.n)], *operands)

    def chunks(self, device: int) -> list[Chunk]:
        """Returns the chunks of a device, in the order of `exchange`."""
        size = self.n_queries // self.n
        indices = [device]
        if self.is_zigzag:
            size //= 2
            pair = [device, 2 * self.n - 1 - device]
            indices = pair if device % 2 == 0 else pair[::-1]
        first = 0 if self.halo is None else device * size - self.halo[0]
        chunks = []
        for i, index in enumerate(indices):
            columns = self._columns(index * size, size)
            setting = replace(self.setting, offset=index * size - columns.start)
            chunks.append(Chunk(setting, slice(i * size, (i + 1) * size), columns, first))
        return chunks

    def _columns(self, start: int, size: int) -> slice:
        """Returns the positions of the keys that queries from `start` on may attend to; at least one."""
        before, after = self.n_keys + start, self.n_keys
        if self.drops_keys:
            if self.setting.window is not None:
                before, after = _reach(self.setting)
            after = 0 if self.setting.causal else after
        first = min(max(0, start - before), self.n_keys - 1)
        return slice(first, max(first + 1, min(self.n_keys, start + size + after)))

    # --- between devices ----------------------------------------------------------------------------------------------

    def fetch_keys(self, x: Any) -> Any:
        """Returns keys or values `[B, S, G, H]` of all devices, or of those before and after this one."""
        if self.keys[1] is None:
            return x
        if self.halo is None:
            return jax.lax.all_gather(x, self.axis, axis=1, tiled=True)
        before, after = self.halo
        parts = [x]
        if before:  # the first device gets zeros, which it does not read
            parts.insert(0, self._shift(x[:, x.shape[1] - before :], 1))
        if after:
            parts.append(self._shift(x[:, :after], -1))
        return jnp.concatenate(parts, 1)

    def return_keys(self, x: Any, like: Any) -> Any:
        """Sums gradients of the fetched keys on the devices that own them."""
        if self.keys[1] is None:
            return jax.lax.psum(x, self.axis)
        return jax.linear_transpose(self.fetch_keys, like)(x)[0]

    def sum_keys(self, x: Any) -> Any:
        """Sums over the devices that split the keys."""
        return x if self.keys[1] is None else jax.lax.psum(x, self.axis)

    def _shift(self, x: Any, by: int) -> Any:
        return jax.lax.ppermute(x, self.axis, [(i, i + by) for i in range(self.n) if 0 <= i + by < self.n])

    def exchange(self, x: Any, dim: int, *, back: bool = False) -> Any:
        """Exchanges the two halves of this device's queries for its chunks, or the chunks for the halves."""
        if not self.is_zigzag:
            return x
        halves: Sequence[Any] = jnp.split(x, 2, dim)
        received = []
        for odd, half in enumerate(halves):
            pairs = [(i, min(chunk := 2 * i + odd, 2 * self.n - 1 - chunk)) for i in range(self.n)]
            received.append(jax.lax.ppermute(half, self.axis, [(b, a) for a, b in pairs] if back else pairs))
        return jnp.concatenate(received, dim)

    def exchange_keys(self, *xs: Any, back: bool = False) -> list[Any]:
        """Exchanges keys and values like queries if they travel in a ring."""
        return [self.exchange(x, 1, back=back) if self.setting.in_ring else x for x in xs]
