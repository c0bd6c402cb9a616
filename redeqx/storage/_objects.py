"""Requests to object stores: read, write, list and delete objects. All other files of this package use these.

`obstore` retries requests that fail with a 5xx, a dropped connection or a timeout, with growing pauses. Its final error
becomes an OSError: `FileNotFoundError` for a missing object, `StoreError` for a store that does not answer or refuses. An
object is replaced atomically, so a reader sees the old one or the new one.
"""

import errno
import functools
import importlib.util
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

SCHEMES = {"s3": "S3Store", "gs": "GCSStore"}
PART = 2**23  # bytes sent or read by one request
CONCURRENT = 8  # concurrent requests of one call
TIMEOUT = 120.0  # seconds for one request: 8 of 8 MiB on a link of 0.5 MiB/s
RETRIES = 10  # with pauses from `PAUSE` to 15 s
PAUSE = 0.1  # seconds
GIVE_UP = 180.0  # seconds after which a request is not retried
_MOST_PARTS = 9_000  # S3 allows 10,000


class StoreError(OSError):
    """An object store does not answer, or refuses a request: its contents are unknown."""


def check_installed() -> None:
    """Raises ImportError without `obstore`."""
    if importlib.util.find_spec("obstore") is None:
        raise ImportError(
            "`s3://`, `gs://`: expected obstore, which reads and writes object stores, got no such package. "
            'Run `pip install "redeqx[stores]"`, or pass a folder.'
        )


def read(scheme: str, bucket: str, key: str, start: int = 0, stop: int | None = None) -> bytes:
    """Returns the bytes `[start, stop)` of an object, or all of them."""
    import obstore

    if start == stop:
        return b""
    store = _open(scheme, bucket)
    with _translate_errors(scheme, bucket, key):
        if stop is None:
            return _retry(lambda: bytes(obstore.get(store, key).bytes()))
        found = _retry(lambda: bytes(obstore.get_range(store, key, start=start, end=stop)))
    if len(found) != stop - start:
        text = f"expected {stop - start} bytes from {start} on, got {len(found)}. The object is truncated: load another"
        raise OSError(errno.EIO, text, f"{scheme}://{bucket}/{key}")
    return found


def version(scheme: str, bucket: str, key: str) -> tuple[bytes, dict[str, str]]:
    """Returns an object's bytes, and the version to pass to `write(replacing=...)` to replace only these."""
    import obstore

    def get() -> tuple[bytes, dict[str, str]]:
        found = obstore.get(_open(scheme, bucket), key)
        return bytes(found.bytes()), _version(found.meta)

    with _translate_errors(scheme, bucket, key):
        return _retry(get)


def size(scheme: str, bucket: str, key: str) -> int | None:
    """Returns the bytes of an object, None if there is none."""
    import obstore

    try:
        with _translate_errors(scheme, bucket, key):
            return obstore.head(_open(scheme, bucket), key)["size"]
    except FileNotFoundError:
        return None


def sizes(scheme: str, bucket: str, key: str) -> dict[str, int]:
    """Returns the bytes of each object below a key, by the rest of its key."""
    import obstore

    with _translate_errors(scheme, bucket, key, is_list=True):
        found = _retry(lambda: obstore.list(_open(scheme, bucket), key or None).collect())
    return {each["path"][len(key) :].lstrip("/"): each["size"] for each in found}


def has_any(scheme: str, bucket: str, key: str) -> bool:
    """Returns whether there are objects below a key."""
    import obstore

    with _translate_errors(scheme, bucket, key, is_list=True):
        return _retry(lambda: any(obstore.list(_open(scheme, bucket), key or None, chunk_size=1)))


