"""What a fit does besides its steps, as callbacks: evaluations, best checkpoints, and saves.

They use the interface of `Callback`, as the user's callbacks do. A fit calls them in the order `Evaluate`, `KeepBest`, the
user's callbacks, `Save`: so a user's callback sees the evaluation of its step, and a checkpoint holds the state of callbacks
that have seen the step.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from ..data import size_of
from ..errors import as_metrics, note
from ._callbacks import Callback
from ._loops import evaluate

_SANITY_CHECK = (
    "Raised by the check before training, which evaluates the first {} of {} examples, so that mistakes show early. If a "
    "metric needs more of them, pass `eval_sanity_check=False`."
)


def is_due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0


class Evaluate(Callback):
    """Evaluates one batch before the first step, and all examples at steps, at the end of epochs and of the fit."""

    def __init__(self, fit: Any):
        self._fit = fit
        self._at: int | None = None  # the step of the newest evaluation

    def wants(self, step: int) -> bool:
        return not self._fit.ends_epoch and is_due(step, self._fit.options.eval_every_n_steps)

    def on_fit_start(self, trainer: Any) -> None:
        options, fit = self._fit.options, self._fit
        if options.eval_examples is None or not options.eval_sanity_check or fit.is_at_last_step:
            return
        sets = options.eval_sets
        some = {prefix: fit.first_evaluated(examples) for prefix, examples in sets.items()}
        n_some, n_all = (sum(size_of(examples) or 0 for examples in of.values()) for of in (some, sets))
        with nullcontext() if n_some == n_all else note(_SANITY_CHECK.format(n_some, n_all)):
            self._metrics_of(some)
        fit.stop_requested = False  # a fit is not stopped for the metrics of its first batch

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._evaluate()

    def on_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self._fit.options.evaluates:
            self._evaluate()

    def on_last_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        fit = self._fit
        if fit.options.evaluates and fit.engine.step not in (fit.began_at, self._at):  # stopped within an epoch
            self._evaluate()

    def _evaluate(self) -> None:
        self._at = self._fit.engine.step
        self._fit.report(self._metrics_of(self._fit.options.eval_sets))

    def _metrics_of(self, sets: Mapping[str, Any]) -> dict[str, float]:
        options, engine = self._fit.options, self._fit.engine
        metrics: dict[str, float] = {}
        with engine.line.pause("evaluating"):
            for prefix, examples in sets.items():
                own = {f"{prefix}{name}": value for name, value in self._metrics_of_set(examples).items()}
                if clash := own.keys() & metrics.keys():
                    got = f"two of `{min(clash)}`"
                    raise ValueError(f"`eval_examples`: expected one metric of each name, got {got}. Rename a set.")
                metrics |= own
            metrics = engine.deployer.peers.decide("eval_metric_fn", metrics)
        missing = sorted({name for name, _ in options.tracked.values()} - set(metrics))
        if missing:
            raise ValueError(
                f"`save_argmin_ckpt_by_metrics`, `save_argmax_ckpt_by_metrics`: expected metrics among {sorted(metrics)}, "
                f"which the evaluation returns, got {missing}. Return them from `eval_metric_fn`, or drop them."
            )
        return metrics

    def _metrics_of_set(self, examples: Any) -> dict[str, float]:
        options, fit, engine = self._fit.options, self._fit, self._fit.engine
        metrics = evaluate(engine, examples, fit.eval_size_of_loss) if options.eval_loss else {}
        if options.eval_predictor is not None:
            size = fit.eval_size(examples).micro_batch
            outputs = options.eval_predictor.predict(examples, batch_size=size, model=engine.eval_model)
            if options.eval_metric_fn is not None:
                engine.deployer.watch.beat()
                metrics |= as_metrics(options.eval_metric_fn(examples, outputs), taken=list(metrics))
        return metrics


class KeepBest(Callback):
    """Names the checkpoint of a step at which a metric is the best so far."""

    def __init__(self, fit: Any):
        self._fit = fit

    def on_eval(self, trainer: Any, metrics: dict[str, float]) -> None:
        progress, step = self._fit.progress, self._fit.engine.step
        for tag, (name, sign) in self._fit.options.tracked.items():
            value, best = metrics[name], progress.best.get(tag)
            if value == value and (best is None or sign * value > sign * best["value"]):  # NaN is never the best
                progress.best[tag] = {"value": value, "step": step}
                self._fit.checkpointer.tags.add(tag)


class Save(Callback):
    """Saves at steps, at the end of epochs and of the fit, where a best checkpoint is due, and before a preempted script
    ends."""

    def __init__(self, fit: Any):
        self._fit = fit
        self._is_preempted = False

    def wants(self, step: int) -> bool:
        return not self._fit.ends_epoch and self._is_wanted(step)

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._save()

    def on_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        fit, n_epochs = self._fit, self._fit.engine.position.epoch
        if is_due(n_epochs, fit.options.save_ckpt_every_k_epochs):
            n_fits = fit.engine.position.fit + 1
            fit.checkpointer.tags.add(f"fit_{n_fits}_epoch_{n_epochs}" if n_fits > 1 else f"epoch_{n_epochs}")
        if self._is_wanted(fit.engine.step) or fit.options.save_last_ckpt:
            self._save()

    def on_last_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        fit = self._fit
        is_saved = fit.progress.saved == (fit.engine.step, fit.engine.position)
        if fit.checkpointer.tags or (fit.options.save_end and fit.checkpointer.checkpoints is not None and not is_saved):
            self._save()

    def _is_wanted(self, step: int) -> bool:
        """Whether this step is to be saved. All processes call it after every step."""
        fit, checkpoints = self._fit, self._fit.checkpointer.checkpoints
        if checkpoints is not None:
            checkpoints.check()
            self._is_preempted = fit.engine.deployer.preemption.is_due(step)
        return self._is_preempted or bool(fit.checkpointer.tags) or is_due(step, fit.options.save_every_n_steps)

    def _save(self) -> None:
        """Saves this step by the options; a preempted one with everything that resuming needs, and then ends the script."""
        fit, engine, options = self._fit, self._fit.engine, self._fit.options
        engine.flush()  # raises for a loss that is not finite, before anything is written
        step, tags = engine.step, sorted(fit.checkpointer.tags)
        names = ", ".join(["last", *tags])
        fit.checkpointer.save(
            tags,
            keep_last=options.keep_last,
            save_opt_states=options.save_opt_states or self._is_preempted,
            save_float_dtype=None if self._is_preempted else options.save_float_dtype,
            is_of_fit=True,
            then=lambda path: engine.deployer.console.info(f"step {step}: saved {path} ({names})"),
        )
        fit.progress.saved = (step, engine.position)  # as the options say, maybe without what resuming needs
        if self._is_preempted:
            assert fit.checkpointer.checkpoints is not None
            fit.checkpointer.checkpoints.wait()
            engine.deployer.preemption.end(step, engine.deployer.console.info)
