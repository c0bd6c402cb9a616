"""Rows of a batch: their number, their split into micro-batches that fit the mesh, and their placement.

`_examples` owns the contents and the order of rows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..dims import UNKNOWN, RowUse
from ..errors import check_count
from ..machine import MODEL, SEQUENCE, n_batch_shards, replicated, split_rows


@dataclass(frozen=True)
class Group:
    """`n` micro-batches of `rows` rows each."""

    n: int
    rows: int

    @property
    def size(self) -> int:
        """The number of rows of all micro-batches."""
        return self.n * self.rows

    def n_copies(self, mesh: Mesh) -> int:
        """Returns the number of batch shards that compute each row: all of them, if the rows do not divide over them."""
        n_shards = n_batch_shards(mesh)
        return n_shards if self.rows % n_shards else 1


@dataclass(frozen=True)
class BatchSize:
    """The examples of an update, and the rows of each of its micro-batches, over the whole mesh."""

    examples: int
    micro_batch: int
    by_examples: bool = False  # whether the user gave `batch_size`
    asked: int = 1  # micro-batches per update, by `accumulate_grad_batches`
    pads: bool = False  # whether a step is one full micro-batch, whose rows after the examples repeat the last one

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        per_device_batch_size: int | None,
        batch_size: int | None,
        n_micro_batches: int = 1,
        *,
        prefix: str = "",
        n_devices: int | None = None,
    ) -> "BatchSize":
        """Returns the sizes for one of the user's two arguments: rows per device, or examples per update.

        With `batch_size` the rows of a micro-batch are a multiple of `n_devices`, by default the mesh's, over the sequence
        shards, which need no rows of their own. So the split does not depend on the other axes, nor on the number of
        devices if that divides `batch_size / n_micro_batches`.

        Raises ValueError unless exactly one of the two sizes is given, and for a size below 1. `prefix` is that of the
        arguments' names.
        """
        if (per_device_batch_size is None) == (batch_size is None):
            given = per_device_batch_size is not None
            found = f"{per_device_batch_size} and {batch_size}" if given else "neither"
            remedy = " alone: it sets the rows per device" if given else ", examples per update"
            raise ValueError(
                f"`{prefix}per_device_batch_size`, `{prefix}batch_size`: expected one of the two, got {found}. "
                f"Pass `{prefix}batch_size`{remedy}."
            )
        n_devices = n_devices or mesh.size
        if batch_size is not None:
            check_count(batch_size, f"{prefix}batch_size")
            least = n_devices // mesh.shape[SEQUENCE]
            rows = -(-batch_size // n_micro_batches) // least * least
            return cls(batch_size, rows or least, by_examples=True, asked=n_micro_batches)
        check_count(per_device_batch_size, f"{prefix}per_device_batch_size")
        assert per_device_batch_size is not None
        rows = per_device_batch_size * (n_devices // (mesh.shape[SEQUENCE] * mesh.shape[MODEL]))
        return cls(rows * n_micro_batches, rows, asked=n_micro_batches)

    def micro_batch_for(self, use: RowUse, mesh: Mesh) -> int:
        """Returns the rows of a full micro-batch for a loss that uses rows in this way.

        A loss that mixes rows, or may, or changes the model's state, gets no more micro-batches than the user asked for.
        Groups of rows are not divided; if a micro-batch has enough of them, each shard of the batch gets whole groups, else
        the micro-batch may be larger.
        """
        if use.stays_whole:
            return -(-self.examples // (self.asked * use.group)) * use.group
        if use.group == 1:
            return self.micro_batch
        n_shards, least = n_batch_shards(mesh), math.lcm(use.group, n_batch_shards(mesh))
        unit = use.group * n_shards if use.group * n_shards <= self.micro_batch else least
        return max(self.micro_batch // unit * unit, least)

    def cut(self, n_rows: int, use: RowUse, mesh: Mesh) -> tuple[Group, ...]:
        """Splits the rows of a step into micro-batches: full ones, then the remaining rows that divide over the devices,
        then the few rows that do not. Every device computes the latter, in micro-batches with at most as many rows as it has
        of a full one. A remainder no larger than this is not split further: the loss is compiled once for each group. (XLA
        can also shard uneven rows, but then computes a wrong gradient of an embedding: by 3 % for 11 rows on 8 CPU devices,
        jaxlib 0.10.2.) Groups of rows that the loss takes stay together. For a loss that needs all rows, the remainder is
        one micro-batch, whether or not it divides.

        Raises ValueError for rows that do not divide into the groups of rows that the loss takes.
        """
        if self.pads:
            return (Group(1, self.micro_batch),)
        unit, n_devices = use.group, mesh.size
        if n_rows % unit:
            line = f" ({use.line})" if use.line else ""
            raise ValueError(
                f"`batch_size`: expected steps of a multiple of {unit} examples, since `loss_fn` takes {unit} "
                f"rows at a time{line}, got a step of {n_rows}, with {self.examples} examples a full step. Choose the batch "
                f"size and the number of examples as multiples of {unit}, or drop the remainder."
            )
        micro_batch = self.micro_batch_for(use, mesh)
        n_full, rest = divmod(n_rows, micro_batch)
        rows_a_device = max(micro_batch // n_devices, 1)
        tail = rest if rest <= rows_a_device else rest % math.lcm(unit, n_devices)
        tail = 0 if use.stays_whole or rest % n_devices == 0 else tail
        most = min(rows_a_device, tail)
        rows = max((size for size in range(unit, most + 1, unit) if tail % size == 0), default=unit)
        groups = (Group(n_full, micro_batch), Group(1, rest - tail), Group(tail // rows, rows))
        return tuple(group for group in groups if group.n and group.rows)

    def evenly(self, n: int | None, n_devices: int, use: RowUse = UNKNOWN) -> "BatchSize":
        """Returns the sizes for an evaluation of `n` examples: the largest micro-batch, at least half of this size, that
        leaves no remainder, for which another program would be compiled; this size if there is none, and for a loss whose
        value depends on it."""
        if n is None or n <= self.micro_batch or not (use.is_additive or use == UNKNOWN):
            return self
        smallest, unit = -(-self.micro_batch // 2), math.lcm(n_devices, use.group)
        sizes = (rows for rows in range(self.micro_batch // unit * unit, smallest - 1, -unit) if n % rows == 0)
        rows = self.micro_batch if n % self.micro_batch == 0 else next(sizes, self.micro_batch)
        return BatchSize(rows, rows)


def group_sharding(group: Group, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of leaves `[n, rows, ...]`: rows over the batch axes if they divide, else replicated."""
    return split_rows(mesh, dim=1) if group.n_copies(mesh) == 1 else replicated(mesh)


