"""Name tables: a tensor on disk <-> leaves of the tree <-> how one becomes the other.

Owns the entries of a table and the words to write one with. A table is a family's; folders of weights and of adapters use
it in both directions.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Name:
    """One tensor on disk, and the leaves of the tree that it holds.

    **Arguments:**

    - `disk`: its name there; `{}` stands for the number of a layer where `n_layers` is set.
    - `leaves`: paths in the tree.
    - `load`: from the tensor to its leaves. Only views (slices, transposes, reshapes), so that a device reads from the
        file what it keeps and no more.
    - `save`: from the leaves to the tensor.
    - `n_layers`: where each leaf is a stack `[n_layers, ...]` of what one tensor a layer holds.
    """

    disk: str
    leaves: tuple[str, ...]
    load: Callable[[np.ndarray], Sequence[np.ndarray]] = lambda tensor: (tensor,)
    save: Callable[..., np.ndarray] = lambda leaf: leaf
    n_layers: int | None = None

    @property
    def on_disk(self) -> list[str]:
        """The tensors' names, one a layer."""
        return [self.disk] if self.n_layers is None else [self.disk.format(i) for i in range(self.n_layers)]


@dataclass(frozen=True)
class Names:
    """The table of one model.

    **Arguments:**

    - `tensors`: every tensor that is written.
    - `ignored`: globs of names that files carry and that are no weights: masks, position counters.
    - `copies`: tensors that may stand in a file beside the one that they are tied to; read only to see that they are the
        same, never written.
    - `untied_by`: the key of `config.json` whose value false makes them tensors of their own; None where this family has no
        such model.
    - `aliases`: `(pattern, replacement)` of regular expressions that turn the spelling of old files into today's; all are
        applied, in order.
    - `zeros`: tensors that a file may lack; they are zeros then.
    - `modules`: `(pattern, replacement)` that turn names on disk into those of transformers' modules in memory, where they
        differ; adapters of PEFT bear the latter.
    """

    tensors: Sequence[Name]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    untied_by: str | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    zeros: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def in_memory(self, disk: str) -> str:
        """What transformers calls a module in memory, from its name on disk."""
        return _rename(disk, self.modules)

    def current(self, name: str) -> str:
        """Today's spelling of a name in a file."""
        return _rename(name, self.aliases)


def _rename(name: str, renamings: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renamings:
        name = re.sub(pattern, replacement, name)
    return name


def same(disk: str, leaf: str) -> Name:
    """A tensor that is the leaf."""
    return Name(disk, (leaf,))


def transposed(disk: str, leaf: str) -> Name:
    """A matrix that is `[in, out]` on disk."""
    return Name(disk, (leaf,), lambda tensor: (tensor.T,), lambda leaf: leaf.T)


def reshaped(disk: str, leaf: str, on_disk: tuple[int, ...], in_tree: tuple[int, ...]) -> Name:
    """A tensor whose dims of size 1 (or whose grouping of dims) differ: a convolution's bias, a class token."""
    return Name(disk, (leaf,), lambda t: (_view(t, in_tree, on_disk),), lambda leaf: leaf.reshape(on_disk))


def _view(tensor: np.ndarray, shape: tuple[int, ...], expected: tuple[int, ...]) -> np.ndarray:
    """`tensor` reshaped, or as it is where it has not the expected shape; the check of shapes then says so."""
    return tensor.reshape(shape) if tensor.shape == expected else tensor


def same_layer(disk: str, leaf: str, *, use_bias: bool = True, is_transposed: bool = False) -> list[Name]:
    """The `weight` and `bias` of a layer (linear, norm, embedding).

    **Arguments:**

    - `is_transposed`: whether the matrix is `[in, out]` on disk.
    """
    weight = (transposed if is_transposed else same)(f"{disk}.weight", f"{leaf}.weight")
    return [weight, *([same(f"{disk}.bias", f"{leaf}.bias")] if use_bias else [])]


def fused(disk: str, layers: Sequence[str], *, use_bias: bool = True, is_transposed: bool = False) -> list[Name]:
    """The weight and bias of several layers of equal size held as one, their outputs side by side."""
    n, axis = len(layers), -1 if is_transposed else 0

    def cut(tensor: np.ndarray, axis: int) -> list[np.ndarray]:
        size = tensor.shape[axis] // n
        parts = [slice(i * size, (i + 1) * size) for i in range(n)]
        return [tensor[..., part] if axis == -1 else tensor[part] for part in parts]

    turn = np.transpose if is_transposed else lambda tensor: tensor
    weight = Name(
        f"{disk}.weight",
        tuple(f"{layer}.weight" for layer in layers),
        lambda tensor: [turn(part) for part in cut(tensor, axis)],
        lambda *leaves: np.concatenate([turn(leaf) for leaf in leaves], axis),
    )
    bias = Name(
        f"{disk}.bias",
        tuple(f"{layer}.bias" for layer in layers),
        lambda tensor: cut(tensor, 0),
        lambda *leaves: np.concatenate(leaves),
    )
    return [weight, bias] if use_bias else [weight]


def layers(disk: str, leaf: str, n_layers: int, block: Iterable[Name]) -> list[Name]:
    """The tensors of a stack of `n_layers` blocks.

    **Arguments:**

    - `disk`: prefix of the names there, with `{}` for the number: `"transformer.h.{}."`.
    - `leaf`: prefix of the paths: `"stack.blocks."`.
    - `block`: the tensors of one block, named within it.
    """
    return [
        replace(name, disk=disk + name.disk, leaves=tuple(leaf + path for path in name.leaves), n_layers=n_layers)
        for name in block
    ]


def within(disk: str, leaf: str, names: Iterable[Name]) -> list[Name]:
    """The tensors of a part of a model, whose names and paths begin with a prefix each."""
    return [replace(name, disk=disk + name.disk, leaves=tuple(leaf + path for path in name.leaves)) for name in names]
