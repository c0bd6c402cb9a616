"""Leaves: their names, as JAX writes them, and random values."""

import jax
import jax.numpy as jnp
import numpy as np


def named_leaves(tree):
    """Returns all leaves by name, in the tree's order."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "value": leaf for path, leaf in paths}


def drawn(shapes, std, seed=0):
    """Returns a tree with normal values in place of shapes, which takes no compilation."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jnp.asarray(std * rng.normal(size=leaf.shape), leaf.dtype) if is_shape else leaf

    return jax.tree.map(draw, shapes)
