"""Processes connect at the start or report why not; messages arrive; no process waits for one that is gone.

Each process is a thread in these tests: what would end the process ends its thread.
"""

import contextlib
import errno
import json
import os
import queue
import random
import re
import socket
import sys
import threading
import time
from functools import partial

import pytest

from redeqx.distributed import Member, PeerError, Peers, Watch

LIMIT = 30.0  # seconds for any operation; most take hundredths
LOCAL = "127.0.0.1"
SCRIPT = "Every process must run the same script with the same arguments."


class Cluster:
    """The processes of a test, and those that have left with an exit code of their own."""

    def __init__(self):
        self.all = []
        self.left = queue.Queue()
        self.codes = {}
        self.ended = []  # processes that have left, whose other threads go on here

    def process(self, n, index, heartbeat=30.0):
        self.all.append(Peers(n, index, heartbeat))
        return self.all[-1]

    def connect(self, n, heartbeat=30.0):
        """Connects all processes of a run."""
        port = free_port()
        peers = [self.process(n, i, heartbeat) for i in range(n)]
        assert run_in_threads(*(partial(meet, each, port) for each in peers)) == [None] * n
        return peers

    def leave(self, code):
        """Replaces `os._exit` in a thread of a process: closes the process's connections and ends the thread."""
        owner = threading.current_thread()._target.__self__
        peers = getattr(owner, "_peers", owner)  # of a `Watch`
        if peers not in self.ended:
            self.ended.append(peers)
            self.codes[peers.index] = code
            self.left.put(peers.index)
            kill(peers)
        sys.exit()

    def wait_for_exits(self, n):
        return sorted(self.left.get(timeout=LIMIT) for _ in range(n))

    def end(self):
        names = ("redeqx-peer-", "redeqx-farewell", "redeqx-watch", "redeqx-stuck")
        listening = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
        for peers in self.all:
            with peers._change:
                peers._left.update(range(peers.n))
                peers._change.notify_all()
        for peers in self.all:
            kill(peers)
        for thread in listening:
            thread.join(LIMIT)
            assert not thread.is_alive()
        for peers in self.all:
            for link in peers._links.values():
                link.close()
        assert self.left.empty()


@pytest.fixture
def cluster(monkeypatch):
    cluster, hook = Cluster(), threading.excepthook
    monkeypatch.setattr("redeqx.distributed._peers.exit_now", cluster.leave)
    monkeypatch.setattr(threading, "excepthook", lambda args: None if args.exc_type is SystemExit else hook(args))
    # Every process has a host of its own, named after its thread.
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    yield cluster
    cluster.end()


def kill(peers):
    """Closes the connections, as the end of a process does."""
    peers._left.update(range(peers.n))
    for link in peers._links.values():
        with contextlib.suppress(OSError):
            link._socket.shutdown(socket.SHUT_RDWR)


def free_port():
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        return free.getsockname()[1]


def meet(peers, port, timeout=LIMIT, host=LOCAL, bind=LOCAL):
    peers.meet(Member(peers.n, peers.index, host, port, bind), timeout)


