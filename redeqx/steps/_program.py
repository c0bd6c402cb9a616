"""The program of a trainer on one mesh: its compiled steps, and the shapes and shardings of the arrays that they carry.

The Trainer creates these arrays; a dry run compiles the same steps without creating any.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._tree import PyTree, bare_shape, bytes_in_memory, named_leaves
from ..compiled import argument_text
from ..errors import check_alive
from ..machine import in_host, replicated
from ..memory import Loop
from ..optimizers import Update, check_opt_state, eval_params, has_eval_params
from ..partition import Plan, shardings_like, using_kinds
from ..tracing import as_fun, matmul_flops
from ._functions import Functions
from ._state import TrainState, stream_dtype
from ._step import EvalStep, TrainStep, in_memory, jitted, strong
from ._structure import Structure
from ._task import Task


class Sizes(NamedTuple):
    """Bytes of the parameters, of those that are not trained, of everything that stays in memory, and of the optimizer state
    in it."""

    weights: int
    frozen: int
    state: int
    opt_state: int


@dataclass(frozen=True)
class Program:
    """The steps of a trainer on one mesh, and the shapes and shardings of the arrays that they carry."""

    plan: Plan
    structure: Structure
    state: TrainState  # shapes with shardings
    opt_treedef: Any
    layers_treedef: Any
    update: Update  # the optimizer's, which the train step makes
    # Maps the trained arrays to the optimizer state, whose shards are created in place.
    init_opt_state: Callable[[list[Array]], list[Array]]
    train_step: Callable[..., Any]
    metric_names: list[str]
    eval_step: Callable[..., Any]
    eval_names: list[str]
    # Maps the optimizer state and the trained arrays to those to evaluate; None if these are the same.
    eval_params: Callable[[list[Array], list[Array]], list[Array]] | None
    saved: Sequence[Loop] = ()  # what each loop saves, where that is chosen by value, once the train step was traced

    # --- a state as trees --------------------------------------------------------------------------------------------

    def model(self, state: TrainState) -> PyTree:
        """Returns the model; the next step deletes its trained arrays."""
        return self.structure.put(state.trained, state.frozen)

    def eval_trained(self, state: TrainState) -> list[Any]:
        """Returns the trained leaves as they are evaluated and saved."""
        return state.trained if self.eval_params is None else self.eval_params(state.opt_state, state.trained)

    def eval_model(self, state: TrainState) -> PyTree:
        """Returns the model as it is evaluated and saved; the next step may delete its trained arrays."""
        return self.structure.put(self.eval_trained(state), state.frozen)

    def model_state(self, state: TrainState) -> PyTree | None:
        """Returns the state of the model's stateful layers; None if there are none."""
        return jax.tree.unflatten(self.layers_treedef, state.layers)

    def opt_tree(self, state: TrainState) -> PyTree:
        """Returns the optimizer state in optax's structure."""
        return jax.tree.unflatten(self.opt_treedef, state.opt_state)

    def check_alive(self, state: TrainState) -> None:
        """Raises ValueError if the user's code has deleted arrays that `trainer.model` or `model_state` returned."""
        if any(x.is_deleted() for x in (*state.trained, *state.frozen, *state.layers)):  # 0.1 ms for 1,000 leaves
            advice = (
                "A function outside of the trainer has deleted them, as one with `donate_argnums` does: load a checkpoint, "
                "and pass such a function"
            )
            check_alive(self.model(state), "trainer.model", advice)
            check_alive(self.model_state(state), "trainer.model_state", advice)

    # --- steps -------------------------------------------------------------------------------------------------------

    def train_args(self, state: TrainState, groups: Any, n_rows: Any) -> tuple[Any, ...]:
        """Returns the arguments of the train step; the state may be shapes."""
        return replace(state, frozen=[]), state.frozen, groups, n_rows

    def call_train(self, state: TrainState, groups: Any, n_rows: Any) -> tuple[TrainState, Array]:
        """Calls the train step; returns the state after it, and the values."""
        frozen = [*state.frozen]
        # They are not donated. `replace` would call Equinox's `__init__`, which looks at each leaf: 0.4 ms for 500 leaves.
        state.frozen.clear()
        try:
            after, values = self.train_step(state, frozen, groups, n_rows)
        finally:
            state.frozen.extend(frozen)
        if isinstance(values, Tracer):  # the caller would keep them as its state
            raise ValueError(
                "`Trainer`: expected its steps outside of functions that JAX traces, got one inside `jax.jit` or another "
                "transformation. It compiles its own step: call it from plain Python."
            )
        after.frozen.extend(frozen)
        return after, values

    @property
    def sizes(self) -> Sizes:
        """The bytes of all shards together."""
        bytes_of = lambda leaves: sum(bytes_in_memory(x.shape, x.dtype) for x in leaves)  # noqa: E731
        state = self.state
        trained, frozen, opt_state = map(bytes_of, (state.trained, state.frozen, state.opt_state))
        return Sizes(trained + frozen, frozen, trained + frozen + opt_state + bytes_of(state.layers), opt_state)

    @property
    def argument_names(self) -> dict[str, str]:
        """The names of the leaves that the steps receive, by their names in a compiled program: `state.trained[3]`."""
        trained, frozen = self.structure.names
        opt_names = named_leaves(self.opt_tree(self.state))
        lists = {"state.trained": trained, "trained": trained, "frozen": frozen, "state.opt_state": opt_names}
        return {f"{argument}[{i}]": name for argument, names in lists.items() for i, name in enumerate(names)}

    def model_flops(self, args: tuple[Any, ...]) -> Counter[str]:
        """Returns the FLOPs of the train step for such `train_args`, by dtype, without those of recomputation."""
        traced = self.train_step.trace(*args).jaxpr  # a call finds this trace in JAX's cache, and the reverse
        return matmul_flops(traced.jaxpr, with_recomputation=False, with_masked=False)

    def argument_texts(self, args: tuple[Any, ...]) -> dict[str, str]:
        """Describes each of the `train_args`, by name."""
        state, frozen, groups, _ = args
        texts = dict(zip(self.structure.weights, map(argument_text, (*state.trained, *frozen)), strict=True))
        opt_names = (f"optimizer.{name}" for name in named_leaves(self.opt_tree(self.state)))
        texts |= zip(opt_names, map(argument_text, state.opt_state), strict=True)
        texts |= {f"model_state[{i}]": argument_text(leaf) for i, leaf in enumerate(state.layers)}
        batch = {f"batch[{i}]": group for i, group in enumerate(groups)}
        return texts | {name: argument_text(leaf) for name, leaf in named_leaves(batch).items()}