def local_rows(cut: Iterable[Group], mesh: Mesh) -> np.ndarray:
    """Returns the rows of a step that this process's devices need, in order: all rows if it has all devices."""
    cut = tuple(cut)
    if not mesh.is_multi_process:
        return np.arange(sum(group.size for group in cut))
    needed, start = [], 0
    for group in cut:
        rows = start + np.arange(group.size).reshape(group.n, group.rows)
        indices = group_sharding(group, mesh).addressable_devices_indices_map(rows.shape).values()
        needed += [rows[index].reshape(-1) for index in indices]
        start += rows.size
    return np.unique(np.concatenate(needed))


def place_batch(
    batch: PyTree[np.ndarray],
    cut: Iterable[Group],
    mesh: Mesh,
    rows: np.ndarray,
    n_micro_batches: int,
) -> tuple[PyTree[jax.Array], ...]:
    """Places the batch on the mesh: for each group a PyTree with the same structure and leaves `[n, rows, ...]`.

    `rows` are those of the step that the batch contains, from `local_rows`; the last one stands for those after it. The
    first group has at least `n_micro_batches`; its last one is repeated.
    """
    placed = []
    start = 0
    for i, group in enumerate(cut):
        places = np.minimum(start + np.arange(group.size).reshape(group.n, group.rows), rows[-1])
        start += places.size
        if i == 0 and group.n < n_micro_batches:
            places = np.concatenate([places, np.repeat(places[-1:], n_micro_batches - group.n, axis=0)])
        placed.append(place_rows(batch, places, group_sharding(group, mesh), rows))
    return tuple(placed)


def place_rows(
    batch: PyTree[np.ndarray], places: np.ndarray, sharding: NamedSharding, rows: np.ndarray
) -> PyTree[jax.Array]:
    """Places rows of the batch on the mesh: those with the numbers in `places`, whose dims are the leading dims of the
    result. `rows` is as for `place_batch`."""
    if sharding.is_fully_addressable:
        first, last = int(places.flat[0]), int(places.flat[-1])
        # Contiguous rows are taken as a view.
        taken = slice(first, last + 1) if last + 1 - first == places.size else places.reshape(-1)
        leaves = [x[taken].reshape(*places.shape, *x.shape[1:]) for x in jax.tree.leaves(batch)]
        return jax.tree.unflatten(jax.tree.structure(batch), jax.device_put(leaves, sharding))

    def put(x: np.ndarray) -> jax.Array:
        def piece(index: Any) -> np.ndarray:
            return x[np.searchsorted(rows, places[index[: places.ndim]])]

        return jax.make_array_from_callback((*places.shape, *x.shape[1:]), sharding, piece)

    return jax.tree.map(put, batch)
