"""Reads PEFT's folders of LoRA adapters, and refuses what this package does not compute."""

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from redeqx._origins import CHANGED, set_origin
from redeqx._quantised import is_quantised
from redeqx._rounding import at_least_float32
from redeqx._tree import ModelT, PyTree, is_array_like, listed, map_named, named_leaves, nearest
from redeqx.checkpoint import TensorReader
from redeqx.errors import brief, filter_traceback
from redeqx.storage import disk_path

from .._kinds import INTEGER, NUMBER, RATE
from ..hf import ConfigReader, Pretrained, StoredTensor, read_config
from ._adapters import check_plain, layers_of, replace_layers
from ._layers import LoraEmbedding, LoraLinear, lengths
from ._modules import CONFIG, PREFIX, WEIGHTS, Module, copies_of, in_memory, module_of, modules_of

_TENSOR = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(embedding_(?=[AB]$)|(?=[AB]\.))(?P<which>[AB])(\.weight)?")
_MAGNITUDE = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
_BASE = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.base_layer\.(?P<which>weight|bias)")
# Keys that change what an adapter computes, or the base's weights. Any value but null, false or an empty one is refused.
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
# Patterns of names in `rank_pattern` and `alpha_pattern`, which PEFT runs as regular expressions. Those of a foreign folder
# with nested or many repeats could run for ever.
_LETTER = r"(?:[\w.-]|\\[dDwW.-]|\[\^?[\w.\\-]+\])"
_REPEAT = r"(?:[*+?]\??|\{\d{1,3}(?:,\d{0,3})?\})"
_PATTERN = re.compile(rf"(?:{_LETTER}{_REPEAT}?|\((?:\?:)?(?:{_LETTER}|\|)*\)\??|[|^$])*")
_MOST = 10**7  # ways to match all patterns of a config, about 50 ms for a name
# With any other initialization, PEFT changes the base's weights when it loads the adapter.
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@filter_traceback
def load_adapter(model: ModelT, folder: str | Path) -> ModelT:
    """Loads the adapters of a folder that PEFT or `save_adapter` wrote into a model.

    The layers of one stack get the same rank, the largest among them, and the same scale. Smaller adapters are padded with
    zeros. A layer without an adapter gets one of zeros, which stays zero in training. Where transformers holds several of
    our layers as one, its adapter is split: each layer gets its own rows of `B` and the components of the rank that those
    rows use. A quantised weight becomes an array if the folder has its module as a whole.

    **Arguments:**

    - `model`: the base: a model of `redeqx.models`, or any other model whose adapters `save_adapter` wrote.
    - `folder`: holds `adapter_config.json` and `adapter_model.safetensors`. Its `lora_dropout` is off until
        `eqx.nn.inference_mode(model, False)`, as in PEFT.

    Raises ValueError for a folder without an adapter, for an adapter of a kind that is not implemented or of another base,
    and for layers that already have an adapter.
    """
    folder = disk_path(folder, "folder")
    keys = _read_config(folder / CONFIG)
    source = TensorReader.find(folder, WEIGHTS)
    model, whole = _with_whole_modules(model, source, keys)
    linears = layers_of(model)
    layers: dict[str, Any] = {}
    rate = keys.get("lora_dropout", 0.0, RATE)
    drop = eqx.nn.Dropout(rate, inference=True) if rate else None
    for module, adapters in _match(model, linears, source, keys, whole).items():
        a, b, scale = _stacked(module, adapters)
        has_dora = len(next(iter(adapters.values()))) > 3
        if module.is_embedding:
            check_plain({path: linears[path] for path in module.paths})
            own = jnp.asarray(a), jnp.asarray(b)
            layers |= {path: LoraEmbedding(linears[path], *own, scale=scale) for path in module.paths}
            continue
        for rows, path in zip(module.rows, module.paths, strict=True):
            part, used = b[..., rows, :], slice(None)
            if len(module.paths) > 1 and b.any():  # an untrained adapter has B = 0: keep its full rank
                used = part.any(axis=tuple(range(part.ndim - 1)))
                if not used.any() and not has_dora:
                    continue
            check_plain({path: linears[path]})
            own = jnp.asarray(a[..., used, :]), jnp.asarray(part[..., used])
            magnitude = _magnitude(linears[path], module, adapters, rows) if has_dora else None
            own_drop = None if module.parameter else drop
            layers[path] = LoraLinear(linears[path], *own, scale=scale, magnitude=magnitude, dropout=own_drop)
    return replace_layers(model, layers)


