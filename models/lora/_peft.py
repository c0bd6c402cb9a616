"""PEFT's folders of LoRA adapters, read and written by the same name tables as folders of weights.

Owns `adapter_config.json`, the names of transformers' modules, and how the adapter of one module there is those of one or
several layers here. What an adapter computes is `_adapters`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from redeqx._tree import listed, nearest
from redeqx.checkpoint import Source, write_tensors
from redeqx.errors import brief, check_alive

from .._kinds import INTEGER, NUMBER
from ..hf import ConfigReader, Pretrained, StoredTensor, WeightMap, read_config, replace_file, replace_json
from ._adapters import LoraLinear, adapters_of, at_least_float32, check_plain, linears_of, put, within

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."
_TENSOR = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_BASE = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+)\.base_layer\.(?P<which>weight|bias)")
# Keys that change what an adapter computes, or the weights around it. Any value but null, false or an empty one is refused.
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# All others take something from the weights of the base when PEFT loads them.
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, eq=False)
class _Module:
    """One linear layer as PEFT knows it, and the layers of the tree that it holds.

    **Arguments:**

    - `name`: its path there; `{}` stands for the number of a layer where `n_layers` is set.
    - `disk`: the path in files of weights, which adapters of older versions bear.
    - `paths`: of the layers in the tree, several where the library holds them as one.
    - `rows`: for each of them, which of the module's outputs are its own.
    - `n_in`, `n_out`: features of the module.
    - `stacked`: leading dims of its adapter's tensors, of stacks that are no table's.
    - `n_layers`: where each layer in the tree is a stack of what one module a layer holds.
    - `is_transposed`: whether its weight is `[in, out]`.
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

    @property
    def names(self) -> list[str]:
        """The modules' names, one a layer."""
        return self._each(self.name)

    @property
    def numbers(self) -> dict[str, int]:
        """The number of the layer by each name that a module goes by; 0 where there is one."""
        return {name: i for names in (self._each(self.disk), self.names) for i, name in enumerate(names)}

    def _each(self, name: str) -> list[str]:
        return [name] if self.n_layers is None else [name.format(i) for i in range(self.n_layers)]


def _modules(model: PyTree, linears: Mapping[str, eqx.nn.Linear]) -> list[_Module]:
    """Every linear layer that an adapter of a folder can be for: by a family's table of names, else by our own paths."""
    if not isinstance(model, Pretrained):
        return [
            _Module(path, path, (path,), (slice(None),), *reversed(layer.weight.shape[-2:]), stacked=layer.weight.shape[:-2])
            for path, layer in linears.items()
        ]
    weight_map = type(model).weight_map(model.config)
    modules = [_module(name, weight_map, linears) for name in weight_map.tensors]
    return [module for module in modules if module is not None]


def _module(name: StoredTensor, weight_map: WeightMap, linears: Mapping[str, eqx.nn.Linear]) -> _Module | None:
    """The module whose weight a table's entry is; None where it is not that of linear layers."""
    paths = tuple(leaf.removesuffix(".weight") for leaf in name.leaves)
    if not name.disk.endswith(".weight") or any(within(p, "weight") not in name.leaves or p not in linears for p in paths):
        return None
    shapes = [linears[path].weight.shape[name.n_layers is not None :] for path in paths]
    on_disk = name.save(*[np.broadcast_to(np.int8(0), shape) for shape in shapes]).shape
    if len(on_disk) != 2:
        return None
    for is_transposed in (False, True):
        # Where the table takes each row from: a tensor that holds the numbers of its own outputs, loaded as if of weights.
        numbers = [np.arange(size) for size in on_disk]
        outputs, inputs = (np.broadcast_to(n[:, None] if axis == 0 else n, on_disk) for axis, n in enumerate(numbers))
        if is_transposed:
            outputs, inputs = inputs, outputs
        parts = [*zip(name.load(outputs), name.load(inputs), shapes, strict=True)]
        if all(
            o.shape == tuple(shape) and (o[0] == o[0, 0]).all() and np.array_equal(i[0], np.arange(shape[1]))
            for o, i, shape in parts
        ):
            n_out, n_in = reversed(on_disk) if is_transposed else on_disk
            rows = tuple(np.array(o[:, 0]) for o, _, _ in parts)
            disk = name.disk.removesuffix(".weight")
            return _Module(weight_map.in_memory(disk), disk, paths, rows, n_in, n_out, (), name.n_layers, is_transposed)
    return None


