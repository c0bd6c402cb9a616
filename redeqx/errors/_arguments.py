"""Checks arguments for common mistakes before any work: models of other libraries, optimizers that were not called,
functions with wrong parameters, data frames, loaders of batches, numbers that are not counts.

Each error names the argument, the value and the next step. `_user_code` handles errors that occur while the user's
functions run.
"""

import inspect
import operator
import os
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._tree import array_leaves, is_array_like, is_key, listed, named_leaves


def wrong(name: object, expected: object, got: object, advice: str, error: type[Exception] = ValueError) -> Exception:
    """Returns the error for an argument; `advice` is the next step."""
    return error(f"`{name}`: expected {expected}, got {got}. {advice.removesuffix('.')}.")


def wrong_type(name: str, expected: str, value: Any, advice: str) -> Exception:
    return wrong(name, expected, described(value), advice, TypeError)


def described(value: Any) -> str:
    """Describes a value, for the part of an error after "got"."""
    if isinstance(value, bool | int | float | None):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "...")
    if isinstance(value, partial | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        name = getattr(value, "__name__", None) or getattr(getattr(value, "func", None), "__name__", "partial")
        return f"the function `{name}`"
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple):
        kinds = sorted({type(item).__name__ for item in islice(value, 100)})
        return f"a {type(value).__name__} of {', '.join(kinds) or 'nothing'}"
    return f"a {type(value).__name__}" if type(value).__name__[0] not in "aeiouAEIOU" else f"an {type(value).__name__}"


# --- numbers and paths -----------------------------------------------------------------------------------------------


def check_count(value: Any, name: str, least: int = 1, *, optional: bool = False, advice: str = "") -> None:
    """Raises TypeError if `value` is not an integer, ValueError if it is below `least`; `advice` is then the next step."""
    if optional and value is None:
        return
    or_none = " or None" if optional else ""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        is_whole = isinstance(value, float) and value.is_integer() and value >= least
        advice = f"Pass {int(value)}" if is_whole else "Pass a whole number"
        raise wrong_type(name, f"an integer{or_none}", value, advice) from None
    if count < least:
        advice = advice or ("Pass a positive number" if least == 1 else f"Pass {least} or more")
        raise wrong(name, f"at least {least}{or_none}", str(count), advice)


def check_flag(value: Any, name: str, *, optional: bool = False) -> None:
    """Raises TypeError if `value` is not a boolean: the text "false", as from a command line, would be taken for True."""
    if not (isinstance(value, bool | np.bool_) or (optional and value is None)):
        raise wrong_type(name, f"True{', ' if optional else ' or '}False{' or None' * optional}", value, "Pass one of them")


def check_number(
    value: Any, name: str, expected: str, holds: Callable[[Any], bool], advice: str, *, optional: bool = False
) -> None:
    """Raises TypeError if `value` is not a real number, ValueError if `holds(value)` is false, as it must be for NaN.
    `expected` describes the valid numbers, and `advice` is the next step."""
    if optional and value is None:
        return
    is_number = (isinstance(value, Real) or getattr(value, "shape", None) == ()) and not isinstance(value, bool)
    if isinstance(value, Tracer) and is_number:
        return  # as of `optax.inject_hyperparams`; its value is unknown
    if not is_number or not holds(value):
        expected += " or None" * optional
        raise wrong(name, expected, described(value), advice, ValueError if is_number else TypeError)


def check_choice(value: Any, name: str, choices: Sequence[Any]) -> None:
    """Raises ValueError if `value` is not one of the choices."""
    if not any(value is choice or (isinstance(value, type(choice)) and value == choice) for choice in choices):
        which = "the two" if len(choices) == 2 else "them"
        raise wrong(name, alternatives(choices), described(value), f"Pass one of {which}")


