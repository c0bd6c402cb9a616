"""What JAX's client says reaches the coordinator and back; that the coordinator is gone does not reach it."""

import socket
import threading

import pytest

from redeqx.distributed._relay import Relay

LIMIT = 10.0


@pytest.fixture
def coordinator():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        yield listener


def client(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
    connection.settimeout(LIMIT)
    return connection


def port_of(listener):
    return listener.getsockname()[1]


def test_bytes_pass_both_ways_on_each_connection(coordinator):
    relay = Relay("127.0.0.1", port_of(coordinator), LIMIT)
    data = bytes(range(256)) * 4000  # more than a socket holds
    for _ in range(2):
        with client(relay.port) as near, coordinator.accept()[0] as far:
            for source, target in ((near, far), (far, near)):
                sending = threading.Thread(target=source.sendall, args=(data,))
                sending.start()
                received = b""
                while len(received) < len(data):
                    received += target.recv(2**16)
                sending.join(LIMIT)
                assert received == data


def test_where_the_coordinator_is_gone_the_client_hears_nothing(coordinator):
    relay = Relay("127.0.0.1", port_of(coordinator), LIMIT)
    with client(relay.port) as near:
        far = coordinator.accept()[0]
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, as of a process that is killed
        far.close()
        near.settimeout(0.3)
        for _ in range(3):  # what the first sends meets a closed connection, what the next do a broken one
            with pytest.raises(TimeoutError):
                near.recv(1)
            near.sendall(b"still there?")


def test_where_the_client_has_gone_the_coordinator_hears_of_it(coordinator):
    relay = Relay("127.0.0.1", port_of(coordinator), LIMIT)
    with client(relay.port):
        far = coordinator.accept()[0]
    far.settimeout(LIMIT)
    with far:
        assert far.recv(1) == b""


def test_the_coordinator_may_come_later():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = port_of(reserved)
    relay = Relay("127.0.0.1", port, LIMIT)
    with client(relay.port) as near:
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(1)
        with socket.create_server(("127.0.0.1", port)) as late:
            late.settimeout(LIMIT)
            with late.accept()[0] as far:
                far.sendall(b"here")
                near.settimeout(LIMIT)
                assert near.recv(4) == b"here"


def test_where_no_coordinator_comes_in_time_the_connection_is_refused():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        relay = Relay("127.0.0.1", port_of(reserved), 0.2)
        with client(relay.port) as near:
            assert near.recv(1) == b""
