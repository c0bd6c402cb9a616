"""`redeqx inspect`: what a run, a checkpoint, a safetensors file or a Hugging Face folder holds. No tensor is read.

Owns the table and the JSON. `checkpoint` owns the formats, and checks every header that is opened.
"""

import argparse
import fnmatch
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._tree import listed, nearest
from ..checkpoint import INDEX, MANIFEST, CheckpointFolder, Manifest, TensorReader, find_checkpoint, read_manifest
from ..distributed import Peers
from ..errors import DamagedError, brief, brief_name, load_json
from ..monitor import Console, size_text
from ..storage import Location
from ._paths import as_location

_CONFIGS = ("config.json", "adapter_config.json", "scheduler_config.json")
# What is shown of a configuration of Hugging Face.
_KEYS = ("model_type", "_class_name", "architectures", "dtype", "torch_dtype", "peft_type", "r", "base_model_name_or_path")
_EPILOG = """
PATH may be
  runs/x                          a workdir: its checkpoints, and what the last one holds
  runs/x/ckpts/step_00000400      a checkpoint, also by a name of the index, as runs/x/ckpts/argmax_accuracy
  model.safetensors               any safetensors file, or the index of several (model.safetensors.index.json)
  llama-3.1-8b                    a folder with such files, as those of Hugging Face
  s3://bucket/runs/x              each of these in an object store (s3:// or gs://)

examples:
  redeqx inspect runs/x --match "*.attention.*"
  redeqx inspect runs/x --kind optimizer --check
  redeqx inspect llama-3.1-8b --json | jq .totals
"""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "inspect",
        help="say what a run, a checkpoint or a file of weights holds",
        description="Print step, metrics and sizes of a checkpoint, and name, dtype, shape and size of its tensors. Only "
        "headers are read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=as_location, metavar="PATH")
    parser.add_argument(
        "--match", action="append", default=[], metavar="PATTERN",
        help='only tensors whose name matches, as "*.attention.*"; given again, those of each',
    )  # fmt: skip
    parser.add_argument(
        "--kind",
        help="which tensors: `model` by default, where there is one; `optimizer`, `ema` and so on, as the files are called; "
        "or `all`",
    )
    parser.add_argument("--check", action="store_true", help="read a checkpoint's files and compare their checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class Tensor:
    """What the header of a file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int

    @property
    def n_numbers(self) -> int:
        return math.prod(self.shape)


@dataclass
class Found:
    """What there is at a path.

    **Arguments:**

    - `path`: of the checkpoint, the file or the folder; not of the workdir that it is in.
    - `files`: bytes of each file, by name.
    - `sources`: the tensors' files by kind (`model`, `optimizer`).
    - `manifest`: of a checkpoint.
    - `tags`: the names that the index has for it.
    - `config`: what a Hugging Face folder says of its model.
    - `beside`: the checkpoints of the folder that it is in, where all of them were asked for.
    """

    path: Location
    files: dict[str, int]
    sources: dict[str, Location]
    manifest: Manifest | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    beside: list[dict[str, Any]] = field(default_factory=list)


def _run(args: argparse.Namespace) -> int:
    found = look(args.path)
    if args.check:
        _check(found)
    trees = {kind: _tensors(path) for kind, path in _chosen(found, args.kind).items()}
    of_all = {kind: len(tensors) for kind, tensors in trees.items()}
    if args.match:
        trees = _matching(trees, args.match)
    console = Console(None)
    if args.json:
        console.info(json.dumps(_as_json(found, trees, args.check)))
    else:
        _show(console, found, trees, of_all, args.check)
    return 0


# --- what there is -----------------------------------------------------------------------------------------------------


def look(path: Location) -> Found:
    """What there is at a path.

    Raises ValueError for a path without tensors, and for what is damaged.
    """
    if path.is_file():
        return Found(path, {path.name: path.stat().st_size}, {_kind(path): path})
    if path.is_dir() and not (path / MANIFEST).is_file() and (sources := _sources(path)):
        files = {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
        return Found(path, files, sources, config=_config(path))
    try:
        checkpoints, folder = find_checkpoint(path, Peers())
    except DamagedError:
        raise
    except ValueError:
        if path.is_dir():
            raise _nothing_in(path) from None
        raise
    manifest = read_manifest(folder)
    files = {name: of["size"] for name, of in manifest.files.items()}
    files[MANIFEST] = (folder / MANIFEST).stat().st_size
    index = checkpoints.index() if folder.parent == checkpoints.folder else {}
    tags = [tag for tag, name in index.items() if name == folder.name]
    is_of_many = path.is_dir() and path.resolve() != folder.resolve()
    beside = _listed(checkpoints, index) if is_of_many else []
    return Found(folder, files, _sources(folder), manifest, tags, beside=beside)


def _nothing_in(path: Location) -> ValueError:
    """The error for a folder that is none of what the command takes."""
    entries = sorted(path.iterdir())
    below = [each for each in entries if each.is_dir() and ((each / "ckpts").is_dir() or _sources(each))]
    if below:
        got, step = f"one whose folders hold some: {', '.join(each.name for each in below)}", f"Pass `{below[0]}`, say."
    else:
        names = ", ".join(listed([each.name for each in entries])) or "nothing"
        got, step = f"one that holds {names}", "Pass another path; `redeqx inspect --help` lists what is taken."
    return ValueError(f"`{path}`: expected a workdir, a checkpoint, or a folder of safetensors files, got {got}. {step}")


def _kind(path: Location) -> str:
    """`model` for `model.safetensors`, `model.safetensors.index.json` and `model-00001-of-00002.safetensors`."""
    return re.sub(r"(-\d+-of-\d+)?\.safetensors(\.index\.json)?$", "", path.name)


def _sources(folder: Location) -> dict[str, Location]:
    """The tensors of a folder by kind: a file, or the index of several. As `transformers`, a single file goes first."""
    found = {_kind(path): path for path in sorted(folder.glob(f"*{INDEX}"))}
    single = {path.name.removesuffix(".safetensors"): path for path in sorted(folder.glob("*.safetensors"))}
    found |= {stem: path for stem, path in single.items() if _kind(path) == stem or _kind(path) not in found}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "model", item[0])))


def _config(folder: Location) -> dict[str, Any]:
    path = next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)
    try:
        fields = {} if path is None else load_json(path, unique=False)
    except ValueError as error:
        raise ValueError(f"`{path}`: expected JSON, got {error}. Correct the file.") from error
    return {key: fields[key] for key in _KEYS if fields.get(key) is not None} if isinstance(fields, dict) else {}


def _listed(checkpoints: CheckpointFolder, index: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each checkpoint of a folder."""
    rows = []
    for name in checkpoints.names():
        row: dict[str, Any] = {"name": name, "tags": [tag for tag, of in index.items() if of == name]}
        try:
            manifest = read_manifest(checkpoints.folder / name)
            row |= {"step": manifest.record.get("step"), "metrics": manifest.record.get("metrics")}
            row["bytes"] = sum(of["size"] for of in manifest.files.values())
        except (ValueError, OSError) as error:
            row["damaged"] = str(error)
        rows.append(row)
    return rows


def _check(found: Found) -> None:
    """Reads all files of a checkpoint. Raises ValueError for one that is not as it was written."""
    if found.manifest is None:
        raise ValueError(
            f"`--check`: expected a checkpoint of redeqx, whose {MANIFEST} has checksums, got {found.path}. Leave it out: "
            "the headers are checked in any case."
        )
    CheckpointFolder(found.path.parent).record(found.path)


# --- its tensors -------------------------------------------------------------------------------------------------------


def _chosen(found: Found, kind: str | None) -> dict[str, Location]:
    """The files whose tensors are shown, by kind."""
    kinds = found.sources
    if kind is None and found.manifest is not None and "model" in kinds:
        kind = "model"
    if kind in (None, "all"):
        return kinds
    if kind not in kinds:
        raise ValueError(
            f"`--kind`: expected {', '.join(kinds)} or all, got {kind!r}.{nearest(kind, kinds)} Pass one of them."
        )
    return {kind: kinds[kind]}


def _tensors(path: Location) -> dict[str, Tensor]:
    """The tensors of a file or an index, layers by their numbers."""
    reader = TensorReader(path)
    found = {}
    for name in sorted(reader.names(), key=_in_order):
        view = reader.view(name)
        found[name] = Tensor(str(view.dtype), view.shape, view.nbytes)
    return found


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """A key by which `layers.2` goes before `layers.10`."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _matching(trees: Mapping[str, Mapping[str, Tensor]], patterns: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Those whose names match. Raises ValueError for a pattern that matches nothing."""
    names = [name for tensors in trees.values() for name in tensors]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = nearest(pattern, map(brief_name, names))
            raise ValueError(
                f"`{pattern}`: expected a pattern of tensors' names, got one that matches none of {len(names)}.{near} Quote "
                'it, and write "*" for any text.'
            )
    return {
        kind: {name: of for name, of in tensors.items() if any(fnmatch.fnmatchcase(name, each) for each in patterns)}
        for kind, tensors in trees.items()
    }


def _totals(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    dtypes = Counter[str]()
    for of in tensors.values():
        dtypes[of.dtype] += of.n_numbers
    n_bytes = sum(of.n_bytes for of in tensors.values())
    return {"tensors": len(tensors), "numbers": sum(dtypes.values()), "bytes": n_bytes, "dtypes": dict(dtypes.most_common())}


# --- what is printed -----------------------------------------------------------------------------------------------------


def _as_json(found: Found, trees: Mapping[str, Mapping[str, Tensor]], is_checked: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"path": str(found.path), "files": found.files}
    if found.manifest is not None:
        said |= {"tags": found.tags, "record": found.manifest.record, "checked": is_checked}
    if found.config:
        said["config"] = found.config
    if found.beside:
        said["checkpoints"] = found.beside
    said["tensors"] = {
        kind: {name: {"dtype": of.dtype, "shape": of.shape, "bytes": of.n_bytes} for name, of in tensors.items()}
        for kind, tensors in trees.items()
    }
    said["totals"] = {kind: _totals(tensors) for kind, tensors in trees.items()}
    return said


def _show(
    console: Console, found: Found, trees: Mapping[str, Mapping[str, Tensor]], of_all: Mapping[str, int], is_checked: bool
) -> None:
    if found.beside:
        rows = [
            (
                of["name"],
                ", ".join(map(brief_name, of["tags"])),
                "damaged" if "damaged" in of else size_text(of["bytes"]),
                _metrics(of.get("metrics")),
            )
            for of in found.beside
        ]
        console.table(f"checkpoints of {found.path.parent}", ("name", "named", "size", "metrics"), rows)
    console.header(_facts(found, is_checked), title=str(found.path))
    for kind, tensors in trees.items():
        totals = _totals(tensors)
        dtypes = ", ".join(totals["dtypes"])
        count = f"{len(tensors):,}" if len(tensors) == of_all[kind] else f"{len(tensors):,} of {of_all[kind]:,}"
        rows = [(brief_name(name), of.dtype, _shape(of.shape), size_text(of.n_bytes)) for name, of in tensors.items()]
        last = (f"{count} tensors", dtypes, f"{totals['numbers']:,} numbers", size_text(totals["bytes"]))
        console.table(found.sources[kind].name, ("tensor", "dtype", "shape", "size"), [*rows, last])


def _facts(found: Found, is_checked: bool) -> dict[str, str]:
    """The rows above the tensors."""
    rows: dict[str, str] = {}
    if found.manifest is not None:
        record = found.manifest.record
        rows["step"] = str(record.get("step"))
        rows["metrics"] = _metrics(record.get("metrics")) or "none"
        rows["named"] = ", ".join(map(brief_name, found.tags)) or "by no name of the index"
        mesh = record.get("mesh")
        on = " x ".join(f"{axis}={n}" for axis, n in mesh.items()) if isinstance(mesh, dict) else "an unknown mesh"
        rows["saved by"] = brief_name(f"redeqx {record.get('redeqx', 'of an unknown version')} on {on}")
    for key, value in found.config.items():
        rows[key.lstrip("_")] = brief_name(", ".join(map(str, value)) if isinstance(value, list) else str(value))
    most = sorted(found.files.items(), key=lambda item: item[0].removesuffix(".json"))
    rows["files"] = "\n".join(f"{size_text(size):>9}  {brief_name(name)}" for name, size in most)
    if is_checked:
        rows["checksums"] = "as they were written"
    return rows


def _metrics(metrics: Any) -> str:
    if not isinstance(metrics, dict):
        return ""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else brief(value) for name, value in metrics.items()}
    return ", ".join(f"{brief_name(name)} {value}" for name, value in shown.items())


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
