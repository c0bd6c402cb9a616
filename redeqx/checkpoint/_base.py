"""The base of a checkpoint: frozen leaves that a folder of weights holds. The checkpoint names them, with their checksums.

A checkpoint of adapters would otherwise hold the whole model again, and each average of it too.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from .._tree import is_array_like, is_key, listed, map_named, nearest
from ..machine import replicated
from ..storage import Location


@dataclass(frozen=True)
class Base:
    """The leaves that a checkpoint does not hold: for each folder of weights, the checksums of the leaves that are read from
    it, by name. This is the entry `base` of a checkpoint's record."""

    folders: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, origins: Mapping[str, str], leaves: Mapping[str, Array]) -> "Base":
        """Returns the base with the leaves that `origins` names, with the folder of each."""
        folders: dict[str, dict[str, str]] = {}
        for name, folder in origins.items():
            folders.setdefault(folder, {})[name] = checksum(leaves[name])
        return cls(folders)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Base | None":
        """Returns the base of a checkpoint, from its record; None if the checkpoint holds all leaves."""
        return None if record.get("base") is None else cls(record["base"])

    @property
    def checksums(self) -> dict[str, str]:
        """The checksum of each leaf, by name."""
        return {name: sum_ for leaves in self.folders.values() for name, sum_ in leaves.items()}

    @property
    def origins(self) -> dict[str, str]:
        """The folder of each leaf, by name."""
        return {name: folder for folder, leaves in self.folders.items() for name in leaves}

    def without(self, tree: PyTree) -> PyTree:
        """Returns a model with None for these leaves."""
        names = self.checksums
        return map_named(lambda name, leaf: None if name in names else leaf, tree)

    def check(self, path: Location, leaves: Mapping[str, Any]) -> None:
        """Raises ValueError if the leaves of a model are not those with which the checkpoint at `path` was saved."""
        checksums = self.checksums
        missing = [name for name in checksums if not isinstance(leaves.get(name), jax.Array | np.ndarray)]
        folders = ", ".join(f"`{folder}`" for folder in self.folders)
        if missing:
            name = missing[0]
            got = "a shape" if is_array_like(leaves.get(name)) else f"none.{nearest(name, leaves)}"
            raise ValueError(
                f"`{path}`: expected the values of the base, which this checkpoint of trained leaves does not hold, got "
                f"{got} for `{name}`{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}. Build the model as for "
                f"training, from {folders}: `redeqx.models.from_pretrained`, then `lora.add`, for example."
            )
        found = {name: checksum(leaves[name]) for name in checksums}
        different = [name for name in checksums if found[name] != checksums[name]]
        if different:
            then, now = (sums[different[0]].partition("[")[0] for sums in (checksums, found))
            got = f"{now} instead of {then}" if now != then else "others"
            shown = ", ".join(f"`{each}`" for each in listed(different, 3))
            raise ValueError(
                f"`{path}`: expected the base that it was trained on, {folders}, with the values of then, got {got} in "
                f"{shown}. Load that base, in that dtype, or train again from this one in another workdir."
            )


def checksum(array: Any) -> str:
    """Returns the dtype, shape and checksum of an array's bits, which are the same on every mesh: `"float32[4,8]:0f3a..."`.
    All processes that hold parts of it must call this."""
    array = jnp.asarray(array)
    sharding = array.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None
    sums = np.asarray(_sums(array, mesh))
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]:{sums[0]:08x}{sums[1]:08x}"


@functools.partial(jax.jit, static_argnums=1)
def _sums(array: Array, mesh: Mesh | None) -> Array:
    """Returns two sums, modulo 2 ** 32, of functions of each word and its position. Sums of integers have no order."""
    words = _words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    at = _mixed(index * np.uint32(0x9E3779B9) + np.uint32(1))
    sums = jnp.stack([jnp.sum(words * (at | 1), dtype=jnp.uint32), jnp.sum(_mixed(words ^ at), dtype=jnp.uint32)])
    return sums if mesh is None else jax.lax.with_sharding_constraint(sums, replicated(mesh))


def _mixed(x: Array) -> Array:
    """Spreads each bit over the whole word (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: Array) -> Array:
    """Returns the bits of an array as uint32."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    n_bits = (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{n_bits}")).astype(jnp.uint32)


def is_worth_naming(origins: Mapping[str, str], leaves: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint should name these leaves of a base instead of holding them: if they are most of the
    bytes, so that a model that is trained as a whole stays complete in one file."""
    n_bytes = {name: leaf.nbytes for name, leaf in leaves.items()}
    return 2 * sum(n_bytes[name] for name in origins) > sum(n_bytes.values())
