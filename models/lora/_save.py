"""Writes PEFT's folders of LoRA adapters: `adapter_config.json`, the adapters, and the modules trained beside them."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from redeqx._origins import CHANGED, origin_of
from redeqx._quantised import is_quantised
from redeqx._tree import PyTree, named_leaves
from redeqx.checkpoint import write_tensors
from redeqx.errors import brief, check_alive, check_folder, filter_traceback, wrong
from redeqx.storage import disk_path, replacing

from ..hf import Pretrained, replace_json
from ._adapters import adapters_of, layers_of, leaf_path
from ._layers import LEAVES, LoraLinear, lengths
from ._modules import CONFIG, PREFIX, WEIGHTS, Module, copies_of, in_memory, module_of, modules_of


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
        raise wrong("base", "a name or a folder", brief(base), "Pass what the base was loaded from.", TypeError)
    tensors: dict[str, np.ndarray] = {}
    saved: dict[Module, tuple[int, int | float]] = {}  # rank and alpha
    linears, has_dora = layers_of(model), any(getattr(layer, "magnitude", None) is not None for layer in adapters.values())
    modules, rate = modules_of(model, linears), _rate(adapters)
    for module in modules:
        parts = [(rows, adapters[path]) for rows, path in zip(module.rows, module.paths, strict=True) if path in adapters]
        if not parts:
            continue
        if module.is_embedding:
            parts = [(slice(None), layer) for _, layer in parts]
        a, b, scale = _combine(parts, module.n_in if module.is_embedding else module.n_out)
        magnitude = _magnitude(module, adapters, linears) if has_dora else None
        # PEFT adapts the parameters of a module one around the other.
        is_inner = module.parameter == "gate_up_proj" and module.paths[0].replace(".gate", ".down") in adapters
        saved[module] = a.shape[-2], _alpha(scale, a.shape[-2])
        for i, name in enumerate(module.names):
            layer = ... if module.n_layers is None else i
            tensors |= module.tensors(name, a[layer], b[layer], is_inner=is_inner)
            if magnitude is not None:
                tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = magnitude[layer]
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
    parameters = sorted({name for module in saved if module.parameter is not None for name in module.names})
    (rank, alpha), _ = Counter(saved.values()).most_common(1)[0]
    # The longest first, because PEFT applies a pattern to any module whose path ends with it.
    patterns = {_pattern(module, saved): saved[module] for module in sorted(saved, key=lambda module: -len(module.name))}
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": None if base is None else str(base),
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {pattern: r for pattern, (r, _) in patterns.items() if len(set(saved.values())) > 1},
        "alpha_pattern": {pattern: a for pattern, (_, a) in patterns.items() if len(set(saved.values())) > 1},
        "target_modules": _targets(model, [module for module in saved if module.parameter is None]),
        **({"target_parameters": parameters} if parameters else {}),
        "fan_in_fan_out": any(module.is_transposed for module in saved),
        "lora_dropout": rate,
        **({"use_dora": True} if has_dora else {}),
        "bias": "none",
        **({"modules_to_save": modules_to_save} if modules_to_save else {}),
    }
    replace_json(folder / CONFIG, fields)
    return folder


def _rate(adapters: Mapping[str, Any]) -> float:
    """Returns the dropout rate of all adapters. Raises ValueError if they differ, since PEFT has one for all."""
    rates = {path: drop.p for path, layer in adapters.items() if (drop := getattr(layer, "dropout", None)) is not None}
    rate = next(iter(rates.values()), 0.0)
    for path, layer in adapters.items():
        if isinstance(layer, LoraLinear) and rates.get(path, 0.0) != rate:
            got = rates.get(path, 0.0)
            raise wrong(path, f"a dropout rate of {rate}, as in other layers", got, "Make them equal.")
    return rate


def _changed(model: PyTree, adapters: Mapping[str, Any]) -> list[str]:
    """Returns the paths of leaves that are no adapters and differ from the base, because they were trained."""
    own = {leaf_path(path, leaf) for path in adapters for leaf in LEAVES}
    return [name for name, leaf in named_leaves(model).items() if origin_of(leaf) == CHANGED and name not in own]


def _add_changed(
    model: PyTree, changed: Sequence[str], adapted: Collection[str], tensors: dict[str, np.ndarray]
) -> list[str]:
    """Adds the modules with changed leaves to an adapter's tensors. Returns the modules' names.

    Raises ValueError for a leaf that no module without an adapter holds.
    """
    leaves, modules = named_leaves(model, is_leaf=is_quantised), set[str]()
    if not isinstance(model, Pretrained):
        for name in changed:
            tensors[PREFIX + name] = np.asarray(leaves[name])
            modules.add(module_of(name) or name)
        return sorted(modules)
    weight_map = type(model).weight_map(model.config)
    stored = [tensor for tensor in weight_map.tensors if tensor.n_experts is None]
    wanted = {module_of(tensor.disk) for tensor in stored if not set(changed).isdisjoint(tensor.leaves)}
    known = {leaf for tensor in stored if module_of(tensor.disk) in wanted for leaf in tensor.leaves}
    whole: dict[str, np.ndarray] = {}
    for tensor in stored:
        if module_of(tensor.disk) in wanted:
            arrays = [np.asarray(jnp.asarray(leaves[leaf])) for leaf in tensor.leaves]  # of quantised ones, the numbers
            for i, name in enumerate(in_memory(weight_map, tensor)):
                whole[name] = tensor.save(*(arrays if tensor.n_layers is None else [array[i] for array in arrays]))
    # Another module of transformers that shares a tensor would keep the base's: PEFT copies a module that it saves.
    whole |= {copy: whole[name] for copy, name in copies_of(weight_map).items() if name in whole}
    tensors |= {PREFIX + name: array for name, array in whole.items()}
    modules = {module_of(name) for name in whole}
    lost = sorted(set(changed) - known) or sorted(modules & set(adapted))
    if lost:
        raise ValueError(
            f"`{lost[0]}`: expected trained leaves in modules without an adapter, as folders of {type(model).__name__} hold "
            "them, got another one. Save it with `Trainer.save_ckpt`, or `lora.merge` the model and save that."
        )
    return sorted(modules)


def _combine(parts: Sequence[tuple[Any, Any]], n_out: int) -> tuple[np.ndarray, np.ndarray, float]:
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


def _magnitude(module: Module, adapters: Mapping[str, Any], linears: Mapping[str, Any]) -> np.ndarray:
    """Returns the magnitudes of a module of DoRA. Layers without an adapter have the lengths of their weights.

    Raises ValueError for an adapter without magnitudes, since PEFT has one config for all.
    """
    found: Any = None
    for rows, path in zip(module.rows, module.paths, strict=True):
        if path in adapters and getattr(adapters[path], "magnitude", None) is None:  # embeddings have none
            raise wrong(path, "DoRA, as other layers have", "none", "Save these adapters on their own.")
        own = adapters[path].magnitude if path in adapters else lengths(linears[path].weight)
        found = np.zeros((*own.shape[:-1], module.n_out), own.dtype) if found is None else found
        found[..., rows] = np.asarray(own)
    return found


def _alpha(scale: float, rank: int) -> int | float:
    # Recovers the original `alpha` if it had few digits.
    alpha = float(f"{scale * rank:.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def _pattern(module: Module, saved: Collection[Module]) -> str:
    """Returns the regular expression for a module's names, for `rank_pattern` and `alpha_pattern`. It lists the layers if
    others have a module of this name in another stack."""
    start, *end = (re.escape(part) for part in module.name.split("{}"))
    every = r"\d+".join((start, *end))
    others = [name for other in saved if other is not module for name in other.names]
    if module.n_layers is None or not any(re.fullmatch(every, name) for name in others):
        return every
    indices = (module.first_layer + i * module.layer_step for i in range(module.n_layers))
    return f"({'|'.join(map(str, indices))})".join((start, *end))


def _targets(model: PyTree, saved: Sequence[Module]) -> list[str]:
    """`target_modules`: the last components of the adapted modules' names if they match no other module, else the full
    names."""
    adapted = {name for module in saved for name in module.names}
    if isinstance(model, Pretrained):
        table = type(model).weight_map(model.config).tensors
        layers = {module_of(disk) for tensor in table for disk in tensor.on_disk} | adapted
    else:
        layers = set(layers_of(model))
    known = {".".join(parts[: i + 1]) for parts in (name.split(".") for name in layers) for i in range(len(parts))}
    last = {name.rpartition(".")[2] for name in adapted}
    return sorted(last if {name for name in known if name.rpartition(".")[2] in last} == adapted else adapted)
