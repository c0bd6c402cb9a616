"""Jobs: a training step to compile for other machines and meshes, the input of a dry run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from ..data import BatchSize, Slice, collated_shapes
from ..dims import UNKNOWN, RowUse
from ..machine import FSDP, MODEL, n_batch_shards
from ..partition import Plan
from ..tracing import Rule
from ._program import Program
from ._recipe import Recipe


@dataclass(frozen=True)
class Setting:
    """How a run is distributed; its updates do not depend on it."""

    n_model_shards: int
    n_fsdp_shards: int
    per_device_batch_size: int
    accumulate_grad_batches: int
    remat: str = "auto"  # this and the next two as for `Trainer`
    unroll: bool = True
    offload_opt_state: bool = False
    batch_size: int | None = None  # examples per update, if the script sets them instead of rows per device

    def size(self, mesh: Mesh) -> BatchSize:
        """Returns the sizes of an update's batch."""
        rows = self.per_device_batch_size * n_batch_shards(mesh)
        n = self.accumulate_grad_batches
        return BatchSize(self.batch_size or rows * n, rows, by_examples=self.batch_size is not None, asked=n)

    def code(self) -> str:
        """Returns the arguments to write in a script."""
        options = "" if self.remat == "auto" else f', remat="{self.remat}"'
        options += "" if self.unroll else ", unroll=False"
        options += ", offload_opt_state=True" if self.offload_opt_state else ""
        rows = f"per_device_batch_size={self.per_device_batch_size}"
        lines = [
            f"Deployer(n_model_shards={self.n_model_shards}, n_fsdp_shards={self.n_fsdp_shards})",
            f"Trainer(accumulate_grad_batches={self.accumulate_grad_batches}{options})",
            f"fit({rows if self.batch_size is None else f'batch_size={self.batch_size}'})",
        ]
        return "; ".join(lines)


@dataclass(frozen=True)
class Job:
    """A training step that can be compiled for any mesh and setting.

    **Arguments:**

    - `batch`: shapes of the first step's rows, as `collate_fn` returns them.
    - `make_plan`: maps `(mesh, micro_batch)` to the plan.
    - `make_program`: maps `(plan, change, setting)` to the steps, whose operations name their weights.
    - `can_remat`: whether a rule can change the backward pass, which is False for a user's `grad_fn`.
    - `eval_batch`: shapes of the rows of an evaluation's first batch; None without an evaluation.
    - `trace_predict`: maps a program to the traced predict step of the evaluation; None without one.
    - `files`: the bytes of each file of a checkpoint; empty if none is saved.
    - `rows`, `eval_rows`: what the loss does with rows, in training and in the evaluation.
    """

    setting: Setting
    batch: PyTree
    make_plan: Callable[[Mesh, PyTree], Plan]
    make_program: Callable[[Plan, Rule | None, Setting], Program]
    can_remat: bool = True
    eval_batch: PyTree | None = None
    eval_per_device_batch_size: int = 0
    trace_predict: Callable[[Program], Any] | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    rows: RowUse = UNKNOWN
    eval_rows: RowUse = UNKNOWN

    def eval_size(self, mesh: Mesh) -> BatchSize:
        """Returns the sizes of an evaluation's batch."""
        rows = self.eval_per_device_batch_size * n_batch_shards(mesh)
        return BatchSize(rows, rows)


def make_job(
    recipe: Recipe, model: PyTree, state: PyTree, step: Slice, size: BatchSize, mesh: Mesh, n_devices: int | None = None
) -> Job:
    """Returns the job that compiles one training step.

    **Arguments:**

    - `model`, `state`: of arrays or their shapes.
    - `step`: the examples of the step.
    - `mesh`: defines the numbers of shards.
    - `n_devices`: devices of the target machine; the mesh's by default.
    """
    rows = size.micro_batch // ((n_devices or mesh.size) // mesh.shape[MODEL])
    batch = collated_shapes(recipe.collate_fn, step.examples)
    use = recipe.rows or recipe.row_use(model, state, batch)
    recipe = replace(recipe, rows=use)

    def make_program(plan: Plan, change: Rule | None, setting: Setting) -> Program:
        chosen = {name: getattr(setting, name) for name in ("remat", "unroll", "offload_opt_state")}
        changed = replace(recipe, compute=replace(recipe.compute, **chosen))
        return changed.program(plan, model, state, named=True, change=change)

    return Job(
        setting=Setting(
            mesh.shape[MODEL],
            mesh.shape[FSDP],
            rows,
            recipe.accumulate,
            recipe.compute.remat,
            recipe.compute.unroll,
            recipe.compute.offload_opt_state,
            batch_size=size.examples if size.by_examples else None,
        ),
        batch=batch,
        make_plan=lambda mesh, micro_batch: recipe.plan_on(mesh, model, recipe.trace(model, state, micro_batch)),
        make_program=make_program,
        can_remat=recipe.grad_fn is None,
        rows=use,
    )