def run_in_threads(*fns):
    """What each function returns or raises, each run in its own thread."""
    ended = [None] * len(fns)

    def run(i, fn):
        try:
            ended[i] = fn()
        except Exception as error:
            ended[i] = error

    threads = [threading.Thread(target=run, args=(i, fn), name=f"host{i}", daemon=True) for i, fn in enumerate(fns)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT + 5
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
        assert not thread.is_alive()
    return ended


def common_message(errors, kind):
    """The message of the error of type `kind` that every process raises."""
    assert {type(error) for error in errors} == {kind}, errors
    (text,) = {str(error) for error in errors}
    return text


def wait_until(holds):
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def open_connection(port):
    """Connects to the coordinator as soon as it listens."""
    until = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection((LOCAL, port), timeout=LIMIT)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


# --- collective calls ------------------------------------------------------------------------------------------------


def test_gather_returns_values_in_process_order(cluster):
    peers = cluster.connect(4)
    values = [0, None, [1.5, "two"], {"three": (3,)}]
    found = run_in_threads(*(partial(each.gather, "x", value) for each, value in zip(peers, values, strict=True)))
    assert found == [[0, None, [1.5, "two"], {"three": [3]}]] * 4
    assert [each.n_contributed for each in peers] == [1] * 4


def test_repeated_gathers_are_separate(cluster):
    """A process may be ahead: its contribution to the next gather is kept."""
    peers = cluster.connect(3)
    names = [peers[2].contribute("x", i) for i in range(3)]
    assert names == ["x 1", "x 2", "x 3"]
    assert [peers[2]._results.get(name) for name in names] == [None] * 3
    for each in peers[:2]:
        for i in range(3):
            each.contribute("x", 10 * each.index + i)
    assert [peers[2].wait(name, LIMIT) for name in reversed(names)] == [[2, 12, 2], [1, 11, 1], [0, 10, 0]]
    assert peers[0].wait("x 2", LIMIT) == [1, 11, 1]
    wait_until(lambda: peers[1]._results.get("x 3") == [2, 12, 2])


def test_topics_can_be_gathered_by_several_threads_in_any_order(cluster):
    peers = cluster.connect(3)
    topics = ["loss", "save", "stop", "row"]

    def gather(each, topic):
        for i in range(15):
            time.sleep(random.random() / 500)
            assert each.gather(topic, [topic, i, each.index], LIMIT) == [[topic, i, index] for index in range(3)]

    fns = [partial(gather, each, topic) for each in peers for topic in topics]
    random.Random(0).shuffle(fns)
    assert run_in_threads(*fns) == [None] * 12


def test_single_process_needs_no_peers():
    peers = Peers()
    assert peers.gather("x", (1,)) == [[1]]
    peers.agree("fit", {"a": 1})
    peers.compare("t", "fit", {"a": 1})
    peers.check()
    peers.broadcast("word")
    assert peers.fail()
    peers.close()


def test_coordinator_names_the_process_that_did_not_contribute(cluster):
    peers = cluster.connect(3)
    found = run_in_threads(*(partial(each.gather, "x", 0, 0.3) for each in peers[:2]))
    assert [type(error) for error in found] == [PeerError] * 2
    assert str(found[0]) == "`x 1`: expected every process within 0.3 s, got none from [2]."
    assert str(found[1]) == "`x 1`: expected every process within 0.3 s, got none from another process."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device", "/run/x"), "[Errno 28] No space left on device (process 1): '/run/x'"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device (process 1)"),  # as of `os.pwrite`
        (TimeoutError("timed out"), "timed out (process 1)"),
    ],
)
def test_error_of_one_process_is_raised_in_all(cluster, error, expected):
    def act(peers):
        if peers.index == 1:
            raise error
        return peers.index

    peers = cluster.connect(2)
    found = run_in_threads(*(partial(each.together, "act", partial(act, each)) for each in peers))
    assert common_message(found, OSError) == expected


def test_differing_field_is_named_in_all_processes(cluster):
    peers = cluster.connect(3)
    values = {"seed": 0, "size": (2, 3), "rule": max}  # values that JSON cannot hold are compared by their text
    assert run_in_threads(*(partial(each.agree, "Trainer", values) for each in peers)) == [None] * 3
    others = [values, values, {**values, "size": (2, 4)}]
    found = run_in_threads(*(partial(each.agree, "Trainer", other) for each, other in zip(peers, others, strict=True)))
    assert common_message(found, ValueError) == (
        f"`Trainer`: expected `size` to be [2, 3], as in process 0, got [2, 4] in process 2. {SCRIPT}"
    )


def test_missing_field_is_named(cluster):
    peers = cluster.connect(2)
    found = run_in_threads(partial(peers[0].agree, "fit", {"a": "x"}, "Pass one."), partial(peers[1].agree, "fit", {"b": 1}))
    assert {str(error).split(". ")[0] for error in found} == {
        "`fit`: expected `a` to be x, as in process 0, got null in process 1"
    }
    assert str(found[0]).endswith(". Pass one.")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_failed_comparison_raises_in_all_processes_without_waiting(cluster, odd):
    peers = cluster.connect(3)
    for i in range(5):
        for each in peers:
            each.compare(f"step {i}", "rows", {"x": (1, i)})
    assert run_in_threads(*(partial(each.gather, "here") for each in peers)) == [[None] * 3] * 3  # after the messages above
    for each in peers:
        each.check()
    assert not peers[0]._compared
    for each in peers:
        each.compare("step 5", "rows", {"x": (9 if each.index == odd else 1, 5)}, "Pad.")

    def checked(each):
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            each.check()
            time.sleep(0.01)

    # Which value is the reference depends on the order of arrival.
    assert re.fullmatch(
        r"`rows`: expected `x` to be \[[19], 5\], as in process \d, got \[[19], 5\] in process \d\. Pad\.",
        common_message(run_in_threads(*(partial(checked, each) for each in peers)), ValueError),
    )


