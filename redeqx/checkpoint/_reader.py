"""Reads tensors from one safetensors file, or from several with an index that maps tensors to files.

Owns the index, in the format of Hugging Face folders, and loads a PyTree's leaves onto any mesh. `_safetensors` owns a
single file, `redeqx.models` the tensor names of other libraries.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from .._tree import MOST_LISTED, array_leaves, is_array_like, is_key, listed, map_named, nearest
from ..errors import brief, brief_name, is_plain, load_json
from ..storage import Location, View, fetch
from ._safetensors import is_float, open_tensors
from ._shards import shape_in_file

INDEX = ".safetensors.index.json"


class TensorReader:
    """The tensors of one file or of several, by name."""

    def __init__(self, path: Location):
        """Opens a safetensors file, of any library, or the index (`*.safetensors.index.json`) of several in its folder.

        Raises ValueError if a file is not a safetensors file, or disagrees with the index.
        """
        self.path = path
        self._views: dict[str, View] = {}
        self.paths: list[Location] = []
        if path.name.endswith(INDEX):
            self._open_shards()
        else:
            self._views, self.paths = open_tensors(path), [path]

    @classmethod
    def find(cls, folder: Location, stem: str) -> "TensorReader":
        """Returns the tensors of a folder: `stem.safetensors`, or else the files that its index names, as `transformers`
        reads them.

        Raises ValueError if there are none.
        """
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}{INDEX}"
        if single.is_file():
            return cls(single)
        if index.is_file():
            return cls(index)
        suffixes = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
        names = sorted(brief_name(path.name) for path in folder.iterdir())
        others = [name for name in names if name.endswith(".safetensors")][:8]  # variants, or shards without their index
        pickles = [name for name in names if name.endswith(suffixes)]
        if others:
            remedy = f"Rename the file that holds all weights to `{single.name}`, or fetch the index of shards."
        elif pickles:
            remedy = (
                "Convert it with its own library (`save_pretrained` writes safetensors): pickled weights can run any code, "
                "and are never read here."
            )
        else:
            remedy = "Pass the folder that holds the weights."
        found = ", ".join(others or pickles) or "none"
        raise ValueError(f"`{single}`: expected safetensors, or `{index.name}` beside their shards, got {found}. {remedy}")

    def _open_shards(self) -> None:
        index = self.path
        try:
            pairs = list(load_json(index)["weight_map"].items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            got = f"{type(error).__name__}: {error}"  # not `repr`: that of a UnicodeError contains the whole file
            raise ValueError(f"`{index}`: expected JSON with a `weight_map`, got {got}. Fetch the index again.") from error
        files: dict[str, dict[str, View]] = {}
        for name, shard in pairs:
            # Only the name is restricted: the file may be a link, as in the Hugging Face cache.
            if not is_plain(shard):
                raise ValueError(
                    f"`{index}`: `{brief_name(name)}`: expected a file of this folder, got {brief(shard)}, which points "
                    "outside or is no name. Do not load a folder that you do not trust."
                )
            path = index.with_name(shard)
            if shard not in files:
                if not path.is_file():
                    raise ValueError(f"`{path}`: expected the shard that `{index.name}` names, got none. Fetch it again.")
                files[shard] = open_tensors(path)
                self.paths.append(path)
            if name not in files[shard]:
                raise ValueError(
                    f"`{path}`: expected the tensor `{brief_name(name)}`, as `{index.name}` says, got none. "
                    "Fetch the folder again."
                )
            self._views[name] = files[shard][name]

    def names(self) -> Collection[str]:
        """Returns the tensors' names, in the order of the files."""
        return self._views.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def view(self, name: str) -> Any:
        """Returns a view of a tensor in its file, which reads only what is indexed: NumPy's or a `storage.StoredArray`.

        Raises ValueError if there is no tensor of that name.
        """
        if name not in self._views:
            raise ValueError(
                f"`{self.path}`: expected one of its {len(self._views)} tensors, got `{name}`."
                f"{nearest(name, map(brief_name, self._views))} `names` lists them."
            )
        return self._views[name]

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """Returns a copy of a tensor, or of the part that `index` (as for `numpy.ndarray`) selects. Reads nothing else."""
        # A copy: JAX on CPU would otherwise share the file's pages, and change with the file.
        return np.array(self.view(name)[index])


