"""What a fit does besides its steps, as callbacks: evaluations, best checkpoints, and saves. And how it calls all callbacks.

The fit's own use the interface of `Callback`, as the user's do. A fit calls them in the order `Evaluate`, `KeepBest`, the
user's callbacks, `Save`: so a user's callback sees the evaluation of its step, and a checkpoint holds the state of callbacks
that have seen the step.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import jax
import numpy as np

from .._tree import nearest
from ..checkpoint import CheckpointFolder, CheckpointManager
from ..data import size_of
from ..errors import as_metrics, brief, check_count, check_function, note, warn
from ..monitor import to_json
from ..storage import Location
from ._callbacks import Callback
from ._loops import evaluate

_SANITY_CHECK = (
    "Raised by the check before training, which evaluates the first batch, {} of {} examples, so that mistakes show "
    "early. If a metric needs more of them, pass `eval_sanity_check=False`."
)
_OF_SET = "Raised by the evaluation of `eval_examples[{!r}]`."


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
                with note(_OF_SET.format(prefix[:-1])) if prefix else nullcontext():
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
        if self._is_preempted:
            assert fit.checkpointer.checkpoints is not None
            fit.checkpointer.checkpoints.wait()
            engine.deployer.preemption.end(step, engine.deployer.console.info)


# --- all callbacks of a fit ------------------------------------------------------------------------------------------

_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def _overrides(callback: Callback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(Callback, method)


class Callbacks:
    """The callbacks of one fit, the user's `own` between those of the fit itself, and the trainer that is passed to them."""

    def __init__(self, trainer: Any, before: Sequence[Callback], own: Sequence[Callback], after: Sequence[Callback]):
        self.trainer, self.own, self.each = trainer, own, [*before, *own, *after]
        self._overriding = {method: [each for each in self.each if _overrides(each, method)] for method in _METHODS}
        self.has_begun = False  # whether their states of an earlier run were restored, before the first call
        self.was_called = False  # since this was last set to False; the same in all processes
        self._is_saving = False  # within `on_save`

    @staticmethod
    def check(each: Any) -> None:
        """Raises TypeError for anything but a list of callbacks."""
        if isinstance(each, Callback) or not isinstance(each, Sequence):
            raise TypeError(f"`callbacks`: expected a list, got {type(each).__name__}. Write [callback].")
        for i, callback in enumerate(each):
            if not isinstance(callback, Callback):
                found = f"the class {callback.__name__}" if isinstance(callback, type) else type(callback).__name__
                raise TypeError(
                    f"`callbacks[{i}]`: expected a `redeqx.Callback`, got {found}. Pass an instance of a subclass."
                )
            if callback.every is not Callback.every:
                check_count(callback.every, f"callbacks[{i}].every")
            for method in _METHODS:
                if _overrides(callback, method):
                    _, *parameters = inspect.signature(getattr(Callback, method)).parameters
                    check_function(getattr(callback, method), f"callbacks[{i}].{method}", parameters)
            for name in dir(type(callback)):
                if name.startswith("on_") and name not in _METHODS and nearest(name, _METHODS):
                    warn(
                        f"`callbacks[{i}].{name}`: expected one of {', '.join(_METHODS)}, got a method that a fit never "
                        f"calls.{nearest(name, _METHODS)}"
                    )

    def call(self, method: str, *given: Callable[[], Any], step: int | None = None) -> None:
        """Calls a method of each callback that overrides it; with a `step`, of those that want it. The functions in
        `given` return the arguments after the trainer, for each callback anew: an evaluation may come before."""
        for callback in self._overriding[method]:
            if step is None or callback.wants(step):
                self.was_called = True
                getattr(callback, method)(self.trainer, *(argument() for argument in given))

    def call_on_save(self, path: Location, checkpoints: CheckpointManager) -> None:
        """Calls `on_save` once the checkpoint is on disk, except for checkpoints that are saved inside `on_save`."""
        if not self._is_saving and self._overriding["on_save"]:
            checkpoints.wait()
            self._is_saving = True
            try:
                self.call("on_save", lambda: path)
            finally:
                self._is_saving = False

    def __enter__(self) -> "Callbacks":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Closes every callback, even if another one raises. An error of the fit itself is the one that is raised."""
        failed: list[Exception] = []
        for callback in self.each:
            try:
                callback.close()
            except Exception as raised:
                failed.append(raised)
        if failed and error is None:
            raise failed[0]
        for raised in failed:
            assert error is not None
            error.add_note(f"A callback's `close` failed after it: {type(raised).__name__}: {raised}")

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the state of each callback that has one, by its class and its position among those of its class."""
        states = {key: callback.state() for key, callback in self._keyed().items()}
        return {key: state for key, state in states.items() if state}

    def begin(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restores the saved state of each callback."""
        self.has_begun = True
        for key, callback in self._keyed().items():
            if key in states:
                callback.load_state(states[key])

    def _keyed(self) -> dict[str, Callback]:
        n_before: Counter[str] = Counter()
        keyed = {}
        for callback in self.own:
            name = type(callback).__name__
            keyed[f"{name}_{n_before[name]}"] = callback
            n_before[name] += 1
        return keyed


def _not_json(values: Mapping[str, Any]) -> str | None:
    """Describes what JSON cannot hold of these values; None if it can hold all."""
    try:
        to_json(values)
    except (TypeError, ValueError) as error:
        return str(error)
    others = [key for key in _keys(values) if not isinstance(key, str)]
    return f"the key {brief(others[0])}, of which JSON makes a string" if others else None


def _keys(value: Any) -> Iterator[Any]:
    """Yields the keys of all dicts in a value."""
    if isinstance(value, Mapping):
        yield from value
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _keys(item)


def states_to_record(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the entry of callbacks' states in `trainer.json`, which has the values and the dtype and shape of each array;
    and the arrays. Raises TypeError for a state that a checkpoint cannot hold."""
    record, arrays = {}, {}
    for key, state in states.items():
        items = state.items() if isinstance(state, Mapping) else ()
        own = {name: x for name, x in items if isinstance(x, jax.Array | np.ndarray)}
        values = {name: x for name, x in items if name not in own}
        if (got := _not_json(values) if isinstance(state, Mapping) else brief(state)) is not None:
            raise TypeError(
                f"`{key}.state`: expected a dict of arrays, and of values that JSON can hold, got {got}. Return a dict, and "
                "convert what is in it."
            )
        record[key] = {"values": values, "arrays": {name: [str(x.dtype), *x.shape] for name, x in own.items()}}
        arrays |= {key: own} if own else {}
    return record, arrays


def states_of_record(record: Mapping[str, Any], checkpoints: CheckpointFolder, path: Location) -> dict[str, Any]:
    """Reads the callbacks' states from a checkpoint, given their entry in `trainer.json`."""
    template = {
        key: {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (dtype, *shape) in state["arrays"].items()}
        for key, state in record.items()
        if state["arrays"]
    }
    arrays = checkpoints.load(path, "callbacks", template) if template else {}
    return {key: {**state["values"], **arrays.get(key, {})} for key, state in record.items()}
