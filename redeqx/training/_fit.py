"""A fit: a stream of moments, at each of which callbacks are called.

`Fit.moments` is the loop: it takes the steps of all epochs. What else happens (evaluations, best checkpoints, saves, and
what the user adds) are callbacks: those of `_handlers.py`, and the user's. `_progress.py` decides where a fit starts.
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from ..checkpoint import check_savable
from ..data import (
    BatchSize,
    Slice,
    check_examples,
    checksum,
    collated_shapes,
    differs_by_epoch,
    examples_of,
    known_size,
    n_slices,
    sample_of,
    size_of,
    slices,
    source_of,
)
from ..dims import UNKNOWN, with_rows
from ..errors import (
    brief,
    check_count,
    check_flag,
    check_float_dtype,
    check_function,
    check_predictor,
    check_readable_again,
    warn,
)
from ..monitor import ProgressLine
from ..optimizers import kinds_of_states, warn_of_zero_rate
from ..storage import Location, check_writable
from ._checkpointer import Checkpointer
from ._engine import Engine
from ._handlers import Callbacks, Evaluate, KeepBest, Save
from ._loops import warn_of_large_batch
from ._progress import Position, Progress


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `Trainer.fit`, which documents them."""

    train_examples: Any
    per_device_batch_size: int | None
    n_epochs: int | None
    max_steps: int | None
    batch_size: int | None
    drop_remainder: bool
    eval_examples: Any
    eval_per_device_batch_size: int | None
    eval_batch_size: int | None
    eval_loss: bool
    eval_predictor: Any
    eval_metric_fn: Callable[[Any, list[Any]], Mapping[str, Any]] | None
    eval_sanity_check: bool
    eval_every_n_steps: int | None
    save_every_n_steps: int | None
    save_ckpt_every_k_epochs: int | None
    save_last_ckpt: bool
    save_argmin_ckpt_by_metrics: Sequence[str]
    save_argmax_ckpt_by_metrics: Sequence[str]
    save_end: bool
    keep_last: int
    save_opt_states: bool
    save_float_dtype: Any
    resume: bool
    callbacks: Sequence[Any]

    @property
    def epochs(self) -> int | None:
        """The number of epochs; None if only `max_steps` ends the fit."""
        return 1 if self.n_epochs is None and self.max_steps is None else self.n_epochs

    @property
    def tracked(self) -> dict[str, tuple[str, float]]:
        """Maps each tag of a best checkpoint to its metric, and to +1 if more is better, -1 if less is."""
        least = {f"argmin_{name}": (name, -1.0) for name in self.save_argmin_ckpt_by_metrics}
        return {**least, **{f"argmax_{name}": (name, 1.0) for name in self.save_argmax_ckpt_by_metrics}}

    @property
    def plain(self) -> dict[str, Any]:
        """The scalar options, and the sizes of the datasets."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sets = {"train_examples": self.train_examples, "eval_examples": None}
        sets |= {f"{prefix}eval_examples": examples for prefix, examples in self.eval_sets.items()}
        sizes = {f"len({name})": size_of(examples) for name, examples in sets.items()}
        return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)} | sizes

    @property
    def eval_sets(self) -> dict[str, Any]:
        """The examples to evaluate, by the prefix of their metrics' names: each name and `_` if there are several sets. They
        are sorted, as the order of a dict may differ between processes, which evaluate each set together."""
        given = self.eval_examples
        if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
            return {f"{name}_": examples for name, examples in sorted(given.items(), key=lambda item: item[0])}
        return {} if given is None else {"": given}

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate."""
        return self.eval_examples is not None and (self.eval_loss or self.eval_metric_fn is not None)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are requested in addition to the one at the end."""
        return bool(self.save_every_n_steps or self.save_ckpt_every_k_epochs or self.save_last_ckpt or self.tracked)

    def check(self, workdir: Location | None) -> None:
        """Raises ValueError or TypeError for invalid arguments."""
        for field in fields(self):
            if field.type is bool:
                check_flag(getattr(self, field.name), field.name)
        check_count(self.keep_last, "keep_last")
        check_float_dtype(self.save_float_dtype, "save_float_dtype", "Pass None to save what the model has.")
        for name in ("n_epochs", "max_steps", "eval_every_n_steps", "save_every_n_steps", "save_ckpt_every_k_epochs"):
            check_count(getattr(self, name), name, optional=True)
        for name in ("save_argmin_ckpt_by_metrics", "save_argmax_ckpt_by_metrics"):
            names = getattr(self, name)
            if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(one, str) for one in names):
                got, one = ("a string", names) if isinstance(names, str) else (brief(names), "loss")
                raise TypeError(f"`{name}`: expected names of metrics in a list, got {got}. Write [{one!r}].")
        check_examples(self.train_examples)
        check_readable_again(source_of(self.train_examples), self.epochs or 1)
        Callbacks.check(self.callbacks)
        if self.eval_examples is not None and not self.eval_sets:
            raise ValueError("`eval_examples`: expected at least one set by name, got none. Pass a list, or leave it out.")
        for prefix, examples in self.eval_sets.items():
            if "/" in prefix or prefix == "_":  # a checkpoint's name has no `/`, as `argmin_dev_loss`
                raise ValueError(
                    f"`eval_examples`: expected names that are not empty and without `/`, got {prefix[:-1]!r}. Rename it."
                )
            name = f"eval_examples[{prefix[:-1]!r}]" if prefix else "eval_examples"
            known_size(examples, name)
            check_examples(examples, name, or_function=False)
        if self.eval_metric_fn is not None:
            check_function(self.eval_metric_fn, "eval_metric_fn", ["examples", "outputs"])
        if self.eval_predictor is not None:
            check_predictor(self.eval_predictor)
        if self.eval_metric_fn is not None and self.eval_predictor is None:
            raise ValueError("`eval_metric_fn`: expected with an `eval_predictor`, got None. Pass the predictor too.")
        of_callbacks = any(callback.needs_eval for callback in self.callbacks)
        needs_eval = self.eval_predictor is not None or self.eval_every_n_steps or self.tracked or of_callbacks
        if needs_eval and not self.evaluates:
            raise ValueError(
                "`eval_examples`: expected examples and something to evaluate, got "
                f"{'none' if self.eval_examples is None else 'no `eval_loss` and no `eval_metric_fn`'}. "
                "The evaluation that was asked for needs them."
            )
        if self.saves and workdir is None:
            raise ValueError("`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`.")


class Fit:
    """One fit of an engine's model. The trainer is passed to the callbacks."""

    def __init__(self, engine: Engine, checkpointer: Checkpointer, options: FitOptions, trainer: Any):
        self.engine, self.checkpointer, self.options, self.trainer = engine, checkpointer, options, trainer
        options.check(engine.deployer.workdir)
        self.size = engine.batch_size(options.per_device_batch_size, options.batch_size)
        given = (options.eval_per_device_batch_size, options.eval_batch_size)
        self.eval_size_of_loss = BatchSize(self.size.micro_batch, self.size.micro_batch)  # at most; evaluations are even
        if given != (None, None):
            self.eval_size_of_loss = BatchSize.of(engine.deployer.mesh, *given, prefix="eval_")
        itself = weakref.proxy(self)  # in a cycle, the arrays of a trainer that was deleted would stay for a while
        self.callbacks = Callbacks(trainer, [Evaluate(itself), KeepBest(itself)], options.callbacks, [Save(itself)])
        self.began_at, self.ends_epoch = engine.step, False  # whether the newest step is the last one of its epoch
        self.stop_requested = self._is_stopping = False

    @property
    def progress(self) -> Progress:
        return self.checkpointer.progress

    def eval_size(self, examples: Any) -> BatchSize:
        """Returns the sizes of a batch of an evaluation of these; they may depend on what the loss does with rows."""
        use = self.engine.eval_use or UNKNOWN
        return self.eval_size_of_loss.evenly(size_of(examples), self.engine.deployer.mesh.size, use)

    def first_evaluated(self, examples: Any) -> list[Any]:
        """Returns the first batch of an evaluation of these."""
        return [examples[i] for i in range(min(size_of(examples) or 0, self.eval_size(examples).micro_batch))]

    def result(self) -> dict[str, float]:
        """Returns the metrics of the newest evaluation, or if nothing is evaluated, of the newest step."""
        return dict(self.progress.metrics if self.options.evaluates else self.engine.metrics.last)

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, float]:
        """Trains to the end of the fit; returns its `result`."""
        engine, checkpoints = self.engine, self.checkpointer.checkpoints
        engine.deployer.peers.agree("fit", self.options.plain)
        with nullcontext() if checkpoints is None else checkpoints.writing():
            return self._run()

    def _run(self) -> dict[str, float]:
        engine, checkpointer, deployer = self.engine, self.checkpointer, self.engine.deployer
        start = checkpointer.begin_fit(may_resume=self.options.resume)
        deployer.begin_records(engine.step, engine.name)
        if start is None:
            engine.place()
            deployer.console.info(f"this fit is done already: the model is that of step {engine.step}, in a later fit")
            return dict(self.progress.results.get(str(checkpointer.fit_index - 1), self.result()))
        self.began_at = engine.step
        line = deployer.console.progress(n_epochs=self.options.epochs, first_step=engine.step)
        listening = nullcontext() if checkpointer.checkpoints is None else deployer.preemption.listening()
        keeping = checkpointer.keeping(self.callbacks, self.options.keep_last)
        with self.callbacks, keeping, listening, deployer.watch.on(), engine.showing(line):
            with closing(self.moments(start, line)) as moments:
                for moment in moments:
                    self._call(moment)
                    if self.is_over() and not (moment == "on_step" and self.ends_epoch):  # the epoch's end comes first
                        break
            engine.flush()
            self._call("on_last_step")
            checkpointer.keep_states(self.callbacks)
            self._call("on_fit_end")
        with line.pause("saving"):
            checkpointer.end_fit(self.result())
        engine.records.end(engine.step, engine.name)
        self._summarise()
        return self.result()

    def _call(self, moment: str) -> None:
        """Calls the callbacks, with the metrics of the step or of the newest evaluation."""

        def metrics() -> dict[str, float]:
            if moment != "on_step":
                return self.result()
            self.engine.flush()
            return dict(self.engine.metrics.last)

        given = [] if moment == "on_fit_start" else [metrics]
        self.callbacks.call(moment, *given, step=self.engine.step if moment == "on_step" else None)

    def moments(self, start: Position, line: ProgressLine) -> Generator[str, None, None]:
        """Takes the steps of the fit, from its start; yields the method of the callbacks to call after each part."""
        for epoch in self._epochs(start):
            yield from self._epoch(epoch, start if epoch == start.epoch else Position(start.fit, epoch), line)
        if not self.callbacks.has_begun:  # no step was due; the plan is made from the examples nevertheless
            self._place_for_examples(start)
            yield self._started()

    def _epoch(self, epoch: int, start: Position, line: ProgressLine) -> Iterator[str]:
        engine, examples = self.engine, examples_of(self.options.train_examples, epoch)
        n, is_first = size_of(examples), not self.callbacks.has_begun
        self._check_epoch(epoch, start, examples, is_first=is_first)
        self._note_length(n, start, line, is_first=is_first)
        with closing(engine.batches(self.steps(start, examples), self.size, checks_end=n is None)) as upcoming:
            if is_first:
                # Before anything else is placed or evaluated, so that the plan is that of the loss.
                if (batch := upcoming.peek()) is not None:
                    engine.place(batch.micro_batch, batch)
                yield self._started()
            with closing(engine.updates(upcoming, start)) as steps:
                for self.ends_epoch in steps:
                    yield "on_step"
        engine.flush()
        engine.position = Position(start.fit, epoch + 1)
        yield "on_epoch_end"

    def _started(self) -> str:
        self.callbacks.begin(self.checkpointer.states)
        return "on_fit_start"

    def steps(self, start: Position, examples: Any) -> Iterator[Slice]:
        """Returns the examples of each step of an epoch, from its start position."""
        return slices(
            examples,
            self.size.examples,
            seed=(self.engine.deployer.jax_seed, start.fit, start.epoch),
            position=start.examples,
            state=start.data_state,
            drop_remainder=self.options.drop_remainder,
        )

    # --- when it ends ------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int | None:
        """The step at which `max_steps` ends this fit."""
        return None if self.options.max_steps is None else self.progress.first_step + self.options.max_steps

    @property
    def is_at_last_step(self) -> bool:
        return self.last_step is not None and self.engine.step >= self.last_step

    def _epochs(self, start: Position) -> Iterable[int]:
        """Returns the remaining epochs."""
        n = self.options.epochs
        is_done = n is not None and start.epoch >= n
        if is_done or self.is_at_last_step:
            what = f"epoch {start.epoch} of {n} is done" if is_done else f"step {self.engine.step} is reached"
            self.engine.deployer.console.info(
                f"{what} already: nothing to train, the result is that of then. Another run needs another workdir"
            )
            self._warn_of_other_examples()
            return ()
        return count(start.epoch) if n is None else range(start.epoch, n)

    def is_over(self) -> bool:
        """Returns whether the fit ends after this moment, although more remain. All processes call it at the same points.
        Process 0 decides. Unless a callback was called, in which `trainer.stop` may be called, nothing is communicated."""
        if self.engine.deployer.peers.n == 1:
            self._is_stopping = self.stop_requested
        elif self.callbacks.was_called:
            self.callbacks.was_called, self._is_stopping = False, bool(self.engine.deployer.decide(self.stop_requested))
        return self._is_stopping or self.is_at_last_step

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_epoch(self, epoch: int, start: Position, examples: Any, *, is_first: bool) -> None:
        """Checks the examples of an epoch: the same in all processes, and those with which a resumed run began."""
        options, n, differs = self.options, size_of(examples), differs_by_epoch(self.options.train_examples)
        if differs:
            advice = "Pass the same in every process."
            self.engine.deployer.peers.agree("train_examples", {f"the size of epoch {epoch}": n}, advice)
        if not is_first:
            if differs:
                self.progress.setting |= {"train_size": n, "sample": sample_of(examples)}
            return
        workdir = self.engine.deployer.workdir
        if (options.saves or options.save_end) and workdir is not None:
            check_savable(self.engine.trees, options.save_float_dtype)
            if isinstance(workdir, Path):
                check_writable(workdir, "workdir")
        evaluated = [(name, size_of(of), sample_of(of)) for name, of in options.eval_sets.items()]
        now = {
            "batch_size": self.size.examples,
            "train_size": n,
            "drop_remainder": options.drop_remainder,
            "accumulate_grad_batches": self.engine.task.accumulate,
            "sample": sample_of(examples),
            "precision": self.engine.task.precision_of(self.engine.trees[0]),
            "optimizer": kinds_of_states(self.engine.task.opt_shapes(self.engine.trees[0])),
            "trainable": checksum(self.engine.task.structure.names[0]),
            "eval_sample": checksum(evaluated) if evaluated else None,
        }
        # If epochs differ, their data must be the same only when a run resumes within an epoch.
        unknown = () if start.examples or not differs else ("train_size", "sample")
        self.checkpointer.use_setting(now, unknown)
        if not options.drop_remainder:
            warn_of_large_batch(n, self.size, options.per_device_batch_size)

    def _warn_of_other_examples(self) -> None:
        """Warns if this fit, in which nothing is left to train, was done with other examples than these."""
        examples, was = self.options.train_examples, self.progress.setting
        now = {} if differs_by_epoch(examples) else {"train_size": size_of(examples), "sample": sample_of(examples)}
        if any(None not in (was.get(name), value) and was[name] != value for name, value in now.items()):
            n = was.get("train_size")
            got = "others" if now["train_size"] == n else f"{now['train_size']} others"
            warn(
                f"`train_examples`: expected the {n} with which this fit was done, got {got}: nothing is trained on "
                "them, and the result is that of then. For a run on these choose another workdir."
            )

    def _note_length(self, n: int | None, start: Position, line: ProgressLine, *, is_first: bool) -> None:
        """Notes the number of steps, if it is known; warns of a schedule that ends before."""
        engine, n_epochs = self.engine, self.options.epochs
        line.n_steps = self.last_step
        if n is not None and n_epochs is not None:
            left = n_slices(n - start.examples, self.size.examples, self.options.drop_remainder)
            later = (n_epochs - start.epoch - 1) * n_slices(n, self.size.examples, self.options.drop_remainder)
            n_steps = engine.step + left + later
            line.n_steps = n_steps if line.n_steps is None else min(n_steps, line.n_steps)
        schedule = engine.task.checked_schedule(engine.trees[0]) if is_first else None
        if line.n_steps is not None and schedule is not None:
            warn_of_zero_rate(schedule, line.n_steps - engine.metrics.n_skipped)

    def first_step(self) -> Slice:
        """Returns the examples of the first step of the first fit."""
        return next(self.steps(Position(), examples_of(self.options.train_examples, 0)))

    def _place_for_examples(self, start: Position) -> None:
        examples = examples_of(self.options.train_examples, 0)
        step = None if size_of(examples) is None else next(self.steps(Position(start.fit), examples))
        shapes = None
        if step is not None:
            n_rows = self.size.cut(len(step.examples), UNKNOWN, self.engine.deployer.mesh)[0].rows
            shapes = with_rows(collated_shapes(self.engine.task.collate_fn, step.examples), n_rows)
        self.engine.place(shapes)

    # --- what callbacks do -------------------------------------------------------------------------------------------

    def report(self, metrics: dict[str, float]) -> None:
        """Records the metrics of an evaluation, and calls `on_eval`."""
        engine = self.engine
        self.progress.metrics, self.progress.evaluated = metrics, engine.step
        engine.records.metrics({f"eval_{name}": x for name, x in metrics.items()}, engine.step, name=engine.name)
        engine.deployer.console.info(f"step {engine.step}: " + ", ".join(f"eval {k} {v:.5g}" for k, v in metrics.items()))
        self.callbacks.call("on_eval", lambda: dict(metrics))

    def _summarise(self) -> None:
        checkpoints, metrics, best = self.checkpointer.checkpoints, self.progress.metrics, self.progress.best
        rows = {"steps": f"{self.engine.step:,}", **{f"eval {name}": f"{x:.6g}" for name, x in metrics.items()}}
        if checkpoints is not None:
            folder, index, names = checkpoints.folder, checkpoints.index(), checkpoints.names()
            # Somebody may have removed a checkpoint since: that ends no run.
            paths = {tag: f"{folder / name}{'' if name in names else ', which was removed'}" for tag, name in index.items()}
            for tag in (tag for tag in self.options.tracked if tag in best and tag in paths):
                rows[tag] = f"{best[tag]['value']:.6g} at step {best[tag]['step']}: {paths[tag]}"
            rows |= {tag: paths[tag] for tag in ("last",) if tag in paths}
        rows["goodput"] = self.engine.records.goodput.text()
        self.engine.deployer.console.header(rows, title="done")
