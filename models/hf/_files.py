"""The files of a Hugging Face folder: configs, weights, and the tokenizer files with them.

`_reader.py` interprets configs, and `_load.py` converts tensors to leaves.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redeqx.checkpoint import TensorReader
from redeqx.errors import brief_name, load_json, wrong
from redeqx.machine import dry
from redeqx.storage import Location, make_subfolder, write_file

from ..generation import GENERATION, Generation

CONFIG = "config.json"
# Files of tokenizers and of image or feature processors. They are saved with the model, which is incomplete without them.
_COMPANIONS = (
    "tokenizer*.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json", "normalizer.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.spm", "spiece.model", "sentencepiece*.model",
    "chat_template*.json", "*.jinja", "additional_chat_templates/*.jinja", "*processor_config.json",
)  # fmt: skip
_MAX_COMPANION = 10**8  # bytes; the largest tokenizers have a third of it


def type_key(fields: Mapping[str, Any]) -> str:
    """Returns the key of `config.json` that names the model. It differs between diffusers and transformers."""
    return "_class_name" if "_class_name" in fields else "model_type"


def read_config(folder: Location, file: str = CONFIG) -> dict[str, Any]:
    """Returns the parsed `config.json` of a folder, or another JSON file in it.

    Raises ValueError if the file does not exist or is not JSON.
    """
    path = folder / file
    if not folder.is_dir():
        step = f"Pass the folder that holds `{file}`; a model of the Hub has to be downloaded first."
        raise wrong(folder, "a folder", "a file" if folder.exists() else "nothing there", step)
    if not path.is_file():
        there = ", ".join(brief_name(entry.name) for entry in sorted(folder.iterdir())[:8]) or "an empty folder"
        raise wrong(path, "a file", there, f"Pass the folder that holds `{file}`.")
    try:
        fields = load_json(path, unique=False)  # as transformers reads it
    except ValueError as error:
        raise wrong(path, "JSON", error, "Correct the file.") from error
    if not isinstance(fields, dict):
        raise wrong(path, "a JSON object", type(fields).__name__, "Correct the file.")
    return fields


def read_generation(folder: Location) -> Generation | None:
    if not (folder / GENERATION).exists():
        return None
    path, fields = folder / GENERATION, read_config(folder, GENERATION)
    if isinstance(path, Path) and not _belongs(path, path.parent):  # saving the model must not copy another JSON file
        fields = {key: value for key, value in fields.items() if key in Generation.known()}
    return Generation(fields, path)


def companions(folder: Location) -> dict[str, bytes]:
    """Returns the files of a folder that belong to its model, other than weights and config, by name."""
    found: dict[str, bytes] = {}
    for name, path in _companion_paths(folder).items():
        if (size := path.stat().st_size) > _MAX_COMPANION:
            got = f"{size} bytes, more than {_MAX_COMPANION}"
        elif isinstance(path, Path) and isinstance(folder, Path) and not _belongs(path, folder):
            got = f"a link to {brief_name(str(path.resolve()))}"
        else:
            found[name] = path.read_bytes()
            continue
        warnings.warn(
            f"`{folder}`: `{brief_name(name)}`: expected a file of this folder, got {got}. It is left out when the model is "
            "saved: copy it yourself, if it belongs to the model.",
            stacklevel=3,
        )
    return found


def _companion_paths(folder: Location) -> dict[str, Location]:
    root: Any = folder
    paths = sorted({path for pattern in _COMPANIONS for path in root.glob(pattern) if path.is_file()})
    return {path.relative_to(root).as_posix(): path for path in paths}


def _belongs(path: Path, folder: Path) -> bool:
    """Returns whether a file is in a folder, and no link to a file elsewhere; `blobs` of the Hub's cache count as in it."""
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    return any(path.resolve().is_relative_to(root) for root in roots)


def weights_of(folder: Location, stem: str) -> TensorReader | None:
    """Returns the tensors of a folder; None in a dry run if it has none, so that weights need not be downloaded to check
    whether a model fits. Otherwise raises ValueError if there are none."""
    if dry() is not None and not any(folder.glob(f"{stem}*.safetensors*")):
        return None
    return TensorReader.find(folder, stem)


def write_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files that a model was loaded with, unless the folder has its own: the files of two tokenizers must not
    be mixed."""
    there = _companion_paths(folder)
    same = {name for name, path in there.items() if name in files and path.stat().st_size == len(files[name])}
    if differing := [name for name, path in there.items() if name not in same or path.read_bytes() != files[name]]:
        if files:
            warnings.warn(
                f"`{folder / differing[0]}`: kept, and no file added, because the folder that the model was loaded "
                f"from has a different one, or none. Remove it and save again to get that folder's {', '.join(files)}.",
                stacklevel=3,
            )
        return
    for name, content in files.items():
        path = folder / name
        make_subfolder(path.parent, folder)
        write_file(path, content)


def replace_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(fields, indent=2) + "\n").encode())
