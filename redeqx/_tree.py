"""Names of leaves: renders a PyTree path as a tensor name, in one form everywhere.

Plans, errors and checkpoints all write `blocks.3.attn.query.weight`. This module knows paths and names, but no meshes.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # part of each type checker

    # jaxtyping hides its PyTree from type checkers; in strict mode they would report each of our calls.
    PyTree: TypeAlias = Any
    ModelT = TypeVar("ModelT", default=Any)
else:
    from typing import TypeVar

    from jaxtyping import PyTree

    ModelT = TypeVar("ModelT")

MOST_LISTED = 10  # the most names in one error message


def render(path: tuple[Any, ...]) -> str:
    """Returns the dotted name of a PyTree path: `(GetAttrKey("blocks"), SequenceKey(3))` is `"blocks.3"`; the root is
    `"value"`."""
    return jtu.keystr(path, simple=True, separator=".") or "value"


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns all leaves by name, in the tree's order.

    Raises ValueError if two leaves have the same name (from dict keys with dots), since a checkpoint would keep only one.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = render(path)
        if name in leaves:
            raise ValueError(
                f"`{name}`: expected one leaf of that name, got two. Rename the dict key or field that contains the dot."
            )
        leaves[name] = leaf
    return leaves


def array_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves that are arrays, or the shapes of arrays, by name."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if is_array_like(leaf)}


def wide_leaves(model: PyTree, dtype: Any) -> frozenset[str]:
    """Returns the paths of the leaves that modules keep in float32 when a model is cast to `dtype`, to be loaded or for
    the loss: those of the fields that a method `keeps_float32(dtype)` of a module names."""
    if jnp.finfo(dtype).bits >= 32:
        return frozenset()
    declares = lambda node: hasattr(type(node), "keeps_float32")  # noqa: E731
    found = set[str]()
    for path, node in named_leaves(model, is_leaf=declares).items():
        fields = node.keeps_float32(dtype) if declares(node) else ()
        prefix = "" if node is model else f"{path}."
        found.update(prefix + name for name in named_leaves(node) if name.partition(".")[0] in fields)
    return frozenset(found)


def map_named(fn: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: Callable[[Any], bool] | None = None):
    """As `jax.tree.map`, for a function whose first argument is the leaf's name."""
    return jtu.tree_map_with_path(lambda path, *leaves: fn(render(path), *leaves), tree, *rest, is_leaf=is_leaf)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `" Did you mean `x`?"` with the most similar of `names`, to end an error; empty if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


_INDEX = re.compile(r"((?<![^.`])\d+(?![^.`]))")  # a list index in a name, which may be quoted in a text


def without_indices(text: str) -> str:
    """Replaces each list index in names, which may be quoted in a text, by `*`."""
    return _INDEX.sub("*", text)


def merged(texts: Sequence[str]) -> str:
    """Merges texts that differ only in numbers, such as list indices, into one, with `*` for each that differs. Of others
    returns the first."""
    parts = [re.split(r"(\d+)", text) for text in texts]
    if len(set(map(len, parts))) > 1:
        return texts[0]
    return "".join(alike[0] if len(set(alike)) == 1 else "*" for alike in zip(*parts, strict=True))


def listed(lines: Sequence[str], most: int = MOST_LISTED) -> list[str]:
    """Shortens a long list for an error message: the first `most` lines, and the number of the others."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def is_array_like(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or the shape of one (`jax.ShapeDtypeStruct`) as in abstract models."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or (hasattr(leaf, "__array__") and hasattr(leaf, "dtype"))


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, or an abstract value, is an array of typed PRNG keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key)


def bare_shape(x: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, or another one, with the dtype that JAX gives the array: 32 bits for numpy's 64, unless
    these are enabled. JAX 0.12 warns of the others."""
    dtype = x.dtype if is_key(x) else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(tuple(x.shape if shape is None else shape), dtype)


def bytes_in_memory(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array on a device, where numbers of 4 bits are packed, though NumPy gives each a byte."""
    n_bits = jax.dtypes.itemsize_bits(dtype) if jnp.issubdtype(dtype, jnp.number) else 8 * dtype.itemsize
    return -(-math.prod(shape) * n_bits // 8)


def as_bare_shapes(tree: PyTree) -> PyTree:
    """Replaces arrays by shapes and dtypes alone: a weak type, or a sharding on a mesh, may add equations to a trace."""
    return jax.tree.map(bare_shape, tree)
