"""`save_pretrained`: writes a model and its config for `transformers` or `diffusers`."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redeqx._tree import is_array_like, listed, named_leaves, nearest, wide_leaves
from redeqx.checkpoint import INDEX, to_host, write_tensors
from redeqx.errors import check_alive, check_folder, filter_traceback, wrong
from redeqx.machine import dry
from redeqx.storage import disk_path, replacing

from ..generation import GENERATION
from ._files import CONFIG, replace_json, write_companions
from ._pretrained import Pretrained
from ._weight_map import StoredTensor, WeightMap, shapes_of


@dataclass(frozen=True)
class _Saved:
    """A tensor to be written: its shape and dtype are known, its values are read when needed."""

    name: StoredTensor
    index: tuple[int, ...]  # the layer, and the expert
    leaves: Sequence[Any]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        index = tuple(map(np.int32, self.index))
        parts = [_layer(leaf, index) if index else leaf for leaf in self.leaves]
        tensor = self.name.save(*[to_host(part) for part in parts])
        return np.ascontiguousarray(tensor, dtype=dtype)


@jax.jit
def _layer(stack: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    for i in index:
        stack = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)
    return stack


def _check_placed(leaves: Mapping[str, Any], weight_map: WeightMap, what: str) -> None:
    """Raises ValueError for an array without a tensor in the weight map, or the reverse, so that nothing is lost."""
    placed = {leaf for name in weight_map.tensors for leaf in name.leaves}
    arrays = [path for path, leaf in leaves.items() if is_array_like(leaf)]
    if adapters := [path for path in arrays if re.search(r"(^|\.)lora_[ab]$", path) and path not in placed]:
        raise ValueError(
            f"`{adapters[0]}`: expected a leaf that folders of {what} contain, got one of {len(adapters)} of adapters. Save "
            "the merged model, `save_pretrained(lora.merge(model), ...)`, or the adapters, `lora.save_adapter(model, ...)`."
        )
    if codes := [path.removesuffix(".codes") for path in arrays if path.endswith(".codes") and path not in placed]:
        raise ValueError(
            f"`{codes[0]}`: expected an array, got one of {len(codes)} quantised weights, which folders of {what} do not "
            "hold. Save the dequantised model, `save_pretrained(lora.dequantise(model), ...)`, or a checkpoint."
        )
    if lost := [path for path in arrays if path not in placed]:
        raise ValueError(
            f"`{lost[0]}`: expected a leaf that folders of {what} contain, got one of {len(lost)} that they have no tensor "
            f"for: {', '.join(listed(lost))}. Save the model with `Trainer.save_ckpt`, or without these leaves."
        )
    if missing := sorted(placed - set(arrays)):
        raise ValueError(
            f"`{missing[0]}`: expected an array, as in folders of {what} with this config, got "
            f"{leaves.get(missing[0], 'no such leaf')}.{nearest(missing[0], arrays)} Pass the model's own config."
        )


def _check_shapes(model: Any, config: Any) -> None:
    """Raises ValueError if an array's shape is not the one that the config describes, as such a folder could not be
    loaded."""
    described = named_leaves(shapes_of(type(model), config))
    for path, leaf in named_leaves(model).items():
        if is_array_like(leaf) and leaf.shape != described[path].shape:
            step = "Pass the config that describes the model: `dataclasses.replace(config, ...)`."
            raise wrong(path, f"{described[path].shape}, as in `config`", leaf.shape, step)


def to_disk(model: Any, weight_map: WeightMap) -> dict[str, _Saved]:
    """Returns the tensors of a folder by name, before any of them is read.

    Raises TypeError for a model with shapes as leaves, and ValueError for a leaf that is not in the weight map.
    """
    leaves = named_leaves(model)
    _check_placed(leaves, weight_map, type(model).__name__)
    tensors: dict[str, _Saved] = {}
    for name in weight_map.tensors:
        parts = [leaves[leaf] for leaf in name.leaves]
        for path, part in zip(name.leaves, parts, strict=True):
            if isinstance(part, jax.ShapeDtypeStruct):
                raise wrong(path, "an array", f"only its shape {part}", "Create the arrays, then save.", TypeError)
            if isinstance(part, jax.Array) and not part.is_fully_addressable:
                step = "Save a checkpoint, which all processes write together, and load it in one process."
                raise wrong(path, "an array that this process holds completely", "one sharded over several processes", step)
        skip = len(name.stacked)
        dummies = [np.broadcast_to(np.int8(0), part.shape[skip:]) for part in parts]
        shape, dtype = name.save(*dummies).shape, functools.reduce(jnp.promote_types, [part.dtype for part in parts])
        for index, disk in zip(np.ndindex(*name.stacked), name.on_disk, strict=True):
            tensors[disk] = _Saved(name, index, parts, shape, np.dtype(dtype))
    return tensors


@filter_traceback
def save_pretrained(model: Any, config: Any, folder: str | Path, *, max_shard_size: int | str = "5GB") -> Path:
    """Writes a model and its config as a folder that `transformers` or `diffusers` loads. Returns the folder's path.

    The other files of the folder that the config came from are written too: tokenizer, chat template, generation config,
    image processor. If `folder` already has such files with other contents, they are kept, with a warning.

    The host holds one tensor at a time. Each file is written under a temporary name, fsynced and renamed. The config is
    written last.

    **Arguments:**

    - `model`, `config`: as `from_pretrained` returned them, or of the same classes.
    - `folder`: created if it does not exist. Weights of the same name in it are replaced.
    - `max_shard_size`: the maximum size of one file, in bytes or as text like `"200MB"`. More than one file get an index.

    In a dry run nothing is written.

    Raises TypeError for a model that is not of one of the families here. Raises ValueError for a leaf that such a folder has
    no tensor for (such as an adapter that is not merged), for shapes that differ from the config's, and for an invalid size.
    Raises OSError if the disk is full.
    """
    if not isinstance(model, Pretrained):
        step = "Save other models with `Trainer.save_ckpt`: Hugging Face has no names for their tensors."
        raise wrong("model", "one of redeqx.models", type(model).__name__, step, TypeError)
    check_alive(model, "model")
    limit = _bytes(max_shard_size)
    cls, folder = type(model), disk_path(folder, "folder")
    check_folder(folder, "folder")
    if type(config) is not type(getattr(model, "config", config)):
        found = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
        rule = f"that of the model, a {type(model.config).__name__}"
        raise wrong("config", rule, found, "Pass what `from_pretrained` returned, or what the model was made of.", TypeError)
    if dry() is not None:
        return folder
    tensors = to_disk(model, cls.weight_map(config))
    _check_shapes(model, config)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, _Saved]] = [{}]
    size = 0  # of the newest shard
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.n_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name], size = tensor, size + tensor.n_bytes
    stem, n = cls.weights_name, len(shards)
    files = [f"{stem}.safetensors"] if n == 1 else [f"{stem}-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    for file, shard in zip(files, shards, strict=True):
        # transformers refuses a file without this metadata, which names the framework that wrote it.
        with replacing(folder / file) as path:
            write_tensors(path, shard, metadata={"format": "pt"})
    index = folder / f"{stem}{INDEX}"
    if n > 1:
        size = sum(tensor.n_bytes for tensor in tensors.values())
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        replace_json(index, {"metadata": {"total_size": size}, "weight_map": where})
    else:
        index.unlink(missing_ok=True)
    for old in folder.glob(f"{stem}*.safetensors"):
        if re.fullmatch(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors", old.name) and old.name not in files:
            old.unlink()
    write_companions(folder, getattr(config.extra, "files", {}))
    generation = to_generation(config)
    if generation is None:
        (folder / GENERATION).unlink(missing_ok=True)
    else:
        replace_json(folder / GENERATION, generation)
    replace_json(folder / CONFIG, to_config(cls, config, tensors))
    return folder


def to_generation(config: Any) -> dict[str, Any] | None:
    """Returns the `generation_config.json` of a model's folder; None if its config has no generation options."""
    generation = getattr(config, "generation", None)
    if generation is None:
        return None
    tokens = {name: value for name, value in config.to_hf().items() if name.endswith("_token_id")}
    return {name: value for name, value in {**generation.keys, **tokens}.items() if value is not None}