@pytest.mark.parametrize("sender", [0, 1])
def test_broadcast_reaches_every_other_process(cluster, sender):
    peers = cluster.connect(3)
    received = queue.Queue()
    for each in peers:
        each.on("word", lambda index, value, each=each: received.put((each.index, index, value)))
    peers[sender].broadcast("another word", 1)  # no handler for this topic
    peers[sender].broadcast("word", [1, "a"])
    others = sorted({0, 1, 2} - {sender})
    assert sorted(received.get(timeout=LIMIT) for _ in others) == [(i, sender, [1, "a"]) for i in others]
    assert run_in_threads(*(partial(each.gather, "after") for each in peers)) == [[None] * 3] * 3
    assert received.empty()


# --- the start -------------------------------------------------------------------------------------------------------


def test_processes_may_start_before_the_coordinator(cluster):
    port = free_port()
    peers = [cluster.process(3, i) for i in range(3)]

    def late():
        time.sleep(0.6)
        meet(peers[0], port)

    assert run_in_threads(late, *(partial(meet, each, port) for each in peers[1:])) == [None] * 3


def test_missing_processes_are_listed(cluster):
    port = free_port()
    found = run_in_threads(*(partial(meet, cluster.process(4, i), port, 1.5) for i in (0, 2)))
    assert common_message(found, PeerError) == (
        f"`n_processes`: expected 4 processes at 127.0.0.1:{port} within 1.5 s, got none of number 1, 3; here besides 0: "
        "2 (host1). Look at what those print, and whether they reach this port."
    )


def test_coordinator_reports_that_no_process_connected(cluster):
    with pytest.raises(PeerError, match=r"within 0\.2 s, got none of number 1, 2; here besides 0: none\. Look"):
        meet(cluster.process(3, 0), free_port(), 0.2)


def test_missing_coordinator_is_reported_in_time(cluster):
    port = free_port()
    with pytest.raises(PeerError) as caught:
        meet(cluster.process(2, 1), port, 0.5)
    assert str(caught.value) == (
        f"`host0_address`: expected process 0 at 127.0.0.1:{port} within 0.5 s, got no answer ([Errno 111] Connection "
        "refused). Look at what it prints, and whether this host reaches that port."
    )


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"7\n"])
def test_other_servers_are_not_taken_for_the_coordinator(cluster, answer):
    """Including a server that echoes (None), as a connection to itself does."""
    with socket.create_server((LOCAL, 0)) as server:
        server.settimeout(0.05)
        over = threading.Event()

        def serve():
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    request = connection.recv(2**16)
                    connection.sendall(request if answer is None else answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(PeerError, match=r"^`host0_address`: expected process 0 at .* got no answer \(.+\)\. Look"):
                meet(cluster.process(2, 1), server.getsockname()[1], 0.5)
        finally:
            over.set()
            thread.join(LIMIT)


def test_connecting_processes_receive_the_start_error(cluster):
    """Of six processes, two have index 1; the others have connected or are about to when the coordinator detects it."""
    port = free_port()
    found = run_in_threads(*(partial(meet, cluster.process(6, i), port) for i in (0, 1, 1, 2, 3, 4)))
    assert common_message(found, ValueError).startswith("`process_id`: expected each number once, got 1 at host")


def test_duplicate_index_is_reported_with_both_hosts(cluster):
    port = free_port()
    found = run_in_threads(*(partial(meet, cluster.process(3, i), port) for i in (0, 1, 1)))
    assert re.fullmatch(
        r"`process_id`: expected each number once, got 1 at (host1 and at host2|host2 and at host1)\. "
        r"Number the processes from 0\.",
        common_message(found, ValueError),
    )


def test_differing_number_of_processes_is_refused(cluster):
    port = free_port()
    found = run_in_threads(partial(meet, cluster.process(2, 0), port), partial(meet, cluster.process(3, 1), port))
    assert common_message(found, ValueError) == (
        "`n_processes`: expected 2, as in process 0, got 3 at host1. Pass one number."
    )


@pytest.mark.parametrize("index", [2, -1])
def test_index_out_of_range_is_refused(cluster, index):
    port = free_port()
    found = run_in_threads(*(partial(meet, cluster.process(2, i), port) for i in (0, index)))
    assert common_message(found, ValueError) == (
        f"`process_id`: expected 1 to 1 beside process 0, got {index} at host1. Number them from 0."
    )


def test_occupied_port_is_reported(cluster):
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError) as caught:
            meet(cluster.process(2, 0), port)
    assert str(caught.value) == (
        f"`host0_port`: expected a free port, got {port}, which another program holds. Pass another everywhere."
    )