def alternatives(choices: Sequence[Any]) -> str:
    """Returns the choices in words: 'a', 'b' or None."""
    *most, last = [repr(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last


def check_float_dtype(value: Any, name: str, advice: str) -> None:
    """Raises ValueError if `value` is no floating dtype of 16 bits or more, TypeError if it is no dtype. None is allowed."""
    if value is None:
        return
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise wrong_type(name, "a floating dtype or None", value, "Pass 'bfloat16'") from None
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    if not is_floating or dtype.itemsize < 2:  # no model computes with narrower ones, or keeps its values
        raise wrong(name, f"a floating dtype{' of 16 bits or more' * is_floating}", str(dtype), advice)


def check_path(path: Any, name: str, *, optional: bool = False) -> None:
    """Raises TypeError if `path` is no path, ValueError if it is an empty one."""
    expected = f"a path{' or None' if optional else ''}"
    if not isinstance(path, str | Path):
        raise wrong_type(name, expected, path, "Pass a string or a `pathlib.Path`")
    if path == "":
        raise wrong(name, expected, "''", "Pass '.' for the current folder")


def check_folder(path: Any, name: str, *, optional: bool = False, make: bool = False) -> None:
    """Raises ValueError if a part of the path is a file, so that the folder cannot exist; TypeError if it is not a path; an
    OSError of the same kind, with the name of the argument, if the system refuses it. With `make`, creates the folder.

    An object store's address is not checked.
    """
    check_path(path, name, optional=optional)
    if isinstance(path, str) and "://" in path:
        return
    folder = Path(os.path.expanduser(path))
    try:
        for part in (folder, *folder.parents):
            if part.is_symlink() and not part.exists():
                got = f"`{path}`, where `{part}` is a link to {os.readlink(part)!r}, which is not there"
                raise wrong(name, "a folder", got, "Mount or create that, or remove the link")
            if part.exists() and not part.is_dir():
                got = f"`{path}`, {'which' if part == Path(path) else f'where `{part}`'} is a file"
                raise wrong(name, "a folder", got, "Move the file, or choose another folder")
        if make:
            folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError for a null character
        if str(error).startswith("`"):
            raise
        got = f"{described(str(path))}: {getattr(error, 'strerror', None) or error}"
        advice = "Choose a folder in which you may write"
        raise wrong(name, "a folder that can be created", got, advice, type(error)) from None


# --- models ----------------------------------------------------------------------------------------------------------

# Libraries whose layers users pass by mistake, by package name. They need not be installed.
_LIBRARIES = {"torch": "PyTorch", "flax": "Flax", "haiku": "Haiku", "keras": "Keras", "tensorflow": "TensorFlow"}
_LAYERS = {"Module", "Layer", "Transformed", "TransformedWithState"}


def check_model(model: Any, name: str = "model") -> None:
    """Raises TypeError if a model is a function, a class, a module of another library, or another single object that is no
    array; ValueError if its arrays have been deleted, or hold integers that devices would wrap around."""
    if (problem := _why_no_model(model)) is not None:
        raise wrong(name, "an Equinox module", *problem, TypeError)
    check_alive(model, name)
    for path, leaf in named_leaves(model).items():
        if isinstance(leaf, np.ndarray):
            check_integers(leaf, f"`{name}` leaf `{path}`")


def check_alike(model: Any, own: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError if the arrays of a model differ in name or shape from those of another; and as `check_model`. `own`
    has the other's arrays, or anything with a `shape`, by name; `whose` says which model it is, as "the trained model"."""
    check_model(model)
    found = array_leaves(model)
    for name in [*own, *(name for name in found if name not in own)]:
        shapes = [tuple(of[name].shape) if name in of else None for of in (own, found)]
        if shapes[0] != shapes[1]:
            expected, got = ("no array" if shape is None else f"shape {shape}" for shape in shapes)
            raise ValueError(
                f"`model`: `{name}`: expected {expected}, as in {whose}, got {got}. Pass a model of the same structure."
            )


def _why_no_model(model: Any) -> tuple[str, str] | None:
    """Returns what was passed in place of a model, and the next step; None for a model."""
    if isinstance(model, type):
        return f"the class {model.__name__}", f"Make one: `{model.__name__}(..., key=key)`"
    if (found := _of_library(model, _LAYERS)) is not None:
        return found, (
            "Write it as an `eqx.Module`; `redeqx.models.from_pretrained` loads the folders of many Hugging Face models"
        )
    if isinstance(model, tuple) and any(isinstance(part, eqx.nn.State) for part in model):
        return "a tuple of a model and its state", "Pass them apart: `model=model, model_state=state`"
    if model is not None and (not jax.tree_util.all_leaves([model]) or eqx.is_array_like(model)):
        return None
    advice = "Pass an `eqx.Module`, or another PyTree of arrays"
    if callable(model):
        advice = "A function holds no weights: put them into an `eqx.Module`, and what it does into its `__call__`"
    elif isinstance(model, str | Path):
        advice = "Load it first: `model, config = redeqx.models.from_pretrained(...)`"
    return described(model), advice


def check_integers(array: np.ndarray, where: str) -> None:
    """Raises ValueError for integers that do not fit into the narrower dtype which JAX stores on devices: it would wrap them
    around without an error."""
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))
    if narrow == array.dtype or array.dtype.kind not in "iu" or not array.size:
        return
    info, least, most = np.iinfo(narrow), array.min(), array.max()
    if least < info.min or most > info.max:
        found = f"up to {most}" if most > info.max else f"down to {least}"
        raise ValueError(
            f"{where}: expected integers that {narrow} holds, got {found}. Enable JAX's 64-bit mode (`jax_enable_x64`), or "
            "use smaller numbers."
        )


_AFTER_A_STEP = "A training step deletes the arrays that it updates: take `trainer.model` after the last step, or keep"


def check_alive(tree: Any, name: str, advice: str = _AFTER_A_STEP) -> None:
    """Raises ValueError if arrays have been deleted. A training step deletes its inputs to reuse their memory, and jaxlib
    0.10.2 crashes if a step is called with deleted arrays. `advice` says why they may be deleted and the next step, as far
    as "a copy"."""

    def is_dead(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()

    if not any(map(is_dead, jax.tree.leaves(tree))):  # the names of all leaves take longer
        return
    arrays = {path: leaf for path, leaf in named_leaves(tree).items() if isinstance(leaf, jax.Array)}
    dead = [path for path, leaf in arrays.items() if is_dead(leaf)]
    shown = ", ".join(f"`{path}`" for path in listed(dead, 3))
    raise wrong(
        name,
        "arrays that still exist",
        f"{len(dead)} of {len(arrays)} deleted ({shown})",
        f"{advice} a copy: `jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, trainer.model)`",
    )


def check_state(state: Any) -> None:
    """Raises TypeError if a leaf of `model_state` is no array, such as the activation of a teacher network; ValueError as
    `check_alive`."""
    check_alive(state, "model_state")
    for path, leaf in named_leaves(state).items():
        if is_array_like(leaf):
            continue
        advice = "Pass `jnp.asarray(...)`"
        if not eqx.is_array_like(leaf):
            advice = "Pass `eqx.filter(state, eqx.is_array)`, and combine it with the rest where it is used: `eqx.combine`"
        raise wrong_type(f"model_state` leaf `{path}", "an array", leaf, advice)


def check_key(key: Any) -> None:
    """Raises TypeError if this is not one PRNG key, typed or of integers."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and (key.ndim == 0 if is_key(key) else key.ndim == 1 and jnp.issubdtype(key.dtype, jnp.unsignedinteger)):
        return
    found = f"an array of {key.dtype}{list(key.shape)}" if is_array else described(key)
    raise wrong("key", "a PRNG key", found, "Pass `jax.random.key(0)`, for example", TypeError)


def check_optimizer(optimizer: Any, argument: str = "optimizer") -> None:
    """Raises TypeError if this is not an optax transformation, for example `optax.adam` itself or a PyTorch optimizer."""
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    got, advice = described(optimizer), "Pass, for example, `optax.adamw(learning_rate)`"
    if (found := _of_library(optimizer)) is not None:
        got, advice = found, f"{advice}, which holds no weights"
    elif callable(optimizer):
        name = getattr(optimizer, "__name__", "optimizer")
        name = f"optax.{name}" if _package(optimizer) == "optax" else name
        got, advice = f"the function `{name}`", f"Call it: `{name}(learning_rate)`"
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        advice = "Chain them: `optax.chain(...)`"
    raise wrong(argument, "an optax transformation", got, advice, TypeError)


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _of_library(value: Any, bases: Collection[str] = ()) -> str | None:
    """Returns what a value is, if its class or a base of it, with one of these names if given, is of another library."""
    of = (_LIBRARIES.get(_package(cls)) for cls in type(value).__mro__ if not bases or cls.__name__ in bases)
    library = next(filter(None, of), None)
    return None if library is None else f"{library}'s {type(value).__name__}"


# --- functions -------------------------------------------------------------------------------------------------------


def check_function(fn: Any, name: str, parameters: Sequence[str], why: str = "") -> None:
    """Raises TypeError if `fn` is not a function that takes these positional arguments. `why` is added to the rule."""
    expected = f"a function of `({', '.join(parameters)})`{why}" if parameters else f"a function without arguments{why}"
    if not callable(fn):
        raise wrong_type(name, expected, fn, "Pass the function itself")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a function that is not written in Python may have no signature
    names = list(signature.parameters)
    swapped = [found for p, found in zip(parameters, names, strict=False) if p != found and found in parameters]
    try:
        signature.bind(*parameters)
        if not swapped:
            return
    except TypeError:
        swapped = []
    if swapped:
        advice = "They are passed by position: put them into this order"
    elif not parameters:
        advice = "Bind them: `lambda: ...`"
    elif [p for p in parameters if p not in names] == ["key"] and len(names) < len(parameters):
        advice = "Add the parameter `key`, which dropout and sampling draw from; it may stay unused"
    elif names[1:2] == ["state"] and "state" not in parameters:
        advice = "Pass `model_state` too, as `eqx.nn.make_with_state` returns it"
    else:
        advice = "Give it these parameters; bind others with `functools.partial`"
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    found = f"one of `{signature.replace(parameters=plain, return_annotation=signature.empty)}`"
    raise wrong(name, expected, found, advice, TypeError)


def check_model_function(fn: Any, name: str, *, has_state: bool) -> None:
    """Calls `check_function` for a `loss_fn`, a `grad_fn` or a `pred_fn`."""
    state, why = (["state"], ", as `model_state` was given") if has_state else ([], "")
    check_function(fn, name, ["model", *state, "batch", "key"], why)


def check_type(value: Any, cls: type, name: str) -> None:
    """Raises TypeError if an argument is not of this public class."""
    if not isinstance(value, cls):
        raise wrong_type(name, f"a `redeqx.{cls.__name__}`", value, f"Pass `redeqx.{cls.__name__}(...)`")


def check_predictor(predictor: Any) -> None:
    """Raises TypeError if `eval_predictor` has no `predict`, for example if it is `pred_fn` itself."""
    if not callable(getattr(predictor, "predict", None)):
        raise wrong_type("eval_predictor", "a Predictor", predictor, "Pass `trainer.get_default_predictor(pred_fn)`")


def as_metrics(returned: Any, taken: Sequence[str]) -> dict[str, float]:
    """Converts the metrics that `eval_metric_fn` returned to Python floats.

    Raises TypeError if they are not a mapping from strings to numbers, ValueError for arrays and for names in `taken`, those
    of the evaluation's own metrics.
    """
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise wrong_type("eval_metric_fn", "a dict of numbers by name", returned, "Return one: `{'accuracy': ...}`")
    metrics = {}
    for name, value in returned.items():
        of = f"eval_metric_fn` metric `{name}"
        if name in taken:
            expected = f"names other than {name!r}, which the evaluation itself reports"
            raise wrong("eval_metric_fn", expected, "it too", "Rename that metric, or pass `eval_loss=False`")
        if getattr(value, "shape", ()) != ():
            raise wrong(of, "a number", described(value), "Return its mean, or a metric for each entry")
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            raise wrong_type(of, "a number", value, "Return a number") from None
    return metrics


# --- examples --------------------------------------------------------------------------------------------------------


def check_examples_kind(given: Any, name: str) -> None:
    """Raises TypeError for objects whose items are not examples: data frames, loaders of batches, tuples of columns."""
    if (problem := _why_no_examples(given)) is not None:
        raise wrong(name, "one item per example", *problem, TypeError)


def _why_no_examples(given: Any) -> tuple[str, str] | None:
    """Returns what was passed in place of examples, and the next step; None if these may be examples."""
    kind = type(given).__name__
    is_loader = all(hasattr(given, of) for of in ("dataset", "batch_size", "batch_sampler", "collate_fn"))
    if is_loader and (given.batch_size is not None or given.batch_sampler is not None):
        return f"a {kind}, whose items are whole batches", (
            "Pass its `dataset`: redeqx shuffles, batches and calls `collate_fn` itself"
        )
    if (isinstance(given, Mapping) and given and 0 not in given) or kind in ("DataFrame", "Series"):
        if kind not in ("DataFrame", "Series") and all(map(_is_a_set, given.values())):
            return f"a {kind} of sets of examples", f"Pass one of them, such as the one at {next(iter(given))!r}"
        return f"a {kind}, whose items have names", (
            'Pass a list with one item per example, such as `df.to_dict("records")`, `series.to_list()` or '
            "`[dict(zip(columns, row)) for row in zip(*columns.values())]`"
        )
    # In a list, arrays of one shape and kind are examples. A tuple is what functions return that load columns.
    if not isinstance(given, tuple | list) or not 2 <= len(given) <= 4 or not all(getattr(x, "shape", ()) for x in given):
        return None
    is_alike = len({(len(x.shape), np.dtype(x.dtype).kind) for x in given}) == 1
    if len({x.shape[0] for x in given}) > 1 or (is_alike and isinstance(given, list)):
        return None
    shapes = ", ".join(str(tuple(x.shape)) for x in given)
    return f"a {kind} of {len(given)} arrays of shapes {shapes}, each with one row per example", (
        "Pass `list(zip(*arrays))`, or `list(arrays)` if each is one example"
    )


def _is_a_set(value: Any) -> bool:
    """Whether an entry of a dict is examples by itself, such as a split of `datasets`, and not a column."""
    if isinstance(value, str | bytes | Mapping) or hasattr(value, "dtype"):
        return False
    if not hasattr(value, "__len__"):  # a stream
        return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    try:
        return isinstance(value[0], Mapping | tuple)  # a column of `datasets` or `pyarrow` has other items
    except Exception:  # it is empty, or not indexed by number
        return False


def check_readable_again(given: Any, n_epochs: int) -> None:
    """Raises ValueError if an object can be read only once, such as a generator, a `map` or an open file, but there are
    several epochs. An iterator written in Python is accepted: its `__iter__` may start again."""
    kind = type(given)
    if n_epochs == 1 or hasattr(given, "__len__") or not hasattr(kind, "__iter__"):
        return
    if isinstance(kind.__iter__, types.FunctionType) or iter(given) is not given:
        return
    what = f"`{given.__name__}`, a generator" if isinstance(given, types.GeneratorType) else described(given)
    raise wrong(
        "train_examples",
        f"examples that can be read {n_epochs} times, once per epoch",
        f"{what}, which can be read once",
        "Pass a list, or a function of the epoch that returns a new one: `lambda epoch: ...`",
    )
