"""Iterables of examples whose position can be saved: the state from which a later run continues, and the check that it does.

There are two conventions for states: `get_state` / `set_state` and `state_dict` / `load_state_dict`. Not every state is
complete: `datasets`, for example, does not save its shuffle buffers, and drops their contents. So the first examples after
a restart are compared with those that followed in the earlier run.
"""

import base64
import contextlib
import copy
import importlib
import itertools
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_BYTES, _ARRAY = "bytes in base 64", "array in base 64"
_N_AHEAD = 8  # examples to compare: a refilled shuffle buffer may begin with the same one by chance


class Stream(Iterator[Any]):
    """The examples of an iterable, from a position on.

    A resumed run continues with the examples that followed in the earlier run: by the saved state, or if that is missing or
    leads elsewhere, by reading up to the position. If neither works, a warning says so. Examples that differ at each reading
    (random crops, for example) cannot be compared; the state is then trusted.

    Reading begins after `position` examples; `saved` is the result of `state` there.
    """

    def __init__(self, iterable: Any, position: int = 0, saved: Any = None, name: str = "train_examples"):
        self._given = self._iterable = iterable
        self._name = name
        self._ahead: deque[Any] = deque()  # examples that were read for the record and not taken yet
        self._error: Exception | None = None  # raised by reading the example after `_ahead`
        self._record: dict[str, Any] = {}  # the state from which `_ahead` was read
        self._n_taken = 0  # the number of `_ahead` taken since
        if not position:
            self._iterate()
            return
        saved = saved or {"state": None, "next": None, "n_taken": 0}
        self._n_taken = saved["n_taken"]
        self._record = {name: saved[name] for name in ("state", "next")}
        self._resume(position - self._n_taken, **self._record)
        for _ in range(min(self._n_taken, len(self._ahead))):
            self._ahead.popleft()

    def __next__(self) -> Any:
        if self._ahead:
            self._n_taken += 1
            return self._ahead.popleft()
        if self._error is not None:
            raise self._error
        return next(self._items)

    def _iterate(self) -> None:
        self._iterator = iter(self._iterable)
        self._items = _until_end(self._iterator)

    def state(self) -> Any:
        """Returns the state at this point, as JSON: a state of the iterable, a checksum of the examples that follow it
        (which are read for this), and how many of those have been taken since."""
        if not self._ahead:
            methods = _methods(self._iterator) or _methods(self._iterable)
            state = None if methods is None else _to_json(methods[0](), f"{self._name}.{methods[0].__name__}()")
            self._record, self._n_taken = {"state": state, "next": self._read_ahead()}, 0
        return {**self._record, "n_taken": self._n_taken}

    def _read_ahead(self) -> int | None:
        """Reads the next examples; returns their checksum."""
        try:
            self._ahead.extend(itertools.islice(self._items, _N_AHEAD))
        except Exception as error:  # raised when that example is requested, after the earlier ones
            self._error = error
        return checksum(*self._ahead) if self._ahead else None

    def _resume(self, position: int, state: Any, next: int | None) -> None:
        """Continues after the examples of a record, and reads ahead."""
        state = _from_json(state)
        if (before := self._begin(state)) is not None:
            found = self._read_ahead()
            if next in (None, found):
                return
            self._begin(state)
            if self._read_ahead() != found:
                return  # examples differ at each reading
            self._begin(before[0] if self._iterable is self._given else None)
        deque(itertools.islice(self._items, position), maxlen=0)
        if self._read_ahead() != next and next is not None:
            warnings.warn(
                f"`{self._name}`: expected, after {position} examples, those that followed when the checkpoint was saved, "
                "got others. This run does not continue the earlier one exactly: seed what draws the examples, and leave "
                "the data as it is.",
                stacklevel=2,
            )

    def _begin(self, state: Any) -> tuple[Any] | None:
        """Starts to iterate, from a state if one is given; returns the previous one, in a tuple. None if no state is set."""
        self._ahead.clear()
        self._error, self._iterable = None, _own_state(self._given)
        self._iterate()
        methods = _methods(self._iterator) or _methods(self._iterable)
        if state is None or methods is None:
            return None
        before = methods[0]()
        methods[1](state)
        if _methods(self._iterator) is None:
            self._iterate()  # which starts from the state of its iterable
        return (before,)


def _until_end(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields the examples up to the first end, even if the iterator then begins anew. It may lack `__iter__`."""
    while True:
        try:
            example = next(iterator)
        except StopIteration:
            return
        yield example


def _own_state(iterable: Any) -> Any:
    """Returns a copy of an iterable of `datasets`, so that setting a state leaves the user's object unchanged, which would
    begin there in each later pass too. Other iterables are returned as given."""
    if not type(iterable).__module__.startswith("datasets."):
        return iterable
    own = copy.copy(iterable)
    if own.__dict__ is iterable.__dict__:  # `datasets` shares it with its copies
        own.__dict__ = dict(iterable.__dict__)
    return own


def checksum(*examples: Any) -> int | None:
    """Returns a checksum of examples; None if they do not consist of numbers and text."""
    with contextlib.suppress(TypeError):
        return zlib.crc32(b"".join(map(_bytes_of, examples)))
    return None


def _bytes_of(example: Any) -> bytes:
    match example:
        case str() | bytes() | bool() | int() | float() | None:
            return repr(example).encode()
        case dict():
            return b"{" + b",".join(_bytes_of(key) + b":" + _bytes_of(value) for key, value in example.items()) + b"}"
        case list() | tuple():
            return b"[" + b",".join(map(_bytes_of, example)) + b"]"
        case np.ndarray() | np.generic() | jax.Array() if example.dtype != object:
            return f"{example.dtype}{example.shape}".encode() + np.asarray(example).tobytes()
    raise TypeError(type(example).__name__)


def _methods(holder: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the methods that get and set an object's state; None if it has none."""
    for get, set_ in _METHODS:
        if hasattr(holder, get) and hasattr(holder, set_):
            return getattr(holder, get), getattr(holder, set_)
    return None


def _to_json(state: Any, where: str) -> Any:
    """Converts a state as JSON would. Bytes (of grain's DataLoader) and arrays (part of torch's states) become text."""
    match state:
        case None | bool() | int() | float() | str():
            return state
        case list():
            return [_to_json(part, where) for part in state]
        case dict() if all(isinstance(name, str) for name in state):
            return {name: _to_json(part, where) for name, part in state.items()}
        case bytes():
            return {_BYTES: base64.b64encode(state).decode("ascii")}
    library = type(state).__module__.partition(".")[0]
    array = np.asarray(state) if library in ("numpy", "torch") and hasattr(state, "__array__") else None
    if array is None or array.dtype == object:
        raise TypeError(
            f"`{where}`: expected a state that JSON can store, got a part that is a {type(state).__name__}. "
            "Return numbers, strings, lists, dicts with string keys, bytes, or arrays."
        )
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {_ARRAY: data, "dtype": array.dtype.str, "shape": list(array.shape), "library": library}


def _from_json(state: Any) -> Any:
    if isinstance(state, list):
        return [_from_json(part) for part in state]
    if not isinstance(state, dict):
        return state
    if state.keys() == {_BYTES}:
        return base64.b64decode(state[_BYTES])
    if state.keys() == {_ARRAY, "dtype", "shape", "library"}:
        array = np.frombuffer(base64.b64decode(state[_ARRAY]), state["dtype"]).reshape(state["shape"]).copy()
        return array if state["library"] == "numpy" else importlib.import_module("torch").from_numpy(array)
    return {name: _from_json(part) for name, part in state.items()}