_Adapter = tuple[Any, ...]  # A, B and scale of one module, and the magnitudes of DoRA
_Found = dict[Module, dict[int, _Adapter]]  # by the layer's index; 0 for a single module


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
    leaves, new, whole, problems = named_leaves(model, is_leaf=is_quantised), {}, set[str](), []
    for key in source.names():
        name = key.removeprefix(PREFIX)
        # With `ensure_weight_tying`, PEFT saves a tied module that is not listed.
        names = (module_of(name) or name, module_of(copies.get(name, name)) or name)
        is_listed = any(name.endswith(module) for name in names for module in listed_modules)  # as PEFT compares
        if not is_listed or not key.startswith(PREFIX) or _TENSOR.fullmatch(key) is not None:
            continue
        whole.add(key)
        tensor = np.asarray(source.view(key))
        if name in copies:
            original = PREFIX + copies[name]
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
            f"`{PREFIX}{copy}`: expected too, as this model ties it to `{key}`, got none."
            for copy, original in copies.items()
            if original == name and PREFIX + copy not in source.names()
        ]
        for leaf, part in zip(stored.leaves, parts, strict=True):
            array = new.get(leaf, leaves[leaf])
            new[leaf] = jnp.asarray(array).at[... if i is None else i].set(jnp.asarray(part, array.dtype))
    for module in listed_modules:
        if not any((module_of(key) or key).endswith(module) for key in whole):
            problems.append(f"`{module}`: expected its tensors, got none.")
    if problems:
        listing = "\n  - ".join(["", *listed(problems)])
        raise ValueError(
            f"`{source.path}`: expected the tensors of `modules_to_save`, as `{keys.path}` lists them, got {len(problems)} "
            f"that do not match:{listing}\nLoad it over the model that it was trained on."
        )
    for array in new.values():
        set_origin(array, CHANGED)
    return map_named(lambda name, leaf: new.get(name, leaf), model, is_leaf=is_quantised), whole


def _places(model: PyTree) -> tuple[dict[str, tuple[StoredTensor, int | None]], dict[str, str]]:
    """Returns the tensors of a model's modules by their names in PEFT, each with the layer's index, and those that are tied
    to another tensor."""
    if not isinstance(model, Pretrained):
        leaves = named_leaves(model, is_leaf=is_quantised)
        names = [name for name, leaf in leaves.items() if is_array_like(leaf) or is_quantised(leaf)]
        return {name: (StoredTensor(name, (name,)), None) for name in names}, {}
    weight_map = type(model).weight_map(model.config)
    places = {
        name: (tensor, None if tensor.n_layers is None else i)
        for tensor in weight_map.tensors
        for i, name in enumerate(in_memory(weight_map, tensor))
    }
    return places, copies_of(weight_map)


