"""Weight maps: which tensor on disk holds which leaves, and how to convert between them.

This module owns `WeightMap` and the functions that build one. Each family has its own. Folders of weights and of adapters
use it to load and to save.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np

from redeqx._tree import is_array_like, named_leaves
from redeqx.storage import View, merge_dims


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk, and the leaves of the tree that it holds.

    **Arguments:**

    - `disk`: its name on disk; `{}` stands for the layer's index if `n_layers` is set.
    - `leaves`: the paths of the leaves.
    - `load`: maps the tensor to its leaves. It must return views (slices, transposes, reshapes), so that a device reads only
        what it keeps from the file.
    - `save`: maps the leaves to the tensor.
    - `n_layers`: set if each leaf is a stack `[n_layers, ...]` that is stored as one tensor for each layer.
    - `n_experts`: set if each leaf of a layer is itself a stack `[n_experts, ...]` that is stored as one tensor for each
        expert; a second `{}` stands for the expert's index.
    - `first_layer`: the index of the first layer, if the stack lacks the ones before it.
    - `layer_step`: the distance between its layers, if others are between them.
    """

    disk: str
    leaves: tuple[str, ...]
    load: Callable[[View], Sequence[View]] = lambda tensor: (tensor,)
    save: Callable[..., np.ndarray] = lambda leaf: leaf
    n_layers: int | None = None
    n_experts: int | None = None
    first_layer: int = 0
    layer_step: int = 1

    @property
    def stacked(self) -> tuple[int, ...]:
        """The leading dims of the leaves that the tensors do not have: layers, and experts."""
        return tuple(n for n in (self.n_layers, self.n_experts) if n is not None)

    @property
    def on_disk(self) -> list[str]:
        """The tensors' names, one for each layer, and for each expert of it."""
        if not self.stacked:
            return [self.disk]
        return [self.disk.format(self.layer_index(layer), *expert) for layer, *expert in np.ndindex(*self.stacked)]

    def layer_index(self, i: int) -> int:
        """Returns the index in the model of the stack's i-th layer."""
        return self.first_layer + i * self.layer_step


@dataclass(frozen=True)
class WeightMap:
    """The weight map of one model.

    **Arguments:**

    - `tensors`: all tensors that are written.
    - `ignored`: globs for tensors in files that are not weights, such as masks and position counters.
    - `copies`: tensors that a file may hold in addition to the tensor that they are tied to. They are never written, and are
        only read to check that both are equal.
    - `untied_by`: the key of `config.json` that unties them if it is false; None if the family always ties them.
    - `aliases`: `(pattern, replacement)` of regular expressions that rename tensors of old files to current names. All are
        applied, in order.
    - `zeros`: tensors that default to zeros if a file lacks them.
    - `modules`: `(pattern, replacement)` from names on disk to the names of transformers' modules in memory, where they
        differ. PEFT names its adapters by the latter.
    - `experts`: the module of transformers with the experts of a layer, with `{}` for its index; empty for none. It has
        `gate_up_proj`, with gates before inner layers, or alternating if `alternates` is True, and `down_proj`.
    """

    tensors: Sequence[StoredTensor]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    untied_by: str | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    zeros: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    experts: str = ""
    alternates: bool = False

    def in_memory(self, disk: str) -> str:
        """Returns the name of a transformers module in memory, from its name on disk."""
        return _rename(disk, self.modules)

    def current(self, name: str) -> str:
        """Returns the current name of a tensor in a file."""
        return _rename(name, self.aliases)


