"""Traces a function of a model abstractly, in normal form, and finds which of the model's leaves its outputs depend on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._tree import bare_shape, is_array_like, named_leaves
from ._flow import flow, union
from ._normal import normal


@dataclass(frozen=True)
class Trace:
    """An abstract trace of a function of a model. No array is allocated."""

    names: tuple[str, ...]  # of the model's arrays, which are the first inputs of `closed`
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # their shapes
    closed: Any  # the closed jaxpr, in normal form

    @classmethod
    def of(cls, fn: Callable[..., Any], model: PyTree, *args: PyTree) -> "Trace":
        """Traces `fn(model, *args)`, for arrays or `jax.ShapeDtypeStruct`s."""
        arrays, static = eqx.partition(model, is_array_like)
        leaves, treedef = jax.tree.flatten(arrays)
        shapes = tuple(map(bare_shape, leaves))

        def of_leaves(leaves: tuple[Any, ...], *args: PyTree) -> Any:
            return fn(eqx.combine(jax.tree.unflatten(treedef, leaves), static), *args)

        return cls(tuple(named_leaves(arrays)), shapes, normal(jax.make_jaxpr(of_leaves)(shapes, *args)))

    def reads(self) -> dict[str, bool]:
        """Returns, for each leaf, whether the outputs' gradient can depend on it."""
        jaxpr, bits = self.closed.jaxpr, [1 << i for i in range(len(self.closed.jaxpr.invars))]
        depends = flow(self.closed, bits, lambda eqn, _: [0] if eqn.primitive.name == "stop_gradient" else None, union)
        read = union(list(map(depends, jaxpr.outvars)))
        return {name: bool(read & bit) for name, bit in zip(self.names, bits, strict=False)}
