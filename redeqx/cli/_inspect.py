"""`redeqx inspect`: shows the contents of a run, a checkpoint, a safetensors file or a Hugging Face folder.

No tensor is read. Owns the table and the JSON; `checkpoint` owns the formats, and checks every header that is opened.
"""

import argparse
import fnmatch
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .._tree import listed, nearest
from ..checkpoint import INDEX, MANIFEST, Base, CheckpointFolder, TensorReader, find_checkpoint, kind_of, read_manifest
from ..distributed import Peers
from ..errors import DamagedError, brief, brief_name, load_json
from ..machine import mesh_text
from ..monitor import Console, size_text, to_json
from ..storage import Location, location

Report = dict[str, Any]  # what `--json` prints
Tensors = dict[str, dict[str, Any]]  # dtype, shape and bytes of each tensor, as a file's header says

_CONFIGS = ("config.json", "adapter_config.json", "scheduler_config.json")
# The keys of a Hugging Face configuration that are shown.
_KEYS = ("model_type", "_class_name", "architectures", "dtype", "torch_dtype", "peft_type", "r", "base_model_name_or_path")
_EPILOG = """
PATH may be
  runs/x                          a workdir: its checkpoints, and the contents of the last one
  runs/x/ckpts/step_00000400      a checkpoint, also by a name of the index, such as runs/x/ckpts/argmax_accuracy
  model.safetensors               any safetensors file, or the index of several (model.safetensors.index.json)
  llama-3.1-8b                    a folder with such files, such as a Hugging Face folder
  s3://bucket/runs/x              any of these in an object store (s3:// or gs://)

examples:
  redeqx inspect runs/x --match "*.attention.*"
  redeqx inspect runs/x --kind optimizer --check
  redeqx inspect llama-3.1-8b --json | jq .totals
"""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show the contents of a run, a checkpoint or a file of weights",
        description="Print step, metrics and sizes of a checkpoint, and name, dtype, shape and size of its tensors. Only "
        "headers are read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=as_location, metavar="PATH")
    parser.add_argument(
        "--match", action="append", default=[], metavar="PATTERN",
        help='only tensors whose name matches, such as "*.attention.*"; may be repeated',
    )  # fmt: skip
    parser.add_argument(
        "--kind",
        help="which tensors: by default `model` if there is one; otherwise a file's name, such as `optimizer`; or `all`",
    )
    parser.add_argument("--check", action="store_true", help="read a checkpoint's files and compare their checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def as_location(text: str) -> Location:
    """Parses a path for `argparse`, which would drop the message of a ValueError."""
    try:
        return location(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(args: argparse.Namespace) -> int:
    path, report, sources = describe_path(args.path)
    if args.check:
        _check(path, report)
    tensors = {kind: _tensors(source) for kind, source in _select_kinds(report, sources, args.kind).items()}
    n_all = {kind: len(of) for kind, of in tensors.items()}
    report["tensors"] = _filter_names(tensors, args.match) if args.match else tensors
    report["totals"] = {kind: _totals(of) for kind, of in report["tensors"].items()}
    console = Console(None)
    if args.json:
        console.info(to_json(report))
        return 0
    if rows := report.get("checkpoints"):
        console.table(f"checkpoints of {path.parent}", ("name", "named", "size", "metrics"), map(_checkpoint_cells, rows))
    console.header(_summary(report), title=str(path))
    for kind, of in report["tensors"].items():
        console.table(
            sources[kind].name, ("tensor", "dtype", "shape", "size"), _cells(of, report["totals"][kind], n_all[kind])
        )
    return 0


# --- contents of a path ------------------------------------------------------------------------------------------------


def describe_path(path: Location) -> tuple[Location, Report, dict[str, Location]]:
    """Finds the contents of a path.

    Returns the path of the file, folder or checkpoint itself; what `--json` prints of it, except for its tensors; and its
    files with tensors by kind (`model`, `optimizer`).

    Raises ValueError for a path without tensors, and for damaged files.
    """
    if path.is_file():
        if not path.name.endswith((".safetensors", ".json")):
            raise ValueError(
                f"`{path}`: expected a safetensors file or an index of some, got a file of another kind. Pass one of "
                "those, or a folder."
            )
        return path, {"path": str(path), "files": {path.name: path.stat().st_size}}, {kind_of(path.name): path}
    if path.is_dir() and not (path / MANIFEST).is_file() and (sources := _sources(path)):
        files = {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
        config = _config(path)
        return path, {"path": str(path), "files": files, **({"config": config} if config else {})}, sources
    try:
        checkpoints, folder = find_checkpoint(path, Peers())
    except DamagedError:
        raise
    except ValueError:
        if not path.is_dir():
            raise
        names = ", ".join(listed([each.name for each in sorted(path.iterdir())])) or "nothing"
        raise ValueError(
            f"`{path}`: expected a workdir with a complete checkpoint, a checkpoint, or a folder of safetensors files, got "
            f"one with {names}. Pass another path; `redeqx inspect --help` lists the supported ones."
        ) from None
    manifest = read_manifest(folder)
    files = {name: of["size"] for name, of in manifest.files.items()} | {MANIFEST: (folder / MANIFEST).stat().st_size}
    index = checkpoints.index()
    tags = [tag for tag, name in index.items() if name == folder.name]
    report: Report = {"path": str(folder), "files": files, "tags": tags, "record": manifest.record, "checked": False}
    if path.is_dir() and path.resolve() != folder.resolve():  # a workdir, or its folder of checkpoints
        report["checkpoints"] = _checkpoint_rows(checkpoints, index)
    return folder, report, _sources(folder)


def _sources(folder: Location) -> dict[str, Location]:
    """Returns the tensor files of a folder by kind: a file, or the index of several. As in `transformers`, a single file has
    precedence."""
    found = {kind_of(path.name): path for path in sorted(folder.glob(f"*{INDEX}"))}
    single = {path.name.removesuffix(".safetensors"): path for path in sorted(folder.glob("*.safetensors"))}
    found |= {stem: path for stem, path in single.items() if kind_of(path.name) == stem or kind_of(path.name) not in found}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "model", item[0])))


