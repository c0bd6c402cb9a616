"""The mesh, its three axes, and simulated devices.

Owns the names of the mesh axes: nobody else spells "data", "fsdp" or "model". An *axis* is always one of the mesh's; the
sides of a tensor are its *dims*.
"""

import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

DATA = "data"
FSDP = "fsdp"
MODEL = "model"
AXES = (DATA, FSDP, MODEL)
BATCH_AXES = (DATA, FSDP)  # the axes that split the rows of a batch; the model axis shares them


def make_mesh(n_model_shards: int = 1, n_fsdp_shards: int = 1) -> Mesh:
    """A mesh over every device, of axes `("data", "fsdp", "model")`; what the shards leave over is data parallelism.

    **Arguments:**

    - `n_model_shards`: devices among which one layer's tensors are split (tensor parallelism).
    - `n_fsdp_shards`: devices among which parameters and optimizer state are split while the batch stays split too.

    Raises ValueError where their product does not divide the number of devices.
    """
    n_devices = jax.device_count()
    for name, value in (("n_model_shards", n_model_shards), ("n_fsdp_shards", n_fsdp_shards)):
        if value < 1:
            raise ValueError(f"`{name}`: expected at least 1, got {value}. Pass 1 to leave that axis unused.")
    n_shards = n_model_shards * n_fsdp_shards
    if n_devices % n_shards:
        divisors = ", ".join(str(d) for d in range(1, n_devices + 1) if n_devices % d == 0)
        asked = f"`n_model_shards`={n_model_shards} x `n_fsdp_shards`={n_fsdp_shards} = {n_shards}"
        raise ValueError(
            f"{asked}: expected a product that divides the {n_devices} devices, got a remainder of "
            f"{n_devices % n_shards}. Choose a product among {divisors}."
        )
    shape = (n_devices // n_shards, n_fsdp_shards, n_model_shards)
    # Auto: the plan pins parameters and inputs, XLA's partitioner derives the rest. (Newer JAX defaults to Explicit.)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def n_batch_shards(mesh: Mesh) -> int:
    """In how many parts the rows of a batch are split: data x fsdp."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, P())


def split_rows(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """The sharding of a batch whose rows, in `dim`, are split over the data and fsdp axes."""
    return NamedSharding(mesh, P(*[None] * dim, BATCH_AXES))


def simulate_devices(n_devices: int) -> None:
    """Act as `n_devices` devices where the machine has no accelerator; with one, this changes nothing that is used.

    Call it before the first use of JAX's devices. It sets the number of JAX's CPU devices, and `NPROC` in the environment:
    XLA sizes its thread pool by it, and collectives over more devices than threads wait for each other for ever.

    Raises RuntimeError where JAX's backends have been started already.
    """
    try:
        jax.config.update("jax_num_cpu_devices", n_devices)
    except RuntimeError as error:
        raise RuntimeError(
            f"`simulate_devices({n_devices})`: expected JAX's devices to be untouched, got a started backend. "
            "Call it at the top of the script, before any array is made."
        ) from error
    os.environ["NPROC"] = str(max(2 * n_devices, int(os.environ.get("NPROC") or 0), os.cpu_count() or 1))
