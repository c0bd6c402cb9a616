"""Hugging Face folders: `config.json` and safetensors in, and out again so that their own library loads them.

Owns the files and shards of a folder, and the reading of each device's own slices. What is called how is in `_names`.
"""

import fnmatch
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from redeqx import Deployer, Plan
from redeqx._tree import is_array_like, listed, map_named, named_leaves, nearest
from redeqx.checkpoint import INDEX, Source, to_host, write_tensors
from redeqx.errors import brief, brief_name, check_alive, load_json
from redeqx.machine import as_shapes, dry

from ._config import Keys
from ._generation import GENERATION, Generation
from ._names import Name, Names

CONFIG = "config.json"
# Of tokenizers and of what prepares images: a folder without them is half of what was loaded.
_COMPANIONS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
)


# --- models that have a folder --------------------------------------------------------------------------------------


class Pretrained(eqx.Module):
    """A model that a Hugging Face folder holds. A family's models say which folders, and where each leaf is in them."""

    config_class: ClassVar[Any]  # with `from_hf(Keys)`, `to_hf()` and `extra`
    model_types: ClassVar[tuple[str, ...]]  # of `config.json`; of diffusers, its `_class_name`
    architectures: ClassVar[tuple[str, ...]]  # classes of transformers; the first is written, unless `architecture` says
    weights_name: ClassVar[str] = "model"  # of the files; diffusers has another

    config: eqx.AbstractVar[Any]

    @staticmethod
    def names(config: Any) -> Names:
        """The table of a model of this config."""
        raise NotImplementedError

    @classmethod
    def architecture(cls, config: Any) -> str:
        """The class that `transformers` loads a saved folder with."""
        del config
        return cls.architectures[0]

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: Any = None,
        deployer: Deployer | None = None,
        plan: Plan | None = None,
        **changes: Any,
    ) -> tuple[Any, Any]:
        """The model in a folder, and its config. As `redeqx.models.from_pretrained`, for one class."""
        folder = Path(folder)
        config = cls.read_config(folder)
        if changes:
            fields = config.__dataclass_fields__
            for name in changes:
                if name not in fields or name == "extra":
                    raise ValueError(f"`{name}`: expected a field of {type(config).__name__}.{nearest(name, fields)}")
            config = replace(config, **changes)
        return load(cls, config, folder, dtype=dtype, deployer=deployer, plan=plan), config

    @classmethod
    def read_config(cls, folder: Path) -> Any:
        """The config of a folder.

        Raises ValueError where the folder is of another model type.
        """
        fields = read_config(folder)
        key = type_key(fields)
        if fields.get(key, cls.model_types[0]) not in cls.model_types:
            raise ValueError(
                f"`{folder / CONFIG}`: `{key}`: expected {' or '.join(cls.model_types)} for {cls.__name__}, "
                f"got {fields[key]!r}. Give the folder of such a model."
            )
        if fields.get("quantization_config") is not None:
            raise ValueError(
                f"`{folder / CONFIG}`: `quantization_config`: expected none, got {brief(fields['quantization_config'])}. "
                "Load the weights as they were before, or have `transformers` dequantize and save them."
            )
        source = weights_of(folder, cls.weights_name)
        keys = Keys(
            fields,
            folder / CONFIG,
            generation=_read_generation(folder),
            n_tensors=None if source is None else len([*source.names()]),
            files=_companions(folder),
        )
        return cls.config_class.from_hf(keys)


def type_key(fields: Mapping[str, Any]) -> str:
    """The key of `config.json` that says which model it is: of diffusers another than of transformers."""
    return "_class_name" if "_class_name" in fields else "model_type"


