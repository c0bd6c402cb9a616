"""Processes find each other at the start or say why not; what they tell each other arrives; none waits for one that is gone.

Each process is a thread here, so that what would end it ends the thread.
"""

import contextlib
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

from redeqx.distributed import _peers, _rendezvous
from redeqx.distributed._links import Link, PeerError
from redeqx.distributed._peers import Peers

LIMIT = 30.0  # seconds for anything; most take hundredths
LOCAL = "127.0.0.1"
SCRIPT = "Every process must run the same script with the same arguments."


class Room:
    """The processes of a test, and which of them have left with an exit code of their own."""

    def __init__(self):
        self.all = []
        self.left = queue.Queue()

    def process(self, n, index, heartbeat=30.0):
        self.all.append(Peers(n, index, heartbeat))
        return self.all[-1]

    def started(self, n, heartbeat=30.0):
        """All of a run, met."""
        port = free_port()
        peers = [self.process(n, i, heartbeat) for i in range(n)]
        assert at_once(*(partial(meet, each, port) for each in peers)) == [None] * n
        return peers

    def leave(self):
        """In place of `os._exit`, in a thread that listens: the process's connections close, and no code after this runs."""
        peers = threading.current_thread()._target.__self__
        self.left.put(peers.index)
        kill(peers)
        sys.exit()

    def gone(self, n):
        return sorted(self.left.get(timeout=LIMIT) for _ in range(n))

    def end(self):
        names = ("redeqx-peer-", "redeqx-farewell")
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
def room(monkeypatch):
    room, hook = Room(), threading.excepthook
    monkeypatch.setattr(_peers, "_exit", room.leave)
    monkeypatch.setattr(threading, "excepthook", lambda args: None if args.exc_type is SystemExit else hook(args))
    # Each is on a host of its own, by its name.
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    yield room
    room.end()


def kill(peers):
    """What is left of a process that has ended: closed connections."""
    peers._left.update(range(peers.n))
    for link in peers._links.values():
        with contextlib.suppress(OSError):
            link._socket.shutdown(socket.SHUT_RDWR)


def free_port():
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        return free.getsockname()[1]


def meet(peers, port, timeout=LIMIT, host=LOCAL, bind=LOCAL):
    peers.meet(host, port, bind=bind, timeout=timeout)