def to_config(cls: type[Pretrained], config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of a model's folder."""
    fields = {**config.extra, **config.to_hf()}
    if "_class_name" in fields:  # diffusers names the class and stores no dtype
        return fields
    dtypes = {str(tensor.dtype) for tensor in tensors.values() if jnp.issubdtype(tensor.dtype, jnp.floating)}
    narrow = dtypes - {"float32"}
    if len(dtypes) == 2 and len(narrow) == 1 and _wide_alone(cls, config, tensors, *narrow):
        dtypes = narrow
    dtype = {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    return {**fields, "architectures": [cls.architecture(config)], **dtype}


def _wide_alone(cls: type[Pretrained], config: Any, tensors: Mapping[str, Any], narrow: str) -> bool:
    """Returns whether a model's float32 tensors are those that remain float32 if it is loaded in a narrower dtype."""
    wide = wide_leaves(shapes_of(cls, config), narrow)
    kept = {disk for name in cls.weight_map(config).tensors if wide.issuperset(name.leaves) for disk in name.on_disk}
    return all(disk in kept for disk, tensor in tensors.items() if tensor.dtype == "float32")


def _bytes(size: int | str) -> int:
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*", str(size).upper())
    n = int(float(match[1]) * units.get(match[2] or "B", 0)) if match else 0
    if n < 1:
        raise wrong("max_shard_size", "bytes, or a text like '5GB'", repr(size), "Pass one of the two.")
    return n
