"""The mesh and its four axes.

Owns the names of the mesh axes: no other module has the strings "data", "fsdp", "sequence" or "model". *Axis* always
means a mesh axis. A tensor has *dims*.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from .._tree import is_key
from ..errors import check_count

DATA = "data"
FSDP = "fsdp"
SEQUENCE = "sequence"
MODEL = "model"
AXES = (DATA, FSDP, SEQUENCE, MODEL)
_HOST = "pinned_host"  # JAX's name of host memory
BATCH_AXES = (DATA, FSDP)  # the axes that split the rows of a batch, which are replicated over the others
STORAGE_AXES = (FSDP, SEQUENCE)  # the axes that split weights in memory; each weight is gathered over them at its use


def make_mesh(
    n_model_shards: int = 1, n_fsdp_shards: int = 1, devices: Sequence[Any] | None = None, n_sequence_shards: int = 1
) -> Mesh:
    """Makes a mesh with axes `("data", "fsdp", "sequence", "model")`, by default of all of JAX's devices. Their number gives
    the size of the data axis. `Deployer` says what the others split.

    Raises ValueError if the product does not divide the number of devices.
    """
    n_devices = jax.device_count() if devices is None else len(devices)
    sizes = {"n_model_shards": n_model_shards, "n_fsdp_shards": n_fsdp_shards, "n_sequence_shards": n_sequence_shards}
    for name, value in sizes.items():
        check_count(value, name, advice="Pass 1 to leave that axis unused.")
    n_shards = math.prod(sizes.values())
    if n_devices % n_shards:
        # The first two are always named; the third only if it is used.
        factors = [f"`{name}`={value}" for name, value in sizes.items() if name != "n_sequence_shards" or value > 1]
        asked = f"{' x '.join(factors)} = {n_shards}"
        if n_devices == 1:
            raise ValueError(
                f"{asked}: expected 1 on one device, got {n_shards}. Leave them out, or simulate devices on the CPU with "
                "`redeqx.simulate_devices(8)` and JAX_PLATFORMS=cpu."
            )
        divisors = ", ".join(str(d) for d in range(1, n_devices + 1) if n_devices % d == 0)
        raise ValueError(
            f"{asked}: expected a product that divides the {n_devices} devices, got a remainder of "
            f"{n_devices % n_shards}. Choose a product among {divisors}."
        )
    shape = (n_devices // n_shards, n_fsdp_shards, n_sequence_shards, n_model_shards)
    # Auto: the plan sets the shardings of parameters and inputs, and XLA the others. (Newer JAX defaults to Explicit.)
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # such as 8 x 8 shards on a torus of 4 x 4 x 4 chips: two axes share a side
        return Mesh(create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES, axis_types=types)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of axes as text: `data=2 x fsdp=1 x model=4`. The sequence axis is named only if it is used."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if axis != SEQUENCE or size != 1)


def n_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts into which the rows of a batch are split: data x fsdp."""
    return n_shards(BATCH_AXES, mesh)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec, which may be None, an axis, or several."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def n_shards(spec: Iterable[Any], mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of distinct shards of an array with this spec, or along a dim that these axes split."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in axes_of(entry))


def sharding_of(spec: P, mesh: Mesh) -> NamedSharding:
    """Returns a sharding by a spec, without axes of size 1: they split nothing, but to JAX another sharding has them."""
    kept = (tuple(axis for axis in axes_of(entry) if mesh.shape[axis] > 1) for entry in spec)
    return NamedSharding(mesh, P(*(axes[0] if len(axes) == 1 else axes or None for axes in kept)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a replicated value."""
    return NamedSharding(mesh, P())


def in_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in host memory."""
    return sharding.with_memory_kind(_HOST)


def is_in_host(sharding: Any) -> bool:
    """Whether arrays of this sharding are in host memory."""
    return sharding.memory_kind == _HOST


def copied(array: Any) -> Any:
    """Returns a copy without a weak type. `jnp.array(2.0)` has one, but no output of a step: the next step would compile
    again."""
    return jnp.array(array, array.dtype) if getattr(array, "weak_type", False) else array.copy()


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """Puts a value on a mesh, which may span several processes. All of them must pass the same value."""
    is_split = isinstance(value, jax.Array) and not value.is_fully_addressable and not value.is_fully_replicated
    if sharding.is_fully_addressable or is_split:  # no process has all of a split value
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and is_key(value):
        return jax.random.wrap_key_data(put(jax.random.key_data(value), sharding), impl=jax.random.key_impl(value))
    # Not `device_put`, which first compares the values of all processes, with a collective.
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def split_rows(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """Returns the sharding of a batch whose rows, in `dim`, are split over the data and fsdp axes."""
    return NamedSharding(mesh, P(*[None] * dim, BATCH_AXES))


def split_heads(mesh: Mesh | AbstractMesh, *, by_rows: bool = False) -> NamedSharding:
    """Returns the sharding of an attention's queries `[rows, positions, heads, size]`: rows are split as in a batch,
    positions over the sequence axis, and heads over the model axis. With `by_rows` the sequence axis splits rows too,
    instead of positions."""
    if by_rows:
        return NamedSharding(mesh, P((*BATCH_AXES, SEQUENCE), None, MODEL, None))
    return NamedSharding(mesh, P(BATCH_AXES, SEQUENCE if mesh.shape[SEQUENCE] > 1 else None, MODEL, None))