def at_once(*acts):
    """What each returns or raises, all in threads of their own."""
    ended = [None] * len(acts)

    def run(i, act):
        try:
            ended[i] = act()
        except Exception as error:
            ended[i] = error

    threads = [threading.Thread(target=run, args=(i, act), name=f"host{i}", daemon=True) for i, act in enumerate(acts)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT + 5
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
        assert not thread.is_alive()
    return ended


def same(errors, kind):
    """The message of an error that all raise."""
    assert {type(error) for error in errors} == {kind}, errors
    (text,) = {str(error) for error in errors}
    return text


def eventually(holds):
    until = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def connected(port):
    """A connection to the coordinator, once it listens."""
    until = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection((LOCAL, port), timeout=LIMIT)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


# --- what all do together --------------------------------------------------------------------------------------------


def test_gathers_are_in_the_order_of_processes(room):
    peers = room.started(4)
    values = [0, None, [1.5, "two"], {"three": (3,)}]
    found = at_once(*(partial(each.gather, "x", value) for each, value in zip(peers, values, strict=True)))
    assert found == [[0, None, [1.5, "two"], {"three": [3]}]] * 4
    assert [each.n_contributed for each in peers] == [1] * 4


def test_each_call_is_another_gathering(room):
    """One process may be ahead: what it gives to the next is kept."""
    peers = room.started(3)
    names = [peers[2].contribute("x", i) for i in range(3)]
    assert names == ["x 1", "x 2", "x 3"]
    assert [peers[2]._results.get(name) for name in names] == [None] * 3
    for each in peers[:2]:
        for i in range(3):
            each.contribute("x", 10 * each.index + i)
    assert [peers[2].wait(name, LIMIT) for name in reversed(names)] == [[2, 12, 2], [1, 11, 1], [0, 10, 0]]
    assert peers[0].wait("x 2", LIMIT) == [1, 11, 1]
    eventually(lambda: peers[1]._results.get("x 3") == [2, 12, 2])


def test_topics_are_gathered_by_several_threads_in_any_order(room):
    peers = room.started(3)
    topics = ["loss", "save", "stop", "row"]

    def gather(each, topic):
        for i in range(15):
            time.sleep(random.random() / 500)
            assert each.gather(topic, [topic, i, each.index], LIMIT) == [[topic, i, index] for index in range(3)]

    acts = [partial(gather, each, topic) for each in peers for topic in topics]
    random.Random(0).shuffle(acts)
    assert at_once(*acts) == [None] * 12


def test_one_process_needs_no_other():
    peers = Peers()
    assert peers.gather("x", (1,)) == [[1]]
    peers.agree("fit", {"a": 1})
    peers.compare("t", "fit", {"a": 1})
    peers.check()
    peers.broadcast("word")
    assert peers.fail()
    peers.close()


def test_one_that_gives_nothing_in_time_is_named_by_the_coordinator(room):
    peers = room.started(3)
    found = at_once(*(partial(each.gather, "x", 0, 0.3) for each in peers[:2]))
    assert [type(error) for error in found] == [PeerError] * 2
    assert str(found[0]) == "`x 1`: expected every process within 0.3 s, got none from [2]."
    assert str(found[1]) == "`x 1`: expected every process within 0.3 s, got none from another process."


def test_a_field_that_differs_is_named_alike_in_all(room):
    peers = room.started(3)
    values = {"seed": 0, "size": (2, 3), "rule": max}  # what JSON has not is compared by its text
    assert at_once(*(partial(each.agree, "Trainer", values) for each in peers)) == [None] * 3
    others = [values, values, {**values, "size": (2, 4)}]
    found = at_once(*(partial(each.agree, "Trainer", other) for each, other in zip(peers, others, strict=True)))
    assert same(found, ValueError) == (
        f"`Trainer`: expected `size` to be [2, 3], as in process 0, got [2, 4] in process 2. {SCRIPT}"
    )


def test_a_field_that_one_lacks_is_named(room):
    peers = room.started(2)
    found = at_once(partial(peers[0].agree, "fit", {"a": "x"}, "Pass one."), partial(peers[1].agree, "fit", {"b": 1}))
    assert {str(error).split(". ")[0] for error in found} == {
        "`fit`: expected `a` to be x, as in process 0, got null in process 1"
    }
    assert str(found[0]).endswith(". Pass one.")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_comparison_that_fails_is_raised_in_all_without_waiting(room, odd):
    peers = room.started(3)
    for i in range(5):
        for each in peers:
            each.compare(f"step {i}", "rows", {"x": (1, i)})
    assert at_once(*(partial(each.gather, "here") for each in peers)) == [[None] * 3] * 3  # after what was said before
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

    # Which one is odd depends on who was heard first.
    assert re.fullmatch(
        r"`rows`: expected `x` to be \[[19], 5\], as in process \d, got \[[19], 5\] in process \d\. Pad\.",
        same(at_once(*(partial(checked, each) for each in peers)), ValueError),
    )


@pytest.mark.parametrize("speaker", [0, 1])
def test_what_one_says_reaches_every_other(room, speaker):
    peers = room.started(3)
    heard = queue.Queue()
    for each in peers:
        each.on("word", lambda index, value, each=each: heard.put((each.index, index, value)))
    peers[speaker].broadcast("another word", 1)  # nobody listens to that
    peers[speaker].broadcast("word", [1, "a"])
    others = sorted({0, 1, 2} - {speaker})
    assert sorted(heard.get(timeout=LIMIT) for _ in others) == [(i, speaker, [1, "a"]) for i in others]
    assert at_once(*(partial(each.gather, "after") for each in peers)) == [[None] * 3] * 3
    assert heard.empty()


# --- the start -------------------------------------------------------------------------------------------------------


def test_the_others_may_come_before_the_coordinator(room):
    port = free_port()
    peers = [room.process(3, i) for i in range(3)]

    def late():
        time.sleep(0.6)
        meet(peers[0], port)

    assert at_once(late, *(partial(meet, each, port) for each in peers[1:])) == [None] * 3


def test_who_does_not_come_is_listed(room):
    port = free_port()
    found = at_once(*(partial(meet, room.process(4, i), port, 1.5) for i in (0, 2)))
    assert same(found, PeerError) == (
        f"`n_processes`: expected 4 processes at 127.0.0.1:{port} within 1.5 s, got none of number 1, 3; here besides 0: "
        "2 (host1). Look at what those print, and whether they reach this port."
    )


def test_where_none_comes_the_coordinator_says_so(room):
    with pytest.raises(PeerError, match=r"within 0\.2 s, got none of number 1, 2; here besides 0: none\. Look"):
        meet(room.process(3, 0), free_port(), 0.2)


def test_where_no_hub_is_each_says_so_in_time(room):
    port = free_port()
    with pytest.raises(PeerError) as caught:
        meet(room.process(2, 1), port, 0.5)
    assert str(caught.value) == (
        f"`host0_address`: expected process 0 at 127.0.0.1:{port} within 0.5 s, got no answer ([Errno 111] Connection "
        "refused). Look at what it prints, and whether this host reaches that port."
    )


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"7\n"])
def test_what_is_no_hub_is_not_taken_for_one(room, answer):
    """Not even what echoes (None), as a connection does that has reached itself."""
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
                    said = connection.recv(2**16)
                    connection.sendall(said if answer is None else answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(PeerError, match=r"^`host0_address`: expected process 0 at .* got no answer \(.+\)\. Look"):
                meet(room.process(2, 1), server.getsockname()[1], 0.5)
        finally:
            over.set()
            thread.join(LIMIT)


def test_who_is_at_the_door_when_something_is_wrong_hears_it_too(room):
    """Of six: the coordinator finds the second with number 1, and the others have come or are about to."""
    port = free_port()
    found = at_once(*(partial(meet, room.process(6, i), port) for i in (0, 1, 1, 2, 3, 4)))
    assert same(found, ValueError).startswith("`process_id`: expected each number once, got 1 at host")


def test_a_number_that_is_given_twice_is_said_with_both_hosts(room):
    port = free_port()
    found = at_once(*(partial(meet, room.process(3, i), port) for i in (0, 1, 1)))
    assert re.fullmatch(
        r"`process_id`: expected each number once, got 1 at (host1 and at host2|host2 and at host1)\. "
        r"Number the processes from 0\.",
        same(found, ValueError),
    )


def test_another_number_of_processes_is_refused(room):
    port = free_port()
    found = at_once(partial(meet, room.process(2, 0), port), partial(meet, room.process(3, 1), port))
    assert same(found, ValueError) == ("`n_processes`: expected 2, as in process 0, got 3 at host1. Pass one number.")


@pytest.mark.parametrize("index", [2, -1])
def test_a_number_out_of_range_is_refused(room, index):
    port = free_port()
    found = at_once(*(partial(meet, room.process(2, i), port) for i in (0, index)))
    assert same(found, ValueError) == (
        f"`process_id`: expected 1 to 1 beside process 0, got {index} at host1. Number them from 0."
    )


def test_a_port_that_is_taken_is_said(room):
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError) as caught:
            meet(room.process(2, 0), port)
    assert str(caught.value) == (
        f"`host0_port`: expected a free port, got {port}, which another program holds. Pass another everywhere."
    )


