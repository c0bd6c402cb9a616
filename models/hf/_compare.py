"""Holds a module of the user's own against a Hugging Face folder: which tensors its leaves take, what differs, and loading.

A family's weight map is code; here a dict of names is enough. `_load.py` reads the tensors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from redeqx import Deployer, Plan
from redeqx._tree import is_array_like, listed, named_leaves, nearest, without_indices
from redeqx.errors import brief_name, check_model, filter_traceback, wrong
from redeqx.storage import Location, location

from ._files import weights_of
from ._load import load
from ._weight_map import StoredTensor, WeightMap, same


@dataclass(frozen=True)
class Differences:
    """What differs between a module and a folder. It is false if nothing does; `str` lists everything.

    **Arguments:**

    - `missing`: leaves without a tensor in the folder, and the name that was looked for.
    - `unexpected`: tensors without a leaf, and their shapes.
    - `shapes`: leaves whose tensor has another shape.
    - `transposed`: leaves whose tensor has their shape the other way round, or whose transposed tensors make the outputs
        equal.
    - `unclear`: square matrices: shapes do not tell whether they are stored the other way round.
    - `output`: the largest difference of the outputs; None if they were not compared.
    - `tolerance`: how much of it is rounding.
    - `n_equal`: the number of leaves with a tensor of their shape.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    output: float | None = None
    tolerance: float = 0.0
    n_equal: int = 0

    def __bool__(self) -> bool:
        names = self.missing or self.unexpected or self.shapes or self.transposed
        return bool(names) or (self.output is not None and not self.output <= self.tolerance)

    def __str__(self) -> str:
        lines = [f"{self.n_equal} leaves have a tensor of their shape"]
        for name in ("missing", "unexpected", "shapes", "transposed", "unclear"):
            found = getattr(self, name)
            lines += [f"{name}: {len(found)}", *(f"  - {line}" for line in listed(found))] if found else []
        if self.output is not None:
            lines.append(f"outputs: differ by up to {self.output:.2g}; up to {self.tolerance:.2g} is rounding")
        return "\n".join(lines)


@filter_traceback
def compare_weights(
    model: Any,
    folder: str | Location,
    names: Mapping[str, str] | None = None,
    *,
    ignored: Sequence[str] = (),
    run: Callable[[Any], Any] | None = None,
    expected: Any = None,
    tolerance: float = 1e-4,
) -> Differences:
    """Compares the leaves of a module with the tensors of a folder's safetensors files, and on request its outputs.

    ```python
    names = {"blocks.*.query": "model.layers.*.self_attn.q_proj", "blocks.*.up.weight": "model.layers.*.mlp.up.T"}
    print(compare_weights(model, folder, names))
    ```

    **Arguments:**

    - `model`: any Equinox module, of arrays or of their shapes (`eqx.filter_eval_shape`).
    - `folder`: contains safetensors, in one file `model.safetensors` or in shards with an index; on a disk or in an object
        store. Or such a file, of any name.
    - `names`: tensors by leaves, or modules by modules, whose weights and biases then have the same last names. A `*` is an
        index, the same on both sides; in a tensor's name, `{}` is the index of a layer if the leaf is a stack of them,
        `[layers, ...]`. A name that ends with `.T` is of a tensor that is stored the other way round. Early entries win;
        leaves that none fits are called the same in the folder. Dims of size 1 may differ: the bias of PyTorch's convolution
        is `[channels]`, and that of Equinox `[channels, 1, 1]`.
    - `ignored`: globs over the names of tensors that are no weights.
    - `run`, `expected`: a function of the model, and what it should return, as arrays. Then weights are loaded, if all have
        a tensor, and outputs compared. If they differ, each group of square matrices is tried the other way round.
    - `tolerance`: the largest difference of outputs that is rounding.

    Raises ValueError for a missing folder, or for a `*` that the other side lacks.
    """
    where, shapes, leaves, tensors = _matched(model, folder, names or {})
    wanted = {disk for tensor in tensors.values() for disk in tensor.on_disk}
    patterns = [re.compile(re.escape(glob).replace(r"\*", ".*")) for glob in ignored]
    extra = [name for name in sorted(shapes) if name not in wanted and not any(p.fullmatch(name) for p in patterns)]

    missing, differing, turned, square, equal = [], [], [], [], []
    for name, leaf in leaves.items():
        tensor, shape = tensors[name], tuple(leaf.shape[len(tensors[name].stacked) :])
        absent = [disk for disk in tensor.on_disk if disk not in shapes]
        if absent:
            missing.append(f"`{name}` {tuple(leaf.shape)}: no `{absent[0]}`.{nearest(absent[0], extra)}")
            continue
        on_disk = tensor.save(np.broadcast_to(np.int8(0), shape)).shape
        others = [disk for disk in tensor.on_disk if shapes[disk] != on_disk]
        if not others:
            equal.append(name)
            if len(shape) == 2 and shape[0] == shape[1] and on_disk == shape:
                square.append(name)
        elif shapes[others[0]] == on_disk[::-1]:
            turned.append(f"`{name}`: {shape}, and `{others[0]}` is {shapes[others[0]]}")
        else:
            differing.append(f"`{name}`: expected {on_disk}, got {shapes[others[0]]} in `{others[0]}`")
    unexpected = [f"`{brief_name(name)}` {shapes[name]}" for name in extra]
    found = Differences(tuple(missing), tuple(unexpected), tuple(differing), tuple(turned), n_equal=len(equal))
    if run is None or len(equal) < len(leaves):
        return replace(found, unclear=tuple(f"`{name}`" for name in square))

    def difference(turned: Sequence[str] = ()) -> float:
        chosen = {name: _transposed(tensor) if name in turned else tensor for name, tensor in tensors.items()}
        pairs = zip(jax.tree.leaves(run(_load(model, chosen, [*ignored, *extra], *where))), outputs, strict=True)
        return max(float(np.max(np.abs(np.asarray(a, np.float64) - b))) for a, b in pairs)

    outputs = [np.asarray(array, np.float64) for array in jax.tree.leaves(expected)]
    found = replace(found, output=(output := difference()), tolerance=tolerance)
    groups: dict[str, list[str]] = {}
    for name in square if not output <= tolerance else ():
        groups.setdefault(without_indices(name), []).append(name)
    for group, members in groups.items():
        if (other := difference(members)) <= tolerance:
            return replace(found, transposed=(f"`{group}`: the outputs differ by {other:.2g} if it is transposed",))
    return found


