"""JAX's persistent compilation cache: chooses its folder, and counts what was read from it.

The cache is off for CPUs unless a folder is given. Its entries contain machine code, which other CPUs may not support. XLA
checks this, but its check also prints errors and rejects entries on the machine that wrote them (jax issue 38445).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "REDEQX_COMPILATION_CACHE"
# The maximal size of the user's cache folder, in bytes. A program has some megabytes.
MAX_BYTES = 16 * 2**30
_MAX_SIZE = "jax_compilation_cache_max_size"
_ON, _OFF = ("", "1", "true", "on", "yes"), ("0", "false", "off", "no")


def start_cache(given: bool | str | Path | None, platform: str) -> str | None:
    """Sets JAX's cache folder for this process. Returns the line to print, or None.

    **Arguments:**

    - `given`: a folder; True for JAX's own setting or else the user's cache folder; False or None to set nothing. The
        environment variable `REDEQX_COMPILATION_CACHE` (a folder, or 0) replaces True.
    - `platform`: the platform that steps are compiled for.
    """
    before = _folder()
    variable = os.environ.get(VARIABLE, "")
    if given is True and variable.lower() not in _ON:
        given = False if variable.lower() in _OFF else variable
    if not given or (given is True and (platform == "cpu" or before is not None)):
        return None if before is None else f"{before}, as JAX is set"
    try:
        if given is True:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redeqx" / "xla"
        else:
            folder = Path(given).expanduser().absolute()
    except RuntimeError:  # the account has no home folder, as in some containers
        return f"off: expected a home folder for `{'~/.cache' if given is True else given}`, got none"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # private, since others who can write here could run code
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"off: `{folder}` cannot be written ({error.strerror or error})"
    if given is True and getattr(jax.config, _MAX_SIZE) == -1 and find_spec("filelock"):  # which JAX needs for a limit
        jax.config.update(_MAX_SIZE, MAX_BYTES)
    if before != str(folder):
        _use(str(folder))
    return str(folder)


@contextmanager
def uncached_where_described(device: Any) -> Iterator[None]:
    """A context that turns the cache off if a device is only described: its compiler cannot load programs from the cache
    (jax 0.10.2: "PjRtCompiler must be constructed with a Client")."""
    folder = _folder()
    if folder is None or type(device.client).__name__ != "CompileOnlyPyClient":
        yield
        return
    _use(None)
    try:
        yield
    finally:
        _use(folder)


def _use(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # JAX keeps the cache of an earlier folder open


def _folder() -> str | None:
    return getattr(jax.config, "jax_compilation_cache_dir", None)


@dataclass
class CacheUse:
    """The use of the compilation cache during some compilations.

    **Arguments:**

    - `n_hits`, `n_misses`: the numbers of programs that were read from the cache, and of others.
    - `seconds_saved`: the time that compiling would have taken, minus the time of reading.
    """

    n_hits: int = 0
    n_misses: int = 0
    seconds_saved: float = 0.0

    def text(self) -> str:
        """Returns a phrase to print, or an empty string if there is no cache."""
        if self.n_hits:  # misses are then small programs: JAX stores none that compiles within a second
            return f"read from the compilation cache, which saved {self.seconds_saved:.1f}s"
        has_cache = _folder() is not None and getattr(jax.config, "jax_enable_compilation_cache", True)
        return "not found in the compilation cache" if self.n_misses and has_cache else ""


_REQUESTS, _HITS = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"


@contextmanager
def cache_use() -> Iterator[CacheUse]:
    """A context that counts this thread's hits and misses, from the events that JAX reports to `jax.monitoring`."""
    use, thread = CacheUse(), threading.get_ident()

    def count(event: str, **kwargs: str | int) -> None:
        del kwargs
        if threading.get_ident() != thread:
            return
        use.n_misses += (event == _REQUESTS) - (event == _HITS)
        use.n_hits += event == _HITS

    def add(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        use.seconds_saved += duration_secs if event == _SAVED and threading.get_ident() == thread else 0.0

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield use
    finally:
        jax.monitoring.unregister_event_listener(count)
        jax.monitoring.unregister_event_duration_listener(add)
