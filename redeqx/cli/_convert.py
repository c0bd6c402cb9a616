"""`redeqx convert`: weights as a Hugging Face folder of one of `redeqx.models`, or as one safetensors file.

Owns the checks that come before the work, and the place of what is written. `redeqx.models` owns the families, their folders
and adapters; `checkpoint` owns the files.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .. import load
from .._tree import is_array_like, map_named
from ..checkpoint import CheckpointFolder, TensorReader, file_size, write_tensors
from ..machine import described
from ..monitor import Console, size_text
from ..storage import Location, StorePath
from ._inspect import Found, look
from ._paths import as_location

_DTYPES = ("float32", "bfloat16", "float16")
_MAIN = ("model", "diffusion_pytorch_model")  # the files of a model, whatever else is beside them
_ADAPTER = ".lora_a"  # the end of the name of an adapter's first tensor
_EPILOG = """
DST ending in .safetensors is one file, with the names that the tensors have. Any other DST is a folder that transformers or
diffusers loads; SRC is then such a folder, or a checkpoint of a model of redeqx.models with --config.

examples:
  redeqx convert llama-3.1-8b llama-bf16 --dtype bfloat16               another dtype
  redeqx convert llama-3.1-8b merged --adapter adapter                  with PEFT's adapter merged
  redeqx convert runs/x tuned --config llama-3.1-8b                     the last checkpoint of a run
  redeqx convert runs/x tuned --config llama-3.1-8b --alpha 16          with the adapters that it trained merged
  redeqx convert runs/x/ckpts/argmin_loss best.safetensors --kind ema   an average of the weights, as a file
"""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "convert",
        help="write weights as a Hugging Face folder or one file, in another dtype, or with adapters merged",
        description="Write the weights of a folder, a checkpoint or a file as a Hugging Face folder, or as one safetensors "
        "file. Nothing is overwritten, and what is written is there complete or not at all.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=as_location, metavar="SRC", help="as PATH of `redeqx inspect`")
    parser.add_argument("to", type=as_location, metavar="DST", help="a folder or file that does not exist yet")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating tensors; as they are by default")
    parser.add_argument(
        "--config",
        type=as_location,
        metavar="FOLDER",
        help="the Hugging Face folder whose config.json and tokenizer describe the model of a checkpoint: the one that it "
        "was made from; it need not hold weights",
    )
    parser.add_argument("--kind", help="which file of a checkpoint: `model` by default, or a callback's, as `ema`")
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="a folder of PEFT's, merged into the weights")
    parser.add_argument(
        "--alpha", type=float, help="of the adapters that SRC's own weights hold, as it was given to `lora.add`"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # what the host holds need not fit on an accelerator
    if isinstance(args.to, StorePath):
        raise ValueError(f"`{args.to}`: expected a path on a disk, got an object store's. Write to a disk, then copy it.")
    if args.to.exists():
        raise ValueError(
            f"`{args.to}`: expected a path that does not exist yet, got one that does. Remove it, or pass another."
        )
    found = look(args.source)
    path = _source(found, args.kind)
    write = _file if args.to.suffix == ".safetensors" else _folder
    try:
        with np.errstate(over="raise"):
            _put_in_place(args.to, write(args, found, path))
    except FloatingPointError:
        raise ValueError(
            f"`--dtype`: expected numbers that {args.dtype} holds, got larger ones in {args.source}. Pass bfloat16, which "
            "has the range of float32."
        ) from None
    files = "\n".join(f"{size_text(n):>9}  {name}" for name, n in look(args.to).files.items())
    Console(None).header({"files": files}, title=str(args.to))
    return 0


def _source(found: Found, kind: str | None) -> Location:
    """The tensors to read: a file or an index. Raises ValueError where it is not clear which."""
    sources = found.sources
    if kind is None:
        kind = next((stem for stem in _MAIN if stem in sources), next(iter(sources)) if len(sources) == 1 else None)
    if kind not in sources:
        got = "none" if kind is None else repr(kind)
        raise ValueError(f"`--kind`: expected one of {', '.join(sources)}, got {got}. Pass one of them.")
    return sources[kind]


def _put_in_place(to: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside a path that does not exist, and renames."""
    to.parent.mkdir(parents=True, exist_ok=True)
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        write(beside)
        os.rename(beside, to)
    finally:
        if beside.is_dir():
            shutil.rmtree(beside)
        beside.unlink(missing_ok=True)


