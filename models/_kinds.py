"""Kinds of values: the valid type and range of a key of a JSON file, and the errors for other values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redeqx.errors import brief

_LARGEST = 2**31 - 1  # no dim of these models is larger, and larger shapes would overflow


@dataclass(frozen=True)
class Kind:
    """The valid values of a key.

    **Arguments:**

    - `type`: the type of the value in JSON; a float may be written as a whole number.
    - `rule`: the valid range, in the words of an error.
    - `holds`: a function that returns whether a value of the type is in the range.
    """

    type: type
    rule: str = ""
    holds: Callable[[Any], bool] = lambda value: True

    def check(self, path: Any, name: str, value: Any) -> Any:
        """Converts a key's value to this type. Raises TypeError for another type, ValueError for a value out of range."""
        wanted = (int, float) if self.type is float else self.type
        if not isinstance(value, wanted) or isinstance(value, bool) != (self.type is bool):  # True is an int too
            raise TypeError(f"`{path}`: `{name}`: expected {self.type.__name__}, got {brief(value)}. Correct the file.")
        if not self.holds(value):
            raise ValueError(f"`{path}`: `{name}`: expected {self.rule}, got {brief(value)}. Correct the file.")
        return self.type(value)


INTEGER = Kind(int)
SIZE = Kind(int, f"a whole number from 1 to {_LARGEST}", lambda value: 1 <= value <= _LARGEST)
COUNT = Kind(int, f"a whole number from 0 to {_LARGEST}", lambda value: 0 <= value <= _LARGEST)
# Negative numbers are valid too: folders use -1 for no token.
TOKEN = Kind(int, f"a token id up to {_LARGEST}", lambda value: abs(value) <= _LARGEST)
NUMBER = Kind(float, "a finite number", lambda value: abs(value) <= 1e300)
POSITIVE = Kind(float, "a finite number above 0", lambda value: 0 < value <= 1e300)
NOT_NEGATIVE = Kind(float, "a finite number of at least 0", lambda value: 0 <= value <= 1e300)
RATE = Kind(float, "a rate in [0, 1)", lambda value: 0 <= value < 1)
FLAG = Kind(bool)
TEXT = Kind(str)
LIST = Kind(list)
OBJECT = Kind(dict)


def kind_of(default: Any) -> Kind:
    """Returns the kind of a key with this default: `SIZE` for an integer, `NOT_NEGATIVE` for a float, else only the type."""
    return {bool: FLAG, int: SIZE, float: NOT_NEGATIVE}.get(type(default), Kind(type(default)))
