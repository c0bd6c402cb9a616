"""The plan: how every leaf of a model is split over the mesh, and the reasons.

Owns the specs on the mesh's axes and the reasons. `_dataflow` decides how a traced loss splits its weights, `_search` looks
for splits that cost less. Without a loss, leaves are split in storage alone. `_placement` puts a model on the mesh,
`transforms` applies a plan within a step.
"""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._quantised import quantised_leaves
from .._tree import PyTree, array_leaves, bytes_in_memory, merged, nearest, without_indices
from ..dims import UNKNOWN, RowUse
from ..machine import MODEL, STORAGE_AXES, axes_of, mesh_text, n_shards, sharding_of
from ..monitor import aligned, size_text
from ..storage import disk_path
from ..tracing import Trace, line_of, product_flops
from ._codes import by_blocks, expanded, of_whole_weights, unit_shape, with_whole_weights
from ._dataflow import values_by
from ._draw import Picture, draw
from ._flow import Split
from ._kinds import OTHER, Kind, kinds_of, of_loss
from ._layers import followers, stacked_dims
from ._overrides import Overrides, specs_of
from ._pass import EXPERTS
from ._positions import describe_positions
from ._search import order

# Leaves with fewer elements are not stored split: the latency of gathering one would outweigh the memory saved.
MIN_STORED_SIZE = 2**12
# A replicated leaf with this many elements, and at least 1 % of its model, is worth a warning.
LARGE_SIZE = 2**20
_N_SHOWN = 3


@dataclass(frozen=True)
class LeafPlan:
    """The split of one leaf: its spec on the mesh, with one entry for each dim, and the reason."""

    shape: tuple[int, ...]
    dtype: Any
    spec: P
    reason: str
    n_shards: int  # the number of distinct shards of the leaf
    is_read: bool | None = None  # whether the loss reads it; None if no loss was traced
    kind: Kind = OTHER
    is_stored_split: bool = False  # whether the model axis splits only its storage: layers compute with all of it

    @property
    def n_bytes(self) -> int:
        """The bytes of the unsharded leaf."""
        return bytes_in_memory(self.shape, self.dtype)


