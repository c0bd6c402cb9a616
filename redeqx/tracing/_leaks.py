"""Finds values that a traced function keeps where JAX does not see them: in the closure of a function, in a static field.

After the trace they are of no use, and JAX raises UnexpectedTracerError far from the line that kept them.
"""

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax.core


def leak(tree: Any) -> str | None:
    """Return the path of the first traced value inside a tree that a traced function has returned, or None.

    The tree is as `eqx.filter_eval_shape` returns it: with shapes in place of its arrays.
    """
    return _find(tree, "", set())


def _find(value: Any, path: str, seen: set[int]) -> str | None:
    if isinstance(value, jax.core.Tracer):
        return path
    if id(value) in seen:
        return None
    seen.add(id(value))
    inner = (_find(part, f"{path}.{name}" if path else str(name), seen) for name, part in _parts(value))
    return next((found for found in inner if found is not None), None)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, eqx.Module):
        yield from vars(value).items()  # with its static fields
    elif isinstance(value, functools.partial):
        yield from [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # assigned only later
                continue
        yield from enumerate(value.__defaults__ or ())
    wrapped = getattr(value, "__wrapped__", None)  # by `jax.jit`, `functools.wraps`
    if wrapped is not None:
        yield "__wrapped__", wrapped
