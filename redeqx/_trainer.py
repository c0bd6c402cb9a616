"""The Trainer: trains an Equinox model on any mesh. The public interface of the package `training`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from types import MappingProxyType
from typing import Any, Generic

import equinox as eqx
import jax
import optax

from ._deployer import Deployer
from ._predictor import Predictor
from ._tree import ModelT, PyTree
from .data import BatchSize, CollatePool, Slice, Workers, check_examples, known_size, size_of
from .distributed import agree_on_examples
from .dry_run import DryRun, DryRunDone, Workload, dry_run
from .errors import (
    REDCO_TRAINER,
    REDCO_TRAINER_ARGUMENTS,
    RedcoNames,
    brief,
    check_choice,
    check_count,
    check_flag,
    check_float_dtype,
    check_function,
    check_model,
    check_model_function,
    check_not_traced,
    check_optimizer,
    check_state,
    check_type,
    filter_traceback,
    is_plain,
    with_batch_note,
)
from .machine import describe, dry, of_devices
from .optimizers import hyperparam_values
from .partition import Plan, check_plan
from .steps import Compute, Precision, Structure, Task, weak_types, with_weak_types
from .storage import Location
from .training import Checkpointer, Engine, Fit, FitOptions, evaluate, in_order, warn_of_large_batch


class Trainer(RedcoNames, Generic[ModelT]):
    """Trains an Equinox model on the deployer's mesh.

    An update is that of the undivided loss, up to rounding: it does not depend on the mesh, on micro-batches or on a
    restart, even if the loss draws random numbers. A loss that mixes rows, such as a contrastive one, is computed undivided
    unless `accumulate_grad_batches` asks for parts. The header names its line, and what could not be proved: an unknown
    operation, or a draw that cannot follow its rows.

    The arrays of `model` are copied to the mesh when the first batch arrives. Those that are split over it already, as by
    `deployer.init` or as results of another trainer's model, are used without a copy, unless another trainer has them too:
    they are deleted where the plan of the first batch moves them, even if it is evaluated, and else by the first update.

    **Arguments:**

    - `deployer`: the devices.
    - `model`: an Equinox module. Evaluation and prediction use `eqx.nn.inference_mode` of it.
    - `optimizer`: an optax transformation; one update is one *step*.
    - `collate_fn`: maps a list of examples to a PyTree of numpy arrays with one row per example.
    - `loss_fn`: maps `(model, batch, key)` to a scalar, or to a `redeqx.Loss`, as if the batch were undivided. With
        `model_state`: maps `(model, state, batch, key)` to `(loss, state)`.
    - `model_state`: the state of layers that have one (`eqx.nn.BatchNorm`), from `eqx.nn.make_with_state`.
    - `trainable`: which leaves are trained: a function of a leaf, or a PyTree of booleans in the model's structure; by
        default all floating leaves of 16 bits or more.
    - `lr_schedule_fn`: maps a step to the learning rate; only logged, so pass the same schedule to the optimizer. A fit that
        continues after the schedule has reached 0 warns.
    - `accumulate_grad_batches`: micro-batches per step.
    - `grad_fn`: maps `(model, batch, key)` (with `model_state` after `model`) to `(loss, grads)` and replaces the gradient
        of `loss_fn`. `grads` is the gradient of the returned loss, `total / weight`, in the model's structure. With
        `model_state` it returns `((loss, state), grads)`.
    - `plan`: how the model is split; `deployer.plan(model, loss_fn, batch)` with the first batch by default.
    - `compute`: how the loss is computed: a precision such as `"bfloat16"`, or a `redeqx.Compute` with all options.
    - `workers`: `redeqx.Workers(4)` calls `collate_fn` in four threads, `redeqx.Workers(4, "processes")` in processes.
    - `on_nonfinite`: what happens to a step whose loss or gradient is not finite: `"raise"` ends training; `"skip"` leaves
        parameters and optimizer state unchanged, bit for bit, and goes on with the next examples, unless more than 10 steps
        in a row are skipped; a number instead of `"skip"` is another limit. `n_skipped` counts.
    - `name`: tells the trainers of one deployer apart, such as an actor's and a critic's: metrics are called `critic/loss`,
        and checkpoints are in `ckpts/critic`.

    Raises ValueError where no leaf is trainable, and for fp8 on a device that does not support it.
    """

    _redco_attributes, _redco_arguments = REDCO_TRAINER, REDCO_TRAINER_ARGUMENTS

    def __init__(
        self,
        deployer: Deployer,
        *,
        model: ModelT,
        optimizer: optax.GradientTransformation,
        collate_fn: Callable[[list[Any]], PyTree],
        loss_fn: Callable[..., Any],
        model_state: PyTree | None = None,
        trainable: Any = eqx.is_inexact_array,
        lr_schedule_fn: Callable[[Any], Any] | None = None,
        accumulate_grad_batches: int = 1,
        grad_fn: Callable[..., Any] | None = None,
        plan: Plan | None = None,
        compute: Compute | Precision | str | None = None,
        workers: Workers = Workers(),
        on_nonfinite: str | int = "raise",
        name: str | None = None,
    ):
        check_type(deployer, Deployer, "deployer")
        max_skipped = _max_skipped(on_nonfinite)
        check_count(accumulate_grad_batches, "accumulate_grad_batches")
        _check_name(name)
        compute = Compute.of(compute)
        dtypes = compute.precision
        dtypes.check(deployer.mesh)
        check_type(workers, Workers, "workers")
        check_model(model)
        check_state(model_state)
        check_optimizer(optimizer)
        check_function(collate_fn, "collate_fn", ["examples"])
        has_state, self._weak = model_state is not None, weak_types(model_state)
        check_model_function(loss_fn, "loss_fn", has_state=has_state)
        if grad_fn is not None:
            check_model_function(grad_fn, "grad_fn", has_state=has_state)
        if lr_schedule_fn is not None:
            check_function(lr_schedule_fn, "lr_schedule_fn", ["step"])
        check_plan(plan)
        structure = Structure.of(model, trainable)
        if not structure.names[0]:
            if not structure.names[1]:
                raise ValueError(
                    f"`model`: expected arrays to train, got none in {brief(model)}. Pass a model with weights."
                )
            raise ValueError(
                "`trainable`: expected at least one trainable leaf, got none of "
                f"{len(structure.names[1])} arrays. Check the filter and the model."
            )
        structure.warn_of_twins(model)
        if dtypes.parameters is not None:
            trained, frozen = structure.take(model)
            model = structure.put(dtypes.stored(trained), frozen)
        task = Task(
            structure=structure,
            loss_fn=with_batch_note(with_weak_types(loss_fn, self._weak), "loss_fn"),
            collate_fn=collate_fn,
            optimizer=dtypes.optimizer(optimizer),
            has_state=has_state,
            grad_fn=None if grad_fn is None else with_batch_note(with_weak_types(grad_fn, self._weak), "grad_fn"),
            lr_schedule_fn=lr_schedule_fn,
            compute=compute,
            accumulate=accumulate_grad_batches,
            plan=plan,
            max_skipped=max_skipped,
            xla_settings=deployer.xla_settings,
        )
        self._engine = Engine(deployer, task, CollatePool(collate_fn, workers), model, model_state, name)
        self._checkpointer = Checkpointer(self._engine)
        self._fit: Fit | None = None  # the running one

    # --- the state of training ---------------------------------------------------------------------------------------

    @property
    def deployer(self) -> Deployer:
        """The devices."""
        return self._engine.deployer

    @property
    def model(self) -> ModelT:
        """The current model. The next step deletes its arrays: save it, or copy what you want to keep."""
        check_not_traced("Trainer.model")
        return self._with_origins(self._engine.current[0])

    @property
    def eval_model(self) -> ModelT:
        """The model that is evaluated, saved and used for predictions: the average, with `redeqx.optimizers.ema`. The next
        step may delete its arrays."""
        check_not_traced("Trainer.eval_model")
        return self._with_origins(self._engine.eval_model)

    def _with_origins(self, model: PyTree) -> PyTree:
        return self._checkpointer.origins.noted(model) if self._engine.program is not None else model

    @property
    def model_state(self) -> PyTree | None:
        """The current state of the model's stateful layers; None if there are none."""
        check_not_traced("Trainer.model_state")
        return self._engine.current[1]

    @property
    def opt_state(self) -> PyTree:
        """The current optimizer state; in a dry run zeros. A value written into a dict of hyperparameters, as in
        `trainer.opt_state.hyperparams["learning_rate"] = 1e-4`, is set as by `set_hyperparams`; other changes have no
        effect."""
        check_not_traced("Trainer.opt_state")
        return self._engine.opt_state

    @property
    def hyperparams(self) -> Mapping[str, Any]:
        """The hyperparameters of `optax.inject_hyperparams` by name, read-only; waits for the device. Those with a schedule
        are of the newest update."""
        check_not_traced("Trainer.hyperparams")
        return MappingProxyType(hyperparam_values(self._engine.opt_state))

    @filter_traceback
    def set_hyperparams(self, **values: Any) -> None:
        """Sets hyperparameters of `optax.inject_hyperparams`, from the next update on. What is set after the first update is
        saved, and a resumed run keeps it; the page "Choose an optimizer" says what it takes from the script.

        Call it in a callback, or between the updates of a loop of your own, with several processes in each of them: the
        values of process 0 are used.

        **Arguments:**

        - `values`: numbers by name: `learning_rate=1e-4`. Where several have the same name, the whole name in the
            optimizer's state: `**{"inner_states.body.inner_state.hyperparams.learning_rate": 1e-4}`.

        Raises ValueError for an unknown name, with the nearest one, for a hyperparameter with a schedule, and for NaN;
        TypeError for anything but a number.
        """
        if self._fit is not None:
            self._engine.hyperparams.begin_run()
        self._engine.set_hyperparams(values)

    @property
    def plan(self) -> Plan | None:
        """How the model is split. If no plan was given, it is made at first use; None before."""
        return self._engine.plan

    @property
    def name(self) -> str | None:
        """What tells this trainer apart from others of its deployer."""
        return self._engine.name

    @property
    def step(self) -> int:
        """The number of updates so far, including those before a resume."""
        check_not_traced("Trainer.step")
        return self._engine.step

    @property
    def n_skipped(self) -> int:
        """The number of steps skipped because their loss or gradient was not finite, including those before a resume."""
        return self._engine.metrics.n_skipped

    def batch_size(self, per_device_batch_size: int) -> int:
        """Returns the examples per step: rows per device x batch shards x micro-batches."""
        check_count(per_device_batch_size, "per_device_batch_size")
        return per_device_batch_size * self.deployer.n_batch_shards * self._engine.task.accumulate

    # --- single passes -----------------------------------------------------------------------------------------------

    @filter_traceback
    def train(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> dict[str, float]:
        """Trains for one pass over the examples, in their order; returns the last step's metrics.

        **Arguments:**

        - `examples`: anything with `len()` and integer items, or an iterable.
        - `per_device_batch_size`, `batch_size`, `drop_remainder`: as for `fit`.
        """
        self._check_outside_of_fit("train")
        check_flag(drop_remainder, "drop_remainder")
        size = self._engine.batch_size(per_device_batch_size, batch_size)
        steps = in_order(examples, size, drop_remainder)
        agree_on_examples(self.deployer.peers, "train", size_of(examples), size.examples)
        if (run := dry()) is not None:
            raise DryRunDone(dry_run(self._workload(steps, size), run.machine, **run.options))
        if not drop_remainder:
            warn_of_large_batch(size_of(examples), size, per_device_batch_size)
        engine, line = self._engine, self.deployer.console.progress(first_step=self._engine.step, title="train")
        with self.deployer.watch.on(), engine.showing(line):
            with closing(engine.batches(steps, size)) as upcoming:
                for _ in engine.updates(upcoming):
                    self._checkpointer.after_update()
            engine.flush()
        return dict(engine.metrics.last)

    @filter_traceback
    def update(self, examples: Any) -> dict[str, float]:
        """Takes one step on all of these examples; waits for its metrics and returns them. For loops of your own:
        curricula, reinforcement learning.

        Numbers, records and checkpoints are those of `train` with the same examples as one batch. Such a loop resumes with
        `resume` and saves with `save_ckpt`:

        ```python
        for step in range(trainer.resume(), 1000):
            metrics = trainer.update(draw_examples(step))
            if trainer.step % 100 == 0:
                trainer.save_ckpt()
        ```

        A scheduler's signal saves the newest update of a loop that has called `resume`, or `save_ckpt` with the optimizer's
        state, and ends the script with exit code 75. Ctrl-C saves only in `fit`.

        Trainers that take turns need a name each (`Trainer(name=)`), if their steps are recorded. Guard updates after a
        `fit` by the step (`while trainer.step < 700:`): a script that is run again takes them again.

        **Arguments:**

        - `examples`: anything with `len()` and integer items. Each new number of examples compiles another program.

        Raises ValueError for trainers of one name that take turns.
        """
        self._check_outside_of_fit("update")
        engine, n_processes = self._engine, self.deployer.peers.n
        check_examples(examples, "examples", or_function=False)
        size = engine.batch_size(None, known_size(examples))
        steps = in_order(examples, size)
        if (run := dry()) is not None:
            raise DryRunDone(dry_run(self._workload(steps, size), run.machine, **run.options))
        engine.line.begin_step(engine.step)
        shown = engine.line if not engine.called.known else nullcontext()  # shows the compilation
        watched = self.deployer.watch.on() if n_processes > 1 else nullcontext()  # it costs a thread
        with shown, engine.updating(), watched, closing(engine.batches(steps, size, depth=0)) as upcoming:
            engine.queue(next(upcoming))
            engine.flush()
            self._checkpointer.after_update()
        return dict(engine.metrics.last)

    @filter_traceback
    def eval_loss(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        *,
        batch_size: int | None = None,
        model: PyTree | None = None,
    ) -> float:
        """Computes the loss over all examples: sums totals and weights, and divides once.

        The result is the same for every batch size, remainder included, if the loss is a mean over rows, each of which
        depends on itself alone, or a `Loss` with the total and weight of such rows. Otherwise a line in the console says
        that it depends on the batch size. If `examples` is an iterator, a draw whose rows are not the first dim differs
        from that for a list, whose length is known.

        **Arguments:**

        - `per_device_batch_size`, `batch_size`: at most this many rows at one position of the data and fsdp axes, or
            examples over all devices; slightly fewer if that leaves no remainder.
        - `model`: evaluated instead of `trainer.eval_model`, in the same structure: `trainer.model`, for example.

        Raises ValueError for a `model` of another structure.
        """
        return self.eval_metrics(examples, per_device_batch_size, batch_size=batch_size, model=model)["loss"]

    @filter_traceback
    def eval_metrics(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        *,
        batch_size: int | None = None,
        model: PyTree | None = None,
    ) -> dict[str, float]:
        """Computes `{"loss": ...}` and every metric of `Loss.metrics` over all examples; arguments as for `eval_loss`."""
        size = BatchSize.of(self.deployer.mesh, per_device_batch_size, batch_size)
        check_examples(examples, "examples", or_function=False)
        agree_on_examples(self.deployer.peers, "eval_loss", size_of(examples), size.examples)
        return evaluate(self._engine, examples, size, model)

    @filter_traceback
    def get_default_predictor(
        self,
        pred_fn: Callable[..., PyTree],
        output_fn: Callable[[PyTree], list[Any]] | None = None,
        *,
        collate_fn: Callable[[list[Any]], PyTree] | None = None,
    ) -> Predictor:
        """Returns a Predictor that uses this trainer's `eval_model` at the time of each call, with its plan and `compute`.

        **Arguments:**

        - `collate_fn`: for the examples to predict, if they differ from the training examples: prompts without answers, or
            the observations that a policy acts on. The trainer's by default.
        """
        task = self._engine.task
        check_model_function(pred_fn, "pred_fn", has_state=task.has_state)
        predictor = Predictor(
            self.deployer,
            collate_fn=task.collate_fn if collate_fn is None else collate_fn,
            pred_fn=with_weak_types(pred_fn, self._weak),
            output_fn=output_fn,
            compute=task.compute,
        )
        predictor._engine = self._engine
        return predictor

    @property
    def compiled_step(self) -> jax.stages.Compiled | None:
        """The compiled program of the newest step, for inspection; None before the first. Reading it compiles nothing."""
        newest = self._engine.newest_step
        return None if newest is None else newest.lowered.compile()

    @filter_traceback
    def compile(
        self, examples: Any, per_device_batch_size: int | None = None, *, batch_size: int | None = None
    ) -> jax.stages.Compiled:
        """Compiles the train step for the first step's examples, for inspection: its memory, its collectives, its text."""
        size = self._engine.batch_size(per_device_batch_size, batch_size)
        with closing(self._engine.batches(in_order(examples, size), size)) as batches:
            return self._engine.compiled(next(batches))

    @filter_traceback
    def dry_run(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        topology: str | None = None,
        *,
        batch_size: int | None = None,
        optimization: str | None = None,
        search: str = "fits",
    ) -> DryRun:
        """Compiles a training step without running it, and reports its memory, collectives, FLOPs, and whether it fits.

        Allocates nothing, and leaves the trainer unchanged.

        **Arguments:**

        - `examples`, `per_device_batch_size`, `batch_size`: as for `train`; the first step is compiled.
        - `topology`: devices that need not exist here, with the shards of this deployer: `"v4:2x2x2"`, `"gpu:a100-40gb:4"`,
            `"gpu:h100-80gb:2x8"`; the deployer's own devices by default.
        - `optimization`: the compiler's level, `"O0"` to `"O3"`, or `"UNKNOWN"`, the level of a run. By default `"UNKNOWN"`,
            but for TPUs `"O2"`, which needs the same memory and compiles in half the time; `"O1"` is faster and needs less.
            `"none"` compiles nothing, and estimates the memory from the trace.
        - `search`: `"fits"` searches for a strategy that fits (shards, micro-batches, `remat`) if this one does not;
            `"fastest"` for the fastest one that fits, in any case; `"none"` for none.

        Raises ValueError for an unknown topology, level or search, ImportError where its compiler is not installed.
        """
        run = dry()
        if topology is not None:
            machine = describe(topology)
        else:
            machine = of_devices("this", self.deployer.mesh.devices.flat) if run is None else run.machine
        n_devices = len(machine.devices)
        size = self._engine.batch_size(per_device_batch_size, batch_size, n_devices)
        work = self._workload(in_order(examples, size), size, n_devices)
        return dry_run(work, machine, optimization=optimization, search=search)

    def _workload(self, steps: Iterator[Slice], size: BatchSize, n_devices: int | None = None) -> Workload:
        """Returns the workload of a dry run: the first of these steps."""
        return Workload.of_step(self._engine.task, *self._engine.trees, next(steps), size, self.deployer.mesh, n_devices)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @filter_traceback
    def save_ckpt(
        self,
        name: str = "last",
        *,
        metrics: Mapping[str, float] | None = None,
        keep_last: int | None = None,
        save_opt_states: bool = True,
        save_float_dtype: Any = None,
        then: Callable[[Location], None] | None = None,
    ) -> Location:
        """Saves model, optimizer state and position to the workdir; returns the checkpoint's folder.

        **Arguments:**

        - `name`: its name for `load_ckpt` and in `index.json`. A checkpoint is kept as long as it has a name.
        - `metrics`: numbers by name for its `trainer.json`, such as those it was chosen by; by default those of a fit's
            evaluation of this step.
        - `keep_last`: how many of the newest checkpoints are kept without a name; by default as many as the newest fit or
            save kept, or 2. In a fit, the most that any of its saves keeps.
        - `save_opt_states`: whether to save what only resuming needs. A run does not resume from a checkpoint without it.
        - `save_float_dtype`: floating leaves of the model are cast to it in the file.
        - `then`: a function of the folder. With it, `save_ckpt` returns as soon as the arrays are copied to the host; a
            thread writes the files while training continues, and calls `then` when the checkpoint is complete. The next step
            or save raises its errors. In that thread no other checkpoint can be saved or loaded.

        Raises ValueError without a workdir, and for a path in place of a name, OSError if the disk is full; earlier
        checkpoints stay valid.
        """
        if not is_plain(name) or name.startswith("step_"):
            rule = "a name for the index, without `/`, that does not begin with `step_`, as folders do"
            raise ValueError(f"`name`: expected {rule}, got {brief(name)}. Pass 'best', for example.")
        if keep_last is not None:
            check_count(keep_last, "keep_last", 0, advice="Pass the number of checkpoints to keep.")
        check_flag(save_opt_states, "save_opt_states")
        if not isinstance(metrics, Mapping | None):
            raise TypeError(f"`metrics`: expected numbers by name, got {brief(metrics)}. Pass a dict: `{{'loss': 0.5}}`.")
        check_float_dtype(save_float_dtype, "save_float_dtype", "Pass None to save what the model has.")
        if then is not None:
            check_function(then, "then", ["path"])
        return self._checkpointer.save(
            [name],
            metrics=metrics,
            keep_last=keep_last,
            save_opt_states=save_opt_states,
            save_float_dtype=save_float_dtype,
            then=then,
        )

    @filter_traceback
    def load_ckpt(self, name: str | Location = "last", *, load_opt_states: bool = True) -> None:
        """Loads a checkpoint onto this trainer's mesh, whichever mesh it was saved on.

        **Arguments:**

        - `name`: a name in the index (`"last"`, `"argmax_accuracy"`), a checkpoint's name, or a path, which needs no
            workdir: a checkpoint's folder (`"runs/x/ckpts/step_00000400"`), a name in another index
            (`"runs/x/ckpts/last"`), or another workdir, for its newest checkpoint.
        - `load_opt_states`: whether to load the optimizer state and the step too; otherwise only the model.

        The next `fit` continues from the loaded checkpoint; if this trainer has not run a fit before, with all its epochs.
        A checkpoint of another workdir is a new start: if this workdir has a run already, `fit` resumes that run.

        The current arrays, which `trainer.model` returned, are deleted before new ones are read, as in a step. Before
        anything is computed, the tensors are only matched, and read when the model is placed.

        Raises ValueError if the checkpoint is damaged or belongs to another model, and names the differences; the trainer is
        then unchanged. If a file becomes unreadable after it was verified, the trainer has no values until another
        checkpoint is loaded. Also raises ValueError inside `fit` or `train`.
        """
        check_flag(load_opt_states, "load_opt_states")
        if self._engine.is_updating or self._fit is not None:
            raise ValueError("`load_ckpt`: expected after `fit` or `train`, got called inside it. Call it afterwards.")
        if not self.deployer.is_dry_run:  # there it has the shapes of this model
            self._checkpointer.load(name, opt_states=load_opt_states)

    @filter_traceback
    def resume(self) -> int:
        """Continues from the newest checkpoint of the workdir, if there is one; returns the step. For loops of your own,
        before their first update: `fit` resumes by itself.

        Later records of `metrics.jsonl` are deleted, as these steps are repeated. Damaged checkpoints are skipped with a
        warning. If a kill came between the saves of several trainers, all continue from the saves before.

        Raises ValueError if the checkpoint belongs to another model, or all are damaged.
        """
        engine = self._engine
        if engine.is_updating or self._fit is not None:
            raise ValueError("`resume`: expected before the first update, got called inside `fit`. It resumes by itself.")
        if not self.deployer.is_dry_run:
            self._checkpointer.resume()
            engine.hyperparams.begin_run()
            engine.records.rewind(engine.step, engine.name)  # also if this process has taken later steps
        return engine.step

    # --- whole runs --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the running fit after this step as it ends at its last one: the step is evaluated and saved. Call it in a
        callback or in `eval_metric_fn`; with several processes only the call of process 0 counts. A later run of the script
        continues from that step.

        Raises ValueError outside a fit.
        """
        if self._fit is None:
            raise ValueError("`stop`: expected inside `fit`, got called outside. Call it in a callback.")
        self._fit.stop_requested = True

    @filter_traceback
    def fit(
        self,
        train_examples: Any,
        per_device_batch_size: int | None = None,
        n_epochs: int | None = None,
        *,
        max_steps: int | None = None,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        eval_examples: Any = None,
        eval_per_device_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        eval_loss: bool = True,
        eval_predictor: Any = None,
        eval_metric_fn: Callable[[Any, list[Any]], Mapping[str, Any]] | None = None,
        eval_sanity_check: bool = True,
        eval_every_n_steps: int | None = None,
        save_every_n_steps: int | None = None,
        save_ckpt_every_k_epochs: int | None = None,
        save_last_ckpt: bool = False,
        save_argmin_ckpt_by_metrics: Sequence[str] = (),
        save_argmax_ckpt_by_metrics: Sequence[str] = (),
        save_end: bool = True,
        keep_last: int = 2,
        save_opt_states: bool = True,
        save_float_dtype: Any = None,
        resume: bool = True,
        callbacks: Sequence[Any] = (),
    ) -> dict[str, float]:
        """Trains for `n_epochs` epochs, with evaluations and saves; returns the metrics of the last evaluation, or of the
        last step if nothing is evaluated.

        Every example is used once per epoch. The last step of an epoch holds the remaining examples. A run that was stopped
        resumes from its newest checkpoint and ends with the same bits; a finished one continues if `n_epochs` is larger than
        before, and else returns its metrics of then.

        **Arguments:**

        - `train_examples`: an object with `len()` and integer items, shuffled anew each epoch; or a function of the epoch
            that returns one, of any length; or an iterable.
        - `per_device_batch_size`: rows of a micro-batch at one position of the data and fsdp axes. A step has
            `trainer.batch_size(per_device_batch_size)` examples, which depends on the mesh.
        - `n_epochs`: passes over the examples; by default 1, or with `max_steps` as many as these need.
        - `max_steps`: the fit ends after this many steps, even within an epoch; a later run with more continues there.
        - `batch_size`: instead of `per_device_batch_size`, the examples of a step over all devices and micro-batches: the
            same run on every mesh. Best a multiple of devices times micro-batches, as every device computes all of the
            remaining rows.
        - `drop_remainder`: whether to drop the incomplete batch at the end of an epoch, for which another program is
            compiled.
        - `eval_examples`: with `len()` and integer items; evaluated at the end of every epoch, and every
            `eval_every_n_steps` steps. Several sets by name, `{"dev": ..., "test": ...}`, give `"dev_loss"`, `"test_loss"`.
        - `eval_per_device_batch_size`, `eval_batch_size`: for evaluations; the size of a training micro-batch by default.
        - `eval_loss`: whether to evaluate the loss; its metric is called `"loss"`.
        - `eval_predictor`, `eval_metric_fn`: computes outputs for `eval_examples`; maps `(examples, outputs)` to a dict of
            numbers.
        - `eval_sanity_check`: whether to evaluate one batch before training, so that mistakes show early.
        - `save_every_n_steps`, `save_ckpt_every_k_epochs`, `save_last_ckpt`: save every n steps; after every k-th epoch,
            to keep (`"epoch_3"` in the index, of a second fit `"fit_2_epoch_3"`); at the end of every epoch.
        - `save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: names of metrics by which the best checkpoint of
            all fits of the run is kept (`"argmax_accuracy"` in the index).
        - `save_end`: whether to save the end of the fit, if there is a `workdir`.
        - `keep_last`: how many of the newest checkpoints are kept in addition.
        - `save_opt_states`: whether to save the optimizer state. Without it a run cannot be resumed.
        - `save_float_dtype`: floating leaves of the model are cast to it in the file, and a resumed run continues with them.
        - `resume`: whether to continue from the workdir's newest checkpoint, or where this trainer's last fit was
            interrupted. If False, a workdir that holds checkpoints is refused, and an interrupted fit is abandoned.
        - `callbacks`: called at each step, evaluation, save or epoch; see `redeqx.Callback`. Their state is saved and
            resumed.

        Raises ValueError or TypeError for invalid arguments, before any work; ValueError for a run that was begun with
        another seed, batch size or number of examples; ValueError for a loss that is not finite, naming the step. The model
        is then unusable: `load_ckpt()` restores the last good one.

        In a dry run, compiles the step for the first batch and raises SystemExit with the report.
        """
        arguments = dict(locals())  # all of the above
        del arguments["self"]
        self._check_outside_of_fit("fit")
        fit = Fit(self._engine, self._checkpointer, FitOptions(**arguments), self)
        if (run := dry()) is not None:
            raise DryRunDone(dry_run(Workload.of_fit(fit), run.machine, **run.options))
        self._fit = fit
        try:
            return fit.run()
        finally:
            self._fit = None

    def _check_outside_of_fit(self, method: str) -> None:
        """Raises ValueError inside a fit: the step after an evaluation would be saved as the one that was evaluated."""
        if self._fit is not None:
            raise ValueError(f"`{method}`: expected after the running `fit`, got called inside it. Call it afterwards.")


def _max_skipped(on_nonfinite: Any) -> int | None:
    """Returns how many steps in a row may be skipped; None if none is skipped."""
    if isinstance(on_nonfinite, str):
        check_choice(on_nonfinite, "on_nonfinite", ("raise", "skip"))
        return None if on_nonfinite == "raise" else 10
    check_count(on_nonfinite, "on_nonfinite", 0, advice="Pass how many steps in a row may be skipped, or 'raise'.")
    return on_nonfinite


def _check_name(name: Any) -> None:
    """Raises ValueError unless a name can be a prefix of metrics and a folder beside the checkpoints."""
    is_taken = isinstance(name, str) and (name == "last" or name.startswith("step_"))
    if name is not None and not (isinstance(name, str) and name.isidentifier() and not is_taken):
        rule = "an identifier other than `last` and `step_...`, which name checkpoints"
        raise ValueError(f"`name`: expected {rule}, got {brief(name)}. Pass `name='critic'`, for example.")
