"""A whole run of training: epochs, evaluations, checkpoints, and going on where an earlier run stopped.

It drives a Trainer, which takes the steps. Where a run stands is four numbers (`Position`), saved beside the weights, so
that a run that was killed ends with the same bits as one that was not.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .checkpoint import RECORD
from .data import (
    BatchSize,
    Slice,
    check_examples,
    collated_shapes,
    examples_of,
    is_function,
    micro_batch_shapes,
    n_slices,
    sample_of,
    size_of,
    slices,
)
from .errors import (
    DamagedError,
    as_metrics,
    brief,
    check_count,
    check_function,
    check_predictor,
    check_readable_again,
    damaged,
    is_size,
)
from .monitor import Progress
from .training import Job


@dataclass(frozen=True)
class Position:
    """Where training stands: after `examples` examples of an epoch of one of the trainer's fits, all counted from 0.

    `data_state` is what an iterable of examples says of itself there.
    """

    fit: int = 0
    epoch: int = 0
    examples: int = 0
    data_state: Any = None


@dataclass
class Standing:
    """Where a trainer stands in its fits: what `trainer.json` says beside the step.

    **Arguments:**

    - `position`: now.
    - `setting`: what the fit under way was begun with, as far as numbers tell; empty where not known.
    - `best`: for each tag of a best checkpoint `{"value": ..., "step": ...}`.
    - `n_skipped`: steps that were skipped, as they were not finite.
    - `metrics`: of the newest evaluation.
    - `learning_rate`: of the newest step, where a checkpoint says it.
    - `saved`: step and position of the newest checkpoint.
    """

    position: Position = Position()
    setting: dict[str, Any] = field(default_factory=dict)
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    n_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    saved: tuple[int, Position] | None = None

    def to_record(self) -> dict[str, Any]:
        """What `trainer.json` holds of it."""
        setting = {name: self.setting.get(name) for name in _SETTING}
        return {**asdict(self.position), **setting, "best": self.best, "n_skipped": self.n_skipped}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Standing":
        """What `trainer.json` held, once `check_record` has found it whole."""
        position = Position(**{name: record[name] for name in ("fit", "epoch", "examples", "data_state")})
        return cls(
            position,
            {name: record[name] for name in _SETTING if record.get(name) is not None},
            record["best"],
            record.get("n_skipped", 0),
            record.get("metrics", {}),
            record.get("learning_rate"),
            (record["step"], position),
        )


# What decides which examples a step holds, and how they are computed.
_SETTING = ("batch_size", "train_size", "drop_remainder", "accumulate_grad_batches", "sample")
_MAX_STEP = 2**31  # the count of steps is an int32


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # True is an int, too


def _is_best(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(best, dict) and _is_number(best.get("value")) and is_size(best.get("step")) for best in value.values()
    )


_SIZE = ("an integer from 0 on", is_size)
_SIZE_OR_NONE = ("an integer from 1 on, or null", lambda value: value is None or (is_size(value) and value > 0))
# What a Trainer writes, each with the values that it can have; `data_state` is the user's own.
_RECORDED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": (f"an integer from 0 to {_MAX_STEP - 1}", lambda value: is_size(value) and value < _MAX_STEP),
    "seed": ("an integer", lambda value: type(value) is int),
    **dict.fromkeys(("fit", "epoch", "examples"), _SIZE),
    "data_state": ("any JSON", lambda value: True),
    **dict.fromkeys(("train_size", "batch_size", "accumulate_grad_batches"), _SIZE_OR_NONE),
    "drop_remainder": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "sample": ("a crc32, or null", lambda value: value is None or (is_size(value) and value < 2**32)),
    "best": ("a value and a step for each tag", _is_best),
    "n_skipped": _SIZE,
    "learning_rate": ("a number, or null", lambda value: value is None or _is_number(value)),
    "metrics": ("an object", lambda value: isinstance(value, dict)),
}
# What earlier releases did not write, and what it was then.
_SINCE: dict[str, Any] = {
    **dict.fromkeys(("batch_size", "accumulate_grad_batches", "drop_remainder", "sample", "learning_rate")),
    "n_skipped": 0,
    "metrics": {},
}


def check_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise DamagedError where a checkpoint's record is not one that a Trainer has written."""
    for name, (rule, is_right) in _RECORDED.items():
        if name not in record and name not in _SINCE:
            raise damaged(folder / RECORD, f"`{name}`, {rule}", "none")
        if not is_right(value := record.get(name, _SINCE.get(name))):
            raise damaged(folder / RECORD, f"`{name}` to be {rule}", brief(value))


