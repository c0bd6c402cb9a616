"""Collation: reads examples, calls `collate_fn`, and checks that its result is a batch with one row for each example."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._tree import as_bare_shapes, named_leaves, render
from ..errors import check_integers, example_note


def read(examples: Any, indices: Iterable[Any], places: Sequence[int] | None = None) -> list[Any]:
    """Returns the examples at these indices. If reading one raises, the error gets a note with the example's number.
    `places` has these numbers, if they differ from the indices."""
    items, place = [], [0]  # of the example that is read
    with example_note("Raised in reading example", place):
        for i in map(int, indices):
            place[0] = i if places is None else places[i]
            items.append(examples[i])
    return items


def collate(collate_fn: Callable[[list], PyTree], examples: list, places: Sequence[int] | None = None) -> PyTree[np.ndarray]:
    """Returns the checked result of `collate_fn`: a PyTree of NumPy arrays, each with one row per example. Errors get a note
    with the examples' numbers, `places`; by default they count from 0.

    64-bit numbers are converted to 32 bits, as everywhere in JAX, unless JAX runs in 64-bit mode.

    Raises TypeError for a leaf that is not an array of numbers, ValueError for another number of rows and for integers that
    do not fit into 32 bits.
    """
    with example_note("`collate_fn` was called with examples", range(len(examples)) if places is None else places):
        try:
            return _checked_batch(collate_fn(examples), len(examples))
        except Exception as error:
            if (shapes := _as_ready_batch(examples)) is not None:
                error.add_note(_READY_BATCH.format(shapes))
            raise


def collate_alone(
    collate_fn: Callable[[list], PyTree], examples: list, batch: PyTree[np.ndarray]
) -> tuple[list[PyTree[np.ndarray]], bool]:
    """Returns the batches of a few of these examples, each alone, or none if `collate_fn` takes no single ones; and whether
    their rows in `batch`, that of all of them, depend on the others. Rows that are random cannot be compared."""
    places = sorted({round(i) for i in np.linspace(0, len(examples) - 1, _N_ALONE)}) if examples else []
    collated = lambda: [_checked_batch(collate_fn([examples[i]]), 1) for i in places]  # noqa: E731
    try:
        alone = collated()
        within = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in places]
        if all(map(_are_alike, within, alone)):
            return alone, False
        # Both once more: a rare augmentation may have been drawn in one of them only.
        is_same = all(map(_are_alike, collated(), alone))
        return alone, is_same and _are_alike(_checked_batch(collate_fn(examples), len(examples)), batch)
    except Exception:  # such as of a `collate_fn` that needs pairs of examples
        return [], False


def _are_alike(batch: PyTree[np.ndarray], other: PyTree[np.ndarray]) -> bool:
    """Returns whether two batches have the same values, up to rounding, where they have the same shapes."""
    pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(other), strict=False)
    return all(_are_close(x, y) for x, y in pairs if x.shape == y.shape)


def _are_close(x: np.ndarray, y: np.ndarray) -> bool:
    if not jnp.issubdtype(x.dtype, np.inexact):
        return np.array_equal(x, y)
    x, y = (each.astype(np.complex128 if each.dtype.kind == "c" else np.float64) for each in (x, y))  # also of bfloat16
    largest = np.abs(y[np.isfinite(y)]).max(initial=0.0)
    return np.allclose(x, y, rtol=1e-2, atol=1e-3 * largest, equal_nan=True)


_N_ALONE = 8
_READY_BATCH = (
    "Each example has arrays that share their leading dim: {}. If these are ready batches, pass their rows as the examples, "
    "and stack these in `collate_fn`: redeqx shuffles and batches by itself."
)


def _as_ready_batch(examples: list) -> str | None:
    """Returns the shapes of the first example's arrays if they could be the columns of a batch; None otherwise."""
    first = examples[0] if examples else ()
    columns = first.values() if isinstance(first, Mapping) else first if isinstance(first, tuple | list) else ()
    shapes = [tuple(getattr(column, "shape", None) or ()) for column in columns]
    may_be = len(shapes) > 1 and len({shape[:1] for shape in shapes}) == 1 and min(map(len, shapes)) > 0
    return ", ".join(map(str, shapes)) if may_be and max(map(len, shapes)) > 1 else None


def _checked_batch(batch: PyTree, n_rows: int) -> PyTree[np.ndarray]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    if not leaves:
        raise TypeError(f"`collate_fn`: expected a PyTree of arrays, got {batch!r}. Return a dict of numpy arrays.")
    return jax.tree.unflatten(treedef, [_checked(render(path), leaf, n_rows) for path, leaf in leaves])


