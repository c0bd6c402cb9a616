"""Built-in trackers: open, continue, fill and end runs of TensorBoard, Weights & Biases, MLflow and Trackio.

Each class supports one package, which it imports when a run is opened. It may be slow and may raise: `_delivery.py` calls it
in a thread.
"""

import importlib.util
import os
import secrets
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsFloat, runtime_checkable

from ..storage import make_subfolder
from ._media import Medium

PROJECT = "redeqx"  # if the environment names none


@runtime_checkable
class Tracker(Protocol):
    """An object that records metrics: a `wandb` run, or a class of three lines.

    It is called in the loop, in process 0; its exceptions end the fit. It may have two more methods:
    `log_image(name, image, step)` is called with a uint8 array `[height, width]` or `[height, width, channels]`, or with the
    matplotlib figure that was passed; and `log_text(name, text, step)`.
    """

    def log(self, metrics: dict[str, float], step: int) -> Any: ...


@dataclass(frozen=True)
class Row:
    """The metrics of one step, and the time when they were recorded, in seconds since 1970."""

    step: int
    numbers: Mapping[str, float]
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Opening:
    """The arguments to open a tracker's run.

    **Arguments:**

    - `folder`: the workdir, or None.
    - `run_id`: the id of a run to continue, which an earlier process began; None for a new run.
    - `purge_step`: the first step that is repeated, of those that an earlier process recorded; None if there is none.
    """

    folder: Path | None
    run_id: str | None = None
    purge_step: int | None = None

    @property
    def title(self) -> str | None:
        return None if self.folder is None else self.folder.resolve().name


Keeps = Literal["at once", "soon", "after the step"]


class NamedTracker(Protocol):
    """A run of a tracker, opened by `__init__(opening)`.

    **Attributes:**

    - `package`: the package to import. `install`: the requirement that provides it, for `pip install`.
    - `purges`: whether it deletes records of repeated steps. For the others, repeated records are not delivered.
    - `keeps`: when its rows are safe from a kill: `"at once"`, `"soon"` (within half a second), or `"after the step"`: it
        keeps those of the newest step in memory.
    - `run_id`: the id by which a later process continues the run.
    - `where`: the address or folder that shows the run.
    """

    package: str
    install: str
    purges: bool
    keeps: Keeps
    run_id: str
    where: str

    def __init__(self, opening: Opening) -> None: ...
    def config(self, values: Mapping[str, str]) -> None: ...
    def rows(self, rows: Sequence[Row]) -> None: ...
    def medium(self, medium: Medium) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    package, install, purges = "tensorboardX", "redeqx[tensorboard]", True
    keeps: Keeps = "at once"

    def __init__(self, opening: Opening) -> None:
        from tensorboardX import SummaryWriter

        assert opening.folder is not None, "checked"
        folder = opening.folder / "tensorboard"
        make_subfolder(folder, opening.folder)
        self.run_id, self.where = "", str(folder)
        # A file is named by the second: one opened within the same second would replace the previous one.
        suffix = f".{len(list(folder.glob('*'))):04}.{secrets.token_hex(4)}"  # nobody else can guess it and plant a link
        self._writer = SummaryWriter(self.where, purge_step=opening.purge_step, filename_suffix=suffix)

    def config(self, values: Mapping[str, str]) -> None:
        cells = {name: value.replace("|", "\\|").replace("\n", "<br>") for name, value in values.items()}
        table = "".join(f"|{name}|{cell}|\n" for name, cell in cells.items())
        self._writer.add_text("config", f"|name|value|\n|-|-|\n{table}", 0)
        self._writer.flush()

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.numbers.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()  # by default it flushes every two minutes, which a kill would lose

    def medium(self, medium: Medium) -> None:
        if medium.is_text:
            indented = "\n".join("    " + line for line in str(medium.content).splitlines())  # a code block in Markdown
            self._writer.add_text(medium.name, indented, medium.step)
        else:
            from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

            height, width = medium.size
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=medium.data)
            summary = Summary(value=[Summary.Value(tag=medium.name, image=image)])
            assert self._writer.file_writer is not None
            self._writer.file_writer.add_summary(summary, medium.step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandB:
    package, install, purges = "wandb", "redeqx[wandb]", False
    keeps: Keeps = "after the step"

    def __init__(self, opening: Opening) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False):
            raise RuntimeError("no API key is configured: run `wandb login`, or set WANDB_MODE=offline")
        if opening.folder is not None:
            make_subfolder(opening.folder / "wandb", opening.folder)
        # A separate run, in addition to any that the script has. The console is not captured: wandb would copy each redraw.
        # Offline, its file is flushed every 15 s by default, which a kill would lose.
        settings = wandb.Settings(silent=True, console="off")
        if hasattr(settings, "x_transaction_log_flush_interval"):
            settings.x_transaction_log_flush_interval = 0.5
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or opening.title,
            id=opening.run_id,
            resume=None if opening.run_id is None else "allow",
            dir=opening.folder,
            reinit="create_new",
            settings=settings,
        )
        self.run_id = self._run.id
        self.where = (None if self._run.offline else self._run.url) or str(Path(self._run.dir).parent)

    def config(self, values: Mapping[str, str]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.numbers), step=row.step)

    def medium(self, medium: Medium) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        if medium.is_text:
            self._run.log({medium.name: wandb.Html(f"<pre>{escape(str(medium.content))}</pre>")}, step=medium.step)
        else:
            with tempfile.TemporaryDirectory() as folder:
                self._run.log({medium.name: wandb.Image(str(medium.write(Path(folder))))}, step=medium.step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    package, install, purges = "mlflow", "redeqx[mlflow]", False
    keeps: Keeps = "at once"

    def __init__(self, opening: Opening) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        # The client, not the module's functions: those use one global active run, which belongs to the script.
        self._client = client = MlflowClient()
        if opening.run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
            self.run_id = client.create_run(experiment_id, run_name=opening.title).info.run_id
        else:
            self.run_id = opening.run_id
            client.update_run(self.run_id, status="RUNNING")
        self.where = f"{client.tracking_uri}, run {self.run_id}"

    def config(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        known = self._client.get_run(self.run_id).data.params  # never overwritten: they describe the start of the run
        new = [Param(name, value[:_MLFLOW_PARAM]) for name, value in values.items() if name not in known]
        self._client.log_batch(self.run_id, params=new)

    def rows(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        metrics = [
            Metric(name, value, int(row.time * 1000), row.step) for row in rows for name, value in row.numbers.items()
        ]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MLFLOW_BATCH])

    def medium(self, medium: Medium) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._client.log_artifact(self.run_id, str(medium.write(Path(folder))), "media")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


_MLFLOW_PARAM, _MLFLOW_BATCH = 6000, 1000  # maximum characters of a value, and metrics of a request


class Trackio:
    package, install, purges = "trackio", "redeqx[trackio]", False
    keeps: Keeps = "soon"

    def __init__(self, opening: Opening) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Trackio continues a run by its name, so each name must be unique.
        self.run_id = opening.run_id or "-".join(filter(None, [opening.title, uuid.uuid4().hex[:8]]))
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._run: Any = trackio.init(project, self.run_id, resume="allow", embed=False)
        self.where = f"trackio show --project {project}, run {self.run_id}"

    def config(self, values: Mapping[str, str]) -> None:
        self._run.config.update(values)  # sent with the next row

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.numbers), step=row.step)

    def medium(self, medium: Medium) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        if medium.is_text:
            self._run.log({medium.name: trackio.Markdown(f"```\n{medium.content}\n```")}, step=medium.step)
        else:
            with tempfile.TemporaryDirectory() as folder:
                self._run.log({medium.name: trackio.Image(str(medium.write(Path(folder))))}, step=medium.step)

    def close(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[NamedTracker]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio
}  # fmt: skip


