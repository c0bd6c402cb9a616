"""`load`: reads a model from a checkpoint or a safetensors file, without a Trainer."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import equinox as eqx

from ._deployer import Deployer
from ._origins import CHANGED, set_origin
from ._tree import ModelT, PyTree, map_named, named_leaves
from .checkpoint import Base, CheckpointFolder, TensorReader, check_tree, find_checkpoint, load_tree
from .distributed import Peers
from .errors import check_alive, check_model, check_type, filter_traceback
from .machine import as_zeros
from .partition import Plan, check_plan, place
from .storage import Location, location

_WITHOUT_BASE = ("model_state", "optimizer", "callbacks")  # the trees of a checkpoint that are no model


@filter_traceback
def load(
    path: str | Location,
    like: ModelT,
    deployer: Deployer | None = None,
    *,
    plan: Plan | None = None,
    kind: str = "model",
) -> ModelT:
    """Returns the model in a checkpoint or a safetensors file: `like`, with the saved values.

    No optimizer is needed. The files of a checkpoint are verified against its checksums; then each device reads only its own
    slices.

    ```python
    like = eqx.filter_eval_shape(Net, jax.random.key(0))        # shapes are enough: nothing is allocated
    model = redeqx.load("runs/digits", like)                    # the newest checkpoint of a workdir
    model = redeqx.load("runs/digits/ckpts/argmax_accuracy", like, deployer)
    model = redeqx.load("model.safetensors", like)
    ```

    **Arguments:**

    - `path`: a safetensors file, or the index of several (`model.safetensors.index.json`); the folder of a checkpoint; a
        workdir, or its `ckpts`, for the newest checkpoint; or `ckpts/` and a name of the workdir's index. Each may be in
        an object store: `s3://bucket/run`, `gs://bucket/run` (extra `stores`).
    - `like`: a model of the same structure, with arrays or shapes (`eqx.filter_eval_shape`). Floating tensors are cast to
        its dtypes. Leaves that are not arrays are kept. A checkpoint of adapters does not hold the frozen weights of
        a folder: `like` must have their values then, which are compared with the saved checksums.
    - `deployer`: the model is placed on its mesh; without one, on the mesh of `plan`, or else each array like that of
        `like`, or on the first device.
    - `plan`: how the model is split; `deployer.plan(like)` by default.
    - `kind`: the tree of the checkpoint: `"model"`, or `"model_state"` with the state of the layers as `like`.

    In a dry run it returns zeros that take no memory, and reads nothing.

    Raises ValueError if there is no such checkpoint, it is damaged, or it or the plan belongs to another model: the error
    names the tensors that differ. Raises OSError if an object store does not answer.
    """
    if kind == "model":
        check_model(like, "like")
    else:
        check_alive(like, "like")
    if deployer is not None:
        check_type(deployer, Deployer, "deployer")
    check_plan(plan)
    saved = Saved.at(path, like, deployer, kind)
    if deployer is not None and not saved.is_dry_run:
        plan = deployer.plan(like) if plan is None else plan.on(deployer.mesh)
    return saved.read(plan)


@dataclass(frozen=True)
class Saved:
    """A saved model, to be read as `like`, in a file or the folder of a checkpoint in `checkpoints`. `base` has the frozen
    leaves that the checkpoint does not hold, if there are any; `trained` has the names of the trained leaves."""

    path: Location
    like: Any
    kind: str = "model"
    is_dry_run: bool = False
    checkpoints: CheckpointFolder | None = None
    base: Base | None = None
    trained: Collection[str] = ()

    @classmethod
    def at(cls, path: str | Location, like: PyTree, deployer: Deployer | None, kind: str = "model") -> "Saved":
        """Finds what a path refers to. Raises ValueError if it is nothing, or another model's base."""
        path = location(path)
        if deployer is not None and deployer.is_dry_run:
            return cls(path, like, kind, is_dry_run=True)
        if path.is_file():
            return cls(path, like, kind)
        checkpoints, found = find_checkpoint(path, Peers() if deployer is None else deployer.peers)
        record = checkpoints.record(found, kinds=[kind])
        base = None if kind in _WITHOUT_BASE else Base.of_record(record)
        if base is not None:
            checkpoints.match_base(found, base, named_leaves(like))
        return cls(found, like, kind, False, checkpoints, base, record.get("trained", ()))

    def match(self) -> None:
        """Raises ValueError if the tensors are not those of `like`. Reads none."""
        if self.checkpoints is not None:
            self.checkpoints.match(self.path, self.kind, self._held)
        elif not self.is_dry_run:
            check_tree(TensorReader(self.path), self.like, self.kind)

    @property
    def _held(self) -> PyTree:
        """The part of `like` whose values are in the files."""
        return self.like if self.base is None else self.base.without(self.like)

    def read(self, plan: Plan | None) -> Any:
        """Returns `like` with the saved values, each device with its own slices; in a dry run, zeros."""
        if self.is_dry_run:
            return as_zeros(self.like)
        if plan is not None:
            plan.check(self.like)
        shardings = None if plan is None else plan.sharding
        if self.checkpoints is None:
            return load_tree(self.path, self.like, shardings, self.kind)
        loaded = self.checkpoints.load(self.path, self.kind, self._held, shardings)
        if self.base is not None:
            names = self.base.checksums
            kept = map_named(lambda name, leaf: leaf if name in names else None, self.like)
            loaded = eqx.combine(loaded, kept if plan is None else place(kept, plan))
        for name, leaf in named_leaves(loaded).items():
            if name in self.trained:
                set_origin(leaf, CHANGED)
        return loaded
