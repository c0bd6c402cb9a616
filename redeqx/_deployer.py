"""The Deployer: devices, keys, plans, schedules and the console, joined for one run."""

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray, PyTree

from ._tree import is_array_like, named_leaves
from .data import BatchSize, n_slices
from .distributed import HANG, HEARTBEAT, START, Peers, Preemption, Watch, agree_on_program, start
from .errors import Plainly, check_count, check_folder, check_function, check_model, check_model_function, explained
from .machine import as_shapes, dry, make_mesh, n_batch_shards
from .monitor import Console, Tracker
from .partition import Overrides, Plan, make_plan, mark_read
from .tracing import Trace
from .training import Parts, as_sums


class Deployer:
    """The devices of a run and how models are laid out on them.

    **Arguments:**

    - `jax_seed`: the one seed of the run: keys, order of examples.
    - `n_model_shards`: devices among which each layer's tensors are split. The number to raise when a model does not fit.
    - `n_fsdp_shards`: devices among which parameters and optimizer state are split while the batch stays split. What both
        leave over of the devices is data parallelism.
    - `workdir`: the folder of the run: metrics, checkpoints, outputs. None records nothing.
    - `verbose`: whether to print.
    - `n_processes`, `host0_address`, `host0_port`, `process_id`: for a run over several hosts by their addresses: how many
        processes, where process 0 is, and which this one is. Under SLURM, Open MPI, Kubernetes (JobSet), on Cloud TPU and
        with `python -m redeqx launch` leave them out: they are found.
    - `n_local_devices`: how many of this host's GPUs are this process's; all by default, one where the launcher starts a
        task a GPU.
    - `heartbeat_timeout`: seconds of silence after which another process counts as gone, and this one leaves.
    - `start_timeout`: seconds in which all processes must have come.
    - `hang_timeout`: seconds without a step of training, compilation apart, after which the run ends, saying who is behind
        and what each thread is at; None never ends it.
    - `run_tensorboard`: whether to write TensorBoard events to the workdir (extra `tensorboard`).
    - `loggers`: further trackers; anything with `log(metrics: dict, step: int)`.

    In a dry run (`python -m redeqx dry-run`) the devices are those of the machine that is described, `is_dry_run` is True,
    and nothing is written or tracked.

    Raises ValueError where the shards do not divide the devices, and where the processes cannot be one run: a number given
    twice, a port taken, a host that is not found, arguments that differ; PeerError where some do not come, RuntimeError
    where JAX's devices have been used before and there are other processes.
    """

    def __init__(
        self,
        jax_seed: int = 0,
        n_model_shards: int = 1,
        n_fsdp_shards: int = 1,
        workdir: str | Path | None = None,
        verbose: bool = True,
        n_processes: int | None = None,
        host0_address: str | None = None,
        host0_port: int | None = None,
        process_id: int | None = None,
        n_local_devices: int | None = None,
        run_tensorboard: bool = False,
        loggers: Iterable[Tracker] = (),
        heartbeat_timeout: float = HEARTBEAT,
        start_timeout: float = START,
        hang_timeout: float | None = HANG,
    ):
        check_count(jax_seed, "jax_seed", 0)
        if workdir is not None:
            check_folder(workdir, "workdir")
        self.jax_seed = jax_seed
        run = dry()
        self.is_dry_run = run is not None
        if self.is_dry_run:
            self.peers = Peers()
        else:
            self.peers = start(
                n_processes, host0_address, host0_port, process_id, n_local_devices,
                heartbeat=heartbeat_timeout, timeout=start_timeout,
            )  # fmt: skip
        if self.peers.n > 1:
            given = {"jax_seed": jax_seed, "n_model_shards": n_model_shards, "n_fsdp_shards": n_fsdp_shards}
            versions = {"the version of redeqx": version("redeqx"), "the version of jax": jax.__version__}
            devices = {"devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"}
            self.peers.agree("Deployer", {**given, "workdir": workdir, **versions, **devices})
        self.mesh = make_mesh(n_model_shards, n_fsdp_shards, None if run is None else run.machine.devices)
        self.workdir = None if workdir is None else Path(workdir)
        if self.is_dry_run:
            self.console = Console(None, verbose=verbose)
        else:
            is_main = self.peers.index == 0
            if self.workdir is not None and is_main:
                self.workdir.mkdir(parents=True, exist_ok=True)
            self.console = Console(
                self.workdir, verbose=verbose, run_tensorboard=run_tensorboard, loggers=loggers, is_main=is_main
            )
        self.watch = Watch(self.peers, hang_timeout)
        self.preemption = Preemption(self.peers)
        self._n_keys = 0
        self._records_begun = False

    @property
    def n_batch_shards(self) -> int:
        """In how many parts the rows of a batch are split: the data axis times the fsdp axis."""
        return n_batch_shards(self.mesh)

    def next_key(self) -> PRNGKeyArray:
        """The next key of the run: the same at the same call of every run with the same seed."""
        self._n_keys += 1
        return jax.random.fold_in(jax.random.key(self.jax_seed), self._n_keys)

    def need_values(self, what: str) -> None:
        """Raise ValueError in a dry run, where there are none."""
        if self.is_dry_run:
            raise ValueError(
                f"`{what}`: expected to come after `fit`, with which a dry run ends, got called before: nothing has a "
                "value yet. Leave it out with `if not deployer.is_dry_run:`."
            )

    def returns_zeros(self, what: str) -> bool:
        """Whether this is a dry run, in which `what`, called before the first `fit`, returns zeros in place of values, so
        that a script runs unchanged. Prints so, once a method."""
        run = dry()
        if run is not None and what not in run.zeros:
            run.zeros.add(what)
            self.console.info(f"dry run: `{what}` comes before the first `fit`, where nothing has a value: it returns zeros")
        return self.is_dry_run

    # --- models ------------------------------------------------------------------------------------------------------

    def plan(
        self,
        model: PyTree,
        loss_fn: Callable[..., Any] | None = None,
        batch: PyTree | None = None,
        overrides: Overrides | None = None,
        *,
        compute_dtype: Any = None,
    ) -> Plan:
        """How each leaf of the model is split over the mesh, with a reason for each.

        The order of the two rules is that of the walk over the model's fields; with a loss and a batch it is the order in
        which the loss computes, which is traced abstractly, and leaves that it does not read are marked.

        **Arguments:**

        - `model`: an Equinox module, of arrays or of their shapes (`eqx.filter_eval_shape`).
        - `loss_fn`, `batch`: the loss, `(model, batch, key)`, and what `collate_fn` returns (or its shapes).
        - `overrides`: specs by path or glob, as `{"head.weight": ("model", None)}`; None keeps a leaf whole; early
            patterns win.
        - `compute_dtype`: floating leaves of the model are cast to it for the loss, as by a Trainer.

        Raises ValueError for an override that matches nothing, names an unknown axis or does not divide. Warns of each
        large leaf that no axis splits.
        """
        check_model(model)
        if (loss_fn is None) != (batch is None):
            missing = "batch" if batch is None else "loss_fn"
            raise ValueError(f"`{missing}`: expected with `loss_fn` and `batch` both or neither, got None. Pass both.")

        if loss_fn is not None:
            check_model_function(loss_fn, "loss_fn", has_state=False)
            loss_fn = explained(loss_fn, "loss_fn")

        def total(model: PyTree, batch: PyTree, key: PRNGKeyArray) -> Any:
            assert loss_fn is not None
            parts = Parts.of(model)
            model = parts.put(*parts.take(model), compute_dtype=compute_dtype)
            return as_sums(loss_fn(model, batch, key), jax.tree.leaves(batch)[0].shape[0])[0]

        key = jax.eval_shape(lambda: jax.random.key(0))
        with Plainly():
            trace = None if loss_fn is None else Trace.of(total, model, batch, key)
        return self._plan(model, trace, overrides)

    def _plan(
        self, model: PyTree, trace: Trace | None, overrides: Overrides | None = None, mesh: Mesh | None = None
    ) -> Plan:
        """The plan of a model whose loss may have been traced; warns of what it warns of."""
        plan = make_plan(model, mesh or self.mesh, overrides, trace)
        for message in plan.warnings:
            warnings.warn(message, stacklevel=3)
        return plan if trace is None else mark_read(plan, trace)

    def init(self, make_model: Callable[[], PyTree], plan: Plan | None = None) -> PyTree:
        """The model that `make_model()` returns, each device creating only its own shards; in a dry run, its shapes.

        **Arguments:**

        - `make_model`: makes the model, without arguments: `lambda: Model(key=key)`. It is called twice, once for the shapes
            alone, so take keys outside of it.
        - `plan`: of its leaves; the walk's by default.
        """
        check_function(make_model, "make_model", [])
        shapes = eqx.filter_eval_shape(make_model)
        if self.is_dry_run:
            return as_shapes(shapes)
        plan = self.plan(shapes) if plan is None else plan
        arrays, static = eqx.partition(shapes, is_array_like)
        shardings = [plan.sharding(name) for name in named_leaves(arrays)]

        def make() -> list[Any]:
            return jax.tree.leaves(eqx.filter(make_model(), is_array_like))

        jitted = jax.jit(make, out_shardings=shardings)
        if self.peers.n > 1:
            agree_on_program(self.peers, "init", jitted.lower())
        leaves = jitted()
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)

    # --- batches and schedules ---------------------------------------------------------------------------------------

    def get_per_device_batch_size(self, global_batch_size: int, accumulate_grad_batches: int = 1) -> int:
        """Rows of a micro-batch at one position of the data and fsdp axes, for updates of `global_batch_size` examples.

        So the same script takes the same updates on any mesh.

        Raises ValueError where the batch shards times the micro-batches do not divide it.
        """
        check_count(global_batch_size, "global_batch_size", 0)
        check_count(accumulate_grad_batches, "accumulate_grad_batches")
        n_parts = self.n_batch_shards * accumulate_grad_batches
        if global_batch_size < 1 or global_batch_size % n_parts:
            raise ValueError(
                f"`global_batch_size`: expected a multiple of {self.n_batch_shards} shards x {accumulate_grad_batches} "
                f"micro-batches = {n_parts}, got {global_batch_size}. Change one of the three."
            )
        return global_batch_size // n_parts

    def get_accumulate_grad_batches(self, global_batch_size: int, per_device_batch_size: int) -> int:
        """How many micro-batches make one update of `global_batch_size` examples.

        Raises ValueError where `per_device_batch_size` times the batch shards does not divide it.
        """
        check_count(global_batch_size, "global_batch_size", 0)
        check_count(per_device_batch_size, "per_device_batch_size")
        micro = per_device_batch_size * self.n_batch_shards
        if global_batch_size < 1 or global_batch_size % micro:
            raise ValueError(
                f"`global_batch_size`: expected a multiple of {per_device_batch_size} rows a device x "
                f"{self.n_batch_shards} shards = {micro}, got {global_batch_size}. Change one of the two."
            )
        return global_batch_size // micro

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
        """A schedule over the optimizer updates of a fit: linear warm-up, then decay to the last update.

        **Arguments:**

        - `train_size`: examples an epoch; the last update of an epoch may hold fewer than the others.
        - `per_device_batch_size`, `batch_size`, `drop_remainder`: as given to `fit`.
        - `learning_rate`: after the warm-up.
        - `schedule_type`: of the decay: `"linear"`, `"cosine"`, or `"constant"` for none.
        - `warmup_ratio`, `warmup_steps`: the length of the warm-up, as a share of all updates or as updates, which win.
        - `accumulate_grad_batches`: micro-batches an update. Updates are counted, never micro-batches.

        Raises ValueError for an unknown type, for sizes below 1 and for a warm-up longer than the fit; TypeError without a
        learning rate.
        """
        if learning_rate is None:
            raise TypeError("`learning_rate`: expected a number, got None. Pass that of the updates after the warm-up.")
        sizes = {"train_size": train_size, "n_epochs": n_epochs, "accumulate_grad_batches": accumulate_grad_batches}
        for name, size in sizes.items():
            check_count(size, name)
        update = BatchSize.of(self.mesh, per_device_batch_size, batch_size, accumulate_grad_batches).examples
        n_steps = n_epochs * n_slices(train_size, update, drop_remainder)
        n_warmup = round(warmup_ratio * n_steps) if warmup_steps is None else warmup_steps
        if not 0 <= n_warmup <= n_steps:
            name, found = ("warmup_ratio", warmup_ratio) if warmup_steps is None else ("warmup_steps", warmup_steps)
            raise ValueError(
                f"`{name}`: expected a warm-up of 0 to the {n_steps} updates of the fit, got {found}. Choose another length."
            )
        n_decay = max(n_steps - n_warmup, 1)
        if schedule_type == "linear":
            decay = optax.linear_schedule(learning_rate, end_learning_rate, n_decay)
        elif schedule_type == "cosine":
            alpha = end_learning_rate / learning_rate if learning_rate else 0.0
            decay = optax.cosine_decay_schedule(learning_rate, n_decay, alpha)
        elif schedule_type == "constant":
            decay = optax.constant_schedule(learning_rate)
        else:
            raise ValueError(
                f"`schedule_type`: expected 'linear', 'cosine' or 'constant', got {schedule_type!r}. "
                "Any optax schedule can be given to the optimizer instead."
            )
        if n_warmup == 0:
            return decay
        return optax.join_schedules([optax.linear_schedule(init_learning_rate, learning_rate, n_warmup), decay], [n_warmup])

    # --- what is said and recorded -----------------------------------------------------------------------------------

    def log_info(self, message: str, *, title: str | None = None) -> None:
        """Prints a message, once for the whole run."""
        self.console.info(message, title=title)

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Records numbers by name at a step: `metrics.jsonl`, TensorBoard, the loggers."""
        self.console.metrics(metrics, step)

    def begin_records(self, step: int) -> None:
        """Forgets what an earlier process recorded in the workdir after `step`, where this one goes on from; once."""
        if not self._records_begun:
            self._records_begun = True
            self.console.rewind(step)

    def forget_records(self) -> None:
        """Let `begin_records` act once more, for a run that begins anew from an earlier step."""
        self._records_begun = False

    def save_outputs(self, outputs: Sequence[Any], name: str = "outputs.jsonl") -> Path:
        """Writes one JSON line an output to `workdir/outputs/NAME` and returns its path. Arrays become nested lists.

        Raises ValueError without a workdir, TypeError for what JSON does not hold.
        """
        if self.workdir is None:
            raise ValueError("`workdir`: expected a folder, got None. Pass `Deployer(workdir=...)` to save outputs.")

        def plain(value: Any) -> Any:
            if isinstance(value, jax.Array | np.ndarray | np.generic):
                return np.asarray(value).tolist()
            raise TypeError(f"`outputs`: expected what JSON holds, got {type(value).__name__}. Convert it first.")

        lines = "".join(json.dumps(output, default=plain) + "\n" for output in outputs)
        path = self.workdir / "outputs" / name
        if self.is_dry_run or self.peers.index:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines, "utf-8")
        return path