def test_privileged_port_is_reported(cluster, monkeypatch):
    def refuse(address):
        raise PermissionError(errno.EACCES, "Permission denied")

    class Socket(socket.socket):
        bind = staticmethod(refuse)

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(ValueError) as caught:
        meet(cluster.process(2, 0), 80)
    assert str(caught.value) == (
        "`host0_port`: expected a port that this user may listen on, got 80 (Permission denied). "
        "Pass one above 1023 everywhere."
    )


def test_address_of_another_host_is_reported(cluster):
    with pytest.raises(ValueError) as caught:
        meet(cluster.process(2, 0), free_port(), host="192.0.2.1", bind="192.0.2.1")
    assert str(caught.value) == (
        "`host0_address`: expected an address of process 0's own host, got '192.0.2.1' (Cannot assign requested address). "
        "Pass the one under which the others reach it."
    )


@pytest.mark.parametrize("index", [0, 1])
def test_unknown_host_is_reported(cluster, index):
    with pytest.raises(ValueError) as caught:
        meet(cluster.process(2, index), free_port(), host="nowhere.invalid", bind="nowhere.invalid")
    assert re.fullmatch(
        r"`host0_address`: expected a host that this one can find, got 'nowhere\.invalid' \(.+\)\. Pass its address\.",
        str(caught.value),
    )


def test_unrelated_connections_do_not_disturb_the_start(cluster):
    port = free_port()
    coordinator, other = cluster.process(2, 0), cluster.process(2, 1)
    greeting = json.dumps(["redeqx peers 3", None]).encode()
    messages = [
        b"",
        b"\x16\x03\x01\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"7\n",
        b"null\n",
        b"[1, 2, 3]\n",
        greeting + b"\n",
        b'["',
        b"[1]\n",
        b'["redeqx peers 3", 5]\n',
        b'["redeqx peers 3", [true, 2, "host1", ""]]\n',
        b'["redeqx peers 3", [1, 2, "host1", "not the token"]]\n',
        b"[" * 4000 + b"\n",
        b"x" * 10000,
    ]

    def come():
        for words in messages:
            with open_connection(port) as stranger:
                stranger.sendall(words)
        with open_connection(port):  # open and silent
            meet(other, port)

    assert run_in_threads(partial(meet, coordinator, port), come) == [None, None]
    assert run_in_threads(partial(coordinator.gather, "x", 0), partial(other.gather, "x", 1)) == [[0, 1]] * 2


def test_slow_or_flooding_connections_do_not_delay_the_start(cluster, monkeypatch):
    """Even if there are more of them than the coordinator serves at once."""
    monkeypatch.setattr(
        "redeqx.distributed._links._GREETING_TIMEOUT", 2 * LIMIT
    )  # to wait for one of them would take too long
    port = free_port()
    coordinator, other = cluster.process(2, 0), cluster.process(2, 1)
    over = threading.Event()

    def dribble():
        with open_connection(port) as stranger, contextlib.suppress(OSError):
            while not over.is_set():
                stranger.sendall(b"[")
                time.sleep(0.05)

    def flood():
        with open_connection(port) as stranger, contextlib.suppress(OSError):
            while not over.is_set():
                stranger.sendall(b"x" * 2**16)

    def come():
        with contextlib.ExitStack() as silent:
            for _ in range(80):
                silent.enter_context(open_connection(port))
            time.sleep(0.2)
            meet(other, port)
            over.set()

    assert run_in_threads(partial(meet, coordinator, port), come, dribble, dribble, flood) == [None] * 5


