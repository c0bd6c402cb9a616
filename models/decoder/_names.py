"""The names of a decoder's tensors in weight files. With the model's leaves, they give its weight map."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from redeqx._tree import is_array_like, named_leaves
from redeqx.storage import MergedDims, View

from ..hf import StoredTensor, WeightMap


@dataclass(frozen=True)
class ByHead:
    """Layers that are stored as one, with outputs by head: query, key and value of head 0, then those of head 1."""

    leaves: tuple[str, ...]
    heads: Callable[[Any], int] = lambda config: config.n_heads


Held = str | tuple[str, ...] | ByHead  # what a name stores
# The names of LLaMA's blocks. Modules that a model lacks have no tensors.
BLOCK: Mapping[str, Held] = MappingProxyType(
    {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.output",
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
)


@dataclass(frozen=True)
class Names:
    """Names on disk, and the module or the array that each of them stores.

    **Arguments:**

    - `block`: the modules of a block, by their names on disk, where they differ from LLaMA's. A name with `{}` is one of
        each expert. A tuple is several layers that are stored as one, with concatenated outputs.
    - `layers`: the prefix of the names of a block, with `{}` for its index.
    - `embedding`, `norm`, `head`: the other modules; `others`: more of them, and arrays.
    - `is_transposed`: whether the matrices of blocks are stored as `[in, out]`.
    - `ignored`, `aliases`: as in `WeightMap`.
    """

    block: Mapping[str, Held] = field(default_factory=dict)
    layers: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    others: Mapping[str, str] = field(default_factory=dict)
    is_transposed: bool = False
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)  # frequencies in old files
    aliases: tuple[tuple[str, str], ...] = ()

    def weight_map(self, shapes: Any, config: Any) -> WeightMap:
        """Returns the weight map of a model.

        **Arguments:**

        - `shapes`: the model, with shapes as leaves.
        """
        leaves = {name: leaf for name, leaf in named_leaves(shapes).items() if is_array_like(leaf)}
        tensors = [
            tensor
            for disk, module in {self.embedding: "embedding", **self.others}.items()
            for tensor in _stored(disk, (module,), leaves)
        ]
        prefix = "stack.blocks."
        renamed = {module for held in self.block.values() for module in _modules(held)}
        kept = {disk: held for disk, held in BLOCK.items() if renamed.isdisjoint(_modules(held))}
        for disk, held in {**kept, **self.block}.items():
            modules = _modules(held)
            paths = tuple(prefix + module for module in modules)
            n_heads = held.heads(config) if isinstance(held, ByHead) else None
            stacked = {"n_layers": config.n_layers, "n_experts": config.n_experts if "{}" in disk else None}
            found = _stored(self.layers + disk, paths, leaves, n_heads, is_transposed=self.is_transposed)
            tensors += [replace(tensor, **stacked) for tensor in found]
        for disk, module in {self.norm: "norm", self.head: "head", f"{self.head}.bias": "head_bias"}.items():
            tensors += _stored(disk, (module,), leaves)
        return WeightMap(
            tensors=tensors,
            ignored=self.ignored,
            copies={f"{self.head}.weight": f"{self.embedding}.weight"} if config.is_tied else {},
            untied_by="tie_word_embeddings",
            aliases=self.aliases,
        )


def _modules(held: Held) -> tuple[str, ...]:
    return held.leaves if isinstance(held, ByHead) else (held,) if isinstance(held, str) else held


def _stored(
    disk: str,
    modules: Sequence[str],
    leaves: Mapping[str, Any],
    n_heads: int | None = None,
    *,
    is_transposed: bool = False,
) -> list[StoredTensor]:
    """Returns the tensors of a module, or of several that are stored as one: weights, biases, or an array by itself."""
    found = []
    for end in ("", ".weight", ".bias"):
        paths = tuple(module + end for module in modules)
        if not all(path in leaves for path in paths):
            continue
        if len(paths) == 1:
            tensor = StoredTensor(disk + end, paths)
        else:
            sizes = [leaves[path].shape[1] for path in paths]  # after the dim of layers
            tensor = _fused(disk + end, paths, sizes, n_heads)
        is_matrix = len(leaves[paths[0]].shape) == 3
        found.append(_transposed(tensor) if is_transposed and is_matrix else tensor)
    return found


def _transposed(tensor: StoredTensor) -> StoredTensor:
    return replace(
        tensor, load=lambda stored: tensor.load(stored.T), save=lambda *leaves: np.transpose(tensor.save(*leaves))
    )


def _fused(disk: str, paths: tuple[str, ...], sizes: Sequence[int], n_heads: int | None) -> StoredTensor:
    """Returns a tensor whose first dim has the outputs of several layers, one after another, or alternating by head."""
    if n_heads is None:
        starts = [0, *np.cumsum(sizes).tolist()]

        def load(tensor: View) -> Sequence[View]:
            return [tensor[a:b] for a, b in itertools.pairwise(starts)]

        return StoredTensor(disk, paths, load, lambda *parts: np.concatenate(parts))
    n = len(paths)

    def load_heads(tensor: View) -> Sequence[View]:
        split = tensor.reshape(n_heads, n, -1, *tensor.shape[1:])
        return [MergedDims(split[:, i]) for i in range(n)]

    def save_heads(*parts: np.ndarray) -> np.ndarray:
        stacked = np.stack([part.reshape(n_heads, -1, *part.shape[1:]) for part in parts], axis=1)
        return stacked.reshape(-1, *parts[0].shape[1:])

    return StoredTensor(disk, paths, load_heads, save_heads)
