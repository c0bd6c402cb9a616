"""Reads and writes PEFT's folders of LoRA adapters, through the weight maps of the models.

This module owns `adapter_config.json`, the names of transformers' modules, and the mapping between a module's adapter there
and the adapters of one or several layers here. What an adapter computes is in `_adapters`.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from redeqx._origins import CHANGED, origin_of, set_origin
from redeqx._tree import ModelT, PyTree, is_array_like, listed, map_named, named_leaves, nearest
from redeqx.checkpoint import TensorReader, write_tensors
from redeqx.errors import brief, check_alive, check_folder, filter_traceback
from redeqx.storage import disk_path, replacing

from .._kinds import INTEGER, NUMBER
from ..hf import ConfigReader, Pretrained, StoredTensor, WeightMap, read_config, replace_json
from ._adapters import LoraLinear, adapters_of, at_least_float32, check_plain, leaf_path, linears_of, replace_layers
from ._patterns import by_pattern, check_patterns

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."
_TENSOR = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_BASE = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.base_layer\.(?P<which>weight|bias)")
# Keys that change what an adapter computes, or the base's weights. Any value but null, false or an empty one is refused.
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# With any other initialization, PEFT changes the base's weights when it loads the adapter.
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, eq=False)
class _Module:
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
    - `first_layer`: the index of the first of them.
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

    @property
    def names(self) -> list[str]:
        """The modules' names, one for each layer."""
        return self._layer_names(self.name)

    @property
    def layer_indices(self) -> dict[str, int]:
        """The layer's index by each name that a module has had; 0 for a single module."""
        return {name: i for names in (self._layer_names(self.disk), self.names) for i, name in enumerate(names)}

    def _layer_names(self, name: str) -> list[str]:
        return [name] if self.n_layers is None else [name.format(i + self.first_layer) for i in range(self.n_layers)]


def _modules(model: PyTree, linears: Mapping[str, eqx.nn.Linear]) -> list[_Module]:
    """Returns every linear layer that a folder's adapter may be for: by the family's weight map, else by the tree's own
    paths."""
    if not isinstance(model, Pretrained):
        return [
            _Module(path, path, (path,), (slice(None),), *reversed(layer.weight.shape[-2:]), stacked=layer.weight.shape[:-2])
            for path, layer in linears.items()
        ]
    weight_map = type(model).weight_map(model.config)
    modules = [_module(name, weight_map, linears) for name in weight_map.tensors]
    return [module for module in modules if module is not None]


def _module(name: StoredTensor, weight_map: WeightMap, linears: Mapping[str, eqx.nn.Linear]) -> _Module | None:
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
            return _Module(in_memory, disk, paths, rows, n_in, n_out, (), n_layers, is_transposed, first)
    return None


