"""A local folder for the small files of a run whose workdir is in an object store.

Metrics and traces are appended to, which stores do not support. So they are written to a local folder, from which files that
have changed are uploaded.
"""

import shutil
import tempfile
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from .._at_end import AtEnd
from ._path import StorePath

_living: "weakref.WeakValueDictionary[StorePath, Staging]" = weakref.WeakValueDictionary()
# By destination. A background save uploads too, and a new one downloads what the last one uploads at its end.
_busy: defaultdict[StorePath, threading.Lock] = defaultdict(threading.Lock)


class Staging:
    """A temporary folder whose files are uploaded to a store. When the process ends or this object is collected, the
    remaining files are uploaded and the folder is removed; if that fails, it is kept, with a warning.

    Files keep their relative paths. Those in `restored` are downloaded first, because a run continues them.

    Raises OSError if the store does not answer.
    """

    def __init__(self, to: StorePath, restored: Iterable[str] = ()):
        self.to = to
        to.is_dir()  # raises if the bucket does not exist; reading a missing object does not show that
        with _busy[to]:
            downloaded = {name: (to / name).read_bytes() for name in restored if (to / name).is_file()}
        self.folder = Path(tempfile.mkdtemp(prefix="redeqx-")) / (to.name or "bucket")  # trackers name their run after it
        self.folder.mkdir()
        for name, content in downloaded.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        uploaded = {name: _version(self.folder / name) for name in downloaded}
        # Uploads the files that have changed. Raises OSError if the store refuses one.
        self.upload = partial(_upload, self.folder, to, uploaded)
        AtEnd(partial(_end, self.folder, to, self.upload), self)

    @classmethod
    def of(cls, to: StorePath, restored: Iterable[str] = ()) -> "Staging":
        """Returns that of a destination, which all deployers of this process share: else the one that ends last would
        replace the files of the others."""
        found = _living.get(to)
        if found is None:
            found = _living[to] = cls(to, restored)
        return found


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _upload(folder: Path, to: StorePath, uploaded: dict[str, tuple[int, int]]) -> None:
    with _busy[to]:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            try:
                if not path.is_file() or uploaded.get(name) == (version := _version(path)):
                    continue
                content = path.read_bytes()
            except FileNotFoundError:  # renamed or deleted in the meantime, by the thread of a tracker
                continue
            (to / name).upload(partial(iter, [content]), len(content))
            uploaded[name] = version


def _end(folder: Path, to: StorePath, upload: Callable[[], None]) -> None:
    try:
        upload()
    except OSError as error:
        warnings.warn(f"`{to}`: expected to receive the run's records, got {error}. They are in {folder}.", stacklevel=2)
        return
    shutil.rmtree(folder.parent, ignore_errors=True)