def read_sharded(view: View, leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns a tensor, cast to the dtype of a leaf with the same shape. Each device reads only its own slice."""
    # Several devices may need the same slice.
    indices = {str(index): index for index in sharding.addressable_devices_indices_map(leaf.shape).values()}
    # Copies: otherwise JAX on CPU would share the file's pages, and later changes of the file would change the model.
    slices = dict(zip(indices, fetch([view[index] for index in indices.values()], leaf.dtype), strict=True))
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: slices[str(index)])


def check_tree(source: TensorReader, template: PyTree, what: str) -> None:
    """Raises ValueError if the tensors differ from the template's arrays, as `load_tree` does. No tensor is read."""
    wanted, there = array_leaves(template), set(source.names())
    lines = _mismatches(source, wanted)
    if lines:
        differing = "\n  - ".join(listed(lines))
        advice = f"Build the {what} that was saved, or load the checkpoint of this one."
        if wanted.keys() - there and there - wanted.keys():
            advice += " If leaves were renamed, `redeqx.models.load_weights` maps the names."
        if what == "optimizer":
            advice = (
                "Pass the `optimizer` and the `trainable` with which it was saved, or load the model alone: "
                "`load_ckpt(..., load_opt_states=False)`."
            )
        raise ValueError(
            f"`{source.path}`: expected the tensors of this {what}, got {len(lines)} that differ:\n  - {differing}\n{advice}"
        )


def _mismatches(source: TensorReader, wanted: Mapping[str, Any]) -> list[str]:
    """Returns the differences between the tensors and the wanted leaves, one line for each."""
    there = {name: source.view(name) for name in source.names()}
    missing = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted]
    shown = [brief_name(name) for name in extra]
    lines = []

    def hint(name: str, others: Sequence[str]) -> str:
        # Only for the names that are shown: the search is slow.
        return nearest(name, others) if len(lines) < MOST_LISTED else ""

    for name in missing:
        shape, dtype = shape_in_file(wanted[name])
        lines.append(f"`{name}`: expected {dtype} {shape}, got none.{hint(name, shown)}")
    for name, label in zip(extra, shown, strict=True):
        found = there[name]
        lines.append(f"`{label}`: expected no tensor of this name, got {found.dtype} {found.shape}.{hint(label, missing)}")
    for name, leaf in wanted.items():
        if name in there:
            (shape, dtype), found = shape_in_file(leaf), there[name]
            if shape != found.shape or not _fits(found.dtype, dtype):
                lines.append(f"`{name}`: expected {dtype} {shape}, got {found.dtype} {found.shape}.")
    return lines


def _fits(found: np.dtype, wanted: Any) -> bool:
    """Returns whether a tensor can be cast to the wanted dtype: between floats, and to a wider dtype of the same kind, since
    a Trainer keeps a NumPy array of int64 with 32 bits."""
    if found == wanted or (is_float(found) and is_float(wanted)):
        return True
    return found.kind in "iuc" and found.kind == np.dtype(wanted).kind and np.can_cast(found, wanted, "safe")


def load_tree(
    path: Location,
    template: PyTree,
    shardings: Callable[[str], Sharding] | None = None,
    what: str = "model",
) -> PyTree:
    """Returns the template, with its arrays read from safetensors. Each device reads only its own slices.

    **Arguments:**

    - `path`: as for `TensorReader`.
    - `template`: a PyTree whose array leaves give names, shapes and dtypes: JAX arrays, typed PRNG keys,
        `jax.ShapeDtypeStruct`s, or numpy arrays, which stay numpy arrays. A floating tensor is cast to the template's
        floating dtype, an integer or complex one to a wider dtype of its kind. Other leaves are returned unchanged.
    - `shardings`: maps a leaf's name to its sharding; by default the leaf's own, if it has one.
    - `what`: the name of the template in errors.

    Raises ValueError with the names of tensors that are missing, extra, of another shape or of a dtype that does not fit.
    """
    source = TensorReader(path)
    check_tree(source, template, what)

    def restore(name: str, leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        shape, dtype = shape_in_file(leaf)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return source.read(name).astype(dtype, copy=False)
        sharding = leaf.sharding if shardings is None else shardings(name)
        if sharding is None:
            array = jnp.asarray(source.read(name).astype(dtype, copy=False))
        else:
            # A PRNG key's sharding also fits its data, whose additional last dim is not split.
            array = read_sharded(source.view(name), jax.ShapeDtypeStruct(shape, dtype), sharding)
        if array.dtype != dtype:
            raise ValueError(f"`{name}`: expected {dtype}, got {array.dtype} from JAX. Set `jax_enable_x64` to load it.")
        if is_key(leaf):
            # `key_impl` needs an array, and the template may have only a shape.
            return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), leaf.dtype)))
        return array

    return map_named(restore, template)