def save_adapter(model: PyTree, folder: str | Path, *, base: str | None = None) -> Path:
    """Writes adapters as a folder that `peft.PeftModel.from_pretrained` loads over the same base; returns its path.

    Of a model of `redeqx.models` the adapters bear the names of transformers' modules, one a layer. Where transformers holds
    several layers as one, their adapters become one of the summed rank, `A` side by side and `B` block-diagonal; layers
    among them that have no adapter get zeros. Any other model's adapters bear its own paths, for `load_adapter`.

    **Arguments:**

    - `model`: with adapters.
    - `folder`: made where it does not exist; an adapter in it is replaced.
    - `base`: name or folder of the base model, for `base_model_name_or_path`.

    Raises ValueError for a model without adapters, and for adapters on layers that the base has not.
    """
    check_alive(model, "model")
    adapters, folder = adapters_of(model), Path(folder)
    tensors: dict[str, np.ndarray] = {}
    saved: dict[_Module, tuple[int, int | float]] = {}  # rank and alpha
    for module in _modules(model, linears_of(model)):
        parts = [(rows, adapters[path]) for rows, path in zip(module.rows, module.paths, strict=True) if path in adapters]
        if not parts:
            continue
        a, b, scale = _as_one(parts, module.n_out)
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
    folder.mkdir(parents=True, exist_ok=True)
    # transformers takes no file that does not say which library's layout it has.
    replace_file(folder / f"{WEIGHTS}.safetensors", lambda path: write_tensors(path, tensors, metadata={"format": "pt"}))
    (rank, alpha), _ = Counter(saved.values()).most_common(1)[0]
    # The longest first: PEFT takes a pattern for any module whose path ends so.
    patterns = {_pattern(module): saved[module] for module in sorted(saved, key=lambda module: -len(module.name))}
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
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
    }
    replace_json(folder / CONFIG, fields)
    return folder