def test_coordinator_times_out_if_only_strangers_connect(cluster, monkeypatch):
    monkeypatch.setattr("redeqx.distributed._links._GREETING_TIMEOUT", 2 * LIMIT)
    port = free_port()
    coordinator, over = cluster.process(2, 0), threading.Event()

    def dribble():
        with open_connection(port) as stranger, contextlib.suppress(OSError):
            while not over.is_set():
                stranger.sendall(b"[")
                time.sleep(0.02)

    def wait():
        began = time.monotonic()
        with pytest.raises(PeerError, match=r"within 0\.5 s, got none of number 1; here besides 0: none\. Look"):
            meet(coordinator, port, 0.5)
        over.set()
        assert time.monotonic() - began < LIMIT

    assert run_in_threads(wait, dribble) == [None] * 2


def test_restarted_process_may_connect_again(cluster):
    """As a restarted pod does."""
    port = free_port()
    peers = [cluster.process(3, i) for i in range(3)]
    greeting = json.dumps(["redeqx peers 3", [1, 3, "host1", ""]]).encode() + b"\n"

    def again():
        with open_connection(port) as first:
            first.sendall(greeting)
            time.sleep(0.2)
        meet(peers[1], port)

    def late():
        time.sleep(0.5)
        meet(peers[2], port)

    assert run_in_threads(partial(meet, peers[0], port), again, late) == [None] * 3


def test_wrong_token_is_reported_only_to_the_process_that_has_it(cluster, monkeypatch):
    port, token = free_port(), {"host0": "a", "host1": "b", "host2": "a"}
    monkeypatch.setattr(os, "environ", Environment(token))
    first, stranger, second = (cluster.process(2, i) for i in (0, 1, 1))
    reported = threading.Event()

    def with_another():
        try:
            meet(stranger, port)
        finally:
            reported.set()

    def afterwards():  # the run connects without the stranger, and then nobody listens any more
        reported.wait(LIMIT)
        meet(second, port)

    found = run_in_threads(partial(meet, first, port), with_another, afterwards)
    assert found[0] is None
    assert found[2] is None
    assert str(found[1]) == (
        "`REDEQX_TOKEN`: expected the value of process 0 in the environment, got another at host1. Set the same in "
        "every process."
    )
    assert type(found[1]) is ValueError


class Environment(dict):
    """The environment of each thread's process."""

    def __init__(self, tokens):
        super().__init__(os.environ)
        self._tokens = tokens

    def get(self, name, default=None):
        return self._tokens[threading.current_thread().name] if name == "REDEQX_TOKEN" else super().get(name, default)


