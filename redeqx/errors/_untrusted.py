"""What files hold that others wrote: read within limits, and shown in errors cut to a length, whatever it is."""

import json
import reprlib
from pathlib import Path
from typing import Any

_MAX_JSON = 10**8  # bytes of a file
_MAX_PLACE = 2**63  # no file, and no array, has that many bytes

_BRIEF = reprlib.Repr()
_BRIEF.maxstring, _BRIEF.maxlevel = 200, 2


def brief(value: Any) -> str:
    """The `repr` of what a file holds, cut to a length for a message, however long or deep it is."""
    return _BRIEF.repr(value)


def brief_name(name: str) -> str:
    """A name that a file chose, cut to a length for a message, and without what would break its line."""
    return brief(name)[1:-1]


def is_plain(name: Any) -> bool:
    """Whether a value that a file holds is a name that one of its folder's own files can have: no path, no control."""
    return (
        isinstance(name, str)
        and name not in (".", "..")
        and name.isprintable()  # lone surrogates are not, either
        and not {"/", "\\"} & set(name)
        and 0 < len(name.encode()) <= 255
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name that occurs twice")
    return fields


def parse_json(text: bytes | memoryview, *, unique: bool = True) -> Any:
    """What a JSON text holds. Raises ValueError for whatever is none.

    **Arguments:**

    - `unique`: whether an object that has one name twice is refused; else the last is taken.
    """
    try:
        # Not as bytes: `json` would guess at other encodings than UTF-8.
        return json.loads(str(text, "utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def load_json(path: Path, *, unique: bool = True) -> Any:
    """As `parse_json`, of a file; what is no file, or a larger one than any of ours, is refused unread."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("no regular file")
    if (size := path.stat().st_size) > _MAX_JSON:
        raise ValueError(f"{size} bytes, more than {_MAX_JSON}")
    return parse_json(path.read_bytes(), unique=unique)


def is_size(value: Any) -> bool:
    """Whether a value that a file holds is a number of bytes or items, and one that a file or an array can have."""
    return type(value) is int and 0 <= value < _MAX_PLACE  # True is an int, too


class DamagedError(ValueError):
    """A file is not what its writer left."""


def unreadable(path: Path, error: OSError) -> DamagedError:
    """The error for a file that the system cannot read."""
    return damaged(path, "a file that can be read", repr(error.strerror or str(error)))


def damaged(path: Path, rule: str, got: str) -> DamagedError:
    """The error for a file that is not what its writer left."""
    return DamagedError(f"`{path}`: expected {rule}, got {got}. The file is damaged or unfinished: load another checkpoint.")