def _rename(name: str, renamings: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renamings:
        name = re.sub(pattern, replacement, name)
    return name


def same(disk: str, leaf: str) -> StoredTensor:
    """Returns a tensor that is stored as its leaf."""
    return StoredTensor(disk, (leaf,))


def reshaped(disk: str, leaf: str, on_disk: tuple[int, ...], in_tree: tuple[int, ...]) -> StoredTensor:
    """Returns a tensor that is stored with other dims of size 1, or with its dims grouped differently, such as a
    convolution's bias."""

    def load(tensor: View) -> tuple[View]:  # one of another shape is left as it is, so that the shape check reports it
        return (tensor.reshape(in_tree) if tensor.shape == on_disk else tensor,)

    return StoredTensor(disk, (leaf,), load, lambda leaf: leaf.reshape(on_disk))


def same_layer(disk: str, leaf: str, *, use_bias: bool = True) -> list[StoredTensor]:
    """Returns the `weight` and `bias` of a layer (linear, norm, embedding)."""
    return [same(f"{disk}.{name}", f"{leaf}.{name}") for name in ("weight", "bias")[: 1 + use_bias]]


def fused(disk: str, leaves: tuple[str, ...], sizes: Sequence[int], n_heads: int | None = None) -> StoredTensor:
    """Returns a tensor whose first dim has the outputs of several layers, one after another, or alternating by head.

    **Arguments:**

    - `sizes`: the number of outputs of each layer.
    - `n_heads`: outputs alternate between so many heads; None if they do not.
    """
    if n_heads is None:
        starts = [0, *np.cumsum(sizes).tolist()]

        def load(tensor: View) -> Sequence[View]:
            return [tensor[a:b] for a, b in itertools.pairwise(starts)]

        return StoredTensor(disk, leaves, load, lambda *parts: np.concatenate(parts))
    each = [size // n_heads for size in sizes]  # outputs of one head
    ends = [0, *np.cumsum(each).tolist()]

    def load_heads(tensor: View) -> Sequence[View]:
        split = tensor.reshape(n_heads, ends[-1], *tensor.shape[1:])
        return [merge_dims(split[:, a:b]) for a, b in itertools.pairwise(ends)]

    def save_heads(*parts: np.ndarray) -> np.ndarray:
        split = [part.reshape(n_heads, -1, *part.shape[1:]) for part in parts]
        return np.concatenate(split, axis=1).reshape(-1, *parts[0].shape[1:])

    return StoredTensor(disk, leaves, load_heads, save_heads)


def layers(disk: str, leaf: str, n_layers: int, block: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Returns the tensors of a stack of `n_layers` blocks.

    **Arguments:**

    - `disk`: the prefix of names on disk, with `{}` for the layer's index: `"transformer.h.{}."`.
    - `leaf`: the prefix of paths: `"stack.blocks."`.
    - `block`: the tensors of one block, with names relative to it.
    """
    return [
        replace(name, disk=disk + name.disk, leaves=tuple(leaf + path for path in name.leaves), n_layers=n_layers)
        for name in block
    ]


def within(disk: str, leaf: str, names: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Returns the tensors of a submodule, with prefixes added to each name and path."""
    return [replace(name, disk=disk + name.disk, leaves=tuple(leaf + path for path in name.leaves)) for name in names]


def stored(
    names: Mapping[str, str], leaves: Mapping[str, Any], prefix: str = "", n_heads: int | None = None
) -> list[StoredTensor]:
    """Returns the tensors of modules, weights and biases, or of arrays, from a table of names. What a model lacks has none.

    **Arguments:**

    - `names`: names on disk, by the path of the module or the array. Several paths, with spaces between them, are layers
        that are stored as one. A name with `*` has the end, `weight` or `bias`, there.
    - `leaves`: the model's arrays, or their shapes, by path. Paths begin with `prefix`; those of `names` do not.
    - `n_heads`: as in `fused`.
    """
    found = []
    for path, disk in names.items():
        for end in ("", "weight", "bias"):
            own = tuple(f"{part}.{end}".removesuffix(".") for part in path.split())
            if not all(prefix + leaf in leaves for leaf in own):
                continue
            name = disk.replace("*", end) if "*" in disk else f"{disk}.{end}".removesuffix(".")
            if len(own) == 1:
                found.append(same(name, *own))
                continue
            sizes = [leaves[prefix + leaf].shape[-2 if end == "weight" else -1] for leaf in own]
            found.append(fused(name, own, sizes, n_heads))
    return found


def shapes_of(cls: Any, config: Any) -> Any:
    """Returns a model with shapes in place of its arrays."""
    return eqx.filter_eval_shape(cls, config, key=jax.eval_shape(lambda: jax.random.key(0)))


def leaves_of(cls: Any, config: Any) -> dict[str, Any]:
    """Returns the shapes of a model's arrays, by path."""
    return {name: leaf for name, leaf in named_leaves(shapes_of(cls, config)).items() if is_array_like(leaf)}
