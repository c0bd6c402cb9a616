"""`redeqx convert`: writes weights as a Hugging Face folder of a family of `redeqx.models`, or as one safetensors file.

Owns the checks before the work, and the atomic write. `redeqx.models` owns the families, their folders and adapters;
`checkpoint` owns the files.
"""

import argparse
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .. import load
from .._tree import is_array_like, map_named
from ..checkpoint import Base, CheckpointFolder, TensorReader, file_size, write_tensors
from ..machine import described
from ..monitor import Console, size_text
from ..storage import Location, StorePath, disk_path
from ._inspect import Contents, inspect_path
from ._paths import as_location

_DTYPES = ("float32", "bfloat16", "float16")
_MAIN = ("model", "diffusion_pytorch_model")  # the model's file, if the folder has others too
_ADAPTER = ".lora_a"  # the suffix of an adapter's first tensor
_EPILOG = """
DST ending in .safetensors is one file, with the same tensor names. Any other DST is a folder that transformers or diffusers
loads; SRC is then such a folder, or a checkpoint of a model of redeqx.models with --config.

examples:
  redeqx convert llama-3.1-8b llama-bf16 --dtype bfloat16               another dtype
  redeqx convert llama-3.1-8b merged --adapter adapter                  with PEFT's adapter merged
  redeqx convert runs/x tuned --config llama-3.1-8b                     the last checkpoint of a run
  redeqx convert runs/x tuned --config llama-3.1-8b --alpha 16          with the run's adapters merged
  redeqx convert runs/x/ckpts/argmin_loss best.safetensors              the weights as a file
"""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "convert",
        help="write weights as a Hugging Face folder or one file, in another dtype, or with adapters merged",
        description="Write the weights of a folder, a checkpoint or a file as a Hugging Face folder, or as one safetensors "
        "file. Nothing is overwritten. DST is written atomically: completely or not at all.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=as_location, metavar="SRC", help="like PATH of `redeqx inspect`")
    parser.add_argument("to", type=as_location, metavar="DST", help="a folder or file that does not exist yet")
    parser.add_argument("--dtype", choices=_DTYPES, help="the dtype of floating tensors; unchanged by default")
    parser.add_argument(
        "--config",
        type=as_location,
        metavar="FOLDER",
        help="the Hugging Face folder whose config.json and tokenizer describe the model of a checkpoint: the one that it "
        "was made from; it need not contain weights",
    )
    parser.add_argument("--kind", help="which file of a checkpoint: `model` by default")
    parser.add_argument(
        "--adapter", type=disk_path, metavar="FOLDER", help="a PEFT adapter folder to merge into the weights"
    )
    parser.add_argument("--alpha", type=float, help="the `alpha` of `lora.add`, if the weights of SRC contain adapters")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # a model that fits the host may not fit an accelerator
    if isinstance(args.to, StorePath):
        raise ValueError(f"`{args.to}`: expected a path on a disk, got an object store's. Write to a disk, then copy it.")
    if args.to.exists():
        raise ValueError(
            f"`{args.to}`: expected a path that does not exist yet, got one that does. Remove it, or pass another."
        )
    found = inspect_path(args.source)
    path = _select_source(found, args.kind)
    write = _file_writer if args.to.suffix == ".safetensors" else _folder_writer
    try:
        with np.errstate(over="raise"):
            _write_atomically(args.to, write(args, found, path))
    except FloatingPointError:
        raise ValueError(
            f"`--dtype`: expected numbers in the range of {args.dtype}, got larger ones in {args.source}. Pass bfloat16, "
            "which has the range of float32."
        ) from None
    files = "\n".join(f"{size_text(n):>9}  {name}" for name, n in inspect_path(args.to).files.items())
    Console(None).header({"files": files}, title=str(args.to))
    return 0


def _select_source(found: Contents, kind: str | None) -> Location:
    """Returns the file or index to read the tensors from. Raises ValueError if there are several and `kind` names none."""
    sources = found.sources
    if kind is None:
        kind = next((stem for stem in _MAIN if stem in sources), next(iter(sources)) if len(sources) == 1 else None)
    if kind not in sources:
        got = "none" if kind is None else repr(kind)
        raise ValueError(f"`--kind`: expected one of {', '.join(sources)}, got {got}. Pass one of them.")
    return sources[kind]


