"""Callbacks: the interface, and two of them. `_handlers.py` has those of every fit, and calls all of them.

`Callback` is the interface; `EarlyStopping`, `Profile` and the `SaveEvery` of `_save_every.py` use nothing else.
"""

import math
from typing import Any

import jax

from ..compiled import profile_of
from ..errors import check_choice, check_count, check_number, filter_traceback
from ..storage import Location, make_subfolder, write_file


class Callback:
    """Acts during `Trainer.fit(callbacks=[...])`. Override the methods that you need; each does nothing by default.

    A method is called when everything about its moment is known: in `on_step`, `metrics` are those of the step
    `trainer.step`, and `trainer.model` is the model after it. Callbacks are called in the order of the list. They may log
    (`trainer.deployer.log_metrics`), save (`trainer.save_ckpt`) and stop the fit (`trainer.stop`). With several processes
    every process calls its own callbacks, and process 0 decides whether the fit stops; for other decisions use
    `trainer.deployer.decide`.

    ```python
    class Norm(redeqx.Callback):
        every = 100

        def on_step(self, trainer, metrics):
            norm = float(optax.tree.norm(eqx.filter(trainer.model, eqx.is_array)))
            trainer.deployer.log_metrics({"norm": norm}, trainer.step)

    trainer.fit(examples, batch_size=32, callbacks=[Norm()])
    ```

    **Attributes:**

    - `every`: `on_step` is called after every `every` steps. The loop waits for the device at these steps; without a
        callback that overrides `on_step` it never waits.
    - `needs_eval`: whether the callback only works with evaluations; a fit without them is then an error.
    """

    every: int = 1
    needs_eval: bool = False

    def wants(self, step: int) -> bool:
        """Returns whether `on_step` is called after this step: by default every `every` steps."""
        return step % self.every == 0

    def on_fit_start(self, trainer: Any) -> None:
        """Called before the first step of a fit, when the model is on the mesh and a resumed state is loaded."""

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after a step, with its metrics."""

    def on_eval(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after an evaluation, with its metrics, and before the checkpoint of the same step is saved."""

    def on_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after an epoch, before its checkpoint is saved, with the metrics of its evaluation, or without one, of its
        last step."""

    def on_last_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called once after the last step of a fit, even if it was stopped, before its end is saved."""

    def on_save(self, trainer: Any, path: Location) -> None:
        """Called after a checkpoint is complete on disk; the loop waits for this if a callback overrides this method. The
        checkpoint holds the callback's state from before this call."""

    def on_fit_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after a fit, with the metrics that it returns."""

    def close(self) -> None:
        """Called after a fit, even if it raised: release what was opened."""

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint keeps of this callback, by name: JSON values and arrays."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned when the checkpoint was saved; arrays are NumPy's."""


class EarlyStopping(Callback):
    """Stops a fit when a metric of its evaluations no longer improves.

    ```python
    trainer.fit(
        examples, batch_size=32, n_epochs=100, eval_examples=held_out, save_argmin_ckpt_by_metrics=["loss"],
        callbacks=[redeqx.EarlyStopping("loss", patience=3)],
    )
    trainer.load_ckpt("argmin_loss")
    ```

    **Arguments:**

    - `metric`: its name in the evaluation.
    - `patience`: the fit stops after this many evaluations in a row without an improvement.
    - `mode`: `"min"` if less is better, `"max"` if more is.
    - `min_delta`: the smallest change that counts as an improvement.

    Raises ValueError in a fit without an evaluation, and at the first evaluation without the metric.
    """

    needs_eval = True

    metric: str
    patience: int
    mode: str
    min_delta: float
    best: float | None
    n_worse: int

    @filter_traceback
    def __init__(self, metric: str, patience: int, mode: str = "min", min_delta: int | float = 0.0):
        check_count(patience, "patience")
        check_choice(mode, "mode", ("min", "max"))
        advice = "Pass the least change that counts."
        check_number(min_delta, "min_delta", "a number of at least 0", lambda least: least >= 0, advice)
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best, self.n_worse = None, 0

    def on_fit_start(self, trainer: Any) -> None:
        if self.n_worse >= self.patience:  # the resumed fit had been stopped already
            trainer.stop()

    def on_eval(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self.metric not in metrics:
            raise ValueError(
                f"`EarlyStopping.metric`: expected one of {sorted(metrics)}, which the evaluation returns, got "
                f"{self.metric!r}. Return it from `eval_metric_fn`, or pass another."
            )
        value = metrics[self.metric]
        gain = -math.inf if self.best is None else (self.best - value) * (1 if self.mode == "min" else -1)
        if not math.isnan(value) and (self.best is None or gain > self.min_delta):
            self.best, self.n_worse = value, 0
            return
        self.n_worse += 1
        if self.n_worse >= self.patience:
            best = "no number yet" if self.best is None else f"{self.best:.6g}"
            trainer.deployer.log_info(
                f"step {trainer.step}: stopping, as {self.metric} has not improved on {best} for {self.n_worse} evaluations"
            )
            trainer.stop()

    def on_fit_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.best, self.n_worse = None, 0  # the next fit starts afresh

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, "best": self.best, "n_worse": self.n_worse}

    def load_state(self, state: dict[str, Any]) -> None:
        if (state.get("metric", self.metric), state.get("mode", self.mode)) == (self.metric, self.mode):  # else of another
            self.best, self.n_worse = state["best"], state["n_worse"]


