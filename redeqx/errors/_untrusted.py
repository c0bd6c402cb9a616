"""Untrusted files: reads their contents within limits, and shortens them for error messages."""

import json
import reprlib
import unicodedata
from typing import Any

_MAX_JSON = 10**8  # bytes of a file
_MAX_SIZE = 2**63  # more bytes than any file or array has

_BRIEF = reprlib.Repr()
_BRIEF.maxstring, _BRIEF.maxlevel = 200, 2


def brief(value: Any) -> str:
    """Returns the `repr` of a value from a file, shortened for a message."""
    return _BRIEF.repr(value)


def brief_name(name: str) -> str:
    """Returns a name from a file, shortened for a message, with line breaks escaped."""
    return brief(name)[1:-1]


def printable(text: str) -> str:
    """Returns a text whose control and direction characters are escaped, except line breaks: a terminal would obey them."""
    unsafe = {
        letter for letter in set(text) if letter != "\n" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }
    return text.translate({ord(letter): repr(letter)[1:-1] for letter in unsafe}) if unsafe else text


def is_plain(name: Any) -> bool:
    """Returns whether a value from a file is a plain file name: no path, no control characters."""
    return (
        isinstance(name, str)
        and name not in (".", "..")
        and name.isprintable()  # also False for lone surrogates
        and not {"/", "\\"} & set(name)
        and 0 < len(name.encode()) <= 255
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that occurs twice")
    return fields


def parse_json(text: bytes | memoryview, *, unique: bool = True) -> Any:
    """Parses a JSON text. Raises ValueError for any other text, and if names must be `unique`, for an object that has one
    twice; else the last one is used."""
    try:
        # As a string: for bytes `json` guesses the encoding.
        return json.loads(str(text, "utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def load_json(path: Any, *, unique: bool = True) -> Any:
    """Parses a JSON file, on a disk or in an object store. Raises ValueError, without reading it, if it is no regular file
    or too large."""
    if not path.is_file():  # reading a pipe would block
        raise ValueError("no regular file")
    if (size := path.stat().st_size) > _MAX_JSON:
        raise ValueError(f"{size} bytes, more than {_MAX_JSON}")
    return parse_json(path.read_bytes(), unique=unique)


def is_size(value: Any) -> bool:
    """Returns whether a value from a file is a possible number of bytes or items."""
    return type(value) is int and 0 <= value < _MAX_SIZE  # excludes True, an instance of int


class DamagedError(ValueError):
    """A file differs from what was written."""


def unreadable(path: Any, error: OSError) -> DamagedError:
    """Returns the error for a file that the system cannot read."""
    return damaged(path, "a file that can be read", repr(error.strerror or str(error)))


def damaged(path: Any, rule: str, got: str) -> DamagedError:
    """Returns the error for a file that differs from what was written."""
    return DamagedError(f"`{path}`: expected {rule}, got {got}. The file is damaged or unfinished: load another checkpoint.")
