"""`load`: a model from a checkpoint or a safetensors file, without a Trainer."""

from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from ._deployer import Deployer
from .checkpoint import MANIFEST, Checkpoints, load_tree
from .distributed import Peers
from .errors import check_alive, check_model, plainly
from .machine import as_shapes
from .partition import Plan

_FOLDER, _INDEX = "ckpts", "index.json"  # of a workdir


@plainly
def load(
    path: str | Path,
    like: PyTree,
    deployer: Deployer | None = None,
    *,
    plan: Plan | None = None,
    kind: str = "model",
) -> PyTree:
    """The model that a checkpoint or a safetensors file holds: `like`, with the values that were saved.

    No optimizer is needed. Each device reads only its own slices, and the tensors of a checkpoint are verified against its
    checksums while they are read.

    ```python
    like = eqx.filter_eval_shape(Net, jax.random.key(0))        # shapes will do: nothing is allocated
    model = redeqx.load("runs/digits", like)                    # the newest checkpoint of a workdir
    model = redeqx.load("runs/digits/ckpts/argmax_accuracy", like, deployer)
    model = redeqx.load("model.safetensors", like)
    ```

    **Arguments:**

    - `path`: a safetensors file, or the index of several (`model.safetensors.index.json`); the folder of a checkpoint; a
        workdir, or its `ckpts`, for the newest checkpoint; or a name of the workdir's index after `ckpts/`.
    - `like`: a model of the same structure, of arrays or of shapes (`eqx.filter_eval_shape`). Floating tensors are cast to
        its dtypes. Leaves that are no arrays are taken over.
    - `deployer`: on whose mesh the model is placed, by its plan; by default each array goes where that of `like` is, or to
        the first device.
    - `plan`: how it is split; `deployer.plan(like)` by default.
    - `kind`: which tree of a checkpoint: `"model"`; `"model_state"`, with the state of the layers as `like`; or a model that
        a callback keeps, as `"ema"`.

    In a dry run it returns shapes and reads nothing.

    Raises ValueError where there is no such checkpoint, where it is damaged, or where it is of another model: the error
    names the tensors that differ.
    """
    if kind == "model":
        check_model(like)
    else:
        check_alive(like, "like")
    if deployer is not None and deployer.is_dry_run:
        return as_shapes(like)
    shardings = None
    if deployer is not None:
        plan = plan or deployer.plan(like)
        shardings = plan.sharding
    path = Path(path)
    if path.is_file():
        return load_tree(path, like, shardings, kind)
    checkpoints, found = _find(path, Peers() if deployer is None else deployer._run.peers)
    return checkpoints.load(found, kind, like, shardings, verify=True)


def _find(path: Path, peers: Peers) -> tuple[Checkpoints, Path]:
    """The checkpoint that a path means, and the folder of checkpoints that it is in."""

    def folder(of: Path) -> Checkpoints:
        return Checkpoints(of, peers, lambda text: None)

    if (path / MANIFEST).is_file():
        return folder(path.parent), path
    for of, name in ((path / _FOLDER, "last"), (path, "last"), (path.parent, path.name), (path.parent / _FOLDER, path.name)):
        if (of / _INDEX).is_file():
            checkpoints = folder(of)
            return checkpoints, checkpoints.resolve(name)
    found: Any = "a folder without one" if path.is_dir() else "nothing there"
    raise ValueError(
        f"`{path}`: expected a safetensors file, a checkpoint (`runs/x/ckpts/step_00000100`), a workdir that holds some, or "
        f"a name of its index (`runs/x/ckpts/last`), got {found}. For a folder of Hugging Face use "
        "`redeqx.models.from_pretrained`."
    )
