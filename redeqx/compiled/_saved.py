"""Saved programs: a folder that a dry run fills with compiled programs, and that a run then uses as its compilation cache.

The programs are entries of JAX's cache, under the keys that JAX computes for the run. JAX does not say why it finds no
entry, so a manifest beside them names what they were compiled for: a run that differs is refused before it compiles.
"""

import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ..machine import XLA_CACHES, compiler_environment, configured, mesh_text, use_cache_folder
from ..storage import write_file

MANIFEST = "redeqx.json"
_LARGE = 2**20  # the most elements of a constant whose values are compared
_COMPUTATION = "the text of the train step (the loss, the optimizer, a constant such as the learning rate, or an option)"
_AGAIN = "Save them again with `redeqx dry-run --save`, or pass another folder to `Compiler(cache=)`."


@dataclass
class SavedPrograms:
    """The manifest of a folder of programs."""

    folder: Path
    # What a run must agree with, by name: versions, devices, flags, the mesh; the dtype, shape and spec of each argument of
    # the train step, and the checksum of its text.
    facts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | Path | None) -> "SavedPrograms | None":
        """Returns the manifest of a folder; None if it has none. Raises ValueError for a damaged one."""
        path = None if folder is None else Path(folder) / MANIFEST
        if path is None or not path.is_file():
            return None
        try:
            return cls(path.parent, {str(name): str(value) for name, value in json.loads(path.read_text()).items()})
        except (ValueError, AttributeError, OSError) as error:
            raise ValueError(f"`{path}`: expected a manifest of saved programs, got {error!r}. {_AGAIN}") from None

    def write(self) -> None:
        """Writes the manifest, after the programs."""
        write_file(self.folder / MANIFEST, json.dumps(self.facts, indent=1).encode())

    def check(self, found: Mapping[str, str]) -> None:
        """Raises ValueError for the first of these facts that differs."""
        for name, value in found.items():
            if (saved := self.facts.get(name, "unknown")) != value:
                raise ValueError(
                    f"`{self.folder / MANIFEST}`: expected {name} to be {_short(saved)}, as when the programs were saved, "
                    f"got {_short(value)}. {_AGAIN}"
                )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which compiled programs are kept in the folder, even those of devices that are only described."""
        options = {"jax_persistent_cache_min_compile_time_secs": 0.0, XLA_CACHES: ""}
        with configured(**options), use_cache_folder(str(self.folder)), warnings.catch_warnings():
            # An earlier entry cannot be loaded by a compiler that has no devices: it is compiled again.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
            yield


def program_environment(mesh: Mesh) -> dict[str, str]:
    """Returns what decides whether a compiled program can be used on a mesh, by name."""
    devices = list(mesh.devices.flat)
    hosts = len({device.process_index for device in devices})
    return {
        "the version of jax": jax.__version__,
        **compiler_environment(devices[0].client),
        "the devices": f"{mesh.size} x {devices[0].device_kind} in {hosts} process{'es' * (hosts > 1)}",
        "the mesh": mesh_text(mesh.shape),
        "the optimization level": str(jax.config.jax_optimization_level),  # pyright: ignore[reportAttributeAccessIssue]
    }


def argument_text(array: Any) -> str:
    """Describes an argument of a program: an array, or its shape."""
    spec = getattr(getattr(array, "sharding", None), "spec", None)
    axes = "" if spec is None or not any(spec) else f" over {', '.join(map(str, spec))}"
    return f"{array.dtype}{list(array.shape)}{axes}"


def step_facts(arguments: Mapping[str, str], lowered: Any) -> dict[str, str]:
    """Returns what a train step must have in common with the saved one, by name."""
    # The text excludes source locations and names.
    text = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=_LARGE)
    facts = {f"`{name}` of the train step": value for name, value in arguments.items()}
    return {**facts, _COMPUTATION: f"{zlib.crc32(text.encode()):08x}"}


def _short(text: str) -> str:
    return repr(" ".join(text.split()))