@filter_traceback
def save_adapter(model: PyTree, folder: str | Path, *, base: str | None = None) -> Path:
    """Saves adapters as a folder that `peft.PeftModel.from_pretrained` loads over the same base. Returns the folder's path.

    The adapters of a `redeqx.models` model get the names of transformers' modules, one for each layer. Where transformers
    holds several layers as one module, their adapters become one adapter whose rank is the sum of theirs: `A` is
    concatenated and `B` is block-diagonal. Layers of the module without an adapter get zeros. The adapters of any other
    model get its own paths, for `load_adapter`.

    Leaves that were trained in addition to the adapters (`trainable(also=)`) are saved too, in their modules, which PEFT's
    config lists as `modules_to_save`. A Trainer knows them: pass `trainer.model`, or the model that an average keeps.

    **Arguments:**

    - `model`: a model with adapters.
    - `folder`: created if it does not exist. An adapter in it is replaced.
    - `base`: the name or folder of the base model, for `base_model_name_or_path`.

    Raises ValueError for a model without adapters, for adapters on layers that the base does not have, and for leaves that
    were trained in a module with an adapter, which PEFT's format cannot hold.
    """
    check_alive(model, "model")
    adapters, folder = adapters_of(model), disk_path(folder, "folder")
    check_folder(folder, "folder")
    if base is not None and not isinstance(base, str | Path):
        raise TypeError(f"`base`: expected a name or a folder, got {brief(base)}. Pass what the base was loaded from.")
    tensors: dict[str, np.ndarray] = {}
    saved: dict[_Module, tuple[int, int | float]] = {}  # rank and alpha
    for module in _modules(model, linears_of(model)):
        parts = [(rows, adapters[path]) for rows, path in zip(module.rows, module.paths, strict=True) if path in adapters]
        if not parts:
            continue
        a, b, scale = _combine(parts, module.n_out)
        saved[module] = a.shape[-2], _alpha(scale, a.shape[-2])
        for i, name in enumerate(module.names):
            layer = ... if module.n_layers is None else i
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = a[layer]
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = b[layer]
    lost = adapters.keys() - {path for module in saved for path in module.paths}
    if lost:
        raise ValueError(
            f"`{min(lost)}`: expected a layer that folders of {type(model).__name__} hold as a matrix, got an adapter on "
            "another. Save it with `Trainer.save_ckpt`, or `lora.merge` the model and save that."
        )
    changed = _changed(model, adapters)
    modules_to_save = _add_changed(model, changed, {name for module in saved for name in module.names}, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses a file without this metadata, which names the framework that wrote it.
    with replacing(folder / f"{WEIGHTS}.safetensors") as path:
        write_tensors(path, tensors, metadata={"format": "pt"})
    (rank, alpha), _ = Counter(saved.values()).most_common(1)[0]
    # The longest first, because PEFT applies a pattern to any module whose path ends with it.
    patterns = {_pattern(module): saved[module] for module in sorted(saved, key=lambda module: -len(module.name))}
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": None if base is None else str(base),
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {pattern: r for pattern, (r, _) in patterns.items() if len(set(saved.values())) > 1},
        "alpha_pattern": {pattern: a for pattern, (_, a) in patterns.items() if len(set(saved.values())) > 1},
        "target_modules": _targets(model, saved),
        "fan_in_fan_out": any(module.is_transposed for module in saved),
        "lora_dropout": 0.0,
        "bias": "none",
        **({"modules_to_save": modules_to_save} if modules_to_save else {}),
    }
    replace_json(folder / CONFIG, fields)
    return folder


def _changed(model: PyTree, adapters: Mapping[str, LoraLinear]) -> list[str]:
    """Returns the paths of leaves that are no adapters and differ from the base, because they were trained."""
    own = {leaf_path(path, leaf) for path in adapters for leaf in ("lora_a", "lora_b")}
    return [name for name, leaf in named_leaves(model).items() if origin_of(leaf) == CHANGED and name not in own]


def _add_changed(
    model: PyTree, changed: Sequence[str], adapted: Collection[str], tensors: dict[str, np.ndarray]
) -> list[str]:
    """Adds the modules with changed leaves to an adapter's tensors. Returns the modules' names.

    Raises ValueError for a leaf that no module without an adapter holds.
    """
    leaves, modules = named_leaves(model), set[str]()
    if not isinstance(model, Pretrained):
        for name in changed:
            tensors[_PREFIX + name] = np.asarray(leaves[name])
            modules.add(name.rpartition(".")[0] or name)
        return sorted(modules)
    weight_map = type(model).weight_map(model.config)
    wanted = {_module_of(tensor.disk) for tensor in weight_map.tensors if not set(changed).isdisjoint(tensor.leaves)}
    known = {leaf for tensor in weight_map.tensors if _module_of(tensor.disk) in wanted for leaf in tensor.leaves}
    whole: dict[str, np.ndarray] = {}
    for tensor in weight_map.tensors:
        if _module_of(tensor.disk) in wanted:
            arrays = [np.asarray(leaves[leaf]) for leaf in tensor.leaves]
            for i, name in enumerate(_in_memory(weight_map, tensor)):
                whole[name] = tensor.save(*(arrays if tensor.n_layers is None else [array[i] for array in arrays]))
    # Another module of transformers that shares a tensor would keep the base's: PEFT copies a module that it saves.
    whole |= {copy: whole[name] for copy, name in _copies(weight_map).items() if name in whole}
    tensors |= {_PREFIX + name: array for name, array in whole.items()}
    modules = {_module_of(name) for name in whole}
    lost = sorted(set(changed) - known) or sorted(modules & set(adapted))
    if lost:
        raise ValueError(
            f"`{lost[0]}`: expected trained leaves in modules without an adapter, as folders of {type(model).__name__} hold "
            "them, got another one. Save it with `Trainer.save_ckpt`, or `lora.merge` the model and save that."
        )
    return sorted(modules)


