"""The checkpointer of a trainer: saves its engine, restores it, and knows how far its fits have come.

What a checkpoint contains is decided here; its files belong to the package `checkpoint`. `_progress.py` decides where a
fit starts.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

from .._version import __version__
from ..checkpoint import CheckpointFolder, CheckpointManager, check_savable, find_checkpoint
from ..errors import DamagedError, Once, warn
from ..storage import Location, location
from ._engine import Engine
from ._handlers import Callbacks, states_of_record, states_to_record
from ._progress import (
    Position,
    Progress,
    changed_setting,
    check_record,
    is_whole,
    numbers_of_record,
    others_of_record,
    plain_numbers,
    position_of_record,
    start,
    warn_of_unsaved,
)
from ._state import Checkpoint, Origins, checkpoint_trees, leaves_of


class Checkpointer:
    """Saves and restores one engine."""

    def __init__(self, engine: Engine):
        deployer, task, folder = engine.deployer, engine.task, engine.name or ""
        self.engine, self.progress, self.fit_index = engine, Progress(), 0  # the number of finished fits
        self.tags: set[str] = set()  # names of the running fit for the next checkpoint of this step
        self._callbacks: Callbacks | None = None  # of the running fit
        self.states: dict[str, dict[str, Any]] = {}  # of the callbacks of the fit that was resumed, or ran last
        # What the next fit does: it looks for an earlier run, begins anew, whatever `progress` says, or goes on.
        self._next: Literal["look", "begin", "go on"] = "look"
        self._is_resumed = False  # whether `progress` is that of an earlier process
        self._kept_step = 0  # the step of the newest save from which a run resumes, or of the checkpoint that was loaded
        self._keep_last = 2  # as in the newest save or fit
        self._warn_of_repeated = Once(warn)
        self.origins = Origins(task.structure, engine.trees[0], deployer.console.info)
        self.checkpoints = None
        if deployer.workdir is not None:
            self.checkpoints = CheckpointManager(
                deployer.workdir / "ckpts" / folder,
                deployer.peers,
                deployer.console.info,
                run=deployer,
                before_commit=deployer.upload,
                root=deployer.workdir,
            )
            deployer.preemption.keep(self)
            engine.checkpoints = self.checkpoints

    def need_checkpoints(self) -> CheckpointManager:
        """Returns the checkpoints of the workdir, after a running background save has ended."""
        if self.checkpoints is None:
            raise ValueError("`workdir`: expected a folder for checkpoints, got None. Pass `Deployer(workdir=...)`.")
        self.checkpoints.wait()
        return self.checkpoints

    @property
    def _is_ahead(self) -> bool:
        """Whether this script skipped fits that an earlier run had finished, and that run had begun the next one."""
        fit, position = self.fit_index, self.engine.position
        return self._is_resumed and 0 < fit <= position.fit and position != Position(fit)

    # --- fits --------------------------------------------------------------------------------------------------------

    def begin_fit(self, *, may_resume: bool) -> Position | None:
        """Returns where the next fit starts, after it was resumed; None if an earlier run has finished it.

        Raises ValueError if the workdir has a run that must not be resumed.
        """
        known = None if self._next == "begin" else self.engine.position
        if self._next == "look":
            known = self._look(may_resume=may_resume)
        position, progress = start(known, self.fit_index, may_resume=may_resume), self.progress
        self._next = "go on"
        if position is None:
            self.fit_index += 1  # that of the next fit, in which the model may be already
            return None
        self.fit_index, self._is_resumed = position.fit, False
        if position == Position(position.fit):  # the fit is a new one
            self.engine.position, progress.first_step = position, self.engine.step
            progress.setting, progress.metrics, progress.evaluated, self.states = {}, {}, 0, {}
        return position

    @contextmanager
    def keeping(self, callbacks: Callbacks, keep_last: int) -> Iterator[None]:
        """A context of a running fit. Checkpoints hold the states of its callbacks; if it fails, the next fit has them. No
        save in it keeps fewer checkpoints than the fit, or than a save before."""
        self._callbacks, self.tags, self._keep_last = callbacks, set(), keep_last
        try:
            yield
        except BaseException as error:
            if self.checkpoints is not None:
                self.checkpoints.settle()
            if callbacks.has_begun:
                try:
                    self.keep_states(callbacks)
                except Exception as other:  # the fit's own error says more
                    error.add_note(f"A callback's `state` failed after it: {type(other).__name__}: {other}")
            raise
        finally:
            self._callbacks, self.tags = None, set()

    def keep_states(self, callbacks: Callbacks) -> None:
        """Keeps the states of a fit's callbacks, for checkpoints that are saved after it."""
        self.states = callbacks.states()

    def end_fit(self, result: dict[str, float]) -> None:
        """Waits until the end of a fit is on disk."""
        results = {**self.progress.results, str(self.fit_index): result}
        self.progress.results = dict([*results.items()][-1000:])  # each checkpoint records them
        self.fit_index += 1
        if self.checkpoints is not None:
            self.checkpoints.wait()
        self.engine.deployer.upload()

    def resume(self) -> None:
        """Resumes from the newest checkpoint of the workdir, if there is one."""
        if self.checkpoints is not None:
            check_savable(self.engine.trees)
        self._look(may_resume=True)
        self._next = "go on"

    def _look(self, *, may_resume: bool) -> Position | None:
        """Resumes from the workdir's newest undamaged checkpoint, and returns how far the run has come; None without one.
        Raises ValueError if there is one and the fit may not resume, if the run had another seed, and if every checkpoint is
        damaged, since a run must not overwrite what may be repaired."""
        if self.checkpoints is None:
            return None
        self.checkpoints.wait()
        candidates = self.checkpoints.newest(lambda record: is_whole(self._others(record)))
        if candidates and not may_resume:
            raise ValueError(
                f"`workdir`: expected no checkpoints, as `resume=False`, got {candidates[0]}. "
                "Pass `resume=True` to continue from it, or another workdir for a new run."
            )
        path, record = self.checkpoints.first_valid(candidates, check_record)
        if path is None:
            # Those of a checkpoint loaded from another workdir are not this run's.
            self.progress, self.engine.position = Progress(), Position()
            return None
        engine = self.engine
        if record["seed"] != engine.deployer.jax_seed:
            raise ValueError(
                f"`jax_seed`: expected {record['seed']}, as in {path}, got {engine.deployer.jax_seed}. "
                "Pass the same seed to continue, or another workdir for a new run."
            )
        self._resume_from(path, record)
        engine.deployer.console.info(f"resuming from {path}, step {engine.step}")
        warn_of_unsaved(path, self._others(record))
        return engine.position

    def _others(self, record: Mapping[str, Any]) -> dict[str, tuple[int, list[int]]]:
        """For each of the run's other trainers its step at the time of a record, and the steps of its checkpoints."""
        assert self.checkpoints is not None
        root = self.checkpoints.folder.parent if self.engine.name else self.checkpoints.folder
        return {name: (step, CheckpointFolder(root / name).steps()) for name, step in others_of_record(record).items()}

    def use_setting(self, now: Mapping[str, Any], unknown: Collection[str]) -> None:
        """Begins a fit with the sizes of `now`, after comparing them, but for the `unknown` ones, with those of the run that
        it resumes; prints harmless differences. Raises ValueError if the steps would have other examples."""
        engine, progress = self.engine, self.progress
        if engine.step > progress.first_step:  # updates were made with the earlier sizes
            otherwise = "pass `resume=False`" if self.checkpoints is None else "choose another workdir"
            compared = {name: value for name, value in now.items() if name not in unknown}
            differences = [*changed_setting(progress.setting, compared, otherwise), *self._changed_rate()]
            if differences:
                engine.deployer.console.info(f"resumed with settings that differ: {'; '.join(differences)}")
        progress.setting, progress.learning_rate = dict(now), None

    def _changed_rate(self) -> Iterator[str]:
        """Yields a description of the schedule, if its rate at the newest step differs from the recorded one."""
        engine, was = self.engine, self.progress.learning_rate
        schedule = engine.task.checked_schedule(engine.trees[0])
        if was is not None and schedule is not None and engine.step:
            found = float(schedule(jnp.asarray(engine.step - 1 - engine.metrics.n_skipped, jnp.int32)))
            if not math.isclose(found, was, rel_tol=1e-5, abs_tol=1e-12):
                yield f"a learning rate at step {engine.step} of {found:.6g}, before {was:.6g}"

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        tags: Sequence[str],
        *,
        metrics: Mapping[str, float] | None = None,
        keep_last: int | None,
        save_opt_states: bool,
        save_float_dtype: Any,
        then: Callable[[Location], None] | None = None,
        is_of_fit: bool = False,
    ) -> Location:
        """Saves the current step under `tags` and "last", by default with the metrics of its evaluation; returns the
        checkpoint's folder. `then` is called after a background save. `is_of_fit` says whether the options of a fit ask for
        it, so that the run resumes from weights that are cast."""
        engine, deployer = self.engine, self.engine.deployer
        step, is_full = engine.step, save_opt_states and (save_float_dtype is None or is_of_fit)
        if is_full:  # else the fit's own save of this step follows
            tags = [*tags, *sorted(self.tags.difference(tags))]
        if metrics is None:
            metrics = self.progress.metrics if self.progress.evaluated == step else {}
        keep_last = self._keep_last if keep_last is None else keep_last
        if self._callbacks is not None:
            keep_last = self._keep_last = max(self._keep_last, keep_last)

        def committed(path: Location) -> None:
            if is_full:
                self._kept_step = step
            if then is not None:
                then(path)

        if deployer.is_dry_run:
            return self.need_checkpoints().folder / f"step_{step:08d}"  # writes nothing
        engine.take_hyperparams()  # places the model
        record = {**self._record(metrics), "resumable": is_full}
        with engine.line.pause("saving"):
            checkpoints = self.need_checkpoints()
        program, state = engine.placed
        trees = checkpoint_trees(program, state, program.eval_model(state), opt_states=save_opt_states)
        states = self.states if self._callbacks is None else self._callbacks.states()
        record["callbacks"], arrays = states_to_record(states)
        if arrays:
            trees["callbacks"] = arrays
        if (base := self.origins.find_base(leaves_of(program, state))) is not None:
            record["base"] = base.folders
            trees["model"] = base.without(trees["model"])
        with engine.line.pause("saving"), deployer.preemption.held():
            names, later = ["last", *tags], None if then is None else committed
            path = checkpoints.save(step, trees, record, names, keep_last, save_float_dtype, later)
            if later is None:
                committed(path)
            if is_full or is_of_fit:
                self.progress.saved, self._keep_last = (step, engine.position), keep_last
            self.tags.difference_update(tags)
        if self._callbacks is not None:
            self._callbacks.call_on_save(path, checkpoints)
        return path

    def _record(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Returns the record of a checkpoint of the current step, but for callbacks and frozen leaves."""
        engine, deployer = self.engine, self.engine.deployer
        # The metrics of the newest updates may be unread, for example if a tracker saves.
        last_metrics, n_skipped = engine.metrics.newest_unread(engine)
        record = {
            "redeqx": __version__,
            "step": engine.step,
            **asdict(engine.position),
            **self.progress.to_record(),
            "n_skipped": n_skipped,
            "n_examples": engine.n_examples,
            "learning_rate": plain_numbers(last_metrics.get("learning_rate")),
            "seed": deployer.jax_seed,
            "stream": int(engine.stream[1]),
            "n_keys": deployer.n_keys,
            "mesh": dict(deployer.mesh.shape),
            "metrics": plain_numbers(dict(metrics)),
            "train_metrics": plain_numbers(last_metrics),
            "hyperparams": engine.hyperparams.record,
        }
        same_run = [other for other in engine.every if other.deployer is deployer and other.name != engine.name]
        if same_run:
            record["others"] = dict(sorted((other.name or "", other.step) for other in same_run))
        if engine.placed[1].frozen:
            record["trained"] = list(engine.task.structure.names[0])
        return record

    def is_unsaved(self) -> bool:
        """Whether updates were made since the newest save that is on disk, by a fit or by a loop that resumes or saves."""
        resumes = self._next != "look" or self.progress.saved is not None
        return resumes and self.engine.step != self._kept_step and self.engine.has_values

    def save_to_resume(self) -> int:
        """Saves the newest step with all that resuming needs, and waits until it is on disk; returns the step."""
        assert self.checkpoints is not None
        with suppress(Exception):  # of a background save: if it failed, the step is saved once more
            self.checkpoints.wait()
        if self.is_unsaved():
            self.save([], keep_last=self._keep_last, save_opt_states=True, save_float_dtype=None)
        return self.engine.step

    def after_update(self) -> None:
        """Outside of a fit, after an update: raises the error of a background save; saves and ends the script if the run is
        preempted."""
        if self.checkpoints is None:
            return
        self.checkpoints.check()
        if self._is_ahead:
            self._warn_of_repeated(
                f"`workdir`: expected an update before fit {self.fit_index + 1} of the run, got a run that has begun that "
                f"fit, and was at step {self.engine.step - 1}: this update is taken twice. Guard updates between fits by "
                "the step: `while trainer.step < ...`."
            )
        if self.engine.deployer.preemption.is_due_outside(self.engine.step):
            self.engine.flush()
            self.engine.deployer.preemption.end_outside()

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self, name: str | Location, *, opt_states: bool) -> None:
        """Loads a checkpoint, by a name as for `CheckpointManager.resolve`; with `opt_states` also the optimizer state, the
        step and the progress. Its files are verified before any current value is freed."""
        engine = self.engine
        if self.checkpoints is None and (not isinstance(name, str) or "/" in name):  # a path needs no workdir
            console, peers = engine.deployer.console, engine.deployer.peers
            checkpoints, path = find_checkpoint(location(name, "checkpoint"), peers, console.info)
        else:
            checkpoints = self.need_checkpoints()
            path = checkpoints.resolve(name)
        is_ahead = self._is_ahead
        record = checkpoints.record(path)
        if opt_states:
            check_record(path, record)
        states = states_of_record(record["callbacks"], checkpoints, path) if opt_states else {}
        engine.load(saved := Checkpoint(checkpoints, path, record, opt_states))
        self.origins.note_base(saved.base)
        if opt_states:
            self._continue_from(record, states)
        if path.parent != checkpoints.folder:
            return
        if is_ahead and opt_states:
            self._next = "look"  # the next fit resumes the part of it that an earlier run has done
        elif self._next == "look":  # the next fit begins from this checkpoint, not from the newest
            self._next = "begin"

    def _resume_from(self, path: Location, record: dict[str, Any]) -> None:
        """Loads a checkpoint of an earlier run: now, or when the model is placed for the first batch."""
        engine = self.engine
        engine.deployer.n_keys = max(engine.deployer.n_keys, record["n_keys"])  # a key that was used is not returned again
        with self._resuming(path):
            checkpoints = self.need_checkpoints()
            states = states_of_record(record["callbacks"], checkpoints, path)
            self._continue_from(record, states)
            self._is_resumed = True
        saved = Checkpoint(checkpoints, path, record, explained=partial(self._resuming, path))
        if engine.program is None:
            engine.pending = saved
        else:
            engine.load(saved)
        self.origins.note_base(saved.base)

    def _continue_from(self, record: Mapping[str, Any], states: dict[str, dict[str, Any]]) -> None:
        """Takes over the counts, the stream of keys, the progress and the callbacks' states of a checkpoint's record."""
        results = self.progress.results  # fits may have ended since that checkpoint
        self.progress, self.states = Progress.of_record(record), states
        self.progress.results |= results
        self._kept_step = record["step"]
        self.engine.continue_from(
            record["step"],
            record["n_examples"],
            position_of_record(record),
            record["n_skipped"],
            numbers_of_record(record["train_metrics"]),
        )
        if record["seed"] == self.engine.deployer.jax_seed:
            # The script may have drawn more keys, or fewer, before it made this trainer.
            self.engine.use_stream(record["stream"])

    @contextmanager
    def _resuming(self, path: Location) -> Iterator[None]:
        """Explains an error as one of resuming from a checkpoint."""
        try:
            yield
        except ValueError as error:
            # A later fit finds that run again, and does not overwrite it.
            self.engine.continue_from(0, 0, Position(), 0, {})
            self.progress, self._next, self._is_resumed, self.states = Progress(), "look", False, {}
            self.engine.pending = None
            if isinstance(error, DamagedError):
                raise
            raise ValueError(
                f"`workdir`: expected a run that this trainer can continue, got {path}, which it cannot: {error} "
                "For a new run choose another workdir."
            ) from None  # its text is repeated here, so that a traceback would show it twice
