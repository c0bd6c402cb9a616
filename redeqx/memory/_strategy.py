"""Strategies: how a run is distributed over devices, and what it recomputes or moves to save memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from ..data import BatchSize
from ..dims import RowUse
from ..machine import FSDP, MODEL, SEQUENCE, make_mesh, n_batch_shards

# What the loops of a loss recompute in the backward pass, from the most memory to the least.
REMATS = ("none", "matmuls", "full", "offload")
AUTO = "matmuls"  # the level of `"auto"`: on CPUs too, a step waits longer for memory than for elementwise work
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str) -> int | None:
    """Returns the bytes of a text such as `"9.5GiB"`; None for any other text."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMG]?I?B)?", text.upper())
    return None if found is None else int(float(found[1]) * _UNITS[found[2] or ""])


FIT = "fit"  # of a strategy in a search: as many bytes for what loops save as the device has left


def bytes_text(n_bytes: float) -> str:
    """Returns bytes as a level of `Compute.remat`, rounded down."""
    unit, size = next(
        ((unit, size) for unit, size in (("GiB", 2**30), ("MiB", 2**20)) if n_bytes >= 2 * size), ("KiB", 2**10)
    )
    return f"{max(0, int(10 * n_bytes / size)) / 10:g}{unit}"


def level_of(remat: str) -> str:
    """Returns a level of recomputation, which is `FIT` for bytes."""
    return FIT if bytes_of(remat) is not None else remat


_OPTIONS = ("remat", "unroll", "offload_opt_state", "split_residual")  # as for `Compute`


@dataclass(frozen=True)
class Strategy:
    """How a run is distributed; its updates do not depend on it."""

    n_model_shards: int
    n_fsdp_shards: int
    per_device_batch_size: int
    accumulate_grad_batches: int
    remat: str = "auto"
    unroll: bool = True
    offload_opt_state: bool = False
    n_sequence_shards: int = 1
    batch_size: int | None = None  # examples per update, if the script sets them instead of rows per device
    split_residual: bool | None = None

    @classmethod
    def of(cls, compute: Any, mesh: Mesh, rows: int, n_micro_batches: int, batch_size: int | None = None) -> "Strategy":
        """Returns the strategy of a `Compute` on a mesh, with so many rows on a device in a micro-batch."""
        options = {name: getattr(compute, name) for name in _OPTIONS}
        shards = {"n_sequence_shards": mesh.shape[SEQUENCE], "batch_size": batch_size}
        return cls(mesh.shape[MODEL], mesh.shape[FSDP], rows, n_micro_batches, **options, **shards)

    @property
    def shards(self) -> tuple[int, int]:
        return self.n_model_shards, self.n_fsdp_shards

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        return make_mesh(*self.shards, devices, self.n_sequence_shards)

    def size(self, mesh: Mesh) -> BatchSize:
        """Returns the sizes of an update's batch."""
        rows = self.per_device_batch_size * n_batch_shards(mesh)
        n = self.accumulate_grad_batches
        return BatchSize(self.batch_size or rows * n, rows, by_examples=self.batch_size is not None, asked=n)

    def applied(self, compute: Any) -> Any:
        """Returns the `Compute` with the options of this strategy."""
        return replace(compute, **{name: getattr(self, name) for name in _OPTIONS})

    def code(self) -> str:
        """Returns the arguments to write in a script."""
        options = [] if self.remat == "auto" else [f'remat="{self.remat}"']
        options += [] if self.unroll else ["unroll=False"]
        options += [] if self.split_residual is None else [f"split_residual={self.split_residual}"]
        options += ["offload_opt_state=True"] if self.offload_opt_state else []
        compute = f", compute=Compute({', '.join(options)})" if options else ""
        rows = f"per_device_batch_size={self.per_device_batch_size}"
        shards = f"n_model_shards={self.n_model_shards}, n_fsdp_shards={self.n_fsdp_shards}"
        shards += f", n_sequence_shards={self.n_sequence_shards}" if self.n_sequence_shards > 1 else ""
        lines = [
            f"Deployer({shards})",
            f"Trainer(accumulate_grad_batches={self.accumulate_grad_batches}{compute})",
            f"fit({rows if self.batch_size is None else f'batch_size={self.batch_size}'})",
        ]
        return "; ".join(lines)


@dataclass(frozen=True)
class Tried:
    """A strategy whose train step was compiled."""

    strategy: Strategy
    needs: int  # bytes on each device at the step's peak; a lower bound if the compiler refused the step
    held: int  # the part of these bytes that is in memory between steps
    fits: bool
    is_refused: bool = False
    # Bounds on the time of a step at published rates, with perfect overlap and without any; None if unknown.
    seconds: tuple[float, float] | None = None

    @property
    def cost(self) -> float:
        """The time by which strategies are compared: that of a step without overlap, or infinity if unknown."""
        return float("inf") if self.seconds is None else self.seconds[1]


def fastest(tried: Sequence[Tried]) -> Tried | None:
    """Returns the fastest strategy that fits (the first of equally fast ones), or None if none fits."""
    return min((each for each in tried if each.fits), key=lambda each: each.cost, default=None)


def may_cut(use: RowUse, *, has_state: bool) -> bool:
    """Whether smaller micro-batches make the same update, given what the loss does with rows: stateful layers would see
    other rows."""
    return use.is_exact and not use.draws and not has_state
