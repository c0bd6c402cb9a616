"""Workloads: a training step, an evaluation and the files of a checkpoint, to compile for other machines and strategies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from .._tree import array_leaves
from ..checkpoint import file_size
from ..data import BatchSize, Slice, collated_shapes, size_of
from ..dims import RowUse
from ..machine import MODEL, SEQUENCE, n_batch_shards
from ..memory import Strategy
from ..optimizers import has_eval_params
from ..partition import Plan
from ..steps import Program, Task, make_program
from ..training import Fit


@dataclass(frozen=True)
class Workload:
    """What a script computes, which can be compiled for any mesh and strategy."""

    strategy: Strategy  # the script's own
    task: Task
    model: PyTree
    state: PyTree
    batch: PyTree  # shapes of the first step's rows, as `collate_fn` returns them
    eval_batch: PyTree | None = None  # the same of an evaluation's first batch; None without an evaluation
    eval_per_device_batch_size: int = 0
    trace_predict: Callable[[Program], Any] | None = None  # traces the predict step of the evaluation
    files: Mapping[str, int] = field(default_factory=dict)  # bytes of each file of a checkpoint

    @classmethod
    def of_step(
        cls,
        task: Task,
        model: PyTree,
        state: PyTree,
        step: Slice,
        size: BatchSize,
        mesh: Mesh,
        n_devices: int | None = None,
    ) -> "Workload":
        """Returns the workload of one training step, on as many shards as the mesh has, and on `n_devices`, by default the
        mesh's."""
        batch = collated_shapes(task.collate_fn, step.examples)
        rows = size.micro_batch // ((n_devices or mesh.size) // (mesh.shape[SEQUENCE] * mesh.shape[MODEL]))
        n_examples = size.examples if size.by_examples else None
        strategy = Strategy.of(task.compute, mesh, rows, task.accumulate, n_examples)
        return cls(strategy, task, model, state, batch)

    @classmethod
    def of_fit(cls, fit: Fit) -> "Workload":
        """Returns the workload of a fit: its first step, its evaluation and its checkpoints."""
        options, engine = fit.options, fit.engine
        task, (model, state), mesh = engine.task, engine.trees, engine.deployer.mesh
        work = cls.of_step(task, model, state, fit.first_step(), fit.size, mesh)
        if options.evaluates:
            sizes = {prefix: fit.eval_size(examples).micro_batch for prefix, examples in options.eval_sets.items()}
            largest = max(options.eval_sets.items(), key=lambda item: min(size_of(item[1]) or 0, sizes[item[0]]))[1]
            examples = fit.first_evaluated(largest)
            rows = max(1, fit.eval_size(largest).micro_batch // n_batch_shards(mesh))
            if options.eval_loss:
                batch = collated_shapes(task.collate_fn, examples)
                work = replace(work, eval_batch=batch, eval_per_device_batch_size=rows)
            if (predictor := options.eval_predictor) is not None:
                work = replace(work, trace_predict=lambda program: predictor.trace(model, examples, rows, program))
        if options.saves or (options.save_end and engine.deployer.workdir is not None):
            leaves = array_leaves(model)
            unsaved = fit.checkpointer.origins.unsaved(leaves)
            leaves = {name: leaf for name, leaf in leaves.items() if name not in unsaved}
            files = {"model.safetensors": file_size(leaves, options.save_float_dtype)}
            if task.has_state:
                files["model_state.safetensors"] = file_size(array_leaves(state))
            if options.save_opt_states:
                opt_state = task.opt_shapes(model)
                files["optimizer.safetensors"] = file_size(array_leaves(opt_state))
                if has_eval_params(opt_state):
                    files["trained.safetensors"] = file_size(array_leaves(task.structure.take(model)[0]))
            work = replace(work, files=files)
        return work

    @property
    def rows(self) -> RowUse:
        """What the loss does with the rows of `batch`."""
        return self.task.row_use_of(self.model, self.state, self.batch)

    @property
    def eval_rows(self) -> RowUse:
        """What it does in an evaluation with those of `eval_batch`: layers such as BatchNorm compute something else then."""
        return self.task.row_use_of(self.model, self.state, self.eval_batch, inference=True)

    def eval_size(self, mesh: Mesh) -> BatchSize:
        """Returns the sizes of an evaluation's batch."""
        rows = self.eval_per_device_batch_size * n_batch_shards(mesh)
        return BatchSize(rows, rows)

    def plan_on(self, mesh: Mesh, micro_batch: PyTree) -> Plan:
        """Returns the plan on a mesh, for the shapes of a micro-batch."""
        return self.task.plan_on(mesh, self.model, self.task.trace(self.model, self.state, micro_batch), self.rows)

    def program(self, plan: Plan, strategy: Strategy, *, named: bool = True, measures: bool = False) -> Program:
        """Returns the steps; if `named`, their operations name their weights, which a run's do not. `measures` is that of
        `make_program`."""
        task = replace(self.task, compute=strategy.applied(self.task.compute))
        return make_program(task, plan, self.model, self.state, named=named, measures=measures)
