"""The engine: one model and its optimizer on a mesh. It plans, places, updates, saves and restores them.

Evaluations are in `_evaluation.py`; epochs, callbacks and the schedule of evaluations and saves in `_loop.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from .._origins import CHANGED, origin_of, set_origin
from .._version import __version__
from ..checkpoint import Base, CheckpointFolder, Checkpoints, is_worth_naming
from ..data import Batch, BatchSize, Prefetch, Slice, batches, collated_shapes, size_of
from ..dims import UNKNOWN, RowUse
from ..errors import DamagedError, check_alive, warn
from ..machine import FSDP, MODEL, as_shapes, chip_of_kind, put, replicated
from ..memory import SearchSpace, Strategy, choose, levels_of
from ..monitor import ProgressLine
from ..optimizers import find_hyperparam, with_new_copies
from ..partition import Plan
from ..storage import AtEnd, Location, location
from ._agreement import agree_on_opt_state, agree_on_trainer, check_rows
from ._callbacks import Callbacks, arrays_of, states_of_record, states_to_record
from ._calls import Calls
from ._header import eval_text, header_rows, loss_rows
from ._hyperparams import Hyperparams
from ._loss import n_rows
from ._metrics import Metrics, Update
from ._nonfinite import explain_nonfinite
from ._program import Program, shard_bytes
from ._progress import Position, Progress, check_record, numbers_of_record, plain_numbers
from ._recipe import Recipe
from ._run import Run
from ._state import TrainState
from ._work import counted_share, work_of


class _Pending(NamedTuple):
    """A checkpoint to load once the model is placed."""

    path: Location
    hyperparams: Mapping[str, Any]  # as for `Hyperparams.match`
    base: Base | None  # the leaves that it does not hold


class Engine:
    """The state of training, with the updates and checkpoints of it.

    **Arguments:**

    - `run`: the devices, processes, folder and console.
    - `recipe`: how the model is trained.
    - `model`, `model_state`: arrays, or their shapes in a dry run.
    - `max_skipped`: the number of updates that may be skipped in a row.
    - `name`: tells the engines of a run apart: the prefix of metrics, and the folder of checkpoints.

    **Attributes:**

    - `step`: the number of updates so far.
    - `kept_step`: the step of the newest save, or of the checkpoint that was loaded.
    - `plan`: how the model is split; None until something was computed.
    - `progress`: the position in the fits.
    - `n_fits`: the number of finished fits.
    - `begun_fit`: the index of the fit that this process began last.
    - `follows`: whether `progress.position` belongs to this script's fits; None until a fit has looked for an earlier run.
    - `calls`: calls the compiled steps of the model.
    - `metrics`: the metrics of its updates.
    - `callbacks`: the callbacks of the running fit; None outside a fit.
    - `callback_states`: the callbacks' states of the fit that was resumed, interrupted or ended last.
    - `stop_requested`: whether the fit is to stop after this step.
    - `hyperparams`: the hyperparameters in the optimizer's state.
    - `is_updating`: whether updates are in progress.
    - `update_line`: measures the updates of a user's own loop, from one to the next.
    - `stream`: from which each step derives its key (`Run.next_stream`).
    - `given`: the model and the state of its layers until they are placed; None afterwards.
    - `checkpoints`: the checkpoints of the workdir; None without one.
    - `warned`: damaged checkpoints that the user has been warned about.
    """

    def __init__(self, run: Run, recipe: Recipe, model: PyTree, model_state: PyTree, max_skipped: int, name: str | None):
        self.run = run
        self.recipe = recipe
        self.name = name
        self.step = self.kept_step = 0
        self.plan = recipe.plan
        self.progress = Progress()
        self.n_fits = 0
        self.begun_fit: int | None = None
        self.follows: bool | None = None
        self.calls = Calls(run)
        self.metrics = Metrics(self.record, run.console.info, recipe.skips, max_skipped)
        self.callbacks: Callbacks | None = None
        self.callback_states: dict[str, dict[str, Any]] = {}
        self.stop_requested = False
        self.hyperparams = Hyperparams()
        self.is_updating = False
        self.update_line = run.console.progress(title="update")
        self.warned: set[Location] = set()
        self._keep_last = 2  # as in the newest save
        self.stream = run.next_stream()
        self.given: tuple[PyTree, PyTree] | None = (model, model_state)
        self._train_state: TrainState | None = None  # set once the model is placed
        frozen = zip(recipe.parts.names[1], map(origin_of, recipe.parts.take(model)[1]), strict=True)
        self._origins = {name: origin for name, origin in frozen if origin is not None}
        self._base: Base | None = None  # of the checkpoints that are saved, or of the loaded one
        self._is_planned = False  # from the loss of a batch, not only from the order of the fields
        self._pending: _Pending | None = None
        self._has_chosen = False  # a strategy that fits, with `memory="auto"`
        if recipe.pool.n:
            AtEnd(self, recipe.pool.close)
        self.checkpoints = None
        if run.workdir is not None:
            self.checkpoints = Checkpoints(
                run.workdir / "ckpts" / (name or ""),
                run.peers,
                run.console.info,
                run=run,
                before_commit=run.upload,
                root=run.workdir,
            )
            run.preemption.keep(self)

    # --- the model on the mesh -------------------------------------------------------------------------------------------

    @property
    def is_placed(self) -> bool:
        """Whether the model is on the mesh."""
        return self._train_state is not None

    @property
    def must_compile(self) -> bool:
        """Whether the train step has to compile for any batch."""
        return self._train_state is None or not self.calls.has_called(self._train_state.program.train_step)

    @property
    def state(self) -> TrainState:
        """The arrays that training carries. The model must be placed."""
        assert self._train_state is not None, "placed"
        if not self._train_state.is_loaded:
            raise ValueError(
                "`trainer`: expected its values, got none: they were freed for a checkpoint that then could not be read. "
                "Load one that is complete with `load_ckpt`, or create the Trainer again."
            )
        return self._train_state

    @property
    def trees(self) -> tuple[PyTree, PyTree]:
        """The model and the state of its layers. A pending restore is ignored."""
        return self.given if self.given is not None else (self.state.model, self.state.model_state)

    @property
    def current(self) -> tuple[PyTree, PyTree]:
        """The model and the state of its layers. A pending restore is done first."""
        if self._pending is not None:
            self.place()
        return self.trees

    @property
    def eval_model(self) -> PyTree:
        """The model that is evaluated and saved. A pending restore is done first."""
        model = self.current[0]
        return model if self._train_state is None else self.state.eval_model

    def with_origins(self, model: PyTree) -> PyTree:
        """Notes which of the model's arrays training changes, and where the others come from; returns the model."""
        if self._train_state is not None:
            trained, frozen = self.recipe.parts.take(model)
            for array in trained:
                set_origin(array, CHANGED)
            for name, array in zip(self.recipe.parts.names[1], frozen, strict=True):
                if name in self._origins:
                    set_origin(array, self._origins[name])
        return model

    @property
    def precision(self) -> str:
        """A description of the dtypes of a step."""
        return self.recipe.compute.precision.describe([leaf.dtype for leaf in self.recipe.parts.take(self.trees[0])[0]])

    @property
    def opt_state(self) -> PyTree:
        """The optimizer state; in a dry run its shapes."""
        if self.run.is_dry_run:
            return as_shapes(self.recipe.opt_shapes(self.current[0]))
        self.place()
        self.hyperparams.take_written(self.state, self.run.peers)
        return self.hyperparams.show(self.state.opt_tree)

    def set_hyperparams(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters in the optimizer's state, for the next update."""
        if self.run.is_dry_run:
            shapes = self.recipe.opt_shapes(self.trees[0])
            for name in values:
                find_hyperparam(shapes, name)
            return
        self.place()
        self.hyperparams.is_running |= self.callbacks is not None
        self.hyperparams.take_written(self.state, self.run.peers)
        self.hyperparams.set(self.state, values, self.run.peers)

    def place(self, batch: PyTree | None = None, first: Batch | None = None) -> None:
        """Makes the plan and the program, places the model, and creates or restores the optimizer state.

        Done once, at first use, with the plan of the loss. If the trainer is used before the first batch (to predict, or to
        load a checkpoint), the arrays are first placed by the order of the model's fields, and are resharded by the loss's
        plan at the first batch.

        **Arguments:**

        - `batch`: the shapes of a micro-batch; with None, no loss is traced.
        - `first`: the batch of the next update, whose step compiles while the model is placed.
        """
        if self._train_state is not None and (self._is_planned or batch is None):
            return
        self.run.need_values("trainer")
        if self._train_state is None:
            self._agree()
        trace = None if batch is None else self.recipe.trace(*self.trees, batch)
        plan = self.recipe.plan_on(self.run.mesh, self.trees[0], trace)
        before = {} if self.plan is None else self.plan.leaves
        is_same = all(plan.leaves[name].spec == leaf.spec for name, leaf in before.items())
        has_kinds = self.plan is None or plan.kinds_of_loss == self.plan.kinds_of_loss  # masks depend on them
        self.plan, self._is_planned = plan, batch is not None
        if self._train_state is None:
            program = None if first is None else self._compile_ahead(plan, first)
            pending = self._pending
            with nullcontext() if pending is None else self._resuming(pending.path):
                self._train_state = self._make_state(program or self.recipe.program(plan, *self.trees))
                self.given = None
                self._restore()
            if pending is None:
                self.hyperparams.begin(self.state)
            else:
                self._match_hyperparams(pending.hyperparams)
            agree_on_opt_state(self.run.peers, self.state.opt_tree)
            run, state = self.run, self.state
            rows = header_rows(run, self.recipe, plan, state, trace, self.precision)
            run.console.header(rows)
            run.console.records.begin(rows, plan.explain)
            return
        if not is_same or not has_kinds or self.recipe.rows != UNKNOWN:
            self._train_state.move(self.recipe.program(plan, *self.trees), is_new=self.step == 0)
        if not is_same:
            self.run.console.info(f"plan: {plan.summary()}; now in the order of the loss")
        for name, text in loss_rows(self.recipe, plan, self.state, trace).items():  # the header was printed without a loss
            self.run.console.info(f"{name}: {text}")

    def place_for(self, batch: Batch, *, is_update: bool = False) -> None:
        """Calls `place` with the shapes of this batch.

        **Arguments:**

        - `is_update`: whether the batch is that of the next update.
        """
        if self._train_state is None or not self._is_planned:  # every step calls this: make shapes only if needed
            self.place(batch.micro_batch, batch if is_update else None)

    def _compile_ahead(self, plan: Plan, batch: Batch) -> Program | None:
        """Starts to compile the train step for a batch, and returns its program; None if another program may run.

        `memory="auto"` may change the program, and several processes agree on it first.
        """
        if self.run.peers.n > 1 or self.recipe.compute.memory is not None:
            return None
        program = self.recipe.program(plan, *self.trees)
        shapes = program.train_shapes(batch.groups, np.uint32(batch.n_examples))
        self.calls.compile_ahead(program.train_step, shapes, batch.signature)
        return program

    def _make_state(self, program: Program) -> TrainState:
        """Returns the state of step 0; if a checkpoint is to be restored, the shapes to load it into."""
        model, state = self.trees
        if self._pending is None:
            return TrainState.of(self.recipe.parts, program, model, state, self.stream)
        base = self._pending.base
        train_state = TrainState.to_load(self.recipe.parts, program, model, self.stream, base)
        train_state.match(
            self.need_checkpoints(), self._pending.path, base, opt_state=True
        )  # before the given values are freed
        return train_state

    def _agree(self) -> None:
        """Checks that the arrays still exist, and that the trainers of all processes agree."""
        model, state = self.trees
        check_alive(model, "model")  # another trainer may have donated the arrays of `deployer.init`
        settings = {"accumulate_grad_batches": self.recipe.accumulate, "precision": self.precision}
        agree_on_trainer(self.run, model, state, {**settings, "trained leaves": len(self.recipe.parts.names[0])})

    def record(self, metrics: Mapping[str, Any], step: int, speed: Mapping[str, float] | None = None) -> None:
        """Records one row of metrics, under the name of this engine."""
        prefix = "" if self.name is None else f"{self.name}/"
        named, rates = ({f"{prefix}{name}": x for name, x in of.items()} for of in (metrics, speed or {}))
        self.run.console.metrics(named, step, speed=rates)

    # --- updates -----------------------------------------------------------------------------------------------------

    def batch_size(self, per_device: int | None, total: int | None, n_devices: int | None = None) -> BatchSize:
        """Returns the sizes of an update's batch, from the arguments of `fit`."""
        return BatchSize.of(self.run.mesh, per_device, total, self.recipe.accumulate, n_devices=n_devices)

    def batches(
        self, steps: Iterable[Slice], size: BatchSize, *, inference: bool = False, checks_end: bool = False
    ) -> Prefetch:
        """Returns the batch of each step, prepared ahead by a thread. Close it after use.

        **Arguments:**

        - `inference`: whether they are batches of an evaluation.
        - `checks_end`: whether the processes compare where the steps end, since the number of examples is unknown.
        """
        self.run.n_passes += 1
        check = None if self.run.peers.n == 1 else partial(check_rows, self.run.peers, self.run.n_passes)
        known = self.recipe.eval_rows if inference else self.recipe.rows
        use = known or partial(self._find_row_use, size, inference)
        return batches(steps, self.recipe.pool, size, self.run.mesh, check, use=use, checks_end=checks_end)

    def even_eval_size(self, examples: Any, size: BatchSize) -> BatchSize:
        """Returns the sizes of an evaluation's batch: these, or those of `BatchSize.evenly` where the loss allows them."""
        recipe, n, n_devices = self.recipe, size_of(examples), self.run.mesh.size
        use = recipe.eval_rows
        if use is None and size.evenly(n, n_devices).examples != size.examples:  # so it matters what the loss does
            first = [examples[i] for i in range(size.examples)]
            with closing(Prefetch(map(partial(collated_shapes, recipe.collate_fn), [first]))) as shapes:
                use = recipe.row_use(*self.trees, next(shapes), inference=True)
        return size.evenly(n, n_devices, use or UNKNOWN)

    def _find_row_use(self, size: BatchSize, inference: bool, batch: PyTree) -> RowUse:
        """Finds what the loss does with the rows of a batch, given as shapes; warns of micro-batches that do not divide."""
        use = self.recipe.rows or self.recipe.row_use(*self.trees, batch)
        self.recipe = replace(self.recipe, rows=use)
        if inference:
            use = self.recipe.row_use(*self.trees, batch, inference=True)
            self.recipe = replace(self.recipe, eval_rows=use)
            if text := eval_text(use):
                self.run.console.info(text)
        n_shards, rows = self.run.n_batch_shards, size.micro_batch_for(use, self.run.mesh)
        if use.kind == "mixed" and rows % n_shards and n_rows(batch) == size.examples:
            warn(
                f"`batch_size`: expected micro-batches of a multiple of {n_shards} rows, so that each device computes its "
                f"share, got {rows}. The loss mixes rows{f' at {use.line}' if use.line else ''}, so they are not cut, and "
                f"every device computes all of them. Choose a multiple of {n_shards * size.asked}."
            )
        return use

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which a scheduler's signal waits. Raises ValueError for an update inside another one."""
        if self.is_updating:
            raise ValueError(
                "`fit`, `train`: expected to be called one after the other, got one inside the other. "
                "Call it after the first has ended."
            )
        self.is_updating = True
        with self.run.preemption.held():
            try:
                yield
            finally:
                self.is_updating = False

    def update(self, batch: Batch, line: ProgressLine, position: Position | None = None) -> None:
        """Queues one update. The device may still be computing it afterwards, and the newest metrics may be unread: `flush`
        waits for both. Step and position change together, so that a checkpoint saved at any time is consistent.

        **Arguments:**

        - `position`: in a fit, the position after this update.
        """
        self.run.peers.check()
        if self.checkpoints is not None:
            self.checkpoints.check()
        self.run.claim_records(self)
        self.place_for(batch, is_update=True)
        self.hyperparams.is_running = True
        self.hyperparams.take_written(self.state, self.run.peers)
        # Read late, the steps around a compilation would count in the rates without their time.
        if compiles := not self.calls.has_called(self.state.program.train_step, batch.signature):
            self.flush(line)
            self._choose_memory(batch, line)
        assert self.plan is not None
        program, plan, args = self.state.program, self.plan, self.state.train_args(batch)
        count = lambda: work_of(self.recipe, plan, *self.trees, program.train_step, args)  # noqa: E731
        outs, work = self.calls.train(program.train_step, args, batch, line, plan, count)
        vector = self.state.advance(outs)
        self.step += 1
        self.progress.n_examples += batch.n_examples
        if position is not None:
            self.progress.position = position
        self.run.watch.beat(self.step)
        epoch, work = None if position is None else position.epoch, work * counted_share(batch)
        update = Update(self.step, epoch, program.metric_names, vector, replace(batch, groups=()), work)
        self.metrics.add(update, line, self.progress, self._explain_nonfinite)
        if compiles:
            self.flush(line)

    def _choose_memory(self, batch: Batch, line: ProgressLine) -> None:
        """With `memory="auto"`: chooses the first strategy whose train step fits into memory, before a new program runs.

        Each program is compiled once: the compiled step whose memory was checked is the one that runs.
        """
        run, recipe = self.run, self.recipe
        if recipe.compute.memory is None or recipe.grad_fn is not None:
            return
        own = self._strategy(batch)

        def compiled(strategy: Strategy) -> jax.stages.Compiled:
            if strategy != own:
                self._use_strategy(strategy, recipe)
            with line.compiling("train step"):
                return self.compiled(batch)

        opt_state = 0 if recipe.compute.offload_opt_state else shard_bytes(self.state.opt_state)
        with run.watch.paused():
            space = partial(self._search_space, own, batch)
            tried, text = choose(own, run.mesh, run.peers, compiled, space, opt_state)
        if tried and (tried[-1].strategy != own or not tried[-1].fits or not self._has_chosen):
            run.console.info(text)
        self._has_chosen |= bool(tried)

    def _strategy(self, batch: Batch) -> Strategy:
        """Returns the strategy of this run for a batch."""
        recipe, compute, mesh = self.recipe, self.recipe.compute, self.run.mesh
        rows = max(1, n_rows(batch.micro_batch) // self.run.n_batch_shards // recipe.n_parts)
        n_micro_batches, remat = recipe.accumulate * recipe.n_parts, compute.remat_level
        shards = mesh.shape[MODEL], mesh.shape[FSDP]
        return Strategy(*shards, rows, n_micro_batches, remat, compute.unroll, compute.offload_opt_state)

    def _search_space(self, own: Strategy, batch: Batch, limit: int) -> SearchSpace:
        """Returns the strategies that make the same update on this mesh."""
        recipe, args, mesh = self.recipe, self.state.train_args(batch), self.run.mesh
        assert self.plan is not None
        plan, device = self.plan, mesh.devices.flat[0]

        def trace(remat: str, unroll: bool) -> Any:
            compute = replace(recipe.compute, remat=remat, unroll=unroll and own.unroll)
            return replace(recipe, compute=compute).program(plan, *self.trees).train_step.trace(*args).jaxpr.jaxpr

        remat, flops, unrolls = levels_of(own.remat, trace, device.platform)
        sizes = self.state.program.sizes
        return SearchSpace(
            replace(own, remat=remat),
            mesh.size,
            flops,
            sizes.weights,
            sizes.state,
            limit,
            chip_of_kind(device.device_kind),
            opt_state=0 if device.platform == "cpu" else sizes.opt_state,
            unrolls=unrolls,
            rows=recipe.rows or UNKNOWN,
            has_state=recipe.has_state,
            is_running=True,
        )

    def _use_strategy(self, strategy: Strategy, given: Recipe) -> None:
        """Switches from a given recipe to the train step of a strategy."""
        changed = {name: getattr(strategy, name) for name in ("remat", "unroll", "offload_opt_state")}
        n_parts = strategy.accumulate_grad_batches // given.accumulate
        self.recipe = replace(self.recipe, compute=replace(self.recipe.compute, **changed), n_parts=n_parts)
        self.state.move(self._program_with_eval(self.state.program))

    def _program_with_eval(self, old: Program) -> Program:
        """Returns the program of the changed recipe, with the old evaluation step, which need not compile again."""
        assert self.plan is not None
        new = self.recipe.program(self.plan, *self.trees)
        return replace(new, eval_step=old.eval_step, eval_names=old.eval_names)

    def flush(self, line: ProgressLine) -> None:
        """Waits for the device, and reads, checks and records the metrics of every step."""
        self.metrics.read_all(line, self.progress, self._explain_nonfinite)

    def compiled(self, batch: Batch) -> jax.stages.Compiled:
        """Returns the compiled train step for a batch."""
        self.place_for(batch)
        args = self.state.train_args(batch)
        return self.state.program.train_step.lower(*args).compile()

    def _explain_nonfinite(self, update: Update) -> str:
        """Names the last good checkpoint, and what makes the loss of an update not finite."""
        if self.checkpoints is not None:
            self.checkpoints.wait()
        index = {} if self.checkpoints is None else self.checkpoints.index()
        last = f"The last good checkpoint is {index['last']}." if "last" in index else "Nothing was saved yet."
        if not update.has_weight:
            return (
                f"{last} The sum of `Loss.weight` over the update is 0, as if every row or token were masked: leave such "
                "examples out, or pass a larger batch size."
            )
        rows, places = update.batch.rows, update.batch.places
        return f"{last} {explain_nonfinite(rows, places, lambda: self.recipe.trace(*self.trees, rows))}"

    def predictor_source(self) -> tuple[PyTree, PyTree, Plan]:
        """Returns the model, the state of its layers and the plan that a Predictor of this trainer uses."""
        if self.run.is_dry_run:
            return *self.trees, self.recipe.plan_on(self.run.mesh, self.trees[0], None)
        self.place()
        assert self.plan is not None
        return self.eval_model, self.current[1], self.plan

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def need_checkpoints(self) -> Checkpoints:
        """Returns the checkpoints of the workdir, after a running background save has ended."""
        if self.checkpoints is None:
            raise ValueError("`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`.")
        self.checkpoints.wait()
        return self.checkpoints

    def save(
        self,
        tags: Sequence[str],
        *,
        metrics: Mapping[str, float],
        keep_last: int,
        save_opt_states: bool,
        save_float_dtype: Any,
        then: Callable[[Location], None] | None = None,
    ) -> Location:
        """Saves the current step; returns the checkpoint's folder.

        **Arguments:**

        - `tags`: its names in the index, in addition to `"last"`.
        - `then`: called after a background save, see `Checkpoints.save`.
        """
        if self.run.is_dry_run:
            return self.need_checkpoints().folder / f"step_{self.step:08d}"  # writes nothing
        self.place()
        self.hyperparams.take_written(self.state, self.run.peers)
        # The metrics of the newest updates may be unread, for example if a tracker saves.
        last_metrics, n_skipped = self.metrics.newest_unread(self.progress.n_skipped, self._explain_nonfinite)
        record = {
            "redeqx": __version__,
            "step": self.step,
            **self.progress.to_record(),
            "n_skipped": n_skipped,
            "learning_rate": plain_numbers(last_metrics.get("learning_rate")),
            "seed": self.run.seed,
            "stream": int(self.stream[1]),
            "n_keys": self.run.n_keys,
            "mesh": dict(self.run.mesh.shape),
            "metrics": plain_numbers(dict(metrics)),
            "train_metrics": plain_numbers(last_metrics),
            "hyperparams": self.hyperparams.record,
        }
        checkpoints = self.need_checkpoints()
        trees = self.state.trees(self.state.eval_model, opt_state=save_opt_states)
        if self.state.frozen:
            record["trained"] = list(self.recipe.parts.names[0])
        states = self.callback_states if self.callbacks is None else self.callbacks.states()
        record["callbacks"] = states_to_record(states)
        if arrays := arrays_of(states):
            trees["callbacks"] = arrays
        if (base := self._find_base()) is not None:
            record["base"] = base.folders
            trees["model"] = base.without(trees["model"])
        with self.run.preemption.held():
            path = checkpoints.save(self.step, trees, record, ["last", *tags], keep_last, save_float_dtype, then)
            self.progress.saved, self.kept_step, self._keep_last = (self.step, self.progress.position), self.step, keep_last
        if self.callbacks is not None:
            self.callbacks.call_on_save(path, checkpoints)
        return path

    def _find_base(self) -> Base | None:
        """Returns the frozen leaves that a checkpoint need not hold, since a known folder does; None if there are none."""
        leaves, frozen = self.state.leaves, self.recipe.parts.names[1]
        origins = {name: self._origins[name] for name in frozen if self._origins.get(name, CHANGED) != CHANGED}
        if not is_worth_naming(origins, leaves):
            return None
        if self._base is None or self._base.origins != origins:
            self._base = Base.of(origins, leaves)
            n, folders = len(leaves) - len(origins), ", ".join(self._base.folders)
            self.run.console.info(f"checkpoints hold {n} leaves; the other {len(origins)} are those of {folders}")
        return self._base

    def _note_base(self, base: Base | None) -> None:
        """Notes where frozen leaves come from, after a checkpoint with this base was loaded: all others were in it."""
        changed = {name: origin for name, origin in self._origins.items() if origin == CHANGED}
        self._origins, self._base = {**changed, **({} if base is None else base.origins)}, base

    def is_unsaved(self) -> bool:
        """Whether updates were made since the newest save, by a fit or by a loop that resumes or saves."""
        resumes = self.follows is not None or self.progress.saved is not None
        return resumes and self.step != self.kept_step and self._train_state is not None and self._train_state.is_loaded

    def save_to_resume(self) -> int:
        """Saves the newest step with all that resuming needs, and waits until it is on disk; returns the step."""
        self.save([], metrics={}, keep_last=self._keep_last, save_opt_states=True, save_float_dtype=None)
        self.need_checkpoints().wait()
        return self.step

    def end_if_preempted(self, line: ProgressLine) -> None:
        """Outside of a fit, after an update: saves it and ends the script if the run is preempted."""
        if self.checkpoints is not None and self.run.preemption.is_due_outside(self.step):
            self.flush(line)
            self.run.preemption.end_outside()

    def load(self, name: str | Location, *, opt_states: bool) -> None:
        """Loads a checkpoint. Its files are verified before any current value is freed.

        **Arguments:**

        - `name`: as for `Checkpoints.resolve`.
        - `opt_states`: whether to load the optimizer state, the step and the progress too.
        """
        if self.is_updating:
            raise ValueError("`load_ckpt`: expected after `fit` or `train`, got called inside it. Call it afterwards.")
        checkpoints: CheckpointFolder
        if self.checkpoints is None and (not isinstance(name, str) or "/" in name):  # a path needs no workdir
            checkpoints = CheckpointFolder(location(name, "checkpoint").parent, self.run.peers, self.run.console.info)
        else:
            checkpoints = self.need_checkpoints()
        path = checkpoints.resolve(name)
        # Whether this script skipped fits that an earlier run had finished, and that run stopped within the next fit.
        is_ahead = bool(self.follows and opt_states and 0 < self.n_fits <= self.progress.position.fit)
        is_ahead &= self.progress.position != Position(self.n_fits) and self.begun_fit != self.n_fits
        record = checkpoints.record(path)
        if opt_states:
            check_record(path, record)
        pending, self._pending = self._pending, None
        self.place()
        assert self._train_state is not None
        steps = (record["step"], record.get("n_skipped", 0))
        states = states_of_record(record.get("callbacks", {}), checkpoints, path) if opt_states else {}
        try:
            base = Base.of_record(record)
            self._train_state.load(checkpoints, path, steps if opt_states else None, base)
            self._note_base(base)
        except ValueError:
            # Such as another model's checkpoint: the pending one stays valid.
            if pending is not None and self._train_state.is_loaded:
                self._pending = pending
                with self._resuming(pending.path):
                    self._restore()
                self._match_hyperparams(pending.hyperparams)
            raise
        self.metrics.forget()
        if opt_states:
            self.step = self.kept_step = record["step"]
            self._continue_from(record, states)
            self._match_hyperparams(record["hyperparams"])
        else:  # master copies and averages of the old parameters would bring these back at the next step
            train_state = self._train_state
            trained = train_state.parts.trained_tree(train_state.trained)
            train_state.opt_state = jax.tree.leaves(with_new_copies(train_state.opt_tree, trained))
        if is_ahead and path.parent == checkpoints.folder:
            self.follows = None  # the next fit resumes the part of it that an earlier run has done
        elif self.follows is None and path.parent == checkpoints.folder:
            self.follows = False  # the next fit begins from this checkpoint, not from the newest

    def resume_from(self, path: Location, record: Mapping[str, Any]) -> None:
        """Loads a checkpoint of an earlier run: now, or when the model is placed for the first batch."""
        self.step, self.follows = record["step"], True
        self.kept_step = self.step
        self.run.n_keys = max(self.run.n_keys, record["n_keys"])  # a key that was used is not returned again
        self.metrics.forget()
        with self._resuming(path):
            states = states_of_record(record.get("callbacks", {}), self.need_checkpoints(), path)
        self._continue_from(record, states)
        base = Base.of_record(record)
        pending = self._pending = _Pending(path, record["hyperparams"], base)
        if self._train_state is not None:
            with self._resuming(pending.path):
                self._restore()
            self._match_hyperparams(pending.hyperparams)

    def _continue_from(self, record: Mapping[str, Any], states: dict[str, dict[str, Any]]) -> None:
        """Restores progress, the stream of keys, callback states and last metrics from a checkpoint's record."""
        self.progress, self.callback_states = Progress.of_record(record), states
        self.metrics.last = numbers_of_record(record.get("train_metrics", {}))
        if record["seed"] == self.run.seed and record.get("stream") is not None:
            # The script may have drawn more keys, or fewer, before it made this trainer.
            self.stream = np.array([self.stream[0], record["stream"]], self.stream.dtype)
            if self._train_state is not None:
                self._train_state.stream = put(self.stream, replicated(self.run.mesh))

    def _match_hyperparams(self, saved: Mapping[str, Any]) -> None:
        """Decides between the hyperparameters of a loaded state and those of the script."""
        self.hyperparams.match(self.state, saved, self.run.console.info)

    def _restore(self) -> None:
        """Loads the pending checkpoint, if there is one, within `_resuming`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            assert self._train_state is not None
            steps = (self.step, self.progress.n_skipped)
            self._train_state.load(self.need_checkpoints(), pending.path, steps, pending.base)
            self._note_base(pending.base)

    @contextmanager
    def _resuming(self, path: Location) -> Iterator[None]:
        """Explains an error as one of resuming from a checkpoint."""
        try:
            yield
        except ValueError as error:
            # A later fit finds that run again, and does not overwrite it.
            self.step, self.progress, self.follows = 0, Progress(), None
            self._pending, self.callback_states = None, {}
            if isinstance(error, DamagedError):
                raise
            raise ValueError(
                f"`workdir`: expected a run that this trainer can continue, got {path}, which it cannot: {error} "
                "For a new run choose another workdir."
            ) from error
