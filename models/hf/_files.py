"""The files of a Hugging Face folder: configs, weights, and the tokenizer files with them.

`_reader.py` interprets configs, and `_load.py` converts tensors to leaves.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redeqx.checkpoint import TensorReader
from redeqx.errors import load_json
from redeqx.machine import dry
from redeqx.storage import Location

from ..generation import GENERATION, Generation

CONFIG = "config.json"
# Files of tokenizers and of image or feature processors. They are saved with the model, which is incomplete without them.
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


def type_key(fields: Mapping[str, Any]) -> str:
    """Returns the key of `config.json` that names the model. It differs between diffusers and transformers."""
    return "_class_name" if "_class_name" in fields else "model_type"


def read_config(folder: Location, file: str = CONFIG) -> dict[str, Any]:
    """Returns the parsed `config.json` of a folder, or another JSON file in it.

    Raises ValueError if the file does not exist or is not JSON.
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


def read_generation(folder: Location) -> Generation | None:
    if not (folder / GENERATION).exists():
        return None
    return Generation(read_config(folder, GENERATION), folder / GENERATION)


def companions(folder: Location) -> dict[str, bytes]:
    """Returns the files of a folder that belong to its model, other than weights and config, by name."""
    root: Any = folder
    paths = sorted({path for pattern in _COMPANIONS for path in root.glob(pattern) if path.is_file()})
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def weights_of(folder: Location, stem: str) -> TensorReader | None:
    """Returns the tensors of a folder; None in a dry run if it has none, so that weights need not be downloaded to check
    whether a model fits. Otherwise raises ValueError if there are none."""
    if dry() is not None and not any(folder.glob(f"{stem}*.safetensors*")):
        return None
    return TensorReader.find(folder, stem)


def write_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files that a model was loaded with, unless the folder has its own: the files of two tokenizers must not
    be mixed."""
    there = companions(folder)
    if differing := [name for name, content in there.items() if files.get(name) != content]:
        if files:
            warnings.warn(
                f"`{folder / differing[0]}`: kept, and no file added, because the folder that the model was loaded "
                f"from has a different one, or none. Remove it and save again to get that folder's {', '.join(files)}.",
                stacklevel=3,
            )
        return
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda beside, content=content: beside.write_bytes(content))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a temporary file next to the target and renames it, so that a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def replace_json(path: Path, fields: Mapping[str, Any]) -> None:
    replace_file(path, lambda beside: beside.write_text(json.dumps(fields, indent=2) + "\n", "utf-8"))
