"""The engine: the arrays of one model on a mesh, and the programs that compute with them.

It plans, places and updates. Passes over examples are in `_loops`; it does not know fits and their checkpoints.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import jax
import numpy as np
from jaxtyping import PyTree

from .._at_end import AtEnd
from .._deployer import Deployer
from ..checkpoint import CheckpointManager
from ..data import Batch, BatchSize, CollatePool, Prefetch, Slice, batches
from ..dims import UNKNOWN, RowUse
from ..distributed import RowCheck, agree_on_opt_state, agree_on_trainer
from ..errors import check_alive
from ..machine import as_zeros, put, replicated
from ..monitor import ProgressLine, Records
from ..optimizers import find_hyperparam
from ..partition import Plan, make_plan
from ..steps import Program, Task, TrainState, make_program, n_rows
from ..tracing import Trace
from ._compilation import CalledStep, CalledSteps, TrainSteps, check_captured, choose_memory
from ._header import eval_text, header_rows, loss_rows, shapes_text, warn_of_means, warn_of_uncut_rows
from ._hyperparams import Hyperparams
from ._metrics import Metrics, Queued
from ._progress import Position
from ._state import Checkpoint, given_state, load_state, match_state, moved, new_state, without_shared


class Engine:
    """The arrays and programs of one model. `name` tells the engines of a run apart: it is the prefix of metrics, and the
    folder of checkpoints. In a dry run `model` and `model_state` are shapes."""

    every: ClassVar[WeakSet["Engine"]] = WeakSet()  # all engines of this process
    pending: Checkpoint | None  # the checkpoint to load when the model is placed, instead of the given values
    checkpoints: CheckpointManager | None  # those of the workdir, of which errors name the newest

    def __init__(
        self, deployer: Deployer, task: Task, pool: CollatePool, model: PyTree, model_state: PyTree, name: str | None
    ):
        self.deployer, self.task, self.name, self._pool = deployer, task, name, pool  # which ends with the engine
        # Updates and their examples so far, and where that is in the trainer's fits. These change together, so that a
        # checkpoint that is saved at any time is consistent.
        self.step, self.n_examples, self.position = 0, 0, Position()
        self.stream, self.pending, self.checkpoints = deployer.next_stream(), None, None
        self.metrics = Metrics(deployer.console.info, task.max_skipped)
        self.hyperparams = Hyperparams()
        self.line: ProgressLine = deployer.console.progress(title="update")  # of a fit, a pass, or a user's own loop
        self.records: Records = deployer.console.records
        self.is_updating = False
        # What the loss does with the rows of the batches so far: by `inference`, then by the shapes of a row.
        self._uses: dict[bool, dict[Any, RowUse]] = {False: {}, True: {}}
        self.called, self.evaluated = TrainSteps(deployer), CalledSteps(deployer, "eval step", "loss_fn")
        self.newest_step: CalledStep | None = None  # the train step that was called last
        self._given = model, model_state  # before they are placed
        self.program: Program | None = None  # None until then
        self._state: TrainState | None = None  # None also if it was freed for a checkpoint that then could not be read
        self._knows_loss = False  # whether the plan tells what the loss does with leaves and rows
        self._is_lent = True  # whether others may hold arrays of the state, as those that were given or returned
        self.every.add(self)
        if pool.n:
            AtEnd(pool.close, self)

    # --- the model on the mesh -------------------------------------------------------------------------------------------

    @property
    def has_values(self) -> bool:
        """Whether the model is on the mesh and has values."""
        return self._state is not None

    @property
    def placed(self) -> tuple[Program, TrainState]:
        """The program and the arrays that it carries. The model must be placed."""
        assert self.program is not None, "placed"
        if self._state is None:
            raise ValueError(
                "`trainer`: expected its values, got none: they were freed for a checkpoint that then could not be read. "
                "Load one that is complete with `load_ckpt`, or create the Trainer again."
            )
        return self.program, self._state

    @property
    def plan(self) -> Plan | None:
        """How the model is split; None until it is placed, unless the task has a plan."""
        return self.task.plan if self.program is None else self.program.plan

    @property
    def trees(self) -> tuple[PyTree, PyTree]:
        """The model and the state of its layers. A checkpoint to restore is ignored."""
        self._is_lent = True
        if self.program is None:
            return self._given
        program, state = self.placed
        return program.model(state), program.model_state(state)

    @property
    def current(self) -> tuple[PyTree, PyTree]:
        """The `trees`, after a checkpoint was restored."""
        if self.pending is not None:
            self.place()
        return self.trees

    @property
    def eval_model(self) -> PyTree:
        """The model that is evaluated and saved."""
        model, _ = self.current
        return model if self.program is None else self.program.eval_model(self.placed[1])

    def place(self, batch: PyTree | None = None, first: Batch | None = None, plan: Plan | None = None) -> None:
        """Makes the plan and the program, places the model, and creates or restores the optimizer state.

        Done once, for what is computed first. What the loss does with leaves and rows is added at the first batch. `batch`
        has the shapes of a micro-batch, for which the loss is traced; `first` is the batch of the next update, whose step
        compiles while the model is placed; `plan` is that of a prediction, if this is computed first. Without any of these,
        leaves are only stored split.
        """
        if self.program is not None and plan is None and (self._knows_loss or batch is None):
            return
        self.deployer.need_values("trainer")
        before = self.program
        if before is None:
            self._given = self._agreed(*self._given)
        trace, use = None, UNKNOWN
        if batch is not None:
            trace, use = self.task.trace(*self.trees, batch), self.task.row_use_of(*self.trees, batch)
            warn_of_means(use)
        if plan is None:
            placed = None if before is None else before.plan
            plan = self.task.plan_on(self.deployer.mesh, self.trees[0], trace, use, placed)
        program = make_program(self.task, plan, *self.trees)
        if before is not None:
            self._use(program, trace)
            return
        # With `memory="auto"` another program may run, and several processes agree on it first.
        if first is not None and self.deployer.peers.n == 1 and self.task.compute.memory is None:
            self.called.compile_ahead(program, first)
        checkpoint, self.pending = self.pending, None  # if it cannot be loaded, the given values stay
        if checkpoint is None:
            state = new_state(program, *self.trees, self.stream)
            self.hyperparams.begin(program, state)
            self.program, self._state, self._given = program, state, (None, None)
        else:
            self._read(checkpoint, program, given_state(program, self.trees[0], self.stream, checkpoint.base))
        self._knows_loss = trace is not None
        agree_on_opt_state(self.deployer.peers, program.opt_tree(self.placed[1]))
        rows = header_rows(self.deployer, self.task, *self.placed, trace)
        self.deployer.console.header(rows)
        self.records.begin(rows, plan.explain)

    def _use(self, program: Program, trace: Trace | None) -> None:
        """Switches to a program that knows what is computed with leaves: their splits and optimizers' masks may differ."""
        before, state = self.placed
        if program.opt_treedef != before.opt_treedef:
            if self.step:
                raise ValueError(
                    "`optimizer`: expected the same state whether masks know the loss or only the types of layers, got two "
                    "structures. Pass the plan: `functools.partial(decay_mask, plan=deployer.plan(model, loss_fn, batch))`."
                )
            state = replace(state, opt_state=program.init_opt_state(state.trained))
            self.hyperparams.begin(program, state)
        self.program, self._state, self._knows_loss = program, moved(state, program.state), trace is not None
        self.called.known.clear()
        # The header was printed without a loss.
        for name, text in {} if trace is None else loss_rows(self.task, program, trace).items():
            self.deployer.console.info(f"{name}: {text}")

    def _agreed(self, model: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        """Checks that the arrays still exist, and that the trainers of all processes agree; copies what others hold too."""
        check_alive(model, "model")  # another trainer may have donated the arrays of `deployer.init`
        others = self.every - {self}
        placed = [other._state for other in others if other._state is not None]
        model = without_shared(self.task.structure, model, placed, [other._given for other in others])
        if self.deployer.peers.n > 1:
            settings = {"accumulate_grad_batches": self.task.accumulate, "precision": self.task.precision_of(model)}
            settings["trained leaves"] = len(self.task.structure.names[0])
            with self.deployer.watch.paused():
                agree_on_trainer(self.deployer.peers, model, model_state, settings)
        return model, model_state

    def use_task(self, task: Task) -> None:
        """Switches to another task's train step, and moves the optimizer state to its memory, leaf after leaf."""
        before, state = self.placed
        program = make_program(task, before.plan, *self.trees, update=before.update)
        moved(state, program.state)
        kept = {"eval_step": before.eval_step, "eval_names": before.eval_names}  # it need not compile again
        self.task, self.program = task, replace(program, **kept)
        self.called.known.clear()

    # --- hyperparameters -------------------------------------------------------------------------------------------------

    @property
    def opt_state(self) -> PyTree:
        """The optimizer state; in a dry run zeros."""
        if self.deployer.is_dry_run:
            return as_zeros(self.task.opt_shapes(self.current[0]))
        self.take_hyperparams()
        program, state = self.placed
        self._is_lent = True
        return self.hyperparams.show(program.opt_tree(state))

    def set_hyperparams(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters in the optimizer's state, for the next update."""
        if self.deployer.is_dry_run:
            shapes = self.task.opt_shapes(self.trees[0])
            for name in values:
                find_hyperparam(shapes, name)
            return
        self.take_hyperparams()
        self.hyperparams.set(*self.placed, values, self.deployer.peers)

    def take_hyperparams(self) -> None:
        """Sets what the user wrote into the optimizer state that `opt_state` returned."""
        self.place()
        self.hyperparams.take_written(*self.placed, self.deployer.peers)

    # --- batches ---------------------------------------------------------------------------------------------------------

    def batch_size(self, per_device: int | None, total: int | None, n_devices: int | None = None) -> BatchSize:
        """Returns the sizes of an update's batch, from the arguments of `fit`."""
        return BatchSize.of(self.deployer.mesh, per_device, total, self.task.accumulate, n_devices=n_devices)

    def batches(
        self, steps: Iterable[Slice], size: BatchSize, *, inference: bool = False, is_counted: bool = True, **options: Any
    ) -> Prefetch:
        """Returns the batch of each step, prepared ahead by a thread, with the `options` of `redeqx.data.batches`. Close it
        after use. `inference`: whether they are of an evaluation; `is_counted`: whether the number of its examples is
        known."""
        peers = self.deployer.peers
        check = None if peers.n == 1 else RowCheck(peers, self.deployer.console.info)
        find, uses = partial(self._find_row_use, size, inference, is_counted), self._uses[inference]
        return batches(steps, self._pool, size, self.deployer.mesh, check, find_use=find, uses=uses, **options)

    @property
    def eval_use(self) -> RowUse | None:
        """What the loss does with rows in an evaluation, as found for the first batch of one; None before."""
        return next(iter(self._uses[True].values()), None)

    def _find_row_use(self, size: BatchSize, inference: bool, is_counted: bool, batch: PyTree) -> RowUse:
        """Finds what the loss does with the rows of a batch, given as shapes; warns of micro-batches that do not divide. Of
        later shapes it tells what no earlier ones had."""
        before, use = [*self._uses[inference].values()], self.task.row_use_of(*self.trees, batch, inference=inference)
        if inference:
            text = eval_text(use, is_counted)
            if text and text not in (eval_text(each, is_counted) for each in before):
                self.deployer.console.info(text)
        elif self._knows_loss:  # else the header tells it
            assert self.program is not None
            if use.text not in (each.text for each in (self.program.plan.row_use, *before)):
                self.deployer.console.info(f"rows: {use.text}, for batches with {shapes_text(batch)}")
        if n_rows(batch) == size.examples and use.text not in (each.text for each in before):
            warn_of_uncut_rows(use, size, self.deployer.mesh)
        return use

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which a scheduler's signal waits. Raises ValueError for an update inside another one."""
        if self.is_updating:
            raise ValueError(
                "`fit`, `train`: expected to be called one after the other, got one inside the other. "
                "Call it after the first has ended."
            )
        self.deployer.claim_records(self)
        self.is_updating = True
        with self.deployer.preemption.held(), self.records.goodput.during("steps"):
            try:
                yield
            finally:
                self.is_updating = False

    # --- updates -----------------------------------------------------------------------------------------------------

    def updates(self, upcoming: Prefetch, epoch: Position | None = None) -> Generator[bool, None, None]:
        """Takes the updates of one pass; after each, yields whether it was the last. In an epoch of a fit, `epoch` is where
        the pass starts."""
        with self.updating():
            with self.line.waiting():
                batch = next(upcoming, None)
            while batch is not None:
                self.queue(batch, epoch)
                with self.line.waiting():
                    following = next(upcoming, None)
                yield following is None
                batch = following

    def queue(self, batch: Batch, epoch: Position | None = None) -> None:
        """Queues one update, and reads the metrics of an earlier one; `epoch` as for `updates`."""
        deployer, step = self.deployer, self.called.known.get(batch.signature)
        is_first = step is None
        deployer.peers.check()
        if is_first:
            self.hyperparams.begin_run()
            self.place(batch.micro_batch, batch)
            self.flush()
            choose_memory(self, batch)
        if self.hyperparams.shown:
            self.take_hyperparams()
        program, state = self.placed
        program.check_alive(state)
        if step is None:
            step, (after, vector) = self.called.call_first(program, state, batch, self.line)
        else:
            if step.captured:
                check_captured(step.captured, "loss_fn" if self.task.grad_fn is None else "grad_fn")
            after, vector = program.call_train(state, batch.groups, np.uint32(batch.n_examples))
        if self._is_lent:
            state.delete_donated()
        self._state, self.newest_step, self._is_lent = after, step, False
        self.step += 1
        self.n_examples += batch.n_examples
        if epoch is not None:
            self.position = Position(epoch.fit, epoch.epoch, batch.position, batch.state)
        deployer.watch.beat(self.step)
        work = None if step.work is None else step.work * batch.counted_share
        n_epochs = None if epoch is None else epoch.epoch + 1
        self.metrics.add(Queued(self.step, n_epochs, program.metric_names, vector, replace(batch, groups=()), work), self)
        if is_first:  # read late, the steps around a compilation would count in the rates without their time
            self.flush()

    def flush(self) -> None:
        """Waits for the device, and reads, checks and records the metrics of every step."""
        self.metrics.read_all(self)

    @contextmanager
    def showing(self, line: ProgressLine) -> Iterator[None]:
        """A context in which a line shows the progress."""
        before, self.line = self.line, line
        try:
            with line:
                yield
        finally:
            self.line = before

    def compiled(self, batch: Batch) -> jax.stages.Compiled:
        """Returns the compiled train step for a batch."""
        self.place(batch.micro_batch)
        program, state = self.placed
        return program.train_step.lower(*program.train_args(state, batch.groups, np.uint32(batch.n_examples))).compile()

    def to_predict(self, make_plan: Callable[[PyTree, PyTree], Plan]) -> tuple[PyTree, PyTree, Plan]:
        """Returns the model, the state of its layers and the plan that a Predictor of this trainer uses: of `make_plan`, if
        nothing was computed before."""
        is_planned = self.task.plan is not None or (self.program is not None and self.program.plan.is_traced)
        self.place(plan=None if is_planned else make_plan(*self.trees))
        return self.eval_model, self.trees[1], self.placed[0].plan

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint: now, or if the model is not placed yet, when it is.

        Raises ValueError if it belongs to another model or optimizer; the values are then unchanged.
        """
        if self.program is None and checkpoint.base is None:
            program = make_program(self.task, make_plan(self.trees[0], self.deployer.mesh), *self.trees)
            match_state(program, program.state, checkpoint)
            self.pending = checkpoint
            return
        self.place()
        program, state = self.program, self._state
        assert program is not None
        if state is None:
            state = given_state(program, program.model(program.state), self.stream, None)
        self._read(checkpoint, program, state)
        self.metrics.forget()

    def _read(self, checkpoint: Checkpoint, program: Program, state: TrainState) -> None:
        """Loads a checkpoint in place of a state. Its arrays are deleted, once the checkpoint is known to match."""
        with checkpoint.explained():
            match_state(program, state, checkpoint)
            self.program, self._state, self._given = program, None, (None, None)  # nothing keeps what is freed
            self._state = load_state(program, state, checkpoint)
        if checkpoint.opt_states:  # decide between its hyperparameters and those of the script
            self.hyperparams.match(program, self._state, checkpoint.record["hyperparams"], self.deployer.console.info)

    def continue_from(
        self, step: int, n_examples: int, position: Position, n_skipped: int, metrics: dict[str, float]
    ) -> None:
        """Sets the counts and the newest metrics, as a checkpoint records them."""
        self.step, self.n_examples, self.position = step, n_examples, position
        self.metrics.n_skipped, self.metrics.last = n_skipped, metrics
        self.metrics.forget()

    def use_stream(self, n: int) -> None:
        """Continues with the stream of keys of this number."""
        self.stream = np.array([self.stream[0], n], self.stream.dtype)
        if self._state is not None:
            self._state = replace(self._state, stream=put(self.stream, replicated(self.deployer.mesh)))
