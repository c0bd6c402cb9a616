"""The task: the arguments of a Trainer, and the plan and program that follow from them on any mesh. It holds no arrays."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._tree import is_array_like, named_leaves
from ..data import CollatePool
from ..dims import UNKNOWN, RowUse
from ..machine import XlaOptions, XlaSettings, xla_settings
from ..optimizers import Update, follows_schedule
from ..partition import Plan, mark_read
from ..steps import Compute, Functions, Program, Structure, Sums, make_program, plan_model
from ..tracing import Trace, restricted, shapes_in
from ..transforms import describe_residual


@dataclass(frozen=True)
class Task:
    """How a model is trained: the user's functions, the optimizer, and the options of a step.

    **Arguments:**

    - `structure`: the names of the trained and the frozen leaves, and everything else of the model.
    - `loss_fn`, `grad_fn`, `collate_fn`, `optimizer`, `lr_schedule_fn`: the Trainer's arguments.
    - `compute`: the Trainer's argument; `optimizer` was made for its precision.
    - `pool`: calls `collate_fn`; it ends with the task.
    - `has_state`: whether the model has stateful layers.
    - `accumulate`: micro-batches per update.
    - `plan`: the user's own plan; None makes one from the loss.
    - `max_skipped`: how many updates in a row that are not finite may be skipped; None skips none.
    - `n_parts`: the number of parts of each micro-batch, computed one after the other.
    - `xla_settings`: for the train and eval steps, as for `Deployer`.
    - `rows`, `eval_rows`: what the loss does with rows in training and in an evaluation, where layers such as BatchNorm
        compute something else; None until a batch is known.
    - `uses`: as for `Sums`.
    """

    structure: Structure
    loss_fn: Callable[..., Any]
    collate_fn: Callable[[list], PyTree]
    pool: CollatePool
    optimizer: optax.GradientTransformation
    has_state: bool = False
    grad_fn: Callable[..., Any] | None = None
    lr_schedule_fn: Callable[[Any], Any] | None = None
    compute: Compute = Compute()
    accumulate: int = 1
    plan: Plan | None = None
    max_skipped: int | None = None
    n_parts: int = 1
    xla_settings: XlaOptions | str | None = "auto"
    rows: RowUse | None = None
    eval_rows: RowUse | None = None
    uses: dict[Any, RowUse] = field(default_factory=dict, compare=False, repr=False)

    def trace(self, model: PyTree, state: PyTree, batch: PyTree) -> Trace:
        """Traces the loss for the shapes of a batch. The trace of the verdict about rows is used if it is for these."""
        traced = None if self.rows is None or self.has_state or self.grad_fn is not None else self.rows.trace
        names = tuple(named_leaves(eqx.filter(model, is_array_like)))
        shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
        if traced is not None and [v.aval.shape for v in traced.jaxpr.invars[len(names) : -1]] == shapes:
            weights, rest = traced.jaxpr.invars[: len(names)], traced.jaxpr.invars[len(names) :]
            by_name = dict(zip(self.structure.weights, weights, strict=True))
            closed = restricted(traced, traced.jaxpr.outvars[:1], [*map(by_name.__getitem__, names), *rest])
            return Trace(names, tuple(shapes_in(closed)[: len(names)]), closed)
        return self.sums.trace(model, state, batch)

    def plan_on(self, mesh: Mesh, model: PyTree, trace: Trace | None, placed: Plan | None = None) -> Plan:
        """Returns the model's plan on a mesh; with a trace, in the order of the loss.

        **Arguments:**

        - `placed`: the plan by which the model is placed already: it stays if something was traced for it, and learns what
            the loss does.
        """
        row_use, own = self.rows or UNKNOWN, placed if placed is not None and placed.is_traced else self.plan
        if own is None:
            by_model = self.grad_fn is None and self.compute.splits_residual_on(mesh)
            plan = plan_model(model, mesh, trace, row_use=row_use, splits_residual=by_model)
        else:
            own.check(model)
            plan = own.on(mesh)
            plan = plan if trace is None else mark_read(plan, trace, row_use, with_kinds=plan.repeats is None)
        if trace is not None and self.grad_fn is None and self.compute.splits_residual_on(mesh):
            plan = replace(plan, positions=(*plan.positions, *describe_residual(trace, plan)))
        if self.grad_fn is None and all(plan[name].is_read is False for name in self.structure.names[0]):
            raise ValueError(
                "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of "
                f"{len(self.structure.names[0])}. Use the model that `loss_fn` is given, not one from outside."
            )
        return plan

    def program(
        self,
        plan: Plan,
        model: PyTree,
        state: PyTree,
        *,
        named: bool = False,
        measures: bool = False,
        update: Update | None = None,
    ) -> Program:
        """Returns the program of this model under a plan.

        **Arguments:**

        - `named`, `measures`: as for `Functions`.
        - `update`: as for `make_program`.
        """
        self.compute.precision.check(plan.mesh)
        functions = Functions(self.sums, plan, self.compute, named, measures)
        options = self.compiler(plan.mesh).options
        of_step = {"skips": self.max_skipped is not None, "n_parts": self.n_parts, "options": options, "update": update}
        return make_program(functions, model, state, self.optimizer, self.lr_schedule_fn, **of_step)

    def compiler(self, mesh: Mesh) -> XlaSettings:
        """Returns the settings for the compiler of the train and eval steps on a mesh."""
        return xla_settings(mesh, self.xla_settings, self.compute.harmful_settings_on(mesh))

    def precision_of(self, model: PyTree) -> str:
        """Returns a description of the dtypes of a step."""
        return self.compute.precision.describe([leaf.dtype for leaf in self.structure.take(model)[0]])

    def opt_shapes(self, model: PyTree) -> PyTree:
        """Returns the shapes of the optimizer state."""
        try:
            return jax.eval_shape(self.optimizer.init, self.structure.trained_tree(self.structure.take(model)[0]))
        except Exception as error:
            error.add_note(
                "Raised by `optimizer.init` of the trained arrays, which are the model with None for everything else. Masks "
                "and labels have that structure; an optimizer whose parameters are something else cannot be used."
            )
            raise

    def checked_schedule(self, model: PyTree) -> Callable[[Any], Any] | None:
        """Returns `lr_schedule_fn` if the learning rate of each step is its value there, as far as the optimizer shows."""
        schedule = self.lr_schedule_fn
        return schedule if schedule is not None and follows_schedule(self.opt_shapes(model)) else None

    @property
    def sums(self) -> Sums:
        """The user's functions as sums over rows."""
        return Sums(self.structure, self.loss_fn, self.has_state, self.compute.precision, self.grad_fn, self.uses)
