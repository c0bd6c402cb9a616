"""The Trainer: a model, an optimizer and a loss; one update after another, on any mesh.

It holds the state of training and takes single passes over examples. A whole run, with its epochs, evaluations,
checkpoints and resumption, is `training`.
"""

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ._deployer import Deployer
from ._fit import DamagedCheckpoint, Fit, Options, Position, Standing, check_record
from ._predictor import Predictor
from ._tree import map_named, named_leaves
from .checkpoint import Checkpoints, array_leaves, file_size
from .compiled import checked as checked_work
from .data import Batch, BatchSize, Prefetch, Slice, batches, check_examples, collated_shapes, size_of, slices
from .distributed import Peers, agree_on_program, agree_on_values
from .dry_run import DryRun, DryRunDone, dry_run
from .errors import (
    DamagedError,
    check_alive,
    check_count,
    check_function,
    check_model,
    check_model_function,
    check_optimizer,
    explained,
    plainly,
)
from .machine import FSDP, MODEL, as_shapes, describe, dry, of_devices
from .monitor import Progress
from .partition import Plan, mark_read
from .tracing import Change, Trace
from .training import (
    Functions,
    Job,
    Parts,
    Program,
    Setting,
    TrainState,
    as_sums,
    make_program,
    shard_bytes,
    why_nonfinite,
)

_FEW = 2**10  # numbers in a leaf of an optimizer's state that is no parameter's
# Metrics are read this many steps late, so that the device always has a step queued while the host reads.
_LAG = 2


