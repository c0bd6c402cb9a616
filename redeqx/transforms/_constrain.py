"""Constraints that rules put on values: the mesh axes that split some of their dims, or those of their gradients alone."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from ..tracing import Tagged


def split_over(x: Any, mesh: Mesh | AbstractMesh, axes: Mapping[int, Any], others: Any = P.UNCONSTRAINED) -> Any:
    """Constrains the dims of a value to be split over mesh axes: those of `axes` by their places, and all others alike.
    Without `axes` it is unchanged, and so is a tagged value, such as a weight, which is left to its rule."""
    if isinstance(x, Tagged) or not axes:
        return x
    spec = P(*(axes.get(dim, others) for dim in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def with_gradient(fn: Callable[[Any], Any], of_gradient: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of one array whose derivative maps the output's gradient by another function."""
    new = jax.custom_vjp(fn)
    new.defvjp(lambda x: (fn(x), None), lambda _, gradient: (of_gradient(gradient),))
    return new