class Profile(Callback):
    """Traces some steps with `jax.profiler`, and prints the ten costliest operations in process 0: the time of each per
    step, its share, and the line of your code that it comes from.

    ```python
    trainer.fit(examples, batch_size=32, callbacks=[redeqx.Profile(range(10, 13))])
    ```

    The trace is written to `workdir/profile`, for TensorBoard or Perfetto, with the table beside it in `profile.txt`. Times
    are means over devices; concurrent operations all count, so shares may sum to more than 100 %.

    **Arguments:**

    - `steps`: a range of steps, counted from 1 as in `trainer.step`. Leave out the first two, which compile.

    Raises ValueError for an empty range or anything but a range, and without a workdir.
    """

    @filter_traceback
    def __init__(self, steps: range):
        if not isinstance(steps, range) or not steps or steps.step != 1 or steps.start < 1:
            raise ValueError(
                f"`Profile.steps`: expected a range of steps from 1 on, got {steps!r}. Pass `range(10, 13)` for three steps."
            )
        self.steps = steps
        self._is_tracing = False

    def wants(self, step: int) -> bool:
        return step in (self.steps[0] - 1, self.steps[-1])  # before the first step, and after the last

    def on_fit_start(self, trainer: Any) -> None:
        need_workdir(trainer, "Profile")
        if trainer.step == self.steps[0] - 1:
            self._start(trainer)

    def on_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.step < self.steps[-1]:
            self._start(trainer)
        elif self._is_tracing:
            self.close()
            self._report(trainer)

    def _start(self, trainer: Any) -> None:
        if jax.process_index() == 0:
            workdir = trainer.deployer.local_workdir
            make_subfolder(workdir / "profile" / "plugins" / "profile", workdir)  # JAX makes a folder for each trace in it
            jax.profiler.start_trace(str(workdir / "profile"))
            self._is_tracing = True

    def _report(self, trainer: Any) -> None:
        traces = (trainer.deployer.local_workdir / "profile").rglob("*.xplane.pb")
        trace = max(traces, key=lambda path: path.stat().st_mtime_ns)
        found = profile_of(trace, trainer.compiled_step.as_text() or "", len(self.steps))
        if found is None:
            trainer.deployer.log_info(f"profile: {trace} has no operation of the train step by name")
            return
        text = found.text()
        write_file(trace.with_name("profile.txt"), f"{text}\n".encode())
        title = f"profile of steps {self.steps[0]} to {self.steps[-1]}: {trace.parent}"
        trainer.deployer.log_info(text, title=title)

    def close(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def need_workdir(trainer: Any, name: str) -> None:
    """Raises ValueError for a run that records nothing."""
    if trainer.deployer.workdir is None:
        raise ValueError(f"`{name}`: expected a `workdir` to write to, got None. Pass `Deployer(workdir=...)`.")
