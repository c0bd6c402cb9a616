"""The relay forwards bytes between JAX's client and the coordinator, but hides the coordinator's end from the client."""

import socket
import threading

import pytest

from redeqx.distributed._relay import start_relay

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


def test_bytes_pass_in_both_directions(coordinator):
    relay = start_relay("127.0.0.1", port_of(coordinator), LIMIT)
    data = bytes(range(256)) * 4000  # more than a socket buffer holds
    for _ in range(2):
        with client(relay) as near, coordinator.accept()[0] as far:
            for source, target in ((near, far), (far, near)):
                sending = threading.Thread(target=source.sendall, args=(data,))
                sending.start()
                received = b""
                while len(received) < len(data):
                    received += target.recv(2**16)
                sending.join(LIMIT)
                assert received == data


def test_client_does_not_see_the_coordinator_end(coordinator):
    relay = start_relay("127.0.0.1", port_of(coordinator), LIMIT)
    with client(relay) as near:
        far = coordinator.accept()[0]
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, as when a process is killed
        far.close()
        near.settimeout(0.3)
        for _ in range(3):  # the first message reaches a closed connection, later ones a broken one
            with pytest.raises(TimeoutError):
                near.recv(1)
            near.sendall(b"still there?")


def test_coordinator_sees_the_client_end(coordinator):
    relay = start_relay("127.0.0.1", port_of(coordinator), LIMIT)
    with client(relay):
        far = coordinator.accept()[0]
    far.settimeout(LIMIT)
    with far:
        assert far.recv(1) == b""


def test_coordinator_may_start_later():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = port_of(reserved)
    relay = start_relay("127.0.0.1", port, LIMIT)
    with client(relay) as near:
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(1)
        with socket.create_server(("127.0.0.1", port)) as late:
            late.settimeout(LIMIT)
            with late.accept()[0] as far:
                far.sendall(b"here")
                near.settimeout(LIMIT)
                assert near.recv(4) == b"here"


def test_connection_is_refused_if_no_coordinator_starts_in_time():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        relay = start_relay("127.0.0.1", port_of(reserved), 0.2)
        with client(relay) as near:
            assert near.recv(1) == b""
