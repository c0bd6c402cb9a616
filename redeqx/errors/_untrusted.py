"""Untrusted files: reads their contents within limits, and shortens them for error messages."""

import json
import reprlib
from typing import Any

_MAX_JSON = 10**8  # bytes of a file
_MAX_SIZE = 2**63  # more bytes than any file or array has

_BRIEF = reprlib.Repr()
_BRIEF.maxstring, _BRIEF.maxlevel = 200, 2


def brief(value: Any) -> str:
    """The `repr` of a value from a file, shortened for a message, however long or deep it is."""
    return _BRIEF.repr(value)


def brief_name(name: str) -> str:
    """A name from a file, shortened for a message, and without characters that would break its line."""
    return brief(name)[1:-1]


def is_plain(name: Any) -> bool:
    """Whether a value from a file is a plain file name: no path, no control characters."""
    return (
        isinstance(name, str)
        and name not in (".", "..")
        and name.isprintable()  # neither are lone surrogates
        and not {"/", "\\"} & set(name)
        and 0 < len(name.encode()) <= 255
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that occurs twice")
    return fields


def parse_json(text: bytes | memoryview, *, unique: bool = True) -> Any:
    """The value of a JSON text. Raises ValueError for any other text.

    **Arguments:**

    - `unique`: whether to refuse objects with the same name twice. If False, the last one counts.
    """
    try:
        # Not from bytes, for which `json` guesses the encoding.
        return json.loads(str(text, "utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def load_json(path: Any, *, unique: bool = True) -> Any:
    """As `parse_json`, of a file on a disk or in an object store. Refuses what is not a regular file, or is too large,
    without reading it."""
    if not path.is_file():  # reading a pipe would block
        raise ValueError("no regular file")
    if (size := path.stat().st_size) > _MAX_JSON:
        raise ValueError(f"{size} bytes, more than {_MAX_JSON}")
    return parse_json(path.read_bytes(), unique=unique)


def is_size(value: Any) -> bool:
    """Whether a value from a file is a possible number of bytes or items."""
    return type(value) is int and 0 <= value < _MAX_SIZE  # not True, which is an int too


class DamagedError(ValueError):
    """A file is not as it was written."""


def unreadable(path: Any, error: OSError) -> DamagedError:
    """The error for a file that the system cannot read."""
    return damaged(path, "a file that can be read", repr(error.strerror or str(error)))


def damaged(path: Any, rule: str, got: str) -> DamagedError:
    """The error for a file that is not as it was written."""
    return DamagedError(f"`{path}`: expected {rule}, got {got}. The file is damaged or unfinished: load another checkpoint.")
