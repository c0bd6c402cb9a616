"""A run: the devices, processes, folder and console that all models trained by one script share."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from ..distributed import Peers, Preemption, Watch
from ..machine import Options, dry, n_batch_shards
from ..monitor import Console
from ..storage import Location, Staging


@partial(jax.jit, static_argnums=0)  # a static seed may have more than 32 bits; one program, not one a call of `jax.random`
def _key_of(seed: int, n: Any) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.key(seed), n)


@dataclass(eq=False)
class Run:
    """What a run has beside its models. The Deployer makes one, and every engine of the script uses it.

    **Arguments:**

    - `mesh`: the devices.
    - `peers`: the processes of the run.
    - `console`: prints, and records metrics.
    - `watch`: ends the run when no step finishes any more.
    - `preemption`: reports the signals that ask the run to stop.
    - `workdir`: the folder of the run, on a disk or in an object store; None records nothing.
    - `seed`: the one seed of the run.
    - `is_dry_run`: whether models are shapes and nothing is computed.
    - `xla_settings`: as given to the Deployer.
    - `cache`: what is said of the compilation cache; None for nothing.
    - `staging`: of process 0, where the workdir is in an object store: the local folder of what is no checkpoint.
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
    n_passes: int = 0  # over examples, by all engines: comparisons are named by it
    records_begun: bool = False

    @property
    def n_batch_shards(self) -> int:
        """The number of parts that the rows of a batch are split into: the data axis times the fsdp axis."""
        return n_batch_shards(self.mesh)

    @property
    def local(self) -> Path | None:
        """The folder on this machine into which process 0 writes what is no checkpoint; None where nothing is recorded."""
        if self.staging is not None:
            return self.staging.folder
        return self.workdir if isinstance(self.workdir, Path) else None

    def upload(self) -> None:
        """Uploads what was written to `local`, where the workdir is in an object store. Raises OSError if that fails."""
        if self.staging is not None:
            self.staging.upload()

    def next_key(self) -> PRNGKeyArray:
        """Returns the next key: the same at the same call of every run with the same seed."""
        self.n_keys += 1
        return _key_of(self.seed, np.uint32(self.n_keys))

    def decide(self, value: Any) -> Any:
        """Process 0's value (what JSON holds), in every process; each process calls it."""
        return value if self.peers.n == 1 else self.peers.gather("decide", value)[0]

    def need_values(self, what: str) -> None:
        """Raises ValueError in a dry run, where arrays have no values."""
        if self.is_dry_run:
            raise ValueError(
                f"`{what}`: expected to come after `fit`, with which a dry run ends, got called before: nothing has a "
                "value yet. Leave it out with `if not deployer.is_dry_run:`."
            )

    def returns_zeros(self, what: str) -> bool:
        """Returns whether this is a dry run, in which the method `what`, called before the first `fit`, returns zeros
        instead of values, so that a script runs unchanged. Prints so, once for each method."""
        run = dry()
        if run is not None and what not in run.zeros:
            run.zeros.add(what)
            self.console.info(f"dry run: `{what}` comes before the first `fit`, where nothing has a value: it returns zeros")
        return self.is_dry_run

    def begin_records(self, step: int) -> None:
        """Deletes what an earlier process recorded in the workdir after `step`, from which this one continues; once."""
        if not self.records_begun:
            self.records_begun = True
            self.console.records.rewind(step)

    def forget_records(self) -> None:
        """Lets `begin_records` act once more, for a run that begins again from an earlier step."""
        self.records_begun = False