def _config(folder: Location) -> dict[str, Any]:
    path = next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)
    try:
        fields = {} if path is None else load_json(path, unique=False)
    except ValueError as error:
        raise ValueError(f"`{path}`: expected JSON, got {error}. Correct the file.") from error
    return {key: fields[key] for key in _KEYS if fields.get(key) is not None} if isinstance(fields, dict) else {}


def _checkpoint_rows(checkpoints: CheckpointFolder, index: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns a row for each checkpoint of a folder."""
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


def _check(path: Location, report: Report) -> None:
    """Reads all files of a checkpoint. Raises ValueError for a damaged one."""
    if "record" not in report:
        raise ValueError(
            f"`--check`: expected a checkpoint of redeqx, whose {MANIFEST} has checksums, got {path}. Leave it out: "
            "the headers are checked in any case."
        )
    CheckpointFolder(path.parent).record(path)
    report["checked"] = True


# --- tensors -----------------------------------------------------------------------------------------------------------


def _select_kinds(report: Report, sources: Mapping[str, Location], kind: str | None) -> Mapping[str, Location]:
    """Returns the files whose tensors are shown, by kind."""
    if kind is None and "record" in report and "model" in sources:
        kind = "model"
    if kind in (None, "all"):
        return sources
    if kind not in sources:
        raise ValueError(
            f"`--kind`: expected {', '.join(sources)} or all, got {kind!r}.{nearest(kind, sources)} Pass one of them."
        )
    return {kind: sources[kind]}


def _tensors(path: Location) -> Tensors:
    """Returns the tensors of a file or an index, with layers in numeric order."""
    reader = TensorReader(path)
    views = {name: reader.view(name) for name in sorted(reader.names(), key=_natural_key)}
    return {name: {"dtype": str(of.dtype), "shape": of.shape, "bytes": of.nbytes} for name, of in views.items()}


def _natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that puts `layers.2` before `layers.10`."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _filter_names(trees: Mapping[str, Tensors], patterns: Sequence[str]) -> dict[str, Tensors]:
    """Returns the tensors whose names match. Raises ValueError for a pattern without matches."""
    names = [name for tensors in trees.values() for name in tensors]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = nearest(pattern, map(brief_name, names))
            raise ValueError(
                f"`{pattern}`: expected a pattern of tensor names, got one that matches none of {len(names)}.{near} Quote "
                'it, and write "*" for any text.'
            )
    matches = lambda name: any(fnmatch.fnmatchcase(name, each) for each in patterns)  # noqa: E731
    return {kind: {name: of for name, of in tensors.items() if matches(name)} for kind, tensors in trees.items()}


def _totals(tensors: Tensors) -> dict[str, Any]:
    dtypes = Counter[str]()
    for of in tensors.values():
        dtypes[of["dtype"]] += math.prod(of["shape"])
    n_bytes = sum(of["bytes"] for of in tensors.values())
    return {"tensors": len(tensors), "numbers": sum(dtypes.values()), "bytes": n_bytes, "dtypes": dict(dtypes.most_common())}


# --- output ------------------------------------------------------------------------------------------------------------


def _checkpoint_cells(of: Mapping[str, Any]) -> tuple[str, ...]:
    size = "damaged" if "damaged" in of else size_text(of["bytes"])
    return of["name"], ", ".join(map(brief_name, of["tags"])), size, _metrics(of.get("metrics"))


def _cells(tensors: Tensors, totals: Mapping[str, Any], n_all: int) -> list[tuple[str, ...]]:
    """Returns a row for each tensor, and a last one for all of them."""
    shapes = {name: " x ".join(map(str, of["shape"])) or "scalar" for name, of in tensors.items()}
    rows = [(brief_name(name), of["dtype"], shapes[name], size_text(of["bytes"])) for name, of in tensors.items()]
    count = f"{len(tensors):,}" if len(tensors) == n_all else f"{len(tensors):,} of {n_all:,}"
    last = (f"{count} tensors", ", ".join(totals["dtypes"]), f"{totals['numbers']:,} numbers", size_text(totals["bytes"]))
    return [*rows, last]


def _summary(report: Report) -> dict[str, str]:
    """Returns the rows printed above the tensors."""
    rows: dict[str, str] = {}
    if (record := report.get("record")) is not None:
        rows["step"] = str(record.get("step"))
        rows["metrics"] = _metrics(record.get("metrics")) or "none"
        rows["named"] = ", ".join(map(brief_name, report["tags"])) or "by no name of the index"
        mesh = record.get("mesh")
        on = mesh_text(mesh) if isinstance(mesh, dict) else "an unknown mesh"
        rows["saved by"] = brief_name(f"redeqx {record.get('redeqx', 'of an unknown version')} on {on}")
        if (base := Base.of_record(record)) is not None:
            n_of = "; ".join(f"{len(leaves):,} leaves of {brief_name(folder)}" for folder, leaves in base.folders.items())
            rows["base"] = f"{n_of}, which are not in these files"
    for key, value in report.get("config", {}).items():
        rows[key.lstrip("_")] = brief_name(", ".join(map(str, value)) if isinstance(value, list) else str(value))
    sizes = sorted(report["files"].items(), key=lambda item: item[0].removesuffix(".json"))
    rows["files"] = "\n".join(f"{size_text(size):>9}  {brief_name(name)}" for name, size in sizes)
    if report.get("checked"):
        rows["checksums"] = "as they were written"
    return rows


def _metrics(metrics: Any) -> str:
    if not isinstance(metrics, dict):
        return ""
    shown = {name: _number(value) for name, value in metrics.items()}
    return ", ".join(f"{brief_name(name)} {value}" for name, value in shown.items())


def _number(value: Any) -> str:
    if isinstance(value, str):  # NaN or an infinity
        return brief_name(value)
    return f"{value:.4g}" if isinstance(value, float) else brief(value)
