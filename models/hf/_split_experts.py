"""Folders that hold the matrices of all experts of a layer as one tensor, for models that name one of each expert.

transformers reads both. A layer has `gate_up_proj` `[experts, 2 x inner, in]`, gates first, and `down_proj` `[experts, in,
inner]`. `SplitExperts` shows their parts as tensors of their own. They are views, so that a device reads only its slices.
"""

from collections.abc import Mapping

from redeqx.checkpoint import TensorReader
from redeqx.storage import View

from ._packed import Unpacked
from ._weight_map import WeightMap

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class SplitExperts:
    """The tensors of a folder, with those of all experts as one of each expert."""

    def __init__(self, source: TensorReader | Unpacked, parts: Mapping[str, tuple[str, int, int, int]]):
        """**Arguments:**

        - `parts`: by the name of a part, the tensor that holds it, its expert, and its place among how many parts of its
            rows.
        """
        self.path, self.paths, self._source, self._parts = source.path, source.paths, source, parts
        self._whole = {disk for disk, *_ in parts.values()}

    def names(self) -> list[str]:
        """Returns the names of the tensors."""
        return [*(name for name in self._source.names() if name not in self._whole), *self._parts]

    def view(self, name: str) -> View:
        """Returns a tensor."""
        if name not in self._parts:
            return self._source.view(name)
        disk, expert, i, n = self._parts[name]
        whole = self._source.view(disk)
        n_rows = whole.shape[1] // n
        return whole[expert, i * n_rows : (i + 1) * n_rows]


Source = TensorReader | Unpacked | SplitExperts


def split_experts(source: TensorReader | Unpacked, weight_map: WeightMap) -> Source:
    """Returns the tensors of a folder, with those of all experts split if the weight map names one of each expert."""
    if not weight_map.experts:
        return source
    wanted = {disk for tensor in weight_map.tensors if tensor.n_experts is not None for disk in tensor.on_disk}
    parts: dict[str, tuple[str, int, int, int]] = {}
    for disk in source.names():
        module, _, last = weight_map.current(disk).rpartition(".")
        for i, layer in enumerate(_PARTS.get(last, ())):
            whole = source.view(disk)
            n_experts = whole.shape[0] if whole.ndim == 3 else 0
            names = {f"{module}.{expert}.{layer}.weight": expert for expert in range(n_experts)}
            if names and names.keys() <= wanted:
                parts |= {name: (disk, expert, i, len(_PARTS[last])) for name, expert in names.items()}
    return SplitExperts(source, parts) if parts else source