@dataclass(frozen=True)
class Options:
    """The arguments of `Trainer.fit`, which documents them."""

    train_examples: Any
    per_device_batch_size: int | None
    n_epochs: int
    eval_examples: Any = None
    eval_per_device_batch_size: int | None = None
    eval_loss: bool = True
    eval_predictor: Any = None
    eval_metric_fn: Callable[[Any, list], Mapping[str, Any]] | None = None
    eval_sanity_check: bool = True
    eval_every_n_steps: int | None = None
    save_every_n_steps: int | None = None
    save_ckpt_every_k_epochs: int | None = None
    save_last_ckpt: bool = False
    save_argmin_ckpt_by_metrics: Sequence[str] = ()
    save_argmax_ckpt_by_metrics: Sequence[str] = ()
    keep_last: int = 2
    save_opt_states: bool = True
    save_float_dtype: Any = None
    resume: bool = True
    batch_size: int | None = None
    eval_batch_size: int | None = None
    drop_remainder: bool = False
    save_end: bool = True

    @property
    def tracked(self) -> dict[str, tuple[str, float]]:
        """For each tag of a best checkpoint its metric, and +1 where more is better, -1 where less is."""
        least = {f"argmin_{name}": (name, -1.0) for name in self.save_argmin_ckpt_by_metrics}
        return {**least, **{f"argmax_{name}": (name, 1.0) for name in self.save_argmax_ckpt_by_metrics}}

    @property
    def plain(self) -> dict[str, Any]:
        """What of them is a number, a word or nothing, and how many examples there are."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sizes = {f"len({name})": size_of(values[name]) for name in ("train_examples", "eval_examples")}
        return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)} | sizes

    @property
    def evaluates(self) -> bool:
        return self.eval_examples is not None and (self.eval_loss or self.eval_metric_fn is not None)

    @property
    def saves(self) -> bool:
        return bool(self.save_every_n_steps or self.save_ckpt_every_k_epochs or self.save_last_ckpt or self.tracked)

    def check(self, workdir: Path | None) -> None:
        """Raise for arguments that cannot work, before any work."""
        for name in ("n_epochs", "keep_last"):
            check_count(getattr(self, name), name)
        optional = (
            "eval_every_n_steps",
            "save_every_n_steps",
            "save_ckpt_every_k_epochs",
        )
        for name in optional:
            check_count(getattr(self, name), name, optional=True)
        for name in ("save_argmin_ckpt_by_metrics", "save_argmax_ckpt_by_metrics"):
            if isinstance(getattr(self, name), str):
                raise TypeError(
                    f"`{name}`: expected names of metrics in a list, got a string. Write [{getattr(self, name)!r}]."
                )
        check_examples(self.train_examples)
        check_readable_again(self.train_examples, "train_examples", self.n_epochs)
        if self.eval_examples is not None and size_of(self.eval_examples) is None:
            found = type(self.eval_examples).__name__
            raise TypeError(f"`eval_examples`: expected `len()` and integer items, got {found}. Pass a list.")
        if self.eval_examples is not None:
            check_examples(self.eval_examples, "eval_examples")
        if self.eval_metric_fn is not None:
            check_function(self.eval_metric_fn, "eval_metric_fn", ["examples", "outputs"])
        if self.eval_predictor is not None:
            check_predictor(self.eval_predictor)
        if self.eval_metric_fn is not None and self.eval_predictor is None:
            raise ValueError("`eval_metric_fn`: expected with an `eval_predictor`, got None. Pass the predictor too.")
        needs_eval = self.eval_predictor is not None or self.eval_every_n_steps or self.tracked
        if needs_eval and not self.evaluates:
            raise ValueError(
                "`eval_examples`: expected examples and something to evaluate, got "
                f"{'none' if self.eval_examples is None else 'no `eval_loss` and no `eval_metric_fn`'}. "
                "The evaluation that was asked for needs them."
            )
        if self.saves and workdir is None:
            raise ValueError("`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`.")


class DamagedCheckpoint(DamagedError):
    """A checkpoint that a fit was about to go on from turned out to be damaged while it was read."""


@dataclass
class Fit:
    """One fit of a trainer, under way."""

    trainer: Any
    options: Options
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest evaluation
    warned: set[Path] = field(default_factory=set)  # of damaged checkpoints

    def __post_init__(self) -> None:
        options, trainer = self.options, self.trainer
        options.check(trainer.deployer.workdir)
        self.size = trainer._size(options.per_device_batch_size, options.batch_size)
        rows = (options.eval_per_device_batch_size, options.eval_batch_size)
        mesh = trainer.deployer.mesh
        given = rows != (None, None)
        self.eval_size = (
            BatchSize.of(mesh, *rows, prefix="eval_") if given else BatchSize(self.size.micro_batch, self.size.micro_batch)
        ).evenly(None if options.eval_examples is None else size_of(options.eval_examples), mesh.size)

    def run(self) -> dict[str, float]:
        """Train to the end of the last epoch; returns the metrics of the last evaluation."""
        options, trainer = self.options, self.trainer
        trainer.deployer.peers.agree("fit", options.plain)
        with nullcontext() if trainer._checkpoints is None else trainer._checkpoints.writing():
            while True:
                try:
                    return self._run()
                except DamagedCheckpoint:
                    trainer.deployer.forget_records()  # before the first step: begun anew from the checkpoint before

    def _run(self) -> dict[str, float]:
        options, trainer = self.options, self.trainer
        start = self._begin()
        if start is None:
            trainer._ensure_placed(None)
            trainer.deployer.log_info("this fit is done already: the checkpoint was saved after it")
            trainer._n_fits += 1
            return self.metrics
        progress = trainer.deployer.console.progress(n_epochs=options.n_epochs, first_step=trainer.step)
        listening = trainer.deployer.preemption.listening() if trainer._checkpoints is not None else nullcontext()
        try:
            with listening, trainer.deployer.watch.on(), progress:
                for epoch in range(start.epoch, options.n_epochs):
                    self._epoch(epoch, start if epoch == start.epoch else Position(start.fit, epoch), progress, start)
                self._keep_end(progress)
        except BaseException:
            if trainer._checkpoints is not None:
                trainer._checkpoints.settle()
            raise
        trainer._n_fits += 1
        if trainer._checkpoints is not None:
            trainer._checkpoints.wait()
        self._summarise()
        return self.metrics

    def job(self) -> Job:
        """What a dry run compiles: the first step, and what evaluations and checkpoints this fit is asked for."""
        options, trainer = self.options, self.trainer
        job = self._job(trainer, next(self.steps(0, Position())), self._first_evaluated() if options.evaluates else [])
        if options.saves or (options.save_end and trainer.deployer.workdir is not None):
            job = replace(job, files=trainer._files(options))
        return job

    def _job(self, trainer: Any, step: Slice, examples: list[Any]) -> Job:
        """The job of this fit's trainer, or of one whose model has fewer blocks."""
        options = self.options
        job = trainer._job(step, self.size)
        job = replace(job, with_model=lambda model, names: self._job(trainer._with_model(model, names), step, examples))
        if options.evaluates:
            rows = max(1, self.eval_size.micro_batch // trainer.deployer.n_batch_shards)
            if options.eval_loss:
                batch = collated_shapes(trainer._collate_fn, examples)
                job = replace(job, eval_batch=batch, eval_per_device_batch_size=rows)
            if (predictor := options.eval_predictor) is not None:
                job = replace(job, trace_predict=lambda program: predictor.trace(trainer.model, examples, rows, program))
        return job

    # --- where to begin ----------------------------------------------------------------------------------------------

    def _begin(self) -> Position | None:
        """Where this fit starts from; None where an earlier run has done it already, and later ones too."""
        trainer = self.trainer
        fit = trainer._n_fits
        if trainer._follows is None:
            self._find_earlier_run()
        elif not self.options.resume and trainer._follows and trainer._standing.position.fit == fit:
            fit = trainer._n_fits = fit + 1  # the one that was interrupted is given up
        if trainer._follows is False:
            trainer._standing.position, trainer._follows = Position(fit), True
        trainer.deployer.begin_records(trainer.step)
        standing = trainer._standing
        if fit < standing.position.fit:
            self.metrics = dict(standing.metrics)
            return None
        if fit > standing.position.fit:
            standing.position, standing.setting, standing.metrics = Position(fit), {}, {}
        self.metrics = dict(standing.metrics)
        start = standing.position
        if start.epoch >= self.options.n_epochs:
            trainer.deployer.log_info(f"epoch {start.epoch} of {self.options.n_epochs} is done already: nothing to train")
        return start

    def _find_earlier_run(self) -> None:
        """Take up what the workdir's newest checkpoint holds, if there is one."""
        trainer, checkpoints = self.trainer, self.trainer._checkpoints
        if checkpoints is None:
            trainer._follows = False
            return
        checkpoints.wait()
        there = checkpoints.newest()
        if there and not self.options.resume:
            raise ValueError(
                f"`workdir`: expected no checkpoints, as `resume=False`, got {there[0]}. "
                "Pass `resume=True` to go on from it, or another workdir to begin anew."
            )
        path, record = self._first_whole(there)
        if path is None:
            trainer._standing = Standing(n_skipped=trainer._standing.n_skipped)  # what was loaded from elsewhere begins anew
            trainer._follows = False
            return
        if record["seed"] != trainer.deployer.jax_seed:
            raise ValueError(
                f"`jax_seed`: expected {record['seed']}, as in {path}, got {trainer.deployer.jax_seed}. "
                "Pass the same seed to go on, or another workdir to begin anew."
            )
        trainer._standing, trainer._follows = Standing.of_record(record), True
        trainer._resume_from(path, record["step"])
        trainer.deployer.log_info(f"resuming from {path}, step {trainer.step}")

    def _first_whole(self, there: Sequence[Path]) -> tuple[Path | None, dict[str, Any]]:
        """The first of these checkpoints that shows no damage before its tensors are read, with its record; each that does
        is warned of.

        Raises ValueError where none is left: a run is not begun anew over what may be mended.
        """
        checkpoints = self.trainer._checkpoints
        assert checkpoints is not None
        problem: DamagedError | None = None
        for path in there:
            error = checkpoints.damage(path)
            if error is None:
                try:
                    # Tensors are verified while they are restored, for which this fit must be able to begin once more.
                    record = checkpoints.record(path, tensors=hasattr(self.options.train_examples, "__next__"))
                    check_record(path, record)
                    return path, record
                except DamagedError as raised:
                    error = raised
            checkpoints.note_damage(path, error)
            if path not in self.warned:
                self.warned.add(path)
                warnings.warn(f"{error} It is passed over for the one before.", stacklevel=6)
            problem = problem or error
        if problem is not None:
            checkpoints.forget_damage()
            raise problem
        return None, {}

    def _compare(self, start: Position, n: int | None, sample: int | None) -> None:
        """Compare what this fit is given with what the run that it goes on with was begun with, and take it down.

        Raises ValueError where its steps would hold other examples; says whatever else differs.
        """
        options, trainer = self.options, self.trainer
        standing = trainer._standing
        now = {
            "batch_size": self.size.examples,
            "train_size": n,
            "drop_remainder": options.drop_remainder,
            "accumulate_grad_batches": trainer._accumulate,
            "sample": sample,
        }
        # Of a function's epochs only one that was stopped within has to be the same again.
        is_same_data = start.examples or not is_function(options.train_examples)
        differs = {
            name: (was, now[name])
            for name, was in standing.setting.items()
            if now[name] is not None and now[name] != was and (is_same_data or name not in ("train_size", "sample"))
        }
        if "batch_size" in differs:
            was, found = differs["batch_size"]
            raise ValueError(
                f"`batch_size`: expected {was} examples an update, as in the run that is resumed, got {found}. "
                f"Pass `batch_size={was}`, from which the rows a device follow on any mesh, or choose another workdir."
            )
        if "train_size" in differs:
            was, found = differs["train_size"]
            raise ValueError(
                f"`train_examples`: expected {was}, as in the run that is resumed, got {found}. "
                "Its order of examples would be another one. For new examples choose another workdir."
            )
        said = [
            "other examples" if name == "sample" else f"`{name}` {found}, before {was}"
            for name, (was, found) in differs.items()
        ]
        was, schedule = standing.learning_rate, trainer._lr_schedule_fn
        if was is not None and schedule is not None and trainer.step:
            found = float(schedule(trainer.step - 1 - standing.n_skipped))
            if not math.isclose(found, was, rel_tol=1e-5, abs_tol=1e-12):
                said.append(f"a learning rate at step {trainer.step} of {found:.6g}, before {was:.6g}")
        if said:
            trainer.deployer.log_info(f"resumed with settings that differ: {'; '.join(said)}")
        standing.setting, standing.learning_rate = now, None

    # --- an epoch ----------------------------------------------------------------------------------------------------

    def steps(self, epoch: int, start: Position, examples: Any = None) -> Iterator[Slice]:
        """The examples of each step of an epoch, from where it starts.

        **Arguments:**

        - `examples`: of the epoch, where the caller has them already.
        """
        options, trainer = self.options, self.trainer
        return slices(
            examples_of(options.train_examples, epoch) if examples is None else examples,
            self.size.examples,
            seed=(trainer.deployer.jax_seed, start.fit, epoch),
            position=start.examples,
            state=start.data_state,
            drop_remainder=options.drop_remainder,
        )

    def _epoch(self, epoch: int, start: Position, progress: Progress, first: Position) -> None:
        options, trainer = self.options, self.trainer
        examples = examples_of(options.train_examples, epoch)
        n = size_of(examples)
        if start is first:
            self._compare(start, n, sample_of(examples))
        else:
            trainer._standing.setting["train_size"] = n
        if n is not None:
            left = n_slices(n - start.examples, self.size.examples, options.drop_remainder)
            later = (options.n_epochs - epoch - 1) * n_slices(n, self.size.examples, options.drop_remainder)
            progress.n_steps = trainer.step + left + later
        with closing(trainer._batches(self.steps(epoch, start, examples), self.size)) as upcoming:
            if start is first:
                # Before anything else is placed or evaluated: the plan is the loss's.
                if (batch := upcoming.peek()) is not None:
                    trainer._ensure_placed(batch.micro_batch)
                if options.eval_examples is not None and options.eval_sanity_check:
                    self._check_evaluation(progress)
            with closing(trainer._updates(upcoming, progress, start.fit, epoch)) as updates:
                for _, is_last in updates:
                    if is_last:
                        break  # what is due then is due at the end of the epoch
                    tags = self._evaluate(progress) if _is_due(trainer.step, options.eval_every_n_steps) else set()
                    self._keep(tags, progress)
        trainer._flush(progress)
        trainer._standing.position = Position(start.fit, epoch + 1)
        tags = self._evaluate(progress) if options.evaluates else set()
        if _is_due(epoch + 1, options.save_ckpt_every_k_epochs):
            tags.add(f"epoch_{epoch + 1}")
        self._keep(tags, progress, is_due=options.save_last_ckpt)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _measure(self, examples: Any, progress: Progress) -> dict[str, float]:
        options, trainer = self.options, self.trainer
        metrics: dict[str, float] = {}
        with progress.pause("evaluating"):
            if options.eval_loss:
                metrics.update(trainer._eval_metrics(examples, self.eval_size))
            if options.eval_predictor is not None:
                with trainer.deployer.watch.paused():
                    rows = self.eval_size.micro_batch
                    outputs = options.eval_predictor.predict(examples, batch_size=rows, model=trainer.model)
                    if options.eval_metric_fn is not None:
                        metrics.update(as_metrics(options.eval_metric_fn(examples, outputs), taken=list(metrics)))
            with trainer.deployer.watch.paused():  # others may be at theirs for any time
                metrics = trainer.deployer.peers.decide("eval_metric_fn", metrics)
        missing = sorted({name for name, _ in options.tracked.values()} - set(metrics))
        if missing:
            raise ValueError(
                f"`save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: expected metrics among {sorted(metrics)}, "
                f"which the evaluation returns, got {missing}. Return them from `eval_metric_fn`, or drop them."
            )
        return metrics

    def _check_evaluation(self, progress: Progress) -> None:
        """Run the whole evaluation on one batch, so that a mistake in it shows before training and not after an epoch."""
        self._measure(self._first_evaluated(), progress)

    def _first_evaluated(self) -> list[Any]:
        """The first examples of the evaluation, a batch of them."""
        n = min(size_of(self.options.eval_examples) or 0, self.eval_size.micro_batch)
        return [self.options.eval_examples[i] for i in range(n)]

    def _evaluate(self, progress: Progress) -> set[str]:
        """Evaluate; returns the tags of which this is now the best checkpoint."""
        trainer = self.trainer
        trainer._flush(progress)
        self.metrics = self._measure(self.options.eval_examples, progress)
        trainer._standing.metrics = self.metrics
        console = trainer.deployer.console
        console.metrics({f"eval_{name}": value for name, value in self.metrics.items()}, trainer.step)
        console.info(f"step {trainer.step}: " + ", ".join(f"eval {k} {v:.5g}" for k, v in self.metrics.items()))
        better = set()
        for tag, (name, sign) in self.options.tracked.items():
            value, best = self.metrics[name], trainer._standing.best.get(tag)
            if value == value and (best is None or sign * value > sign * best["value"]):  # NaN is never the best
                trainer._standing.best[tag] = {"value": value, "step": trainer.step}
                better.add(tag)
        return better

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _keep(self, tags: set[str], progress: Progress, *, is_due: bool = False) -> None:
        """Save this step where that is due, or the run has been told to stop, which it then does; after every step."""
        step = self.trainer.step
        is_told_to_stop = self.trainer._checkpoints is not None and self.trainer.deployer.preemption.is_due(step)
        if tags or is_due or is_told_to_stop or _is_due(step, self.options.save_every_n_steps):
            self._save(tags, progress, to_resume=is_told_to_stop)
        if is_told_to_stop:
            self._stop()

    def _keep_end(self, progress: Progress) -> None:
        """Save the end of the fit, unless the newest checkpoint is of it."""
        options, trainer = self.options, self.trainer
        if trainer._held is None:  # no step was to be taken; the examples are known all the same, and with them the plan
            examples = examples_of(options.train_examples, 0)
            step = None if size_of(examples) is None else next(self.steps(0, Position(trainer._n_fits), examples))
            mesh = trainer.deployer.mesh
            trainer._ensure_placed(
                None if step is None else micro_batch_shapes(trainer._collate_fn, step.examples, self.size, mesh)
            )
        end = (trainer.step, trainer._standing.position)
        if options.save_end and trainer._checkpoints is not None and trainer._standing.saved != end:
            self._save(set(), progress)

    def _save(self, tags: set[str], progress: Progress, *, to_resume: bool = False) -> None:
        """Save this step as the options say; `to_resume`, all of it, as a run that is told to stop is to go on."""
        options, trainer = self.options, self.trainer
        trainer._flush(progress)  # a loss that is not finite raises here, before anything is written
        step, names = trainer.step, ", ".join(["last", *sorted(tags)])
        with progress.pause("saving"):
            trainer._save(
                sorted(tags),
                metrics=self.metrics,
                keep_last=options.keep_last,
                save_opt_states=options.save_opt_states or to_resume,
                save_float_dtype=None if to_resume else options.save_float_dtype,
                then=lambda path: trainer.deployer.console.info(f"step {step}: saved {path} ({names})"),
            )

    def _stop(self) -> None:
        """End the script, told to by a signal, once the last step is safe."""
        trainer = self.trainer
        assert trainer._checkpoints is not None
        trainer._checkpoints.wait()
        trainer.deployer.preemption.end(trainer.step, trainer.deployer.console.info)

    def _summarise(self) -> None:
        trainer = self.trainer
        rows = {"steps": f"{trainer.step:,}"}
        rows.update({f"eval {name}": f"{value:.6g}" for name, value in self.metrics.items()})
        if trainer._checkpoints is not None:
            index = trainer._checkpoints.index()
            for tag in self.options.tracked:
                if tag in trainer._standing.best and tag in index:
                    best = trainer._standing.best[tag]
                    rows[tag] = f"{best['value']:.6g} at step {best['step']}: {trainer._checkpoints.resolve(tag)}"
            if "last" in index:
                rows["last"] = str(trainer._checkpoints.resolve("last"))
        trainer.deployer.console.summary(rows)


def _is_due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
