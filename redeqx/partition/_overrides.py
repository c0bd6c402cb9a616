"""Specs that the user gives for leaves, by path or by glob."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec as P

from .._tree import nearest
from ..machine import axes_of, n_shards

Overrides = Mapping[str, P | Sequence[str | Sequence[str] | None] | None]


def specs_of(overrides: Overrides, leaves: Mapping[str, Any], mesh: Mesh) -> dict[str, tuple[P, str]]:
    """Returns the spec and reason of each leaf that an override matches. Raises an error for an invalid override."""
    chosen: dict[str, tuple[P, str]] = {}
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"`overrides`: expected a dict of specs by path or glob, got {type(overrides).__name__}. "
            'Write `{"head.weight": ("model", None)}`.'
        )
    for pattern, given in overrides.items():
        where = f"`overrides[{pattern!r}]`"
        if not isinstance(pattern, str):
            raise TypeError(f"{where}: expected a path or a glob, got {type(pattern).__name__}. Pass a string.")
        if not (matched := fnmatch.filter(leaves, pattern)):
            near = nearest(pattern, leaves) or " `deployer.plan(model).explain()` lists them."
            raise ValueError(f"{where}: expected a path of the model, got none of that name.{near}")
        spec = _as_spec(where, given)
        for name in matched:
            if name not in chosen:
                shape = tuple(leaves[name].shape)
                _check(where, spec, name, shape, mesh)
                chosen[name] = P(*spec, *[None] * (len(shape) - len(spec))), f"overridden by {pattern!r}"
    return chosen


def _as_spec(where: str, given: Any) -> P:
    entries = given if isinstance(given, tuple | list | P) else () if given is None else (given,)
    axes = [axis for entry in entries for axis in (entry if isinstance(entry, tuple | list) else (entry,))]
    wrong = [axis for axis in axes if axis is not None and not isinstance(axis, str)]
    if isinstance(given, str) or wrong:  # a string instead of a tuple with one entry for each dim
        raise (TypeError if wrong else ValueError)(
            f"{where}: expected a mesh axis or None for each dim, got {(wrong or [given])[0]!r}. "
            f"Write `({'model' if wrong else given!r}, None)` to split the first of two dims, None to replicate the leaf."
        )
    return P(*entries)


def _check(where: str, spec: P, name: str, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Raises ValueError for an override that does not fit the leaf `name`."""
    if len(spec) > len(shape):
        raise ValueError(
            f"{where}: expected at most {len(shape)} entries for `{name}` of shape {shape}, "
            f"got {tuple(spec)}. Give one mesh axis or None for each dim."
        )
    named = [axis for entry in spec for axis in axes_of(entry)]
    if len(set(named)) < len(named):
        raise ValueError(f"{where}: expected each mesh axis once, got {tuple(spec)}. Split one dim by it.")
    if unknown := [axis for axis in named if axis not in mesh.shape]:
        raise ValueError(
            f"{where}: expected mesh axes among {tuple(mesh.shape)}, got {unknown[0]!r}.{nearest(unknown[0], mesh.shape)}"
        )
    for dim, entry in enumerate(spec):
        if shape[dim] % (n := n_shards(P(entry), mesh)):
            raise ValueError(
                f"{where}: expected dim {dim} of `{name}` to divide over {n} shards, got {shape}. "
                "Choose another dim, or None."
            )
