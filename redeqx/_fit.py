"""A whole run of training: epochs, evaluations, checkpoints, and going on where an earlier run stopped.

It drives a Trainer, which takes the steps. Where a run stands is four numbers (`Position`), saved beside the weights, so
that a run that was killed ends with the same bits as one that was not.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._console import Progress
from ._data import Slice, check_examples, collated_shapes, examples_of, size_of, slices
from ._dry_run import Job
from ._interrupts import Preempted
from ._record import RECORD
from ._untrusted import DamagedError, brief, damaged

if TYPE_CHECKING:
    from ._trainer import Trainer


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

    - `position`: now; `position.fit` counts the fits that are done.
    - `train_size`: examples an epoch of the fit under way; None where not known.
    - `best`: for each tag of a best checkpoint `{"value": ..., "step": ...}`.
    - `n_skipped`: steps that were skipped, as they were not finite.
    - `earlier`: where an earlier run stopped, until the fit that goes on from there begins.
    """

    position: Position = Position()
    train_size: int | None = None
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    n_skipped: int = 0
    earlier: Position | None = None

    def to_record(self) -> dict[str, Any]:
        """What `trainer.json` holds of it."""
        return {**asdict(self.position), "train_size": self.train_size, "best": self.best, "n_skipped": self.n_skipped}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Standing":
        """What `trainer.json` held, once `check_record` has found it whole."""
        position = Position(**{name: record[name] for name in ("fit", "epoch", "examples", "data_state")})
        return cls(position, record["train_size"], record["best"], record.get("n_skipped", 0))


_NUMBER = (int, float)
_RECORDED: dict[str, Any] = {
    **dict.fromkeys(("step", "seed", "fit", "epoch", "examples"), int),
    "data_state": object,
    "train_size": (int, type(None)),
    "best": dict,
}


def check_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise DamagedError where a checkpoint's record is not one that a Trainer has written."""
    for name, kind in _RECORDED.items():
        if name not in record or not isinstance(record[name], kind):
            got = brief(record[name]) if name in record else "none"
            raise damaged(folder / RECORD, f"`{name}` as a Trainer leaves it", got)
    for tag, best in record["best"].items():
        match best:
            case {"value": value, "step": int()} if isinstance(value, _NUMBER):
                pass
            case _:
                raise damaged(folder / RECORD, f"value and step of `best`'s {brief(tag)}", brief(best))


@dataclass(frozen=True)
class Options:
    """The arguments of `Trainer.fit`, which documents them."""

    train_examples: Any
    per_device_batch_size: int
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
        for name in ("per_device_batch_size", "n_epochs", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}`: expected at least 1, got {getattr(self, name)}. Pass a positive number.")
        optional = (
            "eval_per_device_batch_size",
            "eval_every_n_steps",
            "save_every_n_steps",
            "save_ckpt_every_k_epochs",
        )
        for name in optional:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}`: expected at least 1 or None, got {value}. Pass a positive number.")
        for name in ("save_argmin_ckpt_by_metrics", "save_argmax_ckpt_by_metrics"):
            if isinstance(getattr(self, name), str):
                raise TypeError(
                    f"`{name}`: expected names of metrics in a list, got a string. Write [{getattr(self, name)!r}]."
                )
        check_examples(self.train_examples)
        if self.eval_examples is not None and size_of(self.eval_examples) is None:
            found = type(self.eval_examples).__name__
            raise TypeError(f"`eval_examples`: expected `len()` and integer items, got {found}. Pass a list.")
        if self.eval_examples is not None:
            check_examples(self.eval_examples, "eval_examples")
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