def test_an_address_of_another_host_is_said(room):
    with pytest.raises(ValueError) as caught:
        meet(room.process(2, 0), free_port(), host="192.0.2.1", bind="192.0.2.1")
    assert str(caught.value) == (
        "`host0_address`: expected an address of process 0's own host, got '192.0.2.1' (Cannot assign requested address). "
        "Pass the one under which the others reach it."
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_is_not_known_is_said(room, index):
    with pytest.raises(ValueError) as caught:
        meet(room.process(2, index), free_port(), host="nowhere.invalid", bind="nowhere.invalid")
    assert re.fullmatch(
        r"`host0_address`: expected a host that this one can find, got 'nowhere\.invalid' \(.+\)\. Pass its address\.",
        str(caught.value),
    )


def test_strangers_do_not_disturb_the_start(room):
    port = free_port()
    coordinator, other = room.process(2, 0), room.process(2, 1)
    greeting = json.dumps(["redeqx peers 2", None]).encode()
    said = [
        b"",
        b"\x16\x03\x01\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"7\n",
        b"null\n",
        b"[1, 2, 3]\n",
        greeting + b"\n",
        b'["',
        b"[1]\n",
        b'["redeqx peers 2", 5]\n',
        b'["redeqx peers 2", [true, 2, "host1", ""]]\n',
        b'["redeqx peers 2", [1, 2, "host1", "not the token"]]\n',
        b"[" * 4000 + b"\n",
        b"x" * 10000,
    ]

    def come():
        for words in said:
            with connected(port) as stranger:
                stranger.sendall(words)
        with connected(port):  # open and silent
            meet(other, port)

    assert at_once(partial(meet, coordinator, port), come) == [None, None]
    assert at_once(partial(coordinator.gather, "x", 0), partial(other.gather, "x", 1)) == [[0, 1]] * 2


def test_one_that_dribbles_or_floods_holds_nobody_up(room):
    """Though there are more of them than the coordinator listens to."""
    port = free_port()
    coordinator, other = room.process(2, 0), room.process(2, 1)
    over = threading.Event()

    def dribble():
        with connected(port) as stranger, contextlib.suppress(OSError):
            while not over.is_set():
                stranger.sendall(b"[")
                time.sleep(0.05)

    def flood():
        with connected(port) as stranger, contextlib.suppress(OSError):
            while not over.is_set():
                stranger.sendall(b"x" * 2**16)

    def come():
        with contextlib.ExitStack() as silent:
            for _ in range(80):
                silent.enter_context(connected(port))
            time.sleep(0.2)
            began = time.monotonic()
            meet(other, port)
            over.set()
            assert time.monotonic() - began < 4  # seconds; each stranger alone has five

    assert at_once(partial(meet, coordinator, port), come, dribble, dribble, flood) == [None] * 5


def test_where_only_strangers_come_the_coordinator_gives_up_in_time(room):
    port = free_port()
    coordinator, over = room.process(2, 0), threading.Event()

    def dribble():
        with connected(port) as stranger, contextlib.suppress(OSError):
            while not over.is_set():
                stranger.sendall(b"[")
                time.sleep(0.02)

    def wait():
        began = time.monotonic()
        with pytest.raises(PeerError, match=r"within 0\.5 s, got none of number 1; here besides 0: none\. Look"):
            meet(coordinator, port, 0.5)
        over.set()
        assert time.monotonic() - began < 4

    assert at_once(wait, dribble) == [None] * 2


def test_a_process_that_has_ended_may_come_again(room):
    """As a pod that is started again does."""
    port = free_port()
    peers = [room.process(3, i) for i in range(3)]
    greeting = json.dumps(["redeqx peers 2", [1, 3, "host1", ""]]).encode() + b"\n"

    def again():
        with connected(port) as first:
            first.sendall(greeting)
            time.sleep(0.2)
        meet(peers[1], port)

    def late():
        time.sleep(0.5)
        meet(peers[2], port)

    assert at_once(partial(meet, peers[0], port), again, late) == [None] * 3


def test_who_knows_another_token_is_told_so_and_none_of_the_run(room, monkeypatch):
    port, token = free_port(), {"host0": "a", "host1": "b", "host2": "a"}
    monkeypatch.setattr(os, "environ", Environment(token))
    first, stranger, second = (room.process(2, i) for i in (0, 1, 1))
    told = threading.Event()

    def with_another():
        try:
            meet(stranger, port)
        finally:
            told.set()

    def afterwards():  # all that have come in time meet, and nobody listens any more
        told.wait(LIMIT)
        meet(second, port)

    found = at_once(partial(meet, first, port), with_another, afterwards)
    assert found[0] is None
    assert found[2] is None
    assert str(found[1]) == (
        "`REDEQX_TOKEN`: expected the value of process 0 in the environment, got another at host1. Set the same everywhere, "
        "or none."
    )
    assert type(found[1]) is ValueError


class Environment(dict):
    """That of each thread's process."""

    def __init__(self, tokens):
        super().__init__(os.environ)
        self._tokens = tokens

    def get(self, name, default=None):
        return self._tokens[threading.current_thread().name] if name == "REDEQX_TOKEN" else super().get(name, default)


@pytest.mark.parametrize("answer", [b"[", b"x" * 2**17])
def test_who_joins_gives_up_in_time_whatever_answers(room, answer, monkeypatch):
    monkeypatch.setattr(_rendezvous, "_LATE", 0.2)
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
                meet(room.process(2, 1), server.getsockname()[1], 0.5)
            assert time.monotonic() - began < 4
        finally:
            over.set()
            thread.join(LIMIT)


# --- ends ------------------------------------------------------------------------------------------------------------


def last_lines(capsys, n):
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == n, lines
    return sorted(lines)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_connection_that_closes_ends_the_others(room, capsys, culprit):
    """Each says what is safe on its disk; another than the coordinator learns of it from the coordinator."""
    peers = room.started(3)
    peers[1].committed = 8
    kill(peers[culprit])
    others = sorted({0, 1, 2} - {culprit})
    assert room.gone(2) == others
    assert last_lines(capsys, 2) == [
        f"redeqx: process {culprit} of 3 is gone: its connection was closed; {safe}. Leaving with exit code 75: run it "
        "again to go on."
        for safe in ("no step was committed yet", "the last committed step is 8")
    ]


def test_one_that_is_silent_for_a_heartbeat_is_left(room, capsys):
    port = free_port()
    coordinator = room.process(2, 0, heartbeat=1.0)
    coordinator.committed = 3

    def frozen():
        connection = connected(port)
        connection.sendall(json.dumps(["redeqx peers 2", [1, 2, "host1", ""]]).encode() + b"\n")
        return connection

    with at_once(frozen, partial(meet, coordinator, port))[0]:
        began = time.monotonic()
        assert room.gone(1) == [0]
        assert 0.9 < time.monotonic() - began < 4.0  # neither before nor much later, on busy cores
    assert last_lines(capsys, 1) == [
        "redeqx: process 1 of 2 is gone: no message from it for 1 s; the last committed step is 3. Leaving with exit "
        "code 75: run it again to go on."
    ]


def test_heartbeats_keep_those_that_have_nothing_to_say(room):
    peers = room.started(2, heartbeat=1.0)
    time.sleep(2.5)
    assert room.left.empty()
    assert at_once(*(partial(each.gather, "x", each.index) for each in peers)) == [[0, 1]] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_that_fails_speaks_when_the_others_have_left_without_a_word(room, capsys, culprit):
    peers = room.started(3)
    assert at_once(peers[culprit].fail) == [True]
    assert room.left.qsize() == 2
    left = [room.left.get(), room.left.get()]
    assert sorted(left) == sorted({0, 1, 2} - {culprit})
    if culprit != 0:
        assert left == [2, 0]  # the coordinator, from which all learn of it, is the last of them
    assert last_lines(capsys, 0) == []
    kill(peers[culprit])


def test_of_two_that_fail_at_once_one_speaks(room):
    peers = room.started(3)
    said = at_once(*(each.fail for each in peers[:2]))
    assert sorted(said) == [False, True]
    speaker = said.index(True)
    kill(peers[speaker])
    assert room.gone(2) == sorted({0, 1, 2} - {speaker})


def test_a_forked_child_sends_nothing(room):
    """Its copies of the connections are closed, and what it asks of the others is refused."""
    coordinator, other = room.started(2)
    links = dict(other._links)
    copy = Peers(2, 1)
    copy._links = {i: Link(socket.socket(fileno=os.dup(link.fileno()))) for i, link in links.items()}
    copies = list(copy._links.values())
    copy.forget()
    assert [link.fileno() for link in copies] == [-1]
    copy.broadcast("word")
    copy.close()
    with pytest.raises(PeerError, match=r"^`Deployer`: expected a call from a process of the run, got one from a forked"):
        copy.gather("x", 1)
    assert at_once(partial(coordinator.gather, "x", 0), partial(other.gather, "x", 1)) == [[0, 1]] * 2


def test_an_agreed_end_disturbs_nobody(room, capsys):
    peers = room.started(3)
    for each in peers:
        each.close()
    eventually(lambda: peers[0]._left == {0, 1, 2} and peers[1]._left == peers[2]._left == {0})
    for each in peers:
        for link in each._links.values():
            link._socket.shutdown(socket.SHUT_RDWR)
    room.end()
    assert last_lines(capsys, 0) == []


@pytest.mark.parametrize(("committed", "safe"), [(None, "no step was committed yet"), (12, "the last committed step is 12")])
def test_who_leaves_says_what_is_safe_and_exits_at_once(monkeypatch, capsys, committed, safe):
    class Exit(Exception):
        pass

    def exit(code):
        raise Exit(code)

    monkeypatch.setattr(os, "_exit", exit)
    with pytest.raises(Exit, match="75"):
        _peers.leave("the disk is gone", committed)
    assert capsys.readouterr().err == (
        f"redeqx: the disk is gone; {safe}. Leaving with exit code 75: run it again to go on.\n"
    )
