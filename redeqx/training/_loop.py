"""The training loop: a fit with its epochs, evaluations and checkpoints, resumed where an earlier run stopped.

It drives an engine, which computes the updates.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from ..data import (
    BatchSize,
    Slice,
    differs_by_epoch,
    examples_of,
    micro_batch_shapes,
    n_slices,
    sample_of,
    size_of,
    slices,
)
from ..dims import UNKNOWN
from ..errors import Note, as_metrics
from ..monitor import ProgressLine
from ..optimizers import warn_of_zero_rate
from ..storage import check_writable
from ._callbacks import Callbacks
from ._engine import Engine
from ._evaluation import evaluate
from ._options import FitOptions
from ._passes import updates, warn_of_large_batch
from ._progress import Position
from ._resume import check_setting, resume_newest


class Fit:
    """One fit of an engine's model.

    **Arguments:**

    - `trainer`: passed to the callbacks.
    """

    def __init__(self, engine: Engine, options: FitOptions, trainer: Any = None):
        self.engine, self.options, self.trainer = engine, options, trainer
        options.check(engine.run.workdir)
        self.size = engine.batch_size(options.per_device_batch_size, options.batch_size)
        rows = (options.eval_per_device_batch_size, options.eval_batch_size)
        given = rows != (None, None)
        self._eval_size = (
            BatchSize.of(engine.run.mesh, *rows, prefix="eval_")
            if given
            else BatchSize(self.size.micro_batch, self.size.micro_batch)
        )
        self.callbacks = Callbacks(options.callbacks, trainer)
        self.metrics: dict[str, float] = {}  # of the newest evaluation
        self.evaluated_at: int | None = None  # the step of the newest evaluation
        self.has_started = self.is_stopping = False

    @property
    def eval_size(self) -> BatchSize:
        """The sizes of an evaluation's batch; they may depend on what the loss does with rows."""
        examples = self.options.eval_examples
        n, use = None if examples is None else size_of(examples), self.engine.recipe.eval_rows or UNKNOWN
        return self._eval_size.evenly(n, self.engine.run.mesh.size, use)

    def run(self) -> dict[str, float]:
        """Trains to the end of the fit; returns the metrics of its last evaluation, or without one, of its last step."""
        options, engine = self.options, self.engine
        engine.run.peers.agree("fit", options.plain)
        if options.saves and isinstance(engine.run.workdir, Path):
            check_writable(engine.run.workdir, "workdir")
        engine.warned.clear()
        with nullcontext() if engine.checkpoints is None else engine.checkpoints.writing():
            return self._run()

    def _run(self) -> dict[str, float]:
        options, engine = self.options, self.engine
        start = self._begin()
        if start is None:
            engine.place()
            engine.run.console.info("this fit is done already: the checkpoint was saved after it")
            engine.n_fits += 1
            return self._result()
        line = engine.run.console.progress(n_epochs=options.epochs, first_step=engine.step)
        listening = engine.run.preemption.listening() if engine.checkpoints is not None else nullcontext()
        engine.stop_requested, engine.callbacks, self.began_at = False, self.callbacks, engine.step
        engine.begun_fit = start.fit
        try:
            with self.callbacks, self._keeping_states(), listening, engine.run.watch.on(), line:
                for epoch in self._epochs(start):
                    self._epoch(epoch, start if epoch == start.epoch else Position(start.fit, epoch), line, start)
                    if self._is_over():
                        break
                self._end(line)
                engine.callback_states = self.callbacks.states()
                self.callbacks.call("on_fit_end", self._result())
        finally:
            engine.callbacks = None
        engine.n_fits += 1
        if engine.checkpoints is not None:
            engine.checkpoints.wait()
        engine.run.upload()
        self._summarise()
        return self._result()

    @contextmanager
    def _keeping_states(self) -> Iterator[None]:
        """A context that keeps the callbacks' states if the fit fails, before the callbacks are closed."""
        engine = self.engine
        try:
            yield
        except BaseException:
            if engine.checkpoints is not None:
                engine.checkpoints.settle()
            if self.has_started:
                engine.callback_states = self.callbacks.states()
            raise

    def _result(self) -> dict[str, float]:
        """Returns the result of `fit`."""
        return dict(self.metrics if self.options.evaluates else self.engine.metrics.last)

    # --- when it ends ------------------------------------------------------------------------------------------------

    @property
    def _last_step(self) -> int | None:
        """The step at which `max_steps` ends this fit."""
        return None if self.options.max_steps is None else self.engine.progress.first_step + self.options.max_steps

    def _epochs(self, start: Position) -> Iterable[int]:
        """Returns the remaining epochs."""
        if self._is_at_last_step():
            return ()
        return count(start.epoch) if self.options.epochs is None else range(start.epoch, self.options.epochs)

    def _is_at_last_step(self) -> bool:
        return self._last_step is not None and self.engine.step >= self._last_step

    def _is_over(self) -> bool:
        """Returns whether the fit ends after this step, although more remain. All processes call it at the same points.

        Process 0 decides. Unless a callback or an evaluation ran, in which `trainer.stop` may be called, nothing is
        communicated.
        """
        callbacks, engine = self.callbacks, self.engine
        if engine.run.peers.n == 1:
            self.is_stopping = engine.stop_requested
        elif callbacks.was_called:
            callbacks.was_called, self.is_stopping = False, bool(engine.run.decide(engine.stop_requested))
        return self.is_stopping or self._is_at_last_step()

    def _begin_callbacks(self) -> None:
        """Restores the callbacks' states, once the model is placed, and calls their `on_fit_start`."""
        if not self.has_started:
            self.has_started = True
            self.callbacks.load(self.engine.callback_states)
            self.callbacks.call("on_fit_start")

    def first_step(self) -> Slice:
        """Returns the examples of the first step, for a dry run."""
        return next(self.steps(0, Position()))

    # --- the start ---------------------------------------------------------------------------------------------------

    def _begin(self) -> Position | None:
        """Returns the position at which this fit starts; None if an earlier run has finished this fit."""
        engine = self.engine
        fit = engine.n_fits
        if engine.follows is None:
            resume_newest(engine, may_resume=self.options.resume)
        elif not self.options.resume and engine.follows and engine.progress.position.fit == fit:
            fit = engine.n_fits = fit + 1  # the interrupted fit is abandoned
        if engine.follows is False:
            engine.progress.position, engine.progress.first_step, engine.follows = Position(fit), engine.step, True
            engine.callback_states = {}
        engine.run.begin_records(engine.step, engine.name)
        progress = engine.progress
        if fit < progress.position.fit:
            self.metrics = dict(progress.metrics)
            return None
        if fit > progress.position.fit:
            progress.position, progress.setting, progress.metrics = Position(fit), {}, {}
            progress.first_step, engine.callback_states = engine.step, {}
        self.metrics = dict(progress.metrics)
        start = progress.position
        if start == Position(fit):  # no step was taken: the resumed run was a loop of updates before this fit
            progress.first_step, progress.setting = engine.step, {}
        n_epochs = self.options.epochs
        if n_epochs is not None and start.epoch >= n_epochs:
            engine.run.console.info(f"epoch {start.epoch} of {n_epochs} is done already: nothing to train")
        elif self._is_at_last_step():
            engine.run.console.info(f"step {engine.step} is reached already: nothing to train")
        return start

    def _check_setting(self, start: Position, n: int | None, sample: int | None) -> None:
        """Compares the sizes of this fit with those of the run that it resumes, and records them.

        **Arguments:**

        - `start`: the position at which this fit begins.
        - `n`, `sample`: the number of examples, and a checksum of some; None if unknown.
        """
        options, engine = self.options, self.engine
        now = {
            "batch_size": self.size.examples,
            "train_size": n,
            "drop_remainder": options.drop_remainder,
            "accumulate_grad_batches": engine.recipe.accumulate,
            "sample": sample,
            "precision": engine.precision,
        }
        # If epochs differ, their data must be the same only when a run resumes within an epoch.
        is_same_data = start.examples or not differs_by_epoch(options.train_examples)
        unknown = () if is_same_data else ("train_size", "sample")
        if engine.step > engine.progress.first_step:  # else no update was made with the earlier sizes
            check_setting(engine, {name: value for name, value in now.items() if name not in unknown})
        engine.progress.setting, engine.progress.learning_rate = now, None

    # --- an epoch ----------------------------------------------------------------------------------------------------

    def steps(self, epoch: int, start: Position, examples: Any = None) -> Iterator[Slice]:
        """Returns the examples of each step of an epoch, from its start position.

        **Arguments:**

        - `examples`: the examples of the epoch, if the caller has them already.
        """
        options, engine = self.options, self.engine
        return slices(
            examples_of(options.train_examples, epoch) if examples is None else examples,
            self.size.examples,
            seed=(engine.run.seed, start.fit, epoch),
            position=start.examples,
            state=start.data_state,
            drop_remainder=options.drop_remainder,
        )

    def _epoch(self, epoch: int, start: Position, line: ProgressLine, first: Position) -> None:
        options, engine = self.options, self.engine
        examples = examples_of(options.train_examples, epoch)
        n = size_of(examples)
        if differs_by_epoch(options.train_examples):
            engine.run.peers.agree("train_examples", {f"the size of epoch {epoch}": n}, "Pass the same in every process.")
        if start is first:
            self._check_setting(start, n, sample_of(examples))
            if not options.drop_remainder:
                warn_of_large_batch(n, self.size, options.per_device_batch_size)
        elif differs_by_epoch(options.train_examples):
            engine.progress.setting |= {"train_size": n, "sample": sample_of(examples)}
        line.n_steps = self._last_step
        if n is not None and options.epochs is not None:
            left = n_slices(n - start.examples, self.size.examples, options.drop_remainder)
            later = (options.epochs - epoch - 1) * n_slices(n, self.size.examples, options.drop_remainder)
            n_steps = engine.step + left + later
            line.n_steps = n_steps if line.n_steps is None else min(n_steps, line.n_steps)
        schedule = engine.recipe.checked_schedule(engine.trees[0]) if start is first else None
        if line.n_steps is not None and schedule is not None:
            warn_of_zero_rate(schedule, line.n_steps - engine.progress.n_skipped)
        with closing(engine.batches(self.steps(epoch, start, examples), self.size, checks_end=n is None)) as upcoming:
            if start is first:
                # Before anything else is placed or evaluated, so that the plan is that of the loss.
                if (batch := upcoming.peek()) is not None:
                    engine.place_for(batch, is_update=True)
                self._begin_callbacks()
                if self._is_over():
                    return
                if options.eval_examples is not None and options.eval_sanity_check:
                    # On one batch, so that an error shows before training and not after an epoch.
                    some, n_all = self.first_evaluated(), size_of(options.eval_examples)
                    with nullcontext() if len(some) == n_all else Note(_SANITY_CHECK.format(len(some), n_all)):
                        self._compute_metrics(some, line)
                    if engine.run.peers.n == 1 and self._is_over():  # stopped by an `eval_metric_fn`
                        return
            with closing(updates(engine, upcoming, line, start.fit, epoch)) as steps_taken:
                for _, is_last in steps_taken:
                    if due := self.callbacks.due(engine.step):
                        engine.flush(line)
                        self.callbacks.call_on_step(due, engine.metrics.last)
                    if is_last:
                        break  # the end of the epoch evaluates and saves
                    tags = self._evaluate(line) if _is_due(engine.step, options.eval_every_n_steps) else set()
                    self._save_if_due(tags, line)
                    if self._is_over():
                        return
        engine.flush(line)
        engine.progress.position = Position(start.fit, epoch + 1)
        tags = self._evaluate(line) if options.evaluates else set()
        if _is_due(epoch + 1, options.save_ckpt_every_k_epochs):
            tags.add(f"epoch_{epoch + 1}")
        self.callbacks.call("on_epoch_end", self._result())
        self._save_if_due(tags, line, is_due=options.save_last_ckpt)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _compute_metrics(self, examples: Any, line: ProgressLine) -> dict[str, float]:
        options, engine = self.options, self.engine
        metrics: dict[str, float] = {}
        with line.pause("evaluating"):
            if options.eval_loss:
                metrics.update(evaluate(engine, examples, self._eval_size))
            if options.eval_predictor is not None:
                rows = self.eval_size.micro_batch
                outputs = options.eval_predictor.predict(examples, batch_size=rows, model=engine.eval_model)
                if options.eval_metric_fn is not None:
                    engine.run.watch.beat()
                    metrics.update(as_metrics(options.eval_metric_fn(examples, outputs), taken=list(metrics)))
            metrics = engine.run.peers.decide("eval_metric_fn", metrics)
        missing = sorted({name for name, _ in options.tracked.values()} - set(metrics))
        if missing:
            raise ValueError(
                f"`save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: expected metrics among {sorted(metrics)}, "
                f"which the evaluation returns, got {missing}. Return them from `eval_metric_fn`, or drop them."
            )
        return metrics

    def first_evaluated(self) -> list[Any]:
        """Returns the first batch of examples of the evaluation."""
        n = min(size_of(self.options.eval_examples) or 0, self.eval_size.micro_batch)
        return [self.options.eval_examples[i] for i in range(n)]

    def _evaluate(self, line: ProgressLine) -> set[str]:
        """Evaluates; returns the tags whose best checkpoint is now this one."""
        engine = self.engine
        engine.flush(line)
        self.metrics = self._compute_metrics(self.options.eval_examples, line)
        engine.progress.metrics, self.evaluated_at, self.callbacks.was_called = self.metrics, engine.step, True
        console = engine.run.console
        engine.record({f"eval_{name}": value for name, value in self.metrics.items()}, engine.step)
        console.info(f"step {engine.step}: " + ", ".join(f"eval {k} {v:.5g}" for k, v in self.metrics.items()))
        better = set()
        for tag, (name, sign) in self.options.tracked.items():
            value, best = self.metrics[name], engine.progress.best.get(tag)
            if value == value and (best is None or sign * value > sign * best["value"]):  # NaN is never the best
                engine.progress.best[tag] = {"value": value, "step": engine.step}
                better.add(tag)
        self.callbacks.call("on_eval", dict(self.metrics))
        return better

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_if_due(self, tags: set[str], line: ProgressLine, *, is_due: bool = False) -> None:
        """Saves this step if a save is due or the run is preempted; a preempted run then ends. Called after every step."""
        step = self.engine.step
        is_preempted = self.engine.checkpoints is not None and self.engine.run.preemption.is_due(step)
        if tags or is_due or is_preempted or _is_due(step, self.options.save_every_n_steps):
            self._save(tags, line, to_resume=is_preempted)
        if is_preempted:
            self._exit_preempted()

    def _end(self, line: ProgressLine) -> None:
        """Evaluates and saves the last step of the fit, unless this is done already."""
        options, engine = self.options, self.engine
        if not engine.is_placed:  # no step was due; the plan is made from the examples nevertheless
            examples = examples_of(options.train_examples, 0)
            step = None if size_of(examples) is None else next(self.steps(0, Position(engine.n_fits), examples))
            mesh = engine.run.mesh
            engine.place(
                None if step is None else micro_batch_shapes(engine.recipe.collate_fn, step.examples, self.size, mesh)
            )
        self._begin_callbacks()
        engine.flush(line)
        tags = set()
        if options.evaluates and engine.step not in (self.began_at, self.evaluated_at):  # stopped within an epoch
            tags = self._evaluate(line)
        end = (engine.step, engine.progress.position)
        if tags or (options.save_end and engine.checkpoints is not None and engine.progress.saved != end):
            self._save(tags, line)

    def _save(self, tags: set[str], line: ProgressLine, *, to_resume: bool = False) -> None:
        """Saves this step by the options; with `to_resume`, always saves everything that resuming needs."""
        options, engine = self.options, self.engine
        engine.flush(line)  # raises for a loss that is not finite, before anything is written
        step, names = engine.step, ", ".join(["last", *sorted(tags)])
        with line.pause("saving"):
            engine.save(
                sorted(tags),
                metrics=self.metrics,
                keep_last=options.keep_last,
                save_opt_states=options.save_opt_states or to_resume,
                save_float_dtype=None if to_resume else options.save_float_dtype,
                then=lambda path: engine.run.console.info(f"step {step}: saved {path} ({names})"),
            )

    def _exit_preempted(self) -> None:
        """Ends a preempted script once the last step is saved."""
        engine = self.engine
        assert engine.checkpoints is not None
        engine.checkpoints.wait()
        engine.run.preemption.end(engine.step, engine.run.console.info)

    def _summarise(self) -> None:
        engine = self.engine
        rows = {"steps": f"{engine.step:,}"}
        rows.update({f"eval {name}": f"{value:.6g}" for name, value in self.metrics.items()})
        if engine.checkpoints is not None:
            folder, index, names = engine.checkpoints.folder, engine.checkpoints.index(), engine.checkpoints.names()
            # Somebody may have removed a checkpoint since: that ends no run.
            paths = {tag: f"{folder / name}{'' if name in names else ', which was removed'}" for tag, name in index.items()}
            for tag in self.options.tracked:
                if tag in engine.progress.best and tag in paths:
                    best = engine.progress.best[tag]
                    rows[tag] = f"{best['value']:.6g} at step {best['step']}: {paths[tag]}"
            if "last" in paths:
                rows["last"] = paths["last"]
        engine.run.console.header(rows, title="done")


_SANITY_CHECK = (
    "Raised by the check before training, which evaluates the first {} of {} examples, so that mistakes show early. If a "
    "metric needs more of them, pass `eval_sanity_check=False`."
)


def _is_due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
