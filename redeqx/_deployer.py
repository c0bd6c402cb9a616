"""The Deployer: the devices, keys, plans, schedules and records of a run.

It also holds what the trainers and predictors of a run share: processes, console, watchdog, preemption.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from ._tree import ModelT, PyTree, is_array_like, named_leaves
from ._version import __version__
from .compiled import SavedPrograms, program_environment
from .data import BatchSize, n_slices
from .distributed import Peers, Preemption, Timeouts, Watch, agree_on_program, start
from .errors import (
    REDCO_DEPLOYER,
    RedcoNames,
    brief,
    check_count,
    check_flag,
    check_folder,
    check_function,
    check_model,
    check_model_function,
    check_not_traced,
    check_type,
    filter_traceback,
    is_plain,
    with_batch_note,
)
from .machine import (
    Compiler,
    XlaOptions,
    as_zeros,
    cache_folder,
    compiler_environment,
    dry,
    make_mesh,
    n_batch_shards,
    peak_memory,
    start_cache,
)
from .monitor import RECORDS, Console, ProgressLine, Tracker, to_json
from .optimizers import lr_schedule
from .partition import Overrides, Plan, check_plan
from .steps import Compute, Precision, Structure, Task, plan_model, stream_dtype, stream_key
from .storage import Location, Staging, StorePath, explained, location, make_subfolder, write_file

_key = jax.jit(stream_key)


class Deployer(RedcoNames):
    """Owns the devices of a run, and plans how models are split over them.

    **Arguments:**

    - `jax_seed`: the seed of the run, for keys and the order of examples.
    - `n_model_shards`: devices over which each layer's tensors are split. Raise this number when a model does not fit.
    - `n_fsdp_shards`: devices over which parameters and optimizer state are split while the batch stays split. The
        remaining devices are used for data parallelism.
    - `n_sequence_shards`: devices over which the positions of each sequence are split, for sequences that do not fit on one
        device; parameters and optimizer state are split over these devices too. They share the rows of a batch.
    - `workdir`: the folder of the run: metrics, checkpoints, outputs; or a path in an object store, `"s3://bucket/run"` or
        `"gs://bucket/run"` (extra `stores`). Checkpoints are written to a store as they are saved; metrics and the like with
        each checkpoint and at the end. None records nothing. A relative path counts from the current folder at this call,
        `~` is the home folder. The folder and its parents may be links, but nothing in it may be one.
    - `verbose`: whether to print.
    - `n_processes`, `host0_address`, `host0_port`, `process_id`: for a run over several hosts: the number of processes, the
        address and port of process 0, and this process's index. Leave them out under the launchers that the page
        "Clusters and pods" lists, such as SLURM and `python -m redeqx launch`, where they are detected, and after
        `jax.distributed.initialize`: the Deployer then joins the processes that run.
    - `n_local_devices`: the number of this host's GPUs that this process uses; by default all, but under SLURM and
        Open MPI one, the one with the task's number on the host. Pass the number if a task uses several, and 1 if a task
        sees only its own.
    - `loggers`: trackers by name, each in the extra of that name: `"tensorboard"`, `"wandb"`, `"mlflow"`, `"trackio"`; and
        objects with `log(metrics: dict, step: int)`. Trackers by name record in a thread, continue their run after a resume,
        and never end training: metrics that could not be sent are kept, and sent when the tracker works again.
    - `timeouts`: `redeqx.Timeouts`: how long to wait for other processes, and for progress.
    - `compiler`: `redeqx.Compiler`: where compiled programs are kept, and XLA's settings.

    Each step's metrics are recorded in `workdir/metrics.jsonl`, which a rerun of a `fit` reproduces byte for byte (as does a
    loop of `update` that begins with `resume`), in TensorBoard and by the loggers; their speed in `workdir/speed.jsonl`. The
    page "When it is slow" lists what is recorded.

    In a dry run (`python -m redeqx dry-run`) the devices are those of the described machine, `is_dry_run` is True, and
    nothing is written or tracked.

    Raises ValueError if the shards do not divide the devices, or the processes cannot form one run: an index used twice, a
    port in use, an unknown host, different arguments; PeerError if some do not start in time; RuntimeError if JAX's devices
    were used before and there are other processes; ImportError for an object store without `obstore`; OSError if the store
    does not answer.
    """

    # What the trainers and predictors of a run share.
    peers: Peers
    console: Console
    watch: Watch
    preemption: Preemption
    xla_settings: XlaOptions | str | None  # as asked for
    cache_text: str | None  # the header's text about the compilation cache
    saved_programs: SavedPrograms | None  # those in the cache folder; in a dry run, those that it saves
    n_keys: int

    _redco_attributes, _redco_arguments = REDCO_DEPLOYER, {}

    def __init__(
        self,
        jax_seed: int = 0,
        n_model_shards: int = 1,
        n_fsdp_shards: int = 1,
        n_sequence_shards: int = 1,
        workdir: str | Location | None = None,
        verbose: bool = True,
        n_processes: int | None = None,
        host0_address: str | None = None,
        host0_port: int | None = None,
        process_id: int | None = None,
        n_local_devices: int | None = None,
        loggers: Iterable[Tracker | str] = (),
        timeouts: Timeouts = Timeouts(),
        compiler: Compiler = Compiler(),
    ):
        check_count(jax_seed, "jax_seed", 0)
        check_flag(verbose, "verbose")
        check_type(timeouts, Timeouts, "timeouts")
        check_type(compiler, Compiler, "compiler")
        folder = None
        if workdir is not None:
            if not isinstance(workdir, StorePath):  # as `workdir / name` of a deployer in an object store returns
                check_folder(workdir, "workdir", optional=True)
            folder = location(workdir, "workdir")
        described, peers = dry(), Peers()
        if described is None:
            peers = start(
                n_processes, host0_address, host0_port, process_id, n_local_devices,
                heartbeat=timeouts.heartbeat, timeout=timeouts.start,
            )  # fmt: skip
        shards = {"n_model_shards": n_model_shards, "n_fsdp_shards": n_fsdp_shards, "n_sequence_shards": n_sequence_shards}
        # With different XLA settings, processes would compile different collectives and wait for each other.
        _agree(peers, {"jax_seed": jax_seed, **shards, "compiler.settings": str(compiler.settings), "workdir": workdir})
        mesh = make_mesh(**shards, devices=None if described is None else described.machine.devices)
        if described is not None:
            cache, saved = None, described.options.get("save")
            console, staging = Console(None, verbose=verbose), None
        else:
            cache = start_cache(compiler.cache, mesh.devices.flat[0].platform)
            saved = SavedPrograms.read(cache_folder())
            if saved is not None:
                saved.check(program_environment(mesh))
            console, staging = _make_console(folder, peers, mesh, verbose=verbose, loggers=loggers)
        self.peers, self.watch, self.preemption = peers, Watch(peers, timeouts.hang), Preemption(peers)
        if folder is not None and described is None:
            self.preemption.guard()
        self.console, self.cache_text, self.saved_programs = console, cache, saved
        self.xla_settings = compiler.settings
        self.n_keys = 0
        self._mesh, self._workdir, self._staging = mesh, folder, staging
        self._jax_seed, self._is_dry_run = jax_seed, described is not None
        self._recorders: dict[str | None, Callable[[], Any]] = {}  # the trainer of each name that records
        self._former_recorders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def mesh(self) -> Mesh:
        """The devices, on the axes `data`, `fsdp`, `sequence` and `model`."""
        return self._mesh

    @property
    def n_batch_shards(self) -> int:
        """The number of parts that the rows of a batch are split into: the data axis times the fsdp axis."""
        return n_batch_shards(self._mesh)

    @property
    def jax_seed(self) -> int:
        """The seed of the run."""
        return self._jax_seed

    @property
    def workdir(self) -> Location | None:
        """The folder of the run; None records nothing. In an object store it is not a `pathlib.Path`: `str` returns its
        address, and `/` a path below it."""
        return self._workdir

    @property
    def local_workdir(self) -> Path | None:
        """The folder in which process 0 writes: `workdir`, or for one in an object store, a folder on this machine whose
        files are uploaded with each checkpoint and at the end. None if nothing is recorded."""
        if self._staging is not None:
            return self._staging.folder
        return self._workdir if isinstance(self._workdir, Path) else None

    @property
    def is_dry_run(self) -> bool:
        """Whether this is a dry run: models are zeros that take no memory, and nothing is computed."""
        return self._is_dry_run

    def next_key(self) -> PRNGKeyArray:
        """Returns the next key of the run: with the same seed, the n-th call returns the same key in every run. A resumed
        run continues after the keys that it had drawn when its checkpoint was saved."""
        check_not_traced("Deployer.next_key")
        return _key(self.next_stream())

    def next_stream(self) -> np.ndarray:
        """Returns the seed and the number of the next key, int `[2]`: a trainer derives the keys of its steps from them."""
        self.n_keys += 1
        return np.array([self.jax_seed, self.n_keys]).astype(stream_dtype())

    def decide(self, value: Any) -> Any:
        """Returns process 0's value (anything that JSON can hold; a tuple becomes a list) in every process, for decisions
        that depend on a clock or a file, for example. Every process must call it at the same point of the script.

        Raises TypeError for any other value, such as a NumPy boolean.
        """
        try:
            return self.peers.gather("decide", value)[0]
        except TypeError:
            raise TypeError(
                f"`decide`: expected a value that JSON can hold, got {type(value).__name__}. Convert it first, as by `bool` "
                "or `float`."
            ) from None

    # --- models ------------------------------------------------------------------------------------------------------

    @filter_traceback
    def plan(
        self,
        model: PyTree,
        loss_fn: Callable[..., Any] | None = None,
        batch: PyTree | None = None,
        overrides: Overrides | None = None,
        *,
        compute: Compute | Precision | str | None = None,
    ) -> Plan:
        """Plans how each leaf of the model is split over the mesh, with a reason for each.

        With a loss and a batch, the loss is traced abstractly, and the two rules are applied in the order in which it
        computes; leaves that it does not read are marked. Without them, each large leaf is stored split along its largest
        dims, and gathered for use.

        **Arguments:**

        - `model`: an Equinox module, of arrays or of their shapes (`eqx.filter_eval_shape`).
        - `loss_fn`, `batch`: the loss, `(model, batch, key)`, and the result of `collate_fn` (or its shapes).
        - `overrides`: specs by path or glob, such as `{"head.weight": ("model", None)}`; None replicates a leaf; early
            patterns win.
        - `compute`: as for `Trainer`; the plan follows from the loss in its dtype.

        Raises ValueError for an override that matches nothing, names an unknown axis or does not divide. Warns about each
        large leaf that no axis splits.
        """
        check_model(model)
        compute = Compute.of(compute)
        if isinstance(loss_fn, Mapping):
            raise TypeError(
                "`loss_fn`: expected a function of `(model, batch, key)`, got a dict. Specs have a name: `overrides=...`."
            )
        if (loss_fn is None) != (batch is None):
            missing = "batch" if batch is None else "loss_fn"
            raise ValueError(f"`{missing}`: expected both `loss_fn` and `batch`, or neither, got None. Pass both.")
        if loss_fn is None:
            return plan_model(model, self.mesh, None, overrides)
        check_model_function(loss_fn, "loss_fn", has_state=False)
        task = Task(Structure.of(model), with_batch_note(loss_fn, "loss_fn"), optax.identity(), compute)
        trace = task.trace(model, None, batch)
        return plan_model(model, self.mesh, trace, overrides, row_use=task.row_use_of(model, None, batch))

    @filter_traceback
    def init(self, make_model: Callable[[], ModelT], plan: Plan | None = None) -> ModelT:
        """Returns the model of `make_model()`, where each device creates only its own shards; in a dry run, zeros
        that take no memory.

        **Arguments:**

        - `make_model`: makes the model, without arguments: `lambda: Model(key=key)`. It is called twice, once only for the
            shapes, so create keys outside of it. A model that keeps an array outside of its leaves, in the closure of a
            function or a static field, would keep a traced value: call `make_model()` yourself.
        - `plan`: how the leaves are split; `deployer.plan(make_model())` by default.
        """
        check_function(make_model, "make_model", [])
        check_plan(plan)
        shapes = eqx.filter_eval_shape(make_model)
        if self.is_dry_run and self.saved_programs is None:
            return as_zeros(shapes)
        if plan is not None:
            plan.check(shapes)
        plan = self.plan(shapes) if plan is None else plan.on(self.mesh)
        arrays, static = eqx.partition(shapes, is_array_like)
        shardings = [plan.sharding(name) for name in named_leaves(arrays)]

        def make() -> list[Any]:
            return jax.tree.leaves(eqx.filter(make_model(), is_array_like))

        jitted = jax.jit(make, out_shardings=shardings)
        if self.is_dry_run and self.saved_programs is not None:
            with self.saved_programs.saving():
                jitted.lower().compile()
            return as_zeros(shapes)
        if self.peers.n > 1:
            agree_on_program(self.peers, "init", jitted.lower())
        leaves = jitted()
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)

    # --- batches and schedules ---------------------------------------------------------------------------------------

    @filter_traceback
    def get_accumulate_grad_batches(self, global_batch_size: int, per_device_batch_size: int) -> int:
        """Returns the number of micro-batches in an update of `global_batch_size` examples.

        Raises ValueError if `per_device_batch_size` times the batch shards does not divide `global_batch_size`.
        """
        check_count(global_batch_size, "global_batch_size", 0)
        check_count(per_device_batch_size, "per_device_batch_size")
        micro = per_device_batch_size * self.n_batch_shards
        if global_batch_size < 1 or global_batch_size % micro:
            raise ValueError(
                f"`global_batch_size`: expected a multiple of {per_device_batch_size} rows per device x "
                f"{self.n_batch_shards} shards = {micro}, got {global_batch_size}. Change one of the two."
            )
        return global_batch_size // micro

    @filter_traceback
    def get_lr_schedule_fn(
        self,
        train_size: int,
        per_device_batch_size: int | None = None,
        n_epochs: int = 1,
        learning_rate: float | None = None,
        schedule_type: str = "linear",
        warmup_ratio: float = 0.0,
        warmup_steps: int | None = None,
        init_learning_rate: float = 0.0,
        end_learning_rate: float = 0.0,
        accumulate_grad_batches: int = 1,
        *,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> optax.Schedule:
        """Returns a schedule over the optimizer updates of a fit: linear warm-up, then decay to the last update.

        **Arguments:**

        - `train_size`: examples per epoch; the last update of an epoch may have fewer than the others.
        - `per_device_batch_size`, `batch_size`, `drop_remainder`: as in `fit`.
        - `learning_rate`: after the warm-up.
        - `schedule_type`: the decay: `"linear"`, `"cosine"`, or `"constant"` for none.
        - `warmup_ratio`, `warmup_steps`: the length of the warm-up, as a fraction of all updates or as a number of updates,
            which takes precedence.
        - `accumulate_grad_batches`: micro-batches per update. Updates are counted, never micro-batches.

        Raises ValueError for an unknown type, for sizes below 1 and a warm-up longer than the fit; TypeError without a
        learning rate.
        """
        sizes = {"train_size": train_size, "n_epochs": n_epochs, "accumulate_grad_batches": accumulate_grad_batches}
        for name, size in sizes.items():
            check_count(size, name)
        check_flag(drop_remainder, "drop_remainder")
        update = BatchSize.of(self.mesh, per_device_batch_size, batch_size, accumulate_grad_batches).examples
        n_steps = n_epochs * n_slices(train_size, update, drop_remainder)
        if n_steps < 1:
            raise ValueError(
                f"`train_size`: expected the {update} examples of an update with `drop_remainder`, got {train_size}. Pass a "
                "smaller batch size, or keep the remainder."
            )
        return lr_schedule(
            n_steps, learning_rate, schedule_type, warmup_ratio, warmup_steps, init_learning_rate, end_learning_rate
        )

    # --- printed and recorded ----------------------------------------------------------------------------------------

    @filter_traceback
    def log_info(self, message: str, *, title: str | None = None) -> None:
        """Prints a message, once for the whole run. Raises TypeError if it is not a string."""
        if not isinstance(message, str):
            raise TypeError(f"`message`: expected a string, got {type(message).__name__}. Pass `str(message)`.")
        self.console.info(message, title=title)

    @filter_traceback
    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Records numbers by name at a step: `metrics.jsonl`, TensorBoard, the loggers."""
        self.console.records.metrics(metrics, step)

    @filter_traceback
    def log_config(self, config: dict[str, Any]) -> None:
        """Records the configuration of a run in the trackers by name: hyperparameters, versions, arguments. The header
        (devices, mesh, plan) is recorded automatically."""
        self.console.records.config(config)

    @filter_traceback
    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Records an image: as `workdir/media/step_00000100_NAME.png`, and in each tracker that supports images.

        ```python
        class Samples(redeqx.Callback):
            every = 200

            def on_step(self, trainer, metrics):
                images = sample(trainer.model, n=8)  # [8, 64, 64, 3], from 0 to 1
                trainer.deployer.log_image("samples", np.concatenate(images, axis=1))
        ```

        **Arguments:**

        - `image`: a numpy or JAX array, `[height, width]` or `[height, width, channels]` with 1, 3 or 4 channels, of uint8
            or of numbers from 0 to 1; or a matplotlib figure.
        - `step`: optimizer updates so far; by default those of the newest metrics, which in a callback is `trainer.step`.

        Every process may call it; process 0 records. Raises ValueError for another shape, numbers outside 0 to 1, parts of
        an array and a name whose file another name has at this step, such as `"a/b"` and `"a_b"`; TypeError for anything
        else, and ImportError without pillow (extra `images`).
        """
        self.console.records.image(name, image, step)

    @filter_traceback
    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Records a text, as `log_image` does an image, in `workdir/media/step_00000100_NAME.txt`."""
        self.console.records.text(name, text, step)

    @filter_traceback
    def progress(
        self, *, n_epochs: int | None = None, n_steps: int | None = None, first_step: int = 0, title: str = ""
    ) -> ProgressLine:
        """Returns a context manager that shows the progress of a loop of your own; call its `update` after each step.

        **Arguments:**

        - `n_epochs`, `n_steps`: the totals, if known.
        - `first_step`: steps done before the loop begins; counted in `n_steps`.
        - `title`: printed at the start of the line.
        """
        for name, count in {"n_epochs": n_epochs, "n_steps": n_steps}.items():
            check_count(count, name, 0, optional=True)
        check_count(first_step, "first_step", 0)
        return self.console.progress(n_epochs=n_epochs, n_steps=n_steps, first_step=first_step, title=title)

    def begin_records(self, step: int, name: str | None = None) -> None:
        """Deletes records in the workdir that an earlier process wrote after `step`, for a loop of your own that continues
        from there; -1 deletes all. `fit` does this by itself. Only the first call in a run has an effect.

        **Arguments:**

        - `name`: of a trainer that has one: images and texts are kept. The rows of other trainers always are.
        """
        self.console.records.rewind_once(step, name)

    def claim_records(self, engine: Any) -> None:
        """Lets a trainer's engine record its steps from now on; another one of its name may follow it.

        Raises ValueError if trainers of one name take turns: their steps have the same numbers, and their metrics the same
        names.
        """
        before = self._recorders.get(engine.name, lambda: None)()
        if before is engine or (self.workdir is None and not self.console.records.has_trackers):
            return
        if engine in self._former_recorders or (before is not None and before.is_updating):
            raise ValueError(
                "`Trainer`: expected that one trainer of a name records after the other, got two in turn: nothing would "
                "tell their steps apart. Give each a name: `Trainer(name='critic')`."
            )
        if before is not None:
            self._former_recorders.add(before)
        self._recorders[engine.name] = weakref.ref(engine)

    def upload(self) -> None:
        """Uploads the files in `local_workdir`, if the workdir is in an object store. Raises OSError if that fails."""
        if self._staging is not None:
            self._staging.upload()

    def need_values(self, what: str) -> None:
        """Raises ValueError in a dry run, where arrays have no values."""
        if self.is_dry_run:
            raise ValueError(
                f"`{what}`: expected to come after `fit`, with which a dry run ends, got called before: nothing has a "
                "value yet. Leave it out with `if not deployer.is_dry_run:`."
            )

    @filter_traceback
    def save_outputs(self, outputs: Sequence[Any], name: str | Path = "outputs.jsonl") -> Location:
        """Writes one JSON line per output to `workdir/outputs/NAME` and returns its path. Arrays become nested lists.

        NaN and the infinities, which JSON lacks, become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, as in
        `metrics.jsonl`; `float` reads them.

        Raises ValueError without a workdir and for a name outside of `outputs`, TypeError for values that JSON cannot hold.
        """
        if self.workdir is None:
            raise ValueError("`workdir`: expected a folder, got None. Pass `Deployer(workdir=...)` to save outputs.")
        if not (isinstance(name, str | Path) and all(map(is_plain, str(name).split("/")))):
            raise ValueError(f"`name`: expected a file in `outputs`, got {brief(name)}. Pass 'test.jsonl', for example.")

        def plain(value: Any) -> Any:
            if isinstance(value, jax.Array | np.ndarray | np.generic):
                return np.asarray(value).tolist()
            raise TypeError(f"`outputs`: expected values that JSON can hold, got {type(value).__name__}. Convert it first.")

        if isinstance(outputs, str | bytes | Mapping) or not isinstance(outputs, Iterable):
            raise TypeError(f"`outputs`: expected a list with a line for each, got {brief(outputs)}. Pass `[outputs]`.")
        lines = "".join(to_json(output, default=plain) + "\n" for output in outputs).encode()
        path = self.workdir / "outputs" / str(name)
        if self.is_dry_run or self.peers.index:
            return path
        if isinstance(path, StorePath):
            path.upload(lambda: [lines], len(lines))
            return path
        with explained(path, "to write it"):
            make_subfolder(path.parent, self.workdir)  # pyright: ignore[reportArgumentType]
            write_file(path, lines)
        return path


def _make_console(
    folder: Location | None, peers: Peers, mesh: Mesh, *, verbose: bool, loggers: Iterable[Tracker | str]
) -> tuple[Console, Staging | None]:
    """Returns the console of a run; and if the workdir is in an object store, the folder that stands for it here."""
    staging, is_main = None, peers.index == 0
    if isinstance(folder, StorePath) and is_main:
        staging = Staging.of(folder, RECORDS)
    elif isinstance(folder, Path) and is_main:
        check_folder(folder, "workdir", make=True)
    console = Console(
        staging.folder if staging is not None else folder if isinstance(folder, Path) else None,
        verbose=verbose,
        loggers=loggers,
        is_main=is_main,
        peak_memory=lambda: peak_memory(mesh.local_devices),
    )
    return console, staging


def _agree(peers: Peers, given: dict[str, Any]) -> None:
    """Checks that arguments, versions and devices are equal in all processes."""
    if peers.n > 1:
        versions = {"the version of redeqx": __version__, "the version of jax": jax.__version__, **compiler_environment()}
        devices = {"devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"}
        peers.agree("Deployer", {**given, **versions, **devices})
