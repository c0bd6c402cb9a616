"""The names of a decoder's tensors in weight files. With the model's leaves, they give its weight map."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from redeqx._tree import is_array_like, named_leaves
from redeqx.storage import View

from ..hf import StoredTensor, WeightMap, reshaped, stored
from ._layers import layers_of


@dataclass(frozen=True)
class ByHead:
    """Layers that are stored as one, with outputs by head: query, key and value of head 0, then those of head 1."""

    leaves: tuple[str, ...]
    heads: Callable[[Any], int] = lambda config: config.n_heads


@dataclass(frozen=True)
class Experts:
    """Layers of all experts that are stored as one tensor `[experts, out, in]`, and their biases as another.

    **Arguments:**

    - `leaves`: one layer of each expert, or two, whose outputs are concatenated.
    - `is_transposed`: whether the matrices are `[in, out]`.
    - `is_interleaved`: whether the outputs of two layers alternate.
    - `ends`: what follows the name, of weights and of biases.
    """

    leaves: tuple[str, ...]
    is_transposed: bool = False
    is_interleaved: bool = False
    ends: tuple[str, str] = (".weight", ".bias")

    def stored(self, disk: str, prefix: str, leaves: Mapping[str, Any]) -> list[StoredTensor]:
        """Returns the tensors."""
        found = []
        for end, ours in zip(self.ends, (".weight", ".bias"), strict=True):
            paths = tuple(prefix + module + ours for module in self.leaves)
            if all(path in leaves for path in paths):
                swaps = self.is_transposed and ours == ".weight"
                found.append(StoredTensor(disk + end, paths, self._loader(swaps), self._saver(swaps)))
        return found

    def _loader(self, swaps: bool) -> Callable[[View], Sequence[View]]:
        def load(tensor: View) -> Sequence[View]:
            tensor = tensor.transpose(0, 2, 1) if swaps else tensor
            n, n_out = len(self.leaves), tensor.shape[1]
            if self.is_interleaved:
                return [tensor[:, i::n] for i in range(n)]
            return [tensor[:, i * n_out // n : (i + 1) * n_out // n] for i in range(n)]

        return load

    def _saver(self, swaps: bool) -> Callable[..., np.ndarray]:
        def save(*parts: np.ndarray) -> np.ndarray:
            if self.is_interleaved:
                tensor = np.stack(parts, axis=2).reshape(len(parts[0]), -1, *parts[0].shape[2:])
            else:
                tensor = np.concatenate(parts, axis=1)
            return tensor.transpose(0, 2, 1) if swaps else tensor

        return save


@dataclass(frozen=True)
class Wide:
    """An array that is stored with a first dim of size 1."""

    leaf: str


@dataclass(frozen=True)
class Taps:
    """Arrays `[width, kernel]` of convolutions of each feature by itself, which are stored as one `[widths, 1, kernel]`."""

    leaves: tuple[str, ...]

    def stored(self, disk: str, prefix: str, leaves: Mapping[str, Any]) -> list[StoredTensor]:
        """Returns the tensor, if a block has these arrays."""
        paths = tuple(prefix + leaf for leaf in self.leaves)
        if not all(path in leaves for path in paths):
            return []
        ends = np.cumsum([leaves[path].shape[1] for path in paths]).tolist()
        starts = [0, *ends]

        def load(tensor: View) -> Sequence[View]:
            if tensor.ndim != 3 or tensor.shape[1] != 1:
                return [tensor]  # the check of shapes refuses it
            return [tensor[a:b, 0] for a, b in itertools.pairwise(starts)]

        return [StoredTensor(disk, paths, load, lambda *parts: np.concatenate(parts)[:, None])]


Held = str | tuple[str, ...] | ByHead | Experts | Wide | Taps  # what a name stores
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


def expert_names(shared: str = "shared_experts", gate: str = "gate") -> dict[str, Held]:
    """Returns the names of experts in most families.

    **Arguments:**

    - `shared`: the module of the expert that all tokens are sent to.
    - `gate`: the router's.
    """
    return {
        f"mlp.{gate}": "mlp.router",
        f"mlp.{gate}.e_score_correction_bias": "mlp.correction",
        **{f"mlp.experts.{{}}.{layer}_proj": f"mlp.experts.{layer}" for layer in ("gate", "up", "down")},
        **{f"mlp.{shared}.{layer}_proj": f"mlp.shared.{layer}" for layer in ("gate", "up", "down")},
        f"mlp.{shared.removesuffix('s')}_gate": "mlp.shared_gate",
    }


# The names of latent attention in most families. That of queries depends on whether they have a latent vector.
LATENT_NAMES: Mapping[str, Held] = MappingProxyType(
    {
        "self_attn.q_a_proj": "attention.query_down",
        "self_attn.q_a_layernorm": "attention.query_norm",
        "self_attn.kv_a_proj_with_mqa": "attention.latent",
        "self_attn.kv_a_layernorm": "attention.latent_norm",
        "self_attn.kv_b_proj": ByHead(("attention.key", "attention.value")),
    }
)


# The names of a gated delta rule in Qwen3-Next, but for its projections from the residual stream, and of a gated attention.
DELTA_NAMES: Mapping[str, Held] = MappingProxyType(
    {
        "self_attn.q_proj": ByHead(("attention.query", "attention.gate")),
        "linear_attn.conv1d.weight": Taps(("mixer.query_taps", "mixer.key_taps", "mixer.value_taps")),
        "linear_attn.A_log": "mixer.log_rate",
        "linear_attn.dt_bias": "mixer.decay_bias",
        "linear_attn.norm": "mixer.norm",
        "linear_attn.out_proj": "mixer.output",
    }
)


def mamba1_names(module: str = "mamba") -> dict[str, Held]:
    """Returns the names of a Mamba-1, which is this module of a block."""
    return {
        f"{module}.in_proj": ("mixer.value", "mixer.gate"),
        f"{module}.conv1d.weight": Taps(("mixer.value_taps",)),
        f"{module}.conv1d.bias": "mixer.value_bias",
        f"{module}.x_proj": ("mixer.low", "mixer.key", "mixer.query"),
        f"{module}.dt_proj.weight": "mixer.decay.weight",
        f"{module}.dt_proj.bias": "mixer.decay_bias",
        **{f"{module}.{b}_layernorm": f"mixer.{a}_norm" for a, b in (("low", "dt"), ("key", "b"), ("query", "c"))},
        f"{module}.A_log": "mixer.log_rate",
        f"{module}.D": "mixer.skip",
        f"{module}.out_proj": "mixer.output",
    }


def mamba_names(module: str = "mamba") -> dict[str, Held]:
    """Returns the names of a Mamba-2, which is this module of a block."""
    return {
        f"{module}.in_proj": ("mixer.gate", "mixer.value", "mixer.key", "mixer.query", "mixer.decay"),
        f"{module}.conv1d.weight": Taps(("mixer.value_taps", "mixer.key_taps", "mixer.query_taps")),
        f"{module}.conv1d.bias": ("mixer.value_bias", "mixer.key_bias", "mixer.query_bias"),
        f"{module}.A_log": "mixer.log_rate",
        f"{module}.D": "mixer.skip",
        f"{module}.dt_bias": "mixer.decay_bias",
        f"{module}.norm": "mixer.norm",
        f"{module}.out_proj": "mixer.output",
    }


@dataclass(frozen=True)
class Names:
    """Names on disk, and the module or the array that each of them stores.

    **Arguments:**

    - `block`: the modules of a block, by their names on disk, where they differ from LLaMA's. A name with `{}` is one of
        each expert. A tuple is several layers that are stored as one, with concatenated outputs.
    - `layers`: the prefix of the names of a block, with `{}` for its index.
    - `experts`: the module of transformers with the experts of a layer.
    - `embedding`, `norm`, `head`, `score`, `token_score`: the other modules; `others`: more of them, and arrays.
    - `is_transposed`: whether the matrices of blocks are stored as `[in, out]`.
    - `ignored`, `aliases`: as in `WeightMap`. `{n_layers}` in the first ones stands for the number of layers. Names without
        their first part, as in folders of models without a head, are read too.
    """

    block: Mapping[str, Held] = field(default_factory=dict)
    layers: str = "model.layers.{}."
    experts: str = "mlp.experts"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    score: str = "score"
    token_score: str = "score"
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
            for tensor in stored({module: disk}, leaves)
        ]
        renamed = {module for held in self.block.values() for module in _modules(held)}
        kept = {disk: held for disk, held in BLOCK.items() if renamed.isdisjoint(_modules(held))}
        for prefix, first, n, step in _stacks(config):
            for disk, held in {**kept, **self.block}.items():
                n_experts = config.n_experts if "{}" in disk else None
                stacked = {"n_layers": n, "first_layer": first, "layer_step": step, "n_experts": n_experts}
                found = self._of_block(self.layers + disk, held, prefix, leaves, config)
                tensors += [replace(tensor, **stacked) for tensor in found]
        for disk, module in {self.norm: "norm", self.head: "head", f"{self.head}.bias": "head_bias"}.items():
            tensors += stored({module: disk}, leaves)
        names = [name.split(".") for name in (self.embedding, self.layers, self.norm, *self.others)]
        base = names[0][0]
        starts = "|".join(dict.fromkeys(parts[1] for parts in names if parts[0] == base))
        headless = () if config.has_head else (f"{self.head}.*",)
        return WeightMap(
            tensors=tensors,
            ignored=tuple(glob.replace("{n_layers}", str(config.n_layers)) for glob in (*self.ignored, *headless)),
            copies={f"{self.head}.weight": f"{self.embedding}.weight"} if config.is_tied else {},
            untied_by="tie_word_embeddings",
            aliases=(*self.aliases, (rf"^(?=({starts})\.)", f"{base}.")),
            modules=() if config.has_head else ((rf"^{base}\.", ""),),
            experts=self.layers + self.experts if config.n_experts else "",
            alternates=any(isinstance(held, Experts) and held.is_interleaved for held in self.block.values()),
        )

    def _of_block(self, disk: str, held: Held, prefix: str, leaves: Mapping[str, Any], config: Any) -> list[StoredTensor]:
        if isinstance(held, Experts | Taps):
            return held.stored(disk, prefix, leaves)
        if isinstance(held, Wide):
            path = prefix + held.leaf
            shape = tuple(leaves[path].shape[1:]) if path in leaves else ()
            return [reshaped(disk, path, (1, *shape), shape)] if path in leaves else []
        n_heads = held.heads(config) if isinstance(held, ByHead) else None
        names = {" ".join(prefix + module for module in _modules(held)): disk}
        found = stored(names, leaves, n_heads=n_heads)
        is_matrix = lambda tensor: len(leaves[tensor.leaves[0]].shape) == 3  # noqa: E731
        return [_transposed(tensor) if self.is_transposed and is_matrix(tensor) else tensor for tensor in found]


# Of a text model in the folder of a model that also reads images: the other tensors, and the names in such a folder.
PART_OF_LARGER: Mapping[str, Any] = MappingProxyType(
    {
        "ignored": ("*.rotary_emb.inv_freq", "*vision_tower.*", "*multi_modal_projector.*"),
        "aliases": (
            (r"^language_model\.lm_head\.", "lm_head."),
            (r"^(language_model\.model|model\.language_model)\.", "model."),
        ),
    }
)


def _stacks(config: Any) -> list[tuple[str, int, int, int]]:
    """Returns the path of each stacked block, the index of its first layer, the number of layers that it stands for, and the
    distance between them."""
    if config.by_kind:
        groups = [(layers.field, layers.first, len(layers.kinds), layers.period) for layers in layers_of(config)]
        return [
            (f"{stack}.blocks.layers.{i}.", first + i, n // period, period)
            for stack, first, n, period in groups
            for i in range(period)
        ]
    n_first = config.n_first_stack
    found = []
    for stack, first, n_layers in (("first", 0, n_first), ("stack", n_first, config.n_layers - n_first)):
        n = len(config.kinds(first, n_layers)) if n_layers else 0
        if n < 2:
            found.append((f"{stack}.blocks.", first, n_layers, 1))
        found += [(f"{stack}.blocks.layers.{i}.", first + i, n_layers // n, n) for i in range(n) if n > 1]
    return found


def _modules(held: Held) -> tuple[str, ...]:
    if isinstance(held, str | Wide):
        return (held if isinstance(held, str) else held.leaf,)
    return held.leaves if isinstance(held, ByHead | Experts | Taps) else held


def _transposed(tensor: StoredTensor) -> StoredTensor:
    return replace(
        tensor, load=lambda stored: tensor.load(stored.T), save=lambda *leaves: np.transpose(tensor.save(*leaves))
    )
