"""The names of PEFT's modules: which linear layers of the tree, and which leaves, each of them stands for.

They follow from the weight map of a model. `_save` writes folders with these names, and `_load` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from einops import rearrange

from redeqx._tree import PyTree

from ..hf import Pretrained, StoredTensor, WeightMap
from ._adapters import is_linear, leaf_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"
PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class Module:
    """One linear layer as PEFT names it, and the layers of the tree that it corresponds to.

    **Arguments:**

    - `name`: its path in PEFT; `{}` stands for the layer's index if `n_layers` is set.
    - `disk`: its path in weight files, which adapters of older versions use.
    - `paths`: the paths of the layers in the tree; several if transformers holds them as one.
    - `rows`: for each of these layers, the rows of the module's output that belong to it.
    - `n_in`, `n_out`: the module's input and output features.
    - `stacked`: leading dims of the adapter's tensors, for stacks that are not in a weight map.
    - `n_layers`: set if each layer in the tree is a stack of this many modules.
    - `is_transposed`: whether the module's weight is `[in, out]`.
    - `first_layer`, `layer_step`: the index of the stack's first layer in the model, and the distance to the next one.
    - `is_embedding`: whether it is an embedding. Its adapter is that of the transposed weight.
    - `parameter`: of experts, whose layers are one array `[experts, out, in]` of the module, its name. `name` ends with it.
    """

    name: str
    disk: str
    paths: tuple[str, ...]
    rows: tuple[Any, ...]
    n_in: int
    n_out: int
    stacked: tuple[int, ...] = ()
    n_layers: int | None = None
    is_transposed: bool = False
    first_layer: int = 0
    is_embedding: bool = False
    parameter: str | None = None
    layer_step: int = 1

    @property
    def names(self) -> list[str]:
        """The modules' names, one for each layer."""
        return self._layer_names(self.name)

    @property
    def layer_indices(self) -> dict[str, int]:
        """The layer's index by each name that a module has had; 0 for a single module."""
        return {name: i for names in (self._layer_names(self.disk), self.names) for i, name in enumerate(names)}

    def tensors(self, name: str, a: Any, b: Any, *, is_inner: bool) -> dict[str, Any]:
        """Returns the tensors of one layer's adapter by their names in PEFT, from `A` and `B`.

        **Arguments:**

        - `name`: one of `names`.
        - `is_inner`: whether the module has an adapter of another parameter, around that of this one.
        """
        if self.is_embedding:
            return {f"{PREFIX}{name}.lora_embedding_A": a, f"{PREFIX}{name}.lora_embedding_B": b}
        if self.parameter is not None:
            name = name.removesuffix(f".{self.parameter}") + (".base_layer" if is_inner else "")
            a, b = rearrange(a, "experts rank size -> (experts rank) size"), rearrange(b, "e out rank -> out (rank e)")
        return {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}

    def _layer_names(self, name: str) -> list[str]:
        indices = (self.first_layer + i * self.layer_step for i in range(self.n_layers or 0))
        return [name] if self.n_layers is None else [*map(name.format, indices)]


def modules_of(model: PyTree, linears: Mapping[str, Any]) -> list[Module]:
    """Returns every linear layer and embedding that a folder's adapter may be for: by the family's weight map, else by the
    tree's own paths."""
    if not isinstance(model, Pretrained):
        return [_own_module(path, layer) for path, layer in linears.items()]
    weight_map = type(model).weight_map(model.config)
    modules = [_module(name, weight_map, linears) for name in weight_map.tensors]
    return [module for module in modules if module is not None] + _experts(weight_map, linears)


def _own_module(path: str, layer: Any) -> Module:
    *stacked, n_out, n_in = layer.weight.shape
    is_table = not is_linear(layer)
    return Module(path, path, (path,), (slice(None),), n_in, n_out, tuple(stacked), is_embedding=is_table)