@filter_traceback
def load_weights(
    model: Any,
    folder: str | Location,
    names: Mapping[str, str] | None = None,
    *,
    ignored: Sequence[str] = (),
    dtype: Any = None,
    deployer: Deployer | None = None,
    plan: Plan | None = None,
) -> Any:
    """Returns the module with the weights of a folder. Each device reads its own slices.

    **Arguments:**

    - `model`, `folder`, `names`, `ignored`: as for `compare_weights`.
    - `dtype`, `deployer`, `plan`: as for `from_pretrained`.

    Raises ValueError that lists what differs.
    """
    where, _, _, tensors = _matched(model, folder, names or {})
    return _load(model, tensors, ignored, *where, dtype=dtype, deployer=deployer, plan=plan)


def _matched(model: Any, folder: str | Location, names: Mapping[str, str]) -> tuple[Any, ...]:
    """Returns a folder and the start of its weight files' names; the shapes of its tensors, which are none in a dry run
    without weights; the leaves of a model; and the tensor of each."""
    check_model(model)
    path, stem = location(folder, "folder"), "model"
    if path.name.endswith(".safetensors") and path.is_file():
        path, stem = path.parent, path.name.removesuffix(".safetensors")
    elif not path.is_dir():
        raise wrong(path, "a folder or a safetensors file", "none", "Pass the one that holds the weights.")
    source = weights_of(path, stem)
    shapes = {} if source is None else {name: tuple(source.view(name).shape) for name in source.names()}
    leaves = {name: leaf for name, leaf in named_leaves(model).items() if is_array_like(leaf)}
    tensors = {name: _fitted(_tensor(name, leaf, names), leaf, shapes) for name, leaf in leaves.items()}
    return (path, stem), shapes, leaves, tensors


def _load(
    model: Any, tensors: Mapping[str, StoredTensor], ignored: Sequence[str], folder: Location, stem: str, **options: Any
) -> Any:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array_like(x) else x, model)
    return load(shapes, WeightMap([*tensors.values()], ignored=tuple(ignored)), folder, stem=stem, **options)


def _fitted(tensor: StoredTensor, leaf: Any, shapes: Mapping[str, tuple[int, ...]]) -> StoredTensor:
    """Returns the tensor of a leaf, reshaped if the file has other dims of size 1."""
    in_tree = tuple(leaf.shape[len(tensor.stacked) :])
    found = {shapes.get(disk, in_tree) for disk in tensor.on_disk}
    on_disk = found.pop()
    if found or on_disk == in_tree or _is_transposed(tensor) or _without_ones(on_disk) != _without_ones(in_tree):
        return tensor
    return replace(tensor, load=lambda stored: (stored.reshape(in_tree),), save=lambda leaf: leaf.reshape(on_disk))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _tensor(leaf: str, array: Any, names: Mapping[str, str]) -> StoredTensor:
    """Returns the tensor that holds a leaf."""
    for pattern, disk in names.items():
        if pattern.count("*") != disk.count("*"):
            step = "Write an index as `*` on both sides, or as `{}` for a stack of layers."
            raise wrong(f"names[{pattern!r}]", "as many `*` as in the leaf's name", repr(disk), step)
        parts = (re.escape(part) for part in pattern.split("*"))
        match = re.fullmatch(r"([^.]+)".join(parts) + r"(\..+)?", leaf)
        if match is None:
            continue
        *indices, last = match.groups()
        is_turned, disk = disk.endswith(".T"), disk.removesuffix(".T")
        for index in indices:
            disk = disk.replace("*", index, 1)
        n_layers = array.shape[0] if "{}" in disk else None
        is_matrix = len(array.shape) - (n_layers is not None) == 2
        tensor = replace(same(disk + (last or ""), leaf), n_layers=n_layers)
        return _transposed(tensor) if is_turned and is_matrix else tensor
    return same(leaf, leaf)


def _transposed(tensor: StoredTensor) -> StoredTensor:
    """Returns a tensor that is stored the other way round."""
    if _is_transposed(tensor):
        return replace(tensor, load=lambda stored: (stored,), save=lambda leaf: leaf)
    return replace(tensor, load=lambda stored: (stored.T,), save=lambda leaf: leaf.T)


def _is_transposed(tensor: StoredTensor) -> bool:
    return tensor.save(np.zeros((1, 2))).shape == (2, 1)
