"""Built-in trackers: open, continue, fill and end runs of TensorBoard, Weights & Biases, MLflow and Trackio.

Each class supports one package, which it imports when a run is opened. It may be slow and may raise: `_delivery.py` calls it
in a thread.
"""

import importlib
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
from typing import Any, Literal, Protocol, runtime_checkable

from ..errors import check_function
from ..storage import make_subfolder
from ._jsonl import prefix_of
from ._media import MediaFile, pixels

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

    @property
    def of(self) -> str:
        """The name of the trainer whose numbers these are, or another prefix of them all; empty without one."""
        return prefix_of(self.numbers) or ""


class NamedTracker(Protocol):
    """A run of a tracker."""

    package: str  # to import
    install: str  # the requirement that provides it, for `pip install`
    # When its rows are safe from a kill: soon is within half a second, and after the step, if those of the newest one
    # are kept in memory.
    keeps: Literal["at once", "soon", "after the step"]
    run_id: str  # the id by which a later process continues the run
    where: str  # the address or folder that shows the run

    def __init__(self, folder: Path | None, run_id: str | None) -> None:
        """Opens the run of a workdir (None without one), or continues the one with this id, which an earlier process
        began."""

    def config(self, values: Mapping[str, Any]) -> None: ...
    def rows(self, rows: Sequence[Row]) -> None: ...
    def medium(self, medium: MediaFile) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard(NamedTracker):
    package, install, keeps = "tensorboardX", "redeqx[tensorboard]", "at once"

    def __init__(self, folder: Path | None, run_id: str | None) -> None:
        from tensorboardX import SummaryWriter

        assert folder is not None, "checked"
        events = folder / "tensorboard"
        make_subfolder(events, folder)
        self.run_id, self.where = "", str(events)
        # A file is named by the second: one opened within the same second would replace the previous one.
        suffix = f".{len(list(events.glob('*'))):04}.{secrets.token_hex(4)}"  # nobody else can guess it and plant a link
        # A new run in the folder of an earlier one replaces it.
        self._writer: Any = SummaryWriter(self.where, purge_step=0 if run_id is None else None, filename_suffix=suffix)

    def config(self, values: Mapping[str, Any]) -> None:
        cells = {name: str(value).replace("|", "\\|").replace("\n", "<br>") for name, value in values.items()}
        table = "".join(f"|{name}|{cell}|\n" for name, cell in cells.items())
        self._writer.add_text("config", f"|name|value|\n|-|-|\n{table}", 0)
        self._writer.flush()

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.numbers.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._writer.flush()  # by default it flushes every two minutes, which a kill would lose

    def medium(self, medium: MediaFile) -> None:
        if medium.is_text:
            indented = "\n".join("    " + line for line in str(medium.content).splitlines())  # a code block in Markdown
            self._writer.add_text(medium.name, indented, medium.step)
        else:
            image = pixels(medium.data)
            self._writer.add_image(medium.name, image, medium.step, dataformats="HW" if image.ndim == 2 else "HWC")
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class _RunWithLog(NamedTracker):
    """A tracker with the interface of `wandb`: `run.log(values, step=step)`."""

    _run: Any

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.numbers), step=row.step)

    def medium(self, medium: MediaFile) -> None:
        package = importlib.import_module(self.package)
        if medium.is_text:
            self._run.log({medium.name: self._text(package, str(medium.content))}, step=medium.step)
        else:
            with tempfile.TemporaryDirectory() as folder:
                self._run.log({medium.name: package.Image(str(medium.write(Path(folder))))}, step=medium.step)

    def _text(self, package: Any, text: str) -> Any: ...


