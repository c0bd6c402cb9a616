"""Names of leaves: a PyTree path rendered as a tensor name, one way everywhere.

Plans, errors and checkpoints all say `blocks.3.attn.query.weight`. This room knows paths and names, nothing of meshes.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

MOST_LISTED = 10  # names that one error tells


def render(path: tuple[Any, ...]) -> str:
    """The dotted name of a PyTree path: `(GetAttrKey("blocks"), SequenceKey(3))` is `"blocks.3"`; the root is `"value"`.

    **Arguments:**

    - `path`: keys as `jax.tree_util.tree_flatten_with_path` gives them.
    """
    parts = []
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            parts.append(key.name)
        elif isinstance(key, jtu.SequenceKey):
            parts.append(str(key.idx))
        elif isinstance(key, jtu.DictKey | jtu.FlattenedIndexKey):
            parts.append(str(key.key))
        else:
            parts.append(str(key).strip(".[]'\""))
    return ".".join(parts) or "value"


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Every leaf by its name, in the tree's order.

    Raises ValueError where two leaves have the same name (dict keys that hold dots), since a checkpoint would then keep
    only one of them.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = render(path)
        if name in leaves:
            raise ValueError(
                f"`{name}`: expected one leaf of that name, got two. Rename the dict key or field that holds the dot."
            )
        leaves[name] = leaf
    return leaves


def map_named(fn: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None):
    """`jax.tree.map` whose function gets the leaf's name first."""
    return jtu.tree_map_with_path(lambda path, *leaves: fn(render(path), *leaves), tree, *rest, is_leaf=is_leaf)


def nearest(name: str, names: Iterable[str]) -> str:
    """`" Did you mean `x`?"` for the most similar of `names`, or nothing where none is similar; ends an error message."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def listed(lines: Sequence[str], most: int = MOST_LISTED) -> list[str]:
    """What an error names of so many: the first, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def is_array_like(leaf: Any) -> bool:
    """Whether a leaf is an array or the shape of one (`jax.ShapeDtypeStruct`), as abstract models hold."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or (hasattr(leaf, "__array__") and hasattr(leaf, "dtype"))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
