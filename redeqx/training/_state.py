"""Makes, saves and loads training states: the trees of a checkpoint, and their arrays on the devices of a program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._origins import CHANGED, origin_of, set_origin
from .._tree import map_named, named_leaves
from ..checkpoint import Base, CheckpointFolder, is_worth_naming
from ..machine import copied, put, replicated
from ..optimizers import with_new_copies
from ..partition import is_on, place
from ..steps import Program, Structure, TrainState
from ..storage import Location


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a trainer to load, with the optimizer state and the counts or without; `explained` returns a context
    in which errors are explained."""

    folder: CheckpointFolder
    path: Location
    record: Mapping[str, Any]
    opt_states: bool = True
    explained: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def base(self) -> Base | None:
        """The leaves that it does not hold, which stay as they are; None if it holds all."""
        return Base.of_record(self.record)


def new_state(program: Program, model: PyTree, model_state: PyTree | None, stream: np.ndarray) -> TrainState:
    """Returns the state of step 0, with the model and the state of its layers copied to the program's mesh."""
    replicate = replicated(program.plan.mesh)
    # Copied as `place` does, and before it deletes what it moves: target networks begin as the model's own arrays.
    layers = [put(copied(leaf), replicate) for leaf in jax.tree.leaves(model_state)]
    trained, frozen = program.structure.take(place(model, program.plan, program.structure.names[0]))
    counts = put(np.zeros(2, np.int32), replicate)
    return TrainState(trained, frozen, program.init_opt_state(trained), layers, counts, put(stream, replicate))


def without_shared(structure: Structure, model: PyTree, others: Sequence[TrainState], upcoming: Sequence[PyTree]) -> PyTree:
    """Returns a model with copies of those arrays that other trainers hold too, in states or in models that are not placed
    yet, if a step deletes them: it deletes all arrays of its trainer's state but the frozen ones."""
    frozen_there = {id(x) for state in others for x in state.frozen}
    deleted_there = {id(x) for state in others for x in jax.tree.leaves(replace(state, frozen=[]))}
    trained, frozen = structure.take(model)
    kept_there = frozen_there | {id(x) for x in jax.tree.leaves(upcoming)}
    shared = [x for x in trained if id(x) in kept_there] + [x for x in (*trained, *frozen) if id(x) in deleted_there]
    copies = {id(x): x.copy() for x in shared}
    return jax.tree.map(lambda x: copies.get(id(x), x), model) if copies else model


def given_state(program: Program, model: PyTree, stream: np.ndarray, base: Base | None) -> TrainState:
    """Returns a state to load into: shapes, and those arrays of the model that `load_state` frees or keeps."""
    if base is not None:
        names = base.checksums
        kept = named_leaves(place(map_named(lambda name, x: x if name in names else None, model), program.plan))
        model = map_named(lambda name, x: kept.get(name, x), model)
    trained, frozen = (
        [leaf if is_on(program.plan.mesh, leaf) else shape for leaf, shape in pairs]
        for pairs in map(zip, program.structure.take(model), (program.state.trained, program.state.frozen))
    )
    replicate = replicated(program.plan.mesh)
    counts, stream_array = put(np.zeros(2, np.int32), replicate), put(stream, replicate)
    return replace(program.state, trained=trained, frozen=frozen, counts=counts, stream=stream_array)


def moved(state: TrainState, shapes: TrainState) -> TrainState:
    """Moves the model and the optimizer state to the shardings of shapes, one array after the other; returns the state. As
    by a step, arrays that are moved are deleted, but for frozen ones, which others may share."""
    for arrays, wanted in ((state.trained, shapes.trained), (state.opt_state, shapes.opt_state)):
        for i, shape in enumerate(wanted):
            if (array := arrays[i]).sharding != shape.sharding:
                arrays[i] = jax.device_put(copied(array), shape.sharding)  # which may keep a device's own part
                array.delete()
    state.frozen[:] = [jax.device_put(x, shape.sharding) for x, shape in zip(state.frozen, shapes.frozen, strict=True)]
    return state


def leaves_of(program: Program, state: TrainState) -> dict[str, Any]:
    """Returns the arrays of the model, by name."""
    trained, frozen = program.structure.names
    return dict(zip((*trained, *frozen), (*state.trained, *state.frozen), strict=True))