@dataclass
class Fit:
    """One fit of a trainer, under way."""

    trainer: "Trainer"
    options: Options
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest evaluation

    def run(self) -> dict[str, float]:
        """Train to the end of the last epoch; returns the metrics of the last evaluation."""
        options, trainer = self.options, self.trainer
        options.check(trainer.deployer.workdir)
        trainer.deployer.peers.agree("fit", options.plain)
        start = self._begin()
        if start is None:
            trainer.deployer.log_info("this fit is done already: the checkpoint was saved after it")
            return {}
        progress = trainer.deployer.console.progress(n_epochs=options.n_epochs, first_step=trainer.step)
        listening = trainer.deployer.preemption.listening() if trainer._checkpoints is not None else nullcontext()
        try:
            with listening, progress:
                if options.eval_examples is not None and options.eval_sanity_check:
                    self._check_evaluation(progress)
                for epoch in range(start.epoch, options.n_epochs):
                    self._epoch(epoch, start if epoch == start.epoch else Position(start.fit, epoch), progress)
        except BaseException:
            if trainer._checkpoints is not None:
                trainer._checkpoints.settle()
            raise
        finally:
            trainer.deployer.watch.off()
        self._end()
        if trainer._checkpoints is not None:
            trainer._checkpoints.wait()
        self._summarise()
        return self.metrics

    def job(self) -> Job:
        """What a dry run compiles: the first step, and what evaluations and checkpoints this fit is asked for."""
        options, trainer = self.options, self.trainer
        options.check(trainer.deployer.workdir)
        job = trainer._job(next(self.steps(0, Position())), options.per_device_batch_size)
        if options.saves:
            job = replace(job, files=trainer._files(options))
        if options.evaluates:
            rows, examples = self._first_evaluated()
            if options.eval_loss:
                batch = collated_shapes(trainer._collate_fn, examples)
                job = replace(job, eval_batch=batch, eval_per_device_batch_size=rows)
            if (predictor := options.eval_predictor) is not None:
                job = replace(job, trace_predict=lambda program: predictor.trace(trainer.model, examples, rows, program))
        return job

    # --- where to begin ----------------------------------------------------------------------------------------------

    def _begin(self) -> Position | None:
        """Where this fit starts from; None where an earlier run has done it already."""
        trainer = self.trainer
        fit = trainer._standing.position.fit
        if fit == 0 and trainer.step == 0:
            self._find_earlier_run()
        if fit == 0:
            trainer.deployer.begin_records(trainer.step)
        standing = trainer._standing
        if standing.earlier is None:
            return Position(fit)
        if fit < standing.earlier.fit:
            self._end()
            return None
        start, standing.earlier = standing.earlier, None
        return start if start.fit == fit else Position(fit)

    def _end(self) -> None:
        standing = self.trainer._standing
        standing.position = Position(standing.position.fit + 1)
        if standing.earlier is None:
            standing.train_size = None

    def _find_earlier_run(self) -> None:
        """Take up what the workdir's newest checkpoint holds, if there is one."""
        trainer, checkpoints = self.trainer, self.trainer._checkpoints
        if checkpoints is None:
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
            return
        if record["seed"] != trainer.deployer.jax_seed:
            raise ValueError(
                f"`jax_seed`: expected {record['seed']}, as in {path}, got {trainer.deployer.jax_seed}. "
                "Pass the same seed to go on, or another workdir to begin anew."
            )
        earlier = Standing.of_record(record)
        trainer._standing = Standing(Position(), earlier.train_size, earlier.best, earlier.n_skipped, earlier.position)
        trainer._resume_from(path, record["step"])
        trainer.deployer.log_info(f"resuming from {path}, step {trainer.step}")

    def _first_whole(self, there: Sequence[Path]) -> tuple[Path | None, dict[str, Any]]:
        """The first of these checkpoints that is whole, with its record; each that is not is warned of.

        Raises ValueError where none of them is: a run is not begun anew over what may be mended.
        """
        checkpoints = self.trainer._checkpoints
        assert checkpoints is not None
        problem: DamagedError | None = None
        for path in there:
            try:
                record = checkpoints.record(path)
                check_record(path, record)
            except DamagedError as error:
                problem = problem or error
                warnings.warn(f"{error} It is passed over for the one before.", stacklevel=5)
                continue
            return path, record
        if problem is not None:
            raise problem
        return None, {}

    def _check_train_size(self, n: int) -> None:
        standing = self.trainer._standing
        if standing.train_size not in (None, n):
            raise ValueError(
                f"`train_examples`: expected {standing.train_size}, as in the run that is resumed, got {n}. "
                "Its order of examples would be another one. For new examples choose another workdir."
            )
        standing.train_size = n

    # --- an epoch ----------------------------------------------------------------------------------------------------

    def steps(self, epoch: int, start: Position, examples: Any = None) -> Iterator[Slice]:
        """The examples of each step of an epoch, from where it starts.

        **Arguments:**

        - `examples`: of the epoch, where the caller has them already.
        """
        options, trainer = self.options, self.trainer
        return slices(
            examples_of(options.train_examples, epoch) if examples is None else examples,
            trainer.batch_size(options.per_device_batch_size),
            seed=(trainer.deployer.jax_seed, start.fit, epoch),
            position=start.examples,
            state=start.data_state,
        )

    def _epoch(self, epoch: int, start: Position, progress: Progress) -> None:
        options, trainer = self.options, self.trainer
        examples = examples_of(options.train_examples, epoch)
        n, batch_size = size_of(examples), trainer.batch_size(options.per_device_batch_size)
        if n is not None:
            self._check_train_size(n)
            left = -(-(n - start.examples) // batch_size) + (options.n_epochs - epoch - 1) * -(-n // batch_size)
            progress.n_steps = trainer.step + left
        with closing(
            trainer._updates(self.steps(epoch, start, examples), options.per_device_batch_size, progress, epoch)
        ) as updates:
            for batch, is_last in updates:
                if is_last:
                    break  # what is due then is due at the end of the epoch
                trainer._standing.position = Position(start.fit, epoch, batch.position, batch.state)
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
        rows = options.eval_per_device_batch_size or options.per_device_batch_size
        metrics: dict[str, float] = {}
        with progress.pause("evaluating"):
            if options.eval_loss:
                metrics.update(trainer.eval_metrics(examples, rows))
            if options.eval_predictor is not None:
                with trainer.deployer.watch.paused():
                    outputs = options.eval_predictor.predict(examples, rows, model=trainer.model)
                    if options.eval_metric_fn is not None:
                        metrics.update({k: float(v) for k, v in options.eval_metric_fn(examples, outputs).items()})
        missing = sorted({name for name, _ in options.tracked.values()} - set(metrics))
        if missing:
            raise ValueError(
                f"`save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: expected metrics among {sorted(metrics)}, "
                f"which the evaluation returns, got {missing}. Return them from `eval_metric_fn`, or drop them."
            )
        return metrics

    def _check_evaluation(self, progress: Progress) -> None:
        """Run the whole evaluation on one batch, so that a mistake in it shows before training and not after an epoch."""
        self._measure(self._first_evaluated()[1], progress)

    def _first_evaluated(self) -> tuple[int, list[Any]]:
        """The rows of a batch of the evaluation, and its first examples, a batch of them."""
        options = self.options
        rows = options.eval_per_device_batch_size or options.per_device_batch_size
        n = min(size_of(options.eval_examples) or 0, rows * self.trainer.deployer.n_batch_shards)
        return rows, [options.eval_examples[i] for i in range(n)]

    def _evaluate(self, progress: Progress) -> set[str]:
        """Evaluate; returns the tags of which this is now the best checkpoint."""
        trainer = self.trainer
        trainer._flush(progress)
        self.metrics = self._measure(self.options.eval_examples, progress)
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
            self._save(tags, progress)
        if is_told_to_stop:
            self._stop()

    def _save(self, tags: set[str], progress: Progress) -> None:
        options, trainer = self.options, self.trainer
        trainer._flush(progress)  # a loss that is not finite raises here, before anything is written
        step, names = trainer.step, ", ".join(["last", *sorted(tags)])
        with progress.pause("saving"):
            trainer._save(
                sorted(tags),
                metrics=self.metrics,
                keep_last=options.keep_last,
                save_opt_states=options.save_opt_states,
                save_float_dtype=options.save_float_dtype,
                then=lambda path: trainer.deployer.console.info(f"step {step}: saved {path} ({names})"),
            )

    def _stop(self) -> None:
        """End the script, told to by a signal, once the last step is safe."""
        trainer = self.trainer
        assert trainer._checkpoints is not None
        trainer._checkpoints.wait()
        trainer.deployer.console.info(f"told to stop: step {trainer.step} is saved; run the script again to go on from it")
        raise Preempted(trainer.step)

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
