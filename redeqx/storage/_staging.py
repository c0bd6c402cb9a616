"""A local folder for the small files of a run whose own folder is in an object store.

Metrics and traces are appended to, which no store can do. So they are written to a folder on this machine, and uploaded from
there: what has changed since the last time.
"""

import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ._end import AtEnd
from ._path import StorePath


class Staging:
    """A temporary folder whose files are uploaded to a place in a store. When the process ends, and when this object is
    collected, what is left is uploaded and the folder removed; if that fails, it is kept, with a warning.

    **Arguments:**

    - `to`: where its files go, under the same relative paths.
    - `restored`: paths of files that are fetched from there first, because a run goes on with them.

    Raises OSError if the store does not answer.
    """

    def __init__(self, to: StorePath, restored: Iterable[str] = ()):
        self.to = to
        to.is_dir()  # of a bucket that does not exist, no single object is missing
        there = {name: (to / name).read_bytes() for name in restored if (to / name).is_file()}
        self.folder = Path(tempfile.mkdtemp(prefix="redeqx-")) / (to.name or "bucket")  # trackers name their run after it
        self.folder.mkdir()
        for name, content in there.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        self._uploaded = {name: _version(self.folder / name) for name in there}
        self._busy = threading.Lock()  # a save in the background uploads too
        AtEnd(self, partial(_end, self.folder, to, self._uploaded, self._busy))

    def upload(self) -> None:
        """Uploads the files that have changed. Raises OSError if the store does not take one."""
        _upload(self.folder, self.to, self._uploaded, self._busy)


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _upload(folder: Path, to: StorePath, uploaded: dict[str, tuple[int, int]], busy: threading.Lock) -> None:
    with busy:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and uploaded.get(name) != (version := _version(path)):
                content = path.read_bytes()
                (to / name).upload(partial(iter, [content]), len(content))
                uploaded[name] = version


def _end(folder: Path, to: StorePath, uploaded: dict[str, tuple[int, int]], busy: threading.Lock) -> None:
    try:
        _upload(folder, to, uploaded, busy)
    except OSError as error:
        warnings.warn(f"`{to}`: expected to take the run's records, got {error}. They are in {folder}.", stacklevel=2)
        return
    shutil.rmtree(folder.parent, ignore_errors=True)