def _need_room(to: Path, n_bytes: int) -> None:
    """Raises OSError where the disk has too little room."""
    there = next(folder for folder in to.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if n_bytes > free:
        raise OSError(
            f"`{to}`: expected {size_text(n_bytes)} free on its disk, got {size_text(free)}. Make room, or write elsewhere."
        )


# --- one file ------------------------------------------------------------------------------------------------------------


def _file(args: argparse.Namespace, found: Found, path: Location) -> Callable[[Path], Any]:
    """What writes the tensors of a source as one file, with one of them in memory."""
    for option in ("config", "adapter", "alpha"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"`--{option}`: expected with a folder to write, got it with the file {args.to}. Leave it out, or write "
                f"`{args.to.with_suffix('')}`."
            )
    reader = TensorReader(path)
    views = {name: reader.view(name) for name in reader.names()}
    _need_room(args.to, file_size(views, args.dtype))
    if found.manifest is not None:
        CheckpointFolder(found.path.parent).record(found.path)  # verifies its files
    return lambda to: write_tensors(to, views, args.dtype, metadata={"format": "pt"})


# --- a folder ------------------------------------------------------------------------------------------------------------


def _folder(args: argparse.Namespace, found: Found, path: Location) -> Callable[[Path], Any]:
    """What writes a model of `redeqx.models` as a folder. All of it is in memory."""
    from redeqx.models import from_pretrained, lora, save_pretrained

    is_folder = found.manifest is None and (found.path / "config.json").is_file()
    adapters = _adapters(path)
    merges = bool(adapters) or args.adapter is not None
    _check_options(args, is_folder, adapters)
    # Where adapters are merged and the dtype changes, both are summed in float32 and rounded once.
    dtype = "float32" if merges and args.dtype is not None else args.dtype
    _need_room(args.to, _size(path, args.dtype))
    _need_memory(args.source, _size(path, dtype))
    if is_folder:
        model, config = from_pretrained(found.path, dtype=dtype)
    else:
        with described("this"):
            like, config = from_pretrained(args.config)
        for rank in sorted(set(adapters.values())):
            where = [name for name, own in adapters.items() if own == rank]
            like = eqx.filter_eval_shape(lora.add, like, rank=rank, alpha=args.alpha, where=where, key=jax.random.key(0))
        model = load(
            path if found.manifest is None else found.path, _in_dtypes(like, path, dtype), kind=args.kind or "model"
        )
    if args.adapter is not None:
        model = lora.load_adapter(model, args.adapter)
    if merges:
        model = lora.merge(model)
    if merges and args.dtype is not None:
        model = jax.tree.map(lambda x: np.asarray(x).astype(args.dtype) if eqx.is_inexact_array(x) else x, model)
    return lambda to: save_pretrained(model, config, to)


def _check_options(args: argparse.Namespace, is_folder: bool, adapters: Mapping[str, int]) -> None:
    """Raises ValueError for options that do not fit the source."""
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
            f"`--alpha`: expected what `lora.add` was given for the {len(adapters)} adapters in {args.source}, got none. "
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
    """The rank of each adapter that the tensors of a model hold, by the path of its layer."""
    reader = TensorReader(path)
    names = [name for name in reader.names() if name.endswith(_ADAPTER)]
    return {name.removesuffix(_ADAPTER): reader.view(name).shape[-2] for name in names}


def _in_dtypes(like: Any, path: Location, dtype: str | None) -> Any:
    """The shapes of a model, in the dtypes of its tensors in a file, or floating ones in `dtype`."""
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


def _need_memory(source: Location, n_bytes: int) -> None:
    """Raises ValueError for a model that this host cannot hold."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes > there:
        raise ValueError(
            f"`{source}`: expected a model that this host holds ({size_text(there)} of memory), got one of "
            f"{size_text(n_bytes)}. Convert it on a larger host."
        )