class Origins:
    """Where the arrays of a trainer's model come from: a checkpoint need not hold frozen leaves that a known folder has."""

    def __init__(self, structure: Structure, model: PyTree, log: Callable[[str], None]):
        self._structure, self._log = structure, log
        frozen = zip(structure.names[1], map(origin_of, structure.take(model)[1]), strict=True)
        self._of = {name: origin for name, origin in frozen if origin is not None}
        self._base: Base | None = None  # of the checkpoints that are saved, or of the loaded one

    def noted(self, model: PyTree) -> PyTree:
        """Notes which of the placed model's arrays training changes, and where the others come from; returns the model."""
        trained, frozen = self._structure.take(model)
        for array in trained:
            set_origin(array, CHANGED)
        for name, array in zip(self._structure.names[1], frozen, strict=True):
            if name in self._of:
                set_origin(array, self._of[name])
        return model

    def note_base(self, base: Base | None) -> None:
        """Notes where frozen leaves come from, after a checkpoint with this base was loaded: all others were in it."""
        changed = {name: origin for name, origin in self._of.items() if origin == CHANGED}
        self._of, self._base = {**changed, **({} if base is None else base.origins)}, base

    def unsaved(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """Returns the folders of those of the leaves that a checkpoint need not hold, by name."""
        origins = {name: self._of[name] for name in self._structure.names[1] if self._of.get(name, CHANGED) != CHANGED}
        return origins if origins and is_worth_naming(origins, leaves) else {}

    def find_base(self, leaves: Mapping[str, Any]) -> Base | None:
        """Returns those of the leaves that a checkpoint need not hold, since a known folder does; None if there are none."""
        if not (origins := self.unsaved(leaves)):
            return None
        if self._base is None or self._base.origins != origins:
            self._base = Base.of(origins, leaves)
            n, folders = len(leaves) - len(origins), ", ".join(self._base.folders)
            self._log(f"checkpoints hold {n} leaves; the other {len(origins)} are those of {folders}")
        return self._base


def checkpoint_trees(program: Program, state: TrainState, model: PyTree, *, opt_states: bool) -> dict[str, PyTree]:
    """Returns the trees of a checkpoint, by kind. `model` is the model as it is evaluated, or its shapes; the trained leaves
    are then a tree of their own."""
    trees = {"model": model, **({"model_state": program.model_state(state)} if state.layers else {})}
    if opt_states:
        trees["optimizer"] = program.opt_tree(state)
        if program.eval_params is not None:
            trees["trained"] = program.structure.trained_tree(state.trained)
    return trees


def match_state(program: Program, state: TrainState, checkpoint: Checkpoint) -> None:
    """Raises ValueError if a checkpoint belongs to another model, base or optimizer; reads headers only, no tensors."""
    for kind, (template, _) in _templates(program, checkpoint).items():
        checkpoint.folder.match(checkpoint.path, kind, template)
    if checkpoint.base is not None:
        checkpoint.folder.match_base(checkpoint.path, checkpoint.base, leaves_of(program, state))


def load_state(program: Program, state: TrainState, checkpoint: Checkpoint) -> TrainState:
    """Returns the state of a checkpoint that `match_state` accepted, each device with its own slices. The arrays of `state`
    are deleted first, so that no device holds two states.

    Raises DamagedError if a file became unreadable.
    """
    base, folder, opt_states = checkpoint.base, checkpoint.folder, checkpoint.opt_states
    kept = {} if base is None else {name: x for name, x in leaves_of(program, state).items() if name in base.checksums}
    templates = _templates(program, checkpoint)
    _free(program, state, kept, opt_states=opt_states)
    trees = {kind: folder.load(checkpoint.path, kind, *of) for kind, of in templates.items()}
    leaves = {**named_leaves(trees["model"]), **kept, **named_leaves(trees.get("trained"))}
    trained, frozen = ([leaves[name] for name in names] for names in program.structure.names)
    layers = jax.tree.leaves(trees["model_state"]) if state.layers else state.layers
    state = replace(state, trained=trained, frozen=frozen, layers=layers)
    if opt_states:
        counts = np.array([checkpoint.record["step"], checkpoint.record["n_skipped"]], np.int32)
        counts = put(counts, replicated(program.plan.mesh))
        return replace(state, opt_state=jax.tree.leaves(trees["optimizer"]), counts=counts)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in state.opt_state):
        return replace(state, opt_state=program.init_opt_state(trained))
    # Master copies and averages of the old parameters would bring these back at the next step.
    new = program.structure.trained_tree(trained)
    opt_tree = with_new_copies(program.opt_tree(state), new)
    return replace(state, opt_state=jax.tree.leaves(opt_tree))


_Template = tuple[PyTree, Callable[[str], NamedSharding]]


def _templates(program: Program, checkpoint: Checkpoint) -> dict[str, _Template]:
    """Returns what is read, by kind: shapes by name, and the sharding of each."""
    shapes = program.state
    trees = checkpoint_trees(program, shapes, program.model(shapes), opt_states=checkpoint.opt_states)
    if checkpoint.base is not None:
        trees["model"] = checkpoint.base.without(trees["model"])
    plan, replicate = program.plan, replicated(program.plan.mesh)
    shardings = {"model": plan.sharding, "trained": plan.sharding, "model_state": lambda _: replicate}
    if checkpoint.opt_states:
        by_name = zip(named_leaves(trees["optimizer"]), (x.sharding for x in program.state.opt_state), strict=True)
        shardings["optimizer"] = dict(by_name).__getitem__
    return {kind: (tree, shardings[kind]) for kind, tree in trees.items()}


def _free(program: Program, state: TrainState, kept: Mapping[str, Any], *, opt_states: bool) -> None:
    """Deletes the arrays that a checkpoint replaces, except for the `kept` ones, even if they are referenced elsewhere, as a
    step does: the caller's reference must not keep a second model alive."""
    # Frozen arrays are only dropped, since another model may share them; a step does not delete them either.
    trained = [x for name, x in zip(program.structure.names[0], state.trained, strict=True) if name not in kept]
    for array in [*trained, *state.layers, *(state.opt_state if opt_states else [])]:
        if isinstance(array, jax.Array):
            array.delete()
    state.frozen[:] = program.state.frozen