def write(
    scheme: str, bucket: str, key: str, data: bytes, replacing: dict[str, str] | str | None = "any"
) -> dict[str, str] | None:
    """Writes an object in one request; returns its version.

    **Arguments:**

    - `replacing`: `"any"`: any object or none; None: only if there is no object; a version: only that one. Otherwise nothing
        is written and None is returned. None is also returned if the object was written but the answer was lost: callers
        that pass a condition then read the object.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    mode: Any = "overwrite" if replacing == "any" else replacing or "create"
    try:
        with _translate_errors(scheme, bucket, key):
            put = lambda: obstore.put(_open(scheme, bucket), key, data, mode=mode, use_multipart=False)  # noqa: E731
            return _version(_retry(put))
    except OSError as error:
        if isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
            return None
        if replacing != "any" and isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def upload(scheme: str, bucket: str, key: str, content: Callable[[], Iterable[memoryview | bytes]], n_bytes: int) -> None:
    """Writes an object of `n_bytes`, in chunks from `content`, a few of them in memory. It appears when it is complete, or
    never. `content` is called again for a retry.

    If the answer to the last request of an upload is lost, the request is retried, but S3 no longer knows the upload.
    """
    import obstore

    if n_bytes <= PART:
        write(scheme, bucket, key, b"".join(content()))
        return
    part = max(PART, math.ceil(n_bytes / _MOST_PARTS))
    store = _open(scheme, bucket)
    with _translate_errors(scheme, bucket, key):
        put = lambda: obstore.put(store, key, iter(content()), chunk_size=part, max_concurrency=CONCURRENT)  # noqa: E731
        _retry(put, also=FileNotFoundError)


def delete(scheme: str, bucket: str, keys: Sequence[str]) -> None:
    """Deletes objects. Missing ones count as deleted."""
    import obstore

    if not keys:
        return
    with _translate_errors(scheme, bucket, keys[0]):
        store = _open(scheme, bucket)
        try:
            _retry(lambda: obstore.delete(store, keys))
        except FileNotFoundError:  # Google's store reports a missing object, and then some others may not be deleted
            for key in keys:
                with suppress(FileNotFoundError):
                    _retry(lambda key=key: obstore.delete(store, key))


def _retry(act: Callable[[], T], also: type[Exception] | tuple[()] = ()) -> T:
    """Returns the result of `act`. Retries it if an answer is cut off: `obstore` retries only requests without an answer.

    **Arguments:**

    - `also`: further errors that are retried.
    """
    from obstore.exceptions import BaseError

    for attempt in range(RETRIES):
        try:
            return act()
        except (BaseError, FileNotFoundError) as error:
            if not isinstance(error, also) and "response body" not in str(error):
                raise
        time.sleep(min(PAUSE * 2**attempt, 15) * random.uniform(0.5, 1))
    return act()


def _version(found: Any) -> dict[str, str]:
    return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}


def _open(scheme: str, bucket: str) -> Any:
    return _opened(scheme, bucket, os.getpid())  # connections do not survive a fork


@functools.lru_cache(maxsize=16)
def _opened(scheme: str, bucket: str, pid: int) -> Any:
    """Returns the store of a bucket, with the credentials, region and endpoint of the environment or the machine."""
    del pid
    check_installed()
    from obstore import store

    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    is_plain = scheme == "s3" and any(os.environ.get(name, "").startswith("http://") for name in endpoints)
    client = {"timeout": timedelta(seconds=TIMEOUT), "connect_timeout": timedelta(seconds=10), "allow_http": is_plain}
    backoff = {"init_backoff": timedelta(seconds=PAUSE), "max_backoff": timedelta(seconds=15), "base": 2}
    retry = {"max_retries": RETRIES, "backoff": backoff, "retry_timeout": timedelta(seconds=GIVE_UP)}
    return getattr(store, SCHEMES[scheme])(bucket, client_options=client, retry_config=retry)


@contextmanager
def _translate_errors(scheme: str, bucket: str, key: str, *, is_list: bool = False) -> Iterator[None]:
    """Raises the errors of a store as an OSError that names the object, or the bucket when listing."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such object", f"{scheme}://{bucket}/{key}") from error
    except (exceptions.BaseError, NotImplementedError) as error:
        number = next((number for kinds, number in _error_numbers().items() if isinstance(error, kinds)), errno.EIO)
        got = str(error).split("\n", 1)[0][:400]
        if is_list and "404 Not Found" in got:  # a listed prefix need not exist, but the bucket must
            text = "expected a bucket, got none of that name. Create it, or correct the address"
            raise StoreError(errno.ENOENT, text, f"{scheme}://{bucket}") from error
        text = f"expected the store to answer, got: {got}. Check the address, the credentials and the network"
        raise StoreError(number, text, f"{scheme}://{bucket}/{key}") from error


@functools.cache
def _error_numbers() -> dict[tuple[type[Exception], ...], int]:
    """Returns the errno of errors that are not I/O errors."""
    from obstore import exceptions

    return {
        (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError): errno.EACCES,
        (exceptions.NotSupportedError, NotImplementedError): errno.ENOTSUP,
    }