def check_leading_dims(batch: PyTree[np.ndarray], n_rows: int, collate_one: Callable[[], PyTree]) -> None:
    """Raises ValueError for a leaf whose leading dim has as many entries as there are rows, but is another dim. This is seen
    by the leaf of one example alone, which is collated only if another dim has as many entries too."""
    doubtful = {name: leaf.shape for name, leaf in named_leaves(batch).items() if n_rows > 1 and n_rows in leaf.shape[1:]}
    if not doubtful:
        return
    try:
        one = {name: np.shape(leaf) for name, leaf in named_leaves(collate_one()).items() if name in doubtful}
    except Exception:  # such as a `collate_fn` that needs pairs of examples
        return
    for name, shape in one.items():
        if shape and shape[0] != 1:
            raise ValueError(
                f"`collate_fn` output `{name}`: expected rows in dim 0, one for each example, got shape {doubtful[name]} "
                f"for {n_rows} examples and {shape} for one. The leading dim is the batch: transpose it."
            )


def collated_shapes(collate_fn: Callable[[list], PyTree], examples: Sequence[Any]) -> PyTree:
    """Returns the shapes of the result of `collate`."""
    return as_bare_shapes(collate(collate_fn, list(examples)))


_OTHERS = (np.timedelta64, np.longdouble, np.clongdouble)  # NumPy calls them numbers, JAX has none


def _checked(name: str, leaf: Any, n_rows: int) -> np.ndarray:
    if isinstance(leaf, list):
        if any(isinstance(x, str | bytes | None) for x in leaf):
            objects = np.fromiter(leaf, object, len(leaf))
            raise TypeError(f"`collate_fn` output `{name}`: expected numbers, got {_describe_objects(objects)}.")
        lengths = _lengths(leaf)
        found = f"a list of {len(leaf)}" + (f" with lengths {lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else "")
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array of {n_rows} rows, got {found}. "
            f"{'Pad to one length and return' if len(lengths) > 1 else 'Return'} `np.array(...)`."
        )
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        advice = "Return `np.array(...)` with one row for each example."
        if is_dataclass(leaf):  # which JAX takes for one leaf
            advice = "Register this dataclass with `jax.tree_util.register_dataclass`, or return a dict."
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array of {n_rows} rows, got {type(leaf).__name__}. {advice}"
        )
    if isinstance(leaf, np.ma.MaskedArray):  # NumPy would drop the mask, and JAX does not take one
        raise TypeError(
            f"`collate_fn` output `{name}`: expected an array without a mask, got a masked array. Fill it, "
            "`array.filled(0)`, and return `~np.ma.getmaskarray(array)` as another output, for the loss to use."
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"`collate_fn` output `{name}`: expected numbers, got random keys. Split the key of `loss_fn`, or return "
            "`np.asarray(jax.random.key_data(keys))`, and call `jax.random.wrap_key_data` in the loss."
        )
    array = np.asarray(leaf)
    if array.dtype.type in _OTHERS or not (array.dtype == bool or jnp.issubdtype(array.dtype, np.number)):
        raise TypeError(f"`collate_fn` output `{name}`: expected numbers, got {_describe_objects(array)}.")
    if array.ndim == 0 or len(array) != n_rows:
        advice = ""
        if array.ndim == 0:
            advice = f": repeat a number of the whole batch, `np.full({n_rows}, number)`"
        elif len(array) > n_rows:
            advice = ": pad examples of different lengths, such as graphs, to one length, in place of joining them"
        raise ValueError(
            f"`collate_fn` output `{name}`: expected {n_rows} rows, one for each example, got shape {array.shape}. "
            f"The leading dim is the batch{advice}."
        )
    check_integers(array, f"`collate_fn` output `{name}`")
    # A copy: JAX may read NumPy's memory later, or keep it, and a `collate_fn` may write its next batch there.
    # Files of other formats (IDX, FITS, NetCDF) may store bytes in the order that JAX does not take.
    return np.array(array, jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")))


def _lengths(items: Iterable[Any]) -> list[int]:
    return sorted({len(x) for x in items if hasattr(x, "__len__")})


def _describe_objects(array: np.ndarray) -> str:
    """Returns what an array without numbers holds, and the next step."""
    objects = array.ravel().tolist()
    lengths = _lengths(objects)
    if nones := [i for i, x in enumerate(objects) if x is None]:
        return f"None in {len(nones)} of {len(objects)} entries, the first is entry {nones[0]}. Replace them by numbers"
    if any(isinstance(x, str | bytes) for x in objects):
        return f"text in {len(objects)} entries. Tokenize it, or leave it out"
    if len(lengths) > 1:
        return f"rows of {lengths[0]} to {lengths[-1]} items. Pad them to one length"
    kinds = sorted({type(x).__name__ for x in objects})
    return f"an array of dtype {array.dtype} that holds: {', '.join(kinds)}. Return arrays of numbers"


def n_tokens(batch: PyTree[np.ndarray]) -> int | None:
    """Returns the number of tokens in a batch: the size of its largest integer leaf `[rows, seq]`; None without one."""
    return max((x.size for x in jax.tree.leaves(batch) if x.ndim == 2 and x.dtype.kind in "iu"), default=None)
