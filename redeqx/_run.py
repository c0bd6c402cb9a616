"""A run: the devices, processes, folder and console that all models of one script share."""

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from .distributed import Peers, Preemption, Watch
from .machine import Options, n_batch_shards
from .monitor import Console
from .steps import stream_dtype, stream_key
from .storage import Location, Staging

_key = jax.jit(stream_key)


@dataclass(eq=False)
class Run:
    """The resources of a run that do not belong to a model. The Deployer makes it, and every engine of the script uses it.

    **Arguments:**

    - `mesh`: the devices.
    - `peers`: the processes of the run.
    - `console`: prints, and records metrics.
    - `watch`: ends the run if steps stop finishing.
    - `preemption`: reports the signals that ask the run to stop.
    - `workdir`: the folder of the run, on a disk or in an object store; None records nothing.
    - `seed`: the seed of the run.
    - `is_dry_run`: whether models are shapes and nothing is computed.
    - `xla_settings`: the Deployer's argument.
    - `cache`: the header's text about the compilation cache; None for none.
    - `staging`: in process 0, if the workdir is in an object store: the local folder for everything except checkpoints.
    """

    mesh: Mesh
    peers: Peers
    console: Console
    watch: Watch
    preemption: Preemption
    workdir: Location | None
    seed: int
    is_dry_run: bool = False
    xla_settings: Options | str | None = "auto"
    cache: str | None = None
    staging: Staging | None = None
    n_keys: int = 0
    n_passes: int = 0  # over examples, by all engines; numbers the comparisons between processes

    def __post_init__(self) -> None:
        self._recorders: dict[str | None, Callable[[], Any]] = {}  # the engine of each name that records
        self._former_recorders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begun: set[str | None] = set()  # the engines, by name, whose records of an earlier process were rewound

    @property
    def n_batch_shards(self) -> int:
        """The number of parts that the rows of a batch are split into: the data axis times the fsdp axis."""
        return n_batch_shards(self.mesh)

    @property
    def local(self) -> Path | None:
        """The local folder in which process 0 writes everything except checkpoints; None if nothing is recorded."""
        if self.staging is not None:
            return self.staging.folder
        return self.workdir if isinstance(self.workdir, Path) else None

    def upload(self) -> None:
        """Uploads the files in `local`, if the workdir is in an object store. Raises OSError if that fails."""
        if self.staging is not None:
            self.staging.upload()

    def next_key(self) -> PRNGKeyArray:
        """Returns the next key: with the same seed, the n-th call returns the same key in every run."""
        return _key(self.next_stream())

    def next_stream(self) -> np.ndarray:
        """Returns the seed and the number of the next key, int `[2]`, for `stream_key`."""
        self.n_keys += 1
        return np.array([self.seed, self.n_keys]).astype(stream_dtype())

    def decide(self, value: Any) -> Any:
        """Returns process 0's value (any JSON) in every process; each process must call it.

        Raises TypeError for a value that JSON cannot hold, also in the only process of a run.
        """
        try:
            value = json.loads(json.dumps(value))  # as the others receive it: a tuple is a list
        except TypeError:
            raise TypeError(
                f"`decide`: expected a value that JSON can hold, got {type(value).__name__}. Convert it first, as by `bool` "
                "or `float`."
            ) from None
        return value if self.peers.n == 1 else self.peers.gather("decide", value)[0]

    def need_values(self, what: str) -> None:
        """Raises ValueError in a dry run, where arrays have no values."""
        if self.is_dry_run:
            raise ValueError(
                f"`{what}`: expected to come after `fit`, with which a dry run ends, got called before: nothing has a "
                "value yet. Leave it out with `if not deployer.is_dry_run:`."
            )

    def claim_records(self, engine: Any) -> None:
        """Lets an engine record its steps from now on; another one of its name may follow it.

        Raises ValueError if engines of one name take turns: their steps have the same numbers, and their metrics the same
        names.
        """
        before = self._recorders.get(engine.name, lambda: None)()
        if before is engine or (self.workdir is None and not self.console.records.has_trackers):
            return
        if engine in self._former_recorders:
            raise ValueError(
                "`Trainer`: expected that one trainer of a name records after the other, got two in turn: nothing would "
                "tell their steps apart. Give each a name: `Trainer(name='critic')`."
            )
        if before is not None:
            self._former_recorders.add(before)
        self._recorders[engine.name] = weakref.ref(engine)

    def begin_records(self, step: int, name: str | None = None) -> None:
        """Deletes an earlier process's records after `step`, those of the engine of this name. Only the first call for a
        name has an effect."""
        if name not in self._begun:
            self._begun.add(name)
            self.console.records.rewind(step, name)

    def forget_records(self, name: str | None = None) -> None:
        """Lets `begin_records` act again, for a run that restarts from an earlier step."""
        self._begun.discard(name)
