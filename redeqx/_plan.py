"""The plan: how every leaf of a model is split over the mesh, and why.

Owns the walk (find the layers of a model by type, hand their sizes to the rules), the plan that comes out, and the placing
of a model by it. The rules themselves are `_rules`; using a plan inside a step is `_apply`.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import PyTree

from . import _rules
from ._dataflow import leaves_read
from ._mesh import FSDP, MODEL, replicated
from ._paths import is_array_like, named_leaves, nearest, render

# Below this many elements the fsdp axis leaves a leaf alone: gathering it would cost more in latency than it saves.
MIN_FSDP_SIZE = 2**12
# A leaf this large (and at least 1 % of its model) that no axis splits is worth a warning.
LARGE_SIZE = 2**20

Overrides = Mapping[str, P | Sequence[str | Sequence[str] | None] | None]


def _common(texts: Sequence[str]) -> str:
    """Texts with dotted names that differ in some indices, as one: `*` for those."""
    parts = zip(*(text.split(".") for text in texts), strict=True)
    return ".".join(alike[0] if len(set(alike)) == 1 else "*" for alike in parts)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class LeafPlan:
    """How one leaf is split: its spec on the mesh, one entry a dim, and the reason."""

    shape: tuple[int, ...]
    dtype: Any
    spec: P
    reason: str
    n_shards: int  # distinct pieces that the spec cuts the leaf into
    is_read: bool | None = None  # whether the loss reads it; None where no loss was traced

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """The split of every array leaf of a model, by name.

    `plan["blocks.mlp.up.weight"]` is the leaf's `LeafPlan`; `plan.explain()` the table with a reason for each.
    """

    mesh: Mesh
    leaves: Mapping[str, LeafPlan]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> LeafPlan:
        if name not in self.leaves:
            raise KeyError(f"`{name}`: expected a leaf of the plan.{nearest(name, self.leaves)}")
        return self.leaves[name]

    def sharding(self, name: str) -> NamedSharding:
        """Where the leaf of that name lives between steps."""
        return NamedSharding(self.mesh, self[name].spec)

    def spec_in_use(self, name: str) -> P:
        """The leaf's spec without the fsdp axis: how a layer computes with it."""
        return P(*(tuple(axis for axis in _axes(entry) if axis != FSDP) or None for entry in self[name].spec))

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.leaves.values())

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole model."""
        return sum(leaf.n_bytes for leaf in self.leaves.values())

    @property
    def n_bytes_per_device(self) -> int:
        """Bytes of the model that one device holds."""
        return sum(leaf.n_bytes // leaf.n_shards for leaf in self.leaves.values())

    def summary(self) -> str:
        """One line: how many leaves are split by which axis, and how many stay whole."""
        axes = [{axis for entry in leaf.spec for axis in _axes(entry)} for leaf in self.leaves.values()]
        counts = {axis: sum(axis in of for of in axes) for axis in (MODEL, FSDP) if self.mesh.shape[axis] > 1}
        split = ", ".join(f"{n} split over {axis}" for axis, n in counts.items()) or "one shard"
        return f"{len(axes)} leaves: {split}, {sum(not of for of in axes)} whole"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table's rows, (path, shape, spec, reason). Leaves that differ only in a list index share one row."""
        merged: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        for name, leaf in self.leaves.items():
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            spec = ", ".join("+".join(_axes(entry)) or "·" for entry in leaf.spec) or "·"
            pattern, reason = (re.sub(r"(?<=\.)\d+(?=\.)", "*", text) for text in (name, leaf.reason))
            merged.setdefault((pattern, shape, spec, reason), []).append((name, leaf.reason))
        rows = []
        for (_, shape, spec, _), alike in merged.items():
            name, reason = map(_common, zip(*alike, strict=True))
            rows.append((name + (f"  ({len(alike)}x)" if len(alike) > 1 else ""), shape, spec, reason))
        return rows

    def explain(self) -> str:
        """The plan as a table: path, shape, mesh axis of each dim, reason; then totals and warnings."""
        table = [("leaf", "shape", "split", "reason"), *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in table]
        lines.insert(1, "-" * max(map(len, lines)))
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        total = f"{self.n_parameters:,} parameters, {self.n_bytes / 2**20:,.1f} MiB"
        lines.append(f"mesh {mesh}: {total}, {self.n_bytes_per_device / 2**20:,.1f} MiB a device")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def make_plan(model: PyTree, mesh: Mesh, overrides: Overrides | None = None) -> Plan:
    """The plan of a model from the walk over its layers.

    **Arguments:**

    - `model`: an Equinox module, of arrays or of their shapes (`eqx.filter_eval_shape`).
    - `mesh`: as `make_mesh` gives it.
    - `overrides`: specs by path, or by glob over paths (`"blocks.*.weight"`); early patterns win. A spec is one mesh axis
        or None a dim; None alone keeps the leaf whole.

    Raises ValueError for an override that matches nothing, names an unknown axis or does not divide.
    """
    leaves = {name: leaf for name, leaf in named_leaves(model).items() if is_array_like(leaf)}
    splits, stacked = _walk(model, mesh.shape[MODEL])
    chosen = _resolve_overrides(overrides or {}, leaves, mesh)
    unknown = _rules.Split(None, "whole: no layer that the walk knows")
    decides: dict[int, str] = {}  # of leaves that are the same array, the one that the others follow: one that rules know
    for name in sorted(leaves, key=lambda name: name not in splits):
        if not isinstance(leaves[name], jax.ShapeDtypeStruct):  # one shape may stand for several arrays
            decides.setdefault(id(leaves[name]), name)
    planned: dict[str, LeafPlan] = {}
    warnings = []
    for name, leaf in leaves.items():
        shape, twin = tuple(leaf.shape), decides.get(id(leaf), name)
        split, n_stacked = splits.get(twin, unknown), stacked.get(twin, 0)
        if twin != name:
            split = _rules.tie(split, twin)
            warnings.append(
                f"`{name}`: the same array as `{twin}`, but two leaves of the tree: training will let them drift apart. "
                "Tie them with `eqx.nn.Shared`."
            )
        spec, reason = chosen[name] if name in chosen else _spec(shape, n_stacked, split, mesh)
        n_shards = math.prod(mesh.shape[axis] for entry in spec for axis in _axes(entry))
        planned[name] = LeafPlan(shape, leaf.dtype, spec, reason, n_shards)
    n_shards = mesh.shape[MODEL] * mesh.shape[FSDP]
    total = sum(math.prod(leaf.shape) for leaf in planned.values())
    for name, leaf in planned.items():
        size = math.prod(leaf.shape)
        if n_shards > 1 and leaf.n_shards == 1 and size >= max(LARGE_SIZE, total // 100) and name not in chosen:
            warnings.append(
                f"`{name}`: {leaf.shape}, {leaf.n_bytes / 2**20:,.1f} MiB, stays whole on every device ({leaf.reason}). "
                f"Split it with `overrides={{'{name}': ...}}`."
            )
    return Plan(mesh, planned, tuple(warnings))


def _spec(shape: tuple[int, ...], n_stacked: int, split: _rules.Split, mesh: Mesh) -> tuple[P, str]:
    """The spec and reason of a leaf: what the rules split over the model axis, the fsdp axis along the largest free dim."""
    axes: list[tuple[str, ...]] = [()] * len(shape)
    split_dim = None if split.dim is None else n_stacked + split.dim
    if split_dim is not None:
        axes[split_dim] = (MODEL,)
    reason, n_fsdp = split.reason, mesh.shape[FSDP]
    if n_fsdp > 1 and math.prod(shape) >= MIN_FSDP_SIZE:
        dim = _rules.largest_free_dim(shape, {*range(n_stacked), split_dim}, n_fsdp)
        if dim is None and split_dim is not None and shape[split_dim] % (mesh.shape[MODEL] * n_fsdp) == 0:
            dim = split_dim  # both axes on one dim, as for a long bias
        if dim is None:
            reason += f"; no free dim for {n_fsdp} fsdp shards"
        else:
            axes[dim] += (FSDP,)
            reason += f"; fsdp on dim {dim}"
    return P(*(entry or None for entry in axes)), reason


def mark_read(plan: Plan, model: PyTree, fn: Callable[..., Any], *args: PyTree) -> Plan:
    """The plan with a note on each leaf that `fn(model, *args)` does not read, by tracing it abstractly.

    **Arguments:**

    - `model`: of arrays or shapes; `fn` gets the same structure.
    - `args`: PyTrees of arrays or shapes.
    """
    arrays, static = eqx.partition(model, is_array_like)
    leaves, treedef = jax.tree.flatten(arrays)

    def of_leaves(leaves: list[Any], *args: PyTree) -> Any:
        return fn(eqx.combine(jax.tree.unflatten(treedef, leaves), static), *args)

    reads = dict(zip(named_leaves(arrays), leaves_read(of_leaves, leaves, *args), strict=True))
    note = "; the loss does not read it"
    marked = {
        name: replace(leaf, is_read=reads[name], reason=leaf.reason + ("" if reads[name] else note))
        for name, leaf in plan.leaves.items()
    }
    return replace(plan, leaves=marked)


def place(model: PyTree, plan: Plan) -> PyTree:
    """The model with every array on the plan's mesh, split by the plan's specs.

    Arrays that already live there are taken as they are (`deployer.init` made them); all others are copied, so that a step
    which donates its arguments never deletes the caller's own.
    """

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        sharding = plan.sharding(render(path))
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        # Copied first: of keys, and of arrays that were put on one of the mesh's devices by hand, `device_put` hands on the
        # caller's own buffer whatever `may_alias` says.
        copied = leaf.copy() if isinstance(leaf, jax.Array) else leaf
        return jax.device_put(copied, sharding, may_alias=False)

    return jtu.tree_map_with_path(put, model)


def shardings_like(state: PyTree, plan: Plan) -> PyTree:
    """Where the leaves of an optimizer state (or gradients, or averages) live: with the parameter whose name and shape they
    have, so `0.mu.head.weight` with `head.weight`; whole where there is none.

    **Arguments:**

    - `state`: a PyTree of arrays or shapes.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts = render(path).split(".")
        for i in range(len(parts)):
            planned = plan.leaves.get(".".join(parts[i:]))
            if planned is not None and planned.shape == tuple(leaf.shape):
                return NamedSharding(plan.mesh, planned.spec)
        return replicated(plan.mesh)

    return jtu.tree_map_with_path(of, state)


# --- the walk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """Where an attention class keeps its projections and its numbers of heads."""

    query: str
    key: str
    value: str
    output: str
    heads: str | Callable[[Any], int] | None
    kv_heads: str | Callable[[Any], int] | None
    by_name: bool = False

    def projections(self, module: Any) -> tuple[Any, Any, Any, Any]:
        return tuple(getattr(module, name) for name in self.names)  # pyright: ignore[reportReturnType]

    @property
    def names(self) -> tuple[str, str, str, str]:
        return self.query, self.key, self.value, self.output

    def n_heads(self, module: Any) -> tuple[int | None, int | None]:
        heads = _read(module, self.heads)
        kv_heads = _read(module, self.kv_heads)
        return heads, heads if kv_heads is None else kv_heads


def _read(module: Any, where: str | Callable[[Any], int] | None) -> int | None:
    if where is None:
        return None
    return where(module) if callable(where) else getattr(module, where)


_ATTENTIONS: dict[type, _Attention] = {
    eqx.nn.MultiheadAttention: _Attention("query_proj", "key_proj", "value_proj", "output_proj", "num_heads", None)
}

# The last resort, for classes that nobody registered: the names that published code gives to the four projections.
_QUERY_NAMES = ("query", "q", "q_proj", "query_proj", "wq", "to_q", "w_q", "linear_q")
_KEY_NAMES = ("key", "k", "k_proj", "key_proj", "wk", "to_k", "w_k", "linear_k")
_VALUE_NAMES = ("value", "v", "v_proj", "value_proj", "wv", "to_v", "w_v", "linear_v")
_OUTPUT_NAMES = ("output", "o", "out", "o_proj", "out_proj", "output_proj", "wo", "to_out", "w_o", "linear_o", "proj")
_HEADS_NAMES = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "h")
_KV_HEADS_NAMES = ("num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads")


def register_attention(
    cls: type,
    *,
    query: str,
    key: str,
    value: str,
    output: str,
    heads: str | Callable[[Any], int] | None = None,
    kv_heads: str | Callable[[Any], int] | None = None,
) -> None:
    """Tell the walk that `cls` is an attention, and which of its fields are the four projections.

    **Arguments:**

    - `cls`: the class of an Equinox module.
    - `query`, `key`, `value`, `output`: names of fields that hold an `eqx.nn.Linear` each.
    - `heads`, `kv_heads`: the field (or a function of the module) that says how many heads there are; a shard gets whole
        heads only. Without `heads` the usual names are tried (`num_heads`, `n_heads`, ...), without `kv_heads` too, and
        then there are as many as `heads`.

    Raises TypeError where `cls` is no `eqx.Module`, ValueError where it has no such field.
    """
    if not (isinstance(cls, type) and issubclass(cls, eqx.Module)):
        raise TypeError(f"`cls`: expected a subclass of eqx.Module, got {cls!r}. Register the class, not an instance.")
    fields = cls.__dataclass_fields__
    for role, name in (("query", query), ("key", key), ("value", value), ("output", output)):
        if name not in fields:
            raise ValueError(f"`{role}`: expected a field of {cls.__name__}, got {name!r}.{nearest(name, fields)}")
    heads = heads or next((name for name in _HEADS_NAMES if name in fields), None)
    kv_heads = kv_heads or next((name for name in _KV_HEADS_NAMES if name in fields), None)
    _ATTENTIONS[cls] = _Attention(query, key, value, output, heads, kv_heads)


def _attention_of(node: Any) -> _Attention | None:
    """How `node` is an attention: by its type, else by the names of its fields; None if it is none."""
    if not isinstance(node, eqx.Module):
        return None
    for cls in type(node).__mro__:
        if cls in _ATTENTIONS:
            return _ATTENTIONS[cls]
    fields = type(node).__dataclass_fields__

    def find(names: Sequence[str]) -> str | None:
        return next((name for name in names if isinstance(getattr(node, name, None), eqx.nn.Linear)), None)

    query, key, value, output = map(find, (_QUERY_NAMES, _KEY_NAMES, _VALUE_NAMES, _OUTPUT_NAMES))
    if query is None or key is None or value is None or output is None:
        return None
    heads = next((name for name in _HEADS_NAMES if isinstance(getattr(node, name, None), int)), None)
    kv_heads = next((name for name in _KV_HEADS_NAMES if name in fields), None)
    return _Attention(query, key, value, output, heads, kv_heads, by_name=True)


_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
_CONVS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_LAYERS = (eqx.nn.Linear, eqx.nn.Embedding, *_CONVS, *_NORMS)


def _n_stacked(layer: Any) -> int:
    """Over how many leading dims a known layer is stacked (`eqx.filter_vmap` over its constructor)."""
    weight = layer.weight
    if not is_array_like(weight):
        return 0
    if isinstance(layer, _CONVS):
        return len(weight.shape) - 2 - layer.num_spatial_dims
    if isinstance(layer, eqx.nn.LayerNorm | eqx.nn.RMSNorm):
        return len(weight.shape) - len(layer.shape)
    return len(weight.shape) - (1 if isinstance(layer, _NORMS) else 2)


def _walk(model: PyTree, n_shards: int) -> tuple[dict[str, _rules.Split], dict[str, int]]:
    """The split of each leaf of each known layer, and the number of stacked dims of each leaf, by name."""

    def stop(node: Any) -> bool:
        return isinstance(node, _LAYERS) or _attention_of(node) is not None

    nodes = jtu.tree_flatten_with_path(model, is_leaf=stop)[0]
    splits: dict[str, _rules.Split] = {}
    stacked: dict[str, int] = {}
    layers: dict[str, Any] = {}  # path -> Linear or Conv, whose weight rule 1 decides
    sequence: list[_rules.Layer | None] = []  # rule 1's layers in calling order
    siblings: dict[str, list[int]] = {}  # module -> positions of its fields in `sequence`

    def visit(path: tuple[Any, ...], node: Any) -> None:
        name = render(path)
        if isinstance(node, _LAYERS):
            for leaf_name in named_leaves(node):
                stacked[_within(name, leaf_name)] = max(_n_stacked(node), 0)
        if isinstance(node, eqx.nn.Linear | eqx.nn.Conv | eqx.nn.ConvTranspose):
            parent = render(path[:-1]) if path and isinstance(path[-1], jtu.GetAttrKey) else None
            if parent is not None:
                siblings.setdefault(parent, []).append(len(sequence))
            layers[name] = node
            sequence.append(_as_layer(name, node, parent))
        elif isinstance(node, eqx.nn.Embedding):
            sequence.append(None)
            splits[_within(name, "weight")] = _rules.embedding(node.num_embeddings, n_shards)
        elif isinstance(node, _NORMS):
            for leaf_name in named_leaves(node):
                splits[_within(name, leaf_name)] = _rules.Split(None, "whole: normalisation")
        else:
            attention = _attention_of(node)
            if attention is not None:
                sequence.append(None)
                visit_attention(path, node, attention)

    def visit_attention(path: tuple[Any, ...], node: Any, how: _Attention) -> None:
        roles = {}
        for role, linear in zip(how.names, how.projections(node), strict=True):
            role_path = (*path, jtu.GetAttrKey(role))
            if not isinstance(linear, eqx.nn.Linear):
                raise TypeError(
                    f"`{render(role_path)}`: expected an eqx.nn.Linear, as registered for {type(node).__name__}, "
                    f"got {type(linear).__name__}. Register the field that holds the layer."
                )
            roles[role] = _as_layer(render(role_path), linear, None)
            layers[render(role_path)] = linear
            for leaf_name in named_leaves(linear):
                stacked[f"{render(role_path)}.{leaf_name}"] = max(_n_stacked(linear), 0)
        heads, kv_heads = how.n_heads(node)
        found = _rules.attention(*roles.values(), n_shards=n_shards, heads=heads, kv_heads=kv_heads)
        note = f"; recognised by the names of its fields, register {type(node).__name__} to be sure" if how.by_name else ""
        for name, split in found.items():
            _set_layer(splits, name, _rules.Split(split.dim, split.reason + note), layers[name])
        rest = [(key, child) for key, child in _children(node) if render((key,)) not in roles]
        for key, child in rest:
            for sub_path, leaf in jtu.tree_flatten_with_path(child, is_leaf=stop)[0]:
                visit((*path, key, *sub_path), leaf)

    for path, node in nodes:
        visit(path, node)
    for positions in siblings.values():
        ordered = _rules.in_calling_order([layer for i in positions if (layer := sequence[i]) is not None])
        for position, layer in zip(positions, ordered, strict=True):
            sequence[position] = layer
    for name, split in _rules.alternate(sequence, n_shards).items():
        _set_layer(splits, name, split, layers[name])
    _inherit_stacks(model, stacked)
    return splits, stacked


def _children(node: eqx.Module) -> list[tuple[Any, Any]]:
    """The direct children of a module with their keys, leaves unflattened."""
    flat = jtu.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return [(path[0], child) for path, child in flat]


def _as_layer(name: str, node: Any, parent: str | None) -> _rules.Layer:
    if isinstance(node, eqx.nn.Linear):
        sizes = (1 if size == "scalar" else int(size) for size in (node.in_features, node.out_features))
        return _rules.Layer(name, *sizes, parent=parent)
    return _rules.Layer(name, node.in_channels, node.out_channels, parent, node.groups)


def _set_layer(splits: dict[str, _rules.Split], name: str, split: _rules.Split, node: Any) -> None:
    splits[_within(name, "weight")] = split
    if getattr(node, "bias", None) is not None:
        splits[_within(name, "bias")] = _rules.bias(split)


def _within(module: str, leaf: str) -> str:
    """The name of a module's leaf; a model that is one layer has no name of its own."""
    return leaf if module == render(()) else f"{module}.{leaf}"


def _inherit_stacks(model: PyTree, stacked: dict[str, int]) -> None:
    """Leaves of no known layer are stacked as the known layers beside them are: those of the nearest module around."""
    leaves = {name: leaf for name, leaf in named_leaves(model).items() if is_array_like(leaf)}
    for name, leaf in leaves.items():
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if name in stacked:
                break
            module = ".".join(parts[:depth]) + "."
            known = [n for other, n in stacked.items() if other.startswith(module) and n <= len(leaf.shape)]
            if known:
                stacked[name] = min(known)


def _resolve_overrides(overrides: Overrides, leaves: Mapping[str, Any], mesh: Mesh) -> dict[str, tuple[P, str]]:
    """The spec and reason of each leaf that an override names, checked."""
    chosen: dict[str, tuple[P, str]] = {}
    for pattern, given in overrides.items():
        matched = fnmatch.filter(leaves, pattern)
        if not matched:
            raise ValueError(f"`overrides[{pattern!r}]`: expected a path of the model.{nearest(pattern, leaves)}")
        spec = P() if given is None else P(*given)
        for name in matched:
            if name in chosen:
                continue
            shape = tuple(leaves[name].shape)
            if len(spec) > len(shape):
                raise ValueError(
                    f"`overrides[{pattern!r}]`: expected at most {len(shape)} entries for `{name}` of shape {shape}, "
                    f"got {tuple(spec)}. Give one mesh axis or None a dim."
                )
            named = [axis for entry in spec for axis in _axes(entry)]
            if len(set(named)) < len(named):
                raise ValueError(
                    f"`overrides[{pattern!r}]`: expected each mesh axis once, got {tuple(spec)}. Split one dim by it."
                )
            for dim, entry in enumerate(spec):
                for axis in _axes(entry):
                    if axis not in mesh.shape:
                        raise ValueError(
                            f"`overrides[{pattern!r}]`: expected mesh axes among {tuple(mesh.shape)}, got {axis!r}."
                            f"{nearest(axis, mesh.shape)}"
                        )
                n = int(np.prod([mesh.shape[axis] for axis in _axes(entry)]))
                if shape[dim] % n:
                    raise ValueError(
                        f"`overrides[{pattern!r}]`: expected dim {dim} of `{name}` to divide over {n} shards, got "
                        f"{shape}. Choose another dim, or None."
                    )
            full = P(*spec, *[None] * (len(shape) - len(spec)))
            chosen[name] = (full, f"overridden by {pattern!r}")
    return chosen
