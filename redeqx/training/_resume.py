"""Resumes an earlier run from the newest undamaged checkpoint of its workdir."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..errors import DamagedError, warn
from ..storage import Location
from ._engine import Engine
from ._progress import Progress, check_record


def resume_newest(engine: Engine, *, may_resume: bool = True) -> None:
    """Resumes from the workdir's newest checkpoint, if there is one. Warns about each damaged one that is skipped.

    **Arguments:**

    - `may_resume`: if False, a workdir with checkpoints is refused.

    Raises ValueError if every checkpoint is damaged, since a run must not overwrite what may be repaired, and if the run had
    another seed.
    """
    checkpoints = engine.checkpoints
    if checkpoints is None:
        engine.follows = False
        return
    checkpoints.wait()
    candidates = checkpoints.newest()
    if candidates and not may_resume:
        raise ValueError(
            f"`workdir`: expected no checkpoints, as `resume=False`, got {candidates[0]}. "
            "Pass `resume=True` to continue from it, or another workdir for a new run."
        )
    path, record = _first_valid(engine, candidates)
    if path is None:
        # A checkpoint loaded from another workdir is a new start: its progress is not this run's.
        engine.progress, engine.follows = Progress(n_skipped=engine.progress.n_skipped), False
        return
    if record["seed"] != engine.run.seed:
        raise ValueError(
            f"`jax_seed`: expected {record['seed']}, as in {path}, got {engine.run.seed}. "
            "Pass the same seed to continue, or another workdir for a new run."
        )
    engine.resume_from(path, record)
    engine.run.console.info(f"resuming from {path}, step {engine.step}")


def _first_valid(engine: Engine, paths: Sequence[Location]) -> tuple[Location | None, dict[str, Any]]:
    """Returns the first undamaged checkpoint of these, with its record."""
    checkpoints = engine.checkpoints
    assert checkpoints is not None
    problem: DamagedError | None = None
    for path in paths:
        if path not in checkpoints.damaged:
            try:
                record = checkpoints.record(path)
                check_record(path, record)
                return path, record
            except DamagedError as error:
                checkpoints.damaged[path] = error
        if path not in engine.warned:
            engine.warned.add(path)
            warn(f"{checkpoints.damaged[path]} It is skipped for the previous one.")
        problem = problem or checkpoints.damaged[path]
    if problem is not None:
        checkpoints.damaged.clear()  # all are verified again at the next attempt
        raise problem
    return None, {}


def check_setting(engine: Engine, now: Mapping[str, Any]) -> None:
    """Compares the sizes of a fit with those of the run that it resumes; prints harmless differences.

    **Arguments:**

    - `now`: the sizes by name; None if unknown.

    Raises ValueError if the steps would have other examples.
    """
    progress, schedule = engine.progress, engine.recipe.checked_schedule(engine.trees[0])
    otherwise = "pass `resume=False`" if engine.checkpoints is None else "choose another workdir"
    differs = {
        name: (was, now[name]) for name, was in progress.setting.items() if now.get(name) is not None and now[name] != was
    }
    if "batch_size" in differs:
        was, found = differs["batch_size"]
        raise ValueError(
            f"`batch_size`: expected {was} examples per update, as in the resumed run, got {found}. "
            f"Pass `batch_size={was}`, which sets the rows per device on any mesh, or {otherwise}."
        )
    if "train_size" in differs:
        was, found = differs["train_size"]
        raise ValueError(
            f"`train_examples`: expected {was}, as in the resumed run, got {found}. "
            f"The order of the examples would differ. For new examples {otherwise}."
        )
    differences = [
        "other examples" if name == "sample" else f"`{name}` {found}, before {was}" for name, (was, found) in differs.items()
    ]
    was = progress.learning_rate
    if was is not None and schedule is not None and engine.step:
        found = float(schedule(jnp.asarray(engine.step - 1 - progress.n_skipped, jnp.int32)))
        if not math.isclose(found, was, rel_tol=1e-5, abs_tol=1e-12):
            differences.append(f"a learning rate at step {engine.step} of {found:.6g}, before {was:.6g}")
    if differences:
        engine.run.console.info(f"resumed with settings that differ: {'; '.join(differences)}")