def _module_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _in_memory(weight_map: WeightMap, tensor: StoredTensor) -> list[str]:
    """Returns the names that a stored tensor has in transformers' modules, one for each layer."""
    name = f"{weight_map.in_memory(_module_of(tensor.disk))}.{tensor.disk.rpartition('.')[2]}"
    return [name] if tensor.n_layers is None else [name.format(i + tensor.first_layer) for i in range(tensor.n_layers)]


def _copies(weight_map: WeightMap) -> dict[str, str]:
    """Maps the names of tied tensors in transformers' modules to that of the one that is stored."""
    renamed = lambda disk: f"{weight_map.in_memory(_module_of(disk))}.{disk.rpartition('.')[2]}"  # noqa: E731
    return {renamed(copy): renamed(original) for copy, original in weight_map.copies.items()}


def _combine(parts: Sequence[tuple[Any, LoraLinear]], n_out: int) -> tuple[np.ndarray, np.ndarray, float]:
    """`A`, `B` and the scale of one adapter that computes the same as the adapters of the parts."""
    scale = max((layer.scale for _, layer in parts), key=abs)
    a_parts = [np.asarray(layer.lora_a) for _, layer in parts]
    is_shared = all(np.array_equal(a, a_parts[0]) for a in a_parts)
    a = a_parts[0] if is_shared else np.concatenate(a_parts, axis=-2)
    b = np.zeros((*a.shape[:-2], n_out, a.shape[-2]), a.dtype)
    start = 0
    for rows, layer in parts:
        b_part = np.asarray(layer.lora_b)
        stop = start + b_part.shape[-1]
        b[..., rows, start:stop] = b_part if layer.scale == scale else b_part * (layer.scale / scale)
        start = 0 if is_shared else stop
    return a, b, scale


