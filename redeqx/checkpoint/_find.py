"""Finds the checkpoint that a path refers to: a checkpoint's folder, a workdir, its `ckpts`, or a name in their index."""

from pathlib import Path

from ..distributed import Peers
from ..storage import Location
from ._folder import CheckpointFolder
from ._manifest import MANIFEST

_FOLDER = "ckpts"  # of a workdir


def find_checkpoint(path: Location, peers: Peers) -> tuple[CheckpointFolder, Location]:
    """Returns the folder of checkpoints that a path refers to, and the checkpoint in it.

    Raises ValueError if there is none.
    """
    if isinstance(path, Path) and path.name in ("", ".."):  # such as `.`: its name is needed below
        path = path.resolve()
    if (path / MANIFEST).is_file():
        return CheckpointFolder(path.parent, peers), path
    for of, name in ((path / _FOLDER, "last"), (path, "last"), (path.parent, path.name), (path.parent / _FOLDER, path.name)):
        checkpoints = CheckpointFolder(of, peers)
        if checkpoints.exist():
            return checkpoints, checkpoints.resolve(name)
    name, above = path.name, path.parent
    while above != above.parent:  # a name with slashes, after that of a metric
        name, above = f"{above.name}/{name}", above.parent
        checkpoints = CheckpointFolder(above if above.name == _FOLDER else above / _FOLDER, peers)
        if checkpoints.exist() and name in checkpoints.index():
            return checkpoints, checkpoints.resolve(name)
    found = "a folder without one" if path.is_dir() else "nothing there"
    raise ValueError(
        f"`{path}`: expected a safetensors file, a checkpoint (`runs/x/ckpts/step_00000100`), a workdir that holds some, or "
        f"a name of its index (`runs/x/ckpts/last`), got {found}. For a folder of Hugging Face use "
        "`redeqx.models.from_pretrained`."
    )
