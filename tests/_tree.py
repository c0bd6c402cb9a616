"""Names of leaves, as JAX writes them."""

import jax


def named_leaves(tree):
    """Returns all leaves by name, in the tree's order."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "value": leaf for path, leaf in paths}