@pytest.mark.parametrize("answer", [b"[", b"x" * 2**17])
def test_joining_process_times_out_whatever_the_answer(cluster, answer, monkeypatch):
    monkeypatch.setattr("redeqx.distributed._links._LATE", 0.2)
    with socket.create_server((LOCAL, 0)) as server:
        server.settimeout(0.05)
        over = threading.Event()

        def serve():
            while not over.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    while not over.is_set():
                        connection.sendall(answer)
                        time.sleep(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            began = time.monotonic()
            with pytest.raises(PeerError, match=r"^`host0_address`: expected process 0 at .* got no answer \(.+\)\. Look"):
                meet(cluster.process(2, 1), server.getsockname()[1], 0.5)
            assert time.monotonic() - began < LIMIT
        finally:
            over.set()
            thread.join(LIMIT)


# --- ends of processes -----------------------------------------------------------------------------------------------


def last_lines(capsys, n):
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == n, lines
    return sorted(lines)


@pytest.mark.parametrize("culprit", [0, 2])
def test_closed_connection_ends_the_other_processes(cluster, capsys, culprit):
    """Each reports its last committed step; the coordinator forwards the failure to the others."""
    peers = cluster.connect(3)
    peers[1].committed = 8
    kill(peers[culprit])
    others = sorted({0, 1, 2} - {culprit})
    assert cluster.wait_for_exits(2) == others
    assert set(cluster.codes.values()) == {75}
    assert last_lines(capsys, 2) == [
        f"redeqx: process {culprit} of 3 is gone: its connection was closed; {safe}. Leaving with exit code 75: run it "
        "again to go on."
        for safe in ("no step was committed yet", "the last committed step is 8")
    ]


@pytest.mark.parametrize("last", [0, 1])
def test_processes_that_leave_a_stuck_run_give_the_same_reason(cluster, capsys, monkeypatch, last):
    """The one that leaves last, as its stacks take longer, does not report that the other one is gone."""
    peers = cluster.connect(2)

    def stacks():
        watch = threading.current_thread()._target.__self__
        if watch._peers.index == last:
            wait_until(lambda: 1 - last in peers[last]._left)
        return f"the stacks of {watch._peers.index}"

    monkeypatch.setattr("redeqx.distributed._watch.stacks", stacks)
    watches = [Watch(each, 0.2) for each in peers]
    with watches[0].on(), watches[1].on():
        watches[1].beat(7)
        watches[0].beat(8)
        assert cluster.wait_for_exits(2) == [0, 1]
    why = "redeqx: no progress for 0.2 s: process 1 of 2 is behind, after step 7"
    assert last_lines(capsys, 6) == [
        *(f"{why}. What each thread of process {i} is at:" for i in (0, 1)),
        *[f"{why}; no step was committed yet. Leaving with exit code 75: run it again to go on."] * 2,
        *(f"the stacks of {i}" for i in (0, 1)),
    ]


def test_silent_process_is_abandoned_after_the_heartbeat_timeout(cluster, capsys):
    port = free_port()
    coordinator = cluster.process(2, 0, heartbeat=1.0)
    coordinator.committed = 3

    def frozen():
        connection = open_connection(port)
        connection.sendall(json.dumps(["redeqx peers 3", [1, 2, "host1", ""]]).encode() + b"\n")
        return connection

    began = time.monotonic()
    with run_in_threads(frozen, partial(meet, coordinator, port))[0]:
        assert cluster.wait_for_exits(1) == [0]
        assert 1.0 <= time.monotonic() - began < 10.0  # not before the timeout and, on busy cores, not much later
    assert last_lines(capsys, 1) == [
        "redeqx: process 1 of 2 is gone: no message from it for 1 s; the last committed step is 3. Leaving with exit "
        "code 75: run it again to go on."
    ]


@pytest.mark.sweep
def test_heartbeats_keep_idle_processes_alive(cluster):
    peers = cluster.connect(2, heartbeat=2.0)
    time.sleep(4.5)
    assert cluster.left.empty()
    assert run_in_threads(*(partial(each.gather, "x", each.index) for each in peers)) == [[0, 1]] * 2


@pytest.mark.parametrize("in_runtime", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_process_reports_after_the_others_left_silently(cluster, capsys, culprit, in_runtime):
    peers = cluster.connect(3)
    began = time.monotonic()
    assert run_in_threads(partial(peers[culprit].fail, in_runtime=in_runtime)) == [True]
    assert time.monotonic() - began < peers[culprit].heartbeat / 2  # all answer at once
    assert cluster.left.qsize() == 2
    left = [cluster.left.get(), cluster.left.get()]
    assert sorted(left) == sorted({0, 1, 2} - {culprit})
    if culprit != 0:
        assert left == [2, 0]  # the coordinator forwards the failure and leaves last
    assert set(cluster.codes.values()) == {1}  # not 75: a rerun would fail again
    assert last_lines(capsys, 0) == []
    kill(peers[culprit])


@pytest.mark.parametrize("culprit", [0, 2])
def test_script_that_ends_early_ends_the_run_with_code_1(cluster, capsys, culprit):
    """A scheduler that requeues on 75 would start it again and again."""
    peers = cluster.connect(3)
    peers[culprit].close()
    peers[1].contribute("x", 1)
    assert cluster.wait_for_exits(3) == [0, 1, 2]  # the culprit too, if it still waits for the others at its exit
    assert set(cluster.codes.values()) == {1}
    reason = f"redeqx: process {culprit} of 3 has come to the end of its script, while others wait for it"
    assert last_lines(capsys, 3) == [f"{reason}; no step was committed yet. Leaving with exit code 1."] * 3


@pytest.mark.parametrize(("failing", "delay"), [([0], 0.0), ([0], 0.5), ([1], 0.0), ([0, 1], 0.5)])
def test_process_that_is_gone_is_the_reason_if_collectives_fail_first(cluster, capsys, monkeypatch, failing, delay):
    """Even if the coordinator hears of the failure before it notices that a process is gone, and takes time to end then."""
    peers = cluster.connect(3, heartbeat=1.0)
    asked, send, send_first = threading.Event(), peers[2]._send, peers[0]._send

    def slow(to, kind, *value):
        time.sleep(delay * (kind == "lost"))
        send_first(to, kind, *value)

    monkeypatch.setattr(peers[0], "_send", slow)

    def silent(to, kind, *value):
        asked.set() if kind == "answer" else send(to, kind, *value)

    monkeypatch.setattr(peers[2], "_send", silent)
    results = []
    # They do not return before the end of their processes; in this test their threads go on.
    threads = [threading.Thread(target=lambda i=i: results.append(peers[i].fail(in_runtime=True))) for i in failing]
    for thread in threads:
        thread.start()
    assert asked.wait(LIMIT)
    assert results == []
    kill(peers[2])
    assert cluster.wait_for_exits(2) == [0, 1]
    assert results == []  # else its script would print the failure of the collective, and exit with 1
    reason = "redeqx: process 2 of 3 is gone: its connection was closed; no step was committed yet."
    assert last_lines(capsys, 2) == [f"{reason} Leaving with exit code 75: run it again to go on."] * 2
    for thread in threads:
        thread.join(LIMIT)


@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_process_waits_for_no_answer_of_one_that_has_ended(cluster, culprit):
    peers = cluster.connect(3)
    peers[2].close()
    wait_until(lambda: 2 in peers[0]._left)
    kill(peers[2])
    began = time.monotonic()
    assert run_in_threads(partial(peers[culprit].fail, in_runtime=True)) == [True]
    assert time.monotonic() - began < peers[culprit].heartbeat / 2
    assert cluster.wait_for_exits(1) == [1 - culprit]
    kill(peers[culprit])


@pytest.mark.parametrize("in_runtime", [False, True])
def test_only_one_of_two_failing_processes_reports(cluster, in_runtime):
    peers = cluster.connect(3)
    results = run_in_threads(*(partial(each.fail, in_runtime=in_runtime) for each in peers[:2]))
    assert sorted(results) == [False, True]
    reporter = results.index(True)
    kill(peers[reporter])
    assert cluster.wait_for_exits(2) == sorted({0, 1, 2} - {reporter})


def test_forked_child_sends_nothing(cluster):
    """Its copies of the connections are closed, and its collective calls raise."""
    coordinator, other = cluster.connect(2)
    links = dict(other._links)
    copy = Peers(2, 1)
    copy._links = {i: type(link)(socket.socket(fileno=os.dup(link._socket.fileno()))) for i, link in links.items()}
    copies = list(copy._links.values())
    copy.forget()
    assert [link._socket.fileno() for link in copies] == [-1]
    copy.broadcast("word")
    copy.close()
    with pytest.raises(PeerError, match=r"^`Deployer`: expected a call from a process of the run, got one from a forked"):
        copy.gather("x", 1)
    assert run_in_threads(partial(coordinator.gather, "x", 0), partial(other.gather, "x", 1)) == [[0, 1]] * 2


def test_orderly_end_prints_nothing(cluster, capsys):
    peers = cluster.connect(3)
    for each in peers:
        each.close()
    wait_until(lambda: peers[0]._left == {0, 1, 2} and peers[1]._left == peers[2]._left == {0})
    for each in peers:
        for link in each._links.values():
            link._socket.shutdown(socket.SHUT_RDWR)
    cluster.end()
    assert last_lines(capsys, 0) == []


@pytest.mark.parametrize(("code", "advice"), [(75, ": run it again to go on."), (1, ".")])
@pytest.mark.parametrize(("committed", "safe"), [(None, "no step was committed yet"), (12, "the last committed step is 12")])
def test_the_end_prints_the_last_committed_step_and_exits(monkeypatch, capsys, committed, safe, code, advice):
    class Exit(Exception):
        pass

    def exit(code):
        raise Exit(code)

    monkeypatch.setattr(os, "_exit", exit)
    peers = Peers()
    peers.committed = committed
    with pytest.raises(Exit, match=rf"^{code}$"):
        peers.end("the disk is gone", code)
    assert capsys.readouterr().err == f"redeqx: the disk is gone; {safe}. Leaving with exit code {code}{advice}\n"