def _match(
    model: PyTree, linears: Mapping[str, Any], source: TensorReader, keys: ConfigReader, whole: Collection[str]
) -> _Found:
    """Returns a folder's adapters by module, after a check that all of them match the model.

    **Arguments:**

    - `whole`: the names of tensors that are no adapters.

    Raises ValueError that lists those that do not match.
    """
    known = {name: (module, i) for module in modules_of(model, linears) for name, i in module.layer_indices.items()}
    targets = keys.get("target_parameters", None) or []
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise ValueError(f"`{keys.path}`: `target_parameters`: expected names, got {brief(targets)}. Correct the file.")
    parameters = [f".{name}" for name, (module, _) in known.items() if module.parameter is not None]
    if not all(any(name.endswith(f".{target}") for name in parameters) for target in targets):
        raise _refuse(keys.path, "target_parameters", "those of this model's experts", targets)
    problems: list[str] = []
    has_dora = keys.get("use_dora", False)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key in source.names():
        if key in whole:
            continue
        tensor = source.view(key)
        if (match := _TENSOR.fullmatch(key)) is not None:
            pairs.setdefault(match["module"], {})[match["which"]] = tensor
        elif has_dora and (match := _MAGNITUDE.fullmatch(key)) is not None:
            pairs.setdefault(match["module"], {})["magnitude_vector"] = tensor
        elif (match := _BASE.fullmatch(key)) is None or (current := _current(model, match["module"])) not in known:
            got = tensor.shape
            problems.append(f"`{key}`: expected `{PREFIX}<module>.lora_A.weight` or `.lora_B.weight`, got {got}.")
        elif not _is_base_tensor(tensor, match["which"], *known[current], linears):
            problems.append(f"`{key}`: expected the values that this model has, got others, of shape {tensor.shape}.")
    found: _Found = {}
    for disk, pair in pairs.items():
        name = disk if _current(model, disk) in known else _parameter(disk, pairs, known, targets)
        current = _current(model, name)
        if current not in known:
            reason, tied = nearest(current, known), _places(model)[1].get(f"{current}.weight")
            if tied is not None:
                reason = f" It has the weight of `{module_of(tied)}` here, and no adapter of its own."
            problems.append(f"`{PREFIX}{name}`: expected the name of a layer of this model.{reason}")
            continue
        module, i = known[current]
        if has_dora and module.is_embedding:
            raise _refuse(keys.path, "use_dora", f"false with an adapter of the embedding `{name}`", has_dora)
        rank = _by_pattern(keys.get("rank_pattern", {}), name, keys.get("r", 8))
        alpha = _by_pattern(keys.get("alpha_pattern", {}), name, keys.get("lora_alpha", 8.0, NUMBER))
        if module.is_embedding:
            shapes = {"A": (rank, module.n_out), "B": (module.n_in, rank)}
        elif module.parameter is not None:
            shapes = {"A": (module.stacked[0] * rank, module.n_in), "B": (module.n_out, module.stacked[0] * rank)}
        else:
            shapes = {"A": (*module.stacked, rank, module.n_in), "B": (*module.stacked, module.n_out, rank)}
        shapes |= {"magnitude_vector": (*module.stacked, module.n_out)} if has_dora else {}
        wrong = [which for which, shape in shapes.items() if which not in pair or pair[which].shape != shape]
        for which in wrong:
            got = pair[which].shape if which in pair else "none"
            problems.append(f"`{PREFIX}{disk}.lora_{which}.weight`: expected {shapes[which]}, got {got}.")
        if not wrong:
            scale = alpha / (rank**0.5 if keys.get("use_rslora", False) else rank)
            magnitude = [pair["magnitude_vector"]] if has_dora else []
            a, b = pair["A"], pair["B"]
            if module.parameter is not None:
                a = rearrange(np.asarray(a), "(experts rank) size -> experts rank size", rank=rank)
                b = rearrange(np.asarray(b), "out (rank experts) -> experts out rank", rank=rank)
            found.setdefault(module, {})[i] = a, b, scale, *magnitude
    if problems or not found:
        listing = "\n  - ".join(["", *listed(problems)])
        base = keys.get("base_model_name_or_path", None)
        raise ValueError(
            f"`{source.path}`: expected adapters of this {type(model).__name__}, as `{keys.path}` describes them, got "
            f"{f'{len(problems)} that do not match:' if problems else 'none.'}{listing}\n"
            f"Load it over the model that it was trained on{f', {base!r}' if base else ''}."
        )
    return found