def read_config(folder: Path, file: str = CONFIG) -> dict[str, Any]:
    """The parsed `config.json` of a folder, or another file of it.

    Raises ValueError where there is none, or none of JSON.
    """
    path = folder / file
    if not folder.is_dir():
        raise ValueError(
            f"`{folder}`: expected a folder, got {'a file' if folder.exists() else 'nothing there'}. Pass "
            f"the folder that holds `{file}`; a model of the Hub has to be downloaded first."
        )
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "an empty folder"
        raise ValueError(f"`{path}`: expected a file, got {there}. Pass the folder that holds `{file}`.")
    try:
        fields = load_json(path, unique=False)  # as transformers reads it
    except ValueError as error:
        raise ValueError(f"`{path}`: expected JSON, got {error}. Correct the file.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"`{path}`: expected a JSON object, got {type(fields).__name__}. Correct the file.")
    return fields


def _read_generation(folder: Path) -> Generation | None:
    if not (folder / GENERATION).exists():
        return None
    return Generation(read_config(folder, GENERATION), folder / GENERATION)


def _companions(folder: Path) -> dict[str, bytes]:
    """The files of a folder that belong to its model and are neither its weights nor its config, by name."""
    paths = sorted({path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()})
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def weights_of(folder: Path, stem: str) -> Source | None:
    """The tensors of a folder; None in a dry run of one that has none, which asks whether the model fits before anyone has
    fetched its weights. Raises ValueError where there are none otherwise."""
    if dry() is not None and not any(folder.glob(f"{stem}*.safetensors*")):
        return None
    return Source.find(folder, stem)


# --- reading --------------------------------------------------------------------------------------------------------


def load(
    cls: type[Pretrained],
    config: Any,
    folder: Path,
    *,
    dtype: Any = None,
    deployer: Deployer | None = None,
    plan: Plan | None = None,
) -> Any:
    """A model of the class and config, its arrays read from a folder; the arguments are those of `from_pretrained`."""
    if dtype is not None and not jnp.issubdtype(dtype := jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"`dtype`: expected a floating dtype, got {dtype}. Pass None to keep the file's.")
    if plan is not None and deployer is None:
        raise ValueError("`deployer`: expected one with `plan`, got None. Pass the deployer that made the plan.")
    shapes = eqx.filter_eval_shape(cls, config, key=jax.eval_shape(lambda: jax.random.key(0)))
    wanted = {name: leaf for name, leaf in named_leaves(shapes).items() if is_array_like(leaf)}
    source, names = weights_of(folder, cls.weights_name), cls.names(config)
    if source is None:
        fields = read_config(folder)
        kept = jnp.dtype(dtype or fields.get("dtype") or fields.get("torch_dtype") or "float32")
        return as_shapes(map_named(lambda _, leaf: _cast(leaf, kept), shapes))
    _check_index(source, folder / f"{cls.weights_name}{INDEX}")
    tensors = _match(source, names, wanted, folder / CONFIG)
    if dtype is None:
        _check_dtypes(source, names)
    held = {leaf: [parts[i] for parts in tensors[name.disk]] for name in names.tensors for i, leaf in enumerate(name.leaves)}
    dtypes = {leaf: _dtype(parts, dtype) for leaf, parts in held.items()}
    shapes = map_named(
        lambda name, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[name]) if is_array_like(leaf) else leaf, shapes
    )
    if dry() is not None:
        return as_shapes(shapes)
    if deployer is not None and plan is None:
        plan = deployer.plan(shapes)
    stacked = {leaf for name in names.tensors if name.n_layers is not None for leaf in name.leaves}

    def read(name: str, leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        sharding = SingleDeviceSharding(jax.devices()[0]) if plan is None else plan.sharding(name)
        if name in stacked:
            return _read_stack(held[name], leaf, sharding)
        return _read(held[name][0], leaf, sharding)

    return map_named(read, shapes)


def _check_index(source: Source, index: Path) -> None:
    """Raises ValueError where a folder has two sets of weights that differ: a file, which is read, and shards."""
    if source.path == index or not index.is_file():
        return
    try:
        shards = Source(index)
    except ValueError:  # what is left of shards that were removed
        return
    names = {*source.names(), *shards.names()}
    for name in sorted(names) if {*shards.paths()} != {source.path} else ():
        views = [tensors.view(name) if name in tensors else None for tensors in (source, shards)]
        a, b = views
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or not _equal(a, b):
            found = ["none" if view is None else f"{view.dtype} {view.shape}" for view in views]
            raise ValueError(
                f"`{index}`: expected shards that hold the same as `{source.path.name}` beside it, got another "
                f"`{brief_name(name)}` ({found[0]} there, {found[1]} in the shards). Remove the index, or that file."
            )


def _check_dtypes(source: Source, names: Names) -> None:
    """Raises ValueError for floats that no model computes with as they are, where nobody says what they are to become."""
    wanted = {disk for name in names.tensors for disk in name.on_disk}
    kept: dict[str, str] = {}
    for name in source.names():
        if names.current(name) in wanted:
            kept.setdefault(str(source.view(name).dtype), name)
    narrow = next((dtype for dtype in kept if dtype.startswith("float8")), None)
    if narrow is not None:
        raise ValueError(
            f"`{source.path}`: `{brief_name(kept[narrow])}`: expected floats of 16 bits or more, got {narrow}. Pass the "
            "`dtype=` to cast them to, `jnp.bfloat16` for one."
        )
    if {"float16", "bfloat16"} <= kept.keys():
        raise ValueError(
            f"`{source.path}`: expected one kind of 16-bit floats, got float16 in `{brief_name(kept['float16'])}` and "
            f"bfloat16 in `{brief_name(kept['bfloat16'])}`. Pass the `dtype=` to cast both to; `jnp.float32` loses nothing."
        )


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _cast(leaf: Any, dtype: Any) -> Any:
    """A shape whose floats are of that dtype; anything else as it is."""
    if not is_array_like(leaf) or not _is_float(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _dtype(parts: Sequence[np.ndarray], dtype: Any) -> Any:
    """The dtype of a leaf: that of the files (the widest, where layers differ) or, of floats, the wanted one."""
    if dtype is not None and all(jnp.issubdtype(part.dtype, jnp.floating) for part in parts):
        return dtype
    return functools.reduce(jnp.promote_types, [part.dtype for part in parts])


def _read(view: np.ndarray, leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """A leaf from a view of its file, each device reading its own slice of it."""

    def piece(index: Any) -> np.ndarray:
        # A copy: JAX on CPU would otherwise share the file's pages, and follow whatever happens to the file.
        return np.array(view[index], dtype=leaf.dtype, order="C")

    return jax.make_array_from_callback(leaf.shape, sharding, piece)


def _read_stack(views: Sequence[np.ndarray], leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """A stacked leaf, layer by layer, so that the host holds one layer's tensor at a time and never the stack."""
    one, whole = sharding, sharding
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
        one = NamedSharding(sharding.mesh, P(*spec[1:]))
        whole = NamedSharding(sharding.mesh, P(None, *spec[1:]))
    stack = jnp.zeros(leaf.shape, leaf.dtype, device=whole)
    layer = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    for i, view in enumerate(views):
        stack = _put(stack, _read(view, layer, one), np.int32(i), whole)
        stack.block_until_ready()  # else the host would run ahead, and hold all the layers that wait
    return jax.device_put(stack, sharding)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(stack: jax.Array, layer: jax.Array, i: Any, sharding: Sharding) -> jax.Array:
    stack = jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0)
    return jax.lax.with_sharding_constraint(stack, sharding) if isinstance(sharding, NamedSharding) else stack


def _match(
    source: Source, names: Names, wanted: Mapping[str, Any], config_path: Path
) -> dict[str, list[Sequence[np.ndarray]]]:
    """The views of each table entry's tensors, one sequence of leaves a layer, once all of them are known to be right.

    Raises ValueError that lists what is missing, unknown, of another shape, or tied but different.
    """
    spelt: dict[str, str] = {}
    problems = []
    for name in source.names():
        current = names.current(name)
        if current in spelt:
            one, other, both = map(brief_name, (current, spelt[current], name))
            problems.append(f"`{both}`: expected one tensor `{one}`, got `{other}` too.")
        spelt[current] = name
    needed = {disk for name in names.tensors for disk in name.on_disk}
    extra = [
        name
        for name in spelt
        if name not in needed and name not in names.copies and not any(fnmatch.fnmatchcase(name, g) for g in names.ignored)
    ]
    found: dict[str, list[Sequence[np.ndarray]]] = {}
    for name in names.tensors:
        found[name.disk] = []
        shapes = [wanted[leaf].shape[name.n_layers is not None :] for leaf in name.leaves]
        for disk in name.on_disk:
            if disk not in spelt and disk in names.zeros and spelt:
                dtype = source.view(next(iter(spelt.values()))).dtype  # so that a file of one dtype stays one
                found[name.disk].append([np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes])
                continue
            if disk not in spelt:
                problems.append(f"`{disk}`: expected for `{name.leaves[0]}`, got none.{nearest(disk, extra)}")
                continue
            tensor = source.view(spelt[disk])
            # A cut into equal parts would drop what is left over, and fail at a scalar.
            parts = name.load(tensor) if tensor.size == sum(map(math.prod, shapes)) else ()
            if [part.shape for part in parts] != [tuple(shape) for shape in shapes]:
                dummies = [np.broadcast_to(np.int8(0), shape) for shape in shapes]
                expected = name.save(*dummies).shape
                problems.append(f"`{disk}`: expected {expected}, as `{CONFIG}` says, got {tensor.shape}.")
            elif not all(_is_float(tensor) == _is_float(wanted[leaf]) for leaf in name.leaves):
                problems.append(f"`{disk}`: expected {wanted[name.leaves[0]].dtype} or its like, got {tensor.dtype}.")
            found[name.disk].append(parts)
    missing = [disk for disk in needed if disk not in spelt]
    for name in extra:
        shape = source.view(spelt[name]).shape
        there = brief_name(spelt[name])
        problems.append(f"`{there}`: expected no tensor of this name, got {shape}.{nearest(brief_name(name), missing)}")
    remedy = "This family ties them always: bring the model as a module of your own."
    if names.untied_by is not None:
        remedy = f"Set `{names.untied_by}` to false there."
    for copy, original in names.copies.items():
        if copy in spelt and original in spelt:
            a, b = source.view(spelt[copy]), source.view(spelt[original])
            if a.shape != b.shape or not _equal(a, b):
                problems.append(
                    f"`{copy}`: expected the same values as `{original}`, to which `{CONFIG}` ties it, got others. {remedy}"
                )
    if problems:
        differing = "\n  - ".join(listed(problems))
        raise ValueError(
            f"`{source.path}`: expected the tensors that `{config_path}` describes, got {len(problems)} that differ:\n"
            f"  - {differing}\nLoad the weights with their own config, and the class that they were saved from."
        )
    return found


def is_tied_on_disk(folder: Path, stem: str, copy: str, original: str) -> bool:
    """Whether a tensor of a folder is absent or the same as another; for models whose config does not tell."""
    source = weights_of(folder, stem)
    if source is None or not {copy, original} <= set(source.names()):
        return True
    a, b = source.view(copy), source.view(original)
    return a.shape == b.shape and _equal(a, b)


def is_on_disk(folder: Path, stem: str, *names: str) -> bool:
    """Whether a folder has a tensor of one of these names; for models whose config does not tell."""
    source = weights_of(folder, stem)
    return source is not None and not set(names).isdisjoint(source.names())


def _equal(a: np.ndarray, b: np.ndarray, rows: int = 1024) -> bool:
    """Whether two views hold the same values; read a few rows at a time."""
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """A tensor to be written: its shape and dtype now, its values when they are asked for."""

    name: Name
    layer: int | None
    leaves: Sequence[Any]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        parts = [leaf if self.layer is None else _layer(leaf, np.int32(self.layer)) for leaf in self.leaves]
        tensor = self.name.save(*[to_host(part) for part in parts])
        return np.ascontiguousarray(tensor, dtype=dtype)


@jax.jit
def _layer(stack: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)


def _check_placed(leaves: Mapping[str, Any], names: Names, what: str) -> None:
    """Raises ValueError for an array that the table has no tensor for, or the other way round: nothing is left out."""
    placed = {leaf for name in names.tensors for leaf in name.leaves}
    arrays = [path for path, leaf in leaves.items() if is_array_like(leaf)]
    if adapters := [path for path in arrays if re.search(r"(^|\.)lora_[ab]$", path) and path not in placed]:
        raise ValueError(
            f"`{adapters[0]}`: expected a leaf that folders of {what} hold, got one of {len(adapters)} of adapters. Save "
            "the merged model, `save_pretrained(lora.merge(model), ...)`, or the adapters, `lora.save_adapter(model, ...)`."
        )
    if lost := [path for path in arrays if path not in placed]:
        raise ValueError(
            f"`{lost[0]}`: expected a leaf that folders of {what} hold, got one of {len(lost)} that they have no tensor "
            f"for: {', '.join(listed(lost))}. Save the model with `Trainer.save_ckpt`, or as its class made it."
        )
    if missing := sorted(placed - set(arrays)):
        raise ValueError(
            f"`{missing[0]}`: expected an array, as folders of {what} with this config hold, got "
            f"{leaves.get(missing[0], 'no such leaf')}.{nearest(missing[0], arrays)} Pass the model's own config."
        )


def _check_shapes(model: Any, config: Any) -> None:
    """Raises ValueError where an array has not the shape that the config describes: nothing could load such a folder."""
    described = named_leaves(eqx.filter_eval_shape(type(model), config, key=jax.eval_shape(lambda: jax.random.key(0))))
    for path, leaf in named_leaves(model).items():
        if is_array_like(leaf) and leaf.shape != described[path].shape:
            raise ValueError(
                f"`{path}`: expected {described[path].shape}, as `config` says, got {leaf.shape}. Pass the config that "
                "describes the model: `dataclasses.replace(config, ...)`."
            )


def to_disk(model: Any, names: Names) -> dict[str, _Saved]:
    """The tensors of a folder, by name, none of them read yet.

    Raises TypeError for a model of shapes alone, ValueError for a leaf that has no place in the table.
    """
    leaves = named_leaves(model)
    _check_placed(leaves, names, type(model).__name__)
    tensors: dict[str, _Saved] = {}
    for name in names.tensors:
        parts = [leaves[leaf] for leaf in name.leaves]
        for path, part in zip(name.leaves, parts, strict=True):
            if isinstance(part, jax.ShapeDtypeStruct):
                raise TypeError(f"`{path}`: expected an array, got only its shape {part}. Create the arrays, then save.")
            if isinstance(part, jax.Array) and not part.is_fully_addressable:
                raise ValueError(
                    f"`{path}`: expected an array that this process holds whole, got one over the devices of several. Save "
                    "a checkpoint, which all processes write together, and load it in one process."
                )
        skip = name.n_layers is not None
        dummies = [np.broadcast_to(np.int8(0), part.shape[skip:]) for part in parts]
        shape, dtype = name.save(*dummies).shape, functools.reduce(jnp.promote_types, [part.dtype for part in parts])
        for i, disk in enumerate(name.on_disk):
            tensors[disk] = _Saved(name, i if skip else None, parts, shape, np.dtype(dtype))
    return tensors


def save_pretrained(model: Any, config: Any, folder: str | Path, *, max_shard_size: int | str = "5GB") -> Path:
    """Writes a model and its config as a folder that `transformers` or `diffusers` loads, and returns its path.

    What the folder had that the config came from is written again: tokenizer, chat template, generation config, image
    processor. Where `folder` has such files already, and others, they are kept, with a warning.

    The host holds one tensor at a time. Each file is written beside, fsynced and renamed; the config comes last.

    **Arguments:**

    - `model`, `config`: as `from_pretrained` returned them, or of the same classes.
    - `folder`: made where it does not exist. Weights of the same name in it are replaced.
    - `max_shard_size`: bytes of one file, or a text like `"200MB"`; more than one file get an index.

    In a dry run nothing is written.

    Raises TypeError for a model of no family here; ValueError for a leaf that such a folder has no tensor for (an adapter
    that is not merged), for shapes that are not the config's, and for a size that is none; OSError where the disk is full.
    """
    if not isinstance(model, Pretrained):
        raise TypeError(
            f"`model`: expected one of redeqx.models, got {type(model).__name__}. Save other models with "
            "`Trainer.save_ckpt`: their names are their own."
        )
    check_alive(model, "model")
    limit = _bytes(max_shard_size)
    cls, folder = type(model), Path(folder)
    if dry() is not None:
        return folder
    tensors = to_disk(model, cls.names(config))
    _check_shapes(model, config)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, _Saved]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.n_bytes for t in shards[-1].values()) + tensor.n_bytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    stem, n = cls.weights_name, len(shards)
    files = [f"{stem}.safetensors"] if n == 1 else [f"{stem}-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    for file, shard in zip(files, shards, strict=True):
        # transformers takes no file that does not say which library's layout it has.
        replace_file(folder / file, lambda path, shard=shard: write_tensors(path, shard, metadata={"format": "pt"}))
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
    _write_companions(folder, getattr(config.extra, "files", {}))
    generation = to_generation(config)
    if generation is None:
        (folder / GENERATION).unlink(missing_ok=True)
    else:
        replace_json(folder / GENERATION, generation)
    replace_json(folder / CONFIG, to_config(cls, config, tensors))
    return folder


def to_generation(config: Any) -> dict[str, Any] | None:
    """The `generation_config.json` of a model's folder; None where its config says nothing of generation."""
    generation = getattr(config, "generation", None)
    if generation is None:
        return None
    tokens = {name: value for name, value in config.to_hf().items() if name.endswith("_token_id")}
    return {name: value for name, value in {**generation.keys, **tokens}.items() if value is not None}


def _write_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    """The files that a model came with, unless the folder has others of theirs: a tokenizer of two halves is none."""
    there = _companions(folder)
    if differing := [name for name, content in there.items() if files.get(name) != content]:
        if files:
            warnings.warn(
                f"`{folder / differing[0]}`: kept, and nothing added to it, for the folder that the model was loaded "
                f"from has another, or none. Remove it, and save again, to have that folder's {', '.join(files)}.",
                stacklevel=3,
            )
        return
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside, content=content: beside.write_bytes(content))


def to_config(cls: type[Pretrained], config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a model's folder."""
    fields = {**config.extra, **config.to_hf()}
    if "_class_name" in fields:  # diffusers: it names the class, and keeps no dtype
        return fields
    dtypes = {str(tensor.dtype) for tensor in tensors.values() if jnp.issubdtype(tensor.dtype, jnp.floating)}
    dtype = {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    return {**fields, "architectures": [cls.architecture(config)], **dtype}


def _bytes(size: int | str) -> int:
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*", str(size).upper())
    n = int(float(match[1]) * units.get(match[2] or "B", 0)) if match else 0
    if n < 1:
        raise ValueError(f"`max_shard_size`: expected bytes, or a text like '5GB', got {size!r}. Pass one of the two.")
    return n


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside and rename it, so that a reader sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def replace_json(path: Path, fields: Mapping[str, Any]) -> None:
    replace_file(path, lambda beside: beside.write_text(json.dumps(fields, indent=2) + "\n", "utf-8"))