def check_loggers(loggers: Any, workdir: Path | None) -> tuple[list[str], list[Tracker]]:
    """Returns the names of built-in trackers, without duplicates, and the trackers that are objects.

    Every process calls it, so that all of them stop at an error. Raises TypeError, ValueError and ImportError, as `Console`
    documents.
    """
    if isinstance(loggers, str):
        raise TypeError(f"`loggers`: expected a list of trackers, got {loggers!r}. Pass `loggers=[{loggers!r}]`.")
    if not isinstance(loggers, Iterable):
        raise TypeError(f"`loggers`: expected a list of trackers, got {type(loggers).__name__}. Write [logger].")
    named: list[str] = []
    objects: list[Tracker] = []
    for i, logger in enumerate(loggers):
        if isinstance(logger, str) and logger not in TRACKERS:
            raise ValueError(
                f"`loggers[{i}]`: expected one of {sorted(TRACKERS)}, or an object with `log(metrics, step)`, got "
                f"{logger!r}. Pass one of them."
            )
        if isinstance(logger, type) or not isinstance(logger, str | Tracker):
            found = f"the class {logger.__name__}" if isinstance(logger, type) else type(logger).__name__
            advice = "Pass an instance of it." if isinstance(logger, type) else "Wrap it in a class that has one."
            raise TypeError(f"`loggers[{i}]`: expected an object with `log(metrics, step)`, got {found}. {advice}")
        if not isinstance(logger, str):
            objects.append(logger)
        elif logger not in named:
            named.append(logger)
    if "tensorboard" in named and workdir is None:
        raise ValueError("`loggers`: expected a `workdir` to write to, got None. Pass `workdir=`.")
    for name in named:
        tracker = TRACKERS[name]
        if importlib.util.find_spec(tracker.package) is None:
            raise ImportError(
                f"`loggers`: expected {tracker.package}, got no such package. "
                f'Run `pip install "{tracker.install}"`, or do without this tracker.'
            )
    return named, objects


def as_number(name: str, value: SupportsFloat) -> float:
    """Converts a metric to a float. Raises TypeError if it is not one number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        shape = getattr(value, "shape", None)
        got = repr(value)[:80] if shape is None else f"an array of shape {shape}"
        raise TypeError(f"`{name}`: expected one number as a metric, got {got}. Reduce it to one.") from None
