"""The mesh and its three axes.

Owns the names of the mesh axes: nobody else spells "data", "fsdp" or "model". An *axis* is always one of the mesh's; the
sides of a tensor are its *dims*.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from ..errors import check_count

DATA = "data"
FSDP = "fsdp"
MODEL = "model"
AXES = (DATA, FSDP, MODEL)
BATCH_AXES = (DATA, FSDP)  # the axes that split the rows of a batch; the model axis shares them


def make_mesh(n_model_shards: int = 1, n_fsdp_shards: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over devices, of axes `("data", "fsdp", "model")`; what the shards leave over is data parallelism.

    **Arguments:**

    - `n_model_shards`: devices among which one layer's tensors are split (tensor parallelism).
    - `n_fsdp_shards`: devices among which parameters and optimizer state are split while the batch stays split too.
    - `devices`: all of JAX's by default.

    Raises ValueError where their product does not divide the number of devices.
    """
    n_devices = jax.device_count() if devices is None else len(devices)
    for name, value in (("n_model_shards", n_model_shards), ("n_fsdp_shards", n_fsdp_shards)):
        check_count(value, name, advice="Pass 1 to leave that axis unused.")
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
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # as 8 x 8 shards on a torus of 4 x 4 x 4 chips, whose sides are then shared by two axes
        return Mesh(create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES, axis_types=types)


def n_batch_shards(mesh: Mesh) -> int:
    """In how many parts the rows of a batch are split: data x fsdp."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that every device holds whole."""
    return NamedSharding(mesh, P())


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """What this process has whole, on a mesh that may span others, which have the same; each device gets its part."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(value), sharding), impl=jax.random.key_impl(value))
    # Not `device_put`, which would first compare the whole of it over the processes, by a collective.
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def split_rows(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """The sharding of a batch whose rows, in `dim`, are split over the data and fsdp axes."""
    return NamedSharding(mesh, P(*[None] * dim, BATCH_AXES))