def _parameter(module: str, pairs: Collection[str], known: Collection[str], targets: Sequence[str]) -> str:
    """Returns the name of the parameter of experts that an adapter is for. PEFT names it by the module, and by its
    `base_layer` if the module has an adapter of a later parameter too; else `target_parameters` tells which one it is."""
    outer = module.removesuffix(".base_layer")
    names = [f"{outer}.{name}" for name in ("gate_up_proj", "down_proj") if f"{outer}.{name}" in known]
    if len(names) < 2:
        return module
    if outer != module or f"{outer}.base_layer" in pairs:
        return names[outer == module]
    chosen = [name for name in names if any(f".{name}".endswith(f".{target}") for target in targets)]
    return chosen[0] if len(chosen) == 1 else module


def _is_base_tensor(tensor: np.ndarray, which: str, module: Module, i: int, linears: Mapping[str, Any]) -> bool:
    """Returns whether a tensor equals a layer's own weight or bias, which PEFT saves beside the adapters of heads."""
    tensor = tensor.T if which == "weight" and module.is_transposed else tensor
    for rows, path in zip(module.rows, module.paths, strict=True):
        leaf = getattr(linears[path], which)
        leaf = leaf if leaf is None or module.n_layers is None else leaf[i]
        if leaf is None or tensor.shape[0] != module.n_out or not np.array_equal(tensor[rows].astype(leaf.dtype), leaf):
            return False
    return True


def _stacked(module: Module, adapters: Mapping[int, _Adapter]) -> _Adapter:
    """Returns one module's adapters over its layers, stacked into one. Smaller ranks are padded with zeros."""
    rank = max(a.shape[-2] for a, *_ in adapters.values())
    scale = max((scale for _, _, scale, *_ in adapters.values()), key=abs)
    dtype = at_least_float32(jnp.result_type(*(array.dtype for a, b, *_ in adapters.values() for array in (a, b))))
    n_layers = module.n_layers or 1
    n_in, n_out = (module.n_out, module.n_in) if module.is_embedding else (module.n_in, module.n_out)
    all_a = np.zeros((n_layers, *module.stacked, rank, n_in), dtype)
    all_b = np.zeros((n_layers, *module.stacked, n_out, rank), dtype)
    for i, (a, b, own_scale, *_) in adapters.items():
        all_a[i, ..., : a.shape[-2], :] = a
        all_b[i, ..., : b.shape[-1]] = b if own_scale == scale else b.astype(dtype) * (own_scale / scale)
    return (all_a[0], all_b[0], scale) if module.n_layers is None else (all_a, all_b, scale)


def _magnitude(layer: eqx.nn.Linear, module: Module, adapters: Mapping[int, _Adapter], rows: Any) -> Any:
    """Returns a layer's magnitudes of DoRA. Layers of a stack without an adapter have the lengths of their weights."""
    magnitude = lengths(layer.weight)
    for i, (*_, own) in adapters.items():
        own = jnp.asarray(own[..., rows], magnitude.dtype)
        magnitude = own if module.n_layers is None else magnitude.at[i].set(own)
    return magnitude


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
        n_ways = 0.0
        for pattern in values:
            n_ways += _count_ways(pattern)
            if n_ways > _MOST:
                raise ValueError(
                    f"`{path}`: `{patterns}`: expected names of modules, with few repeats (`.*`, `\\d+`) and choices "
                    f"(`(a|b)`), which are not nested, got {brief(pattern)}. Write it so."
                )
    return keys


def _count_ways(pattern: str) -> float:
    """Returns about how many ways to match a name Python's matcher tries before it gives up; infinity for what is not
    supported."""
    if _PATTERN.fullmatch(pattern) is None:
        return math.inf
    try:
        _compiled(pattern)
    except re.error:
        return math.inf
    choices = [group.count("|") + 1 for group in re.findall(r"\([^)]*\)", pattern)]
    digits = 2 * len(re.findall(r"[*+{]", pattern)) + sum(map(math.log10, [*choices, *[2] * pattern.count("?")]))
    return 10.0 ** min(digits, 9)


@functools.lru_cache(2**14)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value for a module: that of the first pattern that matches the end of its name, else the default."""
    return next((value for pattern, value in patterns.items() if _compiled(pattern).match(name)), default)


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
