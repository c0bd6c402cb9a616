"""Folders that hold the matrices of all experts of a layer as one tensor, for models that name one of each expert.

transformers reads both. A layer has `gate_up_proj` `[experts, 2 x inner, in]`, gates first, and `down_proj` `[experts, in,
inner]`. A `Source` shows their parts as tensors of their own. They are views, so that a device reads only its slices.
"""

import functools
from collections.abc import Callable

from redeqx.checkpoint import TensorReader
from redeqx.storage import View

from ._packed import Source
from ._weight_map import WeightMap

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(source: TensorReader | Source, weight_map: WeightMap) -> TensorReader | Source:
    """Returns the tensors of a folder, with those of all experts split if the weight map names one of each expert."""
    if not weight_map.experts:
        return source
    wanted = {disk for tensor in weight_map.tensors if tensor.n_experts is not None for disk in tensor.on_disk}
    shown: dict[str, Callable[[], View]] = {}
    hidden = set[str]()

    def show(disk: str, expert: int, i: int, n: int) -> View:
        whole = source.view(disk)
        n_rows = whole.shape[1] // n
        return whole[expert, i * n_rows : (i + 1) * n_rows]

    for disk in source.names():
        module, _, last = weight_map.current(disk).rpartition(".")
        for i, layer in enumerate(_PARTS.get(last, ())):
            whole = source.view(disk)
            n_experts = whole.shape[0] if whole.ndim == 3 else 0
            names = {f"{module}.{expert}.{layer}.weight": expert for expert in range(n_experts)}
            if names and names.keys() <= wanted:
                hidden.add(disk)
                shown |= {
                    name: functools.partial(show, disk, expert, i, len(_PARTS[last])) for name, expert in names.items()
                }
    return Source(source, shown, hidden=hidden) if shown else source