class Trainer:
    """Trains an Equinox model on the deployer's mesh.

    Numbers do not depend on the mesh, on micro-batches or on a restart. Arrays of `model` are copied to the mesh at first
    use, when a batch is at hand; those that `deployer.init` made are taken over, and deleted by the first update.

    **Arguments:**

    - `deployer`: the devices.
    - `model`: an Equinox module. In evaluation and prediction it is switched by `eqx.nn.inference_mode`.
    - `optimizer`: an optax transformation; one update is one *step*.
    - `collate_fn`: a list of examples to a PyTree of numpy arrays with a row an example.
    - `loss_fn`: `(model, batch, key)` to a scalar, the mean over the rows of the batch, or to a `redeqx.Loss`. With
        `model_state`: `(model, state, batch, key)` to `(loss, state)`.
    - `model_state`: of layers that have one (`eqx.nn.BatchNorm`), as `eqx.nn.make_with_state` gives it.
    - `trainable`: which leaves are trained: a function of a leaf, or a PyTree of booleans in the model's structure.
    - `lr_schedule_fn`: of steps; only logged. Give the same to the optimizer.
    - `accumulate_grad_batches`: micro-batches a step.
    - `compute_dtype`: floating leaves of the model are cast to it for the loss; parameters and updates keep theirs. The
        batch is left alone: cast floating inputs in `loss_fn`.
    - `grad_fn`: `(model, batch, key)` (with `model_state` after `model`) to `(loss, grads)`, in place of the gradient of
        `loss_fn`; `grads` is of the loss that it returns, `total / weight`, and has the model's structure. With
        `model_state` it returns `((loss, state), grads)`.
    - `plan`: how the model is split; `deployer.plan(model, loss_fn, batch)` with the first batch by default.
    - `on_nonfinite`: what becomes of a step whose loss or gradient is not finite: `"raise"` ends training; `"skip"` leaves
        parameters and optimizer state as they were, to the bit, and goes on with the next examples. `n_skipped` counts.
    - `max_skipped`: how many steps may be skipped one after the other; more raise.

    Raises ValueError where no leaf is trainable.
    """

    def __init__(
        self,
        deployer: Deployer,
        *,
        model: PyTree,
        optimizer: optax.GradientTransformation,
        collate_fn: Callable[[list], PyTree],
        loss_fn: Callable[..., Any],
        model_state: PyTree | None = None,
        trainable: Any = eqx.is_inexact_array,
        lr_schedule_fn: Callable[[Any], Any] | None = None,
        accumulate_grad_batches: int = 1,
        compute_dtype: Any = None,
        grad_fn: Callable[..., Any] | None = None,
        plan: Plan | None = None,
        on_nonfinite: str = "raise",
        max_skipped: int = 10,
    ):
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"`on_nonfinite`: expected 'raise' or 'skip', got {on_nonfinite!r}. Pass one of the two.")
        check_count(max_skipped, "max_skipped", 0, advice="Pass how many steps may be skipped.")
        check_count(accumulate_grad_batches, "accumulate_grad_batches")
        check_model(model)
        check_alive(model_state, "model_state")
        check_optimizer(optimizer)
        check_function(collate_fn, "collate_fn", ["examples"])
        check_model_function(loss_fn, "loss_fn", has_state=model_state is not None)
        if grad_fn is not None:
            check_model_function(grad_fn, "grad_fn", has_state=model_state is not None)
        if lr_schedule_fn is not None:
            check_function(lr_schedule_fn, "lr_schedule_fn", ["step"])
        self.deployer = deployer
        self.step = 0
        self.plan = self._own_plan = plan
        self._accumulate = accumulate_grad_batches
        self._optimizer = optimizer
        self._collate_fn = collate_fn
        self._loss_fn = explained(loss_fn, "loss_fn")
        self._has_state = model_state is not None
        self._lr_schedule_fn = lr_schedule_fn
        self._compute_dtype = compute_dtype
        self._grad_fn = None if grad_fn is None else explained(grad_fn, "grad_fn")
        self._key = deployer.next_key()
        self._parts = Parts.of(model, trainable)
        if not self._parts.names[0]:
            raise ValueError(
                "`trainable`: expected at least one trainable leaf, got none of "
                f"{len(self._parts.names[1])} arrays. Check the filter and the model."
            )
        self._given: tuple[PyTree, PyTree] | None = (model, model_state)  # until placed
        self._held: TrainState | None = None  # from then on
        self._is_planned = False  # by the loss, as a batch was at hand
        self._pending: deque[tuple[int, int | None, jax.Array, Batch]] = deque()
        self._last_metrics: dict[str, float] = {}
        self._restore_from: Path | None = None  # a checkpoint to load once placed
        self._skips = on_nonfinite == "skip"
        self._max_skipped = max_skipped
        self._n_skipped_now = 0  # one after the other, up to the newest step
        self._standing = Standing()
        self._n_fits = 0  # that have come to their end
        self._follows: bool | None = None  # whether the position is one of this script's fits; None: nobody has looked yet
        self._is_updating = False
        self._n_passes = 0  # over examples
        self._checkpoints = None
        if deployer.workdir is not None:
            self._checkpoints = Checkpoints(deployer.workdir / "ckpts", deployer.peers, deployer.log_info, run=deployer)

    # --- the state of training ---------------------------------------------------------------------------------------

    @property
    def model(self) -> PyTree:
        """The model as it is now. The next step deletes its arrays: save it, or copy what is to be kept."""
        return self._now()[0]

    @property
    def model_state(self) -> PyTree | None:
        """The state of the model's stateful layers as it is now; None where there are none."""
        return self._now()[1]

    @property
    def opt_state(self) -> PyTree:
        """The optimizer's state as it is now; in a dry run its shapes."""
        if self.deployer.is_dry_run:
            return as_shapes(self._opt_shapes())
        self._ensure_placed(None)
        return self._state.opt_tree

    @property
    def _state(self) -> TrainState:
        assert self._held is not None, "placed"
        if not self._held.is_loaded:
            raise ValueError(
                "`trainer`: expected its values, got none: they were freed for a checkpoint that then could not be read. "
                "Load one that is complete with `load_ckpt`, or make the Trainer anew."
            )
        return self._held

    def _now(self) -> tuple[PyTree, PyTree]:
        """The model and the state of its layers; what waits to be restored is restored first."""
        if self._restore_from is not None:
            self._ensure_placed(None)
        return self._trees()

    def _trees(self) -> tuple[PyTree, PyTree]:
        return self._given if self._given is not None else (self._state.model, self._state.model_state)

    def _ensure_placed(self, batch: PyTree | None) -> None:
        """Make the plan and the steps, place the model, make the optimizer's state.

        Once, at first use, and under the plan of the loss. Where something was used before a batch was at hand (a
        prediction, a checkpoint that was loaded), the arrays are placed by the model's fields first, and move to the loss's
        plan at the first batch.

        **Arguments:**

        - `batch`: the shapes of a micro-batch; None where there is none, and then no loss is traced.
        """
        if self._held is not None and (self._is_planned or batch is None):
            return
        self.deployer.need_values("trainer")
        if self._held is None:
            self._agree()
        plan = self._make_plan(batch, self.deployer.mesh)
        before = {} if self.plan is None else self.plan.leaves
        is_alike = all(plan.leaves[name].spec == leaf.spec for name, leaf in before.items())
        self.plan, self._is_planned = plan, batch is not None
        if self._held is None:
            self._held = self._make_state(self._make_program(plan))
            self._given = None
            self._compiled: set[Any] = set()
            self._restore()
            self._agree_on_opt_state()
            self._say_header()
        elif not is_alike:
            self._held.move(self._make_program(plan))
            self._compiled = set()
            self.deployer.log_info(f"plan: {plan.summary()}; now in the order of the loss")

    def _make_state(self, program: Program) -> TrainState:
        """The state of step 0; where one is to be restored, what that is to be loaded into."""
        model, state = self._trees()
        if (path := self._restore_from) is None:
            return TrainState.of(self._parts, program, model, state, self._key)
        held = TrainState.to_load(self._parts, program, model, self._key)
        with self._resuming(path):
            held.match(self._need_checkpoints(), path, opt_state=True)  # before the values that were given are let go
        return held

    def _agree(self) -> None:
        """Check that the arrays are still there, and that the trainers of all processes are alike."""
        check_alive(self._trees()[0], "model")  # another trainer may have updated the arrays of `deployer.init` since
        leaves = array_leaves(self._trees())
        self.deployer.peers.agree("model", {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in leaves.items()})
        settings = {"accumulate_grad_batches": self._accumulate, "compute_dtype": str(self._compute_dtype)}
        self.deployer.peers.agree("Trainer", {**settings, "trained leaves": len(self._parts.names[0])})
        model, state = self._trees()
        with self.deployer.watch.paused():
            agree_on_values(self.deployer.peers, "model", array_leaves(model))
            agree_on_values(self.deployer.peers, "model_state", array_leaves(state))

    def _agree_on_opt_state(self) -> None:
        """Check the numbers that an optimizer keeps in its state, as `optax.inject_hyperparams` does."""
        leaves = {name: leaf for name, leaf in array_leaves(self._state.opt_tree).items() if leaf.size <= _FEW}
        agree_on_values(self.deployer.peers, "optimizer", leaves)

    def _make_plan(self, batch: PyTree | None, mesh: Mesh) -> Plan:
        """The model's plan on a mesh: in the order of the loss where a batch's shapes are given."""
        trace = None if batch is None else self._trace(batch)
        if self._own_plan is None:
            plan = self.deployer._plan(self._trees()[0], trace, mesh=mesh)
        else:
            plan = self._own_plan.on(mesh)
            plan = plan if trace is None else mark_read(plan, trace)
        if self._grad_fn is None and all(plan[name].is_read is False for name in self._parts.names[0]):
            raise ValueError(
                "`loss_fn`: expected a loss that depends on a trainable leaf, got one that reads none of "
                f"{len(self._parts.names[0])}. Use the model that `loss_fn` is given, not one from outside."
            )
        return plan

    def _trace(self, batch: PyTree) -> Trace:
        """The loss, traced for the shapes of a batch."""
        model, state = self._trees()

        def total(model: PyTree, batch: PyTree, key: Any) -> Any:
            model = self._parts.put(*self._parts.take(model), compute_dtype=self._compute_dtype)
            out = self._loss_fn(model, *([state] if self._has_state else []), batch, key)
            out = out[0] if self._has_state and isinstance(out, tuple) else out
            return as_sums(out, jax.tree.leaves(batch)[0].shape[0])[0]

        return Trace.of(total, model, batch, jax.eval_shape(lambda: jax.random.key(0)))

    def _make_program(self, plan: Plan, *, named: bool = False, change: Change | None = None) -> Program:
        functions = Functions(
            self._parts, plan, self._loss_fn, self._has_state, self._compute_dtype, self._grad_fn, named, change
        )
        return make_program(functions, *self._trees(), self._optimizer, self._lr_schedule_fn, self._skips)

    # --- single passes -----------------------------------------------------------------------------------------------

    @plainly
    def train(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> dict[str, float]:
        """One pass over the examples, in the order that they are in; returns the last step's metrics.

        **Arguments:**

        - `examples`: anything with `len()` and integer items, or an iterable.
        - `per_device_batch_size`, `batch_size`, `drop_remainder`: as for `fit`.
        """
        size = self._size(per_device_batch_size, batch_size)
        steps = self._slices(examples, size, drop_remainder)
        if (run := dry()) is not None:
            raise DryRunDone(dry_run(self._job(next(steps), size), run.machine, **run.options))
        with self.deployer.watch.on(), self.deployer.console.progress(first_step=self.step, title="train") as progress:
            with closing(self._batches(steps, size)) as upcoming:
                for _ in self._updates(upcoming, progress):
                    pass
            self._flush(progress)
        return dict(self._last_metrics)

    def eval_loss(self, examples: Any, per_device_batch_size: int | None = None, *, batch_size: int | None = None) -> float:
        """The loss over all the examples: totals and weights are added up, and divided once.

        The same for every batch size, with a remainder too.

        **Arguments:**

        - `per_device_batch_size`, `batch_size`: rows at one position of the data and fsdp axes, or examples over all
            devices, at most; a little fewer where that leaves no remainder.
        """
        return self.eval_metrics(examples, per_device_batch_size, batch_size=batch_size)["loss"]

    @plainly
    def eval_metrics(
        self, examples: Any, per_device_batch_size: int | None = None, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """`{"loss": ...}` over all the examples, and every metric of `Loss.metrics` with it."""
        size = BatchSize.of(self.deployer.mesh, per_device_batch_size, batch_size)
        check_examples(examples, "examples")
        return self._eval_metrics(examples, size.evenly(size_of(examples), self.deployer.mesh.size))

    def _eval_metrics(self, examples: Any, size: BatchSize) -> dict[str, float]:
        steps = self._slices(examples, size)
        if self.deployer.returns_zeros("eval_loss"):
            return self._zero_metrics(next(steps))
        sums: np.ndarray | float = 0.0
        pending: deque[jax.Array] = deque()
        with self.deployer.console.progress(title="evaluate") as progress:
            with closing(self._batches(steps, size)) as batches:
                for i, batch in enumerate(batches):
                    self._ensure_placed(batch.micro_batch)
                    args = self._state.eval_args(i, batch.groups)
                    vector = self._call("eval step", self._state.program.eval_step, args, batch, progress)
                    self.deployer.watch.beat_on()
                    vector.copy_to_host_async()
                    pending.append(vector)
                    if len(pending) > _LAG:
                        sums = sums + np.asarray(pending.popleft(), np.float64)
            for vector in pending:
                sums = sums + np.asarray(vector, np.float64)
        pairs = np.asarray(sums).reshape(-1, 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            return dict(zip(self._state.program.eval_names, (pairs[:, 0] / pairs[:, 1]).tolist(), strict=True))

    def _zero_metrics(self, step: Slice) -> dict[str, float]:
        """What an evaluation of these examples returns, as zeros."""

        def metrics(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> dict[str, Any]:
            model = self._parts.put(*self._parts.take(model), inference=True, compute_dtype=self._compute_dtype)
            out = self._loss_fn(model, *([state] if self._has_state else []), batch, key)
            out = out[0] if self._has_state and isinstance(out, tuple) else out
            return as_sums(out, len(step.examples))[2]

        batch = collated_shapes(self._collate_fn, step.examples)
        found = eqx.filter_eval_shape(metrics, *self._trees(), batch, jax.random.key(0))
        return dict.fromkeys(sorted(["loss", *found]), 0.0)

    def get_default_predictor(
        self,
        pred_fn: Callable[..., PyTree],
        output_fn: Callable[[PyTree], list] | None = None,
        *,
        collate_fn: Callable[[list], PyTree] | None = None,
    ) -> Predictor:
        """A Predictor of this trainer's model as it is at each call, with its plan and `compute_dtype`.

        **Arguments:**

        - `collate_fn`: of the examples to predict, where they are others than those trained on: prompts without answers, or
            the observations that a policy acts on. The trainer's by default.
        """
        check_model_function(pred_fn, "pred_fn", has_state=self._has_state)
        predictor = Predictor(
            self.deployer,
            collate_fn=collate_fn or self._collate_fn,
            pred_fn=pred_fn,
            output_fn=output_fn,
            compute_dtype=self._compute_dtype,
        )

        def source() -> tuple[PyTree, PyTree, Plan]:
            if self.deployer.is_dry_run:
                return *self._trees(), self._make_plan(None, self.deployer.mesh)
            self._ensure_placed(None)
            assert self.plan is not None
            return *self._now(), self.plan

        predictor._source = source
        return predictor

    def batch_size(self, per_device_batch_size: int) -> int:
        """Examples a step: rows a device x batch shards x micro-batches."""
        return per_device_batch_size * self.deployer.n_batch_shards * self._accumulate

    @plainly
    def compile(
        self, examples: Any, per_device_batch_size: int | None = None, *, batch_size: int | None = None
    ) -> jax.stages.Compiled:
        """The compiled train step for the first step's examples, to look into: its memory, its collectives, its text."""
        size = self._size(per_device_batch_size, batch_size)
        with closing(self._batches(self._slices(examples, size), size)) as batches:
            batch = next(batches)
        self._ensure_placed(batch.micro_batch)
        args = self._state.train_args(batch.groups, batch.n_micro_batches)
        return self._state.program.train_step.lower(*args).compile()

    @plainly
    def dry_run(
        self,
        examples: Any,
        per_device_batch_size: int | None = None,
        topology: str | None = None,
        *,
        batch_size: int | None = None,
        optimization: str | None = None,
        search: bool = True,
        exact: bool = False,
    ) -> DryRun:
        """What a step of training takes, compiled and not run: memory, collectives, FLOPs, and whether it fits.

        Nothing is allocated, and nothing of the trainer changes.

        **Arguments:**

        - `examples`, `per_device_batch_size`, `batch_size`: as for `train`; the first step's are compiled for.
        - `topology`: devices that need not be there, with the shards of this deployer: `"v4:2x2x2"`, `"gpu:a100-40gb:4"`,
            `"gpu:h100-80gb:2x8"`; its own devices by default.
        - `optimization`: the compiler's level, `"O0"` to `"O3"`, or `"UNKNOWN"`, that of a run. By default that, but for
            TPUs `"O2"`, which takes the same memory in half the time; `"O1"` is faster still, and takes less.
        - `search`: whether to try what could help where it does not fit.
        - `exact`: whether to compile all of a list of equal blocks that the loss computes one by one. By default a few of
            them are compiled, and what all take is extrapolated.

        Raises ValueError for an unknown topology, ImportError where its compiler is not installed.
        """
        run = dry()
        if topology is not None:
            machine = describe(topology)
        else:
            machine = of_devices("this", self.deployer.mesh.devices.flat) if run is None else run.machine
        size = self._size(per_device_batch_size, batch_size, len(machine.devices))
        job = self._job(next(self._slices(examples, size)), size, len(machine.devices))
        return dry_run(job, machine, optimization=optimization, search=search, exact=exact)

    def _job(self, step: Slice, size: BatchSize, n_devices: int | None = None) -> Job:
        """What a dry run compiles: the step of those examples."""
        mesh = self.deployer.mesh
        rows = size.micro_batch // ((n_devices or mesh.size) // mesh.shape[MODEL])
        return Job(
            setting=Setting(
                mesh.shape[MODEL],
                mesh.shape[FSDP],
                rows,
                self._accumulate,
                batch_size=size.examples if size.by_examples else None,
            ),
            batch=collated_shapes(self._collate_fn, step.examples),
            make_plan=lambda mesh, micro_batch: self._make_plan(micro_batch, mesh),
            make_program=lambda plan, change: self._make_program(plan, named=True, change=change),
            model=self._trees()[0],
            with_model=lambda model, names: self._with_model(model, names)._job(step, size, n_devices),
            can_remat=self._grad_fn is None,
        )

    def _with_model(self, model: PyTree, names: Mapping[str, str]) -> "Trainer":
        """This trainer, to be compiled for a model with fewer blocks.

        **Arguments:**

        - `names`: for each of its leaves the name in this trainer's model.
        """
        other = copy.copy(self)
        other._given, other._held = (model, self._trees()[1]), None
        trained = set(self._parts.names[0])
        other._parts = Parts.of(model, map_named(lambda name, leaf: names[name] in trained, model))
        return other

    def _files(self, options: Options) -> dict[str, int]:
        """Bytes of each file of a checkpoint that a fit with those options saves; of shapes too."""
        files = {"model.safetensors": file_size(array_leaves(self.model), options.save_float_dtype)}
        if self._has_state:
            files["model_state.safetensors"] = file_size(array_leaves(self.model_state))
        if options.save_opt_states:
            files["optimizer.safetensors"] = file_size(array_leaves(self._opt_shapes()))
        return files

    def _opt_shapes(self) -> PyTree:
        """The shapes of the optimizer's state."""
        return jax.eval_shape(self._optimizer.init, self._parts.trained_tree(self._parts.take(self.model)[0]))

    def _size(self, per_device_batch_size: int | None, batch_size: int | None, n_devices: int | None = None) -> BatchSize:
        return BatchSize.of(self.deployer.mesh, per_device_batch_size, batch_size, self._accumulate, n_devices=n_devices)

    def _slices(self, examples: Any, size: BatchSize, drop_remainder: bool = False) -> Iterator[Slice]:
        check_examples(examples, "examples")
        return slices(examples, size.examples, drop_remainder=drop_remainder, name="examples")

    def _batches(self, steps: Iterable[Slice], size: BatchSize) -> Prefetch:
        self._n_passes += 1
        check = None if self.deployer.peers.n == 1 else partial(_check_rows, self.deployer.peers, self._n_passes)
        return batches(steps, self._collate_fn, size, self.deployer.mesh, check)

    def _call(self, what: str, step: Callable[..., Any], args: tuple, batch: Batch, progress: Progress) -> Any:
        """Call a jitted step, saying so where it has to compile first."""
        signature = (what, batch.signature)
        if signature in self._compiled:
            return step(*args)
        work = checked_work(step, args, self.plan, batch.groups) if what == "train step" else nullcontext()
        with self.deployer.watch.paused(), progress.compiling(what), work:
            if self.deployer.peers.n > 1:  # lowered once: the call takes it up
                agree_on_program(self.deployer.peers, what, step.lower(*args))
            outs = step(*args)
        self._compiled.add(signature)
        return outs

    def _updates(
        self, upcoming: Prefetch, progress: Progress, fit: int | None = None, epoch: int | None = None
    ) -> Generator[tuple[Batch, bool], None, None]:
        """Take the steps; after each yields its batch and whether it was the last.

        The device may still be at it then, and the metrics of the newest steps unread: `_flush` waits for both. Step and
        position change together: whoever saves in between, a tracker say, saves what belongs together.

        **Arguments:**

        - `fit`, `epoch`: of a fit, whose position is kept.
        """
        if self._is_updating:
            raise ValueError(
                "`fit`, `train`: expected to be called one after the other, got one inside the other. "
                "Call it after the first has ended."
            )
        self._is_updating = True
        try:
            batch = next(upcoming, None)
            while batch is not None:
                self.deployer.peers.check()
                if self._checkpoints is not None:
                    self._checkpoints.check()
                self._ensure_placed(batch.micro_batch)
                args = self._state.train_args(batch.groups, batch.n_micro_batches)
                vector = self._state.advance(self._call("train step", self._state.program.train_step, args, batch, progress))
                self.step += 1
                if fit is not None and epoch is not None:
                    self._standing.position = Position(fit, epoch, batch.position, batch.state)
                self.deployer.watch.beat(self.step)
                vector.copy_to_host_async()
                self._pending.append((self.step, epoch, vector, replace(batch, groups=())))  # the device's memory is free
                if len(self._pending) > _LAG:
                    self._record(progress)
                following = next(upcoming, None)
                yield batch, following is None
                batch = following
        finally:
            self._is_updating = False

    def _record(self, progress: Progress) -> None:
        """Read the metrics of the oldest step that is still unread, check them, show and record them."""
        step, epoch, vector, batch = self._pending.popleft()
        metrics, nonfinite = self._read(vector)
        self._n_skipped_now = self._n_skipped_now + 1 if nonfinite else 0
        if nonfinite and (not self._skips or self._n_skipped_now > self._max_skipped):
            self._pending.clear()
            raise ValueError(self._why_nonfinite(nonfinite[0], step, metrics[nonfinite[0]], batch))
        if nonfinite:
            self._standing.n_skipped += 1
            said = f"step {step}: skipped, as `{nonfinite[0]}` is {metrics[nonfinite[0]]}; {self._standing.n_skipped} so far"
            self.deployer.console.info(said)
        self._last_metrics = metrics
        shown = {} if epoch is None else {"epoch": epoch + 1}
        self.deployer.console.metrics({**shown, **metrics}, step)
        progress.update(
            step,
            metrics=metrics,
            n_examples=batch.n_examples,
            n_tokens=batch.n_tokens,
            epoch=None if epoch is None else epoch + 1,
        )

    def _read(self, vector: jax.Array) -> tuple[dict[str, float], list[str]]:
        """A step's metrics, and which of them had to be finite and are not."""
        metrics = dict(zip(self._state.program.metric_names, np.asarray(vector).tolist(), strict=True))
        return metrics, [name for name in ("loss", "grad_norm") if not np.isfinite(metrics[name])]

    def _why_nonfinite(self, name: str, step: int, found: float, batch: Batch) -> str:
        if self._checkpoints is not None:
            self._checkpoints.wait()
        index = {} if self._checkpoints is None else self._checkpoints.index()
        last = f"The last good checkpoint is {index['last']}." if "last" in index else "Nothing was saved yet."
        what = "the loss" if name == "loss" else "the gradient's norm"
        often = f" for {self._n_skipped_now} steps one after the other" if self._skips else ""
        return (
            f"`{name}` at step {step}: expected {what} to be finite, got {found}{often}. {last} "
            f"{why_nonfinite(batch.rows, batch.places, lambda: self._trace(batch.rows))}"
        )

    @property
    def n_skipped(self) -> int:
        """How many steps were skipped, as their loss or gradient was not finite, those before a resume included."""
        return self._standing.n_skipped

    def _flush(self, progress: Progress) -> None:
        while self._pending:
            self._record(progress)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_ckpt(
        self,
        name: str = "last",
        *,
        metrics: Mapping[str, float] | None = None,
        keep_last: int = 2,
        save_opt_states: bool = True,
        save_float_dtype: Any = None,
    ) -> Path:
        """Saves model, optimizer state and position to the workdir; returns the checkpoint's folder.

        **Arguments:**

        - `name`: what `load_ckpt` and `index.json` call it; the checkpoint stays while it has a name.
        - `metrics`: numbers by name that its `trainer.json` shall carry: what it was chosen by, say.
        - `keep_last`: how many of the newest stay without one.
        - `save_opt_states`: whether to save what only resuming needs.
        - `save_float_dtype`: floating leaves of the model are cast to it in the file.

        Raises ValueError without a workdir, OSError where the disk has no room; what was saved before stays whole.
        """
        return self._save([name], metrics or {}, keep_last, save_opt_states, save_float_dtype)

    def load_ckpt(self, name: str | Path = "last", *, load_opt_states: bool = True) -> None:
        """Loads a checkpoint onto this trainer's mesh, whichever mesh it was saved on.

        **Arguments:**

        - `name`: a name of the index (`"last"`, `"argmax_accuracy"`), of a checkpoint, or a path.
        - `load_opt_states`: whether to load the optimizer's state and the step too; without, only the model.

        The next `fit` goes on from what was loaded: with its own epochs, where this trainer has not fitted before. A
        checkpoint of another workdir is a beginning: where this workdir has a run already, `fit` goes on with that run.

        The arrays that were there are deleted before new ones are read, as a step would: those that `trainer.model` gave.

        Raises ValueError where the checkpoint is damaged or of another model, naming what differs; nothing has
        changed then. Inside `fit` too.
        """
        if self.deployer.is_dry_run:
            return  # it has the shapes of this model
        if self._is_updating:
            raise ValueError("`load_ckpt`: expected after `fit` or `train`, got called inside of it. Call it afterwards.")
        path = self._need_checkpoints().resolve(name)
        self._restore_from = None  # what was to be restored is replaced
        self._ensure_placed(None)
        record = self._load(path, load_opt_states)
        if load_opt_states:
            self._standing = Standing.of_record(record)
        if self._follows is None and path.parent == self._need_checkpoints().folder:
            self._follows = False  # the next fit begins from this one, and not from the newest

    def _need_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            raise ValueError("`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`.")
        self._checkpoints.wait()
        return self._checkpoints

    def _save(
        self,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        keep_last: int,
        save_opt_states: bool,
        save_float_dtype: Any,
        then: Callable[[Path], None] | None = None,
    ) -> Path:
        if self.deployer.is_dry_run:
            return self._need_checkpoints().folder / f"step_{self.step:08d}"  # it writes nothing
        self._ensure_placed(None)
        unread = [(step, batch, *self._read(vector)) for step, _, vector, batch in self._pending]
        for step, batch, found, nonfinite in unread:  # by a tracker, say
            if nonfinite and not self._skips:
                raise ValueError(self._why_nonfinite(nonfinite[0], step, found[nonfinite[0]], batch))
        n_skipped = self._standing.n_skipped + sum(bool(nonfinite) for *_, nonfinite in unread)
        last_metrics = unread[-1][2] if unread else self._last_metrics
        record = {
            "redeqx": version("redeqx"),
            "step": self.step,
            **self._standing.to_record(),
            "n_skipped": n_skipped,
            "learning_rate": last_metrics.get("learning_rate"),
            "seed": self.deployer.jax_seed,
            "mesh": dict(self.deployer.mesh.shape),
            "metrics": dict(metrics),
        }
        checkpoints = self._need_checkpoints()
        trees = self._state.trees(opt_state=save_opt_states)
        self._standing.saved = (self.step, self._standing.position)
        return checkpoints.save(self.step, trees, record, ["last", *tags], keep_last, save_float_dtype, then)

    def _load(self, path: Path, load_opt_states: bool) -> dict[str, Any]:
        """Load a checkpoint that is found complete first, as there are values to lose."""
        assert self._held is not None
        checkpoints = self._need_checkpoints()
        record = checkpoints.record(path)
        if load_opt_states:
            check_record(path, record)
        steps = (record["step"], record.get("n_skipped", 0))
        self._held.load(checkpoints, path, steps if load_opt_states else None)
        if load_opt_states:
            self.step = record["step"]
        return record

    def _resume_from(self, path: Path, step: int) -> None:
        """Load a checkpoint of an earlier run: now, or once a batch is at hand and the model is placed."""
        self.step = step
        self._restore_from = path
        if self._held is not None:
            self._restore()

    def _restore(self) -> None:
        path, self._restore_from = self._restore_from, None
        if path is not None:
            assert self._held is not None
            with self._resuming(path):
                self._held.load(self._need_checkpoints(), path, (self.step, self._standing.n_skipped), verify=True)

    @contextmanager
    def _resuming(self, path: Path) -> Iterator[None]:
        """Say of an error that this trainer cannot go on with a checkpoint; of a damaged one so that `fit` takes another."""
        try:
            yield
        except ValueError as error:
            # A second fit finds that run again, and does not write over it.
            self.step, self._standing, self._follows = 0, Standing(), None
            self._restore_from = None
            if isinstance(error, DamagedError):
                raise DamagedCheckpoint(str(error)) from error
            raise ValueError(
                f"`workdir`: expected a run that this trainer can go on with, got {path}, which it cannot: {error} "
                "For a new run choose another workdir."
            ) from error

    # --- runs --------------------------------------------------------------------------------------------------------

    @plainly
    def fit(
        self,
        train_examples: Any,
        per_device_batch_size: int | None = None,
        n_epochs: int = 1,
        eval_examples: Any = None,
        eval_per_device_batch_size: int | None = None,
        eval_loss: bool = True,
        eval_predictor: Predictor | None = None,
        eval_metric_fn: Callable[[Any, list], Mapping[str, Any]] | None = None,
        eval_sanity_check: bool = True,
        eval_every_n_steps: int | None = None,
        save_every_n_steps: int | None = None,
        save_ckpt_every_k_epochs: int | None = None,
        save_last_ckpt: bool = False,
        save_argmin_ckpt_by_metrics: Sequence[str] = (),
        save_argmax_ckpt_by_metrics: Sequence[str] = (),
        keep_last: int = 2,
        save_opt_states: bool = True,
        save_float_dtype: Any = None,
        resume: bool = True,
        *,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        drop_remainder: bool = False,
        save_end: bool = True,
    ) -> dict[str, float]:
        """Trains for `n_epochs` passes, evaluates and saves on the way; returns the metrics of the last evaluation.

        Every example is used once an epoch; the last step of an epoch holds what is left, and of that the few rows that do
        not divide over the devices in micro-batches of their own (which layers like BatchNorm see as small batches: give a
        multiple of the batch size, or `drop_remainder`, where that matters). A run that was stopped goes on from its newest
        checkpoint and ends with the same bits; one that has come to its end goes on where `n_epochs` is more than before.

        **Arguments:**

        - `train_examples`: an object with `len()` and integer items, shuffled anew each epoch; or a function of the epoch
            that returns one, of any length; or an iterable.
        - `per_device_batch_size`: rows of a micro-batch at one position of the data and fsdp axes. A step has
            `trainer.batch_size(per_device_batch_size)` examples: on another mesh others.
        - `batch_size`: in its place, the examples of a step, over all devices and micro-batches: the same run on every mesh.
            Best a multiple of the devices times the micro-batches: the rows that are left over every device computes.
        - `eval_examples`: with `len()` and integer items; evaluated at the end of every epoch, and every
            `eval_every_n_steps` steps.
        - `eval_per_device_batch_size`, `eval_batch_size`: of evaluations; a training micro-batch's by default.
        - `eval_loss`: whether to evaluate the loss; its metric is called `"loss"`.
        - `eval_predictor`, `eval_metric_fn`: outputs for `eval_examples`, and `(examples, outputs)` to a dict of numbers.
        - `eval_sanity_check`: whether to evaluate one batch before training, so that mistakes show at once.
        - `drop_remainder`: whether to leave out what does not fill a batch at the end of an epoch, which would be a program
            of its own to compile.
        - `save_every_n_steps`, `save_ckpt_every_k_epochs`, `save_last_ckpt`: save every n steps; after every k-th epoch,
            to keep (`"epoch_3"` in the index); at the end of every epoch.
        - `save_end`: whether to save the end of the fit, where there is a `workdir`.
        - `save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: names of metrics by which the best checkpoint is
            kept (`"argmax_accuracy"` in the index).
        - `keep_last`: how many of the newest checkpoints stay, beside those.
        - `save_opt_states`: whether to save the optimizer's state. Without it a run cannot be resumed.
        - `save_float_dtype`: floating leaves of the model are cast to it in the file, and a resumed run goes on with them.
        - `resume`: whether to go on where the workdir's newest checkpoint stands, or where this trainer's last fit was
            interrupted. Without, a workdir that holds checkpoints is refused, and an interrupted fit is given up.

        Raises ValueError or TypeError for arguments that cannot work, before any work; ValueError for a run that was begun
        with another batch size or other examples; ValueError for a loss that is not finite, naming the step. The model is
        spoilt then: `load_ckpt()` brings the last good one back.

        In a dry run it compiles for the first batch, and raises SystemExit with the report.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        options = Options(**arguments)
        if (run := dry()) is not None:
            raise DryRunDone(dry_run(Fit(self, options).job(), run.machine, **run.options))
        return Fit(self, options).run()

    def _say_header(self) -> None:
        plan, mesh = self.plan, self.deployer.mesh
        assert plan is not None
        devices = mesh.devices.flat
        trained, frozen = self._state.trained, self._state.frozen
        held, opt = shard_bytes([*trained, *frozen]), shard_bytes(self._state.opt_state)
        rows = {
            "devices": f"{mesh.size} x {devices[0].device_kind}",
            "mesh": " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
            "parameters": f"{sum(x.size for x in trained):,} trained"
            + (f", {sum(x.size for x in frozen):,} frozen" if frozen else ""),
            "bytes per device": f"{held / 2**20:,.1f} MiB parameters, {opt / 2**20:,.1f} MiB optimizer state",
            "plan": plan.summary(),
            "workdir": str(self.deployer.workdir) if self.deployer.workdir else "none: nothing is recorded",
        }
        self.deployer.console.header(rows)


def _check_rows(peers: Peers, n_pass: int, i: int, batch: PyTree) -> None:
    """Check that the rows of step `i` are alike in all processes, whose shards are of one array."""
    rows = {name: f"{leaf.dtype} {list(leaf.shape[1:])} a row" for name, leaf in named_leaves(batch).items()}
    advice = "Pad to one length, the same in every batch: a process collates the rows that its devices need."
    if i == 0:
        peers.agree("collate_fn", rows, advice)
    else:  # without waiting: two steps ahead of the device
        peers.compare(f"rows of pass {n_pass}, step {i}", "collate_fn", rows, advice)
