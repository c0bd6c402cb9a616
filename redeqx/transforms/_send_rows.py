"""Sends rows to the devices of the model axis that hold their experts, and back, for any number of rows of each.

A device has room for as many rows as it has itself. If more are for its experts, they come in further passes: pass `p` takes
rows `p * n` to `(p + 1) * n` of those for each device. So no row is dropped, whatever the imbalance, and with even counts a
row is sent once. All devices know the numbers of rows of each other, `[devices, experts]`, and so where rows come from.

Where the compiler has a ragged all-to-all (NVIDIA GPUs and TPUs), each row is sent to its device alone. Simulated devices
gather the rows of all, and take theirs.

Sending there and sending back are each other's transposes, so each is the other's gradient.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from ..machine import MODEL


@dataclass(frozen=True)
class Sending:
    """How one device sends its rows, inside of `jax.shard_map`: `n` rows, and M devices of E experts in all. The platform of
    the mesh decides how."""

    mesh: Mesh
    n_experts: int

    @property
    def n_devices(self) -> int:
        return self.mesh.shape[MODEL]

    def count(self, experts: Array) -> Array:
        """Returns the numbers of rows that each device has for each expert, `[M, E]`, given the expert of each row, int32
        `[n]`; E for none."""
        return jax.lax.all_gather(jnp.bincount(experts, length=self.n_experts), MODEL)

    def sizes(self, counts: Array, n: int, number: Array) -> Array:
        """Returns the numbers of rows of its own experts that a device has in a pass, `[E / M]`."""
        return jnp.bincount(self._experts_in(counts, n, number), length=self.n_experts // self.n_devices)

    def there(self, rows: Array, experts: Array, counts: Array, number: Array) -> Array:
        """Returns the rows `[n, d]` of a device's own experts in a pass, sorted by expert; zeros after them."""
        return _send(self, False, rows, experts, counts, number)

    def back(self, rows: Array, experts: Array, counts: Array, number: Array) -> Array:
        """Returns the rows `[n, d]` of a device in their own order; zeros for those that are not sent in this pass."""
        return _send(self, True, rows, experts, counts, number)

    def _experts_in(self, counts: Array, n: int, number: Array) -> Array:
        """Returns the expert of each row that arrives in a pass, among the device's own; their number for none. Rows arrive
        by device, and then by expert."""
        n_own = self.n_experts // self.n_devices
        own = jax.lax.dynamic_slice_in_dim(counts, jax.lax.axis_index(MODEL) * n_own, n_own, 1)
        ends = jnp.cumsum(own.reshape(-1))
        place = jnp.searchsorted(ends, number * n + jnp.arange(n), side="right")
        return jnp.where(place < ends.size, place % n_own, n_own)

    def _offsets(self, counts: Array, n: int, number: Array) -> tuple[Array, Array, Array]:
        """Returns for each device and each other one, `[M, M]`: the first of its sorted rows that are sent in a pass, how
        many, and at which place they arrive."""
        by_device = counts.reshape(self.n_devices, self.n_devices, -1).sum(2)
        before = jnp.cumsum(by_device, 0) - by_device  # of those for a device, from other devices
        low, high = (jnp.clip(number * n + end - before, 0, by_device) for end in (0, n))
        first = jnp.cumsum(by_device, 1) - by_device
        return first + low, high - low, before + low - number * n


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(sending: Sending, is_back: bool, rows: Array, experts: Array, counts: Array, number: Array) -> Array:
    n = len(rows)
    first, sizes, places = sending._offsets(counts, n, number)
    by_expert, arrived = jnp.argsort(experts), jnp.argsort(sending._experts_in(counts, n, number))
    if is_back:
        return _exchange(sending, rows[jnp.argsort(arrived)], places.T, sizes.T, first.T)[jnp.argsort(by_expert)]
    return _exchange(sending, rows[by_expert], first, sizes, places)[arrived]


def _forward(sending: Sending, is_back: bool, rows: Array, *rest: Array) -> tuple[Array, Any]:
    return _send(sending, is_back, rows, *rest), rest


def _backward(sending: Sending, is_back: bool, rest: Any, gradient: Array) -> tuple[Any, ...]:
    return _send(sending, not is_back, gradient, *rest), None, None, None


_send.defvjp(_forward, _backward)


def _exchange(sending: Sending, rows: Array, first: Array, sizes: Array, places: Array) -> Array:
    """Returns the rows that other devices send to this one; zeros elsewhere. For each device and each other one, `[M, M]`,
    `first` is the first of its rows that it sends, `sizes` how many, and `places` where they arrive."""
    me = jax.lax.axis_index(MODEL)
    first, sizes, places = (x.astype(jnp.int32) for x in (first, sizes, places))
    if sending.mesh.devices.flat[0].platform != "cpu":
        return jax.lax.ragged_all_to_all(
            rows, jnp.zeros_like(rows), first[me], sizes[me], places[me], sizes[:, me], axis_name=MODEL
        )
    place = jnp.arange(len(rows)) - places[:, me, None]  # among the rows of each device, [M, n]
    is_sent = (place >= 0) & (place < sizes[:, me, None])
    every, index = jax.lax.all_gather(rows, MODEL), jnp.clip(first[:, me, None] + place, 0, len(rows) - 1)
    found = jax.vmap(lambda x, i: x[i])(every, index)
    return jnp.sum(jnp.where(is_sent[..., None], found, 0), 0, dtype=rows.dtype)