@dataclass(frozen=True)
class Plan:
    """The split of every array leaf of a model, by name.

    `plan["blocks.mlp.up.weight"]` is the `LeafPlan` of one leaf; `plan.explain()` returns a table with the reason for each.
    """

    mesh: Mesh
    leaves: Mapping[str, LeafPlan]
    warnings: tuple[str, ...] = ()
    is_traced: bool = False  # whether it follows from what a loss or a prediction computes
    # For each line of the loss with a matmul, the number of devices that repeat its work; None if no loss was traced.
    repeats: Mapping[str, float] | None = None
    row_use: RowUse = UNKNOWN  # what the loss does with the rows of its batch
    positions: tuple[str, ...] = ()  # how it combines positions: one sentence for each place; empty without a sequence axis
    attention: tuple[str, ...] = ()  # how a training step computes attention: fused or not, and how it is split

    def __getitem__(self, name: str) -> LeafPlan:
        if name not in self.leaves:
            raise KeyError(f"`{name}`: expected a leaf of the plan.{nearest(name, self.leaves)}")
        return self.leaves[name]

    @property
    def kinds_of_loss(self) -> dict[str, Kind]:
        """The kinds of the leaves, by name; empty if no loss was traced."""
        return {} if self.repeats is None else {name: leaf.kind for name, leaf in self.leaves.items()}

    def sharding(self, name: str) -> NamedSharding:
        """Returns the sharding in which a leaf is stored between steps."""
        return sharding_of(self[name].spec, self.mesh)

    def model_dim(self, name: str) -> int | None:
        """Returns the dim that the model axis splits while a layer computes with the leaf, or None."""
        return next((dim for dim, entry in enumerate(self.spec_in_use(name)) if MODEL in axes_of(entry)), None)

    def spec_in_use(self, name: str) -> P:
        """Returns the spec of a leaf while a layer computes with it: its spec without the axes that split only storage."""
        stored = {*STORAGE_AXES, MODEL} if self[name].is_stored_split else {*STORAGE_AXES}
        return P(*(tuple(axis for axis in axes_of(entry) if axis not in stored) or None for entry in self[name].spec))

    def on(self, mesh: Mesh) -> "Plan":
        """Returns the plan with the same specs on another mesh with the same axes."""
        leaves = {name: replace(leaf, n_shards=n_shards(leaf.spec, mesh)) for name, leaf in self.leaves.items()}
        return replace(self, mesh=mesh, leaves=leaves)

    def check(self, model: PyTree) -> None:
        """Raises ValueError if a leaf of the model is missing in this plan, or has another shape there."""
        for name, leaf in array_leaves(model).items():
            planned = self.leaves.get(name)
            if planned is None or planned.shape != tuple(leaf.shape):
                found = "no such leaf" if planned is None else f"shape {planned.shape}"
                raise ValueError(
                    f"`plan`: expected the plan of this model, whose `{name}` has shape {tuple(leaf.shape)}, got one with "
                    f"{found}. Make a new plan with `deployer.plan(model, loss_fn, batch)`."
                )

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.leaves.values())

    @property
    def n_bytes(self) -> int:
        """The bytes of the unsharded model."""
        return sum(leaf.n_bytes for leaf in self.leaves.values())

    @property
    def n_bytes_per_device(self) -> int:
        """The bytes of the model that one device holds."""
        return sum(leaf.n_bytes // leaf.n_shards for leaf in self.leaves.values())

    def summary(self) -> str:
        """Returns one line with the numbers of leaves that each axis splits and of replicated leaves. A spec may name an
        axis of size 1, which splits nothing."""
        axes = [{axis for entry in leaf.spec for axis in axes_of(entry)} for leaf in self.leaves.values()]
        if self.mesh.size == 1:
            return f"{len(axes)} leaves on one device"
        counts = {axis: sum(axis in used for used in axes) for axis in (MODEL, *STORAGE_AXES) if self.mesh.shape[axis] > 1}
        split = "".join(f"{n} split over {axis}, " for axis, n in counts.items())
        return f"{len(axes)} leaves: {split}{sum(used.isdisjoint(counts) for used in axes)} replicated"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Returns the table's rows: (path, shape, spec, reason). Leaves that differ only in a list index share a row."""
        rows = []
        for name, reason, alike in self._alike():
            leaf = self[alike[0]]
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            spec = ", ".join("+".join(axes_of(entry)) or "·" for entry in leaf.spec) or "·"
            rows.append((name + (f"  ({len(alike)}x)" if len(alike) > 1 else ""), shape, spec, reason))
        return rows

    def _alike(self) -> list[tuple[str, str, list[str]]]:
        """Groups leaves that differ only in a list index. Returns the path and the reason of each group, and its names."""
        found: dict[tuple[Any, ...], list[str]] = {}
        for name, leaf in self.leaves.items():
            pattern, reason = map(without_indices, (name, leaf.reason))
            found.setdefault((pattern, leaf.shape, leaf.spec, reason), []).append(name)
        return [(merged(names), merged([self[name].reason for name in names]), names) for names in found.values()]

    def explain(self) -> str:
        """Returns the plan as a table of path, shape, mesh axis of each dim and reason, followed by totals, what the loss
        does with rows, positions and attention, and warnings."""
        lines = aligned([("leaf", "shape", "split", "reason"), *self.rows()])
        lines.insert(1, "-" * max(map(len, lines)))
        lines += [self._totals(), *([] if self.row_use == UNKNOWN else [f"rows: {self.row_use.text}"])]
        lines += [f"{name}: {'; '.join(texts)}" for name in ("positions", "attention") if (texts := getattr(self, name))]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"Plan({self.summary()})"

    def _repr_html_(self) -> str:
        """Returns the table for notebooks."""
        return f"<pre>{escape(self.explain())}</pre>"

    def _totals(self) -> str:
        total = f"{self.n_parameters:,} parameters, {size_text(self.n_bytes)}"
        return f"mesh {mesh_text(self.mesh.shape)}: {total}, {size_text(self.n_bytes_per_device)} a device"

    def draw(self, path: str | Path, *, where: str = "*") -> Path:
        """Draws each array as a rectangle, divided where mesh axes split it, in a row for each layer. Returns the path.

        ```python
        deployer.plan(model, loss_fn, batch).draw("plan.svg", where="blocks.*")
        ```

        **Arguments:**

        - `path`: the file to write, in SVG.
        - `where`: a glob over the names of the leaves to draw.

        Raises ValueError for a glob that matches nothing or another suffix than `.svg`.
        """
        pictures = []
        for name, reason, alike in self._alike():
            if fnmatch.filter(alike, where):
                leaf, (*layer, module, own) = self[alike[0]], ["", *name.split(".")]
                own = f"{module}.{own}".strip(".") + (f"  ({len(alike)}x)" if len(alike) > 1 else "")
                why = re.split(r"[:; ]", reason)[0]  # its first word; fsdp may split what the model axis does not
                why = "" if why == "replicated" and any(leaf.spec) else why
                pictures.append(Picture(".".join(layer[1:]), own, leaf.shape, leaf.spec, why))
        if not pictures:
            raise ValueError(f"`where`: expected a path of the model, got {where!r}.{nearest(where, self.leaves)}")
        path = disk_path(path)
        draw(pictures, self.mesh.shape, path, title=self._totals())
        return path


def make_plan(
    model: PyTree,
    mesh: Mesh,
    overrides: Overrides | None = None,
    trace: Trace | None = None,
    experts: Mapping[str, int | None] = MappingProxyType({}),
) -> Plan:
    """Makes the plan of a model from the dataflow of a traced loss.

    Large leaves that the dataflow does not follow, and all without a trace, are stored split and gathered for use: users
    enlarge the model axis to save memory.

    **Arguments:**

    - `model`: an Equinox module of arrays or of their shapes (`eqx.filter_eval_shape`).
    - `overrides`: specs by path or by glob over paths (`"blocks.*.weight"`). Early patterns win. A spec has one mesh axis or
        None for each dim. None instead of a spec replicates the leaf.
    - `trace`: of a loss of this model, or of a prediction.
    - `experts`: the stacks of experts of grouped matmuls, with the dim that counts experts if tokens are sent to their
        devices, and None if each device has a part of every expert.

    Raises ValueError if an override matches no leaf, has more entries than the leaf has dims, names an unknown axis or one
    axis twice, or does not divide a dim evenly.
    """
    if quantised := quantised_leaves(model):
        model = with_whole_weights(model)
        trace = None if trace is None else of_whole_weights(trace, quantised)
    leaves, stacked = array_leaves(model), stacked_dims(model)
    splits: dict[str, Split] = {}
    if trace is not None:
        found = order(trace, mesh.shape[MODEL], followers(model))
        splits |= found.splits
        stacked |= {name: max(n, stacked[name]) for name, n in found.stacked.items() if name in stacked}
    splits |= {name: by_blocks(splits[name], of, mesh.shape[MODEL]) for name, of in quantised.items() if name in splits}
    for name, dim in experts.items():
        if dim is not None:
            splits[name] = Split(dim, f"{EXPERTS}, to which tokens are sent and back")
        elif name in splits and splits[name].dim is not None:
            reason = f"{splits[name].reason}; each token's outputs are added up over the model axis"
            splits[name] = replace(splits[name], reason=reason)
    kinds = kinds_of(model, trace)
    chosen = specs_of(overrides or {}, leaves, mesh)
    why = "no loss is known" if trace is None else "no operation on data splits it"
    unknown = Split(None, f"replicated: {why}", is_unknown=True)
    # Maps the id of each array to the leaf that decides the split of all leaves with this array: one with a split, if any.
    decides: dict[int, str] = {}
    for name in sorted(leaves, key=lambda name: splits.get(name, unknown).dim is None):
        if not isinstance(leaves[name], jax.ShapeDtypeStruct):  # the same shape object may stand for several arrays
            decides.setdefault(id(leaves[name]), name)
    planned: dict[str, LeafPlan] = {}
    for name, leaf in leaves.items():
        shape, twin = tuple(leaf.shape), decides.get(id(leaf), name)
        split, n_stacked, size = splits.get(twin, unknown), stacked[twin], math.prod(shape)
        units = unit_shape(quantised[name]) if name in quantised else shape
        is_stored = split.is_unknown and name not in chosen
        if is_stored:
            split = _in_storage(units, size, n_stacked, split, mesh.shape[MODEL])
        if twin != name:
            split = replace(split, reason=f"tied: the same array as `{twin}`")
        spec, reason = chosen[name] if name in chosen else _spec(units, size, n_stacked, split, mesh)
        n_parts, is_stored = n_shards(spec, mesh), is_stored and split.dim is not None and mesh.shape[MODEL] > 1
        planned[name] = LeafPlan(shape, leaf.dtype, spec, reason, n_parts, kind=kinds[name], is_stored_split=is_stored)
    planned = expanded(planned, quantised, mesh)
    warnings: list[str] = []
    if n_shards((MODEL, *STORAGE_AXES), mesh) > 1:
        replicated_leaves = {name: leaf for name, leaf in planned.items() if leaf.n_shards == 1 and name not in chosen}
        warnings = _why_replicated(replicated_leaves, sum(math.prod(leaf.shape) for leaf in planned.values()))
    return Plan(mesh, planned, tuple(warnings), is_traced=trace is not None)


def _why_replicated(leaves: Mapping[str, LeafPlan], total: int) -> list[str]:
    """Returns a warning for each large replicated leaf, and one for the others if they are a large part of the model."""
    sizes = {name: math.prod(leaf.shape) for name, leaf in leaves.items()}
    large = [name for name, size in sizes.items() if size >= max(LARGE_SIZE, total // 100)]
    found = [
        f"`{name}`: {leaves[name].shape}, {size_text(leaves[name].n_bytes)}, is replicated on every device "
        f"({leaves[name].reason}). Split it with `overrides={{'{name}': ...}}`."
        for name in large
    ]
    rest = Counter[str]()
    for name in (name for name in leaves if name not in large):
        pattern, reason = map(without_indices, (name, leaves[name].reason))
        rest[f"`{pattern}` ({reason})"] += sizes[name]
    if (small := rest.total()) >= max(LARGE_SIZE, total // 10):
        most = "; ".join(text for text, _ in rest.most_common(_N_SHOWN))
        found.append(
            f"{small / total:.0%} of the model ({small:,} of {total:,} parameters, in small leaves) is "
            f"replicated: {most}{'; and others' if len(rest) > _N_SHOWN else ''}. Pad their sizes, or split them with "
            "`overrides=`."
        )
    return found


def _in_storage(shape: tuple[int, ...], size: int, n_stacked: int, split: Split, n_shards: int) -> Split:
    """Returns the split, in storage alone, of a leaf that no split is known for: along the largest dim that divides. That is
    the dim of most weights' split by the loss, so that few move once it is known."""
    if size < MIN_STORED_SIZE:
        return split
    dim = _largest_dim(shape, range(n_stacked), n_shards)
    if dim is None:
        why = f"replicated: no dim of {' x '.join(map(str, shape[n_stacked:]))} divides over {n_shards} shards"
        return replace(split, reason=why)
    return replace(split, dim=dim, reason=f"stored split, gathered for use: {split.reason.removeprefix('replicated: ')}")


def _largest_dim(shape: tuple[int, ...], taken: Collection[int | None], n_shards: int) -> int | None:
    """Returns the largest dim that is not taken and divides evenly, the first of equal ones; None if there is none."""
    free = [dim for dim in range(len(shape)) if dim not in taken and shape[dim] and shape[dim] % n_shards == 0]
    return max(free, key=lambda dim: shape[dim], default=None)


def _spec(shape: tuple[int, ...], size: int, n_stacked: int, split: Split, mesh: Mesh) -> tuple[P, str]:
    """Returns the spec and reason of a leaf: the model axis on the dim of `split`, and the storage axes on the largest free
    dim."""
    axes: list[tuple[str, ...]] = [()] * len(shape)
    if split.dim is not None:
        axes[split.dim] = (MODEL,)
    storage = tuple(axis for axis in STORAGE_AXES if mesh.shape[axis] > 1)
    reason, n_storage = split.reason, n_shards(storage, mesh)
    if n_storage > 1 and size >= MIN_STORED_SIZE:
        dim = _largest_dim(shape, {*range(n_stacked), split.dim}, n_storage)
        if dim is None and split.dim is not None and shape[split.dim] % (mesh.shape[MODEL] * n_storage) == 0:
            dim = split.dim  # both axes on one dim, such as that of a long bias
        if dim is None:
            reason += f"; no free dim for {n_storage} {'+'.join(storage)} shards"
        else:
            axes[dim] += storage
            reason += f"; {'+'.join(storage)} on dim {dim}"
    return P(*(entry or None for entry in axes)), reason


def _repeats(products: Mapping[tuple[Any, Any], int | None], mesh: Mesh) -> dict[str, float]:
    """Returns, for each source line with products (`Pass.products`), the number of devices that repeat them, averaged by
    their FLOPs."""
    works: dict[str, list[float]] = {}
    unknown: set[str] = set()  # lines whose work differs in the compiled program, such as decompositions of weights
    for (eqn, at), n in products.items():
        flops = product_flops(eqn)
        # XLA expands grouped convolutions to ungrouped ones: their FLOPs differ from those of the trace on any device.
        if flops is None or eqn.params.get("feature_group_count", 1) * eqn.params.get("batch_group_count", 1) > 1:
            unknown.add(line_of(at))
            continue
        work = works.setdefault(line_of(at), [0.0, 0.0])
        work[0] += flops
        work[1] += flops * (mesh.size if n is None else n)
    return {line: repeated / flops for line, (flops, repeated) in works.items() if flops and line not in unknown}


def mark_read(plan: Plan, trace: Trace, row_use: RowUse = UNKNOWN, *, with_kinds: bool = False) -> Plan:
    """Adds to a plan what a traced loss does: a note on each leaf that it does not read, `Plan.repeats`, `Plan.row_use`
    (unless it is `UNKNOWN`), `Plan.positions`. With `with_kinds`, completes the kinds of a plan that was made without a
    loss."""
    reads, note = trace.reads(), "; the loss does not read it"
    kinds = {name: leaf.kind for name, leaf in plan.leaves.items()}
    kinds = of_loss(kinds, trace) if with_kinds else kinds
    marked = {
        name: replace(leaf, is_read=reads[name], kind=kinds[name], reason=leaf.reason + ("" if reads[name] else note))
        for name, leaf in plan.leaves.items()
    }
    splits = tuple(map(plan.model_dim, trace.names))
    repeats = _repeats(values_by(trace.closed, splits, plan.mesh.shape[MODEL]).products, plan.mesh)
    if row_use == UNKNOWN:
        row_use = plan.row_use
    row_use = replace(row_use, trace=None, constants=None)  # a plan can be copied, and keeps no arrays alive
    positions = describe_positions(trace, plan.mesh)
    return replace(plan, leaves=marked, repeats=repeats, row_use=row_use, positions=positions)


def check_plan(plan: Any) -> None:
    """Raises TypeError if this is no plan; None is allowed."""
    if plan is not None and not isinstance(plan, Plan):
        found = plan if isinstance(plan, str | float | int) else type(plan).__name__
        raise TypeError(f"`plan`: expected a Plan or None, got {found!r}. Pass `deployer.plan(model, loss_fn, batch)`.")
