"""The arrays that training carries from step to step, on their mesh, and their way into a checkpoint and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ._checkpoint import Checkpoints
from ._mesh import put, replicated
from ._paths import named_leaves
from ._plan import place
from ._program import Program
from ._step import Parts


@dataclass
class TrainState:
    """What a program carries: parameters, the optimizer's state, the state of layers, the count of steps.

    **Arguments:**

    - `trained`, `frozen`, `opt_state`, `layers`: arrays, as the program's shapes say.
    - `steps`: how many were taken, and how many of those were skipped; int32 `[2]`.
    - `key`: the run's key, of which each step takes its own.
    """

    parts: Parts
    program: Program
    trained: list[Array]
    frozen: list[Array]
    opt_state: list[Array]
    layers: list[Array]
    steps: Array
    key: Array

    @classmethod
    def of(cls, parts: Parts, program: Program, model: PyTree, model_state: PyTree | None, key: Array) -> "TrainState":
        """That of step 0: the model and the state of its layers copied to the program's mesh."""
        whole = replicated(program.plan.mesh)
        trained, frozen = parts.take(place(model, program.plan))
        layers = [put(jnp.copy(leaf), whole) for leaf in jax.tree.leaves(model_state)]  # as `place` copies
        steps = put(np.zeros(2, np.int32), whole)
        return cls(parts, program, trained, frozen, program.init_opt_state(trained), layers, steps, put(key, whole))

    def move(self, program: Program) -> None:
        """Take another program of the same model, and move the arrays to its shardings, one after the other."""
        for arrays, shapes in (
            (self.trained, program.trained),
            (self.frozen, program.frozen),
            (self.opt_state, program.opt_state),
        ):
            for i, shape in enumerate(shapes):
                arrays[i] = jax.device_put(arrays[i], shape.sharding)
        self.program = program

    @property
    def model(self) -> PyTree:
        """The model; the next step deletes its trained arrays."""
        return self.parts.put(self.trained, self.frozen)

    @property
    def model_state(self) -> PyTree | None:
        """The state of the model's stateful layers; None where there are none."""
        return jax.tree.unflatten(self.program.state_treedef, self.layers)

    @property
    def opt_tree(self) -> PyTree:
        """The optimizer's state, as optax has it."""
        return jax.tree.unflatten(self.program.opt_treedef, self.opt_state)

    def train_args(self, groups: Any, n_micro_batches: int) -> tuple[Any, ...]:
        """What the program's train step takes: micro-batches in groups of one shape, and how many of the first count."""
        carried = (self.trained, self.opt_state, self.layers, self.steps)
        return (*carried, self.frozen, self.key, groups, np.int32(n_micro_batches))

    def eval_args(self, i: int, groups: Any) -> tuple[Any, ...]:
        """What the program's eval step takes, for the `i`-th batch of an evaluation."""
        return (self.trained, self.frozen, self.layers, self.key, np.uint32(i), groups)

    def advance(self, outs: Sequence[Any]) -> Array:
        """Take over what a train step returned; returns its vector of metrics."""
        self.trained, self.opt_state, self.layers, self.steps, vector = outs
        return vector

    def trees(self, *, opt_state: bool) -> dict[str, PyTree]:
        """What a checkpoint holds, by kind."""
        model_state = {"model_state": self.model_state} if self.layers else {}
        return {"model": self.model, **model_state, **({"optimizer": self.opt_tree} if opt_state else {})}

    def load(self, checkpoints: Checkpoints, path: Path, steps: tuple[int, int] | None) -> None:
        """Take the values of a checkpoint, each device its own slices; nothing changes before everything has been read.

        **Arguments:**

        - `steps`: how many were taken and skipped there, with which the optimizer's state goes; None leaves both.

        Raises ValueError where the checkpoint is of another model or optimizer.
        """
        plan, whole = self.program.plan, replicated(self.program.plan.mesh)
        model = checkpoints.load(path, "model", self.model, plan.sharding)
        opt_state, layers = self.opt_state, self.layers
        if steps is not None:
            shardings = dict(zip(named_leaves(self.opt_tree), (x.sharding for x in opt_state), strict=True))
            opt_state = jax.tree.leaves(checkpoints.load(path, "optimizer", self.opt_tree, shardings.__getitem__))
        if layers:
            layers = jax.tree.leaves(checkpoints.load(path, "model_state", self.model_state, lambda _: whole))
        self.trained, self.frozen = self.parts.take(model)
        self.opt_state, self.layers = opt_state, layers
        if steps is not None:
            self.steps = put(np.asarray(steps, np.int32), whole)
