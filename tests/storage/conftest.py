"""One S3 server for the tests of this folder, and a bucket for each test."""

import itertools

import pytest

from redeqx.storage import limits
from tests.storage._server import Server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def bucket(server, monkeypatch):
    """The address of an empty bucket."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    name = f"bucket{next(_numbers)}"
    server.make_bucket(name)
    yield f"s3://{name}"
    server.fault = server.after = lambda method, path: None
    server.requests.clear()


@pytest.fixture
def short_pauses(monkeypatch):
    """Short pauses and few retries. On busy cores the server may take seconds."""
    monkeypatch.setattr(limits, "timeout", 20.0)
    monkeypatch.setattr(limits, "retries", 3)
    monkeypatch.setattr(limits, "pause", 0.01)
