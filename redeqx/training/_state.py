"""The training state: the arrays carried from step to step, on their mesh, and how they are saved and loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from .._tree import map_named, named_leaves
from ..checkpoint import Base, CheckpointFolder
from ..data import Batch
from ..machine import copied, put, replicated
from ..partition import place
from ..storage import Location
from ._parts import Parts
from ._program import Program


@dataclass
class TrainState:
    """The arrays that a program carries: parameters, optimizer state, the state of layers, step counters.

    **Arguments:**

    - `trained`, `frozen`, `opt_state`, `layers`: arrays with the program's shapes and shardings.
    - `steps`: int32 `[2]`: the number of steps taken, and of skipped ones among them.
    - `stream`: int `[2]`, from which each step derives its key (`_run.stream_key`).
    - `is_loaded`: whether all values exist; otherwise some of the arrays are only shapes.
    """

    parts: Parts
    program: Program
    trained: list[Any]
    frozen: list[Any]
    opt_state: list[Any]
    layers: list[Any]
    steps: Array
    stream: Array
    is_loaded: bool = True

    @classmethod
    def of(
        cls, parts: Parts, program: Program, model: PyTree, model_state: PyTree | None, stream: np.ndarray
    ) -> "TrainState":
        """Returns the state of step 0, with the model and the state of its layers copied to the program's mesh."""
        replicate = replicated(program.plan.mesh)
        trained, frozen = parts.take(place(model, program.plan))
        layers = [put(copied(leaf), replicate) for leaf in jax.tree.leaves(model_state)]  # as `place` copies
        steps = put(np.zeros(2, np.int32), replicate)
        return cls(parts, program, trained, frozen, program.init_opt_state(trained), layers, steps, put(stream, replicate))

    def move(self, program: Program, *, is_new: bool = False) -> None:
        """Switches to another program of the same model, and moves the arrays to its shardings, one after the other.

        **Arguments:**

        - `is_new`: whether no step was taken yet, so that the optimizer state may be made again.

        Raises ValueError if the program's optimizer state has another structure.
        """
        if program.opt_treedef != self.program.opt_treedef:
            if not is_new:
                raise ValueError(
                    "`optimizer`: expected the same state whether masks know the loss or only the types of layers, got two "
                    "structures. Pass the plan: `functools.partial(decay_mask, plan=deployer.plan(model, loss_fn, batch))`."
                )
            self.opt_state = program.init_opt_state(self.trained)
        for arrays, shapes in (
            (self.trained, program.trained),
            (self.frozen, program.frozen),
            (self.opt_state, program.opt_state),
        ):
            for i, shape in enumerate(shapes):
                arrays[i] = jax.device_put(arrays[i], shape.sharding)
        self.program = program

    @classmethod
    def to_load(cls, parts: Parts, program: Program, model: PyTree, stream: np.ndarray, base: Base | None) -> "TrainState":
        """Returns a state of shapes for `load` to fill; arrays that already have the right sharding stay until `load` frees
        them. The leaves of the checkpoint's base are those of the model."""
        replicate = replicated(program.plan.mesh)
        if base is not None:
            names = base.checksums
            placed = named_leaves(place(map_named(lambda name, x: x if name in names else None, model), program.plan))
            model = map_named(lambda name, x: placed.get(name, x), model)
        given = parts.take(model)
        trained, frozen = (
            [leaf if isinstance(leaf, jax.Array) and leaf.sharding == shape.sharding else shape for leaf, shape in pairs]
            for pairs in map(zip, given, (program.trained, program.frozen))
        )
        steps = put(np.zeros(2, np.int32), replicate)
        opt_state, layers = list(program.opt_state), list(program.state)
        return cls(parts, program, trained, frozen, opt_state, layers, steps, put(stream, replicate), is_loaded=False)

    @property
    def model(self) -> PyTree:
        """The model; the next step deletes its trained arrays."""
        return self.parts.put(self.trained, self.frozen)

    @property
    def eval_trained(self) -> list[Any]:
        """The trained leaves as they are evaluated and saved."""
        evaluated = self.program.eval_params
        return self.trained if evaluated is None else evaluated(self.opt_state, self.trained)

    @property
    def eval_model(self) -> PyTree:
        """The model as it is evaluated and saved; the next step may delete its trained arrays."""
        return self.parts.put(self.eval_trained, self.frozen)

    @property
    def model_state(self) -> PyTree | None:
        """The state of the model's stateful layers; None if there are none."""
        return jax.tree.unflatten(self.program.state_treedef, self.layers)

    @property
    def opt_tree(self) -> PyTree:
        """The optimizer state in optax's structure."""
        return jax.tree.unflatten(self.program.opt_treedef, self.opt_state)

    def train_args(self, batch: Batch) -> tuple[Any, ...]:
        """Returns the train step's arguments."""
        carried = (self.trained, self.opt_state, self.layers, self.steps)
        return (*carried, self.frozen, self.stream, batch.groups, np.uint32(batch.n_examples))

    def eval_args(
        self, span: np.ndarray, groups: Any, weights: tuple[list[Any], list[Any]] | None = None
    ) -> tuple[Any, ...]:
        """Returns the arguments of the eval step.

        **Arguments:**

        - `span`: the place of the batch in the evaluation, see `row_span`.
        - `weights`: trained and frozen arrays that replace this state's.
        """
        return (*(weights or (self.trained, self.frozen)), self.layers, self.stream, span, groups)

    def advance(self, outs: Sequence[Any]) -> Array:
        """Stores the results of a train step; returns its vector of metrics."""
        self.trained, self.opt_state, self.layers, self.steps, vector = outs
        return vector

    @property
    def leaves(self) -> dict[str, Any]:
        """The arrays of the model, by name."""
        return dict(zip((*self.parts.names[0], *self.parts.names[1]), (*self.trained, *self.frozen), strict=True))

    def trees(self, model: PyTree, *, opt_state: bool) -> dict[str, PyTree]:
        """Returns the trees of a checkpoint, by kind.

        **Arguments:**

        - `model`: the model as it is evaluated, or its shapes. The trained leaves are then a tree of their own.
        """
        trees = {"model": model, **({"model_state": self.model_state} if self.layers else {})}
        if opt_state:
            trees["optimizer"] = self.opt_tree
            if self.program.eval_params is not None:
                trees["trained"] = self.parts.trained_tree(self.trained)
        return trees

    def match(self, checkpoints: CheckpointFolder, path: Location, base: Base | None, *, opt_state: bool) -> None:
        """Raises ValueError if a checkpoint belongs to another model, base or optimizer; reads headers only, no tensors."""
        for kind, (template, _) in self._templates(opt_state, base).items():
            checkpoints.match(path, kind, template)
        if base is not None:
            checkpoints.match_base(path, base, self.leaves)

    def load(
        self,
        checkpoints: CheckpointFolder,
        path: Location,
        steps: tuple[int, int] | None,
        base: Base | None,
    ) -> None:
        """Loads the values of a checkpoint, each device its own slices. The current arrays are freed first, so that no
        device holds two states.

        **Arguments:**

        - `steps`: the checkpoint's numbers of taken and skipped steps, to load with the optimizer state; None keeps both.
        - `base`: the leaves that the checkpoint does not hold, which stay as they are.

        Raises ValueError if the checkpoint belongs to another model or optimizer; the state is then unchanged. Raises
        DamagedError if a file became unreadable; the values are then lost, and `is_loaded` is False.
        """
        opt_state = steps is not None
        self.match(checkpoints, path, base, opt_state=opt_state)
        kept = {} if base is None else {name: x for name, x in self.leaves.items() if name in base.checksums}
        self._free(opt_state, kept)
        trees = {
            kind: checkpoints.load(path, kind, template, shardings)
            for kind, (template, shardings) in self._templates(opt_state, base).items()
        }
        leaves = {**named_leaves(trees["model"]), **kept, **named_leaves(trees.get("trained"))}
        self.trained, self.frozen = ([leaves[name] for name in names] for names in self.parts.names)
        self.opt_state = jax.tree.leaves(trees["optimizer"]) if opt_state else self.opt_state
        self.layers = jax.tree.leaves(trees["model_state"]) if self.layers else self.layers
        if steps is not None:
            self.steps = put(np.asarray(steps, np.int32), replicated(self.program.plan.mesh))
        self.is_loaded = True

    def _templates(self, opt_state: bool, base: Base | None) -> dict[str, tuple[PyTree, Callable[[str], NamedSharding]]]:
        """Returns what `load` reads, by kind: arrays or shapes by name, and the sharding of each."""
        trees = self.trees(self.model, opt_state=opt_state)
        if base is not None:
            trees["model"] = base.without(trees["model"])
        plan, replicate = self.program.plan, replicated(self.program.plan.mesh)
        shardings = {"model": plan.sharding, "trained": plan.sharding, "model_state": lambda _: replicate}
        if opt_state:
            by_name = zip(named_leaves(trees["optimizer"]), (x.sharding for x in self.program.opt_state), strict=True)
            shardings["optimizer"] = dict(by_name).__getitem__
        return {kind: (tree, shardings[kind]) for kind, tree in trees.items()}

    def _free(self, opt_state: bool, kept: Mapping[str, Any]) -> None:
        """Replaces the arrays that `load` reads by their shapes, except for the `kept` ones."""
        program, self.is_loaded = self.program, False
        # Deleted even if referenced elsewhere, as a step does: the caller's reference must not keep a second model alive.
        # Frozen arrays are not deleted, nor does a step delete them, since another model may share them.
        trained = [x for name, x in zip(self.parts.names[0], self.trained, strict=True) if name not in kept]
        for array in [*trained, *self.layers, *(self.opt_state if opt_state else [])]:
            if isinstance(array, jax.Array):
                array.delete()
        self.trained, self.frozen, self.layers = map(list, (program.trained, program.frozen, program.state))
        if opt_state:
            self.opt_state = list(program.opt_state)