def _write_atomically(to: Path, write: Callable[[Path], Any]) -> None:
    """Writes to a temporary path in the same folder, then renames it to `to`, which must not exist."""
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(f".tmp_{secrets.token_hex(8)}")
    try:
        write(temporary)
        os.rename(temporary, to)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def _check_disk(to: Path, n_bytes: int) -> None:
    """Raises OSError if the disk has too little free space."""
    there = next(folder for folder in to.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if n_bytes > free:
        raise OSError(
            f"`{to}`: expected {size_text(n_bytes)} free on its disk, got {size_text(free)}. Make room, or write elsewhere."
        )


# --- one file ------------------------------------------------------------------------------------------------------------


def _file_writer(args: argparse.Namespace, found: Contents, path: Location) -> Callable[[Path], Any]:
    """Returns a function that writes the tensors of a source as one file, with one tensor in memory at a time."""
    for option in ("config", "adapter", "alpha"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"`--{option}`: expected a folder as DST, got the file {args.to}. Leave it out, or write "
                f"`{args.to.with_suffix('')}`."
            )
    if found.manifest is not None and (base := Base.of_record(found.manifest.record)) is not None:
        folder = next(iter(base.folders))
        raise ValueError(
            f"`{args.source}`: expected a checkpoint that holds the whole model, got trained leaves alone, whose base is "
            f"`{folder}`. Write a folder: `redeqx convert {args.source} {args.to.with_suffix('')} --config {folder}`."
        )
    reader = TensorReader(path)
    views = {name: reader.view(name) for name in reader.names()}
    _check_disk(args.to, file_size(views, args.dtype))
    if found.manifest is not None:
        CheckpointFolder(found.path.parent).record(found.path)  # verifies its files
    return lambda to: write_tensors(to, views, args.dtype, metadata={"format": "pt"})


# --- a folder ------------------------------------------------------------------------------------------------------------


def _folder_writer(args: argparse.Namespace, found: Contents, path: Location) -> Callable[[Path], Any]:
    """Returns a function that writes a model of `redeqx.models` as a folder. The whole model is in memory."""
    from redeqx.models import from_pretrained, lora, save_pretrained

    is_folder = found.manifest is None and (found.path / "config.json").is_file()
    adapters = _adapters(path)
    merges = bool(adapters) or args.adapter is not None
    base = None if found.manifest is None else Base.of_record(found.manifest.record)
    if base is not None and args.config is None:
        args.config = Path(next(iter(base.folders)))
    _check_options(args, is_folder, adapters)
    # If adapters are merged and the dtype changes, weights are summed in float32 and rounded once.
    dtype = "float32" if merges and args.dtype is not None else args.dtype
    _check_disk(args.to, _size(path, args.dtype))
    _check_memory(args.source, _size(path, dtype))
    if is_folder:
        model, config = from_pretrained(found.path, dtype=dtype)
    else:
        with described("this") if base is None else nullcontext():  # shapes, unless the base's values are needed
            like, config = from_pretrained(args.config, dtype=None if base is None else base.dtype)
        for rank in sorted(set(adapters.values())):
            where = [name for name, own in adapters.items() if own == rank]
            added = partial(lora.add, rank=rank, alpha=args.alpha, where=where, key=jax.random.key(0))
            like = added(like) if base is not None else eqx.filter_eval_shape(added, like)
        model = load(
            path if found.manifest is None else found.path, _with_dtypes(like, path, dtype), kind=args.kind or "model"
        )
    if args.adapter is not None:
        model = lora.load_adapter(model, args.adapter)
    if merges:
        model = lora.merge(model)
    if (merges or base is not None) and args.dtype is not None:
        model = jax.tree.map(lambda x: np.asarray(x).astype(args.dtype) if eqx.is_inexact_array(x) else x, model)
    return lambda to: save_pretrained(model, config, to)


def _check_options(args: argparse.Namespace, is_folder: bool, adapters: Mapping[str, int]) -> None:
    """Raises ValueError if the options do not match the source."""
    if is_folder and args.config is not None:
        raise ValueError(
            f"`--config`: expected none with {args.source}, which has its own config.json, got {args.config}. Leave it out."
        )
    if not is_folder and args.config is None:
        raise ValueError(
            f"`--config`: expected the Hugging Face folder that describes the model in {args.source}, got none. Pass the "
            "one that it was made from, or a DST that ends in .safetensors."
        )
    if adapters and args.alpha is None:
        ranks = ", ".join(map(str, sorted(set(adapters.values()))))
        raise ValueError(
            f"`--alpha`: expected the `alpha` of `lora.add` for the {len(adapters)} adapters in {args.source}, got none. "
            f"Its default is the rank: here {ranks}."
        )
    if not adapters and args.alpha is not None:
        raise ValueError(f"`--alpha`: expected adapters in {args.source}, got none. Leave it out.")
    if args.adapter is not None and adapters:
        raise ValueError(
            f"`--adapter`: expected weights without adapters, got {len(adapters)} in {args.source}. Leave it out."
        )
    if args.adapter is not None and not (args.adapter / "adapter_config.json").is_file():
        raise ValueError(f"`--adapter`: expected a folder with adapter_config.json, got {args.adapter}. Pass one of PEFT's.")


def _adapters(path: Location) -> dict[str, int]:
    """Returns the rank of each adapter in a model's tensors, by the path of its layer."""
    reader = TensorReader(path)
    names = [name for name in reader.names() if name.endswith(_ADAPTER)]
    return {name.removesuffix(_ADAPTER): reader.view(name).shape[-2] for name in names}


def _with_dtypes(like: Any, path: Location, dtype: str | None) -> Any:
    """Returns a model's shapes with the dtypes of its tensors in a file; floating ones with `dtype`, if it is given."""
    reader = TensorReader(path)

    def of(name: str, leaf: Any) -> Any:
        if not is_array_like(leaf) or name not in reader:
            return leaf
        is_cast = dtype is not None and jax.numpy.issubdtype(leaf.dtype, np.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if is_cast else reader.view(name).dtype)

    return map_named(of, like)


def _size(path: Location, dtype: str | None) -> int:
    reader = TensorReader(path)
    return file_size({name: reader.view(name) for name in reader.names()}, dtype)


def _check_memory(source: Location, n_bytes: int) -> None:
    """Raises ValueError if a model is larger than this host's memory."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes > there:
        raise ValueError(
            f"`{source}`: expected a model that fits this host's memory ({size_text(there)}), got one of "
            f"{size_text(n_bytes)}. Convert it on a larger host."
        )