class WandB(_RunWithLog):
    package, install, keeps = "wandb", "redeqx[wandb]", "after the step"

    def __init__(self, folder: Path | None, run_id: str | None) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False):
            raise RuntimeError("no API key is configured: run `wandb login`, or set WANDB_MODE=offline")
        if folder is not None:
            make_subfolder(folder / "wandb", folder)
        # A separate run, in addition to any that the script has. The console is not captured: wandb would copy each redraw.
        # Offline, its file is flushed every 15 s by default, which a kill would lose.
        settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=0.5)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or _title(folder),
            id=run_id,
            resume=None if run_id is None else "allow",
            dir=folder,
            reinit="create_new",
            settings=settings,
        )
        self.run_id = self._run.id
        self.where = (None if self._run.offline else self._run.url) or str(Path(self._run.dir).parent)

    def config(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def _text(self, package: Any, text: str) -> Any:
        return package.Html(f"<pre>{escape(text)}</pre>")

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(NamedTracker):
    package, install, keeps = "mlflow", "redeqx[mlflow]", "at once"

    def __init__(self, folder: Path | None, run_id: str | None) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        # The client, not the module's functions: those use one global active run, which belongs to the script.
        self._client = client = MlflowClient()
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
            self.run_id = client.create_run(experiment_id, run_name=_title(folder)).info.run_id
        else:
            client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
        self.where = f"{client.tracking_uri}, run {self.run_id}"

    def config(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        known = self._client.get_run(self.run_id).data.params  # never overwritten: they describe the start of the run
        new = [Param(name, str(value)[:_MLFLOW_PARAM]) for name, value in values.items() if name not in known]
        self._client.log_batch(self.run_id, params=new)

    def rows(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        metrics = [
            Metric(name, value, int(row.time * 1000), row.step) for row in rows for name, value in row.numbers.items()
        ]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MLFLOW_BATCH])

    def medium(self, medium: MediaFile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._client.log_artifact(self.run_id, str(medium.write(Path(folder))), "media")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


_MLFLOW_PARAM, _MLFLOW_BATCH = 6000, 1000  # maximum characters of a value, and metrics of a request


class Trackio(_RunWithLog):
    package, install, keeps = "trackio", "redeqx[trackio]", "soon"

    def __init__(self, folder: Path | None, run_id: str | None) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Trackio continues a run by its name, so each name must be unique.
        self.run_id = run_id or "-".join(filter(None, [_title(folder), uuid.uuid4().hex[:8]]))
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._run = trackio.init(project, self.run_id, resume="allow", embed=False)
        self.where = f"trackio show --project {project}, run {self.run_id}"

    def config(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(values)  # sent with the next row

    def _text(self, package: Any, text: str) -> Any:
        return package.Markdown(f"```\n{text}\n```")

    def close(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[NamedTracker]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio
}  # fmt: skip


def _title(folder: Path | None) -> str | None:
    return None if folder is None else folder.resolve().name


def check_loggers(loggers: Any, workdir: Path | None) -> tuple[list[str], list[Tracker]]:
    """Returns the names of built-in trackers, without duplicates, and the trackers that are objects. Every process calls it,
    so that all of them stop at an error. Raises TypeError, ValueError and ImportError, as `Console` documents."""
    if isinstance(loggers, str) or not isinstance(loggers, Iterable):
        got = repr(loggers) if isinstance(loggers, str) else type(loggers).__name__
        raise TypeError(f"`loggers`: expected a list of trackers, got {got}. Pass `loggers=[logger]`.")
    named, objects = [], []
    for i, logger in enumerate(loggers):
        if isinstance(logger, str):
            if logger not in TRACKERS:
                raise ValueError(
                    f"`loggers[{i}]`: expected one of {sorted(TRACKERS)}, or an object with `log(metrics, step)`, got "
                    f"{logger!r}. Pass one of them."
                )
            named.append(logger)
        elif isinstance(logger, type) or not isinstance(logger, Tracker):
            found = f"the class {logger.__name__}" if isinstance(logger, type) else type(logger).__name__
            advice = "Pass an instance of it." if isinstance(logger, type) else "Wrap it in a class that has one."
            raise TypeError(f"`loggers[{i}]`: expected an object with `log(metrics, step)`, got {found}. {advice}")
        else:
            check_function(logger.log, f"loggers[{i}].log", ["metrics", "step"])
            objects.append(logger)
    if "tensorboard" in named and workdir is None:
        raise ValueError("`loggers`: expected a `workdir` to write to, got None. Pass `workdir=`.")
    named = list(dict.fromkeys(named))
    for name in named:
        tracker = TRACKERS[name]
        if importlib.util.find_spec(tracker.package) is None:
            raise ImportError(
                f"`loggers`: expected {tracker.package}, got no such package. "
                f'Run `pip install "{tracker.install}"`, or do without this tracker.'
            )
    return named, objects