def _alpha(scale: float, rank: int) -> int | float:
    # Recovers the original `alpha` if it had few digits.
    alpha = float(f"{scale * rank:.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def _pattern(module: _Module) -> str:
    """Returns the regular expression for a module's names, for `rank_pattern` and `alpha_pattern`."""
    escaped = re.escape(module.name)
    return escaped if module.n_layers is None else escaped.replace(re.escape("{}"), r"\d+")


def _targets(model: PyTree, saved: Mapping[_Module, Any]) -> list[str]:
    """`target_modules`: the last components of the adapted modules' names if they match no other module, else the full
    names."""
    adapted = {name for module in saved for name in module.names}
    if isinstance(model, Pretrained):
        table = type(model).weight_map(model.config).tensors
        layers = {disk.rpartition(".")[0] for name in table for disk in name.on_disk} | adapted
    else:
        layers = set(linears_of(model))
    known = {".".join(parts[: i + 1]) for parts in (name.split(".") for name in layers) for i in range(len(parts))}
    last = {name.rpartition(".")[2] for name in adapted}
    return sorted(last if {name for name in known if name.rpartition(".")[2] in last} == adapted else adapted)


@filter_traceback
def load_adapter(model: ModelT, folder: str | Path) -> ModelT:
    """Loads the adapters of a folder that PEFT or `save_adapter` wrote into a model.

    The layers of one stack get the same rank, the largest among them, and the same scale. Smaller adapters are padded with
    zeros. A layer without an adapter gets one of zeros, which stays zero in training. Where transformers holds several of
    our layers as one, its adapter is split: each layer gets its own rows of `B` and the components of the rank that those
    rows use.

    **Arguments:**

    - `model`: the base: a model of `redeqx.models`, or any other model whose adapters `save_adapter` wrote.
    - `folder`: holds `adapter_config.json` and `adapter_model.safetensors`. Its `lora_dropout` is not used.

    Raises ValueError for a folder without an adapter, for an adapter of a kind that is not implemented or of another base,
    and for layers that already have an adapter.
    """
    folder = disk_path(folder, "folder")
    keys = _read_config(folder / CONFIG)
    source = TensorReader.find(folder, WEIGHTS)
    model, whole = _with_whole_modules(model, source, keys)
    linears = linears_of(model)
    layers: dict[str, eqx.nn.Linear] = {}
    for module, adapters in _match(model, linears, source, keys, whole).items():
        a, b, scale = _stacked(module, adapters)
        for rows, path in zip(module.rows, module.paths, strict=True):
            part, used = b[..., rows, :], slice(None)
            if len(module.paths) > 1 and b.any():  # an untrained adapter has B = 0: keep its full rank
                used = part.any(axis=tuple(range(part.ndim - 1)))
                if not used.any():
                    continue
            check_plain({path: linears[path]})
            layers[path] = LoraLinear(linears[path], jnp.asarray(a[..., used, :]), jnp.asarray(part[..., used]), scale=scale)
    return replace_layers(model, layers)


_Adapter = tuple[np.ndarray, np.ndarray, float]  # A, B and scale of one module
_Found = dict[_Module, dict[int, _Adapter]]  # by the layer's index; 0 for a single module


def _with_whole_modules(model: ModelT, source: TensorReader, keys: ConfigReader) -> tuple[ModelT, set[str]]:
    """Returns the model with the modules that a folder holds as a whole (`modules_to_save`), and the names of their tensors.

    Raises ValueError for tensors that do not match the model.
    """
    listed_modules = keys.get("modules_to_save", None) or []
    if not isinstance(listed_modules, list) or not all(isinstance(name, str) for name in listed_modules):
        raise ValueError(f"`{keys.path}`: `modules_to_save`: expected names, got {brief(listed_modules)}. Correct the file.")
    if not listed_modules:
        return model, set()
    places, copies = _places(model)
    leaves, new, whole, problems = named_leaves(model), {}, set[str](), []
    for key in source.names():
        name = key.removeprefix(_PREFIX)
        is_listed = any((_module_of(name) or name).endswith(module) for module in listed_modules)  # as PEFT compares
        if not is_listed or not key.startswith(_PREFIX) or _TENSOR.fullmatch(key) is not None:
            continue
        whole.add(key)
        tensor = np.asarray(source.view(key))
        if name in copies:
            original = _PREFIX + copies[name]
            if original not in source.names() or not np.array_equal(tensor, np.asarray(source.view(original))):
                problems.append(f"`{key}`: expected the values of `{original}`, to which this model ties it, got others.")
            continue
        if name not in places:
            problems.append(f"`{key}`: expected the name of a tensor of this model.{nearest(name, places)}")
            continue
        stored, i = places[name]
        expected = [leaves[leaf].shape if i is None else leaves[leaf].shape[1:] for leaf in stored.leaves]
        parts = stored.load(tensor) if tensor.size == sum(map(math.prod, expected)) else ()
        if [part.shape for part in parts] != expected:
            problems.append(f"`{key}`: expected {expected[0]}, got {tensor.shape}.")
            continue
        problems += [
            f"`{_PREFIX}{copy}`: expected too, as this model ties it to `{key}`, got none."
            for copy, original in copies.items()
            if original == name and _PREFIX + copy not in source.names()
        ]
        for leaf, part in zip(stored.leaves, parts, strict=True):
            array = new.get(leaf, leaves[leaf])
            new[leaf] = jnp.asarray(array).at[... if i is None else i].set(jnp.asarray(part, array.dtype))
    for module in listed_modules:
        if not any((_module_of(key) or key).endswith(module) for key in whole):
            problems.append(f"`{module}`: expected its tensors, got none.")
    if problems:
        listing = "\n  - ".join(["", *listed(problems)])
        raise ValueError(
            f"`{source.path}`: expected the tensors of `modules_to_save`, as `{keys.path}` lists them, got {len(problems)} "
            f"that do not match:{listing}\nLoad it over the model that it was trained on."
        )
    for array in new.values():
        set_origin(array, CHANGED)
    return map_named(lambda name, leaf: new.get(name, leaf), model), whole


def _places(model: PyTree) -> tuple[dict[str, tuple[StoredTensor, int | None]], dict[str, str]]:
    """Returns the tensors of a model's modules by their names in PEFT, each with the layer's index, and those that are tied
    to another tensor."""
    if not isinstance(model, Pretrained):
        names = [name for name, leaf in named_leaves(model).items() if is_array_like(leaf)]
        return {name: (StoredTensor(name, (name,)), None) for name in names}, {}
    weight_map = type(model).weight_map(model.config)
    places = {
        name: (tensor, None if tensor.n_layers is None else i)
        for tensor in weight_map.tensors
        for i, name in enumerate(_in_memory(weight_map, tensor))
    }
    return places, _copies(weight_map)


def _match(
    model: PyTree, linears: Mapping[str, eqx.nn.Linear], source: TensorReader, keys: ConfigReader, whole: Collection[str]
) -> _Found:
    """Returns a folder's adapters by module, after a check that all of them match the model.

    **Arguments:**

    - `whole`: the names of tensors that are no adapters.

    Raises ValueError that lists those that do not match.
    """
    known = {name: (module, i) for module in _modules(model, linears) for name, i in module.layer_indices.items()}
    problems: list[str] = []
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key in source.names():
        if key in whole:
            continue
        tensor = source.view(key)
        if (match := _TENSOR.fullmatch(key)) is not None:
            pairs.setdefault(match["module"], {})[match["which"]] = tensor
        elif (match := _BASE.fullmatch(key)) is None or (current := _current(model, match["module"])) not in known:
            got = tensor.shape
            problems.append(f"`{key}`: expected `{_PREFIX}<module>.lora_A.weight` or `.lora_B.weight`, got {got}.")
        elif not _is_base_tensor(tensor, match["which"], *known[current], linears):
            problems.append(f"`{key}`: expected the values that this model has, got others, of shape {tensor.shape}.")
    found: _Found = {}
    for name, pair in pairs.items():
        current = _current(model, name)
        if current not in known:
            near = nearest(current, known)
            problems.append(f"`{_PREFIX}{name}`: expected the name of a linear layer of this model.{near}")
            continue
        module, i = known[current]
        rank = by_pattern(keys.get("rank_pattern", {}), name, keys.get("r", 8))
        alpha = by_pattern(keys.get("alpha_pattern", {}), name, keys.get("lora_alpha", 8.0, NUMBER))
        shapes = {"A": (*module.stacked, rank, module.n_in), "B": (*module.stacked, module.n_out, rank)}
        wrong = [which for which, shape in shapes.items() if which not in pair or pair[which].shape != shape]
        for which in wrong:
            got = pair[which].shape if which in pair else "none"
            problems.append(f"`{_PREFIX}{name}.lora_{which}.weight`: expected {shapes[which]}, got {got}.")
        if not wrong:
            scale = alpha / (rank**0.5 if keys.get("use_rslora", False) else rank)
            found.setdefault(module, {})[i] = pair["A"], pair["B"], scale
    if problems or not found:
        listing = "\n  - ".join(["", *listed(problems)])
        base = keys.get("base_model_name_or_path", None)
        raise ValueError(
            f"`{source.path}`: expected adapters of this {type(model).__name__}, as `{keys.path}` describes them, got "
            f"{f'{len(problems)} that do not match:' if problems else 'none.'}{listing}\n"
            f"Load it over the model that it was trained on{f', {base!r}' if base else ''}."
        )
    return found


def _is_base_tensor(tensor: np.ndarray, which: str, module: _Module, i: int, linears: Mapping[str, eqx.nn.Linear]) -> bool:
    """Returns whether a tensor equals a layer's own weight or bias, which PEFT saves beside the adapters of heads."""
    tensor = tensor.T if which == "weight" and module.is_transposed else tensor
    for rows, path in zip(module.rows, module.paths, strict=True):
        leaf = getattr(linears[path], which)
        leaf = leaf if leaf is None or module.n_layers is None else leaf[i]
        if leaf is None or tensor.shape[0] != module.n_out or not np.array_equal(tensor[rows].astype(leaf.dtype), leaf):
            return False
    return True


def _stacked(module: _Module, adapters: Mapping[int, _Adapter]) -> _Adapter:
    """Returns one module's adapters over its layers, stacked into one. Smaller ranks are padded with zeros."""
    rank = max(a.shape[-2] for a, _, _ in adapters.values())
    scale = max((scale for _, _, scale in adapters.values()), key=abs)
    dtype = at_least_float32(jnp.result_type(*(array.dtype for a, b, _ in adapters.values() for array in (a, b))))
    n_layers = module.n_layers or 1
    all_a = np.zeros((n_layers, *module.stacked, rank, module.n_in), dtype)
    all_b = np.zeros((n_layers, *module.stacked, module.n_out, rank), dtype)
    for i, (a, b, own_scale) in adapters.items():
        all_a[i, ..., : a.shape[-2], :] = a
        all_b[i, ..., : b.shape[-1]] = b if own_scale == scale else b.astype(dtype) * (own_scale / scale)
    return (all_a[0], all_b[0], scale) if module.n_layers is None else (all_a, all_b, scale)


def _read_config(path: Path) -> ConfigReader:
    """Returns the keys of an adapter's config, after a check that they require nothing that is not implemented."""
    if not path.is_file():
        raise ValueError(
            f"`{path}`: expected a file, got none. Pass the folder that PEFT's `save_pretrained` or `save_adapter` wrote; "
            "one of the Hub has to be downloaded first."
        )
    fields = read_config(path.parent, path.name)
    if fields.get("peft_type") != "LORA":
        raise _refuse(path, "peft_type", "LORA", fields.get("peft_type"))
    if fields.get("bias", "none") != "none":
        raise _refuse(path, "bias", "none", fields["bias"])
    if fields.get("init_lora_weights", True) not in _INITS:
        raise _refuse(path, "init_lora_weights", "one that does not change the base", fields["init_lora_weights"])
    for name in _REFUSED:
        if fields.get(name):
            raise _refuse(path, name, "none", fields[name])
    keys = ConfigReader(fields, path)
    for key, patterns, default, kind, rule in (
        ("r", "rank_pattern", 8, INTEGER, "a number from 1 to 2**31"),
        ("lora_alpha", "alpha_pattern", 8.0, NUMBER, "a finite number"),
    ):
        values = keys.get(patterns, {})
        for value in (keys.get(key, default, kind), *values.values()):
            is_number = isinstance(value, int | float) and abs(value) <= 2**31
            if not is_number or (key == "r" and (not isinstance(value, int) or value < 1)):
                raise ValueError(f"`{path}`: `{key}`: expected {rule}, got {brief(value)}. Correct the file.")
        if (pattern := check_patterns(values)) is not None:
            raise ValueError(
                f"`{path}`: `{patterns}`: expected names of modules, with repeats (`.*`, `\\d+`) and choices (`[ab]`, "
                f"`(a|b)`) that are not nested, got {brief(pattern)}. Write it so."
            )
    return keys


def _refuse(path: Path, key: str, expected: str, got: Any) -> ValueError:
    return ValueError(
        f"`{path}`: `{key}`: expected {expected}, which is implemented, got {brief(got)}. Merge the adapter with "
        "PEFT (`merge_and_unload`) and load the merged model."
    )


def _current(model: PyTree, module: str) -> str:
    """Returns the current spelling of a module's name, which old files may spell differently."""
    if not isinstance(model, Pretrained):
        return module
    return type(model).weight_map(model.config).current(f"{module}.weight").removesuffix(".weight")