def _as_one(parts: Sequence[tuple[Any, LoraLinear]], n_out: int) -> tuple[np.ndarray, np.ndarray, float]:
    """`A`, `B` and scale of the adapter of one module that computes what those of its parts do."""
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
    # The number that was divided, where that was one of few digits.
    alpha = float(f"{scale * rank:.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def _pattern(module: _Module) -> str:
    """The regular expression for a module's names in `rank_pattern` and `alpha_pattern`."""
    escaped = re.escape(module.name)
    return escaped if module.n_layers is None else escaped.replace(re.escape("{}"), r"\d+")


def _targets(model: PyTree, saved: Mapping[_Module, Any]) -> list[str]:
    """`target_modules`: the last parts of the adapted modules' names where those pick no other module, else whole names."""
    adapted = {name for module in saved for name in module.names}
    if isinstance(model, Pretrained):
        table = type(model).weight_map(model.config).tensors
        layers = {disk.rpartition(".")[0] for name in table for disk in name.on_disk} | adapted
    else:
        layers = set(linears_of(model))
    known = {".".join(parts[: i + 1]) for parts in (name.split(".") for name in layers) for i in range(len(parts))}
    last = {name.rpartition(".")[2] for name in adapted}
    return sorted(last if {name for name in known if name.rpartition(".")[2] in last} == adapted else adapted)


def load_adapter(model: PyTree, folder: str | Path) -> PyTree:
    """The model with the adapters of a folder that PEFT or `save_adapter` wrote.

    Layers of one stack get one rank, the largest of theirs, and one scale: zeros fill up the others, so that a layer without
    an adapter gets one that is zero, and that stays so in training. An adapter of what transformers holds as one layer, and
    we as several, is cut: each gets its own rows of `B` and, of the rank, what those rows use.

    **Arguments:**

    - `model`: the base, of `redeqx.models` or, for what `save_adapter` wrote of it, any other.
    - `folder`: holds `adapter_config.json` and `adapter_model.safetensors`. Its `lora_dropout` is not taken over.

    Raises ValueError for a folder that is none, an adapter of a kind that is not implemented, one of another base, and for
    layers that have an adapter already.
    """
    folder, linears = Path(folder), linears_of(model)
    keys = _read_config(folder / CONFIG)
    layers: dict[str, eqx.nn.Linear] = {}
    for module, adapters in _match(model, linears, Source.find(folder, WEIGHTS), keys).items():
        a, b, scale = _stacked(module, adapters)
        for rows, path in zip(module.rows, module.paths, strict=True):
            part, used = b[..., rows, :], slice(None)
            if len(module.paths) > 1 and b.any():  # a new adapter is all zero, and wanted whole
                used = part.any(axis=tuple(range(part.ndim - 1)))
                if not used.any():
                    continue
            check_plain({path: linears[path]})
            layers[path] = LoraLinear(linears[path], jnp.asarray(a[..., used, :]), jnp.asarray(part[..., used]), scale=scale)
    return put(model, layers)


_Adapter = tuple[np.ndarray, np.ndarray, float]  # A, B and scale of one module
_Found = dict[_Module, dict[int, _Adapter]]  # by the number of the layer; 0 where there is one


def _match(model: PyTree, linears: Mapping[str, eqx.nn.Linear], source: Source, keys: ConfigReader) -> _Found:
    """A folder's adapters by module, once all of them are known to fit.

    Raises ValueError that lists those that do not.
    """
    known = {name: (module, i) for module in _modules(model, linears) for name, i in module.numbers.items()}
    problems: list[str] = []
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key in source.names():
        tensor = source.view(key)
        if (match := _TENSOR.fullmatch(key)) is not None:
            pairs.setdefault(match["module"], {})[match["which"]] = tensor
        elif (match := _BASE.fullmatch(key)) is None or (current := _current(model, match["module"])) not in known:
            got = tensor.shape
            problems.append(f"`{key}`: expected `{_PREFIX}<module>.lora_A.weight` or `.lora_B.weight`, got {got}.")
        elif not _is_of_base(tensor, match["which"], *known[current], linears):
            problems.append(f"`{key}`: expected the values that this model has, got others, of shape {tensor.shape}.")
    found: _Found = {}
    for name, pair in pairs.items():
        current = _current(model, name)
        if current not in known:
            near = nearest(current, known)
            problems.append(f"`{_PREFIX}{name}`: expected the name of a linear layer of this model.{near}")
            continue
        module, i = known[current]
        rank = _by_pattern(keys.get("rank_pattern", {}), name, keys.get("r", 8))
        alpha = _by_pattern(keys.get("alpha_pattern", {}), name, keys.get("lora_alpha", 8.0, NUMBER))
        shapes = {"A": (*module.stacked, rank, module.n_in), "B": (*module.stacked, module.n_out, rank)}
        wrong = [which for which, shape in shapes.items() if which not in pair or pair[which].shape != shape]
        for which in wrong:
            got = pair[which].shape if which in pair else "none"
            problems.append(f"`{_PREFIX}{name}.lora_{which}.weight`: expected {shapes[which]}, got {got}.")
        if not wrong:
            scale = alpha / (rank**0.5 if keys.get("use_rslora", False) else rank)
            found.setdefault(module, {})[i] = pair["A"], pair["B"], scale
    if problems or not found:
        unfit = "\n  - ".join(["", *listed(problems)])
        base = keys.get("base_model_name_or_path", None)
        raise ValueError(
            f"`{source.path}`: expected adapters of this {type(model).__name__}, as `{keys.path}` describes them, got "
            f"{f'{len(problems)} that do not fit:' if problems else 'none.'}{unfit}\n"
            f"Load it over the model that it was trained on{f', {base!r}' if base else ''}."
        )
    return found


def _is_of_base(tensor: np.ndarray, which: str, module: _Module, i: int, linears: Mapping[str, eqx.nn.Linear]) -> bool:
    """Whether a tensor is a layer's own weight or bias, which PEFT writes beside the adapters of heads."""
    tensor = tensor.T if which == "weight" and module.is_transposed else tensor
    for rows, path in zip(module.rows, module.paths, strict=True):
        leaf = getattr(linears[path], which)
        leaf = leaf if leaf is None or module.n_layers is None else leaf[i]
        if leaf is None or tensor.shape[0] != module.n_out or not np.array_equal(tensor[rows].astype(leaf.dtype), leaf):
            return False
    return True


def _stacked(module: _Module, adapters: Mapping[int, _Adapter]) -> _Adapter:
    """One module's adapters over its layers, as one whose arrays are stacked; filled up with zeros to one rank."""
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
    """The keys of an adapter's config, once none of them is known to ask for what is not implemented."""
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
        raise _refuse(path, "init_lora_weights", "one that leaves the base as it is", fields["init_lora_weights"])
    for name in _REFUSED:
        if fields.get(name):
            raise _refuse(path, name, "none", fields[name])
    keys = ConfigReader(fields, path)
    for key, patterns, default, kind, rule in (
        ("r", "rank_pattern", 8, INTEGER, "a number from 1 to 2**31"),
        ("lora_alpha", "alpha_pattern", 8.0, NUMBER, "a finite number"),
    ):
        by_pattern = keys.get(patterns, {})
        for value in (keys.get(key, default, kind), *by_pattern.values()):
            is_number = isinstance(value, int | float) and abs(value) <= 2**31
            if not is_number or (key == "r" and (not isinstance(value, int) or value < 1)):
                raise ValueError(f"`{path}`: `{key}`: expected {rule}, got {brief(value)}. Correct the file.")
        for pattern in by_pattern:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"`{path}`: `{patterns}`: expected regular expressions, got {brief(pattern)} ({error}). Correct it."
                ) from error
    return keys


def _refuse(path: Path, key: str, expected: str, got: Any) -> ValueError:
    return ValueError(
        f"`{path}`: `{key}`: expected {expected}, which is what is implemented, got {brief(got)}. Merge the adapter with "
        "PEFT (`merge_and_unload`) and load the merged model."
    )


def _current(model: PyTree, module: str) -> str:
    """Today's spelling of a module's name, as of tensors in old files."""
    if not isinstance(model, Pretrained):
        return module
    return type(model).weight_map(model.config).current(f"{module}.weight").removesuffix(".weight")


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value for a module, by the first pattern that its name ends with."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)