def placed_shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of the array that a leaf becomes on devices, where JAX may use a narrower dtype than the host."""
    return jax.ShapeDtypeStruct(leaf.shape, bare_shape(leaf).dtype, sharding=sharding)


def placed_shapes(
    structure: Structure, model: PyTree, plan: Plan
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
    """Returns the shapes of a model's trained and frozen arrays, with their shardings by the plan."""
    trained, frozen = (
        [placed_shape(leaf, plan.sharding(name)) for name, leaf in zip(names, leaves, strict=True)]
        for names, leaves in zip(structure.names, structure.take(model), strict=True)
    )
    return trained, frozen


def make_program(
    task: Task,
    plan: Plan,
    model: PyTree,
    state: PyTree,
    *,
    named: bool = False,
    measures: bool = False,
    update: Update | None = None,
) -> Program:
    """Returns the program of a model and its state, given as arrays or shapes, under a plan. `named` and `measures` are as
    for `plan_rules`, `update` is that of another program of the same plan, which need not be traced again."""
    task.compute.precision.check(plan.mesh)
    structure, options = task.structure, task.compiler(plan.mesh).options
    replicate = replicated(plan.mesh)
    trained, frozen = placed_shapes(structure, model, plan)

    def init(trained: Sequence[Array]) -> PyTree:
        with using_kinds(plan.kinds_of_loss):
            return task.init_opt_state(trained)

    traced, opt_tree = jax.make_jaxpr(init, return_shape=True)(trained)
    check_opt_state(opt_tree)
    opt_state = jax.tree.leaves(jax.tree.map(placed_shape, opt_tree, shardings_like(opt_tree, plan)))
    offloads = task.compute.offload_opt_state  # but for scalars: copying them would take longer than using them
    bytes_in_host = shard_bytes([leaf for leaf in opt_state if leaf.ndim and offloads])
    functions = Functions(task, plan, named, measures, bytes_in_host)
    opt_state = [placed_shape(leaf, in_host(leaf.sharding)) if leaf.ndim and offloads else leaf for leaf in opt_state]

    def init_opt_state(trained: list[Array]) -> list[Array]:
        return [strong(leaf) for leaf in as_fun(traced)(*trained)]

    def evaluated(opt_state: list[Array], trained: list[Array]) -> list[Array]:
        opt_tree = jax.tree.unflatten(opt_treedef, in_memory(jax.memory.Space.Device, opt_state, shardings.opt_state))
        return jax.tree.leaves(eval_params(opt_tree, structure.trained_tree(trained)))

    opt_treedef, layers_treedef = jax.tree.structure(opt_tree), jax.tree.structure(state)
    layers = [placed_shape(leaf, replicate) for leaf in jax.tree.leaves(state)]
    counts, stream = (placed_shape(jax.ShapeDtypeStruct((2,), d), replicate) for d in (np.int32, stream_dtype()))
    shapes = TrainState(trained, frozen, opt_state, layers, counts, stream)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, replace(shapes, frozen=[]))
    if update is None:
        opt_shapes = jax.tree.unflatten(opt_treedef, opt_state)
        wide = task.compute.precision.rounds
        update = Update(task.optimizer, plan, structure.trained_tree(trained), opt_shapes, wide)
    train = TrainStep(functions, update, opt_treedef, layers_treedef, shardings)
    evaluation = EvalStep(functions, layers_treedef)
    return Program(
        plan=plan,
        structure=structure,
        state=shapes,
        opt_treedef=opt_treedef,
        layers_treedef=layers_treedef,
        update=update,
        init_opt_state=jax.jit(init_opt_state, out_shardings=shardings.opt_state),
        train_step=jitted(train.step_fn, (shardings, replicate), options, donate_argnums=0),
        metric_names=train.metric_names,
        eval_step=jitted(evaluation.eval_fn, replicate, options),
        eval_names=evaluation.names,
        eval_params=jax.jit(evaluated, out_shardings=shardings.trained) if has_eval_params(opt_tree) else None,
        saved=functions.saved,
    )


def shard_bytes(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of these arrays (or shapes with shardings) on one device, or on its host for this device."""
    return sum(bytes_in_memory(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays)
