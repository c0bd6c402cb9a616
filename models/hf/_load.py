"""Loads a folder's tensors into a model's leaves. Each device reads only its own slices.

A family's weight map (`_weight_map.py`) defines which tensor holds which leaves.
"""

import fnmatch
import functools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from redeqx import Deployer, Plan
from redeqx._origins import set_origin
from redeqx._rounding import at_least_float32
from redeqx._tree import is_array_like, listed, map_named, named_leaves, nearest, wide_leaves
from redeqx.checkpoint import INDEX, TensorReader, read_sharded
from redeqx.errors import brief_name, check_float_dtype, wrong
from redeqx.machine import as_zeros, dry
from redeqx.storage import Location, View

from ._files import CONFIG, read_config, weights_of
from ._packed import Source, unpacked
from ._split_experts import split_experts
from ._weight_map import WeightMap


def load(
    shapes: Any,
    weight_map: WeightMap,
    folder: Location,
    *,
    stem: str,
    dtype: Any = None,
    deployer: Deployer | None = None,
    plan: Plan | None = None,
    config_path: Location | None = None,
) -> Any:
    """Returns a model whose arrays are read from a folder.

    **Arguments:**

    - `shapes`: the model, with shapes as leaves.
    - `weight_map`: which tensor holds which leaves.
    - `stem`: the start of the weight files' names.
    - `dtype`, `deployer`, `plan`: as for `from_pretrained`.
    - `config_path`: the file that describes the tensors, for errors; None for a module of the user's own.
    """
    check_float_dtype(dtype, "dtype", "Pass None to keep the file's.")
    dtype = None if dtype is None else jnp.dtype(dtype)
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise wrong("dtype", "a dtype of JAX's 32-bit mode", dtype, "Set `jax_enable_x64`, or pass another.")
    if plan is not None and deployer is None:
        raise wrong("deployer", "one with `plan`", "None", "Pass the deployer that made the plan.")
    origin = os.path.abspath(folder) if isinstance(folder, Path) else str(folder)

    def zeros(shapes: Any) -> Any:
        model = as_zeros(shapes)
        for leaf in jax.tree.leaves(model):
            set_origin(leaf, origin)
        return model

    wanted = {name: leaf for name, leaf in named_leaves(shapes).items() if is_array_like(leaf)}
    source = weights_of(folder, stem)
    if source is None:
        fields = read_config(folder)
        kept = jnp.dtype(dtype or fields.get("dtype") or fields.get("torch_dtype") or "float32")
        wide = _wide(shapes, dtype)
        return zeros(map_named(lambda name, leaf: _cast(leaf, at_least_float32(kept) if name in wide else kept), shapes))
    _check_index(source, folder / f"{stem}{INDEX}")
    disk_names = {disk for name in weight_map.tensors for disk in name.on_disk}
    source = unpacked(source, folder, disk_names, dtype)
    source = split_experts(source, weight_map)
    tensors = _match(source, weight_map, wanted, config_path)
    if dtype is None:
        _check_dtypes(source, weight_map)
    held = {leaf: [parts[i] for parts in stored] for leaves, stored in tensors.items() for i, leaf in enumerate(leaves)}
    wide = _wide(shapes, dtype)
    dtypes = {leaf: _dtype(parts, jnp.dtype("float32") if leaf in wide else dtype) for leaf, parts in held.items()}
    shapes = map_named(
        lambda name, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[name]) if is_array_like(leaf) else leaf, shapes
    )
    if dry() is not None:
        return zeros(shapes)
    if deployer is not None and plan is None:
        plan = deployer.plan(shapes)
    stacked = {leaf: name.stacked for name in weight_map.tensors for leaf in name.leaves}

    def read(name: str, leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        sharding = SingleDeviceSharding(jax.local_devices()[0]) if plan is None else plan.sharding(name)
        dims = stacked[name]
        array = _read_stack(held[name], leaf, sharding, dims) if dims else read_sharded(held[name][0], leaf, sharding)
        set_origin(array, origin)
        return array

    return map_named(read, shapes)


def _check_index(source: TensorReader, index: Location) -> None:
    """Raises ValueError if a folder has both a single file, which is read, and shards with other contents."""
    if source.path == index or not index.is_file():
        return
    try:
        shards = TensorReader(index)
    except ValueError:  # the remains of shards that were removed
        return
    names = {*source.names(), *shards.names()}
    for name in sorted(names) if {*shards.paths} != {source.path} else ():
        views = [tensors.view(name) if name in tensors else None for tensors in (source, shards)]
        a, b = views
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or not _equal(a, b):
            found = ["none" if view is None else f"{view.dtype} {view.shape}" for view in views]
            raise ValueError(
                f"`{index}`: expected shards with the same contents as `{source.path.name}` next to it, got another "
                f"`{brief_name(name)}` ({found[0]} there, {found[1]} in the shards). Remove the index, or that file."
            )


def _check_dtypes(source: TensorReader | Source, weight_map: WeightMap) -> None:
    """Raises ValueError for floats of a dtype that a model cannot compute with unless they are cast."""
    wanted = {disk for name in weight_map.tensors for disk in name.on_disk}
    kept: dict[str, str] = {}
    for name in source.names():
        if weight_map.current(name) in wanted:
            kept.setdefault(str(source.view(name).dtype), name)
    narrow = next((dtype for dtype in kept if dtype.startswith("float8")), None)
    if narrow is not None:
        raise ValueError(
            f"`{source.path}`: `{brief_name(kept[narrow])}`: expected floats of 16 bits or more, got {narrow}. Pass the "
            "`dtype=` to cast them to, such as `jnp.bfloat16`."
        )
    if {"float16", "bfloat16"} <= kept.keys():
        raise ValueError(
            f"`{source.path}`: expected one kind of 16-bit floats, got float16 in `{brief_name(kept['float16'])}` and "
            f"bfloat16 in `{brief_name(kept['bfloat16'])}`. Pass the `dtype=` to cast both to; `jnp.float32` loses nothing."
        )


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _cast(leaf: Any, dtype: Any) -> Any:
    """Returns the same shape, with `dtype` if it is floating-point; other dtypes are unchanged."""
    if not is_array_like(leaf) or not _is_float(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _dtype(parts: Sequence[View], dtype: Any) -> Any:
    """Returns the dtype of a leaf: `dtype` for floats if it is given, otherwise the file's (the widest if layers differ)."""
    if dtype is not None and all(jnp.issubdtype(part.dtype, jnp.floating) for part in parts):
        return dtype
    return functools.reduce(jnp.promote_types, [part.dtype for part in parts])


def _wide(shapes: Any, dtype: Any) -> Collection[str]:
    """Returns the leaves that are not cast to `dtype`, as in transformers: at least float32."""
    return () if dtype is None else wide_leaves(shapes, dtype)


def _read_stack(
    views: Sequence[View], leaf: jax.ShapeDtypeStruct, sharding: Sharding, stacked: tuple[int, ...]
) -> jax.Array:
    """Reads a stacked leaf tensor by tensor, so that the host holds only one at a time.

    **Arguments:**

    - `stacked`: the leading dims that the tensors do not have.
    """
    n = len(stacked)
    one, whole = sharding, sharding
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
        one = NamedSharding(sharding.mesh, P(*spec[n:]))
        whole = NamedSharding(sharding.mesh, P(*[None] * n, *spec[n:]))
    stack = jnp.zeros(leaf.shape, leaf.dtype, device=whole)
    layer = jax.ShapeDtypeStruct(leaf.shape[n:], leaf.dtype)
    for index, view in zip(np.ndindex(*stacked), views, strict=True):
        stack = _put(stack, read_sharded(view, layer, one), tuple(map(np.int32, index)), whole)
        stack.block_until_ready()  # otherwise the host runs ahead and holds all pending layers
    return jax.device_put(stack, sharding)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(stack: jax.Array, layer: jax.Array, index: tuple[Any, ...], sharding: Sharding) -> jax.Array:
    start = (*index, *[np.int32(0)] * layer.ndim)
    stack = jax.lax.dynamic_update_slice(stack, layer[(None,) * len(index)], start)
    return jax.lax.with_sharding_constraint(stack, sharding) if isinstance(sharding, NamedSharding) else stack


def _match(
    source: TensorReader | Source, weight_map: WeightMap, wanted: Mapping[str, Any], config_path: Location | None
) -> dict[tuple[str, ...], list[Sequence[View]]]:
    """Views of each stored tensor's leaves, by their paths, one sequence for each layer, after a check of names, shapes and
    dtypes.

    Raises ValueError that lists the tensors that are missing, unknown, of another shape, or tied but different.
    """
    file_names: dict[str, str] = {}
    problems, as_described = [], ", as in the model" if config_path is None else f", as in `{config_path.name}`"
    for name in source.names():
        current = weight_map.current(name)
        if current in file_names:
            one, other, both = map(brief_name, (current, file_names[current], name))
            problems.append(f"`{both}`: expected one tensor `{one}`, got `{other}` too.")
        file_names[current] = name
    needed = {disk for name in weight_map.tensors for disk in name.on_disk}
    extra = [
        name
        for name in file_names
        if name not in needed
        and name not in weight_map.copies
        and not any(fnmatch.fnmatchcase(name, g) for g in weight_map.ignored)
    ]
    found: dict[tuple[str, ...], list[Sequence[View]]] = {}
    for name in weight_map.tensors:
        found[name.leaves] = []
        shapes = [wanted[leaf].shape[len(name.stacked) :] for leaf in name.leaves]
        for disk in name.on_disk:
            if disk not in file_names and disk in weight_map.zeros and file_names:
                dtype = source.view(next(iter(file_names.values()))).dtype  # so that all tensors keep the same dtype
                found[name.leaves].append([np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes])
                continue
            if disk not in file_names:
                problems.append(f"`{disk}`: expected for `{name.leaves[0]}`, got none.{nearest(disk, extra)}")
                continue
            tensor = source.view(file_names[disk])
            # Splitting into equal parts would drop a remainder, and fails for a scalar.
            parts = name.load(tensor) if tensor.size == sum(map(math.prod, shapes)) else ()
            if [part.shape for part in parts] != [tuple(shape) for shape in shapes]:
                dummies = [np.broadcast_to(np.int8(0), shape) for shape in shapes]
                expected = name.save(*dummies).shape
                problems.append(f"`{disk}`: expected {expected}{as_described}, got {tensor.shape}.")
            elif not all(_is_float(tensor) == _is_float(wanted[leaf]) for leaf in name.leaves):
                problems.append(f"`{disk}`: expected {wanted[name.leaves[0]].dtype} or a similar dtype, got {tensor.dtype}.")
            found[name.leaves].append(parts)
    missing = [disk for disk in needed if disk not in file_names]
    for name in extra:
        shape = source.view(file_names[name]).shape
        there = brief_name(file_names[name])
        problems.append(f"`{there}`: expected no tensor of this name, got {shape}.{nearest(brief_name(name), missing)}")
    remedy = "This family always ties them: write the model as your own module."
    if weight_map.untied_by is not None:
        remedy = f"Set `{weight_map.untied_by}` to false there."
    for copy, original in weight_map.copies.items():
        if copy in file_names and original in file_names:
            a, b = source.view(file_names[copy]), source.view(file_names[original])
            if a.shape != b.shape or not _equal(a, b):
                problems.append(
                    f"`{copy}`: expected the same values as `{original}`, to which `{CONFIG}` ties it, got others. {remedy}"
                )
    if problems:
        differing = "\n  - ".join(listed(problems))
        what, remedy = (
            f"that `{config_path}` describes",
            "Load the weights with their own config, and the class that they were saved from.",
        )
        if config_path is None:
            what, remedy = "of the model's leaves", "Name them in `names`; `compare_weights` lists what differs."
        raise ValueError(
            f"`{source.path}`: expected the tensors {what}, got {len(problems)} that differ:\n  - {differing}\n{remedy}"
        )
    return found


def is_tied_on_disk(folder: Location, stem: str, copy: str, original: str, *, default: bool) -> bool:
    """Returns whether a tensor of a folder is absent or equal to another. For models whose config does not say whether it is
    tied.

    **Arguments:**

    - `default`: the result for a folder without tensors, as in a dry run.
    """
    source = weights_of(folder, stem)
    if source is None:
        return default
    if not {copy, original} <= set(source.names()):
        return True
    a, b = source.view(copy), source.view(original)
    return a.shape == b.shape and _equal(a, b)


def is_on_disk(folder: Location, stem: str, *names: str, default: bool) -> bool:
    """Returns whether a folder has a tensor with one of these names. For models whose config does not say so.

    **Arguments:**

    - `default`: the result for a folder without tensors, as in a dry run.
    """
    source = weights_of(folder, stem)
    return default if source is None else not set(names).isdisjoint(source.names())


def _equal(a: Any, b: Any, rows: int = 1024) -> bool:
    """Returns whether two views hold the same values. Reads a few rows at a time."""
    a, b = (x.reshape(1) if x.ndim == 0 else x for x in (a, b))
    return all(np.array_equal(np.asarray(a[i : i + rows]), np.asarray(b[i : i + rows])) for i in range(0, len(a), rows))
