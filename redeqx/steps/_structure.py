"""The structure of a model: which arrays are trained, which are frozen, and everything else.

A model is partitioned once, and a step jits a function of flat lists of arrays. `eqx.filter_jit` would traverse the whole
module on every call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._tree import PyTree, is_array_like, listed, named_leaves
from ..errors import brief
from ._precision import cast


@dataclass(frozen=True)
class Structure:
    """Takes the arrays of a model as flat lists, and puts a model together from such lists.

    `trained` and `frozen` arrays are lists in the tree's order; everything else stays in `static`.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]  # of the trained and the frozen leaves
    treedefs: tuple[Any, Any]
    static: PyTree

    @classmethod
    def of(cls, model: PyTree, trainable: Any = eqx.is_inexact_array) -> "Structure":
        """Returns the structure of a model, or of its shapes."""
        arrays, static = eqx.partition(model, is_array_like)
        # `eqx.is_inexact_array` is False for shapes, and True for 8-bit floats, which are quantised weights without
        # arithmetic.
        which = _has_gradient if trainable is eqx.is_inexact_array else trainable
        try:
            trained, frozen = eqx.partition(arrays, which)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "`trainable`: expected a function of a leaf, or a PyTree of booleans in the model's structure, got "
                f"{brief(which)}. For a part of the model use `eqx.tree_at` on a tree of False."
            ) from error
        fixed = [f"`{name}` ({leaf.dtype})" for name, leaf in named_leaves(trained).items() if not _has_gradient(leaf)]
        if fixed:
            raise ValueError(
                "`trainable`: expected floating leaves of 16 bits or more, which have gradients, got "
                f"{', '.join(listed(fixed, 3))}. Pass `eqx.is_inexact_array`, the default, or leave these out."
            )
        names = (tuple(named_leaves(trained)), tuple(named_leaves(frozen)))
        return cls(names, (jax.tree.structure(trained), jax.tree.structure(frozen)), static)

    def take(self, model: PyTree) -> tuple[list[Any], list[Any]]:
        """Returns the trained and the frozen arrays of a model with the same structure."""
        leaves = named_leaves(model)
        return [leaves[name] for name in self.names[0]], [leaves[name] for name in self.names[1]]

    def trained_tree(self, trained: Sequence[Any]) -> PyTree:
        """Returns the model with None for all other leaves, as an optimizer receives it."""
        return jax.tree.unflatten(self.treedefs[0], trained)

    def put(
        self, trained: Sequence[Any], frozen: Sequence[Any], *, inference: bool = False, compute_dtype: Any = None
    ) -> PyTree:
        """Returns the model with these arrays; `compute_dtype` casts its floating leaves."""
        trees = [jax.tree.unflatten(d, leaves) for d, leaves in zip(self.treedefs, (trained, frozen), strict=True)]
        if compute_dtype is not None:
            trees = jax.tree.map(lambda x: cast(x, compute_dtype), trees)
        model = eqx.combine(*trees, self.static)
        return eqx.nn.inference_mode(model) if inference else model


def _has_gradient(leaf: Any) -> bool:
    return is_array_like(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) and jnp.finfo(leaf.dtype).bits >= 16
