"""Requests to object stores: how they are sent, retried, and their errors translated. `_path` has one method for each.

`obstore` retries requests that fail with a 5xx, a dropped connection or a timeout, with growing pauses. Its final error
becomes an OSError: `FileNotFoundError` for a missing object, `StoreError` for a store that does not answer or refuses. An
object is replaced atomically, so a reader sees the old one or the new one.
"""

import errno
import functools
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ._disk import StorageError

T = TypeVar("T")

SCHEMES = {"s3": "S3Store", "gs": "GCSStore"}


@dataclass
class Limits:
    """The limits of requests."""

    part: int = 2**23  # bytes sent or read by one request, if they can be split
    gap: int = 2**20  # gaps of up to this many bytes are read and dropped, which is faster than a further request
    concurrent: int = 8  # concurrent requests of one call
    timeout: float = 120.0  # seconds for one request: 8 of 8 MiB on a link of 0.5 MiB/s
    retries: int = 10  # with pauses from `pause` to 15 seconds
    pause: float = 0.1
    give_up: float = 180.0  # seconds after which a request is not retried


limits = Limits()


class StoreError(StorageError):
    """An object store does not answer, or refuses a request: its contents are unknown."""


def check_installed() -> None:
    """Raises ImportError without `obstore`."""
    if importlib.util.find_spec("obstore") is None:
        raise ImportError(
            "`s3://`, `gs://`: expected obstore, which reads and writes object stores, got no such package. "
            'Run `pip install "redeqx[stores]"`, or pass a folder.'
        )


def request(
    scheme: str,
    bucket: str,
    key: str,
    act: Callable[[Any, Any], T],
    *,
    is_list: bool = False,
    on_condition: bool = False,
    also: type[Exception] | tuple[()] = (),
) -> T:
    """Returns `act(obstore, store)`, a request to a bucket. Retries it if an answer is cut off: `obstore` retries only
    requests without an answer, and of these none that writes on a condition.

    A request that lists objects (`is_list`) may find none. If one writes on a condition, that no longer holds if the first
    of two tries has written. Errors name the object `key`; further errors in `also` are retried.
    """
    check_installed()
    import obstore
    from obstore.exceptions import BaseError

    with _translate_errors(scheme, bucket, key, is_list):
        client = (limits.timeout, limits.retries, limits.pause, limits.give_up)
        store = _opened(scheme, bucket, os.getpid(), *client)  # connections do not survive a fork
        lost = ("response body", "error sending request") if on_condition else ("response body",)
        until = time.monotonic() + limits.give_up
        for attempt in range(limits.retries):
            try:
                return act(obstore, store)
            except (BaseError, FileNotFoundError) as error:
                is_lost = isinstance(error, also) or any(text in str(error) for text in lost)
                if not is_lost or time.monotonic() > until:
                    raise
            time.sleep(min(limits.pause * 2**attempt, 15) * random.uniform(0.5, 1))
        return act(obstore, store)


@functools.lru_cache(maxsize=16)
def _opened(scheme: str, bucket: str, pid: int, timeout: float, retries: int, pause: float, give_up: float) -> Any:
    """Returns the store of a bucket, with the credentials, region and endpoint of the environment or the machine."""
    del pid
    from obstore import store

    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    is_plain = scheme == "s3" and any(os.environ.get(name, "").startswith("http://") for name in endpoints)
    client: Any = {"timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=10), "allow_http": is_plain}
    backoff = {"init_backoff": timedelta(seconds=pause), "max_backoff": timedelta(seconds=15), "base": 2}
    retry: Any = {"max_retries": retries, "backoff": backoff, "retry_timeout": timedelta(seconds=give_up)}
    return getattr(store, SCHEMES[scheme])(bucket, client_options=client, retry_config=retry)


@contextmanager
def _translate_errors(scheme: str, bucket: str, key: str, is_list: bool) -> Iterator[None]:
    """Raises the errors of a store as an OSError that names the object, or the bucket when listing."""
    from obstore import exceptions

    numbers = {  # of errors that are not I/O errors
        (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError): errno.EACCES,
        (exceptions.NotSupportedError, NotImplementedError): errno.ENOTSUP,
    }
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such object", f"{scheme}://{bucket}/{key}") from error
    except (exceptions.BaseError, NotImplementedError) as error:
        number = next((number for kinds, number in numbers.items() if isinstance(error, kinds)), errno.EIO)
        got = str(error).split("\n", 1)[0][:400]
        if is_list and "404 Not Found" in got:  # a listed prefix need not exist, but the bucket must
            text = "expected a bucket, got none of that name. Create it, or correct the address"
            raise StoreError(errno.ENOENT, text, f"{scheme}://{bucket}") from error
        text = f"expected the store to answer, got: {got}. Check the address, the credentials and the network"
        raise StoreError(number, text, f"{scheme}://{bucket}/{key}") from error
