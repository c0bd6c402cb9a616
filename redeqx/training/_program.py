"""The program of a trainer on one mesh: its compiled steps, and the shapes and shardings of the arrays that they carry.

The Trainer creates these arrays; a dry run compiles the same steps without creating any.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from .._tree import is_key, named_leaves
from ..machine import Options, in_host, replicated
from ..optimizers import check_opt_state, eval_params, has_eval_params
from ..partition import Plan, shardings_like, using_kinds
from ..tracing import as_fun
from ._functions import Functions
from ._parts import Parts
from ._run import stream_dtype
from ._step import Layout, in_memory, make_eval_step, make_train_step, strong


class Sizes(NamedTuple):
    """Bytes of the parameters, of everything that stays in memory, and of the optimizer state in it."""

    weights: int
    state: int
    opt_state: int


@dataclass(frozen=True)
class Program:
    """The steps of a trainer on one mesh, and the shapes and shardings of the arrays that they carry. It creates no array.

    **Arguments:**

    - `trained`, `frozen`, `opt_state`, `state`, `steps`, `stream`: shapes with shardings; `steps` as in the train step.
    - `names`: the names of the trained and of the frozen leaves.
    - `init_opt_state`: maps the trained arrays to the optimizer state, whose shards are created in place.
    - `eval_params`: maps the optimizer state and the trained arrays to those to evaluate; None if these are the same.
    """

    plan: Plan
    trained: list[jax.ShapeDtypeStruct]
    frozen: list[jax.ShapeDtypeStruct]
    opt_state: list[jax.ShapeDtypeStruct]
    state: list[jax.ShapeDtypeStruct]
    steps: jax.ShapeDtypeStruct
    stream: jax.ShapeDtypeStruct
    opt_treedef: Any
    state_treedef: Any
    init_opt_state: Callable[[list[Array]], list[Array]]
    train_step: Callable[..., Any]
    metric_names: list[str]
    eval_step: Callable[..., Any]
    eval_names: list[str]
    eval_params: Callable[[list[Array], list[Array]], list[Array]] | None
    names: tuple[Sequence[str], Sequence[str]]

    def train_shapes(self, groups: Any, n_rows: Any) -> tuple[Any, ...]:
        """Returns the arguments of the train step, as shapes except for `groups` and `n_rows`."""
        return (self.trained, self.opt_state, self.state, self.steps, self.frozen, self.stream, groups, n_rows)

    @property
    def sizes(self) -> Sizes:
        """The bytes of all shards together."""
        bytes_of = lambda leaves: sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)  # noqa: E731
        weights, opt_state = bytes_of([*self.trained, *self.frozen]), bytes_of(self.opt_state)
        return Sizes(weights, weights + opt_state + bytes_of(self.state), opt_state)

    @property
    def argument_names(self) -> dict[str, str]:
        """The names of the leaves that the steps receive in lists, by their names in a compiled program: `trained[3]`."""
        opt_names = named_leaves(jax.tree.unflatten(self.opt_treedef, self.opt_state))
        lists = zip(("trained", "frozen", "opt_state"), (*self.names, opt_names), strict=True)
        return {f"{argument}[{i}]": name for argument, names in lists for i, name in enumerate(names)}


def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the shape of the array that a leaf becomes on devices, where JAX may use a narrower dtype than the host."""
    dtype = leaf.dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def placed_shapes(parts: Parts, model: PyTree, plan: Plan) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
    """Returns the shapes of a model's trained and frozen arrays, with their shardings by the plan."""
    trained, frozen = (
        [placed(leaf, plan.sharding(name)) for name, leaf in zip(names, leaves, strict=True)]
        for names, leaves in zip(parts.names, parts.take(model), strict=True)
    )
    return trained, frozen


def make_program(
    functions: Functions,
    model: PyTree,
    state: PyTree,
    optimizer: optax.GradientTransformation,
    lr_schedule_fn: Callable[[Any], Any] | None,
    skip_nonfinite: bool = False,
    n_parts: int = 1,
    options: Options | None = None,
    *,
    offload_opt_state: bool = False,
) -> Program:
    """Returns the program of a model and its state, given as arrays or shapes.

    **Arguments:**

    - `skip_nonfinite`, `n_parts`, `options`: as for `make_train_step`.
    - `offload_opt_state`: whether the arrays of the optimizer state are stored in host memory.
    """
    parts, plan = functions.parts, functions.plan
    replicate = replicated(plan.mesh)
    trained, frozen = placed_shapes(parts, model, plan)

    def init(trained: Sequence[Array]) -> PyTree:
        with using_kinds(plan.kinds_of_loss):
            return optimizer.init(parts.trained_tree(trained))

    traced, opt_tree = jax.make_jaxpr(init, return_shape=True)(trained)
    check_opt_state(opt_tree)
    opt_state = jax.tree.leaves(jax.tree.map(placed, opt_tree, shardings_like(opt_tree, plan)))
    if offload_opt_state:  # scalars stay: copying them would take longer than using them
        opt_state = [placed(leaf, in_host(leaf.sharding)) if leaf.ndim else leaf for leaf in opt_state]

    def init_opt_state(trained: list[Array]) -> list[Array]:
        return [strong(leaf) for leaf in as_fun(traced)(*trained)]

    def evaluated(opt_state: list[Array], trained: list[Array]) -> list[Array]:
        opt_tree = jax.tree.unflatten(opt_treedef, in_memory(jax.memory.Space.Device, opt_state, layout.opt_state))
        return jax.tree.leaves(eval_params(opt_tree, parts.trained_tree(trained)))

    opt_treedef, state_treedef = jax.tree.structure(opt_tree), jax.tree.structure(state)
    states = [placed(leaf, replicate) for leaf in jax.tree.leaves(state)]
    layout = Layout(*([leaf.sharding for leaf in leaves] for leaves in (trained, opt_state, states)))
    train_step, metric_names = make_train_step(
        functions, optimizer, lr_schedule_fn, opt_treedef, state_treedef, layout, skip_nonfinite, n_parts, options
    )
    eval_step, eval_names = make_eval_step(functions, state_treedef, options)
    return Program(
        plan=plan,
        trained=trained,
        frozen=frozen,
        opt_state=opt_state,
        state=states,
        steps=placed(jax.ShapeDtypeStruct((2,), np.int32), replicate),
        stream=placed(jax.ShapeDtypeStruct((2,), stream_dtype()), replicate),
        opt_treedef=opt_treedef,
        state_treedef=state_treedef,
        init_opt_state=jax.jit(init_opt_state, out_shardings=layout.opt_state),
        train_step=train_step,
        metric_names=metric_names,
        eval_step=eval_step,
        eval_names=eval_names,
        eval_params=jax.jit(evaluated, out_shardings=layout.trained) if has_eval_params(opt_tree) else None,
        names=parts.names,
    )


def shard_bytes(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of these arrays (or shapes with shardings) on one device, or on its host for this device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in arrays)
