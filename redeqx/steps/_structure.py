"""The structure of a model: which arrays are trained, which are frozen, and everything else.

A model is partitioned once, and a step jits a function of flat lists of arrays. `eqx.filter_jit` would traverse the whole
module on every call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._quantised import is_quantised, map_quantised, quantised_leaves
from .._tree import PyTree, is_array_like, listed, map_named, named_leaves, wide_leaves
from ..errors import brief, warn
from ._precision import cast


@dataclass(frozen=True)
class Structure:
    """Takes the arrays of a model as flat lists, and puts a model together from such lists. `trained` and `frozen` arrays
    are lists in the tree's order; everything else stays in `static`."""

    names: tuple[tuple[str, ...], tuple[str, ...]]  # of the trained and the frozen leaves
    treedefs: tuple[Any, Any]
    static: PyTree

    @classmethod
    def of(cls, model: PyTree, trainable: Any = eqx.is_inexact_array) -> "Structure":
        """Returns the structure of a model, or of its shapes."""
        arrays, static = eqx.partition(model, is_array_like)
        # `eqx.is_inexact_array` is False for shapes, and True for 8-bit floats, which are quantised weights without
        # arithmetic.
        which = _trained_by_default(arrays) if trainable is eqx.is_inexact_array else trainable
        try:
            trained, frozen = eqx.partition(arrays, which)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "`trainable`: expected a function of a leaf, or a PyTree of booleans in the model's structure, got "
                f"{brief(which)}. For a part of the model use `eqx.tree_at` on a tree of False."
            ) from error
        fixed = [f"`{name}` ({leaf.dtype})" for name, leaf in named_leaves(trained).items() if not _has_gradient(leaf)]
        fixed += [f"`{name}` (quantised)" for name, weight in quantised_leaves(trained).items() if weight.scales is not None]
        if fixed:
            raise ValueError(
                "`trainable`: expected floating leaves of 16 bits or more, which have gradients, got "
                f"{', '.join(listed(fixed, 3))}. Pass `eqx.is_inexact_array`, the default, or leave these out."
            )
        names = (tuple(named_leaves(trained)), tuple(named_leaves(frozen)))
        return cls(names, (jax.tree.structure(trained), jax.tree.structure(frozen)), static)

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of all leaves, in the order in which functions take their arrays as one list: trained, then frozen."""
        return (*self.names[0], *self.names[1])

    def take(self, model: PyTree) -> tuple[list[Any], list[Any]]:
        """Returns the trained and the frozen arrays of a model with the same structure."""
        leaves = named_leaves(model)
        return [leaves[name] for name in self.names[0]], [leaves[name] for name in self.names[1]]

    def warn_of_twins(self, model: PyTree) -> None:
        """Warns about two trained leaves that are one array: each gets its own updates, so that they drift apart. A frozen
        leaf with the array of a trained one is a reference, which is meant to stay."""
        first: dict[int, str] = {}
        twins: list[tuple[str, str]] = []
        for name, array in zip(self.names[0], self.take(model)[0], strict=True):
            other = first.setdefault(id(array), name)
            if other != name and not isinstance(array, jax.ShapeDtypeStruct):  # one shape may stand for several arrays
                twins.append((name, other))
        if twins:
            (name, other), n_more = twins[0], len(twins) - 1
            more = f" (and {n_more} more)" if n_more else ""
            warn(
                f"`{name}`: the same array as `{other}`, but two leaves of the tree{more}: training will let them drift "
                "apart. Tie them with `eqx.nn.Shared`, or freeze one as a reference by `trainable=`."
            )

    def trained_tree(self, trained: Sequence[Any]) -> PyTree:
        """Returns the model with None for all other leaves, as an optimizer receives it."""
        return jax.tree.unflatten(self.treedefs[0], trained)

    def put(
        self, trained: Sequence[Any], frozen: Sequence[Any], *, inference: bool = False, compute_dtype: Any = None
    ) -> PyTree:
        """Returns the model with these arrays; `compute_dtype` casts its floating leaves, but for those that
        modules keep in float32."""
        trees = [jax.tree.unflatten(d, leaves) for d, leaves in zip(self.treedefs, (trained, frozen), strict=True)]
        static = self.static
        if compute_dtype is not None:  # scales keep their digits: the numbers that they make are rounded
            wide = [wide_leaves(tree, compute_dtype) for tree in trees]
            trees = [
                map_named(
                    lambda name, x, kept=kept: x if name in kept or is_quantised(x) else cast(x, compute_dtype),
                    tree,
                    is_leaf=is_quantised,
                )
                for tree, kept in zip(trees, wide, strict=True)
            ]
            trees, static = map_quantised(lambda weight: replace(weight, dtype=compute_dtype), (trees, static))
        model = eqx.combine(*trees, static)
        return eqx.nn.inference_mode(model) if inference else model


def _trained_by_default(arrays: PyTree) -> PyTree:
    """Returns the mask of the leaves that have gradients: floating ones, except the scales of quantised weights."""
    return jax.tree.map(lambda x: not is_quantised(x) and _has_gradient(x), arrays, is_leaf=is_quantised)


def _has_gradient(leaf: Any) -> bool:
    return is_array_like(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) and jnp.finfo(leaf.dtype).bits >= 16