def _experts(weight_map: WeightMap, linears: Mapping[str, Any]) -> list[Module]:
    """Returns the two parameters of transformers' modules of experts: that of gates and inner layers, and the other one."""
    found = []
    for parameter, ends in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for tensor in weight_map.tensors:
            start, _, last = tensor.leaves[0].removesuffix(".weight").rpartition(".")
            paths = tuple(f"{start}.{end}" for end in ends)
            is_weight = tensor.leaves[0].endswith(".weight") and start.endswith(".experts") and last == ends[0]
            if not (weight_map.experts and is_weight and all(path in linears for path in paths)):
                continue
            sizes = [linears[path].weight.shape[-2] for path in paths]
            n_out, n_in, n = sum(sizes), linears[paths[0]].weight.shape[-1], len(paths)
            alternate = [np.arange(i, n_out, n) for i in range(n)]
            rows = alternate if weight_map.alternates else np.split(np.arange(n_out), np.cumsum(sizes)[:-1])
            name, stacked = f"{weight_map.experts}.{parameter}", (linears[paths[0]].weight.shape[1],)
            more = {"n_layers": tensor.n_layers, "first_layer": tensor.first_layer, "layer_step": tensor.layer_step}
            found.append(Module(name, name, paths, tuple(rows), n_in, n_out, stacked, **more, parameter=parameter))
    return found


def _module(name: StoredTensor, weight_map: WeightMap, linears: Mapping[str, Any]) -> Module | None:
    """Returns the module whose weight this entry of a weight map describes; None if it is not the weight of linear
    layers."""
    paths = tuple(leaf.removesuffix(".weight") for leaf in name.leaves)
    are_weights = all(leaf_path(path, "weight") in name.leaves and path in linears for path in paths)
    if not name.disk.endswith(".weight") or not are_weights or name.n_experts is not None:
        return None
    shapes = [linears[path].weight.shape[name.n_layers is not None :] for path in paths]
    on_disk = name.save(*[np.broadcast_to(np.int8(0), shape) for shape in shapes]).shape
    if len(on_disk) != 2:
        return None
    for is_transposed in (False, True):
        # Find the source of each row: load a tensor whose entries are their own output indices, as if it were the weight.
        numbers = [np.arange(size) for size in on_disk]
        outputs, inputs = (np.broadcast_to(n[:, None] if axis == 0 else n, on_disk) for axis, n in enumerate(numbers))
        if is_transposed:
            outputs, inputs = inputs, outputs
        parts = [*zip(name.load(outputs), name.load(inputs), shapes, strict=True)]
        if all(
            o.shape == tuple(shape) and np.all(np.equal(o[0], o[0, 0])) and np.array_equal(i[0], np.arange(shape[1]))
            for o, i, shape in parts
        ):
            n_out, n_in = reversed(on_disk) if is_transposed else on_disk
            rows = tuple(np.array(o[:, 0]) for o, _, _ in parts)
            disk = name.disk.removesuffix(".weight")
            in_memory, n_layers, first = weight_map.in_memory(disk), name.n_layers, name.first_layer
            is_table = not is_linear(linears[paths[0]])
            more = {"is_embedding": is_table, "layer_step": name.layer_step}
            return Module(in_memory, disk, paths, rows, n_in, n_out, (), n_layers, is_transposed, first, **more)
    return None


def module_of(tensor: str) -> str:
    """Returns the name of the module that has a tensor."""
    return tensor.rpartition(".")[0]


def in_memory(weight_map: WeightMap, tensor: StoredTensor) -> list[str]:
    """Returns the names that a stored tensor has in transformers' modules, one for each layer; none for those of numbered
    experts, which are one tensor there."""
    if tensor.n_experts is not None:
        return []
    name = _renamed(weight_map, tensor.disk)
    return [name] if tensor.n_layers is None else [name.format(tensor.layer_index(i)) for i in range(tensor.n_layers)]


def copies_of(weight_map: WeightMap) -> dict[str, str]:
    """Maps the names of tied tensors in transformers' modules to that of the one that is stored."""
    return {_renamed(weight_map, copy): _renamed(weight_map, original) for copy, original in weight_map.copies.items()}


def _renamed(weight_map: WeightMap, tensor: str) -> str:
    """Returns the name of a tensor in transformers' modules, from its name on disk."""
    module, _, name = tensor.rpartition(".")
    return f"{weight_map.in_memory(module)}.{name}"
